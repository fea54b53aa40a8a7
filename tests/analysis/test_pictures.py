"""The pictures: axes, colours, formats and file names."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("fairseq")
pytest.importorskip("matplotlib")

import numpy as np
from matplotlib.figure import Figure

from fairseq_sg.analysis import accuracy, attention_maps, experts, gates, norms, plots, values
from fairseq_sg.analysis.__main__ import main
from fairseq_sg.analysis.result import Result

SENTENCE = ["--input", "s t u", "--target", "A B"]


@pytest.fixture
def measured(saved, tmp_path, capsys):
    """The findings of a command, read from its files."""

    def run(command: str, kind: str, *options: str) -> Result:
        out = str(tmp_path / "numbers")
        assert main([command, saved(kind), "--device", "cpu", "--out", out, "--format", "none", *options]) == 0
        facts = json.loads(Path(f"{out}.json").read_text())
        return Result(dict(np.load(f"{out}.npz")), facts)

    return run


def drawn(module, result: Result, **options) -> dict:
    defaults = {"roles": None, "steps": None, "heads": None, "vmax": None}
    return module.draw(result, Namespace(**defaults | options))


def words(ticks) -> list[str]:
    return [label.get_text() for label in ticks]


def panels(figure) -> list:
    """The axes with content, except the colour scale's, which has no place in the grid."""
    return [ax for ax in figure.axes if ax.axison and ax.get_subplotspec() is not None]


def test_maps_have_queries_up_and_keys_across_at_the_outer_edges_alone(measured):
    figures = drawn(attention_maps, measured("maps", "softmax", *SENTENCE))
    source, read, said = ["<s>", "s", "t", "u", "</s>"], ["</s>", "A", "B"], ["A", "B", "</s>"]
    expected = {"encoder": (source, source), "decoder": (read, read), "cross": (said, source)}
    for role, (queries, keys) in expected.items():
        maps = panels(figures[role])
        assert len(maps) == 8
        for number, ax in enumerate(maps):  # 4 heads below each other, 2 steps side by side
            left, bottom = number % 2 == 0, number >= 6
            assert words(ax.get_yticklabels()) == (queries if left else [])
            assert words(ax.get_xticklabels()) == (keys if bottom else [])
            assert ax.get_ylabel().startswith("query ") == left and ax.get_xlabel().startswith("key ") == bottom
    assert [figures[role].texts[0].get_text() for role in expected] == [
        *("encoder self-attention", "decoder self-attention", "cross-attention"),
    ]


def test_the_colour_scale_fits_the_data_or_ends_where_it_is_told(measured):
    result = measured("maps", "softmax", *SENTENCE)
    for vmax in (None, 0.125):
        for role, figure in drawn(attention_maps, result, vmax=vmax).items():
            largest = max(array.max() for name, array in result.arrays.items() if name.startswith(f"{role}."))
            assert 0 < largest
            for ax in panels(figure):
                assert ax.images[0].get_clim() == pytest.approx((0, vmax or largest))
    signed = [[np.array([[-0.5, 0.25]]), None]]
    for vmax, limits in ((None, (-0.5, 0.5)), (0.2, (-0.2, 0.2))):
        figure = plots.heatmaps(signed, [["a", ""]], ["r"], ["c", "d"], None, plots.Labels(scale="weight"), vmax)
        (ax,) = panels(figure)
        assert ax.images[0].get_clim() == limits
        assert figure.axes[-1].get_ylabel() == "weight"


def test_names_of_many_entries_become_smaller_and_then_fewer():
    def ticks(entries: int) -> list:
        names = [f"w{number}" for number in range(entries)]
        figure = plots.heatmaps([[np.eye(entries)] * 12], [[""] * 12], names, names)
        return panels(figure)[0].get_xticklabels()

    few, many, most = ticks(5), ticks(25), ticks(100)
    assert len(few) == 5 and len(many) == 25 and 0 < len(most) < 100
    assert words(most)[:2] == ["w0", f"w{round(100 / len(most))}"]
    assert few[0].get_fontsize() > many[0].get_fontsize() >= plots.LEAST_TEXT


def test_values_and_gates_say_what_is_at_their_axes(measured):
    first, *_ = panels(drawn(values, measured("values", "softmax", *SENTENCE))["cross"])
    assert first.get_ylabel() == "Value (source word)" and first.images[0].get_clim() == pytest.approx((-1, 1))
    gated = measured("gates", "gated", *SENTENCE)
    for side, word in (("encoder", "source word"), ("decoder", "word read")):
        figure = drawn(gates, gated)[side]
        (*_, last), (first, *_) = panels(figure), panels(figure)
        assert last.get_xlabel() == f"position ({word})" and first.get_ylabel() == "feature"
        assert first.images[0].get_clim() == (0, 1) and f"copy gates of the {side}" in figure.texts[0].get_text()


