"""Conditional products in Triton against float64: blocks and parts, rows without a matrix, precision, strides."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

from fairseq_sg.ops import cvmm, cvmm_sorted, sort_selection
from helpers.comparison import Operations, assert_all_close, with_gradients
from helpers.operators.cvmm import make, make_selection
from helpers.pairs import pairs
from helpers.triton_comparison import DEVICE, compare, count_launches, uninitialized_memory_is_nan  # noqa: F401

kernels = importlib.import_module("fairseq_sg.ops.cvmm.triton")

# N, K, M, L: blocks have 16 to 64 rows by what a matrix has on average, and up to 64 columns
SHAPES = [(1, 1, 1, 1), (1, 5, 3, 2), (33, 3, 7, 5), (70, 4, 40, 70), (150, 2, 24, 16), (8, 1, 140, 130)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "N{}-K{}-M{}-L{}".format(*s))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def product(implementation, *, selection):
    return lambda x, matrices: {"out": cvmm(x, selection, matrices, implementation=implementation)}


def mixture(implementation, *, experts, complete=False):
    """Both products of a mixture of experts."""

    def run(x, a, b, weights):
        routing = sort_selection(experts, len(a), complete=complete)
        u = cvmm_sorted(x, routing, a, from_tokens=True, implementation=implementation)
        options = {"relu": True, "weights": weights, "implementation": implementation}
        return {"u": u, "y": cvmm_sorted(u, routing, b, to_tokens=True, **options)}

    return run


def make_mixture(tokens, chosen, count, width, size, dtype, missing=False):
    experts = torch.stack([torch.randperm(count)[:chosen] for _ in range(tokens)]).to(DEVICE)
    if missing:
        experts[::3] = -1
        experts[1, 0] = count + 3
    inputs = {
        "x": torch.randn(tokens, width, device=DEVICE).to(dtype),
        "a": torch.randn(count, width, size, device=DEVICE).to(dtype),
        "b": torch.randn(count, size, width, device=DEVICE).to(dtype),
        "weights": torch.rand(tokens, chosen, device=DEVICE),
    }
    return experts, inputs


@shapes
@pytest.mark.parametrize("kind", ["random", "last", "missing", "nothing"])
def test_values_and_gradients(shape, kind):
    selection = make_selection(kind, shape[0], shape[1], DEVICE)
    results = compare(product, make(shape, DEVICE, torch.float32), "grouped", selection=selection)
    unused = [k for k in range(shape[1]) if not (selection == k).any()]
    assert (results["gradient of matrices"][unused] == 0).all()
    assert (results["out"][selection < 0] == 0).all() and (results["gradient of x"][selection < 0] == 0).all()


@dtypes
@pytest.mark.parametrize(
    ("chosen", "width", "size", "missing"), [(1, 12, 8, False), (3, 24, 20, True), (2, 48, 144, False)]
)
def test_mixture(dtype, chosen, width, size, missing):
    experts, inputs = make_mixture(17, chosen, 4, width, size, dtype, missing)
    results = compare(mixture, inputs, "grouped", experts=experts, complete=not missing)
    if missing:
        assert (results["y"][::3] == 0).all() and (results["gradient of weights"][::3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_tiles(dtype):
    """Of half precision alone, of 128 rows and columns, where widths are multiples of 16."""
    selection = make_selection("missing", 420, 2, DEVICE)
    compare(product, make((420, 2, 32, 144), DEVICE, dtype), "grouped", selection=selection)


@pytest.mark.parametrize("from_tokens", [False, True])
@pytest.mark.parametrize("to_tokens", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_every_form(from_tokens, to_tokens, relu):
    """With weights where there may be some."""
    experts, inputs = make_mixture(11, 2, 3, 9, 6, torch.float32, missing=True)
    x = inputs["x"] if from_tokens else torch.randn(22, 9, device=DEVICE)
    routing = sort_selection(experts, 3)
    options = {"from_tokens": from_tokens, "to_tokens": to_tokens, "relu": relu}

    def run(implementation):
        return lambda x, matrices, weights=None: {
            "out": cvmm_sorted(x, routing, matrices, weights=weights, implementation=implementation, **options)
        }

    tensors = {"x": x, "matrices": inputs["a"]} | ({} if from_tokens else {"weights": inputs["weights"]})
    compare(run, tensors, "grouped")


@pairs(
    counts=[(64, 0, 33, 32, 0, 1), (0, 31, 65, 0), (100,), (32, 32, 64)],
    missing=[0, 5],
    cut=[{"SPLIT": 32, "PARTS": 128}, {"SPLIT": 16, "PARTS": 3}],
)
def test_matrices_with_many_rows_are_split(counts, missing, cut, monkeypatch):
    for name, value in cut.items():
        monkeypatch.setattr(kernels, name, value)
    launched = count_launches(monkeypatch, kernels)
    selection = torch.tensor([e for e, count in enumerate(counts) for _ in range(count)] + [-1] * missing)
    selection = selection[torch.randperm(len(selection))].to(DEVICE)
    inputs = make((len(selection), len(counts), 20, 6), DEVICE, torch.float32)
    results = compare(product, inputs, "grouped", selection=selection)
    assert "_sum_of_parts_kernel" in launched
    unused = [e for e, count in enumerate(counts) if count == 0]
    assert (results["gradient of matrices"][unused] == 0).all()


def test_parts_are_added_up_in_float32(monkeypatch):
    monkeypatch.setattr(kernels, "SPLIT", 64)
    x = torch.ones(256, 1, dtype=torch.bfloat16, device=DEVICE)
    matrices = torch.ones(1, 1, 1, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    grad = torch.full((256, 1), 4.0, dtype=torch.bfloat16, device=DEVICE)
    grad[:192:64], grad[192] = 5.0, 1.0
    out = cvmm(x, torch.zeros(256, dtype=torch.long, device=DEVICE), matrices, implementation="triton")
    out.backward(grad)
    assert matrices.grad.item() == 1024.0  # 3 · 257 + 253, and bfloat16 does not hold 257


def test_gradient_of_weights_is_float32():
    x = torch.ones(1, 257, dtype=torch.bfloat16, device=DEVICE)
    weights = torch.ones(1, 1, device=DEVICE, requires_grad=True)
    routing = sort_selection(torch.zeros(1, 1, dtype=torch.long, device=DEVICE), 1, complete=True)
    out = cvmm_sorted(x, routing, torch.ones_like(x).view(1, 257, 1), weights=weights, implementation="triton")
    out.backward(torch.ones_like(out))
    assert weights.grad.item() == 257.0  # which bfloat16 does not hold


def test_more_matrices_than_are_counted_at_once():
    selection = torch.tensor([299, 0, 256, 255, 299, 7], device=DEVICE)
    x, matrices = make((6, 300, 3, 2), DEVICE, torch.float32).values()
    out = cvmm(x, selection, matrices, implementation="triton")
    torch.testing.assert_close(out, cvmm(x, selection, matrices, implementation="naive"))


@pytest.mark.parametrize("garbage", [math.nan, math.inf], ids=str)
def test_rows_without_matrix_are_not_read(garbage):
    experts, inputs = make_mixture(20, 2, 3, 8, 5, torch.float32, missing=True)
    routing, none = sort_selection(experts, 3), experts == -1
    rows = torch.randn(40, 8, device=DEVICE)
    grad = torch.randn(20, 5, device=DEVICE)

    def results(x, weights, grad):
        leaves = [t.clone().requires_grad_() for t in (x, inputs["a"], weights)]
        options = {"to_tokens": True, "relu": True, "weights": leaves[2], "implementation": "triton"}
        out = cvmm_sorted(leaves[0], routing, leaves[1], **options)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    clean = results(rows, inputs["weights"], grad)
    poisoned = results(
        rows.masked_fill(routing.without_matrix, garbage),
        inputs["weights"].masked_fill(none, garbage),
        grad.masked_fill(none.all(1, keepdim=True), garbage),
    )
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def test_relu_is_that_of_torch():
    """Also of what is no number, and of 0, where its derivative is 0."""
    x = torch.tensor([[math.nan], [-1.0], [0.0], [2.0], [-math.inf]], device=DEVICE)
    routing = sort_selection(torch.zeros(5, dtype=torch.long, device=DEVICE), 1, complete=True)
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for implementation in ("triton", "naive"):
            leaf = x.to(dtype, copy=True).requires_grad_()
            matrix = torch.full((1, 1, 1), 3.0, dtype=dtype, device=DEVICE)
            out = cvmm_sorted(leaf, routing, matrix, relu=True, implementation=implementation)
            out.backward(torch.ones_like(out))
            found.append(torch.cat([out, leaf.grad]))
        torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@dtypes
def test_layouts(dtype):
    """Columns first, every other row, one row for all, transposed matrices and gradients, and one number expanded."""
    experts, inputs = make_mixture(20, 2, 3, 8, 6, dtype)
    routing = sort_selection(experts, 3, complete=True)

    def results(x, matrices, weights, grad):
        leaves = [t.detach().requires_grad_() for t in (x, matrices, weights)]
        options = {"to_tokens": True, "weights": leaves[2], "implementation": "triton"}
        out = cvmm_sorted(leaves[0], routing, leaves[1], **options)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    x = torch.randn(40, 8, device=DEVICE).to(dtype)
    one = x[:1].expand(40, 8)
    strided = (x.t().contiguous().t(), x.repeat_interleave(2, dim=0)[::2], one)
    matrices = inputs["a"].transpose(1, 2).contiguous().transpose(1, 2)
    weights = inputs["weights"].t().contiguous().t()
    grad = torch.randn(6, 20, device=DEVICE).to(dtype).t()
    ones = torch.ones((), dtype=dtype, device=DEVICE).expand(20, 6)
    for rows, gradient in zip(strided, (grad, ones, ones), strict=True):
        assert not rows.is_contiguous() and not gradient.is_contiguous()
        found = results(rows, matrices, weights, gradient)
        expected = results(*(t.contiguous() for t in (rows, matrices, weights, gradient)))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("from_tokens", [False, True])
def test_no_rows(from_tokens):
    routing = sort_selection(torch.zeros(0, 2, dtype=torch.long, device=DEVICE), 3)
    x = torch.randn(0, 8, device=DEVICE, requires_grad=True)
    matrices = torch.randn(3, 8, 4, device=DEVICE, requires_grad=True)
    options = {"from_tokens": from_tokens, "to_tokens": not from_tokens, "implementation": "triton"}
    out = cvmm_sorted(x, routing, matrices, **options)
    out.sum().backward()
    assert out.shape == (0, 4) and x.grad.shape == (0, 8) and (matrices.grad == 0).all()


def test_only_the_gradients_that_are_wanted(monkeypatch):
    experts, inputs = make_mixture(9, 2, 3, 8, 5, torch.float32)
    routing, x = sort_selection(experts, 3, complete=True), torch.randn(18, 8, device=DEVICE)
    every = None
    for wanted, expected in (
        ("xmw", ["_grad_rows_kernel", "_grad_matrices_kernel"]),
        ("x", ["_grad_rows_kernel"]),
        ("w", ["_grad_rows_kernel"]),
        ("m", ["_grad_matrices_kernel"]),
    ):
        leaves = {"x": x, "m": inputs["a"], "w": inputs["weights"]}
        leaves = {name: t.detach().clone().requires_grad_(name in wanted) for name, t in leaves.items()}
        with monkeypatch.context() as patch:
            launched = count_launches(patch, kernels)
            options = {"to_tokens": True, "relu": True, "weights": leaves["w"], "implementation": "triton"}
            cvmm_sorted(leaves["x"], routing, leaves["m"], **options).sum().backward()
        assert launched == ["_rows_kernel", *expected]
        every = every or {name: t.grad for name, t in leaves.items()}
        for name, leaf in leaves.items():
            assert torch.equal(leaf.grad, every[name]) if name in wanted else leaf.grad is None


def test_the_host_waits_for_nothing_and_nothing_is_sorted_into_copies():
    experts, inputs = make_mixture(40, 3, 3, 8, 5, torch.float32, missing=True)
    routing = sort_selection(experts, 3)
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    kept = []
    with (
        Operations() as operations,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t),
    ):
        u = cvmm_sorted(leaves["x"], routing, leaves["a"], from_tokens=True, implementation="triton")
        options = {"relu": True, "weights": leaves["weights"], "implementation": "triton"}
        y = cvmm_sorted(u, routing, leaves["b"], to_tokens=True, **options)
        y.backward(torch.ones_like(y))
    assert not {"index", "index_select", "index_add", "index_put", "_local_scalar_dense"} & set(operations.names)
    assert "counts_on_host" not in vars(routing)
    # x, A; u, B, s
    assert kept == [(40, 8), (3, 8, 5), (120, 5), (3, 5, 8), (40, 3)]


def test_results_are_the_same_again():
    experts, inputs = make_mixture(12, 2, 2, 8, 70, torch.float32, missing=True)
    assert_all_close(*(with_gradients(mixture("triton", experts=experts), inputs) for _ in range(2)), rtol=0, atol=0)


def test_autocast_leaves_weights_as_they_are():
    routing = sort_selection(torch.zeros(1, 1, dtype=torch.long, device=DEVICE), 1, complete=True)
    weights = torch.full((1, 1), 259 / 256, device=DEVICE)  # 1.015625 in bfloat16
    x, matrices = torch.ones(1, 1, device=DEVICE), torch.full((1, 1, 1), 3.0, device=DEVICE)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        out = cvmm_sorted(x, routing, matrices, to_tokens=True, weights=weights, implementation="triton")
    assert out.dtype == torch.bfloat16 and out.item() == 3.03125  # 3.03515625 as bfloat16, and not 3.046875


def test_second_derivatives_are_refused():
    x = torch.randn(4, 3, device=DEVICE, requires_grad=True)
    selection = torch.zeros(4, dtype=torch.long, device=DEVICE)
    with pytest.raises(RuntimeError, match="no second derivative .*implementation='naive' has one"):
        out = cvmm(x, selection, torch.ones(2, 3, 2, device=DEVICE), implementation="triton")
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_refused_with_the_reason():
    single, double = (torch.ones(4, 2, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.float64))
    routing = sort_selection(torch.zeros(4, 1, dtype=torch.long, device=DEVICE), 1)
    message = "cvmm cannot run its implementation 'triton' here: .*not float64"
    with pytest.raises(ValueError, match=message):
        cvmm_sorted(double, routing, torch.ones(1, 2, 2).to(double), implementation="triton")
    with pytest.raises(ValueError, match=message):
        cvmm_sorted(single, routing, torch.ones(1, 2, 2).to(single), weights=double[:, :1], implementation="triton")
