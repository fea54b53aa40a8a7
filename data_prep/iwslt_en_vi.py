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

import io
from dataclasses import dataclass
from pathlib import Path

from data_prep.corpus import Corpus
from data_prep.dataset import DataError, Dataset, Pair, option, whole_number
from data_prep.parallel import (
    DEFAULT_SIZE,
    LARGEST_SIZE,
    Split,
    TranslationOptions,
    max_length_option,
    pair_up,
    split_by_length,
    subword_corpus,
    without,
)
from data_prep.sources import OfficialFiles, members, official_files

FILES = dict(zip(("train", "valid", "test"), official_files("iwslt_en_vi").values(), strict=True))
MEMBERS = {"train": "train", "valid": "tst2012", "test": "tst2013"}
LANGUAGES = ("en", "vi")
SIZES = {"train": 133_317, "valid": 1_553, "test": 1_268}
LARGEST_MEMBER = 1 << 27  # bytes
SMALL_SIZE = 2_000


class IwsltFiles(OfficialFiles):
    """The sources of IWSLT'15 English-Vietnamese."""

    urls = {
        "iwslt_en_vi": "https://raw.githubusercontent.com/stefan-it/nmt-en-vi/"
        "93193ddf269449c98495e3455b2bb261b4851234/data"
    }


@dataclass(frozen=True)
class IwsltOptions(TranslationOptions):
    """The options of IWSLT'15 English-Vietnamese."""

    small: bool = option(False, "train on tst2012 and test on tst2013: not the published sets", given={"--small": True})
    vocab_size: int | None = option(
        None,
        f"number of subwords in a model (default: {DEFAULT_SIZE}, or {SMALL_SIZE} with --small)",
        type=whole_number(2, LARGEST_SIZE),
    )
    max_length: int = max_length_option(20)

    def default_size(self) -> int:
        return SMALL_SIZE if self.small else DEFAULT_SIZE


class IwsltEnVi(Dataset):
    """``python -m data_prep iwslt_en_vi``."""

    name = "iwslt_en_vi"
    title = "IWSLT'15 English-Vietnamese"
    source = "github.com/stefan-it/nmt-en-vi"
    licence = "none stated (TED: CC BY-NC-ND)"
    size = "about 10 MB"
    arch = "sg_transformer"
    splits = ("length", "all", "small")
    options = IwsltOptions
    sources = IwsltFiles

    def build(self, options: IwsltOptions, sources: IwsltFiles) -> Corpus:
        names = [name for name in FILES if name != "train" or not options.small]
        subsets, empty = {}, {}
        for name in names:
            subsets[name], empty[name] = load(name, sources)
        membership = "the published ones"
        if options.small:
            subsets, membership = resplit(subsets), "re-split, not the published sets"
        train, shared = without(subsets["train"], (subsets["valid"], subsets["test"]))
        left_out = {"with an empty side": empty.get("train", 0), "whose source is in another subset": shared}
        split = split_by_length(Split(subsets | {"train": train}, left_out), options)
        origin = {"files": [FILES[name].describe() for name in names]}
        return subword_corpus(split, published_sizes(options), membership, origin, options)


def published_sizes(options: IwsltOptions) -> dict[str, int]:
    """The official sizes of the subsets that consist of one official file each."""
    if options.small:
        return {}
    return {"train": SIZES["train"]} if options.max_length else SIZES


def load(name: str, sources: IwsltFiles) -> tuple[list[Pair], int]:
    """Reads the pairs of an official file; returns them and how many training pairs were omitted for an empty side.

    Raises DataError, also if the number of pairs is not the published one.
    """
    path = sources.get(FILES[name])
    data = sources.read_bytes(path)
    FILES[name].check(path, data)
    wanted = [f"{MEMBERS[name]}.{language}" for language in LANGUAGES]
    packed = io.BufferedReader(io.BytesIO(data))
    contents = {place: text.read() for place, text in members(path, packed, dict.fromkeys(wanted, LARGEST_MEMBER))}
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
