"""The drawing of prompts. A prompt is N examples (x, y) of one function, and a query x whose y is to be predicted.

Prompt i of epoch e of a subset is drawn from numpy's frozen legacy generator, seeded by (seed, subset, e, i). So it is
the same in any order of drawing, in any process, and after a resume. It is computed in float64 and rounded to float32.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.random import RandomState

from data_prep.dataset import Json
from data_prep.in_context.functions import FUNCTIONS, FunctionClass
from data_prep.in_context.shifts import SHIFTS
from data_prep.progress import progress

#: Raised when equal requests give other prompts.
VERSION = 1


@dataclass(frozen=True)
class Prompts:
    """The distribution of prompts.

    Attributes:
        function: the class of functions, one of which is drawn for each prompt.
        examples: N; a prompt has P = N + 1 points, the last of which is the query.
        x_std: σ_x; x ~ N(0, σ_x² I).
    """

    function: FunctionClass
    examples: int
    x_std: float
    # Seeding it for each prompt takes a fourteenth of the time of making one.
    _random: RandomState = field(default_factory=RandomState, init=False, repr=False, compare=False)

    @classmethod
    def of_request(cls, request: Json) -> Prompts:
        """The distribution of the request in ``dataset.json``."""
        kind = FUNCTIONS[request["function"]]
        settings = {name: request[name] for name in kind.defaults}
        return cls(kind(request["dims"], **settings), request["examples"], request["x_std"])

    def draw(self, seed: int, subset: str, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """x (P, n) and y (P,), float32; with the shift that the subset is named after."""
        random = self._random
        random.seed([seed, zlib.crc32(subset.encode()), epoch, number])
        x = self.x_std * random.standard_normal((self.examples + 1, self.function.dims))
        shift = SHIFTS.get(subset)
        if shift is not None:
            x = shift.points(x, random)
        y = self.function.values(x, random)
        if shift is not None:
            y = shift.values(y, self.function.variance(self.x_std), random)
        return x.astype(np.float32), y.astype(np.float32)

    def draw_many(self, seed: int, subset: str, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The first prompts of a subset that has no epochs: x (S, P, n) and y (S, P), float32."""
        # Shifts that turn x take half a second a prompt in 400 dimensions.
        numbers = progress(range(size), f"drawing {subset}", unit=" prompts")
        x, y = zip(*(self.draw(seed, subset, 0, number) for number in numbers), strict=True)
        return np.stack(x), np.stack(y)

    @property
    def zero_error(self) -> float:
        """The mean squared error / unit of a predictor that always answers 0."""
        return self.function.variance(self.x_std) / self.function.unit

    @property
    def floor(self) -> float | None:
        """The least expected mean over all points of the squared error / unit; None where it is not known."""
        errors = [self.function.least_error(seen, self.x_std) for seen in range(self.examples + 1)]
        if None in errors:
            return None
        return sum(errors) / len(errors) / self.function.unit
