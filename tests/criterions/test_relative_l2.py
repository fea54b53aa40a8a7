"""The criterion of functions: by hand on four points, its units, grids and edges, other losses, workers."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("fairseq")

import numpy as np
import torch
from fairseq.logging import metrics

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.criterions.relative_l2 import RelativeL2, RelativeL2Config, derivative_error, inner_differences
from fairseq_sg.errors import UsageError
from helpers.fields import task_of

TARGET = torch.tensor([[1.0, 2.0, 2.0, 0.0], [0.0, 3.0, 0.0, 4.0]], dtype=torch.float64)  # norms 3 and 5
GRADIENT = torch.tensor([[2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 4.0, 3.0]], dtype=torch.float64)  # norms 2 and 5
PREDICTION = torch.tensor([[1.0, 2.0, 2.0, 3.0], [0.0, 3.0, 0.0, 4.0]])  # errors 3 and 0


def criterion(**options) -> RelativeL2:
    return RelativeL2(RelativeL2Config(**options), task_of())


def answers(prediction=PREDICTION, **losses):
    extra = {"aux_losses": {name: [torch.tensor(value)] for name, value in losses.items()}}
    return lambda a: (prediction, extra)


def batch(rows=slice(None), scale: float = 1.0, spacing: float = 0.25):
    target, gradient = scale * TARGET[rows], scale * GRADIENT[rows]
    inputs = {"a": torch.zeros_like(target)}
    return {"net_input": inputs, "target": target, "gradient": gradient, "ntokens": 4 * len(target), "spacing": spacing}


def logged(logs) -> dict:
    with metrics.aggregate() as values:
        RelativeL2.reduce_metrics(logs)
    return dict(values.get_smoothed_values())


def test_by_hand():
    """h = 1/4: (D û)_i = 2 (û_{i+1} − û_{i−1}), with û_4 = û_0: (−2, 2, 2, −2) and (−2, 0, 2, 0)."""
    loss, size, logs = criterion(h1_weight=0.1)(answers(), batch())
    first = math.sqrt(16 + 4 + 4 + 4) / 2
    second = math.sqrt(4 + 0 + 4 + 9) / 5
    weight = math.sqrt(0.1 * 0.25)
    assert size == 2 and logs["sample_size"] == logs["nsentences"] == 2
    assert loss.item() == pytest.approx(1 + 0 + weight * (first + second))
    expected = {
        "loss": loss.item() / 2, "relative_l2": 0.5, "h1": (first + second) / 2,
        "share_relative_l2": 0.5, "share_h1": weight * (first + second) / 2,
    }  # fmt: skip
    assert logged([logs]) == pytest.approx(expected, abs=1e-4)


def test_without_derivatives():
    loss, _, logs = criterion()(answers(), batch())
    assert loss.item() == pytest.approx(1.0) and "h1" not in logs
    assert logged([logs]) == {"loss": 0.5, "relative_l2": 0.5}


def test_the_weight_is_that_of_the_batchs_own_grid():
    """√(γ h): with four times the points, the same derivatives have half the share."""
    shares = []
    for points in (64, 256):
        x = torch.arange(points, dtype=torch.float64) / points
        target, gradient = torch.sin(2 * math.pi * x), 2 * math.pi * torch.cos(2 * math.pi * x)
        sample = {
            "net_input": {"a": target[None]}, "target": target[None], "gradient": gradient[None],
            "ntokens": points, "spacing": 1 / points,
        }  # fmt: skip
        _, _, logs = criterion(h1_weight=0.1)(answers(torch.zeros(1, points)), sample)
        assert logs["h1"].item() == pytest.approx(1)
        shares.append(logs["share_h1"].item())
    assert shares == pytest.approx([math.sqrt(0.1 / 64), math.sqrt(0.1 / 256)])


@pytest.mark.parametrize("scale", [1e-6, 3.0, 1e5])
def test_errors_are_relative(scale):
    plain = criterion(h1_weight=0.1)(answers(), batch())[0]
    scaled = criterion(h1_weight=0.1)(answers(PREDICTION.double() * scale), batch(scale=scale))[0]
    assert scaled.item() == pytest.approx(plain.item())


def test_the_energy_error_of_two_dimensions_in_numpy():
    """Over inner points; numpy's second-order gradient is the central difference there."""
    random = np.random.RandomState(1)
    a, u = np.exp(random.standard_normal((2, 3, 6, 6)))
    gradient, h = random.standard_normal((3, 6, 6, 2)), 0.2
    expected = []
    for i in range(3):
        differences = np.stack(np.gradient(u[i], h), axis=-1)
        inner = (slice(1, -1),) * 2
        error = ((a[i][..., None] * (gradient[i] - differences)) ** 2)[inner].mean()
        expected.append(math.sqrt(error / (2 * (a[i][..., None] * gradient[i] ** 2)[inner].mean())))
    tensors = (torch.tensor(x) for x in (u, gradient, a))
    torch.testing.assert_close(derivative_error(*tensors, h), torch.tensor(expected, dtype=torch.float64))


