"""Small data folders in the form that ``python -m data_prep`` writes, binarized by fairseq's own writer."""

from __future__ import annotations

import random
from pathlib import Path

Pairs = list[tuple[str, str]]

SOURCE_WORDS = [f"s{i}" for i in range(9)]
TARGET_WORDS = [f"T{i}" for i in range(7)]


def random_pairs(count: int, seed: int) -> Pairs:
    """Sentences of 1 to 12 source and 1 to 15 target words."""
    draw = random.Random(seed)
    return [
        (
            " ".join(draw.choices(SOURCE_WORDS, k=draw.randint(1, 12))),
            " ".join(draw.choices(TARGET_WORDS, k=draw.randint(1, 15))),
        )
        for _ in range(count)
    ]


def write_folder(folder: Path, subsets: dict[str, Pairs], manifest: bool = True) -> Path:
    from fairseq.data import Dictionary, indexed_dataset

    folder.mkdir(parents=True, exist_ok=True)
    for side, (language, words) in enumerate((("src", SOURCE_WORDS), ("tgt", TARGET_WORDS))):
        dictionary = Dictionary()
        for word in words:
            dictionary.add_symbol(word)
        dictionary.save(str(folder / f"dict.{language}.txt"))
        for subset, pairs in subsets.items():
            prefix = str(folder / f"{subset}.src-tgt.{language}")
            builder = indexed_dataset.make_builder(prefix + ".bin", impl="mmap", vocab_size=len(dictionary))
            for pair in pairs:
                builder.add_item(dictionary.encode_line(pair[side], add_if_not_exist=False))
            builder.finalize(prefix + ".idx")
    if manifest:
        (folder / "dataset.json").write_text("{}\n")
    return folder
