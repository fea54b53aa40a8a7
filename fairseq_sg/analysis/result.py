"""The findings of a command, and their files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Result:
    """Attributes:
    arrays: the numbers by name.
    facts: their meaning (words, sizes, means), for JSON.
    summary: the printed lines.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    summary: list[str] = field(default_factory=list)

    def write(self, prefix: str) -> list[str]:
        """Writes PREFIX.npz and PREFIX.json; returns their names."""
        names = [f"{prefix}.npz", f"{prefix}.json"]
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(names[0], **self.arrays)
        Path(names[1]).write_text(json.dumps(self.facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return names
