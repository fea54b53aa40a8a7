"""What the user can mend: a wrong option, configuration, data folder or checkpoint."""


class UsageError(ValueError):
    """One message that names the option or the file, and the mend; fairseq's commands end with it and no traceback."""
