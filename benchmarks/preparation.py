"""Time and memory of the data preparations in ``COMMANDS``, binaries included: ``python -m benchmarks.preparation``.

Datasets are generated in full, but for those whose command has a size. Datasets from files need a folder in
``--raw-dirs FOLDER`` (``scan``, ``cogs``, ``iwslt_en_vi``). The text for language modelling is the library of the
running Python. CFQ is an archive of 300 MB, unpacked, with as many invented records as the split has.

Wall-clock seconds depend on other work of the machine, processor seconds less so.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import report
from data_prep.cfq import PARTS, SIZES
from fairseq_sg.parsers import Command

FILES = "FILES"  # stands for a folder of official files
TEXT = "TEXT"  # stands for a file with the source of Python's library
CFQ = "CFQ"  # stands for an invented archive of the official form
CFQ_SIZES = dict(zip(PARTS, SIZES["mcd1"], strict=True))
CFQ_RECORD = 2_500  # bytes; the official records have about 20,000
COMMANDS = [
    "scan --split length --cutoff 26",
    f"scan --split length --cutoff 26 --raw-dir {FILES}",
    f"cogs --raw-dir {FILES}",
    "pcfg --condition systematicity --generate 97203",
    f"cfq --split mcd1 --archive {CFQ}",
    "mathematics --module arithmetic__add_or_sub --generate 66666 --workers 2",
    "ctl --order forward",
    "ctlpp --variant A",
    "ctlpp --variant S --overlap 16 --shared-symbols 4",
    "arithmetic",
    "listops",
    "parity --train-lengths 1-40 --test-lengths 50,100",
    "first --train-lengths 10 --test-lengths 1000",
    "repeat_copy --train 5000",
    "associative_recall --train 5000",
    "key_value --train 5000",
    "double_addition",
    "add_multiply",
    "in_context",
    "sort_of_clevr --scenes 980",
    "burgers --train 100",
    "darcy --points 71 --grid 36 --train 20 --valid 10 --test 10",
    f"iwslt_en_vi --small --raw-dir {FILES}",
    f"text --unit bytes --input {TEXT}",
    f"text --unit sentencepiece --vocab-size 8000 --input {TEXT}",
]


class Cost(NamedTuple):
    """Wall-clock and processor seconds, peak memory of one process in MB, and the amount of data."""

    wall: float
    cpu: float
    memory: float
    made: str


def measure(arguments: list[str]) -> Cost:
    """Runs one preparation in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "data_prep", *arguments, "--out", str(out)]
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=report.REPOSITORY, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        if status:
            sys.exit(f"error: python -m data_prep {' '.join(arguments)} failed")
        subsets = json.loads((out / "dataset.json").read_text())["subsets"]
    if all("bytes" in subset for subset in subsets.values()):
        made = f"{sum(subset['bytes'] for subset in subsets.values()) / 1e6:.1f} MB"
    else:
        made = f"{sum(subset['size'] for subset in subsets.values()):,} examples"
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, made)


def expand(command: str, raw_dirs: Path | None, text: Path, cfq: Path) -> list[str] | None:
    """The arguments of a command; None if its files are missing."""
    name, *rest = command.split()
    files = None if raw_dirs is None else raw_dirs / name
    if FILES in rest and (files is None or not files.is_dir()):
        return None
    if CFQ in rest and not cfq.exists():
        write_cfq(cfq)
    places = {FILES: str(files), TEXT: str(text), CFQ: str(cfq)}
    return [name, *(places.get(word, word) for word in rest)]


def write_library(path: Path) -> None:
    """Writes the source of Python's library to one file."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    with path.open("wb") as stream:
        for source in sources:
            content = source.read_bytes()
            # Python's own tests have carriage returns and other encodings on purpose.
            if "site-packages" not in source.parts and b"\r" not in content and is_utf8(content):
                stream.write(content)


def write_cfq(path: Path) -> None:
    """Writes an archive with distinct questions of three words, their queries, and digits that compress to a half."""
    chance, words = random.Random(1), [f"{a}{b}" for a in "bdfgklm" for b in "aeiouyzw"]
    dataset, split = path.with_name("dataset.json"), path.with_name("mcd1.json")
    with dataset.open("w") as stream:
        for number, three in enumerate(itertools.islice(itertools.product(words, repeat=3), sum(CFQ_SIZES.values()))):
            query = f"SELECT count(*) WHERE {{\nM0 ns:film.{three[0]}.{three[1]} M1 .\n?x0 a ns:m.{three[2]}\n}}"
            texts = {"questionPatternModEntities": f"Did M0 {' '.join(three)} M1", "sparqlPatternModEntities": query}
            record = {"complexityMeasures": chance.randbytes(CFQ_RECORD // 2 - 120).hex(), **texts}
            stream.write(("," if number else "[") + json.dumps(record) + "\n")
        stream.write("]\n")
    ends = list(itertools.accumulate(CFQ_SIZES.values()))
    indices = {part: list(range(end - CFQ_SIZES[part], end)) for part, end in zip(CFQ_SIZES, ends, strict=True)}
    split.write_text(json.dumps(indices))
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        archive.add(dataset, "cfq/dataset.json")
        archive.add(split, "cfq/splits/mcd1.json")


def is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def preparation_section(only: str, raw_dirs: Path | None = None) -> report.Section:
    """The cost of every command with this beginning whose files are there."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "library.txt"
        write_library(text)
        for command in COMMANDS:
            arguments = (
                expand(command, raw_dirs, text, Path(folder) / "cfq1.1.tar.gz") if command.startswith(only) else None
            )
            if arguments is None:
                continue
            cost = measure(arguments)
            shown = command.replace(f"--raw-dir {FILES}", "--raw-dir …").replace(TEXT, "…").replace(CFQ, "…")
            rows.append([shown, cost.made, cost.wall, cost.cpu, cost.memory])
            print(*rows[-1], file=sys.stderr)
    columns = [("`python -m data_prep …`", "`{}`"), ("made", "{}"), ("seconds", "{:.1f}"), ("CPU seconds", "{:.1f}")]
    columns.append(("MB", "{:.0f}"))
    return report.Section("preparation", only or "All datasets", "cpu", columns, report.rounded(rows))


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(prog="python -m benchmarks.preparation", description=__doc__)
    parser.add_argument("--raw-dirs", type=Path, metavar="FOLDER", help="has a folder of official files per dataset")
    parser.add_argument("--only", metavar="WORD", default="", help="only commands with this beginning, such as parity")
    report.add_out(parser)
    args = parser.parse_args(argv)
    report.check_out(parser, args.out)
    # Preparations run in the root of the clone.
    section = preparation_section(args.only, args.raw_dirs and args.raw_dirs.resolve())
    if not section.rows:
        sys.exit(f"error: no command to run: --only {args.only!r} fits none whose files are in --raw-dirs")
    report.publish(section, report.command("benchmarks.preparation", argv), args.out)


if __name__ == "__main__":
    main()
