"""Scores of PCFG SET's tests: by hand on invented outputs, and of a model against its outputs one by one."""

from __future__ import annotations

import gzip
import re
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

import numpy as np
import torch

import fairseq_sg
from data_prep.corpus import Subset
from data_prep.pcfg.language import FUNCTIONS, interpret
from fairseq_sg.analysis import consistency, load
from fairseq_sg.analysis.__main__ import main
from helpers.analysis_models import checkpoint
from helpers.pcfg_folders import (
    EXCEPTIONS,
    PLAIN,
    RENAMED,
    TRAIN,
    localism_folder,
    overgeneralisation_folder,
    pcfg_folder,
    substitutivity_folder,
)

ARGS = Namespace(batch_size=2, limit=None, max_len=4)


@pytest.fixture
def invented(monkeypatch):
    """The scores of a folder if these are the outputs; an unknown source has none."""

    def measure(folder: Path, outputs: dict[str, str], updates: int = 1, limit: int | None = None):
        monkeypatch.setattr(consistency, "answers", lambda loaded, sources, args: [outputs.get(s, "") for s in sources])
        return consistency.measure(Namespace(folder=str(folder), updates=updates), Namespace(limit=limit))

    return measure


# By hand.

SYNONYMS = dict(
    zip(
        [*PLAIN, *RENAMED],
        # right and equal; right, then wrong; wrong and equal; wrong and different; none at all
        ["A1 A1", "A1 B2", "B1", "C1", "", "A1 A1", "B2 A1", "B1", "C2", ""],
        strict=True,
    )
)


def row(pairs: int, *percentages: float, names: str) -> dict:
    return {"pairs": pairs, **dict(zip(names.split(), map(pytest.approx, percentages), strict=True))}


def test_substitutivity(invented, tmp_path):
    result = invented(substitutivity_folder(tmp_path / "data"), SYNONYMS)
    names = "consistent test_right gen_right"
    assert result.facts["scores"] == {
        "all": row(5, 40, 40, 20, names=names),
        "test is right": row(2, 50, 100, 50, names=names),
        "test is wrong": row(3, 100 / 3, 0, 0, names=names),
        "one is wrong": row(4, 25, 25, 0, names=names),
        "append": row(2, 0, 50, 0, names=names),
        "repeat": row(3, 200 / 3, 100 / 3, 100 / 3, names=names),
    }
    assert (result.facts["condition"], result.facts["types"]) == ("substitutivity_primitive", ["append", "repeat"])
    arrays = {name: array.tolist() for name, array in result.arrays.items()}
    assert arrays["consistent"] == [True, False, True, False, False] and arrays["group"] == [1, 0, 1, 0, 1]
    assert result.summary[:3] == [
        "substitutivity_primitive",
        "%              pairs  consistent  test_right  gen_right",
        "all                5       40.00       40.00      20.00",
    ]


def test_localism_reads_its_own_outputs(invented, tmp_path):
    outputs = {
        # The wrong first step leads to the same wrong output as the whole.
        "copy A1 B2": "A2", "repeat A2": "A2 A2", "repeat copy A1 B2": "A2 A2",
        # Right steps, in the order of their numbers in the expression, and a wrong whole.
        "copy C1": "C1", "echo C2": "C2 C2", "append C2 C2 , C1": "C2 C2 C1", "append echo C2 , copy C1": "C1",
        # A right whole, and a first step too long for the model.
        "copy": "C1 A1", "copy reverse A1 C1": "C1 A1",
    }  # fmt: skip
    result = invented(localism_folder(tmp_path / "data"), outputs)
    names = "consistent whole_right steps_right"
    assert result.facts["scores"] == {
        "all": row(3, 100 / 3, 100 / 3, 100 / 3, names=names),
        "whole is right": row(1, 0, 100, 0, names=names),
        "whole is wrong": row(2, 50, 0, 50, names=names),
        "one is wrong": row(3, 100 / 3, 100 / 3, 100 / 3, names=names),
        "functions_02": row(2, 50, 50, 0, names=names),
        "functions_03": row(1, 0, 0, 100, names=names),
    }
    assert invented(tmp_path / "data", outputs, limit=1).facts["scores"]["all"] == row(1, 100, 0, 0, names=names)


def test_overgeneralisation(invented, tmp_path):
    said = dict(zip(EXCEPTIONS, ["B2 B2 A1", "C1 B1 B1", "A2", "A1 C2 C2"], strict=True))
    result = invented(overgeneralisation_folder(tmp_path / "data"), said)
    names = "overgeneralised memorised other"
    assert result.facts["scores"] == {
        "all": row(4, 25, 50, 25, names=names),
        "prepend_reverse": row(1, 0, 100, 0, names=names),
        "reverse_echo": row(3, 100 / 3, 100 / 3, 100 / 3, names=names),
    }


