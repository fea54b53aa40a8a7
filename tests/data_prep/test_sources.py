"""Published files: found, downloaded and checked atomically, and read out of archives."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from data_prep.dataset import DataError
from data_prep.sources import OfficialFile, OfficialFiles, default_cache, download, members
from helpers.data_files import scan_line

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
    assert len(server.requests) == 1 and left(tmp_path) == ["data.bin"]


def test_file_of_another_folder_with_the_same_name(server, tmp_path: Path) -> None:
    """A bare name in --raw-dir is taken for the file that it is: --download gets the other one."""
    server.files["/folder/data.bin"] = DATA
    (tmp_path / "data.bin").write_bytes(b"of another folder")
    assert OfficialFiles(tmp_path).get(FILE) == tmp_path / "data.bin"
    both = OfficialFiles(tmp_path, download=True, mirror=server.url, cache_dir=tmp_path / "cache")
    assert both.get(FILE).read_bytes() == DATA
    (tmp_path / "data.bin").write_bytes(DATA)
    assert both.get(FILE) == tmp_path / "data.bin" and len(server.requests) == 1


def test_kept_for_the_next_time(get, server) -> None:
    assert get() == get()
    assert len(server.requests) == 1


def test_damaged_cache_is_replaced(get, server) -> None:
    get().write_bytes(DATA[:-1] + b"x")
    assert get().read_bytes() == DATA
    assert len(server.requests) == 2


@pytest.mark.parametrize("faults", [["cut"], ["cut", 503, "cut"]], ids=["once", "three-times"])
def test_broken_connection_is_tried_again(faults: list, get, server, tmp_path: Path) -> None:
    server.faults = list(faults)
    assert get().read_bytes() == DATA
    assert len(server.requests) == len(faults) + 1 and left(tmp_path) == ["data.bin"]


KILLED = """
import os, signal, sys
from pathlib import Path
from data_prep import sources
os.replace = lambda part, target: os.kill(os.getpid(), signal.SIGKILL)
file = sources.OfficialFile("folder/data.bin", int(sys.argv[3]), sys.argv[4])
sources.download(file, sys.argv[1], Path(sys.argv[2]))
"""


def test_killed_download_leaves_nothing_that_counts(get, server, tmp_path: Path) -> None:
    arguments = [f"{server.url}/folder/data.bin", tmp_path / "cache" / "data.bin", len(DATA), FILE.sha256]
    killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, arguments)], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "cache" / "data.bin").exists() and len(left(tmp_path)) == 1
    assert get().read_bytes() == DATA
    assert left(tmp_path) == ["data.bin"]


def test_cache_that_cannot_be_made(get, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"cannot be made \(a file is in the way\): choose another --cache-dir$"):
        get()


def test_full_disk_is_no_fault_of_the_server(get, server, largest_file, tmp_path: Path) -> None:
    with largest_file(HALF), pytest.raises(DataError) as caught:
        get()
    expected = "cannot be written (File too large): make room, or name another folder by --cache-dir"
    assert str(caught.value) == f"{tmp_path / 'cache' / 'data.bin'}: {expected}"
    assert len(server.requests) == 1 and left(tmp_path) == []


@pytest.mark.parametrize(
    "other", [b"x" * len(DATA), DATA + b"x" * 100_000, DATA + b"x"], ids=["other", "longer", "one-byte-longer"]
)
def test_other_file_is_refused(other: bytes, get, server, tmp_path: Path) -> None:
    server.files["/folder/data.bin"] = other
    with pytest.raises(
        DataError, match=f"not the official data.bin: .* expected 262,144 bytes with sha256 {FILE.sha256}"
    ):
        get()
    assert len(server.requests) == 1 and not (tmp_path / "cache").exists()


def test_endless_file_is_not_read_to_the_end(get, server) -> None:
    server.files["/folder/data.bin"] = DATA * 20
    with pytest.raises(DataError, match="not the official data.bin: 327,680 bytes"):
        get()


def test_short_file_is_refused(get, server, tmp_path: Path) -> None:
    server.files["/folder/data.bin"] = DATA[:1000]
    with pytest.raises(DataError, match="the connection ended after 1,000 of 262,144 bytes"):
        get()
    assert not (tmp_path / "cache" / "data.bin").exists()


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (403, 1), (500, 4), (429, 4)])
def test_status(status: int, requests: int, get, server, tmp_path: Path) -> None:
    server.faults = [status] * 4
    with pytest.raises(DataError) as caught:
        get()
    assert str(caught.value).startswith(f"{server.url}/folder/data.bin: cannot be downloaded (HTTP status {status}, ")
    assert "--raw-dir" in str(caught.value)
    assert len(server.requests) == requests and not (tmp_path / "cache").exists()


def test_silent_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("data_prep.sources.PAUSE", 0.0)
    monkeypatch.setattr("data_prep.sources.TIMEOUT", 0.05)
    message = "cannot be downloaded \\(timed out\\)"
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(DataError, match=message):
        download(FILE, f"http://127.0.0.1:{silent.getsockname()[1]}/x", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_several_at_once(get) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(get())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in paths] == [DATA] * 4


@pytest.mark.parametrize("name", ["folder/data.bin", "folder/data.bin.gz", "data.bin", "data.bin.gz"])
def test_places_in_raw_dir(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / name).write_bytes(gzip.compress(DATA) if name.endswith(".gz") else DATA)
    path, data = OfficialFiles(raw_dir=tmp_path).read(FILE)
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


def test_other_file_than_the_git_blob(blob: OfficialFile, get, server, tmp_path: Path) -> None:
    server.files["/folder/data.bin"] = DATA + b"x"
    with pytest.raises(DataError, match=f"not the official data.bin: .* expected git blob {blob.git_blob}"):
        get()
    assert not (tmp_path / "cache").exists()


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


def test_download_of_the_simple_split(run, command, server, official_splits) -> None:
    for subset in ("train", "test"):
        text = "".join(scan_line(pair) + "\n" for pair in official_splits[f"simple_{subset}"])
        server.files[f"/simple_split/tasks_{subset}_simple.txt"] = text.encode("ascii")
    result = run(*command, "simple")
    assert result.code == 0 and "examples: the published ones" in result.out


def test_files_that_are_there_are_not_downloaded(run, command, server, scan_files: Path) -> None:
    result = run(*command, "mcd1", "--raw-dir", scan_files)
    assert result.code == 0 and server.requests == []


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
    assert not (tmp_path / "out").exists() and not (tmp_path / "cache").exists()


# ---- archives

TEXT = b"What is 1 + 1?\n2\n"


def pack(path: Path, entries: dict[str, bytes | tarfile.TarInfo], format: int = tarfile.PAX_FORMAT) -> Path:
    """Makes an archive of files with their contents, or of ready headers without one."""
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w", format=format) as stream:
        for name, content in entries.items():
            info = tarfile.TarInfo(name) if isinstance(content, bytes) else content
            info.name = name
            if isinstance(content, bytes):
                info.size = len(content)
            stream.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return path


def header(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, "good"
    return info


def read(path: Path, wanted: dict[str, int]) -> dict[str, bytes]:
    with path.open("rb") as packed:
        return {name: stream.read() for name, stream in members(path, packed, wanted)}


@pytest.mark.parametrize("suffix", [".tar", ".tgz"])
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_wanted_files_are_read(suffix: str, format: int, tmp_path: Path) -> None:
    long = "a/" + "x" * 90 + "/" + "y" * 90 + ".txt"
    entries = {"a": header(tarfile.DIRTYPE), "./a/b.txt": TEXT, "other": b"x" * 9_000, long: b"long", "empty": b""}
    path = pack(tmp_path / f"data{suffix}", entries, format)
    wanted = {"empty": 0, "a/b.txt": len(TEXT), long: 4}
    assert read(path, wanted) == {"a/b.txt": TEXT, long: b"long", "empty": b""}
    assert os.listdir(tmp_path) == [path.name]


def test_memory_is_bounded(large_archive, little_memory) -> None:
    """For any size of wanted files, read line by line, and of skipped ones."""
    path = large_archive({"a": 12 << 20, "b": 12 << 20, "c": b"end"})
    with little_memory(1 << 20), path.open("rb") as packed:
        lines = {name: sum(1 for _ in stream) for name, stream in members(path, packed, {"b": 1 << 30, "c": 1 << 30})}
    assert lines == {"b": 12 << 10, "c": 1}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"good": TEXT + b"x"}, "data.tgz/good: has 18 bytes; expected at most 17"),
        ({"good": header(tarfile.SYMTYPE)}, "data.tgz/good: is not a plain file"),
        ({"good": header(tarfile.LNKTYPE)}, "data.tgz/good: is not a plain file"),
        ({"good": header(tarfile.DIRTYPE)}, "data.tgz/good: is not a plain file"),
        ({"../good": TEXT}, "data.tgz: has no good"),
        ({"/good": TEXT}, "data.tgz: has no good"),
        ({}, "data.tgz: has no good"),
    ],
    ids=["large", "symbolic-link", "hard-link", "folder", "outside", "absolute", "empty"],
)
def test_member_that_is_not_the_wanted_file(entries: dict, message: str, tmp_path: Path) -> None:
    path = pack(tmp_path / "data.tgz", entries)
    with pytest.raises(DataError) as caught:
        read(path, {"good": len(TEXT)})
    assert str(caught.value) == f"{tmp_path}/{message}"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-9],
        lambda data: data[:-6] + bytes([data[-6] ^ 1]) + data[-5:],
        lambda data: data[:60] + b"\0" * 20 + data[80:],
        lambda data: b"",
        lambda data: b"no archive",
        lambda data: gzip.compress(b"no archive" * 100),
        lambda data: gzip.compress(gzip.decompress(data)[:700]),
    ],
    ids=["half", "end", "checksum", "damaged", "nothing", "other", "no-tar", "cut-inside"],
)
def test_broken_archive(spoil, tmp_path: Path) -> None:
    path = pack(tmp_path / "data.tgz", {"good": TEXT * 100})
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        read(path, {"good": 100 * len(TEXT)})
    assert str(caught.value).startswith(f"{path}: not a complete tar or tar.gz archive (")
    assert caught.value.path == path
