"""The base classes of positions, sinusoids, and position numbers.

The class attribute ``gives`` is the place where a position enters the model:

- ``embedding``  P_i is added to the token embeddings; the module is called with indices and returns ``(B, N, dim)``.
- ``rotation``   Queries and Keys are rotated by their position: an `AttentionPosition` with ``rotate``.
- ``bias``       A function of query and key position is added to the logits: an `AttentionPosition` with ``bias``.
- ``indices``    Other position numbers than 0, 1, 2, … for an attention that brings its own positions. The module is
                 called with a length and returns the numbers in increasing order; in evaluation, those of a prefix do
                 not depend on its length.
- ``nothing``    No positions.

An attention lists in ``takes`` which of rotation, bias and indices it is defined for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.registry import Mechanism, Registry

#: Largest position for which angles of sinusoids are accurate enough in float32.
PRECISE = 1 << 14
POSITION_REGISTRY = Registry("position", "--position")
register_position = POSITION_REGISTRY.register


class Position(Mechanism, nn.Module):
    """Base class of positions."""

    #: See the module's docstring.
    gives: ClassVar[str] = "nothing"
    #: Whether the positions after a prefix do not depend on how much of the prefix is present.
    continues: ClassVar[bool] = True
    #: Whether a position depends on the length of its sentence, which a decoder does not know.
    needs_length: ClassVar[bool] = False
    #: The option with which it gives indices, where others give something else.
    indices_with: ClassVar[str] = ""
    #: Length of the longest sequence that has positions, in training and evaluation; None for no limit.
    longest: int | None = None
    #: What masks of weights take its parameters for (``modules.masks``).
    mask_as: ClassVar[str] = "table"

    @classmethod
    def gives_with(cls, config: Any) -> str:
        """``gives`` under a configuration; the class attribute unless options decide."""
        return cls.gives


class EmbeddedPosition(Position):
    """A position that is added to the token embeddings. ``dim`` is the model's width."""

    gives = "embedding"

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, positions: Tensor, length: int) -> Tensor | None:
        """positions (B, N) int64, all below ``length`` -> P (B, N, dim) in the module's dtype."""
        raise NotImplementedError


@dataclass
class MirroredOptions:
    """Options of positions with a number for each feature, of which the constructions use one or two."""

    mirrored_positions: bool = field(
        default=False,
        metadata={
            "help": "with --position fraction or indicator: the second half of the features has the negative of the "
            "first, so that a layer norm finds a mean of 0"
        },
    )


def features(p: Tensor, dim: int, mirrored: bool) -> Tensor:
    """p (…, k) -> (…, dim): p and zeros; ``mirrored``, p and zeros in each half, the second negative.

    Raises UsageError for a width that has no room for p.
    """
    if mirrored:
        if dim % 2:
            raise UsageError(
                f"--mirrored-positions needs an even width, and it is {dim}: change --encoder-embed-dim (of a decoder, "
                "--decoder-embed-dim), or leave the option out"
            )
        half = features(p, dim // 2, mirrored=False)
        return torch.cat([half, -half], dim=-1)
    if p.size(-1) > dim:
        raise UsageError(
            f"--position has {p.size(-1)} features here, and there are {dim}: choose a larger width "
            "(--encoder-embed-dim; of a decoder, --decoder-embed-dim)"
        )
    return nn.functional.pad(p, (0, dim - p.size(-1)))


class AttentionPosition(Position):
    """A position inside self-attention: a subclass writes ``rotate`` or ``bias``, and gives that.

    Args:
        dim: D, the width of the input of ``rotate``: a head's queries and keys, or features in linear attention.
        num_heads: H.
        causal: whether the attention is causal.
    """

    def __init__(self, dim: int, num_heads: int, *, causal: bool):
        super().__init__()
        self.dim, self.num_heads, self.causal = dim, num_heads, causal

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.gives = "bias" if cls.rotate is AttentionPosition.rotate else "rotation"

    def rotate(self, x: Tensor, offset: int) -> Tensor:
        """x (B, H, N, D), the first of which is at position ``offset`` -> the same, rotated by position."""
        raise NotImplementedError

    def bias(self, queries: int, keys: int, offset: int) -> Tensor:
        """(H, N, M), added to the logits; query 0 is at position ``offset`` of the keys."""
        raise NotImplementedError


def rotate_both(
    position: AttentionPosition | None, q: Tensor, k: Tensor, first_query: int, first_key: int
) -> tuple[Tensor, Tensor]:
    """Queries and keys (B, H, N, D) rotated by their position; as they are where ``position`` gives no rotation.

    ``first_query`` and ``first_key`` are the positions of the first of them.
    """
    if position is None or position.gives != "rotation":
        return q, k
    return position.rotate(q, first_query), position.rotate(k, first_key)


def angles(positions: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(…) -> (…, ⌈dim/2⌉): pos / 10000^(2i/dim), the angles of ``sinusoid`` and of rotations."""
    exponent = torch.arange(0, dim, 2, dtype=dtype, device=positions.device) / dim
    return positions.unsqueeze(-1).to(dtype) * torch.pow(10000.0, -exponent)


def sinusoid(positions: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sinusoids of (signed) positions, (…) -> (…, dim): sin at even features, cos at odd.

    The angle is pos / 10000^(2⌊j/2⌋/dim) (Vaswani et al. 2017, section 3.5). Angles and result are of ``dtype``.
    """
    phases = angles(positions, dim, dtype)
    return torch.stack([phases.sin(), phases.cos()], dim=-1).flatten(-2)[..., :dim]


def unbounded_sinusoid(positions: Tensor, dim: int) -> Tensor:
    """``sinusoid`` of positions from 0 on that may exceed ``PRECISE``, in float64.

    Below it, values are those of float32, so that a position has one value whatever the length of its sequence.
    """
    near = (positions < PRECISE).unsqueeze(-1)
    return torch.where(near, sinusoid(positions, dim), sinusoid(positions, dim, torch.float64))


def real_positions(padding_mask: Tensor) -> Tensor:
    """Positions (B, N) int64, counted from 0 at the first real token, whatever side padding is on.

    Args:
        padding_mask: (B, N), True at padding.
    """
    return ((~padding_mask).long().cumsum(1) - 1).clamp(min=0)
