"""What the benchmarks share: where they ran, and their sections of RESULTS.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Sequence

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "scripts"))

from runs import commit, machine  # noqa: E402


def where(gpu: bool) -> str:
    """Machine, versions and commit on one line."""
    found = machine(gpu=gpu)
    device = found.get("gpu") or f"{found['cores']} cores of {found['cpu']}"
    return f"{device}, Python {found['python']}, torch {found['torch']}, commit {commit()}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; all columns but the first are aligned to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def publish(title: str, text: str, results: Path | None) -> None:
    """Prints a section, and puts it in the place of the section of that title in ``results``, or at its end."""
    section = f"## {title}\n\n{text.strip()}\n"
    print(section)
    if results is None:
        return
    old = results.read_text("utf-8") if results.is_file() else "# Benchmarks\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if pattern.search(old):
        new = pattern.sub(lambda _: section + "\n", old)
    else:
        new = old.rstrip() + "\n\n" + section
    results.write_text(new.rstrip() + "\n", "utf-8")
