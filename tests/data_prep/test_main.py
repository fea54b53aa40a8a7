"""The command line common to all datasets."""

from __future__ import annotations

import pytest
from fairseq.models import ARCH_MODEL_REGISTRY

from data_prep.__main__ import DATASETS
from fairseq_sg.models.architectures import ARCHITECTURES, ENCODER_ARCHITECTURES

NAMES = [dataset.name for dataset in DATASETS]


def test_names() -> None:
    first = "scan cogs pcfg cfq mathematics ctl ctlpp arithmetic listops parity first".split()
    first += "repeat_copy associative_recall key_value babi double_addition add_multiply in_context".split()
    assert NAMES == first + [
        *("sort_of_clevr", "burgers", "darcy", "fields", "iwslt_en_vi", "libreoffice_help", "parallel", "text"),
    ]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("skan --split length", "argument DATASET: invalid choice: 'skan': did you mean scan?"),
        ("verfy x", "argument DATASET: invalid choice: 'verfy': did you mean verify?"),
        ("nothing", "argument DATASET: invalid choice: 'nothing': choose from scan, cogs, pcfg, "),
        ("--cutoff 26 scan", "unknown option --cutoff; the name of a dataset comes first"),
        ("scan --split mcd4", "argument --split: invalid choice: 'mcd4': did you mean mcd1 or mcd2 or mcd3?"),
        ("scan --split length --cutof 26", "unknown option --cutof: did you mean --cutoff?"),
        ("scan --split length --cutof=26", "unknown option --cutof: did you mean --cutoff?"),
        ("scan --split length -out x", "unknown option -out: did you mean --out?"),
        ("scan --spilt length", "unknown option --spilt: did you mean --split?"),
        ("scan --split length --seed -1", "argument --seed: must be a whole number from 0 to 4294967295, not '-1'"),
        ("scan --split length --frobnicate", "unknown option --frobnicate (see "),
        ("scan", "the following arguments are required: --split, --out"),
        ("scan --split", "argument --split: expected one argument"),
        ("scan --split length 26 --out x", "unrecognized arguments: 26"),
        ("ctlpp --variant S --overlap 5", "argument --overlap: invalid choice: 5: choose from 4, 8, 12, 16"),
        ("mathematics --module add_sub", "argument --module: invalid choice: 'add_sub' (see "),
        ("reorder here --lke there --out x", "unknown option --lke: did you mean --like?"),
        ("", "the following arguments are required: DATASET"),
    ],
)
def test_mistake_is_one_line_with_the_nearest_names(command: str, message: str, run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*command.split())
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"error: {message}") and " --help)" in result.err
    assert list(tmp_path.iterdir()) == []


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
