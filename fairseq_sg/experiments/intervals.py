"""Confidence intervals of differences of means over seeds (Welch 1947)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

#: Of the intervals.
CONFIDENCE = 0.95


def interval(a: Sequence[float], b: Sequence[float], paired: bool = False) -> tuple[float, float] | None:
    """The confidence interval of mean(a) − mean(b); None below two values each, and where no float has a variance.

        mean(a) − mean(b) ± t_ν √e,   e = s_a²/n_a + s_b²/n_b,
        1/ν = (s_a²/(n_a e))²/(n_a − 1) + (s_b²/(n_b e))²/(n_b − 1).

    Values that do not vary are taken as exact.

    Args:
        a, b: values of seeds, assumed to be normal.
        paired: whether a_i and b_i belong together. The interval is then that of the mean of a_i − b_i.
    """
    if min(len(a), len(b)) < 2:
        return None
    from scipy.special import stdtrit  # the quantile of t

    difference = statistics.mean(a) - statistics.mean(b)
    varying = [[x - y for x, y in zip(a, b, strict=True)]] if paired else [a, b]
    try:
        errors = [statistics.variance(values) / len(values) for values in varying]
    except OverflowError:
        return None
    error = sum(errors)
    if error == 0:
        return difference, difference
    freedom = 1 / sum((e / error) ** 2 / (len(values) - 1) for e, values in zip(errors, varying, strict=True))
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error**0.5
    return difference - half, difference + half


def with_interval(difference: float, around: tuple[float, float] | None, digits: int) -> str:
    """``+5.0 [−1.2, +11.2]``, without brackets where there is no interval."""

    def signed(number: float) -> str:
        return f"{number:+z.{digits}f}".replace("-", "−")

    return signed(difference) + (f" [{signed(around[0])}, {signed(around[1])}]" if around else "")
