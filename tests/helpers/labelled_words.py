"""A tiny folder with a label for every word, as ``python -m data_prep`` writes it, and arguments of commands on it."""

from __future__ import annotations

import random
from pathlib import Path

from data_prep.corpus import Corpus, Subset
from data_prep.folder import write
from data_prep.repeat_copy import example

BITS = 3
#: subset -> number of sentences, and of blocks
SUBSETS = {"train": (200, (1, 2)), "valid": (29, (1, 2)), "gen": (13, (3, 4))}
TAGGERS = {
    "sg_dnc": "--arch sg_dnc_copy --memory-variant mds --memory-cells 4 --memory-width 6 --controller-dim 12",
    "sg_lstm": "--arch sg_lstm --embed-dim 8 --hidden-dim 16 --bidirectional",
    "sg_encoder": "--arch sg_encoder_ctl --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--encoder-attention geometric --encoder-update copy_gate",
    "sg_transformer_lm": "--arch sg_transformer_lm --decoder-layers 2 --decoder-embed-dim 16 "
    "--decoder-ffn-embed-dim 16 --decoder-attention relative --decoder-attention-heads 2",
}


def write_labelled_words(folder: Path, bits: bool = True) -> Path:
    """Repeated copying of words of three bits; without ``bits`` the same words are any words."""
    draw, seen, subsets = random.Random(0), set(), {}
    for name, (size, repeats) in SUBSETS.items():
        pairs, types = [], []
        while len(pairs) < size:
            blocks = [
                ["".join(draw.choices("01", k=BITS)) for _ in range(draw.randint(1, 3))]
                for _ in range(draw.choice(repeats))
            ]
            made = example(blocks, f"repeats_{len(blocks)}")
            if name == "train" or made.pair().source not in seen:
                pairs.append(made.pair())
                types.append(made.type)
                seen |= {made.pair().source} if name != "train" else set()
        subsets[name] = Subset(pairs, () if name == "train" else types)
    subsets["train"] = Subset([pair for pair in subsets["train"].pairs if pair.source not in seen])
    side = {"width": BITS, "markers": {"<copy>": "1"}}
    corpus = Corpus(
        subsets=subsets,
        rule="gen has more blocks",
        membership="drawn for the tests",
        origin={"generator": "labelled_words"},
        no_label=".",
        bits={"source": side, "target": side} if bits else None,
    )
    write(folder, corpus, {"dataset": "labelled_words", "raw_only": False})
    return folder


def training(data: Path, folder: Path, *more: object) -> list[str]:
    fixed = (
        "--user-dir fairseq_sg --task sg_tagging --criterion tagging --optimizer torch_adam --lr 1e-2 --clip-norm 5 "
        "--batch-size 32 --batch-size-valid 64 --valid-subset valid,gen --no-epoch-checkpoints --cpu "
        "--log-format json --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --accuracy-by types"
    )
    return [str(argument) for argument in [data, *fixed.split(), "--save-dir", folder, *more]]


def evaluation(data: Path, checkpoint: Path, *more: object) -> list[str]:
    fixed = "--user-dir fairseq_sg --task sg_tagging --cpu --batch-size 64 --log-format json --valid-subset valid,gen"
    return [str(argument) for argument in [data, *fixed.split(), "--path", checkpoint, *more]]
