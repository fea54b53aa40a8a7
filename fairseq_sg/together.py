"""Several trainings in one process, which take turns: a step of each, again and again.

    python -m fairseq_sg.together PLAN.json

A GPU runs the processes of one machine one after the other, but the streams of one process beside each other. With
``--step-graphs`` a step costs the host one launch, so one process can keep a GPU busy with many small trainings.

PLAN.json is a list with an entry for each training:

    {"arguments": [of fairseq-train …], "log": FILE, "end": FILE, "stop": FILE, "lock": file descriptor or null,
     "stack": NAME or null}

A training writes into its own log, which is continued, and then its exit code into ``end``. It ends before its next
step where ``stop`` exists, and closes ``lock`` when it ends. One that fails does not end the others.

A training does what it does alone, bit for bit on a CPU. What fairseq keeps for a whole process is exchanged where
turns change: meters, the best value of checkpoints and of early stopping, writers of TensorBoard, random states.

Trainings with one name of a stack make their steps at once (``stacked``).
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import random
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_sg.files import write_text

if TYPE_CHECKING:
    from fairseq_sg.stacked import Stack


class ByThread(io.TextIOBase):
    """A standard stream that is another file in each training's thread."""

    def __init__(self, otherwise):
        self._otherwise = otherwise

    def _stream(self):
        return getattr(threading.current_thread(), "log", self._otherwise)

    def write(self, text: str) -> int:
        return self._stream().write(text)

    def flush(self) -> None:
        self._stream().flush()

    def fileno(self) -> int:
        return self._stream().fileno()


class ProcessState:
    """What fairseq, torch and numpy keep for a whole process, for one training."""

    def __init__(self):
        self.metrics = OrderedDict(), OrderedDict(), defaultdict(int)
        self.functions: list[dict[str, Any]] = [{}, {}]
        self.writers: dict[str, Any] = {}
        self.random: tuple | None = None
        #: The generator's state of a GPU: recorded graphs read theirs while others run.
        self.cuda: Any = None

    def take(self) -> None:
        """Makes this state that of the process."""
        import numpy as np
        import torch
        from fairseq.logging import metrics, progress_bar

        metrics._aggregators, metrics._active_aggregators, metrics._active_aggregators_cnt = self.metrics
        progress_bar._tensorboard_writers = self.writers
        for function, values in zip(_with_values(), self.functions, strict=True):
            vars(function).clear()
            vars(function).update(values)
        if self.random is not None:
            random.setstate(self.random[0])
            np.random.set_state(self.random[1])
            torch.set_rng_state(self.random[2])
        if torch.cuda.is_initialized():
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            if self.cuda is None:
                self.cuda = generator.clone_state()
            generator.graphsafe_set_state(self.cuda)

    def keep(self) -> None:
        """Keeps the state of the process as this one."""
        import numpy as np
        import torch

        self.functions = [dict(vars(function)) for function in _with_values()]
        self.random = random.getstate(), np.random.get_state(), torch.get_rng_state()


def _with_values() -> list[Any]:
    """The functions of fairseq that keep values from one call to the next."""
    from fairseq import checkpoint_utils
    from fairseq_cli import train

    return [checkpoint_utils.save_checkpoint, train.should_stop_early]


class Training(threading.Thread):
    """A training of the plan.

    Attributes:
        go: released when it is its turn.
        next: whose turn is next.
        stack: what it shares with others that make their steps at once, or None.
    """

    def __init__(
        self, arguments: Sequence[str], log: str, end: str, stop: str, lock: int | None, stack: Stack | None = None
    ):
        super().__init__(daemon=True)
        self.arguments, self.end, self.stop, self.lock = list(arguments), Path(end), Path(stop), lock
        self.log = open(log, "a", buffering=1)
        self.state = ProcessState()
        self.go = threading.Semaphore(0)
        self.next, self.stack = self, stack

    def run(self) -> None:
        self.go.acquire()
        code = 1
        try:
            self.state.take()
            with self._stream():
                code = self._train()
        finally:
            # A full disk must not keep the others waiting.
            with contextlib.suppress(OSError):
                self.log.close()
            with contextlib.suppress(OSError):
                write_text(self.end, str(code))
            if self.lock is not None:
                os.close(self.lock)
            if self.stack is not None:
                self.stack.leave()
            # Its graphs and memory: released at a later time, they could end a recording of another training.
            gc.collect()
            self._leave()

    def _train(self) -> int:
        """The exit code."""
        from fairseq_cli import train

        sys.argv = ["fairseq-train", *self.arguments]
        try:
            train.cli_main()
            return 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code)
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            return 1

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        """On a GPU, a stream of its own, or that of its stack."""
        import torch

        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.stream(torch.cuda.Stream() if self.stack is None else self.stack.stream):
            yield

    def pass_on(self) -> None:
        """Waits until all others had their turn. Raises SystemExit where the training is to stop."""
        if self.stop.exists():
            raise SystemExit("stopped")
        if self.next is not self:
            self.state.keep()
            self.next.go.release()
            self.go.acquire()
            self.state.take()

    def _leave(self) -> None:
        before = self
        while before.next is not self:
            before = before.next
        before.next = self.next
        if before is not self:
            self.next.go.release()


def train_all(plan: Sequence[dict[str, Any]]) -> int:
    """Trains all; returns 1 if one has failed, else 0."""
    sys.stdout, sys.stderr = ByThread(sys.stdout), ByThread(sys.stderr)
    # fairseq's log goes to what is the standard output when its command is imported, which has to come first.
    from fairseq_cli import train  # noqa: F401, I001

    import fairseq_sg.plugin  # noqa: F401
    from fairseq_sg.stacked import Stack
    from fairseq_sg.trainer import SGTrainer

    names = [entry.get("stack") for entry in plan]
    stacks = {name: Stack(names.count(name)) for name in names if name is not None}
    trainings = [Training(**entry | {"stack": stacks.get(name)}) for entry, name in zip(plan, names, strict=True)]
    for training, following in zip(trainings, [*trainings[1:], trainings[0]], strict=True):
        training.next = following
    SGTrainer.between_steps = staticmethod(lambda: threading.current_thread().pass_on())
    SGTrainer.stack_of = staticmethod(lambda: threading.current_thread().stack)
    for training in trainings:
        training.start()
    trainings[0].go.release()
    for training in trainings:
        training.join()
    return int(any(training.end.read_text() != "0" for training in trainings))


if __name__ == "__main__":
    sys.exit(train_all(json.loads(Path(sys.argv[1]).read_text("utf-8"))))
