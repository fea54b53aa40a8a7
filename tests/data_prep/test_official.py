"""Downloads from a local server are complete and checked, or absent."""

from __future__ import annotations

import gzip
import hashlib
import signal
import socket
import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from data_prep.dataset import DataError
from data_prep.scan import render
from data_prep.sources import OfficialFile, OfficialFiles, default_cache, download, promised_size

DATA = bytes(range(256)) * 1024
FILE = OfficialFile("folder/data.bin", len(DATA), hashlib.sha256(DATA).hexdigest())
HALF = len(DATA) // 2


@pytest.fixture
def get(server, tmp_path: Path):
    """Downloads the file from the server; returns where it is."""
    server.files["/folder/data.bin"] = DATA
    return lambda: download(FILE, f"{server.url}/folder/data.bin", tmp_path / "cache" / "data.bin")


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


def test_download(get, server, tmp_path: Path) -> None:
    assert get().read_bytes() == DATA
    assert server.ranges == [None] and left(tmp_path) == ["data.bin"]


def test_kept_for_the_next_time(get, server) -> None:
    assert get() == get()
    assert len(server.ranges) == 1


def test_damaged_cache_is_replaced(get, server) -> None:
    get().write_bytes(DATA[:-1] + b"x")
    assert get().read_bytes() == DATA
    assert len(server.ranges) == 2


def test_broken_connection_goes_on_where_it_stopped(get, server, tmp_path: Path) -> None:
    server.faults = ["cut", 503, "cut"]
    assert get().read_bytes() == DATA
    assert server.ranges == [None, f"bytes={HALF}-", f"bytes={HALF}-", f"bytes={HALF + HALF // 2}-"]
    assert left(tmp_path) == ["data.bin"]


def test_later_run_goes_on_where_an_earlier_stopped(get, server, tmp_path: Path) -> None:
    server.faults = ["cut"] + [503] * 3
    with pytest.raises(DataError, match="cannot be downloaded \\(HTTP status 503, Service Unavailable\\)"):
        get()
    assert left(tmp_path) == ["data.bin.part"]
    assert get().read_bytes() == DATA
    assert server.ranges[-1] == f"bytes={HALF}-" and left(tmp_path) == ["data.bin"]


KILLED = """
import os, signal, sys
from data_prep import sources as official
append = official.append
def append_and_die(stream, block):
    append(stream, block)
    os.kill(os.getpid(), signal.SIGKILL)
official.append = append_and_die
file = official.OfficialFile("folder/data.bin", int(sys.argv[3]), "0")
official.download(file, sys.argv[1], official.Path(sys.argv[2]))
"""


def test_killed_download_leaves_nothing_that_counts_and_the_next_goes_on(get, server, tmp_path: Path) -> None:
    arguments = [f"{server.url}/folder/data.bin", tmp_path / "cache" / "data.bin", len(DATA)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, arguments)], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert left(tmp_path) == ["data.bin.part"]
    have = (tmp_path / "cache" / "data.bin.part").stat().st_size
    assert 0 < have < len(DATA)
    assert get().read_bytes() == DATA
    assert server.ranges == [None, f"bytes={have}-"] and left(tmp_path) == ["data.bin"]


def test_full_disk_is_no_fault_of_the_server(get, server, largest_file, tmp_path: Path) -> None:
    """One request; the received bytes are kept for a later run."""
    with largest_file(HALF + 1), pytest.raises(DataError) as caught:
        get()
    part = tmp_path / "cache" / "data.bin.part"
    expected = "cannot be written (File too large): make room, or name a folder on another disk by --cache-dir"
    assert str(caught.value) == f"{part}: {expected}" and part.read_bytes() == DATA[: HALF + 1]
    assert get().read_bytes() == DATA
    assert server.ranges == [None, f"bytes={HALF + 1}-"]


def test_server_that_sends_no_parts(get, server) -> None:
    server.faults = ["cut", "whole"]
    assert get().read_bytes() == DATA


