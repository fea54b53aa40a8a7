"""Positions: one file each, chosen by ``--position``; ``base`` lists where they enter the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.position.alibi import AlibiPosition
from fairseq_sg.modules.position.base import (
    POSITION_REGISTRY,
    PRECISE,
    AttentionPosition,
    EmbeddedPosition,
    Position,
    angles,
    real_positions,
    register_position,
    rotate_both,
    sinusoid,
    unbounded_sinusoid,
)
from fairseq_sg.modules.position.fraction import FractionPosition
from fairseq_sg.modules.position.indicator import IndicatorPosition
from fairseq_sg.modules.position.learned import LearnedPosition
from fairseq_sg.modules.position.none import NoPosition
from fairseq_sg.modules.position.randomized import RandomizedPosition
from fairseq_sg.modules.position.rotary import RotaryPosition
from fairseq_sg.modules.position.sinusoidal import SinusoidalPosition
from fairseq_sg.modules.position.t5 import T5Position

#: The values of ``gives`` for positions inside an attention that brings none itself.
INSIDE = ("rotation", "bias")
MakePosition = Callable[[int, int], AttentionPosition]


def build_embedded_position(name: str, dim: int, config: Any) -> EmbeddedPosition:
    """The positions ``name`` to add to embeddings of width ``dim``; ``NoPosition`` for one that enters elsewhere.

    Raises UsageError for an unknown name or a wrong option.
    """
    if POSITION_REGISTRY.find(name).gives_with(config) != "embedding":
        return NoPosition(dim)
    return POSITION_REGISTRY.build(name, config, dim)


def attention_position(attention: type, config: Any, role: str) -> MakePosition | None:
    """A function that makes the ``--position`` inside one attention, a module with ``rotate`` or ``bias``; or None.

    Args:
        attention: the class of the attention.
        config: has ``position`` (a name or None) and the position's options.
        role: positions inside attention are between a sequence and itself, so ``cross`` has none.

    Returns:
        A function of the rotated width and the number of heads.

    Raises:
        UsageError: the position is not defined for this attention.
    """
    name = getattr(config, "position", None)
    if name is None or role == "cross":
        return None
    cls = POSITION_REGISTRY.find(name)
    gives = cls.gives_with(config)
    if gives != "indices" and attention.brings_position:
        return None
    known = positions_for(attention, config, role)
    if name not in known:
        raise UsageError(
            f"--position {name} is not defined for {attention.registered_name} attention (--{role}-attention); with "
            f"it go: {', '.join(sorted(known)) or 'none, it brings its own'}"
        )
    if gives not in INSIDE:
        return None
    return partial(cls, causal=role == "decoder", **cls.keyword_arguments(config))


def build_indices(config: Any) -> Position | None:
    """The module of position numbers for the attentions of one side; None where ``--position`` gives none."""
    return POSITION_REGISTRY.build(config.position, config) if gives_indices(config) else None


def gives_indices(config: Any) -> bool:
    """Whether ``--position`` gives position numbers to attentions that bring positions of their own."""
    name = getattr(config, "position", None)
    return name is not None and POSITION_REGISTRY.find(name).gives_with(config) == "indices"


def positions_for(attention: type, config: Any, role: str = "encoder") -> set:
    """The names of the positions that an attention is defined with in a role, under these options."""
    if attention.brings_position:
        return {name for name, cls in POSITION_REGISTRY.items() if cls.gives_with(config) in attention.takes}
    usable = {"embedding", "nothing", *attention.takes} - {"indices"}
    return {
        name
        for name, cls in POSITION_REGISTRY.items()
        if cls.gives_with(config) in usable and not (role == "decoder" and cls.needs_length)
    }
