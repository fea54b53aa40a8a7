"""Operators on a memory: batched against naive with gradients, and the identities of each equation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairseq_sg.ops import memory as ops
from fairseq_sg.ops.memory.naive import EPS
from helpers.comparison import assert_all_close, with_gradients

# B, R, N, W
SHAPES = [(1, 1, 1, 1), (2, 1, 2, 3), (3, 2, 5, 4), (2, 3, 7, 2)]


def rand(*shape: int, device="cpu") -> Tensor:
    return torch.rand(shape, dtype=torch.float64).to(device)


def distribution(*shape: int, device="cpu", total: float = 0.9) -> Tensor:
    """Weights over the last dimension that sum up to ``total``."""
    x = rand(*shape, device=device) + 0.05
    return total * x / x.sum(-1, keepdim=True)


def cases(shape: tuple[int, int, int, int], device) -> dict[str, tuple]:
    """operator -> (named inputs, a function of them with an implementation)."""
    b, r, n, w = shape
    memory = torch.randn(b, n, w, dtype=torch.float64).to(device)
    memory[:, 0] = 0.0  # a cell that was never written
    keys = torch.randn(b, r, w, dtype=torch.float64).to(device)
    weights, reads = distribution(b, n, device=device), distribution(b, r, n, device=device)
    # Spread, so that no two usages are near enough for a derivative to change their order.
    used = (torch.stack([torch.randperm(n) for _ in range(b)]).double() + 0.5).to(device) / (n + 1)
    links = distribution(b, n, n, device=device, total=0.5) / max(n, 1)
    links.diagonal(dim1=1, dim2=2).zero_()
    look_up = {"memory": memory, "keys": keys, "strengths": 1 + 3 * rand(b, r, device=device)}
    write = {"memory": memory, "write_weights": weights}
    write |= {"erase": rand(b, w, device=device), "vector": torch.randn(b, w, dtype=torch.float64).to(device)}
    followed = {"links": links, "read_weights": reads}
    powers = {"forward_sharpness": 1 + rand(b, r, device=device)}
    powers |= {"backward_sharpness": 1 + 2 * rand(b, r, device=device)}

    def one(operator):
        return lambda implementation: lambda **x: {"out": operator(**x, implementation=implementation)}

    def several(operator):
        return lambda implementation: lambda **x: dict(enumerate_of(operator(**x, implementation=implementation)))

    return {
        "content_weights": (look_up, one(ops.content_weights)),
        "content_weights, masked": (look_up | {"masks": rand(b, r, w, device=device)}, one(ops.content_weights)),
        "retention": ({"read_weights": reads, "free": rand(b, r, device=device)}, one(ops.retention)),
        "usage": (
            {"usage": used, "write_weights": weights, "retention": rand(b, n, device=device)}, one(ops.usage)
        ),
        "allocation": ({"usage": used}, one(ops.allocation)),
        "write": (write, one(ops.write)),
        "write, de-allocating": (write | {"retention": rand(b, n, device=device)}, one(ops.write)),
        "links": (
            {"links": links, "precedence": distribution(b, n, device=device), "write_weights": weights},
            several(ops.links),
        ),
        "follow": (followed, several(ops.follow)),
        "follow, sharpened": (followed | powers, several(ops.follow)),
        "read": ({"memory": memory, "read_weights": reads}, one(ops.read)),
    }  # fmt: skip


def enumerate_of(results) -> list[tuple[str, Tensor]]:
    return [(f"out {i}", x) for i, x in enumerate(results)]


NAMES = list(cases((1, 1, 2, 1), "cpu"))


@pytest.mark.parametrize(
    ("name", "shape"),
    # A single cell has no links, and nothing has a gradient.
    [(name, shape) for shape in SHAPES for name in NAMES if name != "links" or shape[2] > 1],
)
def test_equals_naive(name, shape, device):
    inputs, function = cases(shape, device)[name]
    fast, naive = (with_gradients(function(way), inputs) for way in ("batched", "naive"))
    assert_all_close(fast, naive, rtol=1e-10, atol=1e-12)
    assert all(tensor.isfinite().all() for tensor in fast.values())


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name, device):
    inputs, function = cases((2, 2, 3, 2), device)[name]
    if "memory" in inputs:
        inputs["memory"] = torch.randn_like(inputs["memory"])  # a norm has no derivative at 0
    for tensor in inputs.values():
        tensor.requires_grad_()

    def flat(*tensors):
        return tuple(function("batched")(**dict(zip(inputs, tensors, strict=True))).values())

    assert torch.autograd.gradcheck(flat, tuple(inputs.values()))


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_computed_in_float32(name, device):
    inputs, function = cases((2, 2, 5, 4), device)[name]
    low = {key: x.to(torch.bfloat16) for key, x in inputs.items()}
    exact = function("auto")(**{key: x.float() for key, x in low.items()})
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = function("auto")(**low)
    for key, x in found.items():
        assert x.dtype == torch.float32
        assert torch.equal(x, exact[key])


# Look-ups.


def test_a_mask_of_ones_is_no_mask(device):
    inputs, _ = cases((3, 2, 5, 4), device)["content_weights"]
    ones = torch.ones_like(inputs["keys"])
    plain, masked = (ops.content_weights(**inputs, masks=m, implementation="naive") for m in (None, ones))
    assert torch.equal(plain, masked)
    torch.testing.assert_close(ops.content_weights(**inputs, masks=ones), plain, rtol=1e-13, atol=0)


def test_masked_columns_have_no_influence(device):
    inputs, _ = cases((3, 2, 5, 4), device)["content_weights"]
    masks = torch.ones_like(inputs["keys"])
    masks[..., 2:] = 0.0
    before = ops.content_weights(**inputs, masks=masks)
    inputs["memory"][..., 2:] = 1e6 * torch.randn(3, 5, 2)
    inputs["keys"][..., 2:] = 1e6
    torch.testing.assert_close(ops.content_weights(**inputs, masks=masks), before, rtol=1e-9, atol=0)


def test_an_unwritten_cell_scores_0_and_has_finite_gradients(device):
    memory = torch.zeros(1, 3, 2, device=device, requires_grad=True)
    keys = torch.tensor([[[1.0, 2.0]]], device=device, requires_grad=True)
    masks = torch.full_like(keys, 0.5, requires_grad=True)
    for m in (None, masks):
        weights = ops.content_weights(memory, keys, torch.ones(1, 1, device=device), m)
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))
        for gradient in torch.autograd.grad(weights[0, 0, 0], [memory, keys], retain_graph=True):
            assert gradient.isfinite().all()


# De-allocation and allocation.


def test_a_freed_cell_is_erased_and_allocated_next(device):
    usage, r = torch.tensor([[0.9, 0.8, 0.7]], dtype=torch.float64, device=device), torch.zeros(1, 1, 3).double()
    r[0, 0, 1] = 1.0
    kept = ops.retention(r.to(device), torch.ones(1, 1, dtype=torch.float64, device=device))
    assert kept.tolist() == [[1.0, 0.0, 1.0]]
    after = ops.usage(usage, torch.zeros_like(usage), kept)
    assert after.tolist() == [[0.9, 0.0, 0.7]]
    a = ops.allocation(after)
    assert a.argmax() == 1 and a[0, 1] > 1 - 1e-5
    memory = torch.randn(1, 3, 4, dtype=torch.float64, device=device)
    nothing = torch.zeros(1, 4, dtype=torch.float64, device=device)
    erased = ops.write(memory, torch.zeros_like(usage), nothing, nothing, kept)
    assert erased[0, 1].tolist() == [0.0] * 4 and torch.equal(erased[0, [0, 2]], memory[0, [0, 2]])
    # The look-up of what was in it finds it no better than any cell that is not there.
    keys, strengths = memory[:, 1:2], torch.full((1, 1), 10.0, dtype=torch.float64, device=device)
    scores = ops.content_weights(erased, keys, strengths).log() / 10
    assert (scores[0, 0, 1] - scores[0, 0].mean()).abs() < 1


def test_the_cosine_feels_retention_only_at_the_extreme(device):
    """Trap of section 2.2: at ψ = .01 a stale cell is found as before, and only what is read from it is smaller."""
    memory = 2 * torch.randn(1, 1, 16, dtype=torch.float64).sign().to(device)
    keys = memory.clone()

    def score(kept: float) -> float:
        # Beside an empty cell, whose score is 0.
        both = torch.cat([kept * memory, torch.zeros_like(memory)], 1)
        w = ops.content_weights(both, keys, torch.ones(1, 1, dtype=torch.float64, device=device))[0, 0]
        return float((w[0] / w[1]).log())

    assert score(0.01) == pytest.approx(score(1.0), rel=1e-4)
    assert score(1e-9) < 0.1


def test_allocation_sums_to_1_minus_the_product(device):
    u = rand(4, 6, device=device)
    raised = u * (1 - EPS) + EPS
    torch.testing.assert_close(ops.allocation(u).sum(1), 1 - raised.prod(1))


def test_allocation_of_equal_usages_takes_the_first_cell(device):
    for value in (0.0, 0.5):
        a = ops.allocation(torch.full((1, 4), value, dtype=torch.float64, device=device))[0]
        assert (a[:-1] > a[1:]).all()
    assert ops.allocation(torch.zeros(1, 4, device=device))[0, 0] > 1 - 1e-5


def test_allocation_is_equivariant(device):
    u, order = torch.rand(2, 7, dtype=torch.float64, device=device), torch.randperm(7)
    torch.testing.assert_close(ops.allocation(u[:, order]), ops.allocation(u)[:, order])


@pytest.mark.parametrize("cells", [1, 2, 5, 16])
def test_the_gradient_of_unused_cells_is_that_of_naive_in_float32(cells, device):
    """The derivative of a product without one factor: not that of the whole product minus a part."""
    gradient, weights = {}, torch.randn(1, cells, generator=torch.Generator().manual_seed(1)).to(device)
    for implementation in ("naive", "batched"):
        u = torch.zeros(1, cells, device=device, requires_grad=True)
        a = ops.allocation(u, implementation=implementation)
        (gradient[implementation],) = torch.autograd.grad((a * weights).sum(), u)
    torch.testing.assert_close(gradient["batched"], gradient["naive"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("usage", [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.5]])
def test_gradients_of_allocation_are_finite(usage, device):
    u = torch.tensor([usage], device=device, requires_grad=True)
    a = ops.allocation(u)
    (gradient,) = torch.autograd.grad(a[0, 0] + 2 * a[0, 1], u)
    assert a.isfinite().all() and gradient.isfinite().all()


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 10**6))
def test_usage_and_links_stay_in_their_ranges(cells, steps, seed):
    """0 ≤ u ≤ 1; links are at least 0, their rows and columns sum up to at most 1, their diagonal is 0."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    u, p, links = torch.zeros(1, cells), torch.zeros(1, cells), torch.zeros(1, cells, cells)
    for _ in range(steps):
        w = draw(1, cells) ** 4
        w = (w / w.sum() * draw(1, 1)).double()
        u = ops.usage(u.double(), w, draw(1, cells).round())
        links, p = ops.links(links.double(), p.double(), w)
        assert (u >= 0).all() and (u <= 1 + 1e-12).all()
        assert (links >= -1e-12).all() and not links.diagonal(dim1=1, dim2=2).any()
        assert (links.sum(1) <= 1 + 1e-9).all() and (links.sum(2) <= 1 + 1e-9).all()
        assert p.sum() <= 1 + 1e-12


