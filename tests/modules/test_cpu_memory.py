"""Freed memory that stays with the process: whether it does, who decides, and where a task asks for it."""

from __future__ import annotations

import ctypes
import platform
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fairseq")
resource = pytest.importorskip("resource")

from fairseq_sg.modules.cpu import memory as host_memory  # noqa: E402
from fairseq_sg.tasks import sg_language_modeling, sg_translation  # noqa: E402

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in USERS:
        monkeypatch.delenv(name, raising=False)


def faults_of_a_step() -> float:
    """Pages that the system hands over while 240 MB are written in blocks of 8, as a share of the pages written."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2 << 20) for _ in range(30)]
    pages = sum(block.nbytes for block in blocks) / resource.getpagesize()
    del blocks
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / pages


@glibc
def test_a_second_step_gets_the_memory_of_the_first():
    assert host_memory.keep_freed_memory()
    faults_of_a_step()
    # Without, it is 1; some blocks may find no room between what else has been allocated.
    assert faults_of_a_step() < 0.5


@glibc
@pytest.mark.parametrize(("name", "value"), zip(USERS, ("131072", "131072", "glibc.malloc.trim_threshold=131072")))
def test_the_environment_decides(name, value, monkeypatch):
    refuse_mallopt(monkeypatch)
    monkeypatch.setenv(name, value)
    assert not host_memory.keep_freed_memory()


def test_other_libraries_are_left_alone(monkeypatch):
    refuse_mallopt(monkeypatch)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not host_memory.keep_freed_memory()


@glibc
def test_other_tunables_do_not_matter(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.rtld.nns=4")
    assert host_memory.keep_freed_memory()


def refuse_mallopt(monkeypatch) -> None:
    def refused(name):
        raise AssertionError("mallopt was asked for")

    monkeypatch.setattr(ctypes, "CDLL", refused)


@pytest.mark.parametrize("task", [sg_translation.SGTranslationTask, sg_language_modeling.SGLanguageModelingTask])
@pytest.mark.parametrize(("device", "kept"), [("cpu", 1), ("meta", 0)])
def test_a_task_keeps_it_where_a_training_on_a_cpu_begins(task, device, kept, monkeypatch):
    calls = []
    monkeypatch.setattr(host_memory, "keep_freed_memory", lambda: calls.append(1))
    instance = task.__new__(task)
    instance.cfg = SimpleNamespace()
    instance.begin_epoch(1, torch.nn.Linear(2, 2, device=device))
    assert len(calls) == kept
