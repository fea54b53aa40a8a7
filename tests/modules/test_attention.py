"""Every attention, in every role it has, against its equation, and against itself under padding, decoding and
reordering.

A new kind adds a file to ``attention_kinds`` with its cases and its equation; all tests below then hold it.
"""

from __future__ import annotations

import copy
import math
import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fairseq_sg.modules.attention import ATTENTION_REGISTRY, AttentionOptions, Context, build_attention
from helpers.attention_cases import CASES, HEADS, KINDS, WIDTH, WINDOWS, Case, padding_of, reference

cases = pytest.mark.parametrize("case", CASES, ids=str)
#: One of each kind and role: what the base class does depends on no option.
PLAIN = list({(case.name, case.role): case for case in reversed(CASES)}.values())
WINDOWED = [case for case in CASES if case.window]
plain_cases = pytest.mark.parametrize("case", PLAIN, ids=str)
decoding_cases = pytest.mark.parametrize("case", [c for c in CASES if c.role != "encoder"], ids=str)


def test_every_attention_has_its_cases_in_every_role():
    assert set(KINDS) == set(ATTENTION_REGISTRY)
    for name, cls in ATTENTION_REGISTRY.items():
        assert {case.role for case in CASES if case.name == name} == set(cls.roles)
    assert len(set(map(str, CASES))) == len(CASES)


@cases
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_equals_its_equation(case, side):
    module, (query, key) = case.build(), case.inputs()
    padding = None if side == "none" else padding_of(key.size(0), side)
    with torch.no_grad():  # loops over the queries of each head
        expected, weights = reference(module, query, key, padding)
    out, got, _ = module(query, key, Context(key_padding_mask=padding, return_weights=True))
    lean, none, _ = module(query, key, Context(key_padding_mask=padding))
    assert none is None
    torch.testing.assert_close(out, expected, rtol=0, atol=case.tolerance)
    torch.testing.assert_close(got, weights, rtol=0, atol=case.tolerance)
    torch.testing.assert_close(lean, out, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "name,options,part,number",
    [
        *((name, {}, "scale", 8**-0.5) for name in ("softmax", "relative", "abs_rel", "compositional")),
        *((name, {"attention_scale": "model_dim"}, "scale", 24**-0.5) for name in ("softmax", "relative")),
        ("linear", {}, "eps", 1e-6),
        ("linear", {"linear_attention_eps": 0.5}, "eps", 0.5),
        *(("galerkin", {"galerkin_norm_eps": 0.5}, f"{norm}_norm.eps", 0.5) for norm in "kv"),
        ("galerkin", {"galerkin_average": "2.5"}, "divisor", 2.5),
    ],
)
def test_numbers_that_the_equations_read_from_the_module(name, options, part, number):
    assert operator.attrgetter(part)(Case(name, "encoder", options).build()) == number


@cases
def test_gradients_with_and_without_weights_agree(case):
    """The lean path and the one that shows its weights are the same function; gradcheck holds the former."""
    module, (query, key) = case.build(), case.inputs(batch=2, queries=4)
    padding = padding_of(key.size(0), "right")[:2]
    query = query.clone().requires_grad_()
    source = key.clone().requires_grad_() if case.role == "cross" else None

    def attend(*x):
        memory = x[1] if case.role == "cross" else x[0]
        return module(x[0], memory, Context(key_padding_mask=padding))[0]

    tensors = [query] + ([source] if source is not None else [])
    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)
    memory = source if source is not None else query
    lean = module(query, memory, Context(key_padding_mask=padding))[0]
    shown = module(query, memory, Context(key_padding_mask=padding, return_weights=True))[0]
    wanted = [*tensors, *module.parameters()]
    g = torch.randn_like(lean)
    for name, a, b in zip(
        ["query", "source"][: len(tensors)] + [n for n, _ in module.named_parameters()],
        torch.autograd.grad(lean, wanted, g, allow_unused=True),
        torch.autograd.grad(shown, wanted, g, allow_unused=True),
    ):
        assert a is not None and b is not None, f"no gradient to {name}"
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(case, side):
    """A sentence alone gives what it gives in a batch with padding, whatever the padding holds."""
    module, (query, key) = case.build(), case.inputs(batch=1, queries=6)
    alone = module(query, key)[0]
    pad = 3
    garbage = torch.full((pad, 1, key.size(2)), 1e9, dtype=key.dtype)
    padded = torch.cat([garbage, key] if side == "left" else [key, garbage])
    mask = torch.zeros(1, padded.size(0), dtype=torch.bool)
    mask[0, :pad] = side == "left"
    if side == "right":
        mask[0, -pad:] = True
    if case.role == "cross":
        got = module(query, padded, Context(key_padding_mask=mask))[0]
    else:
        got = module(padded, padded, Context(key_padding_mask=mask))[0]
        got = got[pad:] if side == "left" else got[:-pad]
    torch.testing.assert_close(got, alone, rtol=1e-6, atol=1e-7)


