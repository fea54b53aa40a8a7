"""Geometric attention as a module: its learned scalars, directions, dropout on the keys, and initialization."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention import Context, build_attention
from fairseq_sg.modules.cpu.dropout import dropout
from helpers.attention_cases import HEADS, WIDTH, WINDOWS, Case, padding_of, reference
from helpers.configs import config_of

ROLES = ("encoder", "decoder")
roles = pytest.mark.parametrize("role", ROLES)


@roles
@pytest.mark.parametrize(
    "options",
    [{}, {"geometric_normalize": True}, {"no_directional_encoding": True}],
    ids=["plain", "normalized", "without directions"],
)
def test_equals_its_equation_with_other_scalars(role, options):
    case = Case("geometric", role, options)
    module, (x, _) = case.build(), case.inputs()
    with torch.no_grad():
        module.alpha.fill_(-0.7), module.gamma.fill_(-0.4)
        if module.directional is not None:
            module.beta.fill_(1.9)
    expected, weights = reference(module, x, x, padding_of(7, "left"))
    out, got, _ = module(x, None, Context(key_padding_mask=padding_of(7, "left"), return_weights=True))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(got, weights, rtol=0, atol=1e-9)


def test_parameters_at_the_start():
    module = build_attention("geometric", config_of(32, 4), "encoder")
    assert module.alpha.item() == pytest.approx(8**-0.5) and module.beta.item() == 1 and module.gamma.item() == 0
    assert module.query_bias.shape == (4, 1, 8) and (module.query_bias == 0).all()
    assert module.directional.weight.shape == (8, 32) and module.directional.bias.abs().max() > 0
    scalars, bias, direction = 3, 32, 8 * 33
    assert sum(p.numel() for p in module.parameters()) == 4 * 32 * 32 + scalars + bias + direction


def test_fewer_parameters_where_there_is_less_to_say():
    def names(role="encoder", **options):
        module = build_attention("geometric", config_of(32, 4, **options), role)
        return {name: tuple(p.shape) for name, p in module.named_parameters()}

    assert names("decoder")["directional.weight"] == (4, 32)  # nothing lies ahead
    without = names(no_directional_encoding=True)
    assert not any("directional" in name or name == "beta" for name in without) and "gamma" in without
    biased = names(attention_bias=True)
    assert "query_bias" not in biased and biased["q_proj.bias"] == (32,)


@pytest.mark.parametrize(
    ("init", "bound"),
    [("reference", math.sqrt(6 / (64 + 16))), ("glorot", math.sqrt(6 / (64 + 64))), ("torch", 1 / 8)],
)
def test_initialization(init, bound):
    """The reference's is Glorot uniform with the fans of one head: 64 in and 16 out, or the reverse."""
    module = build_attention("geometric", config_of(64, 4, attention_init=init), "encoder")
    for projection in (module.q_proj, module.k_proj, module.v_proj, module.out_proj):
        assert 0.97 * bound < projection.weight.abs().max().item() <= bound
    assert module.directional.weight.abs().max().item() <= 1 / 8


def looking(direction: float):
    """An encoder whose heads all look forward (direction > 0) or backward; Values are the input."""
    module = Case("geometric", "encoder").build()
    with torch.no_grad():
        module.alpha.zero_(), module.directional.weight.zero_()
        module.directional.bias.copy_(torch.tensor([-direction, direction]).repeat(HEADS))
        for projection in (module.v_proj, module.out_proj):
            projection.weight.copy_(torch.eye(WIDTH))
    return module


