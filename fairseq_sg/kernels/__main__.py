"""The implementations of the operators on this machine.

    fairseq-sg kernels list        # which exist, which can run here, which one runs by default
    fairseq-sg kernels verify      # each against its equation in float64; a failing one never runs by default
    fairseq-sg kernels tune        # times the verified ones; from then on the fastest runs by default

See docs/kernels.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch

from fairseq_sg.errors import exit_code
from fairseq_sg.kernels import listing, processes, tune, verify
from fairseq_sg.kernels.keeping import Findings, check_place, kept
from fairseq_sg.kernels.processes import START, isolated, threads
from fairseq_sg.ops.dispatch import check_environment
from fairseq_sg.ops.operators import OPERATORS, TRITON
from fairseq_sg.ops.tuning import SHARE, dtype_name
from fairseq_sg.parsers import Command, Parser
from fairseq_sg.tables import aligned

#: Implementations that are verified at a time, and the processes of each. On a GPU most of the time is compilation.
JOBS, PARTS = {"cpu": 1, "cuda": 4}, {"cpu": 1, "cuda": 4}


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="fairseq-sg kernels", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command", parser_class=Command)
    commands.add_parser("list", help="operators and implementations in one table")
    for name, text in (("verify", "compare each with its equation"), ("tune", "time the verified ones")):
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
        )
        command.add_argument("--quick", action="store_true", help="few small sizes, as a smoke test; nothing is kept")
    return parser


def main(line: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code.

    It is 1 for an error and, of ``verify``, for an implementation that fails; and 130 where Ctrl-C interrupts it.
    """
    parser = make_parser()
    args = parser.parse_args(line)
    try:
        check_environment()
        if args.command == "list":
            print(*listing.table(), sep="\n")
            return 0
        if args.device == "cuda" and not torch.cuda.is_available():
            parser.error("--device cuda: torch finds no GPU")
        check_place(args.device, args.quick)
        processes.preload()
        return (run_verify if args.command == "verify" else run_tune)(args.device, args.quick)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def attempt(findings: Findings, operator: str, name: str, device: str, quick: bool) -> verify.Verdict:
    """Verifies one implementation, if it can run here, and notes the verdict."""
    reason = listing.why_not(name, device)
    if reason is not None:
        return verify.Verdict(operator, name, [verify.Result("", "", cannot=reason)])
    found = verify.verdict_of(operator, name, device, quick, parts=PARTS[device])
    if not found.cannot and not found.unknown and not (device == "cpu" and name == TRITON):  # interpreted: no device
        findings.verdicts.setdefault(operator, {})[name] = found.problem
    return found


def verified(findings: Findings, which: Sequence[tuple[str, str]], device: str, quick: bool) -> bool:
    """Verifies implementations, prints a line for each, and notes the verdicts; whether none fails.

    Raises:
        ValueError: nothing works on this device in a process of its own, so nothing can be told of the operators.
    """
    _, ended = isolated(partial(verify.first_step, device), START)
    if ended:
        raise ValueError(f"{device} cannot be used in a process of its own: {ended}")
    failed, good = [], 0
    width = max(len("operator"), *(len(operator) for operator, _ in which))
    print(f"{'operator':{width}}  {'implementation':14}  cases  seconds  largest error in float32, bfloat16, float16")
    print("-" * (width + 78), flush=True)
    with threads(JOBS[device]) as pool:
        for found in pool.map(lambda one: attempt(findings, *one, device, quick), which):
            operator, name = found.operator, found.implementation
            start = f"{operator:{width}}  {name:14}"
            if found.cannot:
                print(f"{start}  cannot run here: {found.cannot}", flush=True)
                continue
            start += f"  {sum(not one.cannot for one in found.results):5}  {found.seconds:7.1f}"
            if found.unknown:
                print(f"{start}  not verified: no memory for {found.without_memory} more; try again", flush=True)
            elif found.problem:
                failed.append((operator, name))
                print(f"{start}  FAILS: {found.problem}", flush=True)
            else:
                good += 1
                worst = "  ".join(f"{found.worst(dtype_name(dtype)):.0e}" for dtype in verify.DTYPES)
                print(f"{start}  {worst}", flush=True)
    for operator, name in failed:
        instead = findings.tuning.working(operator, torch.float32, OPERATORS[operator].default)
        print(f"{operator}: {name} fails here and never runs by default; {instead} runs in its place")
    print(f"{good} implementations verified, {len(failed)} fail")
    return not failed


def run_verify(device: str, quick: bool) -> int:
    with kept(device, quick) as findings:
        good = verified(findings, verify.everything(), device, quick)
    return 0 if good else 1


def run_tune(device: str, quick: bool) -> int:
    operators = sorted(operator for operator in OPERATORS if tune.sizes_of(operator, device))
    candidates = [(o, name) for o in operators for name in OPERATORS[o].candidates(device, torch.float32)]
    with kept(device, quick) as findings:
        unknown = [(o, name) for o, name in candidates if name not in findings.before.verdicts.get(o, {})]
        if unknown:
            verified(findings, unknown, device, quick)
            print()
        print(
            "milliseconds forward and backward; another than the first runs where it takes "
            f"{SHARE:.0%} or less of its time"
        )
        for operator in operators:
            time_one(findings, operator, device, quick)
        print()
    return 0


def time_one(findings: Findings, operator: str, device: str, quick: bool) -> None:
    """Times the verified implementations of an operator, prints a table, and notes the points."""
    verified = findings.tuning.verified
    names = [name for name in OPERATORS[operator].candidates(device, torch.float32) if verified(operator, name)]
    budget = (1, 1, 0.0) if quick else (None, tune.ROUNDS, tune.SHORTEST)
    points, problems = [], []
    for dtype in tune.DTYPES[device]:
        found, ended = isolated(partial(tune.measure, operator, names, device, dtype, *budget), tune.LIMIT)
        points += found
        # Where it ended early, it may hang at other sizes, too.
        findings.timed[operator, dtype_name(dtype)] = [] if ended else found
        if ended:
            where = f" in {dtype_name(dtype)}" * (len(tune.DTYPES[device]) > 1)
            problems.append(f"{operator}{where}: {ended}, after {len(found)} sizes; its own rule decides")
    tuning = findings.tuning  # with these points
    cells = [("dtype", *OPERATORS[operator].sizes, *names, "runs")]
    for point in points:
        dtype = getattr(torch, point.dtype)
        times = [f"{point.ms[name][1]:.3g}" if name in point.ms else "" for name in names]
        runs = tuning.choice(operator, dtype, point.sizes, OPERATORS[operator].rule(device, dtype, point.sizes))
        cells.append((point.dtype, *map(str, point.sizes), *times, runs))
    lines = aligned(cells, left=len(cells[0])) if points else ["nothing to choose from"]
    print("", operator, *lines, *problems, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
