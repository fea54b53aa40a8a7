"""Analysis of trained models: ``python -m fairseq_sg.analysis COMMAND CHECKPOINT`` (docs/analysis.md).

Every command first makes arrays and facts, which are also available from Python, and then draws them. Hooks that last
for one pass observe the model (``record``), so the analysis adds no cost to training.
"""

from fairseq_sg.analysis.checkpoint import Loaded, Sentence, load, read_sentence
from fairseq_sg.analysis.record import AttentionCall, GateCall, Recording, record
from fairseq_sg.analysis.result import Result

__all__ = [
    "AttentionCall",
    "GateCall",
    "Loaded",
    "Recording",
    "Result",
    "Sentence",
    "load",
    "read_sentence",
    "record",
]
