"""The inside of a trained model as numbers and pictures.

    fairseq-sg analysis maps     CHECKPOINT --input "jump twice"
    fairseq-sg analysis gates    CHECKPOINT --input "a b c 3"
    fairseq-sg analysis values   CHECKPOINT --input "jump twice"
    fairseq-sg analysis norms    CHECKPOINT --subset valid
    fairseq-sg analysis experts  CHECKPOINT --subset valid
    fairseq-sg analysis accuracy CHECKPOINT --subset valid,gen --by target_length
    fairseq-sg analysis accuracy NAME=CHECKPOINT CHECKPOINT … NAME=CHECKPOINT … --out OUT
    fairseq-sg analysis symbols  CHECKPOINT
    fairseq-sg analysis consistency CHECKPOINT
    fairseq-sg analysis consistency NAME=CHECKPOINT … --out OUT
    fairseq-sg analysis regression CHECKPOINT --subset test
    fairseq-sg analysis answers  CHECKPOINT --scene 0
    fairseq-sg analysis operator CHECKPOINT --subset test,test_512
    fairseq-sg analysis masks    CHECKPOINT --where jump --inverse
    fairseq-sg analysis overlap  NAME=MASKS.npz NAME=MASKS.npz … --out OUT
    fairseq-sg analysis memory   CHECKPOINT --index 0

Each command writes the numbers to OUT.npz and OUT.json, and draws them in PNG, or in PDF or SVG with --out OUT.pdf
or OUT.svg. COMMAND --help lists the options of a command.
"""

from __future__ import annotations

import argparse
import filecmp
import glob
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.analysis import (
    accuracy,
    answers,
    attention_maps,
    consistency,
    experts,
    gates,
    masks,
    memory,
    norms,
    operator,
    overlap,
    plots,
    regression,
    symbols,
    values,
)
from fairseq_sg.analysis.checkpoint import absent, load
from fairseq_sg.analysis.options import of_pictures
from fairseq_sg.analysis.result import Result
from fairseq_sg.errors import UsageError, exit_code, finish
from fairseq_sg.files import check_writable
from fairseq_sg.parsers import Command, Parser, add_model

COMMANDS = {
    "maps": attention_maps,
    "gates": gates,
    "values": values,
    "norms": norms,
    "experts": experts,
    "accuracy": accuracy,
    "symbols": symbols,
    "consistency": consistency,
    "regression": regression,
    "answers": answers,
    "operator": operator,
    "masks": masks,
    "overlap": overlap,
    "memory": memory,
}


def make_parser() -> Parser:
    """One subcommand per analysis."""
    parser = Parser(
        prog="fairseq-sg analysis",
        usage="%(prog)s COMMAND CHECKPOINT [options]",
        description=__doc__,
    )
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", prog=parser.prog, parser_class=Command)
    for name, module in COMMANDS.items():
        about = (module.__doc__ or "").partition("\n\n")[0]
        several, reads = hasattr(module, "combine"), getattr(module, "READS", "CHECKPOINT")
        command = commands.add_parser(
            name,
            help=about.partition(" (")[0].rstrip("."),
            usage=f"%(prog)s {f'[NAME=]{reads} …' if several else reads} [options]",
            description=(module.__doc__ or "").replace("``", ""),
        )
        what = "a checkpoint of fairseq-train" if reads == "CHECKPOINT" else module.WHAT
        command.add_argument(
            "checkpoint",
            metavar=reads,
            nargs="+" if several else None,
            help=what + f"; or several, NAME={reads}, to compare them" * several,
        )
        of_pictures(command)
        module.add_arguments(command)
        written = command.add_argument_group("output")
        written.add_argument(
            "--out",
            metavar="OUT",
            help="prefix of the files; OUT.pdf and the like choose the pictures' format (default: "
            f"CHECKPOINT without .pt, and .{name})",
        )
        written.add_argument(
            "--format",
            choices=[*plots.FORMATS, "none"],
            help="format of the pictures (default: --out's extension, or png)",
        )
        if reads != "CHECKPOINT":
            continue
        model = command.add_argument_group("model and data")
        model.add_argument("--data", metavar="DIR", help="the data folder (default: that of its training)")
        add_model(model)
    return parser


