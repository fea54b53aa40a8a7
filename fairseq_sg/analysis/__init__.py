"""Analysis of trained models: ``python -m fairseq_sg.analysis COMMAND CHECKPOINT`` (docs/analysis.md).

Every command first makes arrays and facts, which are also available from Python, and then draws them. Hooks that last
for one pass observe the model (``record``), so the analysis adds no cost to training.
"""

from fairseq_sg import compat

with compat.unchanged_logging():
    from fairseq_sg.analysis.checkpoint import Loaded, load
    from fairseq_sg.analysis.record import record
    from fairseq_sg.analysis.sentence import read_sentence

__all__ = ["Loaded", "load", "read_sentence", "record"]
