"""The repairs of ``compat``: fairseq, torch and Python's warnings."""

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
import warnings

import numpy as np
import pytest
import torch

from fairseq_sg import compat
from fairseq_sg.errors import UsageError
from helpers.states import Harmful

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
        "fairseq.trainer": "detected shared parameter: decoder.fc1.bias <- decoder.fc2.bias",
    }
    for name, noise in lines.items():
        logger = logging.getLogger(name)
        logger.debug(noise)
        logger.info(noise)
        logger.info("%s of another kind", name)
    logging.getLogger("fairseq.trainer").info("detected shared parameter: a.weight <- b.weight")
    assert caplog.messages == [
        *(f"{name} of another kind" for name in lines),
        "detected shared parameter: a.weight <- b.weight",
    ]


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
def test_another_fairseq_is_refused_with_the_fix(versions, found, monkeypatch):
    installed(monkeypatch, **versions)
    with pytest.raises(
        ImportError, match=rf"the installed fairseq is {found}; .*fairseq-fixed==.*Fix: pip uninstall fairseq"
    ):
        compat.fairseq_version()


# Plain data in checkpoints.


@needs_fairseq
def test_plain_data_of_checkpoints_are_read(tmp_path):
    compat.allow_checkpoint_globals()
    arrays = [np.arange(4), np.float64(0.5), np.int64(3)]
    state = {"args": argparse.Namespace(lr=[0.1]), "extra": arrays, "state": collections.defaultdict(dict)}
    torch.save(state, tmp_path / "plain.pt")
    found = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert found["args"].lr == [0.1] and found["state"] == {}
    assert found["extra"][0].tolist() == [0, 1, 2, 3] and found["extra"][1:] == [0.5, 3]


@needs_fairseq
def test_code_in_checkpoints_is_not_run(tmp_path):
    compat.allow_checkpoint_globals()
    torch.save({"args": Harmful(tmp_path / "harmed")}, tmp_path / "harmful.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
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
    """The calls of the hook that was there before."""
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


# Checkpoints are written atomically.


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

    compat.repair()
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

    compat.repair()
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
    for code, kind, message in (
        (errno.ENOSPC, UsageError, "there is no room for the checkpoint .*last.pt"),
        (errno.EDQUOT, UsageError, "there is no room for the checkpoint .*last.pt"),
        (errno.EACCES, PermissionError, os.strerror(errno.EACCES)),
    ):
        target.write_bytes(b"old")
        monkeypatch.setattr(shutil, "copyfile", lambda src, dst, code=code: (copyfile(src, dst), full(code)))
        with pytest.raises(kind, match=message):
            PathManager.copy(str(source), str(target), overwrite=True)
        assert target.read_bytes() == b"old" and len(os.listdir(tmp_path)) == 2


@needs_fairseq
def test_a_second_repair_changes_nothing():
    compat.repair()
    hook, filters, before = sys.excepthook, len(warnings.filters), replaced()
    compat.repair()
    assert sys.excepthook is hook and len(warnings.filters) == filters and replaced() == before


def replaced() -> list:
    from fairseq import checkpoint_utils
    from fairseq.distributed import utils
    from fairseq.file_io import PathManager

    functions = [getattr(checkpoint_utils, name) for name in ("save_checkpoint", "torch_persistent_save")]
    return [*functions, utils.call_main, PathManager.copy]


def test_without_fairseq_the_repair_says_how_to_install_it(monkeypatch):
    installed(monkeypatch)
    with pytest.raises(ImportError, match="fairseq is not installed; .*doctor` says how to install it"):
        compat.repair()


@needs_fairseq
@pytest.mark.parametrize("bf16, xla, tpu", [(True, False, False), (True, True, True), (False, False, True)])
def test_bfloat16_without_torch_xla_is_not_for_a_tpu(bf16, xla, tpu, monkeypatch):
    """An explicit ``--tpu`` is left to fairseq. By the copy in ``distributed_training``, workers add up gradients."""
    from omegaconf import OmegaConf

    groups = {"common": {"bf16": bf16, "tpu": True}, "distributed_training": {"tpu": True}, "task": {}, "ema": None}
    groups["common"]["fp16_scale_window"], groups["optimization"] = None, {"update_freq": [1]}
    cfg = OmegaConf.create(groups)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: xla and name == "torch_xla" or None)
    seen = []
    compat._call_main(lambda cfg, main, **more: seen.append((cfg.common.tpu, main, more)), cfg, "main", start=1)
    assert seen == [(tpu, "main", {"start": 1})]
    assert cfg.distributed_training.tpu == tpu and "tpu" not in cfg.task and cfg.common.fp16_scale_window is None


@needs_fairseq
@pytest.mark.parametrize("size, banned", [(1, {5, 6, 7, 8}), (2, {5, 7}), (3, {7}), (4, set()), (9, set())])
def test_repeated_ngrams_are_banned(size, banned):
    """An output begins with an end symbol, and the rest of its row is padding."""
    from fairseq.ngram_repeat_block import NGramRepeatBlock

    compat.repair()
    output = [2, 6, 5, 8, 5, 6, 7, 5, 6]
    tokens = torch.tensor([[*output, 1, 1, 1], [2, *range(10, 18), 1, 1, 1]])
    of_each = NGramRepeatBlock(size, use_extension=False)(tokens, torch.zeros(2, 20), 2, 1, step=len(output) - 1)
    found = [set(torch.nonzero(row.isinf()).flatten().tolist()) for row in of_each]
    assert found == [banned, set(range(10, 18)) if size == 1 else set()]


def test_a_forced_word_is_not_banned():
    """A prompt leaves one word, also where it repeats an n-gram."""
    from fairseq.ngram_repeat_block import NGramRepeatBlock

    compat.repair()
    forced = torch.full((1, 20), -torch.inf)
    forced[0, 6] = 0.0
    found = NGramRepeatBlock(2, use_extension=False)(torch.tensor([[2, 5, 6, 5, 1]]), forced.clone(), 1, 1, step=3)
    assert torch.equal(found, forced)
