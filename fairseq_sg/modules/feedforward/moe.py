"""The base of all mixtures of experts (Csordás 2023, section 7.2.3).

    z = W₃ x                                          selection logits, computed in float32
    E = K experts, s their weights                    by the kind: see ``select`` of each
    y = Σ_{e ∈ E} W₂ᵉ · Drop(s[e] ReLU(W₁ᵉ x))                                      (7.11)

N_E experts of size G replace d_ff = N_E · G hidden units. There are no biases, and no limit to the tokens of an expert.
The K experts of all tokens share one sort (`fairseq_sg.ops.cvmm_sorted`).

Tokens of padding are neither routed nor counted, and their output is 0.

In training a layer returns its load balancing loss, multiplied by its weight γ, and statistics of this worker's batch:

    experts_effective      effective number of experts: exp of the entropy of their shares of the selections
    experts_dead           share of the experts that no token selects
    experts_largest        share of the selections of the most selected expert
    experts_token_entropy  mean entropy of a token's softmax(z) in nats, from 0 to log N_E

Initialization (``--moe-init``), all normal; L is the number of layers whose outputs add up in the residual stream
(``summed_layers``):

    dense_equivalent   W₁ᵉ √(2/(d_model L)), W₂ᵉ √(2/(N_E G L)): as one dense layer of width d_ff    (section 7.4)
    standard           W₂ᵉ √(2/(G L)): each expert as a layer of its own
    switch             the standard one times √0.1, for W₃ too, after Fedus et al. (2022)

W₃ has the standard deviation of W₁ᵉ and, except with ``switch``, rows of equal norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.cpu.dropout import Dropout
from fairseq_sg.modules.feedforward.base import FeedForward
from fairseq_sg.modules.feedforward.workers import sum_over_workers
from fairseq_sg.modules.losses import Statistic
from fairseq_sg.ops import cvmm_sorted, sort_selection
from fairseq_sg.ops.cvmm import SortedSelection
from fairseq_sg.ops.precision import accumulation_dtype, autocast_disabled

EXPERTS = 16


@dataclass
class MoEOptions:
    """Options of every mixture of experts; None is the kind's own default."""

    moe_experts: int | None = field(
        default=None,
        metadata={
            "help": "number of experts N_E; N_E times their size is the hidden width (--encoder-ffn-embed-dim), so "
            f"give this or --moe-expert-dim (default: {EXPERTS})",
            "least": 1,
        },
    )
    moe_expert_dim: int | None = field(
        default=None,
        metadata={
            "help": "hidden units G of an expert (default: the hidden width divided by --moe-experts)",
            "least": 1,
        },
    )
    moe_k: int | None = field(
        default=None,
        metadata={
            "help": "experts of a token, K (default: 4 for sigma_moe and noisy_topk, 1 for switch and s_base)",
            "least": 1,
        },
    )
    moe_init: str | None = field(
        default=None,
        metadata={
            "help": "start of a mixture of experts: 'dense_equivalent' (as a dense layer of the whole hidden width), "
            "'standard' (each expert by itself) or 'switch' (standard, variance times 0.1) (default: switch for "
            "switch, else dense_equivalent)",
            "choices": ("dense_equivalent", "standard", "switch"),
        },
    )
    moe_regularization: float | None = field(
        default=None,
        metadata={
            "help": "weight γ of the experts' load balancing loss in training, which each layer returns multiplied by "
            "it; 0 leaves it out (default: 0.001 for sigma_moe and s_base, 0.01 for switch, 0.1 for noisy_topk)",
            "least": 0,
        },
    )
    moe_expert_dropout: float | None = field(
        default=None,
        metadata={
            "help": "probability δ with which a token cannot select an expert in training (default: 0.05 for "
            "sigma_moe, else 0)",
            "least": 0,
            "below": 1,
        },
    )
    moe_dropout: float = field(
        default=0.0,
        metadata={"help": "standard dropout on the hidden units of the selected experts", "least": 0, "below": 1},
    )


class Selection(NamedTuple):
    """The experts of each token, (T, K) int64, and their weights, (T, K)."""

    experts: Tensor
    weights: Tensor


