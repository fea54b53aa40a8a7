"""``cross_entropy_orthogonality``: token cross entropy + λ · orthogonality of the Values + other losses of the model.

``base`` has the options and the logs. ``loss`` and ``nll_loss`` are in bits per token. ``accuracy`` is the percentage
of sentences whose every teacher-forced argmax is right, the end symbol included. It equals the exact match of greedy
decoding: as long as all earlier argmaxes were right, greedy decoding feeds itself the prefix of the target. Padding is
no output in either. (fairseq's generator also forbids an empty output, except with ``--min-len 0``.)
``token_accuracy`` is the percentage of tokens whose argmax is right, the end symbol included and padding excluded.
With the task's ``--oracle-length`` no number includes the end symbol (``oracle_length``).
"""

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from torch import Tensor

from fairseq_sg.criterions.base import Score, SGCriterion, SGCriterionConfig
from fairseq_sg.criterions.oracle_length import scored


@register_criterion("cross_entropy_orthogonality", dataclass=SGCriterionConfig)
class CrossEntropyOrthogonality(SGCriterion):
    """See the module's docstring."""

    def score(self, logits: Tensor, sample: dict[str, Any]) -> Score:
        """logits (B, N, V), ``target`` (B, N)."""
        logits, target, predictions = scored(self.task, logits, sample)
        loss, nll = self._cross_entropy(logits, target)
        right, padding = best(logits, self.padding_idx).eq(target), target.eq(self.padding_idx)
        # The last batch of a text has rows without a token.
        exact = (right | padding).all(-1) & sample["target"].ne(self.padding_idx).any(-1)
        tokens_right = (right & ~padding).sum()
        return Score(loss, nll, exact, predictions, tokens_right)

    def _cross_entropy(self, logits: Tensor, target: Tensor):
        """Smoothed and plain cross entropy, both summed over the tokens that are not padding, in nats."""
        if self.label_smoothing > 0:
            log_probabilities = F.log_softmax(logits, dim=-1, dtype=torch.float32).flatten(0, 1)
            return label_smoothed_nll_loss(
                log_probabilities, target.flatten(), self.label_smoothing, ignore_index=self.padding_idx
            )
        nll = F.cross_entropy(
            logits.flatten(0, 1).float(), target.flatten(), ignore_index=self.padding_idx, reduction="sum"
        )
        return nll, nll


def best(logits: Tensor, padding: int) -> Tensor:
    """The symbol of the highest logit, the first of several; ``padding`` is none. logits (…, V) -> (…) int64.

    The highest before and the highest after padding are compared: logits are neither copied nor waited for.
    """
    before, after = logits.detach()[..., :padding], logits.detach()[..., padding + 1 :]
    if not before.size(-1) or not after.size(-1):
        return before.argmax(-1) if before.size(-1) else after.argmax(-1) + 1
    (first, index), (second, other) = before.max(-1), after.max(-1)
    # A NaN is the highest, as in torch's argmax.
    return torch.where((first >= second) | first.isnan(), index, other + padding + 1)
