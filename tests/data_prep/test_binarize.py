"""Binaries equal those of ``fairseq-preprocess``, and fairseq's tasks read them."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from data_prep.__main__ import main
from data_prep.binarize import binarize, link_labels, make_dictionary
from data_prep.corpus import Corpus, Subset
from data_prep.dataset import DataError, Pair
from data_prep.scan import Scan
from helpers.commands import succeed

SUBSETS = ("train", "valid", "gen")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SCAN with cutoff 26."""
    out = tmp_path_factory.mktemp("prepared") / "scan"
    assert main(["scan", "--split", "length", "--cutoff", "26", "--out", str(out)]) == 0
    return out


def test_files(prepared: Path) -> None:
    binaries = [
        f"{subset}.src-tgt.{language}.{kind}"
        for subset in SUBSETS
        for language in ("src", "tgt")
        for kind in ("bin", "idx")
    ]
    expected = {*binaries, "dict.src.txt", "dict.tgt.txt", "dataset.json", "raw"}
    assert {path.name for path in prepared.iterdir()} == expected


@pytest.mark.parametrize(("language", "words"), [("src", 13), ("tgt", 6)])
def test_dictionary_has_the_words_and_nothing_else(language: str, words: int, prepared: Path) -> None:
    dictionary = Dictionary.load(str(prepared / f"dict.{language}.txt"))
    assert len(dictionary) == dictionary.nspecial + words
    found = dictionary.symbols[dictionary.nspecial :]
    assert found == sorted(found)
    texts = [(prepared / "raw" / f"{subset}.{language}").read_text("ascii") for subset in SUBSETS]
    assert dict(zip(found, dictionary.count[dictionary.nspecial :])) == Counter(" ".join(texts).split())


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("language", ["src", "tgt"])
def test_binaries_hold_the_text(subset: str, language: str, prepared: Path) -> None:
    dictionary = Dictionary.load(str(prepared / f"dict.{language}.txt"))
    dataset = data_utils.load_indexed_dataset(str(prepared / f"{subset}.src-tgt.{language}"), dictionary)
    lines = (prepared / "raw" / f"{subset}.{language}").read_text("ascii").splitlines()
    assert [dictionary.string(tokens) for tokens in dataset] == lines
    assert all(tokens[-1] == dictionary.eos() and (tokens != dictionary.unk()).all() for tokens in dataset)


def test_equal_to_fairseq_preprocess(prepared: Path, tmp_path: Path) -> None:
    # With our dictionaries; the three subsets get names that the command knows.
    raw = prepared / "raw"
    command = ["--source-lang", "src", "--target-lang", "tgt"]
    command += ["--srcdict", str(prepared / "dict.src.txt"), "--tgtdict", str(prepared / "dict.tgt.txt")]
    command += ["--trainpref", str(raw / "train"), "--destdir", str(tmp_path / "bin")]
    command += ["--testpref", f"{raw / 'valid'},{raw / 'gen'}"]
    succeed("fairseq-preprocess", *command)
    names = {"train": "train", "valid": "test", "gen": "test1"}
    for language in ("src", "tgt"):
        name = f"dict.{language}.txt"
        assert (prepared / name).read_bytes() == (tmp_path / "bin" / name).read_bytes()
        for ours, theirs in names.items():
            for kind in ("bin", "idx"):
                end = f"src-tgt.{language}.{kind}"
                assert (prepared / f"{ours}.{end}").read_bytes() == (tmp_path / "bin" / f"{theirs}.{end}").read_bytes()


def test_fairseq_task_loads_every_subset(prepared: Path) -> None:
    # fairseq infers the languages from the names of the files.
    config = TranslationConfig(data=str(prepared), dataset_impl=None, train_subset="train", required_seq_len_multiple=1)
    task = TranslationTask.setup_task(config)
    for subset in SUBSETS:
        task.load_dataset(subset)
        source, target = (
            (prepared / "raw" / f"{subset}.{language}").read_text("ascii").splitlines() for language in ("src", "tgt")
        )
        dataset = task.dataset(subset)
        assert len(dataset) == len(source)
        for index in (0, len(dataset) - 1):
            assert task.source_dictionary.string(dataset[index]["source"]) == source[index]
            assert task.target_dictionary.string(dataset[index]["target"]) == target[index]


@pytest.mark.parametrize(
    ("names", "validation"),
    [
        (["train", "valid", "gen"], "valid,gen"),
        (["train", "gen"], None),
        (["train", "dev", "gen"], "dev,gen"),
        (["train", "dev", "valid", "gen"], "valid,dev,gen"),
        (["train"], None),
    ],
    ids=["usual", "nothing-held-out", "mcd", "mcd-and-holdout", "nothing-else"],
)
def test_training_command(names: list[str], validation: str | None) -> None:
    corpus = Corpus({name: Subset([Pair("a b", "c")]) for name in names}, "", "", {})
    (command,) = corpus.training_commands(Scan(), Path("data-bin/my data"))
    assert shlex.split(command)[:2] == ["fairseq-train", "data-bin/my data"]
    assert shlex.split(command)[-2:] == ["--save-dir", "checkpoints/my data"]
    assert " --optimizer torch_adam --lr 1e-3 --clip-norm 5 " in command and " --no-epoch-checkpoints " in command
    best = " --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric "
    if validation is None:
        # Otherwise the test set would pick the best checkpoint.
        assert " --disable-validation " in command and best not in command and "--validate" not in command
    else:
        assert f" --valid-subset {validation} --batch-size-valid 1024{best}" in command
        assert " --validate-interval-updates 500 --validate-interval 1000000 --save-interval-updates 500 " in command


