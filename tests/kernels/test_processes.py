"""Processes of their own: several at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fairseq_sg.kernels import processes
from fairseq_sg.kernels.processes import START, _run, isolated, threads


def test_processes_that_end_at_the_same_time_have_their_own_exit_codes():
    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(lambda _: isolated(partial(range, 2), START), range(80)))
    assert ends == [([0, 1], "")] * 80


def test_a_process_that_ends_early_with_exit_code_0_says_so():
    """As one without any item does, which `tune` would take for an operator without a choice."""
    assert isolated(partial(os._exit, 0), START) == ([], "its process ended before the last case")
    assert isolated(partial(sys.exit, 0), START) == ([], "its process ended before the last case")


def reports(folder, number):
    (folder / str(number)).touch()
    yield number
    time.sleep(1000)


def test_ctrl_c_ends_the_processes_and_starts_no_other(tmp_path):
    """Threads that wait for them end, and have no results."""
    with pytest.raises(KeyboardInterrupt), threads(2) as pool:
        calls = [pool.submit(isolated, partial(reports, tmp_path, number), START) for number in range(4)]
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    assert all(isinstance(call.exception(), KeyboardInterrupt) for call in calls[:2])
    assert all(call.cancelled() for call in calls[2:])
    assert isolated(partial(range, 2), START) == ([0, 1], "")


def test_ctrl_c_ends_a_process_that_the_main_thread_waits_for(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    before = set(multiprocessing.active_children())
    monkeypatch.setattr(processes, "_received", interrupted)
    with pytest.raises(KeyboardInterrupt):
        isolated(partial(time.sleep, 1000), START)
    (process,) = set(multiprocessing.active_children()) - before
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_process_that_nobody_listens_to_ends_silently():
    receive, send = multiprocessing.Pipe(duplex=False)
    receive.close()
    _run(partial(range, 2), send, torch.get_num_threads())


def test_products_are_in_float32_whatever_the_environment_allows():
    """``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1`` begins a process with "high"."""
    torch.set_float32_matmul_precision("high")
    sent: list = []
    threads = torch.get_num_threads()  # which stay
    try:
        _run(lambda: iter([torch.get_float32_matmul_precision()]), SimpleNamespace(send=sent.append), threads)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert sent == [("start", None), ("item", "highest"), ("end", None)]
