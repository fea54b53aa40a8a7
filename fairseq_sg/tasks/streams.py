"""A text as streams: parts of equal length that are read side by side, a segment of each at a time.

S streams of a text of T tokens, N tokens a segment, B rows a batch:

    stream 0      t_0 …                       segment 0 | segment 1 | …
    stream 1      t_{T/S} …                   segment 0 | segment 1 | …
    …
    batches       segment 0 of rows 0 … B−1, of rows B … 2B−1, …, then segment 1 of the same rows, …

A batch's rows are one *group* of streams, the same rows for every segment. With W workers that accumulate gradients
over U batches, training has S = B·W·U streams and W·U groups. Worker w gets the groups w, w + W, …. Each update is one
segment of all streams. The division of S into B, W and U changes nothing.

A token is predicted from the one before it in the text, the first one from the end symbol. So every token is a target
once. In training, streams have ⌊T/S⌋ tokens, and the rest, fewer than S, is dropped. In evaluation no token is dropped:
the lengths of streams differ by at most one, and the shorter ones are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset
from torch import Tensor


class Text(FairseqDataset):
    """The entries of an indexed dataset, one after the other, as one row of tokens.

    Args:
        entries: an indexed dataset of int tensors.
        sizes: the number of tokens of each entry.
        dictionary: has the end symbol and the padding.
        name: the subset.
        units: the mean number of characters, bytes and words per token.
    """

    def __init__(self, entries: Sequence[Tensor], sizes: np.ndarray, dictionary, name: str, units: dict[str, float]):
        self.entries, self.dictionary, self.name, self.units = entries, dictionary, name, units
        self.ends = np.cumsum(sizes, dtype=np.int64)

    def __len__(self) -> int:
        """The number of tokens."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, end: int) -> Tensor:
        """The tokens from ``start`` to before ``end``, int64 (end − start,)."""
        if start >= end:
            return torch.empty(0, dtype=torch.long)
        first, last = np.searchsorted(self.ends, [start, end - 1], side="right")
        before = int(self.ends[first - 1]) if first else 0
        tokens = torch.cat([self.entries[int(entry)] for entry in range(first, last + 1)])
        return tokens[start - before : end - before].long()


class Streams(FairseqDataset):
    """The segments of a text's streams; item ``segment · count + stream`` is a segment of a stream.

    Args:
        text: the text. count: S, a multiple of ``rows``. rows: B. segment: N.
        all_tokens: whether every token is in a stream, as in evaluation; in training all streams have one length.
    """

    def __init__(self, text: Text, count: int, rows: int, segment: int, all_tokens: bool):
        self.text, self.count, self.rows, self.segment = text, count, rows, segment
        length, rest = divmod(len(text), count)
        longer = rest if all_tokens else 0  # the first streams, so that only the last batches may be without a token
        self.bounds = np.array([length * stream + min(stream, longer) for stream in range(count + 1)], dtype=np.int64)
        self.segments = -(-(length + (longer > 0)) // segment)

    def __len__(self) -> int:
        return self.segments * self.count

    def bounds_of(self, index: int) -> tuple[int, int]:
        """Where an item begins and ends in the text."""
        number, stream = divmod(index, self.count)
        start = int(self.bounds[stream]) + number * self.segment
        end = int(self.bounds[stream + 1])
        return min(start, end), min(start + self.segment, end)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, end = self.bounds_of(index)
        tokens = self.text.read(max(start - 1, 0), end)
        if start == 0:
            tokens = torch.cat([tokens.new_tensor([self.text.dictionary.eos()]), tokens])
        return {"id": index, "source": tokens[:-1], "target": tokens[1:]}

    def batches(self) -> list[list[int]]:
        """The items of all batches, in order, without batches that have no token (the last ones in evaluation)."""
        starts = range(0, len(self), self.rows)
        batches = (list(range(start, start + self.rows)) for start in starts)
        return [batch for batch in batches if any(start < end for start, end in map(self.bounds_of, batch))]

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch of a group: ``net_input`` and ``target`` (B, ≤ N), ``segment`` (its place), ``units``."""
        if not samples:
            return {}
        number, stream = divmod(samples[0]["id"], self.count)
        lengths = [len(sample["target"]) for sample in samples]
        shape = (len(samples), max(lengths))
        source, target = (torch.full(shape, self.text.dictionary.pad(), dtype=torch.long) for _ in range(2))
        for row, sample in enumerate(samples):
            source[row, : lengths[row]] = sample["source"]
            target[row, : lengths[row]] = sample["target"]
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": sum(map(bool, lengths)),  # the last batches may have rows without a token
            "ntokens": sum(lengths),
            "net_input": {"src_tokens": source, "src_lengths": torch.tensor(lengths)},
            "target": target,
            "segment": {
                "group": stream // self.rows,
                "start": number * self.segment,
                "last": number == self.segments - 1,
            },
            "units": {unit: per_token * sum(lengths) for unit, per_token in self.text.units.items()},
        }
