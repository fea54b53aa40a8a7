"""The commands: their numbers against direct computation, their files, their errors."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from argparse import Namespace
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

import numpy as np
import torch
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, CRITERION_REGISTRY

from fairseq_sg.analysis import accuracy, load, plots, read_sentence, record
from fairseq_sg.analysis.__main__ import main, named
from fairseq_sg.analysis.examples import Part, open_examples
from fairseq_sg.analysis.result import Result
from fairseq_sg.analysis.symbols import represent
from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.streams import Streams
from helpers.analysis_models import CLASSIFIERS, GROUPS, TABLES, checkpoint, subwords_folder


@pytest.fixture
def analyse(saved, tmp_path, capsys):
    """Runs a command on the CPU, by default without pictures; returns its arrays, facts, and output."""

    def run(command: str, checkpoint: str, *options: str):
        out = str(tmp_path / "new" / "out")
        code = main([command, checkpoint, "--device", "cpu", "--out", out, "--format", "none", *options])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        facts = json.loads(Path(f"{out}.json").read_text(encoding="utf-8"))
        return dict(np.load(f"{out}.npz")), facts, printed.out

    return run


@torch.no_grad()
@pytest.mark.parametrize("kind", ["softmax", "gated", "mixed"])
def test_maps(kind, analyse, saved, loaded):
    arrays, facts, printed = analyse("maps", saved(kind), "--input", "s t u", "--target", "A B C")
    model = loaded(kind)
    sentence = read_sentence(model, "s t u", "A B C")
    with record(model.model) as recording:
        logits = model.model(**sentence.inputs)[0]
    assert set(arrays) == {
        f"{role}.step{step}" for role in recording.roles for step in range(1, len(recording.steps(role)) + 1)
    }
    shapes = {"encoder": (4, 5, 5), "decoder": (4, 4, 4), "cross": (4, 4, 5)}
    for role in recording.roles:
        for step, call in enumerate(recording.steps(role), start=1):
            assert arrays[f"{role}.step{step}"].shape == shapes[role]
            np.testing.assert_array_equal(arrays[f"{role}.step{step}"], call.weights[0])
        assert facts["roles"][role]["attention"] == [call.kind for call in recording.steps(role)]
    source, target = ["<s>", "s", "t", "u", "</s>"], ["A", "B", "C", "</s>"]
    assert facts["roles"]["cross"]["queries"] == target and facts["roles"]["cross"]["keys"] == source
    assert facts["roles"]["decoder"]["keys"] == ["</s>", "A", "B", "C"]
    assert facts["output"] == [model.task.target_dictionary[i] for i in logits[0].argmax(-1)]
    assert "source  <s> s t u </s>" in printed


@pytest.mark.parametrize("joint", ["--joint", "--separate"])
def test_a_sentence_of_subwords_is_plain_text_or_pieces(joint, analyse, tmp_path):
    data = subwords_folder(tmp_path / "data", joint, "--model", "bpe")
    path = str(checkpoint(tmp_path / "model.pt", data, "softmax"))
    plain, pieces = (
        {side: (data / "raw" / f"train.{kind}{side}").read_text().splitlines()[0] for side in ("src", "tgt")}
        for kind in ("plain.", "")
    )
    assert len(pieces["src"].split()) > len(plain["src"].split())
    for text in (plain, pieces):
        _, facts, _ = analyse("maps", path, "--input", text["src"], "--target", text["tgt"])
        assert facts["source"] == ["<s>", *pieces["src"].split(), "</s>"]
        assert facts["target"] == [*pieces["tgt"].split(), "</s>"]
    assert main(["maps", path, "--input", "the fox", "--out", str(tmp_path / "x"), "--format", "none"]) == 1


def test_what_is_drawn_is_chosen(analyse, saved, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "heatmaps", lambda *a: drawn.append(a[:2]) or _empty_figure())
    choice = ["--input", "s t", "--target", "A", "--roles", "encoder", "--steps", "3,1"]
    arrays, *_ = analyse("maps", saved("linear"), *choice, "--heads", "4,2", "--format", "png")
    analyse("maps", saved("linear"), *choice, "--heads", "max", "--format", "png")
    analyse("values", saved("linear"), *choice, "--heads", "mean", "--format", "png")
    assert set(arrays) == {f"{role}.step{step}" for role in ("encoder", "decoder", "cross") for step in (1, 2, 3)}
    (panels, titles), (highest, _), (means, _) = drawn
    assert titles[1] == ["encoder, step 3, head 2", "encoder, step 1, head 2"] and len(panels) == 2
    np.testing.assert_array_equal(panels[0], [arrays["encoder.step3"][3], arrays["encoder.step1"][3]])
    np.testing.assert_array_equal(highest[0], [arrays["encoder.step3"].max(0), arrays["encoder.step1"].max(0)])
    assert len(means) == 1 and np.allclose(np.diagonal(means[0], axis1=1, axis2=2), 1)


def _empty_figure():
    from matplotlib.figure import Figure

    return Figure()


@torch.no_grad()
@pytest.mark.parametrize("kind,sides", [("gated", ["encoder", "decoder"]), ("encoder", ["encoder"])])
def test_gates(kind, sides, analyse, saved, loaded):
    line = "p q 3" if kind in CLASSIFIERS else "s t u"
    arrays, facts, _ = analyse("gates", saved(kind), "--input", line)
    model = loaded(kind)
    sentence = read_sentence(model, line)
    with record(model.model) as recording:
        model.model(**sentence.inputs)
    assert list(facts["sides"]) == sides
    assert len(arrays) == len(recording.updates)
    for side in sides:
        for step, call in enumerate(recording.gates(side), start=1):
            gates = arrays[f"{side}.step{step}"]
            assert gates.shape == (len(facts["sides"][side]["words"]), 16)
            np.testing.assert_array_equal(gates, call.gates[0])
            np.testing.assert_allclose(facts["sides"][side]["mean_over_features"][step - 1], gates.mean(1), rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "mixed"])
def test_values(kind, analyse, saved, loaded):
    arrays, facts, _ = analyse("values", saved(kind), "--input", "s t u", "--target", "A")
    model = loaded(kind)
    sentence = read_sentence(model, "s t u", "A")
    with record(model.model) as recording:
        model.model(**sentence.inputs)
    for role in recording.roles:
        for step, call in enumerate(recording.steps(role), start=1):
            for head, values in enumerate(call.values[0].double().tolist()):
                expected = [[_cosine(v, w) for w in values] for v in values]
                np.testing.assert_allclose(arrays[f"{role}.step{step}"][head], expected, atol=1e-5)
                others = [abs(x) for i, row in enumerate(expected) for j, x in enumerate(row) if i != j]
                mean = facts["roles"][role]["mean_off_diagonal"][step - 1][head]
                assert mean == pytest.approx(sum(others) / len(others), abs=1e-5)
    assert facts["roles"]["cross"]["queries"] == ["<s>", "s", "t", "u", "</s>"]


def _cosine(v, w) -> float:
    return sum(x * y for x, y in zip(v, w)) / (sum(x * x for x in v) * sum(x * x for x in w)) ** 0.5


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "softmax", "encoder"])
def test_norms_are_those_of_the_sentences_one_by_one(kind, analyse, saved, loaded):
    """Padding is excluded: one large batch has some, batches of one have none."""
    subset = "valid"
    arrays, facts, _ = analyse("norms", saved(kind), "--subset", subset, "--batch-size", "5", "--limit", "12")
    model = loaded(kind)
    dataset = model.subset(subset)
    expected = defaultdict(list)
    for batch in (dataset.collater([dataset[i]]) for i in range(12)):
        with record(model.model) as recording:
            model.model(**batch["net_input"])
        for role in recording.roles:
            for step, call in enumerate(recording.steps(role), start=1):
                for name, norms in call.norms.items():
                    expected[f"{role}.step{step}.{name}"].append(norms[0])
    assert arrays.keys() == expected.keys()
    for name, norms in expected.items():
        norms = torch.cat(norms, dim=1)
        assert arrays[name].shape == norms.shape
        np.testing.assert_allclose(np.sort(arrays[name]), np.sort(norms), rtol=1e-4)
        np.testing.assert_allclose(facts["norms"][name]["mean"], norms.mean(1), rtol=1e-4)
        np.testing.assert_allclose(facts["norms"][name]["std"], norms.std(1, correction=0), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(facts["norms"][name]["quantiles"]["0.25"], norms.quantile(0.25, dim=1), rtol=1e-4)
    stages = {name.split(".")[-1] for name in arrays}
    assert stages == ({"projected", "mapped", "normalized"} if kind == "linear" else {"projected"})
    assert facts["sentences"] == 12


class HalfRight(torch.nn.Module):
    """Predicts the target if the sum of the source's words is even; otherwise its last word is wrong."""

    decoder = None

    def __init__(self, task):
        super().__init__()
        self.words, self.eos, self.pad = len(task.target_dictionary), task.target_dictionary.eos(), 1

    def forward(self, src_tokens, src_lengths, prev_output_tokens):
        lengths = prev_output_tokens.ne(self.pad).sum(1)
        answer = prev_output_tokens.roll(-1, 1)
        rows = torch.arange(len(lengths))
        answer[rows, lengths - 1] = self.eos
        odd = src_tokens.masked_fill(src_tokens.eq(self.pad), 0).sum(1) % 2
        answer[rows, lengths - 2] += odd
        logits = torch.nn.functional.one_hot(answer, self.words + 1)[..., :-1].float()
        # Padding has the highest logit, but is never the answer.
        logits[..., self.pad] = 2
        return logits, {}


