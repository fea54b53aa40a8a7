"""Several trainings in one process: each is what it is alone, whatever becomes of the others."""

from __future__ import annotations

import gc
import json
import random
import weakref
from pathlib import Path

import pytest
import torch

from data_prep.__main__ import main as data_prep
from fairseq_sg.experiments.logs import events
from fairseq_sg.together import Training
from helpers import classifiers
from helpers.commands import LINEAR, RELATIVE, REPOSITORY, launch, run, succeed, training
from helpers.labelled_data import write_labelled
from helpers.states import assert_same_state
from helpers.trainers import lasting

BEST = (
    "--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --patience 3 --keep-best-checkpoints 1".split()
)


@pytest.fixture(scope="module")
def sources(data, tmp_path_factory) -> dict[str, Path]:
    folder, draw = tmp_path_factory.mktemp("sources"), random.Random(0)
    (folder / "letters").write_text("".join(draw.choices("abcdefgh", k=6000)))
    text = ["text", "--unit", "bytes", "--input", str(folder / "letters"), "--out", str(folder / "text")]
    assert not data_prep(text)
    write_labelled(folder / "labelled")
    return {"pairs": data, "text": folder / "text", "labelled": folder / "labelled"}


def commands(sources: dict[str, Path], folder: Path) -> dict[str, list[str]]:
    """Name -> arguments of ``fairseq-train``: other tasks, lengths, numbers of validations, and moments of the end."""
    language = (
        "--user-dir fairseq_sg --task sg_language_modeling --tokens-per-sample 16 --memory-length 16 --cpu "
        "--arch sg_transformer_lm --decoder-layers 1 --decoder-embed-dim 16 --decoder-attention-heads 2 "
        "--decoder-attention relative --decoder-ffn-embed-dim 32 --dropout 0.1 --optimizer adam --lr 1e-2 "
        "--criterion cross_entropy_orthogonality --batch-size 8 --no-epoch-checkpoints --log-format json "
        "--max-epoch 2"
    ).split()
    made = {
        "linear": training(
            sources["pairs"], folder / "linear", *LINEAR, *BEST, "--dropout", "0.2", "--max-epoch", "3",
            "--orthogonality-weight", "1e-3", "--validate-interval-updates", "4", "--seed", "2",
        ),
        "relative": training(sources["pairs"], folder / "relative", *RELATIVE, *BEST, "--max-update", "7"),
        "classifier": classifiers.training(
            sources["labelled"], folder / "classifier", *classifiers.KINDS["sg_encoder"], "--max-epoch", 1
        ),
        "language": [sources["text"], *language, "--save-dir", folder / "language"],
    }  # fmt: skip
    common = ["--log-interval", "3", "--num-workers", "0"]
    return {name: [*map(str, arguments), *common] for name, arguments in made.items()}


def together(folder: Path, made: dict[str, list[str]], stacked: bool = False, **environment: str):
    """The result of the process, and the exit code of each training; those with one name before ``-`` are a stack."""
    plan = []
    for name, arguments in made.items():
        files = {key: str(folder / f"{name}.{key}") for key in ("log", "end", "stop")}
        stack, _, seed = name.partition("-")
        plan.append({"arguments": arguments, "lock": None, "stack": stack if stacked and seed else None, **files})
    (folder / "plan.json").write_text(json.dumps(plan))
    done = run("fairseq_sg.together", folder / "plan.json", cwd=REPOSITORY, **environment)
    return done, {name: (folder / f"{name}.end").read_text() for name in made}


def test_checkpoints_and_logs_are_those_of_single_trainings(sources, tmp_path):
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    for folder in (alone, beside):
        folder.mkdir()
    for name, arguments in commands(sources, alone).items():
        (alone / f"{name}.log").write_text(succeed("fairseq-train", *arguments))
    done, ends = together(beside, commands(sources, beside))
    assert done.code == 0 and set(ends.values()) == {"0"}, done.err
    for name in ends:
        files = sorted(path.name for path in (alone / name).glob("*.pt"))
        assert files == sorted(path.name for path in (beside / name).glob("*.pt")) and "checkpoint_last.pt" in files
        for file in files:
            assert_same_state(alone / name / file, beside / name / file)
        logged = [[lasting(event) for event in events(folder / f"{name}.log")] for folder in (beside, alone)]
        assert logged[0] == logged[1] != []


