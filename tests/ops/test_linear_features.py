"""Linear attention that maps and normalizes queries and keys itself: the same as mapping and normalizing before."""

from __future__ import annotations

import pytest
import torch
from ops_comparison import assert_all_close, make_mask, with_gradients
from test_linear_attention import make_state
from torch import Tensor

from fairseq_sg.modules.feature_maps import build_feature_map
from fairseq_sg.modules.normalization import build_qk_norm
from fairseq_sg.ops import linear_attention, linear_attention_read, linear_attention_state

MAPS = [None, "elu", "relu", "squared"]
NORMS = [None, "l1", "l2", "rms"]
implementations = pytest.mark.parametrize("implementation", ["naive", "chunked"])
causality = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
maps, norms = pytest.mark.parametrize("feature_map", MAPS), pytest.mark.parametrize("norm", NORMS)


def make_raw(
    batch, heads, queries, keys, features, width, feature_map, norm, device, dtype=torch.float64
) -> dict[str, Tensor]:
    """q and k of both signs, with rows of zeros, single zeros, and rows that have no positive number.

    Where they are features already, signs are those of the column, so that no similarity is negative.
    """
    inputs = {
        name: torch.randn(batch, heads, length, size, dtype=torch.float64)
        for name, length, size in (("q", queries, features), ("k", keys, features), ("v", keys, width))
    }
    for name in ("q", "k"):
        x = inputs[name]
        if feature_map is None:
            x.abs_().add_(0.05)
            x[..., 1::2].neg_()
        else:
            x[:, :, 5::11] = -x[:, :, 5::11].abs()
        x[:, :, 3::11] = 0
        x[:, :, 2::11, 0] = 0
        x[..., ::4] *= 3
    if norm == "rms":
        inputs |= {name: torch.rand(features, dtype=torch.float64) + 0.5 for name in ("q_weight", "k_weight")}
    return {name: x.to(device, dtype) for name, x in inputs.items()}


def run_raw(implementation: str, **options):
    """linear_attention as a function of named tensors to named tensors; S and z, if given, are the incoming state."""

    def function(q, k, v, S=None, z=None, **more):  # noqa: N803
        state = None if S is None else (S, z)
        out = linear_attention(q, k, v, state=state, implementation=implementation, **options, **more)
        if not options.get("return_state"):
            return {"out": out}
        return {"out": out[0], "final S": out[1][0], "final z": out[1][1]}

    return function


def prepared(x: Tensor, feature_map, norm, weight, eps: float) -> Tensor:
    """As the modules do it."""
    if feature_map is not None:
        x = build_feature_map(feature_map, x.shape[-1])(x)
    module = build_qk_norm(norm or "none", x.shape[-1]).to(x)
    module.eps = eps
    return module(x) if weight is None else torch.func.functional_call(module, {"weight": weight}, (x,))


def run_prepared(implementation: str, feature_map, qk_norm, norm_eps=1e-6, **options):
    def function(q, k, v, q_weight=None, k_weight=None, **state):
        q, k = (prepared(x, feature_map, qk_norm, w, norm_eps) for x, w in ((q, q_weight), (k, k_weight)))
        return run_raw(implementation, **options)(q, k, v, **state)

    return function


@implementations
@causality
@maps
@norms
@pytest.mark.parametrize("length", [1, 9, 70])
def test_equals_features_made_before(implementation, causal, feature_map, norm, length, device):
    inputs = make_raw(2, 2, length, length, 5, 3, feature_map, norm, device) | make_state(2, 2, 5, 3, device)
    mask = make_mask("left", 2, length, device)
    options = {"feature_map": feature_map, "qk_norm": norm, "norm_eps": 0.1, "eps": 0.3}
    options |= {"causal": causal, "key_padding_mask": mask, "return_state": True}
    raw, before = (with_gradients(f(implementation, **options), inputs) for f in (run_raw, run_prepared))
    assert_all_close(raw, before, rtol=1e-10, atol=1e-10)


@maps
@norms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_features_are_float32(feature_map, norm, dtype, device):
    """From half precision too: those of the same numbers in float32, also under autocast."""
    inputs = make_raw(2, 2, 40, 40, 8, 5, feature_map, norm, device, dtype)
    options = {"feature_map": feature_map, "qk_norm": norm, "causal": True}
    out = linear_attention(**inputs, **options)
    wide = linear_attention(**{name: x.float() for name, x in inputs.items()}, **options)
    assert out.dtype == dtype and torch.equal(out, wide.to(dtype))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(linear_attention(**inputs, **options), out)


