"""In-context regression: functions, shifts and oracles against plain references; draws; files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import RandomState

from data_prep.in_context.functions import FUNCTIONS, Linear
from data_prep.in_context.oracles import ORACLES
from data_prep.in_context.prompts import Prompts
from data_prep.in_context.shifts import SHIFTS, orthonormal

SIZE = 3_000


def prompts(function: str = "linear", dims: int = 4, examples: int = 12, x_std: float = 2.0, **settings) -> Prompts:
    return Prompts(FUNCTIONS[function](dims, **settings), examples, x_std)


# Functions.


def reference(name: str, x: np.ndarray, random: RandomState) -> list[float]:
    """The values of a function of 5 variables, point by point, from the same draws."""
    if name == "relu_network":
        u, v = random.standard_normal((100, 5)), random.standard_normal(100)
        return [math.sqrt(2 / 100) * sum(v[j] * max(0.0, u[j] @ point) for j in range(100)) for point in x]
    if name == "decision_tree":
        tree, leaves = random.randint(5, size=15).tolist(), random.standard_normal(16)
        return [leaves[leaf_of(point, tree, 0) - 15] for point in x]
    w = random.standard_normal(5)
    if name == "sparse_linear":
        w = np.where(np.isin(np.arange(5), random.permutation(5)[:3]), w, 0.0)
    if name == "quadratic":
        return [sum(w[j] * point[j] ** 2 for j in range(5)) / 3**0.5 for point in x]
    noise = random.standard_normal(len(x)) if name == "noisy_linear" else np.zeros(len(x))
    return [w @ point + error for point, error in zip(x, noise, strict=True)]


def leaf_of(point: np.ndarray, tree: list[int], node: int) -> int:
    if node >= len(tree):
        return node
    return leaf_of(point, tree, 2 * node + (2 if point[tree[node]] > 0 else 1))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_the_equation(name):
    x = RandomState(3).standard_normal((9, 5))
    found = FUNCTIONS[name](5).values(x, RandomState(7))
    np.testing.assert_allclose(found, reference(name, x, RandomState(7)), rtol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("x_std", [1.0, 2.0])
def test_the_predictor_0_has_its_error(name, x_std):
    """Within four standard errors of the mean over prompts."""
    drawn = prompts(name, x_std=x_std)
    errors = (drawn.draw_many(1, "test", SIZE)[1].astype(float) ** 2).mean(1) / drawn.function.unit
    assert abs(errors.mean() - drawn.zero_error) < 4 * errors.std() / math.sqrt(SIZE)


def test_settings():
    assert FUNCTIONS["sparse_linear"](4, sparsity=1).unit == 1 and FUNCTIONS["sparse_linear"](2).unit == 2
    assert prompts("noisy_linear", noise_std=3.0).zero_error == 4 + 9 / 4
    leaves = FUNCTIONS["decision_tree"](4, tree_depth=1).values(RandomState(2).standard_normal((50, 4)), RandomState(1))
    assert len(set(leaves)) == 2


# Oracles.


def naive(name: str, x: np.ndarray, y: np.ndarray, x_std: float) -> float:
    """The prediction of one oracle at the last point."""
    if len(y) == 1:
        return 0.0
    if name == "least_squares":
        return np.linalg.lstsq(x[:-1], y[:-1], rcond=None)[0] @ x[-1]
    if name == "averaging":
        return np.mean([y[j] * x[j] for j in range(len(y) - 1)], axis=0) @ x[-1] / x_std**2
    if name == "gradient_step":
        rate = 1 / ((len(y) - 1 + x.shape[1] + 1) * x_std**2)
        return rate * sum(y[j] * (x[j] @ x[-1]) for j in range(len(y) - 1))
    distances = [float(((point - x[-1]) ** 2).sum()) for point in x[:-1]]
    return float(np.mean([y[j] for j in sorted(range(len(distances)), key=distances.__getitem__)[:3]]))


@pytest.mark.parametrize("name", ORACLES)
@given(dims=st.integers(1, 5), points=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_oracles_are_those_of_one_prefix(name, dims, points, seed):
    random = RandomState(seed)
    x, y = random.standard_normal((2, points, dims)), random.standard_normal((2, points))
    found = ORACLES[name](x, y, 1.5)
    for row in range(2):
        for point in range(points):
            expected = naive(name, x[row, : point + 1], y[row, : point + 1], 1.5)
            assert found[row, point] == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_errors_of_the_oracles_are_the_expected_ones():
    """n = 4, in units of the error of 0; within four standard errors."""
    drawn = prompts(examples=8)
    x, y = drawn.draw_many(1, "test", SIZE)
    errors = {name: (oracle(x, y, 2.0) - y) ** 2 / (4 * 4.0) for name, oracle in ORACLES.items()}
    seen = np.arange(9)
    expected = {
        "least_squares": np.maximum(0, 1 - seen / 4),
        "averaging": 5 / np.maximum(seen, 1),
        "gradient_step": 5 / (seen + 5),
    }
    for name, values in expected.items():
        standard = errors[name].std(0) / math.sqrt(SIZE)
        assert (abs(errors[name].mean(0) - values) < 4 * standard + 1e-6)[1:].all(), name
    assert errors["least_squares"][:, 4:].mean() < 1e-6
    assert errors["nearest_neighbors"].mean(0)[1:5] == pytest.approx([1.97, 1.55, 1.36, 1.07], abs=0.2)


def test_floor_of_the_loss():
    """The one of the article's prompts is 4 · (1 + ¾ + ½ + ¼) / 65; least squares reach it."""
    assert prompts(examples=64).floor == pytest.approx(10 / 65)
    x, y = prompts().draw_many(1, "test", SIZE)
    reached = ((ORACLES["least_squares"](x, y, 2.0) - y) ** 2).mean(1) / 4
    assert abs(reached.mean() - prompts().floor) < 4 * reached.std() / math.sqrt(SIZE)
    assert [prompts(name).floor for name in FUNCTIONS if name != "linear"] == [None] * 5


