"""Processes of their own: several at a time."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import torch

from fairseq_sg.kernels.processes import START, _run, isolated, preload


def test_processes_that_end_at_the_same_time_have_their_own_exit_codes():
    preload()
    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(lambda _: isolated(partial(range, 2), START), range(80)))
    assert ends == [([0, 1], "")] * 80


def test_a_process_that_ends_early_with_exit_code_0_says_so():
    """As one without any item does, which `tune` would take for an operator without a choice."""
    assert isolated(partial(os._exit, 0), START) == ([], "its process ended before the last case")
    assert isolated(partial(sys.exit, 0), START) == ([], "its process ended before the last case")


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
