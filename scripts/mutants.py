"""Changes lines at random and counts how many of the changes the tests notice.

    python scripts/mutants.py --number 60 --seed 1 --out mutants.json

A change (a mutant) is one operator or constant of a line of ``fairseq_sg`` or ``data_prep``. It is made in a copy of
the repository. The test files that name the changed module run first, then those of the folders in ``FOLDERS``. A
mutant that no test notices has survived: it needs a test, or the line does nothing. Run the command again to resume.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
#: Code -> the folders of its tests.
FOLDERS = {
    "fairseq_sg/ops": ["ops", "modules"],
    "fairseq_sg/modules": ["modules", "models"],
    "fairseq_sg/criterions": ["criterions", "tasks", "models"],
    "data_prep": ["data_prep"],
}
#: Kernels run on a GPU, or in an interpreter that takes minutes.
LEFT_OUT = re.compile(r"triton|__main__")
SECONDS = 900  # for the tests of a mutant; what takes longer hangs, and is noticed
SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}


class Mutant(NamedTuple):
    """A change of a file: the text from ``start`` to ``end``, in characters, becomes ``text``."""

    file: str
    line: int
    start: int
    end: int
    before: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.text}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All changes of a file, in its order."""
    source = path.read_text("utf-8")
    lines = source.splitlines(keepends=True)
    begins = [sum(map(len, lines[:number])) for number in range(len(lines))]

    def place(line: int, column: int) -> int:
        return begins[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def between(left: ast.expr, right: ast.expr, operator: ast.AST) -> Iterator[Mutant]:
        sign, other = SWAPS.get(type(operator), ("", ""))
        start, end = place(left.end_lineno, left.end_col_offset), place(right.lineno, right.col_offset)
        found = re.search(rf"(?<![\w*/<>=!-]){re.escape(sign)}(?![\w*/=])", source[start:end]) if sign else None
        if found and "#" not in source[start:end]:
            begin = start + found.start()
            yield Mutant(name, left.end_lineno, begin, begin + len(sign), sign, other)

    name = path.relative_to(REPOSITORY).as_posix()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, node.op)
        elif isinstance(node, ast.Compare):
            for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield from between(left, right, operator)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from between(left, right, node.op)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            start, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
            text = repr(not node.value if isinstance(node.value, bool) else node.value + 1)
            yield Mutant(name, node.lineno, start, end, source[start:end], text)


def draw(number: int, seed: int) -> list[Mutant]:
    """Draws mutants of different lines, from all lines alike."""
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            if not LEFT_OUT.search(path.name):
                for mutant in mutants_of(path):
                    lines.setdefault((mutant.file, mutant.line), []).append(mutant)
    chance = random.Random(seed)
    return [chance.choice(lines[key]) for key in chance.sample(sorted(lines), number)]


def test_files(mutant: Mutant) -> list[list[str]]:
    """Test files in the order of their runs: those that name the module, then all of its folders."""
    folders = next(tests for code, tests in FOLDERS.items() if mutant.file.startswith(f"{code}/"))
    module = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    stem = module.rpartition(".")[2]
    everything = [path for folder in folders for path in sorted((REPOSITORY / "tests" / folder).glob("test_*.py"))]
    named = [path for path in everything if stem in path.stem or module in path.read_text("utf-8")]
    others = [path for path in everything if path not in named]
    return [[str(path.relative_to(REPOSITORY)) for path in paths] for paths in (named, others) if paths]


def noticed_by(mutant: Mutant, copy: Path) -> str:
    """The first test that fails with a mutant; "" if it survives."""
    path = copy / mutant.file
    source = path.read_text("utf-8")
    path.write_text(source[: mutant.start] + mutant.text + source[mutant.end :], "utf-8")
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for files in test_files(mutant):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *files]
            options = {"cwd": copy, "env": environment, "capture_output": True, "text": True, "timeout": SECONDS}
            try:
                done = subprocess.run(command, **options)
            except subprocess.TimeoutExpired:
                return "a test that does not end"
            if done.returncode:
                failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                return failed[0] if failed else f"exit status {done.returncode}"
    finally:
        path.write_text(source, "utf-8")
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--number", type=int, default=60, help="of mutants (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: 1)")
    parser.add_argument("--out", type=Path, help="JSON file of results; those in it are not run again")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    args = parser.parse_args()
    drawn = draw(args.number, args.seed)
    if args.list:
        print(*drawn, sep="\n")
        return 0
    done = json.loads(args.out.read_text("utf-8")) if args.out and args.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / REPOSITORY.name
        ignored = shutil.ignore_patterns(".*", "data-bin", "runs", "checkpoints", "__pycache__")
        shutil.copytree(REPOSITORY, copy, ignore=ignored)
        if (REPOSITORY.parent / "shared").exists():
            (copy.parent / "shared").symlink_to(REPOSITORY.parent / "shared")
        for mutant in drawn:
            if str(mutant) not in done:
                done[str(mutant)] = noticed_by(mutant, copy)
                if args.out:
                    args.out.write_text(json.dumps(done, indent=1), "utf-8")
            print(f"{mutant}: {done[str(mutant)] or 'SURVIVED'}", flush=True)
    survived = sum(not done[str(mutant)] for mutant in drawn)
    print(f"{len(drawn) - survived} of {len(drawn)} noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
