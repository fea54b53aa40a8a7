"""Darcy flow: a series, manufactured solutions, a dense solver, identities; random fields; blocks; folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import RandomState

from data_prep.__main__ import main
from data_prep.darcy import ALPHA, TAU, InverseLaplacian, Operator, block_means, gradient, solve
from data_prep.dataset import DataError
from data_prep.fields import cosine_field


def medium(seed: int, points: int) -> np.ndarray:
    return np.where(cosine_field(RandomState(seed), points, TAU, ALPHA) >= 0, 12.0, 3.0)


def solved(a: np.ndarray, **options) -> np.ndarray:
    return solve(a, InverseLaplacian(len(a)), **options)[0]


def test_variances_of_the_field_are_those_of_the_covariance():
    """By the cosine transform of the trapezoidal rule, over 2,000 draws, within 5 σ."""
    points, draws = 9, 2_000
    random = RandomState(2)
    fields = np.stack([cosine_field(random, points, TAU, ALPHA) for _ in range(draws)])
    i = np.arange(points - 1)
    x, weights = np.linspace(0, 1, points), np.r_[0.5, np.ones(points - 2), 0.5] / (points - 1)
    basis = np.cos(np.pi * i[:, None] * x) * np.where(i == 0, 1, np.sqrt(2))[:, None]
    found = (basis * weights) @ fields @ (basis * weights).T
    expected = 9 * (np.pi**2 * (i[:, None] ** 2 + i**2) + 9) ** -2.0
    expected[0, 0] = 0
    # A grid of K nodes takes frequency K − 1 + m for K − 1 − m: the last drawn row and column are left out above.
    assert abs(found.mean(0)).max() < 5 * np.sqrt(expected.max() / draws)
    inner = np.s_[:, :-1, :-1]
    ratio = (found[inner] ** 2).mean(0)[expected[:-1, :-1] > 0] / expected[:-1, :-1][expected[:-1, :-1] > 0]
    assert abs(ratio - 1).max() < 5 * np.sqrt(2 / draws)
    assert abs(found[:, 0, 0]).max() < 1e-12


def test_a_constant_medium_has_the_series_solution():
    """u(½, ½) = 16/π⁴ Σ_{i, j odd} (−1)^{(i+j)/2−1} / (i j (i² + j²)) = 0.0736713…"""
    i = np.arange(1, 2_000, 2)
    signs = np.where(i % 4 == 1, 1.0, -1.0)
    series = 16 / np.pi**4 * (np.outer(signs / i, signs / i) / (i[:, None] ** 2 + i**2)).sum()
    assert series == pytest.approx(0.0736713, abs=1e-6)
    for points in (11, 41):
        assert solved(np.ones((points, points)))[points // 2, points // 2] == pytest.approx(series, abs=0.1 / points**2)


@pytest.mark.parametrize("faces", ["arithmetic", "harmonic"])
def test_the_order_for_smooth_media_is_2(faces):
    """u = sin πx sin 2πy and a = 2 + sin(x + 2y), whose f is known."""

    def error(points: int) -> float:
        x, y = np.meshgrid(*[np.linspace(0, 1, points)] * 2, indexing="ij")
        a, wave = 2 + np.sin(x + 2 * y), np.cos(x + 2 * y)
        u = np.sin(np.pi * x) * np.sin(2 * np.pi * y)
        ux, uy = (
            np.pi * np.cos(np.pi * x) * np.sin(2 * np.pi * y),
            2 * np.pi * np.sin(np.pi * x) * np.cos(2 * np.pi * y),
        )
        f = 5 * np.pi**2 * a * u - wave * ux - 2 * wave * uy
        return abs(solved(a, f=f[1:-1, 1:-1], faces=faces) - u).max()

    errors = [error(points) for points in (22, 43, 85)]
    orders = np.log2(np.divide(errors[:-1], errors[1:]))
    assert abs(orders - 2).max() < 0.1


@pytest.mark.parametrize("faces", ["arithmetic", "harmonic"])
def test_a_dense_solver_agrees(faces):
    """K = 9: the matrix node by node, without a line of the operator's code."""
    a, K = medium(1, 9) + RandomState(3).uniform(0, 1, (9, 9)), 9
    mean = (lambda p, q: (p + q) / 2) if faces == "arithmetic" else (lambda p, q: 2 / (1 / p + 1 / q))
    inner = [(i, j) for i in range(1, K - 1) for j in range(1, K - 1)]
    matrix = np.zeros((len(inner), len(inner)))
    for row, (i, j) in enumerate(inner):
        for neighbour in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
            flow = mean(a[i, j], a[neighbour]) * (K - 1) ** 2
            matrix[row, row] += flow
            if neighbour in inner:
                matrix[row, inner.index(neighbour)] -= flow
    expected = np.zeros((K, K))
    expected[1:-1, 1:-1] = np.linalg.solve(matrix, np.ones(len(inner))).reshape(K - 2, K - 2)
    np.testing.assert_allclose(solved(a, faces=faces), expected, atol=1e-11)
    np.testing.assert_allclose(Operator(a, faces)(expected[1:-1, 1:-1]), 1.0, atol=1e-9)