class MixtureOfExperts(FeedForward):
    """Base class; a kind defines the selection of experts and the load balancing loss.

    Args:
        dim, ffn_dim: d_model, and d_ff = N_E · G.
        layers: L of the initialization.
        moe_…: see `MoEOptions`.

    Raises:
        UsageError: an option outside its range, or N_E · G that is not d_ff.
    """

    options = MoEOptions
    needs_layers = True
    #: Name under which the load balancing loss is returned.
    loss_name: ClassVar[str]
    default_k: ClassVar[int] = 4
    default_init: ClassVar[str] = "dense_equivalent"
    default_regularization: ClassVar[float] = 0.001
    default_expert_dropout: ClassVar[float] = 0.0
    #: Whether experts are selected for each sequence separately in training. Then tokens come as (N, B, d_model), and
    #: ``select`` gets the number of sequences. Models do not pack the tokens of such layers.
    by_sequence = False

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        *,
        layers: int = 1,
        moe_experts: int | None = None,
        moe_expert_dim: int | None = None,
        moe_k: int | None = None,
        moe_init: str | None = None,
        moe_regularization: float | None = None,
        moe_expert_dropout: float | None = None,
        moe_dropout: float = 0.0,
    ):
        super().__init__(dim, ffn_dim)
        self.experts, self.expert_dim = sizes(ffn_dim, moe_experts, moe_expert_dim)
        self.k = self.default_k if moe_k is None else moe_k
        self.regularization_weight = self.default_regularization if moe_regularization is None else moe_regularization
        self.expert_dropout = self.default_expert_dropout if moe_expert_dropout is None else moe_expert_dropout
        init = self.default_init if moe_init is None else moe_init
        if not 1 <= self.k <= self.experts:
            raise UsageError(f"--moe-k is {self.k} of {self.experts} experts: choose a number from 1 to {self.experts}")
        weights = {"moe_regularization": moe_regularization, "moe_expert_dropout": moe_expert_dropout}
        ranges.check(MoEOptions, weights | {"moe_dropout": moe_dropout, "moe_init": init})
        self.dropout = Dropout(moe_dropout)
        self.w1 = nn.Parameter(torch.empty(self.experts, dim, self.expert_dim))
        self.w2 = nn.Parameter(torch.empty(self.experts, self.expert_dim, dim))
        self.w3 = nn.Parameter(torch.empty(self.experts, dim))
        self._initialize(init, layers)

    @torch.no_grad()
    def _initialize(self, init: str, layers: int) -> None:
        scale = math.sqrt((0.2 if init == "switch" else 2.0) / layers)
        width = self.experts * self.expert_dim if init == "dense_equivalent" else self.expert_dim
        self.w1.normal_(std=scale / math.sqrt(self.dim))
        self.w2.normal_(std=scale / math.sqrt(width))
        self.w3.normal_(std=scale / math.sqrt(self.dim))
        if init != "switch":
            # Elements of d_model-vectors of norm `scale` have the standard deviation scale/√d_model.
            self.w3.copy_(scale * F.normalize(self.w3, dim=1))

    @property
    def emitted_losses(self) -> dict[str, float]:
        """The load balancing loss, which is returned multiplied by γ; none where γ is 0."""
        return {self.loss_name: 1.0} if self.regularization_weight else {}

    def rescale_output(self, gain: float) -> None:
        with torch.no_grad():
            self.w2.mul_(gain)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None, return_losses: bool = False):
        flat, real = x.reshape(-1, self.dim), None
        if padding_mask is not None:
            real = ~padding_mask.reshape(-1)
            # Values at padding must not reach the selection's gradient, not even multiplied by 0.
            flat = flat.masked_fill(~real.unsqueeze(1), 0.0)
        logits = self.logits(flat)
        chosen = (
            self.select(logits, real, x.shape[1]) if self.by_sequence and x.dim() == 3 else self.select(logits, real)
        )
        experts = chosen.experts if real is None else chosen.experts.masked_fill(~real.unsqueeze(1), -1)
        routing = sort_selection(experts, self.experts, complete=real is None)
        # Dropout multiplies by 0 or more, so it may precede ReLU and weights, which are then part of the product.
        hidden = self.dropout(cvmm_sorted(flat, routing, self.w1, from_tokens=True))
        y = cvmm_sorted(hidden, routing, self.w2, to_tokens=True, relu=True, weights=chosen.weights).reshape(x.shape)
        if not return_losses:
            return y
        if not self.training:
            return y, {}
        losses = {}
        if self.regularization_weight:
            losses[self.loss_name] = self.regularization_weight * self.balance(logits, chosen, routing, real)
        with torch.no_grad():
            watched = usage(self.plain_logits(flat, logits), routing.counts, real)
        return y, losses | {name: Statistic(value) for name, value in watched.items()}

    def activity(self, x: Tensor) -> dict[str, Tensor]:
        chosen = self.select(self.logits(x.reshape(-1, self.dim)), None)
        return {name: value.reshape(*x.shape[:-1], self.k) for name, value in chosen._asdict().items()}

    def logits(self, x: Tensor) -> Tensor:
        """x (T, d_model) -> z (T, N_E), in float32 (float64): a rounded logit selects another expert."""
        return self._float_linear(x, self.w3)

    def plain_logits(self, x: Tensor, logits: Tensor) -> Tensor:
        """W₃ x, given z, for the statistics."""
        return logits

    def select(self, logits: Tensor, real: Tensor | None) -> Selection:
        """z (T, N_E) and which tokens are real, (T,) bool or None for all -> experts and weights of each token."""
        raise NotImplementedError

    def balance(self, logits: Tensor, chosen: Selection, routing: SortedSelection, real: Tensor | None) -> Tensor:
        """The load balancing loss, a scalar, over the batch of all workers, without its weight."""
        raise NotImplementedError

    def kept(self, logits: Tensor) -> Tensor | None:
        """m of (7.21), drawn for each token and expert as in the released code: (T, N_E) bool, None where δ is 0."""
        if not self.training or self.expert_dropout == 0:
            return None
        return torch.rand_like(logits) >= self.expert_dropout

    @staticmethod
    def _float_linear(x: Tensor, weight: Tensor) -> Tensor:
        dtype = accumulation_dtype(x)
        with autocast_disabled(x.device):
            return F.linear(x.to(dtype), weight.to(dtype))


