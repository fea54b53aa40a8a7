"""The command line, for all datasets alike."""

from __future__ import annotations

import pytest
from fairseq.models import ARCH_MODEL_REGISTRY

from data_prep.__main__ import DATASETS
from fairseq_sg.models.architectures import ARCHITECTURES, ENCODER_ARCHITECTURES

NAMES = [dataset.name for dataset in DATASETS]


def test_names() -> None:
    assert NAMES == "scan cogs pcfg cfq mathematics ctl ctlpp arithmetic listops parity first".split() + [
        *("iwslt_en_vi", "parallel", "text"),
    ]


@pytest.mark.parametrize("dataset", DATASETS, ids=NAMES)
def test_help_and_list(dataset, run) -> None:
    result = run(dataset.name, "--help")
    assert result.code == 0 and "->" in result.out and "Source: " in result.out
    own = dataset.name in ("parallel", "text")
    assert ("--raw-dir" in result.out) == (dataset.size != "generated" and not own)
    row = next(line for line in run("list").out.splitlines() if line.startswith(f"{dataset.name} "))
    assert (
        dataset.licence in row
        and dataset.source in row
        and dataset.size in row
        and row.endswith(" ".join(dataset.splits))
    )


@pytest.mark.parametrize("dataset", DATASETS, ids=NAMES)
def test_architecture_that_is_recommended_exists(dataset) -> None:
    assert dataset.arch in ARCHITECTURES or dataset.arch in ARCH_MODEL_REGISTRY


@pytest.mark.parametrize("dataset", DATASETS, ids=NAMES)
def test_classifier_is_recommended_for_classes(dataset) -> None:
    name = dataset.classifier.partition(" ")[0]
    classes = dataset.name in "ctl ctlpp arithmetic listops parity first".split()
    assert (name in (*ENCODER_ARCHITECTURES, "sg_encoder")) if classes else name == ""