def test_norms_are_named_in_words(measured):
    figures = drawn(norms, measured("norms", "mixed", "--limit", "3"))
    labels = {role: [ax.get_ylabel() for ax in panels(figure) if ax.get_ylabel()] for role, figure in figures.items()}
    stages = ["after the projection", "after the feature map"]
    assert labels["cross"] == [f"norm of {what}\n{stage}" for stage in stages for what in ("queries", "keys")]
    # The first layer, galerkin, normalizes only Keys; the second, compositional, nothing.
    assert labels["encoder"] == [f"norm of {what}" for what in (
        "queries\nafter the projection", "keys\nafter the projection", "keys\nafter normalization"
    )]  # fmt: skip
    assert len(panels(figures["encoder"])) == 5
    assert {ax.get_xlabel() for figure in figures.values() for ax in panels(figure)} == {"head"}


def test_boxes_of_equal_norms_are_inside_the_frame():
    nearly = 1 + 1e-6 * np.arange(18.0).reshape(2, 9)  # as rounding leaves them
    (ax,) = panels(plots.boxes([[nearly]], [["norms"]], ["norm"], "head"))
    bottom, top = ax.get_ylim()
    assert bottom == 0 and top > 1.04


def test_experts_are_named_in_words(measured):
    figures = drawn(experts, measured("experts", "experts", "--subset", "valid"))
    together = panels(figures["encoder.together"])
    assert (together[0].get_ylabel(), together[0].get_xlabel()) == ("expert", "also selected")
    assert figures["encoder.together"].axes[-1].get_ylabel() == "share of the expert's tokens"
    (active,) = panels(figures["decoder.active"])
    assert (active.get_xlabel(), active.get_ylabel()) == ("step", "active hidden units of a word")
    assert words(active.get_xticklabels()) == ["1", "2"]