def test_a_profile_over_updates_has_the_peak_of_overgeneralisation(invented, tmp_path):
    folder = overgeneralisation_folder(tmp_path / "data")
    rule, trained = ([texts[index] for texts in EXCEPTIONS.values()] for index in (1, 2))

    def after(updates: int, follow: int, memorised: int):
        said = rule[:follow] + [""] * (4 - follow - memorised) + trained[4 - memorised :]
        return invented(folder, dict(zip(EXCEPTIONS, said, strict=True)), updates)

    measured = {"a": [after(900, 1, 3), after(100, 1, 0), after(100, 3, 0)], "b": [after(50, 4, 0)]}
    result = consistency.combine(measured)
    profile = {
        updates: [scores["all"]["overgeneralised"] for scores in seeds]
        for updates, seeds in result.facts["models"]["a"].items()
    }
    assert profile == {"100": [25, 75], "900": [25]}
    lines = [" ".join(line.split()) for line in result.summary]
    assert lines == [
        "overgeneralisation",
        "",
        "a, updates pairs overgeneralised memorised other",
        "100 4 50.00 0.00 50.00",
        "900 4 25.00 75.00 0.00",
        "peak: 50.00 % overgeneralised at 100 updates",
        "",
        "b, updates pairs overgeneralised memorised other",
        "50 4 100.00 0.00 0.00",
        "peak: 100.00 % overgeneralised at 50 updates",
    ]
    assert result.arrays["a.100.2.overgeneralised"].tolist() == [True, True, True, False]
    pytest.importorskip("matplotlib")
    (axes,) = consistency.draw(result, ARGS)[""].axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert drawn["a, overgeneralised"] == [[100, 50], [900, 25]] and drawn["b, overgeneralised"] == [[50, 100]]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("updates", "% of pairs")
    (band, *_) = axes.collections
    assert {(x, y) for x, y in band.get_paths()[0].vertices.tolist()} == {(100, 25), (100, 75), (900, 25)}


def test_a_checkpoint_counts_once(invented, tmp_path):
    """checkpoint_best.pt and checkpoint_last.pt of one training are no further seeds; other folders are."""
    folder = overgeneralisation_folder(tmp_path / "data")
    rule = dict(zip(EXCEPTIONS, [text for _, text, *_ in EXCEPTIONS.values()], strict=True))

    def of(path: str, updates: int, follow: int = 4):
        result = invented(folder, dict(list(rule.items())[:follow]), updates)
        result.facts["checkpoint"] = path
        return result

    files = [("a/checkpoint_1_100.pt", 100), ("a/checkpoint_best.pt", 100), ("a/checkpoint_2_200.pt", 200)]
    files += [("a/checkpoint_last.pt", 200), ("b/checkpoint_last.pt", 200)]
    measured = {"one": [of(*file) for file in files], "other": [of("a/seed1.pt", 9, 1), of("a/seed2.pt", 9, 2)]}
    result = consistency.combine(measured)
    numbers = {name: {n: len(seeds) for n, seeds in at.items()} for name, at in result.facts["models"].items()}
    assert numbers == {"one": {"100": 1, "200": 2}, "other": {"9": 2}}
    assert "one.200.2.group" in result.arrays and "one.100.2.group" not in result.arrays


def test_models_of_other_data_are_not_compared(invented, tmp_path):
    first = invented(overgeneralisation_folder(tmp_path / "one"), {})
    fewer = dict(list(EXCEPTIONS.items())[1:])
    second = invented(overgeneralisation_folder(tmp_path / "two", fewer), {})
    with pytest.raises(fairseq_sg.errors.UsageError, match="b was tested on other data than the first model"):
        consistency.combine({"a": [first], "b": [second]})


def test_expressions_of_the_official_test_have_all_of_their_steps(shared_data, tmp_path):
    """Steps made from the official expressions, with outputs of the interpreter: all is consistent and right."""
    folder = shared_data / "pcfg_set" / "pcfgset"
    sources, targets = (
        gzip.decompress((folder / f"test.{side}.gz").read_bytes()).decode().splitlines()[:300]
        for side in ("src", "tgt")
    )
    lines, functions = [], []
    for source, target in zip(sources, targets, strict=True):
        steps = steps_of(source.split(" "))
        functions.append(len(steps))
        made = [f"*{number}" for number in range(1, len(steps))] + [target]
        lines += [f"unrolled\t{step}\t{result}" for step, result in zip(steps, made, strict=True)]
        lines.append(f"original\t{source}\t{target}")
    path = tmp_path / "unrolled.tsv"
    path.write_text("\n".join(lines) + "\n")
    read = consistency.read_unrolled(path)
    assert [len(expression.steps) for expression in read] == functions and max(functions) > 9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consistency, "answers", lambda loaded, given, args: [interpret(source) for source in given])
        assert consistency.step_by_step(None, [expression.steps for expression in read], ARGS) == targets


