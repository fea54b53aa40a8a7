"""The training step beside fairseq's own: the same updates and logs, the same answer to a step that fails."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.logging import metrics
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg import trainer as own
from fairseq_sg.errors import UsageError
from fairseq_sg.experiments.logs import events
from fairseq_sg.tasks.sg_translation import SGTranslationTask
from fairseq_sg.trainer import SGTrainer, counting
from helpers.commands import run
from helpers.small_folders import random_pairs, write_folder
from helpers.trainers import TRANSLATION, build, groups, lasting, without_memory_for

#: What a step depends on -> arguments of fairseq-train.
CASES = {
    "plain": [],
    "accumulated": ["--update-freq", "3"],
    "clipped": ["--clip-norm", "0.1", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "5"],
    "bfloat16": ["--bf16"],
    "autocast": ["--autocast", "bfloat16"],
    "fairseq's adam": ["--optimizer", "adam", "--weight-decay", "0.1"],
    "sentences": ["--sentence-avg", "--label-smoothing", "0.1"],
    "performer": ["--decoder-attention", "linear", "--feature-map", "performer", "--performer-redraw", "2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    subsets = {"train": random_pairs(60, 1), "valid": random_pairs(12, 2)}
    return write_folder(tmp_path_factory.mktemp("data") / "pairs", subsets)


def trained(kind: type[Trainer], folder, *arguments: str):
    """Logs of every step, averages at the end, weights and the optimizer's state."""
    built = build(kind, folder, *arguments)
    logs = []
    for samples in groups(built):
        with metrics.aggregate("steps"):
            logs.append(built.train_step(samples))
    averages = {k: float(v) for k, v in lasting(metrics.get_smoothed_values("steps")).items()}
    return logs, averages, built.model.state_dict(), built.optimizer.state_dict()["state"]


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_fairseqs_to_the_bit(folder, case):
    logs, averages, weights, state = trained(SGTrainer, folder, *CASES[case])
    expected_logs, expected_averages, expected_weights, expected_state = trained(Trainer, folder, *CASES[case])
    assert len(logs) > 2 and logs == expected_logs
    assert averages == expected_averages and averages["num_updates"] == len(logs)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


def test_the_step_is_its_own_one(folder, monkeypatch):
    built = build(SGTrainer, folder)
    monkeypatch.setattr(Trainer, "train_step", None)
    assert all(built.train_step(samples)["loss"] > 0 for samples in groups(built))


@pytest.mark.parametrize("kind", [SGTrainer, Trainer])
def test_autocast_is_for_the_forward_pass_of_a_training_step(folder, kind):
    built = build(kind, folder, "--autocast", "bfloat16", "--dropout", "0")
    plain = build(kind, folder, "--dropout", "0")
    seen: list[tuple[str, bool]] = []
    weight = built.model.decoder.embedding.tokens.weight
    built.model.register_forward_hook(lambda *_: seen.append(("forward", torch.is_autocast_enabled("cpu"))))
    weight.register_hook(lambda _: seen.append(("backward", torch.is_autocast_enabled("cpu"))))
    samples, *_ = groups(built)
    loss, expected = (trainer.train_step(samples)["loss"] for trainer in (built, plain))
    built.valid_step(samples[0])
    assert seen == [("forward", True), ("backward", False), ("forward", False)]
    assert loss == pytest.approx(expected, rel=1e-2) and loss != expected
    assert {p.dtype for p in built.model.parameters()} == {p.grad.dtype for p in built.model.parameters()}
    assert weight.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize(("option", "value"), [("autocast", "bfloat16"), ("step_graphs", 4)])
def test_options_of_the_step_are_refused_where_another_one_runs(option, value):
    given, without = ({"optimizer": {"lr": [0.1], option: on}} for on in (value, {"autocast": "none"}.get(option, 0)))
    others = types.SimpleNamespace(), {"use_bmuf": False}
    averaged = SGTranslationTask.__new__(SGTranslationTask), {"use_bmuf": True}
    for task, optimization in (others, averaged):
        config = OmegaConf.create(given | {"optimization": optimization})
        with pytest.raises(
            UsageError, match=f"--{option.replace('_', '-')} is for tasks of this plugin .*without --use-b"
        ):
            own.make(Trainer, config, task)
    made = own.make(lambda cfg, task: (cfg, task), OmegaConf.create(without | {"optimization": others[1]}), others[0])
    assert made[1] is others[0]


@pytest.mark.parametrize("argument", ["--amp", "--store-ema", "--empty-cache-freq=2"])
def test_other_trainings_have_fairseqs_step(folder, argument):
    assert not build(SGTrainer, folder, argument).ordinary


