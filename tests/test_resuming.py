"""How a training begins from a checkpoint: with our tasks checked and continued, with others as in fairseq."""

from __future__ import annotations

import argparse
import math
import sys
import types

import pytest
import torch

pytest.importorskip("fairseq")

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg import resuming
from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.mixin import SGTask
from fairseq_sg.trainer import SGTrainer
from helpers.small_folders import random_pairs, write_folder
from helpers.trainers import build, groups


class Ours(SGTask):
    """A task of a user's own that derives from ours."""

    def __init__(self):
        self.checked = []
        self.trained_on = {"requests": [{"cutoff": 8}]}

    def other_data(self, trained_on):
        return super().other_data(trained_on if isinstance(trained_on, dict) and "requests" in trained_on else None)

    def check_training(self, trainer):
        self.checked.append("training")

    def check_resumed(self, trained_on, new_data):
        self.checked.append((trained_on, new_data))


class Theirs:
    """A task of fairseq's."""


def checkpoint_options(folder="runs", **options) -> argparse.Namespace:
    chosen = {
        "save_dir": str(folder),
        "restore_file": "checkpoint_last.pt",
        "finetune_from_model": None,
        "patience": -1,
        "optimizer_overrides": "{}",
    }
    reset = {f"reset_{name}": False for name in ("meters", "dataloader", "lr_scheduler", "optimizer")}
    return argparse.Namespace(**chosen | reset | options)


def trainer_after(updates: int, task, cfg=None, most=0, hours=0.0, ema=False) -> types.SimpleNamespace:
    names = {"task": "sg_translation", "lr_scheduler": "fixed"}
    named = {group: argparse.Namespace(_name=name) for group, name in names.items()}
    cfg = types.SimpleNamespace(
        checkpoint=cfg or checkpoint_options(),
        optimization=types.SimpleNamespace(
            max_update=most, stop_time_hours=hours, skip_remainder_batch=False, stop_min_lr=-1.0
        ),
        ema=types.SimpleNamespace(store_ema=ema),
        **named,
    )
    cfg.get = lambda name: vars(cfg).get(name)
    return types.SimpleNamespace(
        get_num_updates=lambda: updates, cumulative_training_time=lambda: 1800.0, cfg=cfg, task=task,
        checkpoint_suffix="", lr_step_update=lambda: None, get_lr=lambda: 0.1,
        optimizer=types.SimpleNamespace(optimizer_config={}, param_groups=[]),
    )  # fmt: skip


@pytest.fixture
def running(monkeypatch):
    """name -> a module in the place of ``fairseq_cli.train`` or of ``__main__``, with another one beside it."""

    def make(name: str):
        module, other = (
            types.SimpleNamespace(should_stop_early=lambda: None, __package__=package)
            for package in ("fairseq_cli", "other")
        )
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, ({"__main__", "fairseq_cli.train"} - {name}).pop(), other)
        return module

    return make


def begin(task, updates: int = 3, most: int = 0, **options):
    """The values that fairseq's command gets after a checkpoint with two idle validations was loaded."""
    cfg = checkpoint_options(**options)
    extra_state = {"patience": {"best": 0.5, "num_runs": 2}}
    return resuming.begin(lambda *_: (extra_state, "epochs"), cfg, trainer_after(updates, task, cfg, most))


@pytest.mark.parametrize("name", ["__main__", "fairseq_cli.train"])
@pytest.mark.parametrize(
    "most,updates,patience,finished",
    [(0, 9, -1, False), (9, 8, -1, False), (9, 9, -1, True), (9, 10, -1, True)]
    + [(9, 8, 3, False), (9, 8, 2, True), (0, 8, 1, True)],
)
def test_no_update_after_the_last_one(name, most, updates, patience, finished, running):
    running(name)
    _, epochs = begin(Ours(), updates, most, patience=patience)
    if not finished:
        assert epochs == "epochs"
    else:  # as fairseq-train asks, with and without --max-epoch
        assert not epochs.next_epoch_idx <= 9 and not epochs.next_epoch_idx <= math.inf
    assert begin(Theirs(), updates, most, patience=patience)[1] == "epochs"