def test_lengths_of_training_are_those_of_all_its_folders(loaded, folders, tmp_path):
    """Also where another folder is evaluated, which may have no training set."""
    model = loaded("softmax")
    lengths = [len(text.split()) for text in raw(model, "train", "tgt")]
    other = shutil.copytree(folders["pairs"], tmp_path / "other")
    for path in other.glob("valid.*"):
        path.rename(other / path.name.replace("valid", "train"))
    longer = [len(text.split()) for text in raw(model, "valid", "tgt")]
    both = dataclasses.replace(model, data="gone", trained_on=f"{folders['pairs']}:{other}")
    assert both.trained_lengths("target") == (min(lengths + longer), max(lengths + longer))
    for path in other.glob("train.*"):
        path.unlink()
    assert dataclasses.replace(model, trained_on=str(other)).trained_lengths("target") is None


@torch.no_grad()
@pytest.mark.parametrize("kind", ["softmax", "encoder", "lstm"])
@pytest.mark.parametrize("by,side", [("source_length", "src"), ("target_length", "tgt")])
def test_accuracy_by_length(kind, by, side, loaded):
    """Against the criterion, one sentence at a time."""
    model = loaded(kind)
    if model.has_decoder:
        model.model = HalfRight(model.task)
    result = accuracy.measure(model, Namespace(subset="valid, gen", by=by, batch_size=4, limit=None))
    trained = [len(text.split()) for text in raw(model, "train", side)]
    assert result.facts["training"] == [min(trained), max(trained)]
    for subset in ("valid", "gen"):
        right = [criterion_says(model, subset, i) for i in range(len(model.subset(subset)))]
        assert 0 < sum(right) < len(right)
        lengths = [len(text.split()) for text in raw(model, subset, side)]
        np.testing.assert_array_equal(result.arrays[f"{subset}.right"], right)
        np.testing.assert_array_equal(result.arrays[f"{subset}.group"], lengths)
        expected = by_group(lengths, right)
        assert result.facts["subsets"][subset]["groups"] == {
            str(length): expected[length] for length in sorted(expected)
        }
        assert f"{subset}: {100 * sum(right) / len(right):.2f} % of {len(right)} sentences" in result.summary


