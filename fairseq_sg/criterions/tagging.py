"""``tagging``: cross entropy of one label a word + the losses of ``base``, for ``--task sg_tagging``.

    L = Σ_{words with a label} −log p(label)        with --output words
    L = Σ_{words with a label} Σ_bits −log p(bit)   with --output bits

``loss`` and ``nll_loss`` are in bits per labelled word. ``accuracy`` is the percentage of sentences whose labels are
all right, ``token_accuracy`` that of labels, and ``word_error`` that of wrong labels. A label of bits is right if all
its bits are. Sentences with types have ``accuracy`` and ``word_error`` by type (``--accuracy-by``), and the mean of the
latter over types as ``mean_word_error``. Words without a label count nowhere. With ``--score-blanks`` they are labelled
as blank and count in the loss, not in the accuracies, as in the code released with Csordás & Schmidhuber 2019. That
code divides the loss by the number of sentences (``--sentence-avg``).
"""

from dataclasses import dataclass, field
from typing import Any

from fairseq.criterions import register_criterion
from fairseq.logging import metrics
from torch import Tensor

from fairseq_sg.criterions.base import Score, SGCriterion, SGCriterionConfig
from fairseq_sg.errors import UsageError


@dataclass
class TaggingConfig(SGCriterionConfig):
    score_blanks: bool = field(
        default=False, metadata={"help": "the loss is also on words without a label, whose label is then a blank"}
    )


@register_criterion("tagging", dataclass=TaggingConfig)
class Tagging(SGCriterion):
    """See the module's docstring. Raises UsageError for a task without labels of words, and for a wrong option."""

    predicted = "label"
    percentages = "accuracy, % of sentences; token_accuracy, % of labels"

    def __init__(self, cfg: TaggingConfig, task):
        super().__init__(cfg, task)
        if not getattr(task, "labels_words", False):
            raise UsageError("--criterion tagging needs a label for every word: choose --task sg_tagging")
        if self.label_smoothing and task.target_bits is not None:
            raise UsageError("--label-smoothing is for labels that are words: leave it out, or choose --output words")
        self.score_blanks = cfg.score_blanks

    def score(self, logits: Tensor, sample: dict[str, Any]) -> Score:
        """logits (B, N, K), ``target`` (B, N)."""
        target = sample["target"]
        asked = self.task.asked(target)
        counted = target.ne(self.padding_idx) if self.score_blanks else asked
        # What does not count has a logit too, which need not be finite.
        nll = self.task.nll(logits, target).masked_fill(~counted, 0.0).sum()
        loss = nll
        if self.label_smoothing > 0:
            loss = self.task.nll(logits, target, self.label_smoothing).masked_fill(~counted, 0.0).sum()
        labels, right = asked.sum(-1), self.task.right(logits.detach(), target).sum(-1)  # (B,)
        return Score(loss, nll, right.eq(labels), labels.sum(), right.sum(), (labels, right))

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> dict[str, float]:
        """See the base class; also logs ``word_error``."""
        sums = super().reduce_metrics(logging_outputs)
        if labels := sums["ntokens"]:
            metrics.log_scalar("word_error", 100.0 * (1 - sums["n_tokens_right"] / labels), labels, round=4)
        return sums
