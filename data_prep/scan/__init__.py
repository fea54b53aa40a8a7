"""SCAN: commands such as ``jump twice`` and the actions they stand for (Lake & Baroni 2018).

    jump twice                            ->  I_JUMP I_JUMP
    walk opposite left and run            ->  I_TURN_LEFT I_TURN_LEFT I_WALK I_RUN
    look after turn around right          ->  I_TURN_RIGHT I_TURN_RIGHT I_TURN_RIGHT I_TURN_RIGHT I_LOOK

Grammar (``scan.grammar`` has it with the meaning):

    command  =  clause  |  clause "and" clause  |  clause "after" clause
    clause   =  phrase  |  phrase "twice"  |  phrase "thrice"
    phrase   =  verb | move direction | move "opposite" direction | move "around" direction

It has 20,910 commands of 13 words, at most 9 words long, with at most 48 of 6 actions. They are generated in the order
of the grammar, or read from the official ``tasks.txt``, which has another order and is checked line by line.

Each split has ``train``, a test set ``gen`` (or ``test`` if it has the training distribution), and ``valid`` from
the training distribution:

    length --cutoff C         Training commands have at most C actions, ``gen`` the longer ones (Newman et al. 2020).
                              ``valid`` is a tenth of the short ones (Csordás et al. 2021). They draw it by position in
                              tasks.txt, so only the official file gives the ``valid`` of their papers.
    length                    Training commands have at most 22 actions, ``gen`` at least 24 (Lake & Baroni 2018,
                              experiment 2).
    addprim_jump              ``gen`` has the commands with ``jump``. The bare command is a tenth of the training lines,
                              before ``--holdout`` takes others (Lake & Baroni 2018, experiment 3).
    addprim_turn_left         The same with the adjacent words ``turn left``.
    template_X                ``gen`` has the commands with X after walk, look, run or jump; none of them is in
                              training (Loula et al. 2018).
    template_jump_around_right, filler_numN
                              ``gen`` has the commands with ``jump around right``. In training, ``around right``
                              follows the other verbs, or N of them: none, look, walk, run (Loula et al. 2018).
    simple                    A random fifth is ``test`` (Lake & Baroni 2018, experiment 1). The official fifth is in
                              two separate files; without them another one is drawn.
    mcd1, mcd2, mcd3          Maximum compound divergence, by index files, with an official ``dev`` (Keysers et al.
                              2020).

Only the split by cutoff is published with ``valid``. For the others ``--holdout`` takes it from the training commands.
By default those of mcd stay complete, because ``dev`` serves for validation.

Source: github.com/brendenlake/SCAN, BSD licence. The index files of mcd are by the authors of CFQ and state no licence.
Their hashes here are those of a third party's copy, made for the same tasks.txt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from data_prep.corpus import Corpus, Subset
from data_prep.dataset import (
    DataError,
    Dataset,
    Options,
    Pair,
    Subsets,
    UsageError,
    check_sizes,
    option,
    seed_number,
    share,
    shorten,
    whole_number,
)
from data_prep.draws import hold_out, seed_of
from data_prep.scan.grammar import ACTIONS, generate, interpret
from data_prep.scan.splits import (
    CUTOFFS,
    HELD_OUT,
    LENGTH_LIMIT,
    LENGTH_SIZES,
    LONGEST,
    MCD_SIZES,
    REFERENCE_SEED,
    SHORTEST,
    SIMPLE_SIZES,
    check_draw,
    random_split,
    resplit,
    resplit_sizes,
    split_by_length,
)
from data_prep.sources import OfficialFile, OfficialFiles, official_files
from data_prep.text import split_lines

FILES = {file.name: file for file in official_files("scan").values()}
TASKS = FILES["tasks.txt"]
SIMPLE_FILES = tuple(f"tasks_{subset}_simple.txt" for subset in SIMPLE_SIZES)
MCD_INDICES = {"train": "trainIdxs", "dev": "devIdxs", "gen": "testIdxs"}
VOCABULARY = (13, 6)
DEFAULT_HOLDOUT = 0.1


class Parts(NamedTuple):
    """A split before any hold-out."""

    subsets: Subsets
    published: dict[str, int]
    rule: str
    membership: str = "the published ones"


class ScanFiles(OfficialFiles):
    """The sources of SCAN."""

    urls = {"scan": "https://raw.githubusercontent.com/brendenlake/SCAN/c4b756cbc010d75c912f16c42c8f15dc6b7e6c8f"}
    elsewhere = dict.fromkeys(
        ("mcd1.json", "mcd2.json", "mcd3.json"),
        "It is in https://storage.googleapis.com/cfq_dataset/scan-splits.tar.gz (--download gets its tasks.txt)",
    )


PUBLISHED_CUTOFFS = " ".join(map(str, CUTOFFS))
SPLITS = ("length", "simple", *HELD_OUT, "mcd1", "mcd2", "mcd3")
CUTOFF = whole_number(
    SHORTEST,
    LONGEST - 1,
    f": commands have {SHORTEST} to {LONGEST} actions. Published cutoffs: {PUBLISHED_CUTOFFS}",
)


@dataclass(frozen=True)
class ScanOptions(Options):
    """The options of SCAN; ``official_files`` are those that are read."""

    split: str = option(choices=SPLITS)
    cutoff: int | None = option(
        None,
        f"with --split length: maximum number of actions in training (published: {PUBLISHED_CUTOFFS}; "
        f"without --cutoff the original split, {LENGTH_LIMIT})",
        type=CUTOFF,
    )
    holdout: float | None = option(
        None,
        f"share of the training commands to use as valid; 0 makes no valid (default: {DEFAULT_HOLDOUT}, or 0 "
        "for mcd, which has dev). Not with --cutoff",
        type=share,
    )
    seed: int | None = option(
        None,
        f"seed of our own draws (default: {REFERENCE_SEED}). Not with --cutoff",
        type=seed_number,
    )
    official_files: tuple[str, ...] = ()

    def complete(self, sources: ScanFiles) -> ScanOptions:
        self.check_cutoff_alone()
        names = official_names(self.split, sources)
        holdout = self.holdout
        if holdout is None and self.cutoff is None:
            holdout = 0.0 if self.split.startswith("mcd") else DEFAULT_HOLDOUT
        own_simple = self.split == "simple" and names != SIMPLE_FILES
        draws = self.cutoff is not None or holdout or own_simple or self.split.startswith("addprim")
        seed = seed_of(self.seed, draws, REFERENCE_SEED, f"--split {self.split} --holdout 0 draws nothing")
        return replace(self, holdout=holdout, seed=seed, official_files=names)

    def check_cutoff_alone(self) -> None:
        """Raises UsageError for ``--cutoff`` without effect, and for options without effect beside it."""
        if self.cutoff is None:
            return
        if self.split != "length":
            raise UsageError(f"--cutoff belongs to --split length, not to --split {self.split}")
        for name in ("holdout", "seed"):
            if getattr(self, name) is not None:
                raise UsageError(f"--{name} does not go with --cutoff, whose valid is drawn as in the papers")


class Scan(Dataset):
    """``python -m data_prep scan``."""

    name = "scan"
    title = "SCAN"
    source = "its grammar, or github.com/brendenlake/SCAN"
    licence = "BSD"
    size = "4 MB, or generated"
    arch = "sg_transformer_scan"
    splits = SPLITS
    options = ScanOptions
    sources = ScanFiles

    def build(self, options: ScanOptions, sources: ScanFiles) -> Corpus:
        names = options.official_files
        parts = make_parts(options, {name: load(FILES[name], sources) for name in names})
        check_sizes(parts.subsets, parts.published)
        subsets, rule = parts.subsets, parts.rule
        if options.holdout:
            train, valid = hold_out(subsets["train"], options.holdout, options.seed)
            subsets = {"train": train, "valid": valid, **{k: v for k, v in subsets.items() if k != "train"}}
            rule += f"; valid is {options.holdout:g} of the commands that occur once in train"
        origin = {"order": "official", "files": [FILES[name].describe() for name in names]}
        if not names:
            origin = {"order": "grammar", "generator": "data_prep.scan_grammar"}
        made = {name: Subset(pairs, published=parts.published.get(name)) for name, pairs in subsets.items()}
        return Corpus(made, rule, parts.membership, origin, VOCABULARY)


def official_names(split: str, sources: ScanFiles) -> tuple[str, ...]:
    """The official files of a split with these options; none for the grammar."""
    if split.startswith("mcd"):
        return (f"{split}.json", TASKS.name)
    if split == "simple" and (sources.download or any(sources.find(FILES[name]) for name in SIMPLE_FILES)):
        return SIMPLE_FILES
    return (TASKS.name,) if sources.asked_for else ()


def load(file: OfficialFile, files: OfficialFiles) -> list[Pair] | dict[str, list[int]]:
    """Reads the pairs of an official text file, or the content of an index file. Raises DataError."""
    path, data = files.read(file)
    pairs = parse(path, data) if file.name.endswith(".txt") else None
    file.check(path, data)
    return json.loads(data) if pairs is None else pairs


def parse(path: Path, data: bytes) -> list[Pair]:
    """Reads commands and actions from lines such as ``IN: jump twice OUT: I_JUMP I_JUMP``.

    Raises DataError with the line for another form (see ``text.split_lines`` and ``parse_line``)
    and for a repeated command.
    """
    seen: dict[str, int] = {}
    pairs = []
    for number, line in enumerate(split_lines(path, data), start=1):
        try:
            pair = parse_line(line)
        except ValueError as error:
            raise DataError(str(error), path, number) from None
        first = seen.setdefault(pair.source, number)
        if first != number:
            raise DataError(f"the command {pair.source!r} is already on line {first}", path, number)
        pairs.append(pair)
    return pairs


def parse_line(line: str) -> Pair:
    """Reads one line. Raises ValueError for another form, an unknown command, or wrong actions."""
    if not line.startswith("IN: "):
        raise ValueError(f"does not begin with 'IN: ': {shorten(line)}")
    command, separator, actions = line.removeprefix("IN: ").partition(" OUT: ")
    if not separator:
        raise ValueError(f"no ' OUT: ' between command and actions: {shorten(line)}")
    if "  " in line or line != line.strip():
        raise ValueError("one space too many")
    meant = interpret(command).split(" ")
    for position, action in enumerate(actions.split(" "), start=1):
        if action not in ACTIONS:
            raise ValueError(f"unknown action {shorten(action)}")
        if meant[position - 1 : position] != [action]:
            expected = meant[position - 1] if position <= len(meant) else "the end"
            raise ValueError(f"wrong actions: number {position} is {action}, but the command means {expected}")
    if actions.count(" ") + 1 < len(meant):
        raise ValueError(f"wrong actions: they end after {actions.count(' ') + 1} of {len(meant)}")
    return Pair(command, actions)


def make_parts(options: ScanOptions, contents: dict) -> Parts:
    """Splits the commands as requested. ``contents`` maps a file name to the result of ``load``."""
    split = options.split
    if split == "simple":
        return simple_parts(options.seed, contents)
    pairs = contents[TASKS.name] if contents else generate()
    if split in HELD_OUT:
        rule = HELD_OUT[split]
        return Parts(rule.split(pairs, options.seed), rule.sizes, rule.rule)
    if split.startswith("mcd"):
        indices = contents[f"{split}.json"]
        subsets = {subset: [pairs[i] for i in indices[key]] for subset, key in MCD_INDICES.items()}
        return Parts(subsets, MCD_SIZES, f"maximum compound divergence, split by {split}.json")
    if options.cutoff is not None:
        return cutoff_parts(options.cutoff, pairs, official=bool(contents))
    rule = f"train has the commands with at most {LENGTH_LIMIT} actions, gen the longer ones"
    return Parts(split_by_length(pairs, LENGTH_LIMIT), LENGTH_SIZES, rule)


def cutoff_parts(cutoff: int, pairs: list[Pair], official: bool) -> Parts:
    """The split by cutoff. From the official file, a published cutoff is checked against the reference."""
    membership = "valid is our own random 10 %. For the valid of the papers, give --download or --raw-dir"
    if official:
        check_draw(pairs, cutoff)
        membership = "the published ones" if cutoff in CUTOFFS else "drawn like the published ones"
    subsets = resplit(pairs, cutoff)
    short = f"the commands with at most {cutoff} actions, gen has all longer ones"
    if "valid" not in subsets:
        return Parts(subsets, {}, f"train has {short}; a valid of 10 % would be empty", "this cutoff is not published")
    return Parts(subsets, resplit_sizes(cutoff), f"train has 90 % and valid 10 % of {short}", membership)


def simple_parts(seed: int | None, contents: dict) -> Parts:
    """The official split if its two files exist, or else one of our own."""
    rule = "test is a random fifth of all commands, train has the others"
    if SIMPLE_FILES[0] in contents:
        return Parts(dict(zip(SIMPLE_SIZES, map(contents.get, SIMPLE_FILES), strict=True)), SIMPLE_SIZES, rule)
    subsets = random_split(contents[TASKS.name] if contents else generate(), seed)
    membership = "our own random split of the official sizes. For the official split, give --download"
    return Parts(subsets, SIMPLE_SIZES, rule, membership)