@pytest.mark.parametrize("unit,limit", [("words", 4), ("characters", 15)])
def test_lengths_of_subwords_are_those_of_their_text(unit, limit, tmp_path):
    """Of their pieces without it."""
    data = subwords_folder(tmp_path / "data", "--length-unit", unit, "--max-length", limit)
    path = str(checkpoint(tmp_path / "model.pt", data, "softmax"))
    args = Namespace(subset="valid,gen", by="source_length", batch_size=64, limit=None)
    count = {"words": lambda line: len(line.split()), "characters": len}[unit]
    model = load(path)
    result = accuracy.measure(model, args)
    lengths = {name: list(map(count, raw(model, name, "plain.src"))) for name in ("train", "valid", "gen")}
    assert result.facts["training"] == [min(lengths["train"]), max(lengths["train"])]
    assert max(lengths["train"]) == limit < min(lengths["gen"])
    for name in ("valid", "gen"):
        np.testing.assert_array_equal(result.arrays[f"{name}.group"], lengths[name])
    assert result.facts.get("length_unit", "words") == unit
    both = accuracy.combine({"a": [result], "b": [result]})
    for found in (result, both):
        assert accuracy.draw(found, args)[""].axes[-1].get_xlabel() == f"{unit} in the source"
    chosen = open_examples(model, "gen").choose(Part(lengths=[limit + 1]))
    np.testing.assert_array_equal(chosen, np.array(lengths["gen"]) == limit + 1)

    file = data / "raw" / "gen.plain.src"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(UsageError, match="the plain text of the subset 'gen' in .*: prepare the folder again"):
        accuracy.measure(load(path), args)
    for file in (data / "raw").glob("*.plain.*"):
        file.unlink()
    result = accuracy.measure(load(path), args)
    np.testing.assert_array_equal(result.arrays["gen.group"], [len(line.split()) for line in raw(model, "gen", "src")])
    assert result.facts["length_unit"] == "pieces" and max(result.facts["training"]) > 6


def by_group(groups, right) -> dict:
    members = {group: [r for r, g in zip(right, groups, strict=True) if g == group] for group in groups}
    return {
        group: {"sentences": len(m), "right": sum(m), "accuracy": pytest.approx(100 * sum(m) / len(m))}
        for group, m in members.items()
    }


def raw(model, subset: str, end: str) -> list:
    return (Path(model.data) / "raw" / f"{subset}.{end}").read_text().splitlines()


def criterion_says(model, subset: str, index: int) -> bool:
    name = "cross_entropy_orthogonality" if model.has_decoder else "classification"
    options = CRITERION_DATACLASS_REGISTRY[name](sentence_avg=False)
    dataset = model.subset(subset)
    batch = dataset.collater([dataset[index]])
    return bool(CRITERION_REGISTRY[name](options, model.task)(model.model, batch)[2]["n_exact"])