@pytest.mark.parametrize("updates,reset,expected", [(3, False, 2), (0, False, None), (3, True, None)])
def test_patience_is_restored_where_the_best_value_is(updates, reset, expected, running):
    module = running("fairseq_cli.train")
    begin(Theirs(), updates, reset_meters=reset)
    assert not hasattr(module.should_stop_early, "num_runs")
    begin(Ours(), updates, reset_meters=reset)
    assert getattr(module.should_stop_early, "num_runs", None) == expected


@pytest.mark.parametrize(
    "metric,largest,subsets,cutoff,goes_on",
    [
        ("accuracy", True, "valid,gen", 8, True),
        ("accuracy", True, "valid", 8, True),
        ("accuracy", True, "gen,valid", 8, False),
        ("token_accuracy", True, "valid", 8, False),
        ("loss", False, "valid", 8, False),
        ("accuracy", True, "valid", 26, False),
    ],
)
def test_values_of_another_metric_or_of_other_data_do_not_count(
    metric, largest, subsets, cutoff, goes_on, tmp_path, running, caplog, monkeypatch
):
    """Otherwise a token accuracy of 99 % would be better than every later accuracy."""
    from fairseq import checkpoint_utils

    module, save = running("fairseq_cli.train"), types.SimpleNamespace()
    monkeypatch.setattr(checkpoint_utils, "save_checkpoint", save)

    def chosen(metric: str, largest: bool, subsets: str) -> dict[str, argparse.Namespace]:
        by = {"best_checkpoint_metric": metric, "maximize_best_checkpoint_metric": largest}
        return {"checkpoint": checkpoint_options(tmp_path, **by), "dataset": argparse.Namespace(valid_subset=subsets)}

    def load(*_):
        save.best = 99.0
        return {"patience": {"best": 99.0, "num_runs": 2}}, "epochs"

    groups = chosen("accuracy", True, "valid,gen")
    state = {"model": {}, "cfg": groups, "last_optimizer_state": {}}
    state["task_state"] = {"trained_on": {"requests": [{"cutoff": 8}]}}
    torch.save(state, tmp_path / "checkpoint_last.pt")
    now = chosen(metric, largest, subsets)
    trainer = trainer_after(3, Ours(), now["checkpoint"])
    trainer.task.trained_on = {"requests": [{"cutoff": cutoff}]}
    trainer.cfg.dataset = now["dataset"]
    resuming.begin(load, now["checkpoint"], trainer)
    assert trainer.task.checked[-1] == (state["task_state"]["trained_on"], False)
    assert hasattr(save, "best") is hasattr(module.should_stop_early, "num_runs") is goes_on
    before = "the largest accuracy on valid" + " of other data" * (cutoff != 8)
    assert (f"the best checkpoint was that of {before}, and is" in caplog.text) is not goes_on


def test_patience_is_kept_in_checkpoints_of_trainings_that_have_some(running):
    assert Ours().get_checkpoint_dict() == {}
    module = running("fairseq_cli.train")
    assert Ours().get_checkpoint_dict() == {}
    module.should_stop_early.best, module.should_stop_early.num_runs = 0.25, 1
    assert Ours().get_checkpoint_dict() == {"patience": {"best": 0.25, "num_runs": 1}}


def write(path, task: str, scheduler: str = "fixed", **more) -> None:
    cfg = {"task": {"_name": task}, "lr_scheduler": {"_name": scheduler}}
    state = {"model": {}, "cfg": cfg, "task_state": {"trained_on": {"data": "then"}}, "last_optimizer_state": {}}
    torch.save(state | more, path)


