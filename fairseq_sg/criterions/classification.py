"""``classification``: cross entropy of one class a sentence, or a question, + the losses of ``base``.

For ``--task sg_classification`` and ``sg_visual_qa``.

``loss`` and ``nll_loss`` are in bits per sentence, ``accuracy`` is the percentage of sentences whose class has the
largest logit. Label smoothing is that of torch and of Szegedy et al. 2016: (1 − ε) on the class and ε/K on each of the
K classes.
"""

from typing import Any

import torch.nn.functional as F
from fairseq.criterions import register_criterion
from torch import Tensor

from fairseq_sg.criterions.base import Score, SGCriterion, SGCriterionConfig
from fairseq_sg.errors import UsageError


@register_criterion("classification", dataclass=SGCriterionConfig)
class Classification(SGCriterion):
    """See the module's docstring. Raises UsageError for a task without classes."""

    predicted = "sentence"
    percentages = "accuracy, % of sentences"

    def __init__(self, cfg: SGCriterionConfig, task):
        super().__init__(cfg, task)
        if not hasattr(task, "classes"):
            raise UsageError(
                "--criterion classification needs classes: choose --task sg_classification or sg_visual_qa"
            )

    def score(self, logits: Tensor, sample: dict[str, Any]) -> Score:
        """logits (B, K)."""
        classes = self.task.classes(sample["target"])
        logits = logits.float()
        nll = F.cross_entropy(logits, classes, reduction="sum")
        loss = nll
        if self.label_smoothing > 0:
            loss = F.cross_entropy(logits, classes, reduction="sum", label_smoothing=self.label_smoothing)
        return Score(loss, nll, is_right(logits.detach(), classes), classes.size(0))


def is_right(logits: Tensor, classes: Tensor) -> Tensor:
    """Whether the class has the highest logit, (B,) bool. Logits (B, K) that are NaN, whose first is it, never are."""
    return logits.argmax(-1).eq(classes) & ~logits.isnan().any(-1)
