"""A prepared folder is complete or absent: existing folders, interruptions, and parallel runs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import folder
from data_prep.dataset import DataError
from data_prep.folder import lock_file, publish, verify
from helpers.data_files import contents, manifest

SMALL = ("first", *"--train-lengths 4 --test-lengths 8 --train 100 --test 10 --raw-only".split())
LARGE = ("scan", "--split", "length", "--raw-only")  # of which a file has more than 100,000 bytes


def test_second_run_finds_it_prepared(run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*SMALL, "--out", out).code == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert run(*SMALL, "--out", out) == (0, f"already prepared: {out}\n", "")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_empty_folder_is_filled(run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run(*SMALL, "--out", tmp_path / "out").code == 0


def test_link_to_a_folder_stays_a_link(run, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere" / "data")
    assert run(*SMALL, "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out").is_symlink() and (tmp_path / "elsewhere" / "data" / "dataset.json").is_file()


def other_request(out: Path) -> None:
    found = manifest(out)
    found["request"]["test"] = 11
    (out / "dataset.json").write_text(json.dumps(found), "utf-8")


def other_format(out: Path) -> None:
    (out / "dataset.json").write_text(json.dumps(manifest(out) | {"format": 0}), "utf-8")


def changed_file(out: Path) -> None:
    with (out / "raw" / "gen.tgt").open("ab") as stream:
        stream.write(b"I_JUMP\n")


def missing_file(out: Path) -> None:
    (out / "raw" / "gen.tgt").unlink()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (other_request, "test is 11 there and 10 here"),
        (other_format, "format is 0 there and 2 here"),
        (missing_file, "raw/gen.tgt is missing"),
    ],
    ids=["other-request", "other-format", "missing-file"],
)
def test_overwrite_is_offered_and_replaces(spoil, problem: str, run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*SMALL, "--out", out).code == 0
    right = contents(out)
    spoil(out)
    spoilt = contents(out)
    fix = "choose another --out, or replace it by --overwrite"
    assert run(*SMALL, "--out", out) == (1, "", f"error: {out}: exists, but {problem}: {fix}\n")
    assert contents(out) == spoilt
    assert run(*SMALL, "--out", out, "--overwrite").code == 0
    assert contents(out) == right and list(tmp_path.iterdir()) == [out]


def test_a_changed_file_is_never_deleted(run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*SMALL, "--out", out).code == 0
    changed_file(out)
    before = contents(out)
    problem = "raw/gen.tgt has changed since its preparation"
    fix = "choose another --out, or move the folder away"
    assert run(*SMALL, "--out", out) == (1, "", f"error: {out}: exists, but {problem}: {fix}\n")
    result = run(*SMALL, "--out", out, "--overwrite")
    message = "--overwrite would delete raw/gen.tgt, which has changed since its preparation: move it away, or delete"
    assert result == (1, "", f"error: {out}: {message} the folder yourself\n")
    assert contents(out) == before and list(tmp_path.iterdir()) == [out]
    (out / "raw" / "gen.tgt").unlink()  # moved away
    assert run(*SMALL, "--out", out, "--overwrite").code == 0


def not_ours(out: Path) -> None:
    (out / "dataset.json").write_text('{"name": "something else"}', "utf-8")


def not_json(out: Path) -> None:
    (out / "dataset.json").write_bytes(b"\xff{")


def no_files(out: Path) -> None:
    (out / "dataset.json").write_text(json.dumps(manifest(out) | {"files": {}}), "utf-8")


@given(
    st.binary(max_size=40)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda parts: (
            st.lists(parts, max_size=3)
            | st.dictionaries(st.sampled_from(["format", "request", "files"]) | st.text(max_size=3), parts, max_size=4)
        ),
    ).map(lambda found: json.dumps(found).encode())
)
def test_any_dataset_json_is_one_of_ours_or_refused(tmp_path_factory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("folder")
    (folder / "dataset.json").write_bytes(data)
    with pytest.raises(DataError, match="not a prepared dataset|is missing"):
        verify(folder)


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["plain", "overwrite"])
@pytest.mark.parametrize(
    "spoil",
    [not_ours, not_json, no_files, lambda out: (out / "dataset.json").unlink()],
    ids=["other-json", "no-json", "no-files", "absent"],
)
def test_a_folder_that_is_not_ours_is_never_touched(spoil, overwrite: list[str], run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*SMALL, "--out", out).code == 0
    spoil(out)
    before = contents(out)
    result = run(*SMALL, "--out", out, *overwrite)
    assert (result.code, result.out) == (1, "") and result.err.startswith(f"error: {out}: not a prepared dataset")
    assert contents(out) == before and list(tmp_path.iterdir()) == [out]


def no_permission(path: Path) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_a_manifest_that_cannot_be_used_names_the_cause(run, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "out"
    assert run("verify", out).err.startswith(f"error: {out}: not a prepared dataset (there is no such folder)")
    assert run(*SMALL, "--out", out).code == 0
    manifest = out / "dataset.json"
    whole = manifest.read_text("utf-8")
    manifest.write_text(whole[:100], "utf-8")
    assert "(dataset.json is cut off or was changed: " in run("verify", out).err
    manifest.write_text("{}", "utf-8")
    assert "(no dataset.json of ours)" in run("verify", out).err
    monkeypatch.setattr(Path, "read_text", lambda path, **_: no_permission(path))
    assert "(dataset.json cannot be read: Permission denied)" in run("verify", out).err


def test_workspaces_of_a_folder_with_a_longer_name_are_left_alone(run, tmp_path: Path) -> None:
    room = tmp_path / ".out.data_prep-b.data_prep-12345678"
    room.mkdir()
    (room / "lock").write_bytes(b"")
    assert run(*SMALL, "--out", tmp_path / "out").code == 0 and (room / "lock").exists()


def test_workspaces_of_others_are_left_alone(run, tmp_path: Path, monkeypatch) -> None:
    """Another user's folder has a lock that cannot be opened."""
    out, room = tmp_path / "out", tmp_path / ".out.data_prep-somebody"
    assert run(*SMALL, "--out", out).code == 0
    room.mkdir()
    (room / "lock").write_bytes(b"")
    opened = Path.open

    def refuse(path, *arguments, **options):
        return no_permission(path) if path == room / "lock" else opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert run(*SMALL, "--out", out).out == f"already prepared: {out}\n"
    assert run(*SMALL, "--out", out, "--overwrite").code == 0 and (room / "lock").exists()