def sizes(ffn_dim: int, experts: int | None, expert_dim: int | None) -> tuple[int, int]:
    """N_E and G with N_E · G = d_ff. Raises UsageError for options that have no such sizes."""
    ranges.check(MoEOptions, {"moe_experts": experts, "moe_expert_dim": expert_dim})
    if experts is not None and expert_dim is not None:
        if experts * expert_dim != ffn_dim:
            raise UsageError(
                f"--moe-experts {experts} of --moe-expert-dim {expert_dim} are {experts * expert_dim} hidden units, "
                f"and the hidden width is {ffn_dim}: set --encoder-ffn-embed-dim (--decoder-ffn-embed-dim) "
                f"{experts * expert_dim}, or leave one of the two out"
            )
        return experts, expert_dim
    option, given = ("--moe-expert-dim", expert_dim) if expert_dim else ("--moe-experts", experts or EXPERTS)
    if ffn_dim % given:
        raise UsageError(
            f"{option} {given} does not divide the hidden width {ffn_dim} (--encoder-ffn-embed-dim, "
            f"--decoder-ffn-embed-dim)"
        )
    other = ffn_dim // given
    return (other, given) if expert_dim else (given, other)


def top_k(scores: Tensor, k: int, kept: Tensor | None) -> Selection:
    """The K largest scores, all above 0, and their experts; a score that is not kept is 0."""
    weights, experts = (scores if kept is None else scores * kept).topk(k)
    return Selection(experts, weights)


def softmax_of_top_k(logits: Tensor, k: int, kept: Tensor | None) -> Selection:
    """The K largest logits' experts, weighted by the softmax of these K (norm topk, F.3), by 0 where not kept."""
    lowest = torch.finfo(logits.dtype).min
    chosen, experts = (logits if kept is None else logits.masked_fill(~kept, lowest)).topk(k)
    weights = chosen.softmax(-1)
    return Selection(experts, weights if kept is None else weights * kept.gather(1, experts))


def sum_of_real(values: Tensor, real: Tensor | None) -> Tensor:
    """values (T, C) -> (C,), summed over the real tokens."""
    return (values if real is None else values.masked_fill(~real.unsqueeze(1), 0.0)).sum(0)


def batch_mean(values: Tensor, real: Tensor | None) -> Tensor:
    """values (T, C) -> (C,), the mean over the real tokens of all workers; 0 where there are none."""
    tokens = values.new_full((1,), len(values)) if real is None else real.sum().to(values.dtype).reshape(1)
    sums = sum_over_workers(torch.cat([sum_of_real(values, real), tokens]))
    return sums[:-1] / sums[-1].clamp_min(1.0)


def entropy_loss(logits: Tensor, real: Tensor | None) -> Tensor:
    """Σ_e p[e] log p[e], p = mean of softmax(z) over the real tokens of all workers (7.19, 7.20); −log N_E at best."""
    p = batch_mean(logits.softmax(-1), real)
    # An expert whose p has underflowed adds 0, and its gradient is 0 as well.
    return (p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum()


@torch.no_grad()
def usage(logits: Tensor, counts: Tensor, real: Tensor | None) -> dict[str, Tensor]:
    """The statistics of the module's docstring, each a scalar; counts (N_E,) are the tokens of each expert."""
    shares = counts.to(logits.dtype) / counts.sum().clamp_min(1)
    log_p = logits.log_softmax(-1)
    entropies = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    tokens = max(len(logits), 1) if real is None else real.sum().clamp_min(1)
    return {
        "experts_effective": torch.special.entr(shares).sum().exp(),
        "experts_dead": (counts == 0).to(logits.dtype).mean(),
        "experts_largest": shares.max(),
        "experts_token_entropy": sum_of_real(entropies, real)[0] / tokens,
    }
