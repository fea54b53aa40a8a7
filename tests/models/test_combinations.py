"""Every mechanism composes with every other: models with mechanisms from all registries at once, in float64.

Only ``--norm none`` is not among them: there states grow from layer to layer, and rounding with them.
"""

from __future__ import annotations

import pytest

pytest.importorskip("fairseq")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention import ATTENTION_REGISTRY
from fairseq_sg.modules.depth import DEPTH_REGISTRY
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from fairseq_sg.modules.normalization import QK_NORM_REGISTRY
from fairseq_sg.modules.position import POSITION_REGISTRY
from fairseq_sg.modules.update import UPDATE_REGISTRY
from helpers.decoding import assert_steps_equal_full_passes
from helpers.models import FFN_OPTIONS, MORE, PAD, UPDATE_OPTIONS, build, pair
from helpers.packing import assert_equal, together

ROLES = ("encoder", "decoder", "cross")
LAYERS = 2  # as ``build`` has them


@st.composite
def combinations(draw) -> dict:
    """The options of a model. Mechanisms of different layers may differ; what the model refuses is left out."""
    depth = draw(st.sampled_from(sorted(DEPTH_REGISTRY)))
    each = LAYERS if depth in ("separate", "looped") else 1

    def names(registered) -> str:
        return ",".join(draw(st.lists(st.sampled_from(sorted(registered)), min_size=each, max_size=each)))

    found = {"depth": depth, **MORE.get(f"depth {depth}", {})}
    for role in ROLES:
        found[f"{role}_attention"] = names(n for n in ATTENTION_REGISTRY if role in ATTENTION_REGISTRY[n].roles)
    # Copy gates are post-norm, and the other update is pre-norm.
    updates = UPDATE_REGISTRY.keys() - {draw(st.sampled_from(["copy_gate", "feedforward_only"]))}
    for side in ("encoder", "decoder"):
        found |= {f"{side}_ffn": names(FEEDFORWARD_REGISTRY), f"{side}_update": names(updates)}
    for name, needed in (FFN_OPTIONS | UPDATE_OPTIONS).items():
        chosen = ",".join(found[f"{side}_{part}"] for side in ("encoder", "decoder") for part in ("ffn", "update"))
        found |= needed if name in chosen.split(",") else {}
    for option, registry in (
        ("position", POSITION_REGISTRY),
        ("feature_map", FEATURE_MAP_REGISTRY),
        ("qk_norm", QK_NORM_REGISTRY),
    ):
        name = draw(st.sampled_from(sorted(registry)))
        found = accepted(found, {option: name, **MORE.get(f"{option.replace('_', ' ')} {name}", {})})
    for option in ("pre_norm", "attention_bias", "untied_output"):
        found = accepted(found, {option: draw(st.booleans())})
    for option in ("attention_window", "encoder_attention_window"):
        found = accepted(found, {option: draw(st.integers(0, 3))})
    return found


def accepted(found: dict, more: dict) -> dict:
    try:
        build(**found | more)
    except UsageError:
        return found
    return found | more


@given(combinations())
@settings(max_examples=15)
def test_padding_changes_nothing(options):
    model = build(**options).eval()
    source, target = pair()
    logits = model(source, None, target)[0]
    for i, (words, prefix) in enumerate(zip(source, target)):
        alone = model(words[None, words.ne(PAD)], None, prefix[None, prefix.ne(PAD)])[0][0]
        torch.testing.assert_close(logits[i, : len(alone)], alone)


@given(combinations())
@settings(max_examples=15)
def test_decoding_step_by_step_after_reordering_equals_full_passes(options):
    begin = torch.full((2, 1), 2)
    model = build(**options).eval()
    assert_steps_equal_full_passes(model, pair()[0][:2], begin, words=5, steps=6, rtol=1e-6, atol=1e-6)


@given(combinations(), st.booleans())
@settings(max_examples=15)
def test_packed_training_is_that_of_padded_batches_and_reaches_every_parameter(options, left_pad):
    try:
        model = build(left_pad=left_pad, **options)
    except UsageError:  # a feature map reads a source without the padding of the prefix
        model = build(**options)
    source, target = pair(left_pad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn_like", torch.zeros_like)  # the noise of noisy_topk
        run = lambda: model(source, None, target, value_roles=model.attention_roles)  # noqa: E731
        packed, padded, count = together(model, run, target.ne(PAD), patch)
    assert count > 0
    assert_equal(packed, padded)
    assert set(packed[2]) == {name for name, _ in model.named_parameters()}
