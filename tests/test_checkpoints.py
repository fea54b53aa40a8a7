"""Checkpoints that cannot be used are named with the cause, and none of their code is run."""

from __future__ import annotations

import argparse
import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("fairseq")

from fairseq_sg import checkpoints
from fairseq_sg.compat import wrap
from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.mixin import SGTask
from helpers.states import Harmful


def change_one_bit(path: Path) -> None:
    """In the middle of the file, where the weights are."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def refusal(path: Path) -> str:
    with pytest.raises(UsageError, match=f"^the checkpoint {path} ") as raised:
        checkpoints.read(str(path))
    cause = raised.value.__cause__
    assert f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}".strip() in str(raised.value)
    assert "elete" not in str(raised.value)
    return str(raised.value)


def test_a_sound_checkpoint_is_read(tmp_path):
    """Whatever tasks and models it names: none of them need be registered."""
    path = tmp_path / "sound.pt"
    torch.save({"model": {"w": torch.arange(3.0)}, "cfg": {"task": {"_name": "of_another_plugin"}}}, path)
    for zipped in (True, False):
        state = torch.load(path, weights_only=True)
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        found = checkpoints.read(str(path))
        assert found["model"]["w"].tolist() == [0, 1, 2] and checkpoints.task_name(found) == "of_another_plugin"
    assert checkpoints.trained_with_ours(str(path)) is None


@pytest.mark.parametrize("size", [0, 1, 300, 2000])
def test_a_checkpoint_that_was_cut_off(size, tmp_path):
    torch.save({"model": torch.zeros(1000), "cfg": {}}, tmp_path / "whole.pt")
    broken = tmp_path / "broken.pt"
    broken.write_bytes((tmp_path / "whole.pt").read_bytes()[:size])
    assert "cannot be read: it was cut off, or is no checkpoint (" in refusal(broken)


def test_the_newest_readable_checkpoint_beside_a_damaged_last_one_is_named(tmp_path):
    sound = {"model": torch.zeros(1000), "cfg": {}}
    last = tmp_path / "checkpoint_last.pt"
    last.write_text("a text")
    for name in ("checkpoint_best.pt", "checkpoint_9.pt"):
        torch.save(sound, tmp_path / name)
    assert refusal(last).endswith(" Restore a copy of it, or name another checkpoint")
    for name in ("checkpoint_1_90.pt", "checkpoint_2_600.pt"):
        torch.save(sound, tmp_path / name)
    (tmp_path / "checkpoint_3_700.pt").write_text("a text")
    newest = tmp_path / "checkpoint_2_600.pt"
    advice = f" Copy {newest} over it, the newest one there that can be read, or name another checkpoint"
    assert refusal(last).endswith(advice)
    assert "Restore a copy" in refusal(tmp_path / "checkpoint_3_700.pt")


def test_a_checkpoint_that_was_changed(tmp_path):
    path = tmp_path / "changed.pt"
    torch.save({"model": {"weight": torch.zeros(10_000)}, "cfg": {}}, path)
    change_one_bit(path)
    assert "was changed after it was written (BadZipFile: its checksums are wrong)" in refusal(path)


def test_no_code_of_a_checkpoint_is_run(tmp_path):
    path, harmful = tmp_path / "bad.pt", {"args": Harmful(tmp_path / "harmed")}
    torch.save(harmful, path)
    message = refusal(path)
    assert "has more than plain data (" in message and "pathlib.P" in message and "No code of it was run" in message
    torch.save(harmful, path, _use_new_zipfile_serialization=False)
    assert "cannot be read" in refusal(path)
    path.write_bytes(pickle.dumps(Harmful(tmp_path / "harmed"), protocol=2))
    assert "cannot be read" in refusal(path)
    assert not (tmp_path / "harmed").exists()


def test_files_of_other_kinds(tmp_path):
    path = tmp_path / "other.pt"
    path.write_text("a text")
    assert "cannot be read" in refusal(path)
    for other in ({}, {"weight": torch.zeros(3)}, [1]):
        torch.save(other, path)
        assert "is no checkpoint of fairseq (TypeError: " in refusal(path)


# Weights.


def layers(**sizes: int) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(size, 2, bias=False) for name, size in sizes.items()})


@pytest.mark.parametrize(
    "there,here,message",
    [
        (layers(a=3), layers(a=3, b=3), "it lacks b.weight"),
        (layers(a=3, b=3), layers(a=3), "it also has b.weight"),
        (layers(a=3), layers(a=4), "other sizes of a.weight ([2, 3], here [2, 4])"),
        (
            layers(a=3, b=1, c=1, d=1, e=1, f=1),
            layers(a=4, x=1),
            "it lacks x.weight; it also has b.weight, c.weight, d.weight and 2 more; other sizes of a.weight "
            "([2, 3], here [2, 4])",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(there, here, message):
    wrap(here, "load_state_dict", checkpoints.load_weights)
    with pytest.raises(UsageError) as raised:
        here.load_state_dict(there.state_dict())
    assert str(raised.value).startswith(f"the checkpoint belongs to another model: {message}. Check the options")
    here.load_state_dict(here.state_dict())
    if "sizes" not in message:
        here.load_state_dict(there.state_dict(), strict=False)


class Base:
    """In place of a task of fairseq."""

    def build_model(self, cfg, from_checkpoint):
        return layers(a=3)


def test_models_of_our_tasks_name_the_weights_and_other_errors_stay(monkeypatch):
    model = type("Task", (SGTask, Base), {})().build_model(None)
    weights = model.state_dict()
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(UsageError, match="another model"):
            copied.load_state_dict(layers(a=4).state_dict())
    model.load_state_dict(weights)
    monkeypatch.setattr(nn.Linear, "_load_from_state_dict", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        model.load_state_dict(weights)


def test_a_copy_loads_its_own_weights():
    model = type("Task", (SGTask, Base), {})().build_model(None)
    other = copy.deepcopy(model)
    other.load_state_dict({"a.weight": torch.full((2, 3), 7.0)})
    assert other.a.weight.eq(7).all() and not model.a.weight.eq(7).any()


def test_the_names_of_options():
    cfg = {"model": argparse.Namespace(depth="shared"), "task": {"data": "x"}, "criterion": None}
    assert checkpoints.option_names(cfg) == {"depth", "data"}
