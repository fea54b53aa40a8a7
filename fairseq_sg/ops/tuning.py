"""What was verified and measured on this machine: the file that ``python -m fairseq_sg.kernels tune`` writes.

There is one file for each GPU model, and for each CPU with a number of threads, in the user's cache folder. A process
reads it at its first call of an operator, and never again. It counts only for the GPU, driver, torch, Triton and
operators that it was measured with; otherwise, and where it is damaged, one line says so, and it is as if there were
none. It is replaced in one step, so a reader finds the old file or the new one.

    {"key": {"device": "NVIDIA …", "driver": …, "torch": …, "triton": …, "operators": …},
     "verdicts": {operator: {implementation: "" or what is wrong}},
     "points": [{"operator": …, "dtype": …, "sizes": [64, 256, 16], "ms": {implementation: [low, median, high]}}, …]}
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import re
import stat
import tempfile
from functools import cache
from pathlib import Path

import torch

from fairseq_sg.ops.operators import NAIVE, OPERATORS, TRITON
from fairseq_sg.ops.triton_support import why_not_here

logger = logging.getLogger(__name__)

#: Where the files are; empty for none, which leaves every choice to the operators' own rules.
FOLDER_VARIABLE = "FAIRSEQ_SG_TUNING"
COMMAND = "python -m fairseq_sg.kernels tune"
#: Another implementation than that of the rule runs where it takes at most this share of its time.
SHARE = 0.95
#: dtype -> the one whose measurements it takes where it has none of its own.
SAME_AS = {"float16": "bfloat16"}
#: Bytes of a file; those of all operators on a GPU have less than a hundredth.
LARGEST = 10_000_000


@dataclasses.dataclass(frozen=True)
class Point:
    """Forward and backward of one call.

    Attributes:
        operator, dtype: of the call.
        sizes: the numbers that `Operator.sizes` names.
        ms: implementation -> first quartile, median and third quartile in milliseconds.
    """

    operator: str
    dtype: str
    sizes: tuple[int, ...]
    ms: dict[str, list[float]]

    @property
    def classes(self) -> tuple[int, ...]:
        return classes(self.sizes)


def classes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Each number's power of two."""
    return tuple(size.bit_length() for size in sizes)


@dataclasses.dataclass
class Tuning:
    """The contents of a file.

    Attributes:
        key: of the machine, see `key_of`.
        verdicts: operator -> implementation -> what is wrong with it here, empty if it was verified.
        points: what was measured.
    """

    key: dict[str, str]
    verdicts: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    points: list[Point] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._chosen: dict[tuple, str] = {}

    @property
    def device_type(self) -> str:
        return "cuda" if self.key["driver"] else "cpu"

    def verified(self, operator: str, name: str) -> bool:
        return self.verdicts.get(operator, {}).get(name) == ""

    def failing(self) -> list[str]:
        """Operator and implementation of all that failed."""
        return [f"{o} {name}" for o, verdicts in self.verdicts.items() for name, text in verdicts.items() if text]

    def working(self, operator: str, dtype: torch.dtype, rule: str) -> str:
        """The implementation of the rule, unless it failed: then the first that did not, in torch."""
        verdicts = self.verdicts.get(operator, {})
        others = OPERATORS[operator].candidates(self.device_type, dtype)
        names = (name for name in (rule, *others) if name != TRITON and not verdicts.get(name))
        return next(names, NAIVE)

    def choice(self, operator: str, dtype: torch.dtype, sizes: tuple[int, ...], rule: str) -> str:
        """What ``"auto"`` runs: what works of `rule`, or what takes 5 % less time at the nearest point, or less.

        Sizes are compared by their powers of two.
        """
        key = (operator, dtype, classes(sizes), rule)
        if key not in self._chosen:
            self._chosen[key] = self._fastest(*key)
        return self._chosen[key]

    def _fastest(self, operator: str, dtype: torch.dtype, wanted: tuple[int, ...], rule: str) -> str:
        name, rule = dtype_name(dtype), self.working(operator, dtype, rule)
        points = [point for point in self.points if point.operator == operator]
        points = [p for p in points if p.dtype == name] or [p for p in points if p.dtype == SAME_AS.get(name)]
        if not points or not wanted:
            return rule
        distances = [sum(abs(a - b) for a, b in zip(point.classes, wanted, strict=True)) for point in points]
        return self.fastest_at(points[distances.index(min(distances))], rule)

    def rule_at(self, point: Point) -> str:
        """What runs at the sizes of a point without measurements."""
        dtype = getattr(torch, point.dtype)
        return self.working(point.operator, dtype, OPERATORS[point.operator].rule(self.device_type, dtype, point.sizes))

    def fastest_at(self, point: Point, rule: str = "") -> str:
        """What takes 5 % less time at a point than the implementation `rule`, or less, and is verified; else `rule`.

        By default `rule` is that of the point.
        """
        rule = rule or self.rule_at(point)
        medians = {name: ms[1] for name, ms in point.ms.items() if self.verified(point.operator, name)}
        if rule not in medians:
            return rule
        best = min(medians, key=lambda name: medians[name])
        return best if medians[best] <= SHARE * medians[rule] else rule

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def tuning_on(device: torch.device) -> Tuning | None:
    """What was measured on a device, None for nothing; the file is read once a process.

    On a GPU that Triton's kernels can run on, a line says how to measure.
    """
    if device.type not in ("cpu", "cuda"):
        return None
    path = path_of(device)
    if path is None:
        return None
    try:
        return read(path, device)
    except FileNotFoundError:
        if device.type == "cuda" and why_not_here(device) is None:
            logger.info(f"operators run in torch: `{COMMAND}` takes a few minutes and finds what is faster on this GPU")
    except (OSError, ValueError) as error:
        logger.warning(f"{path} is ignored: {error}. Write it again: {COMMAND} --device {device.type}")
    return None


