"""Positions one by one: formulas, tables worked out by hand, training against evaluation, and what is refused.

``test_attention`` holds attentions with positions inside them to their equations, to padding and to decoding.
"""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_sg.modules.attention import ATTENTION_REGISTRY, Context, build_attention
from fairseq_sg.modules.embedding import TokenEmbedding
from fairseq_sg.modules.position import (
    POSITION_REGISTRY,
    AlibiPosition,
    AttentionPosition,
    EmbeddedPosition,
    FractionPosition,
    IndicatorPosition,
    LearnedPosition,
    RandomizedPosition,
    RotaryPosition,
    T5Position,
    build_embedded_position,
    build_indices,
    gives_indices,
    positions_for,
    real_positions,
    sinusoid,
)
from helpers.attention_cases import Case, by_rows, padding_of
from helpers.attention_kinds.relative import logits
from helpers.attention_kinds.softmax import bucket, rotated
from helpers.configs import config_of

HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
PAD = 1


def test_every_position_says_where_it_enters():
    config = config_of(8, 2)
    gives = {name: cls.gives_with(config) for name, cls in POSITION_REGISTRY.items()}
    assert gives == {
        "none": "nothing",
        "sinusoidal": "embedding",
        "learned": "embedding",
        "rotary": "rotation",
        "alibi": "bias",
        "t5": "bias",
        "randomized": "embedding",
        "fraction": "embedding",
        "indicator": "embedding",
    }
    assert RandomizedPosition.gives_with(config_of(8, 2, randomized_base="relative")) == "indices"


def test_a_position_of_the_user_s_gives_what_it_writes():
    class Slope(AttentionPosition):
        def bias(self, queries, keys, offset): ...

    class Turn(AttentionPosition):
        def rotate(self, x, offset): ...

    class SlowTurn(Turn): ...

    assert (Slope.gives, Turn.gives, SlowTurn.gives) == ("bias", "rotation", "rotation")


# Learned.


def test_learned_positions_are_rows_of_a_table():
    module = LearnedPosition(6, learned_positions=9)
    positions = torch.tensor([[0, 1, 8], [3, 3, 0]])
    got = module(positions, 9)
    assert got.shape == (2, 3, 6)
    for b in range(2):
        for n in range(3):
            assert torch.equal(got[b, n], module.weight[positions[b, n]])
    got.sum().backward()
    counts = torch.tensor([2.0, 1, 0, 2, 0, 0, 0, 0, 1])
    assert torch.equal(module.weight.grad, counts[:, None].expand(9, 6))


def test_learned_positions_start_with_a_standard_deviation_of_choice():
    """The same draws, scaled; without a choice, fairseq's."""
    weights = []
    for std in (None, 400**-0.5, 1.0):
        torch.manual_seed(5)
        weights.append(LearnedPosition(400, learned_positions=500, learned_positions_std=std).weight)
    torch.manual_seed(5)
    assert torch.equal(weights[0], torch.empty(500, 400).normal_(0.0, 400**-0.5))
    assert torch.equal(weights[0], weights[1])
    torch.testing.assert_close(weights[2], 20 * weights[0])
    with pytest.raises(ValueError, match="--learned-positions-std is 0.0: choose a number above 0"):
        LearnedPosition(4, learned_positions_std=0.0)


def test_learned_positions_end():
    module = LearnedPosition(4, learned_positions=5)
    module(torch.arange(5)[None], 5)
    with pytest.raises(
        ValueError, match="a sequence of length 6 is longer than --learned-positions 5: train with more"
    ):
        module(torch.arange(6)[None], 6)
    with pytest.raises(ValueError, match="length 6 is longer than --learned-positions 5"):
        module(torch.tensor([[5]]), 6)  # a step of decoding
    padded = torch.tensor([[0, 1, 2, 3, 4, 4, 4, 4]])  # padding has the last position before it
    assert torch.equal(module(padded, 8), module.weight[padded])
    with pytest.raises(ValueError, match="--learned-positions is 0: choose 1 or more"):
        LearnedPosition(4, learned_positions=0)
    assert LearnedPosition(4).weight.size(0) == 1024


