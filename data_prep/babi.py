"""bAbI: twenty tasks of question answering about short stories (Weston et al. 2015), in the form of Csordás 2023.

    mary moved to the hall . where is mary ? - - - -      ->  - - - - - - - - - - - - - hall
    john took the ball . what is john carrying ? - - - -  ->  - - - - - - - - - - - - - ball

A story is one sequence. Words are in small letters, and ``.``, ``?`` and ``,`` are words. After each question follow
three steps to think (``--think``) and one step for each word of the answer, all of them ``-``; the labels are the words
of the answer. A ``-`` in the target is no label. The type of a story is its task, ``task_1`` to ``task_20``.

    train    all stories of the training files, but those of valid
    valid    a tenth of them (``--holdout``), drawn among those that occur once; the published models have none
    test     all stories of the test files

The released code of Csordás & Schmidhuber 2019 leaves out the last story of every file; ``--drop-last`` does so too.

The data are not downloaded, as no hash of the archive is known to us: get ``tasks_1-20_v1-2.tar.gz`` and name it by
``--archive``, or its unpacked folder by ``--raw-dir``. The preparation was tested on stories of our own.

Source: the files of Weston et al. 2015, as "bAbI tasks 1-20, v1.2"; Csordás 2023, section 2.3.2.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from data_prep.binarize import check_words
from data_prep.corpus import Corpus, Subset
from data_prep.dataset import (
    DataError,
    Dataset,
    Json,
    Options,
    Pair,
    Sources,
    UsageError,
    check_path,
    option,
    seed_number,
    share,
    shorten,
    whole_number,
)
from data_prep.draws import hold_out, seed_of
from data_prep.sources import select
from data_prep.strings import format_lengths, lengths
from data_prep.text import split_lines

TASKS = range(1, 21)
SETS = ("en", "en-10k", "hn", "hn-10k", "shuffled", "shuffled-10k")
BLANK = "-"
LARGEST = 1 << 28  # bytes of a file; the largest has some 15 MB
DEFAULT_SEED = 1
#: The task, and ``train`` or ``test``.
Name = tuple[int, str]


@dataclass(frozen=True)
class BabiFiles(Sources):
    """The archive, or the folder unpacked from it."""

    archive: Path | None = option(None, "the tasks_1-20_v1-2.tar.gz", one_of="source", type=Path, metavar="FILE")
    raw_dir: Path | None = option(
        None, "the folder unpacked from it, or its folder of a set", one_of="source", type=Path, metavar="FOLDER"
    )

    def __post_init__(self) -> None:
        check_path("--archive", self.archive, "file")
        check_path("--raw-dir", self.raw_dir, "folder")

    def files(self, set_name: str, tasks: Sequence[int]) -> dict[Name, tuple[Path, bytes]]:
        """Name -> path and content. Raises DataError for a missing file, and for two files of one name."""
        if self.archive is None:
            read = ((path, self.read_bytes(path)) for path in self.in_folder(set_name, tasks))
        else:
            read = self._in_archive(set_name, tasks)
        found: dict[Name, tuple[Path, bytes]] = {}
        for path, data in read:
            name = name_of(path.name, tasks)
            if name in found:
                raise DataError(f"{found[name][0]} is also qa{name[0]}_…_{name[1]}.txt: remove one of the two", path)
            found[name] = path, data
        for task in tasks:
            for part in ("train", "test"):
                if (task, part) not in found:
                    raise DataError(f"has no file qa{task}_…_{part}.txt of {set_name}", self.archive or self.raw_dir)
            (train, trained), (test, tested) = (found[task, part] for part in ("train", "test"))
            if trained == tested:
                raise DataError(f"has the same stories as {train.name}: give the published files", test)
        return found

    def in_folder(self, set_name: str, tasks: Sequence[int]) -> list[Path]:
        """The files of the folder, by task. Raises DataError if it is that of another set."""
        places = [self.raw_dir / set_name, self.raw_dir / "tasks_1-20_v1-2" / set_name, self.raw_dir]
        place = next((place for place in places if any(place.glob("qa*.txt"))), self.raw_dir)
        own = place.resolve().name
        if own in SETS and own != set_name:
            raise DataError(f"is the set {own}: add --set {own}, or give the folder of {set_name}", place)
        paths = [path for path in sorted(place.glob("qa*.txt")) if name_of(path.name, tasks)]
        return sorted(paths, key=lambda path: name_of(path.name, tasks))

    def _in_archive(self, set_name: str, tasks: Sequence[int]) -> Iterator[tuple[Path, bytes]]:
        def limit(name: str) -> int | None:
            folder, _, file = f"/{name}".rpartition("/")
            return LARGEST if folder.endswith(f"/{set_name}") and name_of(file, tasks) else None

        with self.open(self.archive) as packed:
            for name, stream in select(self.archive, packed, limit):
                yield self.archive / name, stream.read()


def name_of(name: str, tasks: Sequence[int]) -> Name | None:
    """The task and part of a file such as ``qa20_agents-motivations_test.txt``; None for others and other tasks."""
    match = re.fullmatch(r"qa(\d{1,9})_.*_(train|test)\.txt", name)
    return (int(match[1]), match[2]) if match and int(match[1]) in tasks else None


@dataclass(frozen=True)
class BabiOptions(Options):
    """The options of bAbI; ``source_sha256`` has the hashes of the files."""

    set: str = option("en-10k", "the set of the archive (default: %(default)s)", choices=SETS)
    tasks: tuple[int, ...] = option(tuple(TASKS), "tasks (default: 1-20)", type=lengths, metavar="NUMBERS")
    think: int = option(3, "steps between a question and its answer (default: %(default)s)", type=whole_number(0, 100))
    holdout: float = option(0.1, "share of the training stories that becomes valid (default: %(default)s)", type=share)
    seed: int | None = option(None, f"seed of --holdout (default: {DEFAULT_SEED})", type=seed_number)
    drop_last: bool = option(False, "leave out the last story of every file", given={"--drop-last": True})
    source_sha256: tuple[str, ...] = field(default=())

    def complete(self, sources: BabiFiles) -> BabiOptions:
        if max(self.tasks) > max(TASKS):
            raise UsageError(f"--tasks has {max(self.tasks)}: there are tasks 1 to {max(TASKS)}")
        seed = seed_of(self.seed, bool(self.holdout), DEFAULT_SEED)
        # Recorded without a hold-out too, as earlier versions did.
        return replace(self, seed=DEFAULT_SEED if seed is None else seed)

    def identify(self, sources: BabiFiles) -> BabiOptions:
        paths = [sources.archive] if sources.archive else sources.in_folder(self.set, self.tasks)
        return replace(self, source_sha256=tuple(map(sources.sha256, paths)))


class Babi(Dataset):
    """``python -m data_prep babi``."""

    name = "babi"
    title = "bAbI"
    source = "Weston et al. 2015"
    licence = "CC BY 3.0"
    size = "not downloaded"
    arch = "sg_dnc_babi"
    splits = ("tasks",)
    options = BabiOptions
    sources = BabiFiles

    def build(self, options: BabiOptions, sources: BabiFiles) -> Corpus:
        files = sources.files(options.set, options.tasks)
        parts: dict[str, list[tuple[Pair, str]]] = {"train": [], "test": []}
        for (task, part), (path, data) in sorted(files.items()):
            found = list(stories(path, data))
            for rows in found[:-1] if options.drop_last else found:
                parts[part].append((render(rows, options.think), f"task_{task}"))
        # A file has at least one story.
        empty = next((part for part, found in parts.items() if not found), None)
        if empty is not None:
            raise DataError(
                f"--drop-last left no story: every {empty} file has only one; omit it, or name more --tasks",
                sources.archive or sources.raw_dir,
            )
        train, held_out = [pair for pair, _ in parts["train"]], []
        types = {pair.source: kind for pair, kind in parts["train"]}
        if options.holdout:
            train, held_out = hold_out(train, options.holdout, options.seed)
        subsets = {"train": Subset(train)}
        if held_out:
            subsets["valid"] = Subset(held_out, [types[pair.source] for pair in held_out])
        subsets["test"] = Subset([pair for pair, _ in parts["test"]], [kind for _, kind in parts["test"]])
        held = f"; valid is {options.holdout:g} of the training stories" if held_out else ""
        return Corpus(
            subsets,
            f"tasks {format_lengths(list(options.tasks))} of {options.set}{held}",
            "the stories of the files" + (", without the last of each" if options.drop_last else ""),
            {"files": [describe(path.name, data) for path, data in files.values()]},
            no_label=BLANK,
            official=True,
        )


def describe(name: str, data: bytes) -> Json:
    """The entry of a file in ``dataset.json``."""
    return {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


#: A sentence, or a question and the words of its answer.
Row = tuple[list[str], list[str]]


def stories(path: Path, data: bytes) -> Iterator[list[Row]]:
    """The stories of a file.

    Raises DataError for a line that is not ``1 Mary moved to the hall.`` or ``2 Where is Mary?<tab>hall<tab>1``, for
    numbers that do not count up, for a story that does not end in a question, for the answer ``-``, and for a word that
    is one of fairseq's specials.
    """
    rows: list[Row] = []
    for number, line in enumerate(split_lines(path, data), start=1):
        match = re.fullmatch(r"(\d{1,9}) (.*)", line)
        columns = match[2].split("\t") if match else []
        if not match or len(columns) not in (1, 3):
            raise DataError(
                f"not a numbered sentence, or a question, its answer and facts: {shorten(line)}", path, number
            )
        if len(columns) == 3 and not re.fullmatch(r"\s*\d+(\s+\d+)*\s*", columns[2]):
            raise DataError(
                f"the facts of an answer are no numbers of sentences: {shorten(line)}; is the file cut off?",
                path,
                number,
            )
        position = int(match[1])
        if position == 1 and rows:
            yield checked(rows, path, number - 1)
            rows = []
        if position != len(rows) + 1:
            raise DataError(f"line {position} of a story follows line {len(rows)}", path, number)
        answer = columns[1].lower().split(",") if len(columns) == 3 else []
        if any(not word or len(word.split()) != 1 for word in answer) or not words(columns[0]):
            raise DataError(f"an empty sentence or answer: {shorten(line)}", path, number)
        row = words(columns[0]), [word.strip() for word in answer]
        if BLANK in row[1]:
            raise DataError(f"the answer is {BLANK!r}, which means 'no label' here: write another word", path, number)
        check_words([*row[0], *row[1]], path, number)
        rows.append(row)
    yield checked(rows, path, number)


def checked(rows: list[Row], path: Path, line: int) -> list[Row]:
    """The story that ends at a line. Raises DataError if that is no question, as it is in all published files."""
    _, answer = rows[-1]
    if not answer:
        raise DataError("the story ends here without a question: is the file cut off?", path, line)
    return rows


def words(sentence: str) -> list[str]:
    """Words in small letters, and the signs of punctuation."""
    return re.findall(r"[^\s.?,]+|[.?,]", sentence.lower())


def render(rows: list[Row], think: int) -> Pair:
    """A story as one sequence and its labels."""
    source, target = [], []
    for sentence, answer in rows:
        steps = think + len(answer) if answer else 0
        source += [*sentence, *[BLANK] * steps]
        target += [*[BLANK] * (len(sentence) + (think if answer else 0)), *answer]
    return Pair(" ".join(source), " ".join(target))
