"""The findings of a command, and their files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fairseq_sg.files import replacing, write_json


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
        """Writes PREFIX.npz and PREFIX.json; returns their names. After an error, both are as they were."""
        names = [f"{prefix}.npz", f"{prefix}.json"]
        with replacing(names[0]) as temporary:
            # numpy adds .npz to the name of a file that has another end.
            with open(temporary, "wb") as file:
                np.savez_compressed(file, **self.arrays)
            write_json(names[1], self.facts)
        return names
