"""Confidence intervals: against the equations, pairs, values that do not vary, and how often they hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_sg.experiments.intervals import interval, with_interval

stats = pytest.importorskip("scipy.stats", reason="scipy has the reference: pip install scipy")


def test_three_and_three_values_with_equal_variances():
    """Variances 1, so a standard error of √(1/3 + 1/3) and four degrees of freedom: t = 2.776."""
    low, high = interval([11.0, 12.0, 13.0], [6.0, 7.0, 8.0])
    assert (low, high) == pytest.approx((5 - 2.7764 * (2 / 3) ** 0.5, 5 + 2.7764 * (2 / 3) ** 0.5), abs=1e-3)


def test_pairs():
    """Differences 1, 2 and 3: 2 ± 4.303 √(1/3). Without pairs, what pairs share hides it."""
    a, b = [11.0, 52.0, 93.0], [10.0, 50.0, 90.0]
    assert interval(a, b, paired=True) == pytest.approx((2 - 4.3027 * 3**-0.5, 2 + 4.3027 * 3**-0.5), abs=1e-3)
    low, high = interval(a, b)
    assert low < -80 and high > 80
    with pytest.raises(ValueError, match="is longer than"):
        interval([1.0, 2.0], [1.0, 2.0, 3.0], paired=True)


@pytest.mark.filterwarnings("error")
def test_values_that_do_not_vary_are_exact():
    assert interval([100.0, 100.0], [90.0, 90.0]) == (10.0, 10.0)
    assert interval([3.0, 5.0], [1.0, 3.0], paired=True) == (2.0, 2.0)
    low, high = interval([100.0, 100.0, 100.0], [89.0, 90.0, 91.0])
    assert low == pytest.approx(10 - 4.3027 * 3**-0.5, abs=1e-3) and high == pytest.approx(20 - low)


def test_values_whose_squares_no_float_holds_have_no_interval():
    assert interval([2.0**700, 2.0**690], [1.0, 2.0]) is None


def test_one_value_has_no_interval():
    assert interval([1.0], [2.0, 3.0]) is None and interval([1.0, 2.0], [], paired=False) is None


numbers = st.lists(st.integers(-1000, 1000).map(lambda x: x / 10), min_size=2, max_size=6, unique=True)


@given(numbers, numbers)
def test_intervals_are_those_of_scipy(a, b):
    """With other variances and numbers of seeds; and of pairs."""
    welch = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert interval(a, b) == pytest.approx(tuple(welch), rel=1e-6, abs=1e-6)
    assert interval(b, a) == pytest.approx((-welch[1], -welch[0]), rel=1e-6, abs=1e-6)
    fewest = min(len(a), len(b))
    a, b = a[:fewest], b[:fewest]
    if len({round(x - y, 6) for x, y in zip(a, b, strict=True)}) > 1:
        pairs = stats.ttest_rel(a, b).confidence_interval(0.95)
        assert interval(a, b, paired=True) == pytest.approx(tuple(pairs), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("paired", [False, True])
def test_nineteen_of_twenty_hold_the_difference(paired):
    """Of 2,000 experiments with three seeds. Welch's is a little wider; two standard errors would hold 88 %."""
    draw = np.random.default_rng(1)
    found = [interval(*draw.normal(7, 2, (2, 3)).tolist(), paired) for _ in range(2000)]
    assert 0.94 < np.mean([low < 0 < high for low, high in found]) < 0.98


def test_text():
    assert with_interval(5.0, (-1.25, 11.25), 2) == "+5.00 [−1.25, +11.25]"
    assert with_interval(-0.1234, None, 1) == "−0.1"
    assert with_interval(-0.04, (-0.049, 0.04), 1) == "+0.0 [+0.0, +0.0]"