@pytest.mark.parametrize(("words", "size"), [(8, 1024), (49, 1024), (107, 512), (480, 128), (736, 64), (70_000, 1)])
def test_batches_of_long_examples_are_evaluated_in_smaller_numbers(words: int, size: int) -> None:
    subsets = {"train": Subset([Pair("a", "b")]), "valid": Subset([Pair("a", " ".join("b" * words))])}
    corpus = Corpus(subsets, "", "", {})
    (command,) = corpus.training_commands(Scan(), Path("data"))
    assert f" --batch-size-valid {size} " in command


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (1_000, "--batch-size 64"),
        (1_100, "--batch-size 32 --update-freq 2"),
        (70_000, "--batch-size 1 --update-freq 64"),
    ],
)
def test_updates_of_long_examples_are_made_of_smaller_batches(words: int, options: str) -> None:
    """Those of the training set alone: others are not trained on."""
    long, short = Subset([Pair("a", " ".join("b" * words))]), Subset([Pair("a", "b")])
    (command,) = Corpus({"train": long, "valid": short}, "", "", {}).training_commands(Scan(), Path("data"))
    assert f" {options} --required-batch-size-multiple 1 " in command
    (command,) = Corpus({"train": short, "valid": long}, "", "", {}).training_commands(Scan(), Path("data"))
    assert " --batch-size 64 --required-batch-size-multiple 1 " in command


def write_raw(folder: Path, **subsets: str) -> None:
    (folder / "raw").mkdir()
    for name, text in subsets.items():
        for language in ("src", "tgt"):
            (folder / "raw" / f"{name}.{language}").write_text(text, "utf-8")


def test_word_of_the_test_set_alone_is_known(tmp_path: Path) -> None:
    write_raw(tmp_path, train="a b\n", gen="b c\n")
    binarize(tmp_path, ["train", "gen"])
    assert (tmp_path / "dict.src.txt").read_text("utf-8") == "a 1\nb 2\nc 1\n"
    assert data_utils.load_indexed_dataset(str(tmp_path / "gen.src-tgt.tgt"))[0].tolist() == [5, 6, 2]


def test_words_of_the_language_that_no_text_has(tmp_path: Path) -> None:
    write_raw(tmp_path, train="a c\n")
    binarize(tmp_path, ["train"], joined=True, words=("c", "b", "a"))
    for language in ("src", "tgt"):
        assert (tmp_path / f"dict.{language}.txt").read_text("utf-8") == "a 2\nb 0\nc 2\n"
        assert data_utils.load_indexed_dataset(str(tmp_path / f"train.src-tgt.{language}"))[0].tolist() == [4, 6, 2]


def test_binaries_of_a_joined_dictionary_are_those_of_fairseq_preprocess(tmp_path: Path) -> None:
    texts = {"src": "a b b\nc a\n", "tgt": "x a\nb y y\n"}
    (tmp_path / "raw").mkdir()
    for language, text in texts.items():
        (tmp_path / "raw" / f"train.{language}").write_text(text, "utf-8")
    binarize(tmp_path, ["train"], joined=True)
    command = ["--source-lang", "src", "--target-lang", "tgt"]
    command += ["--trainpref", str(tmp_path / "raw" / "train"), "--destdir", str(tmp_path / "bin")]
    command += ["--joined-dictionary", "--srcdict", str(tmp_path / "dict.src.txt")]
    succeed("fairseq-preprocess", *command)
    ours = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert len(ours) == 6 and (tmp_path / "dict.src.txt").read_text("utf-8") == "a 3\nb 3\nc 1\nx 1\ny 2\n"
    for name in ours:
        assert (tmp_path / name).read_bytes() == (tmp_path / "bin" / name).read_bytes()


def test_labels_are_read_by_fairseqs_sentence_prediction(tmp_path: Path) -> None:
    from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

    (tmp_path / "raw").mkdir()
    for name, (source, target) in {"train": ("a b\nb\n", "yes\nno\n"), "gen": ("b b a\n", "no\n")}.items():
        (tmp_path / "raw" / f"{name}.src").write_text(source, "utf-8")
        (tmp_path / "raw" / f"{name}.tgt").write_text(target, "utf-8")
    binarize(tmp_path, ["train", "gen"])
    link_labels(tmp_path, ["train", "gen"])
    task = SentencePredictionTask.setup_task(
        SentencePredictionConfig(data=str(tmp_path), num_classes=2, seed=1, regression_target=False)
    )
    task.load_dataset("gen")
    sample = task.datasets["gen"].collater([task.datasets["gen"][0]])
    assert task.source_dictionary.string(sample["net_input"]["src_tokens"][0]) == "b b a"
    assert task.label_dictionary.string(sample["target"] + task.label_dictionary.nspecial) == "no"


@pytest.mark.parametrize("special", ["<s>", "<pad>", "</s>", "<unk>"])
def test_symbol_of_fairseq_is_no_word(special: str, tmp_path: Path) -> None:
    write_raw(tmp_path, train="a b\n", gen=f"a\nb {special}\n")
    with pytest.raises(DataError, match=f"gen.src:2: {special} is a special symbol of fairseq and cannot be a word"):
        binarize(tmp_path, ["train", "gen"])


def test_unknown_word_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_raw(tmp_path, train="a b\n", gen="b c c\n")
    monkeypatch.setattr("data_prep.binarize.make_dictionary", lambda texts, words: make_dictionary(texts[:1]))
    with pytest.raises(DataError, match="gen.src:1: c is not in the dictionary"):
        binarize(tmp_path, ["train", "gen"])


def test_missing_fairseq_is_said_before_anything_is_made(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fairseq.data", None)
    result = run("scan", "--split", "length", "--out", tmp_path / "out")
    assert result.code == 1 and result.err.startswith("error: binarizing needs fairseq (")
    assert "--raw-only" in result.err and list(tmp_path.iterdir()) == []
