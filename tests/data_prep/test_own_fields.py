"""``python -m data_prep fields``: functions of the user's own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fairseq")

from fairseq_sg.tasks.sg_operator import SGOperatorTask, SGOperatorTaskConfig
from helpers.printed_commands import train

SIZES = {"train": 8, "valid": 3, "test": 2, "test_12": 2}


def write_folder(folder: Path, *shape: int, target: tuple[int, ...] = ()) -> Path:
    """Random functions of a shape; ``test_12`` has 12 points a side."""
    folder.mkdir()
    random = np.random.default_rng(1)
    for subset, size in SIZES.items():
        for name, side in {"input": shape, "target": target or shape}.items():
            side = (12,) * len(side) if subset == "test_12" and not target else side
            np.save(folder / f"{subset}.{name}.npy", random.normal(size=(size, *side)))
    return folder


@pytest.mark.parametrize(
    ("shape", "options"),
    [((16,), {}), ((9, 9), {}), ((9, 9), {"target": (4, 4)}), ((8, 8), {"target": (15, 15)})],
    ids=["line", "square", "coarse", "fine"],
)
def test_the_printed_command_trains(shape, options, run, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "mine", *shape, **options)
    result = run("fields", "--raw-dir", folder, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    (line,) = [line for line in result.out.splitlines() if line.startswith("next: ")]
    losses, sizes = train([*shlex.split(line)[2:], "--encoder-layers", "1"], lr=1e-3)
    assert min(losses[1:]) < losses[0] and sizes == {"train": 8, "valid": 3}
    for subset in SIZES:
        for path in sorted(folder.glob(f"{subset}.*.npy")):
            np.testing.assert_array_equal(np.load(tmp_path / "out" / path.name), np.load(path).astype(np.float32))


@pytest.mark.parametrize("periodic", [False, True])
def test_coordinates(periodic, run, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "mine", 16)
    assert run("fields", *["--periodic"] * periodic, "--raw-dir", folder, "--out", tmp_path / "out").code == 0
    task = SGOperatorTask.setup_task(SGOperatorTaskConfig(data=str(tmp_path / "out")))
    task.load_dataset("test_12")
    axis = task.dataset("test_12").collater([task.dataset("test_12")[0]])["net_input"]["axis"]
    np.testing.assert_allclose(axis, np.arange(12) / (12 if periodic else 11))


def test_another_content_is_another_request(run, tmp_path: Path) -> None:
    folder, out = write_folder(tmp_path / "mine", 16), tmp_path / "out"
    assert run("fields", "--raw-dir", folder, "--out", out).code == 0
    assert run("fields", "--raw-dir", folder, "--out", out).code == 0
    assert set(json.loads((out / "dataset.json").read_text())["request"]["files"]) == {
        path.name for path in folder.iterdir()
    }
    np.save(folder / "valid.input.npy", np.ones((3, 16)))
    result = run("fields", "--raw-dir", folder, "--out", out)
    assert result.code == 1 and "--overwrite" in result.err


@pytest.mark.parametrize("subset", ["valid", "test"])
def test_evaluations_in_training_are_on_its_grid(subset, run, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "mine", 16)
    for name in ("input", "target"):
        np.save(folder / f"{subset}.{name}.npy", np.ones((SIZES[subset], 12)))
    result = run("fields", "--raw-dir", folder, "--out", tmp_path / "out")
    assert result.code == 1 and f"{subset}.input.npy: has another grid than train: only further tests" in result.err


def test_periodic_fields_have_one_grid(run, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "mine", 9, 9, target=(4, 4))
    result = run("fields", "--periodic", "--raw-dir", folder, "--out", tmp_path / "out")
    assert result.code == 1 and "has 4 points a side, and the input 9: only on a square without a" in result.err


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def with_shape(shape: str) -> Callable[[Path], object]:
    """Writes a file with this shape in its header, and 80 bytes of numbers."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return lambda path: path.write_bytes(b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header + bytes(80))


def test_file_beyond_the_memory(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: Path, allow_pickle: bool) -> None:
        raise MemoryError("no 7 TiB")

    folder = write_folder(tmp_path / "mine", 16)
    monkeypatch.setattr(np, "load", load)
    message = "does not fit into memory, or is damaged (no 7 TiB): give fewer functions"
    result = run("fields", "--raw-dir", folder, "--out", tmp_path / "out")
    assert result == (1, "", f"error: {folder / 'train.input.npy'}: {message}\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "has no valid.target.npy: every subset needs an input and a target"),
        (truncated, "is no complete .npy file of numbers"),
        (with_shape("(1" + 30 * "0" + ",)"), "valid.target.npy: is no complete .npy file of numbers"),
        (with_shape("(True,)"), "valid.target.npy: is no complete .npy file of numbers"),
        (with_shape("(3, 16"), "valid.target.npy: is no complete .npy file of numbers"),
        (lambda path: np.save(path, np.array(["a"] * 3)), "has no real numbers: write an array of floats"),
        (lambda path: np.save(path, np.full((3, 16), np.nan)), "has values that are no finite float32 numbers"),
        (lambda path: np.save(path, np.ones((3, 8))), "valid.target.npy: has another grid than train"),
        (
            lambda path: np.save(path, np.ones((3, 16, 8))),
            "has the shape (3, 16, 8) instead of (functions, points), with",
        ),
        (lambda path: np.save(path, np.ones(3)), "has the shape (3,) instead of (functions, points), with"),
        (lambda path: np.save(path, 5.0), "has the shape () instead of (functions, points), with"),
        (lambda path: np.save(path, np.ones((2, 16))), "subset valid needs arrays of one length above 0"),
        (
            lambda path: np.save(path, np.zeros((3, 16))),
            "target 0 of the subset valid is 0 everywhere, and has no relative error",
        ),
        (
            lambda path: np.save(path, np.full((3, 16), 1e-300)),
            "valid.target.npy: function 0 becomes 0 everywhere when it is rounded to float32: scale the targets up",
        ),
    ],
    ids="missing truncated huge boolean open text nan points square line number rows zero tiny".split(),
)
def test_files_that_do_not_fit(damage, message, run, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "mine", 16)
    damage(folder / "valid.target.npy")
    result = run("fields", "--raw-dir", folder, "--out", tmp_path / "out")
    assert result.code == 1 and message in result.err and result.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: np.save(folder / "test.input.npy", np.load(folder / "train.input.npy")[[5, 2]]),
            "test.input.npy: function 0 is also one of train",
        ),
        (
            lambda folder: np.save(folder / "test.input.npy", np.load(folder / "valid.input.npy")),
            "test.input.npy: function 0 is also one of valid",
        ),
        (
            lambda folder: (folder / "test_12.input.npy").unlink(),
            "has no test_12.input.npy: every subset needs an input",
        ),
        (lambda folder: (folder / "train.input.npy").write_bytes(b"PK\x03\x04"), "is no complete .npy file of numbers"),
    ],
    ids="leak of-valid lone-target archive".split(),
)
def test_folders_that_do_not_fit(damage, message, run, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "mine", 16)
    damage(folder)
    result = run("fields", "--raw-dir", folder, "--out", tmp_path / "out")
    assert result.code == 1 and message in result.err and result.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