def test_the_preconditioner_inverts_the_laplacian():
    f = RandomState(1).standard_normal((8, 8))
    np.testing.assert_allclose(Operator(np.ones((10, 10)))(InverseLaplacian(10)(f)), f, atol=1e-10)


@given(seed=st.integers(0, 999), factor=st.floats(0.1, 10))
@settings(max_examples=15)
def test_identities(seed, factor):
    a = medium(seed, 17)
    u = solved(a)
    np.testing.assert_allclose(solved(factor * a), u / factor, atol=1e-11 / factor)
    np.testing.assert_allclose(solved(a.T), u.T, atol=1e-11)
    inner = u[1:-1, 1:-1]
    assert inner.min() > 0 and (inner * Operator(a)(inner)).sum() == pytest.approx(inner.sum(), rel=1e-8)
    for edge in (u[0], u[-1], u[:, 0], u[:, -1]):
        assert not edge.any()


def test_iterations_do_not_grow_with_the_grid():
    counts = [solve(medium(4, points), InverseLaplacian(points))[1] for points in (22, 43, 85, 169)]
    assert max(counts) - min(counts) <= 4 and max(counts) < 30


def test_no_convergence_is_an_error(monkeypatch):
    monkeypatch.setattr("data_prep.darcy.MOST_ITERATIONS", 3)
    with pytest.raises(DataError, match="no solution in 3 iterations: choose --high and --low closer"):
        solved(medium(1, 22))


def test_what_rounding_leaves_is_no_solution():
    """The residual of the iteration becomes small, the one of its u does not."""
    a = np.where(medium(1, 22) > medium(1, 22).mean(), 1e12, 1e-12)
    with pytest.raises(DataError, match="no solution in .* iterations: choose --high and --low closer"):
        solved(a)


def test_gradients_are_exact_for_quadratic_functions():
    x, y = np.meshgrid(*[np.linspace(0, 1, 6)] * 2, indexing="ij")
    expected = np.stack([2 * x + 3 * y, 3 * x], axis=-1)
    np.testing.assert_allclose(gradient(x**2 + 3 * x * y), expected, atol=1e-12)