def test_accuracy_by_type_and_of_the_first_sentences(loaded):
    model = loaded("softmax")
    model.model = HalfRight(model.task)
    args = Namespace(subset="gen", by="type", batch_size=4, limit=10)
    result = accuracy.measure(model, args)
    right = [criterion_says(model, "gen", i) for i in range(10)]
    expected = by_group(raw(model, "gen", "type")[:10], right)
    groups = result.facts["subsets"]["gen"]["groups"]
    assert list(groups) == result.facts["types"] == ["depth_1", "depth_2", "depth_10"] and groups == expected
    (axes,) = accuracy.draw(result, args)[""].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["depth_1", "depth_2", "depth_10"]
    assert [bar.get_height() for bar in axes.patches] == [groups[name]["accuracy"] for name in groups]


def test_the_picture_shades_the_lengths_in_training():
    curves = {"valid": {"2": [100.0], "3": [50.0]}, "gen": {"5": [25.0]}}
    (axes,) = plots.accuracies({"": curves}, "words", trained=(1, 4)).axes
    (band,) = axes.patches
    assert (band.get_x(), band.get_width()) == (0.5, 4.0)
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[2, 100], [3, 50]], [[5, 25]]]
    assert [line.get_label() for line in axes.lines] == ["valid", "gen"] and not axes.collections


def test_several_models_in_one_picture_with_their_seeds():
    a = {"valid": {"2": [100.0, 90.0], "3": [50.0, 60.0]}, "gen": {"5": [10.0, 40.0]}}
    b = {"valid": {"2": [80.0], "3": [70.0]}, "gen": {"5": [5.0]}}
    (axes,) = plots.accuracies({"a": a, "b": b}, "words", trained=(1, 4)).axes
    drawn = {line.get_label(): line for line in axes.lines}
    assert list(drawn) == ["a, valid", "a, gen", "b, valid", "b, gen"]
    assert drawn["a, valid"].get_xydata().tolist() == [[2, 95], [3, 55]]
    assert {name: (line.get_color(), line.get_linestyle()) for name, line in drawn.items()} == {
        "a, valid": ("C0", "-"), "a, gen": ("C0", "--"), "b, valid": ("C1", "-"), "b, gen": ("C1", "--"),
    }  # fmt: skip
    valid, gen = axes.collections  # the bands of the model that has two seeds
    assert {(x, y) for x, y in valid.get_paths()[0].vertices.tolist()} == {(2, 90), (2, 100), (3, 50), (3, 60)}
    types = {"gen": {"one": [20.0, 40.0], "two": [50.0, 50.0]}}
    (axes,) = plots.accuracies({"a": types, "b": types}, "type", names=["one", "two"]).axes
    assert sorted(bar.get_height() for bar in axes.patches) == [30, 30, 50, 50]
    reach = [sorted({y for _, y in segment}) for bars in axes.collections for segment in bars.get_segments()]
    assert reach == [[20, 40], [50]] * 2 or reach == [[20, 40], [50, 50]] * 2


def test_equal_numbers_have_bars_without_errors():
    """Their mean is rounded, here below them."""
    equal = [100 * 2 / 496] * 3
    assert np.mean(equal) < min(equal)
    (axes,) = plots.accuracies({"a": {"gen": {"one": equal}}}, "type", names=["one"]).axes
    ((bar,),) = (bars.get_segments() for bars in axes.collections)
    assert [y for _, y in bar] == pytest.approx([equal[0]] * 2)


def of_right(right: list[int]) -> Result:
    """The result of one checkpoint for three sentences: two of two words, and one of three."""
    right, groups = np.array(right, dtype=bool), np.array([2, 2, 3])
    table = accuracy.tabulate(right, groups, None)
    subset = {"sentences": 3, "right": int(right.sum()), "targets": "x", "groups": table}
    facts = {"examples": "sentences", "by": "target_length", "subsets": {"gen": subset}}
    return Result({"gen.right": right, "gen.group": groups}, facts)


def test_a_comparison_has_every_seed_and_their_means():
    found = accuracy.combine({"a": [of_right([1, 1, 1]), of_right([0, 1, 0])], "b": [of_right([0, 0, 1])]})
    assert found.facts["models"]["a"]["gen"]["accuracy"] == pytest.approx([100, 100 / 3])
    assert found.facts["models"]["a"]["gen"]["groups"] == {"2": [100.0, 50.0], "3": [100.0, 0.0]}
    assert [line.split() for line in found.summary[-3:]] == [
        ["gen", "sentences", "a", "b"], ["2", "2", "75.00", "0.00"], ["3", "1", "50.00", "100.00"]
    ]  # fmt: skip