@maps
@norms
def test_folded_then_read_equals_cross_attention(feature_map, norm, device):
    inputs = make_raw(2, 2, 7, 50, 8, 5, feature_map, norm, device)
    mask = make_mask("right", 2, 50, device)
    features = {"feature_map": feature_map, "qk_norm": norm, "norm_eps": 0.1}

    def folded(q, k, v, q_weight=None, k_weight=None):
        state = linear_attention_state(k, v, key_padding_mask=mask, k_weight=k_weight, **features)
        return {"out": linear_attention_read(q, state, q_weight=q_weight, **features)}

    expected = with_gradients(run_raw("naive", key_padding_mask=mask, **features), inputs)
    assert_all_close(with_gradients(folded, inputs), expected, rtol=1e-9, atol=1e-9)


@causality
@maps
@norms
@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")], ids=str)
def test_content_of_padded_keys_is_irrelevant(causal, feature_map, norm, garbage, device):
    """Neither features nor gradients take anything from them, those of the weights included."""
    inputs = make_raw(2, 1, 9, 9, 8, 5, feature_map, norm, device, torch.float32)
    mask = make_mask("right", 2, 9, device)
    poisoned = inputs | {"k": inputs["k"].masked_fill(mask[:, None, :, None], garbage)}
    options = {"feature_map": feature_map, "qk_norm": norm, "causal": causal, "key_padding_mask": mask}
    function = run_raw("chunked", return_state=True, **options)
    clean = with_gradients(function, inputs)
    assert_all_close(with_gradients(function, poisoned), clean, rtol=0, atol=0)
    assert (clean["gradient of k"].masked_select(mask[:, None, :, None]) == 0).all()
    states = [linear_attention_state(x["k"], x["v"], key_padding_mask=mask, feature_map=feature_map, qk_norm=norm)
              for x in (inputs, poisoned)]  # fmt: skip
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


@maps
@norms
def test_gradcheck(feature_map, norm, device):
    inputs = make_raw(1, 1, 3, 3, 2, 2, feature_map, norm, device)
    for name in ("q", "k"):  # away from where a map has no derivative
        inputs[name] = torch.where(inputs[name].abs() < 0.1, inputs[name] + 0.3, inputs[name])
    options = {"feature_map": feature_map, "qk_norm": norm, "norm_eps": 0.1, "eps": 0.3, "causal": True}

    def function(*tensors: Tensor) -> Tensor:
        return linear_attention(**dict(zip(inputs, tensors, strict=True)), **options)

    assert torch.autograd.gradcheck(function, tuple(x.requires_grad_() for x in inputs.values()))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"feature_map": "dpfp"}, ValueError, "feature_map is 'dpfp'; choose one of: None, elu, relu, squared"),
        ({"qk_norm": "none"}, ValueError, "qk_norm is 'none'; choose one of: None, l1, l2, rms"),
        ({"qk_norm": "l2", "norm_eps": 0.0}, ValueError, "norm_eps must be positive"),
        ({"qk_norm": "l1", "weight": torch.ones(4)}, ValueError, "the γ of qk_norm 'rms', and qk_norm is 'l1'"),
        ({"qk_norm": "rms", "weight": torch.ones(3)}, ValueError, r"must be \(4,\), not \(3,\)"),
        ({"qk_norm": "rms", "weight": torch.ones(4).long()}, TypeError, "must be a floating-point tensor"),
    ],
    ids=["map", "norm", "eps", "weight-without-rms", "size-of-weight", "dtype-of-weight"],
)
@pytest.mark.parametrize("operator", ["attention-q", "attention-k", "state", "read"])
def test_refused(options, error, message, operator):
    x = torch.rand(1, 1, 3, 4)
    state = linear_attention_state(x, x)
    options = dict(options)
    weight = options.pop("weight", None)
    with pytest.raises(error, match=message):
        if operator == "state":
            linear_attention_state(x, x, k_weight=weight, **options)
        elif operator == "read":
            linear_attention_read(x, state, q_weight=weight, **options)
        else:
            linear_attention(x, x, x, **options, **{f"{operator[-1]}_weight": weight})
