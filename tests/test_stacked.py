"""Steps of several trainings at once are those of each alone, also in graphs of software."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("fairseq")

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.errors import UsageError
from fairseq_sg.stacked import Stack, StackedModels
from fairseq_sg.trainer import Row, SGTrainer
from helpers.small_folders import random_pairs, write_folder
from helpers.software_graph import SoftwareGraphs
from helpers.trainers import build, groups

SEEDS, MOST = (1, 2, 5), 100
#: The last of the seven batches is smaller than the others. The kink of a ReLU would magnify rounding.
PLAIN = "--batch-size 9 --required-batch-size-multiple 1 --dropout 0 --adam-eps 1e-4 --ffn-activation gelu".split()
CASES = {
    "linear, orthogonality": [],
    "accumulated": ["--update-freq", "2"],
    "clipped, a schedule": ["--clip-norm", "0.1", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "5"],
    "sentences": ["--sentence-avg", "--label-smoothing", "0.1", "--weight-decay", "0.1"],
    "relative, softmax": ["--encoder-attention", "relative", "--decoder-attention", "softmax", "--position", "rotary"],
    "router": ["--encoder-attention", "geometric", "--encoder-update", "copy_gate", "--depth", "shared"],
    "mixtures": ["--encoder-ffn", "sigma_moe", "--moe-experts", "4", "--moe-k", "2", "--moe-expert-dropout", "0"],
    "padding on the left": ["--left-pad-source", "--left-pad-target"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    subsets = {"train": random_pairs(60, 1), "valid": random_pairs(12, 2)}
    return write_folder(tmp_path_factory.mktemp("data") / "pairs", subsets)


def of_length(folder: Path, words: int) -> Path:
    """Training data of pairs of so many words."""
    return write_folder(folder, {"train": [("s1 " * words, "T1 " * words)] * 4})


def of_seeds(folder, *arguments: str, seeds: Sequence[int] = SEEDS, **hooks) -> list[SGTrainer]:
    found = []
    for seed in seeds:
        found.append(build(SGTrainer, folder, *PLAIN, *arguments, "--seed", str(seed)))
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in found[-1].model.parameters():
                p += 0.1 * torch.randn_like(p)
    return found


def numbers(row: Row) -> dict[str, float]:
    batch, norm = row.read(row.values.tolist())
    logs = {f"{name} {n}": float(value) for n, log in enumerate(batch.logs) for name, value in log.items()}
    return {"norm": float(norm), "size": float(batch.size), **logs}


def alone(trainers: list[SGTrainer], steps: list[list]) -> list[list[dict[str, float]]]:
    """The numbers of the steps of each training."""
    found = []
    for trainer, own in zip(trainers, steps, strict=True):
        found.append([])
        for samples in own:
            found[-1].append(numbers(trainer._step_on_device(samples)))
            trainer.set_num_updates(trainer.get_num_updates() + 1)
    return found


def at_once(trainers: list[SGTrainer], steps: list[list], recorder=None) -> list[list[dict[str, float]]]:
    groups(trainers[0])  # loads the data
    for trainer in trainers if recorder else ():
        trainer.most_graphs = MOST
        trainer.optimizer.keep_rate_on(trainer.device)
    models, found = StackedModels(trainers, recorder), [[] for _ in trainers]
    for together in zip(*steps, strict=True):
        for own, trainer, row in zip(found, trainers, models.step(together), strict=True):
            own.append(numbers(row))
            trainer.set_num_updates(trainer.get_num_updates() + 1)
    return found


def batches_of(trainers: list[SGTrainer], epochs: int = 2) -> list[list]:
    """In another order for each training."""
    found = []
    for k, trainer in enumerate(trainers):
        own = groups(trainer) * epochs
        found.append(own[k:] + own[:k])
    return found


def assert_same_trainings(a: list[SGTrainer], b: list[SGTrainer], near: float = 2e-4) -> None:
    for first, second in zip(a, b, strict=True):
        torch.testing.assert_close(first.model.state_dict(), second.model.state_dict(), rtol=near, atol=near)
        states = [trainer.optimizer.state_dict()["state"] for trainer in (first, second)]
        torch.testing.assert_close(*states, rtol=10 * near, atol=near)


def assert_same_numbers(found: list[list[dict]], expected: list[list[dict]]) -> None:
    for own, other in zip(found, expected, strict=True):
        for made, right in zip(own, other, strict=True):
            assert made == pytest.approx(right, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("recorded", [False, True], ids=["as it is", "recorded"])
@pytest.mark.parametrize("case", CASES)
def test_each_model_is_what_it_is_alone(folder, case, recorded):
    single, several = of_seeds(folder, *CASES[case]), of_seeds(folder, *CASES[case])
    steps, recorder = batches_of(single), SoftwareGraphs() if recorded else None
    assert_same_numbers(at_once(several, steps, recorder), alone(single, steps))
    assert_same_trainings(several, single)


def test_autocast(folder):
    """Products in bfloat16, as in a training alone."""

    def first(how, *arguments: str) -> dict[str, float]:
        trainers = of_seeds(folder, *arguments, seeds=(1,))
        return how(trainers, [groups(trainers[0])[:1]])[0][0]

    rounded = first(at_once, "--autocast", "bfloat16")
    assert rounded == pytest.approx(first(alone, "--autocast", "bfloat16"), rel=0.01)
    assert rounded["loss 0"] != pytest.approx(first(at_once)["loss 0"], rel=1e-5)


def test_models_whose_batches_differ_in_shape_make_steps_of_their_own(folder, monkeypatch):
    """The last batch of an epoch is smaller, and comes at another step with another seed."""
    trainers, made = of_seeds(folder), []
    step = StackedModels._step
    monkeypatch.setattr(StackedModels, "_step", lambda self, batches: made.append(batches[0]) or step(self, batches))
    at_once(trainers, batches_of(trainers, epochs=1))
    which = [batch["models"] for batch in made]
    assert which.count((0, 1, 2)) == 4
    assert sorted(part for part in which if len(part) < 3) == [(0,), (0, 1), (0, 2), (1,), (1, 2), (2,)]


def test_dropout_differs_from_model_to_model_and_repeats_with_the_seed(folder):
    def losses() -> list[float]:
        trainers = of_seeds(folder, "--dropout", "0.5", seeds=(1, 1))
        samples = groups(trainers[0])[0]
        trainers[0]._set_seed()
        return [numbers(row)["loss 0"] for row in StackedModels(trainers).step([samples, samples])]

    first, second = losses(), losses()
    assert first == second and first[0] != first[1]


def test_a_step_after_a_validation_is_one_of_training(folder):
    trainers = of_seeds(folder, "--dropout", "0.5", seeds=(1, 1))
    samples, models = groups(trainers[0])[0], StackedModels(trainers)
    models.step([samples, samples])
    for trainer in trainers:
        trainer.model.eval()
        trainer.criterion.eval()
    losses = [numbers(row)["loss 0"] for row in models.step([samples, samples])]
    assert losses[0] != losses[1] and trainers[0].model.training and trainers[0].criterion.training


def test_a_model_whose_gradient_is_not_finite_leaves_out_its_update_alone(folder):
    trainers = of_seeds(folder)
    samples = groups(trainers[0])[0]
    models = StackedModels(trainers)
    with torch.no_grad():
        next(trainers[1].model.parameters())[:] = math.nan
    before = [[p.clone() for p in trainer.model.parameters()] for trainer in trainers]
    rows = models.step([samples] * 3)
    assert [math.isfinite(numbers(row)["norm"]) for row in rows] == [True, False, True]
    for k, trainer in enumerate(trainers):
        same = [
            torch.allclose(p, q, equal_nan=True) for p, q in zip(trainer.model.parameters(), before[k], strict=True)
        ]
        assert all(same) == (k == 1)


def test_a_checkpoint_has_one_model_alone(folder, monkeypatch, tmp_path):
    stack = Stack(2)
    monkeypatch.setattr(SGTrainer, "stack_of", staticmethod(lambda: stack))
    trainers = of_seeds(folder, seeds=(1, 2))
    sizes = []
    for number in range(2):
        if number:
            StackedModels(trainers)
        trainers[0].consolidate_optimizer()
        torch.save(trainers[0].state_dict()["model"], tmp_path / "model.pt")
        sizes.append((tmp_path / "model.pt").stat().st_size)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "arguments,said",
    [
        (["--optimizer", "adam"], "--stacked is for one worker that trains in float32 with --optimizer torch_adam"),
        (["--compile", "default"], "--compile has no effect on the steps of --stacked: leave one of them out"),
        (["--bf16"], "--stacked is for one worker that trains in float32"),
        (["--feature-map", "performer", "--decoder-attention", "linear"], "--stacked: .* .--performer-redraw"),
    ],
)
def test_what_cannot_be_stacked_is_refused_at_the_start(folder, arguments, said, monkeypatch):
    monkeypatch.setattr(SGTrainer, "stack_of", staticmethod(lambda: Stack(1)))
    with pytest.raises(UsageError, match=said):
        build(SGTrainer, folder, *arguments)


@pytest.mark.parametrize(
    "error,said",
    [
        (
            RuntimeError("vmap: no rule"),
            r"these models have no step at once \(RuntimeError: vmap: no rule\): leave it out",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory.*: train fewer together"),
        (UsageError("a layer returns the loss x"), "^a layer returns the loss x$"),
    ],
    ids=["error", "memory", "usage"],
)
def test_why_a_step_fails_is_told_to_each_training(folder, error, said, monkeypatch):
    stack = Stack(1)
    monkeypatch.setattr(SGTrainer, "stack_of", staticmethod(lambda: stack))
    (trainer,) = of_seeds(folder, seeds=(1,))
    samples = groups(trainer)[0]

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(trainer.criterion, "forward", fail)
    with pytest.raises(UsageError, match=said):
        trainer.train_step(samples)


def test_a_parameter_without_a_gradient_stays_as_it_is(folder):
    """AdamW would let its weights decay."""
    trainers = of_seeds(folder, "--weight-decay", "0.5")
    for trainer in trainers:
        trainer.model.unused = nn.Parameter(torch.ones(3))
        trainer.model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    models = StackedModels(trainers)
    models.step([groups(trainers[0])[0]] * 3)
    for trainer in trainers:
        unused, frozen = trainer.model.unused, trainer.model.frozen
        assert torch.equal(unused, torch.ones(3)) and torch.equal(frozen, torch.ones(3))
        state = trainer.optimizer.optimizer.state
        assert unused not in state and all(p in state for p in trainer.model.decoder.parameters())
        assert all(p.grad is None for p in trainer.model.parameters())


def test_an_ended_training_is_released(folder, monkeypatch):
    stack = Stack(1)
    monkeypatch.setattr(SGTrainer, "stack_of", staticmethod(lambda: stack))
    (trainer,) = of_seeds(folder, seeds=(1,))
    trainer.train_step(groups(trainer)[0])
    model = weakref.ref(trainer.model)
    stack.leave()
    del trainer
    gc.collect()
    assert model() is None


def test_tables_that_grow_with_the_length_of_sentences(tmp_path):
    """Each model has its own, and one may have seen longer sentences."""
    single, several = (of_seeds(of_length(tmp_path / "long", 140), "--position", "sinusoidal") for _ in range(2))
    with torch.no_grad():
        several[1].model.encoder(torch.full((1, 300), 5), torch.tensor([300]))
    steps = [groups(trainer) * 2 for trainer in single]
    assert_same_numbers(at_once(several, steps), alone(single, steps))


@pytest.mark.parametrize("words", [3, 140])
def test_no_tensors_are_left_by_a_step(words, tmp_path):
    trainers = of_seeds(of_length(tmp_path / "pairs", words), "--position", "sinusoidal")
    samples = groups(trainers[0])[0]
    models = StackedModels(trainers)

    def tensors_after(steps: int) -> int:
        for _ in range(steps):
            models.step([samples] * 3)
        gc.collect()
        return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())

    tensors_after(3)
    assert tensors_after(2) == tensors_after(4)
