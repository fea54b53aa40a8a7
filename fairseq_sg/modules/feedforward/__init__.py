"""Feedforward layers: one file each, chosen by name."""

from __future__ import annotations

from typing import Any

from fairseq_sg.modules.feedforward.base import FEEDFORWARD_REGISTRY, FeedForward, register_feedforward
from fairseq_sg.modules.feedforward.dense import DenseFeedForward
from fairseq_sg.modules.feedforward.moe import MixtureOfExperts
from fairseq_sg.modules.feedforward.noisy_topk import NoisyTopK
from fairseq_sg.modules.feedforward.pkm import ProductKeyMemory
from fairseq_sg.modules.feedforward.s_base import SBase
from fairseq_sg.modules.feedforward.sigma_moe import SigmaMoE
from fairseq_sg.modules.feedforward.switch import Switch
from fairseq_sg.modules.feedforward.topk import TopKFeedForward


def build_feedforward(name: str, config: Any, side: str) -> FeedForward:
    """The feedforward layer ``name`` of the ``encoder`` or ``decoder`` (``side``), from a model's configuration.

    Raises UsageError for an unknown name, with the choices, or for a wrong option.
    """
    dim, ffn_dim = getattr(config, f"{side}_embed_dim"), getattr(config, f"{side}_ffn_embed_dim")
    layers = {}
    if FEEDFORWARD_REGISTRY.find(name).needs_layers:
        layers["layers"] = summed_layers(config, side)
    return FEEDFORWARD_REGISTRY.build(name, config, dim, ffn_dim, **layers)


def summed_layers(config: Any, side: str) -> int:
    """L: the layers of a side whose outputs add up in one residual stream, those of every loop counted.

    After a norm of the stream they are 1.
    """
    return getattr(config, f"{side}_layers") * config.loops if config.pre_norm else 1
