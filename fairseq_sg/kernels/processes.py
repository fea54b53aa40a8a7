"""Work in a process of its own, which may crash or hang without harm to this one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from fairseq_sg.errors import in_one_line

#: What the processes are forked from has imported these. The first call of cvmm would import torch's compiler.
PRELOAD = ["fairseq_sg.kernels.verify", "fairseq_sg.kernels.tune", "torch._dynamo"]

#: Starting a process asks how all others ended, and so does `join`. Of two that ask at once, one gets a wrong answer.
_ASKING = threading.Lock()

#: Set while threads end after Ctrl-C: they start no process, and what they have found so far does not count.
_INTERRUPTED = threading.Event()

#: Seconds for a process to start and to import the task.
START = 300.0


def preload() -> None:
    """Makes all processes start from one that has imported torch and the operators, and has used neither.

    What it imports may ask whether there is a GPU. Answered by CUDA, no process that is forked from it could use one.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    # A terminal sends Ctrl-C to them all. They ignore it, and this process kills them.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that call `isolated`. KeyboardInterrupt within the block kills all processes, and then ends the threads.

    Calls of `isolated` that have not ended raise KeyboardInterrupt, too.
    """
    with ThreadPoolExecutor(number) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            with _ASKING:
                _INTERRUPTED.set()
                for process in multiprocessing.active_children():
                    process.kill()
            pool.shutdown(cancel_futures=True)
            _INTERRUPTED.clear()
            raise


def isolated(task: Callable[[], Iterable[Any]], limit: float) -> tuple[list[Any], str]:
    """What a task yields in a process of its own, and why it ended early; empty if it did not.

    Args:
        task: picklable, and so is what it yields.
        limit: seconds between two results, after which the process is killed.
    """
    context = multiprocessing.get_context("forkserver")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(task, send, torch.get_num_threads()), daemon=True)
    with _ASKING:
        if _INTERRUPTED.is_set():
            raise KeyboardInterrupt
        process.start()
    send.close()
    try:
        found, ended, complete = _received(receive, process, limit)
        receive.close()
        wait([process.sentinel])
    except KeyboardInterrupt:
        process.kill()
        raise
    with _ASKING:
        process.join()
    if _INTERRUPTED.is_set():
        raise KeyboardInterrupt
    if not ended and process.exitcode:
        ended = f"it crashed: {reason(process.exitcode)}"
    if not ended and not complete:  # with exit code 0
        ended = "its process ended before the last case"
    return found, ended


def _received(receive: Connection, process: BaseProcess, limit: float) -> tuple[list[Any], str, bool]:
    """What a process sends until it ends, why it is not waited for, and whether that was all."""
    found, ended, started, complete = [], "", False, False
    while not ended:
        if not receive.poll(limit if started else START):
            ended = f"it took longer than {limit if started else START:g} seconds"
            process.kill()
            break
        try:
            kind, item = receive.recv()
        except (EOFError, OSError):  # OSError: it ended within an item
            break
        if kind == "error":
            ended = item
        elif kind == "item":
            found.append(item)
        complete = kind == "end"
        started = True
    return found, ended, complete


def reason(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _run(task: Callable[[], Iterable[Any]], send: Connection, threads: int) -> None:
    torch.set_num_threads(threads)
    # Where the environment allows TF32, torch's own operators would be wrong.
    torch.set_float32_matmul_precision("highest")
    with contextlib.suppress(BrokenPipeError):  # nobody listens: Ctrl-C came while this process started
        try:
            send.send(("start", None))
            for item in task():
                send.send(("item", item))
            send.send(("end", None))
        except Exception as error:  # whatever the task raises; a message is all that is wanted of it
            send.send(("error", in_one_line(error)))