@pytest.mark.parametrize("gen", [{"5": 30}, {"3": 30}])
def test_accuracy_shows_how_many_sentences_a_point_has(gen):
    sentences = {"valid": {"2": 10, "3": 4}, "gen": gen}
    of = {subset: {group: [50.0] for group in groups} for subset, groups in sentences.items()}
    for models in ({"": of}, {"a": of, "b": of}):
        above, below = plots.accuracies(models, "words", (1, 3), None, sentences).axes
        assert below.get_ylabel() == "sentences" and below.get_xlabel() == "words" and not above.get_xlabel()
        bars = sorted((bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in below.patches)
        assert [(round(x), height) for x, height in bars] == [(2, 10), (3, 4), (int(*gen), 30)]
        assert {text.get_text() for text in below.texts} == {"10", "4", "30"}
        if "5" in gen:  # in the middle, where no other bar is
            assert [x for x, _ in bars] == pytest.approx([2, 3, 5])
        else:
            assert len({x for x, _ in bars}) == 3
    (axes,) = plots.accuracies({"": of}, "type", None, ["2", "3", "5"], sentences).axes
    assert {text.get_text() for text in axes.texts} >= {"n = 10", "n = 4", "n = 30"}


def test_accuracy_of_a_checkpoint_shows_its_sentences(measured):
    result = measured("accuracy", "softmax", "--subset", "valid,gen")
    _, below = drawn(accuracy, result, by="target_length")[""].axes
    counted = [row["sentences"] for of in result.facts["subsets"].values() for row in of["groups"].values()]
    assert [bar.get_height() for bar in below.patches] == counted and sum(counted) == 28


def test_errors_are_inside_the_frame():
    equal = plots.Lines({"model": ((128, 256), [[0.5, 0.500001]])}, {}, "points")
    exact = plots.Lines({"model": ((0, 1), [[4.0, 3.0]])}, {"least_squares": ((0, 1), [5.0, 1e-30])}, "examples")
    figure = plots.errors({"equal": equal, "exact": exact}, "error")
    for ax, least, largest in zip(figure.axes, (0.5, 3), (0.5, 5), strict=True):
        low, high = ax.get_ylim()
        assert least / 3 < low < 0.9 * least and 1.1 * largest < high < 3 * largest


def test_every_line_has_a_colour_of_its_own():
    models = {f"m{number}": {"gen": {"1": [50.0], "2": [60.0]}} for number in range(len(plots.COLOURS) + 1)}
    steps = {f"step {number}": np.array([0.6, 0.4]) for number in range(len(plots.COLOURS) + 1)}
    panels = {"test": plots.Lines({name: ((1, 2), [[0.3, 0.2]]) for name in models}, {}, "loops")}
    for figure in (
        plots.accuracies(models, "words"),
        plots.shares(steps, "expert", "share"),
        plots.errors(panels, "e"),
    ):
        colours = [line.get_color() for line in figure.axes[0].lines if line.get_linestyle() == "-"]
        assert len(set(colours)) == len(colours) == len(models)


def test_no_legend_covers_bars():
    names = ["a", "b", "c"]
    bars = {model: {"": {name: [100.0] for name in names}} for model in ("unmasked", "mask", "inverse")}
    figure = plots.accuracies(bars, "part", None, names)
    figure.draw_without_rendering()
    (ax,) = figure.axes
    assert not any(ax.get_legend().get_window_extent().overlaps(bar.get_window_extent()) for bar in ax.patches)


def test_numbers_of_words_experts_and_loops_are_whole():
    one, two = {"": {"valid": {"1": [50.0]}}}, {"": {"valid": {"1": [50.0], "2": [60.0]}}}
    loops = {"test": plots.Lines({"model": ((1, 2, 3), [[0.3, 0.2, 0.1]])}, {}, "loops")}
    figures = [
        *(plots.accuracies(models, "words", sentences={"valid": {"1": 3, "2": 4}}) for models in (one, two)),
        plots.shares({"step 1": np.array([0.6, 0.4])}, "expert", "share"),
        plots.errors(loops, "error"),
    ]
    for figure in figures:
        for ax in figure.axes:
            low, high = ax.get_xlim()
            ticks = [tick for tick in ax.get_xticks() if low <= tick <= high]
            assert ticks and all(tick == round(tick) for tick in ticks)


def test_what_is_drawn_is_said_before(saved, tmp_path, capsys, monkeypatch):
    said = []
    monkeypatch.setattr(plots, "heatmaps", lambda *a: said.append(capsys.readouterr().out) or Figure())
    assert main(["maps", saved("softmax"), *SENTENCE, "--device", "cpu", "--out", str(tmp_path / "x")]) == 0
    assert said == ["drawing 24 maps …\n", "", ""]


@pytest.mark.parametrize(
    "command,kind,options,pictures",
    [
        ("maps", "softmax", [*SENTENCE, "--heads", "1", "--steps", "1"], ["encoder.", "decoder.", "cross."]),
        ("maps", "softmax", [*SENTENCE, "--roles", "cross", "--heads", "max"], [""]),
        ("gates", "gated", SENTENCE, ["encoder.", "decoder."]),
        ("values", "encoder", ["--input", "p 1", "--heads", "mean", "--steps", "1"], [""]),
        ("norms", "softmax", ["--limit", "2", "--roles", "encoder"], [""]),
        ("experts", "experts", ["--limit", "2"], ["encoder.usage.", "encoder.together.", "decoder.active."]),
        ("accuracy", "softmax", [], [""]),
        ("symbols", "encoder", [], [""]),
    ],
)
def test_pdf(command, kind, options, pictures, saved, tmp_path):
    """The extension of --out selects the format; a single picture has exactly that name."""
    assert main([command, saved(kind), *options, "--device", "cpu", "--out", str(tmp_path / "v1.2.pdf")]) == 0
    expected = {f"v1.2.{end}" for end in ("npz", "json", *(f"{name}pdf" for name in pictures))}
    assert {path.name for path in tmp_path.iterdir()} == expected
    for name in pictures:
        written = (tmp_path / f"v1.2.{name}pdf").read_bytes()
        # Text is kept as text, in TrueType fonts.
        assert written.startswith(b"%PDF") and (b"/TrueType" in written or b"/CIDFontType2" in written)


@pytest.mark.parametrize(
    "out,form,expected",
    [
        ("x", None, ("x", None)),
        ("x.svg", None, ("x", "svg")),
        ("x.pdf", "none", ("x", "none")),
        ("x.pdf", "pdf", ("x", "pdf")),
        ("runs.old/x", None, ("runs.old/x", None)),
        ("x.v2", "png", ("x.v2", "png")),
        ("checkpoint_last.maps", None, ("checkpoint_last.maps", None)),
    ],
)
def test_where_files_go(out, form, expected):
    assert plots.place(out, form, ["maps"]) == expected


@pytest.mark.parametrize(
    "out,options,message",
    [
        ("{}/x.jpg", [], "--out is .*x.jpg, and no picture is written as .jpg: choose from .png, .pdf, .svg"),
        ("{}/x.pdf", ["--format", "svg"], "--out is .*x.pdf, and --format is svg: omit one of them"),
        ("{}", [], "--out .* is a folder: give a file in it, such as .*/norms"),
        ("{}/new/", [], "--out .*new/ is a folder: give a file in it, such as .*/new/norms"),
        ("", [], "--out is '', which names no file: give one, such as norms"),
        ("{}/.png", [], "--out is '.*/.png', which names no file: give one, such as .*/norms"),
        ("{}/file/x", [], "--out .*file/x cannot be written: .*file: Not a directory"),
        ("/proc/nowhere/x", [], "--out /proc/nowhere/x cannot be written: /proc: .*"),
    ],
)
def test_places_that_will_not_do_are_refused_before_anything_is_measured(out, options, message, tmp_path, capsys):
    (tmp_path / "file").touch()
    checkpoint = tmp_path / "file"  # not a checkpoint, and never read
    assert main(["norms", str(checkpoint), "--out", out.format(tmp_path), *options]) == 1
    assert re.fullmatch(f"error: {message}\n", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
