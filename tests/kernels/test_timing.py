"""Interleaved rounds."""

from __future__ import annotations

from functools import partial

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


def test_short_runs_are_repeated(monkeypatch):
    seen = []
    monkeypatch.setattr(timing, "milliseconds", lambda run, calls, device: seen.append(calls) or 0.5)
    timing.interleaved({"a": lambda: seen.append("uncounted")}, 2, "cpu")
    assert seen == [1] * timing.WARM_UP + ["uncounted", int(timing.SHORTEST / 0.5)] * 2
