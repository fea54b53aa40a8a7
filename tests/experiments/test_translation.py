"""BLEU by length: scores, intervals and p-values equal sacreBLEU's; buckets; errors; a tiny complete run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

import sacrebleu
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import bleu_by_length  # noqa: E402
import recipe  # noqa: E402
import reproduce  # noqa: E402
import runs  # noqa: E402
from bleu_by_length import Bucket, System, Text, bootstrap, compare, make_buckets, read_text  # noqa: E402

from fairseq_sg.errors import UsageError  # noqa: E402
from fairseq_sg.scoring import plain_bleu  # noqa: E402

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
    assert bleu_by_length.length_ratio(["a b", "c"], ["a b c d", "e f"], "none") == 0.5
    assert bleu_by_length.length_ratio(["a.", "c"], ["a b c d", "e f"], "13a") == 0.5
    assert bleu_by_length.length_ratio(["", ""], ["a b", "c"], "none") == 0


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


# The command.


def line_of(made, *more: object) -> list[str]:
    folder, _, found = made
    systems = [f"{name}={folder.parent / name}" for name in found]
    options = ["--results", folder.parent / "out" / "by.length", "--bounds", "2,6", "--tokenize", "none", *more]
    return list(map(str, [folder, *systems, *options]))


def test_files_of_results(made, capsys):
    folder = made[0].parent / "out"
    assert bleu_by_length.main(line_of(made)) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    summary = json.loads((folder / "by.length.json").read_text())
    assert summary["data"]["data"] == json.loads(json.dumps(comparison(made, samples=1000)))
    shown = (folder / "by.length.md").read_text("utf-8").splitlines()
    _, relative, _ = summary["data"]["data"]["systems"]
    gen, bleu = relative["subsets"]["gen"], relative["subsets"]["gen"]["BLEU"]
    assert bleu["p"] == pytest.approx(1 / 1001)
    row = f"| gen | relative | 1 | {bleu['score']:.1f} ± {bleu['ci']:.1f} | < 0.001 | {gen['chrF2']['score']:.1f} ± "
    assert sum(found.startswith(row) and found.endswith("| 1.00 |") for found in shown) == 1
    assert sum(found.startswith("| test | softmax | 1 | ") and found.count("| – |") == 2 for found in shown) == 1
    assert "## data: trained on sources of at most 4 words" in shown
    rows = [tuple(line.split(" | ")[:2]) for line in shown if line.startswith(("| test | ", "| gen | "))]
    assert rows == [(f"| {subset}", name) for subset in LENGTHS for name in WRONG]
    assert "| model | seed | 1–2 | 3–4 | 5–6 | 7+ |" in shown and "| sentences |  | 12 | 12 | 10 | 10 |" in shown
    cells = [f"{e['BLEU']['score']:.1f} ± {e['BLEU']['ci']:.1f}" for e in relative["buckets"]]
    assert f"| relative | 1 | {' | '.join(cells)} |" in shown
    for signature in summary["data"]["data"]["signatures"].values():
        assert any(signature in found for found in shown) and "bs:1000|seed:12345" in signature
    assert (folder / "by.length.png").read_bytes().startswith(b"\x89PNG")
    assert "softmax" in printed.out and "± " in printed.out
    # Again, from the same outputs.
    before = (folder / "by.length.json").read_bytes()
    assert bleu_by_length.main(line_of(made)) == 0 and (folder / "by.length.json").read_bytes() == before


def test_outputs_of_results_path_are_found(made):
    """fairseq-generate --results-path writes .txt."""
    old = made[0].parent / "linear" / "generate-gen.log"
    old.rename(old.with_suffix(".txt"))
    assert bleu_by_length.main(line_of(made)) == 0


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
        (
            rename("linear/generate-gen.log", "linear/x"),
            "linear has no generate-gen.log or generate-gen.txt: run fairseq-generate for the subset gen",
        ),
        (
            lambda made: (made[0].parent / "linear/generate-gen.txt").write_text("x"),
            "linear has generate-gen.log and generate-gen.txt: remove the one that should not be scored",
        ),
        (edit("linear/generate-test.log", "H-3\t", "X-3\t"), "1 of 24 sentences have no hypothesis, the first is H-3"),
        (edit("linear/generate-test.log", "T-3\t", "T-3\t▁another"), "T-3 is not line 4 of the references"),
        (rename("data/dataset.json", "data/x"), "dataset.json: No such file or directory: give a folder of data_prep"),
        (rename("data/raw/gen.plain.src", "data/x"), "gen.plain.src: No such file or directory"),
        (edit("data/raw/test.plain.src", "a\n", "a\na\n"), "test.plain.tgt: 24 lines, but test.plain.src has 25"),
    ],
)
def test_what_cannot_be_scored_is_one_line(change, message, made, capsys):
    change(made)
    assert bleu_by_length.main(line_of(made)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert message in printed.err and not (made[0].parent / "out").exists()


@pytest.mark.parametrize(
    "more,message",
    [
        (["--bounds", "6,2"], "--bounds: must be whole numbers above 0, ascending, comma separated, not '6,2'"),
        (["--bounds", "0,2"], "must be whole numbers above 0"),
        (["--bounds", "2,2"], "must be whole numbers above 0"),
        (["--bounds", "2,x"], "must be whole numbers above 0"),
        (["--subsets", "gen,test,gen"], "--subsets has 'gen' twice"),
        (["--tokenize", "moses"], "--tokenize: invalid choice: 'moses'"),
        (["--bound", "3"], "unrecognized arguments: --bound"),
    ],
)
def test_wrong_options(more, message, made, capsys):
    with pytest.raises(SystemExit) as error:
        bleu_by_length.main(line_of(made, *more))
    printed = capsys.readouterr().err
    assert error.value.code == 2 and message in printed and printed.count("\n") == 1


@pytest.mark.parametrize("name", ["softmax", "softmax=", "=x", "softmax=x"])
def test_wrong_systems(name, made, capsys):
    line = line_of(made)
    with pytest.raises(SystemExit):
        bleu_by_length.main([line[0], name, *line[1:]])
    expected = "NAME=FOLDER has 'softmax' twice" if name == "softmax=x" else f"must be NAME=FOLDER, not {name!r}"
    assert expected in capsys.readouterr().err


def test_p_values_are_not_smaller_than_they_can_be():
    shown = [bleu_by_length.p_value({"p": p}, 1000) for p in (None, 1 / 1001, 2 / 1001, 0.0496, 1.0)]
    assert shown == ["–", "< 0.001", "0.002", "0.050", "1.000"]


# The figure.


def drawn(seeds: int, limit: int = 4):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def entry(score: float):
        return {metric: {"score": score, "ci": 1.5, "p": None} for metric in bleu_by_length.METRICS}

    systems = [
        {"name": name, "seed": seed, "buckets": [entry(base + seed), entry(2 * base + seed), entry(base)]}
        for name, base in (("softmax", 0.0), ("relative", 20.0))
        for seed in range(1, seeds + 1)
    ]
    buckets = [{"high": high, "label": label, "sentences": 7} for high, label in ((2, "1–2"), (4, "3–4"), (None, "5+"))]
    figure, axes = plt.subplots()
    found = {"buckets": buckets, "limit": limit, "unit": "words", "systems": systems}
    bleu_by_length.draw(axes, found, "BLEU")
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
    prepare: >-
      parallel --src SRC --tgt TGT --valid-share 0 --test-share 0.3 --vocab-size 40 --model bpe --max-length 4
    subsets: [test, gen]
steps: 4
validate_every: 2
batch_size_valid: 16
seeds: 2
unit: percent
checkpoint: last
generate: --beam 2 --max-len-b 12 --post-process sentencepiece
train: >-
  --task sg_translation --arch sg_transformer_scan --encoder-embed-dim 16 --decoder-embed-dim 16
  --encoder-attention-heads 2 --decoder-attention-heads 2 --encoder-layers 1 --decoder-layers 1
  --criterion cross_entropy_orthogonality --optimizer torch_adam --lr 1e-3 --batch-size 16
columns:
  short: {subset: test, metric: bleu}
  long: {subset: gen, metric: bleu}
by_length: {baseline: softmax, tokenize: none, bounds: [2, 6]}
rows:
  softmax: {label: soft, arguments: ""}
  relative: {arguments: --encoder-attention relative --decoder-attention relative}
chosen: [everything]
"""


