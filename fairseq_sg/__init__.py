"""fairseq_sg: systematic and length generalization for fairseq (``--user-dir fairseq_sg``).

With fairseq installed, importing this package registers everything. Without it, ``fairseq_sg.ops`` and
``fairseq_sg.modules`` work by themselves.
"""

import sys

from fairseq_sg import compat

__version__ = "0.2.0.dev0"


def register() -> None:
    """Registers everything with fairseq, where there is one. Raises ImportError for a fairseq that does not serve."""
    compat.prepare()
    if compat.fairseq_version() is not None:
        from fairseq_sg import criterions, models, optim, scoring, tasks  # noqa: F401


# `python -m fairseq_sg.doctor` must run where this fails, and calls it itself.
if "fairseq_sg.doctor" not in sys.orig_argv:
    register()
