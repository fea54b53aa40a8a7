"""fairseq's commands in processes that are forked from one that has imported fairseq: a command starts in a second, not
in five, and sees what a command sees (``sys.argv``, standard input, the working directory, its exit code)."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch

from helpers.commands import REPOSITORY, Result

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["fairseq_cli.train", "fairseq_cli.generate", "fairseq_cli.validate"])


def run(name: str, *arguments: object, text: str = "", cwd: Path = REPOSITORY, timeout: float = 300) -> Result:
    """Runs a command (``fairseq-train``) or a module (``fairseq_sg.options``), with ``text`` as its standard input."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / stream for stream in ("in", "out", "err")]
        files[0].write_text(text)
        process = CONTEXT.Process(target=_command, args=(name, list(map(str, arguments)), cwd, files))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"{name} {' '.join(map(str, arguments))}\n{files[2].read_text()}")
        return Result(process.exitcode, *(file.read_text() for file in files[1:]))


def _command(name: str, arguments: list[str], cwd: Path, files: list[Path]) -> None:
    modes = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT)
    for number, (file, mode) in enumerate(zip(files, modes, strict=True)):
        os.dup2(os.open(file, mode), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # torch was imported before
    os.chdir(cwd)
    sys.argv = sys.orig_argv = [name, *arguments]
    try:
        if name.startswith("fairseq-"):
            module = f"fairseq_cli.{name.removeprefix('fairseq-').replace('-', '_')}"
            __import__(module, fromlist=["cli_main"]).cli_main()
        else:
            sys.path.insert(0, str(cwd))
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        # As the interpreter does it at the end of a command.
        sys.excepthook(*sys.exc_info())
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
