"""Mixtures of experts against their equations, token by token in float64; routing, losses, statistics, options."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY, DenseFeedForward, MixtureOfExperts, build_feedforward
from fairseq_sg.modules.feedforward.moe import entropy_loss
from fairseq_sg.modules.feedforward.s_base import sinkhorn
from fairseq_sg.modules.losses import Statistic
from helpers.configs import config_of

DIM, EXPERTS, SIZE = 6, 5, 4
VARIANTS = {
    "sigma_moe": ("sigma_moe", {}),
    "softmax_before_topk": ("sigma_moe", {"moe_selection": "softmax_before_topk"}),
    "softmax_after_topk": ("sigma_moe", {"moe_selection": "softmax_after_topk"}),
    "switch": ("switch", {}),
    "s_base": ("s_base", {}),
    "noisy_topk": ("noisy_topk", {}),
}
variants = pytest.mark.parametrize("variant", VARIANTS)
STATISTICS = {"experts_effective", "experts_dead", "experts_largest", "experts_token_entropy"}


def layer(variant: str, k=2, seed=0, spread=True, **options) -> MixtureOfExperts:
    """A float64 layer without dropout of any kind; with ``spread``, its tokens have strong opinions on the experts."""
    name, own = VARIANTS[variant]
    torch.manual_seed(seed)
    module = FEEDFORWARD_REGISTRY[name](
        DIM,
        EXPERTS * SIZE,
        **({"moe_experts": EXPERTS, "moe_k": k, "moe_expert_dropout": 0.0} | own | options),
    ).double()
    if spread:
        nn.init.normal_(module.w3)
    return module


def tokens(*shape):
    torch.manual_seed(1)
    return torch.randn(*(shape or (11,)), DIM, dtype=torch.float64)


def softmax(z):
    largest = max(z)
    powers = [math.exp(v - largest) for v in z]
    return [p / sum(powers) for p in powers]


def weights_of(variant, z, k):
    """expert -> weight of one token outside training, from the logits as plain numbers."""
    best = sorted(range(len(z)), key=lambda e: z[e], reverse=True)[:k]
    if variant in ("sigma_moe", "s_base"):
        return {e: 1 / (1 + math.exp(-z[e])) for e in best}
    if variant in ("softmax_before_topk", "switch"):
        return {e: softmax(z)[e] for e in best}
    return dict(zip(best, softmax([z[e] for e in best])))


def output(module, x, weights):
    """Σ_e s[e] W₂ᵉ ReLU(W₁ᵉ x) (7.11) for one token."""
    y = torch.zeros(DIM, dtype=torch.float64)
    for e, s in weights.items():
        y = y + s * ((x @ module.w1[e]).clamp(min=0) @ module.w2[e])
    return y


@variants
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("implementation", ["naive", "blocks", "grouped"])
def test_equation(variant, k, implementation, monkeypatch):
    monkeypatch.setenv("FAIRSEQ_SG_IMPLEMENTATION", implementation)
    module = layer(variant, k).eval()
    x = tokens(3, 4)
    got = module(x)
    for token, y in zip(x.flatten(0, 1), got.flatten(0, 1)):
        z = [float(row @ token) for row in module.w3.detach()]
        torch.testing.assert_close(y, output(module, token, weights_of(variant, z, k)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ("s_base", "noisy_topk")])
def test_training_without_dropout_is_the_same_function(variant):
    module = layer(variant)
    assert torch.equal(module.train()(tokens()), module.eval()(tokens()))


@variants
@pytest.mark.parametrize("training", [False, True])
def test_gradients(variant, training):
    """With fixed experts, the output and every loss are smooth in x and in all weights."""
    module = layer(variant).train(training)
    names = [name for name, _ in module.named_parameters()]

    def function(x, *parameters):
        torch.manual_seed(3)
        y, emitted = torch.func.functional_call(
            module, dict(zip(names, parameters)), (x,), {"padding_mask": mask, "return_losses": True}
        )
        return (y, *(v for v in emitted.values() if not isinstance(v, Statistic)))

    mask = torch.tensor([False, True, False, False])
    inputs = [t.detach().requires_grad_() for t in (tokens(4), *module.parameters())]
    # A random projection of the derivatives, which a wrong one changes; all of them take ten times as long.
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def test_all_experts_with_equal_scores_are_the_dense_layer():
    """σ(0) = ½ for every expert: y = ½ W₂ ReLU(W₁ x), the experts side by side."""
    module = layer("sigma_moe", k=EXPERTS).eval()
    nn.init.zeros_(module.w3)
    dense = DenseFeedForward(DIM, EXPERTS * SIZE).double()
    with torch.no_grad():
        dense.fc1.weight.copy_(module.w1.transpose(1, 2).flatten(0, 1))
        dense.fc2.weight.copy_(module.w2.flatten(0, 1).t())
        nn.init.zeros_(dense.fc1.bias)
        nn.init.zeros_(dense.fc2.bias)
    x = tokens(3, 4)
    torch.testing.assert_close(2 * module(x), dense(x), rtol=1e-10, atol=1e-12)


@variants
def test_experts_that_no_token_selects_have_no_gradient(variant):
    module = layer(variant, k=2, moe_regularization=0.0).train()
    with torch.no_grad():  # all tokens like the first two experts best
        module.w3.zero_()
        module.w3[0, 0], module.w3[1, 0] = 60.0, 50.0
    x = tokens()
    x[:, 0] = 1 + x[:, 0].abs()
    if variant == "s_base":
        module.eval()
    module(x).square().sum().backward()
    for weight in (module.w1, module.w2):
        assert (weight.grad[:1] != 0).any() and (weight.grad[2:] == 0).all()


# Padding.


@variants
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("side", ["left", "right", "row", "all"])
def test_padding_is_neither_routed_nor_counted(variant, training, side):
    """Garbage there changes no output, no loss, no statistic and no gradient; its own output is 0."""
    module = layer(variant, k=2).train(training)
    x, mask = tokens(3, 5), torch.zeros(3, 5, dtype=torch.bool)
    mask[1, : 2 if side == "left" else None] = side in ("left", "row")
    mask[2, 3:] = side == "right"
    mask |= side == "all"

    def run(x, mask):
        module.zero_grad()
        torch.manual_seed(2)
        x = x.clone().requires_grad_()
        if variant == "noisy_topk":
            module.logits = lambda flat: MixtureOfExperts.logits(module, flat)  # noise is drawn for padding, too
        y, emitted = module(x, padding_mask=mask, return_losses=True)
        losses = [v for v in emitted.values() if not isinstance(v, Statistic)]
        (y.square().sum() + sum(losses)).backward()
        values = {name: getattr(v, "value", v).detach() for name, v in emitted.items()}
        return y.detach(), values, [p.grad for p in module.parameters() if p.grad is not None], x.grad

    y, values, grads, grad_x = run(x, mask)
    assert (y[mask] == 0).all() and (grad_x[mask] == 0).all()
    for garbage in (1e9, math.nan):
        again = run(x.masked_fill(mask.unsqueeze(-1), garbage), mask)
        assert torch.equal(again[0], y) and torch.equal(again[3], grad_x) and again[1] == values
        assert all(torch.equal(a, b) for a, b in zip(again[2], grads))
    if side != "all":  # the same as without the padded tokens
        alone, alone_values, alone_grads, _ = run(x[~mask], torch.zeros(int((~mask).sum()), dtype=torch.bool))
        torch.testing.assert_close(y[~mask], alone, rtol=1e-10, atol=1e-12)
        assert {n: v.item() for n, v in values.items()} == pytest.approx({n: v.item() for n, v in alone_values.items()})
        for a, b in zip(grads, alone_grads):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    else:
        assert all((g == 0).all() for g in grads) and all(v.isfinite() for v in values.values())


@variants
def test_routing_does_not_know_the_rest_of_the_batch(variant):
    module = layer(variant).eval()
    x = tokens(20)
    together, order = module(x), torch.randperm(20)
    torch.testing.assert_close(module(x[order]), together[order], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.cat([module(token[None]) for token in x]), together, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("variant", ["sigma_moe", "softmax_after_topk"])
def test_no_tokens(variant):
    module = layer(variant).train()
    y, emitted = module(tokens(0), return_losses=True)
    assert y.shape == (0, DIM) and all(getattr(v, "value", v).isfinite() for v in emitted.values())


# Selection in training.


def test_expert_dropout_leaves_out_draws_below_its_probability(monkeypatch):
    """Of numbers from 0 to below 1, as in the released code: a share of exactly δ."""
    module = layer("sigma_moe", moe_expert_dropout=0.5).train()
    draws = torch.tensor([[0.0, 0.25, 0.5, 0.75]])
    monkeypatch.setattr(torch, "rand_like", lambda logits: draws)
    assert module.kept(draws).tolist() == [[False, False, True, True]]


def test_expert_dropout_sets_scores_to_zero_and_scales_nothing():
    """(7.21): a dropped expert is not selected, the others keep their scores; the mask is drawn for every token."""
    module = layer("sigma_moe", k=1, moe_expert_dropout=0.3).train()
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]], dtype=torch.float64).expand(4000, 5)
    chosen = module.select(logits, None)
    share = torch.bincount(chosen.experts[:, 0], minlength=5) / 4000
    expected = torch.tensor([0.7 * 0.3**e for e in range(5)])
    torch.testing.assert_close(share[1:4], expected[1:4], rtol=0.2, atol=0.01)
    weights = chosen.weights[:, 0]
    kept = weights > 0
    assert torch.equal(weights[kept], logits.sigmoid().gather(1, chosen.experts)[:, 0][kept])
    assert (~kept).double().mean().item() == pytest.approx(0.3**5, abs=0.005)  # all of them dropped
    assert torch.equal(module.eval().select(logits, None).experts, torch.zeros(4000, 1, dtype=torch.long))


@variants
def test_expert_that_is_dropped_has_weight_zero_where_fewer_than_k_are_left(variant):
    module = layer(variant, k=EXPERTS, moe_expert_dropout=0.5).train()
    chosen = module.select(torch.randn(300, EXPERTS, dtype=torch.float64), None)
    dropped = (chosen.weights == 0).double().mean().item()
    assert dropped == pytest.approx(0.5, abs=0.06) and chosen.weights.isfinite().all()
    if variant in ("softmax_after_topk", "noisy_topk"):
        total = chosen.weights.sum(1)
        assert ((total - 1).abs() < 1e-12).logical_or(total == 0).all()
        assert (total == 0).any()  # of 300 tokens, 9 have lost all five experts


def test_standard_dropout_is_on_the_scored_hidden_units():
    module = layer("sigma_moe", k=EXPERTS, moe_dropout=0.5).train()
    x = tokens(1).expand(4000, DIM)
    exact = module.eval()(x[:1])
    torch.testing.assert_close(module.train()(x).mean(0, keepdim=True), exact, rtol=0.1, atol=0.1)
    assert module(x).std(0).min() > 0
    assert (module(x) == 0).double().mean() < 0.1  # on the output, half would be 0


def test_sinkhorn_balances_real_tokens():
    torch.manual_seed(0)
    logits = 2 * torch.randn(40, 5, dtype=torch.float64) + torch.tensor([3.0, 0, 0, 0, -3])
    real = torch.ones(40, dtype=torch.bool)
    real[5:15] = False
    for mask in (None, real):
        count = 40 if mask is None else 30
        plan = sinkhorn(logits, mask, iterations=200).exp()
        seen = plan if mask is None else plan[mask]
        torch.testing.assert_close(seen.sum(0), torch.full((5,), count / 5, dtype=torch.float64), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(seen.sum(1), torch.ones(count, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(sinkhorn(logits, None, 3), sinkhorn(logits, real, 3))
    torch.testing.assert_close(sinkhorn(logits, real, 3)[real], sinkhorn(logits[real], None, 3))


@pytest.mark.parametrize("sinkhorn_variant,sign", [("textbook", 1), ("released", -1)])
def test_s_base_in_training_selects_by_the_plan(sinkhorn_variant, sign):
    """The iteration number by number: b_t, then a_e, three times; log R = z + a + b."""
    module = layer("s_base", k=2, s_base_sinkhorn=sinkhorn_variant).train()
    x = tokens(8)
    z = (x @ module.w3.t()).tolist()
    a, b = [0.0] * EXPERTS, [0.0] * 8
    for _ in range(3):
        b = [-math.log(sum(math.exp(z[t][e] + sign * a[e]) for e in range(EXPERTS))) for t in range(8)]
        a = [
            math.log(8 / EXPERTS) - math.log(sum(math.exp(z[t][e] + sign * b[t]) for t in range(8)))
            for e in range(EXPERTS)
        ]
    differs = 0
    for t, y in enumerate(module(x)):
        plan = [z[t][e] + a[e] + b[t] for e in range(EXPERTS)]
        best = sorted(range(EXPERTS), key=lambda e: plan[e], reverse=True)[:2]
        differs += set(best) != set(weights_of("s_base", z[t], 2))
        weights = {e: 1 / (1 + math.exp(-z[t][e])) for e in best}
        torch.testing.assert_close(y, output(module, x[t], weights), rtol=1e-10, atol=1e-12)
    assert differs  # from what it selects outside training


def test_the_released_s_base_balances_each_sequence_by_itself():
    """(N, B, d_model), time first: every sequence has the output that it has alone, with padding too."""
    released, textbook = (layer("s_base", k=2, s_base_sinkhorn=kind).train() for kind in ("released", "textbook"))
    x = 3 * tokens(24).view(8, 3, DIM)
    mask = torch.zeros(8, 3, dtype=torch.bool)
    mask[5:, 1] = True
    for padding in (None, mask):
        whole, mixed = (module(x, padding_mask=padding) for module in (released, textbook))
        different = 0
        for sequence in range(3):
            length = 8 if padding is None or sequence != 1 else 5
            alone = released(x[:length, sequence : sequence + 1])
            torch.testing.assert_close(whole[:length, sequence : sequence + 1], alone)
            different += not torch.allclose(mixed[:length, sequence : sequence + 1], alone)
        assert different
        assert whole.isfinite().all()
    assert released(x, padding_mask=torch.ones(8, 3, dtype=torch.bool)).isfinite().all()


def test_noise_of_the_noisy_gate():
    """z + ε softplus(W₄ x) in training alone, ε standard normal for each token and expert."""
    module = layer("noisy_topk").train()
    nn.init.normal_(module.w4)
    x = tokens(1).expand(20_000, DIM)
    noise = (module.logits(x) - x @ module.w3.t()).detach()
    scale = nn.functional.softplus(x[0] @ module.w4.t())
    torch.testing.assert_close(noise.std(0), scale, rtol=0.05, atol=0)
    torch.testing.assert_close(noise.mean(0) / scale, torch.zeros_like(scale), rtol=0, atol=0.05)
    assert noise.t().corrcoef().fill_diagonal_(0).abs().max() < 0.05
    assert torch.equal(module.eval().logits(x), x @ module.w3.t())


def test_one_expert_of_the_noisy_gate_is_for_evaluation_alone():
    module = layer("noisy_topk", k=1)
    with pytest.raises(UsageError, match="--moe-k 1 leaves the selection of noisy_topk without a gradient"):
        module.train()(tokens())
    assert module.eval()(tokens()).isfinite().all()


# Losses and statistics.


def emitted_of(module, x, mask=None):
    return module.train()(x, padding_mask=mask, return_losses=True)[1]


@pytest.mark.parametrize("count", [1, 11])
@pytest.mark.parametrize("variant", ["sigma_moe", "softmax_before_topk", "softmax_after_topk", "s_base"])
def test_entropy_loss(variant, count):
    """Σ p log p of the batch's mean softmax of the raw logits (7.19, 7.20), whatever the selection's function is."""
    module = layer(variant, moe_regularization=0.25)
    x = tokens(count)
    rows = [softmax([float(row @ token) for row in module.w3.detach()]) for token in x]
    p = [sum(row[e] for row in rows) / len(rows) for e in range(EXPERTS)]
    expected = 0.25 * sum(v * math.log(v) for v in p)
    assert emitted_of(module, x)["expert_entropy"].item() == pytest.approx(expected, rel=1e-10)


def test_entropy_loss_of_collapsed_routing_equals_the_one_in_log_space():
    """Where an expert's p underflows in float32, and float64 in log space does not: the values and gradients agree."""
    for scale in (1.0, 30.0, 300.0):
        torch.manual_seed(0)
        logits = scale * torch.randn(50, 6)
        logits[:, 0] += 3 * scale
        exact = logits.double().requires_grad_()
        log_p = torch.logsumexp(exact.log_softmax(-1), 0) - math.log(50)
        expected = (log_p.exp() * log_p).sum()
        logits.requires_grad_()
        got = entropy_loss(logits, None)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-6)
        grads = [torch.autograd.grad(v, z)[0].double() for v, z in ((got, logits), (expected, exact))]
        assert grads[0].isfinite().all()
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("count", [1, 11])
@pytest.mark.parametrize("k", [1, 2])
def test_balance_loss_of_switch(k, count):
    """N_E f · p (7.14 – 7.16); uniform routing has K, and f has no gradient."""
    module = layer("switch", k, moe_regularization=0.5)
    x = tokens(count)
    rows = [softmax([float(row @ token) for row in module.w3.detach()]) for token in x]
    chosen = [sorted(range(EXPERTS), key=lambda e: row[e], reverse=True)[:k] for row in rows]
    f = [sum(e in best for best in chosen) / len(x) for e in range(EXPERTS)]
    p = [sum(row[e] for row in rows) / len(rows) for e in range(EXPERTS)]
    expected = 0.5 * EXPERTS * sum(a * b for a, b in zip(f, p))
    assert emitted_of(module, x)["expert_balance"].item() == pytest.approx(expected, rel=1e-10)
    nn.init.zeros_(module.w3)
    assert emitted_of(module, x)["expert_balance"].item() == pytest.approx(0.5 * k, rel=1e-10)


