"""In-context regression (Garg et al. 2022): a function is to be learned from the examples in one input.

    x₁                       ->  y₁       no example is known
    x₁  y₁  x₂               ->  y₂       one example is known
    x₁  y₁  x₂  y₂  x₃       ->  y₃       …

A prompt has N examples (x, y) of one function and a query x, all drawn at random: x ~ N(0, σ² I) in n dimensions, and
a function of its own for every prompt. The answer is a number. --function chooses the functions:

    linear           y = w·x with w ~ N(0, I)
    sparse_linear    all but --sparsity weights are 0
    noisy_linear     y = w·x + noise of the standard deviation --noise-std
    quadratic        y = Σ w x² / √3
    relu_network     two layers, --hidden units
    decision_tree    signs of coordinates, --tree-depth decisions

No training file is written: --task sg_regression draws the training prompts, the same ones for the same --seed of
fairseq-train, with any number of workers and after a resume. Written are frozen prompts:

    valid, test      --size prompts each, drawn as in training
    long             the same with --long examples a prompt instead of --examples, if it is given
    --shifts         tests with another distribution: inputs or values multiplied (x_double, y_third …), inputs of
                     another covariance (skewed, half_subspace) or in one orthant (random_orthant, opposite_orthant), a
                     query that is orthogonal to all examples (query_orthogonal) or one of them (query_seen), and noise
                     (label_noise)

SUBSET.x.npy has the inputs (prompts, N + 1, n), SUBSET.y.npy the values (prompts, N + 1), both float32.

Source: generated; Garg et al. 2022 and github.com/dtsip/in-context-learning.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.arrays import ArrayMaterial
from data_prep.corpus import saving
from data_prep.dataset import (
    Dataset,
    Json,
    Options,
    Sources,
    UsageError,
    number_between,
    option,
    shell_word,
    whole_number,
)
from data_prep.draws import seed_option
from data_prep.in_context.functions import FUNCTIONS
from data_prep.in_context.prompts import VERSION, Prompts
from data_prep.in_context.shifts import SHIFTS

FROZEN = ("valid", "test")
UPDATES = 5_000  # of the recommended training
LARGEST = 1 << 28  # numbers in one subset
std = number_between(1e-6, 1e6)  # float32 holds what is drawn with it, and its squares


def shifts(text: str) -> tuple[str, ...]:
    """Argument type: ``all``, ``none``, or names of shifts, separated by commas; in the order of ``SHIFTS``."""
    if text in ("all", "none"):
        return tuple(SHIFTS) if text == "all" else ()
    names = [name.strip() for name in text.split(",")]
    unknown = next((name for name in names if name not in SHIFTS), None)
    if unknown is not None:
        raise argparse.ArgumentTypeError(f"has {unknown!r}: choose all, none, or from {', '.join(SHIFTS)}")
    return tuple(name for name in SHIFTS if name in names)


def setting(name: str, of: str, help: str, type: Callable[[str], float]) -> Any:
    """The option of a setting of the class of functions ``of``."""
    return option(None, f"{help}, of {of} (default: {FUNCTIONS[of].defaults[name]:g})", type=type)


@dataclass(frozen=True)
class InContextOptions(Options):
    function: str = option("linear", "class of functions (default: %(default)s)", choices=tuple(FUNCTIONS))
    dims: int = option(20, "n, dimensions of x (default: %(default)s)", type=whole_number(1, 1_000))
    examples: int = option(40, "N, examples before the query (default: %(default)s)", type=whole_number(1, 10_000))
    x_std: float = option(1.0, "σ, standard deviation of x (default: 1)", type=std)
    sparsity: int | None = setting("sparsity", "sparse_linear", "weights that are not 0", whole_number(1, 1_000))
    noise_std: float | None = setting("noise_std", "noisy_linear", "standard deviation of the noise", std)
    hidden: int | None = setting("hidden", "relu_network", "hidden units", whole_number(1, 10_000))
    tree_depth: int | None = setting("tree_depth", "decision_tree", "decisions", whole_number(1, 12))
    size: int = option(480, "prompts in each subset (default: %(default)s)", type=whole_number(1, 1_000_000))
    shifts: tuple[str, ...] = option(
        tuple(SHIFTS),
        "shifted tests, separated by commas, or none (default: all that the dimensions allow)",
        type=shifts,
        metavar="NAMES",
    )
    long: int | None = option(
        None,
        "examples before the query in a further test, `long`; more than --examples (default: no such test)",
        type=whole_number(2, 10_000),
        when_given=True,
    )
    seed: int = seed_option(what="the frozen prompts")

    def complete(self, sources: Sources) -> InContextOptions:
        own = FUNCTIONS[self.function].defaults
        for kind in FUNCTIONS.values():
            for name in kind.defaults:
                if name not in own and getattr(self, name) is not None:
                    raise UsageError(f"--{name.replace('_', '-')} is for --function {kind.name}: leave it out")
        names = tuple(name for name in self.shifts if self.dims >= SHIFTS[name].least_dims)
        if self.shifts != tuple(SHIFTS) and len(names) < len(self.shifts):
            wrong = next(name for name in self.shifts if name not in names)
            raise UsageError(f"--shifts {wrong} needs --dims {SHIFTS[wrong].least_dims} or more")
        if self.long is not None and self.long <= self.examples:
            raise UsageError(
                f"--long {self.long} is not more than --examples {self.examples}: choose more, or leave it out"
            )
        numbers = self.size * ((self.long or self.examples) + 1) * self.dims
        if numbers > LARGEST:
            raise UsageError(
                f"a subset would have {numbers:,} numbers, {LARGEST:,} is the limit: choose a smaller --size"
            )
        given = {name: value if getattr(self, name) is None else getattr(self, name) for name, value in own.items()}
        if given.get("sparsity", 0) > self.dims:
            raise UsageError(f"--sparsity {given['sparsity']} is more than --dims {self.dims}: choose at most as many")
        return replace(self, shifts=names, **given)


class InContext(Dataset):
    """``python -m data_prep in_context``."""

    name, title, source = "in_context", "In-context regression", "its rule (Garg et al. 2022)"
    licence, size = "none (generated)", "generated"
    arch = "sg_regressor_article"
    splits = tuple(FUNCTIONS)
    options = InContextOptions
    binarizes = False

    def build(self, options: InContextOptions, sources: Sources) -> FrozenPrompts:
        prompts = Prompts.of_request(options.request(sources))
        of_subset = dict.fromkeys((*FROZEN, *options.shifts), prompts)
        if options.long is not None:
            of_subset["long"] = replace(prompts, examples=options.long)
        return FrozenPrompts(
            prompts, {name: drawn.draw_many(options.seed, name, options.size) for name, drawn in of_subset.items()}
        )


class FrozenPrompts(ArrayMaterial):
    """The prompts of validation and of tests.

    Args:
        prompts: their distribution.
        arrays: subset -> x (S, P, n) and y (S, P), float32.
    """

    membership = "drawn here; training prompts are drawn by --task sg_regression"
    origin = {"generator": "data_prep.in_context", "version": VERSION}

    def __init__(self, prompts: Prompts, arrays: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        super().__init__({name: {"x": x, "y": y} for name, (x, y) in arrays.items()})
        self.prompts = prompts
        function, settings = prompts.function, prompts.function.settings
        chosen = "".join(f", {name} {value:g}" for name, value in settings.items())
        self.rule = (
            f"{function.name} functions of {function.dims} dimensions{chosen}; {prompts.examples} examples a prompt, "
            f"x of standard deviation {prompts.x_std:g}"
        )

    def describe(self) -> Json:
        """The sizes of the subsets; what squared errors are divided by; the errors of 0 and of the best predictor."""
        return super().describe() | {
            "unit": self.prompts.function.unit,
            "zero_error": self.prompts.zero_error,
            "floor": self.prompts.floor,
        }

    def describe_subset(self, subset: str) -> Json:
        return super().describe_subset(subset) | {"points": self.arrays[subset]["y"].shape[1]}

    def summary(self, description: Json) -> list[str]:
        subsets = description["subsets"]
        width = max(map(len, subsets)) + 2
        lines = [f"{'subset':{width}}{'prompts':>9}{'points':>8}"]
        lines += [f"{name:{width}}{entry['size']:>9,}{entry['points']:>8,}" for name, entry in subsets.items()]
        floor = "not known" if description["floor"] is None else f"{description['floor']:.4f}"
        return [
            *lines,
            f"squared errors are divided by {description['unit']:g}; the predictor 0 has {description['zero_error']:g}",
            f"least expected mean over all points: {floor}",
        ]

    def training_commands(self, dataset: Dataset, out: Path) -> list[str]:
        """For the sizes of the article on linear transformers, with a position for every token."""
        tokens = 2 * self.prompts.examples + 1
        return [
            f"fairseq-train {shell_word(out)} --user-dir fairseq_sg --task sg_regression --arch {dataset.arch} "
            f"--learned-positions {tokens} --criterion regression --valid-subset valid --batch-size-valid 480 "
            f"--best-checkpoint-metric mse_last --optimizer torch_adam --lr 1e-3 --batch-size 64 "
            f"--max-update {UPDATES} {saving(out, UPDATES, validates=True)}"
        ]