def test_checks_come_before_the_checkpoint_is_loaded(tmp_path):
    def load(*_):
        raise AssertionError("too early")

    def refused(task, **options) -> str:
        cfg = checkpoint_options(tmp_path, **options)
        with pytest.raises(UsageError) as raised:
            resuming.begin(load, cfg, trainer_after(0, task, cfg))
        return str(raised.value)

    for option in ("--restore-file", "--finetune-from-model"):
        named = {option[2:].replace("-", "_"): str(tmp_path / "none.pt")}
        assert refused(Ours(), **named) == f"there is no checkpoint {tmp_path / 'none.pt'}: check {option}"
        folder = {option[2:].replace("-", "_"): str(tmp_path)}
        assert refused(Ours(), **folder) == f"there is no checkpoint {tmp_path}: check {option}"
    last = tmp_path / "checkpoint_last.pt"
    last.write_text("a text")
    assert refused(Ours()).startswith(f"the checkpoint {last} cannot be read")
    write(last, "sg_classification")
    assert "with --task sg_classification, and this is --task sg_translation" in refused(Ours())
    assert "with --task sg_classification, and this is --task sg_translation" in refused(Theirs())


def test_tasks_of_fairseq_are_not_checked(tmp_path):
    """Their checkpoints may be of any kind that fairseq reads."""
    cfg = checkpoint_options(tmp_path)
    for make in (lambda path: path.write_text("a text"), lambda path: write(path, "translation")):
        make(tmp_path / "checkpoint_last.pt")
        trainer = trainer_after(0, Theirs(), cfg)
        assert resuming.begin(lambda cfg, trainer, **more: more, cfg, trainer, disable=1) == {"disable": 1}


@pytest.mark.parametrize("option,new_data", [("restore_file", False), ("finetune_from_model", True)])
def test_the_task_compares_the_data(option, new_data, tmp_path):
    path = tmp_path / "other.pt"
    write(path, "sg_translation")
    cfg, task = checkpoint_options(tmp_path, **{option: str(path)}), Ours()
    resuming.begin(lambda *_: (None, "epochs"), cfg, trainer_after(0, task, cfg))
    assert task.checked == ["training", ({"data": "then"}, new_data)]


def test_a_checkpoint_that_is_passed_over_is_named(tmp_path, caplog):
    """fairseq begins from --restore-file each time the command is given."""
    (tmp_path / "elsewhere").mkdir()
    other, last, earlier = (tmp_path / name for name in ("elsewhere/other.pt", "checkpoint_last.pt", "checkpoint_1.pt"))

    def warned(path) -> bool:
        caplog.clear()
        cfg = checkpoint_options(tmp_path, restore_file=str(path))
        resuming.begin(lambda *_: (None, "epochs"), cfg, trainer_after(0, Ours(), cfg))
        return f"training begins from {path}, and not from {last}, which it will replace" in caplog.text

    write(other, "sg_translation")
    assert not warned(other)
    write(last, "sg_translation")
    write(earlier, "sg_translation")
    assert warned(other) and not warned(last) and not warned(earlier)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"finetune_from_model": "x.pt", "reset_optimizer": True}, "so --reset-optimizer has no place beside it"),
        ({"finetune_from_model": "x.pt", "restore_file": "y.pt"}, "so --restore-file has no place beside it"),
        ({"optimizer_overrides": "foo"}, "--optimizer-overrides is 'foo': give a dict"),
    ],
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(UsageError, match=message):
        begin(Ours(), **options)


