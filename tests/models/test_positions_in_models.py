"""Every position with every self-attention it is defined for, in a whole model: padding, decoding, checkpoints,
refusals.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.sequence_generator import SequenceGenerator

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.models.sg_transformer import SGTransformer, resolve
from fairseq_sg.modules.attention import ATTENTION_REGISTRY
from fairseq_sg.modules.position import POSITION_REGISTRY, positions_for
from helpers.decoding import assert_steps_equal_full_passes
from helpers.models import dictionary

PAD, END = 1, 2
#: Every position, with options under which a short sentence shows all of it.
POSITIONS = {
    "none": {},
    "sinusoidal": {},
    "learned": {"learned_positions": 12},
    "rotary": {},
    "alibi": {},
    "t5": {"t5_buckets": 8, "t5_max_distance": 5},
    "fraction": {},
    "fraction-learned": {"fraction_scales": "learned"},
    "indicator": {},
    **{
        f"randomized-{base}": {"randomized_base": base, "randomized_range": 50, "randomized_eval_length": 12}
        for base in ("sinusoidal", "learned", "relative")
    },
}


def of(position: str) -> dict:
    return {"position": position.partition("-")[0]} | POSITIONS[position]


def combination(position: str, kind: str) -> dict:
    """The options of a model with ``kind`` as self-attention on each side where it can serve, and positions it goes
    with.
    """
    chosen = of(position)
    other = "relative" if chosen.get("randomized_base") == "relative" else "softmax"
    roles = ATTENTION_REGISTRY[kind].roles
    if POSITION_REGISTRY[chosen["position"]].needs_length:
        other, roles = "relative", {"encoder"}
    return chosen | {f"{side}_attention": kind if side in roles else other for side in ("encoder", "decoder")}


def goes_with(position: str, kind: str) -> bool:
    attention = ATTENTION_REGISTRY[kind]
    sides = {"encoder"} if POSITION_REGISTRY[of(position)["position"]].needs_length else {"encoder", "decoder"}
    return bool(sides & attention.roles) and of(position)["position"] in positions_for(
        attention, SimpleNamespace(**{"randomized_base": "sinusoidal"} | of(position))
    )


COMBINATIONS = [(position, kind) for kind in ATTENTION_REGISTRY for position in POSITIONS if goes_with(position, kind)]
combinations = pytest.mark.parametrize("position,kind", COMBINATIONS)
RANDOM = [c for c in COMBINATIONS if c[0].startswith("randomized")]


def test_combinations_are_complete():
    assert {position.partition("-")[0] for position in POSITIONS} == set(POSITION_REGISTRY)
    by_kind = {
        kind: {p for p, k in COMBINATIONS if k == kind} for kind in ("softmax", "linear", "galerkin", "relative")
    }
    assert by_kind["softmax"] == set(POSITIONS) - {"randomized-relative"}
    assert by_kind["linear"] == by_kind["galerkin"] == by_kind["softmax"] - {"alibi", "t5"}
    assert by_kind["relative"] == {"randomized-relative"}


def tiny(position: str, kind: str, seed=0, left_pad_target=False, **more) -> SGTransformer:
    sizes = {
        f"{side}_{k}": v
        for side in ("encoder", "decoder")
        for k, v in (("embed_dim", 16), ("ffn_embed_dim", 32), ("attention_heads", 2), ("layers", 2))
    }
    # Unscaled positions, and large ones: their part in what comes out is no rounding error.
    config = sizes | combination(position, kind) | {"embedding_scaling": "none"} | more
    task = SimpleNamespace(
        source_dictionary=dictionary(8),
        target_dictionary=dictionary(8),
        cfg=SimpleNamespace(left_pad_target=left_pad_target),
    )
    torch.manual_seed(seed)
    return SGTransformer.build_model(SimpleNamespace(**config), task).eval()


SRC, TGT = [[4, 5, 6, 7, 2], [8, 9, 2]], [[2, 4, 5], [2, 6, 7, 8, 9]]


def batch(rows, left=False):
    width = max(map(len, rows))
    return torch.tensor([[PAD] * (width - len(r)) + r if left else r + [PAD] * (width - len(r)) for r in rows])


@combinations
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padding_changes_nothing(position, kind, left):
    model = tiny(position, kind, left_pad_target=left)
    together = model(batch(SRC, left), None, batch(TGT, left))[0]
    for i in range(2):
        alone = model(torch.tensor([SRC[i]]), None, torch.tensor([TGT[i]]))[0][0]
        part = together[i, -len(TGT[i]) :] if left else together[i, : len(TGT[i])]
        torch.testing.assert_close(part, alone, rtol=1e-4, atol=1e-5)


@combinations
@pytest.mark.parametrize("depth", ["separate", "shared"])
def test_decoding_step_by_step_after_reordering_equals_full_passes(position, kind, depth):
    model = tiny(position, kind, depth=depth)
    begin = torch.full((2, 1), END)
    assert_steps_equal_full_passes(model, batch(SRC, left=True), begin, words=8, steps=9, rtol=1e-4, atol=1e-5)


@combinations
def test_beam_search_scores_its_hypotheses_as_a_full_pass_does(position, kind):
    model = tiny(position, kind)
    src = batch(SRC, left=True)
    generator = SequenceGenerator([model], dictionary(8), beam_size=3, max_len_b=6, normalize_scores=False)
    sample = {"net_input": {"src_tokens": src, "src_lengths": torch.tensor([5, 3])}}
    for source, hypotheses in zip(src, generator.generate([model], sample)):
        assert len(hypotheses) == 3
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"]
            shifted = torch.cat([torch.tensor([END]), tokens[:-1]])
            scores = model(source[None], None, shifted[None])[0].log_softmax(-1)[0]
            scores = scores.gather(1, tokens[:, None])[:, 0]
            torch.testing.assert_close(hypothesis["positional_scores"], scores, rtol=1e-3, atol=1e-4)


@combinations
def test_checkpoint_holds_all_that_the_model_is(position, kind):
    model, other = tiny(position, kind), tiny(position, kind, seed=1)
    src, tgt = batch(SRC), batch(TGT)
    assert not torch.allclose(model(src, None, tgt)[0], other(src, None, tgt)[0])
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(src, None, tgt)[0], other(src, None, tgt)[0])


@combinations
def test_every_parameter_learns(position, kind):
    model = tiny(position, kind).train()
    model(batch(SRC), None, batch(TGT))[0].square().sum().backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not idle


@combinations
def test_the_encoder_knows_order_by_its_positions(position, kind):
    """Without positions, permuted words give permuted states; with any, they do not."""
    model = tiny(position, kind)
    words, order = torch.tensor([[4, 5, 6, 7]]), torch.tensor([1, 0, 2, 3])
    states, permuted = (model.encoder(x, None)["encoder_out"][0][:, 0] for x in (words, words[:, order]))
    assert torch.allclose(permuted, states[order], atol=1e-5) == (position == "none")


@pytest.mark.parametrize("position,kind", RANDOM)
def test_randomized_positions_change_in_training_alone(position, kind):
    model = tiny(position, kind, dropout=0.0)
    src, tgt = batch(SRC), batch(TGT)
    assert torch.equal(model(src, None, tgt)[0], model(src, None, tgt)[0])
    model.train()
    draws = [model(src, None, tgt)[0] for _ in range(3)]
    assert not torch.allclose(draws[0], draws[1]) and not torch.allclose(draws[1], draws[2])
    torch.manual_seed(7)
    first = model(src, None, tgt)[0]
    torch.manual_seed(7)
    assert torch.equal(model(src, None, tgt)[0], first)


def seen_numbers(model) -> dict:
    """Which position numbers the self-attentions of each side get in one forward pass."""
    seen, handles = {}, []
    for side in ("encoder", "decoder"):
        for layer in getattr(model, side).stack.layers:

            def note(module, args, side=side):
                seen.setdefault(side, []).append(args[2].positions.tolist())

            handles.append(layer.self_attn.register_forward_pre_hook(note))
    words = torch.tensor([[4, 5, 6, 7, 8, 2]])
    model(words, None, words)
    for handle in handles:
        handle.remove()
    return seen


def test_randomized_relative_positions_are_one_draw_a_side_for_all_layers():
    model = tiny("randomized-relative", "relative", encoder_layers=3, decoder_layers=3).train()
    for _ in range(5):
        seen = seen_numbers(model)
        assert len(seen["encoder"]) == len(seen["decoder"]) == 3
        for side in seen.values():
            assert side[0] == side[1] == side[2] == sorted(set(side[0]))
        assert seen["encoder"][0] != seen["decoder"][0]
    model.eval()
    assert seen_numbers(model) == dict.fromkeys(["encoder", "decoder"], [[0, 4, 8, 12, 16, 20]] * 3)


def test_position_serves_the_side_that_needs_it():
    """A relative encoder keeps its own positions; the decoder gets what was asked for."""
    for position in ("rotary", "alibi", "t5", "learned", "randomized-sinusoidal"):
        model = tiny(position, "softmax", encoder_attention="relative")
        assert model.encoder.embedding.positions.registered_name == "none" and model.encoder.indices is None
        decoder = model.decoder
        inside = decoder.stack.layers[0].self_attn.position
        chosen = decoder.embedding.positions if inside is None else inside
        assert chosen.registered_name == of(position)["position"]
        assert decoder.stack.layers[0].cross_attn.position is None


def test_sentences_beyond_the_longest_name_the_option():
    long = torch.full((1, 13), 4)
    for position, kind, option in (
        ("learned", "softmax", "--learned-positions 12"),
        ("randomized-sinusoidal", "linear", "--randomized-eval-length 12"),
        ("randomized-relative", "relative", "--randomized-eval-length 12"),
    ):
        model = tiny(position, kind)
        with torch.no_grad():
            model(long[:, :12], None, long[:, :12])
            for src, tgt in ((long, long[:, :3]), (long[:, :3], long)):
                with pytest.raises(ValueError, match=f"a sequence of length 13 .*{option}"):
                    model(src, None, tgt)


@pytest.mark.parametrize("position,kind", [("none", "softmax"), ("t5", "softmax"), ("sinusoidal", "linear")])
def test_a_model_without_a_longest_sentence(position, kind):
    assert tiny(position, kind).max_positions() == (10**9, 10**9)


@pytest.mark.parametrize(
    "position,kind", [("learned", "softmax"), ("randomized-sinusoidal", "linear"), ("randomized-relative", "relative")]
)
def test_the_longest_sentence_of_a_model_is_told_to_fairseq(position, kind):
    """Which then takes none that is longer, and generates none."""
    model = tiny(position, kind)
    assert model.max_positions() == (12, 12) and model.max_decoder_positions() == 12


def test_a_side_without_these_positions_has_no_longest_sentence():
    assert tiny("learned", "softmax", encoder_attention="relative").max_positions() == (10**9, 12)


@pytest.mark.parametrize("role,limits", [("encoder", (9, 10**9)), ("decoder", (10**9, 9)), ("cross", (9, 9))])
def test_a_feature_map_with_an_end_limits_the_length_too(role, limits):
    options = {f"{role}_attention": "linear", "feature_map": "cosformer", "cosformer_horizon": 9}
    assert tiny("sinusoidal", "softmax", **options).max_positions() == limits


# From the command line.


def parsed(*arguments):
    """The model's configuration as fairseq-train makes it of a command line."""
    command = ["data", "--task", "sg_translation", "--arch", "sg_transformer", *arguments]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), command)).model


