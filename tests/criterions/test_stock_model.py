"""The orthogonality loss with a model that does not show its Values: one message, not a TypeError."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

from omegaconf import OmegaConf

from fairseq_sg.criterions.cross_entropy_orthogonality import CrossEntropyOrthogonality, CrossEntropyOrthogonalityConfig
from fairseq_sg.errors import UsageError


def criterion(weight: float) -> CrossEntropyOrthogonality:
    config = OmegaConf.structured(CrossEntropyOrthogonalityConfig(orthogonality_weight=weight, sentence_avg=False))
    task = SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: 1))
    return CrossEntropyOrthogonality(config, task)


def stock(src_tokens):
    return None, {}


def test_a_model_without_value_losses_is_refused_by_name_of_the_option():
    with pytest.raises(UsageError, match="--orthogonality-weight needs a model that shows its attentions' Values"):
        criterion(0.1)._outputs(stock, {"src_tokens": None})
    assert criterion(0.0)._outputs(stock, {"src_tokens": None}) == (None, {})


def test_other_type_errors_are_left_alone():
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        criterion(0.0)._outputs(stock, {})