# Links.


def written_in(order: list[int], cells: int, device) -> tuple[Tensor, Tensor]:
    """The links after hard writes to some cells."""
    links, p = (torch.zeros(1, *s, dtype=torch.float64, device=device) for s in ((cells, cells), (cells,)))
    for cell in order:
        w = torch.zeros(1, cells, dtype=torch.float64, device=device)
        w[0, cell] = 1.0
        links, p = ops.links(links, p, w)
    return links, p


def test_hard_writes_make_the_matrix_of_successors(device):
    order = [3, 0, 4, 1]
    links, _ = written_in(order, 5, device)
    expected = torch.zeros(5, 5, dtype=torch.float64, device=device)
    for before, after in zip(order, order[1:]):
        expected[after, before] = 1.0
    assert torch.equal(links[0], expected)
    at = torch.zeros(1, 1, 5, dtype=torch.float64, device=device)
    at[0, 0, order[0]] = 1.0
    for cell in order[1:]:
        back = at
        at, _ = ops.follow(links, at)
        assert at[0, 0].tolist() == [float(i == cell) for i in range(5)]
        assert torch.equal(ops.follow(links, at)[1], back)


def test_a_cell_that_is_written_again_leaves_its_place(device):
    links, _ = written_in([0, 1, 2, 1], 3, device)
    assert links[0].nonzero().tolist() == [[1, 2]]