commands = pytest.mark.filterwarnings("ignore:\\s*'config' is validated against ConfigStore schema")


@commands
@pytest.mark.parametrize(
    "arguments,expected",
    [
        ("--position learned --learned-positions 77", {"learned_positions": 77}),
        ("--position learned --learned-positions-std 1", {"learned_positions_std": 1.0}),
        ("--position rotary --encoder-attention linear", {"position": "rotary"}),
        ("--position t5 --t5-buckets 16 --t5-max-distance 40", {"t5_buckets": 16, "t5_max_distance": 40}),
        ("--position alibi --encoder-attention relative", {"position": "alibi"}),
        (
            "--position randomized --randomized-base learned --randomized-range 300 --randomized-eval-length 30",
            {"randomized_base": "learned", "randomized_range": 300, "randomized_eval_length": 30},
        ),
        (
            "--position randomized --randomized-base relative --encoder-attention relative --decoder-attention "
            "relative",
            {"randomized_base": "relative", "randomized_range": 2048},
        ),
    ],
)
def test_options_on_the_command_line(arguments, expected):
    config = resolve(parsed(*arguments.split()))
    assert {name: getattr(config, name) for name in expected} == expected


RELATIVE = "--encoder-attention relative --decoder-attention relative"


@commands
@pytest.mark.parametrize(
    "arguments,message",
    [
        ("--position alibi --encoder-attention linear", r"--position alibi is not defined for linear attention "
            r"\(--encoder-attention\); with it go: fraction, indicator, learned, none, randomized, rotary, "
            r"sinusoidal$"),
        ("--position t5 --decoder-attention linear", r"--position t5 is not defined for linear attention "
            r"\(--decoder-attention\)"),
        ("--position t5 --encoder-layers 2 --encoder-attention softmax,linear", r"--position t5 is not defined for "
            r"linear attention \(--encoder-attention\)"),
        (f"--position rotary {RELATIVE}", r"--position rotary has no effect: relative attention brings its own "
            r"positions; leave the option out"),
        (f"--position learned {RELATIVE}", r"--position learned has no effect: relative attention brings its own"),
        (f"--position randomized {RELATIVE}", r"--position randomized has no effect: relative attention brings its "
            r"own"),
        ("--position randomized --randomized-base relative", r"--position randomized is not defined for softmax "
            r"attention \(--encoder-attention\); with it go: alibi, .*t5"),
        ("--position randomized --randomized-base relative --encoder-attention relative", r"--position randomized is "
            r"not defined for softmax attention \(--decoder-attention\)"),
        ("--position randomized --randomized-base alibi", r"--randomized-base is 'alibi': choose from sinusoidal, "
            r"learned, relative"),
        ("--learned-positions-std 1", r"--learned-positions-std 1.0 has no effect .* an option of: learned position$"),
        ("--learned-positions 5", r"--learned-positions 5 has no effect .* it is an option of: learned position$"),
        ("--position rotary --t5-buckets 16", r"--t5-buckets 16 has no effect .* it is an option of: t5 position$"),
        ("--position sinusoidal --randomized-range 9", r"--randomized-range 9 has no effect .* an option of: "
            r"randomized position$"),
        ("--position fraction", r"--position fraction is not defined for softmax attention "
            r"\(--decoder-attention\); with it go: alibi, indicator, learned, none, randomized, rotary, "
            r"sinusoidal, t5$"),
        ("--position indicator --fraction-scales learned", r"--fraction-scales learned has no effect .* it is an "
            r"option of: fraction position$"),
        ("--position rope", r"unknown position 'rope' \(--position\): choose from alibi, fraction, indicator, "
            r"learned, none, randomized, rotary, sinusoidal, t5"),
    ],
)  # fmt: skip
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve(parsed(*arguments.split()))
