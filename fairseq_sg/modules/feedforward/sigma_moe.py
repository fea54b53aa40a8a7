"""σ-MoE (Csordás 2023, section 7.4; Csordás et al. 2023, "Approximating Two-Layer Feedforward Networks").

    s = σ(W₃ x) ⊙ m in training, σ(W₃ x) otherwise,  m ~ Bernoulli(1 − δ)      (7.21)
    E = the K experts of the largest s,  s[e] their weights                    (7.11)
    L = γ Σ_e p[e] log p[e],  p = mean of softmax(W₃ x) over the batch         (7.19, 7.20)

Its ablations in table 7.4 are options: ``--moe-selection softmax_before_topk`` (s = softmax(W₃ x), as they come) and
``softmax_after_topk`` (softmax of the chosen K alone, "renorm."), ``--moe-init standard``, ``--moe-regularization 0``,
``--moe-expert-dropout 0``, ``--moe-dropout``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fairseq_sg import ranges
from fairseq_sg.modules.feedforward.base import register_feedforward
from fairseq_sg.modules.feedforward.moe import (
    MixtureOfExperts,
    MoEOptions,
    Selection,
    entropy_loss,
    softmax_of_top_k,
    top_k,
)


def sigmoid(logits: Tensor, k: int, kept: Tensor | None) -> Selection:
    """Weights σ(z): no expert competes with another."""
    return top_k(logits.sigmoid(), k, kept)


def softmax_before_topk(logits: Tensor, k: int, kept: Tensor | None) -> Selection:
    """Weights softmax(z), not normalized again."""
    return top_k(logits.softmax(-1), k, kept)


SELECTIONS = {
    "sigmoid": sigmoid,
    "softmax_before_topk": softmax_before_topk,
    "softmax_after_topk": softmax_of_top_k,
}


@dataclass
class SigmaMoEOptions(MoEOptions):
    moe_selection: str = field(
        default="sigmoid",
        metadata={
            "help": "weights of sigma_moe's experts: 'sigmoid', 'softmax_before_topk' (over all experts) or "
            "'softmax_after_topk' (over the selected ones)",
            "choices": tuple(SELECTIONS),
        },
    )


@register_feedforward("sigma_moe")
class SigmaMoE(MixtureOfExperts):
    """See the module's docstring, and `MixtureOfExperts`."""

    paper = "Csordás 2023, 7.4"
    options = SigmaMoEOptions
    loss_name = "expert_entropy"
    default_expert_dropout = 0.05

    def __init__(self, dim: int, ffn_dim: int, *, moe_selection: str = "sigmoid", **kwargs):
        super().__init__(dim, ffn_dim, **kwargs)
        ranges.check(SigmaMoEOptions, {"moe_selection": moe_selection})
        self.selection = SELECTIONS[moe_selection]

    def select(self, logits, real):
        return self.selection(logits, self.k, self.kept(logits))

    def balance(self, logits, chosen, routing, real):
        return entropy_loss(logits, real)