def test_backward_is_the_transpose(device):
    inputs, _ = cases((2, 3, 5, 4), device)["follow"]
    links, reads = inputs["links"], inputs["read_weights"]
    one, other = ops.follow(links, reads), ops.follow(links.transpose(1, 2), reads)
    torch.testing.assert_close(one[0], other[1])
    torch.testing.assert_close(one[1], other[0])
    assert (one[0].sum(2) <= 1).all()


# Sharpness.


def sharpened(d: list[float], s: float, device) -> Tensor:
    """S(d, s) of a column of links."""
    links = torch.zeros(1, len(d), len(d), dtype=torch.float64, device=device)
    links[0, :, 0] = torch.tensor(d, device=device)
    reads = torch.zeros(1, 1, len(d), dtype=torch.float64, device=device)
    reads[0, 0, 0] = 1.0
    power = torch.full((1, 1), s, dtype=torch.float64, device=device)
    return ops.follow(links, reads, power, torch.ones_like(power))[0][0, 0]


def test_sharpness(device):
    d = [0.0, 0.3, 0.1, 0.2]
    powers = torch.tensor(d, dtype=torch.float64, device=device) + EPS
    for s in (1.0, 2.5, 7.0):
        torch.testing.assert_close(sharpened(d, s, device), powers**s / (powers**s).sum())
    assert sharpened(d, 3.0, device).argsort().tolist() == [0, 2, 3, 1]
    assert sharpened(d, 50.0, device)[1] > 1 - 1e-8
    torch.testing.assert_close(
        sharpened([0.0] * 4, 3.0, device), torch.full((4,), 0.25, dtype=torch.float64).to(device)
    )


