"""All benchmarks with one command: time and peak memory of every implementation and of peers.

    python -m benchmarks                                  # operators, training steps and decoding
    python -m benchmarks --suite ops --peers              # operators, installed peers beside them
    python -m benchmarks --suite step --reference PATH    # a training step, beside the reference repository's
    python -m benchmarks --suite data                     # preparing the datasets; takes half an hour
    python -m benchmarks --out FOLDER/NAME                # also NAME.md, NAME.json and plots, NAME-….png

Values and gradients of operators are first compared with their naive forms in float64; wrong ones are reported and not
timed. Times are medians with quartiles of interleaved rounds. The floor is the minimum time in which this machine could
move the bytes or do the FLOPs, from a copy and a product measured in the same run. A table has the project's targets,
met or not. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.measure import Row, as_in_training, measure, measure_machine
from benchmarks.report import publish, store, table, tables, where

SUITES = ("ops", "step", "decode", "data")
DEFAULT_SUITES = SUITES[:3]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MARKS = {True: "met", False: "not met", None: "not measured"}


@dataclasses.dataclass(frozen=True)
class Target:
    """A target: a ratio of times (or rates) to something else, with a lower or an upper bound.

    Attributes:
        text: the description.
        bound: the ratio.
        least: whether the bound is a minimum, else a maximum.
        ratio: as measured; None if it was not.
    """

    text: str
    bound: float
    least: bool
    ratio: float | None

    @property
    def met(self) -> bool | None:
        if self.ratio is None:
            return None
        return self.ratio >= self.bound if self.least else self.ratio <= self.bound

    def row(self) -> tuple[str, ...]:
        sign = "≥" if self.least else "≤"
        return self.text, f"{sign} {self.bound:g}", "–" if self.ratio is None else f"{self.ratio:.3g}", MARKS[self.met]


def operator_targets(rows: Sequence[Row], device: str) -> list[Target]:
    """The targets of operators: ratios of times in the same run."""
    medians = {(row.operator, row.size, row.contender): row.median for row in rows}

    def times(operator: str, size: int, one: str, other: str) -> float | None:
        """The ratio of the times of two rows."""
        a, b = medians.get((operator, size, one)), medians.get((operator, size, other))
        return None if a is None or b is None else a / b

    def faster(operator: str, size: int, than: str, bound: float, what: str) -> Target:
        return Target(what, bound, True, times(operator, size, than, "auto"))

    found = []
    softmax = "softmax: torch SDPA"
    if device == "cpu":
        for operator, name in (("causal_linear_attention", "causal linear"), ("linear_attention", "linear")):
            ratio = times(operator, 64, "auto", softmax)
            found.append(Target(f"{name} attention, N = 64: time, × softmax attention", 1.1, False, ratio))
            for size, bound in ((256, 2.0), (4096, 10.0)):
                what = f"{name} attention, N = {size:,}: times faster than softmax attention"
                found.append(faster(operator, size, softmax, bound, what))
    else:
        what = "causal linear attention, N = {:,}: times faster than flash-linear-attention"
        for size in (256, 4096):
            found.append(faster("causal_linear_attention", size, "flash-linear-attention", 1.0, what.format(size)))
        for other in ("scattermoe", "torch grouped_mm"):
            for size in (16, 64):
                found.append(faster("cvmm", size, other, 1.0, f"cvmm, {size} experts: times faster than {other}"))
    what = "geometric attention, N = 50: times faster than sums of logarithms"
    found.append(faster("geometric_attention", 50, "sums of logarithms", 2.0, what))
    for size, bound in ((16, 3.0), (64, 12.0)):
        same = times("sigma_moe", size, "dense, same parameters", "sigma_moe")
        found.append(Target(f"σ-MoE, {size} experts: times faster than dense, same parameters", bound, True, same))
        same = times("sigma_moe", size, "sigma_moe", "dense, same FLOPs")
        found.append(Target(f"σ-MoE, {size} experts: time, × dense, same FLOPs", 1.25, False, same))
    return found


def step_targets(step: dict | None, shares: Sequence[dict], device: str) -> list[Target]:
    """The targets of a training step, from the files of ``step.py`` and ``orthogonality_share.py``."""
    medians = {(r["batches"], r["implementation"]): r["median"] for r in (step or {}).get("results", ())}

    def faster(batches: str) -> float | None:
        theirs, ours = medians.get(("random", "reference")), medians.get((batches, "ours"))
        return theirs / ours if theirs and ours else None

    found = [
        Target(
            "SCAN step, random batches: × steps/s of the reference",
            1.5 if device == "cpu" else 3.0,
            True,
            faster("random"),
        )
    ]
    if device == "cpu":
        what = "SCAN step, bucketed: × steps/s of the reference on random batches"
        found.append(Target(what, 2.5, True, faster("bucketed")))
    for share in shares:
        what = f"orthogonality loss, N = {share['length']:,}: % of a step"
        found.append(Target(what, 3.0, False, 100 * share["share"]))
    return found


def targets_table(found: Sequence[Target]) -> str:
    return table(("target", "wanted", "measured", ""), [target.row() for target in found])


def shown(row: Row) -> tuple[str, ...]:
    """A row of a table of operators, without its size."""
    if row.status != "timed":
        return row.contender, f"{row.status}: {row.reason}", "–", "–", "–"
    time = f"{number(row.median)} [{number(row.low)}, {number(row.high)}]"
    return row.contender, time, number(row.median / row.floor), number(row.peak / 1e6), f"{row.error:.0e}"


def number(x: float) -> str:
    """Three digits, or more before the decimal point."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def operator_table(rows: Sequence[Row], size: str) -> str:
    """All rows of one operator, with the floor before those of each size."""
    found = []
    for at in dict.fromkeys(row.size for row in rows):
        of = [row for row in rows if row.size == at]
        found.append((f"{at:,}", f"floor ({of[0].floor_of})", number(of[0].floor), "", "", ""))
        found += [("", *shown(row)) for row in of]
    return table((size, "implementation", "ms", "× floor", "MB at the peak", "error"), found)


