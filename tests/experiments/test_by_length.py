"""BLEU by length: scores, intervals and p-values equal sacreBLEU's; buckets; errors; the page of a recipe."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

import sacrebleu
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments import __main__ as command
from fairseq_sg.experiments import by_length, figures, results
from fairseq_sg.experiments.by_length import Bucket, System, Text, bootstrap, compare, make_buckets, read_text
from fairseq_sg.experiments.plan import make_plan
from fairseq_sg.experiments.recipe import read
from helpers.experiment_files import save

WORDS = "Ly đi xa thu về nhà mưa ăn cơm . , ngày".split()
#: subset -> lengths of its sources, in words; the limit of training is 4
LENGTHS = {"test": [1, 2, 3, 4] * 6, "gen": [5, 6, 7, 9] * 5}
#: system -> share of words that are wrong
WRONG = {"softmax": 0.5, "relative": 0.1, "linear": 0.45}


def sentences(lengths: list[int], seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=length + 3)) for length in lengths]


def corrupted(lines: list[str], share: float, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) if draw.random() < share else w for w in line.split()) for line in lines]


def write_output(path: Path, references: list[str], hypotheses: list[str]) -> None:
    """Writes fairseq-generate's output, in another order than that of the lines, with subwords of two letters."""

    def split(text: str) -> str:
        marked = "".join(f"▁{word}" for word in text.split())
        return " ".join(marked[i : i + 2] for i in range(0, len(marked), 2))

    lines = ["2026-01-01 | INFO | fairseq_cli.generate | loading"]
    for i in random.Random(0).sample(range(len(references)), len(references)):
        lines += [f"S-{i}\tx", f"T-{i}\t{split(references[i])}", f"H-{i}\t-0.5\t{split(hypotheses[i])}"]
        lines += [f"D-{i}\t-0.5\t{split(hypotheses[i])}"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "Generate x with beam=4: BLEU = 0.00"]) + "\n", "utf-8")


def write_data(folder: Path, lengths: dict[str, list[int]] = LENGTHS, **request: object) -> dict[str, list[str]]:
    """A data folder; returns its references."""
    (folder / "raw").mkdir(parents=True)
    request = {"max_length": 4, "length_unit": "words", **request}
    (folder / "dataset.json").write_text(json.dumps({"request": request}))
    references = {subset: sentences(found, seed) for seed, (subset, found) in enumerate(lengths.items())}
    for subset, found in lengths.items():
        (folder / "raw" / f"{subset}.plain.src").write_text("".join("a " * (n - 1) + "a\n" for n in found), "utf-8")
        (folder / "raw" / f"{subset}.plain.tgt").write_text("".join(f"{r}\n" for r in references[subset]), "utf-8")
    return references


def translate(folder: Path, references: dict[str, list[str]], share: float, seed: int = 1) -> dict[str, list[str]]:
    """Writes the outputs of a system; returns them."""
    found = {subset: corrupted(lines, share, seed) for subset, lines in references.items()}
    for subset, lines in found.items():
        write_output(folder / f"generate-{subset}.log", references[subset], lines)
    return found


def system(name: str, seed: int, folder: Path) -> System:
    return System(name, seed, {subset: folder / f"generate-{subset}.log" for subset in LENGTHS})


@pytest.fixture
def made(tmp_path):
    """(data folder, references, system -> subset -> translations); the systems' folders are beside the data."""
    references = write_data(tmp_path / "data")
    found = {
        name: translate(tmp_path / name, references, share, seed) for seed, (name, share) in enumerate(WRONG.items())
    }
    return tmp_path / "data", references, found


def comparison(made, tokenize: str = "none", samples: int = 100, bounds=(2, 6)):
    folder, _, found = made
    systems = [system(name, 1, folder.parent / name) for name in found]
    return compare(read_text(folder, list(LENGTHS)), systems, "softmax", bounds, tokenize, samples)


# Scores.