def test_what_a_checkpoint_lacks(tmp_path):
    """The optimizer's state and averaged weights; a training without the first would begin at update 0."""
    path = tmp_path / "other.pt"
    write(path, "sg_translation", last_optimizer_state=None)
    cfg = checkpoint_options(tmp_path, restore_file=str(path))
    with pytest.raises(UsageError, match="has no state of the optimizer"):
        resuming.begin(None, cfg, trainer_after(0, Ours(), cfg))
    write(path, "sg_translation")
    with pytest.raises(UsageError, match="--store-ema: the checkpoint .* has no averaged weights"):
        resuming.begin(None, cfg, trainer_after(0, Ours(), cfg, ema=True))
    for options in ({"restore_file": str(path), "reset_optimizer": True}, {"finetune_from_model": str(path)}):
        cfg = checkpoint_options(tmp_path, **options)
        resuming.begin(lambda *_: (None, "epochs"), cfg, trainer_after(0, Ours(), cfg, ema=True))


def test_what_was_saved_where_a_training_failed_has_no_place_in_the_data(tmp_path):
    path = tmp_path / "crash.pt"
    write(path, "sg_translation", extra_state={"metrics": {}})
    cfg = checkpoint_options(tmp_path / "run", restore_file=str(path))
    with pytest.raises(UsageError, match="crash.pt was saved where a training failed, .* --finetune-from-model"):
        resuming.begin(None, cfg, trainer_after(0, Ours(), cfg))
    for options in ({"restore_file": str(path), "reset_dataloader": True}, {"finetune_from_model": str(path)}):
        cfg = checkpoint_options(tmp_path / "run", **options)
        resuming.begin(lambda *_: (None, "epochs"), cfg, trainer_after(0, Ours(), cfg))


def test_a_training_begins_without_the_values_of_an_earlier_one(tmp_path, running, monkeypatch):
    """In a sweep of hydra's, a process has several trainings."""
    from fairseq import checkpoint_utils
    from fairseq.logging import progress_bar

    closed = []
    writers = {"train": types.SimpleNamespace(close=lambda: closed.append("train"))}
    monkeypatch.setattr(progress_bar, "_tensorboard_writers", writers)
    module, save = running("fairseq_cli.train"), types.SimpleNamespace(best=99.0)
    monkeypatch.setattr(checkpoint_utils, "save_checkpoint", save)
    vars(module.should_stop_early).update(best=99.0, num_runs=3)
    cfg = checkpoint_options(tmp_path, patience=3)
    _, epochs = resuming.begin(lambda *_: (None, "epochs"), cfg, trainer_after(0, Ours(), cfg))
    assert epochs == "epochs" and not vars(save) and not vars(module.should_stop_early)
    assert closed == ["train"] and not writers


@pytest.mark.parametrize("more", [[], ["--ema-fp32"]], ids=["float32", "kept in float32"])
def test_the_average_of_a_new_training_begins_with_its_weights(more, tmp_path):
    """Where updates are counted on, it is the checkpoint's."""
    from fairseq import checkpoint_utils

    folder = write_folder(tmp_path / "pairs", {"train": random_pairs(20, 1)})

    def begun(to: str, *options: str):
        where = ["--disable-validation", "--save-dir", str(tmp_path / to), "--ema-decay", "0.5", *more]
        built = build(SGTrainer, folder, *where, *options)
        return built, checkpoint_utils.load_checkpoint(built.cfg.checkpoint, built)[1]

    for to, options in {"plain": [], "averaged": ["--store-ema"]}.items():
        built, epochs = begun(to, *options)
        for samples in groups(built)[:2]:
            built.train_step(samples)
        epochs.next_epoch_itr()
        checkpoint_utils.save_checkpoint(built.cfg.checkpoint, built, epochs, None)

    name = "encoder.embedding.tokens.weight"
    last = str(tmp_path / "averaged" / "checkpoint_last.pt")
    resets = [f"--reset-{part}" for part in ("optimizer", "lr-scheduler", "dataloader", "meters")]
    plain = str(tmp_path / "plain" / "checkpoint_last.pt")
    beginnings = [["--finetune-from-model", path] for path in (last, plain)] + [["--restore-file", last, *resets]]
    for options in beginnings:
        new, _ = begun("new", "--store-ema", *options)
        weight, average = (model.state_dict()[name].clone() for model in (new.get_model(), new.ema.get_model()))
        assert torch.equal(average, weight)
        if more:
            assert torch.equal(new.ema.fp32_params[name], weight)
        new.train_step(groups(new)[0])
        expected = (weight + new.get_model().state_dict()[name]) / 2
        torch.testing.assert_close(new.ema.get_model().state_dict()[name], expected)
    resumed, _ = begun("averaged", "--store-ema")
    assert torch.equal(resumed.ema.get_model().state_dict()[name], built.ema.get_model().state_dict()[name])


