"""Classes of functions that prompts are drawn from (Garg et al. 2022): x (P, n) -> y (P,), float64.

    linear          y = w·x,                          w ~ N(0, I)
    sparse_linear   y = w·x,                          all but s weights are 0, s = 3
    noisy_linear    y = w·x + ε,                      ε ~ N(0, σ²), also at the query
    quadratic       y = Σ_j w_j x_j² / √3
    relu_network    y = √(2/h) Σ_j v_j ReLU(u_j·x),   u_j ~ N(0, I), v ~ N(0, I), h = 100
    decision_tree   the leaf that x falls into: a node goes right where its coordinate of x is above 0; depth 4,
                    coordinates uniform, leaves N(0, 1)

Every prompt has a function of its own. Sums are taken without a matrix product, whose rounding depends on the machine.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.random import RandomState


class FunctionClass(ABC):
    """A class of functions of n variables; draws come from numpy's frozen legacy generator.

    Args:
        dims: n.
        settings: a value for every name in ``defaults``.
    """

    name: str
    #: Settings of the class -> their values where none is given.
    defaults: Mapping[str, float] = MappingProxyType({})

    def __init__(self, dims: int, **settings: float) -> None:
        self.dims = dims
        self.settings = dict(self.defaults) | settings

    @abstractmethod
    def values(self, x: np.ndarray, random: RandomState) -> np.ndarray:
        """Draws a function; x (P, n) -> its values (P,)."""

    @property
    def unit(self) -> float:
        """What squared errors are divided by: E[y²] at x ~ N(0, I), without noise."""
        return float(self.dims)

    def variance(self, x_std: float) -> float:
        """E[y²] at x ~ N(0, σ_x² I): the squared error of a predictor that always answers 0."""
        return self.unit * x_std**2

    def least_error(self, seen: int, x_std: float) -> float | None:
        """The least expected squared error at x ~ N(0, σ_x² I) after ``seen`` examples; None where it is not known."""
        return None


class Linear(FunctionClass):
    name = "linear"

    def values(self, x, random):
        return product(x, random.standard_normal(self.dims))

    def least_error(self, seen, x_std):
        """n σ_x² max(0, 1 − k/n): the k examples fix the weights in a random subspace of k dimensions."""
        return x_std**2 * max(0, self.dims - seen)


class SparseLinear(FunctionClass):
    name = "sparse_linear"
    defaults = MappingProxyType({"sparsity": 3})

    @property
    def unit(self):
        return float(min(self.settings["sparsity"], self.dims))

    def values(self, x, random):
        w = random.standard_normal(self.dims)
        w[random.permutation(self.dims)[int(self.settings["sparsity"]) :]] = 0.0
        return product(x, w)


class NoisyLinear(Linear):
    name = "noisy_linear"
    defaults = MappingProxyType({"noise_std": 1.0})

    def values(self, x, random):
        return super().values(x, random) + self.settings["noise_std"] * random.standard_normal(len(x))

    def variance(self, x_std):
        return super().variance(x_std) + self.settings["noise_std"] ** 2

    def least_error(self, seen, x_std):
        return self.variance(x_std) if seen == 0 else None


class Quadratic(FunctionClass):
    name = "quadratic"

    def values(self, x, random):
        return product(x**2, random.standard_normal(self.dims)) / math.sqrt(3)

    def variance(self, x_std):
        return self.unit * x_std**4


class ReluNetwork(FunctionClass):
    name = "relu_network"
    defaults = MappingProxyType({"hidden": 100})

    def values(self, x, random):
        hidden = int(self.settings["hidden"])
        u, v = random.standard_normal((hidden, self.dims)), random.standard_normal(hidden)
        return math.sqrt(2 / hidden) * product(np.maximum(product(x[:, None], u), 0), v)  # (P, h) -> (P,)


class DecisionTree(FunctionClass):
    name = "decision_tree"
    defaults = MappingProxyType({"tree_depth": 4})
    unit = 1.0

    def values(self, x, random):
        depth = int(self.settings["tree_depth"])
        coordinates, leaves = random.randint(self.dims, size=2**depth - 1), random.standard_normal(2**depth)
        node = np.zeros(len(x), dtype=int)  # the children of node i are 2i + 1 and 2i + 2
        for _ in range(depth):
            node = 2 * node + 1 + (x[np.arange(len(x)), coordinates[node]] > 0)
        return leaves[node - (2**depth - 1)]

    def variance(self, x_std):
        return self.unit


FUNCTIONS: Mapping[str, type[FunctionClass]] = {
    cls.name: cls for cls in (Linear, SparseLinear, NoisyLinear, Quadratic, ReluNetwork, DecisionTree)
}


def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Σ_j x_j w_j over the last axis."""
    return (x * w).sum(-1)