def test_load_loss_of_noisy_topk():
    """(σ/μ)² of the experts' summed weights, as in the original, not the thesis's μ/σ: 0 where they are equal."""
    module = layer("noisy_topk", moe_regularization=0.5)
    x = tokens()
    torch.manual_seed(4)
    logits = module.train().logits(x)
    importance = [0.0] * EXPERTS
    for z in logits.tolist():
        for e, weight in weights_of("noisy_topk", z, 2).items():
            importance[e] += weight
    mean = sum(importance) / EXPERTS
    variance = sum((v - mean) ** 2 for v in importance) / EXPERTS
    torch.manual_seed(4)
    assert emitted_of(module, x)["expert_load"].item() == pytest.approx(0.5 * variance / mean**2, rel=1e-6)
    equal = layer("noisy_topk", k=EXPERTS, moe_regularization=0.5)
    nn.init.zeros_(equal.w3)
    nn.init.constant_(equal.w4, -1e3)  # as many of the tokens have noise as have a negative sum
    assert emitted_of(equal, x.abs())["expert_load"].item() == pytest.approx(0, abs=1e-12)


@variants
def test_nothing_is_returned_outside_training_and_no_loss_of_weight_zero(variant):
    module = layer(variant)
    assert module.eval()(tokens(), return_losses=True)[1] == {}
    named = emitted_of(module, tokens())
    assert set(named) == STATISTICS | {module.loss_name}
    assert named[module.loss_name].requires_grad and not any(named[s].value.requires_grad for s in STATISTICS)
    assert set(emitted_of(layer(variant, moe_regularization=0.0), tokens())) == STATISTICS


