"""Which implementation of an operator runs, and that operators need neither fairseq nor a device of their own."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from fairseq_sg.ops import force_implementation, linear_attention, orthogonality_loss, relative_logits
from fairseq_sg.ops.dispatch import (
    ENVIRONMENT_VARIABLE,
    OPERATORS,
    check_environment,
    declare,
    requested,
    requested_of,
    resolve,
)

IMPLEMENTATIONS = {"plain": lambda: "plain", "fast": lambda: "fast"}


def chosen(implementation: str = "auto") -> str:
    return resolve("operator", implementation, IMPLEMENTATIONS, automatic="fast")()


def test_auto_is_the_operators_own_choice():
    assert chosen() == "fast"


def test_named_implementation_is_taken():
    assert chosen("plain") == "plain"


def test_forced_only_within_the_block():
    with force_implementation("plain"):
        assert chosen() == "plain"
    assert chosen() == "fast"


def test_forced_ends_with_an_exception():
    with pytest.raises(RuntimeError, match="inner"), force_implementation("plain"):
        raise RuntimeError("inner")
    assert chosen() == "fast"


def test_inner_block_wins_and_auto_gives_the_choice_back(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "plain")
    with force_implementation("plain"):
        with force_implementation("auto"):
            assert chosen() == "fast"
        assert chosen() == "plain"


def test_other_threads_are_not_forced():
    seen = []
    with force_implementation("plain"):
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
    assert seen == ["fast"]


def test_environment_is_taken(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "plain")
    assert chosen() == "plain"


@pytest.mark.parametrize("value", ["", "auto"])
def test_environment_without_a_choice(monkeypatch, value):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, value)
    assert chosen() == "fast"


def test_named_wins_over_block_wins_over_environment(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "no such")
    with force_implementation("plain"):
        assert chosen() == "plain"
        assert chosen("fast") == "fast"


def test_unknown_name_is_answered_with_the_choices():
    with pytest.raises(ValueError, match=r"operator has no implementation 'slow' .* one of: auto, fast, plain"):
        chosen("slow")


def test_unknown_forced_name_says_who_forced_it(monkeypatch):
    with force_implementation("slow"), pytest.raises(ValueError, match=r"'slow' \(force_implementation\)"):
        chosen()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "slow")
    with pytest.raises(ValueError, match=rf"'slow' \(environment variable {ENVIRONMENT_VARIABLE}\); .*: auto, fast"):
        chosen()


@pytest.fixture
def known():
    """The operator of these tests, declared as the others are."""
    declare("operator", IMPLEMENTATIONS)
    yield
    del OPERATORS["operator"]


@pytest.mark.parametrize("how", ["block", "environment"])
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("operator=plain", "plain"),
        ("operator=plain,cvmm=naive", "plain"),
        (" cvmm = naive , operator = plain ", "plain"),
        ("naive,operator=plain", "plain"),
        ("operator=plain,naive", "plain"),
        ("plain,cvmm=naive", "plain"),
        ("cvmm=naive", "fast"),
        ("operator=auto,plain", "fast"),
        ("auto", "fast"),
    ],
)
def test_operators_by_name(known, monkeypatch, how, choice, expected):
    if how == "environment":
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, choice)
        check_environment()
        assert chosen() == expected
    else:
        with force_implementation(choice):
            assert chosen() == expected


def test_others_are_left_alone(known, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "operator=plain,geometric_attention=naive")
    assert requested("cvmm")[0] == "auto" and requested("geometric_attention")[0] == "naive"
    assert requested_of("cvmm") is None
    assert requested_of("operator") == f"environment variable {ENVIRONMENT_VARIABLE} (operator=plain)"
    with force_implementation("naive"):
        assert requested("operator")[0] == "naive" and requested_of("operator") is None
    with force_implementation("operator=auto"):
        assert requested_of("operator") is None and chosen() == "fast"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("operatr=plain", "is 'operatr=plain': there is no operator 'operatr'; there are cvmm, .*, relative_logits"),
        ("cvmm=naive,operator=slow", "operator has no implementation 'slow'; choose one of: auto, fast, plain"),
        ("operator=", "such as relative_attention=flex,linear_attention=triton"),
        ("=plain", "give one implementation for all operators"),
        ("plain,", "give one implementation for all operators"),
        ("plain,fast", "give one implementation for all operators"),
        ("operator=plain,operator=fast", "or one for each of some"),
        ("a=b=c", "there is no operator 'a=b'"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused(known, monkeypatch, choice, message):
    with pytest.raises(ValueError, match=f"^force_implementation .*{message}"), force_implementation(choice):
        pass
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, choice)
    for refused in (chosen, check_environment):
        with pytest.raises(ValueError, match=f"^environment variable {ENVIRONMENT_VARIABLE} .*{message}"):
            refused()


def test_a_name_that_no_operator_has_is_found_before_any_is_called(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "tritn")
    with pytest.raises(ValueError, match=rf"{ENVIRONMENT_VARIABLE}: no operator .* 'tritn'; there are auto, .*triton"):
        check_environment()


def test_who_lacks_an_implementation_names_those_that_have_it(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "flex")
    with pytest.raises(ValueError, match="operator has no .* ask it of the operators .* relative_attention=flex$"):
        chosen()
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    with pytest.raises(ValueError, match="choose one of: auto, fast, plain$"):
        chosen("flex")


CALLS = {
    "linear_attention": lambda x, **kwargs: linear_attention(x, x, x, causal=True, **kwargs),
    "orthogonality_loss": lambda x, **kwargs: orthogonality_loss(x, **kwargs),
    "relative_logits": lambda x, **kwargs: relative_logits(x, x[0, :, :1].expand(-1, 9, -1), **kwargs),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("implementation", ["naive", "chunked"])
def test_every_operator_can_be_forced(name, implementation, device):
    x = torch.rand(2, 3, 5, 4, device=device)
    named = CALLS[name](x, implementation=implementation)
    with force_implementation(implementation):
        assert torch.equal(CALLS[name](x), named)


@pytest.mark.parametrize("name", CALLS)
def test_every_operator_names_itself_and_its_choices(name):
    with pytest.raises(ValueError, match=rf"{name} has no implementation 'slow' .*: auto, chunked, naive"):
        CALLS[name](torch.rand(2, 3, 5, 4), implementation="slow")


@pytest.mark.parametrize("name", CALLS)
def test_every_operator_knows_shapes_without_data(name):
    """On the meta device, which autocast does not know."""
    real, shapes_only = torch.rand(2, 3, 70, 9), torch.rand(2, 3, 70, 9, device="meta")
    if name == "relative_logits":
        real, shapes_only = real[:, :, :5], shapes_only[:, :, :5]
    assert CALLS[name](shapes_only).shape == CALLS[name](real).shape


def test_import_without_fairseq():
    """In a process where importing fairseq fails, the operators work."""
    code = "import sys; sys.modules['fairseq'] = None; import torch, fairseq_sg.ops as ops; "
    code += "print(ops.orthogonality_loss(torch.eye(3)[None, None]).item())"
    repository = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert abs(float(done.stdout)) < 1e-5
