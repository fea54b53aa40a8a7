"""What ``compat`` does to fairseq, torch and Python's warnings, and that it does no more than that."""

from __future__ import annotations

import argparse
import builtins
import collections
import errno
import importlib.metadata
import importlib.util
import logging
import os
import pickle
import shutil
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fairseq_sg import compat
from fairseq_sg.errors import UsageError

needs_fairseq = pytest.mark.skipif(compat.fairseq_version() is None, reason="fairseq is not installed")

#: As hydra, torch and numpy print them, with their line breaks.
NOISE = [
    (
        UserWarning,
        "\n'config' is validated against ConfigStore schema with the same name.\nThis behavior is deprecated",
    ),
    (
        UserWarning,
        "\nThe version_base parameter is not specified.\nPlease specify a compatability version level, or None.",
    ),
    (UserWarning, "In 'config': Usage of deprecated keyword in package header '# @package _group_'."),
    (UserWarning, "\n        The strict flag in the compose API is deprecated.\n"),
    (UserWarning, "hydra.experimental.compose() is no longer experimental. Use hydra.compose()"),
    (
        UserWarning,
        "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used.",
    ),
    (
        FutureWarning,
        "`torch.cuda.amp.autocast(args...)` is deprecated. Please use `torch.amp.autocast('cuda', args...)` instead.",
    ),
]


def test_lines_of_logs_that_say_nothing_are_silent(caplog):
    compat.silence_logs()
    caplog.set_level("DEBUG")
    lines = {
        "fairseq.tasks.fairseq_task": "can_reuse_epoch_itr = True",
        "hydra.core.utils": "Setting JobRuntime:name=utils",
    }
    for name, noise in lines.items():
        logger = logging.getLogger(name)
        logger.debug(noise)
        logger.info(noise)
        logger.info("%s of another kind", name)
    assert caplog.messages == ["fairseq.tasks.fairseq_task of another kind", "hydra.core.utils of another kind"]


@pytest.mark.parametrize("category,message", NOISE, ids=[m.split()[1] for _, m in NOISE])
def test_noise_is_silent(category, message):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        compat.silence_warnings()
        warnings.warn(message, category)
    assert not seen


def test_other_warnings_are_heard():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        compat.silence_warnings()
        warnings.warn("the learning rate is negative", UserWarning)
        warnings.warn("torch.foo is deprecated", FutureWarning)
    assert len(seen) == 2


# Which fairseq is there.


def installed(monkeypatch, **versions: str) -> None:
    """Makes only these distributions appear installed; dashes are underscores here."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if versions else None)


def test_no_fairseq_is_no_error(monkeypatch):
    installed(monkeypatch)
    assert compat.fairseq_version() is None


def test_fairseq_fixed_is_accepted(monkeypatch):
    installed(monkeypatch, fairseq_fixed="0.12.3.1")
    assert compat.fairseq_version() == "0.12.3.1"


@pytest.mark.parametrize(
    "versions,found", [({"fairseq": "0.12.2"}, "fairseq 0.12.2"), ({"other": "1"}, "of unknown origin")]
)
def test_another_fairseq_is_refused_with_the_mend(versions, found, monkeypatch):
    installed(monkeypatch, **versions)
    with pytest.raises(
        ImportError, match=rf"the installed fairseq is {found}; .*fairseq-fixed==.*Mend: pip uninstall fairseq"
    ):
        compat.fairseq_version()


# What torch reads from a checkpoint.


def test_plain_data_of_checkpoints_are_read(tmp_path):
    compat.allow_checkpoint_globals()
    arrays = [np.arange(4), np.float64(0.5), np.int64(3)]
    state = {"args": argparse.Namespace(lr=[0.1]), "extra": arrays, "state": collections.defaultdict(dict)}
    torch.save(state, tmp_path / "plain.pt")
    found = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert found["args"].lr == [0.1] and found["state"] == {}
    assert found["extra"][0].tolist() == [0, 1, 2, 3] and found["extra"][1:] == [0.5, 3]


class Harmful:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_code_in_checkpoints_is_not_run(tmp_path):
    compat.allow_checkpoint_globals()
    torch.save({"args": Harmful(tmp_path / "harmed")}, tmp_path / "harmful.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(tmp_path / "harmful.pt", weights_only=True)
    assert not (tmp_path / "harmed").exists()


# How commands end.


def raised_in(package: str, error: Exception):
    """The error with a traceback through a module of ``package``."""
    code = compile("def command(error):\n    raise error", "command.py", "exec")
    module = {"__package__": package}
    exec(code, module)
    try:
        module["command"](error)
    except Exception as caught:
        return type(caught), caught, caught.__traceback__


def report(package: str, error: Exception) -> list:
    """What went to the hook that was there before."""
    passed_on = []
    compat._report(lambda *args: passed_on.append(args), *raised_in(package, error))
    return passed_on


def test_usage_errors_end_a_command_in_one_line(capsys):
    assert report("fairseq_cli", UsageError("--depth is 'deep'")) == []
    assert capsys.readouterr().err == "error: --depth is 'deep'\n"


def test_all_of_an_error_is_shown_on_request(monkeypatch, capsys):
    monkeypatch.setenv("FAIRSEQ_SG_TRACEBACK", "1")
    assert len(report("fairseq_cli", UsageError("--depth is 'deep'"))) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "package,error", [("fairseq_cli", ValueError("a bug")), ("users.script", UsageError("--depth"))], ids=str
)
def test_other_errors_keep_their_traceback(package, error, capsys):
    assert len(report(package, error)) == 1
    assert capsys.readouterr().err == ""


# What is replaced in fairseq.


class Tied(nn.Module):
    """One weight under two names, and two layers without a bias."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight


