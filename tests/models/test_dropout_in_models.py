"""What makes dropout fast on a CPU changes nothing: whole models beside the same ones in plain operations, with the
same masks.
"""

from __future__ import annotations

import pytest

pytest.importorskip("fairseq")

import torch

from fairseq_sg.modules.attention import softmax
from fairseq_sg.modules.cpu.dropout import Dropout, dropout_mask
from fairseq_sg.modules.cpu.softmax import SHORTEST
from helpers.models import attention_options, build, pair

MODELS = {
    "softmax": {"attention_dropout": 0.2},
    "softmax, shared": {"attention_dropout": 0.2, "depth": "shared"},
    "relative": {"attention_dropout": 0.2, **attention_options("relative")},
    "linear": attention_options("linear"),
    "router": {"encoder_attention": "geometric", "encoder_update": "copy_gate"},
}


def trained(model):
    """Output and gradients."""
    source, target = pair()
    model.zero_grad()
    torch.manual_seed(5)
    out = model(source, None, target)[0]
    torch.manual_seed(4)
    (out * torch.randn(out.shape, dtype=out.dtype)).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def dropped(x, p):
    return x * dropout_mask(x, p)


def plain_attention(q, k, v, bias, hidden, dropout_p, scale):
    logits = q @ k.transpose(-1, -2) * scale + (0 if bias is None else bias)
    if hidden is not None:
        logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min / 2)
    weights = logits.softmax(-1)
    # The mask is drawn for as many keys as the fast softmax has.
    keys = weights.size(-1)
    mask = dropout_mask(weights.new_empty(*weights.shape[:-1], max(keys, SHORTEST)), dropout_p)[..., :keys]
    return (weights * mask) @ v


@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_plain_operations(name, monkeypatch):
    model = build(dropout=0.3, activation_dropout=0.25, **MODELS[name])
    out, gradients = trained(model)
    assert not torch.allclose(out, trained(model.eval())[0])
    monkeypatch.setattr(Dropout, "of_relu", lambda self, x: dropped(x.relu(), self.p))
    monkeypatch.setattr(Dropout, "add_to", lambda self, x, update: x + dropped(update, self.p))
    monkeypatch.setattr(softmax, "closed_form_softmax", plain_attention)
    expected, expected_gradients = trained(model.train())
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[parameter], rtol=1e-9, atol=1e-11)


def test_hooks_on_dropout_fire_in_training_and_change_nothing():
    model = build(dropout=0.3, activation_dropout=0.25, encoder_attention="relative")
    out, gradients = trained(model)
    dropouts, fired = {name: m for name, m in model.named_modules() if isinstance(m, Dropout)}, set()
    for name, module in dropouts.items():
        module.register_forward_hook(lambda *_, name=name: fired.add(name))
    hooked, hooked_gradients = trained(model)
    assert fired == set(dropouts) and any(name.endswith("ffn.dropout") for name in fired)
    torch.testing.assert_close(hooked, out, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(hooked_gradients, gradients, rtol=1e-9, atol=1e-11)
