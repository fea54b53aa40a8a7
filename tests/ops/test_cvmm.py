"""Conditional products against their equation: values, gradients, matrices without rows, rows without a matrix."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fairseq_sg.ops import cvmm, cvmm_sorted, sort_selection
from fairseq_sg.ops.cvmm import FEW_ROWS, blocks, grouped
from fairseq_sg.ops.dispatch import ENVIRONMENT_VARIABLE
from fairseq_sg.ops.operators import OPERATORS
from helpers.comparison import Operations, assert_all_close, assert_as_exact_as, with_gradients
from helpers.operators.cvmm import make, make_selection

# N, K, M, L: one row, fewer rows than matrices, sizes that fill 16 bytes and sizes that do not
SHAPES = [(1, 1, 1, 1), (1, 5, 3, 2), (3, 7, 5, 4), (40, 4, 8, 16), (33, 3, 7, 5), (65, 2, 16, 9)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "N{}-K{}-M{}-L{}".format(*s))
implementations = pytest.mark.parametrize("implementation", ["naive", "grouped", "blocks"])
fast = pytest.mark.parametrize("implementation", ["grouped", "blocks"])
SELECTIONS = ["random", "one", "last", "missing", "nothing"]


def equation(x, selection, matrices):
    """out[n, l] = Σ_m x[n, m] M[S[n], m, l] (Csordás 2023, F.2.1), and 0 where S[n] selects no matrix."""
    none = (selection < 0) | (selection >= len(matrices))
    product = torch.einsum("nm,nml->nl", x, matrices[selection.masked_fill(none, 0)])
    return product.masked_fill(none.unsqueeze(1), 0.0)


@shapes
@implementations
@pytest.mark.parametrize("kind", SELECTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_the_equation(shape, implementation, kind, dtype, device):
    inputs = make(shape, device, dtype)
    selection = make_selection(kind, shape[0], shape[1], device)
    run = lambda x, matrices: {"out": cvmm(x, selection, matrices, implementation=implementation)}  # noqa: E731
    reference = lambda x, matrices: {"out": equation(x, selection, matrices)}  # noqa: E731
    got, expected = (with_gradients(f, inputs) for f in (run, reference))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    assert_all_close(got, expected, rtol=tolerance, atol=tolerance)
    unused = [k for k in range(shape[1]) if not (selection == k).any()]
    assert (got["gradient of matrices"][unused] == 0).all()


@fast
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_exact_as_the_equation(implementation, dtype, device):
    """Also with widths that are no multiple of 16 bytes."""
    for shape in ((70, 4, 24, 40), (70, 4, 13, 21)):
        inputs = make(shape, device, dtype)
        selection = make_selection("missing", shape[0], shape[1], device)
        run = lambda x, matrices: {"out": cvmm(x, selection, matrices, implementation=implementation)}  # noqa: E731
        reference = lambda x, matrices: {"out": equation(x, selection, matrices)}  # noqa: E731
        exact = with_gradients(reference, {name: x.double() for name, x in inputs.items()})
        got, naive = (with_gradients(f, inputs) for f in (run, reference))
        assert_as_exact_as(got, naive, exact)


@implementations
def test_gradcheck(implementation, device):
    for shape, kind in (((5, 3, 4, 2), "random"), ((4, 6, 3, 3), "missing")):
        selection = make_selection(kind, shape[0], shape[1], device)
        inputs = [x.requires_grad_() for x in make(shape, device).values()]
        function = lambda x, m: cvmm(x, selection, m, implementation=implementation)  # noqa: E731
        assert torch.autograd.gradcheck(function, inputs)


def test_second_derivative(device):
    selection = make_selection("random", 4, 3, device)
    x, matrices = (t.requires_grad_() for t in make((4, 3, 2, 2), device).values())
    for implementation in ("grouped", "blocks"):
        with pytest.raises(RuntimeError, match=r"no second derivative .* implementation='naive' has one"):
            out = cvmm(x, selection, matrices, implementation=implementation)
            torch.autograd.grad(out.sum(), x, create_graph=True)
    naive = lambda x, m: cvmm(x, selection, m, implementation="naive")  # noqa: E731
    assert torch.autograd.gradgradcheck(naive, (x, matrices))


@implementations
def test_garbage_in_rows_without_matrix_reaches_nothing(implementation, device):
    """Such rows of the output, and of x's gradient, are exactly 0, whatever x or the incoming gradient has there."""
    for garbage in (1e30, float("nan"), float("inf")):
        inputs = make((30, 3, 8, 4), device, torch.float32)
        selection = make_selection("missing", 30, 3, device)
        none = selection < 0
        clean = cvmm(inputs["x"], selection, inputs["matrices"], implementation=implementation)
        x = inputs["x"].masked_fill(none.unsqueeze(1), garbage).requires_grad_()
        matrices = inputs["matrices"].requires_grad_()
        out = cvmm(x, selection, matrices, implementation=implementation)
        assert torch.equal(out, clean) and (out[none] == 0).all()
        grad = torch.ones_like(out).masked_fill(none.unsqueeze(1), garbage)
        out.backward(grad)
        assert (x.grad[none] == 0).all() and x.grad.isfinite().all() and matrices.grad.isfinite().all()


