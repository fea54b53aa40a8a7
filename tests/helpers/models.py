"""Tiny models in float64 with any mechanism, and batches for them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from fairseq.data import Dictionary

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.models.sg_transformer import SGTransformer
from fairseq_sg.modules.attention import ATTENTION_REGISTRY
from fairseq_sg.modules.depth import DEPTH_REGISTRY
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from fairseq_sg.modules.position import POSITION_REGISTRY
from fairseq_sg.modules.update import UPDATE_REGISTRY

PAD = 1


def dictionary(words: int) -> Dictionary:
    found = Dictionary()
    for word in range(words):
        found.add_symbol(f"w{word}")
    return found


def task(left_pad: bool) -> SimpleNamespace:
    return SimpleNamespace(
        source_dictionary=dictionary(7),
        target_dictionary=dictionary(5),
        num_classes=3,
        cfg=SimpleNamespace(left_pad_target=left_pad),
    )


def build(model=SGTransformer, left_pad=False, **options):
    sizes = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in (("embed_dim", 12), ("ffn_embed_dim", 16), ("attention_heads", 2), ("layers", 2))
    }
    values = sizes | {"dropout": 0.0} | options
    torch.manual_seed(1)
    return model.build_model(SimpleNamespace(**values), task(left_pad)).double().train()


def tokens(lengths, words: int, left_pad: bool) -> torch.Tensor:
    rows = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(rows, lengths):
        found = torch.randint(4, 4 + words, (length,))
        (row[len(row) - length :] if left_pad else row[:length]).copy_(found)
    return rows


def pair(left_pad=False):
    torch.manual_seed(2)
    return tokens([9, 2, 5], 7, left_pad), tokens([3, 8, 4], 5, left_pad)


def attention_options(name: str) -> dict:
    """The attention wherever it can serve, softmax elsewhere."""
    roles = ATTENTION_REGISTRY.find(name).roles
    return {f"{role}_attention": name if role in roles else "softmax" for role in ("encoder", "decoder", "cross")}


#: What a small layer needs, and what its draws for each token would make different.
FFN_OPTIONS = {"topk": {"topk_k": 4}, "sigma_moe": {"moe_expert_dropout": 0.0}}


#: What an update needs.
UPDATE_OPTIONS = {"feedforward_only": {"pre_norm": True}}


LINEAR = attention_options("linear")


MODELS = {
    **{f"attention {name}": attention_options(name) for name in sorted(ATTENTION_REGISTRY)},
    **{f"feature map {name}": LINEAR | {"feature_map": name} for name in sorted(FEATURE_MAP_REGISTRY)},
    **{f"norm {name}": LINEAR | {"qk_norm": name} for name in ("l1", "l2", "rms")},
    **{f"position {name}": {"position": name} for name in sorted(POSITION_REGISTRY)},
    **{f"feedforward {name}": {"encoder_ffn": name, "decoder_ffn": name} for name in sorted(FEEDFORWARD_REGISTRY)},
    **{f"update {name}": {"encoder_update": name, "decoder_update": name} for name in sorted(UPDATE_REGISTRY)},
    **{f"depth {name}": {"depth": name} for name in sorted(DEPTH_REGISTRY)},
    "pre-norm": {"pre_norm": True},
    "router": {
        **attention_options("geometric"),
        **{"encoder_update": "copy_gate", "encoder_ffn": "sigma_moe", "moe_expert_dropout": 0.0, "depth": "shared"},
    },
}


MORE = {
    **{f"feedforward {name}": options for name, options in FFN_OPTIONS.items()},
    **{f"update {name}": options for name, options in UPDATE_OPTIONS.items()},
    "feature map cosformer": {"cosformer_horizon": 64},
    # A denominator may be near 0, where rounding decides.
    **{f"feature map {name}": {"linear_attention_denominator": "none"} for name in ("identity", "mlp")},
    "depth looped": {"loops": 2},
    "position fraction": {"decoder_attention": "relative"},
}


def model_of(name: str):
    return build(**MODELS[name], **MORE.get(name, {})).float()