def test_statistics():
    module = layer("sigma_moe", k=1)
    with torch.no_grad():  # a token is a one-hot vector, and selects the expert of its number
        module.w3.copy_(torch.eye(EXPERTS, DIM))
    x = torch.eye(DIM, dtype=torch.float64)[[0, 0, 0, 2, 4]]
    mask = torch.tensor([False, False, False, False, True])
    found = {name: v.value.item() for name, v in emitted_of(module, x, mask).items() if name in STATISTICS}
    p = math.e / (math.e + EXPERTS - 1)
    q = 1 / (math.e + EXPERTS - 1)
    assert found == pytest.approx(
        {
            "experts_effective": math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)),
            "experts_dead": 3 / 5,
            "experts_largest": 0.75,
            "experts_token_entropy": -p * math.log(p) - (EXPERTS - 1) * q * math.log(q),
        }
    )


def test_statistics_are_of_the_logits_without_noise():
    module, x = layer("noisy_topk"), tokens()
    nn.init.zeros_(module.w3)
    assert emitted_of(module, x)["experts_token_entropy"].value.item() == pytest.approx(math.log(EXPERTS))


# Precision, checkpoints, initialization, options.


@variants
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(variant, dtype):
    module = layer(variant).to(dtype).eval()
    x = tokens(30).to(dtype)
    exact = module.double()(x.double())
    out = module.to(dtype)(x)
    assert out.dtype == dtype and (out.double() - exact).abs().mean() < 0.02 * exact.abs().mean() + 1e-3
    y, emitted = module.train()(x, return_losses=True)
    (y.float().sum() + emitted[module.loss_name]).backward()
    assert emitted[module.loss_name].dtype == torch.float32
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in module.parameters())