def test_learned_positions_are_in_the_checkpoint_and_follow_the_dtype():
    module, other = LearnedPosition(4, learned_positions=5), LearnedPosition(4, learned_positions=5)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.weight, module.weight)
    assert module.half()(torch.zeros(1, 1, dtype=torch.long), 1).dtype == torch.float16


# Rotary.


@pytest.mark.parametrize("dim", [2, 4, 10])
@pytest.mark.parametrize("offset", [0, 5])
def test_rotation(dim, offset):
    x = torch.randn(2, 3, 6, dim, dtype=torch.float64)
    got = RotaryPosition(dim, 3, causal=False).rotate(x, offset)
    for b in range(2):
        for h in range(3):
            for n in range(6):
                torch.testing.assert_close(got[b, h, n], rotated(x[b, h, n], offset + n))


def test_rotation_by_hand():
    """Width 4: neighbours are pairs, the first turns by 1 a position, the second by 1/100."""
    x = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    got = RotaryPosition(4, 1, causal=False).rotate(x[None, None], 1)[0, 0]
    expected = [
        [math.cos(1), math.sin(1), math.cos(0.01), math.sin(0.01)],
        [-math.sin(2), math.cos(2), -math.sin(0.02), math.cos(0.02)],
    ]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


@settings(derandomize=True, max_examples=40)
@given(m=st.integers(0, 3000), n=st.integers(0, 3000), shift=st.integers(0, 3000), pairs=st.integers(1, 8))
def test_rotated_products_know_the_distance_alone(m, n, shift, pairs):
    module = RotaryPosition(2 * pairs, 1, causal=True)
    q, k = torch.randn(2, 1, 1, 1, 2 * pairs, dtype=torch.float64)
    here = module.rotate(q, m) @ module.rotate(k, n).mT
    there = module.rotate(q, m + shift) @ module.rotate(k, n + shift).mT
    torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(module.rotate(q, m).norm(), q.norm())  # and no length


@HALF
def test_rotation_is_as_exact_in_half_precision_far_from_the_start(dtype):
    x = torch.randn(1, 1, 50, 8, dtype=torch.float64).to(dtype)
    module = RotaryPosition(8, 1, causal=True)
    got = module.rotate(x, 5000)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), module.rotate(x.double(), 5000), rtol=0, atol=3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_rotation_differentiates_any_layout_also_compiled(dtype, monkeypatch):
    module = RotaryPosition(6, 2, causal=True)
    # Views with odd strides, or an odd beginning, as no complex number may have.
    base, flat = torch.randn(3, 5, 2, 7, dtype=dtype), torch.randn(61, dtype=dtype)
    grads = torch.randn(3, 2, 5, 6, dtype=dtype), torch.randn(1, 2, 5, 6, dtype=dtype)

    def results() -> list[torch.Tensor]:
        leaves = base.clone().requires_grad_(), flat.clone().requires_grad_()
        views = leaves[0][..., 1:].transpose(1, 2), leaves[1][1:].view(1, 2, 5, 6)
        rotated_views = [module.rotate(view, 3) for view in views]
        torch.autograd.backward(rotated_views, grads)
        return [*rotated_views, *(leaf.grad for leaf in leaves)]

    found = results()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for one, other in zip(found, results(), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other)
    assert found[2][..., 1:].any() and not found[2][..., 0].any()


@pytest.mark.parametrize("make", [
    lambda: RotaryPosition(5, 2, causal=True),
    lambda: build_attention("softmax", config_of(10, 2, position="rotary"), "encoder"),
    lambda: build_attention("linear", config_of(8, 2, position="rotary", feature_dim="5"), "decoder"),
], ids=["bare", "softmax", "linear"])  # fmt: skip
def test_an_odd_width_cannot_be_rotated(make):
    with pytest.raises(
        ValueError,
        match="--position rotary rotates pairs of features, and a head's queries have 5: "
        ".*-attention-heads.*--decoder-head-dim.*--feature-dim",
    ):
        make()


