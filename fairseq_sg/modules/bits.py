"""Words of bits as vectors: what a model reads, ±1, and what it is to write, 0 or 1.

    01101001    its bits, and no flag              <copy>    no bits, and the flags of the marker
    .           a blank: no bits, no flag          011|...   half of its bits; unknown ones count as 0

Vectors are those of the released code of Csordás & Schmidhuber 2019, 2 x − 1 of a row x, so a blank is all −1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fairseq_sg.errors import UsageError

BLANK = "."


def bits_of(words: Sequence[str], width: int, markers: Mapping[str, str]) -> Tensor:
    """The rows of some words, float32 (words, width + flags), 0 or 1.

    Args:
        words: words of bits, blanks and markers.
        width: bits of a word.
        markers: marker -> the flags that it sets, such as ``01``.

    Raises:
        UsageError: for another word.
    """
    flags = max(map(len, markers.values()), default=0)
    rows = []
    for word in words:
        bits = word.replace("|", "")
        if word in markers:
            row = "0" * width + markers[word]
        elif word == BLANK:
            row = "0" * (width + flags)
        elif len(bits) == width and set(bits) <= set("01."):
            row = bits + "0" * flags
        else:
            raise UsageError(
                f"{word!r} is no word of {width} bits: prepare the folder again with `python -m data_prep`"
            )
        rows.append([float(letter == "1") for letter in row])
    return torch.tensor(rows).view(len(rows), width + flags)


class BitEmbedding(nn.Module):
    """A word's bits as ±1, and a linear map of them.

    Args:
        bits: of every number of the dictionary, (V, bits), 0 or 1.
        dim: numbers of an embedding; None for the bits themselves.
    """

    def __init__(self, bits: Tensor, dim: int | None = None):
        super().__init__()
        self.register_buffer("table", 2 * bits - 1, persistent=False)
        self.embedding_dim = bits.size(1) if dim is None else dim
        self.projection = nn.Identity() if dim is None else nn.Linear(bits.size(1), dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (…) -> (…, dim)."""
        bits = self.table[tokens]
        if isinstance(self.projection, nn.Linear):
            bits = bits.to(self.projection.weight.dtype)
        return self.projection(bits).type_as(bits)