def test_a_comparison_of_models(saved, tmp_path, capsys):
    softmax, mixed, gated = (saved(kind) for kind in ("softmax", "mixed", "gated"))
    line = ["--subset", "valid,gen", "--device", "cpu"]
    out = str(tmp_path / "both")
    assert main(["accuracy", f"a={softmax}", mixed, f"b={gated}", *line, "--out", out]) == 0
    printed = capsys.readouterr().out
    facts, arrays = json.loads(Path(f"{out}.json").read_text()), np.load(f"{out}.npz")
    assert facts["checkpoints"] == {"a": [softmax, mixed], "b": [gated]}
    alone = {}
    for path in (softmax, mixed, gated):
        assert main(["accuracy", path, *line, "--out", str(tmp_path / "one")]) == 0
        alone[path] = json.loads((tmp_path / "one.json").read_text())
    for model, paths in facts["checkpoints"].items():
        for subset, values in facts["models"][model].items():
            groups = [alone[path]["subsets"][subset]["groups"] for path in paths]
            expected = {length: [g[length]["accuracy"] for g in groups] for length in groups[0]}
            assert values["groups"] == expected
            right = [
                100 * alone[path]["subsets"][subset]["right"] / alone[path]["subsets"][subset]["sentences"]
                for path in paths
            ]
            assert (
                values["accuracy"] == pytest.approx(right) and f"{model}, {subset}: {np.mean(right):.2f} %" in printed
            )
    assert facts["training"] == alone[softmax]["training"]
    for subset, groups in facts["sentences"].items():
        assert groups == {
            length: row["sentences"] for length, row in alone[softmax]["subsets"][subset]["groups"].items()
        }
        for length, number in groups.items():
            means = [f"{np.mean(of[subset]['groups'][length]):.2f}" for of in facts["models"].values()]
            assert [length, str(number), *means] in [line.split() for line in printed.splitlines()]
    assert {"a.1.valid.right", "a.2.gen.group", "b.1.gen.right"} <= set(arrays)
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_names_of_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("m1.pt", "m2.pt", "x=1.pt", "n.pt"):
        Path(name).touch()
    assert named(["m1.pt"]) == {"": ["m1.pt"]} and named(["x=1.pt"]) == {"": ["x=1.pt"]}
    assert named(["a=m*.pt", "n.pt", "b=n.pt", "a=n.pt"]) == {"a": ["m1.pt", "m2.pt", "n.pt", "n.pt"], "b": ["n.pt"]}
    assert named(["runs/lr=1/m.pt"]) == {"": ["runs/lr=1/m.pt"]}


@pytest.mark.parametrize(
    "words,message",
    [
        (["a={0}", "nothing*.pt", "--out", "{2}"], r"there is no checkpoint nothing\*\.pt"),
        (["a={0}", "b={0}x", "--out", "{2}"], r"there is no checkpoint .*\.ptx: did you mean .*\.pt.*\?"),
        (["a={0}", "b={0}"], "a comparison of named checkpoints needs --out"),
        (["{0}", "b={0}", "--out", "{2}"], ".* has no name: several checkpoints are compared as NAME=CHECKPOINT …"),
        (["a={0}", "b={1}", "--out", "{2}"], "b was trained on other data than the first model: compare .*"),
    ],
)
def test_what_cannot_be_compared(words, message, saved, tmp_path, capsys):
    places = saved("softmax"), saved("encoder"), tmp_path / "out"
    assert main(["accuracy", *(word.format(*places) for word in words), "--device", "cpu"]) == 1
    assert re.fullmatch(f"error: {message}\n", capsys.readouterr().err) and not list(tmp_path.iterdir())


def test_models_of_other_data_are_not_compared():
    def result(targets="one", **facts):
        subset = {"sentences": 2, "right": 1, "targets": targets, "groups": {"3": {"sentences": 2, "accuracy": 50.0}}}
        facts = {"examples": "sentences", "by": "target_length", "subsets": {"gen": subset}, **facts}
        return Result({"gen.right": np.array([True, False])}, facts)

    here = result(training=[1, 9])
    with pytest.raises(UsageError, match="b was tested on other data than the first model"):
        accuracy.combine({"a": [here], "b": [result("other", training=[1, 9])]})
    with pytest.raises(UsageError, match="b was trained on other data than the first model"):
        accuracy.combine({"a": [here], "b": [result(training=[1, 8])]})
    # The folder of a training may be gone.
    for models in ({"a": [here], "b": [result()]}, {"a": [result()], "b": [here]}):
        assert accuracy.combine(models).facts["training"] == [1, 9]
    assert "training" not in accuracy.combine({"a": [result()], "b": [result()]}).facts


def test_targets_are_words_or_numbers(loaded):
    model = loaded("softmax")
    dictionary = model.task.target_dictionary
    rows = torch.tensor([[5, 2, 1], [6, 5, 2]])
    assert accuracy.words(model, rows) == [[dictionary[5]], [dictionary[6], dictionary[5]]]
    assert accuracy.words(model, torch.tensor([3, 1])) == [3, 1]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["encoder", "softmax", "lstm"])
