"""Transforms of ``torch.func`` through whole models: gradients of sentences, models at once, second derivatives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("fairseq")

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, jvp, stack_module_state, vmap

from fairseq_sg.models.sg_dnc import SGDNC
from fairseq_sg.models.sg_encoder import SGEncoder
from fairseq_sg.models.sg_lstm import SGLSTM
from fairseq_sg.models.sg_transformer_lm import SGTransformerLM
from fairseq_sg.modules.feature_maps import EluFeatureMap
from fairseq_sg.ops import linear_attention, orthogonality_loss
from helpers import fields, prompts, scenes
from helpers.models import MODELS, MORE, PAD, build, pair, tokens

#: Models that draw random numbers for each call in training.
RANDOM = ("feature map performer", "position randomized", "feedforward noisy_topk")
WINDOWS = {
    "window": {"attention_window": 2},
    "window, geometric": {"attention_window": 2, "decoder_attention": "geometric"},
    "encoder window": {"encoder_attention_window": 2},
}
models = pytest.mark.parametrize("name", MODELS | WINDOWS)


def model_of(name: str, seed: int = 0) -> nn.Module:
    """A model in float64 whose parameters differ by seed."""
    model = build(**(MODELS | WINDOWS)[name], **MORE.get(name, {}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.01 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model.train(name not in RANDOM)


def loss_of(model: nn.Module) -> Callable[..., Tensor]:
    """(parameters, buffers, source, target) -> the sum of the squares of the logits at words."""

    def loss(parameters: dict, buffers: dict, source: Tensor, target: Tensor) -> Tensor:
        logits = functional_call(model, (parameters, buffers), (source, None, target))[0]
        return logits.square().mul(target.ne(PAD)[..., None]).sum()

    return loss


def backward(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """The gradients by autograd alone, 0 for a parameter without one."""
    model.zero_grad()
    loss.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def state_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return {n: p.detach() for n, p in model.named_parameters()}, dict(model.named_buffers())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@models
def test_the_gradients_of_each_sentence(name):
    model, (source, target) = model_of(name), pair()
    of_sentence = grad_and_value(loss_of(model))
    parameters, buffers = state_of(model)
    gradients, losses = vmap(of_sentence, in_dims=(None, None, 0, 0))(
        parameters, buffers, source[:, None], target[:, None]
    )
    for i in range(len(source)):
        words, prefix = source[i : i + 1], target[i : i + 1]
        logits = model(words, None, prefix)[0][prefix.ne(PAD)]
        torch.testing.assert_close(losses[i], logits.square().sum())
        assert_same({n: g[i] for n, g in gradients.items()}, backward(logits.square().sum(), model))


@models
def test_models_at_once(name):
    several, (source, target) = [model_of(name, seed) for seed in range(3)], pair()
    parameters, buffers = stack_module_state(several)
    of_model = grad_and_value(loss_of(several[0]))
    gradients, losses = vmap(of_model, in_dims=(0, 0, None, None))(parameters, buffers, source, target)
    assert len(set(losses.tolist())) == len(several)
    for i, model in enumerate(several):
        logits = model(source, None, target)[0][target.ne(PAD)]
        torch.testing.assert_close(losses[i], logits.square().sum())
        assert_same({n: g[i] for n, g in gradients.items()}, backward(logits.square().sum(), model))


def assert_hessian(gradient: Callable[[dict], dict], parameters: dict[str, Tensor]) -> None:
    """Compares the Hessian times a vector with differences of gradients."""
    generator = torch.Generator().manual_seed(3)
    direction = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in parameters.items()}
    _, found = jvp(gradient, (parameters,), (direction,))
    step = 1e-8  # so short that no ReLU turns
    before, after = (gradient({n: p + s * direction[n] for n, p in parameters.items()}) for s in (-step, step))
    largest = max(float(x.abs().max()) for x in found.values())
    assert largest > 0
    for n, product in found.items():
        torch.testing.assert_close(product, (after[n] - before[n]) / (2 * step), rtol=0, atol=1e-6 * largest)


@models
def test_a_second_derivative(name):
    model, (source, target) = model_of(name), pair()
    parameters, buffers = state_of(model)
    gradient = grad(loss_of(model))
    assert_hessian(lambda p: gradient(p, buffers, source, target), parameters)


def words() -> tuple[Tensor, ...]:
    torch.manual_seed(4)
    return (tokens([5, 5, 5], 5, left_pad=False),)


def waves() -> tuple[Tensor, ...]:
    axis = fields.periodic_axis(16)
    return torch.randn(3, 16, dtype=torch.float64), axis.expand(3, -1), axis.expand(3, -1)


def examples() -> tuple[Tensor, ...]:
    return torch.randn(3, 5, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)


LM = {"decoder_attention": "relative", "pre_norm": True}
DNC = dict(memory_cells=4, memory_width=3, read_heads=2, controller_dim=5, embed_dim=4, memory_variant="mds")
DNC |= {"usage_gradient": True}  # without it, the gradient is not that of the loss, as in the released code
#: Model, the inputs of three samples, and how many of them have a row for each sample.
OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], int]] = {
    "sg_encoder": (lambda: build(SGEncoder), words, 1),
    "sg_transformer_lm": (lambda: build(SGTransformerLM, **LM), words, 1),
    "sg_dnc": (lambda: build(SGDNC, **DNC), words, 1),
    "sg_regressor": (prompts.build, examples, 2),
    "sg_operator": (fields.build, waves, 1),
    "images": (lambda: scenes.small(dropout=0.0).double(), scenes.random_batch, 2),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_the_gradients_of_each_sample_and_a_second_derivative_of_other_models(kind):
    make, inputs, rows = OTHERS[kind]
    model, given = make().train(), inputs()
    parameters, buffers = state_of(model)

    def loss(parameters: dict, *sample: Tensor) -> Tensor:
        # The axes of an operator model are those of all functions.
        batch = [x[None] if i < rows else x for i, x in enumerate(sample)]
        out = functional_call(model, (parameters, buffers), tuple(batch))
        return (out if torch.is_tensor(out) else out[0]).square().sum()

    in_dims = (None, *[0] * len(given))
    gradients = vmap(grad(loss), in_dims=in_dims)(parameters, *given)
    for i in range(len(given[0])):
        expected = backward(loss(dict(model.named_parameters()), *[x[i] for x in given]), model)
        assert_same({n: g[i] for n, g in gradients.items()}, expected)
    assert_hessian(lambda p: grad(loss)(p, *[x[0] for x in given]), parameters)


def test_an_lstm_is_refused_by_torch():
    """Their lengths are needed on the host, as docs/python.md says."""
    model = build(SGLSTM, embed_dim=4, hidden_dim=6)
    parameters, buffers = state_of(model)

    def loss(sentence: Tensor) -> Tensor:
        return functional_call(model, (parameters, buffers), (sentence[None],))[0].square().sum()

    with pytest.raises(RuntimeError, match="vmap"):
        vmap(loss)(*words())
    with pytest.raises(RuntimeError, match="storage"):
        grad(lambda p: functional_call(model, (p, buffers), words())[0].sum())(parameters)


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("attention")])
def test_autocast(name):
    """In training, with products in bfloat16: as far from float32 as without a transform."""
    model, (source, target) = model_of(name).float(), pair()
    parameters, buffers = state_of(model)
    real = target.ne(PAD)
    with torch.autocast("cpu", torch.bfloat16):
        found = grad(loss_of(model))(parameters, buffers, source, target)
        rounded = model(source, None, target)[0][real].square().sum()
    rounded = backward(rounded, model)
    expected = backward(model(source, None, target)[0][real].square().sum(), model)

    def distance(gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(gradients[n] - g).square().sum() for n, g in expected.items()]).sum().sqrt()

    assert distance(found) < 2 * distance(rounded)


def test_small_features_in_float32():
    """elu(x) + 1 as its definition stands would be 0 at x = −20."""
    x = torch.tensor([-20.0, -10.0, -1.0, 0.0, 2.0])
    features = EluFeatureMap(5)
    slope = vmap(grad(lambda x: features(x)))(x)
    torch.testing.assert_close(vmap(features)(x), features(x), rtol=1e-6, atol=0)
    torch.testing.assert_close(slope, features(x).clamp(max=1), rtol=1e-6, atol=0)


def test_linear_attention_through_several_chunks():
    q, k, v = (torch.randn(3, 1, 2, 130, width, dtype=torch.float64) for width in (8, 8, 5))

    def loss(q, k, v):
        return linear_attention(q.exp(), k.exp(), v, causal=True).square().sum()

    found = vmap(grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for i in range(3):
        leaves = [x[i].clone().requires_grad_() for x in (q, k, v)]
        loss(*leaves).backward()
        for gradient, leaf in zip(found, leaves, strict=True):
            torch.testing.assert_close(gradient[i], leaf.grad)


def test_the_orthogonality_loss():
    values = torch.randn(4, 2, 3, 5, 6, dtype=torch.float64)
    padding = torch.zeros(4, 2, 5, dtype=torch.bool)
    padding[1, 0, 3:] = True
    found = vmap(grad(lambda v, p: orthogonality_loss(v, padding_mask=p)))(values, padding)
    for i, value in enumerate(values):
        leaf = value.clone().requires_grad_()
        orthogonality_loss(leaf, padding_mask=padding[i]).backward()
        torch.testing.assert_close(found[i], leaf.grad)


def test_dropout_differs_from_sentence_to_sentence():
    model, (source, target) = build(dropout=0.5), pair()
    parameters, buffers = state_of(model)
    several = source[:1].expand(3, 1, -1), target[:1].expand(3, 1, -1)
    losses = vmap(loss_of(model), in_dims=(None, None, 0, 0), randomness="different")(parameters, buffers, *several)
    assert len(set(losses.tolist())) == 3