# Draws.


def test_a_prompt_depends_on_its_numbers_alone():
    drawn, other = prompts(), prompts()
    keys = [(1, "train", 1, 0), (1, "train", 1, 1), (1, "train", 2, 0), (2, "train", 1, 0), (1, "valid", 1, 0)]
    found = [drawn.draw(*key) for key in keys]
    assert len({x.tobytes() for x, _ in found}) == len({y.tobytes() for _, y in found}) == len(keys)
    for (x, y), key in reversed(list(zip(found, keys, strict=True))):
        again = other.draw(*key)
        assert (x == again[0]).all() and (y == again[1]).all() and x.dtype == y.dtype == np.float32


def test_the_stream_is_frozen():
    """Another one would need another ``VERSION``."""
    x, y = prompts(dims=2, examples=1, x_std=1.0).draw(1, "train", 3, 5)
    assert (x.shape, y.shape) == ((2, 2), (2,))
    np.testing.assert_allclose(
        np.append(x, y), [0.59744012, 1.0270265, 0.93285394, 0.028468732, -1.2264118, 0.057410933], rtol=1e-6
    )


# Shifts.


def shifted(name: str, dims: int = 4, size: int = SIZE, function: str = "linear"):
    return prompts(function, dims).draw_many(1, name, size)


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("function", ["linear", "decision_tree"])
def test_values_belong_to_the_shifted_inputs(name, function):
    drawn, random, shift = prompts(function), RandomState([1, zlib.crc32(name.encode()), 0, 0]), SHIFTS[name]
    x = shift.points(2 * random.standard_normal((13, 4)), random)
    y = shift.values(reference_of_4(function, x, random), drawn.function.variance(2.0), random)
    np.testing.assert_allclose(drawn.draw(1, name, 0, 0)[1], y, rtol=1e-5, atol=1e-6)


def reference_of_4(function: str, x: np.ndarray, random: RandomState) -> np.ndarray:
    if function == "linear":
        return x @ random.standard_normal(4)
    tree, leaves = random.randint(4, size=15).tolist(), random.standard_normal(16)
    return np.array([leaves[leaf_of(point, tree, 0) - 15] for point in x])


@pytest.mark.parametrize("name,factor", [("third", 1 / 3), ("half", 0.5), ("double", 2), ("triple", 3)])
def test_scales(name, factor):
    x, y = shifted(f"x_{name}")
    assert x.std() == pytest.approx(2 * factor, rel=0.02)
    assert (y**2).mean() / 16 == pytest.approx(factor**2, rel=0.1)
    x, y = shifted(f"y_{name}")
    assert x.std() == pytest.approx(2, rel=0.02) and (y**2).mean() / 16 == pytest.approx(factor**2, rel=0.1)


def test_covariances():
    """A transformation for each prompt, with its eigenvalues, and with the same E‖x‖²."""
    random, x = RandomState(1), RandomState(2).standard_normal((20_000, 3))
    covariance = np.cov(SHIFTS["skewed"].points(x, random).T)
    eigenvalues = np.linalg.eigvalsh(covariance)[::-1]
    expected = 1 / np.arange(1, 4) ** 2
    np.testing.assert_allclose(eigenvalues, 3 * expected / expected.sum(), rtol=0.05)
    x, _ = shifted("half_subspace", dims=5, size=200)
    assert {np.linalg.matrix_rank(prompt, tol=1e-4) for prompt in x.astype(float)} == {2}
    assert (x**2).sum(-1).mean() / 5 == pytest.approx(4, rel=0.1)
    directions = x[:, 0] / np.linalg.norm(x[:, 0], axis=-1, keepdims=True)
    assert abs(directions.mean(0)).max() < 0.15  # no prompt has the subspace of another


