"""``--qk-norm`` against its formulas (Park & Kim 2024, section 4.1), in all precisions, and in linear attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention import build_attention
from fairseq_sg.modules.normalization import QK_NORM_REGISTRY, QKNormalization, build_qk_norm, register_qk_norm
from fairseq_sg.ops import linear_attention
from helpers.configs import config_of

NORMS = ("l1", "l2", "rms")
norms = pytest.mark.parametrize("name", NORMS)
half = pytest.mark.parametrize(
    "dtype,tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)], ids=["fp16", "bf16"]
)


def formula(name: str, x: list, eps: float, gamma: list) -> list:
    """One vector, number by number; ε stands outside the root."""
    if name == "l1":
        norm = sum(abs(v) for v in x)
    elif name == "l2":
        norm = math.sqrt(sum(v * v for v in x))
    else:
        norm = math.sqrt(sum(v * v for v in x) / len(x))
    return [v / (norm + eps) * (g if name == "rms" else 1.0) for v, g in zip(x, gamma)]


def built(name: str, dim: int, eps: float = 1e-6, dtype=torch.float64) -> torch.nn.Module:
    module = QK_NORM_REGISTRY.find(name)(dim, eps=eps).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():  # γ starts at 1, which would hide where it stands
            parameter.copy_(torch.linspace(-1.5, 2.0, dim, dtype=dtype))
    return module


@norms
@pytest.mark.parametrize("eps", [1e-6, 0.25])
@pytest.mark.parametrize("dim", [1, 5, 64])
def test_formula_per_head(name, eps, dim):
    x = torch.randn(2, 3, 4, dim, dtype=torch.float64)
    x[0, 1, 2] = 0.0
    module = built(name, dim, eps)
    gamma = torch.linspace(-1.5, 2.0, dim, dtype=torch.float64).tolist()
    expected = torch.tensor(
        [formula(name, row, eps, gamma) for row in x.reshape(-1, dim).tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(module(x), expected.view_as(x), rtol=1e-6, atol=1e-9)


def test_none_is_the_identity():
    x = torch.randn(2, 3, 4, 5)
    assert build_qk_norm("none", 5)(x) is x


def test_names_and_default_epsilon():
    assert set(QK_NORM_REGISTRY) == {"none", *NORMS}
    assert all(build_qk_norm(name, 4).eps == 1e-6 for name in QK_NORM_REGISTRY)
    with pytest.raises(
        ValueError, match=r"unknown query/key normalization 'l3' \(--qk-norm\): choose from l1, l2, none, rms"
    ):
        build_qk_norm("l3", 4)


def test_gamma_is_learned_starts_at_one_and_is_shared_over_heads():
    assert all(not list(build_qk_norm(name, 6).parameters()) for name in ("none", "l1", "l2"))
    module = build_qk_norm("rms", 6)
    assert [(name, tuple(p.shape)) for name, p in module.named_parameters()] == [("weight", (6,))]
    assert (module.weight == 1).all() and module.weight.requires_grad
    x = torch.randn(2, 1, 4, 6).expand(2, 3, 4, 6)
    with torch.no_grad():
        module.weight.copy_(torch.randn(6))
    out = module(x)
    assert torch.equal(out[:, 0], out[:, 1]) and torch.equal(out[:, 0], out[:, 2])
    out.sum().backward()
    torch.testing.assert_close(
        module.weight.grad, (x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6)).sum((0, 1, 2))
    )


def test_queries_and_keys_have_a_module_each_as_wide_as_a_head():
    from fairseq_sg.modules.attention import LinearAttention

    attention = LinearAttention(24, 3, role="encoder", qk_norm="rms")
    assert attention.q_norm is not attention.k_norm and attention.q_norm.weight is not attention.k_norm.weight
    assert attention.q_norm.weight.shape == attention.k_norm.weight.shape == (8,)


@norms
@half
@pytest.mark.parametrize("value", [300.0, 1e-3, -300.0])
def test_half_precision_accumulates_in_float32(name, dtype, tolerance, value):
    """In float16, 4096 · 300 and 300² are infinite and (10⁻³)² nearly nothing; a bfloat16 sum of ones stalls at 256."""
    x = torch.full((2, 3, 4096), value, dtype=dtype)
    module = built(name, 4096, dtype=dtype)
    out = module(x)
    assert out.dtype == dtype and out.isfinite().all()
    exact = built(name, 4096)
    if name == "rms":
        with torch.no_grad():
            exact.weight.copy_(module.weight)
    torch.testing.assert_close(out.double(), exact(x.double()), rtol=tolerance, atol=0)


@norms
@half
def test_gradients_in_half_precision(name, dtype, tolerance):
    x = (300 * torch.randn(5, 64)).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    weights = torch.randn(5, 64).to(dtype)
    (built(name, 64, dtype=dtype)(x) * weights * 100).sum().backward()
    module = built(name, 64)
    (module(exact) * weights.double() * 100).sum().backward()
    torch.testing.assert_close(
        x.grad.double(), exact.grad, rtol=10 * tolerance, atol=tolerance * exact.grad.abs().max().item()
    )


@norms
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
def test_zero_vector(name, dtype):
    """0 / (0 + ε) with derivative 1/ε, which float16 cannot hold: only its value is tested there."""
    x = torch.zeros(2, 3, 4, dtype=dtype, requires_grad=True)
    module = build_qk_norm(name, 4).to(dtype)
    out = module(x)
    assert (out == 0).all()
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 1e6), rtol=1e-2, atol=0)
    assert (build_qk_norm(name, 4).half()(torch.zeros(4, dtype=torch.float16)) == 0).all()


@norms
def test_gradcheck(name):
    module = built(name, 5, eps=0.1)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    x = (x + 0.2 * x.sign()).requires_grad_()  # away from the corner of |x|
    assert torch.autograd.gradcheck(lambda x, *_: module(x), (x, *module.parameters()))
    assert torch.autograd.gradgradcheck(lambda x, *_: module(x), (x, *module.parameters()))


@norms
def test_strided_input(name):
    module = built(name, 8)
    x = torch.randn(4, 8, 3, 5, dtype=torch.float64).permute(0, 2, 3, 1)
    assert not x.is_contiguous()
    torch.testing.assert_close(module(x), module(x.contiguous()), rtol=1e-14, atol=1e-15)
    assert torch.equal(module(x.contiguous()[..., :0, :]), x[..., :0, :])


@settings(derandomize=True, max_examples=40)
@given(
    name=st.sampled_from(["l1", "l2"]),
    causal=st.booleans(),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 5)),
    seed=st.integers(0, 2**16),
)
def test_scale_of_queries_cancels_in_the_denominator(name, causal, shape, seed):
    """With an ε near 0, Q̂ is only a positive scale per position of φ(Q), which numerator and denominator share."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.01 for _ in range(2))
    v = torch.randn(shape, generator=generator, dtype=torch.float64)
    module = QK_NORM_REGISTRY.find(name)(shape[-1], eps=1e-30)
    plain, normalized = (linear_attention(x, k, v, causal=causal, eps=1e-30) for x in (q, module(q)))
    torch.testing.assert_close(normalized, plain, rtol=1e-9, atol=1e-11)