def test_averages_of_every_third_update_resume(tmp_path):
    folder = write_folder(tmp_path / "pairs", {"train": random_pairs(60, 1)})
    options = ["--store-ema", "--ema-decay", "0.5", "--ema-update-freq", "3", "--dropout", "0"]
    whole, stopped, resumed = (build(SGTrainer, folder, *options) for _ in range(3))
    batches = groups(whole)[:6]
    for samples in batches:
        whole.train_step(samples)
    for samples in groups(stopped)[:4]:
        stopped.train_step(samples)
    stopped.consolidate_optimizer()
    stopped.save_checkpoint(str(tmp_path / "stopped.pt"), {"train_iterator": {"epoch": 1}})
    resumed.load_checkpoint(str(tmp_path / "stopped.pt"))
    for samples in batches[4:]:
        resumed.train_step(samples)
    expected, found = (built.ema.get_model().state_dict() for built in (whole, resumed))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    last = whole.get_model().state_dict()
    assert not all(torch.equal(expected[name], last[name]) for name in expected)


def test_a_new_training_has_options_of_its_own(tmp_path, caplog):
    """Other rates and seeds are normal there; those of the model decide what its weights mean."""
    path = tmp_path / "other.pt"
    write(path, "sg_translation", cfg={"optimization": {"lr": [0.1]}, "model": {"_name": "arch", "qk_norm": "l2"}})

    def warned(**options) -> str:
        caplog.clear()
        cfg = checkpoint_options(tmp_path, **options)
        trainer = trainer_after(0, Ours(), cfg)
        trainer.cfg.model = {"_name": "arch", "qk_norm": "none"}
        trainer.cfg.optimization = argparse.Namespace(**vars(trainer.cfg.optimization), lr=[0.2])
        resuming.begin(lambda *_: (None, "epochs"), cfg, trainer)
        return caplog.text

    for options in ({"restore_file": str(path), "reset_optimizer": True}, {"finetune_from_model": str(path)}):
        assert "a new training begins with those of this command: --qk-norm l2 (here none)\n" in warned(**options)
    resumed = warned(restore_file=str(path))
    assert "training resumes with those of this command: --qk-norm l2 (here none), --lr [0.1] (here [0.2])" in resumed


@pytest.mark.parametrize("updates,hours,left", [(3, 0.0, True), (3, 0.4, False), (3, 0.6, True), (0, 0.4, True)])
def test_no_update_after_the_time_of_a_training(updates, hours, left):
    """A training that begins makes one update, whatever its time."""
    assert bool(resuming.nothing_left(trainer_after(updates, Ours(), hours=hours))) is not left


@pytest.mark.parametrize("updates,time", [(0, 0), (3, 1800.0)])
def test_a_fine_tuning_counts_its_own_time(updates, time, running):
    """Otherwise --stop-time-hours ends it after one update, where the checkpoint's training took as long."""
    running("fairseq_cli.train")
    trainer = trainer_after(updates, Ours())

    def load(cfg, trainer):
        trainer._previous_training_time = 1800.0
        return {}, "epochs"

    resuming.begin(load, trainer.cfg.checkpoint, trainer)
    assert trainer._previous_training_time == time