def test_orthants():
    for name, opposite in (("random_orthant", False), ("opposite_orthant", True)):
        x, _ = shifted(name)
        signs = np.sign(x[:, 0])
        assert (np.sign(x[:, :-1]) == signs[:, None]).all() and abs(signs.mean(0)).max() < 0.1
        agree = (np.sign(x[:, -1]) == signs).mean()
        assert agree == (0 if opposite else pytest.approx(0.5, abs=0.03))


def test_queries():
    x, y = shifted("query_orthogonal")
    assert x.shape == (SIZE, 4, 4) and y.shape == (SIZE, 4)
    assert abs(np.einsum("skn,sn->sk", x[:, :-1].astype(float), x[:, -1])).max() < 1e-4
    assert np.linalg.norm(x[:, -1], axis=-1).mean() == pytest.approx(np.linalg.norm(x[:, 0], axis=-1).mean(), rel=0.03)
    assert prompts(examples=1).draw(1, "query_orthogonal", 0, 0)[0].shape == (2, 4)
    x, y = shifted("query_seen")
    same = (x[:, :-1] == x[:, -1:]).all(-1)  # (S, N)
    assert (same.sum(1) == 1).all() and (y[:, :-1][same] == y[:, -1]).all()
    assert np.bincount(same.argmax(1), minlength=12).min() > 0.7 * SIZE / 12  # any example


def test_noise_of_values():
    """The variance stays; the best linear fit to many points leaves v/(v + 1) of it."""
    x, y = Prompts(Linear(2), 200, 0.5).draw_many(1, "label_noise", 500)
    variance = 2 * 0.25
    assert (y**2).mean() == pytest.approx(variance, rel=0.05)
    fitted = np.stack([np.linalg.lstsq(*prompt, rcond=None)[1] for prompt in zip(x, y, strict=True)]).mean() / 201
    assert fitted == pytest.approx(variance / (variance + 1), rel=0.05)


