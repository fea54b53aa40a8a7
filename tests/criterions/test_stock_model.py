"""The orthogonality loss with a model that does not show its Values: one message, not a TypeError."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

from omegaconf import OmegaConf

from fairseq_sg.criterions.base import SGCriterionConfig
from fairseq_sg.criterions.cross_entropy_orthogonality import CrossEntropyOrthogonality
from fairseq_sg.errors import UsageError


def criterion(weight: float, roles: str = "encoder") -> CrossEntropyOrthogonality:
    options = {"orthogonality_weight": weight, "orthogonality_roles": roles}
    config = OmegaConf.structured(SGCriterionConfig(**options, sentence_avg=False))
    task = SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: 1))
    return CrossEntropyOrthogonality(config, task)


def stock(src_tokens):
    return None, {}


def test_a_model_that_shows_no_values_is_refused_by_name_of_the_option():
    with pytest.raises(UsageError, match="--orthogonality-weight needs a model that shows its attentions' Values"):
        criterion(0.1)._outputs(stock, {"src_tokens": None})
    assert criterion(0.0)._outputs(stock, {"src_tokens": None}) == (None, {})


def test_roles_that_the_model_does_not_have_are_refused(monkeypatch):
    monkeypatch.setattr(stock, "attention_roles", ("decoder",), raising=False)
    with pytest.raises(UsageError, match="--orthogonality-roles has encoder: the model has decoder alone"):
        criterion(0.1)._outputs(stock, {"src_tokens": None})


def test_roles_are_checked_before_a_training(monkeypatch):
    criterion(0.0).check_training(stock)
    criterion(0.0, "encoder").check_training(stock)
    with pytest.raises(UsageError, match="--orthogonality-roles has no effect without --orthogonality-weight"):
        criterion(0.0, "decoder").check_training(stock)
    monkeypatch.setattr(stock, "attention_roles", ("decoder",), raising=False)
    criterion(0.1, "decoder").check_training(stock)
    with pytest.raises(UsageError, match="--orthogonality-roles has encoder: the model has decoder alone"):
        criterion(0.1).check_training(stock)


@pytest.mark.parametrize("second", [None, "attention"])
def test_a_model_with_another_second_output(second):
    """fairseq's LSTM returns None, its convolutional model a tensor."""
    assert criterion(0.0)._outputs(lambda src_tokens: (1, second), {"src_tokens": None}) == (1, {})