@variants
def test_autocast_selects_the_experts_that_float32_does(variant):
    module = layer(variant).float().eval()
    x = tokens(200).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, out = module.logits(x), module(x)
        losses = module.train()(x, return_losses=True)[1]
    module.eval()
    assert torch.equal(logits, module.logits(x)) and logits.dtype == torch.float32
    assert out.dtype == torch.bfloat16 and (out.float() - module(x)).abs().max() < 0.1
    assert all(loss.dtype == torch.float32 for loss in losses.values() if isinstance(loss, torch.Tensor))


@variants
def test_state_dict(variant):
    module, other = layer(variant).eval(), layer(variant, seed=5).eval()
    assert not torch.equal(module(tokens()), other(tokens()))
    other.load_state_dict(module.state_dict())
    assert torch.equal(module(tokens()), other(tokens()))


@pytest.mark.parametrize(
    "init,first,second,third",
    [
        ("dense_equivalent", 2 / 200, 2 / (8 * 60), 2 / 200),
        ("standard", 2 / 200, 2 / 60, 2 / 200),
        ("switch", 0.2 / 200, 0.2 / 60, 0.2 / 200),
    ],
)
@pytest.mark.parametrize("pre_norm,depth", [(True, 6), (False, 1)])
def test_initialization(init, first, second, third, pre_norm, depth):
    sizes = dict(encoder_ffn_embed_dim=8 * 60, encoder_layers=6, moe_expert_dim=60, pre_norm=pre_norm, moe_init=init)
    module = build_feedforward("sigma_moe", config_of(200, 2, **sizes), "encoder")
    assert (module.experts, module.expert_dim) == (8, 60)
    for weight, variance in ((module.w1, first), (module.w2, second), (module.w3, third)):
        assert weight.std().item() == pytest.approx(math.sqrt(variance / depth), rel=0.05)
    norms = module.w3.norm(dim=1)
    assert (norms.max() / norms.min() < 1.001) == (init != "switch")
    before = module.w2.clone()
    module.rescale_output(5 / 3)
    torch.testing.assert_close(module.w2, 5 / 3 * before)


