"""A tiny folder with classes, as ``python -m data_prep`` writes it: the class of a sentence is its second word, in
capitals.
"""

from __future__ import annotations

import random
from pathlib import Path

from data_prep.corpus import Corpus, Subset
from data_prep.dataset import Pair
from data_prep.folder import write

WORDS = "abcd"
#: subset -> (number of sentences, their lengths in words); no multiples of 8
SUBSETS = {"train": (300, (4, 5, 6)), "valid": (61, (4, 5, 6)), "dev": (41, (7,)), "gen": (45, (8, 9))}


def write_labelled(folder: Path, labels: bool = True) -> Path:
    draw = random.Random(0)
    seen: set = set()
    subsets: dict[str, list[Pair]] = {}
    for name, (size, lengths) in SUBSETS.items():
        pairs = []
        while len(pairs) < size:
            words = draw.choices(WORDS, k=lengths[len(pairs) % len(lengths)])
            if tuple(words) not in seen:
                seen.add(tuple(words))
                pairs.append(Pair(" ".join(words), words[1].upper()))
        subsets[name] = pairs
    types = {
        name: [f"length_{len(pair.source.split())}" for pair in pairs]
        for name, pairs in subsets.items()
        if name != "train"
    }
    corpus = Corpus(
        subsets={name: Subset(pairs, types.get(name, ())) for name, pairs in subsets.items()},
        rule="dev and gen are longer",
        membership="drawn for the tests",
        origin={"generator": "labelled_data"},
        vocabulary=(len(WORDS), len(WORDS)),
        labels=labels,
    )
    write(folder, corpus, {"dataset": "labelled", "raw_only": False})
    return folder