@pytest.mark.parametrize("tokenize", ["none", "13a"])
def test_scores_are_those_of_sacrebleu(tokenize, made):
    """All systems in one call of sacreBLEU's test, on the lists behind the outputs."""
    _, references, found = made
    result = comparison(made, tokenize)
    for subset in LENGTHS:
        systems = [(name, translations[subset]) for name, translations in found.items()]
        metrics = {"BLEU": BLEU(tokenize=tokenize), "chrF2": CHRF()}
        signatures, expected = PairedTest(systems, metrics, [references[subset]], "bs", 100)()
        assert result["signatures"] == {name: str(signature) for name, signature in signatures.items()}
        assert [s["name"] for s in result["systems"]] == expected["System"]
        for metric in ("BLEU", "chrF2"):
            there = [s["subsets"][subset][metric] for s in result["systems"]]
            assert [e["score"] for e in there] == [r.score for r in expected[metric]]
            assert [e["ci"] for e in there] == [r.ci for r in expected[metric]]
            assert [e["p"] for e in there] == [None, *(r.p_value for r in expected[metric][1:])]
        for entry in result["systems"]:
            lines = found[entry["name"]][subset]
            bleu = sacrebleu.corpus_bleu(lines, [references[subset]], tokenize=tokenize, force=True)
            assert entry["subsets"][subset]["BLEU"]["score"] == pytest.approx(bleu.score, abs=1e-9)
            assert entry["subsets"][subset]["chrF2"]["score"] == pytest.approx(
                sacrebleu.corpus_chrf(lines, [references[subset]]).score, abs=1e-9
            )
    # Much better systems differ significantly, similar ones do not.
    p = {entry["name"]: entry["subsets"]["gen"]["BLEU"]["p"] for entry in result["systems"]}
    assert p["relative"] == pytest.approx(1 / 101) and p["linear"] > 0.05
    assert f"|bs:100|seed:12345|case:mixed|eff:no|tok:{tokenize}|" in result["signatures"]["BLEU"]
    assert result["subsets"] == {"test": 24, "gen": 20} and (result["limit"], result["unit"]) == (4, "words")


def test_scores_of_buckets(made):
    """Each is the score of the sentences that a plain loop finds, in any subset."""
    _, references, found = made
    result = comparison(made)
    assert [(b["low"], b["high"], b["sentences"]) for b in result["buckets"]] == [
        (1, 2, 12), (3, 4, 12), (5, 6, 10), (7, None, 10),
    ]  # fmt: skip
    for entry in result["systems"]:
        for bucket, scores in zip(result["buckets"], entry["buckets"], strict=True):
            pairs = [
                (found[entry["name"]][subset][i], references[subset][i])
                for subset, lengths in LENGTHS.items()
                for i, length in enumerate(lengths)
                if bucket["low"] <= length <= (bucket["high"] or 99)
            ]
            lines, of = zip(*pairs, strict=True)
            for metric, scorer in (("BLEU", BLEU(tokenize="none", force=True)), ("chrF2", CHRF())):
                _, expected = PairedTest([("x", lines)], {metric: scorer}, [of], "bs", 100)()
                assert scores[metric] == {"score": expected[metric][0].score, "ci": expected[metric][0].ci, "p": None}


def test_length_ratio():
    assert by_length.length_ratio(["a b", "c"], ["a b c d", "e f"], "none") == 0.5
    assert by_length.length_ratio(["a.", "c"], ["a b c d", "e f"], "13a") == 0.5
    assert by_length.length_ratio(["a.", "c"], ["a b c d", "e f"], "none") == 2 / 6
    assert by_length.length_ratio(["", ""], ["a b", "c"], "none") == 0


def test_no_translation_at_all_is_a_score_of_zero():
    scores, _ = bootstrap(["", ""], ["a b c d", "e f g h"], "none", ["a b c d", "x"], samples=20)
    assert (scores["BLEU"].score, scores["BLEU"].ci) == (0, 0) and 0 < scores["BLEU"].p <= 1


# Buckets.


