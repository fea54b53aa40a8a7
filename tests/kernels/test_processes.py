"""Processes of their own: several at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fairseq_sg.kernels.processes import START, isolated, preload


def test_processes_that_end_at_the_same_time_have_their_own_exit_codes():
    preload()
    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(lambda _: isolated(partial(range, 2), START), range(80)))
    assert ends == [([0, 1], "")] * 80
