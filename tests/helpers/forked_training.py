"""``fairseq-train`` in processes that are forked from one that has imported fairseq: they start in a second, and can be
killed at any moment."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["fairseq_cli.train"])


def start(arguments: list[str], log: Path, largest_file: int = resource.RLIM_INFINITY) -> multiprocessing.Process:
    """Starts a training that writes what it prints to the end of ``log``, and no file of more than so many bytes."""
    process = CONTEXT.Process(target=_train, args=(arguments, str(log), largest_file), daemon=True)
    process.start()
    return process


def _train(arguments: list[str], log: str, largest_file: int) -> None:
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1) for number in (1, 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    sys.argv = ["fairseq-train", *arguments]
    from fairseq_cli.train import cli_main

    try:
        cli_main()
    except Exception:
        # As the interpreter does it at the end of a command.
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