def read(folder: Path, text: str = TINY) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(text)
    return path


def test_by_length_of_a_recipe(tmp_path):
    found = recipe.read(read(tmp_path)).by_length
    assert found == recipe.ByLength("softmax", "none", (2, 6))
    plain = TINY.replace("by_length: {baseline: softmax, tokenize: none, bounds: [2, 6]}\n", "")
    assert recipe.read(read(tmp_path, plain)).by_length is None
    default = recipe.read(read(tmp_path, TINY.replace("tokenize: none, ", ""))).by_length
    assert default.tokenize == "13a" and recipe.TOKENIZERS == plain_bleu.TOKENIZERS


@pytest.mark.parametrize(
    "old,new,message",
    [
        ("baseline: softmax", "baseline: soft", "by_length, key 'baseline': is 'soft': choose from softmax, relative"),
        ("tokenize: none", "tokenize: moses", "by_length, key 'tokenize': is 'moses': choose from 13a, none, char"),
        ("[2, 6]", "[6, 2]", "by_length, key 'bounds': must be whole numbers above 0, ascending, not [6, 2]"),
        ("[2, 6]", "[0, 2]", "key 'bounds': must be whole numbers above 0"),
        ("[2, 6]", "[]", "key 'bounds': must be whole numbers above 0"),
        ("[2, 6]", "[2, 2]", "key 'bounds': must be whole numbers above 0"),
        ("[2, 6]", "[true]", "key 'bounds': must be whole numbers above 0"),
        ("bounds: [2, 6]", "bound: 3", "by_length, key 'bounds': is missing"),
        ("[2, 6]", "[2, 6], seeds: 3", "by_length, key 'seeds': is unknown"),
        ("generate: --beam 2 --max-len-b 12 --post-process sentencepiece\n", "", "key 'generate'"),
    ],
)
def test_what_is_wrong_is_named(old, new, message, tmp_path):
    assert TINY.count(old) == 1
    with pytest.raises(recipe.RecipeError) as error:
        recipe.read(read(tmp_path, TINY.replace(old, new)))
    assert message in str(error.value)


