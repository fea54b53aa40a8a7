"""Commands in processes that are forked from one that has imported fairseq: a command starts in a quarter of a second
instead of six, and sees what a command sees: its arguments, environment, standard input, folder and exit status.

What an import prints or loads, and how a command is found, is not seen here: see ``commands.launch``.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import resource
import runpy
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

TESTS = Path(__file__).resolve().parents[1]
REPOSITORY = TESTS.parent
CONTEXT = multiprocessing.get_context("forkserver")
#: What ``python -c`` imports again.
FRESH = ("fairseq", "fairseq_cli", "fairseq_sg", "hydra", "omegaconf")
CONTEXT.set_forkserver_preload(["helpers.preloaded"])


def ensure_running() -> None:
    """Starts the process that all others are forked from: it has one thread, and imports what is preloaded."""
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(TESTS)):
        forkserver.ensure_running()


def start(
    name: str,
    *arguments: object,
    streams: Sequence[Path | str],
    cwd: Path = REPOSITORY,
    env: dict[str, str] | None = None,
    largest_file: int = resource.RLIM_INFINITY,
) -> multiprocessing.Process:
    """Starts a command (``fairseq-train``), a module (``fairseq_sg.options``) or code (``-c`` and the code).

    ``streams`` are the files of standard input, output and error. No file that it writes has more than so many bytes.
    """
    ensure_running()
    env = dict(os.environ if env is None else env)
    limits = (largest_file, resource.RLIM_INFINITY)
    words = [name, *map(str, arguments)]
    process = CONTEXT.Process(target=_command, args=(words, list(map(str, streams)), str(cwd), env, limits))
    process.start()
    return process


def _command(words: list[str], streams: list[str], cwd: str, env: dict[str, str], limits: tuple[int, int]) -> None:
    modes = (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT | os.O_APPEND] * 2)
    for number, (file, mode) in enumerate(zip(streams, modes, strict=True)):
        os.dup2(os.open(file, mode), number)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    os.chdir(cwd)
    sys.path[:] = [path for path in sys.path if path not in (str(REPOSITORY), str(TESTS))]
    # Processes that a command starts, such as those that read batches, are forked in their turn.
    multiprocessing.set_start_method("fork", force=True)
    subprocess.Popen = _Popen
    _become(words, env)


def _become(words: list[str], env: dict[str, str]) -> None:
    """Runs a command or a module in this process as the interpreter does, and ends the process."""
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(env)
    # A command sets up logging when its module is imported; parts of fairseq that were imported before did so, too.
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    name, *arguments = words
    if name == "-c":
        for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] in FRESH]:
            del sys.modules[loaded]
    module = f"fairseq_cli.{name.removeprefix('fairseq-').replace('-', '_')}" if name.startswith("fairseq-") else name
    sys.argv = sys.orig_argv = [name, *arguments]
    code = 0
    try:
        if name == "-c":
            sys.argv = ["-c", *arguments[1:]]
            sys.path.insert(0, "")
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(arguments[0], "<string>", "exec"), vars(main))
        elif module.startswith("fairseq_cli."):
            __import__(module, fromlist=["cli_main"]).cli_main()
        else:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Popen(subprocess.Popen):
    """``python -m MODULE …`` continues in the forked process where Python would be started again."""

    def __init__(self, args, *more, env=None, pass_fds=(), **options):
        if isinstance(args, Sequence) and list(args[:2]) == [sys.executable, "-m"]:
            words = [str(word) for word in args[2:]]

            def go_on() -> None:
                kept = {0, 1, 2, *pass_fds}
                for number in [int(name) for name in os.listdir("/proc/self/fd")]:
                    if number not in kept:
                        try:
                            os.close(number)
                        except OSError:
                            pass  # the folder itself
                _become(words, dict(os.environ if env is None else env))

            options["preexec_fn"] = go_on
        super().__init__(args, *more, env=env, pass_fds=pass_fds, **options)
