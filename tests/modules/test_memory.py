"""The differentiable neural computer: against one in plain Python lists, gradients, sizes, programs set by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fairseq_sg.modules.memory import CONTROLLER_REGISTRY, DNC, State
from fairseq_sg.modules.memory.interface import InterfaceProjection
from helpers.lists_dnc import ListsDNC

#: masks, de-allocation, sharpness
VARIANTS = list(itertools.product([False, True], repeat=3))
variants = pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda v: "".join(letter for letter, on in zip("mds", v) if on) or "plain"
)


def make(
    variant=(True, True, True), *, inputs=3, outputs=2, cells=4, width=3, heads=2, dim=5, layers=1, controller="lstm",
    **more,
) -> DNC:  # fmt: skip
    masks, deallocate, sharpen = variant
    kind = CONTROLLER_REGISTRY.find(controller)(inputs, heads * width, dim, layers)
    switches = {"masks": masks, "deallocate": deallocate, "sharpen": sharpen}
    return DNC(kind, outputs, cells=cells, width=width, heads=heads, **switches, **more)


def shaken(model: DNC, scale: float = 1.0) -> DNC:
    """With larger parameters, so that every gate, mode and mask differs from step to step."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return model.double()


def in_use(model: DNC, x: Tensor) -> State:
    """A state in which no two cells are alike: the order of equal usages would be one of rounding errors."""
    state, cells = model.initial(x), model.cells
    usage = torch.stack([torch.randperm(cells) for _ in range(x.size(0))]).double()
    return state._replace(
        memory=torch.randn_like(state.memory),
        usage=(usage + 0.5) / (cells + 1),
        precedence=torch.softmax(torch.randn_like(state.precedence), 1),
        links=torch.rand_like(state.links).tril(-1) / cells,
        write_weights=torch.softmax(torch.randn_like(state.write_weights), 1),
        read_weights=torch.softmax(torch.randn_like(state.read_weights), 2),
        reads=torch.randn_like(state.reads),
    )


@variants
@pytest.mark.parametrize(("heads", "cells", "clamp"), [(1, 1, 0.0), (2, 5, 20.0), (3, 4, 0.5)])
def test_equals_lists(variant, heads, cells, clamp):
    """Twelve steps of the whole model: outputs and state."""
    model = shaken(make(variant, heads=heads, cells=cells, mask_floor=0.1, clamp=clamp))
    x = torch.randn(2, 12, 3, dtype=torch.float64)
    start = in_use(model, x)
    y, state, _ = model(x, start)
    for b in range(2):
        lists = ListsDNC(model, variant, mask_floor=0.1, clamp=clamp)
        for name in ("memory", "usage", "precedence", "links", "write_weights", "read_weights", "reads"):
            setattr(lists, name, getattr(start, name)[b].tolist())
        expected = [lists.step(row) for row in x[b].tolist()]
        torch.testing.assert_close(y[b], torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-10)
        for name in ("memory", "usage", "links", "precedence", "reads", "read_weights"):
            found = torch.tensor(getattr(lists, name), dtype=torch.float64)
            torch.testing.assert_close(getattr(state, name)[b], found, rtol=1e-9, atol=1e-10)


@variants
def test_equals_lists_from_the_start(variant):
    """Outputs alone: cells that were never written are alike, and any of them may be allocated next."""
    model = shaken(make(variant))
    x = torch.randn(1, 6, 3, dtype=torch.float64)
    lists = ListsDNC(model, variant, mask_floor=0.0, clamp=20.0)
    expected = torch.tensor([[lists.step(row) for row in x[0].tolist()]], dtype=torch.float64)
    torch.testing.assert_close(model(x)[0], expected, rtol=1e-9, atol=1e-10)


