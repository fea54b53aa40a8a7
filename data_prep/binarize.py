"""Binarizes raw text with fairseq's classes, with the output of ``fairseq-preprocess`` for the same text."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.dataset import DataError
from data_prep.progress import progress

if TYPE_CHECKING:
    from fairseq.data import Dictionary

LANGUAGES = ("src", "tgt")
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")  # fairseq's, which cannot be words
RESERVED = frozenset(SPECIALS)


def check_words(words: Collection[str], path: str | os.PathLike[str], line: int | None = None, place: str = "") -> None:
    """Raises DataError for a word that is one of fairseq's specials; ``place`` in the file begins its message."""
    if not RESERVED.isdisjoint(words):
        word = next(word for word in words if word in RESERVED)
        message = f"{place}{word} is a special symbol of fairseq and cannot be a word: write it in another way"
        raise DataError(message, path, line)


def require_fairseq(otherwise: str = "") -> None:
    """Raises DataError, which advises to install it ``otherwise``, if fairseq or torch cannot be imported."""
    try:
        import fairseq.data  # noqa: F401
    except ImportError as error:
        raise DataError(f"binarizing needs fairseq ({error}): install it{otherwise}") from None


def binarize(folder: Path, subsets: Iterable[str], joined: bool = False, words: Iterable[str] = ()) -> None:
    """Makes ``dict.{src,tgt}.txt`` and ``SUBSET.src-tgt.{src,tgt}.{bin,idx}`` from
    ``raw/SUBSET.{src,tgt}``, all in ``folder``.

    The dictionaries hold ``words`` and the words of all subsets, in the order of ``make_dictionary``, without padding
    to a multiple of 8. So a word that occurs only in testing has an embedding, and sizes are those of the papers plus
    fairseq's four specials. With ``joined``, both dictionaries are the same, with the words of both languages, so
    embeddings can be shared.

    Raises DataError for a word that is one of fairseq's specials.
    """
    common = make_dictionary(texts_of(folder, subsets, LANGUAGES), words) if joined else None
    for language in LANGUAGES:
        dictionary = common or make_dictionary(texts_of(folder, subsets, [language]), words)
        dictionary.save(str(folder / f"dict.{language}.txt"))
        write_texts(folder, subsets, language, dictionary)


def binarize_like(folder: Path, subsets: Iterable[str], other: Path) -> None:
    """Binarizes with the dictionaries of another folder. Raises DataError for a word that they lack."""
    from fairseq.data import Dictionary

    for language in LANGUAGES:
        name = f"dict.{language}.txt"
        shutil.copyfile(other / name, folder / name)
        write_texts(folder, subsets, language, Dictionary.load(str(folder / name)))


def texts_of(folder: Path, subsets: Iterable[str], languages: Iterable[str]) -> list[Path]:
    """The raw text of the subsets."""
    return [folder / "raw" / f"{subset}.{language}" for language in languages for subset in subsets]


def write_texts(folder: Path, subsets: Iterable[str], language: str, dictionary: Dictionary) -> None:
    """Writes the indexed datasets of one language. Raises DataError for a word that the dictionary lacks."""
    for text in texts_of(folder, subsets, [language]):
        entries = progress(numbered(text, dictionary), f"binarizing {text.name}", unit=" lines")
        write_indexed(folder / f"{text.stem}.{'-'.join(LANGUAGES)}.{language}", entries, len(dictionary))


def write_indexed(prefix: Path, entries: Iterable[list[int]], symbols: int) -> int:
    """Writes lists of numbers below ``symbols`` as fairseq's memory-mapped dataset, ``prefix``.{bin,idx}.

    The bytes are those of fairseq's builder, without a tensor per list. Returns how many numbers were written.
    """
    import numpy
    from fairseq.data import indexed_dataset

    dtype = indexed_dataset.best_fitting_int_dtype(symbols)
    sizes = []
    with open(f"{prefix}.bin", "wb") as stream:
        for entry in entries:
            sizes.append(len(entry))
            stream.write(numpy.array(entry, dtype=dtype).tobytes())
    with indexed_dataset.MMapIndexedDataset.Index.writer(f"{prefix}.idx", dtype) as index:
        index.write(sizes)
    return sum(sizes)


def numbered(text: Path, dictionary: Dictionary) -> Iterator[list[int]]:
    """Yields every line as the numbers of its words and of the end symbol. Raises DataError for an unknown word.

    Equals ``Dictionary.encode_line``, in a fraction of its time: there are millions of lines.
    """
    indices, eos = dictionary.indices, dictionary.eos()
    for number, line in enumerate(lines_of(text), start=1):
        try:
            yield [*[indices[word] for word in line.split()], eos]
        except KeyError as error:
            raise DataError(f"{error.args[0]} is not in the dictionary", text.name, number) from None


def lines_of(text: Path) -> Iterator[str]:
    """Yields the lines of a file written by ``text.write_lines``."""
    with text.open(encoding="utf-8", newline="\n") as stream:
        yield from stream


def link_labels(folder: Path, subsets: Iterable[str]) -> None:
    """Links a binarized corpus into the form of fairseq's ``sentence_prediction``.

    Sources become ``input0/SUBSET.{bin,idx}``, targets (one word each) ``label/SUBSET.{bin,idx}``, with ``dict.txt`` in
    both. The files are hard links, or copies where the file system has no links.
    """
    pair = "-".join(LANGUAGES)
    for language, name in zip(LANGUAGES, ("input0", "label"), strict=True):
        place = folder / name
        place.mkdir()
        link(folder / f"dict.{language}.txt", place / "dict.txt")
        for subset in subsets:
            for end in ("bin", "idx"):
                link(folder / f"{subset}.{pair}.{language}.{end}", place / f"{subset}.{end}")


def link(source: Path, target: Path) -> None:
    """Makes ``target`` a hard link to ``source``, or a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def make_dictionary(texts: Iterable[Path], words: Iterable[str] = ()) -> Dictionary:
    """Makes fairseq's dictionary of ``words`` and the words in all ``texts``, with their frequencies.

    The specials come first, then the words in the order of their code points. So texts with the same words have the
    same dictionary at all frequencies, and a model of one text can read the other.
    """
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    counts = Counter(dict.fromkeys(words, 0))
    for text in texts:
        lines = progress(lines_of(text), f"counting words of {text.name}", unit=" lines")
        for number, line in enumerate(lines, start=1):
            found = line.split()
            check_words(found, text.name, number)
            counts.update(found)
    for word in sorted(counts):
        dictionary.add_symbol(word, n=counts[word])
    return dictionary
