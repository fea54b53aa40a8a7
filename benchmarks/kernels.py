"""What ``python -m fairseq_sg.kernels tune`` measured on GPUs, as tables.

    python -m benchmarks.kernels            # writes benchmarks/gpu/README.md from the files beside it
    python -m benchmarks.kernels FILE …     # prints the tables of files, such as that of this machine

A file is what ``tune`` keeps in the user's cache; it prints the path.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import fairseq_sg.ops  # noqa: F401  (declares the operators)
from benchmarks.report import number, table
from fairseq_sg.files import write_text
from fairseq_sg.ops.operators import OPERATORS
from fairseq_sg.ops.tuning import Tuning, read
from fairseq_sg.parsers import Command

FOLDER = Path(__file__).resolve().parent / "gpu"
HEAD = """# Operators on GPUs

Milliseconds forward and backward: medians. The column *runs* has the implementation that `implementation="auto"` then
takes near these sizes. Each table is the view of one file in this folder, written by `python -m fairseq_sg.kernels
tune`. [README.md](../README.md#measure-on-your-gpu) says how to send one.
"""
NONE = "**No file has been sent yet.**\n"


def sections(tuning: Tuning) -> str:
    """The machine, its verdicts, and a table for each operator."""
    key = tuning.key
    versions = [f"{name} {key[name]}" for name in ("driver", "torch", "triton", "operators") if key[name]]
    parts = [f"## {key['device']}", f"<sub>{', '.join(versions)}</sub>"]
    failing = [
        f"- `{operator}`, `{name}` fails: {text}"
        for operator, verdicts in tuning.verdicts.items()
        for name, text in verdicts.items()
        if text
    ]
    parts += ["\n".join(failing) if failing else "All implementations that can run there were verified."]
    for operator in dict.fromkeys(point.operator for point in tuning.points):
        points = [point for point in tuning.points if point.operator == operator]
        names = list(dict.fromkeys(name for point in points for name in point.ms))
        rows = []
        for point in points:
            runs = tuning.fastest_at(point)
            times = [number(point.ms[name][1]) if name in point.ms else "–" for name in names]
            rows.append([point.dtype, *(f"{size:,}" for size in point.sizes), *times, f"`{runs}`"])
        parts += [f"### {operator}", table(["dtype", *OPERATORS[operator].sizes, *names, "runs"], rows)]
    return "\n\n".join(parts) + "\n"


def page(folder: Path = FOLDER) -> str:
    """The page of all files in a folder.

    Raises:
        ValueError: a file is damaged.
    """
    files = sorted(folder.glob("*.json"))
    return HEAD + "\n" + ("\n".join(map(sections_of, files)) if files else NONE)


def sections_of(path: Path) -> str:
    try:
        return sections(read(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = Command(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="print their tables")
    files = parser.parse_args(argv).files
    try:
        if files:
            print("\n".join(map(sections_of, files)), end="")
        else:
            write_text(FOLDER / "README.md", page())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
