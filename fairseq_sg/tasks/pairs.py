"""Pairs of sentences whose batches are padded all at once, and not a sentence after the other.

A batch of 256 short sentences takes fairseq milliseconds, as long as some models' whole step on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.data import LanguagePairDataset, PrependTokenDataset
from fairseq.data.indexed_dataset import MMapIndexedDataset
from torch import Tensor


class Side(NamedTuple):
    """The sentences of one side, in fairseq's file of them.

    Attributes:
        data: the file.
        first: a token before every sentence; None for none.
    """

    data: MMapIndexedDataset
    first: int | None = None

    @classmethod
    def of(cls, data: Any) -> Side | None:
        """None for data that are not in one file."""
        first = None
        if type(data) is PrependTokenDataset:
            data, first = data.dataset, data.token
        return cls(data, first) if type(data) is MMapIndexedDataset else None

    def padded(self, indices: np.ndarray, pad: int, left: bool, multiple: int, shift: int | None = None) -> Tensor:
        """The sentences of a batch, (B, N) int64, as ``collate_tokens`` of fairseq pads them.

        Args:
            indices: (B,).
            pad, left, multiple: the token of padding, whether it is on the left, and what N is a multiple of.
            shift: a token that comes first, and for which the last one of each sentence goes.
        """
        index = self.data._index
        tokens = np.frombuffer(self.data._bin_buffer, dtype=index.dtype)
        starts = index._pointers[indices] // tokens.itemsize
        lengths = index._sizes[indices].astype(np.int64) + (self.first is not None)
        width = math.ceil(lengths.max() / multiple) * multiple
        begins = width - lengths if left else np.zeros_like(lengths)
        place = np.arange(width) - begins[:, None]  # (B, N), in the sentence
        inside = (place >= 0) & (place < lengths[:, None])
        before = int(self.first is not None) + int(shift is not None)
        from_file = inside & (place >= before)
        found = np.full(place.shape, pad, dtype=np.int64)
        found[from_file] = tokens[(starts[:, None] + place - before)[from_file]]
        for number, token in enumerate(token for token in (shift, self.first) if token is not None):
            found[inside & (place == number)] = token
        return torch.from_numpy(found)


class PairDataset(LanguagePairDataset):
    """fairseq's dataset, with the same batches bit for bit."""

    def _sides(self) -> tuple[Side, Side] | None:
        """Both sides, if they can be padded at once."""
        others = (self.align_dataset, self.constraints, self.src_lang_id, self.tgt_lang_id)
        changed = self.append_bos or self.append_eos_to_target or self.remove_eos_from_source
        sides = Side.of(self.src), Side.of(self.tgt)
        plain = all(other is None for other in others) and not changed and self.input_feeding
        return sides if plain and None not in sides else None

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """What torch's loader hands to `collater`: the indices, where both sides are padded at once."""
        return indices if self._sides() else [self[index] for index in indices]

    def collater(self, samples, pad_to_length=None):
        if len(samples) == 0 or isinstance(samples[0], dict):
            return super().collater(samples, pad_to_length)
        source, target = self._sides()
        indices, pad = np.asarray(samples), self.src_dict.pad()
        options = {"pad": pad, "left": self.left_pad_source, "multiple": self.pad_to_multiple}
        sources = source.padded(indices, **options)
        lengths, order = sources.ne(pad).sum(1).sort(descending=True)
        indices = indices[order.numpy()]
        options["left"] = self.left_pad_target
        targets = target.padded(indices, **options)
        return {
            "id": torch.from_numpy(indices),
            "nsentences": len(samples),
            "ntokens": targets.ne(pad).sum().item(),
            "net_input": {
                "src_tokens": sources[order],
                "src_lengths": lengths,
                "prev_output_tokens": target.padded(indices, shift=self.eos, **options),
            },
            "target": targets,
        }


class TypedPairDataset(PairDataset):
    """An evaluation set whose batches tell the ``type`` of every sentence: int64 ``(B,)``."""

    types: torch.Tensor

    def collater(self, samples, pad_to_length=None):
        batch = super().collater(samples, pad_to_length)
        if batch:
            batch["type"] = self.types[batch["id"]]
        return batch


class WindowedPairDataset(PairDataset):
    """A training set whose order for batching is random, sorted by target and source length inside windows only."""

    length_window = 1

    def ordered_indices(self) -> np.ndarray:
        """Sample indices, int64; drawn from numpy's generator, which fairseq seeds with seed + epoch."""
        if self.length_window == 0:
            return super().ordered_indices()
        indices = np.random.permutation(len(self)).astype(np.int64)
        if self.length_window > 1:
            window = np.arange(len(self)) // self.length_window
            target_sizes = self.tgt_sizes if self.tgt_sizes is not None else self.src_sizes
            indices = indices[np.lexsort((self.src_sizes[indices], target_sizes[indices], window))]
        return indices


def widened(batches: Sequence[dict[str, Any]], name: str, pad: int, left: bool) -> list[dict[str, Any]]:
    """Batches whose tokens ``name`` (B, N) are padded to the largest N; those without the name stay as they are."""
    most = max((batch[name].size(1) for batch in batches if name in batch), default=0)
    found = []
    for batch in batches:
        more = most - batch[name].size(1) if name in batch else 0
        tokens = {name: F.pad(batch[name], (more, 0) if left else (0, more), value=pad)} if more else {}
        found.append(batch | tokens)
    return found