def test_each_direction_has_its_channel():
    x = torch.randn(5, 2, WIDTH, dtype=torch.float64)
    nothing = torch.zeros(1, 2, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(looking(60.0)(x)[0], torch.cat([x[1:], nothing]))
    torch.testing.assert_close(looking(-60.0)(x)[0], torch.cat([nothing, x[:-1]]))
    mask = torch.tensor([[False, False, True, True, False]] * 2)
    torch.testing.assert_close(looking(60.0)(x, None, Context(key_padding_mask=mask))[0][:2], x[[1, 4]])


def test_normalized_rows_sum_to_one_or_have_nothing_to_sum():
    x = torch.randn(6, 2, WIDTH, dtype=torch.float64)
    mask = torch.tensor([[False] * 6, [True] * 6])
    for role in ROLES:
        module = Case("geometric", role, {"geometric_normalize": True}).build()
        weights = module(x, None, Context(key_padding_mask=mask, return_weights=True)).weights
        expected = torch.ones(6, dtype=torch.float64)
        expected[0] = float(role == "encoder")
        torch.testing.assert_close(weights[0].sum(-1), expected.expand(HEADS, -1))
        assert (weights[1] == 0).all()
        plain = Case("geometric", role).build()
        assert (plain(x, None, Context(return_weights=True)).weights.sum(-1) < 1).all()


@roles
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_normalized_in_half_precision_where_hardly_anything_matches(role, dtype):
    """Sums of 1e-9, which float16 does not have."""
    module = Case("geometric", role, {"geometric_normalize": True}).build(dtype)
    with torch.no_grad():
        module.alpha.fill_((WIDTH // HEADS) ** -0.5), module.beta.fill_(1.0), module.gamma.fill_(-20.0)
    x = torch.randn(6, 2, WIDTH).to(dtype).requires_grad_()
    out, weights, _ = module(x, None, Context(return_weights=True))
    out.float().square().sum().backward()
    assert out.dtype == weights.dtype == dtype
    torch.testing.assert_close(weights[:, :, 1:].float().sum(-1), torch.ones(2, HEADS, 5), rtol=0, atol=0.03)
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in module.parameters())


def test_first_position_of_a_decoder_sees_nothing():
    module, (x, _) = Case("geometric", "decoder").build(), Case("geometric", "decoder").inputs()
    out, weights, _ = module(x, None, Context(return_weights=True))
    assert (out[0] == 0).all() and (weights[:, :, 0] == 0).all() and (out[1:] != 0).all()
    state = {}
    assert (module(x[:1], None, Context(state=state))[0] == 0).all()
    biased = Case("geometric", "decoder", {"attention_bias": True}).build()
    assert torch.equal(biased(x)[0][0], biased.out_proj.bias.expand(3, -1))


def test_a_sentence_of_one_sees_nothing():
    module = Case("geometric", "encoder").build()
    assert (module(torch.randn(1, 2, WIDTH, dtype=torch.float64))[0] == 0).all()


@roles
def test_the_same_neighbours_give_the_same_output_anywhere(role):
    """Positions enter by order alone: where a sentence starts among the columns changes nothing."""
    module, x = Case("geometric", role).build(), torch.randn(5, 1, WIDTH, dtype=torch.float64)
    mask = torch.tensor([[True] * 4 + [False] * 5 + [True] * 2])
    longer = torch.randn(11, 1, WIDTH, dtype=torch.float64)
    longer[4:9] = x
    torch.testing.assert_close(module(longer, None, Context(key_padding_mask=mask))[0][4:9], module(x)[0])


@roles
def test_dropout_is_on_the_keys_in_training_only(role):
    case = Case("geometric", role)
    module, plain, (x, _) = case.build(geometric_key_dropout=0.5), case.build(), case.inputs()
    assert torch.equal(module(x)[0], plain(x)[0])
    module.train()
    torch.manual_seed(3)
    out = module(x)[0]
    torch.manual_seed(3)
    kept = dropout(module._split_heads(module.k_proj(x), HEADS), 0.5, training=True)
    v = plain._split_heads(plain.v_proj(x), HEADS)
    q = plain._split_heads(plain.q_proj(x), HEADS)
    expected = plain._join_heads(plain.attend(q, kept, v, Context(), x=x)[0])
    torch.testing.assert_close(out, expected)
    assert not torch.allclose(out, case.build()(x)[0])


def test_dropping_all_keys_leaves_the_direction():
    case = Case("geometric", "encoder")
    module, plain, (x, _) = case.build(geometric_key_dropout=1.0).train(), case.build(), case.inputs()
    nn.init.zeros_(plain.k_proj.weight)
    torch.testing.assert_close(module(x)[0], plain(x)[0])
    assert (module(x, None, Context(return_weights=True)).weights != 0).any()


@roles
def test_under_autocast(role):
    module = Case("geometric", role).build(torch.float32)
    x = torch.randn(6, 2, WIDTH)
    expected = module(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)[0]
        state: dict = {}
        steps = (
            torch.cat([module(x[n : n + 1], None, Context(state=state))[0] for n in range(6)])
            if role == "decoder"
            else out
        )
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() < 0.03 * expected.norm()
    assert (steps.float() - out.float()).norm() < 0.03 * expected.norm()


@roles
def test_a_window_of_one_leaves_nothing_to_see(role):
    (option,) = WINDOWS[role]
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} 1 leaves geometric attention nothing to see"):
        Case("geometric", role, {option: 1}).build()
    x = torch.randn(4, 1, WIDTH, dtype=torch.float64)
    out = Case("geometric", role, {option: 2}).build()(x)[0]
    assert ((out != 0).any(-1).squeeze(1) == torch.tensor([role == "encoder", True, True, True])).all()


def test_a_normalized_window_of_two_leaves_a_decoder_one_weight_of_one():
    given = {"attention_window": 2, "geometric_normalize": True}
    with pytest.raises(UsageError, match="--attention-window 2 leaves geometric attention one position"):
        Case("geometric", "decoder", given).build()
    Case("geometric", "decoder", given | {"attention_window": 3}).build()


def test_errors():
    with pytest.raises(
        UsageError, match="geometric attention cannot serve as 'cross' attention: its roles are encoder, decoder"
    ):
        build_attention("geometric", config_of(32, 4), "cross")
    with pytest.raises(ValueError, match="geometric attention takes no position numbers"):
        Case("geometric", "encoder").build()(
            torch.zeros(2, 1, WIDTH, dtype=torch.float64), None, Context(positions=torch.arange(2))
        )


def test_options_of_other_attentions_are_refused():
    """Dropout on the weights, for one: geometric attention's is on the keys and has a name of its own."""
    from fairseq_sg.models.sg_transformer import resolve

    only = {"encoder_attention": "geometric", "decoder_attention": "geometric", "cross_attention": "linear"}
    with pytest.raises(UsageError, match="--attention-dropout 0.3 has no effect"):
        resolve(SimpleNamespace(**only, attention_dropout=0.3))
    with pytest.raises(
        UsageError, match="--geometric-normalize True has no effect .* an option of: geometric attention"
    ):
        resolve(SimpleNamespace(geometric_normalize=True))
    with pytest.raises(UsageError, match="--position sinusoidal has no effect: geometric attention brings its own"):
        resolve(SimpleNamespace(**only, position="sinusoidal"))
    assert resolve(SimpleNamespace(**only, geometric_key_dropout=0.1)).geometric_key_dropout == 0.1
