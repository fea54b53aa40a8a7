"""Reading archives: wanted files are read, or the archive is refused with DataError."""

from __future__ import annotations

import gzip
import io
import os
import random
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import archive
from data_prep.archive import members, read_members
from data_prep.dataset import DataError

TEXT = b"What is 1 + 1?\n2\n"
Entry = tuple[str, bytes | tarfile.TarInfo]


def pack(path: Path, entries: Iterable[Entry], format: int = tarfile.PAX_FORMAT) -> Path:
    """Makes an archive of files with their content, or of ready headers without one."""
    with tarfile.open(path, "w:gz" if path.suffix in (".gz", ".tgz") else "w", format=format) as stream:
        for name, content in entries:
            if isinstance(content, bytes):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                stream.addfile(info, io.BytesIO(content))
            else:
                content.name = name
                stream.addfile(content)
    return path


def header(kind: bytes, link: str = "", **pax: str) -> tarfile.TarInfo:
    """A header of any kind; the name is given by ``pack``."""
    info = tarfile.TarInfo("")
    info.type, info.linkname, info.pax_headers = kind, link, pax
    return info


def everything(path: Path, largest: int = archive.LARGEST) -> dict[str, bytes]:
    """All files of an archive."""
    return {name: stream.read() for name, stream in members(path, lambda name: 1 << 30, largest)}


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz"])
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_files_are_read(suffix: str, format: int, tmp_path: Path) -> None:
    long = "a/" + "x" * 90 + "/" + "y" * 90 + ".txt"
    big = random.Random(0).randbytes(300_000)
    entries = [("a", header(tarfile.DIRTYPE)), ("./a/b.txt", TEXT), (long, b"long"), ("empty", b""), ("big", big)]
    path = pack(tmp_path / f"data{suffix}", entries, format)
    assert everything(path) == {"a/b.txt": TEXT, long: b"long", "empty": b"", "big": big}
    assert read_members(path, {"big": 300_000, "a/b.txt": 16 + 1}) == {"big": big, "a/b.txt": TEXT}
    assert list(read_members(path, {"big": 300_000, "a/b.txt": 17})) == ["big", "a/b.txt"]
    assert os.listdir(tmp_path) == [path.name]


def test_what_is_not_wanted_is_passed_over(tmp_path: Path) -> None:
    path = pack(tmp_path / "data.tgz", [("a", b"1" * 5_000), ("b", b"2"), ("c", b"3" * 5_000)])
    asked: list[str] = []

    def wanted(name: str) -> int | None:
        asked.append(name)
        return 1 if name == "b" else None

    assert [(name, stream.read()) for name, stream in members(path, wanted)] == [("b", b"2")]
    assert asked == ["a", "b", "c"]


def test_content_need_not_be_read_to_its_end(tmp_path: Path) -> None:
    lines = b"".join(b"%d\n" % number for number in range(100_000))
    path = pack(tmp_path / "data.tar.gz", [("a", lines), ("b", lines)])
    found = {name: [stream.readline(), stream.read(3)] for name, stream in members(path, lambda name: len(lines))}
    assert found == {name: [b"0\n", b"1\n2"] for name in "ab"}


def test_every_line_can_be_read_alone(tmp_path: Path) -> None:
    path = pack(tmp_path / "data.tgz", [("a", TEXT * 20_000)])
    ((_, lines),) = [(name, list(stream)) for name, stream in members(path, lambda name: 1 << 20)]
    assert b"".join(lines) == TEXT * 20_000 and len(lines) == 40_000


def test_memory_is_bounded(large_archive, little_memory) -> None:
    """For any size of wanted files, read line by line, and of skipped ones."""
    path = large_archive({"a": 12 << 20, "b": 12 << 20, "c": b"end"})
    with little_memory(1 << 20):
        lines = {name: sum(1 for _ in stream) for name, stream in members(path, {"b": 1 << 30, "c": 1 << 30}.get)}
    assert lines == {"b": 12 << 10, "c": 1}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("/etc/passwd", TEXT), "the path '/etc/passwd' leads out of the archive"),
        (("//a", TEXT), "the path '//a' leads out of the archive"),
        (("../x", TEXT), "the path '../x' leads out of the archive"),
        (("a/b/../../../x", TEXT), "the path 'a/b/../../../x' leads out of the archive"),
        (("a/..", header(tarfile.DIRTYPE)), "the path 'a/..' leads out of the archive"),
        (("a\nb", TEXT), r"the path 'a\nb' leads out of the archive, or is empty"),
        (("a\udcffb", TEXT), r"the path 'a\udcffb' leads out of the archive, or is empty"),
        (("x", header(tarfile.SYMTYPE, "../../etc/passwd")), "'x' is a symbolic link, neither a file nor a folder"),
        (("x", header(tarfile.SYMTYPE, "good")), "'x' is a symbolic link"),
        (("x", header(tarfile.LNKTYPE, "good")), "'x' is a hard link"),
        (("x", header(tarfile.CHRTYPE)), "'x' is a device"),
        (("x", header(tarfile.BLKTYPE)), "'x' is a device"),
        (("x", header(tarfile.FIFOTYPE)), "'x' is a pipe"),
        (("x", header(tarfile.CONTTYPE)), "'x' is of the unknown type b'7'"),
        (("x", header(b"Q")), "'x' is of the unknown type b'Q'"),
        (("x", header(tarfile.REGTYPE, **{"GNU.sparse.map": "0,0", "GNU.sparse.size": "1000000"})), "a sparse file"),
        (("good", b"again"), "'good' occurs twice"),
        (("./good", b"again"), "'./good' occurs twice"),
        ((".//good", b"again"), "'.//good' occurs twice"),
        (("good", header(tarfile.DIRTYPE)), "'good' occurs twice"),
        (("x", header(tarfile.REGTYPE, size="-512")), "'x' has a size of -512 bytes"),
        (("x", header(tarfile.DIRTYPE, size="512")), "'x' has a size of 512 bytes"),
    ],
    ids=lambda value: repr(value[0]) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("suffix", [".tar", ".tgz"])