def test_symbols(kind, analyse, saved, loaded):
    arrays, facts, printed = analyse("symbols", saved(kind, "ctlpp"))
    model = loaded(kind, "ctlpp")
    assert facts["functions"] == ["p", "q", "a", "b"]
    right = dict.fromkeys("0123", 0)
    vectors = defaultdict(dict)
    for name, table in TABLES.items():
        for symbol, result in zip("0123", table.split(), strict=True):
            vector, said = below_the_classes(model, f"{name} {symbol}")
            vectors[result][name] = vector
            right[result] += said == result
    assert facts["right"] == right and 0 < sum(right.values()) < 16
    for symbol in "0123":
        ordered = [vectors[symbol][name] for name in facts["functions"]]
        np.testing.assert_allclose(arrays[f"representations.{symbol}"], torch.stack(ordered), rtol=1e-4, atol=1e-5)
        expected = np.array([[_cosine(v.tolist(), w.tolist()) for w in ordered] for v in ordered])
        np.testing.assert_allclose(arrays[f"similarity.{symbol}"], expected, atol=1e-5)
        means = {"a–a": expected[0, 1], "a–b": expected[:2, 2:].mean(), "b–b": expected[2, 3]}
        assert facts["mean_similarity"][symbol] == pytest.approx(means, abs=1e-5)
        assert f"symbol {symbol}: {right[symbol]} of 4 functions right" in printed
    assert facts["groups"] == {name: functions.split() for name, functions in GROUPS.items()}


def test_symbols_need_a_classification_layer(loaded, monkeypatch):
    model = loaded("encoder")
    monkeypatch.setattr(model.model, "classifier", None)
    with pytest.raises(UsageError, match="sg_encoder has no classification layer"):
        represent(model, "p 0")


def below_the_classes(model, line: str):
    """The classified vector and the class, from the parts of the model instead of its own pass."""
    words, classes = model.task.source_dictionary, model.task.target_dictionary
    tokens = torch.tensor([[words.bos(), *map(words.index, line.split()), words.eos()]])
    whole = model.model
    if model.has_decoder:
        start = torch.tensor([[classes.eos()]])
        vector = whole.decoder.extract_features(start, whole.encoder(tokens))[0][0, 0]
        logits = whole.decoder.output_layer(vector)
        logits[classes.pad()] = -np.inf
        return vector, classes[logits.argmax()]
    if hasattr(whole, "lstm"):
        vector = whole.lstm(whole.embedding(tokens))[0][0, -1]
    else:
        vector = whole.encoder(tokens)["encoder_out"][0][0, 0]
    return vector, classes[classes.nspecial + whole.classifier(vector).argmax()]


@pytest.mark.parametrize(
    "kind,command,options,pictures",
    [
        ("softmax", "maps", "--input s --target A --steps 1 --heads max", "encoder.png decoder.png cross.png"),
        ("mixed", "values", "--input s --target A --roles encoder --format svg", "encoder.svg"),
        ("gated", "gates", "--input s --target A", "encoder.png decoder.png"),
        ("encoder", "norms", "", "encoder.png"),
        ("encoder", "accuracy", "", "png"),
        ("encoder", "symbols", "", "png"),
    ],
)
def test_files(kind, command, options, pictures, saved, tmp_path, capsys):
    checkpoint = tmp_path / "checkpoint_best.pt"
    shutil.copyfile(saved(kind), checkpoint)
    assert main([command, str(checkpoint), *options.split()]) == 0
    expected = {f"checkpoint_best.{command}.{end}" for end in ["npz", "json", *pictures.split()]}
    written = {path.name for path in tmp_path.iterdir() if path != checkpoint}
    printed = capsys.readouterr().out.splitlines()[-1].removeprefix("written: ").split()
    assert written == expected and {Path(name).name for name in printed} == expected
    for name in pictures.split():
        start = (tmp_path / f"checkpoint_best.{command}.{name}").read_bytes()[:5]
        assert start == (b"<?xml" if name.endswith("svg") else b"\x89PNG\r")


@pytest.mark.parametrize(
    "kind,command,options,message",
    [
        ("softmax", "gates", "--input s", "sg_transformer was trained without copy gates .*copy_gate.*"),
        ("lstm", "maps", "--input p", "sg_lstm has none of fairseq_sg's attentions"),
        ("lstm", "norms", "", "sg_lstm has none of fairseq_sg's attentions"),
        ("softmax", "maps", "--input q", "--input has the word 'q', which is not in .*"),
        ("softmax", "maps", "--input s --subset gen", ".* reads the words of --input: omit --subset, .*"),
        ("softmax", "maps", "--input s --target A --max-len 3", "--max-len limits an output that .*: omit it"),
        ("encoder", "values", "--input p --max-len 3", "--max-len limits an output that .*: omit it"),
        ("softmax", "maps", "--input s --heads 5", "--heads has '5': choose from 1 to 4"),
        ("softmax", "maps", "--input s --steps 0", "--steps has '0': choose from 1 to 2"),
        ("softmax", "maps", "--input s --format none --heads 1", "--format none draws no pictures: leave out --heads"),
        ("gated", "gates", "--input s --format none --vmax 1", "--format none draws no pictures: leave out --vmax"),
        ("softmax", "norms", "--format none --roles cross", "--format none draws no pictures: leave out --roles"),
        (
            "softmax",
            "values",
            "--input s --roles encoder,self",
            "--roles has 'self': choose from encoder, decoder, cross",
        ),
        ("softmax", "accuracy", "--by type", "the subset 'valid' of .* has no types: choose --by .*"),
        ("softmax", "norms", "--subset test", "the data folder .* has no subset 'test': choose from gen, train, valid"),
        ("softmax", "accuracy", "--subset valid,gne", ".* has no subset 'gne': did you mean gen. choose from gen, .*"),
        (
            "lm",
            "experts",
            "--subset vald",
            ".* has no subset 'vald': did you mean valid. choose from test, train, valid",
        ),
        ("lm", "maps", "--input a", ".* is a language model: .* `experts` .*"),
        ("softmax", "maps", "--input s --roles encodr", "--roles has 'encodr': did you mean encoder.*choose from .*"),
        ("softmax", "symbols", "", ".*dataset.json is not of CTL.*: give a folder of .* with --data"),
        ("softmax", "maps", "--input s --model-overrides {'layers':1}", "--model-overrides names 'layers', .*"),
        (
            "gated",
            "gates",
            "--input s --model-overrides {'encoder_layers':'x'}",
            "--model-overrides has an invalid value: .*'x'.*",
        ),
        ("gated", "gates", "--input s --user-dir /nowhere", "there is no folder /nowhere: .* --user-dir"),
    ],
)
def test_errors_are_one_line_and_nothing_is_written(kind, command, options, message, saved, tmp_path, capsys):
    code = main([command, saved(kind), "--out", str(tmp_path / "out"), *options.split()])
    assert code == 1 and not list(tmp_path.iterdir())
    assert re.fullmatch(f"error: {message}\n", capsys.readouterr().err)


