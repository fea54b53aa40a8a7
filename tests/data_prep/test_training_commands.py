"""fairseq trains the recommended commands, both forms of a dataset of classes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fairseq import options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import fairseq_sg.plugin  # noqa: F401
from data_prep import burgers, darcy, listops
from data_prep.babi import Babi
from data_prep.corpus import Corpus, Subset
from data_prep.dataset import Pair
from data_prep.folder import write
from data_prep.strings import Parity
from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import OPERATOR_ARCHITECTURES
from helpers.printed_commands import train

FORMS = {"next: ": "sg_translation", "or: ": "sg_classification"}
SMALL = {
    "ctl": "--order forward --functions 4 --longest 4",
    "ctlpp": "--variant A",
    "arithmetic": "--train 1000 --test 10 --deepest 2",
    "listops": "--train 1000 --test 10",
    "parity": "--train-lengths 5-6 --test-lengths 9 --train 100 --test 10",
    "first": "--train-lengths 10 --test-lengths 12 --train 100 --test 10",
}


@pytest.fixture
def commands(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], dict[str, list[str]]]:
    """Prepares a small dataset; returns the printed arguments of ``fairseq-train`` by task."""
    monkeypatch.setattr("data_prep.ctlpp.PUBLISHED", {"train": 2_000, "valid": 50, "gen": 100})
    monkeypatch.setattr("data_prep.listops.DEPTHS", dict.fromkeys(("valid", "dev", "gen", "train"), range(1, 3)))
    monkeypatch.setattr(listops, "number_of_processes", lambda: 1)

    def commands(name: str) -> dict[str, list[str]]:
        result = run(name, *SMALL[name].split(), "--out", tmp_path / "out")
        assert result.code == 0, result.err
        lines = [line.strip() for line in result.out.splitlines()]
        found = {FORMS[start]: line.removeprefix(start) for start in FORMS for line in lines if line.startswith(start)}
        return {task: shlex.split(line)[1:] for task, line in found.items()}

    return commands


@pytest.mark.parametrize("name", SMALL)
def test_both_forms_train(name: str, commands, tmp_path: Path) -> None:
    sizes = {}
    found = commands(name)
    assert list(found) == ["sg_translation", "sg_classification"]
    for task, arguments in found.items():
        losses, sizes[task] = train([*arguments, "--dropout", "0"])
        assert min(losses[1:]) < losses[0], (task, losses)
    assert sizes["sg_translation"] == sizes["sg_classification"]
    lines = {path.stem: path.read_bytes().count(b"\n") for path in (tmp_path / "out" / "raw").glob("*.src")}
    assert sizes["sg_translation"] == lines


def test_the_command_of_prompts_trains(run, tmp_path: Path) -> None:
    result = run("in_context", *"--dims 2 --examples 3 --size 9 --shifts none --out".split(), tmp_path / "out")
    (line,) = [line for line in result.out.splitlines() if line.startswith("next: ")]
    losses, sizes = train([*shlex.split(line)[2:], "--epoch-size", "20"])
    assert min(losses[1:]) < losses[0] and sizes == {"train": 20, "valid": 9}


@pytest.mark.parametrize(
    "dataset",
    [
        "repeat_copy --lengths 1-2 --repeats 1-2 --test-lengths 3 --test-repeats 3 --bits 4",
        "associative_recall --blocks 2-3 --test-blocks 4",
        "key_value --lengths 2-3 --test-lengths 4 --queries both",
    ],
    ids=["repeat_copy", "associative_recall", "key_value"],
)
def test_the_commands_of_memory_tasks_train(dataset: str, run, tmp_path: Path) -> None:
    result = run(*dataset.split(), "--train", 100, "--test", 10, "--out", tmp_path / "out")
    (line,) = [line for line in result.out.splitlines() if line.startswith("next: ")]
    losses, sizes = train([*shlex.split(line)[2:], "--memory-variant", "mds"], lr=1e-2)
    assert min(losses[1:]) < losses[0] and sizes.pop("train") == 100 and set(sizes.values()) == {10}


@pytest.mark.parametrize(
    ("dataset", "modes"),
    [
        ("burgers --points 64 --grid 32", ""),
        ("burgers --points 64 --grid 16", "--modes 8"),
        ("darcy --points 25 --grid 25", ""),
        ("darcy --points 19 --grid 19", "--modes 9"),
        ("darcy --points 25 --grid 25 --inverse --coarse 5", ""),
    ],
    ids=["burgers", "burgers on few points", "darcy", "darcy on few points", "inverse"],
)
def test_the_commands_of_functions_train(dataset: str, modes: str, run, tmp_path: Path) -> None:
    """With smaller attention in two dimensions: the published grid of 43 × 43 points takes seconds a step.

    The command of the inverse problem names its coarse grid, and one for few points the frequencies that they have.
    """
    sizes = "--test-grids none --train 8 --valid 3 --test 1 --out"
    result = run(*dataset.split(), *sizes.split(), tmp_path / "out")
    (line,) = [line for line in result.out.splitlines() if line.startswith("next: ")]
    assert modes in line and ("--modes" in line) == bool(modes)
    small = [] if "burgers" in dataset else ["--encoder-layers", "2", "--dropout", "0"]
    small += ["--coarse-points", "5"] if "darcy" in dataset and "inverse" not in dataset else []
    losses, sizes = train([*shlex.split(line)[2:], *small], lr=1e-5)
    assert min(losses[1:]) < losses[0] and sizes == {"train": 8, "valid": 3}


def test_frequencies_are_those_of_the_architectures() -> None:
    for module, dataset in ((burgers, burgers.Burgers), (darcy, darcy.Darcy)):
        assert OPERATOR_ARCHITECTURES[dataset.arch]["modes"] == module.MODES


@pytest.mark.parametrize(("plain", "expected"), [((), ("accuracy", True)), ((Pair("a", "b"),), ("loss", False))])
def test_the_best_checkpoint_has_most_exact_matches_and_of_translations_the_least_loss(
    plain: tuple[Pair, ...], expected: tuple[str, bool], tmp_path: Path
) -> None:
    subsets = {name: Subset([Pair(name, "b")], plain=plain) for name in ("train", "valid")}
    (command,) = Corpus(subsets, "", "", {}).training_commands(Parity(), tmp_path)
    arguments = options.parse_args_and_arch(options.get_training_parser(), shlex.split(command)[1:])
    assert (arguments.best_checkpoint_metric, arguments.maximize_best_checkpoint_metric) == expected


LONG = " ".join(["a"] * 1_025)
TAGGING = {"no_label": "b"}


@pytest.mark.parametrize(
    ("form", "sides", "symbols"),
    [({}, ["source"], 2), ({}, ["target"], 1), ({"labels": True}, ["source"], 2), (TAGGING, ["source", "target"], 0)],
    ids=["source", "target", "classes", "tagging"],
)
def test_commands_accept_the_longest_sequences(form: dict, sides: list[str], symbols: int, tmp_path: Path) -> None:
    """One word more than fairseq's 1,024 tokens have room for needs an option, and no word less does."""
    for words, expected in ((1_024 - symbols, False), (1_025 - symbols, True)):
        pair = Pair("a", "a")._replace(**dict.fromkeys(sides, LONG[: 2 * words - 1]))
        corpus = Corpus({"train": Subset([Pair("c", "a")]), "valid": Subset([pair])}, "", "", {}, **form)
        corpus.check()
        out = tmp_path / str(words)
        write(out, corpus, {"raw_only": False})
        commands = corpus.training_commands(Babi() if form == TAGGING else Parity(), out)
        assert len(commands) == (2 if "labels" in form else 1)
        for command in commands:
            found = re.findall(r"--max-(\w+)-positions (\d+) ", command)
            assert found == ([(side, "1025") for side in sides] if expected else [])
            parser = options.get_training_parser()
            config = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, shlex.split(command)[1:]))
            task = tasks.setup_task(config.task)
            model = task.build_model(config.model)
            task.load_dataset("valid")
            most = utils.resolve_max_positions(task.max_positions(), model.max_positions())
            assert task.filter_indices_by_size(np.arange(1), task.dataset("valid"), most) == [0]
            if expected:
                with pytest.raises(UsageError, match="sample 0 has .* tokens, and the maximum is "):
                    task.filter_indices_by_size(np.arange(1), task.dataset("valid"), (1_024, 1_024))
