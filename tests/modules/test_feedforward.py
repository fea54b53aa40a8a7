"""The dense feedforward layer: formula, initialization, dropout, options and their errors; how all kinds are built."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY, DenseFeedForward, build_feedforward


def config(**options):
    sizes = dict(encoder_embed_dim=6, encoder_ffn_embed_dim=10, decoder_embed_dim=8, decoder_ffn_embed_dim=14)
    sizes |= dict(encoder_layers=3, decoder_layers=5, pre_norm=False, loops=1)
    return SimpleNamespace(
        **(sizes | dict(activation_dropout=0.1, ffn_init="reference", ffn_activation="relu") | options)
    )


def test_formula():
    """Vaswani et al. 2017, eq. 2, one number at a time."""
    module = DenseFeedForward(3, 5).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    w1, b1, w2, b2 = (p.detach() for p in (module.fc1.weight, module.fc1.bias, module.fc2.weight, module.fc2.bias))
    got = module(x)
    for i in range(2):
        for n in range(4):
            hidden = [max(0.0, sum(w1[h, c] * x[i, n, c] for c in range(3)).item() + b1[h].item()) for h in range(5)]
            for c in range(3):
                expected = sum(w2[c, h].item() * hidden[h] for h in range(5)) + b2[c].item()
                assert got[i, n, c].item() == pytest.approx(expected, rel=1e-12)


def test_any_leading_shape_and_losses_on_request():
    module = DenseFeedForward(3, 5)
    x = torch.randn(2, 4, 7, 3)
    out, losses = module(x, padding_mask=torch.zeros(2, 4, 7, dtype=torch.bool), return_losses=True)
    assert torch.equal(out, module(x)) and losses == {} and out.shape == x.shape
    torch.testing.assert_close(module(x[0, 1, 2]), out[0, 1, 2])


@pytest.mark.parametrize("side,dim,ffn_dim", [("encoder", 6, 10), ("decoder", 8, 14)])
def test_built_with_the_sizes_and_options_of_its_side(side, dim, ffn_dim):
    module = build_feedforward("dense", config(activation_dropout=0.3), side)
    assert (module.fc1.in_features, module.fc1.out_features) == (dim, ffn_dim) == (module.dim, module.ffn_dim)
    assert (module.fc2.in_features, module.fc2.out_features) == (ffn_dim, dim)
    assert module.dropout.p == 0.3


def test_names():
    names = {"dense", "topk", "pkm", "noisy_topk", "switch", "s_base", "sigma_moe"}
    assert set(FEEDFORWARD_REGISTRY) == names and DenseFeedForward.registered_name == "dense"
    choices = ", ".join(sorted(names))
    with pytest.raises(
        ValueError, match=rf"unknown feedforward layer 'moe' \(--encoder-ffn, --decoder-ffn\): choose from {choices}"
    ):
        build_feedforward("moe", config(), "encoder")


def test_wrong_initialization():
    with pytest.raises(ValueError, match="--ffn-init is 'zeros': choose from reference, scaled, torch"):
        build_feedforward("dense", config(ffn_init="zeros"), "encoder")


def uniform_bound(weight) -> float:
    """The bound of a uniform distribution, from its largest number; its spread has to fit a uniform one, too."""
    bound = weight.detach().abs().max().item()
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    return bound


@pytest.mark.parametrize(
    "init,first,second",
    [
        ("reference", math.sqrt(2) * math.sqrt(6 / (100 + 300)), math.sqrt(6 / (100 + 300))),
        ("torch", 1 / math.sqrt(100), 1 / math.sqrt(300)),
    ],
)
def test_initialization(init, first, second):
    module = DenseFeedForward(100, 300, ffn_init=init)
    assert uniform_bound(module.fc1.weight) == pytest.approx(first, rel=0.01)
    assert uniform_bound(module.fc2.weight) == pytest.approx(second, rel=0.01)
    for linear, fan_in in ((module.fc1, 100), (module.fc2, 300)):  # biases are PyTorch's either way
        bound = linear.bias.detach().abs().max().item()
        assert 0.9 / math.sqrt(fan_in) < bound <= 1 / math.sqrt(fan_in)


@pytest.mark.parametrize(
    "pre_norm,side,loops,layers",
    [(True, "encoder", 1, 3), (True, "decoder", 1, 5), (True, "encoder", 4, 12), (False, "decoder", 1, 1)],
)
def test_scaled_initialization_knows_the_layers_of_a_pre_norm_model(pre_norm, side, loops, layers):
    sizes = {f"{side}_embed_dim": 200, f"{side}_ffn_embed_dim": 800}
    module = build_feedforward("dense", config(ffn_init="scaled", pre_norm=pre_norm, loops=loops, **sizes), side)
    for linear, fan_in in ((module.fc1, 200), (module.fc2, 800)):
        std = math.sqrt(2 / (layers * fan_in))
        assert linear.weight.std().item() == pytest.approx(std, rel=0.01)
        assert linear.weight.abs().max().item() <= 2 * std / 0.87962  # cut off at two deviations of the uncut one
        assert (linear.bias == 0).all()


def test_dropout_is_after_the_activation():
    module = DenseFeedForward(4, 2000, activation_dropout=0.5)
    with torch.no_grad():
        module.fc1.weight.zero_()
        module.fc1.bias.fill_(1.0)
        module.fc2.weight.fill_(1.0)
        module.fc2.bias.fill_(0.25)
    x = torch.randn(50, 4)
    assert (module.eval()(x) == 2000.25).all()
    kept = (module.train()(x)[:, 0] - 0.25) / 2  # each hidden unit gives 2 or 0
    assert kept.mean().item() == pytest.approx(1000, rel=0.03) and kept.std().item() == pytest.approx(
        math.sqrt(500), rel=0.4
    )
    with torch.no_grad():
        module.dropout.p = 1.0
        assert (module(x) == 0.25).all()


@pytest.mark.parametrize("dropout", [None, 0.0])
def test_no_dropout(dropout):
    module = DenseFeedForward(4, 8, activation_dropout=dropout).train()
    x = torch.randn(5, 4)
    assert torch.equal(module(x), module(x)) and torch.equal(module(x), module.eval()(x))
