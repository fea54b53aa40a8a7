"""``python -m fairseq_sg.evaluate``: the numbers of fairseq-validate, parts that add up, one-line errors."""

from __future__ import annotations

import json
import math
import os
import shutil

import pytest

pytest.importorskip("fairseq")

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.logging import metrics

from fairseq_sg import evaluate, files
from fairseq_sg.analysis import load
from fairseq_sg.errors import UsageError
from fairseq_sg.evaluate import main
from helpers import analysis_models


@pytest.fixture
def evaluated(tmp_path, capsys):
    """Runs the command on the CPU; returns its numbers and its printed lines."""

    def run(*arguments: object):
        file = tmp_path / "new" / "numbers.json"
        assert main([*map(str, arguments), "--device", "cpu", "--json", str(file)]) == 0, capsys.readouterr().err
        assert os.listdir(file.parent) == [file.name]
        return json.loads(file.read_text(encoding="utf-8")), capsys.readouterr().out.splitlines()

    return run


def validated(checkpoint: str, subset: str, batch_size: int) -> dict:
    """The log of fairseq-validate, with the accuracy of all types."""
    overrides = {"accuracy_by": "types"}
    (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([checkpoint], arg_overrides=overrides)
    criterion = task.build_criterion(cfg.criterion).eval()
    task.load_dataset(subset)
    batches = task.get_batch_iterator(task.dataset(subset), max_sentences=batch_size).next_epoch_itr(shuffle=False)
    logs = [task.valid_step(batch, model.eval(), criterion)[2] for batch in batches]
    with metrics.aggregate() as found:
        task.reduce_metrics(logs, criterion)
    return found.get_smoothed_values()


@pytest.mark.parametrize("kind", ["softmax", "linear", "encoder", "lstm", "lm"])
def test_its_numbers_are_those_of_fairseq_validate(kind, saved, evaluated):
    checkpoint, size = saved(kind), 3
    numbers, lines = evaluated(checkpoint, "--batch-size", size)
    names = {"lm": ["valid", "test"]}.get(kind, ["valid", "gen"])
    assert list(numbers["subsets"]) == names
    for name, found in numbers["subsets"].items():
        expected = validated(checkpoint, name, size)
        for key in ("accuracy", "token_accuracy", "nll_loss", "bpc", "bpb"):
            if kind == "lm" and key == "accuracy":
                continue
            assert (key in found) == (key in expected)
            assert found.get(key, 0) == pytest.approx(expected.get(key, 0), abs=2e-4)
        for key in {"ppl", "word_ppl"} & expected.keys():
            assert found[key] == pytest.approx(expected[key], rel=1e-4)
        types = {key: value for key, value in expected.items() if key.startswith("accuracy_")}
        assert types == pytest.approx({f"accuracy_{k}": v["accuracy"] for k, v in found.get("types", {}).items()})
        (row,) = [line.split() for line in lines if line.startswith(f"{name} ") and " all " in line]
        assert f"{found['nll_loss']:.4f}" in row and f"{found.get('sentences', found.get('tokens')):,}" in row
    assert ("types" in numbers["subsets"][names[-1]]) == (kind in ("softmax", "linear"))
    assert lines[0].startswith(f"{checkpoint} (sg_") and lines[-1].startswith("written: ")


@pytest.mark.parametrize("kind", ["softmax", "encoder"])
def test_parts_of_a_subset_add_up(kind, saved, evaluated):
    numbers, lines = evaluated(saved(kind), "--subset", "gen,train")
    assert list(numbers["subsets"]) == ["gen", "train"]
    for name, found in numbers["subsets"].items():
        for parts in (found[key] for key in ("types", "lengths") if key in found):
            rows = list(parts.values())
            assert all(row["sentences"] for row in rows) and 1 < len(rows) <= evaluate.BUCKETS
            for key in ("sentences", "right", "tokens", "tokens_right"):
                assert sum(row.get(key, 0) for row in rows) == found.get(key, 0)
            per = "tokens" if "tokens" in found else "sentences"
            assert sum(row["nll_loss"] * row[per] for row in rows) == pytest.approx(found["nll_loss"] * found[per])
        for length, row in found.get("lengths", {}).items() if kind == "softmax" else ():
            # Its sentences, not as many others; each has an end symbol.
            assert row["tokens"] == row["sentences"] * (int(length) + 1)
        words = load(saved(kind)).subset(name)
        count = (words.tgt_sizes if kind == "softmax" else words.src_sizes) - (1 if kind == "softmax" else 2)
        assert list(found.get("lengths", ())) == [str(n) for n in np.unique(count)] * (len(np.unique(count)) > 1)
    kinds = ["part", "all"] + ["depth"] * (kind == "softmax") + ["target of" if kind == "softmax" else "source of"]
    found = [next(i for i, line in enumerate(lines) if word in line) for word in kinds]
    assert found == sorted(found)


@pytest.mark.parametrize("length", [5, 11])
def test_positions_of_a_text_are_those_of_its_segments(length, saved, evaluated):
    """Against segments that are cut here and scored one by one: 5 tokens as in training, and more."""
    checkpoint, overrides = saved("lm"), {"tokens_per_sample": length, "eval_memory_length": 0}
    arguments = ["--batch-size", 1, "--subset", "valid", "--model-overrides", overrides]
    numbers, lines = evaluated(checkpoint, *arguments)
    loaded = load(checkpoint, kinds=("text",))
    text = loaded.subset("valid")
    tokens = torch.cat([torch.tensor([loaded.task.dictionary.eos()]), text.read(0, len(text))])
    losses: list[list[float]] = [[] for _ in range(length)]
    for start in range(0, len(text), length):
        segment = tokens[start : start + length + 1]
        with torch.no_grad():
            log_probabilities = loaded.model(segment[None, :-1])[0][0].log_softmax(-1)
        for position, (row, token) in enumerate(zip(log_probabilities, segment[1:], strict=True)):
            losses[position].append(-float(row[token]) / math.log(2))
    found = numbers["subsets"]["valid"]["positions"]
    assert 1 < len(found) <= evaluate.BUCKETS and len(losses[0]) >= len(losses[-1]) > 9
    covered = []
    for name, row in found.items():
        first, *last = map(int, name.split("-"))
        members = range(first, (last or [first])[0] + 1)
        expected = [loss for position in members for loss in losses[position - 1]]
        assert row["tokens"] == len(expected) and row["nll_loss"] == pytest.approx(np.mean(expected), rel=1e-5)
        assert row["ppl"] == pytest.approx(2 ** row["nll_loss"])
        assert any(line.split()[:3] == ["valid", "positions", name] for line in lines)
        covered += members
    assert covered == list(range(1, length + 1))
    assert sum(row["tokens_right"] for row in found.values()) == numbers["subsets"]["valid"]["tokens_right"]


def test_a_text_shorter_than_a_segment_has_the_positions_of_its_tokens(saved, evaluated):
    overrides = {"tokens_per_sample": 900, "eval_memory_length": 0}
    numbers, _ = evaluated(saved("lm"), "--subset", "test", "--model-overrides", overrides)
    found = numbers["subsets"]["test"]
    assert list(found["positions"])[-1].endswith(f"-{found['tokens']}")
    assert sum(row["tokens"] for row in found["positions"].values()) == found["tokens"] < 900


def test_many_lengths_are_ranges_of_about_as_many_sentences():
    draw = np.random.default_rng(0)
    for words in (draw.integers(2, 60, 999), np.repeat([1, 30], [900, 20]), np.r_[np.ones(500, int), 2:40]):
        lengths = evaluate.by_length(words)
        assert 1 < len(lengths) <= evaluate.BUCKETS
        assert np.array_equal(np.sum(list(lengths.values()), 0), np.ones(len(words)))
        ends = [tuple(map(int, name.split("-"))) for name in lengths]
        assert all(before[-1] < after[0] for before, after in zip(ends, ends[1:]))
        for (low, *high), members in zip(ends, lengths.values(), strict=True):
            assert (words[members].min(), words[members].max()) == (low, *(high or [low]))
    assert evaluate.by_length(np.full(9, 4)) == {}


def test_lengths_of_subwords_are_those_of_their_text(tmp_path, evaluated):
    data = analysis_models.subwords_folder(tmp_path / "data", "--length-unit", "characters", "--max-length", 12)
    checkpoint = analysis_models.checkpoint(tmp_path / "model.pt", data, "softmax")
    numbers, lines = evaluated(checkpoint, "--subset", "valid,gen")
    for name in ("valid", "gen"):
        text = (data / "raw" / f"{name}.plain.tgt").read_text().splitlines()
        ranges = [tuple(map(int, part.split("-"))) for part in numbers["subsets"][name]["lengths"]]
        assert (ranges[0][0], ranges[-1][-1]) == (min(map(len, text)), max(map(len, text)))
    assert numbers["length_unit"] == "characters"
    assert any(" characters " in line and "target of " in line for line in lines)


def test_options_of_the_model_and_another_folder(saved, folders, evaluated):
    more = ["--model-overrides", "{'encoder_layers': 5}", "--data", folders["pairs"]]
    numbers, lines = evaluated(saved("linear"), *more, "--subset", "gen")
    plain, _ = evaluated(saved("linear"), "--subset", "gen")
    assert numbers["model_overrides"] == {"encoder_layers": 5} and plain["model_overrides"] == {}
    assert numbers["subsets"]["gen"]["nll_loss"] != plain["subsets"]["gen"]["nll_loss"]
    assert math.isfinite(numbers["subsets"]["gen"]["nll_loss"]) and lines[0].endswith(f" on {folders['pairs']}")


def test_what_the_user_can_fix_is_one_line(saved, folders, tmp_path, capsys):
    model, text = saved("softmax"), saved("lm")
    (tmp_path / "runs").mkdir()
    for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
        (tmp_path / "runs" / name).symlink_to(model)
    runs = tmp_path / "runs"
    alone = tmp_path / "alone"
    shutil.copytree(folders["pairs"], alone, ignore=shutil.ignore_patterns("valid.*", "gen.*"))
    cases = {
        (model, "--data", alone): f"the data folder {alone} has only train: evaluate it by --subset train",
        (f"{runs}/checkpoint_lst.pt",): f"there is no checkpoint {runs}/checkpoint_lst.pt: did you mean "
        "checkpoint_last.pt or checkpoint_best.pt?",
        (runs,): f"{runs} is a folder: give a checkpoint in it, such as {runs}/checkpoint_last.pt",
        (model, "--data", "nowhere"): "the data folder nowhere does not exist: give one with --data; the checkpoint "
        f"was trained on {folders['pairs']}",
        (model, "--subset", "valid,gn"): f"the data folder {folders['pairs']} has no subset 'gn': did you mean gen? "
        "choose from gen, train, valid",
        (text, "--subset", "gen"): f"the data folder {folders['text']} has no subset 'gen': "
        "choose from test, train, valid",
        (model, "--json", tmp_path): f"--json {tmp_path} is a folder: name a file",
        (model, "--model-overrides", "{'encoder_layer': 2}"): "--model-overrides names 'encoder_layer', which is not "
        f"an option in {model}",
    }
    for arguments, message in cases.items():
        assert main([*map(str, arguments), "--device", "cpu"]) == 1
        printed = capsys.readouterr()
        assert printed.err == f"error: {message}\n" and not printed.out
    with pytest.raises(SystemExit):
        main([model, "--subest", "gen"])
    assert "has no option --subest: did you mean --subset?" in capsys.readouterr().err


def test_the_folder_that_a_checkpoint_was_trained_on_is_gone(tmp_path, capsys):
    gone = analysis_models.pairs_folder(tmp_path / "gone")
    path = analysis_models.checkpoint(tmp_path / "model.pt", gone, "softmax")
    gone.rename(tmp_path / "elsewhere")
    assert main([str(path), "--device", "cpu"]) == 1
    message = f"the data folder {gone}, which the checkpoint was trained on, does not exist: give one with --data"
    assert capsys.readouterr().err == f"error: {message}\n"
    assert main([str(path), "--device", "cpu", "--data", str(tmp_path / "elsewhere")]) == 0


@pytest.mark.parametrize("mode", ["none", "complete"])
def test_a_language_model_of_another_task(mode, folders, tmp_path, capsys, monkeypatch):
    without_memory = analysis_models.MODELS["lm"].replace("--memory-length 7", "")
    monkeypatch.setitem(analysis_models.MODELS, "lm", without_memory)
    more = "--task", "language_modeling", "--sample-break-mode", mode
    path = analysis_models.checkpoint(tmp_path / "lm.pt", folders["text"], "lm", *more)
    assert main([str(path), "--device", "cpu"]) == 1
    command = f"fairseq-eval-lm {folders['text']} --user-dir fairseq_sg --path {path} --gen-subset valid"
    assert capsys.readouterr().err.endswith(f"run {command} --tokens-per-sample 5 --sample-break-mode {mode}\n")


def test_a_model_whose_outputs_are_nan(folders, tmp_path, evaluated):
    """Of some sentences: the number is said, and fairseq-generate says what it cannot do."""
    path = analysis_models.checkpoint(tmp_path / "model.pt", folders["pairs"], "softmax")
    (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    task.load_dataset("gen")
    dataset = task.dataset("gen")
    word = int(dataset[0]["source"][1])  # The first is the begin symbol.
    state = torch.load(path, weights_only=True)
    for weights in (state["model"], model.state_dict()):
        weights["encoder.embedding.tokens.weight"][word] = math.nan
    torch.save(state, path)
    count = sum(word in example["source"] for example in (dataset[i] for i in range(len(dataset))))
    assert 0 < count < len(dataset)
    numbers, lines = evaluated(path, "--subset", "gen")
    assert numbers["subsets"]["gen"]["not_finite"] == count
    assert any(line.startswith(f"gen: the loss of {count} sentences is NaN or infinite. Has the") for line in lines)
    generator = task.build_generator([model.eval()], GenerationConfig(beam=2))
    batch = next(task.get_batch_iterator(dataset, max_sentences=len(dataset)).next_epoch_itr(shuffle=False))
    with pytest.raises(UsageError, match="finds no output with a finite score. If `fairseq-sg evaluate` has a loss"):
        task.inference_step(generator, [model], batch)


def test_a_language_model_whose_outputs_are_nan(saved, tmp_path, evaluated):
    """The number of positions is said, of which a segment has 5."""
    state, path = torch.load(saved("lm"), weights_only=True), tmp_path / "model.pt"
    state["model"]["decoder.output_bias"][:] = math.nan
    torch.save(state, path)
    numbers, lines = evaluated(path, "--subset", "test")
    assert numbers["subsets"]["test"]["not_finite"] == 5
    assert any(line.startswith("test: the loss at 5 positions is NaN or infinite. Has the") for line in lines)


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    file = tmp_path / "numbers.json"
    file.write_text("before")
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError):
        files.write_json(str(file), {"a": 1})
    assert file.read_text() == "before" and os.listdir(tmp_path) == [file.name]
