"""Masks on weights: choice, replacement in every model, training with known answers, and overlap."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fairseq_sg.models.sg_encoder import SGEncoder
from fairseq_sg.models.sg_lstm import SGLSTM
from fairseq_sg.models.sg_transformer_lm import SGTransformerLM
from fairseq_sg.modules.masks import (
    MaskTraining,
    WeightMasks,
    inverted,
    masked,
    overlap,
    random_like,
    replaced,
    select,
    total,
)
from fairseq_sg.ops import masked_weight
from helpers.models import MODELS, build, model_of, pair, task, tokens


def encoder_decoder(name: str):
    torch.manual_seed(2)
    source, target = tokens([9, 2, 5, 8, 7, 3], 7, False), tokens([3, 8, 4, 2, 6, 9], 5, False)
    return model_of(name), {"src_tokens": source, "src_lengths": None, "prev_output_tokens": target}


def language_model():
    model = build(SGTransformerLM, decoder_attention="relative", decoder_ffn="sigma_moe").float()
    return model, {"src_tokens": pair()[1]}


def classifier(**options):
    def make():
        return build(SGEncoder, **options).float(), {"src_tokens": pair()[0], "src_lengths": None}

    return make


def lstm(**options):
    def make():
        torch.manual_seed(1)
        sizes = SimpleNamespace(embed_dim=6, hidden_dim=6, layers=2, dropout=0.3)
        model = SGLSTM.build_model(SimpleNamespace(**vars(sizes), **options), task(False))
        return model, {"src_tokens": pair()[0]}

    return make


OTHERS = {
    "language model": language_model,
    "classifier": classifier(readout="first"),
    "classifier, shared router": classifier(
        encoder_attention="geometric", encoder_update="copy_gate", depth="shared", encoder_layers=4
    ),
    "lstm": lstm(),
    "bidirectional lstm": lstm(bidirectional=True),
}


def make(name: str):
    model, inputs = OTHERS[name]() if name in OTHERS else encoder_decoder(name)
    with torch.no_grad():
        for parameter in model.parameters():
            # Some start at 0, as the second layer of the gates does nearly.
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False), inputs


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_every_tensor_of_every_model_is_masked_wherever_it_is_used(name):
    """All ones change no bit; without any one tensor the output is another; and the gradient reaches all."""
    model, inputs = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    output = model(**inputs)[0]
    names = select(model, "all")
    parameters = dict(model.named_parameters())
    masks = WeightMasks({key: parameters[key] for key in names})
    with replaced(model, masked(model, masks.threshold())):
        assert torch.equal(model(**inputs)[0], output)
    with replaced(model, masks.sample(torch.zeros_like(masks.logits))):
        kept = model(**inputs)[0]
    # Operators may take another path where a gradient is needed.
    torch.testing.assert_close(kept, output, rtol=1e-3, atol=1e-3)
    kept.square().sum().backward()
    assert all(grad.isfinite().all() for grad in masks.named(masks.logits.grad).values())
    idle = [] if name != "feedforward noisy_topk" else [key for key in names if key.endswith("w4")]
    for key in select(model):
        with replaced(model, {key: torch.zeros_like(parameters[key])}):
            # The weights of noise in training are not used in evaluation.
            assert torch.equal(model(**inputs)[0], output) == (key in idle), key
        assert masks.named(masks.logits.grad)[key].any() == (key not in idle), key
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(**inputs)[0], output)


def test_gradients_are_those_of_the_weights_times_the_slope():
    model, inputs = make("attention relative")
    parameters = {name: p for name, p in model.named_parameters() if name in select(model)}
    masks = WeightMasks(parameters)
    noise = masks.draw(torch.Generator().manual_seed(3))
    weights = masks.sample(noise)
    free = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    for chosen in (weights, free):
        with replaced(model, chosen):
            model(**inputs)[0].square().sum().backward()
    slope = masks.named(torch.sigmoid(masks.logits.detach() + noise))
    for name, grad in masks.named(masks.logits.grad).items():
        expected = free[name].grad * parameters[name] * slope[name] * (1 - slope[name])
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)


def test_choice_of_parameters():
    model, _ = make("router")
    names = select(model)
    assert {"decoder.output_projection.weight", "encoder.stack.layer.update.ffn.w3"} & set(names)
    assert not [name for name in names if "bias" in name or "norm" in name or "tokens" in name]
    reference = set(select(model, "reference")) - set(names)
    assert reference and all(name.endswith(("norm.weight", "norm.bias")) for name in reference)
    everything = select(model, "all")
    assert set(reference) | set(names) < set(everything)
    assert not [name for name in everything if "embedding" in name]
    assert select(model, "q_proj") == [name for name, _ in model.named_parameters() if "q_proj" in name]
    with pytest.raises(ValueError, match="no parameter matches 'nothing': choose weights, reference, all"):
        select(model, "nothing")
    with pytest.raises(ValueError, match="no regular expression"):
        select(model, "(")


def test_gains_of_heads_and_vectors_of_positions_are_no_weights():
    model = build(encoder_attention="galerkin", decoder_attention="softmax", position="learned", learned_positions=12)
    names = dict(model.named_parameters())
    assert {"k_norm", "positions"} <= {part for name in names for part in name.split(".")}
    assert not [name for name in select(model) if "norm" in name or "positions" in name]
    gains = [name for name in set(select(model, "reference")) - set(select(model)) if "k_norm" in name]
    assert {name.rpartition(".")[2] for name in gains} == {"weight", "bias"}


def test_a_tied_table_is_one_parameter_replaced_in_both_places():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    words = torch.arange(5)
    assert select(model, "weight") == ["0.weight"]
    with pytest.raises(ValueError, match="no parameter"):
        select(model)
    with replaced(model, {"0.weight": 2 * model[0].weight}):
        doubled = model(words)
    torch.testing.assert_close(doubled, 4 * model(words))


def test_parameters_come_back_after_an_error():
    model = nn.LSTM(3, 3)
    before = dict(model.named_parameters())
    with pytest.raises(ZeroDivisionError), replaced(model, {"weight_hh_l0": torch.zeros(12, 3)}):
        raise ZeroDivisionError
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(weight is before[name] for weight, name in zip(model._flat_weights, model._flat_weights_names))
    with pytest.raises(KeyError, match="absent"), replaced(model, {"absent": torch.zeros(1)}):
        pass


class Sum(nn.Module):
    """y = Σ_j w_j x_j."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(1 + torch.rand(size))

    def forward(self, x):
        return x @ self.weight


