"""The analyses on models of images and questions: maps, Values, norms, accuracy and answers; wrong options."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fairseq")

import torch

import fairseq_sg
from data_prep.sort_of_clevr.questions import ANSWERS, types_of
from fairseq_sg import evaluate
from fairseq_sg.analysis import accuracy, attention_maps, load, norms, values
from fairseq_sg.analysis.__main__ import main
from fairseq_sg.analysis.answers import choose
from fairseq_sg.analysis.plots import scenes
from fairseq_sg.errors import UsageError
from helpers.analysis_models import checkpoint
from helpers.scenes import write_scenes

ARGS = Namespace(index=37, input=None, target=None, subset="test", max_len=None, roles=None, steps=None, heads=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes") / "out", scenes=1, test_scenes=3)


@pytest.fixture(scope="module")
def visual(folder, tmp_path_factory) -> str:
    return str(checkpoint(tmp_path_factory.mktemp("checkpoint") / "one.pt", folder, "visual"))


@pytest.fixture
def loaded(visual):
    return load(visual, kinds=("images",))


def test_maps_of_a_question(loaded, folder):
    """Weights of the heads times Values are outputs: here rows of a linear attention, which sum to 1."""
    found = attention_maps.measure(loaded, ARGS)
    assert [name for name in found.arrays] == ["image", "encoder.step1", "encoder.step2", "encoder.step3"]
    assert found.arrays["encoder.step2"].shape == (2, 26, 26)
    np.testing.assert_allclose(found.arrays["encoder.step2"].sum(-1), 1, atol=1e-4)
    assert (found.arrays["image"] == np.load(folder / "test.images.npy")[1]).all()
    names = found.facts["roles"]["encoder"]["keys"]
    assert names[:7] == ["CLS", "1,1", "2,1", "3,1", "4,1", "5,1", "1,2"] and names == found.facts["source"]
    assert found.facts["index"] == 37 and found.facts["grid"] == (5, 5)
    assert found.facts["answer"] == ANSWERS[np.load(folder / "test.answers.npy")[1, 7]]
    assert found.facts["output"] in ANSWERS and found.facts["question"].startswith("unary_")


def test_patches_are_named_by_their_place(loaded):
    """The embedding of an image with one changed patch differs there alone."""
    embedding = loaded.model.encoder.embedding
    images, questions = torch.zeros(1, 75, 75, 3, dtype=torch.uint8), torch.zeros(1, 18, dtype=torch.uint8)
    changed = images.clone()
    changed[:, 15:30, 45:60] = 255  # row 2, column 4
    differs = (embedding(images, questions) != embedding(changed, questions)).any(-1)[0]
    assert [name for name, differs in zip(embedding.names, differs.tolist(), strict=True) if differs] == ["2,4"]


def test_values_of_a_question(loaded):
    found = values.measure(loaded, ARGS)
    for step in (1, 2, 3):
        similarity = found.arrays[f"encoder.step{step}"]
        assert similarity.shape == (2, 26, 26)
        np.testing.assert_allclose(np.diagonal(similarity, axis1=1, axis2=2), 1, atol=1e-5)
    assert len(found.facts["roles"]["encoder"]["mean_off_diagonal"]) == 3


def test_norms_over_a_subset(loaded):
    """All 26 positions of all questions; normalized ones are 1."""
    found = norms.measure(loaded, Namespace(subset="valid", batch_size=8, limit=20))
    assert found.arrays["encoder.step1.query.projected"].shape == (2, 20 * 26)
    np.testing.assert_allclose(found.arrays["encoder.step3.key.normalized"], 1, atol=1e-4)
    assert found.summary[0].startswith("20 questions of valid; ")


def test_accuracy_is_that_of_the_answers(loaded, folder, visual):
    """By the model itself, by ``evaluate``, by ``fairseq_sg.load`` and over the answers of every image."""
    images, questions, answers = (np.load(folder / f"test.{name}.npy") for name in ("images", "questions", "answers"))
    with torch.no_grad():
        inputs = torch.from_numpy(images.repeat(30, 0)), torch.from_numpy(questions.reshape(-1, 18))
        predicted = loaded.model(*inputs)[0].argmax(-1).numpy()
    right = predicted == answers.ravel()
    found = evaluate.measure(loaded, "test", 7, visual)
    assert found["sentences"] == 90 and found["right"] == right.sum() and "lengths" not in found
    groups = types_of(questions).ravel() // 3
    for number, group in enumerate(("unary", "binary", "ternary")):
        assert found["types"][group]["accuracy"] == pytest.approx(100 * right[groups == number].mean())
    table = accuracy.measure(loaded, Namespace(by="type", subset="test", batch_size=7, limit=None))
    assert table.summary[0] == f"test: {100 * right.mean():.2f} % of 90 questions"
    assert "questions" in accuracy.combine({"a": [table], "b": [table]}).summary[2]
    model = fairseq_sg.load(visual)
    assert model.accuracy("test") == pytest.approx(100 * right.mean()) and ".classify" not in repr(model)
    with pytest.raises(UsageError, match="a classifier of images"):
        model.classify("a")


def test_answers_of_an_image(visual, tmp_path, capsys):
    assert main(["answers", visual, "--scene", "2", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    facts = json.loads((tmp_path / "out.json").read_text("utf-8"))
    right = sum(q["output"] == q["answer"] for q in facts["questions"])
    assert f"image 2 of test: {right} of 30 answers are right" in printed
    assert printed.count(" is right") == 30 - right
    assert [q["index"] for q in facts["questions"]] == list(range(60, 90))
    assert (tmp_path / "out.png").stat().st_size > 3_000


def test_masks_of_a_model_of_images(visual, tmp_path, capsys):
    """They are trained, and resumed where the questions, images and answers are the same."""
    options = ["masks", visual, "--batch-size", "6", "--steps", "2", "--evaluate", "valid", "--device", "cpu"]
    for more in ([], ["--resume"], ["--resume", "--subset", "test"]):
        assert main([*options, *more, "--out", str(tmp_path / "out"), "--format", "none"]) == 0
        printed = capsys.readouterr().out
        assert ("resuming from step 2" in printed) == (more == ["--resume"])
    facts = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert facts["metric"] == "accuracy" and facts["evaluation"]["valid"]["all"]["examples"] == 90


def test_three_questions_of_each_group():
    """One of each type first; further ones of a type where another has none."""
    asked = [{"question": f"{kind} red", "index": i} for i, kind in enumerate(["unary_up"] * 3 + ["unary_left"])]
    chosen = choose(asked)
    assert [q["index"] for q in chosen["unary"]] == [3, 0, 1] and chosen["binary"] == []


@pytest.mark.parametrize("command,pictures", [("maps", ["encoder", "scene"]), ("values", ["encoder", "scene"])])
def test_pictures(command, pictures, visual, tmp_path, capsys):
    arguments = [command, visual, "--index", "3", "--heads", "2", "--steps", "1,3", "--out", str(tmp_path / "out.png")]
    assert main(arguments) == 0, capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {
        "out.npz", "out.json", *(f"out.{picture}.png" for picture in pictures)
    }  # fmt: skip


def test_shades_of_patches():
    """The largest weight leaves its patch as it is; 0 and negative ones are equally dark."""
    weights = np.array([[0.5, 0.0], [0.25, -1.0]])
    figure = scenes(np.full((4, 4, 3), 255, np.uint8), [[weights]], [["one"]])
    image, shade = figure.axes[0].get_images()
    np.testing.assert_allclose(shade.get_array()[..., 3], [[0, 0.85], [0.425, 0.85]])
    assert image.get_extent() == shade.get_extent()


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["maps", "--input", "a b"], "was trained on images: give --index, the number of a question in --subset"),
        (["maps", "--index", "90"], "--index is 90: test has the questions 0 to 89"),
        (["values", "--index", "0", "--subset", "gen"], "has no subset 'gen': choose from train, valid, test"),
        (["answers", "--scene", "3"], "--scene is 3: test has the images 0 to 2"),
        (["accuracy", "--subset", "test"], "images and questions have no lengths: choose --by type"),
        (["symbols"], "was trained on images: this analysis needs a model of words"),
        (["gates", "--index", "1"], "was trained without copy gates"),
        (["maps", "--index", "1", "--max-len", "3"], "instead of --input, --target and --max-len"),
    ],
)
def test_wrong_options(arguments, message, visual, tmp_path, capsys):
    command, *more = arguments
    assert main([command, visual, *more, "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


@pytest.mark.parametrize("command", [["maps", "--index", "1"], ["answers"]])
def test_models_of_words(command, saved, tmp_path, capsys):
    name, *more = command
    assert main([name, saved("softmax"), *more, "--out", str(tmp_path / "out")]) == 1
    assert "reads words" in capsys.readouterr().err
