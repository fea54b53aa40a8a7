"""``--scoring exact_match``: the share of outputs that equal their reference in every token, in percent.

With ``--beam 1 --min-len 0`` and a sufficient ``--max-len-b``, it equals the ``accuracy`` that training and
``fairseq-validate`` report from one teacher-forced pass.
"""

from fairseq.dataclass import FairseqDataclass
from fairseq.scoring import BaseScorer, register_scorer


@register_scorer("exact_match", dataclass=FairseqDataclass)
class ExactMatchScorer(BaseScorer):
    """Counts pairs of detokenized strings that are equal up to white space between tokens."""

    def score(self) -> float:
        """The percentage of exact matches; 0 without outputs."""
        if not self.ref:
            return 0.0
        return 100.0 * self._matches() / len(self.ref)

    def result_string(self) -> str:
        return f"exact_match = {self.score():.4f} ({self._matches()} of {len(self.ref)})"

    def _matches(self) -> int:
        return sum(reference.split() == hypothesis.split() for reference, hypothesis in zip(self.ref, self.pred))