def test_buckets():
    text = Text({"test": ["r"] * 5, "gen": ["r"] * 3}, {"test": [1, 4, 5, 2, 4], "gen": [6, 30, 31]}, "words", 4)
    assert make_buckets(text, [2, 10, 20, 30]) == [
        Bucket(1, 2, [("test", 0), ("test", 3)]),
        Bucket(3, 4, [("test", 1), ("test", 4)]),
        Bucket(5, 10, [("test", 2), ("gen", 0)]),
        Bucket(21, 30, [("gen", 1)]),
        Bucket(31, None, [("gen", 2)]),
    ]
    assert [b.label for b in make_buckets(text, [4])] == ["1–4", "5+"]
    # Without a limit, only the bounds count.
    without = Text(text.references, text.lengths, "words", 0)
    assert [b.label for b in make_buckets(without, [10, 40])] == ["1–10", "11–40"]


def test_lengths_are_those_of_the_data(tmp_path):
    write_data(tmp_path / "words")
    assert read_text(tmp_path / "words", ["gen"]).lengths == {"gen": LENGTHS["gen"]}
    write_data(tmp_path / "letters", length_unit="characters")
    assert read_text(tmp_path / "letters", ["test"]).lengths == {"test": [1, 3, 5, 7] * 6}
    write_data(tmp_path / "all", max_length=0, length_unit=None)
    text = read_text(tmp_path / "all", ["test"])
    assert (text.limit, text.unit, text.lengths) == (0, "words", {"test": LENGTHS["test"]})


# The bootstrap's seed, and systems of several seeds.


def test_the_seed_is_sacrebleus(made, monkeypatch):
    first = comparison(made)
    assert comparison(made) == first
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    other = comparison(made)
    assert "|seed:7|" in other["signatures"]["BLEU"]
    for old, new in zip(first["systems"], other["systems"], strict=True):
        assert old["subsets"]["gen"]["BLEU"]["score"] == new["subsets"]["gen"]["BLEU"]["score"]
        assert old["subsets"]["gen"]["BLEU"]["ci"] != new["subsets"]["gen"]["BLEU"]["ci"]


