"""The device ``simulated``: a stand-in for a GPU on machines that have none (``simulated.cpp``).

PyTorch has one such device a process, so what uses it runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils import cpp_extension

NAME = "simulated"
SOURCE = Path(__file__).with_suffix(".cpp")


def compiler() -> str | None:
    """The C++ compiler's path, None where there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))


def library() -> Path:
    """The compiled device: made in about a minute, and kept in the user's cache for this source and this torch."""
    command = [compiler(), "-shared", "-fPIC", "-O1", "-std=c++20", str(SOURCE)]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += ["-ltorch_cpu", "-ltorch", "-lc10"]
    made_of = [SOURCE.read_text(), torch.__version__, *command]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairseq_sg_tests"
    name = f"simulated-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    if (folder / name).exists():
        return folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(dir=folder)
    except OSError:  # no cache can be written: each run compiles it
        folder = Path(tempfile.mkdtemp(prefix=folder.name))
        made = tempfile.TemporaryDirectory(dir=folder)
    with made:
        done = subprocess.run([*command, "-o", f"{made.name}/{name}"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        os.replace(f"{made.name}/{name}", folder / name)
    return folder / name


def register(library: Path) -> None:
    """Gives this process the device."""
    torch.ops.load_library(str(library))
    torch.utils.rename_privateuse1_backend(NAME)
    module = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Within it, an operator that would make the host wait for a GPU is a RuntimeError."""
    torch.ops.simulated_device.forbid_waiting(True)
    try:
        yield
    finally:
        torch.ops.simulated_device.forbid_waiting(False)
