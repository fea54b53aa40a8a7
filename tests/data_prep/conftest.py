"""Fixtures of the tests of data preparation."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import io
import json
import random
import resource
import tarfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from data_prep.__main__ import main
from data_prep.dataset import Pair
from data_prep.scan.grammar import generate
from helpers.data_files import scan_line


class Result(NamedTuple):
    """Exit code and printed output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs ``python -m data_prep ARGUMENTS…`` in this process."""

    def run(*arguments: object) -> Result:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def generated() -> list[Pair]:
    """All commands in the order of the grammar."""
    return generate()


@pytest.fixture(scope="session")
def scan_files(shared_data: Path) -> Path:
    """The folder with the official files of SCAN."""
    return shared_data / "scan"


@pytest.fixture(scope="session")
def official(scan_files: Path) -> list[Pair]:
    """All commands of the official tasks.txt, read without the code under test."""
    lines = gzip.decompress((scan_files / "tasks.txt.gz").read_bytes()).decode("ascii").splitlines()
    return [Pair(*line.removeprefix("IN: ").split(" OUT: ")) for line in lines]


@pytest.fixture(scope="session")
def official_splits(scan_files: Path, official: list[Pair]) -> dict[str, list[Pair]]:
    """The official split files: ``simple_train``, ``simple_test``, ``length_train``, …"""
    indices = json.loads(gzip.decompress((scan_files / "official_split_indices.json.gz").read_bytes()))
    return {name: [official[index] for index in numbers] for name, numbers in indices.items()}


@pytest.fixture
def raw_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a folder with the given lines, or bytes, as tasks.txt or another file."""
    folder = tmp_path_factory.mktemp("official")

    def make(content: bytes | list[str], name: str = "tasks.txt") -> Path:
        data = content if isinstance(content, bytes) else "".join(line + "\n" for line in content).encode("utf-8")
        (folder / name).write_bytes(data)
        return folder

    return make


@pytest.fixture(scope="session")
def lines(generated: list[Pair]) -> list[str]:
    """All commands as lines of a file: correct, but not in the official order."""
    return [scan_line(pair) for pair in generated]


def read_subset(folder: Path, name: str) -> list[Pair]:
    """The pairs of a subset of a prepared folder."""
    texts = [(folder / "raw" / f"{name}.{language}").read_text("ascii").splitlines() for language in ("src", "tgt")]
    return [Pair(*pair) for pair in zip(*texts, strict=True)]


@pytest.fixture(name="read_subset")
def read_subset_fixture() -> Callable[[Path, str], list[Pair]]:
    return read_subset


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limits the size of files inside the block: the system refuses to write, as on a full disk."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.fixture(name="largest_file")
def largest_file_fixture() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    return largest_file


@pytest.fixture
def little_memory() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """Limits Python's allocated bytes inside the block."""

    @contextlib.contextmanager
    def little_memory(most: int) -> Iterator[None]:
        tracemalloc.start()
        try:
            yield
            assert tracemalloc.get_traced_memory()[1] < most
        finally:
            tracemalloc.stop()

    return little_memory


@pytest.fixture
def large_archive(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tar.gz archive from names with contents, or with sizes of arbitrary contents.

    Those are lines of hexadecimal digits, which compress to half of their size.
    """
    folder = tmp_path_factory.mktemp("large")
    line = random.Random(1)

    def make(files: dict[str, bytes | int]) -> Path:
        path = folder / "archive.tar.gz"
        with tarfile.open(path, "w:gz", compresslevel=1) as stream:
            for name, content in files.items():
                if isinstance(content, int):
                    content = b"".join(line.randbytes(511).hex().encode() + b"\n" for _ in range(content >> 10))
                info = tarfile.TarInfo(name)
                info.size = len(content)
                stream.addfile(info, io.BytesIO(content))
        return path

    return make


class Server(http.server.ThreadingHTTPServer):
    """A local web server with scripted answers.

    ``files`` maps a path to its bytes. ``faults`` is consumed from the front, one per request: a status, ``"cut"`` for
    half of the promised bytes.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.faults: list[int | str] = []
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET with a file."""

    server: Server

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        fault = self.server.faults.pop(0) if self.server.faults else None
        data = self.server.files.get(self.path)
        if isinstance(fault, int) or data is None:
            return self.send_error(fault or 404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client may disconnect early
            self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)

    def log_message(self, *args: object) -> None:
        """Prints nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A running ``Server``; waiting between download attempts takes no time, and proxies are ignored."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("data_prep.sources.PAUSE", 0.0)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