def test_a_disk_that_fills_up_leaves_both_files_as_they_were(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    paths = [Path(name) for name in Result({"x": np.zeros(2)}, {"of": "one"}).write(str(tmp_path / "out"))]
    before = [path.read_bytes() for path in paths]
    monkeypatch.setattr("fairseq_sg.analysis.result.write_json", full)
    with pytest.raises(OSError, match="No space"):
        Result({"x": np.ones(2)}, {"of": "other"}).write(str(tmp_path / "out"))
    assert [path.read_bytes() for path in paths] == before and set(tmp_path.iterdir()) == set(paths)


def test_no_gpu(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = ["norms", saved("softmax"), "--out", str(tmp_path / "out")]
    assert main([*command, "--device", "cuda"]) == 1
    assert capsys.readouterr().err == "error: --device is cuda, but PyTorch finds no GPU: choose cpu or auto\n"
    assert main([*command, "--format", "none"]) == 0


@pytest.mark.parametrize(
    "options,message",
    [
        (
            [],
            "name a command: maps, gates, values, norms, experts, accuracy, symbols, consistency, regression, .*",
        ),
        (["map", "x.pt"], "unknown command 'map': did you mean maps. choose from maps, gates, values, .*"),
        (["maps", "x.pt", "--inptu", "s"], "maps has no option --inptu: did you mean --input. "),
        (["maps", "x.pt", "y.pt", "--input", "s"], "y.pt is unexpected: maps takes one CHECKPOINT "),
        (
            ["accuracy", "a=x.pt", "--batch-size", "8", "b=y.pt"],
            "b=y.pt is unexpected: accuracy takes every CHECKPOINT before the options ",
        ),
        (["maps", "x.pt", "--input", "s", "--vmax", "-1"], "argument --vmax: '-1' is not a number above 0 "),
        (
            ["norms", "x.pt", "--device", "cudda"],
            "--device is 'cudda': did you mean cuda. choose from auto, cpu, cuda ",
        ),
        (["accuracy", "x.pt", "--by", "lenght"], "--by is 'lenght': choose from source_length, target_length, type "),
        (["norms", "x.pt", "--limit", "0"], "argument --limit: '0' is not a number from 1 on"),
        (["norms", "x.pt", "--model-overrides", "3"], "argument --model-overrides: '3' is not a dict like .*"),
        (["norms", "x.pt", "--model-overrides", "()"], r"argument --model-overrides: '\(\)' is not a dict like .*"),
        (["norms", "x.pt", "--model-overrides", "{[1]: 2}"], "argument --model-overrides: '{.1.: 2}' is not a dict .*"),
        (["maps", "x.pt"], "one of the arguments --input --index is required"),
    ],
)
def test_wrong_command_lines(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(options)
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and re.match(f"error: {message}", printed) and printed.count("\n") == 1


def test_without_matplotlib_numbers_alone(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    command = ["maps", saved("softmax"), "--input", "s", "--out", str(tmp_path / "out")]
    assert main(command) == 1 and "pip install matplotlib, or" in capsys.readouterr().err
    assert main([*command, "--format", "none"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"out.npz", "out.json"}


def test_panels_in_rows():
    assert plots.in_rows([1, 2, 3, 4, 5], 3) == [[1, 2, 3], [4, 5, None]]
    assert plots.in_rows([1, 2], 3) == [[1, 2]]


def test_colors_of_negative_entries_are_even_on_both_sides_of_0():
    for panel, limits in (([[0.1, 0.7]], (0, 1)), ([[0.1, 1.5]], (0, 1.5)), ([[-0.1, 1.5]], (-1.5, 1.5))):
        axes = plots.heatmaps([[np.array(panel)]], [["$ a"]], ["$ r"], ["c$", "$d"]).axes[0]
        assert axes.images[0].get_clim() == pytest.approx(limits)
        assert [label.get_text() for label in axes.get_xticklabels()] == ["c$", "$d"]


@torch.no_grad()
def test_experts(analyse, saved, loaded):
    arrays, facts, printed = analyse("experts", saved("experts"), "--subset", "gen", "--batch-size", "4")
    model = loaded("experts")
    calls = defaultdict(list)
    for layer, name in ((model.model.encoder.stack, "encoder"), (model.model.decoder.stack, "decoder")):
        (ffn,) = [module for module in layer.modules() if hasattr(module, "activity")]
        ffn.register_forward_hook(lambda m, a, k, o, name=name: calls[name].append((m, a[0], k)), with_kwargs=True)
    dataset = model.subset("gen")
    expected = {f"encoder.step{s}.{w}": 0 for s in (1, 2, 3) for w in ("selections", "weights", "together")}
    active = {1: [], 2: []}
    for index in range(len(dataset)):  # one sentence at a time, without padding
        calls.clear()
        model.model(**dataset.collater([dataset[index]])["net_input"])
        for step, (module, x, _) in enumerate(calls["encoder"], start=1):
            for token in x.flatten(0, 1):
                scores = (module.w3 @ token).sigmoid()
                chosen = scores.topk(2)
                one_hot = torch.zeros(6).scatter_(0, chosen.indices, 1.0).numpy()
                expected[f"encoder.step{step}.selections"] += one_hot
                expected[f"encoder.step{step}.together"] += np.outer(one_hot, one_hot)
                expected[f"encoder.step{step}.weights"] += one_hot * scores.numpy()
        for step, (module, x, _) in enumerate(calls["decoder"], start=1):
            hidden = module.fc1(x).relu()
            # With fewer than five positive units, zeros equal the fifth.
            active[step] += [min(5, int((token > 0).sum())) for token in hidden.flatten(0, 1)]
    assert set(arrays) == set(expected) | {"decoder.step1.active", "decoder.step2.active"}
    for name, value in expected.items():
        np.testing.assert_allclose(arrays[name], value, rtol=1e-5)
    for step, units in active.items():
        assert sorted(arrays[f"decoder.step{step}.active"]) == sorted(units)
    shares = expected["encoder.step2.selections"] / expected["encoder.step2.selections"].sum()
    used = np.exp(-sum(share * np.log(share) for share in shares if share))
    assert facts["layers"]["encoder.step2"]["experts"]["effective"] == pytest.approx(used)
    assert facts["layers"]["encoder.step2"]["experts"]["dead"] == [e + 1 for e in range(6) if shares[e] == 0]
    assert facts["layers"]["decoder.step1"]["active_units"]["mean"] == pytest.approx(np.mean(active[1]))
    assert f"encoder.step2: {used:.1f} of 6 experts in effective use" in printed


@torch.no_grad()
@pytest.mark.parametrize("limit,batches", [(1000, None), (7, 1), (13, 3)])
def test_experts_of_a_language_model(limit, batches, analyse, saved):
    """Complete batches of four streams; layers see the same as in validation with a memory."""
    options = ("--subset", "valid", "--batch-size", "4", "--limit", str(limit))
    arrays, facts, _ = analyse("experts", saved("lm"), *options)
    assert facts["steps"] == {"decoder": 2}
    model = load(saved("lm"), kinds=("text",))
    streams = Streams(model.subset("valid"), 4, 4, 5, all_tokens=True)
    seen = []
    layer = model.model.decoder.stack.layers[1].update.ffn
    layer.register_forward_hook(lambda m, a, o: seen.append(m.activity(a[0])["experts"]), with_kwargs=False)
    memory, tokens = None, 0
    for batch in streams.batches()[:batches]:
        made = streams.collater([streams[i] for i in batch])
        _, extra = model.model(made["net_input"]["src_tokens"], memory=memory, memory_length=7)
        memory, tokens = extra["memory"], tokens + made["ntokens"]
        seen[-1] = seen[-1].transpose(0, 1)[made["target"] != model.task.target_dictionary.pad()]
    chosen = torch.cat(seen).flatten()
    np.testing.assert_array_equal(arrays["decoder.step2.selections"], torch.bincount(chosen, minlength=4))
    assert arrays["decoder.step1.selections"].sum() == 2 * tokens == len(chosen)


def test_pictures_of_experts(saved, tmp_path):
    out = tmp_path / "out"
    assert main(["experts", saved("experts"), "--device", "cpu", "--subset", "valid", "--out", str(out)]) == 0
    names = ("encoder.usage", "encoder.together", "decoder.active")
    assert sorted(path.name for path in tmp_path.glob("*.png")) == sorted(f"out.{name}.png" for name in names)


def test_model_without_feedforward_layers_of_ours(saved, capsys):
    assert main(["experts", saved("lstm"), "--device", "cpu"]) == 1
    assert "sg_lstm has no feedforward layer of a kind that this command supports" in capsys.readouterr().err