@cases
@pytest.mark.parametrize("need_weights", [False, True])
def test_fully_padded_sentence_is_finite(case, need_weights):
    module, (query, key) = case.build(), case.inputs()
    query = query.clone().requires_grad_()
    memory = key if case.role == "cross" else query
    mask = torch.zeros(3, memory.size(0), dtype=torch.bool)
    mask[1] = True
    out = module(query, memory, Context(key_padding_mask=mask, return_weights=need_weights))[0]
    out.sum().backward()
    assert out.isfinite().all() and query.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("case", [c for c in CASES if c.role == "decoder"], ids=str)
@pytest.mark.parametrize("length", [2, 9, 70])
def test_causal_exactly(case, length):
    """What comes later changes nothing at all: the outputs before it are equal bit for bit, its gradient there is
    zero.
    """
    module, (x, _) = case.build(), case.inputs(queries=length)
    at = length // 2
    changed = x.clone()
    changed[at:] += 10.0
    before = module(x, x)[0][:at]
    assert torch.equal(module(changed, changed)[0][:at], before)
    x = x.clone().requires_grad_()
    module(x, x)[0][:at].sum().backward()
    assert (x.grad[at:] == 0).all()


@decoding_cases
@pytest.mark.parametrize("length", [1, 2, 19, 40])
def test_step_by_step_equals_full_pass(case, length):
    module, (query, key) = case.build(), case.inputs(queries=length)
    padding = padding_of(key.size(0), "right") if case.role == "cross" else None
    full = module(query, key, Context(key_padding_mask=padding))[0]
    state: dict[str, Any] = {}
    steps = [
        module(query[n : n + 1], key if case.role == "cross" else None, Context(key_padding_mask=padding, state=state))[
            0
        ]
        for n in range(length)
    ]
    torch.testing.assert_close(torch.cat(steps), full, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", [c for c in PLAIN if c.role == "decoder"], ids=str)
def test_copies_have_states_of_their_own(case):
    """As in a stack of layers that are copies of one."""
    first, (x, _) = case.build(), case.inputs(queries=5)
    second = copy.deepcopy(first)
    full = second(first(x)[0])[0]
    state: dict[str, Any] = {}
    steps = [
        second(first(x[n : n + 1], None, Context(state=state))[0], None, Context(state=state))[0] for n in range(5)
    ]
    torch.testing.assert_close(torch.cat(steps), full, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", [c for c in CASES if c.role == "decoder"], ids=str)
def test_several_positions_a_step_and_left_padding_after_reordering(case):
    module, (x, _) = case.build(), case.inputs(queries=30)
    padding = padding_of(30, "left")
    full = module(x, None, Context(key_padding_mask=padding))[0]
    state: dict[str, Any] = {}
    for a, b in ((0, 3), (3, 4), (4, 24), (24, 30)):
        if b == 30:
            order = torch.tensor([2, 0, 0, 1])
            module.reorder_incremental_state(state, order)
            x, padding, full = x[:, order], padding[order], full[:, order]
        part = module(x[a:b], None, Context(key_padding_mask=padding[:, a:b], state=state))[0]
        torch.testing.assert_close(part, full[a:b], rtol=1e-6, atol=1e-7)


def test_a_state_that_cannot_be_reordered_is_refused():
    module = ATTENTION_REGISTRY["softmax"](8, 2, role="decoder")
    state: dict[str, Any] = {}
    module.extend = lambda q, k, v, state, context: (v, {"sums": (k, v)})
    module(torch.randn(1, 2, 8), None, Context(state=state))
    with pytest.raises(TypeError, match="tensors, batch first, and numbers: name each tensor"):
        module.reorder_incremental_state(state, torch.tensor([1, 0]))


@decoding_cases
def test_decoding_after_reordering(case):
    """Beam search swaps, repeats and drops sentences between steps; each continues with its own past."""
    module, (query, key) = case.build(), case.inputs(queries=6)
    padding = padding_of(key.size(0), "right") if case.role == "cross" else None
    orders = {2: torch.tensor([2, 0, 0, 1]), 4: torch.tensor([3, 1])}
    history, source, mask, state = query[:0], key, padding, {}
    for n in range(6):
        if n in orders:
            order = orders[n]
            module.reorder_incremental_state(state, order)
            query, history = query[:, order], history[:, order]
            source = source[:, order]
            mask = None if mask is None else mask[order]
        history = torch.cat([history, query[n : n + 1]])
        memory = source if case.role == "cross" else None
        step = module(query[n : n + 1], memory, Context(key_padding_mask=mask, state=state))[0]
        full = module(history, memory, Context(key_padding_mask=mask))[0][-1:]
        torch.testing.assert_close(step, full, rtol=1e-6, atol=1e-7, msg=lambda m: f"step {n}: {m}")


@pytest.mark.parametrize("case", [c for c in CASES if c.name == "linear" and c.role != "encoder"], ids=str)
def test_linear_state_is_constant(case):
    """The decoding state of linear attention has the same size after 1 and after 50 positions."""
    module, sizes = case.build(), []
    for length in (1, 50):
        query, key = case.inputs(queries=length, keys=length)
        state: dict[str, Any] = {}
        for n in range(length):
            module(query[n : n + 1], key if case.role == "cross" else None, Context(state=state))
        (kept,) = state.values()
        sizes.append(sum(x.numel() for x in kept.values() if isinstance(x, torch.Tensor)))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("case", [c for c in WINDOWED if c.role == "decoder"], ids=str)
def test_the_state_of_a_window_is_constant_and_the_rest_is_not_seen(case):
    """After 60 and after 200 positions a state has as many keys; reordered, it continues as the full pass does."""
    module, (x, _) = case.build(), case.inputs(batch=2, queries=200)
    full = module(x, None)[0]
    state: dict[str, Any] = {}
    sizes = {}
    for n in range(200):
        if n == 100:
            module.reorder_incremental_state(state, torch.tensor([1, 0]))
            x, full = x.flip(1), full.flip(1)
        step = module(x[n : n + 1], None, Context(state=state))[0]
        torch.testing.assert_close(step, full[n : n + 1], rtol=1e-6, atol=1e-7)
        (kept,) = state.values()
        sizes[n] = kept["k"].numel()
        assert kept["length"] < case.window + 16
    assert max(list(sizes.values())[:60]) == max(list(sizes.values())[140:])
    changed = x.clone()
    changed[:190] += 1.0
    torch.testing.assert_close(module(changed, None)[0][193:], module(x, None)[0][193:], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "case,memory",
    [(case, memory) for case in WINDOWED for memory in ((0, 2, 9) if case.role == "decoder" else (0,))],
    ids=str,
)
def test_blocks_of_a_window_equal_the_whole(case, memory, monkeypatch):
    """Outputs and gradients, with lengths around blocks of 4 queries; ``memory`` positions precede them."""
    for length in (1, 4, 5, 8, 17):
        x = torch.randn(length, 2, WIDTH, dtype=torch.float64, requires_grad=True)
        before = torch.randn(memory, 2, WIDTH, dtype=torch.float64, requires_grad=True)
        context = Context(memory=before, first=3) if memory else Context()
        results = []
        for block in (4, 64):
            module = case.build()
            monkeypatch.setattr(type(module), "least_block", block)
            out = module(x, None, context)[0]
            inputs = [x, before, *module.parameters()] if memory else [x, *module.parameters()]
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs, materialize_grads=True)])
        for blocks, whole in zip(*results, strict=True):
            torch.testing.assert_close(blocks, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("role", WINDOWS)
def test_blocks_of_a_window_keep_drawn_positions(role, monkeypatch):
    module = ATTENTION_REGISTRY.find("relative")(WIDTH, HEADS, role=role, **WINDOWS[role]).double().eval()
    x, positions = torch.randn(11, 2, WIDTH, dtype=torch.float64), torch.arange(11).square()
    whole = module(x, None, Context(positions=positions))[0]
    monkeypatch.setattr(type(module), "least_block", 4)
    torch.testing.assert_close(module(x, None, Context(positions=positions))[0], whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("queries", [9, 16])
@pytest.mark.parametrize("case", WINDOWED, ids=str)
def test_a_window_over_padding_equals_the_equation_at_any_block(case, queries, side, monkeypatch):
    module, (x, _) = case.build(), case.inputs(queries=queries)
    monkeypatch.setattr(type(module), "least_block", 4)
    mask = padding_of(queries, side)
    expected = reference(module, x, x, mask)[0]
    tolerance = case.tolerance
    torch.testing.assert_close(
        module(x, None, Context(key_padding_mask=mask))[0], expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(
    "role,option",
    [("encoder", "attention_window"), ("decoder", "encoder_attention_window"), ("cross", "encoder_attention_window")],
)
def test_a_window_is_for_its_own_side(role, option):
    make = ATTENTION_REGISTRY.find("softmax")
    windowed = make(WIDTH, HEADS, role=role, **{option: 2})
    x = torch.randn(5, 1, WIDTH)
    whole = make(WIDTH, HEADS, role=role)
    whole.load_state_dict(windowed.state_dict())
    assert torch.equal(windowed(x)[0], whole(x)[0])


@pytest.mark.parametrize("case", [c for c in WINDOWED if c.role == "encoder"], ids=str)
def test_an_encoder_sees_no_further_than_its_window(case, monkeypatch):
    """A change of position 20 of 40 changes the outputs of positions 18 to 22 alone, also in blocks."""
    module, (x, _) = case.build(), case.inputs(batch=2, queries=40)
    monkeypatch.setattr(type(module), "least_block", 4)
    changed = x.clone()
    changed[20] += 1.0
    differs = (module(changed)[0] - module(x)[0]).abs().amax(dim=(1, 2)) > 0
    assert differs.nonzero().flatten().tolist() == [18, 19, 20, 21, 22]


@cases
@pytest.mark.parametrize("dtype,bound", [(torch.float16, 5e-3), (torch.bfloat16, 4e-2)], ids=["fp16", "bf16"])
def test_half_precision(case, dtype, bound):
    exact, (query, key) = case.build(), case.inputs(queries=40)
    low = case.build(dtype=dtype)
    expected = exact(query, key)[0]
    got = low(query.to(dtype), key.to(dtype))[0]
    assert got.dtype == dtype
    assert (got.double() - expected).norm() / expected.norm() < bound


@pytest.mark.parametrize("case", [c for c in PLAIN if c.role != "cross"], ids=str)
def test_non_contiguous_input(case):
    module = case.build()
    x = torch.randn(3, 7, WIDTH, 2, dtype=torch.float64).transpose(0, 1)[..., 0]
    torch.testing.assert_close(module(x)[0], module(x.contiguous())[0])


@plain_cases
def test_state_dict_round_trip(case):
    module, other = case.build(), case.build()
    nn.init.normal_(other.q_proj.weight)
    other.load_state_dict(module.state_dict())
    query, key = case.inputs()
    assert torch.equal(module(query, key)[0], other(query, key)[0])


@plain_cases
def test_values_come_out_with_their_padding(case):
    module, (query, key) = case.build(), case.inputs()
    mask = padding_of(key.size(0), "right")
    context = Context(padding_mask=mask, key_padding_mask=mask)
    assert module(query, key, context).values is None
    out, _, (values, padding) = module(query, key, replace(context, return_values=True))
    expected = module.v_proj(key).unflatten(-1, (module.value_heads, -1)).permute(1, 2, 0, 3)
    assert padding is mask and torch.equal(values, expected)
    assert torch.equal(out, module(query, key, context).output)


@pytest.mark.parametrize("case", [c for c in PLAIN if c.role != "encoder"], ids=str)
def test_values_while_decoding_are_refused(case):
    module, (query, key) = case.build(), case.inputs()
    with pytest.raises(ValueError, match="a loss on the Values is for training"):
        module(query[:1], key, Context(state={}, return_values=True))


@cases
def test_training_computes_what_evaluation_computes(case):
    """Without dropout, training and evaluation are the same path: equal bit for bit, and every hook fires in both."""
    module, (query, key) = case.build(), case.inputs()
    fired = []
    for name, part in module.named_modules():
        part.register_forward_hook(lambda *_, name=name: fired.append(name))
    results = []
    for training in (True, False):
        fired.clear()
        results.append((module.train(training)(query, key).output, sorted(fired)))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


def test_softmax_equals_torchs_multihead_attention():
    module, (x, _) = Case("softmax", "encoder").build(), Case("softmax", "encoder").inputs()
    theirs = nn.MultiheadAttention(WIDTH, HEADS, bias=False, dtype=torch.float64)
    theirs.in_proj_weight.data = torch.cat([module.q_proj.weight, module.k_proj.weight, module.v_proj.weight]).detach()
    theirs.out_proj.weight.data = module.out_proj.weight.detach()
    out, weights = theirs(x, x, x)
    got = module(x, None, Context(return_weights=True))
    torch.testing.assert_close(got.output, out)
    torch.testing.assert_close(got.weights.mean(1), weights)


def test_relative_attention_does_not_know_where_the_sentence_starts():
    """Shift invariance: the same tokens at other absolute positions, with the same neighbours, give the same output."""
    module = Case("relative", "encoder").build()
    x = torch.randn(4, 1, WIDTH, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False, False, False, False]])
    shifted = torch.cat([torch.randn(3, 1, WIDTH, dtype=torch.float64), x])
    torch.testing.assert_close(
        module(shifted, None, Context(key_padding_mask=mask))[0][3:], module(x)[0], rtol=1e-5, atol=1e-6
    )


# Initialization and errors.


@pytest.mark.parametrize(
    "name,init,bound",
    [
        ("softmax", "reference", math.sqrt(3 / 64)),
        ("linear", "reference", math.sqrt(3 / 64)),
        ("relative", "reference", 1 / 8),
        ("relative", "glorot", math.sqrt(3 / 64)),
        ("softmax", "torch", 1 / 8),
    ],
)
def test_initialization(name, init, bound):
    module = ATTENTION_REGISTRY[name](64, 4, role="encoder", attention_init=init)
    projections = [module.q_proj, module.k_proj, module.v_proj, module.out_proj]
    projections += [module.pos_proj] if name == "relative" else []
    for projection in projections:
        top = projection.weight.abs().max().item()
        assert 0.97 * bound < top <= bound


@pytest.mark.parametrize("name", ["softmax", "relative"])
@pytest.mark.parametrize("init, queries, keys", [("fused", 3, 2), ("joint", 1.5, 1.5)])
def test_initialization_of_several_projections_as_one_matrix(name, init, queries, keys):
    """The output is PyTorch's. Csordás et al. 2022 join keys and values, ``nn.MultiheadAttention`` queries too."""
    module = ATTENTION_REGISTRY[name](64, 4, role="encoder", attention_init=init)
    squares = {"q": queries / 64, "k": keys / 64, "v": keys / 64, "out": 1 / 64}
    squares |= {"pos": 3 / 64} if name == "relative" and init == "fused" else {}
    for projection, square in squares.items():
        top = getattr(module, f"{projection}_proj").weight.abs().max()
        assert 0.97 * math.sqrt(square) < top <= math.sqrt(square)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda c: ATTENTION_REGISTRY["softmax"](24, 5, role="encoder"), "the width 24 is not divisible by the number "
            "of attention heads 5"),
        (lambda c: ATTENTION_REGISTRY["relative"](24, 3, role="cross"), "relative attention cannot serve as 'cross' "
            "attention: its roles are encoder, decoder"),
        (lambda c: ATTENTION_REGISTRY["softmax"](24, 3, role="encoder", attention_init="x"), "--attention-init is "
            "'x': choose from reference, glorot, fused, joint, torch"),
        (lambda c: ATTENTION_REGISTRY["softmax"](24, 3, role="encoder", attention_dropout=1.5), "--attention-dropout "
            "is 1.5: choose a number from 0 to 1"),
        (lambda c: ATTENTION_REGISTRY["linear"](24, 3, role="encoder", linear_attention_eps=0.0),
         "--linear-attention-eps is 0.0: choose a number above 0"),
        (lambda c: ATTENTION_REGISTRY["linear"](24, 3, role="encoder", linear_attention_eps=1e-39),
         "--linear-attention-eps is 1e-39: choose 1.18e-38 or more"),
        (lambda c: ATTENTION_REGISTRY["galerkin"](24, 3, role="encoder", galerkin_norm_eps=0.0), "--galerkin-norm-eps "
            "is 0.0: choose a number above 0"),
        (lambda c: ATTENTION_REGISTRY["fourier"](24, 24, role="encoder"), "fourier attention normalizes each head, "
            "and of one number nothing is left: choose fewer heads"),
        (lambda c: ATTENTION_REGISTRY["softmax"](24, 3, role="encoder", attention_scale="x"), "--attention-scale is "
            "'x': choose from head_dim, model_dim"),
        (lambda c: ATTENTION_REGISTRY["linear"](24, 3, role="encoder", qk_norm="l3"), r"unknown query/key "
            r"normalization 'l3' \(--qk-norm\): choose from l1, l2, none, rms"),
        (lambda c: ATTENTION_REGISTRY["linear"](24, 3, role="encoder", feature_map="x"), r"unknown feature map 'x' "
            r"\(--feature-map\): choose from .*elu"),
        (lambda c: ATTENTION_REGISTRY["linear"](24, 3, role="encoder", feature_dim="x"), "--feature-dim is 'x': choose "
            "from head, sqrt, or a positive number"),
        (lambda c: build_attention("sofmax", c, "encoder"), "unknown attention 'sofmax' .*choose from .*linear, "
            "relative, softmax"),
        (lambda c: build_attention("softmax", c, "middle"), "unknown attention role 'middle': choose from encoder, "
            "decoder, cross"),
    ],
)  # fmt: skip
def test_errors_name_the_option_and_the_choices(make, message):
    with pytest.raises(ValueError, match=message):
        make(AttentionOptions())


def test_duplicate_names_are_refused():
    with pytest.raises(ValueError, match="attention 'softmax' is already registered, as .*SoftmaxAttention"):
        ATTENTION_REGISTRY.register("softmax")(nn.Identity)


@pytest.mark.parametrize("init", ["reference", "glorot", "fused", "joint", "torch", "torch_biases"])
@pytest.mark.parametrize("name", ["softmax", "geometric", "galerkin", "linear"])
def test_biases_of_projections_start_at_0_unless_asked_for(name, init):
    module = ATTENTION_REGISTRY[name](16, 2, role="encoder", attention_bias=True, attention_init=init)
    biases = [bias for key, bias in module.named_parameters() if key.endswith("_proj.bias")]
    assert len(biases) == (3 if name == "galerkin" else 4)
    assert all((bias == 0).all().item() == (init != "torch_biases") for bias in biases)