def train(model, used: torch.Tensor, steps: int = 400, seed: int = 1) -> torch.Tensor:
    """The mask for inputs that are 0 where ``used`` is False; the target is the model's own answer."""
    masks = WeightMasks(dict(model.named_parameters()))
    training = MaskTraining(model, masks, alpha=1e-3, lr=3e-2, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    whole = model.weight.detach().clone()
    for _ in range(steps):
        parts = [torch.randn(16, len(used), generator=draw) * used for _ in range(2)]
        training.step([lambda x=x: (model(x) - x @ whole).square().sum() / 32 for x in parts])
    return masks.threshold()["weight"]


def test_masks_keep_exactly_the_weights_that_are_used():
    """Two disjoint halves: IoU 0, and each is the other's inverse. A shared half: IoMin 1."""
    model = Sum(12)
    halves = torch.arange(12) < 6
    first, second, shared = (train(model, used) for used in (halves, ~halves, torch.arange(12) < 9))
    assert torch.equal(first, halves) and torch.equal(second, ~halves)
    assert overlap(first, second).iou == 0
    assert torch.equal(inverted({"weight": first})["weight"], second)
    assert overlap(first, shared).iomin == 1
    x = torch.randn(4, 12)
    with replaced(model, masked(model, {"weight": first})):
        torch.testing.assert_close(model(x * halves), x * halves @ model.weight)
        assert not model(x * ~halves).any()


def test_gradient_of_several_samples_is_the_mean_over_the_parts_of_the_batch():
    """Parts of unlike sizes, too: every part has its share of the sum over the batch."""
    model = Sum(5)
    x = torch.randn(7, 5)
    whole = model.weight.detach().clone()
    masks = WeightMasks({"weight": model.weight})
    training = MaskTraining(model, masks, alpha=0.0, clip=0.0, seed=5)
    parts = [x[k::4] for k in range(4)]
    training.step([lambda part=part: (model(part) - part @ whole).square().sum() / 7 for part in parts])
    draw, expected = torch.Generator().manual_seed(5), torch.zeros(5)
    for part in parts:
        logits = torch.full((5,), 2.0, requires_grad=True)
        noise = WeightMasks({"weight": whole}).draw(draw)
        loss = (part @ masked_weight(whole, logits, noise) - part @ whole).square().mean()
        expected += len(part) / 7 * torch.autograd.grad(loss, [logits])[0]
    torch.testing.assert_close(masks.logits.grad, expected)


def test_resumed_training_is_equal_to_the_bit_and_the_weights_are_unchanged():
    model, inputs = make("attention softmax")
    parameters = {name: p for name, p in model.named_parameters() if name in select(model)}
    before = {name: p.clone() for name, p in model.named_parameters()}
    target = model(**inputs)[0]

    def loss():
        return (model(**inputs)[0] - target).square().mean()

    def training():
        return MaskTraining(model, WeightMasks(parameters), alpha=1e-4, seed=3)

    one, two, other = training(), training(), training()
    values = [one.step([loss, loss]) for _ in range(6)]
    again = [two.step([loss, loss]) for _ in range(3)]
    state = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in two.state_dict().items()
    }
    other.load_state_dict(state)
    again += [other.step([loss, loss]) for _ in range(3)]
    assert values == again and other.steps == 6
    assert torch.equal(one.masks.logits, other.masks.logits)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert MaskTraining(model, WeightMasks(parameters), alpha=1e-4, seed=4).step([loss, loss]) != values[0]


