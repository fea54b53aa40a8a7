"""Sizes by name: ``--arch``. Mechanisms are options, sizes are architectures.

Encoder–decoders: Table C.1 of Csordás 2023; the universal CFQ model has other sizes than the standard one.
``sg_transformer`` itself has the sizes of Vaswani et al.'s base model.

Classifiers: Tables D.3 to D.5 and appendix E.1.2, all with one shared layer. ``sg_encoder_…`` are the sizes of the
Neural Data Router, ``…_baseline`` those of the transformers without copy gate. The sizes are those of the released
code, which the published numbers come from. It differs from the text in three points:

- the column that is read out (text: the last one everywhere);
- feedforward layers of width 512 and 256 for CTL++ (text: 1024 and 512);
- bidirectional LSTMs of the same width as the others, half of it for each direction (text: 400 and 1024).

``sg_encoder_sort_of_clevr`` has the sizes and starts of Mittal et al. 2022 (released code) and Park & Kim 2024: one
pre-norm layer four times, without a last norm, and dropout in the feedforward layer alone.

Differentiable neural computers: ``sg_dnc_copy``, ``…_recall``, ``…_key_value`` and ``…_babi`` are those of appendix
A.2. ``sg_dnc_ctl`` is that of the code released with the Neural Data Router, whose "DNC" has de-allocation and
sharpness (``--memory-variant ds``).

Language models: Table F.2, pre-norm, with the initialization by depth. Feedforward layers have the widths of the dense
models; docs/language_models.md has those of the mixtures of experts.

Regressors: ``sg_regressor_garg…`` are those of Garg et al. 2022 (GPT-2's sizes, 2 positions for each of 101 points, of
11 for ``toy``). ``sg_regressor_article…`` are those of an article on linear transformers, for prompts of 64 examples.

Operators: ``sg_operator_burgers``, ``…_darcy`` and ``…_inverse`` are those of the code released with Cao 2021,
``sg_operator_fno`` that of Li et al. 2021 in one dimension. ``…_small`` are ours, for two CPU cores;
``sg_operator_fno_small`` has about as many parameters as ``sg_operator_burgers_small``.
"""

from __future__ import annotations

from typing import Any


def _side(side: str, dim: int, ffn: int, heads: int, layers: int) -> dict[str, Any]:
    values = {"embed_dim": dim, "ffn_embed_dim": ffn, "attention_heads": heads, "layers": layers}
    return {f"{side}_{name}": value for name, value in values.items()}


def _sizes(dim: int, ffn: int, heads: int, layers: int, **more: Any) -> dict[str, Any]:
    return _side("encoder", dim, ffn, heads, layers) | _side("decoder", dim, ffn, heads, layers) | more


def _classifier(dim: int, ffn: int, heads: int, layers: int, readout: str) -> dict[str, Any]:
    return _side("encoder", dim, ffn, heads, layers) | {"depth": "shared", "readout": readout}


def _lstm(embed: int, hidden: int, layers: int) -> dict[str, Any]:
    return {"embed_dim": embed, "hidden_dim": hidden, "layers": layers}


#: architecture of sg_transformer -> values of the model's configuration
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "sg_transformer_scan": _sizes(128, 256, heads=8, layers=3),
    "sg_transformer_cfq": _sizes(128, 256, heads=16, layers=2),
    "sg_transformer_cfq_universal": _sizes(256, 512, heads=4, layers=6, depth="shared"),
    "sg_transformer_pcfg": _sizes(512, 2048, heads=8, layers=6),
    "sg_transformer_cogs": _sizes(512, 512, heads=4, layers=2),
    "sg_transformer_math": _sizes(512, 2048, heads=8, layers=6),
}
#: architecture of sg_encoder -> values of the model's configuration
ENCODER_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "sg_encoder_ctl": _classifier(256, 512, heads=1, layers=14, readout="last"),
    "sg_encoder_ctl_baseline": _classifier(128, 256, heads=4, layers=11, readout="last"),
    "sg_encoder_arithmetic": _classifier(256, 1024, heads=4, layers=15, readout="last"),
    "sg_encoder_arithmetic_baseline": _classifier(128, 256, heads=4, layers=11, readout="first"),
    "sg_encoder_listops": _classifier(512, 1024, heads=16, layers=20, readout="first"),
    "sg_encoder_listops_baseline": _classifier(256, 1024, heads=16, layers=6, readout="first"),
    "sg_encoder_ctlpp": _classifier(256, 512, heads=4, layers=8, readout="first"),
    "sg_encoder_ctlpp_baseline": _classifier(128, 256, heads=4, layers=8, readout="first"),
    "sg_encoder_sort_of_clevr": _classifier(256, 512, heads=4, layers=4, readout="first")
    | {"pre_norm": True, "no_final_norm": True, "dropout": 0.1, "attention_dropout": 0.0}
    | {
        "attention_residual_dropout": 0.0,
        "attention_bias": True,
        "attention_init": "torch_biases",
        "ffn_init": "torch",
    },
}
#: architecture of sg_lstm -> values of the model's configuration
LSTM_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "sg_lstm_ctl": _lstm(16, 200, layers=1),
    "sg_lstm_arithmetic": _lstm(200, 200, layers=2),
    "sg_lstm_listops": _lstm(512, 512, layers=4),
    "sg_lstm_ctlpp": _lstm(256, 256, layers=1),
}


