"""``--oracle-length``: the length of an output is given, as in the oracle evaluation of Newman et al. (2020), "The EOS
Decision and Length Extrapolation".

The end symbol is neither an output nor a target: logits and targets lose it. A model that was trained with it and is
evaluated without it is the paper's +EOS+Oracle. One that is trained without it is the paper's −EOS+Oracle, and cannot
end an output by itself. As long as all words before are right, greedy decoding without an end symbol, stopped at the
given length, reads the prefix of the target. So one teacher-forced pass still measures its exact match.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scored(task: Any, logits: Tensor, sample: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
    """What a loss and an accuracy are computed from: logits, targets, and the number of targets that are not padding.

    Args:
        logits: (B, N, V) of all words.
        sample: its ``target`` is (B, N), with one end symbol a sentence.

    Returns:
        logits (B, N, V), targets (B, N) and their number. With ``--oracle-length``, logits (B, N, V − 1) without the
        end symbol, and padding in its place in the targets. The number of a later word is one less then.
    """
    target, tokens = sample["target"], sample["ntokens"]
    if not given_length(task):
        return logits, target, tokens
    dictionary = task.target_dictionary
    end, padding = dictionary.eos(), dictionary.pad()  # fairseq has padding before the end symbol
    words = target - target.gt(end).to(target.dtype)
    logits = torch.cat([logits[..., :end], logits[..., end + 1 :]], dim=-1)
    return logits, words.masked_fill(target.eq(end), padding), tokens - target.size(0)


def given_length(task: Any) -> bool:
    """Whether the task has ``--oracle-length``."""
    return getattr(getattr(task, "cfg", None), "oracle_length", False)
