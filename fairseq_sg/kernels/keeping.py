"""What ``verify`` and ``tune`` find, and how they keep it in a file that others may write meanwhile."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fairseq_sg.files import alone
from fairseq_sg.kernels import listing
from fairseq_sg.ops.tuning import FOLDER_VARIABLE, Point, Tuning, check_writable, key_of, path_of, read, write


def known_here(device: str) -> Tuning:
    """What the file of a device has, empty where there is none that counts."""
    found, path = listing.here(device), path_of(listing.here(device))
    try:
        return read(path, found) if path is not None else Tuning(key_of(found))
    except (OSError, ValueError):
        return Tuning(key_of(found))


@dataclass
class Findings:
    """What a command has found.

    Attributes:
        before: the file at its start.
        verdicts: operator -> implementation -> what is wrong with it, of those that it verified.
        timed: operator and dtype -> the points, of those that it timed.
    """

    before: Tuning
    verdicts: dict[str, dict[str, str]] = field(default_factory=dict)
    timed: dict[tuple[str, str], list[Point]] = field(default_factory=dict)

    def over(self, now: Tuning) -> Tuning:
        """The file ``now``, with these findings in the place of its own.

        A failure stays that another command has found since the start of this one, whatever this one found.
        """
        verdicts = {operator: dict(of) for operator, of in now.verdicts.items()}
        for operator, of in self.verdicts.items():
            known, first = verdicts.setdefault(operator, {}), self.before.verdicts.get(operator, {})
            for name, problem in of.items():
                failed_meanwhile = known.get(name) and known[name] != first.get(name)
                if problem or not failed_meanwhile:
                    known[name] = problem
        points = [point for point in now.points if (point.operator, point.dtype) not in self.timed]
        return Tuning(now.key, verdicts, [*points, *(point for of in self.timed.values() for point in of)])

    @property
    def tuning(self) -> Tuning:
        return self.over(self.before)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises ValueError in the place of an OSError."""
    try:
        yield
    except OSError as error:
        place = f"set {FOLDER_VARIABLE} to another folder"
        raise ValueError(f"{path} cannot be written ({error.strerror}): {place}") from error


def check_place(device: str, quick: bool) -> None:
    """Raises ValueError, before anything is measured, where the file cannot be written."""
    path = path_of(listing.here(device))
    if not quick and path is None and os.environ.get(FOLDER_VARIABLE) != "":
        raise ValueError(f"the home folder is not known: set {FOLDER_VARIABLE} to a folder by its full path")
    if not quick and path is not None:
        with writing(path):
            check_writable(path)


@contextlib.contextmanager
def kept(device: str, quick: bool) -> Iterator[Findings]:
    """Keeps what is found within the block, also where Ctrl-C ends it. Raises ValueError where that cannot be."""
    start, findings = time.monotonic(), Findings(known_here(device))
    try:
        yield findings
    except KeyboardInterrupt:
        keep(findings, device, quick, time.monotonic() - start)
        raise
    keep(findings, device, quick, time.monotonic() - start)


def keep(findings: Findings, device: str, quick: bool, seconds: float) -> None:
    """Writes the file, and says what was done."""
    path, key = path_of(listing.here(device)), findings.before.key
    if quick or path is None or not (findings.verdicts or findings.timed):
        where = "nothing is kept" if path or quick else f"nothing is kept, as {FOLDER_VARIABLE} is empty"
    else:
        with writing(path), alone(path.parent):
            write(findings.over(known_here(device)), path)
        verdicts, points = (sum(map(len, of.values())) for of in (findings.verdicts, findings.timed))
        where = f"{verdicts} verdicts and {points} sizes measured are kept in {path}"
    print(f"{key['device']}, torch {key['torch']}: {seconds:.0f} seconds; {where}")
