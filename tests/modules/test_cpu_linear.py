"""Projections by oneDNN: values and derivatives are those of torch's, and the choice follows the CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairseq_sg.modules.cpu import linear as module
from fairseq_sg.modules.cpu.linear import ROWS, Linear, linear, onednn_is_faster

needs_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch has no oneDNN",
)


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def chosen(request, monkeypatch):
    """Takes oneDNN, or not, whatever the CPU is."""
    if request.param and needs_onednn.args[0]:
        pytest.skip(needs_onednn.kwargs["reason"])
    monkeypatch.setattr(module, "onednn_is_faster", lambda: request.param)
    return request.param


SHAPES = [(ROWS, 1, 1), (ROWS - 1, 8, 3), (ROWS + 1, 17, 10), (1000, 128, 256), (2 * ROWS + 7, 3, 513)]
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: x.repeat_interleave(2, -1)[:, ::2],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "one row, repeated": lambda x: x[:1].expand(len(x), -1),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows,inputs,outputs", SHAPES)
def test_values_and_gradients_are_those_in_float64(rows, inputs, outputs, layout, bias, chosen):
    torch.manual_seed(rows)
    x, w, b = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    x = LAYOUTS[layout](x)
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (x, w, b)]
    ours = [None if t is None else t.detach().requires_grad_() for t in (x, w, b)]
    weight = torch.randn(rows, outputs)
    expected, found = F.linear(*leaves), linear(*ours)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    (expected * weight.double()).sum().backward()
    (found * weight).sum().backward()
    for leaf, mine in zip(leaves, ours, strict=True):
        if leaf is not None:
            torch.testing.assert_close(mine.grad.double(), leaf.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(ROWS, 1), (2, ROWS, 1), (1, 2, 3, ROWS // 2), (ROWS, 0), (0, 5), (5,), (3, 4)])
def test_any_leading_shape(shape, chosen):
    x, w = torch.randn(*shape, 6), torch.randn(4, 6)
    torch.testing.assert_close(linear(x, w), F.linear(x, w))


def test_gradients_of_a_sum_and_of_frozen_parts(chosen):
    """The gradient of a sum is one number with strides of 0."""
    x, w, b = torch.randn(ROWS, 5), torch.randn(3, 5), torch.randn(3)
    for frozen in range(3):
        parts = [part.clone().requires_grad_(place != frozen) for place, part in enumerate((x, w, b))]
        linear(*parts).sum().backward()
        expected = x.new_ones(ROWS, 3) @ w, x.new_ones(3, ROWS) @ x, x.new_full((3,), ROWS)
        for place, part in enumerate(parts):
            if place == frozen:
                assert part.grad is None
            else:
                torch.testing.assert_close(part.grad, expected[place])


def test_second_derivatives(chosen):
    torch.manual_seed(0)
    x, w = torch.randn(ROWS, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)

    def penalty(function):
        (of_x,) = torch.autograd.grad(function(x, w).square().sum(), x, create_graph=True)
        return torch.autograd.grad(of_x.square().sum(), (x, w))

    for found, expected in zip(penalty(linear), penalty(F.linear), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@needs_onednn
def test_only_large_float32_products_outside_of_autocast(monkeypatch):
    monkeypatch.setattr(module, "onednn_is_faster", lambda: True)
    taken = []
    monkeypatch.setattr(module._Product, "apply", lambda x, w, b: taken.append(x.dtype) or F.linear(x, w, b))
    large, small, weight = torch.randn(ROWS, 4), torch.randn(ROWS - 1, 4), torch.randn(2, 4)
    linear(large, weight)
    assert taken == [torch.float32]
    linear(small, weight)
    linear(large.double(), weight.double())
    linear(large.bfloat16(), weight.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(large, weight).dtype == torch.bfloat16
    linear(large.to("meta"), weight.to("meta"))
    assert taken == [torch.float32]


@pytest.mark.parametrize("vendor,expected", [("AuthenticAMD", True), ("GenuineIntel", False), (None, False)])
@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])
@needs_onednn
def test_choice(vendor, expected, capability, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    path = tmp_path / f"cpuinfo-{capability}"
    if vendor:
        path.write_text(f"processor : 0\nvendor_id : {vendor}\n")
    assert onednn_is_faster(str(path)) == (expected and capability == "AVX512")


@needs_onednn
def test_few_numbers_of_rows_are_compiled(monkeypatch):
    monkeypatch.setattr(module, "onednn_is_faster", lambda: True)
    seen, weight = [], torch.randn(2, 4)
    monkeypatch.setattr(module._Product, "apply", lambda x, w, b: seen.append(len(x)) or F.linear(x, w, b))
    for rows in range(ROWS, 4 * ROWS):
        assert linear(torch.ones(rows, 4), weight).shape == (rows, 2)
        assert rows <= seen[-1] < 1.125 * rows
    assert len(set(seen)) == 17
    assert [module.round_number(rows) for rows in (1, 15, 16, 17, 31, 32, 33)] == [1, 15, 16, 18, 32, 32, 36]


def test_module_is_a_drop_in(chosen):
    torch.manual_seed(1)
    ours = Linear(6, 4)
    torch.manual_seed(1)
    theirs = nn.Linear(6, 4)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, ROWS, 6)
    torch.testing.assert_close(ours(x), theirs(x))
    assert isinstance(ours, nn.Linear) and repr(ours) == repr(theirs)