def test_one_that_fails_or_is_stopped_does_not_disturb_the_others(sources, tmp_path):
    made = commands(sources, tmp_path)
    made["wrong"] = [*made["linear"], "--best-checkpoint-metric", "accurracy", "--save-dir", str(tmp_path / "wrong")]
    made["diverging"] = [*made["relative"], "--lr", "1e30", "--save-dir", str(tmp_path / "diverging")]
    (tmp_path / "language.stop").touch()
    done, ends = together(tmp_path, made)
    assert done.code == 1
    assert ends == {"linear": "0", "relative": "0", "classifier": "0", "language": "1", "wrong": "1", "diverging": "1"}
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in made}
    assert "error: --best-checkpoint-metric is 'accurracy'" in logs["wrong"] and "Traceback" not in logs["wrong"]
    assert "\nFloatingPointError: gradients are Nan/Inf at update" in logs["diverging"]
    assert logs["language"].endswith("stopped\n")
    assert [event["kind"] for event in events(tmp_path / "relative.log")].count("valid") > 0


def test_a_stopped_process_is_resumed_by_the_same_plan(sources, tmp_path):
    """Trainings go on from their own checkpoints. Without patience: the last update of a stop is validated too."""

    def train(folder: Path, *most: str) -> None:
        folder.mkdir(exist_ok=True)
        made = {name: commands(sources, folder)[name] for name in ("linear", "relative")}
        done, _ = together(folder, {name: [*words, "--patience", "-1", *most] for name, words in made.items()})
        assert done.code == 0, done.err

    train(tmp_path / "whole")
    train(tmp_path / "parts", "--max-update", "5")
    train(tmp_path / "parts")
    for name in ("linear", "relative"):
        assert_same_state(*(tmp_path / folder / name / "checkpoint_last.pt" for folder in ("whole", "parts")))


#: Dropout would draw other masks. Adam's first updates would magnify rounding, and so would the kink of a ReLU.
ALIKE = "--dropout 0 --ffn-activation gelu --adam-eps 1e-3 --optimizer torch_adam --lr 5e-3".split()


def stacks(sources: dict[str, Path], folder: Path) -> dict[str, list[str]]:
    """Two seeds each of three tasks, and one training that is not stacked."""
    made = commands(sources, folder)
    return {
        **{
            f"{name}-{seed}": [
                *made[name],
                *ALIKE,
                *more.split(),
                "--seed",
                seed,
                "--save-dir",
                f"{folder / name}-{seed}",
            ]
            for name, more in {"linear": "", "classifier": "", "language": "--memory-length 0"}.items()
            for seed in "34"
        },
        "relative": made["relative"],
    }


def test_a_stack_makes_the_steps_of_its_trainings_at_once(sources, tmp_path):
    """Its models are what they are alone, up to rounding; so are logs."""
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    for folder in (alone, beside):
        folder.mkdir()
    single = stacks(sources, alone)
    for name in ("linear-4", "classifier-3", "language-4", "relative"):
        (alone / f"{name}.log").write_text(succeed("fairseq-train", *single[name]))
    done, ends = together(beside, stacks(sources, beside), stacked=True)
    assert done.code == 0 and set(ends.values()) == {"0"}, done.err
    assert_same_state(alone / "relative/checkpoint_last.pt", beside / "relative/checkpoint_last.pt")
    for name in ("linear-4", "classifier-3", "language-4"):
        files = [folder / name / "checkpoint_last.pt" for folder in (beside, alone)]
        one, two = (torch.load(path, weights_only=True) for path in files)
        torch.testing.assert_close(one["model"], two["model"], rtol=1e-4, atol=1e-5)
        assert files[0].stat().st_size == pytest.approx(files[1].stat().st_size, rel=0.05)
        logged = [[lasting(event) for event in events(folder / f"{name}.log")] for folder in (beside, alone)]
        assert len(logged[0]) == len(logged[1]) > 2
        for found, expected in zip(*logged, strict=True):
            numbers = {key: float(value) for key, value in expected.items() if key.endswith(("loss", "num_updates"))}
            assert {key: float(found[key]) for key in numbers} == pytest.approx(numbers, rel=0.01)


