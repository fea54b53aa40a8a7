"""Builds the wheel of fairseq-fixed from its source, for Python versions without one.

    python scripts/build_fairseq.py fairseq-fixed==0.12.3.1 FOLDER

pip compiles the extension modules one after the other and with debug information. Here they are compiled side by side,
one per core, and without it; optimization is the same. FOLDER gets the wheel when it is complete. Where FOLDER has a
wheel, nothing is built. torch, numpy, Cython, setuptools and wheel must be installed.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from Cython.Build import cythonize
from torch.utils import cpp_extension


class SideBySide(cpp_extension.BuildExtension):
    """Compiles extension modules at the same time. Each has one file that takes long, so ninja would not help."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options | {"use_ninja": False})

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = len(os.sched_getaffinity(0))

    def build_extensions(self) -> None:
        for extension in self.extensions:  # before there are threads: Cython promises nothing about them
            (translated,) = cythonize([extension])
            extension.sources = translated.sources
            extension.extra_compile_args = [*extension.extra_compile_args, "-g0"]
        self.extensions.reverse()  # those that include torch's headers take longest and are declared last
        super().build_extensions()


def download(requirement: str, folder: Path) -> Path:
    """Fetches the source distribution with pip and unpacks it; the folder of its setup.py."""
    options = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
    (archive,) = folder.iterdir()
    shutil.unpack_archive(archive, folder)
    (setup,) = folder.glob("*/setup.py")
    return setup.parent


def build(source: Path) -> Path:
    """Runs ``setup.py bdist_wheel``; the wheel."""
    cpp_extension.BuildExtension = SideBySide
    sys.path.insert(0, str(source))
    sys.argv = ["setup.py", "bdist_wheel"]
    os.chdir(source)
    runpy.run_path("setup.py", run_name="__main__")
    (wheel,) = source.glob("dist/*.whl")
    return wheel


def main(requirement: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.whl")):
        print(f"there is a wheel in {folder}")
        return
    with tempfile.TemporaryDirectory() as temporary:
        wheel = build(download(requirement, Path(temporary)))
        # A copy in the same folder is renamed: an interrupted copy is no wheel.
        unfinished = shutil.copy(wheel, folder / f"{wheel.name}.{os.getpid()}")
        os.replace(unfinished, folder / wheel.name)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute())