def test_refused_as_a_whole(entry: Entry, message: str, suffix: str, tmp_path: Path) -> None:
    path = pack(tmp_path / f"data{suffix}", [("good", TEXT), entry, ("after", TEXT)])
    with pytest.raises(DataError) as caught:
        read_members(path, {"good": 100})  # the faulty member is not wanted
    assert caught.value.path == path and caught.value.message.startswith("refused: ")
    assert message in caught.value.message and "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == [path.name]


def test_file_that_is_larger_than_expected(tmp_path: Path) -> None:
    path = pack(tmp_path / "data.tgz", [("good", TEXT)])
    with pytest.raises(DataError) as caught:
        read_members(path, {"good": len(TEXT) - 1})
    assert str(caught.value) == f"{path}/good: has 17 bytes; expected at most 16"


def test_archive_that_is_larger_than_expected(tmp_path: Path) -> None:
    path = pack(tmp_path / "data.tgz", [("a", b"x" * 5_000), ("b", b"x" * 5_000)])
    size = 512 + 5_120 + 512 + 5_000
    assert len(everything(path, largest=size)) == 2
    with pytest.raises(DataError, match="11,144 bytes or more, unpacked; expected at most 11,143"):
        everything(path, largest=size - 1)


def test_declared_size_is_not_believed(tmp_path: Path) -> None:
    """A file of declared 8 EiB is refused before reading; so is one declared longer than the archive."""
    for size, message in ((1 << 63, "expected at most"), (1 << 20, "not a complete tar")):
        path = tmp_path / "data.tar"
        path.write_bytes(header_bytes("a", size) + TEXT)
        with pytest.raises(DataError, match=message):
            everything(path)
        with pytest.raises(DataError, match=message):
            read_members(path, {"another": 1})