def test_errors_of_fairseq_name_the_file(tmp_path):
    """Weights that do not fit and another optimizer are UsageErrors; every other error stays as it is."""
    cfg = checkpoint_options(tmp_path)

    def raised_for(error: Exception, context: Exception | None = None) -> Exception:
        error.__context__ = context

        def load(*_):
            raise error

        with pytest.raises(Exception) as raised:
            resuming.begin(load, cfg, trainer_after(0, Ours(), cfg))
        return raised.value

    last = tmp_path / "checkpoint_last.pt"
    misfit = raised_for(Exception("Cannot load model parameters"), UsageError("another model"))
    assert isinstance(misfit, UsageError) and str(misfit) == f"{last}: another model"
    text = "Optimizer does not match; please reset the optimizer (--reset-optimizer). One vs Two"
    optimizer = raised_for(AssertionError(text))
    assert isinstance(optimizer, UsageError) and str(optimizer) == f"{last}: {text}"
    for other in (KeyError("of_another_plugin"), AssertionError("a bug"), TypeError("a bug")):
        assert raised_for(other, ValueError("a cause")) is other


@pytest.mark.parametrize(
    "optimizer,overrides,betas",
    [
        (["torch_adam"], {}, (0.8, 0.95)),
        (["adam"], {"betas": (0.7, 0.9)}, (0.7, 0.9)),
        ("torch_adam --lr-scheduler one_cycle --one-cycle-rise 0.5 --max-update 6".split(), {}, (0.85, 0.95)),
    ],
)
def test_the_optimizer_has_the_options_of_the_command_that_resumes(optimizer, overrides, betas, tmp_path):
    """torch restores those of the checkpoint with the state; --optimizer-overrides and the schedule come last."""
    from fairseq import checkpoint_utils

    folder = write_folder(tmp_path / "pairs", {"train": random_pairs(20, 1)})

    def begun(*options: str):
        where = ["--disable-validation", "--save-dir", str(tmp_path)]
        built = build(SGTrainer, folder, *where, "--optimizer", *optimizer, *options)
        return built, checkpoint_utils.load_checkpoint(built.cfg.checkpoint, built)[1]

    built, epochs = begun("--weight-decay", "0.1", "--adam-betas", "(0.9, 0.98)")
    for samples in groups(built)[:2]:
        built.train_step(samples)
    epochs.next_epoch_itr()
    checkpoint_utils.save_checkpoint(built.cfg.checkpoint, built, epochs, None)
    rate = built.get_lr()
    options = ["--weight-decay", "0.5", "--adam-betas", "(0.8, 0.95)", "--optimizer-overrides", str(overrides)]
    resumed, _ = begun(*options)
    for name in ("adam_betas", "lr"):
        with pytest.raises(UsageError, match=f"--optimizer-overrides names '{name}': choose from .*betas, eps"):
            begun(*options[:-1], str({name: 1}))
    (group,) = resumed.optimizer.param_groups
    assert resumed.get_num_updates() == 2 and resumed.get_lr() == rate
    assert (group["weight_decay"], *group["betas"]) == pytest.approx((0.5, *betas))


def test_an_epoch_of_fewer_batches_than_were_made(tmp_path):
    """Larger batches, or more workers; the message is one line."""
    from fairseq import checkpoint_utils

    folder = write_folder(tmp_path / "pairs", {"train": random_pairs(20, 1)})

    def begun(size: int, *options: str):
        where = ["--disable-validation", "--save-dir", str(tmp_path), "--required-batch-size-multiple", "1"]
        built = build(SGTrainer, folder, *where, "--batch-size", str(size), *options)
        return built, checkpoint_utils.load_checkpoint(built.cfg.checkpoint, built)[1]

    built, epochs = begun(2)
    batches = epochs.next_epoch_itr()
    for _ in range(8):
        built.train_step([next(batches)])
    checkpoint_utils.save_checkpoint(built.cfg.checkpoint, built, epochs, None)
    assert begun(2)[1].iterations_in_epoch == 8
    with pytest.raises(UsageError, match="checkpoint_last.pt: its training was stopped beyond the last batch"):
        begun(5)
    assert begun(5, "--reset-dataloader")[1].iterations_in_epoch == 0


