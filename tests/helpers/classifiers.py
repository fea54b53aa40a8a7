"""Arguments of small classifiers in fairseq's commands."""

from __future__ import annotations

from pathlib import Path

TRANSFORMER = (
    "--arch sg_encoder_ctl --encoder-layers 3 --encoder-embed-dim 32 --encoder-ffn-embed-dim 32 "
    "--encoder-attention relative --encoder-update copy_gate --readout first"
)


KINDS = {
    "sg_encoder": TRANSFORMER.split(),
    "sg_lstm": "--arch sg_lstm_ctl --hidden-dim 32 --bidirectional --no-source-bos --lr 2e-2".split(),
}


SUBSETS = ("dev", "valid", "gen")


def training(data: Path, folder: Path, *more: object) -> list[str]:
    fixed = (
        "--user-dir fairseq_sg --task sg_classification --criterion classification --optimizer torch_adam --lr 5e-3 "
        "--batch-size 32 --batch-size-valid 64 --dropout 0 --valid-subset dev,valid,gen --no-epoch-checkpoints --cpu "
        "--log-format json --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --accuracy-by types"
    )
    return [str(argument) for argument in [data, *fixed.split(), "--save-dir", folder, *more]]


def evaluation(data: Path, checkpoint: Path, *more: object) -> list[str]:
    fixed = "--user-dir fairseq_sg --task sg_classification --cpu --batch-size 64 --log-format json".split()
    return [
        str(argument) for argument in [data, *fixed, "--path", checkpoint, "--valid-subset", "dev,valid,gen", *more]
    ]
