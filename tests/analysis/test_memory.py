"""``analysis memory``: what is recorded is what the model did; pictures; what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("fairseq")

import torch

import fairseq_sg
from fairseq_sg.analysis import load
from fairseq_sg.analysis.__main__ import main
from fairseq_sg.errors import UsageError
from helpers.analysis_models import checkpoint, ctlpp_folder
from helpers.labelled_words import write_labelled_words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_labelled_words(tmp_path_factory.mktemp("words") / "bin")


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("checkpoint") / "one.pt", folder, "dnc")


def test_the_record_is_the_models(folder, saved, tmp_path, capsys):
    assert main(["memory", str(saved), "--index", "3", "--device", "cpu", "--out", str(tmp_path / "m")]) == 0
    found, facts = np.load(tmp_path / "m.npz"), json.loads((tmp_path / "m.json").read_text())
    source = (folder / "raw" / "valid.src").read_text().splitlines()[3].split()
    target = (folder / "raw" / "valid.tgt").read_text().splitlines()[3].split()
    assert facts["source"] == source and facts["target"] == target and len(facts["output"]) == len(source)
    words = len(source)
    assert found["write_weights"].shape == (words, 5) and found["read_weights"].shape == (words, 2, 5)
    assert found["modes"].shape == (words, 2, 3) and found["read_masks"].shape == (words, 2, 4)
    np.testing.assert_allclose(found["modes"].sum(-1), 1, rtol=1e-5)
    loaded = load(str(saved))
    tokens = loaded.subset("valid")[3]["source"][None]
    with torch.no_grad():
        _, _, record = loaded.model.run(tokens, record=True)
        logits = loaded.model(tokens)[0][0]
    np.testing.assert_allclose(found["usage"], record.usage[0], rtol=1e-6)
    bits = (logits > 0).int().tolist()
    table = loaded.task.target_bits.int().tolist()
    index = loaded.task.target_dictionary.index
    for word, row in zip(facts["output"], bits, strict=True):
        assert "".join(map(str, row)) == word or table[index(word)] == row
    assert (tmp_path / "m.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "head 2: mean read mode backward" in printed
    asked = [word if label != "." else "." for word, label in zip(facts["output"], target, strict=True)]
    assert "." in asked and f"output  {' '.join(asked)}\n" in printed


def test_a_sentence_of_words(saved, tmp_path):
    line = ["--input", "101 <copy> . .", "--format", "none", "--out", str(tmp_path / "m")]
    assert main(["memory", str(saved), *line, "--model-overrides", "{'memory_cells': 9}"]) == 0
    facts = json.loads((tmp_path / "m.json").read_text())
    assert facts["source"] == ["101", "<copy>", ".", "."] and facts["target"] == []
    assert np.load(tmp_path / "m.npz")["usage"].shape == (4, 9)


def test_refused(saved, tmp_path, capsys):
    lstm = checkpoint(tmp_path / "lstm.pt", ctlpp_folder(tmp_path / "ctlpp"), "lstm")
    for line, message in (
        ([lstm, "--index", "0"], "sg_lstm has no memory of cells: choose a checkpoint of sg_dnc"),
        ([saved, "--index", "29"], "--index is 29: valid has the sentences 0 to 28"),
        ([saved, "--input", "101", "--subset", "valid"], "--subset is for --index: omit it, or give --index instead"),
        ([saved, "--input", "102"], "--input has the word '102', which is not in the source dictionary"),
    ):
        assert main(["memory", *map(str, line), "--format", "none", "--out", str(tmp_path / "x")]) == 1
        assert message in capsys.readouterr().err
    for command in (["maps", str(saved), "--input", "101 <copy> . ."], ["gates", str(saved), "--input", "101"]):
        assert main([*command, "--format", "none", "--out", str(tmp_path / "x")]) == 1
        assert "labels words: this analysis needs" in capsys.readouterr().err
    assert not list(tmp_path.glob("x*"))


def test_accuracy_of_labels(saved, tmp_path):
    """`accuracy` takes a model of labels too."""
    line = ["--subset", "valid,gen", "--by", "type", "--format", "none", "--out", str(tmp_path / "a")]
    assert main(["accuracy", str(saved), *line]) == 0
    facts = json.loads((tmp_path / "a.json").read_text())
    assert set(facts["subsets"]["gen"]["groups"]) == {"repeats_3", "repeats_4"}


def test_labels_of_words_in_python(saved):
    """There is no one class, and no text, for `.classify` and `.score`."""
    model = fairseq_sg.load(saved, device="cpu")
    assert "a model that labels words: .accuracy, .evaluate; data" in repr(model)
    assert model.accuracy("gen") == model.evaluate("gen")["accuracy"]
    for method in ("translate", "classify", "score", "attention"):
        with pytest.raises(UsageError, match=f"sg_dnc.* and has no .{method}: use .accuracy, .evaluate"):
            getattr(model, method)("101 <copy> . .")
