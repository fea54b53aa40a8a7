"""Configurations for tests of modules: the defaults of every mechanism's options, and sizes."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

from fairseq_sg.modules.attention import ATTENTION_REGISTRY
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from fairseq_sg.modules.norm import NORM_REGISTRY
from fairseq_sg.modules.normalization import QK_NORM_REGISTRY
from fairseq_sg.modules.position import POSITION_REGISTRY
from fairseq_sg.modules.update import UPDATE_REGISTRY


def config_of(dim: int, heads: int, **options) -> SimpleNamespace:
    """Encoder and decoder of width ``dim``, without dropout; ``options`` override."""
    values = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in sizes(dim, heads).items()}
    for registry in (
        ATTENTION_REGISTRY,
        FEATURE_MAP_REGISTRY,
        QK_NORM_REGISTRY,
        POSITION_REGISTRY,
        FEEDFORWARD_REGISTRY,
        UPDATE_REGISTRY,
        NORM_REGISTRY,
    ):
        for cls in registry.values():
            values.update({f.name: f.default for f in fields(cls.options)} if cls.options else {})
    values.update(position=None, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
    values.update(attention_residual_dropout=values["dropout"] if "dropout" not in options else options["dropout"])
    values.update(norm="layer", pre_norm=False, loops=1, no_final_norm=False)
    return SimpleNamespace(**(values | options))


def sizes(dim: int, heads: int) -> dict:
    return {"embed_dim": dim, "ffn_embed_dim": dim, "attention_heads": heads, "layers": 2}
