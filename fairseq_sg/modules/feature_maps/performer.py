"""FAVOR+, the positive orthogonal random features of Performers (Choromanski et al. 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.feature_maps.base import FeatureMap, register_feature_map
from fairseq_sg.ops.precision import accurate, autocast_disabled


@dataclass
class PerformerOptions:
    performer_features: int | None = field(
        default=None,
        metadata={
            "help": "number of random features of the performer feature map, even (default: the width of a head's "
            "Queries)",
            "least": 2,
        },
    )
    performer_redraw: str = field(
        default="forward",
        metadata={
            "help": "when the performer feature map draws new random features in training: 'never', every 'forward' "
            "pass of an attention, or a number n, every n updates; in evaluation the last ones stay, and checkpoints "
            "keep them"
        },
    )


@register_feature_map("performer")
class PerformerFeatureMap(FeatureMap):
    """φ(x) = exp(−‖x'‖²/2) [exp(Ωᵀx'), exp(−Ωᵀx')] / √m, x' = x / D^¼, F = m (Choromanski et al. 2021, Lemma 1).

    With Ω (D, m/2) Gaussian, φ(q)·φ(k) has the expectation exp(q·k/√D), the kernel of softmax attention. The columns
    of Ω are orthogonal in blocks of D, with the lengths of independent Gaussian vectors. Queries, Keys and heads share
    Ω. As in ``exp``, and for the same reasons, a Query's features are divided by their largest, and those of Keys are
    not, unless they are normalized (``--qk-norm``): as φ(x)_i ≤ exp(‖ω_i‖²/2)/√m, and ‖ω_i‖² is about D, they cannot
    overflow below a D of 150 or so. Features are float32.

    Args:
        performer_features: m, even; D by default.
        performer_redraw: ``never``, ``forward`` or a number of updates, as told by ``set_num_updates``, which
            fairseq's tasks call on the model before every training step.

    Raises:
        UsageError: m is odd or below 2, or the policy is none of these.
    """

    paper = "Choromanski et al. 2021"
    options = PerformerOptions
    scales_queries = True

    def __init__(self, head_dim: int, *, performer_features: int | None = None, performer_redraw: str = "forward"):
        super().__init__(head_dim)
        self.features = head_dim if performer_features is None else performer_features
        if self.features < 2 or self.features % 2:
            raise UsageError(
                f"--performer-features is {self.features}{' by default' * (performer_features is None)}, for Queries "
                f"of width {head_dim}: choose an even number from 2"
            )
        self.redraw_every = _updates(performer_redraw)
        self.updates = self.drawn_at = 0
        self.scale = head_dim**-0.25
        self.register_buffer("projection", orthogonal_gaussian(head_dim, self.features // 2))

    def queries(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        exponents = self._exponents(q)
        return (exponents - exponents.amax(-1, keepdim=True)).exp() / math.sqrt(self.features)

    def keys_to_normalize(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.queries(k)

    def forward(self, x: Tensor) -> Tensor:
        return self._exponents(x).exp() / math.sqrt(self.features)

    def _exponents(self, x: Tensor) -> Tensor:
        with autocast_disabled(x.device):
            x = accurate(x) * self.scale
            projected = x @ self.projection.to(x.dtype)
            return torch.cat([projected, -projected], dim=-1) - x.square().sum(-1, keepdim=True) / 2

    @property
    def not_recorded(self) -> str:
        """Why ``--step-graphs`` and ``--stacked`` refuse this map, or ""."""
        return "" if self.redraw_every is None else "this model changes by the number of updates (--performer-redraw)"

    def set_num_updates(self, num_updates: int) -> None:
        """Called by fairseq with the number of updates that have been made."""
        self.updates = num_updates

    @_disable_dynamo  # the number of updates would be a constant of compiled code, which each step compiles again
    def begin(self) -> None:
        if self.training and self._is_due():
            # Not in place: an earlier application of the layer needs its features for the gradient.
            self.projection = orthogonal_gaussian(*self.projection.shape).to(self.projection)
            self.drawn_at = self.updates

    def _is_due(self) -> bool:
        if self.redraw_every is None:
            return False
        if self.redraw_every == 0:
            return True
        return self.updates != self.drawn_at and self.updates % self.redraw_every == 0

    def extra_repr(self) -> str:
        return f"features={self.features}"


def _updates(redraw: str) -> int | None:
    """The policy as a number of updates: None for never, 0 for every pass."""
    known = {"never": None, "forward": 0}
    if redraw in known:
        return known[redraw]
    if not str(redraw).isdecimal() or int(redraw) < 1:
        raise UsageError(
            f"--performer-redraw is {redraw!r}: choose from never, forward, or a positive number of updates"
        )
    return int(redraw)


def orthogonal_gaussian(dim: int, count: int) -> Tensor:
    """(dim, count): Gaussian columns, orthogonal in blocks of ``dim`` (Choromanski et al. 2021).

    The directions' signs are those of the QR decomposition; both signs of every column are features.
    """
    # On the CPU, whose random numbers dropout on a GPU does not use: data-parallel workers on GPUs draw alike. Those on
    # CPUs do not where a batch of another size takes another number of draws before, as dropout does.
    blocks = [torch.linalg.qr(torch.randn(dim, dim, device="cpu"))[0] for _ in range(-(-count // dim))]
    return torch.cat(blocks, dim=1)[:, :count] * torch.randn(count, dim, device="cpu").norm(dim=1)
