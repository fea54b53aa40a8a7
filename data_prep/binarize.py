"""Binarizes the raw text with fairseq's own classes, into what `fairseq-preprocess` would write for the same text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.common import DataError

if TYPE_CHECKING:
    from fairseq.data import Dictionary

LANGUAGES = ("src", "tgt")


def require_fairseq() -> None:
    """Raises DataError if fairseq, or the torch it needs, cannot be imported."""
    try:
        import fairseq.binarizer  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"binarizing needs fairseq ({error}): install it, or make the text alone by --raw-only"
        ) from None


def binarize(folder: Path, subsets: Iterable[str], joined: bool = False) -> None:
    """Makes `dict.{src,tgt}.txt` and `SUBSET.src-tgt.{src,tgt}.{bin,idx}` of `raw/SUBSET.{src,tgt}`, all in `folder`.

    The dictionaries hold the words of all subsets, most frequent first and ties in alphabetical order, and no filling
    up to a multiple of 8: a word seen in testing alone has an embedding rather than being unknown, and the sizes are
    those of the papers plus fairseq's four specials. If `joined`, both dictionaries are the same one, with the words of
    both languages, as `fairseq-preprocess --joined-dictionary` makes it: embeddings can then be shared.

    Raises DataError for a word that is one of fairseq's specials, or unknown.
    """
    from fairseq.binarizer import FileBinarizer, VocabularyDatasetBinarizer

    languages = {name: [folder / "raw" / f"{subset}.{name}" for subset in subsets] for name in LANGUAGES}
    common = make_dictionary(text for texts in languages.values() for text in texts) if joined else None
    for language, texts in languages.items():
        dictionary = common or make_dictionary(texts)
        dictionary.save(str(folder / f"dict.{language}.txt"))
        for text in texts:
            summary = FileBinarizer.multiprocess_dataset(
                str(text),
                "mmap",
                VocabularyDatasetBinarizer(dictionary, append_eos=True),
                str(folder / f"{text.stem}.{'-'.join(LANGUAGES)}.{language}"),
                vocab_size=len(dictionary),
            )
            if summary.num_replaced:
                raise DataError(f"{summary.num_replaced} words are not in the dictionary", text.name)


def make_dictionary(texts: Iterable[Path]) -> Dictionary:
    """fairseq's dictionary of the words in all `texts`."""
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    specials = set(dictionary.symbols)
    for text in texts:
        with text.open(encoding="utf-8", newline="\n") as stream:
            for number, line in enumerate(stream, start=1):
                for word in line.split():
                    if word in specials:
                        raise DataError(f"{word} is a symbol of fairseq's own and cannot be a word", text.name, number)
                    dictionary.add_symbol(word)
    dictionary.finalize(padding_factor=1)
    return dictionary
