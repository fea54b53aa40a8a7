"""Feedforward layers: one file each, chosen by name."""

from __future__ import annotations

from typing import Any

from fairseq_sg.modules.feedforward.base import FeedForward, FeedForwardOptions
from fairseq_sg.modules.feedforward.dense import DenseFeedForward
from fairseq_sg.modules.feedforward.registry import FEEDFORWARD_REGISTRY, register_feedforward
from fairseq_sg.registry import option_values


def build_feedforward(name: str, config: Any, side: str) -> FeedForward:
    """The feedforward layer ``name`` of the ``encoder`` or the ``decoder`` (``side``), sized and set by a model's configuration.

    Raises ValueError for an unknown name, with the choices.
    """
    cls = FEEDFORWARD_REGISTRY.find(name)
    options = option_values(cls.options or FeedForwardOptions, config)
    return cls(getattr(config, f"{side}_embed_dim"), getattr(config, f"{side}_ffn_embed_dim"), **options)


__all__ = ["FEEDFORWARD_REGISTRY", "DenseFeedForward", "FeedForward", "build_feedforward", "register_feedforward"]