def test_the_loss_of_two_dimensions():
    """Of coefficients a, which are the model's input."""
    a, prediction, target = torch.rand(3, 2, 6, 6, dtype=torch.float64) + 1
    gradient, h = torch.randn(2, 6, 6, 2, dtype=torch.float64), 0.2
    sample = {"net_input": {"a": a}, "target": target, "gradient": gradient, "ntokens": 72, "spacing": h}
    loss, size, logs = RelativeL2(RelativeL2Config(h1_weight=0.5), task_of(2))(answers(prediction), sample)
    relative = [((prediction[i] - target[i]).square().sum() / target[i].square().sum()).sqrt() for i in range(2)]
    derivatives = derivative_error(prediction, gradient, a, h).sum()
    torch.testing.assert_close(loss, sum(relative) + math.sqrt(0.5 * h) * derivatives)
    assert size == 2 and logs["h1"] == derivatives


def test_differences_are_exact_for_quadratic_functions():
    x, y = torch.meshgrid(*[torch.linspace(0, 1, 5, dtype=torch.float64)] * 2, indexing="ij")
    found = inner_differences((x**2 + 3 * x * y)[None], 0.25)[0]
    expected = torch.stack([2 * x + 3 * y, 3 * x], dim=-1)[1:-1, 1:-1]
    torch.testing.assert_close(found, expected)


def test_gradients():
    prediction = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: criterion(h1_weight=0.5)(answers(p), batch())[0], (prediction,))


def test_the_gradient_is_zero_where_the_energy_error_is():
    """The root of 0 has none."""
    u = torch.rand(2, 6, 6, dtype=torch.float64, requires_grad=True)
    gradient = torch.zeros(2, 6, 6, 2, dtype=torch.float64)
    gradient[:, 1:-1, 1:-1] = inner_differences(u.detach(), 0.2)
    derivative_error(u, gradient, torch.ones_like(u), 0.2).sum().backward()
    assert u.grad.eq(0).all()


def test_workers_add_up():
    whole = criterion(h1_weight=0.1)(answers(), batch())[2]
    parts = [criterion(h1_weight=0.1)(answers(PREDICTION[i : i + 1]), batch(slice(i, i + 1)))[2] for i in range(2)]
    assert logged(parts) == pytest.approx(logged([whole]))


def test_losses_of_layers_are_added():
    model = answers(balance=0.5)
    loss, _, logs = criterion(aux_loss_weights='{"balance": 2}')(model, batch())
    assert loss.item() == pytest.approx(1 + 2 * 2 * 0.5)
    assert logged([logs])["balance"] == 0.5


def test_refusals():
    with pytest.raises(UsageError, match="choose --task sg_operator"):
        RelativeL2(RelativeL2Config(), object())
    with pytest.raises(UsageError, match="--h1-weight needs gradients of the targets"):
        RelativeL2(RelativeL2Config(h1_weight=0.1), task_of(gradient=False))
