"""How options of mechanisms become one configuration: joining, defaults from every source, refusals."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Optional

import pytest

pytest.importorskip("fairseq")

from fairseq import criterions, options
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import nn

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import ARCHITECTURES
from fairseq_sg.models.config import REMOVED, Configuration, as_dataclass, join_options, refuse_unused_options
from fairseq_sg.models.sg_transformer import configuration, resolve
from fairseq_sg.modules.depth import SharedACT
from fairseq_sg.registry import Mechanism, Registry
from fairseq_sg.tasks.mixin import SGTask


def option(default, text="text"):
    return field(default=default, metadata={"help": text})


@dataclass
class Own:
    """A model's own options."""

    width: int = option(8, "width of the model")
    scale: float | None = option(None)
    dropout: float = option(0.1)


@dataclass
class Common:
    bias: bool = option(False)


@dataclass
class Lever(Common):
    length: float = option(1.5)


@dataclass
class Wheel(Common):
    spokes: int = option(5)


def registry(**classes) -> Registry:
    gadgets = Registry("gadget", "--gadget")
    for name, options_ in classes.items():
        gadgets.register(name)(type(name, (Mechanism,), {"options": options_}))
    return gadgets


GADGETS = registry(lever=Lever, wheel=Wheel, plain=None)
GADGETS["plain"].excludes = frozenset({"scale"})
LEVER, WHEEL, PLAIN = (GADGETS.find(name) for name in ("lever", "wheel", "plain"))
Joined = join_options(Own, [GADGETS], {"small": {"width": 2}})


# Joining.


def test_joined_class_has_every_option_once():
    fields = {f.name: f for f in dataclasses.fields(Joined)}
    assert [name for name in fields if name != "_name"] == ["width", "scale", "dropout", "bias", "length", "spokes"]
    assert issubclass(Joined, FairseqDataclass) and Joined.__doc__ == Own.__doc__
    assert fields["length"].default == 1.5 and fields["length"].type is float
    assert fields["spokes"].metadata["help"] == "text"


def test_what_an_architecture_sets_has_no_default_but_says_it():
    fields = {f.name: f for f in dataclasses.fields(Joined)}
    assert fields["width"].default is None and fields["width"].type == Optional[int]  # noqa: UP045
    assert fields["width"].metadata["help"] == "width of the model (default: the architecture's, or 8)"
    assert as_dataclass(Joined, Namespace()).width == 8


@dataclass
class OtherDefault:
    bias: bool = option(True)


@dataclass
class OtherType:
    bias: int = option(0)


@dataclass
class OwnsDropout:
    dropout: float = option(0.2)


@pytest.mark.parametrize(
    "other,message",
    [
        (OtherDefault, "option 'bias' of crank gadget differs from the one of lever gadget"),
        (OtherType, "option 'bias' of crank gadget differs from the one of lever gadget"),
        (OwnsDropout, "option 'dropout' of crank gadget differs from the one of Own: choose another name"),
        *(
            (dataclasses.make_dataclass("Taken", [(name, int, option(7))]), f"option '{name}' of crank gadget is an ")
            for name in ("seed", "max_update", "weight_decay", "warmup_updates", "optimizer", "arch")
        ),
    ],
)
def test_conflicting_options_are_refused(other, message):
    with pytest.raises(TypeError, match=message):
        join_options(Own, [registry(lever=Lever, crank=other)], {})


def test_options_of_several_registries_are_joined():
    joined = join_options(Own, [registry(lever=Lever), registry(wheel=Wheel)], {})
    assert {"length", "spokes", "bias"} <= {f.name for f in dataclasses.fields(joined)}
    with pytest.raises(TypeError, match="option 'bias' of crank gadget differs"):
        join_options(Own, [registry(lever=Lever), registry(crank=OtherDefault)], {})


# Values from wherever fairseq keeps them.


def from_structured(**values):
    return OmegaConf.merge(OmegaConf.structured(Joined), values)


