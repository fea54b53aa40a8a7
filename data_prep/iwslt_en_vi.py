"""IWSLT'15 English-Vietnamese: sentences of TED talks, and a test on sentences longer than in training.

    Imagine the first piece : a man burning his life 's work .
        ->  Hãy tưởng tượng mảnh đầu tiên : một người đàn ông đốt cháy sự nghiệp cả đời mình .
    I don 't know .  ->  Tôi không biết .

Chiang & Cholak (2022) train on sentences of at most 20 words and test on longer ones. There, logits scaled by the
logarithm of the length gain a point of BLEU; with training on all lengths they gain none. ``--max-length 20`` (the
default) makes that split by the words of the English sentence. ``--max-length 0`` keeps all lengths together.

              official file          pairs      at most 20    longer
    train     train-en-vi.tgz        133,317    train         omitted
    tst2012   dev-2012-en-vi.tgz       1,553    valid 1,051   dev 502
    tst2013   test-2013-en-vi.tgz      1,268    test    737   gen 531

The files are tokenized, cased, and escaped as by Moses. &apos; and the like are unescaped, so plain text, subwords and
references have an apostrophe. Subwords (SentencePiece, ``--model``, ``--vocab-size``), plain text and scoring are those
of ``python -m data_prep parallel``. The paper does not name its subwords, and its BLEU is not that of sacreBLEU on this
text: compare differences between models rather than scores.

``--small`` needs no training file. It trains on tst2012, and validates and tests on the first and the second half of
tst2013. This re-split is for small experiments; its scores are not comparable with the papers'.

Source: github.com/stefan-it/nmt-en-vi, from nlp.stanford.edu/projects/nmt. It states no licence; TED talks are
published as CC BY-NC-ND.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data_prep.archive import read_members
from data_prep.corpus import Corpus
from data_prep.dataset import DataError, Dataset, Json, Pair
from data_prep.parallel import (
    Split,
    add_length_arguments,
    add_subword_arguments,
    length_request,
    pair_up,
    split_by_length,
    subword_corpus,
    subword_request,
    without,
)
from data_prep.sources import OfficialFile, OfficialFiles, add_source_arguments

BASE_URL = "https://raw.githubusercontent.com/stefan-it/nmt-en-vi/93193ddf269449c98495e3455b2bb261b4851234/data"
FILES = {
    "train": OfficialFile("train-en-vi.tgz", None, None, git_blob="76ce2671526e0b05a9422020820e656b6e2a1472"),
    "valid": OfficialFile(
        "dev-2012-en-vi.tgz", 103_520, "04a0b7ce677cea8ad9dac65bca9492db8183dcfefa458f820597dc46d7486dad"
    ),
    "test": OfficialFile(
        "test-2013-en-vi.tgz", 102_940, "0bbf7cc1ddc4bed68946b005edf9471478445e7994586a277ad4a4b0bb24caa4"
    ),
}
MEMBERS = {"train": "train", "valid": "tst2012", "test": "tst2013"}
LANGUAGES = ("en", "vi")
SIZES = {"train": 133_317, "valid": 1_553, "test": 1_268}
LARGEST_MEMBER = 1 << 27  # bytes
MAX_LENGTH = 20
DEFAULT_SIZE, SMALL_SIZE = 8_000, 2_000


class IwsltEnVi(Dataset):
    """``python -m data_prep iwslt_en_vi``."""

    name = "iwslt_en_vi"
    title = "IWSLT'15 English-Vietnamese"
    source = "github.com/stefan-it/nmt-en-vi"
    licence = "none stated (TED: CC BY-NC-ND)"
    size = "about 10 MB"
    arch = "sg_transformer"
    splits = ("length", "all", "small")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--small", action="store_true", help="train on tst2012 and test on tst2013: not the published sets"
        )
        add_subword_arguments(parser, f"{DEFAULT_SIZE}, or {SMALL_SIZE} with --small")
        add_length_arguments(parser, default=MAX_LENGTH)
        add_source_arguments(parser, BASE_URL)

    def request(self, args: argparse.Namespace) -> Json:
        OfficialFiles(args, self.name, BASE_URL)
        size = SMALL_SIZE if args.small else DEFAULT_SIZE
        return {"small": args.small, **subword_request(args, size), **length_request(args)}

    def build(self, args: argparse.Namespace, request: Json) -> Corpus:
        source = OfficialFiles(args, self.name, BASE_URL)
        names = [name for name in FILES if name != "train" or not request["small"]]
        subsets, empty = {}, {}
        for name in names:
            subsets[name], empty[name] = load(name, source)
        if request["small"]:
            subsets, membership = resplit(subsets), "re-split, not the published sets"
        else:
            membership = "the published ones"
        train, shared = without(subsets["train"], (subsets["valid"], subsets["test"]))
        left_out = {"with an empty side": empty.get("train", 0), "whose source is in another subset": shared}
        split = split_by_length(Split(subsets | {"train": train}, left_out), request)
        origin = {"files": [FILES[name].describe() for name in names]}
        return subword_corpus(split, published_sizes(request), membership, origin, request)


def published_sizes(request: Json) -> dict[str, int]:
    """The official sizes of the subsets that consist of one official file each."""
    if request["small"]:
        return {}
    return {"train": SIZES["train"]} if request["max_length"] else SIZES


def load(name: str, source: OfficialFiles) -> tuple[list[Pair], int]:
    """Reads the pairs of an official file; returns them and how many training pairs were omitted for an empty side.

    Raises DataError, also if the number of pairs is not the published one.
    """
    path = source.get(FILES[name])
    FILES[name].check(path, path.read_bytes())
    wanted = [f"{MEMBERS[name]}.{language}" for language in LANGUAGES]
    contents = read_members(path, dict.fromkeys(wanted, LARGEST_MEMBER))
    english, vietnamese = ((Path(f"{path}:{member}"), contents[member]) for member in wanted)
    pairs, empty = pair_up(*english, *vietnamese, unescape=True, may_be_empty=name == "train")
    if len(pairs) + empty != SIZES[name]:
        raise DataError(f"has {len(pairs) + empty:,} pairs instead of the published {SIZES[name]:,}", path)
    return pairs, empty


def resplit(subsets: dict[str, list[Pair]]) -> dict[str, list[Pair]]:
    """The subsets of ``--small``."""
    tested = subsets["test"]
    half = len(tested) // 2
    return {"train": subsets["valid"], "valid": tested[:half], "test": tested[half:]}