def test_overwrite_does_not_delete_what_the_user_put_there(run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*SMALL, "--out", out).code == 0
    (out / "checkpoints").mkdir()
    (out / "checkpoints" / "best.pt").write_bytes(b"precious")
    result = run(*SMALL, "--out", out, "--overwrite")
    assert (
        result.code == 1
        and "--overwrite would delete checkpoints/best.pt, which is not part of this dataset" in result.err
    )
    assert (out / "checkpoints" / "best.pt").read_bytes() == b"precious"


def test_out_is_a_file(run, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious", "utf-8")
    result = run(*SMALL, "--out", tmp_path / "out", "--overwrite")
    assert result.code == 1 and "not a prepared dataset" in result.err
    assert (tmp_path / "out").read_text("utf-8") == "precious"


def test_out_below_a_file(run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious", "utf-8")
    result = run(*SMALL, "--out", tmp_path / "file" / "out")
    message = f"error: {tmp_path / 'file' / 'out'}: cannot be made (a file is in the way): choose another --out\n"
    assert result == (1, "", message)


@pytest.mark.parametrize("out", [".", ".."])
def test_current_folder_is_refused_before_the_work(out: str, run, tmp_path: Path, monkeypatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    result = run(*SMALL, "--out", out)
    if out == ".":
        message = f"error: {here}: is the current folder, or a folder above it: name a new folder by --out\n"
        assert result == (1, "", message)
    else:
        assert result.code == 1 and "not a prepared dataset" in result.err
    assert list(tmp_path.rglob("*")) == [here]


@pytest.mark.parametrize("inside", ["", "raw"])
def test_current_folder_is_not_replaced(inside: str, run, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "out"
    assert run(*SMALL, "--out", out).code == 0
    before = contents(out)
    monkeypatch.chdir(out / inside)
    assert run(*SMALL, "--out", out).out == f"already prepared: {out}\n"
    result = run(*SMALL, "--out", out, "--overwrite")
    assert result.code == 1 and "is the current folder, or a folder above it" in result.err
    assert contents(out) == before and list(tmp_path.iterdir()) == [out]


def test_current_folder_that_was_removed(run, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run(*SMALL, "--out", tmp_path / "out").code == 0
    message = "error: out: the current folder is gone: give --out as an absolute path\n"
    assert run(*SMALL, "--out", "out") == (1, "", message)
    assert run("reorder", tmp_path / "out", "--out", "out") == (1, "", message)


def test_a_folder_like_an_option_is_printed_as_a_folder(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = "--points 16 --grid 16 --train 2 --valid 1 --test 1".split()
    result = run("burgers", *sizes, "--out=-y")
    assert result.code == 0 and "\nnext: fairseq-train ./-y --user-dir" in result.out, result.err


def test_mount_point_is_refused_before_the_work(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == out)
    message = f"error: {out}: is a mount point, which cannot be replaced: choose a folder inside it by --out\n"
    assert run(*SMALL, "--out", out) == (1, "", message)
    assert list(tmp_path.rglob("*")) == [out]
    assert run(*SMALL, "--out", out / "inside").code == 0


def test_folder_that_cannot_be_moved(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*paths: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(folder.os, "rename", busy)
    message = f"error: {tmp_path / 'out'}: cannot be moved there (Device or resource busy): choose another --out\n"
    assert run(*SMALL, "--out", tmp_path / "out") == (1, "", message)
    assert list(tmp_path.iterdir()) == []


def test_out_that_cannot_be_made_is_refused_before_the_work(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.listops.sample_sets", None)
    result = run("listops", "--raw-only", "--out", "/proc/out")
    assert result.code == 1 and result.err.endswith(": choose another --out\n") and "/proc/out" in result.err


def test_verify(run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*SMALL, "--out", out).code == 0
    assert run("verify", out) == (0, f"{out}: 9 files are unchanged\n", "")
    changed_file(out)
    assert run("verify", out) == (1, "", f"error: {out}: raw/gen.tgt has changed since its preparation\n")
    assert run("verify", tmp_path / "nowhere").err.startswith(f"error: {tmp_path / 'nowhere'}: not a prepared dataset")


PAUSING = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background inherits that it is ignored
import data_prep.corpus, data_prep.folder
original, calls = data_prep.{where}, []
def pause(*arguments, **options):
    calls.append(arguments)
    if len(calls) != {call}:
        return original(*arguments, **options)
    print("paused", flush=True)
    time.sleep(600)
data_prep.{where} = pause
import runpy
runpy.run_module("data_prep", run_name="__main__", alter_sys=True)
"""


def start_and_pause(where: str, arguments: list[str], call: int = 1) -> subprocess.Popen[str]:
    """A run that pauses at the first, or another, call of ``where``."""
    command = [sys.executable, "-c", PAUSING.format(where=where, call=call), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "paused\n"
    return process


@pytest.mark.parametrize("where", ["corpus.write_lines", "folder.manifest", "folder.publish"])
def test_killed_run_leaves_nothing_that_counts_and_the_next_cleans_up(where: str, run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with start_and_pause(where, [*SMALL, "--out", str(out)]) as process:
        process.send_signal(signal.SIGKILL)
    assert not out.exists() and len(list(tmp_path.iterdir())) == 1
    assert run(*SMALL, "--out", out).code == 0
    assert list(tmp_path.iterdir()) == [out]
    assert run("verify", out).code == 0


def test_killed_overwrite_keeps_what_was_there(run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*SMALL, "--out", out).code == 0
    right = contents(out)
    with start_and_pause("folder.publish", [*SMALL, "--overwrite", "--out", str(out)]) as process:
        process.send_signal(signal.SIGKILL)
    assert contents(out) == right
    assert run(*SMALL, "--out", out).out == f"already prepared: {out}\n"
    assert list(tmp_path.iterdir()) == [out]


def test_run_killed_between_the_two_moves_of_an_overwrite(run, tmp_path: Path) -> None:
    """The old folder has been moved away, the new one is not yet there: the next run moves it back and cleans up."""
    out = tmp_path / "out"
    assert run(*SMALL, "--out", out).code == 0
    right = contents(out)
    with start_and_pause("folder.os.rename", [*SMALL, "--overwrite", "--out", str(out)], call=2) as process:
        process.send_signal(signal.SIGKILL)
    assert not out.exists()
    assert run(*SMALL, "--out", out).out == f"already prepared: {out}\n"
    assert contents(out) == right and list(tmp_path.iterdir()) == [out]


def test_run_killed_after_an_overwrite_leaves_nothing_that_comes_back(run, tmp_path: Path) -> None:
    """Not even where the user has removed the new folder since then."""
    out = tmp_path / "out"
    assert run(*SMALL, "--out", out).code == 0
    with start_and_pause("folder.discard", [*SMALL, "--overwrite", "--out", str(out)]) as process:
        process.send_signal(signal.SIGKILL)
    assert out.exists()
    shutil.rmtree(out)
    result = run(*SMALL, "--out", out)
    assert result.code == 0 and "already prepared" not in result.out and list(tmp_path.iterdir()) == [out]


def test_overwrite_of_a_folder_that_goes_in_the_meantime(run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*SMALL, "--out", out).code == 0
    write = folder.write

    def writing(*arguments):
        shutil.rmtree(out)
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(folder, "write", writing)
        assert run(*SMALL, "--out", out, "--overwrite").code == 0
    assert list(tmp_path.iterdir()) == [out] and run("verify", out).code == 0


def test_run_interrupted_between_the_two_moves_of_an_overwrite(run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*SMALL, "--out", out).code == 0
    right = contents(out)
    with start_and_pause("folder.os.rename", [*SMALL, "--overwrite", "--out", str(out)], call=2) as process:
        process.send_signal(signal.SIGINT)
        process.wait()
    assert contents(out) == right and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("name", ["notes.txt", "raw/gen.tgt"])
def test_overwrite_does_not_delete_what_came_in_the_meantime(name: str, run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*SMALL, "--out", out).code == 0
    write = folder.write

    def writing(*arguments):
        (out / name).write_text("precious", "utf-8")
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(folder, "write", writing)
        result = run(*SMALL, "--out", out, "--overwrite")
    assert result.code == 1 and f"--overwrite would delete {name}" in result.err
    assert (out / name).read_text("utf-8") == "precious" and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_interrupted_run_cleans_up_after_itself(sent: signal.Signals, code: int, tmp_path: Path) -> None:
    with start_and_pause("folder.publish", [*SMALL, "--out", str(tmp_path / "not" / "there" / "out")]) as process:
        process.send_signal(sent)
    assert process.returncode == code and list(tmp_path.iterdir()) == []


def test_run_that_is_interrupted_after_the_folder_is_made(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(lines: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder, "say", interrupt)
    assert run(*SMALL, "--out", tmp_path / "out") == (130, "", "error: interrupted\n")
    assert run("verify", tmp_path / "out").code == 0


def test_folders_above_are_kept_where_something_is_in_them(run, tmp_path: Path) -> None:
    assert run(*SMALL, "--out", tmp_path / "new" / "one").code == 0
    refused = run("scan", "--split", "simple", "--raw-dir", tmp_path, "--out", tmp_path / "other" / "one")
    assert refused.code == 1 and list(tmp_path.iterdir()) == [tmp_path / "new"]


def test_closed_standard_output(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data_prep", *SMALL, "--out", str(tmp_path / "out")]
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "out" / "dataset.json").is_file()


def test_output_that_is_not_utf_8() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "data_prep", "list"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "\\xe1" in done.stdout


def test_a_run_beside_another_leaves_its_work_alone(run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with start_and_pause("folder.publish", [*SMALL, "--out", str(out)]) as process:
        (other,) = tmp_path.iterdir()
        before = contents(other)
        assert run(*SMALL, "--out", out).code == 0
        assert contents(other) == before
        process.kill()


@pytest.mark.parametrize("same", [True, False])
def test_another_run_that_ends_earlier(same: bool, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, publish = tmp_path / "out", folder.publish

    def publish_second(*arguments: Path, **options: bool) -> bool:
        monkeypatch.setattr(folder, "publish", publish)
        other = SMALL if same else (*SMALL, "--seed", 2)
        assert run(*other, "--out", out).code == 0
        return publish(*arguments, **options)

    monkeypatch.setattr(folder, "publish", publish_second)
    result = run(*SMALL, "--out", out)
    if same:
        assert result == (0, f"already prepared: {out}\n", "")
    else:
        assert result.code == 1
        assert "cannot be moved there (Directory not empty): is another run making it?" in result.err
    assert run("verify", out).code == 0 and list(tmp_path.iterdir()) == [out]


def test_workspace_that_another_run_removes_once_it_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def unlink_and_discard(path: Path) -> None:
        unlink(path)
        folder.discard_dead(tmp_path / "out")

    monkeypatch.setattr(Path, "unlink", unlink_and_discard)
    with folder.workspace(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_publish_over_another_folder(tmp_path: Path) -> None:
    for name in ("made", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name, "utf-8")
    with pytest.raises(DataError, match="cannot be moved there \\(Directory not empty\\): is another run making it?"):
        publish(tmp_path / "made", tmp_path / "out", tmp_path)
    assert (tmp_path / "out" / "file").read_text("utf-8") == "out"


def test_failed_replacement_puts_the_old_folder_back(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert run(*SMALL, "--out", out).code == 0
    right, rename = contents(out), os.rename

    def refuse_made(source: Path, target: Path) -> None:
        if source.name == "made":
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr("os.rename", refuse_made)
    result = run(*SMALL, "--overwrite", "--out", out)
    assert result.err == f"error: {out}: cannot be moved there (Permission denied): choose another --out\n"
    assert contents(out) == right and list(tmp_path.iterdir()) == [out]


def test_lock_of_a_file_that_is_gone_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another_process(stream: object, operation: int) -> None:
        os.rename(tmp_path / "lock", tmp_path / "elsewhere")
        (tmp_path / "lock").touch()

    monkeypatch.setattr("fcntl.flock", another_process)
    assert lock_file(tmp_path / "lock") is None


def test_lock_that_another_has(tmp_path: Path) -> None:
    with lock_file(tmp_path / "lock"):
        assert lock_file(tmp_path / "lock") is None
    with lock_file(tmp_path / "lock") as stream:
        assert stream is not None


def test_lock_of_no_file(tmp_path: Path) -> None:
    assert lock_file(tmp_path / "lock", create=False) is None
    assert list(tmp_path.iterdir()) == []


def test_file_system_without_locks(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    result = run(*SMALL, "--out", tmp_path / "out")
    assert (
        result.code == 1 and "cannot be locked (No locks available): name a folder on another file system" in result.err
    )
    assert list(tmp_path.iterdir()) == []


def test_disk_error_leaves_nothing(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise OSError(5, "Input/output error", "raw/gen.src")

    monkeypatch.setattr("data_prep.folder.manifest", broken)
    assert run(*SMALL, "--out", tmp_path / "out") == (1, "", "error: raw/gen.src: Input/output error\n")
    assert list(tmp_path.iterdir()) == []


ARRAYS = "in_context --dims 8 --examples 8 --size 100 --shifts none".split()  # of which one has 28,928 bytes


@pytest.mark.parametrize(("command", "size"), [(LARGE, 1_000), (LARGE, 100_000), (ARRAYS, 100), (ARRAYS, 10_000)])
def test_full_disk(command: Sequence[str], size: int, run, largest_file, tmp_path: Path) -> None:
    """The error of the system, by a limit on file sizes; it names no file."""
    out = tmp_path / "out"
    with largest_file(size):
        result = run(*command, "--out", out)
    message = f"error: {out}: cannot be written (File too large): make room, or choose another --out\n"
    assert result == (1, "", message) and list(tmp_path.iterdir()) == []
    assert run(*command, "--out", out).code == 0


def test_full_disk_keeps_what_was_there(run, largest_file, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*LARGE, "--out", out).code == 0
    right = contents(out)
    with largest_file(100_000):
        assert run(*LARGE, "--overwrite", "--out", out).code == 1
    assert contents(out) == right and list(tmp_path.iterdir()) == [out]
