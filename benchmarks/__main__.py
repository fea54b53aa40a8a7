"""All benchmarks with one command: operators, training steps, decoding, and data preparation if asked for.

    python -m benchmarks                                       # tens of minutes on a CPU
    python -m benchmarks --suite ops --peers --out runs/ops    # one suite, also into runs/ops/RESULTS.md
    python -m benchmarks --suite step --reference PATH         # a training step, beside the reference repository's
    python -m benchmarks --suite data                          # preparing the datasets; takes half an hour
    python -m benchmarks --suite together                      # many small trainings at once
    python -m benchmarks --quick                               # a smoke test; its numbers mean nothing

Each suite has its own command with more options: ``benchmarks/README.md``. The command fails if an implementation of an
operator is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import attention, memory, operators, points, preparation, report, step, together
from benchmarks.measure import as_in_training
from fairseq_sg.parsers import Command

SUITES = ("ops", "step", "decode", "data", "together")
DEFAULT_SUITES = SUITES[:3]


def operator_suite(args: argparse.Namespace) -> int:
    setting = operators.setting_on(args.device, peers=args.peers, quick=args.quick)
    every = operators.OPERATORS.values()
    return 1 if operators.run(every, setting, args.rounds, args.command, args.out, quick=args.quick) else 0


def sections(suite: str, args: argparse.Namespace) -> Iterator[report.Section]:
    """Those of the other suites."""
    on = (args.rounds, args.device)
    if suite == "step":
        yield step.step_section("scan", *on, batches=1 if args.quick else 4, reference=args.reference)
        yield attention.step_section(*on, ["linear elu"] if args.quick else ())
        yield attention.orthogonality_section(*on, attention.LENGTHS[: 2 if args.quick else None])
        yield attention.windows_section(*on, attention.WINDOW_LENGTHS[: 2 if args.quick else None])
        yield from points.sections(*on, points=points.POINTS[: 2 if args.quick else None])
        yield from memory.sections(*on, words=memory.WORDS[: 1 if args.quick else None])
    elif suite == "decode":
        yield attention.decoding_section(*on, (16, 64) if args.quick else attention.POSITIONS)
    elif suite == "together":
        yield together.section_of(together.USUAL[args.device], 20 if args.quick else 200, *on)
    else:
        yield preparation.preparation_section("parity" if args.quick else "")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Command(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--suite", choices=SUITES, nargs="+", default=DEFAULT_SUITES, help="default: all but data and together"
    )
    parser.add_argument("--peers", action="store_true", help="also measure installed peers of the operators")
    parser.add_argument("--reference", type=Path, metavar="PATH", help="a copy of the reference repository")
    parser.add_argument("--quick", action="store_true", help="small sizes, as a smoke test; do not quote the numbers")
    report.add_options(parser, rounds=9)
    args = report.parse(parser, argv, "benchmarks")
    if args.reference is not None and "step" not in args.suite:
        parser.error("--reference is for --suite step")
    if args.peers and "ops" not in args.suite:
        parser.error("--peers is for --suite ops")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if an implementation of ours is wrong or fails, else 0."""
    args = parse(argv)
    as_in_training()
    code = 0
    for suite in args.suite:
        if suite == "ops":
            code = operator_suite(args)
            continue
        for section in sections(suite, args):
            report.publish(section, args.command, args.out)
    return code


if __name__ == "__main__":
    sys.exit(main())