@needs_fairseq
def test_absent_parameters_are_not_shared():
    from fairseq import trainer

    compat.leave_out_absent_parameters()
    assert trainer._catalog_shared_params(Tied()) == [["one.weight", "two.weight"]]
    assert trainer._catalog_shared_params(nn.Linear(2, 2)) == []


@needs_fairseq
def test_broken_checkpoints_are_named(tmp_path):
    from fairseq import checkpoint_utils

    compat.name_broken_checkpoints()
    torch.save({"model": torch.zeros(1000)}, tmp_path / "whole.pt")
    for size in (0, 1, 300, 2000):
        broken = tmp_path / "broken.pt"
        broken.write_bytes((tmp_path / "whole.pt").read_bytes()[:size])
        with pytest.raises(UsageError, match=r"the checkpoint .*broken\.pt is not a whole file of torch's"):
            checkpoint_utils.load_checkpoint_to_cpu(str(broken))
    with pytest.raises(FileNotFoundError):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "missing.pt"))


def changed(path):
    """The file with one bit changed in the middle, where the weights are."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@needs_fairseq
def test_what_was_changed_or_is_no_checkpoint_is_refused_and_none_of_it_is_run(tmp_path):
    from fairseq import checkpoint_utils

    compat.name_broken_checkpoints()
    path = tmp_path / "bad.pt"
    harmful = {"args": Harmful(tmp_path / "harmed")}

    def refused(message: str) -> None:
        with pytest.raises(UsageError, match=f"{path} {message}.*name another one with --path"):
            checkpoint_utils.load_checkpoint_to_cpu(str(path))
        assert not (tmp_path / "harmed").exists()

    torch.save(harmful, path)
    refused(r"holds more than plain data \(.*\), which could run code\. It was not read, and nothing of it was run")
    torch.save(harmful, path, _use_new_zipfile_serialization=False)
    refused("holds more than plain data")
    path.write_bytes(pickle.dumps(Harmful(tmp_path / "harmed"), protocol=2))
    refused("holds more than plain data")
    path.write_text("a text")
    refused("is not a whole file of torch's")
    torch.save({"model": {"weight": torch.zeros(10_000)}}, path)
    changed(path)
    refused("was changed after it was written: its checksums are wrong")
    for other in ({}, {"weight": torch.zeros(3)}, [1]):
        torch.save(other, path)
        refused("is no checkpoint of fairseq's")


@needs_fairseq
def test_a_sound_checkpoint_is_never_called_broken(tmp_path, monkeypatch):
    """The classes that it names may not be registered; the message has the cause, and no advice to delete the file."""
    from fairseq import checkpoint_utils

    compat.name_broken_checkpoints()
    path = tmp_path / "sound.pt"
    torch.save({"model": {}, "cfg": {"task": {"_name": "of_another_plugin"}}}, path)

    def upgrade(state):
        raise KeyError(state["cfg"]["task"]["_name"])

    monkeypatch.setattr(checkpoint_utils, "_upgrade_state_dict", upgrade)
    with pytest.raises(UsageError) as raised:
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert str(raised.value).startswith(f"the checkpoint {path} cannot be loaded (KeyError: 'of_another_plugin')")
    assert "--user-dir" in str(raised.value) and "elete" not in str(raised.value)
    assert isinstance(raised.value.__cause__, KeyError)


def full(code=errno.ENOSPC):
    raise OSError(code, os.strerror(code))


class FullDisk:
    """A file that takes so many bytes."""

    def __init__(self, path, room):
        self.file, self.room = builtins.open(path, "wb"), room

    def write(self, data):
        self.room -= len(data)
        return self.file.write(data) if self.room >= 0 else full()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def flush(self):
        self.file.flush()


@needs_fairseq
@pytest.mark.parametrize("room", [0, 100, 2000, 40_400])
def test_a_checkpoint_without_room_leaves_the_one_that_is_there(room, tmp_path, monkeypatch):
    from fairseq import checkpoint_utils

    compat.write_checkpoints_whole()
    path = str(tmp_path / "checkpoint_last.pt")
    checkpoint_utils.torch_persistent_save({"a": torch.ones(10_000)}, path)
    assert torch.equal(torch.load(path, weights_only=True)["a"], torch.ones(10_000)) and os.listdir(tmp_path) == [
        "checkpoint_last.pt"
    ]
    size = os.path.getsize(path)
    assert size > 40_400  # the last case: all but the end of the archive
    with monkeypatch.context() as patch:
        patch.setattr(compat, "open", lambda path, _: FullDisk(path, room), raising=False)
        with pytest.raises(UsageError, match=r"no room for the checkpoint .*last\.pt \(No space left on device\)"):
            checkpoint_utils.torch_persistent_save({"a": torch.zeros(10_000)}, path)
    assert torch.equal(torch.load(path, weights_only=True)["a"], torch.ones(10_000)) and os.listdir(tmp_path) == [
        "checkpoint_last.pt"
    ]
    checkpoint_utils.torch_persistent_save({"a": torch.zeros(10_000)}, path)
    assert not torch.load(path, weights_only=True)["a"].any()


@needs_fairseq
def test_a_copy_is_there_when_it_is_whole(tmp_path, monkeypatch):
    from fairseq.file_io import PathManager

    compat.write_checkpoints_whole()
    source, target = tmp_path / "checkpoint_1_2.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"new" * 1000)
    target.write_bytes(b"old")
    copyfile, seen = shutil.copyfile, []

    def watched(src, dst):
        copyfile(src, dst)
        seen.append(target.read_bytes())
        return dst

    monkeypatch.setattr(shutil, "copyfile", watched)
    assert PathManager.copy(str(source), str(target), overwrite=True)
    assert seen == [b"old"] and target.read_bytes() == source.read_bytes()
    for code, kind in ((errno.ENOSPC, UsageError), (errno.EDQUOT, UsageError), (errno.EACCES, PermissionError)):
        target.write_bytes(b"old")
        monkeypatch.setattr(shutil, "copyfile", lambda src, dst, code=code: (copyfile(src, dst), full(code)))
        with pytest.raises(kind):
            PathManager.copy(str(source), str(target), overwrite=True)
        assert target.read_bytes() == b"old" and len(os.listdir(tmp_path)) == 2


@pytest.fixture
def fake_training(monkeypatch):
    """name -> a module in the place of ``fairseq_cli.train`` or of ``__main__``, with the other one beside it."""
    from fairseq import checkpoint_utils

    def make(name: str):
        module, other = (
            types.SimpleNamespace(train=lambda *_: "trained", should_stop_early=lambda: None, __package__=package)
            for package in ("fairseq_cli", "other")
        )
        module.validate_and_save = other.validate_and_save = None
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, ({"__main__", "fairseq_cli.train"} - {name}).pop(), other)
        extra_state = {"patience": {"best": 0.5, "num_runs": 2}}
        monkeypatch.setattr(checkpoint_utils, "load_checkpoint", lambda *_: (extra_state, "batches"))
        compat.continue_where_it_was()
        return module, other

    return make


def options_of_checkpoints(**options) -> types.SimpleNamespace:
    chosen = {"patience": -1, "reset_meters": False, "save_dir": "runs", "restore_file": "checkpoint_last.pt"}
    return types.SimpleNamespace(**chosen | options)


def trainer_after(updates: int) -> types.SimpleNamespace:
    cfg = types.SimpleNamespace(common=types.SimpleNamespace(fp16=False))
    return types.SimpleNamespace(get_num_updates=lambda: updates, cfg=cfg, cuda=False)


@needs_fairseq
@pytest.mark.parametrize("name", ["__main__", "fairseq_cli.train"])
def test_no_update_after_the_last_one(name, fake_training):
    from fairseq import checkpoint_utils

    module, other = fake_training(name)
    untouched = other.train
    loaded = checkpoint_utils.load_checkpoint(options_of_checkpoints(), trainer_after(3))
    assert loaded == ({"patience": {"best": 0.5, "num_runs": 2}}, "batches") and other.train is untouched
    nothing = ([None], True)
    for most, updates, patience, expected in (
        (0, 9, -1, "trained"),
        (9, 8, -1, "trained"),
        (9, 9, -1, nothing),
        (9, 10, -1, nothing),
        (9, 8, 3, "trained"),
        (9, 8, 2, nothing),
        (0, 8, 1, nothing),
    ):
        cfg = types.SimpleNamespace(
            optimization=types.SimpleNamespace(max_update=most), checkpoint=options_of_checkpoints(patience=patience)
        )
        assert module.train(cfg, trainer_after(updates), "task") == expected


@needs_fairseq
@pytest.mark.parametrize("updates,reset,expected", [(3, False, 2), (0, False, None), (3, True, None)])
def test_patience_is_restored_where_the_best_value_is(updates, reset, expected, fake_training):
    from fairseq import checkpoint_utils

    module, _ = fake_training("fairseq_cli.train")
    checkpoint_utils.load_checkpoint(options_of_checkpoints(reset_meters=reset), trainer_after(updates))
    assert getattr(module.should_stop_early, "num_runs", None) == expected


@needs_fairseq
def test_patience_is_kept_in_checkpoints_of_trainings_that_have_some(fake_training, tmp_path):
    from fairseq import checkpoint_utils

    compat.write_checkpoints_whole()
    module, _ = fake_training("fairseq_cli.train")
    path = str(tmp_path / "checkpoint.pt")

    def kept() -> dict:
        checkpoint_utils.torch_persistent_save({"extra_state": {"epoch": 1}}, path)
        return torch.load(path, weights_only=True)["extra_state"]

    assert kept() == {"epoch": 1}
    module.should_stop_early.best, module.should_stop_early.num_runs = 0.25, 1
    assert kept() == {"epoch": 1, "patience": {"best": 0.25, "num_runs": 1}}


# Checkpoints and sentences that a model cannot take.


def misfit(there: nn.Module, here: nn.Module) -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        here.load_state_dict(there.state_dict())
    return caught.value


def layers(**sizes: int) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(size, 2, bias=False) for name, size in sizes.items()})


@pytest.mark.parametrize(
    "there,here,message",
    [
        (layers(a=3), layers(a=3, b=3), "it lacks b.weight"),
        (layers(a=3, b=3), layers(a=3), "it has b.weight besides"),
        (layers(a=3), layers(a=4), "other sizes of a.weight ([2, 3], here [2, 4])"),
        (
            layers(a=3, b=1, c=1, d=1, e=1, f=1),
            layers(a=4, x=1),
            "it lacks x.weight; it has b.weight, c.weight, d.weight and 2 more besides; other sizes of a.weight "
            "([2, 3], here [2, 4])",
        ),
    ],
)
def test_what_differs_between_models_is_named(there, here, message):
    error = misfit(there, here)
    assert compat._differences(error) == message
    wrapped = Exception("Cannot load model parameters from checkpoint runs/x.pt; please ensure that they match.")
    wrapped.__context__ = error
    refusal = str(compat._refusal(wrapped, options_of_checkpoints()))
    assert refusal.startswith(f"the checkpoint runs/x.pt is of another model: {message}. Give the options")


@needs_fairseq
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
        assert compat._other_options(there, here) == found
        assert compat._other_options(there, there) == []
        assert compat._other_options(there, configuration(dict, {"qk_norm": "none"}, None)) == found[:1]
    # An optimizer without a dataclass of options holds those of the whole command.
    sgd = [{"optimizer": argparse.Namespace(momentum=m, save_dir=f"runs/{m}", stop_time_hours=m)} for m in (0.9, 0.8)]
    assert compat._other_options(*sgd) == ["--momentum 0.9 (here 0.8)"]


def test_other_errors_are_no_differences_between_models():
    assert compat._differences(RuntimeError("out of memory")) is None
    for error in (RuntimeError("out of memory"), misfit(layers(a=3), layers(b=3)), AssertionError("Criterion")):
        assert compat._refusal(error, options_of_checkpoints()) is None


@pytest.mark.parametrize("file,path", [("checkpoint_last.pt", "runs/checkpoint_last.pt"), ("other/x.pt", "other/x.pt")])
def test_a_checkpoint_of_another_optimizer_is_named(file, path):
    error = AssertionError("Optimizer does not match; please reset the optimizer (--reset-optimizer). One vs Two")
    refusal = str(compat._refusal(error, options_of_checkpoints(restore_file=file)))
    assert refusal.startswith(f"the checkpoint {path} is of a training with another optimizer: One, here Two. Give")


@needs_fairseq
def test_weights_that_do_not_fit_their_own_options(monkeypatch):
    from fairseq import checkpoint_utils

    def load(filenames):
        raise errors.pop()

    monkeypatch.setattr(checkpoint_utils, "load_model_ensemble_and_task", load)
    compat.name_broken_checkpoints()
    errors = [RuntimeError("out of memory"), misfit(layers(a=3), layers(a=4))]
    with pytest.raises(UsageError, match=r"^the weights in x\.pt or y\.pt do not fit .*: other sizes of a\.weight \("):
        checkpoint_utils.load_model_ensemble_and_task(["x.pt", "y.pt"])
    with pytest.raises(RuntimeError, match="out of memory"):
        checkpoint_utils.load_model_ensemble_and_task(["x.pt"])


def test_preparing_again_changes_nothing():
    compat.prepare()
    hook, filters, before = sys.excepthook, len(warnings.filters), replaced()
    compat.prepare()
    assert sys.excepthook is hook and len(warnings.filters) == filters and replaced() == before


def replaced() -> list:
    """Functions of fairseq, where it is installed."""
    if compat.fairseq_version() is None:
        return []
    from fairseq import checkpoint_utils

    names = ("load_checkpoint", "load_checkpoint_to_cpu", "load_model_ensemble_and_task", "torch_persistent_save")
    return [getattr(checkpoint_utils, name) for name in names]


@needs_fairseq
@pytest.mark.parametrize("bf16, xla, tpu", [(True, False, False), (True, True, True), (False, False, True)])
def test_bfloat16_without_torch_xla_is_not_for_a_tpu(bf16, xla, tpu, monkeypatch):
    """An explicit ``--tpu`` is left to fairseq."""
    cfg = types.SimpleNamespace(common=types.SimpleNamespace(bf16=bf16, tpu=True))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: xla and name == "torch_xla" or None)
    seen = []
    compat._call_main(lambda cfg, main, **more: seen.append((cfg.common.tpu, main, more)), cfg, "main", start=1)
    assert seen == [(tpu, "main", {"start": 1})]