# ALiBi.


@pytest.mark.parametrize(
    "heads,expected",
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (8, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8]),
        (12, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
        (16, [2 ** (-h / 2) for h in range(1, 17)]),
    ],
)
def test_slopes(heads, expected):
    bias = AlibiPosition(4, heads, causal=False).bias(1, 2, 0)  # distance 1
    torch.testing.assert_close(bias[:, 0, 1], -torch.tensor(expected))
    assert (bias[:, 0, 0] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_linear_bias(causal):
    """Four queries, the first at position 2 of seven keys."""
    bias = AlibiPosition(4, 2, causal=causal).bias(4, 7, 2)
    assert bias.shape == (2, 4, 7)
    for h, slope in enumerate((1 / 16, 1 / 256)):
        for n in range(4):
            for m in range(7):
                if m <= 2 + n or not causal:  # what a causal mask hides may be anything
                    assert bias[h, n, m].item() == -slope * abs(2 + n - m)


@pytest.mark.parametrize("cls", [AlibiPosition, T5Position])
@pytest.mark.parametrize("causal", [False, True])
def test_bias_knows_the_distance_alone(cls, causal):
    module = cls(4, 3, causal=causal)
    whole = module.bias(300, 300, 0)
    assert torch.equal(whole[:, 200:], module.bias(100, 300, 200))
    assert torch.equal(whole[:, 100:200, 100:200], whole[:, :100, :100])


@HALF
@pytest.mark.parametrize("cls", [AlibiPosition, T5Position])
def test_bias_is_single_precision_in_modules_of_half(cls, dtype):
    module = cls(4, 2, causal=True)
    exact = module.bias(3, 500, 497)
    low = module.to(dtype).bias(3, 500, 497)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, exact, rtol=torch.finfo(dtype).eps, atol=0)
    if cls is AlibiPosition:  # these slopes are exact in any precision, and so is every distance
        assert torch.equal(low, exact)


def test_slopes_are_not_in_the_checkpoint():
    module = AlibiPosition(4, 2, causal=True)
    assert not module.state_dict()
    assert module.to("meta").bias(1, 1, 0).device.type == "meta"  # but go where the module goes


# T5.

#: bucket -> the first distance in it, with 32 buckets up to distance 128; the bounds 8·16^(k/8) and 16·8^(k/16) worked
#: out by hand.
TWO_SIDED = dict(enumerate([*range(8), 8, 12, 16, 23, 32, 46, 64, 91]))
CAUSAL = dict(enumerate([*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]))


def expected_bucket(distance: int, causal: bool) -> int:
    starts = CAUSAL if causal else TWO_SIDED
    within = max(b for b, first in starts.items() if first <= abs(distance))
    return within + (16 if distance > 0 else 0)


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_of_distances(causal):
    module = T5Position(4, 2, causal=causal)
    with torch.no_grad():
        module.table.copy_(torch.arange(32.0)[:, None].expand(32, 2) + torch.tensor([0.0, 100.0]))
    bias = module.bias(1, 1101, 500)
    assert bias.shape == (2, 1, 1101)
    for m in range(1101):
        if m <= 500 or not causal:
            expected = expected_bucket(m - 500, causal)
            assert bias[:, 0, m].tolist() == [expected, 100 + expected], m - 500
    assert bias[0, 0, 0] == (31 if causal else 15)  # far beyond the longest distance


@settings(derandomize=True, max_examples=60)
@given(
    half=st.integers(1, 20), more=st.integers(1, 200), causal=st.booleans(), offset=st.integers(0, 250), data=st.data()
)
def test_buckets_of_any_number(half, more, causal, offset, data):
    count = 2 * half if causal else 4 * half
    module = T5Position(2, 1, causal=causal, t5_buckets=count, t5_max_distance=half + more)
    with torch.no_grad():
        module.table.copy_(torch.arange(float(count))[:, None])
    keys = offset + 1 if causal else 300
    m = data.draw(st.integers(0, keys - 1))
    got = int(module.bias(1, keys, offset)[0, 0, m])
    # The reference rounds: next to a bound it may be on either side of it.
    expected = bucket(m - offset, count, half + more, causal)
    assert got == expected or abs(got - expected) == 1 and _at_a_bound(abs(m - offset), half, half + more)