@variants
def test_gradcheck(variant):
    """Of four steps from a state with usages that are not near one another: sorting has no derivative at ties."""
    model = shaken(make(variant, cells=3, heads=2, width=2, dim=3, detach_usage=False), 0.5)
    x = torch.randn(1, 3, 3, dtype=torch.float64, requires_grad=True)
    state = in_use(model, x)
    parameters = dict(model.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(model, named, (x, state))[0]

    assert torch.autograd.gradcheck(run, (x, *parameters.values()))


def test_detached_usage():
    """The gradient through w^w_{t−1} into the usage is left out by default, as in the released code."""
    x = torch.randn(1, 4, 3, dtype=torch.float64)
    found = []
    for detach in (True, False):
        torch.manual_seed(3)
        model = shaken(make(detach_usage=detach))
        y, _, _ = model(x)
        found.append((y, torch.autograd.grad(y.sum(), model.interface.plain.weight)[0]))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.allclose(found[0][1], found[1][1])


# Sizes.


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (dict(inputs=9, outputs=9, cells=16, width=16, dim=32), (10_250, 11_306, 10_316, 11_372)),
        (dict(inputs=10, outputs=10, cells=64, width=32, dim=128), (106_716, 114_972, 106_974, 115_230)),
        (dict(inputs=13, outputs=6, cells=16, width=32, dim=32), (14_868, 16_980, 14_934, 17_046)),
        (dict(inputs=14, outputs=6, cells=16, width=32, dim=32), (14_996, 17_108, 15_062, 17_174)),
    ],
    ids=["copy", "recall", "key-value", "two-way"],
)
def test_parameters(sizes, expected):
    """Those of the released code, of DNC, M, S and MDS; de-allocation adds none."""
    kinds = ((False, False, False), (True, False, False), (False, False, True), (True, True, True))
    counts = [sum(p.numel() for p in make(kind, heads=1, **sizes).parameters()) for kind in kinds]
    assert tuple(counts) == expected


def test_interface():
    """2 W R + 4 W + 7 R + 3 numbers with everything on, as in the text."""
    for width, heads in ((16, 1), (64, 4)):
        full = InterfaceProjection(8, width=width, heads=heads, masks=True, sharpness=True)
        assert full.size == 2 * width * heads + 4 * width + 7 * heads + 3
        weight, bias = full.stacked()
        assert weight.shape == (full.size, 8) and bias.shape == (full.size,)
        bound = math.sqrt(6 / (8 + full.size))
        assert weight.abs().max() <= bound and weight.abs().max() > 0.9 * bound


def test_the_floor_of_masks_keeps_keys_trained():
    """Where masks are shut, keys have no gradient, but for the floor δ."""

    def of_keys(floor: float) -> Tensor:
        torch.manual_seed(0)
        model = shaken(make(mask_floor=floor, clamp=0.0))
        torch.nn.init.constant_(model.interface.masks.bias, -1e3)
        x = torch.randn(2, 3, 3, dtype=torch.float64)
        model(x, in_use(model, x))[0].square().sum().backward()
        width = model.interface.width
        return model.interface.plain.weight.grad[: width * (1 + model.interface.heads)]  # keys of the write and reads

    assert (of_keys(0.0) == 0).all()
    assert (of_keys(0.1).abs().amax(1) > 1e-8).all()


def test_a_plain_checkpoint_is_a_part_of_every_variant():
    plain = make((False, False, False)).state_dict()
    for variant in VARIANTS:
        found = make(variant).load_state_dict(plain, strict=False)
        assert not found.unexpected_keys
        parts = {name.split(".")[1] for name in found.missing_keys}
        assert parts == {part for part, on in (("masks", variant[0]), ("sharpness", variant[2])) if on}


def test_starts():
    model = make(dim=64, layers=2, mask_bias=1.0)
    assert (model.interface.masks.bias == 1).all() and not model.interface.plain.bias.any()
    bias = model.controller.inputs.bias.unflatten(0, (2, 4, 64))
    assert (bias[:, 1] == 1).all() and not bias[:, [0, 2, 3]].any()
    for layer, recurrent in enumerate(model.controller.recurrent):
        bound = math.sqrt(6 / (3 + recurrent.in_features + 64))
        for weight in (model.controller.inputs.weight.chunk(2)[layer], recurrent.weight):
            gates, cell = weight[: 3 * 64].abs().max().item(), weight[3 * 64 :].abs().max().item()
            assert 0.9 * bound < gates <= bound and bound < cell <= bound * 5 / 3