def test_defaults_of_each_kind():
    found = {}
    for name in ("sigma_moe", "switch", "s_base", "noisy_topk"):
        m = build_feedforward(name, config_of(8, 2, encoder_ffn_embed_dim=64), "encoder")
        found[name] = (m.experts, m.expert_dim, m.k, m.regularization_weight, m.expert_dropout, m.dropout.p)
    assert found == {
        "sigma_moe": (16, 4, 4, 0.001, 0.05, 0.0),
        "switch": (16, 4, 1, 0.01, 0.0, 0.0),
        "s_base": (16, 4, 1, 0.001, 0.0, 0.0),
        "noisy_topk": (16, 4, 4, 0.1, 0.0, 0.0),
    }


@pytest.mark.parametrize(
    "options,message",
    [
        ({"moe_experts": 5}, r"--moe-experts 5 does not divide the hidden width 32 \(--encoder-ffn-embed-dim"),
        ({"moe_expert_dim": 5}, "--moe-expert-dim 5 does not divide the hidden width 32"),
        (
            {"moe_experts": 4, "moe_expert_dim": 16},
            r"4 of --moe-expert-dim 16 are 64 hidden units, and the hidden width is 32: set --encoder-ffn-embed-dim "
            r".* 64, or leave one of the two out",
        ),
        ({"moe_experts": 0}, "--moe-experts is 0: choose 1 or more"),
        ({"moe_expert_dim": -1}, "--moe-expert-dim is -1: choose 1 or more"),
        ({"moe_experts": 4, "moe_k": 5}, "--moe-k is 5 of 4 experts: choose a number from 1 to 4"),
        ({"moe_k": 0}, "--moe-k is 0 of 16 experts"),
        ({"moe_init": "dense"}, "--moe-init is 'dense': choose from dense_equivalent, standard, switch"),
        ({"moe_regularization": -1.0}, "--moe-regularization is -1.0: choose 0 or more"),
        ({"moe_expert_dropout": 1.0}, "--moe-expert-dropout is 1.0: choose a number from 0 to below 1"),
        ({"moe_dropout": -0.1}, "--moe-dropout is -0.1: choose a number from 0 to below 1"),
        ({"moe_selection": "softmax"}, "--moe-selection is 'softmax': choose from sigmoid, softmax_before_topk"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message):
        build_feedforward("sigma_moe", config_of(8, 2, **({"encoder_ffn_embed_dim": 32} | options)), "encoder")


@pytest.mark.parametrize(
    "options,message",
    [
        ({"s_base_iterations": 0}, "--s-base-iterations is 0: choose 1 or more"),
        ({"s_base_sinkhorn": "none"}, "--s-base-sinkhorn is 'none': choose from textbook, released"),
    ],
)
def test_wrong_options_of_s_base(options, message):
    with pytest.raises(UsageError, match=message):
        build_feedforward("s_base", config_of(8, 2, encoder_ffn_embed_dim=32, **options), "encoder")


@variants
def test_an_expert_that_is_dropped_is_not_selected_where_k_others_are_left(variant, monkeypatch):
    module = layer(variant, k=2, moe_expert_dropout=0.5).train()
    logits = torch.randn(300, EXPERTS, dtype=torch.float64)
    draws = torch.rand_like(logits)
    monkeypatch.setattr(torch, "rand_like", lambda _: draws)
    kept = draws >= 0.5
    enough = kept.sum(1) >= 2
    assert enough.sum() > 100
    assert kept.gather(1, module.select(logits, None).experts)[enough].all()


def test_the_noise_of_noisy_topk_starts_equal_for_all_experts():
    assert (layer("noisy_topk").w4 == 0).all()


@pytest.mark.parametrize("name", ["sigma_moe", "switch", "s_base", "noisy_topk"])
def test_the_start_of_each_kind(name):
    """Switch starts as Fedus et al. have it, the others as a dense layer of the whole hidden width."""
    torch.manual_seed(0)
    module = FEEDFORWARD_REGISTRY[name](200, 8 * 60, moe_experts=8, moe_k=1)
    variances = (0.2 / 200, 0.2 / 60, 0.2 / 200) if name == "switch" else (2 / 200, 2 / (8 * 60), 2 / 200)
    for weight, variance in zip((module.w1, module.w2, module.w3), variances, strict=True):
        assert weight.std().item() == pytest.approx(variance**0.5, rel=0.05)