def run(args: argparse.Namespace) -> None:
    """Measures, writes and draws; prints the findings and the names of the files."""
    module = COMMANDS[args.command]
    if args.format != "none":
        plots.require_matplotlib()
    of_missing = getattr(module, "absent", absent)
    models = named(args.checkpoint, of_missing) if isinstance(args.checkpoint, list) else {"": [args.checkpoint]}
    models = {name: without_copies(name, paths) for name, paths in models.items()}
    prefix, form, alone = destination(models, args)
    args.prefix = prefix
    useless = [name for name in args.of_pictures if getattr(args, name)] if form == "none" else []
    if useless:
        raise UsageError(f"--format none draws no pictures: leave out --{useless[0]}")
    if "" in models:
        ((checkpoint,),) = models.values()
        result = measure(module, checkpoint, args)
    elif args.out is None:
        raise UsageError("a comparison of named checkpoints needs --out")
    else:
        measured = {name: [measure(module, path, args) for path in paths] for name, paths in models.items()}
        result = module.combine(measured)
        first = next(iter(measured.values()))[0].facts
        facts = {"command": args.command, "checkpoints": models, "data": first["data"]}
        result.facts = {**facts, "model_overrides": first["model_overrides"], **result.facts}
    if form == "none":
        files = result.write(prefix)
    else:
        with plots.style():
            figures = module.draw(result, args)  # first, as it refuses wrong options
            files = result.write(prefix) + plots.save(figures, prefix, form, alone)
    print(*result.summary, f"written: {' '.join(files)}", sep="\n")


def destination(models: Mapping[str, Sequence[str]], args: argparse.Namespace) -> tuple[str, str, bool]:
    """The prefix of the files, the pictures' format, and whether a single picture gets exactly the name of ``--out``.

    Raises UsageError for a folder, for no name, for a place that cannot be written to, for a file that the command
    reads, and for an unknown format.
    """
    checkpoint = models.get("", [""])[0]
    if args.out is None:
        prefix, form, alone = f"{checkpoint.removesuffix('.pt')}.{args.command}", args.format, False
        if not os.path.isfile(checkpoint):
            # Loading the checkpoint reports this error.
            return prefix, form or "png", alone
    elif args.out.endswith("/") or os.path.isdir(args.out):
        raise UsageError(f"--out {args.out} is a folder: give a file in it, such as {Path(args.out, args.command)}")
    else:
        prefix, form = plots.place(args.out, args.format, kept=list(COMMANDS))
        alone = prefix != args.out
        if not os.path.basename(prefix):
            raise UsageError(f"--out is {args.out!r}, which names no file: give one, such as {prefix}{args.command}")
    written = f"{prefix}.npz"
    what = f"--out {args.out}" if args.out else f"{written} (choose another place with --out)"
    check_writable(what, written, read=(path for paths in models.values() for path in paths))
    return prefix, form or "png", alone


def measure(module: Any, checkpoint: str, args: argparse.Namespace) -> Result:
    """Runs a command on one checkpoint."""
    if hasattr(module, "READS"):
        return module.measure(checkpoint, args)
    data, fix = args.data, "--data"
    if getattr(module, "OWN_DATA", False):
        data, fix = None, "--model-overrides \"{'data': 'FOLDER'}\""
    kinds = getattr(module, "KINDS", ("words",))
    loaded = load(checkpoint, data, args.model_overrides, args.device, args.user_dir, kinds, fix=fix)
    result = module.measure(loaded, args)
    shown = {"command": args.command, "checkpoint": checkpoint, "arch": loaded.arch, "data": loaded.data}
    result.facts = {**shown, "model_overrides": args.model_overrides, **result.facts}
    return result


def named(words: Sequence[str], of_missing: Callable[[str], str] = absent) -> dict[str, list[str]]:
    """Model -> checkpoints: NAME=CHECKPOINT, then those up to the next name; "" for one without a name.

    The shell does not expand ``*`` after a name, so it is expanded here.

    Raises UsageError if the first of several has no name. The same, with the message ``of_missing`` the name, for a
    file that is not there and a ``*`` without matches.
    """
    models: dict[str, list[str]] = {}
    name = ""
    for word in words:
        before, equals, after = word.partition("=")
        if equals and before and "/" not in before and not os.path.exists(word):
            name, word = before, after
        if not name and len(words) > 1:
            raise UsageError(f"{word} has no name: several checkpoints are compared as NAME=CHECKPOINT …")
        found = sorted(glob.glob(word)) if name and not os.path.exists(word) else [word]
        if not found:
            raise UsageError(of_missing(word))
        models.setdefault(name, []).extend(found)
    return models


def without_copies(name: str, paths: Sequence[str]) -> list[str]:
    """The files of a model without copies, as fairseq's last and best checkpoints may be; prints what it leaves out."""
    kept: list[str] = []
    for path in paths:
        files = filter(os.path.isfile, kept) if os.path.isfile(path) else ()
        copied = next((file for file in files if filecmp.cmp(file, path, shallow=False)), None)
        if copied is None:
            kept.append(path)
        else:
            print(f"{name}: {path} is left out, as it is a copy of {copied}")
    return kept


def main(line: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 for an error that the user can fix, 2 for a wrong command line."""
    parser = make_parser()
    args = parser.parse_args(line)
    if args.command is None:
        parser.error(f"name a command: {', '.join(COMMANDS)}")
    return finish(run, args)


if __name__ == "__main__":
    # Silences reports of fairseq and matplotlib about loading.
    logging.getLogger().setLevel(logging.WARNING)
    sys.exit(exit_code(main))