def test_by_length_needs_bleu(tmp_path):
    text = TINY.replace(", metric: bleu", "").replace(
        "generate: --beam 2 --max-len-b 12 --post-process sentencepiece\n", ""
    )
    with pytest.raises(recipe.RecipeError, match="key 'by_length': is for a recipe with columns of the metric 'bleu'"):
        recipe.read(read(tmp_path, text))


@pytest.mark.parametrize("name", ["own_translation_length", "own_translation_length_iwslt"])
def test_the_models_of_the_recipes_differ_in_attention_alone(name):
    found = recipe.read(recipe.find(name))
    assert list(found.rows) == ["softmax", "log_length", "relative", "linear", "galerkin"]
    for row in found.rows.values():
        assert {word for word in row.arguments if word.startswith("--")} <= {
            "--encoder-attention", "--decoder-attention", "--cross-attention", "--logit-scale",
        }  # fmt: skip
    limits = {name: data.prepare.partition("--max-length ")[2].split()[0] for name, data in found.data.items()}
    for data, limit in limits.items():
        assert ("gen" in found.data[data].subsets) == (limit != "0") and int(limit) in (0, *found.by_length.bounds)


def planned(tmp_path: Path, *more: object):
    line = [read(tmp_path), "--out", tmp_path / "out", "--data", tmp_path, "--device", "cpu", *more]
    args = reproduce.parse_arguments(list(map(str, line)))
    args.recipe_path, args.jobs = args.recipe_path.resolve(), 1
    return args


def test_translations_of_a_recipe(tmp_path, monkeypatch, capsys):
    """Two rows, two seeds; the baseline of the second seed diverged."""
    references = write_data(tmp_path / "tiny")
    args = planned(tmp_path)
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "tiny"])
    records = []
    for number, trial in enumerate(args.trials):
        translate(trial.run.folder, references, (0.5, 0.2, 0, 0.3)[number], number)
        record = {"name": "x", "seed": trial.run.seed, "folder": str(trial.run.folder), "commit": "abc", "machine": {}}
        result = {"steps": 4, "generated": {"test": {"bleu": 3.0}, "gen": {"bleu": 2.0}}, "curve": [], "accuracy": {}}
        failed = (trial.row, trial.run.seed) == ("softmax", 2)
        records.append(
            record | ({"diverged": {"step": 2, "why": "x"}} if failed else {"result": result | {"loss": {}}})
        )
    reproduce.publish(args, records)
    summary = json.loads((args.out / "summary-bleu.json").read_text())
    found = {(e["name"], e["seed"]): e["subsets"] for e in summary["data"]["tiny"]["systems"]}
    assert list(found) == [("soft", 1), ("relative", 1), ("relative", 2)]
    assert found["relative", 1]["gen"]["BLEU"]["p"] < 0.05 and found["relative", 2]["gen"]["BLEU"]["p"] is None
    assert summary["data"]["tiny"]["baseline"] == "soft"
    shown = (args.out / "summary-bleu.md").read_text("utf-8")
    assert "| gen | relative | 2 | " in shown and "Commit abc; " in shown and "3 of 4 trainings, of 4 steps" in shown
    assert "tok:none" in shown and (args.out / "summary-bleu.png").exists() and (args.out / "summary.md").exists()
    assert "A tiny translation, tiny" in capsys.readouterr().out
    # Missing translations are a one-line error; other results remain.
    (args.trials[0].run.folder / "generate-gen.log").unlink()
    with pytest.raises(SystemExit) as error:
        reproduce.publish(args, records)
    assert str(error.value).startswith("error: ") and "has no generate-gen.log" in str(error.value)