def run_operators(args: argparse.Namespace) -> dict:
    """Measures the operators and publishes their section; returns the content for the JSON file."""
    from benchmarks import operators, peers

    dtype = DTYPES[args.dtype]
    unknown = set(args.only or ()) - {operator.name for operator in operators.OPERATORS}
    if unknown:
        names = ", ".join(operator.name for operator in operators.OPERATORS)
        sys.exit(f"error: --only {' '.join(sorted(unknown))}: choose from {names}")
    found, remarks = peers.find(args.device, args.peers)
    for name, remark in remarks.items():
        print(f"peer {name}: {remark}", file=sys.stderr)
    setting = operators.Setting(args.device, dtype, dim=args.dim, peers=tuple(found))
    if args.device == "cuda":
        setting = dataclasses.replace(setting, **operators.ON_CUDA)
    if args.quick:
        setting = dataclasses.replace(setting, **operators.QUICK)
    machine = measure_machine(args.device, dtype, args.quick)
    rows: list[Row] = []
    texts = []
    for operator in operators.OPERATORS:
        if args.only and operator.name not in args.only:
            continue
        torch.manual_seed(0)
        of = []
        for size in operator.sizes(args.device, args.quick):
            print(f"{operator.name}, {operator.size_name} {size} …", file=sys.stderr)
            of += measure(operator.case(size, setting), args.rounds, args.device, machine)
        rows += of
        texts.append(f"### {operator.name}\n\n{operator_table(of, operator.size_name)}")
        if args.out is not None:
            texts[-1] += plot(of, operator.name, operator.size_name, args.out)
    targets = operator_targets(rows, args.device)
    peer_table = table(("peer", ""), sorted(remarks.items()))
    clock = "processor time of one thread" if args.device == "cpu" else "time on the stream"
    text = (
        f"Forward and backward, {args.dtype}, {setting.heads} heads of width {setting.dim}; {clock}, median "
        f"[quartiles] of {args.rounds} interleaved rounds. Errors are the maximum over value and gradients against "
        "float64, relative to the largest number. The floor is the minimum time for the bytes (inputs, value and "
        f"gradients, each once per pass) or the FLOPs of matrix products at this machine's rates: {machine}. "
        f"`{args.command}`; {where(gpu=args.device == 'cuda')}."
    )
    title = f"Operators ({args.device}, {args.dtype})"
    body = [text, *texts, f"### Peers\n\n{peer_table}", f"### Targets of operators\n\n{targets_table(targets)}"]
    publish(title, "\n\n".join(body), args.results)
    return {
        "title": title,
        "text": "\n\n".join(body),
        "machine": dataclasses.asdict(machine),
        "setting": {k: str(v) for k, v in vars(setting).items() if k != "peers"},
        "peers": remarks,
        "rows": [dataclasses.asdict(row) for row in rows],
        "targets": [dataclasses.asdict(target) | {"met": target.met} for target in targets],
    }


def plot(rows: Sequence[Row], operator: str, size_name: str, out: Path) -> str:
    """Draws time and memory over size into a file; returns its Markdown, or a note without matplotlib."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        import matplotlib
    except ImportError:
        return "\n\nNo plot: matplotlib is not installed."
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    sizes = list(dict.fromkeys(row.size for row in rows))
    floors = {row.size: row.floor for row in rows}
    time.plot(sizes, [floors[size] for size in sizes], linestyle="--", color="grey", label="floor")
    for name in dict.fromkeys(row.contender for row in rows):
        of = [row for row in rows if row.contender == name and row.status == "timed"]
        if not of:
            continue
        at = [row.size for row in of]
        # The choice of "auto" is drawn on top.
        (line,) = time.plot(
            at, [row.median for row in of], marker="o", label=name, linewidth=5 if name == "auto" else 1.5
        )
        time.fill_between(at, [row.low for row in of], [row.high for row in of], alpha=0.2, color=line.get_color())
        memory.plot(at, [row.peak / 1e6 for row in of], marker="o", color=line.get_color())
    for axes, label in ((time, "milliseconds, forward and backward"), (memory, "MB at the peak")):
        axes.set(xscale="log", yscale="log", xlabel=size_name, ylabel=label)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    time.legend(fontsize="small")
    figure.suptitle(operator)
    figure.tight_layout()
    path = out.with_name(f"{out.name}-{operator}.png")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"\n\n![{operator}]({path.name})"


def sections(name: str, arguments: Sequence[str], results: Path | None) -> list[dict]:
    """Runs the ``main`` of another benchmark, and returns the sections it publishes: title, text and their tables."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.md"
        arguments = [*arguments, "--results", str(file)]
        importlib.import_module(f"benchmarks.{name}").main(arguments)
        found = []
        for part in file.read_text("utf-8").split("\n## ")[1:]:
            title, _, text = part.partition("\n")
            found.append({"title": title, "text": text.strip(), "tables": tables(text)})
            if results is not None:
                store(title, text, results)
    return found


