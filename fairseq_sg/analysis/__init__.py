"""Seeing inside a trained model: ``python -m fairseq_sg.analysis COMMAND CHECKPOINT`` (docs/analysis.md).

Numbers first, plots second: every command makes arrays and facts that can be had from Python as well, and then draws
them. What is inside a model is seen through hooks that are there for one pass (``record``); nothing of it costs
anything in training.
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