def steps_of(words: list[str]) -> list[str]:
    """The steps of an expression, innermost first, from its last function to its first."""
    steps: list[str] = []
    words = list(words)
    for start in reversed([place for place, word in enumerate(words) if word in FUNCTIONS]):
        commas = 1 if words[start] in ("append", "prepend", "remove_first", "remove_second") else 0
        end = start
        while end < len(words) and (words[end] != "," or commas):
            commas -= words[end] == ","
            end += 1
        steps.append(" ".join(words[start:end]))
        words[start:end] = [f"*{len(steps)}"]
    return steps


# Of a model.


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory) -> tuple[str, Path]:
    """The checkpoint of a random model, and a folder with all words."""
    room = tmp_path_factory.mktemp("pcfg")
    folder = substitutivity_folder(room / "data")
    return str(checkpoint(room / "model.pt", folder, "mixed", "--max-source-positions", "12")), folder


def said_by(saved: str, sources: list[str]) -> list[str]:
    model = fairseq_sg.load(saved, device="cpu")
    return [model.translate(source, max_len_b=4, min_len=1) for source in sources]


def test_answers_are_those_of_the_generator_for_every_source_alone(saved_model):
    saved, _ = saved_model
    sources = [*PLAIN, *RENAMED, *EXCEPTIONS, "copy A1", "copy A1"]
    expected = said_by(saved, sources)
    assert len(set(expected)) > 2
    # A begin and an end symbol leave room for 10 of 12 tokens.
    longest = "append A1 A2 B1 , B2 C1 C2 A1 A1"
    expected += [*said_by(saved, [longest]), ""]
    assert consistency.answers(load(saved), [*sources, longest, f"{longest} A2"], ARGS) == expected


def test_an_output_that_does_not_end_is_longer_than_any_target(saved_model, monkeypatch):
    loaded = load(saved_model[0])
    monkeypatch.setattr(loaded.model, "get_normalized_probs", lambda output, **_: never_ending(output[0]))
    (said,) = consistency.answers(loaded, ["copy A1"], Namespace(**vars(ARGS) | {"max_len": None}))
    assert len(said.split()) == loaded.longest_target  # with its end symbol, the longest target is shorter


def never_ending(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities that prefer a word to the end symbol."""
    return torch.full_like(logits, -5.0).index_fill_(-1, torch.tensor([5]), -0.1)


def test_localism_of_a_model(saved_model, tmp_path, capsys):
    saved, _ = saved_model
    consistent, right = [], []
    for expression in consistency.read_unrolled(localism_folder(tmp_path / "data") / "raw" / "unrolled.tsv"):
        done: list[str] = []
        for step in expression.steps:
            filled = re.sub(r"\*(\d)", lambda found: done[int(found[1]) - 1], step)
            done += said_by(saved, [filled]) if len(filled.split()) <= 10 else [""]
        assert "" not in done
        consistent.append(said_by(saved, [expression.source]) == done[-1:])
        right.append(done[-1] == expression.target)
    out = str(tmp_path / "out")
    options = ["--data", str(tmp_path / "data"), "--max-len", "4", "--device", "cpu", "--out", out, "--format", "none"]
    assert main(["consistency", saved, *options]) == 0, capsys.readouterr().err
    arrays = np.load(f"{out}.npz")
    assert arrays["consistent"].tolist() == consistent and arrays["steps_right"].tolist() == right


def test_bars_of_one_checkpoint(saved_model, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    saved, folder = saved_model
    out = tmp_path / "bars.svg"
    assert main(["consistency", saved, "--device", "cpu", "--max-len", "4", "--out", str(out)]) == 0
    text = out.read_text()
    assert all(name in text for name in ("consistent", "gen_right", "append", "repeat", "n = 3", "% of pairs"))
    assert "one is wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    "make,message",
    [
        (
            lambda folder: pcfg_folder(folder, "iid", {"test": Subset(TRAIN)}),
            "has no such test: give a folder of `python -m data_prep pcfg --condition` substitutivity, localism, .*",
        ),
        (
            lambda folder: localism_folder(folder, "unrolled\tcopy A1\t*1\ncopy\n"),
            "/raw/unrolled.tsv:2 is not a step: prepare the folder again with `python -m data_prep`",
        ),
    ],
)
def test_errors(make, message, saved_model, tmp_path, capsys):
    folder = make(tmp_path / "data")
    assert main(["consistency", saved_model[0], "--data", str(folder), "--out", str(tmp_path / "out")]) == 1
    assert re.fullmatch(f"error: {folder} ?{message}\n", capsys.readouterr().err)
    assert not list(tmp_path.glob("out*"))