def _at_a_bound(n: int, exact: int, longest: int) -> bool:
    place = math.log(n / exact) / math.log(longest / exact) * exact
    return abs(place - round(place)) < 1e-9


def test_table_of_buckets():
    module, other = (T5Position(16, 25, causal=True, t5_buckets=500, t5_max_distance=300) for _ in range(2))
    assert module.table.shape == (500, 25) and module.table.std().item() == pytest.approx(400**-0.5, rel=0.03)
    assert list(module.state_dict()) == ["table"]
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.bias(3, 9, 6), module.bias(3, 9, 6))


def test_gradients_of_buckets_are_summed_in_single_precision():
    module = T5Position(2, 1, causal=False).to(torch.bfloat16)
    module.bias(600, 600, 0).sum().backward()
    exact = T5Position(2, 1, causal=False).double()
    exact.bias(600, 600, 0).sum().backward()
    assert exact.table.grad.sum() == 600 * 600 and exact.table.grad[0] == 600
    torch.testing.assert_close(module.table.grad.double(), exact.table.grad, rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    "causal,options,message",
    [
        (True, {"t5_buckets": 7}, "--t5-buckets is 7: choose a positive multiple of 2 in the decoder, of 4 in the "
            "encoder"),
        (False, {"t5_buckets": 6}, "--t5-buckets is 6"),
        (True, {"t5_buckets": 0}, "--t5-buckets is 0"),
        (True, {"t5_max_distance": 16}, "--t5-max-distance is 16, and with --t5-buckets 32 distances up to 15 have a "
            "bucket each: choose more than 16"),
        (False, {"t5_max_distance": 8}, "--t5-max-distance is 8, .*up to 7 .*choose more than 8"),
    ],
)  # fmt: skip
def test_buckets_that_cannot_be(causal, options, message):
    with pytest.raises(ValueError, match=message):
        T5Position(4, 2, causal=causal, **options)
    T5Position(4, 2, causal=True, t5_buckets=6, t5_max_distance=4)
    T5Position(4, 2, causal=False, t5_buckets=4, t5_max_distance=2)


def test_each_attention_has_a_table_of_its_own():
    config = config_of(8, 2, position="t5")
    tables = [build_attention("softmax", config, role).position.table for role in ("encoder", "encoder", "decoder")]
    assert len({id(table) for table in tables}) == 3
    assert build_attention("softmax", config, "cross").position is None


# Randomized.


def randomized(base="sinusoidal", dim=6, span=40, longest=10) -> RandomizedPosition:
    dim = None if base == "relative" else dim
    return RandomizedPosition(dim, randomized_base=base, randomized_range=span, randomized_eval_length=longest)


CPU = torch.device("cpu")
bases = pytest.mark.parametrize("base", ["sinusoidal", "learned", "relative"])


@bases
@pytest.mark.parametrize("length", [1, 7, 39, 40])
def test_training_draws_an_ordered_subset(base, length):
    module = randomized(base).train()
    draws = [module.numbers(length, CPU).tolist() for _ in range(20)]
    for draw in draws:
        assert len(draw) == length and draw == sorted(set(draw)) and 0 <= draw[0] and draw[-1] < 40
    if length < 40:
        assert len(set(map(tuple, draws))) > 10
    else:
        assert draws[0] == list(range(40))


def test_subsets_are_uniform():
    """The mean of the j-th smallest of n numbers below L is (j + 1)(L + 1)/(n + 1) − 1."""
    module, n, L = randomized(span=40).train(), 4, 40
    draws = torch.stack([module.numbers(n, CPU) for _ in range(8000)]).double()
    expected = torch.tensor([(j + 1) * (L + 1) / (n + 1) - 1 for j in range(n)], dtype=torch.float64)
    torch.testing.assert_close(draws.mean(0), expected, rtol=0, atol=0.5)
    shares = torch.bincount(draws.long().flatten(), minlength=L) / draws.numel()
    torch.testing.assert_close(shares, torch.full((L,), 1 / L, dtype=shares.dtype), rtol=0.2, atol=0)


