"""Interleaved rounds."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from fairseq_sg.kernels import timing


def test_interleaved(monkeypatch):
    order = []
    monkeypatch.setattr(timing, "milliseconds", lambda run, calls, device: run() or (99.0 if calls == 1 else 5.0))
    times = timing.interleaved({name: partial(order.append, name) for name in "abc"}, 20, "cpu")
    assert order[: 3 * timing.WARM_UP] == [name for name in "abc" for _ in range(timing.WARM_UP)]
    rounds = ["".join(order[start : start + 3]) for start in range(3 * timing.WARM_UP, len(order), 3)]
    assert len(rounds) == 20 and {"".join(sorted(one)) for one in rounds} == {"abc"}
    assert len(set(rounds)) > 3  # orders
    assert times == {name: [99.0] * 20 for name in "abc"}


def test_medians(monkeypatch):
    monkeypatch.setattr(timing, "interleaved", lambda runs, rounds, device: {name: [1.0, 2.0, 9.0] for name in runs})
    assert timing.medians({"a": list, "b": list}, 3, "cpu") == {"a": 2.0, "b": 2.0}


def test_milliseconds_are_those_of_one_call(monkeypatch):
    clock = iter([1.0, 1.5])
    clocks = dict.fromkeys(("process_time", "perf_counter"), lambda: next(clock))
    monkeypatch.setattr(timing, "time", SimpleNamespace(**clocks))
    calls = []
    assert timing.milliseconds(lambda: calls.append(1), 4, "cpu") == 125 and len(calls) == 4


def test_short_runs_are_repeated(monkeypatch):
    seen = []
    monkeypatch.setattr(timing, "milliseconds", lambda run, calls, device: seen.append(calls) or 0.5)
    timing.interleaved({"a": lambda: seen.append("uncounted")}, 2, "cpu")
    assert seen == [1] * timing.WARM_UP + ["uncounted", int(timing.SHORTEST / 0.5)] * 2
