"""Errors that the user can fix: a wrong option, configuration, data folder or checkpoint."""

import os


class UsageError(ValueError):
    """One message that names the option or the file, and the fix. fairseq's commands end with it, without traceback."""


def out_of_memory(error: BaseException | str) -> bool:
    """Whether an error, or its message, is of a GPU or process without memory, which others may use, too.

    Only torch's own allocator raises ``torch.OutOfMemoryError``; CUDA and its libraries raise others.
    """
    return any(words in str(error) for words in ("out of memory", "enough memory", "allocate memory", "ALLOC_FAILED"))


def of_system(error: OSError) -> str:
    """An error of the operating system in one line: the file, if there is one, and the reason."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{error.filename}: {reason}" if error.filename else reason
