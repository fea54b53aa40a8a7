"""One training of an experiment: its ``fairseq-train`` command, and the commands of its evaluation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from fairseq_sg.experiments.quantities import QUANTITIES


@dataclass
class Run:
    """One training: a model's arguments, a seed, and a folder.

    Attributes:
        name: the model's name in tables.
        seed: fairseq's ``--seed``.
        folder: the folder of all its files.
        data: the data folder.
        prepare: the arguments of ``data_prep`` that make it.
        steps: ``--max-update``.
        arguments: all other arguments of ``fairseq-train``.
        user_dir: ``--user-dir`` of fairseq's commands.
        subsets: evaluated during training and at the end; the values are their names in tables.
        shown: the quantity in the progress of training, one of ``QUANTITIES``.
        types: types and groups of examples whose accuracies are kept too.
        evaluation: further arguments of ``fairseq-validate`` and ``fairseq-generate`` (besides device and batch size).
        generation: further arguments of ``fairseq-generate`` alone.
        decodings: what is decoded at the end, besides the teacher-forced pass: subsets, each with further arguments of
            ``fairseq-generate`` or "".
        best: whether to evaluate the best checkpoint by ``checkpoint_metric`` on the first subset (the latest of
            several) instead of the last one.
        checkpoint_metric: one of ``QUANTITIES``.
        model_overrides: of the evaluation.
        more_overrides: of further evaluations.
        analyses: name -> arguments of ``fairseq-sg analysis``, which writes NAME.json into the folder.
        analysed: the numbers that are kept of them, ``NAME/key/key``.
        stacked: whether steps are made at once with those of other seeds.
    """

    name: str
    seed: int
    folder: Path
    data: Path
    steps: int
    arguments: list[str]
    subsets: dict[str, str]
    user_dir: str = "fairseq_sg"
    prepare: str = ""
    shown: str = "accuracy"
    types: tuple[str, ...] = ()
    evaluation: list[str] = field(default_factory=list)
    generation: list[str] = field(default_factory=list)
    decodings: tuple[tuple[str, str], ...] = ()
    best: bool = False
    checkpoint_metric: str = "accuracy"
    model_overrides: str = ""
    more_overrides: tuple[str, ...] = ()
    analyses: dict[str, list[str]] = field(default_factory=dict)
    analysed: tuple[str, ...] = ()
    stacked: bool = False

    def alike(self, other: Run) -> bool:
        """Whether two runs differ in their seed alone."""
        return replace(self, seed=other.seed, folder=other.folder, analyses=other.analyses) == other

    @property
    def task(self) -> str:
        return values_of("--task", self.arguments)[-1]

    @property
    def log(self) -> Path:
        return self.folder / "train.log"

    @property
    def checkpoint(self) -> Path:
        return self.folder / ("checkpoint_best.pt" if self.best else "checkpoint_last.pt")

    def train_command(self) -> list[str]:
        quantity = QUANTITIES[self.checkpoint_metric]
        best = ["--best-checkpoint-metric", quantity.logged] if self.best else []
        best += ["--maximize-best-checkpoint-metric"] if self.best and quantity.more_is_better else []
        return [
            "fairseq-train", str(self.data), "--user-dir", self.user_dir, *self.arguments, *best,
            "--seed", str(self.seed), "--max-update", str(self.steps), "--save-dir", str(self.folder),
            "--valid-subset", ",".join(self.subsets), "--log-format", "json",
        ]  # fmt: skip

    def validate_command(self, model_overrides: str | None = None) -> list[str]:
        return [
            "fairseq-validate", str(self.data), *self._evaluated(model_overrides),
            "--valid-subset", ",".join(self.subsets), "--log-format", "json", *self.evaluation,
        ]  # fmt: skip

    def generate_command(self, subset: str, more: str = "") -> list[str]:
        return [
            "fairseq-generate", str(self.data), *self._evaluated(), "--gen-subset", subset, "--beam", "1",
            "--scoring", "sacrebleu", "--sacrebleu-tokenizer", "none", *self.evaluation, *self.generation,
            *shlex.split(more),
        ]  # fmt: skip

    def _evaluated(self, model_overrides: str | None = None) -> list[str]:
        overrides = self.model_overrides if model_overrides is None else model_overrides
        changed = ["--model-overrides", overrides] if overrides else []
        return ["--user-dir", self.user_dir, "--task", self.task, "--path", str(self.checkpoint), *changed]

    def outputs(self) -> dict[Path, list[str]]:
        """The commands of the evaluation, by the file of their output."""
        return {
            self.folder / "validate.log": self.validate_command(),
            **{self.more_log(n): self.validate_command(more) for n, more in enumerate(self.more_overrides)},
            **{self.decoded_log(*how): self.generate_command(*how) for how in self.decodings},
            **{
                self.folder / f"{name}.log": ["fairseq-sg", "analysis", *words] for name, words in self.analyses.items()
            },
        }

    def more_log(self, number: int) -> Path:
        """The output of further evaluation ``number``."""
        return self.folder / f"validate-{number + 1}.log"

    def decoded_log(self, subset: str, more: str = "") -> Path:
        """The output of a decoding."""
        number = [how for how in self.decodings if how[0] == subset and how[1]].index((subset, more)) + 1 if more else 0
        return self.folder / (f"generate-{subset}-{number}.log" if number else f"generate-{subset}.log")

    def commands(self) -> list[list[str]]:
        """The commands of the training and of its evaluation."""
        return [self.train_command(), *self.outputs().values()]


def option_of(word: str) -> str:
    """The option in a word of fairseq's commands: ``--max_update=9`` -> ``--max-update``."""
    return word.partition("=")[0].replace("_", "-")


def values_of(option: str, arguments: Sequence[str]) -> list[str]:
    """The values of an option in arguments of fairseq's commands (--seed=7, --max_update 9); the last counts."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    return [after for word, after in pairwise(words) if option_of(word) == option]


def on(device: str) -> list[str]:
    """The arguments of fairseq's commands for the device ``cpu`` or ``cuda``."""
    return ["--cpu"] if device == "cpu" else []


def schedule(every: int, device: str, graphs: int = 0) -> list[str]:
    """Arguments of a resumable training that evaluates and saves every ``every`` steps and
    keeps the last checkpoint; with so many CUDA graphs of its steps.
    """
    return [
        "--required-batch-size-multiple", "1",
        "--validate-interval-updates", str(every), "--validate-interval", "1000000",
        "--save-interval-updates", str(every), "--keep-interval-updates", "1", "--save-interval", "1000000",
        "--no-epoch-checkpoints", "--log-interval", "100",
        "--num-workers", "0" if device == "cpu" or graphs else "1", *on(device),
        *(["--step-graphs", str(graphs)] if graphs else []),
    ]  # fmt: skip


def on_any_device(arguments: list[str]) -> list[str]:
    """The words of a command's arguments without those for its device and the memory of validations in training.

    They are those of ``schedule``, `on`, an analysis, and --batch-size-valid, except for language models: there it is
    the number of streams, which changes their numbers.
    """
    words = r"cpu|num-workers \d+|step-graphs \d+|device (cpu|cuda|auto)"
    if values_of("--task", arguments)[-1:] != ["sg_language_modeling"]:
        words += r"|batch-size-valid \d+"
    return re.sub(rf"--({words})(?=\s|$)", "", shlex.join(arguments)).split()