@pytest.mark.parametrize(
    ("beginning", "ranges"),
    [(b"x" * 100, ["bytes=100-", None]), (DATA + b"x", [None]), (b"x" * len(DATA), [None])],
    ids=["wrong", "too-long", "wrong-and-whole"],
)
def test_wrong_beginning_is_thrown_away(beginning: bytes, ranges: list, get, server, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "data.bin.part").write_bytes(beginning)
    assert get().read_bytes() == DATA
    assert server.ranges == ranges and left(tmp_path) == ["data.bin"]


def test_beginning_that_is_longer_than_what_the_server_has(get, server, tmp_path: Path) -> None:
    server.files["/folder/data.bin"] = DATA[:10]
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "data.bin.part").write_bytes(DATA[:100])
    with pytest.raises(DataError, match="the connection ended after 10 of 262,144 bytes"):
        get()


@pytest.mark.parametrize(
    "other", [b"x" * len(DATA), DATA + b"x" * 100_000, DATA + b"x"], ids=["other", "longer", "one-byte-longer"]
)
def test_other_file_is_refused(other: bytes, get, server, tmp_path: Path) -> None:
    server.files["/folder/data.bin"] = other
    with pytest.raises(
        DataError, match=f"not the official data.bin: .* expected 262,144 bytes with sha256 {FILE.sha256}"
    ):
        get()
    assert len(server.ranges) == 1 and left(tmp_path) == []


def test_endless_file_is_not_read_to_the_end(get, server) -> None:
    server.files["/folder/data.bin"] = DATA * 20
    with pytest.raises(DataError, match="not the official data.bin: 327,680 bytes"):
        get()


def test_short_file_is_refused(get, server, tmp_path: Path) -> None:
    server.files["/folder/data.bin"] = DATA[:1000]
    with pytest.raises(DataError, match="cannot be downloaded"):
        get()
    assert not (tmp_path / "cache" / "data.bin").exists()


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (403, 1), (500, 4), (429, 4)])
def test_status(status: int, requests: int, get, server, tmp_path: Path) -> None:
    server.faults = [status] * 4
    with pytest.raises(DataError) as caught:
        get()
    assert str(caught.value).startswith(f"{server.url}/folder/data.bin: cannot be downloaded (HTTP status {status}, ")
    assert "--raw-dir" in str(caught.value)
    assert len(server.ranges) == requests and left(tmp_path) == []


def test_silent_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("data_prep.sources.PAUSE", 0.0)
    monkeypatch.setattr("data_prep.sources.TIMEOUT", 0.05)
    message = "cannot be downloaded \\(timed out\\)"
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(DataError, match=message):
        download(FILE, f"http://127.0.0.1:{silent.getsockname()[1]}/x", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_several_at_once(get, server) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(get())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in paths] == [DATA] * 4
    assert len(server.ranges) == 1


@pytest.mark.parametrize("name", ["folder/data.bin", "folder/data.bin.gz", "data.bin", "data.bin.gz"])
def test_places_in_raw_dir(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / name).write_bytes(gzip.compress(DATA) if name.endswith(".gz") else DATA)
    args = Namespace(raw_dir=tmp_path, download=False, mirror=None, cache_dir=None)
    path, data = OfficialFiles(args, "dataset", "http://unused").read(FILE)
    assert (path, data) == (tmp_path / name, DATA)
    FILE.check(path, data)


def test_default_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache() == Path("/somewhere/fairseq_sg")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache() == Path("/home/someone/.cache/fairseq_sg")


@pytest.fixture
def blob(monkeypatch: pytest.MonkeyPatch) -> OfficialFile:
    """The file, known only by its id in git (as ``git hash-object`` prints it)."""
    file = OfficialFile("folder/data.bin", None, None, git_blob="f1df504fe79ce8baa483c6dcf0599d88778bde0a")
    monkeypatch.setitem(globals(), "FILE", file)
    return file


