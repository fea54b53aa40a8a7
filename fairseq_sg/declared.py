"""What fairseq's registries declare: the options of each choice, and their types."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Mapping

from fairseq_sg import checkpoints


def groups(cfg) -> dict[str, tuple[str | None, type | None]]:
    """The groups of a configuration that are set: what was chosen in each, and the dataclass of its options, if any."""
    found = {}
    for group in cfg:
        if isinstance(cfg[group], (Mapping, argparse.Namespace)):
            name = getattr(cfg[group], "_name", None)
            found[group] = name, dataclasses_of(group).get(name)
    return found


def dataclasses_of(group: str) -> Mapping[str | None, type | None]:
    """The names that can be chosen in a group such as ``model``, with their dataclasses of options; {} for others."""
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY

    if group == "model":
        architectures = {a: MODEL_DATACLASS_REGISTRY.get(model) for a, model in ARCH_MODEL_NAME_REGISTRY.items()}
        return {**architectures, **MODEL_DATACLASS_REGISTRY}
    if group == "task":
        return TASK_DATACLASS_REGISTRY
    registry = REGISTRIES.get(group, {"registry": {}})
    return {name: registry["dataclass_registry"].get(name) for name in registry["registry"]}


def kinds_of(cfg: Mapping[str, typing.Any]) -> dict[str, typing.Any]:
    """The types that a checkpoint's task and model declare for their options, by name."""
    return {name: kind for group in ("task", "model") for name, kind in kinds_in(group, cfg[group]).items()}


def kinds_in(group: str, chosen: typing.Any) -> dict[str, typing.Any]:
    """The types that the ``task`` or ``model`` of a configuration declares for its options, by name."""
    options = checkpoints.values(chosen)
    declared = dataclasses_of(group).get(options.get("_name") or options.get("arch"))
    return typing.get_type_hints(declared) if declared else {}


def is_our_task(name: str | None) -> bool:
    from fairseq.tasks import TASK_REGISTRY

    return checkpoints.is_ours(TASK_REGISTRY.get(name))