@pytest.mark.parametrize(("n", "coarse"), [(12, 3), (13, 4), (11, 4), (141, 36), (5, 5), (7, 2)])
def test_means_over_blocks(n, coarse):
    """Explicit slices; the first and last blocks lack the nodes that the grid lacks."""
    a = RandomState(1).standard_normal((2, n, n))
    size = -(-n // coarse)
    starts = [size * block - (size * coarse - n) // 2 for block in range(coarse)]
    cuts = [slice(max(0, start), min(n, start + size)) for start in starts]
    expected = [[[field[rows, columns].mean() for columns in cuts] for rows in cuts] for field in a]
    np.testing.assert_allclose(block_means(a, coarse), expected, atol=1e-13)


# Folders.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("darcy") / "data"
    sizes = "--points 43 --grid 22 --test-grids 15,43 --train 9 --valid 3 --test 4".split()
    assert main(["darcy", *sizes, "--out", str(folder)]) == 0
    return folder


def array(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy")


def test_grids_are_nested_to_the_bit(folder):
    for name, ending in (("input", ()), ("target", ()), ("gradient", (2,))):
        fine = array(folder, f"test_43.{name}")
        assert fine.shape == (4, 43, 43, *ending) and fine.dtype == np.float32
        np.testing.assert_array_equal(array(folder, f"test.{name}"), fine[:, ::2, ::2])
        np.testing.assert_array_equal(array(folder, f"test_15.{name}"), fine[:, ::3, ::3])


def test_a_folder_has_solutions(folder):
    manifest = json.loads((folder / "dataset.json").read_text())
    assert not manifest["periodic"] and manifest["gradient"] and manifest["dims"] == 2
    assert manifest["statistics"]["target"]["mean"] == pytest.approx(5.6e-3, rel=0.2)
    for name, of_train in manifest["statistics"].items():
        values = array(folder, f"train.{name}").astype(float)
        assert of_train == {"mean": pytest.approx(values.mean()), "std": pytest.approx(values.std())}
    a, u, du = (array(folder, f"test_43.{name}").astype(float) for name in ("input", "target", "gradient"))
    assert set(np.unique(a)) == {3.0, 12.0}
    np.testing.assert_allclose(u[1], solved(a[1]), atol=1e-8)
    np.testing.assert_allclose(du[1], gradient(solved(a[1])), atol=1e-7)
    train, test = (array(folder, f"{subset}.target").astype(float) for subset in ("train", "test"))
    errors = [np.sqrt(((train.mean(0) - u) ** 2).sum() / (u**2).sum()) for u in test]
    assert manifest["trivial_errors"] == {"mean": pytest.approx(np.mean(errors))}


def test_the_inverse_problem(tmp_path, folder):
    sizes = "--inverse --noise 0.5 --coarse 6 --points 43 --grid 22 --train 9 --valid 3 --test 4 --out".split()
    assert main(["darcy", *sizes, str(tmp_path / "out")]) == 0
    u, noisy = array(folder, "train.target"), array(tmp_path / "out", "train.input")
    assert (noisy - u).std() == pytest.approx(0.5 * u.std(), rel=0.05)
    assert not np.array_equal((noisy - u)[0], (noisy - u)[1])
    of_test = array(tmp_path / "out", "test.input") - array(folder, "test.target")
    assert abs(np.corrcoef((noisy - u)[:4].ravel(), of_test.ravel())[0, 1]) < 0.2  # subsets have noise of their own
    means = block_means(array(folder, "train.input").astype(float), 6)
    np.testing.assert_allclose(array(tmp_path / "out", "train.target"), means, rtol=1e-6)
    manifest = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert not manifest["gradient"] and manifest["subsets"]["test"] == {"size": 4, "points": 22, "target_points": 6}


@pytest.mark.filterwarnings("error")  # the one line is all that is printed
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--grid 100", "--grid 100 is no stride of --points 421: the points, less one, of the grid must divide 420"),
        ("--noise 0.1", "--noise is for --inverse: leave it out"),
        ("--coarse 10", "--coarse is for --inverse: leave it out"),
        ("--inverse --test-grids 211", "--test-grids is not for --inverse"),
        ("--inverse --grid 43 --coarse 44", "--grid 43 has no 44 blocks"),
        ("--inverse --grid 43 --coarse 40", "--grid 43 has no 40 blocks"),
        ("--points 421 --grid 421 --train 9999", "the subset train would have"),
        ("--high 0", "must be a number above 0"),
        ("--points 43 --grid 22 --test-grids 2", "--test-grids has 2: such a grid is all edge, where the answer is 0"),
        ("--points 5 --grid 5 --high 1e300 --low 1e-300", "choose --high and --low closer to each other"),
        ("--points 5 --grid 5 --high 1e200 --low 1e199 --faces harmonic", "choose --high and --low closer"),
        ("--points 5 --grid 5 --high 1e39 --low 1e38", "input of the subset train has values beyond float32"),
        ("--points 5 --grid 5 --high 1e-40 --low 1e-41", "target of the subset train has values beyond float32"),
        ("--points 5 --grid 5 --high 2e-40 --low 1e-40 --inverse --coarse 5", "input of the subset train has values"),
        ("--low 12 --high 3", "--low 12 is not below --high 3"),
    ],
)
def test_refusals(options, message, tmp_path, capsys):
    try:
        code = main(["darcy", *options.split(), "--out", str(tmp_path / "out")])
    except SystemExit as error:
        code = error.code
    assert code in (1, 2) and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
