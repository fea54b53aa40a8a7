"""bAbI, on stories of our own in the form of its files: words, thinking steps, answers, the last story, errors."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from data_prep.babi import render, stories
from data_prep.dataset import DataError

TRAIN = {
    "qa1_single-supporting-fact_train.txt": (
        "1 Mary moved to the bathroom.\n2 John went to the hallway.\n3 Where is Mary? \tbathroom\t1\n"
        "4 Daniel went back to the hallway.\n5 Where is Daniel? \thallway\t4\n"
        "1 Sandra travelled to the office.\n2 Where is Sandra? \toffice\t1\n"
        "1 John went to the garden.\n2 Where is John? \tgarden\t1\n"
    ),
    "qa8_lists-sets_train.txt": (
        "1 Mary got the milk, then the football.\n2 What is Mary carrying? \tmilk,football\t1\n"
        "1 Mary got the apple.\n2 What is Mary carrying? \tapple\t1\n"
    ),
}
TEST = {
    "qa1_single-supporting-fact_test.txt": "1 Mary went to the park.\n2 Where is Mary? \tpark\t1\n",
    "qa8_lists-sets_test.txt": "1 John got the milk.\n2 What is John carrying?\tmilk\t1\n",
}


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "tasks_1-20_v1-2" / "en-10k"
    made.mkdir(parents=True)
    for name, text in (TRAIN | TEST).items():
        (made / name).write_text(text)
    return tmp_path


def prepare(run, out: Path, *more: object):
    return run("babi", "--tasks", "1,8", "--raw-only", "--out", out, *more)


def test_a_story_is_one_sequence(folder, run, read_subset, tmp_path):
    result = prepare(run, tmp_path / "o", "--raw-dir", folder, "--holdout", 0)
    assert result.code == 0, result.err
    train = read_subset(tmp_path / "o", "train")
    assert len(train) == 5  # with the last story of both files
    assert train[0].source == (
        "mary moved to the bathroom . john went to the hallway . where is mary ? - - - - "
        "daniel went back to the hallway . where is daniel ? - - - -"
    )
    assert train[0].target.replace("- ", "") == "bathroom hallway"
    assert train[0].target.split()[19:20] == ["bathroom"] and train[0].source.split()[16:20] == ["-"] * 4
    assert train[2].target.split()[-1] == "garden"
    lists = train[3]
    assert lists.source.endswith("mary got the milk , then the football . what is mary carrying ? - - - - -"[-60:])
    assert lists.target.split()[-3:] == ["-", "milk", "football"]
    assert (tmp_path / "o" / "raw" / "test.type").read_text().split() == ["task_1", "task_8"]
    manifest = json.loads((tmp_path / "o" / "dataset.json").read_text())
    assert manifest["request"]["seed"] == 1  # as in older folders, which so stay the same request
    texts = {name: (folder / "tasks_1-20_v1-2" / "en-10k" / name).read_bytes() for name in (TRAIN | TEST)}
    assert {file.pop("name"): file for file in manifest["origin"]["files"]} == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in texts.items()
    }
    assert manifest["no_label"] == "-" and "bits" not in manifest and "valid" not in manifest["subsets"]


def test_options(folder, run, read_subset, tmp_path):
    result = prepare(run, tmp_path / "a", "--raw-dir", folder, "--think", 0, "--drop-last", "--holdout", 0)
    assert result.code == 1 and "--drop-last left no story: every test file has only one" in result.err
    few = "qa1_single-supporting-fact_test.txt", "qa8_lists-sets_test.txt"
    for name in few:
        path = folder / "tasks_1-20_v1-2" / "en-10k" / name
        path.write_text(TEST[name] * 2)
    result = prepare(run, tmp_path / "a", "--raw-dir", folder, "--think", 0, "--drop-last", "--holdout", 0)
    assert result.code == 0, result.err
    assert [len(read_subset(tmp_path / "a", name)) for name in ("train", "test")] == [3, 2]
    assert read_subset(tmp_path / "a", "train")[1].source.endswith("where is sandra ? -")
    assert prepare(run, tmp_path / "b", "--raw-dir", folder, "--holdout", 0.4).code == 0
    sizes = {name: len(read_subset(tmp_path / "b", name)) for name in ("train", "valid", "test")}
    assert sizes == {"train": 3, "valid": 2, "test": 4}


def test_the_archive_is_the_folder(folder, run, read_subset, tmp_path):
    with tarfile.open(tmp_path / "babi.tar.gz", "w:gz") as archive:
        archive.add(folder / "tasks_1-20_v1-2", "tasks_1-20_v1-2")
    for name, source in (("a", ["--archive", tmp_path / "babi.tar.gz"]), ("b", ["--raw-dir", folder])):
        assert prepare(run, tmp_path / name, *source, "--holdout", 0.4).code == 0
    assert read_subset(tmp_path / "a", "train") == read_subset(tmp_path / "b", "train")
    (tmp_path / "cut.tar.gz").write_bytes((tmp_path / "babi.tar.gz").read_bytes()[:200])
    result = prepare(run, tmp_path / "c", "--archive", tmp_path / "cut.tar.gz")
    assert result.code == 1 and "not a complete tar or tar.gz archive" in result.err and not (tmp_path / "c").exists()


def test_the_folder_of_a_set_is_that_set(folder, run, tmp_path):
    sets = folder / "tasks_1-20_v1-2"
    (sets / "en-10k").rename(sets / "en")
    result = prepare(run, tmp_path / "o", "--raw-dir", sets / "en")
    assert result.code == 1 and "is the set en: add --set en, or give the folder of en-10k" in result.err
    assert prepare(run, tmp_path / "o", "--raw-dir", sets / "en", "--set", "en", "--holdout", 0.4).code == 0


def test_missing_files(folder, run, tmp_path):
    result = run("babi", "--raw-dir", folder, "--raw-only", "--out", tmp_path / "o")
    assert result.code == 1 and "has no file qa2_…_train.txt of en-10k" in result.err
    result = run("babi", "--tasks", "20-21", "--raw-dir", folder, "--out", tmp_path / "o")
    assert result.code == 2 and "--tasks has 21: there are tasks 1 to 20" in result.err
    result = prepare(run, tmp_path / "o", "--raw-dir", folder, "--holdout", 0, "--seed", 2)
    assert result.code == 2 and "--seed has no effect: nothing is held out" in result.err
    result = run("babi", "--out", tmp_path / "o")
    assert result.code == 2 and "one of the arguments --archive --raw-dir is required" in result.err


def test_test_stories_are_not_those_of_train(folder, run, tmp_path):
    train, test = (
        folder / "tasks_1-20_v1-2" / "en-10k" / f"qa1_single-supporting-fact_{part}.txt" for part in ("train", "test")
    )
    test.write_bytes(train.read_bytes())
    result = prepare(run, tmp_path / "o", "--raw-dir", folder)
    assert result.code == 1 and f"{test}: has the same stories as {train.name}" in result.err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_two_files_of_one_task(packed, folder, run, tmp_path):
    name, second = "qa1_single-supporting-fact_test.txt", "qa1_single-supporting-facts_test.txt"
    (folder / "tasks_1-20_v1-2" / "en-10k" / second).write_text(TEST[name] * 2)
    source = ["--raw-dir", folder]
    if packed:
        source = ["--archive", tmp_path / "babi.tar"]
        with tarfile.open(tmp_path / "babi.tar", "w") as archive:
            archive.add(folder / "tasks_1-20_v1-2", "tasks_1-20_v1-2")
    result = prepare(run, tmp_path / "o", *source)
    assert result.code == 1 and "is also qa1_…_test.txt: remove one of the two" in result.err
    assert name in result.err and second in result.err and not (tmp_path / "o").exists()


def test_the_hash_is_that_of_the_stories(folder, run, tmp_path, monkeypatch):
    """A file that changes after it was read leaves its hash as it was."""
    path = folder / "tasks_1-20_v1-2" / "en-10k" / "qa1_single-supporting-fact_test.txt"

    def change_and_render(rows, think):
        path.write_text("1 changed\n")
        return render(rows, think)

    monkeypatch.setattr("data_prep.babi.render", change_and_render)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    assert prepare(run, tmp_path / "o", "--raw-dir", folder, "--holdout", 0).code == 0
    hashes = json.loads((tmp_path / "o" / "dataset.json").read_text())["request"]["source_sha256"]
    assert hashes[0] == before


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("Mary moved.\n", 1, "not a numbered sentence"),
        ("1 Mary moved.\n2 Where?\thall\n", 2, "not a numbered sentence"),
        ("1 Mary moved.\n" + "2" * 5_000 + " Where?\thall\t1\n", 2, "not a numbered sentence"),
        ("1 Mary moved.\n3 Where?\thall\t1\n", 2, "line 3 of a story follows line 1"),
        ("1 Where?\thall,\t1\n", 1, "an empty sentence or answer"),
        ("1 Mary moved.\n2 Where?\thall\t", 2, "the facts of an answer are no numbers of sentences"),
        ("1 Mary moved.\n2 Where?\thall\t1 Mary\n", 2, "the facts of an answer are no numbers of sentences"),
        ("1 Where?\thall\t1\n1 Mary moved.\n", 2, "the story ends here without a question: is the file cut off?"),
        ("1 Mary moved.\n1 Where?\thall\t1\n", 1, "the story ends here without a question"),
        ("1 Where?\thall\t1\n2 Mary moved.\n3 John moved.\n", 3, "the story ends here without a question"),
        ("1 Mary moved.\n2 Where?\thall,-\t1\n", 2, "the answer is '-', which means 'no label' here"),
        ("1 Mary moved.\n2 Where?\t<UNK>\t1\n", 2, "<unk> is a special symbol of fairseq and cannot be a word"),
        ("1 Mary <s> moved.\n2 Where?\thall\t1\n", 1, "<s> is a special symbol of fairseq and cannot be a word"),
    ],
)
def test_broken_files(text, line, message):
    with pytest.raises(DataError, match=message) as caught:
        list(stories(Path("qa1_x_train.txt"), text.encode()))
    assert caught.value.line == line


def test_answers_of_several_words():
    (rows,) = stories(Path("f"), b"1 What?\tMilk,Football\t1\n")
    assert render(rows, 2) == ("what ? - - - -", "- - - - milk football")
