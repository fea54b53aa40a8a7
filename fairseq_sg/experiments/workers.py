"""Trains one model in several processes on this machine's CPU (gloo), with the flags that fairseq needs.

    python -m fairseq_sg.experiments.workers 2 fairseq-train data-bin/scan26 --user-dir fairseq_sg …

N processes give the losses of one process with ``--update-freq N``. Random draws differ, and so does the balancing loss
of experts: it is over all processes. It shows the output of the first process, and that of the others only if they
fail. For GPUs use torchrun, see docs/training.md.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from fairseq_sg.errors import exit_code
from fairseq_sg.experiments.jobs import executable, interrupt_by_signals
from fairseq_sg.experiments.run import option_of
from fairseq_sg.parsers import Parser, positive

#: Options that the launcher sets itself.
OWN = (
    "--cpu", "--distributed-world-size", "--distributed-backend", "--distributed-no-spawn", "--distributed-rank",
    "--distributed-init-method", "--distributed-port", "--device-id", "--local_rank", "--ddp-backend",
)  # fmt: skip


def commands(workers: int, command: Sequence[str], port: int) -> list[list[str]]:
    """The command of every process."""
    flags = [
        "--cpu", "--distributed-world-size", str(workers), "--distributed-backend", "gloo", "--distributed-no-spawn",
        "--device-id", "0", "--ddp-backend", "legacy_ddp", "--distributed-init-method", f"tcp://127.0.0.1:{port}",
    ]  # fmt: skip
    return [[*command, *flags, "--distributed-rank", str(rank)] for rank in range(workers)]


def parse_arguments(line: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m fairseq_sg.experiments.workers", description=__doc__)
    parser.add_argument("workers", type=positive, help="number of processes")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="fairseq-train and its arguments")
    args = parser.parse_args(line)
    if args.command[:1] != ["fairseq-train"]:
        parser.error("after the number of processes comes fairseq-train with its arguments")
    for word in args.command:
        if option_of(word) in map(option_of, OWN):
            parser.error(f"{word} is set by this command: omit it")
    return args


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait(processes: Sequence[subprocess.Popen]) -> int:
    """The number of the first failing process, or -1.

    A process whose partner has died would wait for it, so all processes are ended together.
    """
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                return failed[0]
            if all(code == 0 for code in codes):
                return -1
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()


def main(line: Sequence[str]) -> int:
    args = parse_arguments(line)
    interrupt_by_signals()
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    outputs: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(args.workers - 1)]
    processes = [
        subprocess.Popen(executable(command), env=environment, stdout=output, stderr=output and subprocess.STDOUT)
        for command, output in zip(commands(args.workers, args.command, free_port()), [None, *outputs], strict=True)
    ]
    try:
        failed = wait(processes)
    except KeyboardInterrupt:
        return 130
    if failed > 0:
        outputs[failed - 1].seek(0)
        print(outputs[failed - 1].read().decode(errors="replace"), file=sys.stderr)
        print(f"error: process {failed} of {args.workers} failed; see its output above", file=sys.stderr)
    return 1 if failed >= 0 else 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
