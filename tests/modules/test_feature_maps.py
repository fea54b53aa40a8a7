"""Feature maps of linear attention: values, precision and gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY, FeatureMap, build_feature_map

every_map = pytest.mark.parametrize("name", sorted(FEATURE_MAP_REGISTRY))


def elu(head_dim: int = 4) -> FeatureMap:
    return build_feature_map("elu", head_dim)


def test_unknown_name():
    with pytest.raises(ValueError, match=r"unknown feature map 'gelu' \(--feature-map\): choose from .*elu"):
        build_feature_map("gelu", 4)


@every_map
def test_interface_of_a_feature_map(name):
    feature_map = build_feature_map(name, 6).double()
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    for mapped in (feature_map.queries(x), feature_map.keys(x)):
        assert mapped.shape == (2, 3, 5, feature_map.features) and mapped.dtype == x.dtype
    # Each position by itself: attention may then be causal, padded and decoded step by step.
    assert torch.equal(feature_map.keys(x)[:, :, 2:3], feature_map.keys(x[:, :, 2:3]))
    strided = torch.randn(2, 5, 6, 3, dtype=torch.float64).permute(0, 3, 1, 2)
    torch.testing.assert_close(feature_map.keys(strided), feature_map.keys(strided.contiguous()))


def test_a_map_may_treat_queries_and_keys_apart():
    class Apart(FeatureMap):
        def queries(self, q):
            return q + 1

        def keys(self, k):
            return k - 1

    x = torch.zeros(2)
    assert (Apart(2).queries(x) == 1).all() and (Apart(2).keys(x) == -1).all()


def test_elu_plus_one():
    x = torch.cat([torch.linspace(-20, 20, 4001, dtype=torch.float64), torch.tensor([0.0, -0.0], dtype=torch.float64)])
    torch.testing.assert_close(elu()(x), F.elu(x) + 1, rtol=1e-14, atol=1e-15)
    assert torch.equal(elu().queries(x), elu().keys(x)) and elu(7).features == 7 and not list(elu().parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("value", [-1.0, -5.0, -8.0, -12.0])
def test_elu_does_not_cancel_in_half_precision(dtype, value):
    x = torch.tensor([value], dtype=dtype)
    got, exact = elu()(x).item(), math.exp(value)
    assert abs(got - exact) / exact < 1e-2
    if value <= -8:  # what the usual form gives: the test is not vacuous
        assert abs((F.elu(x) + 1).item() - exact) / exact > 0.1


def test_elu_gradient_and_its_corner():
    x = torch.tensor([-1e4, -30.0, -1.0, -0.0, 0.0, 1.0, 1e4], dtype=torch.float64, requires_grad=True)
    elu()(x).sum().backward()
    expected = torch.tensor([0.0, math.exp(-30), math.exp(-1), 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(x.grad, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_elu_has_no_nan_at_the_ends(dtype):
    x = torch.tensor(
        [-1e4, 1e4, -math.inf, torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype, requires_grad=True
    )
    out = elu()(x)
    out.sum().backward()
    assert out.isfinite().all() and (out >= 0).all()
    assert x.grad.tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert elu()(torch.tensor([math.nan], dtype=dtype)).isnan().all()


def test_elu_gradcheck():
    x = torch.randn(3, 7, dtype=torch.float64)
    x = (x + 0.1 * x.sign()).requires_grad_()
    assert torch.autograd.gradcheck(elu(), (x,))
    assert torch.autograd.gradgradcheck(elu(), (x,))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.floats(-80, 1e6, width=32), min_size=2, max_size=20))
def test_elu_is_positive_and_monotone(values):
    x = torch.tensor(sorted(values), dtype=torch.float32)
    out = elu()(x)
    assert (out > 0).all() and (out.diff() >= 0).all()
