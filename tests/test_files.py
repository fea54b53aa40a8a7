"""Files that are replaced in one step, by several writers at a time, some of which are killed."""

from __future__ import annotations

import fcntl
import os
import signal

import pytest

from fairseq_sg.files import alone, replacing, write_text


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results [1].json"


def test_writers_at_the_same_time_do_not_meet(path):
    """Each publishes what it wrote itself; the last one stays."""
    with replacing(path) as outer:
        outer.write_text("half")
        with replacing(path) as inner:
            inner.write_text("one")
        assert path.read_text() == "one" and outer.read_text() == "half"
        outer.write_text("other")
    assert path.read_text() == "other" and list(path.parent.iterdir()) == [path]


def killed(path) -> None:
    """A process that is killed while it writes."""
    child = os.fork()
    if not child:
        with replacing(path) as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_what_a_killed_writer_leaves_is_removed_by_the_next(path):
    write_text(path, "before")
    mine = path.with_name(f"{path.name}.backup.tmp")
    mine.touch()
    for _ in range(2):
        killed(path)
        assert path.read_text() == "before" and len(list(path.parent.iterdir())) == 3
    write_text(path, "after")
    assert path.read_text() == "after" and set(path.parent.iterdir()) == {path, mine}


def test_an_error_leaves_what_was_there(path):
    write_text(path, "before")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half of it\ud800")
    assert path.read_text() == "before" and list(path.parent.iterdir()) == [path]


def test_a_file_system_without_locks(path, monkeypatch):
    def unsupported(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    test_writers_at_the_same_time_do_not_meet(path)


def test_a_writer_whose_file_is_taken_for_one_that_was_left_behind_takes_another(path, monkeypatch):
    """In the moment before it is locked."""
    removed = []

    def flock(stream, operation):
        if not removed:
            os.unlink(stream.name)
            removed.append(stream.name)

    monkeypatch.setattr(fcntl, "flock", flock)
    write_text(path, "text")
    assert removed and path.read_text() == "text" and list(path.parent.iterdir()) == [path]


def test_others_may_read_it(path):
    mask = os.umask(0o022)
    try:
        write_text(path, "text")
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_folder_is_for_one_process_at_a_time(tmp_path):
    folder = tmp_path / "new" / "results"
    with alone(folder):
        other = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
