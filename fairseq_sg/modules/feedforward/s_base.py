"""S-BASE (Clark et al. 2022, after Lewis et al. 2021; Csordás 2023, section 7.3): a balanced assignment in training.

    training     log R = z + a + b, the K experts of the largest R
    otherwise    the K experts of the largest z
    s = σ(z) of the chosen, z = W₃ x                                                               (7.17)

R is what Sinkhorn's iteration makes of exp z: b_t scales a token's row to sum 1, a_e an expert's column to sum T/N_E,

    b_t = −LSE_e(z_te + a_e),   a_e = log(T/N_E) − LSE_t(z_te + b_t),

over the T real tokens of this worker's batch. ``--s-base-sinkhorn released`` is the iteration of the thesis's code,
which the published numbers come from. It differs in two points. It balances the T tokens of each sequence separately.
In the iteration, but not in R, it subtracts a and b where they are added here, so that R is not balanced.

The load balancing loss is that of σ-MoE, as in the thesis.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairseq_sg import ranges
from fairseq_sg.modules.feedforward.base import register_feedforward
from fairseq_sg.modules.feedforward.moe import MixtureOfExperts, MoEOptions, Selection, entropy_loss

SIGNS = {"textbook": 1.0, "released": -1.0}


@dataclass
class SBaseOptions(MoEOptions):
    s_base_iterations: int = field(
        default=3, metadata={"help": "Sinkhorn iterations of s_base in training", "least": 1}
    )
    s_base_sinkhorn: str = field(
        default="textbook",
        metadata={
            "help": "Sinkhorn iteration of s_base: 'textbook', which balances the experts, or 'released', with the "
            "signs of the thesis's code, for each sequence by itself",
            "choices": tuple(SIGNS),
        },
    )


@register_feedforward("s_base")
class SBase(MixtureOfExperts):
    """See the module's docstring, and `MixtureOfExperts`."""

    paper = "Clark et al. 2022; Csordás 2023, 7.3"
    options = SBaseOptions
    loss_name = "expert_entropy"
    default_k = 1

    def __init__(
        self, dim: int, ffn_dim: int, *, s_base_iterations: int = 3, s_base_sinkhorn: str = "textbook", **kwargs
    ):
        super().__init__(dim, ffn_dim, **kwargs)
        ranges.check(SBaseOptions, {"s_base_iterations": s_base_iterations, "s_base_sinkhorn": s_base_sinkhorn})
        self.iterations = s_base_iterations
        self.sign = SIGNS[s_base_sinkhorn]
        self.by_sequence = s_base_sinkhorn == "released"

    def select(self, logits, real, sequences: int = 1):
        scores = logits
        if self.training:
            # (N · sequences, N_E), time first -> (sequences, N, N_E)
            grouped = logits.unflatten(0, (-1, sequences)).transpose(0, 1)
            of_each = None if real is None else real.unflatten(0, (-1, sequences)).transpose(0, 1)
            scores = sinkhorn(grouped, of_each, self.iterations, self.sign).transpose(0, 1).flatten(0, 1)
        kept = self.kept(logits)
        if kept is not None:
            scores = scores.masked_fill(~kept, -torch.inf)
        experts = scores.topk(self.k).indices
        weights = logits.gather(1, experts).sigmoid()
        return Selection(experts, weights if kept is None else weights * kept.gather(1, experts))

    def balance(self, logits, chosen, routing, real):
        return entropy_loss(logits, real)


@torch.no_grad()
def sinkhorn(logits: Tensor, real: Tensor | None, iterations: int, sign: float = 1.0) -> Tensor:
    """z (…, T, N_E), real (…, T) bool or None -> log R (…, T, N_E), each matrix balanced by itself.

    Rows of padding have no meaning and no effect on others; a matrix of padding alone has no meaning.
    """
    experts = logits.shape[-1]
    seen, tokens = logits, logits.new_full((), logits.shape[-2])
    if real is not None:
        seen = logits.masked_fill(~real.unsqueeze(-1), -torch.inf)
        tokens = real.sum(-1).clamp_min(1).to(logits.dtype)[..., None, None]
    column = (tokens / experts).log()
    a = logits.new_zeros(experts)
    for _ in range(iterations):
        b = -torch.logsumexp(logits + sign * a, dim=-1, keepdim=True)  # (…, T, 1)
        a = column - torch.logsumexp(seen + sign * b, dim=-2, keepdim=True)  # (…, 1, N_E)
        # Padding alone has no column sums: +inf, which would make NaN of the next row sums.
        a = a.masked_fill(a.isinf(), 0.0)
    return logits + a + b
