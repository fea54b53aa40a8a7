"""Lengths of the sentences of a data folder of subwords, in the unit of ``--max-length`` of ``data_prep``.

Such a folder keeps its plain text as ``raw/SUBSET.plain.LANGUAGE``. Tokens are pieces there, and a word has several.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.parallel import LENGTHS
from fairseq_sg.scoring.plain_bleu import read_lines


def has_plain_text(folder: str | Path) -> bool:
    return any(Path(folder, "raw").glob("*.plain.*"))


def unit_of(manifest: Mapping[str, Any]) -> str:
    """The unit of lengths, from ``dataset.json``: "words" or "characters"."""
    return (manifest.get("request") or {}).get("length_unit") or "words"


def plain_lengths(folder: str | Path, subset: str, language: str, unit: str) -> list[int]:
    """The length of every sentence of the plain text. Raises UsageError for a file that cannot be read."""
    return [LENGTHS[unit](line) for line in read_lines(Path(folder, "raw", f"{subset}.plain.{language}"))]
