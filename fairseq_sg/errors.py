"""Errors that the user can fix: a wrong option, configuration, data folder or checkpoint."""


class UsageError(ValueError):
    """One message that names the option or the file, and the fix. fairseq's commands end with it, without traceback."""
