"""fairseq_sg: systematic and length generalization for fairseq (``--user-dir fairseq_sg``).

Importing this package does nothing else: ``fairseq_sg.ops`` and ``fairseq_sg.modules`` need torch and numpy alone.
``import fairseq_sg.plugin`` registers everything with fairseq; ``--user-dir fairseq_sg`` imports it.
``fairseq_sg.load(CHECKPOINT)`` loads a trained model; it imports fairseq when it is first used.
"""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairseq_sg.hub import load as load

__version__ = "0.2.0.dev0"


class _Folders(list):
    """The ``__path__`` of this package, which also answers fairseq's ``--user-dir``.

    fairseq's ``import_user_module`` imports nothing for a package that is in ``sys.modules`` already. It only asks
    whether the ``--user-dir`` is ``in package.__path__``; that question loads the plugin.
    """

    def __contains__(self, folder: object) -> bool:
        found = os.path.realpath(folder) in map(os.path.realpath, self)
        if found and "fairseq.utils" in sys.modules:
            import fairseq_sg.plugin  # noqa: F401
        return found


__path__ = _Folders(__path__)


def __getattr__(name: str):
    """``load`` of ``fairseq_sg.hub``."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fairseq_sg import compat

    with compat.unchanged_logging():
        import fairseq_sg.plugin  # noqa: F401  (first: it says what is missing)
        from fairseq_sg.hub import load
    return load