@pytest.mark.parametrize(
    "frequencies,made,resumed_with,ends",
    [
        ("1", 8, "4", True),  # 9 batches: two groups of four
        ("1", 7, "2", True),
        ("1", 6, "2", False),
        ("1", 8, "1", False),
        ("1", 4, "4", False),
        ("1", 5, "4", True),
        ("2,3", 6, "2,9", False),  # the epoch that goes on has the first number
    ],
)
def test_an_epoch_without_an_update_that_is_left(frequencies, made, resumed_with, ends, tmp_path, monkeypatch):
    """fairseq's command ends in an error of its own where an epoch has none."""
    from fairseq import checkpoint_utils
    from fairseq.data.iterators import GroupedIterator

    folder = write_folder(tmp_path / "pairs", {"train": random_pairs(20, 1)})

    def begun(frequency: str, *options: str):
        where = ["--disable-validation", "--save-dir", str(tmp_path), "--required-batch-size-multiple", "1"]
        given = [*where, "--batch-size", "2", "--skip-remainder-batch", "--update-freq", frequency]
        built = build(SGTrainer, folder, *given, *options)
        return built, checkpoint_utils.load_checkpoint(built.cfg.checkpoint, built)[1]

    def left(epochs) -> int:
        size = int(resumed_with.split(",")[0])
        return len(list(GroupedIterator(epochs.next_epoch_itr(), size, skip_remainder_batch=True)))

    built, epochs = begun(frequencies)
    batches = epochs.next_epoch_itr()
    for _ in range(made):
        built.train_step([next(batches)])
    checkpoint_utils.save_checkpoint(built.cfg.checkpoint, built, epochs, None)
    if ends:
        with pytest.raises(UsageError, match="beyond the last batch .*: resume with its batch size, --update-freq and"):
            begun(resumed_with)
        assert begun(resumed_with, "--reset-dataloader")[1].iterations_in_epoch == 0
    monkeypatch.setattr(resuming, "check_batches", lambda *_: None)
    assert (left(begun(resumed_with)[1]) == 0) is ends


def test_every_epoch_has_an_update():
    """Also later ones, with numbers of their own in --update-freq."""

    class Epochs:
        next_epoch_idx, iterations_in_epoch = 1, 0

        def __len__(self):
            return 20

    def check(*frequencies: int, skips: bool = True) -> None:
        cfg = types.SimpleNamespace(skip_remainder_batch=skips, update_freq=list(frequencies))
        resuming.check_batches("last.pt", Epochs(), cfg)

    check(1, 19), check(1, 50, skips=False)
    for frequencies in ((20,), (1, 20), (1, 50)):
        with pytest.raises(UsageError, match="leaves no update of an epoch of 20 batches: .* or --update-freq smaller"):
            check(*frequencies)


@pytest.mark.parametrize(
    "scheduler,least,ends",
    [
        ("inverse_sqrt --warmup-updates 4", "1e-5", True),
        ("inverse_sqrt --warmup-updates 4", "0", True),
        ("inverse_sqrt --warmup-updates 4", "-1", False),
        ("inverse_sqrt --warmup-updates 4 --warmup-init-lr 1e-4", "1e-5", False),
        ("polynomial_decay --warmup-updates 4 --max-update 9", "1e-5", True),
        ("fixed --warmup-updates 4", "1e-5", False),
    ],
)
def test_a_rate_with_which_nothing_would_be_trained(scheduler, least, ends, tmp_path):
    """fairseq's command ends with the exit code 0, and without a checkpoint."""
    from fairseq import checkpoint_utils

    folder = write_folder(tmp_path / "pairs", {"train": random_pairs(20, 1)})
    where = ["--disable-validation", "--save-dir", str(tmp_path), "--stop-min-lr", least]
    built = build(SGTrainer, folder, *where, "--lr-scheduler", *scheduler.split())
    if ends:
        with pytest.raises(UsageError, match="--stop-min-lr is .*, and the learning rate begins at 0.0: nothing would"):
            checkpoint_utils.load_checkpoint(built.cfg.checkpoint, built)
    else:
        checkpoint_utils.load_checkpoint(built.cfg.checkpoint, built)
        assert built.get_lr() > float(least)