@fast
def test_no_rows(implementation, device):
    x = torch.randn(0, 8, device=device, requires_grad=True)
    matrices = torch.randn(3, 8, 4, device=device, requires_grad=True)
    out = cvmm(x, torch.zeros(0, dtype=torch.long, device=device), matrices, implementation=implementation)
    out.sum().backward()
    assert out.shape == (0, 4) and x.grad.shape == (0, 8) and (matrices.grad == 0).all()


@implementations
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
def test_dtypes_of_a_selection_and_layouts_of_the_operands(implementation, dtype, device):
    inputs = make((20, 4, 6, 8), device)
    selection = make_selection("random", 20, 4, device)
    expected = equation(inputs["x"], selection, inputs["matrices"])
    x = inputs["x"].t().contiguous().t()
    matrices = inputs["matrices"].transpose(1, 2).contiguous().transpose(1, 2)
    out = cvmm(x, selection.to(dtype).repeat(2)[:20], matrices, implementation=implementation)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(cvmm(x, selection + 4, matrices, implementation=implementation), torch.zeros_like(expected))


@fast
def test_more_matrices_than_a_small_dtype_counts(implementation, device):
    x, matrices = torch.randn(2, 3, device=device), torch.randn(300, 3, 2, device=device)
    selection = torch.tensor([7, 255], device=device)
    small, large = (
        cvmm(x, selection.to(dtype), matrices, implementation=implementation) for dtype in (torch.uint8, torch.int64)
    )
    assert torch.equal(small, large)


# Several matrices a token, on one sort.


def mixture(x, experts, weights, a, b, implementation, complete):
    """As the docstring of cvmm_sorted has it."""
    routing = sort_selection(experts, len(a), complete=complete)
    u = cvmm_sorted(x, routing, a, from_tokens=True, implementation=implementation)
    return cvmm_sorted(u, routing, b, to_tokens=True, relu=True, weights=weights, implementation=implementation)