@norms
def test_norm_of_keys_weighs_positions_and_gamma_of_queries_does_not_cancel(name):
    q, k, v = (torch.rand(1, 1, 4, 3, dtype=torch.float64) + 0.1 for _ in range(3))
    k[:, :, 0] *= 50  # this key drowns the others unless it is normalized
    plain, normalized = (linear_attention(q, keys, v, eps=1e-30) for keys in (k, build_qk_norm(name, 3).double()(k)))
    assert (plain - v[:, :, :1]).abs().max() < 0.1 < (normalized - v[:, :, :1]).abs().max()
    if name == "rms":
        module = QK_NORM_REGISTRY.find(name)(3, eps=1e-30).double()
        torch.testing.assert_close(linear_attention(module(q), k, v, eps=1e-30), plain)
        with torch.no_grad():
            module.weight.copy_(torch.tensor([3.0, 1.0, 0.2]))
        assert not torch.allclose(linear_attention(module(q), k, v, eps=1e-30), plain, rtol=1e-3)


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_every_role_normalizes(role):
    config = config_of(8, 2, qk_norm="l2")
    normalized = build_attention("linear", config, role)
    config.qk_norm = "none"
    plain = build_attention("linear", config, role)
    plain.load_state_dict(normalized.state_dict())
    x = 3 * torch.randn(6, 2, 8)
    assert not torch.allclose(normalized(x, x)[0], plain(x, x)[0], rtol=1e-3, atol=1e-3)


@dataclass
class PowerOptions:
    norm_power: float = field(default=2.0, metadata={"help": "p of the norm", "above": 0})


def test_options_of_a_normalization_are_options_of_models_and_reach_it():
    """As those of every other mechanism: on the command line, in the configuration, and refused where unused."""
    pytest.importorskip("fairseq")
    from fairseq_sg.models import sg_transformer

    try:

        @register_qk_norm("power")
        class PowerNormalization(QKNormalization):
            options = PowerOptions

            def __init__(self, dim, *, norm_power=2.0):
                super().__init__(dim)
                self.power = norm_power

            def forward(self, x):
                return x / x.norm(self.power, dim=-1, keepdim=True)

        assert sg_transformer.configuration.dataclass().norm_power == 2.0
        attention = build_attention("linear", config_of(8, 2, qk_norm="power", norm_power=3.0), "encoder")
        assert (attention.q_norm.power, attention.k_norm.power) == (3.0, 3.0)
        config = sg_transformer.resolve(SimpleNamespace(encoder_attention="linear", qk_norm="power", norm_power=3.0))
        assert config.norm_power == 3.0
        with pytest.raises(UsageError, match="--norm-power 3.0 has no effect .* an option of: power query/key norm"):
            sg_transformer.resolve(SimpleNamespace(encoder_attention="linear", norm_power=3.0))
    finally:
        QK_NORM_REGISTRY.pop("power")
        for watcher in QK_NORM_REGISTRY.watchers:
            watcher()
    assert not hasattr(sg_transformer.configuration.dataclass(), "norm_power")