def test_penalty_clip_and_the_falling_of_unneeded_logits():
    """A logit without a gradient of the task's falls by the learning rate a step."""
    model = Sum(3)
    masks = WeightMasks({"weight": model.weight})
    training = MaskTraining(model, masks, alpha=1e-3, lr=1e-2)
    for _ in range(199):
        training.step([])
    assert masks.threshold()["weight"].all()
    for _ in range(3):
        training.step([])
    assert not masks.threshold()["weight"].any()
    clipped = MaskTraining(model, WeightMasks({"weight": model.weight}), alpha=10.0, clip=0.5)
    clipped.step([])
    torch.testing.assert_close(clipped.masks.logits.grad.norm(), torch.tensor(0.5))


def test_masks_need_parameters_of_one_kind():
    with pytest.raises(ValueError, match="one parameter or more"):
        WeightMasks({})
    with pytest.raises(ValueError, match="all of one dtype"):
        WeightMasks({"a": torch.ones(1), "b": torch.ones(1, dtype=torch.float64)})


def test_overlap_by_hand():
    one, other = torch.tensor([[1, 1], [0, 1]]).bool(), torch.tensor([[1, 0], [0, 0]]).bool()
    found = overlap(one, other)
    assert tuple(found) == (3, 1, 1, 0.75)
    assert (found.iou, found.iomin) == (1 / 3, 1.0)
    assert (found.chance_iou, found.chance_iomin) == (0.75 / 3.25, 0.75)
    empty = overlap(one & ~one, other & ~other)
    assert (empty.iou, empty.iomin, empty.chance_iou, empty.chance_iomin) == (0.0, 0.0, 0.0, 0.0)
    assert tuple(total({"a": found, "b": overlap(one, one)})) == (6, 4, 4, 0.75 + 9 / 4)
    with pytest.raises(ValueError, match=r"different shapes: \(2, 2\) and \(4,\)"):
        overlap(one, one.flatten())


