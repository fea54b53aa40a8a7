"""Ranges of options: what is inside, what is refused, and how a range reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError


@dataclass
class Options:
    layers: int = field(default=1, metadata={"help": "text", "least": 1})
    rate: float | None = field(default=None, metadata={"help": "text", "least": 0, "below": 1})
    threshold: float = field(default=1.0, metadata={"help": "text", "above": 0, "most": 1})
    scale: float = field(default=1.0, metadata={"help": "text", "above": 0})
    weights: str = field(default="{}", metadata={"help": "text", "least": 0})
    bias: float = field(default=0.0, metadata={"help": "text"})
    name: str = "softmax"
    start: str | None = field(default="ones", metadata={"help": "text", "choices": ("ones", "uniform")})


@pytest.mark.parametrize(
    "values",
    [
        {"layers": 1, "rate": 0, "threshold": 1, "scale": 1e-9, "weights": "{}", "bias": -3.0},
        {"rate": None, "bias": math.inf, "weights": '{"balance": 0.5}'},
        {"weights": "(0.9, 0.98)", "name": "-1"},
        {"weights": [0, 1.5], "layers": True},
        {"weights": "no JSON", "of something else": -1},
        {"start": "uniform"},
        {"start": None},
    ],
)
def test_values_inside(values):
    ranges.check(Options, values)


@pytest.mark.parametrize(
    "values,message",
    [
        ({"layers": 0}, "--layers is 0: choose 1 or more"),
        ({"rate": 1.0}, "--rate is 1.0: choose a number from 0 to below 1"),
        ({"rate": math.nan}, "--rate is nan: choose a number from 0 to below 1"),
        ({"threshold": 0.0}, "--threshold is 0.0: choose a number above 0 and up to 1"),
        ({"scale": 0.0}, "--scale is 0.0: choose a number above 0"),
        ({"scale": math.inf}, "--scale is inf: choose a number above 0"),
        ({"weights": '{"balance": 1, "ponder": -1}'}, '--weights is {"balance": 1, "ponder": -1}: choose 0 or more'),
        ({"weights": "[0.5, NaN]"}, "--weights is [0.5, NaN]: choose 0 or more"),
        ({"weights": (0.9, -0.98)}, "--weights is (0.9, -0.98): choose 0 or more"),
        ({"bias": math.nan}, "--bias is nan: choose a number"),
        ({"start": "zeros"}, "--start is 'zeros': choose from ones, uniform"),
        ({"start": ""}, "--start is '': choose from ones, uniform"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_values_outside(values, message):
    with pytest.raises(UsageError) as error:
        ranges.check(Options, values)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "value,kind",
    [(1, int), (1, float), (0.5, float | None), (None, int | None), (True, bool), ("1", str), ([1], list[int])],
)  # fmt: skip
def test_values_of_the_type(value, kind):
    ranges.check_type("width", value, kind)


@pytest.mark.parametrize(
    "value,kind,wanted",
    [("ten", int, "a whole number"), (1.5, int, "a whole number"), (True, int, "a whole number"),
     ("1", float | None, "a number"), (1, bool, "True or False"), (1, str | None, "text")],
)  # fmt: skip
def test_values_of_another_type(value, kind, wanted):
    with pytest.raises(UsageError, match=f"^--width is {value!r}: choose {wanted}$"):
        ranges.check_type("width", value, kind)
