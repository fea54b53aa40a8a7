"""The orthogonality loss against the paper's formula as loops; collecting and merging losses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_sg.modules.losses import OrthogonalityLoss, OverRealPositions, Statistic, collect, merge


def frobenius(rows: list, eps: float) -> float:
    """‖V̄V̄ᵀ − I‖²_F of one sequence's Values, entry by entry (Park & Kim 2024, section 4.2)."""
    unit = [[v / (math.sqrt(sum(u * u for u in row)) + eps) for v in row] for row in rows]
    total = 0.0
    for i, a in enumerate(unit):
        for j, b in enumerate(unit):
            total += (sum(x * y for x, y in zip(a, b)) - (i == j)) ** 2
    return total


def expected(values, mask, eps) -> float:
    """The mean over sentences and heads, each head by itself, without the positions of padding."""
    losses = []
    for b, sentence in enumerate(values):
        seen = [n for n in range(values.size(2)) if mask is None or not mask[b, n]]
        losses += [frobenius(head[seen].tolist(), eps) for head in sentence]
    return sum(losses) / len(losses)


def case(length=5, width=4):
    torch.manual_seed(3)
    mask = torch.zeros(2, length, dtype=torch.bool)
    mask[1, 3:] = True
    return torch.randn(2, 3, length, width, dtype=torch.float64), mask


@pytest.mark.parametrize("shape", [(5, 4), (4, 6)], ids=["long", "wide"])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_loss_against_the_formula(shape, eps):
    values, mask = case(*shape)
    loss = OrthogonalityLoss(eps=eps)
    for padding_mask in (mask, None):
        got = loss(values, padding_mask)
        assert got.shape == ()
        assert got.item() == pytest.approx(expected(values, padding_mask, eps), rel=1e-9)


def test_orthonormal_values_have_no_loss_and_equal_values_the_most():
    values = torch.eye(4, dtype=torch.float64).expand(2, 3, 4, 4)
    assert OrthogonalityLoss(eps=0.0)(values, None).item() == 0.0
    assert OrthogonalityLoss(eps=0.0)(values.clone().fill_(1.0), None).item() == pytest.approx(4 * 4 - 4)


def test_half_precision_values_give_a_float32_loss():
    values = 300 * torch.ones(1, 2, 700, 4, dtype=torch.float16)
    got = OrthogonalityLoss()(values, None)
    assert got.dtype == torch.float32 and got.item() == pytest.approx(700 * 699, rel=1e-3)  # beyond float16's 65504


@settings(derandomize=True, deadline=None, max_examples=30)
@given(data=st.data(), shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 5)))
def test_order_of_positions_and_heads_and_scale_of_values_do_not_matter(data, shape):
    values = torch.randn(
        shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999))), dtype=torch.float64
    )
    heads, positions = (data.draw(st.permutations(range(n))) for n in shape[1:3])
    loss = OrthogonalityLoss(eps=0.0)
    got = loss(7.5 * values[:, heads][:, :, positions], None)
    torch.testing.assert_close(got, loss(values, None), rtol=1e-9, atol=1e-9)


def test_gradient_ignores_padding():
    values, mask = case()
    values[1, :, 3:] = math.nan
    values.requires_grad_()
    OrthogonalityLoss()(values, mask).backward()
    assert (values.grad[1, :, 3:] == 0).all() and values.grad.isfinite().all() and (values.grad[0] != 0).any()


def test_over_real_positions_has_its_own_mask_and_the_loss_s_name():
    values, mask = case()
    inner = OrthogonalityLoss(name="orthogonality_decoder")
    loss = OverRealPositions(inner, mask)
    assert loss.name == "orthogonality_decoder"
    assert loss(values, None) == loss(values, ~mask) == inner(values, mask)
    assert inner(values, mask) != inner(values, None)
    assert OverRealPositions(inner, None)(values, mask) == inner(values, None)


def scalars(*values):
    return [torch.tensor(float(v)) for v in values]


def test_collect_appends_in_order():
    losses = {}
    for emitted in ({"a": 1, "b": 2}, {}, {"a": 3}):
        collect(losses, {name: torch.tensor(float(v)) for name, v in emitted.items()})
    assert losses == {"a": scalars(1, 3), "b": scalars(2)}


def test_merge_joins_lists_and_leaves_its_parts_alone():
    first, second = {"a": scalars(1), "b": scalars(2)}, {"a": scalars(3, 4), "c": scalars(5)}
    merged = merge([first, None, second, {}])
    assert merged == {"a": scalars(1, 3, 4), "b": scalars(2), "c": scalars(5)}
    merged["a"].append(None)
    assert first["a"] == scalars(1) and second["a"] == scalars(3, 4)
    assert merge([]) == merge([None]) == {}


def test_statistics_are_collected_and_merged_as_losses_are():
    first, second, third = (Statistic(torch.tensor(float(v))) for v in range(3))
    encoder, decoder = {}, {}
    for emitted in ({"a": torch.tensor(1.0), "used": first}, {"used": second}):
        collect(encoder, emitted)
    collect(decoder, {"used": third})
    assert merge([encoder, decoder]) == {"a": scalars(1), "used": [first, second, third]}
    with pytest.raises(AttributeError):
        first.value = torch.tensor(3.0)
