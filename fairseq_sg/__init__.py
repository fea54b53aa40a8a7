"""fairseq_sg: systematic and length generalization for fairseq (``--user-dir fairseq_sg``).

With fairseq installed, importing this package registers everything. Without it, ``fairseq_sg.ops`` and ``fairseq_sg.modules``
work by themselves.
"""

from fairseq_sg import compat

__version__ = "0.1.0"

compat.prepare()
if compat.fairseq_version() is not None:
    from fairseq_sg import criterions, models, optim, scoring, tasks  # noqa: F401
