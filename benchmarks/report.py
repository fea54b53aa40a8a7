"""Provenance of the benchmarks, and their sections of RESULTS.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "scripts"))

from runs import commit, machine  # noqa: E402


def where(gpu: bool) -> str:
    """Machine, versions and commit on one line."""
    found = machine(gpu=gpu)
    device = found.get("gpu") or f"{found['cores']} cores of {found['cpu']}"
    return f"{device}, Python {found['python']}, torch {found['torch']}, commit {commit()}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns except the first are aligned to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def tables(text: str) -> list[dict[str, list]]:
    """The Markdown tables in a text: header and rows of each, as words."""
    found: list[dict[str, list]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("| "):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not inside:
            found.append({"header": cells, "rows": []})
            inside = True
        elif not all(set(cell) <= set("-:") and cell for cell in cells):
            found[-1]["rows"].append(cells)
    return found


def publish(title: str, text: str, results: Path | None) -> None:
    """Prints a section, and stores it in ``results`` (see ``store``)."""
    print(f"## {title}\n\n{text.strip()}\n")
    if results is not None:
        store(title, text, results)


def store(title: str, text: str, results: Path) -> None:
    """Replaces the section with that title in a file, or appends it."""
    section = f"## {title}\n\n{text.strip()}\n"
    old = results.read_text("utf-8") if results.is_file() else "# Benchmarks\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if pattern.search(old):
        new = pattern.sub(lambda _: section + "\n", old)
    else:
        new = old.rstrip() + "\n\n" + section
    results.write_text(new.rstrip() + "\n", "utf-8")
