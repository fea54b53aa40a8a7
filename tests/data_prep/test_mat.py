"""``.mat`` files of both kinds, and the published files of Burgers' and Darcy's equation, invented and small."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.random import RandomState

from data_prep import burgers, darcy
from data_prep.__main__ import main
from data_prep.burgers import GAMMA, SCALE, TAU
from data_prep.dataset import DataError
from data_prep.fields import GENERATOR, VERSION, FieldSources, periodic_field, spectral_derivative
from data_prep.mat import as_data_errors, read_mat

BURGERS, DARCY = "burgers_data_R10.mat", [f"piececonst_r421_N1024_smooth{number}.mat" for number in (1, 2)]


def write_older(path: Path, arrays: Mapping[str, np.ndarray], **options) -> None:
    scipy_io = pytest.importorskip("scipy.io", reason="scipy writes the .mat files of this test")
    scipy_io.savemat(path, dict(arrays), **options)


def write_hdf5(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """As MATLAB does for -v7.3: 512 bytes of header, and axes in the opposite order."""
    h5py = pytest.importorskip("h5py", reason="h5py writes the HDF5 files of this test")
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, array in arrays.items():
            file[name] = np.asarray(array).T
        file.create_group("#refs#")
    with path.open("r+b") as stream:
        stream.write(b"MATLAB 7.3 MAT-file".ljust(512))


@pytest.mark.parametrize("write", [write_older, write_hdf5])
class TestBothKinds:
    def test_axes_are_those_of_matlab(self, write, tmp_path):
        a = RandomState(1).standard_normal((2, 3, 4))
        write(tmp_path / "x.mat", {"other": np.zeros((1, 1)), "a": a, "small": a[0].astype(np.float32)})
        found = read_mat(tmp_path / "x.mat", "a", (2, 3, 4))
        np.testing.assert_array_equal(found, a)
        assert found.dtype == np.float64 and found.flags.c_contiguous
        assert read_mat(tmp_path / "x.mat", "small", (3, 4)).dtype == np.float64

    def test_refusals(self, write, tmp_path):
        path = tmp_path / "x.mat"
        write(path, {"a": np.ones((2, 3)), "b": np.full((2, 3), np.nan), "c": np.ones((2, 3)) * 1j})
        for name, message in {
            "u": "x.mat: has no array u: it has a, b, c",
            "b": "b has values that are no finite real numbers",
            "c": "c has values that are no finite real numbers",
        }.items():
            with pytest.raises(DataError, match=message):
                read_mat(path, name, (2, 3))
        with pytest.raises(DataError, match="a is 2 × 3 instead of the published 3 × 2"):
            read_mat(path, "a", (3, 2))
        path.write_bytes(path.read_bytes()[: 200 if write is write_older else 600])
        with pytest.raises(DataError, match="x.mat: cannot be read as a .mat file"):
            read_mat(path, "a", (2, 3))

    def test_missing_packages(self, write, tmp_path, monkeypatch):
        write(tmp_path / "x.mat", {"a": np.ones((2, 3))})
        package, module = ("scipy", "scipy.io") if write is write_older else ("h5py", "h5py")
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(DataError, match=rf"needs {package} \(.*\): pip install {package}$"):
            read_mat(tmp_path / "x.mat", "a", (2, 3))


def test_a_sparse_array(tmp_path):
    sparse = pytest.importorskip("scipy.sparse", reason="scipy makes the array of this test")
    write_older(tmp_path / "x.mat", {"a": sparse.csc_matrix(np.eye(2, 3))})
    with pytest.raises(DataError, match=r"x.mat: a is no full array, but csc_\w+: save it as full\(…\) in MATLAB"):
        read_mat(tmp_path / "x.mat", "a", (2, 3))


@pytest.mark.parametrize("start", [b"\x89HDF\r\n\x1a\n", b"MATLAB 7.3 MAT-file".ljust(512) + b"\x89HDF\r\n\x1a\n"])
def test_hdf5_is_recognized_without_h5py(start, tmp_path, monkeypatch):
    """Also where no file of this kind can be made for a test."""
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "x.mat").write_bytes(start)
    with pytest.raises(DataError, match=r"x.mat: a .mat file of version 7.3 needs h5py \(.*\): pip install h5py"):
        read_mat(tmp_path / "x.mat", "a", (2, 3))


def test_a_file_that_is_none(tmp_path):
    pytest.importorskip("scipy", reason="scipy reads the file of this test")
    for content in (b"", b"not MATLAB " * 100):
        (tmp_path / "x.mat").write_bytes(content)
        with pytest.raises(DataError, match="x.mat: cannot be read as a .mat file"):
            read_mat(tmp_path / "x.mat", "a", (2, 3))


def test_a_file_larger_than_the_memory(tmp_path):
    message = r"x.mat: does not fit into memory \(no 3 TiB\)"
    with pytest.raises(DataError, match=message), as_data_errors(tmp_path / "x.mat"):
        raise MemoryError("no 3 TiB")


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    """The arrays and the hash come from two passes."""
    path = tmp_path / "x.mat"
    path.write_bytes(b"before")
    monkeypatch.setattr("data_prep.fields.read_mat", lambda path, *_: path.write_bytes(b"after"))
    sources = FieldSources(tmp_path)
    sources.read("x.mat", ("a",), (1,))
    with pytest.raises(DataError, match="x.mat: has changed while it was read"):
        sources.check_unchanged()


# The published files.


def waves() -> dict[str, np.ndarray]:
    a = np.stack([periodic_field(RandomState(i), 128, SCALE, TAU, GAMMA) for i in range(200)])
    return {"a": a, "u": np.stack([burgers.solve(wave, 1, 0.1, 2 * np.pi) for wave in a])}


@pytest.fixture
def burgers_folder(tmp_path, monkeypatch) -> Path:
    """200 functions on 128 points. Another array of the file must not be read for a."""
    monkeypatch.setattr(burgers, "FUNCTIONS", 200)
    monkeypatch.setattr(burgers, "POINTS", 128)
    (tmp_path / "raw").mkdir()
    write_older(tmp_path / "raw" / BURGERS, {"a_smooth": np.zeros((200, 128)), **waves()})
    return tmp_path / "raw"


def run(name: str, raw: Path, options: str, out: Path) -> int:
    try:
        return main([name, "--raw-dir", str(raw), *options.split(), "--out", str(out)])
    except SystemExit as error:
        return error.code


WAVES = "--train 130 --valid 30 --test 20 --grid 64 --test-grids 32,128"


def test_burgers(burgers_folder, tmp_path):
    out = tmp_path / "out"
    assert run("burgers", burgers_folder, WAVES, out) == 0
    given, rows = waves(), {"train": slice(0, 130), "valid": slice(150, 180), "test": slice(180, 200)}
    rows |= {"test_32": rows["test"], "test_128": rows["test"]}
    expected = {"input": given["a"], "target": given["u"], "gradient": spectral_derivative(given["u"])}
    for subset, chosen in rows.items():
        step = {"test_32": 4, "test_128": 1}.get(subset, 2)
        for name, values in expected.items():
            found = np.load(out / f"{subset}.{name}.npy")
            np.testing.assert_array_equal(found, values[chosen, ::step].astype(np.float32))
    manifest = json.loads((out / "dataset.json").read_text())
    data = (burgers_folder / BURGERS).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    files = [{"name": BURGERS, "bytes": len(data), "sha256": digest}]
    assert manifest["origin"] == {"generator": GENERATOR, "version": VERSION, "files": files}
    request = manifest["request"]
    assert request["source_sha256"] == [digest] and request["points"] == 128
    assert not {"seed", "viscosity", "time", "period"} & set(request)
    assert manifest["membership"].startswith("train are the first 130 functions of the file, test the last 20, valid")


def test_a_prepared_folder_belongs_to_its_file(burgers_folder, tmp_path, capsys):
    assert run("burgers", burgers_folder, WAVES, tmp_path / "out") == 0
    assert run("burgers", burgers_folder, WAVES, tmp_path / "out") == 0
    assert "already prepared" in capsys.readouterr().out
    write_older(burgers_folder / BURGERS, waves(), do_compression=True)
    assert run("burgers", burgers_folder, WAVES, tmp_path / "out") == 1
    assert "source_sha256 is" in capsys.readouterr().err
    drawn = WAVES.split() + ["--points", "128", "--out", str(tmp_path / "out")]
    assert main(["burgers", *drawn]) == 1


def with_period_1(arrays: dict[str, np.ndarray]) -> None:
    arrays["u"] = np.stack([burgers.solve(wave, 1, 0.1, 1.0) for wave in arrays["a"]])


def with_another_sign(arrays: dict[str, np.ndarray]) -> None:
    """Sizes are right, the error of the input is not."""
    arrays["u"] *= -1


def with_zero(arrays: dict[str, np.ndarray]) -> None:
    arrays["u"][3] = 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_period_1, r"the mean of ‖u‖/‖a‖ is 0.0\d\d, expected 0.75 to 0.88"),
        (with_another_sign, r"the mean of ‖a − u‖/‖u‖ is 2.\d\d\d, expected 0.52 to 0.56"),
        (with_zero, "a or u has a function that is 0 everywhere"),
    ],
)
def test_other_waves_are_refused(change, message, burgers_folder, tmp_path, capsys):
    arrays = waves()
    change(arrays)
    write_older(burgers_folder / BURGERS, arrays)
    assert run("burgers", burgers_folder, WAVES, tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert BURGERS in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seed 1", "--seed is for functions that are drawn: leave it out, or --raw-dir"),
        ("--period 2pi", "--period is for functions that are drawn"),
        ("--viscosity 0.1", "--viscosity is for functions that are drawn"),
        ("--time 1", "--time is for functions that are drawn"),
        ("--points 128", "--points is for functions that are drawn"),
        ("--grid 100", "--grid 100 is no stride of the published 128 points"),
        ("--grid 64 --test-grids 512", "--test-grids 512 is no stride of the published 128 points"),
        (
            "--grid 64 --test-grids none --train 101 --valid 50 --test 50",
            "--train 101 + --valid 50 + --test 50 are more than the 200 functions of the published file",
        ),
    ],
)
def test_refusals_of_burgers(options, message, burgers_folder, tmp_path, capsys):
    assert run("burgers", burgers_folder, options, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.fixture
def darcy_folder(tmp_path, monkeypatch) -> Path:
    """Two files of 12 functions on 13 × 13 points, whose axes differ."""
    monkeypatch.setattr(darcy, "FUNCTIONS", 12)
    monkeypatch.setattr(darcy, "POINTS", 13)
    (tmp_path / "raw").mkdir()
    for number, name in enumerate(DARCY):
        write_older(tmp_path / "raw" / name, media(number))
    return tmp_path / "raw"


@pytest.mark.parametrize(("name", "options"), [("burgers", WAVES), ("darcy", "--train 11 --valid 4 --test 5 --grid 7")])
def test_a_folder_of_published_files_can_be_trained_on(name, options, request, tmp_path):
    pytest.importorskip("fairseq", reason="the task of this test belongs to fairseq")
    from fairseq_sg.tasks.sg_operator import SGOperatorTask, SGOperatorTaskConfig

    assert run(name, request.getfixturevalue(f"{name}_folder"), options, tmp_path / "out") == 0
    task = SGOperatorTask.setup_task(SGOperatorTaskConfig(data=str(tmp_path / "out")))
    task.load_dataset("train")
    assert len(task.dataset("train")) == (130 if name == "burgers" else 11)


def media(number: int) -> dict[str, np.ndarray]:
    random = RandomState(number)
    return {"coeff": random.choice([3.0, 12.0], (12, 13, 13)), "sol": random.uniform(0.001, 0.01, (12, 13, 13))}


MEDIA = "--train 11 --valid 4 --test 5 --grid 7"


def test_darcy(darcy_folder, tmp_path):
    out = tmp_path / "out"
    assert run("darcy", darcy_folder, f"{MEDIA} --test-grids 13", out) == 0
    rows = {"train": (0, slice(0, 11)), "valid": (1, slice(3, 7)), "test": (1, slice(7, 12))}
    for subset, (number, chosen) in {**rows, "test_13": rows["test"]}.items():
        step = 1 if subset == "test_13" else 2
        a, u = (media(number)[name][chosen] for name in ("coeff", "sol"))
        gradient = np.stack(np.gradient(u, 1 / 12, axis=(1, 2), edge_order=2), axis=-1)
        for name, values in (("input", a), ("target", u), ("gradient", gradient)):
            found = np.load(out / f"{subset}.{name}.npy")
            np.testing.assert_array_equal(found, values[:, ::step, ::step].astype(np.float32))
    manifest = json.loads((out / "dataset.json").read_text())
    digests = [hashlib.sha256((darcy_folder / name).read_bytes()).hexdigest() for name in DARCY]
    assert manifest["request"]["source_sha256"] == digests
    assert [(file["name"], file["sha256"]) for file in manifest["origin"]["files"]] == list(zip(DARCY, digests))
    assert not {"seed", "high", "low", "faces"} & set(manifest["request"])
    assert manifest["rule"].startswith("coeff, from 3 to 12 over train, and sol of the published files, on 13 × 13")


def test_the_inverse_problem_takes_a_seed(darcy_folder, tmp_path):
    """That of the noise."""
    found = []
    for number, seed in enumerate(["", "--seed 1", "--seed 2"]):
        out = tmp_path / str(number)
        assert run("darcy", darcy_folder, f"{MEDIA} --inverse --noise 0.5 --coarse 3 {seed}", out) == 0
        found.append(np.load(out / "test.input.npy"))
        u = media(1)["sol"][7:, ::2, ::2]
        assert 0 < abs(found[-1] - u).max() < 10 * u.std()
        expected = darcy.block_means(media(1)["coeff"][7:, ::2, ::2], 3)
        np.testing.assert_array_equal(np.load(out / "test.target.npy"), expected.astype(np.float32))
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_the_inverse_problem_without_noise(darcy_folder, tmp_path):
    """The request has the default seed, as in older folders."""
    out = tmp_path / "out"
    assert run("darcy", darcy_folder, f"{MEDIA} --inverse --noise 0 --coarse 3", out) == 0
    np.testing.assert_array_equal(np.load(out / "test.input.npy"), media(1)["sol"][7:, ::2, ::2].astype(np.float32))
    assert json.loads((out / "dataset.json").read_text())["request"]["seed"] == 1


def test_a_medium_must_be_above_0(darcy_folder, tmp_path, capsys):
    arrays = media(1)
    arrays["coeff"][2, 3, 4] = 0
    write_older(darcy_folder / DARCY[1], arrays)
    assert run("darcy", darcy_folder, MEDIA, tmp_path / "out") == 1
    assert f"{DARCY[1]}: coeff has values that are not above 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seed 1", "--seed is for functions that are drawn: leave it out, or --raw-dir"),
        ("--high 12", "--high is for functions that are drawn"),
        ("--low 3", "--low is for functions that are drawn"),
        ("--faces arithmetic", "--faces is for functions that are drawn"),
        ("--inverse --coarse 3 --noise 0 --seed 2", "--seed has no effect: --noise 0 draws nothing"),
        ("--inverse --points 13", "--points is for functions that are drawn"),
        ("--grid 6", "--grid 6 is no stride of the published 13 points: the points, less one, of the grid must"),
        ("--grid 7 --train 13", "--train 13 are more than the 12 functions of the published file"),
        (
            "--grid 7 --train 12 --valid 7 --test 6",
            "--valid 7 + --test 6 are more than the 12 functions of the published file",
        ),
    ],
)
def test_refusals_of_darcy(options, message, darcy_folder, tmp_path, capsys):
    assert run("darcy", darcy_folder, options, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "file"), [("burgers", BURGERS), ("darcy", DARCY[0])])
def test_a_folder_without_the_files(name, file, tmp_path, capsys):
    assert run(name, tmp_path, "", tmp_path / "out") == 1
    assert f"{tmp_path}: has no {file}: name the folder of the published file" in capsys.readouterr().err
    assert run(name, tmp_path / "none", "", tmp_path / "out") == 1
    assert "--raw-dir is not a folder: nothing has this name; check it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