def path_of(device: torch.device) -> Path | None:
    """The file of a device; None where ``FAIRSEQ_SG_TUNING`` is empty, or is in a home folder that is not known."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder == "":
        return None
    if folder is None:
        cache = os.environ.get("XDG_CACHE_HOME", "")
        # The specification of these folders ignores relative paths.
        folder = os.path.join(cache if os.path.isabs(cache) else "~/.cache", "fairseq_sg")
    folder = os.path.expanduser(folder)
    if folder.startswith("~"):
        return None
    return Path(folder) / f"kernels-{re.sub(r'[^A-Za-z0-9]+', '-', name_of(device)).strip('-')}.json"


def read(path: Path, device: torch.device | None = None) -> Tuning:
    """The file of a device; without a device, that of any machine with these operators.

    Raises:
        OSError: it cannot be read; FileNotFoundError where there is none.
        ValueError: it is damaged, or of another machine or version; the message says which.
    """
    about = path.stat()
    if not stat.S_ISREG(about.st_mode) or about.st_size > LARGEST:  # to read from a pipe would wait for its writer
        raise ValueError("it is damaged")
    text = path.read_bytes()
    try:
        found = json.loads(text)
        key = {name: str(found["key"][name]) for name in KEY}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError("it is damaged") from error
    for name, here in {} if device is None else key_of(device).items():
        if key[name] != here:
            other = "other" if name == "operators" else "another"
            raise ValueError(f"it is of {other} {name}, {key[name]!r} and not {here!r}")
    try:
        points = [Point(**point | {"sizes": tuple(point["sizes"])}) for point in found["points"]]
        tuning = Tuning(key, found["verdicts"], points)
        for operator, verdicts in tuning.verdicts.items():
            _expect(verdicts.keys() <= OPERATORS[operator].implementations.keys())
            _expect(all(isinstance(text, str) for text in verdicts.values()))
        for point in points:
            one, dtype = OPERATORS[point.operator], getattr(torch, point.dtype)
            _expect(isinstance(dtype, torch.dtype))
            _expect(point.ms.keys() <= set(one.candidates(tuning.device_type, dtype)))
            _expect(len(point.sizes) == len(one.sizes) and all(type(size) is int and size >= 0 for size in point.sizes))
            _expect(all(len(ms) == 3 and all(0 < t < math.inf for t in ms) for ms in point.ms.values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError("it is damaged") from error
    return tuning


def _expect(condition: bool) -> None:
    if not condition:
        raise ValueError


def check_writable(path: Path) -> None:
    """Makes the folder of a file. Raises OSError if no file can be written there, IsADirectoryError for a folder."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "there is a folder of this name", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()


def write(tuning: Tuning, path: Path) -> None:
    """Replaces the file in one step; other processes may read it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(tuning.as_json(), "utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


KEY = ("device", "driver", "torch", "triton", "operators")


def key_of(device: torch.device) -> dict[str, str]:
    """What a measurement depends on: device, driver, versions, and the code of the operators."""
    driver = ""
    if device.type == "cuda":
        file = Path("/proc/driver/nvidia/version")
        versions = re.findall(r"\b\d+\.\d+(?:\.\d+)?\b", file.read_text()) if file.exists() else []
        driver = versions[0] if versions else "unknown"
    return dict(
        zip(KEY, (name_of(device), driver, torch.__version__, triton_version(), digest()), strict=True),
    )


def name_of(device: torch.device) -> str:
    """The GPU; or the CPU with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    threads = torch.get_num_threads()
    return f"{names[0].strip() if names else 'CPU'}, {threads} thread{'s' * (threads > 1)}"


def triton_version() -> str:
    """The version of the installed Triton, with another ptxas than its own; empty without it. It is not imported."""
    ptxas = os.environ.get("TRITON_PTXAS_PATH", "")
    for distribution in ("triton", "pytorch-triton"):
        try:
            return importlib.metadata.version(distribution) + f", {ptxas}" * bool(ptxas)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


@cache
def digest() -> str:
    """Of the code of all operators, and of what verifies them: a changed kernel was neither verified nor measured."""
    found, here = hashlib.sha256(), Path(__file__).parent
    for folder in (here, here.parent / "kernels"):
        for path in sorted(folder.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
