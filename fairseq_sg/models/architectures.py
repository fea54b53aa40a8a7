"""Sizes by name: ``--arch``. Mechanisms are options, sizes are architectures.

From Table C.1 of Csordás 2023; the universal CFQ model has sizes of its own. ``sg_transformer`` itself has the sizes of
Vaswani et al.'s base model.
"""

from __future__ import annotations

from typing import Any, Dict


def _sizes(dim: int, ffn: int, heads: int, layers: int, **more: Any) -> Dict[str, Any]:
    both = {"embed_dim": dim, "ffn_embed_dim": ffn, "attention_heads": heads, "layers": layers}
    return {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in both.items()} | more


#: architecture -> values of the model's configuration
ARCHITECTURES: Dict[str, Dict[str, Any]] = {
    "sg_transformer_scan": _sizes(128, 256, heads=8, layers=3),
    "sg_transformer_cfq": _sizes(128, 256, heads=16, layers=2),
    "sg_transformer_cfq_universal": _sizes(256, 512, heads=4, layers=6, depth="shared"),
    "sg_transformer_pcfg": _sizes(512, 2048, heads=8, layers=6),
    "sg_transformer_cogs": _sizes(512, 512, heads=4, layers=2),
    "sg_transformer_math": _sizes(512, 2048, heads=8, layers=6),
}


def preset(values: Dict[str, Any]):
    """fairseq's form of an architecture: a function that fills in what the user has not set."""

    def fill(cfg) -> None:
        for name, value in values.items():
            if getattr(cfg, name, None) is None:
                setattr(cfg, name, value)

    return fill