def test_every_dataset_is_compared_by_itself(tmp_path, monkeypatch):
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
    path = read(tmp_path, text)
    args = reproduce.parse_arguments(
        [str(path), "--out", str(tmp_path / "out"), "--data", str(tmp_path), "--device", "cpu", "--seeds", "1"]
    )
    args.jobs = 1
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "tiny"])
    references = {
        "tiny": write_data(tmp_path / "tiny"),
        "whole": write_data(tmp_path / "whole", {"test": [1, 7, 3]}, max_length=0, length_unit=None),
    }
    result = {"steps": 4, "generated": {"test": {"bleu": 3.0}}, "curve": [], "accuracy": {}, "loss": {}}
    for trial in args.trials:
        if trial.data in references:
            translate(trial.run.folder, references[trial.data], 0.3)
    record = {"name": "x", "folder": "x", "commit": "abc", "machine": {}, "result": result}
    reproduce.publish(args, [record | {"seed": 1} for _ in args.trials])
    found = json.loads((args.out / "summary-bleu.json").read_text())["data"]
    assert [(name, c["subsets"], c["limit"]) for name, c in found.items()] == [
        ("tiny", {"test": 24, "gen": 20}, 4), ("whole", {"test": 3}, 0),
    ]  # fmt: skip
    for name, comparison in found.items():
        assert [s["outputs"]["test"] for s in comparison["systems"]] == [
            str(t.run.folder / "generate-test.log") for t in args.trials if t.data == name
        ]
    shown = (args.out / "summary-bleu.md").read_text("utf-8")
    assert "## whole: trained on sources of all lengths" in shown


def test_a_recipe_without_translations_yet(tmp_path, monkeypatch, capsys):
    args = planned(tmp_path)
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "tiny"])
    reproduce.publish(args, [{} for _ in args.trials])
    assert "BLEU by length: no training has ended yet" in capsys.readouterr().out
    assert not (args.out / "summary-bleu.json").exists()


def test_trained_translated_and_scored(tmp_path, monkeypatch):
    """The complete way from two text files; then scoring again without generating."""
    pytest.importorskip("sentencepiece")
    draw = random.Random(0)
    sources = [" ".join(draw.choices(WORDS[:9], k=1 + i % 7)) for i in range(120)]
    (tmp_path / "src").write_text("".join(f"{s}\n" for s in sources), "utf-8")
    (tmp_path / "tgt").write_text("".join(f"{' '.join(s.split()[::-1])}\n" for s in sources), "utf-8")
    path = read(tmp_path, TINY.replace("SRC", str(tmp_path / "src")).replace("TGT", str(tmp_path / "tgt")))
    line = [sys.executable, "scripts/reproduce.py", path, "--rows", "softmax", "--seeds", "1", "--device", "cpu"]
    line += ["--jobs", "1", "--memory-guard", "0", "--data", tmp_path, "--out", tmp_path / "out"]
    line += ["--results", tmp_path / "results" / "tiny"]
    done = subprocess.run(
        list(map(str, line)), cwd=REPOSITORY, env=runs.environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "INFO:" not in done.stderr and "DEBUG:" not in done.stderr
    found = json.loads((tmp_path / "results" / "tiny-bleu.json").read_text())["data"]["tiny"]
    subsets = {s: len((tmp_path / "tiny" / "raw" / f"{s}.plain.tgt").read_text("utf-8").splitlines()) for s in LENGTHS}
    assert found["subsets"] == subsets and sum(b["sentences"] for b in found["buckets"]) == sum(subsets.values())
    assert [b["label"] for b in found["buckets"]] == ["1–2", "3–4", "5–6", "7+"] and found["limit"] == 4
    (entry,) = found["systems"]
    (record,) = json.loads((tmp_path / "results" / "tiny.json").read_text())["runs"]
    for subset in subsets:
        # fairseq scores the same words and prints two digits.
        assert entry["subsets"][subset]["BLEU"]["score"] == pytest.approx(
            record["result"]["generated"][subset]["bleu"], abs=0.006
        )
    assert "--beam 2" in (tmp_path / "tiny.yaml").read_text()
    for suffix in ("md", "png"):
        assert (tmp_path / "results" / f"tiny-bleu.{suffix}").stat().st_size > 200
    before = (tmp_path / "results" / "tiny-bleu.png").stat().st_mtime_ns

    monkeypatch.setattr(sys, "argv", ["reproduce.py", "tiny"])
    monkeypatch.chdir(REPOSITORY)
    args = reproduce.parse_arguments([*map(str, line[2:]), "--report"])
    reproduce.publish(args, [record])
    again = json.loads((tmp_path / "results" / "tiny-bleu.json").read_text())["data"]["tiny"]
    assert again == found and (tmp_path / "results" / "tiny-bleu.png").stat().st_mtime_ns > before