def from_partial(**values):
    return OmegaConf.create(values | {"dropout": "???"})


@pytest.mark.parametrize(
    "source", [Namespace, SimpleNamespace, from_structured, from_partial, Joined, lambda **v: OmegaConf.create(v)]
)
def test_missing_values_have_the_declared_defaults(source):
    config = as_dataclass(Joined, source(length=2.5, spokes=7))
    assert type(config) is Joined
    values = {name: getattr(config, name) for name in ("width", "scale", "dropout", "bias", "length", "spokes")}
    assert values == {"width": 8, "scale": None, "dropout": 0.1, "bias": False, "length": 2.5, "spokes": 7}
    assert all(not OmegaConf.is_config(value) for value in vars(config).values())


@pytest.mark.parametrize("source", [Namespace, from_structured, Joined])
def test_given_values_win_also_the_false_ones(source):
    config = as_dataclass(Joined, source(width=3, scale=0.0, dropout=0.0, bias=True))
    assert (config.width, config.scale, config.dropout, config.bias) == (3, 0.0, 0.0, True)
    again = as_dataclass(Joined, config)
    assert again == config and again is not config


def test_unknown_attributes_are_left_out():
    config = as_dataclass(Joined, Namespace(arch="x", data="folder", width=4))
    assert config.width == 4 and not hasattr(config, "data")


def test_lists_become_plain_lists():
    @dataclass
    class Sizes:
        sizes: list[int] | None = option(None)

    joined = join_options(Sizes, [], {})
    config = as_dataclass(joined, OmegaConf.create({"sizes": [1, 2]}))
    assert config.sizes == [1, 2] and type(config.sizes) is list


# Options without effect.


def configured(**values):
    return as_dataclass(Joined, Namespace(**values))


def test_option_that_no_chosen_mechanism_has_is_refused():
    with pytest.raises(
        ValueError, match=r"--length 2.0 has no effect on the chosen mechanisms; it is an option of: lever gadget$"
    ):
        refuse_unused_options(configured(length=2.0), [GADGETS], {WHEEL})
    with pytest.raises(
        ValueError, match=r"--bias True has no effect .* it is an option of: lever gadget, wheel gadget"
    ):
        refuse_unused_options(configured(bias=True), [GADGETS], {PLAIN})


@pytest.mark.parametrize(
    "values,used",
    [
        ({}, set()),
        ({"length": 1.5, "spokes": 5, "bias": False}, {PLAIN}),
        ({"length": 2.0}, {LEVER}),
        ({"length": 2.0, "spokes": 6}, {LEVER, WHEEL}),
        ({"bias": True}, {WHEEL, PLAIN}),
        ({"width": 3, "scale": 2.0}, set()),
    ],
    ids=["nothing-set", "set-to-defaults", "taken", "taken-by-two", "shared", "own-options"],
)
def test_options_with_effect_pass(values, used):
    refuse_unused_options(configured(**values), [GADGETS], used)


# Removed options.

OTHER = {str: "other", float: 0.25, bool: True, type(None): 0.25}
REMOVED_VALUES = [(name, default, OTHER[type(default)]) for name, (default, _) in REMOVED.items()]


@pytest.mark.parametrize("source", [Namespace, lambda **values: OmegaConf.create(values)])
@pytest.mark.parametrize("name,default,other", REMOVED_VALUES, ids=REMOVED)
def test_removed_option_of_an_old_checkpoint(name, default, other, source):
    """At its old default it is ignored; another value would need code that is not there."""
    assert name not in {f.name for f in dataclasses.fields(configuration.dataclass)}
    assert resolve(source(**{name: default}, encoder_layers=2)) == resolve(Namespace(encoder_layers=2))
    message = f"{ranges.flag(name)} is {other} in this configuration, and the option was removed: "
    with pytest.raises(UsageError, match=message):
        resolve(source(**{name: other}))


