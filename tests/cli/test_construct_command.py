"""``fairseq-sg construct``: constructions as checkpoints for fairseq's own commands, and their figures."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from fairseq.data import Dictionary

from fairseq_sg import construct
from fairseq_sg.construct import main, make_parser
from fairseq_sg.errors import UsageError
from fairseq_sg.models import constructions
from helpers.commands import metrics, run, succeed
from helpers.data_files import with_reversed_words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of both languages."""
    found = tmp_path_factory.mktemp("constructions")
    lengths = "--train-lengths 4-9 --test-lengths 15,60 --train 100 --test 20".split()
    for name in ("parity", "first"):
        succeed("data_prep", name, *lengths, "--out", found / name)
    return found


def validated(data, checkpoint):
    options = "--task sg_classification --valid-subset gen --accuracy-by types --batch-size 7 --cpu --num-workers 0"
    log = succeed(
        "fairseq-validate",
        data,
        "--user-dir",
        "fairseq_sg",
        "--path",
        checkpoint,
        *options.split(),
        "--log-format",
        "json",
    )
    (found,) = metrics(log, "gen")
    return found


@pytest.mark.parametrize(
    "name, options, bits",
    [
        ("parity", ["--layer-norm-eps", "0"], 0.0598),
        ("first", ["--layer-norm-eps", "0"], 0.1195),
        ("first", ["--layer-norm-eps", "0", "--bits", "0.01"], 0.01),
        ("first", ["--log-length", "--sharpness", "2"], None),
        ("parity", [], None),
    ],
)
def test_validation_of_a_construction(name, options, bits, folder, tmp_path, capsys):
    assert main([name, str(folder / name), "--out", str(tmp_path / "new" / "exact.pt"), *options]) == 0
    assert re.search(
        rf"exact.pt: {name.upper()} of sentences <s> .*</s>, read from </?s>$", capsys.readouterr().out.strip()
    )
    found = validated(folder / name, tmp_path / "new" / "exact.pt")
    assert found["accuracy"] == 100
    if bits is not None:
        assert found["nll_loss"] == pytest.approx(bits, abs=1e-3)
    elif name == "parity":
        assert 0.99 < found["nll_loss"] < 1
    else:
        assert found["nll_loss"] < 0.7  # s → ½; with c = 1 it is 0.83


def test_a_construction_is_a_checkpoint_like_others(folder, tmp_path):
    assert main(["parity", str(folder / "parity"), "--out", str(tmp_path / "x.pt"), "--layer-norm-eps", "0"]) == 0
    assert "100.00" in succeed("fairseq_sg.evaluate", tmp_path / "x.pt", "--device", "cpu", "--subset", "gen")
    options = ["--input", "0 1 1 0 CLS", "--device", "cpu", "--format", "none", "--out", tmp_path / "maps"]
    succeed("fairseq_sg.analysis", "maps", tmp_path / "x.pt", *options)
    # Another order of words is noticed, as for any checkpoint.
    other = with_reversed_words(folder / "parity", tmp_path / "other", "src")
    refused = run("fairseq_sg.evaluate", tmp_path / "x.pt", "--device", "cpu", "--data", other)
    message = f"the model was trained on {folder / 'parity'}, and the source dictionary of {other} has other words"
    assert refused.code == 1 and f"error: {message}" in refused.err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["parity", "first", "--out", "x.pt"], "first has first, not parity: give a folder of data_prep parity"),
        (["parity", "nowhere", "--out", "x.pt"], "there is no folder nowhere: prepare it with"),
        (
            ["parity", "parity", "--out", "parity/dataset.json"],
            "dataset.json is a checkpoint: name a file that ends in .pt",
        ),
        (["parity", "parity", "--out", "parity"], "--out parity is a folder: name a file"),
        (["figures", "first/dataset.json/f"], "first/dataset.json/f.json cannot be written: "),
        (["parity", "parity", "--out", "x.pt", "--bits", "0.1"], "--bits needs --layer-norm-eps 0: give it"),
        (["parity", "parity", "--out", "x.pt", "--layer-norm-eps", "0", "--bits", "1"], "1.0 bits is out of reach"),
        (["figures", "x", "--longest", "0"], "--longest is 0: choose 10 or more"),
    ],
)
def test_mistakes(arguments, message, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(arguments) == 1
    assert message in capsys.readouterr().err and not (folder / "x.pt").exists()
    with pytest.raises(SystemExit):
        make_parser().parse_args(["first", "d", "--out", "x", "--layer-norm-eps", "-1"])
    assert "'-1' is not a number from 0 on" in capsys.readouterr().err


def test_a_model_of_other_words(folder, tmp_path):
    dictionary = Dictionary()
    for word in ("1", "0", "CLS"):
        dictionary.add_symbol(word)
    model = constructions.parity(dictionary=dictionary)
    with pytest.raises(UsageError, match=f"the model's dictionary is not that of {folder / 'first'}"):
        construct.save(model, str(folder / "first"), tmp_path / "x.pt")
    assert not list(tmp_path.iterdir())


def test_the_probabilities_of_kinds():
    for length in (1, 7, 300):
        strings, probability = construct.kinds("parity", length)
        assert len(strings) == length + 1 and probability.sum().item() == pytest.approx(1, rel=1e-9)
    strings, probability = construct.kinds("parity", 3)
    torch.testing.assert_close(probability, torch.tensor([1, 3, 3, 1], dtype=torch.float64) / 8)


def test_figures(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(construct, "SAMPLES", 10)
    assert main(["figures", str(tmp_path / "f" / "exact"), "--longest", "12"]) == 0
    found = json.loads((tmp_path / "f" / "exact.json").read_text())
    for name, exact in (("parity", 0.059811), ("first", 0.119473)):
        curves = found["by_length"][name]
        assert list(curves) == ["no layer norm", "ε = 0.001", "ε = 1e-05", "ε = 1e-07", "ε = 1e-09", "ε = 0"]
        assert [point["length"] for point in curves["ε = 0"]] == [1, 3, 10]
        for points in curves.values():
            assert all(point["accuracy"] == pytest.approx(100) for point in points)
            assert all(point["bits"] >= exact - 1e-6 for point in points)
        for key in ("bits", "sampled"):
            assert all(point[key] == pytest.approx(exact, abs=1e-6) for point in curves["ε = 0"])
    (around,) = found["around_one_weight"].values()
    best = min(around, key=lambda point: point["bits"])
    assert best["weight"] == pytest.approx(1, abs=0.03) and best["accuracy"] == pytest.approx(100)
    assert around[0]["accuracy"] < 70 and around[-1]["accuracy"] < 70
    assert (tmp_path / "f" / "exact.png").read_bytes().startswith(b"\x89PNG")


def test_figures_without_matplotlib_are_refused_before_anything_is_computed(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(construct, "by_length", lambda lengths: pytest.fail("computed"))
    assert main(["figures", str(tmp_path / "f" / "exact")]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: figures need matplotlib") and "pip install 'fairseq_sg[experiments]'" in printed
    assert not list(tmp_path.iterdir())


def test_options_of_a_model_are_what_was_set():
    found = construct.options_of(constructions.first(1e-7, log_length=True))
    assert found["layer_norm_eps"] == 1e-7 and found["logit_scale"] == "log_length" and found["readout"] == "first"
    assert "encoder_attention" not in found and "depth" not in found