def run_step(args: argparse.Namespace) -> dict:
    """Training steps: fairseq's whole step, the step of every attention, and the orthogonality loss's share."""
    rounds = ["--rounds", str(args.rounds), "--device", args.device]
    reference = [] if args.reference is None else ["--reference", str(args.reference)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        step, share = Path(folder) / "step.json", Path(folder) / "share.json"
        batches = ["--batches", "1"] if args.quick else []
        found += sections("step", [*rounds, *reference, *batches, "--json", str(step)], args.results)
        lengths = ["--lengths", "10", "32"] if args.quick else []
        found += sections("orthogonality_share", [*rounds, *lengths, "--json", str(share)], args.results)
        if not args.quick:
            found += sections("attention", ["step", *rounds], args.results)
        targets = step_targets(json.loads(step.read_text()), json.loads(share.read_text()), args.device)
    title = f"Targets of a training step ({args.device})"
    text = f"`{args.command}`; {where(gpu=args.device == 'cuda')}.\n\n{targets_table(targets)}"
    publish(title, text, args.results)
    found.append({"title": title, "text": text, "tables": tables(text)})
    return {"sections": found, "targets": [dataclasses.asdict(target) | {"met": target.met} for target in targets]}


def run_decode(args: argparse.Namespace) -> dict:
    """Decoding token by token."""
    rounds = ["--rounds", str(args.rounds)]
    return {"sections": sections("attention", ["decoding", *rounds, "--device", args.device], args.results)}


def run_data(args: argparse.Namespace) -> dict:
    """Preparation of the datasets; on the processor for every device."""
    return {"sections": sections("preparation", ["--only", "parity"] if args.quick else [], args.results)}


RUN = {"ops": run_operators, "step": run_step, "decode": run_decode, "data": run_data}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--suite", choices=SUITES, nargs="+", default=list(DEFAULT_SUITES), help="default: all but data"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of operators (default float32)")
    parser.add_argument("--dim", type=int, default=16, help="width of a head of operators (default 16)")
    parser.add_argument("--only", metavar="OPERATOR", nargs="+", help="only these operators of suite ops")
    parser.add_argument("--peers", action="store_true", help="also measure installed peers of the operators")
    parser.add_argument(
        "--reference", type=Path, metavar="PATH", help="a copy of the reference repository (suite step)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="PREFIX", help="write PREFIX.md, PREFIX.json and plots, PREFIX-….png"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="also put the sections into this file (RESULTS.md)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default 9)")
    parser.add_argument("--quick", action="store_true", help="small sizes, as a smoke test; do not quote the numbers")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    if args.reference is not None and "step" not in args.suite:
        parser.error("--reference is for --suite step")
    if args.only is not None and "ops" not in args.suite:
        parser.error("--only is for --suite ops")
    words = sys.argv[1:] if argv is None else argv
    args.command = shlex.join(["python", "-m", "benchmarks", *words])
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if an implementation of ours is wrong or fails, else 0."""
    args = parse(argv)
    as_in_training()
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "command": args.command,
        "where": where(gpu=args.device == "cuda"),
        "device": args.device,
        "dtype": args.dtype,
        "rounds": args.rounds,
        "suites": {},
    }
    for suite in args.suite:
        found["suites"][suite] = RUN[suite](args)
        if args.out is not None:
            write(found, args.out)
    rows = found["suites"].get("ops", {}).get("rows", ())
    wrong = [row for row in rows if row["ours"] and row["status"] in ("wrong", "failed")]
    for row in wrong:
        what = f"{row['operator']} {row['contender']} at {row['size']}"
        print(f"{row['status']}: {what}: {row['reason']}", file=sys.stderr)
    return 1 if wrong else 0


def write(found: dict, out: Path) -> None:
    """Writes everything so far as JSON and as Markdown."""
    out.with_name(f"{out.name}.json").write_text(json.dumps(found, indent=1), "utf-8")
    texts = []
    for suite in found["suites"].values():
        texts += [(one["title"], one["text"]) for one in suite.get("sections", [suite])]
    text = "\n\n".join(f"## {title}\n\n{text}" for title, text in texts)
    out.with_name(f"{out.name}.md").write_text(f"# Benchmarks\n\n{text}\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