def _dnc(cells: int, width: int, heads: int, dim: int, **more: Any) -> dict[str, Any]:
    return {"memory_cells": cells, "memory_width": width, "read_heads": heads, "controller_dim": dim} | more


#: architecture of sg_dnc -> values of the model's configuration
DNC_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "sg_dnc_copy": _dnc(16, 16, heads=1, dim=32),
    "sg_dnc_recall": _dnc(64, 32, heads=1, dim=128),
    "sg_dnc_key_value": _dnc(16, 32, heads=1, dim=32),
    "sg_dnc_babi": _dnc(256, 64, heads=4, dim=256, embed_dim=256),
    "sg_dnc_ctl": _dnc(21, 200, heads=4, dim=200, embed_dim=16),
}


def _language_model(dim: int, ffn: int, heads: int, head_dim: int, layers: int, dropout: float = 0.1) -> dict[str, Any]:
    shell = {"decoder_head_dim": head_dim, "dropout": dropout, "pre_norm": True, "linear_init": "depth"}
    return _side("decoder", dim, ffn, heads, layers) | shell


#: architecture of sg_transformer_lm -> values of the model's configuration
LM_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "sg_transformer_lm_wt_s": _language_model(412, 2053, heads=10, head_dim=41, layers=16),
    "sg_transformer_lm_wt_s_star": _language_model(412, 16480, heads=10, head_dim=41, layers=16),
    "sg_transformer_lm_wt_b": _language_model(1024, 4110, heads=16, head_dim=64, layers=18, dropout=0.2),
    "sg_transformer_lm_e8": _language_model(512, 2053, heads=8, head_dim=64, layers=12),
}


def _regressor(dim: int, ffn: int, heads: int, layers: int, positions: int, **more: Any) -> dict[str, Any]:
    learned = {"position": "learned", "learned_positions": positions}
    start = {"attention_bias": True, "attention_init": "torch", "ffn_init": "torch", "ffn_activation": "gelu"}
    return _side("decoder", dim, ffn, heads, layers) | learned | start | {"pre_norm": True, "dropout": 0.0} | more


def _article(dim: int, **more: Any) -> dict[str, Any]:
    layers = {"depth": "looped", "decoder_update": "feedforward_only", "no_final_norm": True}
    return _regressor(dim, 256, heads=4, layers=2, positions=129, learned_positions_std=1.0, **layers, **more)


#: architecture of sg_regressor -> values of the model's configuration
REGRESSOR_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "sg_regressor_article": _article(96),
    "sg_regressor_article_quadratic": _article(
        112, decoder_attention="linear", feature_map="rebased", rebased_start="uniform", feature_dim="5"
    ),
    "sg_regressor_garg": _regressor(256, 1024, heads=8, layers=12, positions=202, learned_positions_std=0.02),
    "sg_regressor_garg_small": _regressor(128, 512, heads=4, layers=6, positions=202, learned_positions_std=0.02),
    "sg_regressor_garg_toy": _regressor(256, 1024, heads=8, layers=12, positions=22, learned_positions_std=0.02),
}


def _operator(
    dim: int, ffn: int, heads: int, layers: int, spectral: tuple[int, int, int, int], **more: Any
) -> dict[str, Any]:
    """``spectral``: layers, width and modes of the decoder, and the width of its readout."""
    decoder = zip(("spectral_layers", "spectral_dim", "modes", "readout_dim"), spectral, strict=True)
    start = {"attention_bias": True, "ffn_init": "torch", "norm": "none"}
    return _side("encoder", dim, ffn, heads, layers) | dict(decoder) | start | more


def _fno(dim: int, modes: int, readout: int, **more: Any) -> dict[str, Any]:
    sizes = {"encoder_embed_dim": dim, "encoder_layers": 0, "spectral_dim": dim, "spectral_layers": 4}
    return sizes | {"modes": modes, "readout_dim": readout} | more


_DARCY = {"field_scaling": "scalar", "decoder_coordinates": True, "coordinates": "heads"}
#: architecture of sg_operator -> values of the model's configuration
OPERATOR_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "sg_operator_burgers": _operator(96, 192, heads=1, layers=4, spectral=(2, 48, 16, 48), coordinates="heads"),
    "sg_operator_burgers_small": _operator(64, 128, heads=1, layers=4, spectral=(2, 32, 16, 32)),
    "sg_operator_fno": _fno(64, modes=16, readout=128),
    "sg_operator_fno_small": _fno(40, modes=16, readout=64),
    "sg_operator_darcy": _operator(
        128, 256, heads=4, layers=6, spectral=(2, 32, 12, 128), coarse_points=43, zero_boundary=True, dropout=0.05,
        embedding_dropout=0.0, activation_dropout=0.1, **_DARCY,
    ),
    "sg_operator_darcy_small": _operator(
        64, 128, heads=4, layers=4, spectral=(2, 24, 10, 64), coarse_points=15, zero_boundary=True, **_DARCY
    ),
    "sg_operator_inverse": _operator(
        192, 384, heads=4, layers=6, spectral=(0, 192, 12, 192), coarse_points=36, coarse_output=True, dropout=0.05,
        **_DARCY,
    ),
}  # fmt: skip