def test_overlap_by_chance_is_the_mean_of_random_masks():
    masks = {"a": torch.arange(60) < 21, "b": torch.arange(40).view(5, 8) < 30}
    others = {"a": torch.arange(60) % 2 == 0, "b": torch.arange(40).view(5, 8) % 8 < 3}
    draw = torch.Generator().manual_seed(0)
    commons = []
    for _ in range(1000):
        pairs = random_like(masks, draw), random_like(others, draw)
        assert [int(mask.sum()) for mask in pairs[0].values()] == [21, 30]
        commons.append(sum(int((pairs[0][name] & pairs[1][name]).sum()) for name in masks))
    expected = total({name: overlap(masks[name], others[name]) for name in masks}).chance
    assert abs(np.mean(commons) - expected) < 5 * np.std(commons) / 1000**0.5


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=20), st.randoms())
def test_inverse_and_measures_have_their_properties(bits, random):
    one = torch.tensor(bits)
    other = torch.tensor([random.random() < 0.5 for _ in bits])
    assert torch.equal(inverted(inverted({"a": one}))["a"], one)
    found = overlap(one, other)
    assert 0 <= found.iou <= found.iomin <= 1
    assert overlap(other, one).iou == found.iou
    assert overlap(one, one).iou == float(one.any())
    assert overlap(one, ~one).iou == 0


def double_addition(pair: int, size: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Two numbers of two digits at the place of a pair, one-hot (B, 80), and the digits of their sum (B, 2)."""
    one, other = torch.randint(100, (2, size), generator=draw)
    digits = [one % 10, one // 10, other % 10, other // 10]
    own = torch.cat([nn.functional.one_hot(digit, 10) for digit in digits], 1).float()  # (B, 40)
    empty = torch.zeros_like(own)
    total = (one + other) % 100
    return torch.cat([own, empty] if pair == 0 else [empty, own], 1), torch.stack([total % 10, total // 10], 1)


def test_double_addition_in_a_feedforward_network():
    """The network of Csordás 2023, Table 3.1, in small: inputs and outputs are apart, hidden layers are shared.

    Small networks share more than the thesis's of 12 million weights (Figure B.5): the inverse mask says nothing here.
    """
    width = 160
    sizes = [80, width, width, width, 40]
    layers = [module for shape in zip(sizes, sizes[1:]) for module in (nn.Linear(*shape), nn.ReLU())]
    model, draw = nn.Sequential(*layers[:-1]), torch.Generator().manual_seed(0)

    def digits(x: torch.Tensor, pair: int) -> torch.Tensor:
        return model(x)[:, 20 * pair : 20 * (pair + 1)].view(-1, 2, 10)

    def loss(pair: int, size: int) -> torch.Tensor:
        x, target = double_addition(pair, size, draw)
        return nn.functional.cross_entropy(digits(x, pair).flatten(0, 1), target.flatten())

    def accuracy(pair: int) -> float:
        x, target = double_addition(pair, 2000, draw)
        return (digits(x, pair).argmax(-1) == target).all(1).float().mean().item()

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(700):
        optimizer.zero_grad()
        (loss(0, 128) + loss(1, 128)).backward()
        optimizer.step()
    assert min(accuracy(0), accuracy(1)) > 0.98
    parameters = dict(model.named_parameters())

    def mask_of(own: int) -> dict[str, torch.Tensor]:
        masks = WeightMasks({name: parameters[name] for name in select(model)})
        training = MaskTraining(model, masks, alpha=1e-6, lr=3e-2, seed=1)
        for _ in range(250):
            training.step([lambda: loss(own, 32) / 4] * 4)
        found = masks.threshold()
        with replaced(model, masked(model, found)):
            assert accuracy(own) > 0.98 and accuracy(1 - own) < 0.05
        with replaced(model, masked(model, random_like(found, draw))):
            assert accuracy(own) < 0.1
        return found

    one, two = mask_of(0), mask_of(1)
    first, *hidden, last = (overlap(one[name], two[name]) for name in one)
    assert first.iou == last.iou == 0
    assert all(layer.iou > 1.2 * layer.chance_iou and layer.iomin > 0.9 for layer in hidden)
    # A control: with the first pair's weights at inputs and outputs, both pairs have the same modules.
    with torch.no_grad():
        model[0].weight[:, 40:] = model[0].weight[:, :40]
        for rows in (model[-1].weight, model[-1].bias):
            rows[20:] = rows[:20]
    copied = mask_of(1)
    _, *same, _ = (overlap(one[name], copied[name]) for name in one)
    assert all(layer.iou > max(own.iou, 0.95) for layer, own in zip(same, hidden, strict=True))
