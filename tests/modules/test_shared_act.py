"""Adaptive computation time: columns against equations in plain floats; padding, early end, decoding, gradients."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fairseq_sg.modules.attention import Context
from fairseq_sg.modules.depth import SharedACT
from fairseq_sg.modules.depth.shared_act import Halting
from fairseq_sg.modules.layers import DecoderLayer, EncoderLayer, LayerOutput
from helpers.configs import config_of

DIM = 8
VARIANTS, STATES = ("graves", "dehghani"), ("input", "output")
variants = pytest.mark.parametrize("variant", VARIANTS)
states = pytest.mark.parametrize("state", STATES)


class Mixing(nn.Module):
    """A layer without projections: h' = tanh(W h + A tanh(h)), A = softmax of tanh(h)·tanh(h)ᵀ; counts its calls."""

    def __init__(self, losses=False):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.losses, self.calls = losses, 0

    def forward(self, x, context):
        self.calls += 1
        h = x.tanh()
        logits = torch.einsum("nbc,mbc->bnm", h, h)
        if context.padding_mask is not None:
            logits = logits.masked_fill(context.padding_mask.unsqueeze(1), -1e4)
        weights = logits.softmax(-1)
        mean = torch.einsum("bnm,mbc->nbc", weights, h)
        losses = {"size": x.abs().mean()} if self.losses else {}
        return LayerOutput(torch.tanh(self.linear(x) + mean), weights if context.return_weights else None, {}, losses)


def stack(steps=6, bias=-1.0, scale=3.0, layer=None, dtype=torch.float64, **options) -> SharedACT:
    """Halting probabilities around σ(bias); the larger ``scale``, the more columns differ."""
    torch.manual_seed(0)
    made = layer or Mixing()
    module = SharedACT(lambda step: made, steps, DIM, **{f"act_{k}": v for k, v in options.items()})
    with torch.no_grad():
        module.halting_unit.weight.mul_(scale)
        module.halting_unit.bias.fill_(bias)
    return module.to(dtype).eval()


def seen(padding=None, **options) -> Context:
    return Context(padding_mask=padding, key_padding_mask=padding, **options)


def inputs(n=5, batch=3, dtype=torch.float64):
    """x (N, B, C), and padding at the end of sentence 1, the beginning of sentence 2."""
    torch.manual_seed(1)
    padding = torch.zeros(batch, n, dtype=torch.bool)
    padding[1, 3:] = True
    padding[2, :1] = True
    return torch.randn(n, batch, DIM, dtype=dtype), padding


def column(p, variant, threshold):
    """p̂^(1), p̂^(2), … of one column -> p^(1), p^(2), …, R, T, from equations D.2 to D.4."""
    reached = [t for t in range(1, len(p) + 1) if sum(p[:t]) > threshold]
    if not reached and variant == "dehghani":
        return list(p), 0.0, len(p)
    halt = reached[0] if reached else len(p)
    rest = 1 - sum(p[: halt - 1])
    return [*p[: halt - 1], rest, *[0.0] * (len(p) - halt)], rest, halt


def combine(weights, values, variant):
    """Equation D.5, or the average of Dehghani et al."""
    total = 0.0 * values[0]
    for weight, value in zip(weights, values, strict=True):
        total = (1 - weight if variant == "dehghani" else 1) * total + weight * value
    return total


# The equations.


@variants
@states
@pytest.mark.parametrize("threshold", [0.99, 0.6])
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_every_column_is_that_of_the_equations(variant, state, threshold, steps):
    options = dict(variant=variant, halting_state=state, threshold=threshold, scale=6.0)
    module = stack(steps, **options)
    x, padding = inputs()
    out = module(x, seen(padding), keep_hidden=True)
    assert len(out.hidden_states) == steps and out.weights is None
    read = [x, *out.hidden_states[:-1]] if state == "input" else out.hidden_states
    unit = module.halting_unit
    remainders, halts = [], set()
    for n, b in itertools.product(range(5), range(3)):
        if padding[b, n]:
            assert (out.x[n, b] == 0).all()
            continue
        logits = [sum((unit.weight[0] * h[n, b]).tolist()) + unit.bias.item() for h in read]
        weights, rest, halt = column([1 / (1 + math.exp(-z)) for z in logits], variant, threshold)
        torch.testing.assert_close(out.x[n, b], combine(weights, [h[n, b] for h in out.hidden_states], variant))
        remainders.append(rest)
        halts.add(halt)
    assert steps < 6 or len(halts) > 1
    (ponder,) = out.losses["ponder"]
    assert ponder.item() == pytest.approx(sum(remainders) / len(remainders), rel=1e-12)
    (ponder,) = stack(steps, **options, ponder_padding="include")(x, seen(padding)).losses["ponder"]
    assert ponder.item() == pytest.approx(sum(remainders) / padding.numel(), rel=1e-12)


