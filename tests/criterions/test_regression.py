"""The criterion of numbers: against a batch computed by hand, loops, other losses, workers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq.logging import metrics

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.criterions.regression import Regression, RegressionConfig
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention import Values
from fairseq_sg.modules.losses import Statistic
from helpers.prompts import build

TASK = SimpleNamespace(target_dictionary=None, unit=2.0)
TARGET = torch.tensor([[1.0, 2.0], [0.0, -1.0], [4.0, 0.0]], dtype=torch.float64)  # (B, P)
#: Of two loops (2, B, P): errors 1 4, 1 1, 16 1, and 0 0, 0 4, 4 0.
PREDICTIONS = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [[1.0, 2.0], [0.0, 1.0], [2.0, 0.0]]])


def criterion(**options) -> Regression:
    return Regression(RegressionConfig(**options), TASK)


def answers(predictions=PREDICTIONS, **losses):
    return lambda: (predictions, {"aux_losses": {k: [torch.tensor(v)] for k, v in losses.items()}})


def batch(rows=slice(None)):
    target = TARGET[rows]
    return {"net_input": {}, "target": target, "ntokens": 3 * len(target)}


def logged(logs) -> dict:
    with metrics.aggregate() as values:
        Regression.reduce_metrics(logs)
    return dict(values.get_smoothed_values())


def test_by_hand():
    loss, size, logs = criterion()(answers(), batch())
    assert (size, logs["nsentences"], logs["sample_size"]) == (3, 3, 3)
    assert loss.item() == pytest.approx((5 + 2 + 17 + 0 + 4 + 4) / 4 / 2)
    mean = 32 / 4 / 2 / 3
    shown = logged([logs])
    assert shown == pytest.approx(
        {"loss": mean, "mse": mean, "mse_last": 4 / 3 / 2, "mse_last_mean": (6 + 4) / 2 / 3 / 2}, abs=1e-6
    )


def test_loss_of_the_last_loop():
    loss, _, logs = criterion(loop_loss="last")(answers(), batch())
    assert loss.item() == pytest.approx((0 + 4 + 4) / 2 / 2)
    assert logged([logs])["mse_last_mean"] == logged([criterion()(answers(), batch())[2]])["mse_last_mean"]


def test_one_loop_has_one_error():
    shown = logged([criterion()(answers(PREDICTIONS[:1]), batch())[2]])
    assert shown["mse_last"] == shown["mse_last_mean"] == pytest.approx((4 + 1 + 1) / 3 / 2)


def test_batches_and_workers_add_up():
    parts = [slice(0, 1), slice(1, 3)]
    built = criterion()
    found = [built(answers(PREDICTIONS[:, rows]), batch(rows)) for rows in parts]
    whole, size, logs = built(answers(), batch())
    assert sum(loss for loss, *_ in found).item() == pytest.approx(whole.item()) and sum(n for _, n, _ in found) == size
    assert logged([log for *_, log in found]) == pytest.approx(logged([logs]))
    summed = {key: sum(log[key] for *_, log in found) for key in logs}
    assert Regression.logging_outputs_can_be_summed() and logged([summed]) == pytest.approx(logged([logs]))


def test_calls_are_weighed_by_their_prompts():
    """A validation reduces the logs of each batch by themselves, and the last batch is smaller."""
    logs = [criterion()(answers(PREDICTIONS[:, rows]), batch(rows))[2] for rows in (slice(0, 1), slice(1, 3))]
    with metrics.aggregate() as values:
        for log in logs:
            Regression.reduce_metrics([log])
    whole = logged([criterion()(answers(), batch())[2]])
    assert dict(values.get_smoothed_values()) == pytest.approx(whole, abs=2e-6)


def test_gradient_is_that_of_the_mean():
    predictions = PREDICTIONS.double().requires_grad_()
    loss, _, logs = criterion()(answers(predictions), batch())
    loss.backward()
    torch.testing.assert_close(predictions.grad, 2 * (predictions.detach() - TARGET) / (4 * 2))
    assert not any(torch.is_tensor(value) and value.requires_grad for value in logs.values())


def test_half_precision_errors_are_float64():
    predictions = (torch.randn(1, 500, 9) * 8).half()
    target = torch.randn(500, 9, dtype=torch.float64) * 8
    sample = {"net_input": {}, "target": target, "ntokens": 1}
    loss, *_ = criterion()(answers(predictions), sample)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(((predictions.double() - target) ** 2).mean(-1).sum().item() / 2)


def test_other_losses_have_shares():
    built = criterion(orthogonality_weight=0.5, orthogonality_roles="decoder", aux_loss_weights='{"ponder": 0.03}')

    def model(value_roles):
        assert value_roles == ("decoder",)
        predictions, extra = answers(ponder=2.0)()
        extra["aux_losses"]["watched"] = [Statistic(torch.tensor(7.0))]
        # Three equal Values in each of two heads: ‖V̄V̄ᵀ − I‖² = 9 − 3.
        return predictions, extra | {"values": {"decoder": [Values(torch.ones(3, 2, 3, 5), None)]}}

    model.attention_roles = ("decoder",)
    loss, size, logs = built(model, batch())
    plain = criterion()(answers(), batch())[0].item()
    assert loss.item() == pytest.approx(plain + size * (0.03 * 2 + 0.5 * 6), rel=1e-5)
    shown = logged([logs])
    assert (shown["ponder"], shown["watched"]) == (2.0, 7.0)
    shares = {name: value for name, value in shown.items() if name.startswith("share_")}
    assert set(shares) == {"share_mse", "share_ponder", "share_orthogonality_decoder"}
    assert sum(shares.values()) == pytest.approx(shown["loss"], abs=2e-4)
    assert shown["mse"] == pytest.approx(plain / size, abs=1e-5)


def test_the_log_says_the_unit(caplog):
    with caplog.at_level("INFO"):
        Regression.build_criterion(RegressionConfig(), TASK)
    assert caplog.messages == ["units: loss, its shares (share_*) and mse*, squared error divided by 2"]


def test_the_last_loop_is_that_of_a_looped_model():
    looped, plain = (build(decoder_layers=1, depth=depth) for depth in ("looped", "separate"))
    for model, loop_loss in ((looped, "last"), (looped, "all"), (plain, "all")):
        criterion(loop_loss=loop_loss).check_training(model)
    with pytest.raises(UsageError, match="--loop-loss last is for a model with loops: add --depth looped"):
        criterion(loop_loss="last").check_training(plain)


def test_wrong_options():
    with pytest.raises(UsageError, match="--loop-loss is 'first': choose from all, last"):
        criterion(loop_loss="first")
    with pytest.raises(UsageError, match="--criterion regression needs numbers: choose --task sg_regression"):
        Regression(RegressionConfig(), SimpleNamespace(target_dictionary=None))
    with pytest.raises(UsageError, match="--aux-loss-weights names ponder"):
        criterion(aux_loss_weights='{"ponder": 1}')(answers(), batch())
