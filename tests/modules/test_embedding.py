"""Token embeddings, their scaling, and sinusoidal positions (Csordás 2023, section 4.2.3 and appendix C.4)."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_sg.modules.embedding import SCALINGS, TokenEmbedding
from fairseq_sg.modules.position import PRECISE, build_embedded_position, real_positions, sinusoid

PAD = 1
sides = pytest.mark.parametrize("left", [False, True], ids=["right", "left"])


def formula(position: int, j: int, dim: int) -> float:
    """Vaswani et al. 2017, section 3.5: feature 2i is sin(pos / 10000^(2i/d)), feature 2i + 1 the cosine."""
    angle = position / 10000 ** (2 * (j // 2) / dim)
    return math.sin(angle) if j % 2 == 0 else math.cos(angle)


def embedding(rows=12, dim=6, scaling="none", position="sinusoidal", dropout=0.0) -> TokenEmbedding:
    positions = build_embedded_position(position, dim, None)
    return TokenEmbedding(rows, dim, PAD, scaling=scaling, positions=positions, dropout=dropout)


def padded(tokens: list, padding: int, left: bool) -> torch.Tensor:
    return torch.tensor([[PAD] * padding + tokens if left else tokens + [PAD] * padding])


# Positions.


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 128])
def test_sinusoid(dim):
    positions = [-300, -7, -1, 0, 1, 2, 50, 999]
    got = sinusoid(torch.tensor(positions).view(2, 4), dim)
    assert got.shape == (2, 4, dim) and got.dtype == torch.float32
    expected = torch.tensor([[formula(n, j, dim) for j in range(dim)] for n in positions]).view(2, 4, dim)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(got[0, 1:], expected[0, 1:], rtol=0, atol=1e-6)


@settings(derandomize=True, max_examples=50)
@given(position=st.integers(-2000, 2000), dim=st.integers(1, 40))
def test_sinusoid_of_the_opposite_distance_mirrors_the_sines(position, dim):
    there, back = sinusoid(torch.tensor([position, -position]), dim)
    assert torch.equal(there[0::2], -back[0::2]) and torch.equal(there[1::2], back[1::2])


@settings(derandomize=True, max_examples=60)
@given(length=st.integers(1, 12), padding=st.integers(0, 6), left=st.booleans())
def test_positions_count_real_tokens_from_zero(length, padding, left):
    tokens = padded([5] * length, padding, left)
    got = real_positions(tokens.eq(PAD))
    assert got.dtype == torch.int64 and got.min() >= 0 and got.max() < tokens.size(1)
    assert (got[:, padding:] if left else got[:, :length]).tolist() == [list(range(length))]


def test_positions_of_a_batch_with_rows_of_padding_alone():
    tokens = torch.tensor([[4, 5, PAD, PAD], [PAD, PAD, 7, 8], [PAD, PAD, PAD, PAD]])
    assert real_positions(tokens.eq(PAD)).tolist() == [[0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]


def test_no_positions():
    assert build_embedded_position("none", 4, None)(torch.zeros(1, 2, dtype=torch.long), 2) is None


def test_a_position_has_one_value_whatever_the_length_of_its_sequence():
    positions = build_embedded_position("sinusoidal", 64, None)
    seen = torch.tensor([[0, 5, 16_000, PRECISE - 1]])
    short = positions(seen, PRECISE)
    assert torch.equal(positions(seen, PRECISE + 1), short)
    assert torch.equal(positions(torch.arange(PRECISE + 9)[None], PRECISE + 9)[:, seen[0]], short)
    far = positions(torch.tensor([[3 * PRECISE]]), 3 * PRECISE + 1)[0, 0]
    expected = torch.tensor([formula(3 * PRECISE, j, 64) for j in range(64)])
    torch.testing.assert_close(far, expected, rtol=0, atol=1e-6)


def test_table_grows_and_keeps_its_beginning():
    positions = build_embedded_position("sinusoidal", 6, None)
    short = positions(torch.arange(5)[None], 5)
    assert positions.table.size(0) == 128
    for length in (128, 129, 700):
        got = positions(torch.arange(length)[None], length)
        assert got.shape == (1, length, 6) and positions.table.size(0) >= length
        assert torch.equal(got[:, :5], short)
        expected = torch.tensor([formula(length - 1, j, 6) for j in range(6)])
        torch.testing.assert_close(got[0, -1], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_table_follows_the_module_before_and_after_growing(dtype):
    module = embedding(dim=6, position="sinusoidal").to(dtype)
    tokens = torch.randint(4, 12, (2, 20))
    before = module(tokens)
    assert before.dtype == module.positions.table.dtype == dtype
    long = module(torch.randint(4, 12, (1, 300)))
    assert long.dtype == module.positions.table.dtype == dtype
    assert torch.equal(module(tokens), before)  # a long sentence in between changes no other one


def test_table_is_not_in_the_checkpoint():
    module = embedding()
    module(torch.randint(4, 12, (1, 300)))
    assert list(module.state_dict()) == ["tokens.weight"]
    embedding().load_state_dict(module.state_dict())
    assert "positions.table" in dict(module.named_buffers())  # a buffer: it goes where the module goes
    assert module.to("meta").positions.table.device.type == "meta"


# Tokens and positions together.


@pytest.mark.parametrize(
    "scaling,a,b", [("token_up", math.sqrt(7), 1.0), ("none", 1.0, 1.0), ("position_down", 1.0, 1 / math.sqrt(7))]
)
def test_scaled_sum_with_an_odd_width(scaling, a, b):
    module = embedding(dim=7, scaling=scaling)
    tokens = torch.tensor([[4, 9, 4], [5, 5, 11]])
    got = module(tokens)
    assert got.shape == (2, 3, 7)
    for i in range(2):
        for n in range(3):
            for j in range(7):
                expected = a * module.tokens.weight[tokens[i, n], j].item() + b * formula(n, j, 7)
                assert got[i, n, j].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "scaling,position,std,bound",
    [
        ("token_up", "sinusoidal", math.sqrt(2 / (200 + 256)), math.sqrt(6 / (200 + 256))),
        ("none", "sinusoidal", 1.0, None),
        ("position_down", "sinusoidal", math.sqrt(2 / 256), None),
        ("auto", "sinusoidal", math.sqrt(2 / 256), None),
        ("auto", "none", math.sqrt(2 / (200 + 256)), math.sqrt(6 / (200 + 256))),
        ("none", "none", 1.0, None),
    ],
)
def test_initialization(scaling, position, std, bound):
    weight = embedding(200, 256, scaling, position).tokens.weight.detach()
    assert (weight[PAD] == 0).all()
    rows = torch.cat([weight[:PAD], weight[PAD + 1 :]])
    assert rows.std().item() == pytest.approx(std, rel=0.02) and abs(rows.mean().item()) < 0.02 * std
    if bound:
        assert 0.98 * bound < rows.abs().max().item() <= bound
    else:
        assert rows.abs().max().item() > 3.5 * std  # normal, not uniform


def test_auto_is_position_down_with_positions_and_unscaled_without():
    tokens = torch.tensor([[4, 5, 6]])
    auto, down = embedding(scaling="auto"), embedding(scaling="position_down")
    down.load_state_dict(auto.state_dict())
    assert torch.equal(auto(tokens), down(tokens))
    bare = embedding(scaling="auto", position="none")
    assert torch.equal(bare(tokens), bare.tokens(tokens))
    up = embedding(scaling="token_up", position="none")
    torch.testing.assert_close(up(tokens), math.sqrt(6) * up.tokens(tokens))


def test_wrong_scaling():
    with pytest.raises(
        ValueError, match="--embedding-scaling is 'up': choose from auto, token_up, none, position_down"
    ):
        embedding(scaling="up")
    assert set(SCALINGS) == {"token_up", "none", "position_down"}


@sides
@pytest.mark.parametrize("scaling", SCALINGS)
def test_padding_on_either_side_shifts_nothing(scaling, left):
    module = embedding(scaling=scaling)
    alone = module(torch.tensor([[4, 5, 6]]))
    got = module(padded([4, 5, 6], 3, left))
    assert torch.equal(got[:, 3:] if left else got[:, :3], alone)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("length", [1, 5, 140])
def test_last_is_the_last_column(scaling, length):
    module = embedding(scaling=scaling)
    tokens = torch.randint(4, 12, (3, length))
    tokens[1, : length // 2] = PAD
    got = module(tokens, last=True)
    assert got.shape == (3, 1, 6)
    assert torch.equal(got, module(tokens)[:, -1:])


def test_padding_row_stays_zero_in_training():
    module = embedding(scaling="none", position="none")
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module(torch.tensor([[4, PAD]])).sum().backward()
    optimizer.step()
    assert (module.tokens.weight[PAD] == 0).all() and (module.tokens.weight.grad[4] == 1).all()


def test_dropout_is_on_the_sum_in_training_only():
    module = embedding(dim=64, dropout=0.5)
    tokens = torch.randint(4, 12, (20, 50))
    whole = module.eval()(tokens)
    dropped = module.train()(tokens)
    kept = dropped != 0
    assert 0.48 < kept.float().mean().item() < 0.52
    torch.testing.assert_close(dropped[kept], 2 * whole[kept])
    assert torch.equal(copy.deepcopy(module).eval()(tokens), whole)