@pytest.mark.parametrize(
    "p,threshold,variant,weights,remainder",
    [
        ([0.25, 0.5, 0.5, 0.5], 0.99, "graves", [0.25, 0.5, 0.25, 0.0], 0.25),
        ([0.25, 0.5, 0.5, 0.5], 0.99, "dehghani", [0.25, 0.5, 0.25, 0.0], 0.25),
        ([0.995, 0.5], 0.99, "graves", [1.0, 0.0], 1.0),
        ([0.995, 0.5], 0.99, "dehghani", [1.0, 0.0], 1.0),
        ([0.125, 0.25, 0.125], 0.99, "graves", [0.125, 0.25, 0.625], 0.625),
        ([0.125, 0.25, 0.125], 0.99, "dehghani", [0.125, 0.25, 0.125], 0.0),
        ([0.5, 0.25, 0.5], 0.75, "graves", [0.5, 0.25, 0.25], 0.25),
        ([0.5, 0.5, 0.5], 1.0, "graves", [0.5, 0.5, 0.0], 0.0),
        ([0.0, 0.0], 0.99, "graves", [0.0, 1.0], 1.0),
        ([0.25], 0.99, "graves", [1.0], 1.0),
        ([0.25], 0.99, "dehghani", [0.25], 0.0),
    ],
    ids=lambda x: str(x) if not isinstance(x, list) else "",
)
def test_weights_by_hand(p, threshold, variant, weights, remainder):
    halting = Halting(torch.tensor([[True, False]]), threshold, torch.float64)
    for t, (now, expected) in enumerate(zip(p, weights, strict=True)):
        last = t == len(p) - 1
        got = halting.weigh(torch.tensor([[now, now]], dtype=torch.float64), force=last and variant == "graves")
        assert got.tolist() == [[expected, 0.0]], f"step {t + 1}"
    assert halting.remainder.tolist() == [[remainder, 0.0]]
    assert column(p, variant, threshold)[:2] == (weights, remainder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_sum_to_one(dtype):
    torch.manual_seed(2)
    halting = Halting(torch.ones(50, 40, dtype=torch.bool), 0.99, dtype)
    scale = torch.logspace(-3, 0, 40, dtype=dtype)
    weights = torch.stack([halting.weigh(torch.rand(50, 40, dtype=dtype) * scale, force=t == 11) for t in range(12)])
    assert (weights >= 0).all() and (weights > 0).sum(0).unique().numel() == 11
    torch.testing.assert_close(weights.sum(0), torch.ones(50, 40, dtype=dtype))
    assert not halting.running.any()


@variants
def test_attention_weights_are_those_that_made_the_output(variant):
    """Weights of the steps, combined as the states: those of the first step for columns that halt there."""
    module = stack(3, variant=variant)
    x, padding = inputs()
    out = module(x, seen(padding, return_weights=True), keep_hidden=True)
    each = [module.layer(h, seen(padding, return_weights=True))[1] for h in [x, *out.hidden_states[:-1]]]
    p = [module.halting_probability(h) for h in [x, *out.hidden_states[:-1]]]
    for n, b in itertools.product(range(5), range(3)):
        if padding[b, n]:
            assert (out.weights[b, n] == 0).all()
        else:
            weights = column([q[n, b].item() for q in p], variant, 0.99)[0]
            torch.testing.assert_close(out.weights[b, n], combine(weights, [a[b, n] for a in each], variant))


@variants
def test_attention_weights_of_real_layers(variant):
    layer = EncoderLayer(config_of(DIM, 2), "softmax", "dense").double()
    x, padding = inputs()
    out = stack(4, layer=layer, variant=variant, bias=0.0)(x, seen(padding, return_weights=True))
    sums = out.weights.sum(-1)
    assert (sums[padding] == 0).all() and (sums[~padding] <= 1 + 1e-12).all()
    if variant == "graves":
        torch.testing.assert_close(sums[~padding], torch.ones_like(sums[~padding]))


# Padding.


@variants
@states
def test_padding_changes_nothing(variant, state):
    module = stack(variant=variant, halting_state=state)
    x, padding = inputs()
    garbage = x.masked_fill(padding.t().unsqueeze(-1), 1e9)
    together, sums = module(garbage, seen(padding)), 0.0
    for b, real in enumerate(~padding):
        alone = module(x[real, b : b + 1], seen(padding[b : b + 1, real]))
        sums += alone.losses["ponder"][0].item() * int(real.sum())
        torch.testing.assert_close(together.x[real, b], alone.x[:, 0])
        assert (together.x[~real, b] == 0).all()
    assert together.losses["ponder"][0].item() == pytest.approx(sums / int((~padding).sum()), rel=1e-9)


def test_no_mask_is_a_mask_without_padding():
    x, _ = inputs()
    without, mask = stack()(x), stack()(x, seen(torch.zeros(3, 5, dtype=torch.bool)))
    assert torch.equal(without.x, mask.x)
    # The mean over real columns adds up in another order than the mean over all.
    torch.testing.assert_close(without.losses["ponder"][0], mask.losses["ponder"][0], rtol=1e-12, atol=0)
    assert (without.x != 0).all()


def test_one_column_is_its_own_mean():
    one = inputs()[0][:1, :1]
    excluded, included = (stack(ponder_padding=way)(one).losses["ponder"][0] for way in ("exclude", "include"))
    assert excluded > 0 and torch.equal(excluded, included)


@pytest.mark.parametrize("padding_in_mean", ["exclude", "include"])
def test_nothing_but_padding(padding_in_mean):
    module = stack(ponder_padding=padding_in_mean)
    x, _ = inputs()
    out = module(x.requires_grad_(), seen(torch.ones(3, 5, dtype=torch.bool)))
    assert (out.x == 0).all() and out.losses["ponder"][0].item() == 0 and module.layer.calls == 1
    (out.x.sum() + out.losses["ponder"][0]).backward()
    assert all(p.grad.isfinite().all() for p in (x, *module.parameters()))


# The early end.


def test_ends_early_where_nothing_else_is_asked_of_later_steps():
    x, padding = inputs()
    counted = {}
    for name, losses, options in (
        ("plain", False, {}),
        ("weights", False, {"return_weights": True}),
        ("hidden", False, {}),
        ("losses", True, {}),
        ("decoding", False, {"state": {}}),
    ):
        module = stack(4, bias=9.0, scale=0.1, layer=Mixing(losses).double())
        out = module(x, seen(padding, **options), keep_hidden=name == "hidden")
        counted[name] = module.layer.calls
        assert len(out.hidden_states) == (4 if name == "hidden" else 0)
        assert len(out.losses.get("size", [])) == (4 if name == "losses" else 0)
        first = module.layer(x, seen(padding))[0].masked_fill(padding.t().unsqueeze(-1), 0.0)
        torch.testing.assert_close(out.x, first, msg=lambda m, name=name: f"{name}: {m}")
        assert out.losses["ponder"][0].item() == 1.0
    assert counted == {"plain": 1, "weights": 1, "hidden": 4, "losses": 4, "decoding": 4}


@pytest.mark.parametrize("bias,calls", [(-9.0, 5), (0.0, 2)])
def test_goes_on_while_a_column_runs(bias, calls):
    module = stack(5, bias=bias, scale=0.0, threshold=0.9)
    module(inputs()[0])
    assert module.layer.calls == calls


# Real layers.


def test_values_of_every_application_and_ponder():
    layer = EncoderLayer(config_of(DIM, 2), "linear", "dense").double()
    x, padding = inputs()
    out = stack(4, layer=layer, bias=9.0)(x, seen(padding, return_values=True))
    assert len(out.values["encoder"]) == 4 and len(out.losses["ponder"]) == 1


@variants
@states
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_decoding_equals_the_full_pass_when_columns_halt_at_different_steps(variant, state, attention):
    torch.manual_seed(3)
    layer = DecoderLayer(config_of(DIM, 2), attention, "softmax", "dense").double()
    module = stack(5, layer=layer, variant=variant, halting_state=state, bias=0.0, scale=8.0)
    torch.manual_seed(4)
    x, memory = torch.randn(7, 4, DIM, dtype=torch.float64), torch.randn(3, 4, DIM, dtype=torch.float64)
    mask = torch.zeros(4, 3, dtype=torch.bool)
    context = Context(source=memory, cross=seen(mask))
    probability = [module.halting_probability(h) for h in module(x, context, keep_hidden=True).hidden_states]
    assert (
        len({column([p[n, b].item() for p in probability], variant, 0.99)[2] for n in range(7) for b in range(4)}) > 1
    )
    incremental_state = {}
    for n in range(7):
        if n in (2, 5):
            order = torch.tensor([2, 0, 0, 1] if n == 2 else [3, 1, 0])
            x, memory = x[:, order], memory[:, order]
            mask = mask[order]
            for part in module.modules():
                if hasattr(part, "reorder_incremental_state"):
                    part.reorder_incremental_state(incremental_state, order)
        context = Context(source=memory, cross=seen(mask))
        got = module(x[n : n + 1], replace(context, state=incremental_state)).x
        full = module(x[: n + 1], context).x
        torch.testing.assert_close(got[0], full[-1], msg=lambda m, n=n: f"position {n}: {m}")


# Gradients.


@variants
@states
def test_gradients(variant, state):
    module = stack(4, variant=variant, halting_state=state)
    x, padding = inputs(n=4)
    weight, bias = module.halting_unit.weight, module.halting_unit.bias

    def function(x, weight, bias):
        parameters = {"halting_unit.weight": weight, "halting_unit.bias": bias}
        out = torch.func.functional_call(module, parameters, (x, seen(padding)))
        return out.x, out.losses["ponder"][0]

    assert torch.autograd.gradcheck(function, [t.detach().requires_grad_() for t in (x, weight, bias)])


def test_ponder_alone_trains_the_halting_unit():
    module = stack()
    x, padding = inputs()
    module(x, seen(padding)).losses["ponder"][0].backward()
    assert module.halting_unit.weight.grad.abs().sum() > 0 and module.halting_unit.bias.grad.item() < 0


@variants
def test_every_parameter_has_a_gradient_when_all_columns_halt_at_once(variant):
    """Of 0 for the halting unit: data parallel training waits for every parameter."""
    module = stack(3, bias=9.0, scale=0.1, variant=variant)
    module(inputs()[0]).x.square().sum().backward()
    assert module.halting_unit.bias.grad.item() == 0 and module.layer.linear.weight.grad.abs().sum() > 0


# Precision.


@variants
@pytest.mark.parametrize("dtype,bound", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision(variant, dtype, bound):
    x, padding = inputs(dtype=torch.float32)
    exact = stack(3, variant=variant, dtype=torch.float32)(x, seen(padding, return_weights=True))
    got = stack(3, variant=variant, dtype=dtype)(x.to(dtype), seen(padding, return_weights=True))
    assert got.x.dtype == got.weights.dtype == dtype and got.losses["ponder"][0].dtype == torch.float32
    error = (got.x.float() - exact.x).norm() / exact.x.norm()
    assert error < bound
    assert stack(1, variant=variant, dtype=dtype)(x.to(dtype)).losses["ponder"][0].dtype == torch.float32


def test_halting_probabilities_are_float32_under_autocast():
    module = stack(dtype=torch.float32, scale=1.0)
    h = 10 * torch.randn(5, 3, DIM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.layer.linear(h).dtype == torch.bfloat16
        p = module.halting_probability(h)
    assert p.dtype == torch.float32 and torch.equal(p, module.halting_probability(h))


# Checkpoints and options.


def test_more_steps_with_the_same_checkpoint():
    few, many = stack(2, bias=-3.0), stack(5, bias=0.0, scale=1.0)
    assert set(few.state_dict()) == {
        "layer.linear.weight", "layer.linear.bias", "halting_unit.weight", "halting_unit.bias",
    }  # fmt: skip
    many.load_state_dict(few.state_dict())
    x, _ = inputs()
    assert not torch.allclose(many(x).x, few(x).x)
    assert torch.equal(many(x).x, stack(5, bias=-3.0)(x).x)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"variant": "banino"}, r"--act-variant is 'banino': choose from graves, dehghani"),
        ({"halting_state": "before"}, r"--act-halting-state is 'before': choose from input, output"),
        ({"ponder_padding": "none"}, r"--act-ponder-padding is 'none': choose from exclude, include"),
        ({"threshold": 0.0}, r"--act-threshold is 0.0: choose a number above 0 and up to 1"),
        ({"threshold": 1.01}, r"--act-threshold is 1.01: choose"),
        ({"threshold": math.nan}, r"--act-threshold is nan: choose"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        stack(**options)


# The whole model.


def model(**options):
    pytest.importorskip("fairseq")
    from fairseq.data import Dictionary

    from fairseq_sg.models.sg_transformer import SGTransformer

    words = Dictionary()
    for word in "abcdef":
        words.add_symbol(word)
    cfg = SimpleNamespace(left_pad_target=False)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, cfg=cfg)
    sizes = {"embed_dim": 16, "ffn_embed_dim": 32, "attention_heads": 2, "layers": 3}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    torch.manual_seed(0)
    return SGTransformer.build_model(SimpleNamespace(**(sizes | options)), task).eval(), task


def tokens():
    return torch.tensor([[4, 5, 6, 7, 2], [8, 9, 2, 1, 1]]), torch.tensor([[2, 4, 5], [2, 6, 1]])


def test_model_has_the_options_and_a_ponder_loss_on_either_side():
    source, target = tokens()
    net, _ = model(depth="shared_act", act_variant="dehghani", act_threshold=0.7, decoder_layers=2)
    for side, steps in (("encoder", 3), ("decoder", 2)):
        built = getattr(net, side).stack
        assert (built.variant, built.threshold, built.steps) == ("dehghani", 0.7, steps)
    values = net(source, None, target)[1]["aux_losses"]["ponder"]
    wider = torch.cat([source, torch.ones(2, 3, dtype=torch.long)], 1), torch.cat([target, torch.ones_like(target)], 1)
    padded = net(wider[0], None, wider[1])[1]["aux_losses"]["ponder"]
    assert len(values) == len(padded) == 2 and values[0] != values[1]
    torch.testing.assert_close(torch.stack(padded), torch.stack(values))


@variants
@pytest.mark.parametrize("weight", [None, 0.03])
def test_criterion_adds_the_ponder_loss(variant, weight):
    net, task = model(depth="shared_act", act_variant=variant)
    from fairseq_sg.criterions import cross_entropy_orthogonality as criteria

    weights = "{}" if weight is None else f'{{"ponder": {weight}}}'
    config = criteria.SGCriterionConfig(aux_loss_weights=weights, sentence_avg=False)
    source, target = tokens()
    inputs_ = {"src_tokens": source, "src_lengths": None, "prev_output_tokens": target}
    sample = {"net_input": inputs_, "target": target.roll(-1, 1), "ntokens": 5}
    loss, size, logs = criteria.CrossEntropyOrthogonality(config, task)(net, sample)
    ponder = sum(net(source, None, target)[1]["aux_losses"]["ponder"])
    expected = logs["nll_loss"] + (0.03 if weight is None else weight) * size * ponder
    torch.testing.assert_close(loss, expected)
    assert ponder > 0
    loss.backward()
    idle = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not idle


def test_options_of_halting_are_refused_without_it():
    with pytest.raises(ValueError, match=r"--act-threshold 0.5 has no effect .* an option of: shared_act depth"):
        model(depth="shared", act_threshold=0.5)
    with pytest.raises(ValueError, match=r"--encoder-attention names 3 layers, and --depth shared_act has one"):
        model(depth="shared_act", encoder_attention="linear,softmax,linear")
