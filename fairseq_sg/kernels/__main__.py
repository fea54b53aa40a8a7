"""The implementations of the operators on this machine.

    fairseq-sg kernels list        # which exist, which can run here, which one runs by default

See docs/kernels.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def make_parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="fairseq-sg kernels", description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("list", help="operators and implementations in one table")
    return parser


def main(line: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    make_parser().parse_args(line)
    from fairseq_sg.kernels import listing
    from fairseq_sg.ops.dispatch import check_environment

    try:
        check_environment()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(*listing.table(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
