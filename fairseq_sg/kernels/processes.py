"""Work in a process of its own, which may crash or hang without harm to this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fairseq_sg.errors import in_one_line

#: What the processes are forked from has imported these. The first call of cvmm would import torch's compiler.
PRELOAD = ["fairseq_sg.kernels.verify", "fairseq_sg.kernels.tune", "torch._dynamo"]

#: Starting a process asks how all others ended, and so does `join`. Of two that ask at once, one gets a wrong answer.
_ASKING = threading.Lock()

#: Seconds for a process to start and to import the task.
START = 300.0


def preload() -> None:
    """Makes all processes start from one that has imported torch and the operators, and has used neither.

    What it imports may ask whether there is a GPU. Answered by CUDA, no process that is forked from it could use one.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)


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
        process.start()
    send.close()
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
    receive.close()
    wait([process.sentinel])
    with _ASKING:
        process.join()
    if not ended and process.exitcode:
        ended = f"it crashed: {reason(process.exitcode)}"
    if not ended and not complete:  # with exit code 0
        ended = "its process ended before the last case"
    return found, ended


def reason(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _run(task: Callable[[], Iterable[Any]], send: Connection, threads: int) -> None:
    torch.set_num_threads(threads)
    # Where the environment allows TF32, torch's own operators would be wrong.
    torch.set_float32_matmul_precision("highest")
    try:
        send.send(("start", None))
        for item in task():
            send.send(("item", item))
        send.send(("end", None))
    except Exception as error:  # whatever the task raises; a message is all that is wanted of it
        send.send(("error", in_one_line(error)))