@pytest.mark.parametrize("controller", ["lstm", "feedforward"])
@pytest.mark.parametrize("layers", [1, 3])
def test_layers_of_a_controller(controller, layers):
    """Every layer sees the input, the reads and the layer below; h is that of all layers."""
    model = shaken(make(controller=controller, layers=layers, dim=4))
    assert model.controller.outputs == 4 * layers
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    y, state, _ = model(x)
    y.sum().backward()
    assert y.shape == (2, 5, 2) and all(p.grad.abs().sum() > 0 for p in model.parameters())
    # A feedforward controller has no state, an LSTM h and c.
    assert len(state.controller) == (2 if controller == "lstm" else 0)


@pytest.mark.parametrize("controller", ["lstm", "feedforward"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_controller_equals_its_equations(controller, layers):
    """Those of the docstrings, with one matrix W^l for all that a layer sees."""
    module = shaken(make(controller=controller, layers=layers, dim=4)).controller
    x, reads = torch.randn(5, 2, 3, dtype=torch.float64), torch.randn(5, 2, 6, dtype=torch.float64)
    rest = module.recurrent if controller == "lstm" else module.above
    weights = [torch.cat([a, b.weight], 1) for a, b in zip(module.inputs.weight.chunk(layers), rest, strict=True)]
    biases = module.inputs.bias.chunk(layers)
    h, c = ([torch.zeros(2, 4, dtype=torch.float64)] * layers for _ in range(2))
    state = module.initial(x.transpose(0, 1))
    for t in range(5):
        for layer in range(layers):
            below, before = h[layer - 1 : layer], [h[layer]] if controller == "lstm" else []
            sums = torch.cat([x[t], reads[t], *below, *before], 1) @ weights[layer].T + biases[layer]
            if controller == "lstm":
                i, f, o, g = sums.chunk(4, 1)
                c[layer] = f.sigmoid() * c[layer] + i.sigmoid() * g.tanh()
                h[layer] = o.sigmoid() * c[layer].tanh()
            else:
                h[layer] = sums.relu()
        found, state = module(module.project(x[t]), reads[t], state)
        torch.testing.assert_close(found, torch.cat(h, 1), rtol=1e-12, atol=1e-12)


# A sequence.


@variants
def test_padding_on_the_right_and_the_batch_change_nothing(variant):
    model = shaken(make(variant))
    x = torch.randn(3, 6, 3, dtype=torch.float64)
    y, _, _ = model(x)
    alone, _, _ = model(x[1:2, :4])
    torch.testing.assert_close(y[1:2, :4], alone, rtol=1e-10, atol=1e-12)
    turned, _, _ = model(x.flip(0))
    torch.testing.assert_close(turned.flip(0), y, rtol=1e-10, atol=1e-12)


def test_a_sequence_in_two_parts():
    model = shaken(make())
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    y, last, _ = model(x)
    first, state, _ = model(x[:, :3])
    second, end, _ = model(x[:, 3:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), y, rtol=1e-12, atol=0)
    torch.testing.assert_close(end.links, last.links, rtol=1e-12, atol=0)


@variants
def test_invariants_of_a_long_run(variant):
    """Weights are at least 0; those of reads sum up to 1 with sharpness, and to at most 1 without."""
    model = shaken(make(variant, cells=5)).float()
    with torch.no_grad():
        _, state, record = model(torch.randn(4, 60, 3), record=True)
    for name in ("write_weights", "read_weights", "usage", "forward", "backward"):
        found = getattr(record, name)
        assert (found >= -1e-6).all() and (found.amax() <= 1 + 1e-5), name
    totals = record.read_weights.sum(-1)
    assert (totals <= 1 + 1e-5).all()
    if variant[2]:
        torch.testing.assert_close(totals, torch.ones_like(totals))
    else:
        assert totals[:, 0].max() < 1  # nothing is linked yet
    assert (state.links.sum(1) <= 1 + 1e-4).all() and not state.links.diagonal(dim1=1, dim2=2).any()
    assert (record.read_masks is not None) == variant[0]


@pytest.mark.parametrize("how", ["autocast", "half"])
def test_half_precision_keeps_the_state_in_float32(how):
    torch.manual_seed(0)
    model = make(cells=6)
    x = torch.randn(2, 9, 3)
    exact, _, _ = model(x)
    if how == "half":
        y, state, _ = model.bfloat16()(x.bfloat16())
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, state, _ = model(x)
    for name in ("memory", "usage", "links", "precedence", "read_weights", "reads"):
        assert getattr(state, name).dtype == torch.float32
    torch.testing.assert_close(y.float(), exact, rtol=0.1, atol=0.05)


# Programs that are set by hand.


class Program(torch.nn.Module):
    """A controller of copying L words: in step t < L it writes its input, then it reads along the forward links.

    h is the input, an entry that is 1 while it writes, and one that is 1 in the first step of reading.
    """

    def __init__(self, bits: int):
        super().__init__()
        self.outputs = bits + 3

    def initial(self, x):
        return (x.new_zeros(x.size(0), 1),)

    def project(self, x):
        return x

    def forward(self, projected, reads, state):
        """projected (B, bits + 1), the last of them 1 where there is a word."""
        writing, (wrote,) = projected[:, -1:], state
        first = wrote * (1 - writing)
        return torch.cat([projected[:, :-1], writing, first, torch.ones_like(writing)], 1), (writing,)


def copier(variant, cells: int, bits: int) -> DNC:
    """Cell 0 is found by its content once, a mark that only the first word has; then links are followed."""
    masks, deallocate, sharpen = variant
    width = bits + 1  # and the mark
    switches = {"masks": masks, "deallocate": deallocate, "sharpen": sharpen}
    model = DNC(Program(bits + 1), bits, cells=cells, width=width, heads=1, clamp=40.0, **switches).double()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    h = {"writing": bits + 1, "first": bits + 2, "one": bits + 3}
    w, r = width, 1
    rows = {"read_key": w, "vector": w + r * w, "free": 3 * w + w, "g_a": 4 * w + 1, "g_w": 4 * w + 2}
    rows |= {"b_w": 4 * w + 3, "b_r": 4 * w + 4, "modes": 4 * w + 5}
    with torch.no_grad():
        weight = model.interface.plain.weight
        for i in range(width):
            weight[rows["vector"] + i, i] = 1.0
        weight[rows["read_key"] + bits, h["one"]] = 1.0  # the mark
        weight[rows["free"], h["one"]] = -40.0
        weight[rows["g_a"], h["one"]] = 40.0
        weight[rows["g_w"], h["writing"]], weight[rows["g_w"], h["one"]] = 80.0, -40.0
        weight[rows["b_r"], h["one"]] = 40.0
        weight[rows["modes"] + 1, h["first"]] = 80.0  # content
        weight[rows["modes"] + 2, h["one"]] = 20.0  # forward
        if masks:  # of the read: the mark alone
            model.interface.masks.weight[w:, h["one"]] = -40.0
            model.interface.masks.weight[w + bits, h["one"]] = 40.0
        for i in range(bits):
            model.output_of_reads.weight[i, i] = 1.0
    return model


@variants
@pytest.mark.parametrize("extra", [0, 3])
def test_copying_by_a_program(variant, extra):
    """L words in L cells, and in more, whose number is changed on the finished model."""
    bits, length = 5, 6
    model = copier(variant, length, bits)
    model.cells += extra
    words = torch.randint(0, 2, (2, length, bits)).double() * 2 - 1
    x = torch.zeros(2, 2 * length, bits + 2, dtype=torch.float64)
    x[:, :length, :bits], x[:, :length, -1] = words, 1.0
    x[:, 0, bits] = 20.0  # the mark
    y, _, record = model(x, record=True)
    assert torch.equal(y[:, length:].sign(), words)
    torch.testing.assert_close(y[:, length:], words, rtol=0.1, atol=0.1)
    written = record.write_weights[0, :length].argmax(1).tolist()
    assert len(set(written)) == length
    assert record.read_weights[0, length:, 0].argmax(1).tolist() == written
