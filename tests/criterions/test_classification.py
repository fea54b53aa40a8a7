"""The criterion of classes: its value against torch's, accuracy, types, other losses, workers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
import torch.nn.functional as F
from fairseq.logging import metrics

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.criterions.base import SGCriterionConfig
from fairseq_sg.criterions.classification import Classification
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention import Values

SPECIALS, EOS = 4, 2
LOGITS = torch.tensor([[3.0, 1, 0], [0, 2, 1], [0, 0, 5], [1, 0, 0]])
CLASSES = torch.tensor([0, 1, 1, 2])


class Breakdown:
    """Two types, of which each worker logs both."""

    def logs(self, types, right, tokens=None):
        return {
            key: value
            for kind in (0, 1)
            for key, value in {f"n_of_t{kind}": (types == kind).sum(),
                               f"exact_of_t{kind}": ((types == kind) & right).sum()}.items()
        }  # fmt: skip


TASK = SimpleNamespace(target_dictionary=None, classes=lambda target: target[:, 0] - SPECIALS, breakdown=Breakdown())


def criterion(**options) -> Classification:
    return Classification(SGCriterionConfig(**({"sentence_avg": False} | options)), TASK)


def batch(rows=slice(None), **more):
    words = CLASSES[rows] + SPECIALS
    target = torch.stack([words, torch.full_like(words, EOS)], 1)
    return {"net_input": {}, "target": target, "ntokens": target.numel()} | more


def answers(logits=LOGITS, **losses):
    """A model that gives these logits."""
    return lambda: (logits, {"aux_losses": {k: [torch.tensor(v)] for k, v in losses.items()}})


def logged(logs) -> dict:
    with metrics.aggregate() as values:
        Classification.reduce_metrics(logs)
    return dict(values.get_smoothed_values())


@pytest.mark.parametrize("sentence_avg", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_loss_is_torch_s_mean_over_sentences(epsilon, sentence_avg):
    loss, size, logs = criterion(label_smoothing=epsilon, sentence_avg=sentence_avg)(answers(), batch())
    assert size == logs["nsentences"] == logs["ntokens"] == 4
    expected = F.cross_entropy(LOGITS, CLASSES, label_smoothing=epsilon).item()
    assert loss.item() / size == pytest.approx(expected, rel=1e-6)
    shown = logged([logs])
    assert shown["loss"] == pytest.approx(expected / math.log(2), abs=1e-4)
    assert shown["nll_loss"] == pytest.approx(F.cross_entropy(LOGITS, CLASSES).item() / math.log(2), abs=1e-4)
    assert shown["accuracy"] == 50.0 and "token_accuracy" not in shown
    assert shown.get("share_nll", shown["loss"]) + shown.get("share_label_smoothing", 0) == pytest.approx(
        shown["loss"], abs=1e-4
    )


def test_what_is_not_a_number_is_not_right():
    logits = LOGITS.clone()
    logits[0] = math.nan  # its largest is class 0, which is the right one
    assert criterion()(answers(logits), batch())[2]["n_exact"] == 1
    assert criterion()(answers(), batch())[2]["n_exact"] == 2


def test_half_precision_logits_are_summed_in_float32():
    logits = (torch.randn(4000, 3) * 4).half()
    target = torch.randint(SPECIALS, SPECIALS + 3, (4000, 2))
    loss, *_ = criterion()(answers(logits), {"net_input": {}, "target": target})
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(
        F.cross_entropy(logits.double(), target[:, 0] - 4, reduction="sum").item(), rel=1e-4
    )


def test_accuracy_of_types_and_workers_that_add_up():
    types = torch.tensor([0, 1, 1, 0])
    evaluation = criterion().eval()
    logs = [evaluation(answers(LOGITS[rows]), batch(rows, type=types[rows]))[2] for rows in (slice(0, 1), slice(1, 4))]
    assert list(logs[0]) == list(logs[1])
    shown = logged(logs)
    assert (shown["accuracy"], shown["accuracy_t0"], shown["accuracy_t1"]) == (50.0, 50.0, 50.0)
    assert logged([logs[0]])["accuracy"] == 100.0 and "accuracy_t1" not in logged([logs[0]])
    summed = {key: sum(log[key] for log in logs) for key in logs[0]}
    assert Classification.logging_outputs_can_be_summed() and logged([summed]) == shown


def test_other_losses_are_weighted_and_orthogonality_has_its_own_weight():
    built = criterion(orthogonality_weight=0.5, aux_loss_weights='{"ponder": 0.03}')

    def answers_with_values(value_roles):
        assert value_roles == ("encoder",)
        logits, extra = answers(ponder=2.0)()
        # Three equal Values in each of two heads: ‖V̄V̄ᵀ − I‖² = 9 − 3.
        return logits, extra | {"values": {"encoder": [Values(torch.ones(4, 2, 3, 5), None)]}}

    answers_with_values.attention_roles = ("encoder",)
    loss, size, logs = built(answers_with_values, batch())
    plain = criterion()(answers(), batch())[0].item()
    assert loss.item() == pytest.approx(plain + size * (0.03 * 2 + 0.5 * 6), rel=1e-5)
    shown = logged([logs])
    assert (shown["ponder"], shown["orthogonality_encoder"]) == (2.0, pytest.approx(6.0, abs=1e-3))
    shares = {name: value for name, value in shown.items() if name.startswith("share_")}
    assert set(shares) == {"share_nll", "share_ponder", "share_orthogonality_encoder"}
    assert sum(shares.values()) == pytest.approx(shown["loss"], abs=2e-4) and shares["share_nll"] == shown["nll_loss"]


def test_the_log_says_what_is_in_percent(caplog):
    with caplog.at_level("INFO"):
        Classification.build_criterion(SGCriterionConfig(sentence_avg=False), TASK)
    assert caplog.messages == [
        "units: loss and its shares (share_*), bits per sentence; nll_loss, bits per sentence; accuracy, % of sentences"
    ]


def test_gradient_reaches_the_logits():
    logits = LOGITS.clone().requires_grad_()
    loss, _, logs = criterion()(answers(logits), batch())
    loss.backward()
    torch.testing.assert_close(logits.grad, LOGITS.softmax(-1) - F.one_hot(CLASSES, 3))
    assert not any(torch.is_tensor(value) and value.requires_grad for value in logs.values())


def test_model_that_shows_no_values():
    with pytest.raises(UsageError, match="--orthogonality-weight needs a model that shows its attentions' Values"):
        criterion(orthogonality_weight=1.0)(lambda: None, batch())


def test_task_without_classes():
    with pytest.raises(UsageError, match="--criterion classification needs classes: choose --task sg_classification"):
        Classification(SGCriterionConfig(sentence_avg=False), SimpleNamespace(target_dictionary=None))
