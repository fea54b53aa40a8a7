"""``--bf16`` and ``--fp16`` as they reach a model, parameters and all, and ``--autocast``.

Every attention, feature map, position, feedforward layer, update and depth is beside itself in float32, in training
and token by token.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import pytest

pytest.importorskip("fairseq")

import torch

from fairseq_sg.ops import orthogonality_loss
from helpers.models import MODELS, PAD, model_of, pair

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def trained(model, autocast: AbstractContextManager = nullcontext()):
    """The mean log-probability of a symbol, the losses' sum, and the gradients by name; all are finite."""
    source, target = pair()
    torch.manual_seed(3)
    with autocast:
        out, extra = model(source, None, target, value_roles=("encoder", "decoder", "cross"))
        orthogonality = [orthogonality_loss(v, padding_mask=p) for found in extra["values"].values() for v, p in found]
        emitted = [x.sum() for values in extra["aux_losses"].values() for x in values if torch.is_tensor(x)]
    emitted += orthogonality
    expected = autocast.fast_dtype if isinstance(autocast, torch.autocast) else next(model.parameters()).dtype
    assert out.dtype == expected and emitted
    loss = out.float().log_softmax(-1)[target.ne(PAD)][:, 4].mean()
    (loss + sum(emitted)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(grad.isfinite().all() for grad in gradients.values())
    return loss.item(), sum(emitted).item(), gradients


def assert_same_but_for_rounding(gradients, expected, tolerance):
    """All gradients as one vector. A sign that rounding changes before a ReLU moves single ones by more."""
    assert gradients.keys() == expected.keys()
    found, there = (torch.cat([g[name].float().flatten() for name in expected]) for g in (gradients, expected))
    assert (found - there).norm() < tolerance * there.norm()


@HALF
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_float32_but_for_rounding(name, dtype, monkeypatch):
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    model = model_of(name)
    half = copy.deepcopy(model).to(dtype)
    (loss, emitted, expected), (found, also, gradients) = trained(model), trained(half)
    tolerance = 16 * torch.finfo(dtype).eps
    assert found == pytest.approx(loss, rel=tolerance) and also == pytest.approx(emitted, rel=tolerance, abs=tolerance)
    assert_same_but_for_rounding(gradients, expected, 0.3)


@pytest.mark.parametrize("name", MODELS)
def test_autocast_is_float32_but_for_rounding(name, monkeypatch):
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    model = model_of(name)
    (loss, emitted, expected), (found, also, gradients) = (
        trained(copy.deepcopy(model), way) for way in (nullcontext(), torch.autocast("cpu", torch.bfloat16))
    )
    tolerance = 16 * torch.finfo(torch.bfloat16).eps
    assert found == pytest.approx(loss, rel=tolerance) and also == pytest.approx(emitted, rel=tolerance, abs=tolerance)
    assert found != loss
    assert_same_but_for_rounding(gradients, expected, 0.5)


@HALF
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_decoding_token_by_token_equals_one_pass_but_for_rounding(name, dtype):
    model, (source, target) = model_of(name).to(dtype).eval(), pair()
    encoded = model.encoder(source, None)
    expected = model.decoder(target, encoder_out=encoded)[0]
    state: dict = {}
    for length in range(1, target.size(1) + 1):
        found = model.decoder(target[:, :length], encoder_out=encoded, incremental_state=state)[0][:, -1]
        real = target[:, length - 1].ne(PAD)
        # One addition in another order may round otherwise, and the layers after it magnify that.
        atol = 16 * torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(found[real], expected[real, length - 1], rtol=0, atol=atol)