@pytest.mark.parametrize(("more", "kept"), [([], True), (["--no-save-optimizer-state"], False)])
def test_the_float32_copy_of_the_weights_is_saved_with_the_optimizer(more, kept, folder):
    built = build(SGTrainer, folder, "--bf16", *more)
    built.train_step(groups(built)[0])
    built.consolidate_optimizer()
    assert ("float32_weights" in built.state_dict()["extra_state"]) is kept


@pytest.mark.parametrize("more", [[], ["--ema-fp32"]], ids=["float32", "kept in float32"])
def test_averaged_weights_have_the_features_of_the_last_draw(folder, more):
    options = ["--feature-map", "performer", "--performer-redraw", "forward", "--store-ema", "--ema-decay", "0.5"]
    built = build(SGTrainer, folder, *options, *more)
    projection, weight = "encoder.stack.layers.0.self_attn.feature_map.projection", "encoder.embedding.tokens.weight"
    average = built.ema.get_model()
    draws, expected = [], built.model.state_dict()[weight].clone()
    for samples in groups(built)[:3]:
        built.train_step(samples)
        trained = built.model.state_dict()
        draws.append(trained[projection].clone())
        expected = (expected + trained[weight]) / 2
        assert torch.equal(average.state_dict()[projection], draws[-1])
        torch.testing.assert_close(average.state_dict()[weight], expected)
    assert not torch.equal(draws[0], draws[-1])


def test_a_gradient_that_is_not_finite_ends_the_training_before_the_update(folder, tmp_path):
    built = build(SGTrainer, folder, "--save-dir", str(tmp_path))
    first, second, *_ = groups(built)
    built.train_step(first)
    built.model.decoder.embedding.tokens.weight.register_hook(lambda gradient: gradient * math.nan)
    before = [p.clone() for p in built.model.parameters()]
    with pytest.raises(
        FloatingPointError, match=r"Nan/Inf at update 2, of decoder.embedding.tokens.weight\. .*crash.pt"
    ):
        built.train_step(second)
    torch.testing.assert_close(list(built.model.parameters()), before, rtol=0, atol=0)
    assert (tmp_path / "crash.pt").exists() and built.get_num_updates() == 1


def test_fairseqs_step_too_ends_with_a_gradient_that_is_not_finite(folder, tmp_path, caplog):
    """fairseq looks for the module, and its hooks on the backward pass of an encoder raised StopIteration."""
    built = build(SGTrainer, folder, "--store-ema", "--save-dir", str(tmp_path))
    first, second, *_ = groups(built)
    built.train_step(first)
    with torch.no_grad():
        built.model.encoder.embedding.tokens.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="gradients are Nan/Inf"):
        built.train_step(second)
    assert "NaN detected in output of encoder.embedding" in caplog.text and (tmp_path / "crash.pt").exists()


def test_an_error_is_the_users_own(folder, tmp_path, monkeypatch):
    built = build(SGTrainer, folder, "--save-dir", str(tmp_path))

    def refuse(*_):
        raise UsageError("the batch is refused")

    monkeypatch.setattr(built.criterion, "forward", refuse)
    with pytest.raises(UsageError, match="the batch is refused") as raised:
        built.train_step(groups(built)[0])
    assert raised.value.__context__ is None


def test_without_enough_memory_the_batch_is_skipped(folder, monkeypatch):
    built = build(SGTrainer, folder)
    first, second, *_ = groups(built)
    without_memory_for(built, first[0], monkeypatch)
    assert built.train_step(first) is None and built.get_num_updates() == 0
    assert built.train_step(second)["loss"] > 0 and built.get_num_updates() == 1


def test_batches_without_predictions_give_no_update(folder):
    built = build(SGTrainer, folder, "--update-freq", "2")
    samples = groups(built)[0]
    for sample in samples:
        sample["target"].fill_(built.task.target_dictionary.pad())
        sample["ntokens"] = 0
    before = [p.clone() for p in built.model.parameters()]
    built.train_step(samples)
    torch.testing.assert_close(list(built.model.parameters()), before, rtol=0, atol=0)


@pytest.mark.parametrize("gap", [0, 1, 2])
def test_a_gap_among_accumulated_batches_counts_nowhere(folder, gap):
    """The last update of an epoch, where a worker has fewer batches than others."""

    def step(fills: bool) -> tuple[dict, dict]:
        built = build(SGTrainer, folder, "--dropout", "0")
        built.ordinary = False
        samples = groups(built)[0] + groups(built)[1]
        samples[gap:gap] = [{}] * fills
        return lasting(built.train_step(samples)), built.model.state_dict()

    logs, weights = step(fills=True)
    expected_logs, expected_weights = step(fills=False)
    assert logs == pytest.approx(expected_logs) and logs["sample_size"] > 16
    torch.testing.assert_close(weights, expected_weights)


