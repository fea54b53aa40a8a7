"""Universal transformers of SCAN with every kind of attention, feature map and position: the rows of own_attentions."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.experiments import recipe

#: label -> the arguments of its row
MODELS = {
    row.label: shlex.split(row.arguments) for row in recipe.read(recipe.find("own_attentions")).rows.values()
}  # fmt: skip


def build(arguments: Sequence[str], task: Any) -> Any:
    """Builds SCAN's universal transformer from arguments of a ``fairseq-train`` command, in training mode.

    ``task`` has a ``source_dictionary``, a ``target_dictionary``, and a ``cfg`` with ``left_pad_target``.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ARCH_MODEL_REGISTRY["sg_transformer_scan"].add_args(parser)
    cfg = parser.parse_args(["--depth", "shared", *arguments])
    ARCH_CONFIG_REGISTRY["sg_transformer_scan"](cfg)
    return ARCH_MODEL_REGISTRY["sg_transformer_scan"].build_model(cfg, task).train()