def test_draws_come_from_torchs_generator():
    module = randomized().train()
    torch.manual_seed(5)
    first = module.numbers(6, CPU)
    second = module.numbers(6, CPU)
    torch.manual_seed(5)
    assert torch.equal(module.numbers(6, CPU), first) and not torch.equal(first, second)


@bases
def test_evaluation_spreads_positions_evenly_and_alike_for_every_prefix(base):
    module = randomized(base, span=43, longest=10).eval()
    whole = module.numbers(10, CPU)
    assert whole.tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36] and whole.dtype == torch.int64
    for length in range(1, 11):
        assert torch.equal(module.numbers(length, CPU), whole[:length])


def test_a_limit_of_ones_own_is_set_by_its_option():
    class Table(EmbeddedPosition):
        def __init__(self, dim, rows):
            super().__init__(dim)
            self.longest = rows

    assert (Table(4, 12).longest, EmbeddedPosition(4).longest) == (12, None)


@pytest.mark.parametrize(
    "span,longest,step", [(40, 10, 4), (41, 20, 2), (9, 9, 1), (2048, 512, 4), (2048, 500, 4), (7, 1, 7)]
)
def test_evaluation_uses_the_range(span, longest, step):
    numbers = randomized(span=span, longest=longest).eval().numbers(longest, CPU)
    assert numbers.tolist() == [j * step for j in range(longest)] and numbers[-1] < span


@pytest.mark.parametrize("base", ["sinusoidal", "learned"])
@pytest.mark.parametrize("training", [False, True])
def test_base_at_the_numbers(base, training):
    module = randomized(base).train(training)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    torch.manual_seed(3)
    got = module(positions, 5)
    torch.manual_seed(3)
    numbers = module.numbers(5, CPU)
    for b in range(2):
        for n in range(5):
            number = numbers[positions[b, n]]
            expected = module.base.weight[number] if base == "learned" else sinusoid(number, 6)
            assert torch.equal(got[b, n], expected)


def test_learned_base_has_a_vector_for_every_number():
    assert randomized("learned").base.weight.shape == (40, 6)
    assert list(randomized("learned").state_dict()) == ["base.weight"]
    assert not randomized("sinusoidal").state_dict() and not randomized("relative").state_dict()


def test_longest_evaluation_may_change_at_test_time():
    trained, longer = randomized("learned", longest=10), randomized("learned", longest=20).eval()
    longer.load_state_dict(trained.state_dict())
    assert longer.numbers(20, CPU).tolist() == list(range(0, 40, 2))


@pytest.mark.parametrize("base", ["sinusoidal", "learned"])
@pytest.mark.parametrize("left", [False, True])
def test_one_subset_a_batch_and_padding_shifts_nothing(base, left):
    module = TokenEmbedding(9, 6, PAD, scaling="none", positions=randomized(base), dropout=0.0)
    row = [PAD, PAD, 4, 5, 6] if left else [4, 5, 6, PAD, PAD]
    batch = torch.tensor([row, [4, 5, 6, 7, 8], [4, 5, 6, 7, 8]])
    module.train()
    got, again = module(batch), module(batch)
    assert torch.equal(got[1], got[2]) and not torch.equal(got, again)
    real = got[0, 2:] if left else got[0, :3]
    assert torch.equal(real, got[1, :3])
    module.eval()
    alone = module(torch.tensor([[4, 5, 6]]))[0]
    assert torch.equal(module(batch)[0, 2:] if left else module(batch)[0, :3], alone)
    for n in range(5):
        assert torch.equal(module(batch[:, : n + 1], last=True), module(batch)[:, n : n + 1])


