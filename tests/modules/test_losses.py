"""The orthogonality loss against the paper's formula as loops; collecting and merging losses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_sg.modules.losses import Statistic, collect, merge
from fairseq_sg.ops import orthogonality_loss


def frobenius(rows: list, eps: float) -> float:
    """‖V̄V̄ᵀ − I‖²_F of one sequence's Values, entry by entry (Park & Kim 2024, section 4.2)."""
    unit = [[v / (math.sqrt(sum(u * u for u in row)) + eps) for v in row] for row in rows]
    total = 0.0
    for i, a in enumerate(unit):
        for j, b in enumerate(unit):
            total += (sum(x * y for x, y in zip(a, b)) - (i == j)) ** 2
    return total


def expected(values, mask, eps) -> float:
    """Mean over sentences and heads, without padding."""
    batch, heads, length, _ = values.shape
    total = 0.0
    for b in range(batch):
        seen = [n for n in range(length) if mask is None or not mask[b, n]]
        total += sum(frobenius([values[b, h, n].tolist() for n in seen], eps) for h in range(heads)) / heads
    return total / batch


def case(length=5, width=4):
    torch.manual_seed(3)
    mask = torch.zeros(2, length, dtype=torch.bool)
    mask[1, 3:] = True
    return torch.randn(2, 3, length, width, dtype=torch.float64), mask


@pytest.mark.parametrize("shape", [(5, 4), (4, 6)], ids=["long", "wide"])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_against_the_formula(shape, eps):
    values, mask = case(*shape)
    for padding_mask in (mask, None):
        got = orthogonality_loss(values, padding_mask=padding_mask, eps=eps)
        assert got.shape == ()
        assert got.item() == pytest.approx(expected(values, padding_mask, eps), rel=1e-9)


def test_orthonormal_values_have_no_loss_and_equal_values_the_most():
    values = torch.eye(4, dtype=torch.float64).expand(2, 3, 4, 4)
    assert orthogonality_loss(values, eps=0.0).item() == 0.0
    assert orthogonality_loss(values.clone().fill_(1.0), eps=0.0).item() == pytest.approx(4 * 4 - 4)


def test_half_precision_values_give_a_float32_loss():
    values = 300 * torch.ones(1, 2, 700, 4, dtype=torch.float16)
    got = orthogonality_loss(values)
    assert got.dtype == torch.float32 and got.item() == pytest.approx(700 * 699, rel=1e-3)  # beyond float16's 65504


@settings(derandomize=True, max_examples=30)
@given(data=st.data(), shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 5)))
def test_order_of_positions_and_heads_and_scale_of_values_do_not_matter(data, shape):
    values = torch.randn(
        shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999))), dtype=torch.float64
    )
    heads, positions = (data.draw(st.permutations(range(n))) for n in shape[1:3])
    got = orthogonality_loss(7.5 * values[:, heads][:, :, positions], eps=0.0)
    torch.testing.assert_close(got, orthogonality_loss(values, eps=0.0), rtol=1e-9, atol=1e-9)


def test_gradient_ignores_padding():
    values, mask = case()
    values[1, :, 3:] = math.nan
    values.requires_grad_()
    orthogonality_loss(values, padding_mask=mask).backward()
    assert (values.grad[1, :, 3:] == 0).all() and values.grad.isfinite().all() and (values.grad[0] != 0).any()


def scalars(*values):
    return [torch.tensor(float(v)) for v in values]


def test_collect_appends_in_order():
    losses = {}
    for emitted in ({"a": 1, "b": 2}, {}, {"a": 3}):
        collect(losses, {name: torch.tensor(float(v)) for name, v in emitted.items()})
    assert losses == {"a": scalars(1, 3), "b": scalars(2)}


def test_merge_joins_lists_and_leaves_its_parts_alone():
    first, second = {"a": scalars(1), "b": scalars(2)}, {"a": scalars(3, 4), "c": scalars(5)}
    merged = merge([first, {}, second])
    assert merged == {"a": scalars(1, 3, 4), "b": scalars(2), "c": scalars(5)}
    merged["a"].append(None)
    assert first["a"] == scalars(1) and second["a"] == scalars(3, 4)
    assert merge([]) == merge([{}]) == {}


def test_statistics_are_collected_and_merged_as_losses_are():
    first, second, third = (Statistic(torch.tensor(float(v))) for v in range(3))
    encoder, decoder = {}, {}
    for emitted in ({"a": torch.tensor(1.0), "used": first}, {"used": second}):
        collect(encoder, emitted)
    collect(decoder, {"used": third})
    assert merge([encoder, decoder]) == {"a": scalars(1), "used": [first, second, third]}
    with pytest.raises(AttributeError):
        first.value = torch.tensor(3.0)
