"""Checks of a model's configuration before anything is built, and its last defaults."""

from collections.abc import Iterable

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.models.config import refuse_unused_options
from fairseq_sg.modules.attention import ATTENTION_REGISTRY
from fairseq_sg.modules.depth import DEPTH_REGISTRY
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from fairseq_sg.modules.memory import CONTROLLER_REGISTRY
from fairseq_sg.modules.norm import NORM_REGISTRY
from fairseq_sg.modules.normalization import QK_NORM_REGISTRY
from fairseq_sg.modules.position import POSITION_REGISTRY, attention_position, gives_indices
from fairseq_sg.modules.update import UPDATE_REGISTRY
from fairseq_sg.registry import Mechanism

#: The registries of mechanisms of layers, whose options are options of the models with layers.
MECHANISMS = (
    ATTENTION_REGISTRY,
    FEATURE_MAP_REGISTRY,
    QK_NORM_REGISTRY,
    POSITION_REGISTRY,
    FEEDFORWARD_REGISTRY,
    UPDATE_REGISTRY,
    DEPTH_REGISTRY,
    NORM_REGISTRY,
)
REGISTRIES = (*MECHANISMS, CONTROLLER_REGISTRY)

SELF_ATTENTIONS = ("encoder_attention", "decoder_attention")
#: The options that name one mechanism, or one a layer -> the registry that they choose from.
MECHANISMS_OF_LAYERS = {
    option: registry
    for registry in (ATTENTION_REGISTRY, FEEDFORWARD_REGISTRY, UPDATE_REGISTRY)
    for option in registry.choosers
}


def layer_names(config, option: str) -> list[str]:
    """The mechanism of every layer that ``option``, such as ``encoder_attention``, names: one for all, or one a layer.

    Raises UsageError for a list whose length is not the number of layers, or with layers that are shared.
    """
    names = [name.strip() for name in getattr(config, option).split(",")]
    side = "encoder" if option.startswith("encoder") else "decoder"
    layers = getattr(config, f"{side}_layers")
    if len(names) == 1:
        return names * max(layers, 1)
    if DEPTH_REGISTRY.find(config.depth).shares_layers:
        raise UsageError(
            f"{ranges.flag(option)} names {len(names)} layers, and --depth {config.depth} has one for all steps: name "
            "one"
        )
    if len(names) != layers:
        raise UsageError(
            f"{ranges.flag(option)} names {len(names)} layers, and --{side}-layers is {layers}: name one, or one each"
        )
    return names


def check_and_fill(config, *dropouts: str):
    """Checks the configuration of a model and fills in its last defaults; a model may have one side alone.

    Args:
        dropouts: options of this model whose default is --dropout, beside those of all models.

    Raises:
        UsageError: unknown mechanism, an option without effect, a combination that is not defined; the message names
            the option.
    """
    ranges.check(type(config), vars(config))
    used = DEPTH_REGISTRY.find(config.depth).option_classes(config)
    used |= NORM_REGISTRY.find(config.norm).option_classes(config)
    for option in _present_options(config, MECHANISMS_OF_LAYERS):
        for name in layer_names(config, option):
            used |= MECHANISMS_OF_LAYERS[option].find(name).option_classes(config)
    if config.position is not None:
        used |= POSITION_REGISTRY.find(config.position).option_classes(config)
    refuse_unused_options(config, MECHANISMS, used)
    check_excluded(config, used)
    if config.no_final_norm and not config.pre_norm:
        raise UsageError("--no-final-norm is for --pre-norm: a post-norm model has no norm after the last layer")
    check_position(config)
    check_window(config)
    for name in ("activation_dropout", "attention_dropout", "attention_residual_dropout", *dropouts):
        if getattr(config, name) is None:
            setattr(config, name, config.dropout)
    return config


def _present_options(config, options: Iterable[str]) -> list[str]:
    """The options that the model has: an encoder alone has none of a decoder."""
    return [option for option in options if hasattr(config, option)]


def check_excluded(config, used: Iterable[type[Mechanism]]) -> None:
    """Raises UsageError for an option that a mechanism of the model excludes."""
    for cls in sorted(used, key=lambda cls: cls.registered_name):
        for name in sorted(cls.excludes):
            if getattr(config, name, None) not in (None, config.declared[name]):
                flags = next(registry.option for registry in MECHANISMS if registry.get(cls.registered_name) is cls)
                raise UsageError(f"{ranges.flag(name)} has no effect with {flags} {cls.registered_name}: leave it out")


def check_without_padding(config) -> None:
    """Raises UsageError for an option of padding in a model whose inputs have none."""
    if config.act_ponder_padding != "exclude":
        raise UsageError("--act-ponder-padding include has no effect on inputs without padding: leave it out")


def check_window(config) -> None:
    """Raises UsageError for a window without a self-attention of its side that has one."""
    for name, side, whose in (
        ("attention_window", "decoder_attention", "a decoder"),
        ("encoder_attention_window", "encoder_attention", "an encoder"),
    ):
        there = layer_names(config, side) if hasattr(config, side) else []
        kinds = ATTENTION_REGISTRY.with_option(name)
        if getattr(config, name) and not kinds & set(there):
            raise UsageError(
                f"{ranges.flag(name)} is for self-attention of {whose}, of the kinds {', '.join(sorted(kinds))}: leave "
                "it out"
            )


def check_position(config) -> None:
    """Raises UsageError for a ``--position`` that some self-attention is not defined for, or that none uses."""
    if config.position is None:
        return
    position = POSITION_REGISTRY.find(config.position)
    used = position.gives_with(config) == "nothing"
    kinds = [
        (option.partition("_")[0], ATTENTION_REGISTRY.find(name))
        for option in _present_options(config, SELF_ATTENTIONS)
        for name in layer_names(config, option)
    ]
    for side, kind in kinds:
        attention_position(kind, config, side)
        used |= not kind.brings_position or "indices" in kind.takes and gives_indices(config)
    if not used:
        names = " and ".join(sorted({kind.registered_name for _, kind in kinds}))
        bring = "bring their" if " and " in names else "brings its"
        takes = position.indices_with and all("indices" in kind.takes for _, kind in kinds)
        raise UsageError(
            f"--position {config.position} has no effect: {names} attention {bring} own positions; leave the "
            f"option out{f', or give {position.indices_with}' if takes else ''}"
        )
