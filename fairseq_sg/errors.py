"""Errors that the user can fix: a wrong option, configuration, data folder or checkpoint; and how a command ends."""

import os
import sys
from collections.abc import Callable
from typing import Any


class UsageError(ValueError):
    """One message that names the option or the file, and the fix. fairseq's commands end with it, without traceback."""


def first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def in_one_line(error: BaseException) -> str:
    """The type of an error, and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def out_of_memory(error: BaseException | str) -> bool:
    """Whether an error, or its message, is of a GPU or process without memory, which others may use, too.

    Only torch's own allocator raises ``torch.OutOfMemoryError``; CUDA and its libraries raise others.
    """
    return any(words in str(error) for words in ("out of memory", "enough memory", "allocate memory", "ALLOC_FAILED"))


def of_system(error: OSError) -> str:
    """An error of the operating system in one line: the file, if there is one, and the reason."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def exit_code(main: Callable[..., int], *arguments: Any) -> int:
    """What ``main`` returns; 1 if the reader of the output, such as ``head``, has closed it."""
    try:
        try:
            return main(*arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise Python flushes the rest at exit and fails again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def finish(run: Callable[[Any], None], args: Any) -> int:
    """Runs a command; returns the exit code: 0, or 1 after a one-line error that the user can fix."""
    try:
        run(args)
    except UsageError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"error: {of_system(error)}", file=sys.stderr)
        return 1
    return 0