def test_a_module_in_evaluation_is_trained_again(folder):
    built = build(SGTrainer, folder)
    built.model.eval(), built.criterion.eval()
    built.train_step(groups(built)[0])
    assert all(module.training for module in [*built.model.modules(), built.criterion])


def test_who_counts_updates(folder):
    redrawn = build(SGTrainer, folder, *CASES["performer"]).model
    assert {type(part).__name__ for part in counting(redrawn)} == {"PerformerFeatureMap"}
    assert counting(build(SGTrainer, folder).model) == []


@pytest.mark.parametrize(
    "arguments,due",
    [
        ([], {6}),
        (["--save-interval-updates", "2"], {2, 4, 6}),
        (["--validate-interval-updates", "3"], {3, 6}),
        (["--save-interval-updates", "2", "--validate-interval-updates", "3"], {2, 3, 4, 6}),
        (["--stop-time-hours", "5"], {6}),
        (["--stop-time-hours", "1e-9"], {1, 2, 3, 4, 5, 6}),
    ],
)
def test_when_a_validation_a_checkpoint_or_the_end_may_follow(folder, arguments, due):
    built = build(SGTrainer, folder, "--max-update", "6", *arguments)
    asked = []

    def fairseqs(*_):
        asked.append(built.get_num_updates())
        return [None], False

    for made in range(1, 7):
        built.set_num_updates(made)
        assert own.validate_and_save(fairseqs, built.cfg, built, built.task, None, ["valid"], False) == ([None], False)
    assert set(asked) == due
    built.set_num_updates(1)
    own.validate_and_save(fairseqs, built.cfg, built, built.task, None, ["valid"], True)
    assert asked[-1] == 1


def test_another_task_has_fairseqs_trainer():
    class Theirs:
        """A task of fairseq's."""

    class Fairseqs:
        def __init__(self, *arguments):
            self.arguments = arguments

    cfg = types.SimpleNamespace(optimizer=None)
    built = own.make(Fairseqs, cfg, Theirs(), "model")
    assert type(built) is Fairseqs and built.arguments[::2] == (cfg, "model")


def test_a_process_of_one_of_several_gpus_uses_it(monkeypatch):
    """fairseq starts it beyond ``call_main``; the command loads the plugin when it runs already."""
    command = types.SimpleNamespace(Trainer=Trainer, validate_and_save=print)
    monkeypatch.setitem(sys.modules, "fairseq_cli.train", command)
    for _ in range(2):
        own.install()
        assert (command.Trainer.func, command.Trainer.args) == (own.make, (Trainer,))
        assert (command.validate_and_save.func, command.validate_and_save.args) == (own.validate_and_save, (print,))


def test_fairseq_train_uses_it(folder, tmp_path):
    """Epochs, validations within them, the end and a resumed training are those of fairseq's trainer."""
    command = [
        *("fairseq-train", folder, "--user-dir", "fairseq_sg", *TRANSLATION, "--optimizer", "torch_adam", "--cpu"),
        *("--lr", "0.01", "--num-workers", "0", "--log-format", "json", "--log-interval", "2"),
        *("--validate-interval-updates", "5", "--save-interval-updates", "5", "--max-update"),
    ]
    logs = {}
    for name, code in (("own", ""), ("fairseqs", "own.make = lambda fairseqs, *given: fairseqs(*given)")):
        done = [
            run("-c", f"{START}\n{code}\n{TRAIN}", *command[1:], steps, "--save-dir", tmp_path / name)
            for steps in (11, 20)
        ]
        assert [result.code for result in done] == [0, 0], done[0].err + done[1].err
        assert all(f"trainer: {'SG' if name == 'own' else ''}Trainer\n" in result.out for result in done)
        (tmp_path / "log").write_text("".join(result.out + result.err for result in done))
        logs[name] = [lasting(event) for event in events(tmp_path / "log")]
    assert logs["own"] == logs["fairseqs"]
    assert {event["kind"] for event in logs["own"]} == {"train_inner", "train", "valid"} and len(logs["own"]) > 15


START = "from fairseq_cli import train\nfrom fairseq_sg import trainer as own\n"
TRAIN = (
    "import fairseq_sg.plugin\nfrom fairseq import checkpoint_utils as c\nload = c.load_checkpoint\n"
    "def seen(cfg, trainer, **k):\n    print('trainer:', type(trainer).__name__)\n    return load(cfg, trainer, **k)\n"
    "c.load_checkpoint = seen\ntrain.cli_main()"
)


def test_it_can_be_imported_before_the_plugin():
    code = "from fairseq_sg import trainer\nimport fairseq_sg.plugin\nprint(trainer.SGTrainer.__name__)"
    assert run("-c", code).out == "SGTrainer\n"