@pytest.mark.parametrize("seed", ["none", "0", "-1", "", "²"])
def test_a_seed_that_is_none_is_refused(seed, made, monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", seed)
    with pytest.raises(UsageError, match="SACREBLEU_SEED is .* set it to a whole number above 0"):
        comparison(made)


def test_systems_are_tested_against_the_baseline_of_their_seed(made):
    folder, references, found = made
    bases = {1: found["softmax"], 2: translate(folder.parent / "base2", references, 0.12, 22)}
    systems = [
        system("softmax", 1, folder.parent / "softmax"),
        system("softmax", 2, folder.parent / "base2"),
        *(system("relative", seed, folder.parent / "relative") for seed in (1, 2, 3)),
    ]
    result = compare(read_text(folder, list(LENGTHS)), systems, "softmax", [4], "none", 50)
    p = {(e["name"], e["seed"]): e["subsets"]["gen"]["BLEU"]["p"] for e in result["systems"]}
    for seed, base in bases.items():
        scores, _ = bootstrap(found["relative"]["gen"], references["gen"], "none", base["gen"], 50)
        assert p["relative", seed] == scores["BLEU"].p
    assert p["relative", 1] != p["relative", 2]
    assert p["softmax", 1] is p["softmax", 2] is p["relative", 3] is None
    with pytest.raises(UsageError, match="two systems have the same name and seed"):
        compare(read_text(folder, list(LENGTHS)), [systems[0], systems[0]], "softmax", [4], "none", 50)


# What cannot be scored.


def rename(old: str, new: str):
    return lambda made: (made[0].parent / old).rename(made[0].parent / new)


def edit(name: str, old: str, new: str):
    def change(made) -> None:
        path = made[0].parent / name
        assert old in path.read_text("utf-8")
        path.write_text(path.read_text("utf-8").replace(old, new, 1), "utf-8")

    return change


@pytest.mark.parametrize(
    "change,message",
    [
        (rename("linear/generate-gen.log", "linear/x"), "linear/generate-gen.log: No such file or directory"),
        (edit("linear/generate-test.log", "H-3\t", "X-3\t"), "1 of 24 sentences have no hypothesis, the first is H-3"),
        (edit("linear/generate-test.log", "T-3\t", "T-3\t▁another"), "T-3 is not line 4 of the references"),
        (rename("data/dataset.json", "data/x"), "data has no dataset.json: make it with `python -m data_prep`"),
        (rename("data/raw/gen.plain.src", "data/x"), "gen.plain.src: No such file or directory"),
        (edit("data/raw/test.plain.src", "a\n", "a\na\n"), "test.plain.tgt: 24 lines, but test.plain.src has 25"),
    ],
)
def test_what_cannot_be_scored_is_one_line(change, message, made):
    change(made)
    folder, _, found = made
    with pytest.raises(UsageError) as error:
        systems = [
            System(name, 1, {subset: folder.parent / name / f"generate-{subset}.log" for subset in LENGTHS})
            for name in found
        ]
        compare(read_text(folder, list(LENGTHS)), systems, "softmax", [2, 6], "none", 20)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_p_values_are_not_smaller_than_they_can_be():
    shown = [by_length.p_value({"p": p}, 1000) for p in (None, 1 / 1001, 2 / 1001, 0.0496, 1.0)]
    assert shown == ["–", "< 0.001", "0.002", "0.050", "1.000"]


# The figure.


def drawn(seeds: int, limit: int = 4):
    plt = figures.pyplot()

    def entry(score: float):
        return {metric: {"score": score, "ci": 1.5, "p": None} for metric in by_length.METRICS}

    systems = [
        {"name": name, "seed": seed, "buckets": [entry(base + seed), entry(2 * base + seed), entry(base)]}
        for name, base in (("softmax", 0.0), ("relative", 20.0))
        for seed in range(1, seeds + 1)
    ]
    buckets = [{"high": high, "label": label, "sentences": 7} for high, label in ((2, "1–2"), (4, "3–4"), (None, "5+"))]
    figure, axes = plt.subplots()
    found = {"buckets": buckets, "limit": limit, "unit": "words", "systems": systems}
    by_length.draw(axes, found, "BLEU")
    plt.close(figure)
    return axes


def test_the_lengths_of_training_are_shaded():
    (shade,) = drawn(1).patches
    assert (shade.get_x(), shade.get_x() + shade.get_width()) == (-0.5, 1.5)
    assert [label.get_text() for label in drawn(1).get_xticklabels()] == ["1–2\n7", "3–4\n7", "5+\n7"]
    assert not drawn(1, limit=0).patches


@pytest.mark.parametrize(
    "seeds,means,reach", [(1, [21, 41, 20], [(19.5, 22.5)]), (3, [22, 42, 20], [(21, 23)])], ids=["one", "several"]
)
def test_means_and_what_they_range_over(seeds, means, reach):
    """An interval for one seed, minimum to maximum for several; not below 0."""
    softmax, relative = drawn(seeds).containers
    assert list(relative.lines[0].get_ydata()) == pytest.approx(means)
    low, high = relative.lines[2][0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx(reach[0])
    assert min(segment[0, 1] for segment in softmax.lines[2][0].get_segments()) == 0
    assert softmax.get_label() == "softmax"


# In a recipe.

TINY = """\
title: A tiny translation
source: nobody
data:
  tiny:
    folder: tiny
    prepare: parallel --src SRC --tgt TGT --max-length 4
    subsets: [test, gen]
steps: 4
validate_every: 2
batch_size_valid: 16
seeds: 2
unit: percent
checkpoint: last
generate: --beam 2 --max-len-b 12 --post-process sentencepiece
train: --task sg_translation
columns:
  short: {subset: test, metric: bleu}
  long: {subset: gen, metric: bleu}
by_length: {baseline: softmax, tokenize: none, bounds: [2, 6]}
rows:
  softmax: {label: soft, arguments: ""}
  relative: {arguments: --encoder-attention relative --decoder-attention relative}
"""


def planned(folder: Path, text: str = TINY, **more):
    path = folder / "tiny.yaml"
    path.write_text(text)
    return make_plan(read(path), data=folder, out=folder / "out", **more)


RESULT = {
    "steps": 4, "generated": {"test": {"bleu": 3.0}, "gen": {"bleu": 2.0}}, "curve": [], "accuracy": {}, "loss": {},
}  # fmt: skip


def test_translations_of_a_recipe(tmp_path, capsys):
    """Two rows, two seeds; the baseline of the second seed diverged."""
    references = write_data(tmp_path / "tiny")
    plan = planned(tmp_path)
    trials = plan.trials()
    for number, trial in enumerate(trials):
        translate(trial.run.folder, references, (0.5, 0.2, 0, 0.3)[number], number)
        failed = (trial.row, trial.run.seed) == ("softmax", 2)
        save(trial.run, **({"diverged": {"step": 2, "why": "x"}} if failed else {"result": RESULT}))
    prefix = tmp_path / "results" / "tiny_v0.2"
    command.publish(plan, trials, prefix)
    found = results.read(tmp_path / "results" / "tiny_v0.2.json").bleu
    scores = {(e["name"], e["seed"]): e["subsets"] for e in found["tiny"]["systems"]}
    assert list(scores) == [("softmax", 1), ("relative", 1), ("relative", 2)]
    assert scores["relative", 1]["gen"]["BLEU"]["p"] < 0.05 and scores["relative", 2]["gen"]["BLEU"]["p"] is None
    assert found["tiny"]["baseline"] == "softmax" and found["tiny"]["samples"] == by_length.SAMPLES
    printed = capsys.readouterr().out
    assert "BLEU by length, tiny" in printed and "results: " in printed
    # The page.
    shown = (tmp_path / "results" / "tiny_v0.2-bleu.md").read_text("utf-8").splitlines()
    assert shown[:3] == ["# A tiny translation: BLEU by length", "", "![BLEU by length](tiny_v0.2-bleu.png)"]
    assert "## tiny: trained on sources of at most 4 words" in shown
    gen, bleu = scores["relative", 1]["gen"], scores["relative", 1]["gen"]["BLEU"]
    row = f"| gen | relative | 1 | {bleu['score']:.1f} ± {bleu['ci']:.1f} | {by_length.p_value(bleu, 1000)} | "
    row += f"{gen['chrF2']['score']:.1f} ± "
    assert sum(line.startswith(row) and line.endswith("| 1.00 |") for line in shown) == 1
    assert sum(line.startswith("| test | soft | 1 | ") and line.count("| – |") == 2 for line in shown) == 1
    rows = [tuple(line.split(" | ")[:2]) for line in shown if line.startswith(("| test | ", "| gen | "))]
    assert rows == [(f"| {subset}", name) for subset in LENGTHS for name in ("soft", "relative", "relative")]
    assert "| model | seed | 1–2 | 3–4 | 5–6 | 7+ |" in shown and "| sentences |  | 12 | 12 | 10 | 10 |" in shown
    first = next(entry for entry in found["tiny"]["systems"] if (entry["name"], entry["seed"]) == ("relative", 1))
    cells = [f"{e['BLEU']['score']:.1f} ± {e['BLEU']['ci']:.1f} ({e['length_ratio']:.2f})" for e in first["buckets"]]
    assert f"| relative | 1 | {' | '.join(cells)} |" in shown
    for signature in found["tiny"]["signatures"].values():
        assert any(signature in line for line in shown) and "bs:1000|seed:12345" in signature
    assert (tmp_path / "results" / "tiny_v0.2-bleu.png").read_bytes().startswith(b"\x89PNG")
    # Missing translations are a one-line error; other results remain.
    (trials[1].run.folder / "generate-gen.log").unlink()
    before = results.read(tmp_path / "results" / "tiny_v0.2.json")
    with pytest.raises(UsageError, match="generate-gen.log: No such file"):
        command.publish(plan, trials, prefix)
    after = results.read(tmp_path / "results" / "tiny_v0.2.json")
    assert after.bleu == before.bleu and all(
        after.of(*key) == before.of(*key) for key in (("softmax", "tiny"), ("relative", "tiny"))
    )
    # So are those of a training whose evaluation failed.
    save(trials[1].run, result=RESULT, failed="evaluation")
    command.publish(plan, trials, prefix)
    capsys.readouterr()
    # A row has another label, and another row is gone.
    text = TINY.replace("label: soft", "label: hard").replace("  relative: {arg", "  rotary: {arg")
    plan = planned(tmp_path, text, seeds="1")
    (trial,) = [trial for trial in plan.trials() if trial.row == "softmax"]
    earlier = results.read(tmp_path / "results" / "tiny_v0.2.json")
    scored = by_length.score(plan, [trial], results.collect(plan, [trial]), earlier.bleu)["tiny"]
    assert [row[:3] for row in by_length.subset_table(scored)[1:]] == [["test", "hard", "1"], ["gen", "hard", "1"]]


@pytest.mark.parametrize("order", [("relative", "softmax"), ("softmax", "relative")])
def test_a_seed_that_is_trained_again_and_diverges_has_no_scores(order, tmp_path):
    """Also where the baseline is the first of them."""
    plan, references = planned(tmp_path, seeds="1"), write_data(tmp_path / "tiny")
    trials = [trial for trial in plan.trials() if trial.row in order]
    for trial in trials:
        translate(trial.run.folder, references, 0.3)
        save(trial.run, result=RESULT)
    found = by_length.score(plan, trials, results.collect(plan, trials))
    assert [one["name"] for one in found["tiny"]["systems"]] == ["softmax", "relative"]
    first, second = sorted(trials, key=lambda trial: order.index(trial.row))
    save(first.run, diverged={"step": 2})
    found = by_length.score(plan, trials, results.collect(plan, trials), found)
    assert [one["name"] for one in found["tiny"]["systems"]] == [second.row]
    assert f"{first.row} " not in by_length.as_tables(found)
    save(second.run, diverged={"step": 2})
    assert by_length.score(plan, trials, results.collect(plan, trials), found) is None


def test_a_seed_that_is_trained_again_elsewhere_keeps_its_scores(tmp_path):
    """Its translations are where the file was made. Here it has only begun."""
    plan, references = planned(tmp_path, seeds="1"), write_data(tmp_path / "tiny")
    prefix = tmp_path / "results" / "tiny"
    for trial in plan.trials():
        translate(trial.run.folder, references, 0.3)
        save(trial.run, result=RESULT)
    command.publish(plan, plan.trials(), prefix)
    before = results.read(prefix.with_suffix(".json"))
    elsewhere = replace(plan, out=tmp_path / "elsewhere")
    for trial in elsewhere.trials():
        save(trial.run)
    command.publish(elsewhere, elsewhere.trials(), prefix)
    after = results.read(prefix.with_suffix(".json"))
    assert before.bleu["tiny"]["systems"] and after.bleu == before.bleu and after.records == before.records


def test_rows_of_another_time_are_united(made):
    """Systems of an earlier comparison stay. A new system is tested against the baseline's translations from there."""
    folder, references, found = made
    text = read_text(folder, list(LENGTHS))
    at_once = comparison(made)
    one, two, three = (system(name, 1, folder.parent / name) for name in ("softmax", "relative", "linear"))
    first = compare(text, [one, two], "softmax", (2, 6), "none", 100)
    both = compare(text, [three], "softmax", (2, 6), "none", 100, json.loads(json.dumps(first)))
    assert both == at_once
    # A baseline that was translated again: what was tested against the old one has no p-value any more.
    translate(folder.parent / "softmax", references, 0.3, 7)
    again = compare(text, [one], "softmax", (2, 6), "none", 100, json.loads(json.dumps(both)))
    assert [entry["name"] for entry in again["systems"]] == ["softmax", "relative", "linear"]
    for name, before, now in zip(("relative", "linear"), both["systems"][1:], again["systems"][1:], strict=True):
        for subset in LENGTHS:
            assert now["subsets"][subset]["BLEU"] == before["subsets"][subset]["BLEU"] | {"p": None}, name
    # Other text is refused.
    for path in folder.glob("raw/gen.plain.*"):
        path.write_text("".join(path.read_text("utf-8").splitlines(keepends=True)[1:]), "utf-8")
    for name in found:
        write_output(folder.parent / name / "generate-gen.log", references["gen"][1:], found[name]["gen"][1:])
    with pytest.raises(UsageError, match="other references of BLEU by length: choose another --results"):
        compare(read_text(folder, list(LENGTHS)), [one], "softmax", (2, 6), "none", 100, both)


def test_earlier_results_without_a_subset_are_of_other_references(made):
    """The baseline was translated there alone, and without that subset."""
    folder = made[0]
    baseline = System("softmax", 1, {"test": folder.parent / "softmax" / "generate-test.log"})
    earlier = compare(read_text(folder, ["test"]), [baseline], "softmax", (2, 6), "none", 100)
    linear = system("linear", 1, folder.parent / "linear")
    with pytest.raises(UsageError, match="other references of BLEU by length: choose another --results"):
        compare(read_text(folder, list(LENGTHS)), [linear], "softmax", (2, 6), "none", 100, earlier)


def test_every_dataset_is_compared_by_itself(tmp_path):
    """Beside the data of TINY: data of all lengths without a long subset, and data without a BLEU column."""
    more = """\
  whole: {folder: whole, prepare: scan --split simple, subsets: [test]}
  other: {folder: other, prepare: scan --split simple, subsets: [test]}
steps: 4
"""
    text = TINY.replace("steps: 4\n", more).replace(
        "{subset: test, metric", "{subset: test, data: [tiny, whole], metric"
    )
    text = text.replace("columns:\n", "columns:\n  right: {subset: test, data: [other]}\n")
    plan = planned(tmp_path, text, seeds="1")
    trials = plan.trials()
    references = {
        "tiny": write_data(tmp_path / "tiny"),
        "whole": write_data(tmp_path / "whole", {"test": [1, 7, 3]}, max_length=0, length_unit=None),
    }
    for trial in trials:
        save(trial.run, result=RESULT)
        if trial.data in references:
            translate(trial.run.folder, references[trial.data], 0.3)
    found = by_length.score(plan, trials, results.collect(plan, trials))
    assert [(name, c["subsets"], c["limit"]) for name, c in found.items()] == [
        ("tiny", {"test": 24, "gen": 20}, 4), ("whole", {"test": 3}, 0),
    ]  # fmt: skip
    for name, comparison in found.items():
        assert [s["outputs"]["test"] for s in comparison["systems"]] == [
            str(t.run.folder / "generate-test.log") for t in trials if t.data == name
        ]
    assert "## whole: trained on sources of all lengths" in by_length.page("x", found, "x.png")
    # The order is that of the recipe, whatever was there before.
    backwards = {name: comparison | {"systems": comparison["systems"][::-1]} for name, comparison in found.items()}
    again = by_length.score(plan, trials[:1], results.collect(plan, trials), backwards)
    assert [s["name"] for s in again["tiny"]["systems"]] == [s["name"] for s in found["tiny"]["systems"]]
    assert len(again["tiny"]["systems"]) > 1


def test_long_sentences_in_training_are_no_limit(tmp_path):
    write_data(tmp_path / "short", train_all=False)
    write_data(tmp_path / "everything", train_all=True)
    assert [read_text(tmp_path / name, list(LENGTHS)).limit for name in ("short", "everything")] == [4, 0]


def test_a_recipe_without_translations_yet(tmp_path, capsys):
    plan = planned(tmp_path)
    command.publish(plan, plan.trials(), tmp_path / "x")
    assert "BLEU by length" not in capsys.readouterr().out
    assert results.read(tmp_path / "x.json").bleu is None and not (tmp_path / "x-bleu.md").exists()
