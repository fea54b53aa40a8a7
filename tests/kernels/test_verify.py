"""What verification finds: kernels that are wrong, that crash and that hang; and that ours are right."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fairseq_sg.kernels import verify
from fairseq_sg.kernels.cases import CASES, Make
from fairseq_sg.ops.operators import OPERATORS
from helpers import broken_kernels as broken


def verdict_of(kernel, monkeypatch, implementation: str = "triton") -> verify.Verdict:
    """In this process."""
    monkeypatch.setattr(verify, "isolated", lambda task, limit: (list(task()), ""))
    monkeypatch.setitem(OPERATORS[broken.OPERATOR].implementations, implementation, kernel)
    return verify.verdict_of(broken.OPERATOR, implementation, "cpu", True)


def test_a_right_one_is_verified(monkeypatch):
    found = verdict_of(broken.right, monkeypatch)
    assert found.problem == found.cannot == "" and len(found.results) == 3 * 4 * 3
    assert 0 < found.worst("float32") < 1e-5 < found.worst("float16") < found.worst("bfloat16") < 2e-2


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (broken.slightly_off, "5 positions, width 16, padding none, float32: loss is off by 1.0e-03, and 1.0e-05 is"),
        (broken.wrong_gradient, "5 positions, width 16, padding none, float32: gradient of values is off by 1.0e-02"),
        (broken.off_without_gradients, "padding none, float32: loss without gradients is off by 1.0e-03"),
        (broken.nan, "1 positions, width 1, padding none, float32: loss is off by inf"),
        (broken.another_shape, "loss is off by inf"),
        (broken.writes_behind, "it writes outside its tensors"),
        (broken.writes_before, "it writes outside its tensors"),
        (broken.writes_into_its_inputs, "it writes into its inputs"),
        (broken.not_the_same_again, "two runs are not equal bit for bit"),
        (broken.raises, "1 positions, width 1, padding none, float32: RuntimeError: an illegal memory access"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_wrong_one_is_not(kernel, problem, monkeypatch):
    found = verdict_of(kernel, monkeypatch)
    assert problem in found.problem and "\n" not in found.problem


@pytest.mark.parametrize(
    ("kernel", "limit", "problem"),
    [
        (broken.crashes, 60.0, "it crashed: SIGSEGV, after 12 cases"),
        (broken.exits, 60.0, "its process ended before the last case, after 12 cases"),
        (broken.hangs, 3.0, "it took longer than 3 seconds, after 12 cases"),
        (broken.slightly_off, 60.0, "loss is off by"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_in_a_process_of_its_own(kernel, limit, problem):
    """The results before the end are there."""
    task = partial(broken.check, kernel)
    found = verify.verdict_of(broken.OPERATOR, "triton", "cpu", True, limit, task)
    assert problem in found.problem and found.results[0].problem == ""
    assert "triton" not in OPERATORS[broken.OPERATOR].implementations


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotImplementedError("not on a CPU"), "not on a CPU"),
        (ValueError("cvmm cannot run its implementation 'triton' here: why"), "cvmm cannot run its"),
        (RuntimeError("backend failed:\nNotImplementedError: NYI: width 4"), "backend failed:"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "CUDA out of memory"),
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemory"), "CUDA error: out of"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "CUDA error: CUBLAS"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "Triton Error"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to"), "[enforce fail]"),
    ],
)
def test_one_that_cannot_run_here_is_neither_right_nor_wrong(error, reason, monkeypatch):
    def refuses(*arguments):
        raise error

    found = verdict_of(refuses, monkeypatch)
    assert found.cannot.startswith(reason) and not found.problem
    assert found.without_memory == (len(found.results) if "emory" in str(error) or "ALLOC" in str(error) else 0)


def test_a_reference_without_memory_is_not_its_failure(monkeypatch):
    def full(case, implementation, inputs):
        if implementation == "naive" and next(iter(inputs.values())).shape[2] > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return with_gradients(case, implementation, inputs)

    with_gradients = verify.with_gradients
    monkeypatch.setattr(verify, "with_gradients", full)
    found = verdict_of(broken.right, monkeypatch)
    assert found.problem == found.cannot == found.ended == "" and found.without_memory == 4 * 3


def test_one_that_takes_some_calls_is_judged_by_these(monkeypatch):
    def takes_long_ones(values, padding_mask, eps):
        if values.shape[2] < 10:
            raise NotImplementedError("too short")
        return broken.right(values, padding_mask, eps)

    found = verdict_of(takes_long_ones, monkeypatch)
    assert found.problem == found.cannot == "" and sum(not one.cannot for one in found.results) == 4 * 3


def test_processes_share_the_cases(monkeypatch):
    monkeypatch.setattr(verify, "isolated", lambda task, limit: (list(task()), ""))
    whole = verify.verdict_of("cvmm", "grouped", "cpu", True)
    shared = verify.verdict_of("cvmm", "grouped", "cpu", True, parts=4)
    assert len(shared.results) == len(whole.results) > 8
    assert {(r.case, r.dtype, r.error) for r in shared.results} == {(r.case, r.dtype, r.error) for r in whole.results}


def test_a_process_that_ends_early_is_told_of(monkeypatch):
    ends = iter([("", 0), ("it crashed: SIGSEGV", 1), ("", 2), ("", 3)])

    def isolated(task, limit):
        why, _ = next(ends)
        return list(task()), why

    monkeypatch.setattr(verify, "isolated", isolated)
    found = verify.verdict_of("cvmm", "grouped", "cpu", True, parts=4)
    assert found.problem.startswith("it crashed: SIGSEGV, after")


@pytest.mark.parametrize(("operator", "name"), [one for one in verify.everything() if one[1] != "triton"])
def test_implementations_in_torch(operator, name):
    results = list(verify.check(operator, name, "cpu", tiny=True))
    assert results and [result for result in results if result.problem or result.cannot] == []


def test_cases_are_the_same_in_every_process():
    for operator, cases in CASES.items():
        first, second = (list(cases(Make("cpu"), True)) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            assert one.name == other.name, operator
            assert all(torch.equal(x, other.inputs[name]) for name, x in one.inputs.items())


def test_errors_are_relative_to_the_largest_number():
    truth = {"a": torch.tensor([100.0, -1.0]).double(), "b": torch.tensor([1e-9]).double()}
    found = {"a": torch.tensor([100.0, -0.9]), "b": torch.tensor([0.01])}
    assert verify.errors(found, truth) == pytest.approx({"a": 1e-3, "b": 1e-2})
    assert verify.errors(found, truth, small=1000.0) == pytest.approx({"a": 1e-4, "b": 1e-5})
    nothing = {"a": torch.zeros(0, 3)}
    assert verify.errors(nothing, nothing) == {"a": 0.0}
    assert verify.errors({"a": torch.tensor([torch.nan])}, {"a": torch.ones(1).double()}) == {"a": float("inf")}


def test_guard_rows():
    """Around whatever Python code makes; strides stay, and what is not written is seen."""
    guard = verify.GuardRows()
    with guard:
        made = [torch.empty(3, 5), torch.zeros(4), torch.empty(3, 5).t(), torch.empty_like(torch.ones(2, 3).t())]
        counts = torch.zeros(3, dtype=torch.int32)
    assert made[0].isnan().all() and (made[1] == 0).all() and made[3].stride() == (1, 3) and (counts == 0).all()
    assert made[0].storage_offset() == 320 and made[0].data_ptr() % 16 == 0
    assert guard.intact()
    made[0].fill_(1.0)
    assert guard.intact()
    made[0].as_strided((1,), (1,), 320 + 15).fill_(0.0)
    assert not guard.intact()