def header_bytes(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def test_bomb(tmp_path: Path) -> None:
    """128 MiB of zeros in 130 kB are refused after the first 16 MiB, wanted or not."""
    zeros = gzip.compress(b"\0" * (1 << 20), mtime=0)
    path = tmp_path / "data.tgz"
    path.write_bytes(gzip.compress(header_bytes("a", 128 << 20), mtime=0) + zeros * 128)
    for wanted in ({"a": 128 << 20}, {"b": 1}):
        with pytest.raises(
            DataError, match=r"bytes unpack to 16,7[0-9,]* or more: no archive of data has such a ratio"
        ):
            read_members(path, wanted)


def test_what_packs_well_is_no_bomb(tmp_path: Path) -> None:
    """15 MiB of zeros are accepted, and so is much text at a ratio below the limit."""
    path = pack(tmp_path / "data.tgz", [("a", b"\0" * (15 << 20))])
    assert path.stat().st_size < 20_000 and len(everything(path)["a"]) == 15 << 20
    block = random.Random(0).randbytes(1 << 14)
    half = block + b"\0" * (1 << 18)
    path = pack(tmp_path / "text.tgz", [("a", half * 80)])
    assert path.stat().st_size * 10 < len(half) * 80 > archive.HARMLESS
    assert len(everything(path)["a"]) == len(half) * 80


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_endless_header(kind: bytes, tmp_path: Path) -> None:
    """tarfile would read a name or pax header of 8 MiB into memory."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 8 << 20
    path = tmp_path / "data.tgz"
    path.write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + b"7 ab=c\n" * (8 << 17)))
    with pytest.raises(DataError, match="more than 1,048,576 bytes of headers, or after the end"):
        everything(path)


def test_headers_without_end(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 7
    path = tmp_path / "data.tar"
    path.write_bytes((info.tobuf(tarfile.GNU_FORMAT) + b"7 ab=c\n".ljust(512, b"\0")) * 1_020)
    with pytest.raises(DataError, match="headers nested too deeply|bytes of headers"):
        everything(path)


def test_endless_tail(tmp_path: Path) -> None:
    path = pack(tmp_path / "data.tar", [("a", TEXT)])
    with path.open("ab") as stream:
        stream.write(b"\0" * (1 << 20))
    with pytest.raises(DataError, match="bytes of headers, or after the end"):
        everything(path)


def test_too_many_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pack(tmp_path / "data.tgz", [(str(number), b"") for number in range(10)])
    monkeypatch.setattr(archive, "MOST_MEMBERS", 10)
    assert len(everything(path)) == 10
    monkeypatch.setattr(archive, "MOST_MEMBERS", 9)
    with pytest.raises(DataError, match="refused: more than 9 files and folders"):
        everything(path)


def packed(path: Path) -> bytes:
    return pack(path, [("a", TEXT), ("b", random.Random(1).randbytes(3_000)), ("c", TEXT)]).read_bytes()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-9],
        lambda data: data[:-8] + bytes([data[-8] ^ 1]) + data[-7:],
        lambda data: data[:-4] + bytes([data[-4] ^ 1]) + data[-3:],
        lambda data: data[:60] + b"\0" * 20 + data[80:],
        lambda data: data + b"behind",
        lambda data: b"",
        lambda data: b"\x1f\x8b",
        lambda data: gzip.compress(b""),
        lambda data: b"no archive",
        lambda data: b"no archive" * 1_000,
        lambda data: b"PK\x03\x04" + bytes(1_000),
        lambda data: gzip.compress(b"no archive" * 1_000),
        lambda data: gzip.compress(gzip.compress(data)),
        lambda data: gzip.compress(gzip.decompress(data)[:1_300]),
        lambda data: gzip.compress(gzip.decompress(data)[: 2 * 512]),
        lambda data: gzip.compress(gzip.decompress(data)[: 2 * 512 + 100]),
        lambda data: gzip.decompress(data)[: 2 * 512],
        lambda data: gzip.decompress(data)[: 2 * 512] + b"\1" + gzip.decompress(data)[2 * 512 + 1 :],
    ],
    ids=[
        *("half", "end", "checksum", "length", "damaged", "behind", "nothing", "magic", "no-bytes", "short", "other"),
        *("zip", "no-tar", "twice-packed", "cut-inside", "cut-after-file", "cut-in-header", "cut-plain", "second"),
    ],
)
def test_broken_archive(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "data.tgz"
    path.write_bytes(spoil(packed(path)))
    for wanted in ({"a": 100}, {"none": 1}):
        with pytest.raises(DataError) as caught:
            read_members(path, wanted)
        assert str(caught.value).startswith(f"{path}: not a complete tar or tar.gz archive (")
        assert str(caught.value).count("\n") == 0


def test_broken_inside_a_file(tmp_path: Path) -> None:
    """Reading the content raises, not only requesting the next file."""
    path = pack(tmp_path / "data.tgz", [("a", TEXT), ("b", random.Random(1).randbytes(300_000))])
    path.write_bytes(path.read_bytes()[:200_000])
    contents = members(path, lambda name: 1 << 20)
    assert next(contents)[1].read() == TEXT
    _, stream = next(contents)
    with pytest.raises(DataError, match=f"{path}/b: not a complete tar"):
        stream.read()


def test_missing_file(tmp_path: Path) -> None:
    path = pack(tmp_path / "data.tgz", [("a", TEXT), ("b", header(tarfile.DIRTYPE))])
    for name in ("b", "c", "A", "a/"):
        with pytest.raises(DataError) as caught:
            read_members(path, {"a": 100, name: 100})
        assert str(caught.value) == f"{path}: has no {name}"
    with pytest.raises(FileNotFoundError):
        read_members(tmp_path / "none.tgz", {"a": 100})


EDITS = st.lists(st.tuples(st.integers(0, 4_000), st.binary(min_size=1, max_size=12)), min_size=1, max_size=4)


@given(
    edits=EDITS,
    end=st.integers(0, 6_000),
    format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    checked=st.booleans(),
)
def test_damaged_archive_is_read_or_refused(
    edits: list[tuple[int, bytes]], end: int, format: int, checked: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With ``checked``, the checksums of the headers are corrected, so their content is trusted."""
    path = tmp_path_factory.getbasetemp() / "damaged.tar"
    pack(path, [("a", TEXT), ("b" * 120, TEXT), ("é" * 60, TEXT)], format)
    data = bytearray(path.read_bytes())
    for place, change in edits:
        data[place : place + len(change)] = change
    if checked:
        for start in range(0, len(data), 512):
            block = data[start : start + 512]
            if block[257:262] == b"ustar":
                total = sum(block[:148]) + sum(block[156:]) + 8 * 32
                data[start + 148 : start + 156] = b"%06o\0 " % total
    path.write_bytes(data[: max(end, 1_000)])
    try:
        found = everything(path)
        assert all(len(content) <= len(data) for content in found.values())
    except DataError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