# Wrong arguments.


@pytest.mark.parametrize("name", NAMES)
def test_wrong_arguments(name):
    inputs, function = cases((2, 2, 3, 2), "cpu")[name]
    with pytest.raises(ValueError, match="has no implementation 'fast'"):
        function("fast")(**inputs)
    last = list(inputs)[-1]
    with pytest.raises(ValueError, match="shapes do not fit"):
        function("auto")(**inputs | {last: inputs[last][..., None]})
    with pytest.raises(TypeError, match="must be a floating-point tensor"):
        function("auto")(**inputs | {last: inputs[last].long()})


@pytest.mark.parametrize("name", ["content_weights", "follow", "read"])
def test_the_second_argument_needs_its_dimensions(name):
    inputs, function = cases((2, 2, 3, 2), "cpu")[name]
    second = list(inputs)[1]
    with pytest.raises(ValueError, match="shapes do not fit"):
        function("auto")(**inputs | {second: inputs[second][0, 0]})


def test_sharpness_of_one_direction_is_refused():
    inputs, _ = cases((2, 2, 3, 2), "cpu")["follow"]
    for name in ("forward_sharpness", "backward_sharpness"):
        with pytest.raises(ValueError, match="follow takes the sharpness of both directions, or of none"):
            ops.follow(**inputs, **{name: torch.ones(2, 3)})
