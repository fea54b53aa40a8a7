"""The trainings of a recipe: which rows, datasets and seeds, with which commands, in which folders."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments.jobs import environment
from fairseq_sg.experiments.quantities import QUANTITIES, source_of
from fairseq_sg.experiments.run import Run, on, schedule, values_of
from fairseq_sg.experiments.schema import DECODED, Recipe, Row, filled
from fairseq_sg.files import read_manifest

#: The largest number of seeds; a larger one is meant as a seed.
MOST_SEEDS = 100
#: numpy takes seeds below 2^32, and fairseq adds epochs.
LARGEST_SEED = 2**32 - 10**6 - 1


@dataclass
class Trial:
    """A run of the plan, with its row and data."""

    run: Run
    row: str
    data: str


@dataclass
class Plan:
    """The chosen part of a recipe.

    Attributes:
        rows, on, seeds: the chosen rows, datasets and seeds.
        steps_scale: factor on the recipe's steps.
        device: "cpu" or "cuda".
        graphs: most CUDA graphs of a training's steps.
        data: the folder of the data folders.
        out: the folder of the runs' folders.
        stacked: whether the steps of several seeds are made at once.
    """

    recipe: Recipe
    rows: list[str]
    on: list[str]
    seeds: list[int]
    steps_scale: float
    device: str
    data: Path
    out: Path
    graphs: int = 0
    stacked: bool = False

    def trials(self) -> list[Trial]:
        """The runs, with the first seed of every row before any second seed."""
        return [
            Trial(self._run(row, data, seed), row, data)
            for seed in self.seeds
            for row in self.rows
            for data in self.recipe.data_of(row)
            if data in self.on
        ]

    def used(self) -> list[str]:
        """The data of the plan."""
        analysed = self.recipe.used_by_analyses()
        trained = [name for name in self.on if any(name in self.recipe.data_of(row) for row in self.rows)]
        return trained + [name for name in analysed if name not in trained]

    def prepare_command(self, data: str) -> list[str]:
        source = self.recipe.data[data]
        return ["python", "-m", "data_prep", *shlex.split(source.prepare), "--out", str(self.data / source.folder)]

    def prepare(self) -> None:
        """Makes missing data folders.

        Raises:
            UsageError: a folder needs a file from the user, cannot be made, or holds other data.
        """
        for name in self.used():
            source = self.recipe.data[name]
            folder, command = self.data / source.folder, self.prepare_command(name)
            if (folder / "dataset.json").exists():
                check_data(folder, shlex.split(source.prepare))
            elif source.needs_file:
                raise UsageError(
                    f"the data {name!r} do not exist and need a file that cannot be downloaded: "
                    f"{shlex.join(command)}, with its path for FILE (docs/datasets.md)"
                )
            else:
                print(shlex.join(command), flush=True)
                if subprocess.run([sys.executable, *command[1:]], env=environment()).returncode:
                    raise UsageError(f"the data {name!r} were not made: {shlex.join(command)}")
            self._check_names(name, folder)

    def check(self) -> None:
        """Raises UsageError where there is no ``user_dir``, or a training needs a GPU."""
        for trial in self.trials() if self.device == "cpu" else ():
            if "--amp" in trial.run.arguments:
                raise UsageError(
                    f"the row {trial.row!r} trains with --amp, which needs a GPU: give --device cuda where there is one"
                )
        own = self.recipe.user_dir
        if own and not Path(own).is_dir():
            raise UsageError(f"user_dir: there is no folder {own}: start in the folder that has it, or give its path")

    def _check_names(self, data: str, folder: Path) -> None:
        """Raises UsageError for a type or subset that the data do not have, or a type that the trainings do not log."""
        made = read_manifest(folder)
        subsets = made.get("subsets", {})
        for subset in self.recipe.data[data].subsets:
            if subsets and subset not in subsets:
                raise UsageError(f"data.{data}.subsets: {folder} has no subset {subset!r}: {', '.join(subsets)}")
        for subset in self.recipe.by_length_of(data):
            if not (folder / "raw" / f"{subset}.plain.tgt").is_file():
                raise UsageError(
                    f"by_length: {folder} has no plain text of {subset}, as data of translation have (docs/"
                    "translation.md): leave by_length out"
                )
        for name, text in self.recipe.analyses.items():
            for subset in re.findall(rf"{{{re.escape(data)}}}:([\w.+-]+)", text):
                if subset not in subsets:
                    choices = ", ".join(subsets) or "it has none"
                    raise UsageError(f"analyses.{name}: {folder} has no subset {subset!r}: {choices}")
        groups = made.get("groups", {})
        for name, column in self.recipe.columns_of(data).items():
            if not column.type:
                continue
            # The first subset chooses the best evaluation.
            chosen_by = self.recipe.data[data].subsets[:1] if column.at == "best" else []
            for subset in dict.fromkeys([column.subset, *chosen_by]):
                there = subsets.get(subset, {}).get("types", {})
                if column.type not in there and not set(groups.get(column.type, ())) & set(there):
                    choices = ", ".join([*groups, *there]) or "it has none"
                    raise UsageError(f"columns.{name}.type: {subset} of {folder} has no {column.type!r}: {choices}")
            if column.type in groups:
                continue
            for row in self.rows:
                if data not in self.recipe.data_of(row):
                    continue
                if values_of("--accuracy-by", self.recipe.arguments_of(row, data))[-1:] != ["types"]:
                    raise UsageError(
                        f"columns.{name}.type: the training of the row {row!r} does not log {column.type!r}: add "
                        "--accuracy-by types to its arguments"
                    )

    def options(self) -> list[str]:
        """The options that select the same runs again."""
        return [
            "--rows", ",".join(self.rows), "--on", ",".join(self.on), "--seeds", as_seeds(self.seeds),
            "--steps-scale", as_scale(self.steps_scale), "--device", self.device,
            "--data", str(self.data), "--out", str(self.out),
            *(["--variant", self.recipe.variant] if self.recipe.variant else []),
            *(["--step-graphs", str(self.graphs)] if self.graphs else []),
        ]  # fmt: skip

    def _analyses(self, folder: Path, seed: int) -> dict[str, list[str]]:
        """The arguments of the analyses of a run, by name."""
        recipe = self.recipe
        known = {name: str(self.data / data.folder) for name, data in recipe.data.items()}
        known |= {"checkpoint": str(folder / recipe.checkpoint_file), "seed": str(seed), "device": self.device}
        found: dict[str, list[str]] = {}
        for name, text in recipe.analyses.items():
            place = str(folder / name)
            words = [filled(word, known) for word in shlex.split(text)]
            own = ["--user-dir", recipe.user_dir] if recipe.user_dir and "{checkpoint}" in text else []
            found[name] = [*words, *own, "--format", "none", "--out", place]
            known[name] = place
        return found

    def _run(self, row: str, data: str, seed: int) -> Run:
        recipe, source = self.recipe, self.recipe.data[data]
        steps = recipe.steps_of(row, self.steps_scale)
        every = max(1, min(steps, round(recipe.validate_every * min(1.0, self.steps_scale))))
        columns = recipe.columns_of(data)
        # Training shows one quantity: accuracy, or else that of the first column.
        plain = {
            key: c
            for key, c in columns.items()
            if not c.type and not c.model_overrides and source_of(c.metric) in QUANTITIES
        }
        quantities = [source_of(c.metric) for c in plain.values()]
        quantity = "accuracy" if "accuracy" in quantities or not quantities else quantities[0]
        shown = {c.subset: key for key, c in reversed(plain.items()) if c.metric == quantity}
        label = recipe.rows[row].label
        folder = self.out / f"{row}-{data}-seed{seed}"
        return Run(
            name=f"{label}, {data}" if len(recipe.data) > 1 else label,
            seed=seed,
            folder=folder,
            data=self.data / source.folder,
            user_dir=recipe.user_dir or "fairseq_sg",
            prepare=source.prepare,
            steps=steps,
            arguments=[
                *recipe.arguments_of(row, data),
                "--batch-size-valid",
                str(recipe.batch_size_valid),
                *schedule(every, self.device, self.graphs),
            ],
            subsets={subset: shown.get(subset, subset) for subset in source.subsets},
            shown=quantity,
            types=tuple(dict.fromkeys(c.type for c in columns.values() if c.type)),
            evaluation=["--batch-size", str(recipe.batch_size_valid), *on(self.device)],
            generation=shlex.split(recipe.generate),
            decodings=tuple(dict.fromkeys((c.subset, c.generate) for c in columns.values() if c.metric in DECODED)),
            best=recipe.checkpoint == "best",
            checkpoint_metric=recipe.checkpoint_metric,
            model_overrides=recipe.rows[row].model_overrides,
            analyses=self._analyses(folder, seed),
            analysed=tuple(dict.fromkeys(c.value for c in columns.values() if c.value)),
            stacked=self.stacked,
            more_overrides=recipe.overrides(row, data),
        )


def make_plan(
    recipe: Recipe,
    rows: str = "all",
    on: str = "all",
    seeds: str | None = None,
    steps_scale: float = 1.0,
    device: str = "cpu",
    data: Path = Path("data-bin"),
    out: Path | None = None,
    graphs: int = 0,
    stacked: bool = False,
) -> Plan:
    """A plan from the texts of the command line. Raises UsageError for a wrong one."""
    if graphs < 0:
        raise UsageError(f"--step-graphs is {graphs}: choose 0 or more")
    if graphs and device == "cpu":
        raise UsageError("--step-graphs is for a GPU: leave it out")
    if not 0 < steps_scale < float("inf"):
        raise UsageError(f"--steps-scale is {steps_scale}: choose a number above 0")
    scale = f"-x{steps_scale:g}" if steps_scale != 1 else ""
    plan = Plan(
        recipe=recipe,
        rows=_chosen("--rows", rows, recipe.trained, {name: _untrained(row) for name, row in recipe.rows.items()}),
        on=_chosen("--on", on, list(recipe.data), {}),
        seeds=recipe.planned_seeds if seeds is None else read_seeds(seeds),
        steps_scale=steps_scale,
        device=device,
        data=data,
        out=out or Path("runs", recipe.full_name + scale),
        graphs=graphs,
        stacked=stacked,
    )
    if plan.out.is_file():
        raise UsageError(f"--out {plan.out} is a file: name a folder")
    if not plan.trials():
        raise UsageError("no row in --rows is trained on the data in --on")
    named: dict[Path, str] = {}
    for trial in plan.trials():
        name, folder = f"the row {trial.row!r} on {trial.data!r}", trial.run.folder
        if named.setdefault(folder, name) != name:
            raise UsageError(f"{named[folder]} and {name} have one folder, {folder}: rename a row or its data")
    return plan


def _untrained(row: Row) -> str:
    """Why a row cannot be trained; empty for one that can."""
    return f"it is an evaluation of {row.evaluates!r}, and comes with that" if row.evaluates else row.missing


def _chosen(option: str, text: str, there: list[str], reasons: dict[str, str]) -> list[str]:
    """Comma separated names, each once."""
    if text == "all":
        return there
    for name in text.split(","):
        if name not in there:
            reason = f" ({reasons[name]})" if reasons.get(name) else ""
            raise UsageError(f"{option} has {name!r}{reason}: choose from {', '.join(there)}")
    return list(dict.fromkeys(text.split(",")))


def read_seeds(text: str) -> list[int]:
    """``3`` is the seeds 1, 2, 3; a list is that of its seeds (``4,5,6``; one seed: ``4,``). Raises UsageError."""
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*,?", text) or not text.strip("0"):
        raise UsageError(f"--seeds is {text!r}: it must be a number of seeds, or a list as 4,5,6 (one seed: 4,)")
    if "," not in text:
        if int(text) > MOST_SEEDS:
            raise UsageError(f"--seeds {text} is the seeds 1 to {text}: for this seed alone, give --seeds {text},")
        return list(range(1, int(text) + 1))
    found = list(dict.fromkeys(int(seed) for seed in text.strip(",").split(",")))
    if max(found) > LARGEST_SEED:
        raise UsageError(f"--seeds has {max(found)}: choose seeds up to {LARGEST_SEED}, to which epochs are added")
    return found


def as_seeds(seeds: list[int]) -> str:
    """The text of ``read_seeds``: 3 for 1, 2, 3."""
    return (
        str(len(seeds))
        if seeds == list(range(1, len(seeds) + 1)) and len(seeds) <= MOST_SEEDS
        else ",".join(map(str, seeds)) + "," * (len(seeds) == 1)
    )


def as_scale(steps_scale: float) -> str:
    """The text of a factor on the steps, with all its digits: 1 for 1.0."""
    return str(steps_scale).removesuffix(".0")


def check_data(folder: Path, arguments: Sequence[str]) -> None:
    """Compares a prepared folder with the request of ``python -m data_prep ARGUMENTS``.

    The source of the files does not count, nor do missing files, nor the order of words in dictionaries. A folder that
    is not from ``data_prep`` is accepted.

    Raises:
        ValueError: the folder was made by another request.
    """
    from data_prep.__main__ import make_parser, split_user_dir
    from data_prep.dataset import DataError

    found = read_manifest(folder).get("request") or {}
    datasets, words = split_user_dir(arguments)
    known = {dataset.name: dataset for dataset in datasets}
    if found.get("dataset") not in known:
        return
    args, dataset = make_parser(datasets).parse_args([*words, "--out", str(folder)]), known[words[0]]
    try:
        # What only the folder has are options beyond the request.
        wanted = {**dict.fromkeys(found), "dataset": dataset.name, **dataset.request(args)}
    except (DataError, OSError):  # a named file is missing: use the options as given
        given = {name: value for name, value in vars(args).items() if isinstance(value, (str, int, float))}
        wanted = {"dataset": dataset.name, **{name: value for name, value in given.items() if name in found}}
    origin = ("official_files", "raw_only", "reordered_like")
    other = [
        f"{name} {found.get(name)} instead of {value}"
        for name, value in wanted.items()
        if found.get(name) != value and name not in origin and not name.startswith("source")
    ]
    if other:
        raise ValueError(
            f"the data in {folder} differ from those of `python -m data_prep {shlex.join(arguments)}`: "
            f"{', '.join(other)}. Choose another folder with --data, or move this one away"
        )