def test_name_of_a_removed_option_may_be_declared_again():
    @dataclass
    class Again:
        output_dropout: float = option(0.5)

    joined = join_options(Own, [registry(lever=Again)], {})
    assert as_dataclass(joined, Namespace(output_dropout=0.3)).output_dropout == 0.3


class FairseqTask:
    """fairseq's part of a task."""

    def build_model(self, cfg, from_checkpoint=False):
        model = nn.Identity()
        model.cfg = cfg
        return model

    def build_criterion(self, cfg, from_checkpoint=False):
        return criterions.build_criterion(cfg, self, from_checkpoint=from_checkpoint)


class Task(SGTask, FairseqTask):
    """A task of this plugin without data."""

    target_dictionary = None


def old_criterion(**values):
    """The criterion's part of an old checkpoint's configuration, in struct mode as fairseq keeps it."""
    cfg = OmegaConf.create({"criterion": {"_name": "cross_entropy_orthogonality", "sentence_avg": False, **values}})
    OmegaConf.set_struct(cfg, True)
    return cfg.criterion


def test_old_checkpoints_bring_their_criterion():
    cfg = old_criterion(label_smoothing=0.2, orthogonality_heads="separate", orthogonality_padding="exclude")
    assert Task().build_criterion(cfg).label_smoothing == 0.2
    with pytest.raises(UsageError, match="--orthogonality-padding is include .* the orthogonality loss leaves out pad"):
        Task().build_criterion(old_criterion(orthogonality_padding="include"))


def test_a_task_keeps_the_losses_that_its_model_emits(monkeypatch):
    """The criterion is built after the model, and checks --aux-loss-weights against them."""
    stack = SharedACT(lambda step: nn.Identity(), 2, 4)
    monkeypatch.setattr(FairseqTask, "build_model", lambda self, cfg, from_checkpoint: stack)
    task = Task()
    assert task.emitted_losses is None and task.build_model(Namespace()) is stack
    assert task.emitted_losses == {"ponder": 0.03}


def test_old_checkpoints_bring_their_model():
    for arch in ("sg_transformer", "sg_transformer_scan", "sg_encoder"):
        cfg = OmegaConf.create({"_name": arch, "log_length_of": "valid"})
        assert "log_length_of" not in Task().build_model(cfg, True).cfg
        with pytest.raises(UsageError, match="--log-length-of is padded .* was removed"):
            Task().build_model(OmegaConf.create({"_name": arch, "log_length_of": "padded"}), True)
    others = OmegaConf.create({"_name": "model_of_a_user", "tied_output": True})
    assert Task().build_model(others).cfg.tied_output is True


# The real configuration.


def parsed(*arguments):
    """The model's configuration as fairseq-train makes it of a command line."""
    command = ["data", "--task", "sg_translation", "--criterion", "cross_entropy_orthogonality", *arguments]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), command)).model


pytestmark = pytest.mark.filterwarnings("ignore:\\s*'config' is validated against ConfigStore schema")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architecture_sets_its_sizes_and_leaves_the_rest(arch):
    config = resolve(parsed("--arch", arch))
    values = ARCHITECTURES[arch]
    assert {name: getattr(config, name) for name in values} == values
    plain = resolve(parsed("--arch", "sg_transformer"))
    others = [f.name for f in dataclasses.fields(configuration.dataclass) if f.name not in values and f.name != "_name"]
    assert {name: getattr(config, name) for name in others} == {name: getattr(plain, name) for name in others}


def test_user_s_value_wins_over_the_architecture_s_also_where_it_is_the_default_of_the_model():
    config = resolve(parsed("--arch", "sg_transformer_scan", "--encoder-embed-dim", "512", "--decoder-layers", "6"))
    assert (config.encoder_embed_dim, config.decoder_embed_dim) == (512, 128)
    assert (config.encoder_layers, config.decoder_layers) == (3, 6)
    separate = resolve(parsed("--arch", "sg_transformer_cfq_universal", "--depth", "separate"))
    assert separate.depth == "separate" and separate.encoder_layers == 6