def test_other_options_than_a_checkpoint_s_are_named():
    from omegaconf import OmegaConf

    def configuration(wrap, model, criterion):
        return {"model": wrap(_name="arch", **model), "criterion": None if criterion is None else wrap(**criterion)}

    def mandatory(**options):
        return OmegaConf.create({"without": "???", **options})

    for wrap in (dict, argparse.Namespace, mandatory):
        there = configuration(wrap, {"qk_norm": "l2", "dropout": 0.1, "gone": 1}, {"label_smoothing": 0.0})
        here = configuration(dict, {"qk_norm": "none", "dropout": 0.1, "new": 2}, {"label_smoothing": 0.1})
        found = ["--qk-norm l2 (here none)", "--label-smoothing 0.0 (here 0.1)"]
        assert resuming.other_options(there, here) == found
        assert resuming.other_options(there, there) == []
        assert resuming.other_options(there, configuration(dict, {"qk_norm": "none"}, None)) == found[:1]
    # An optimizer without a dataclass of options holds those of the whole command.
    sgd = [{"optimizer": argparse.Namespace(momentum=m, save_dir=f"runs/{m}", stop_time_hours=m)} for m in (0.9, 0.8)]
    assert resuming.other_options(*sgd) == ["--momentum 0.9 (here 0.8)"]


def test_what_changes_the_batches_is_named():
    there, here = ({"distributed_training": {"distributed_world_size": n, "nprocs_per_node": n}} for n in (2, 1))
    assert resuming.other_options(there, here) == ["--distributed-world-size 2 (here 1)"]
    there, here = ({"dataset": {"required_batch_size_multiple": n, "batch_size_valid": n}} for n in (1, 8))
    assert resuming.other_options(there, here) == ["--required-batch-size-multiple 1 (here 8)"]
    there, here = ({"dataset": {"curriculum": n, "grouped_shuffling": n > 1}} for n in (1, 2))
    assert resuming.other_options(there, here) == ["--curriculum 1 (here 2)", "--grouped-shuffling False (here True)"]


def test_a_change_of_the_averaged_weights_is_named():
    """They are lost where --store-ema is left out."""
    there, here = ({"ema": {"_name": None, "store_ema": on, "ema_decay": 0.99}} for on in (True, False))
    assert resuming.other_options(there, here) == ["--store-ema True (here False)"]
    here["ema"] = {**there["ema"], "ema_decay": 0.9}
    assert resuming.other_options(there, here) == ["--ema-decay 0.99 (here 0.9)"]
    assert resuming.other_options({}, here) == []  # a checkpoint of an older fairseq


@pytest.mark.parametrize(
    ("group", "name", "option", "default", "other"),
    [
        ("optimizer", "torch_adam", "autocast", "none", "bfloat16"),
        ("model", "sg_transformer_scan", "feature_dim", "head", "9"),
        ("task", "sg_translation", "oracle_length", False, True),
    ],
)
def test_an_option_younger_than_a_checkpoint_had_its_default(group, name, option, default, other):
    there = {group: {"_name": name}}
    assert resuming.other_options(there, {group: {"_name": name, option: default}}) == []
    found = [f"--{option.replace('_', '-')} {default} (here {other})"]
    assert resuming.other_options(there, {group: {"_name": name, option: other}}) == found
    # A checkpoint without options of a group says nothing of them.
    assert resuming.other_options({}, {group: {"_name": name, option: other}}) == []