@given(rows=st.integers(1, 6), more=st.integers(0, 3), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_orthonormal_bases_span_the_same(rows, more, seed):
    given = RandomState(seed).standard_normal((rows, rows + more))
    basis = orthonormal(given)
    np.testing.assert_allclose(basis @ basis.T, np.eye(rows), atol=1e-12)
    triangle = given @ basis.T
    np.testing.assert_allclose(np.triu(triangle, 1), 0, atol=1e-9)
    np.testing.assert_allclose(triangle @ basis, given, atol=1e-9)


# The command.

SMALL = "--dims 3 --examples 5 --x-std 2 --size 7".split()


def test_the_folder(run, tmp_path: Path):
    result = run("in_context", *SMALL, "--out", tmp_path / "out")
    assert (result.code, result.err) == (0, "")
    found = json.loads((tmp_path / "out" / "dataset.json").read_text("utf-8"))
    assert list(found["subsets"]) == ["valid", "test", *SHIFTS]
    assert found["subsets"]["valid"] == {"size": 7, "points": 6}
    assert found["subsets"]["query_orthogonal"] == {"size": 7, "points": 3}
    assert (found["unit"], found["zero_error"], found["floor"]) == (3.0, 4.0, pytest.approx(4 * 2 / 6))
    assert found["origin"] == {"generator": "data_prep.in_context", "version": 1}
    drawn = Prompts.of_request(found["request"])
    for subset, entry in found["subsets"].items():
        x, y = (np.load(tmp_path / "out" / f"{subset}.{name}.npy", allow_pickle=False) for name in "xy")
        assert (x.shape, y.shape) == ((7, entry["points"], 3), (7, entry["points"])), subset
        assert (x[6] == drawn.draw(1, subset, 0, 6)[0]).all() and (y[6] == drawn.draw(1, subset, 0, 6)[1]).all()
    assert run("verify", tmp_path / "out").out.endswith("34 files are unchanged\n")
    assert run("in_context", *SMALL, "--out", tmp_path / "out").out.startswith("already prepared")
    assert "next: fairseq-train" in result.out and "--learned-positions 11 " in result.out


def test_more_examples_than_in_training(run, tmp_path: Path):
    """The other subsets and the rest of the request are those without it."""
    run("in_context", *SMALL, "--shifts", "none", "--out", tmp_path / "without")
    result = run("in_context", *SMALL, "--shifts", "none", "--long", 9, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    one, two = (json.loads((tmp_path / name / "dataset.json").read_text("utf-8")) for name in ("without", "out"))
    assert two["request"] == one["request"] | {"long": 9} and "long" not in one["request"]
    assert two["subsets"] == one["subsets"] | {"long": {"size": 7, "points": 10}} and two["floor"] == one["floor"]
    assert (tmp_path / "out" / "test.x.npy").read_bytes() == (tmp_path / "without" / "test.x.npy").read_bytes()
    assert np.load(tmp_path / "out" / "long.x.npy").shape == (7, 10, 3)


def test_settings_are_in_the_request(run, tmp_path: Path):
    for function, arguments, wanted in (
        ("linear", [], {}),
        ("sparse_linear", ["--sparsity", 2], {"sparsity": 2}),
        ("noisy_linear", [], {"noise_std": 1.0}),
        ("relu_network", ["--hidden", 9], {"hidden": 9}),
        ("decision_tree", [], {"tree_depth": 4}),
    ):
        out = tmp_path / function
        result = run("in_context", "--function", function, *SMALL, "--shifts", "none", *arguments, "--out", out)
        assert result.code == 0, result.err
        request = json.loads((out / "dataset.json").read_text("utf-8"))["request"]
        settings = ("sparsity", "noise_std", "hidden", "tree_depth")
        assert {name: request[name] for name in settings if request[name] is not None} == wanted
        assert request["shifts"] == [] and not (out / "skewed.x.npy").exists()


@pytest.mark.parametrize("more", [[], ["--shifts", "all"]])
def test_one_dimension_has_fewer_shifts(more, run, tmp_path: Path):
    run("in_context", "--dims", 1, "--examples", 2, "--size", 2, *more, "--out", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "dataset.json").read_text("utf-8"))
    assert set(SHIFTS) - set(found["subsets"]) == {"half_subspace", "query_orthogonal"}


@pytest.mark.parametrize(
    "arguments,code,message",
    [
        ("--sparsity 2", 2, "--sparsity is for --function sparse_linear: leave it out"),
        ("--function sparse_linear --sparsity 9 --dims 4", 2, "--sparsity 9 is more than --dims 4"),
        ("--function sparse_linear --dims 2", 2, "--sparsity 3 is more than --dims 2: choose at most as many"),
        ("--dims 1 --shifts skewed,half_subspace", 2, "--shifts half_subspace needs --dims 2 or more"),
        ("--shifts skwed", 2, "argument --shifts: has 'skwed': choose all, none, or from x_third"),
        ("--x-std 0", 2, "argument --x-std: must be a number from 1e-06 to 1e+06, not '0'"),
        ("--x-std nan", 2, "argument --x-std: must be a number from 1e-06 to 1e+06, not 'nan'"),
        ("--x-std 1e-50 --dims 4", 2, "argument --x-std: must be a number from 1e-06 to 1e+06, not '1e-50'"),
        ("--dims 1000 --examples 10000", 2, "a subset would have 4,800,480,000 numbers"),
        ("--x-std 1e38 --dims 4", 2, "argument --x-std: must be a number from 1e-06 to 1e+06, not '1e38'"),
        ("--function noisy_linear --noise-std 1e39", 2, "argument --noise-std: must be a number from 1e-06 to 1e+06"),
        ("--examples 5 --long 5", 2, "--long 5 is not more than --examples 5: choose more, or leave it out"),
        ("--dims 1000 --long 10000", 2, "a subset would have 4,800,480,000 numbers"),
        ("--raw-only", 2, "unknown option --raw-only"),
    ],
)
def test_wrong_options(arguments, code, message, run, tmp_path: Path):
    result = run("in_context", *arguments.split(), "--out", tmp_path / "out")
    assert result.code == code and result.err.startswith(f"error: {message}"), result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("x_std", ["1e-6", "1e6"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_float32_holds_what_is_drawn_at_the_bounds(function, x_std, run, tmp_path: Path):
    options = f"--function {function} --dims 3 --examples 5 --size 20 --x-std {x_std}".split()
    options += ["--noise-std", x_std] if function == "noisy_linear" else []
    assert run("in_context", *options, "--out", tmp_path).code == 0
    for path in tmp_path.glob("*.npy"):
        values = np.load(path).astype(np.float32)
        squares = values[~np.isin(values, 0)] ** 2
        assert np.isfinite(squares).all() and squares.all(), path


def test_neither_torch_nor_fairseq_is_needed(tmp_path: Path):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['fairseq'] = None\n"
        "from data_prep.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "in_context", *SMALL, "--out", str(tmp_path / "out")], capture_output=True
    )
    assert done.returncode == 0, done.stderr