@implementations
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("chosen", [1, 3])
def test_mixture_of_sorted_products(implementation, missing, chosen, device):
    tokens, experts, width, size = 17, 5, 6, 4
    selection = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)]).to(device)
    if missing:
        selection[::3] = -1
        selection[4, 0] = experts + 3
    inputs = {
        "x": torch.randn(tokens, width, dtype=torch.float64, device=device),
        "weights": torch.rand(tokens, chosen, dtype=torch.float64, device=device),
        "a": torch.randn(experts, width, size, dtype=torch.float64, device=device),
        "b": torch.randn(experts, size, width, dtype=torch.float64, device=device),
    }

    def loops(x, weights, a, b):
        rows = []
        for n in range(tokens):
            row = torch.zeros(width, dtype=torch.float64, device=device)
            for k in range(chosen):
                e = int(selection[n, k])
                if 0 <= e < experts:
                    row = row + weights[n, k] * (x[n] @ a[e]).relu() @ b[e]
            rows.append(row)
        return {"y": torch.stack(rows)}

    run = lambda **tensors: {  # noqa: E731
        "y": mixture(experts=selection, implementation=implementation, complete=not missing, **tensors)
    }
    assert_all_close(with_gradients(run, inputs), with_gradients(loops, inputs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("wanted", [("x", "weights", "a", "b"), ("x",), ("weights",), ("a", "b")], ids="-".join)
def test_several_blocks_a_matrix(rows, missing, wanted, device, monkeypatch):
    """Blocks of so many rows, matrices without any, and any choice of gradients."""
    tokens, experts, width, size = 23, 6, 8, 4
    monkeypatch.setattr(blocks, "BLOCK", rows * width)
    selection = torch.randint(0, experts - 1, (tokens, 3), device=device)  # a token may select a matrix twice
    if missing:
        selection[::4] = -1
    tensors = {
        "x": torch.randn(tokens, width, dtype=torch.float64, device=device),
        "weights": torch.rand(tokens, 3, dtype=torch.float64, device=device),
        "a": torch.randn(experts, width, size, dtype=torch.float64, device=device),
        "b": torch.randn(experts, size, width, dtype=torch.float64, device=device),
    }
    inputs = {name: tensors[name] for name in wanted}
    run = lambda implementation, **given: {  # noqa: E731
        "y": mixture(experts=selection, implementation=implementation, complete=not missing, **{**tensors, **given})
    }
    got, expected = (
        with_gradients(lambda name=name, **given: run(name, **given), inputs) for name in ("blocks", "naive")
    )
    assert_all_close(got, expected, rtol=1e-12, atol=1e-12)


@fast
def test_rows_of_a_token_are_added_up_in_float32(implementation, device, monkeypatch):
    """In bfloat16, 256 + 1 is 256."""
    monkeypatch.setattr(blocks, "BLOCK", 1)  # one row each
    routing = sort_selection(torch.zeros(2, 300, dtype=torch.long, device=device), 1, complete=True)
    x = torch.ones(2, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    matrices = torch.ones(1, 1, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    y = cvmm_sorted(x, routing, matrices, from_tokens=True, to_tokens=True, implementation=implementation)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and y.tolist() == x.grad.tolist() == [[300.0]] * 2
    assert matrices.grad.dtype == torch.bfloat16 and matrices.grad.tolist() == [[[600.0]]]


def test_blocks_make_no_copy_of_all_rows():
    """Of 400 tokens with 4 rows each, 64 wide."""
    inputs = {
        "x": torch.randn(400, 64),
        "weights": torch.rand(400, 4),
        "a": torch.randn(8, 64, 4),
        "b": torch.randn(8, 4, 64),
    }
    selection = torch.rand(400, 8).topk(4).indices
    largest = {}
    for name in ("blocks", "grouped"):
        leaves = {key: x.clone().requires_grad_() for key, x in inputs.items()}
        with Operations() as operations:
            mixture(experts=selection, implementation=name, complete=True, **leaves).square().sum().backward()
        largest[name] = operations.largest
    assert largest == {"blocks": 400 * 64, "grouped": 4 * 400 * 64}


@implementations
@pytest.mark.parametrize("to_tokens", [False, True])
def test_weights_and_relu_are_of_sorted_rows(implementation, to_tokens, device):
    """Weights in another dtype than rows, which keep theirs; a row without a matrix has no weight."""
    selection = torch.tensor([[1, 0], [-1, 1], [0, 0]], device=device)
    routing = sort_selection(selection, 2)
    rows = torch.randn(6, 4, device=device, requires_grad=True)
    matrices = torch.randn(2, 4, 3, device=device)
    weights = torch.rand(3, 2, dtype=torch.float64, device=device, requires_grad=True)
    options = {"to_tokens": to_tokens, "relu": True, "weights": weights, "implementation": implementation}
    out = cvmm_sorted(rows, routing, matrices, **options)
    by_entry = rows.detach()[routing.inverse].relu() * weights.detach().reshape(6, 1).float()
    expected = equation(by_entry, selection.reshape(-1), matrices)
    expected = expected.view(3, 2, 3).sum(1) if to_tokens else expected[routing.order]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert weights.grad.dtype == torch.float64 and weights.grad[1, 0] == 0 and (weights.grad[2] != 0).all()
    assert (rows.grad[rows <= 0] == 0).all()


@fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_expanded_and_transposed_gradients(implementation, dtype, device):
    """The gradient of a sum is one number expanded, which torch's grouped product refuses."""
    routing = sort_selection(make_selection("random", 20, 3, device), 3, complete=True)
    x, matrices = (t.requires_grad_() for t in make((20, 3, 8, 12), device, dtype).values())
    for gradient in (torch.ones((), device=device, dtype=dtype).expand(20, 12), torch.randn(12, 20).t().to(x)):
        found = [
            torch.autograd.grad(cvmm_sorted(x, routing, matrices, implementation=name), (x, matrices), gradient)
            for name in (implementation, "naive")
        ]
        for fast_gradient, naive_gradient in zip(*found):
            torch.testing.assert_close(fast_gradient, naive_gradient)


def test_sorted_selection(device):
    selection = torch.tensor([[2, 0], [0, -1], [2, 1], [9, 2]], device=device)
    routing = sort_selection(selection, 4)
    assert routing.order.tolist() == [1, 2, 5, 0, 4, 7, 3, 6]  # stable: equal entries in their order
    assert routing.tokens.tolist() == [0, 1, 2, 0, 2, 3, 1, 3]
    assert routing.offsets.tolist() == [2, 3, 6, 6] and routing.offsets.dtype == torch.int32
    assert routing.counts.tolist() == routing.counts_on_host == [2, 1, 3, 0]
    assert routing.without_matrix.squeeze(1).tolist() == [False] * 6 + [True] * 2
    assert routing.inverse[routing.order].tolist() == list(range(8))
    values = torch.arange(8.0, device=device).view(4, 2)
    assert torch.equal(routing.sums(routing.sort(values).unsqueeze(1)).squeeze(1), values.sum(1))


def test_more_matrices_than_small_integers_count(device):
    """Beyond 32,767 the sort has to take wider keys."""
    selection = torch.tensor([39_999, 5, 32_768, 39_999], device=device)
    matrices = torch.arange(40_000.0, dtype=torch.float64, device=device)[:, None, None]
    x = torch.ones(4, 1, dtype=torch.float64, device=device)
    assert cvmm(x, selection, matrices).squeeze(1).tolist() == selection.tolist()


# Which product runs.


@pytest.fixture
def without_grouped_mm(monkeypatch):
    grouped.has_grouped_mm.cache_clear()
    monkeypatch.setattr(grouped, "grouped_mm", None)
    yield
    grouped.has_grouped_mm.cache_clear()


def names_of(dtype=torch.float32, **options) -> list[str]:
    inputs = make((64, 16, 8, 8), "cpu", dtype)
    selection = make_selection("one", 64, 16, "cpu")
    grouped.has_grouped_mm(torch.device("cpu"), dtype)
    for tensor in inputs.values():
        tensor.requires_grad_()
    with Operations() as operations:
        cvmm(inputs["x"], selection, inputs["matrices"], **options).square().sum().backward()
    return operations.names


def test_without_grouped_mm_there_is_one_product_a_matrix_with_rows(without_grouped_mm):
    assert names_of().count("mm") == 3 and "_grouped_mm" not in names_of()


@pytest.mark.skipif(grouped.grouped_mm is None, reason="this torch has no grouped matrix product")
def test_grouped_mm_where_torch_has_it(monkeypatch):
    if not grouped.has_grouped_mm(torch.device("cpu"), torch.float32):
        pytest.skip("this torch has no grouped matrix product on the CPU")
    names = names_of()  # few rows for 16 matrices
    assert names.count("_grouped_mm") == 3 and "mm" not in names
    assert "_local_scalar_dense" not in names  # nothing waits for a number
    assert "_grouped_mm" not in names_of(torch.float64)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "blocks")
    assert "_grouped_mm" not in names_of()


@pytest.mark.skipif(grouped.grouped_mm is None, reason="this torch has no grouped matrix product")
def test_parts_of_larger_tensors_lie_where_a_gpu_takes_them(monkeypatch):
    """A GPU's grouped product refuses factors at other addresses than multiples of 16 bytes."""
    if not grouped.has_grouped_mm(torch.device("cpu"), torch.float32):
        pytest.skip("this torch has no grouped matrix product on the CPU")
    product, addresses = grouped.grouped_mm, []

    def watched(*factors, **options):
        addresses.extend(factor.data_ptr() for factor in factors)
        return product(*factors, **options)

    monkeypatch.setattr(grouped, "grouped_mm", watched)
    routing = sort_selection(torch.tensor([1, 0, 1, 1, 0, 1]), 2)

    def run(name, numbers):
        x, matrices = numbers[1:49].view(6, 8), numbers[51:115].view(2, 8, 4)
        return {"y": cvmm_sorted(x, routing, matrices, implementation=name)}

    inputs = {"numbers": torch.randn(115)}
    got, expected = (with_gradients(partial(run, name), inputs) for name in ("grouped", "naive"))
    assert_all_close(got, expected, rtol=1e-4, atol=1e-4)
    assert len(addresses) == 6 and all(address % 16 == 0 for address in addresses)


@pytest.mark.parametrize("rows,name", [(2 * FEW_ROWS - 1, "grouped"), (2 * FEW_ROWS, "blocks")])
def test_blocks_run_where_matrices_have_many_rows(rows, name, monkeypatch):
    ran = []
    for one in ("grouped", "blocks"):
        monkeypatch.setitem(OPERATORS["cvmm"].implementations, one, lambda *arguments, one=one: ran.append(one))
    cvmm(torch.zeros(rows, 1), torch.zeros(rows, dtype=torch.long), torch.zeros(2, 1, 1))
    assert ran == [name]


def test_a_grouped_mm_that_answers_wrongly_is_not_used(monkeypatch):
    """One that leaves the product of no rows as it finds it, as none of ours may."""

    def forgetful(a, b, offs):
        ends = offs.tolist()
        if b.dim() == 2:
            out = torch.full((len(ends), a.shape[0], b.shape[1]), 7.0, dtype=a.dtype)
            for k, (begin, end) in enumerate(zip([0, *ends], ends)):
                if end > begin:
                    out[k] = a[:, begin:end] @ b[begin:end]
            return out
        return torch.cat([a[begin:end] @ m for m, begin, end in zip(b, [0, *ends], [*ends[:-1], len(a)])])

    grouped.has_grouped_mm.cache_clear()
    monkeypatch.setattr(grouped, "grouped_mm", forgetful)
    assert not grouped.has_grouped_mm(torch.device("cpu"), torch.float32)
    grouped.has_grouped_mm.cache_clear()


def test_empty_matrices_cost_no_product(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "blocks")
    assert names_of().count("mm") == 3  # 16 matrices, one of them with rows: forward, dX, dM


def test_what_is_kept_for_the_backward_pass_has_one_row_a_token():
    x = torch.randn(50, 8, requires_grad=True)
    matrices = torch.randn(4, 8, 12, requires_grad=True)
    routing = sort_selection(torch.randint(0, 4, (50, 3)), 4, complete=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t):
        cvmm_sorted(x, routing, matrices, from_tokens=True)
    assert sorted(sizes) == [(4, 8, 12), (50, 8)]


def test_autocast_casts_as_linear_does(device):
    inputs = make((20, 4, 16, 8), device, torch.float32)
    selection = make_selection("random", 20, 4, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = cvmm(inputs["x"].requires_grad_(), selection, inputs["matrices"].requires_grad_())
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and inputs["x"].grad.dtype == inputs["matrices"].grad.dtype == torch.float32
    exact = equation(
        inputs["x"].detach().bfloat16().double(), selection, inputs["matrices"].detach().bfloat16().double()
    )
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "x,selection,matrices,error,message",
    [
        ((4, 3), [0] * 4, (2, 5, 3), ValueError, r"x \(N, M\) and matrices .*x \(4, 3\), matrices \(2, 5, 3\)"),
        ((4, 3, 1), [0] * 4, (2, 3, 3), ValueError, r"cvmm takes x \(N, M\)"),
        ((5, 3), [0] * 4, (2, 3, 3), ValueError, r"of 4 rows among 2 matrices.*x \(5, 3\)"),
        ((4, 3), [[0]] * 4, (2, 3, 3), ValueError, r"selection \(N,\), not selection \(4, 1\)"),
        ((4, 3), [0] * 4, (3, 3), ValueError, r"matrices \(K, M, L\), not matrices \(3, 3\)"),
        ((4, 3), [0] * 4, (0, 3, 3), ValueError, r"at least one matrix"),
        ((4, 3), [0.0] * 4, (2, 3, 3), TypeError, r"must be of integers, not torch.float32"),
        ((4, 3), [True] * 4, (2, 3, 3), TypeError, r"must be of integers, not torch.bool"),
    ],
)
def test_wrong_arguments(x, selection, matrices, error, message):
    with pytest.raises(error, match=message):
        cvmm(torch.ones(x), torch.tensor(selection), torch.ones(matrices))


def test_wrong_dtypes_and_names():
    selection = torch.zeros(4, dtype=torch.long)
    with pytest.raises(TypeError, match="of one dtype, not torch.float32 and torch.float64"):
        cvmm(torch.ones(4, 3), selection, torch.ones(2, 3, 3, dtype=torch.float64))
    with pytest.raises(TypeError, match="x must be a floating-point tensor"):
        cvmm(torch.ones(4, 3, dtype=torch.long), selection, torch.ones(2, 3, 3))
    with pytest.raises(ValueError, match="no implementation 'segments'.*auto, blocks, grouped, naive, triton"):
        cvmm(torch.ones(4, 3), selection, torch.ones(2, 3, 3), implementation="segments")
    with pytest.raises(ValueError, match=r"\(N,\) or \(N, K\), not \(1, 1, 1\)"):
        sort_selection(torch.zeros(1, 1, 1, dtype=torch.long), 2)


def test_wrong_weights():
    """By token as (N, K), for sorted rows alone."""
    routing, matrices = sort_selection(torch.zeros(4, 2, dtype=torch.long), 2), torch.ones(2, 3, 3)
    for shape in ((8,), (2, 4), (4, 2, 1), (4, 1)):
        with pytest.raises(ValueError, match=r"of 4 tokens with 2 matrices each, .* weights \("):
            cvmm_sorted(torch.ones(8, 3), routing, matrices, weights=torch.ones(shape))
    with pytest.raises(ValueError, match="weights for sorted rows, and with from_tokens"):
        cvmm_sorted(torch.ones(4, 3), routing, matrices, from_tokens=True, weights=torch.ones(4, 2))
    with pytest.raises(TypeError, match="weights must be a floating-point tensor"):
        cvmm_sorted(torch.ones(8, 3), routing, matrices, weights=torch.ones(4, 2, dtype=torch.long))