@pytest.mark.parametrize("stacked_first", [False, True])
def test_a_training_is_resumed_in_a_stack_or_without(stacked_first, sources, tmp_path):
    def train(folder: Path, stacked: bool, *most: str) -> None:
        folder.mkdir(exist_ok=True)
        made = {
            n: [*words, "--patience", "-1", "--max-epoch", "1", *most] for n, words in stacks(sources, folder).items()
        }
        done, _ = together(folder, {name: made[name] for name in ("linear-3", "linear-4")}, stacked)
        assert done.code == 0, done.err

    train(tmp_path / "whole", False)
    train(tmp_path / "parts", stacked_first, "--max-update", "5")
    train(tmp_path / "parts", not stacked_first)
    for name in ("linear-3", "linear-4"):
        files = [tmp_path / folder / name / "checkpoint_last.pt" for folder in ("whole", "parts")]
        one, two = (torch.load(path, weights_only=True) for path in files)
        for part in ("model", "last_optimizer_state"):
            torch.testing.assert_close(one[part], two[part], rtol=1e-4, atol=1e-5)


def test_those_of_a_stack_that_remain_are_stacked_again(sources, tmp_path):
    """One diverges, one is stopped, one cannot be built, two have fewer updates. The model of another is refused."""
    words = [*commands(sources, tmp_path)["linear"], "--patience", "-1"]
    most = {"linear-4": 8, "linear-5": 3, "linear-6": 6}
    made = {
        name: [*words, "--seed", name[-1], "--save-dir", str(tmp_path / name), "--max-update", str(updates)]
        for name, updates in {"linear-3": 8, **most}.items()
    }
    made["linear-3"] += ["--lr", "1e30"]
    made["linear-7"] = [*made["linear-4"], "--decoder-attention", "wrong"]
    (tmp_path / "linear-8.stop").touch()
    made["linear-8"] = [*made["linear-4"], "--save-dir", str(tmp_path / "linear-8")]
    lstm = classifiers.KINDS["sg_lstm"]
    made["lstm-1"] = classifiers.training(sources["labelled"], tmp_path / "lstm", *lstm, "--max-update", 1)
    done, ends = together(tmp_path, made, stacked=True)
    assert done.code == 1
    assert ends == {
        "lstm-1": "1",
        "linear-3": "1",
        "linear-4": "0",
        "linear-5": "0",
        "linear-6": "0",
        "linear-7": "1",
        "linear-8": "1",
    }
    assert "\nFloatingPointError: gradients are Nan/Inf at update" in (tmp_path / "linear-3.log").read_text()
    assert (tmp_path / "linear-8.log").read_text().endswith("stopped\n")
    assert "error: --stacked: --arch sg_lstm has lengths on the host" in (tmp_path / "lstm-1.log").read_text()
    for name, updates in most.items():
        saved = torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True)
        assert saved["optimizer_history"][-1]["num_updates"] == updates
        assert all(tensor.isfinite().all() for tensor in saved["model"].values())


def test_logs_of_a_true_process_can_be_read(sources, tmp_path):
    """Who imports fairseq first decides on the form of its log."""
    words = [*commands(sources, tmp_path)["classifier"], "--max-update", "3", "--disable-validation", "--no-save"]
    files = {key: str(tmp_path / key) for key in ("log", "end", "stop")}
    (tmp_path / "plan.json").write_text(json.dumps([{"arguments": words, "lock": None, **files}]))
    done = launch("python", "-m", "fairseq_sg.together", tmp_path / "plan.json")
    assert done.code == 0, done.err
    assert [event["kind"] for event in events(tmp_path / "log")] == ["train_inner", "train"]


def test_what_a_training_leaves_is_gone_before_the_next_turn(tmp_path, monkeypatch):
    """On a GPU, these are graphs, which would otherwise be released during a recording of another training."""

    class Trainer:
        def __init__(self):
            self.step = self.train

        def train(self):
            pass

    def train():
        left.append(weakref.ref(Trainer()))
        return 0

    left: list = []
    training = Training([], *(str(tmp_path / name) for name in ("log", "end", "stop")), None)
    monkeypatch.setattr(training.state, "take", lambda: None)
    monkeypatch.setattr(training, "_train", train)
    monkeypatch.setattr(training, "_leave", lambda: left.append(left[0]() is None))
    training.go.release()
    gc.disable()
    try:
        training.run()
    finally:
        gc.enable()
    assert left[1] is True
