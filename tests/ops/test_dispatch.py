"""Which implementation of an operator runs, and that operators need neither fairseq nor a device of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fairseq_sg.ops import linear_attention, orthogonality_loss, relative_logits
from fairseq_sg.ops.dispatch import ENVIRONMENT_VARIABLE, OPERATORS, check_environment, choose, declare, requested
from helpers.commands import run


@pytest.fixture(autouse=True)
def known():
    """The operator of these tests, declared as the others are."""
    declare("operator", {"plain": lambda: "plain", "fast": lambda: "fast"}, "fast")
    yield
    del OPERATORS["operator"]


def chosen(implementation: str = "auto") -> str:
    return choose("operator", implementation, torch.ones(1))()


def test_auto_is_the_operators_own_choice():
    assert requested("operator") is None and chosen() == "fast"


def test_named_implementation_is_taken():
    assert chosen("plain") == "plain"


def test_environment_is_taken(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "plain")
    assert requested("operator") == "plain" and chosen() == "plain"


@pytest.mark.parametrize("value", ["", "auto"])
def test_environment_without_a_choice(monkeypatch, value):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, value)
    check_environment()
    assert requested("operator") is None and chosen() == "fast"


def test_named_wins_over_environment(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "plain")
    assert chosen("fast") == "fast"


def test_transforms_of_torch_func(monkeypatch):
    """Within one, the operator's own choice is what consists of torch's operations; names win there, too."""
    OPERATORS["operator"] = replace(OPERATORS["operator"], transformed="plain")
    seen = []

    def function(x):
        seen.extend([chosen(), chosen("fast")])
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fast")
        seen.append(chosen())
        monkeypatch.delenv(ENVIRONMENT_VARIABLE)
        return x.sum()

    torch.func.grad(function)(torch.ones(1))
    assert seen == ["plain", "fast", "fast"] and chosen() == "fast"


def test_what_transforms_run_is_an_implementation():
    known = {name: operator for name, operator in OPERATORS.items() if name != "operator"}
    assert all(operator.transformed in operator.implementations for operator in known.values())


def test_operators_without_an_implementation_of_the_name_choose_themselves(monkeypatch):
    """`gram` is known to the orthogonality loss alone."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "gram")
    check_environment()
    assert requested("orthogonality_loss") == "gram"
    assert requested("operator") is None and chosen() == "fast"


def test_unknown_name_is_answered_with_the_choices():
    with pytest.raises(ValueError, match=r"operator has no implementation 'slow'; choose one of: auto, fast, plain$"):
        chosen("slow")


@pytest.mark.parametrize("name", ["tritn", "relative_attention=shift", "naive,triton"])
def test_a_name_that_no_operator_has_is_refused(monkeypatch, name):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, name)
    for refused in (check_environment, chosen, lambda: requested("operator")):
        with pytest.raises(ValueError, match=rf"{ENVIRONMENT_VARIABLE}: no operator .* '{name}'; .*: auto, .*triton"):
            refused()
    assert chosen("plain") == "plain"


CALLS = {
    "linear_attention": lambda x, **kwargs: linear_attention(x, x, x, causal=True, **kwargs),
    "orthogonality_loss": lambda x, **kwargs: orthogonality_loss(x, **kwargs),
    "relative_logits": lambda x, **kwargs: relative_logits(x, x[0, :, :1].expand(-1, 9, -1), **kwargs),
}


FAST = {"linear_attention": "chunked", "orthogonality_loss": "gram", "relative_logits": "shift"}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("naive", [True, False], ids=["naive", "fast"])
def test_every_operator_follows_the_environment(name, naive, device, monkeypatch):
    implementation = "naive" if naive else FAST[name]
    x = torch.rand(2, 3, 5, 4, device=device)
    named = CALLS[name](x, implementation=implementation)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, implementation)
    assert torch.equal(CALLS[name](x), named)


@pytest.mark.parametrize("name", CALLS)
def test_every_operator_names_itself_and_its_choices(name):
    choices = ", ".join(sorted({"auto", "naive", FAST[name]}))
    with pytest.raises(ValueError, match=rf"{name} has no implementation 'slow'; .*: {choices}"):
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
    done = run("-c", code)
    assert done.code == 0, done.err
    assert abs(float(done.out)) < 1e-5
