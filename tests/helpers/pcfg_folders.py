"""Tiny folders of PCFG SET's substitutivity, localism and overgeneralisation, in the form of ``data_prep``."""

from __future__ import annotations

from pathlib import Path

from data_prep.corpus import Corpus, Subset
from data_prep.dataset import Pair
from data_prep.folder import write
from data_prep.pcfg.language import FUNCTIONS, TWINS
from data_prep.pcfg.synonyms import rename

LETTERS = [f"{letter}{number}" for letter in "ABC" for number in (1, 2)]
WORDS = sorted({*FUNCTIONS, *TWINS, *LETTERS, ","})
TRAIN = [Pair(f"copy {letter}", letter) for letter in LETTERS]

#: Sources of ``test``, what to rename there, and their targets.
PLAIN = {
    "repeat A1": ("repeat", "A1 A1"),
    "append A1 , B2": ("append", "A1 B2"),
    "repeat B1": ("repeat", "B1 B1"),
    "append C1 , C2": ("append", "C1 C2"),
    "repeat C2": ("repeat", "C2 C2"),
}
RENAMED = [rename(source, function) for source, (function, _) in PLAIN.items()]
UNROLLED = """\
unrolled\tcopy A1 B2 \t*1
unrolled\trepeat *1\tA1 B2 A1 B2
original\trepeat copy A1 B2\tA1 B2 A1 B2
unrolled\tcopy C1 \t*1
unrolled\techo C2 \t*2
unrolled\tappend *2 , *1\tC2 C2 C1
original\tappend echo C2 , copy C1\tC2 C2 C1
unrolled\treverse A1 C1 \t*1
unrolled\tcopy *1\tC1 A1
original\tcopy reverse A1 C1\tC1 A1
"""
#: Exceptions, their type, the target by the rule, and the trained one.
EXCEPTIONS = {
    "reverse echo A1 B2": ("reverse_echo", "B2 B2 A1", "A1 B2 B2"),
    "reverse echo C1 B1": ("reverse_echo", "B1 B1 C1", "C1 B1 B1"),
    "reverse echo A2 B1": ("reverse_echo", "B1 B1 A2", "A2 B1 B1"),
    "prepend reverse A1 C2 , B1": ("prepend_reverse", "B1 C2 A1", "A1 C2 C2"),
}


def pcfg_folder(
    folder: Path,
    condition: str,
    subsets: dict[str, Subset],
    files: dict[str, bytes] | None = None,
    train: list[Pair] = TRAIN,
) -> Path:
    made = {"train": Subset(train), **{name: subset._replace(may_repeat=True) for name, subset in subsets.items()}}
    origin = {"generator": "tests"}
    corpus = Corpus(made, "drawn", "drawn", origin, joined=True, files=files or {}, words=WORDS)
    write(folder, corpus, {"dataset": "pcfg", "condition": condition, "raw_only": False})
    return folder


def substitutivity_folder(folder: Path) -> Path:
    test = [Pair(source, target) for source, (_, target) in PLAIN.items()]
    gen = [Pair(source, pair.target) for source, pair in zip(RENAMED, test, strict=True)]
    kinds = [function for function, _ in PLAIN.values()]
    return pcfg_folder(folder, "substitutivity_primitive", {"test": Subset(test, kinds), "gen": Subset(gen, kinds)})


def localism_folder(folder: Path, unrolled: str = UNROLLED) -> Path:
    test = [Pair(*line.split("\t")[1:]) for line in UNROLLED.splitlines() if line.startswith("original")]
    return pcfg_folder(folder, "localism", {"test": Subset(test)}, {"raw/unrolled.tsv": unrolled.encode()})


def overgeneralisation_folder(
    folder: Path, exceptions: dict[str, tuple[str, str, str]] = EXCEPTIONS, train: list[Pair] = TRAIN
) -> Path:
    kinds, by_rule, trained = zip(*exceptions.values())
    pairs = {"original": map(Pair, exceptions, by_rule), "exception": map(Pair, exceptions, trained)}
    subsets = {name: Subset(list(found), kinds) for name, found in pairs.items()}
    return pcfg_folder(folder, "overgeneralisation", subsets, train=train)