def test_git_blob_of_known_content() -> None:
    # The ids of the empty file and of "hello world\n" that every git repository has.
    for data, known in {
        b"": "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391",
        b"hello world\n": "3b18e512dba79e4c8300dd08aeb37f8e728b8dad",
    }.items():
        file = OfficialFile("x", None, None, git_blob=known)
        file.check(Path("x"), data)
        with pytest.raises(DataError, match=f"not the official x: .* bytes with git blob .*, expected .* {known}"):
            file.check(Path("x"), data + b"x")


@pytest.mark.parametrize("faults", [[], ["cut"], [503, "cut"]], ids=["plain", "cut", "error-and-cut"])
def test_download_by_git_blob(faults: list, blob: OfficialFile, get, server, tmp_path: Path) -> None:
    server.faults = list(faults)
    assert get().read_bytes() == DATA and get().read_bytes() == DATA
    assert left(tmp_path) == ["data.bin"]
    assert set(server.ranges) == {None}  # without a known size, there are no range requests


@pytest.mark.parametrize("headers", [{}, {"Content-Length": "many"}], ids=["none", "no-number"])
def test_server_that_does_not_say_how_long_the_file_is(headers: dict[str, str]) -> None:
    with pytest.raises(DataError, match="http://x: the server does not give the size of the file"):
        promised_size("http://x", Namespace(headers=headers))


def test_other_file_than_the_git_blob(blob: OfficialFile, get, server, tmp_path: Path) -> None:
    server.files["/folder/data.bin"] = DATA + b"x"
    with pytest.raises(DataError, match=f"not the official data.bin: .* expected git blob {blob.git_blob}"):
        get()
    assert left(tmp_path) == []


# ---- through the command line


@pytest.fixture
def command(server, tmp_path: Path) -> list[object]:
    options = ["--download", "--mirror", server.url + "/", "--cache-dir", tmp_path / "cache"]
    return ["scan", "--raw-only", *options, "--out", tmp_path / "out", "--split"]


def test_download_of_tasks(run, command, server, scan_files: Path, tmp_path: Path) -> None:
    server.files["/tasks.txt"] = gzip.decompress((scan_files / "tasks.txt.gz").read_bytes())
    result = run(*command, "length", "--cutoff", "26")
    assert result.code == 0 and "examples: the published ones" in result.out
    assert result.err == f"downloading {server.url}/tasks.txt (4,080,388 bytes)\n"
    assert (tmp_path / "cache" / "scan" / "tasks.txt").is_file()
    assert run(*command, "length", "--cutoff", "26").out == f"already prepared: {tmp_path / 'out'}\n"


def test_download_of_the_simple_split(run, command, server, official_splits, tmp_path: Path) -> None:
    for subset in ("train", "test"):
        text = "".join(render(pair) + "\n" for pair in official_splits[f"simple_{subset}"])
        server.files[f"/simple_split/tasks_{subset}_simple.txt"] = text.encode("ascii")
    result = run(*command, "simple")
    assert result.code == 0 and "examples: the published ones" in result.out


def test_files_that_are_there_are_not_downloaded(run, command, server, scan_files: Path) -> None:
    result = run(*command, "mcd1", "--raw-dir", scan_files)
    assert result.code == 0 and server.ranges == []


def test_offline(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("data_prep.sources.PAUSE", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    result = run(
        *("scan", "--split", "length", "--raw-only", "--out", tmp_path / "out"),
        *("--download", "--mirror", url, "--cache-dir", tmp_path / "cache"),
    )
    assert (result.code, result.out) == (1, "")
    message = result.err.splitlines()[-1]
    assert message.startswith(f"error: {url}/tasks.txt: cannot be downloaded (") and "Connection refused" in message
    assert message.endswith("); get it another way and pass its folder with --raw-dir")
    assert not (tmp_path / "out").exists() and list((tmp_path / "cache" / "scan").iterdir()) == []
