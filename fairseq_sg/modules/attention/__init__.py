"""Attentions: one file each, chosen by name and role."""

from __future__ import annotations

from typing import Any

from fairseq_sg.modules.attention.abs_rel import AbsRelAttention
from fairseq_sg.modules.attention.base import ATTENTION_REGISTRY, ROLES, Attention, AttentionOptions, register_attention
from fairseq_sg.modules.attention.compositional import CompositionalAttention
from fairseq_sg.modules.attention.context import AttentionOutput, Context, Values
from fairseq_sg.modules.attention.galerkin import FourierAttention, GalerkinAttention
from fairseq_sg.modules.attention.geometric import GeometricAttention
from fairseq_sg.modules.attention.linear import LinearAttention
from fairseq_sg.modules.attention.relative import RelativeAttention
from fairseq_sg.modules.attention.softmax import SoftmaxAttention
from fairseq_sg.modules.position import attention_position


def build_attention(name: str, config: Any, role: str) -> Attention:
    """The attention ``name`` for ``role``, sized and set by a model's configuration.

    Args:
        name: a name in ``ATTENTION_REGISTRY``.
        config: has ``encoder_embed_dim`` and ``encoder_attention_heads`` (role ``encoder``), ``decoder_embed_dim`` and
            ``decoder_attention_heads`` (role ``decoder``), all but the encoder's heads for ``cross``, perhaps
            ``decoder_head_dim`` (role ``decoder``) and ``head_columns`` (role ``encoder``), and one attribute for each
            option of the kind.
        role: ``encoder``, ``decoder`` or ``cross``.

    Raises:
        UsageError: unknown name, a role the kind cannot serve, or a wrong option, each naming the choices.
        ValueError: unknown role.
    """
    cls = ATTENTION_REGISTRY.find(name)
    if role not in ROLES:
        raise ValueError(f"unknown attention role {role!r}: choose from {', '.join(ROLES)}")
    side = "encoder" if role == "encoder" else "decoder"
    width, heads = getattr(config, f"{side}_embed_dim"), getattr(config, f"{side}_attention_heads")
    arguments = cls.keyword_arguments(config)
    position = attention_position(cls, config, role)
    if position is not None:
        arguments["position"] = position
    head_dim = getattr(config, "decoder_head_dim", None)
    if role == "decoder" and head_dim is not None:
        arguments["head_dim"] = head_dim
    columns = getattr(config, "head_columns", 0)
    if role == "encoder" and columns:
        arguments["columns"] = columns
    if role == "cross":
        arguments["kv_dim"] = config.encoder_embed_dim
    return cls(width, heads, role=role, **arguments)