def test_options_of_mechanisms_arrive_with_their_types():
    arguments = ["--feature-map", "elu", "--qk-norm", "rms", "--linear-attention-eps", "1e-3", "--attention-bias"]
    config = resolve(parsed("--arch", "sg_transformer", "--encoder-attention", "linear", *arguments))
    assert (config.qk_norm, config.linear_attention_eps, config.attention_bias) == ("rms", 1e-3, True)


def test_sizes_of_vaswani_without_a_named_architecture():
    config = resolve(SimpleNamespace())
    sizes = (
        config.encoder_embed_dim,
        config.encoder_ffn_embed_dim,
        config.encoder_attention_heads,
        config.encoder_layers,
    )
    assert sizes == (512, 2048, 8, 6) and config.depth == "separate"


@pytest.mark.parametrize(
    "given,attention,activation",
    [
        ({}, 0.1, 0.1),
        ({"dropout": 0.4}, 0.4, 0.4),
        ({"dropout": 0.4, "attention_dropout": 0.0}, 0.0, 0.4),
        ({"activation_dropout": 0.2}, 0.1, 0.2),
    ],
)
def test_dropout_reaches_where_none_of_its_own_is_set(given, attention, activation):
    source = SimpleNamespace(**given)
    config = resolve(source)
    assert (config.attention_dropout, config.activation_dropout) == (attention, activation)
    assert vars(source) == given  # what the checkpoint keeps is what the user set


def test_an_architecture_fills_only_what_is_not_set():
    config = Namespace(width=1, height=None)
    Configuration(Own, (), {}).fill(config, {"width": 5, "height": 6, "depth": 7})
    assert vars(config) == {"width": 1, "height": 6, "depth": 7}


@dataclass
class WithGadgets(Own):
    gadget: str = option("plain")


@pytest.mark.parametrize(
    "given,values,filled",
    [
        ({}, {"gadget": "lever", "length": 2.0}, {"gadget": "lever", "length": 2.0}),
        ({"gadget": "wheel"}, {"gadget": "lever", "length": 2.0}, {"gadget": "wheel"}),
        ({"gadget": "plain, lever"}, {"gadget": "wheel", "length": 2.0}, {"gadget": "plain, lever", "length": 2.0}),
        # The default has no options, and both others have this one.
        ({}, {"bias": True, "width": 3}, {"width": 3}),
        ({"gadget": "wheel"}, {"bias": True}, {"gadget": "wheel", "bias": True}),
        ({"gadget": "wheel"}, {"scale": 2.0}, {"gadget": "wheel", "scale": 2.0}),
        # "plain" excludes a scale; what the user gave stays, and is refused elsewhere.
        ({"gadget": "wheel, plain"}, {"scale": 2.0, "width": 3}, {"gadget": "wheel, plain", "width": 3}),
        ({"scale": 1.0}, {"scale": 2.0}, {"scale": 1.0}),
    ],
)
def test_an_architecture_leaves_out_what_the_chosen_mechanisms_do_not_take(given, values, filled):
    config = Namespace(**given)
    Configuration(WithGadgets, [GADGETS], {"small": values}).fill(config, values)
    assert vars(config) == filled


@pytest.mark.parametrize(
    "arguments",
    [
        ("--arch", "sg_encoder_sort_of_clevr", "--encoder-update", "copy_gate"),
        ("--arch", "sg_encoder_sort_of_clevr", "--norm", "none"),
        ("--arch", "sg_transformer_lm_e8", "--decoder-update", ",".join(["residual"] * 11 + ["copy_gate"])),
        ("--arch", "sg_regressor_garg_toy", "--norm", "none"),
    ],
)
def test_pre_norm_of_an_architecture_gives_way_to_the_user_s_mechanism(arguments):
    config = parsed(*arguments)
    assert not config.pre_norm and not config.no_final_norm
    assert parsed(*arguments[:2]).pre_norm is True and parsed(*arguments, "--pre-norm").pre_norm is True