@bases
def test_sequences_beyond_the_range(base):
    module = randomized(base)
    with pytest.raises(ValueError, match="a sequence of length 41 in training is longer than --randomized-range 40"):
        module.train().numbers(41, CPU)
    with pytest.raises(
        ValueError, match="a sequence of length 11 in evaluation is longer than --randomized-eval-length 10"
    ):
        module.eval().numbers(11, CPU)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"base": "sinus"}, "--randomized-base is 'sinus': choose from sinusoidal, learned, relative"),
        ({"longest": 41}, "--randomized-eval-length is 41: choose from 1 to --randomized-range 40"),
        ({"longest": 0}, "--randomized-eval-length is 0: choose from 1 to"),
        ({"span": 0}, "--randomized-range 0"),
    ],
)
def test_randomized_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        randomized(**options)


@bases
def test_copies_are_alike(base):
    module = copy.deepcopy(randomized(base).eval())
    assert module.numbers(3, CPU).tolist() == [0, 4, 8]
    assert module.gives == ("indices" if base == "relative" else "embedding")


def test_indices_are_built_for_the_relative_base_alone():
    relative = config_of(8, 2, position="randomized", randomized_base="relative")
    module = build_indices(relative).eval()
    assert gives_indices(relative) and module(3, CPU).tolist() == [0, 4, 8]
    assert build_embedded_position("randomized", 8, relative)(torch.zeros(1, 1, dtype=torch.long), 1) is None
    for other in (config_of(8, 2, position="randomized"), config_of(8, 2, position="rotary"), config_of(8, 2)):
        assert not gives_indices(other) and build_indices(other) is None
    embedded = build_embedded_position("randomized", 8, config_of(8, 2, position="randomized")).eval()
    assert torch.equal(embedded(torch.tensor([[0, 2]]), 3)[0], sinusoid(torch.tensor([0, 8]), 8))


# Relative attention at given positions.

relative_cases = pytest.mark.parametrize(
    "case",
    [
        Case("relative", "encoder"),
        Case("relative", "decoder"),
        Case("relative", "encoder", {"attention_bias": True, "attention_scale": "model_dim"}),
    ],
    ids=str,
)
NUMBERS = torch.tensor([0, 3, 4, 90, 91, 700, 2047])


