"""Checks of a model's configuration before anything is built, and its last defaults."""

from collections.abc import Iterable

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.models.config import refuse_unused_options
from fairseq_sg.modules import compilation
from fairseq_sg.modules.attention import ATTENTION_REGISTRY
from fairseq_sg.modules.depth import DEPTH_REGISTRY
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from fairseq_sg.modules.position import POSITION_REGISTRY, attention_position, gives_indices
from fairseq_sg.modules.update import UPDATE_REGISTRY
from fairseq_sg.ops.dispatch import check_environment

#: The registries whose mechanisms have options of their own.
MECHANISMS = (
    ATTENTION_REGISTRY,
    FEATURE_MAP_REGISTRY,
    POSITION_REGISTRY,
    FEEDFORWARD_REGISTRY,
    UPDATE_REGISTRY,
    DEPTH_REGISTRY,
)


SELF_ATTENTIONS = ("encoder_attention", "decoder_attention")
ATTENTIONS = (*SELF_ATTENTIONS, "cross_attention")
OTHERS = {
    "encoder_ffn": FEEDFORWARD_REGISTRY,
    "decoder_ffn": FEEDFORWARD_REGISTRY,
    "encoder_update": UPDATE_REGISTRY,
    "decoder_update": UPDATE_REGISTRY,
}


def layer_names(config, option: str) -> list[str]:
    """The mechanism of every layer that ``option``, such as ``encoder_attention``, names: one name a layer, or one for
    all.

    Raises UsageError for a list whose length is not the number of layers, or with layers that are shared.
    """
    names = [name.strip() for name in getattr(config, option).split(",")]
    side = "encoder" if option.startswith("encoder") else "decoder"
    layers = getattr(config, f"{side}_layers")
    if len(names) == 1:
        return names * max(layers, 1)
    flag = "--" + option.replace("_", "-")
    if DEPTH_REGISTRY.find(config.depth).shares_layers:
        raise UsageError(
            f"{flag} names {len(names)} layers, and --depth {config.depth} has one for all steps: name one"
        )
    if len(names) != layers:
        raise UsageError(f"{flag} names {len(names)} layers, and --{side}-layers is {layers}: name one, or one each")
    return names


def complete(config):
    """Checks the configuration of a model of the sides that it has options for, and fills in the last defaults.

    Raises:
        ValueError: unknown mechanism, an option without effect, a combination that is not defined; the message names
            the option.
    """
    try:
        check_environment()
    except ValueError as error:
        raise UsageError(str(error)) from error
    ranges.check(type(config), vars(config))
    compilation.check_mode(config.compile)
    used = {DEPTH_REGISTRY.find(config.depth)}
    for option in _of(config, ATTENTIONS):
        for name in layer_names(config, option):
            used |= ATTENTION_REGISTRY.find(name).option_classes(config)
    for option in _of(config, OTHERS):
        used |= {OTHERS[option].find(name) for name in layer_names(config, option)}
    if config.position is not None:
        used.add(POSITION_REGISTRY.find(config.position))
    refuse_unused_options(config, MECHANISMS, used)
    check_position(config)
    for name in ("activation_dropout", "attention_dropout"):
        if getattr(config, name) is None:
            setattr(config, name, config.dropout)
    return config


def _of(config, options: Iterable[str]) -> list[str]:
    """Those of some options that the model has: an encoder by itself has none of a decoder."""
    return [option for option in options if hasattr(config, option)]


def check_position(config) -> None:
    """Raises UsageError for a ``--position`` that some self-attention is not defined for, or that none has a use
    for.
    """
    if config.position is None:
        return
    used = config.position == "none"
    kinds = [
        (option.partition("_")[0], ATTENTION_REGISTRY.find(name))
        for option in _of(config, SELF_ATTENTIONS)
        for name in layer_names(config, option)
    ]
    for side, kind in kinds:
        attention_position(kind, config, side)
        used |= not kind.brings_position or "indices" in kind.takes and gives_indices(config)
    if not used:
        names = " and ".join(sorted({kind.registered_name for _, kind in kinds}))
        raise UsageError(
            f"--position {config.position} has no effect: {names} attention brings its own positions; leave the "
            f"option out"
        )