@relative_cases
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_relative_attention_at_given_positions(case, side):
    module, (x, _) = case.build(), case.inputs()
    padding = None if side == "none" else padding_of(7, side)

    def row(row):
        return logits(row, position=lambda m: int(NUMBERS[m])).softmax(0)

    expected, weights = by_rows(row, module, x, x, padding)
    out, got, _ = module(x, None, Context(key_padding_mask=padding, positions=NUMBERS, return_weights=True))
    torch.testing.assert_close(got, weights, rtol=0, atol=1e-9)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-9)
    lean = module(x, None, Context(key_padding_mask=padding, positions=NUMBERS))[0]
    torch.testing.assert_close(lean, out, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_given_positions_of_an_odd_width(role):
    torch.manual_seed(1)
    module = ATTENTION_REGISTRY["relative"](9, 3, role=role).eval()
    torch.nn.init.normal_(module.position_bias)
    x = torch.randn(7, 2, 9)
    torch.testing.assert_close(
        module(x, None, Context(positions=torch.arange(7)))[0], module(x)[0], rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        module(x, None, Context(positions=torch.arange(7) + 500))[0], module(x)[0], rtol=1e-3, atol=1e-3
    )
    assert not torch.allclose(module(x, None, Context(positions=2 * torch.arange(7)))[0], module(x)[0], atol=1e-3)


def test_decoding_at_given_positions():
    case = Case("relative", "decoder")
    module, (x, _) = case.build(), case.inputs()
    padding = padding_of(7, "left")
    full = module(x, None, Context(key_padding_mask=padding, positions=NUMBERS))[0]
    for bounds in ([*range(8)], [0, 3, 4, 7], [0, 1, 7]):
        state, parts = {}, []
        for a, b in zip(bounds, bounds[1:]):
            mask = padding[:, a:b]
            parts.append(module(x[a:b], None, Context(key_padding_mask=mask, state=state, positions=NUMBERS[:b]))[0])
        torch.testing.assert_close(torch.cat(parts), full, rtol=1e-9, atol=1e-10)


@HALF
def test_given_positions_in_half_precision(dtype):
    case = Case("relative", "encoder")
    exact, low, (x, _) = case.build(), case.build(dtype=dtype), case.inputs()
    expected = exact(x, None, Context(positions=NUMBERS))[0]
    got = low(x.to(dtype), None, Context(positions=NUMBERS))[0]
    assert got.dtype == dtype
    assert (got.double() - expected).norm() / expected.norm() < {torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]


def test_gradients_at_given_positions():
    module = Case("relative", "decoder").build()
    x = torch.randn(5, 1, 24, dtype=torch.float64, requires_grad=True)
    numbers = NUMBERS[:5]
    assert torch.autograd.gradcheck(lambda x: module(x, None, Context(positions=numbers))[0], [x], fast_mode=True)
    module(x, None, Context(positions=numbers))[0].square().sum().backward()
    assert module.pos_proj.weight.grad.abs().sum() > 0 and module.position_bias.grad.abs().sum() > 0


def test_kinds_that_take_no_numbers_refuse_them():
    for name in ("softmax", "linear"):
        module = Case(name, "encoder").build()
        with pytest.raises(ValueError, match=f"{name} attention takes no position numbers"):
            module(torch.randn(2, 1, 24, dtype=torch.float64), None, Context(positions=torch.arange(2)))


# Which position goes with which attention.

EMBEDDED = {"none", "sinusoidal", "learned", "randomized", "fraction", "indicator"}


@pytest.mark.parametrize(
    "name,base,expected",
    [
        ("softmax", "sinusoidal", EMBEDDED | {"rotary", "alibi", "t5"}),
        ("softmax", "relative", EMBEDDED - {"randomized"} | {"rotary", "alibi", "t5"}),
        ("linear", "learned", EMBEDDED | {"rotary"}),
        ("linear", "relative", EMBEDDED - {"randomized"} | {"rotary"}),
        *((name, "sinusoidal", EMBEDDED | {"rotary"}) for name in ("galerkin", "fourier")),
        ("relative", "sinusoidal", set()),
        ("relative", "relative", {"randomized"}),
    ],
)
def test_positions_of_each_attention(name, base, expected):
    cls = ATTENTION_REGISTRY.find(name)
    config = config_of(8, 2, randomized_base=base)
    assert positions_for(cls, config) == expected
    for position in POSITION_REGISTRY:
        config.position = position
        inside = POSITION_REGISTRY[position].gives_with(config) in ("rotation", "bias", "indices")
        if inside and not cls.brings_position and position not in expected:
            with pytest.raises(
                ValueError,
                match=rf"--position {position} is not defined for {name} attention \(--encoder-attention\); with it "
                rf"go: "
                f"{', '.join(sorted(expected))}$",
            ):
                build_attention(name, config, "encoder")
        else:
            module = build_attention(name, config, "encoder")
            own = getattr(module, "position", None)
            wanted = position if inside and position in expected and not cls.brings_position else None
            assert (None if own is None else own.registered_name) == wanted


@pytest.mark.parametrize("role,causal", [("encoder", False), ("decoder", True)])
def test_options_and_causality_reach_the_position(role, causal):
    config = config_of(8, 2, position="t5", t5_buckets=8, t5_max_distance=9)
    position = build_attention("softmax", config, role).position
    assert (position.causal, position.dim, position.num_heads) == (causal, 4, 2)
    assert position.table.shape == (8, 2) and len(position.buckets) == 10


def test_position_of_linear_attention_is_as_wide_as_its_features():
    config = config_of(8, 2, position="rotary", feature_dim="6")
    assert build_attention("linear", config, "encoder").position.dim == 6


def test_embedded_options():
    config = SimpleNamespace(learned_positions=7, learned_positions_std=None)
    assert build_embedded_position("learned", 4, config).weight.shape == (7, 4)


# A share of the sentence, and a mark (Chiang & Cholak 2022).


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("mirrored", [False, True])
def test_fractions_are_of_each_sentence(left, mirrored):
    module = FractionPosition(6, mirrored_positions=mirrored).double()
    lengths = [4, 1, 7]
    tokens = torch.full((3, 9), PAD)
    for row, length in zip(tokens, lengths):
        (row[9 - length :] if left else row[:length]).fill_(5)
    got = module(real_positions(tokens.eq(PAD)), 9)
    assert got.shape == (3, 9, 6)
    for row, length in zip(got, lengths):
        real = row[9 - length :] if left else row[:length]
        want = torch.zeros(length, 6, dtype=torch.float64)
        for i in range(length):
            want[i, :2] = torch.tensor([i / length, math.cos(math.pi * i)], dtype=torch.float64)
            if mirrored:
                want[i, 3:5] = -want[i, :2]
        torch.testing.assert_close(real, want, rtol=0, atol=1e-15)
    assert not list(module.parameters()) and not module.state_dict()


@pytest.mark.parametrize("dim, mirrored", [(6, False), (7, False), (2, False), (8, True)])
def test_learned_fractions(dim, mirrored):
    torch.manual_seed(0)
    module = FractionPosition(dim, fraction_scales="learned", mirrored_positions=mirrored).double()
    features = dim // 2 if mirrored else dim
    (scales,) = module.parameters()
    assert scales.shape == (features,)
    positions = torch.tensor([[0, 1, 2, 3, 3], [0, 0, 0, 1, 2]])  # padded on the right, on the left
    got = module(positions, 5)
    for b, length in enumerate((4, 3)):
        for n in range(5):
            i = positions[b, n].item()
            want = [
                i / length * math.exp(s) if j < (features + 1) // 2 else math.cos(math.pi * i * math.exp(s))
                for j, s in enumerate(scales.tolist())
            ]
            want += [-x for x in want] if mirrored else []
            torch.testing.assert_close(got[b, n], torch.tensor(want, dtype=torch.float64))
    assert torch.autograd.gradcheck(
        lambda s: torch.func.functional_call(module, {"log_scales": s}, (positions, 5)), scales
    )
    weights = FractionPosition(2000, fraction_scales="learned").log_scales
    assert weights.std().item() == pytest.approx(1, abs=0.1) and abs(weights.mean().item()) < 0.1


@pytest.mark.parametrize("index", [0, 1, 4, 50])
@pytest.mark.parametrize("mirrored", [False, True])
def test_an_indicator_marks_one_position(index, mirrored):
    module = IndicatorPosition(4, indicator_index=index, mirrored_positions=mirrored)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 1, 2, 3]])
    got = module(positions, 5)
    want = torch.zeros(2, 5, 4)
    want[..., 0] = positions.eq(index).float()
    want[..., 2] = -want[..., 0] if mirrored else 0
    assert torch.equal(got, want) and not module.state_dict()
    assert torch.equal(module(positions[:, -1:], 5), want[:, -1:])  # a step of decoding


@HALF
def test_constructed_positions_follow_the_dtype(dtype):
    positions = torch.arange(3000)[None]
    got = FractionPosition(4).to(dtype)(positions, 3000)
    assert got.dtype == dtype
    # The share is exact before it is rounded, also where a position has no number of the dtype.
    torch.testing.assert_close(got[0, :, 0], (torch.arange(3000) / 3000).to(dtype), rtol=0, atol=0)
    assert got[0, :, 1].tolist() == [1, -1] * 1500
    assert IndicatorPosition(4).to(dtype)(positions, 3000).dtype == dtype


def test_wrong_constructed_positions():
    with pytest.raises(ValueError, match="--fraction-scales is 'free': choose from fixed, learned"):
        FractionPosition(4, fraction_scales="free")
    with pytest.raises(ValueError, match="--position has 2 features here, and there are 1: choose a larger width"):
        FractionPosition(1)
    with pytest.raises(ValueError, match="--mirrored-positions needs an even width, and it is 5"):
        IndicatorPosition(5, mirrored_positions=True)
    with pytest.raises(ValueError, match="--indicator-index is -1: choose 0 or more"):
        IndicatorPosition(4, indicator_index=-1)
