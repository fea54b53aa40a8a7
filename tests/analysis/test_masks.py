"""``masks`` and ``overlap``: planted modules are found, and files, other folders and resuming are exact."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.corpus import Corpus, Subset
from data_prep.dataset import Pair
from data_prep.folder import write
from fairseq_sg.analysis import load, mask_training, masks
from fairseq_sg.analysis.__main__ import main
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.examples import Part, open_examples
from fairseq_sg.analysis.masks import from_arrays, halves, output_words, to_arrays
from fairseq_sg.analysis.overlap import by_word
from fairseq_sg.analysis.overlap import draw as draw_overlap
from fairseq_sg.analysis.result import Result
from fairseq_sg.errors import UsageError
from fairseq_sg.evaluate import main as evaluate
from fairseq_sg.models.sg_encoder import SGEncoder
from fairseq_sg.models.sg_transformer import SGTransformer
from fairseq_sg.models.sg_transformer_lm import SGTransformerLM
from helpers.analysis_models import checkpoint
from helpers.commands import metrics, succeed
from helpers.labelled_words import TAGGERS, training, write_labelled_words
from helpers.models import build, dictionary

WORDS, WIDTH = 5, 16
FIRST, SECOND, ANSWER = slice(0, 5), slice(5, 10), slice(10, 15)


@pytest.fixture
def command(tmp_path, capsys):
    """Runs a command on the CPU without pictures; returns its arrays, facts, and output, or the error's line."""

    def run(name: str, *arguments: object, out: str = "out", code: int = 0):
        prefix = str(tmp_path / out)
        device = ["--device", "cpu"] if name == "masks" else []
        found = main([name, *map(str, arguments), *device, "--out", prefix, "--format", "none"])
        printed = capsys.readouterr()
        assert found == code, printed.err
        if code:
            assert printed.err.count("\n") == 1
            return printed.err
        return dict(np.load(f"{prefix}.npz")), json.loads(Path(f"{prefix}.json").read_text()), printed.out

    return run


def planted_folder(folder: Path) -> Path:
    """One word of two alphabets among fillers; the class is its number, moved by one in the first alphabet."""

    def examples(before: range, after: range) -> Subset:
        pairs, types = [], []
        for i in range(WORDS):
            for letter, answer in (("a", (i + 1) % WORDS), ("b", i)):
                for x in before:
                    for y in after:
                        line = " ".join([*["x"] * x, f"{letter}{i}", *["x"] * y])
                        pairs.append(Pair(line, f"c{answer}"))
                        types.append({"a": "first", "b": "second"}[letter])
        return Subset(pairs, types)

    subsets = {"train": examples(range(1), range(4)), "valid": examples(range(1, 2), range(3))}
    corpus = Corpus(subsets, "drawn", "drawn", {"generator": "tests"}, labels=True)
    write(folder, corpus, {"dataset": "tests", "raw_only": False})
    return folder


def planted_checkpoint(path: Path, data: Path) -> Path:
    """A classifier with a module for each alphabet: attention moves a word to the first column, and the feedforward
    layer maps it to the answer, each alphabet in features and hidden units of its own.
    """
    arguments = (
        f"--norm none --position none --embedding-scaling none --encoder-layers 1 --encoder-embed-dim {WIDTH} "
        f"--encoder-ffn-embed-dim {WIDTH} --encoder-attention-heads 1 --encoder-attention softmax --depth separate "
        "--encoder-update residual"
    )
    checkpoint(path, data, "encoder", *arguments.split())
    loaded = load(str(path))
    words, classes = loaded.task.source_dictionary, loaded.task.target_dictionary
    weights = {name: torch.zeros_like(value) for name, value in loaded.model.state_dict().items()}

    def matrix(end: str) -> torch.Tensor:
        (name,) = (name for name in weights if name.endswith(end))
        return weights[name]

    table = matrix("embedding.tokens.weight")
    for i in range(WORDS):
        table[words.index(f"a{i}"), FIRST.start + i] = 1
        table[words.index(f"b{i}"), SECOND.start + i] = 1
    for end in ("v_proj.weight", "out_proj.weight", "ffn.fc1.weight"):
        matrix(end)[: SECOND.stop, : SECOND.stop] = torch.eye(SECOND.stop)
    for i in range(WORDS):
        matrix("ffn.fc2.weight")[ANSWER.start + (i + 1) % WORDS, FIRST.start + i] = 1
        matrix("ffn.fc2.weight")[ANSWER.start + i, SECOND.start + i] = 1
        matrix("classifier.weight")[classes.index(f"c{i}") - classes.nspecial, ANSWER.start + i] = 50
    state = torch.load(path, weights_only=True)
    torch.save(state | {"model": weights}, path)
    return path


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The checkpoint, and the truth: for each module, the weights that are not 0 and that its alphabet uses."""
    room = tmp_path_factory.mktemp("planted")
    path = planted_checkpoint(room / "planted.pt", planted_folder(room / "data"))
    weights = torch.load(path, weights_only=True)["model"]
    truth = {}
    for name, features in (("first", FIRST), ("second", SECOND)):
        own = torch.zeros(WIDTH, dtype=torch.bool)
        own[features] = True
        truth[name] = {key: (w != 0) & (own if "classifier" not in key else True) for key, w in weights.items()}
    return path, truth


FAST = "--steps 110 --batch-size 32 --samples 2 --lr 3e-2".split()
TRAIN = [*FAST, *"--beta 1e-4 --inverse --random 3".split()]


@pytest.fixture(scope="module")
def found(planted, tmp_path_factory):
    """The masks of both modules, and of everything, as the command writes them: name -> prefix of its files."""
    room = tmp_path_factory.mktemp("masks")
    for name, types in (("first", ["--types", "first"]), ("second", ["--types", "second"]), ("control", [])):
        saved = ["--save-checkpoint", str(room / "models" / f"{name}.pt")]
        arguments = [str(planted[0]), *TRAIN, *types, *saved, "--device", "cpu", "--format", "none"]
        assert main(["masks", *arguments, "--out", str(room / name)]) == 0
    return room


@pytest.mark.parametrize("module,other", [("first", "second"), ("second", "first")])
def test_planted_modules_of_a_transformer_are_found(module, other, planted, found):
    """Exactly, weight for weight, in attention, feedforward and output layer."""
    masks, truth = from_arrays(np.load(found / f"{module}.npz")), planted[1][module]
    facts = json.loads((found / f"{module}.json").read_text())
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in masks} == {
        "v_proj", "out_proj", "fc1", "fc2", "classifier",
    }  # fmt: skip
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in facts["not_masked"]} == {"q_proj", "k_proj"}
    for name, mask in masks.items():
        assert torch.equal(mask, truth[name]), name
    rows = facts["evaluation"]["valid"]
    assert set(rows) == {"all", "chosen", "rest", "first", "second"}
    assert rows["chosen"] == rows[module] and rows["rest"] == rows[other]
    assert rows[module] == {
        "examples": 15, "unmasked": 100, "mask": 100, "inverse": 20, "random": 20, "random_draws": [20] * 3,
    }  # fmt: skip
    # All logits are equal: the first class.
    assert (rows[other]["unmasked"], rows[other]["mask"]) == (100, 20)
    kept = sum(int(mask.sum()) for mask in masks.values())
    assert facts["kept_of_all"] == {"weights": 4 * 256 + 80, "kept": kept, "share": 100 * kept / 1104}
    assert facts["examples"]["number"] == 20 and facts["training"]["beta"] == 1e-4


def test_overlap_of_planted_modules(found, command):
    names = ("first", "second", "control")
    arrays, facts, printed = command("overlap", *(f"{name}={found / name}.npz" for name in names))
    iou, iomin = arrays["iou"][0], arrays["iomin"][0]
    # 4 tensors of 5 weights for each alphabet, and 5 of the classifier for both.
    np.testing.assert_allclose(iou, [[1, 5 / 45, 25 / 45], [5 / 45, 1, 25 / 45], [25 / 45, 25 / 45, 1]])
    np.testing.assert_allclose(iomin, [[1, 0.2, 1], [0.2, 1, 1], [1, 1, 1]])
    tensors = {name.rpartition(".")[0].rpartition(".")[2]: rows for name, rows in facts["tensors"].items()}
    assert tensors["fc1"]["iou"][0] == [1, 0, 0.5] and tensors["classifier"]["iou"] == [[1] * 3] * 3
    assert facts["mean_of_pairs"]["iou"] == {"mean": pytest.approx((5 / 45 + 2 * 25 / 45) / 3)}
    assert tensors["fc1"]["mean_of_pairs"]["iomin"] == {"mean": pytest.approx(2 / 3)}
    chance = 4 * 25 / 256 + 25 / 80
    assert arrays["chance_iomin"][0][0][1] == pytest.approx(chance / 25)
    assert facts["shared"]["first"]["mean"] == 20 and facts["remaining"]["second"]["mean"] == pytest.approx(
        100 * 25 / 45
    )
    (rows,) = (masks["first"] for masks in facts["removed_by_word"].values())
    assert rows == {f"c{i}": 0 for i in range(WORDS)}
    assert "first, second    0.11" in printed


def test_overlap_of_several_networks_is_their_mean(found, command, tmp_path):
    """The k-th file of every name is of network k."""
    for name in ("first", "second"):
        arrays, facts = dict(np.load(found / f"{name}.npz")), json.loads((found / f"{name}.json").read_text())
        logits = {n: torch.ones(tuple(arrays[f"{n}.shape"])) for n in from_arrays(arrays)}
        np.savez(tmp_path / f"{name}2.npz", **to_arrays(logits))
        (tmp_path / f"{name}2.json").write_text(json.dumps(facts | {"network": "another"}))
    lists = [word for name in ("first", "second") for word in (f"{name}={found / name}.npz", tmp_path / f"{name}2.npz")]
    arrays, facts, printed = command("overlap", *lists)
    assert arrays["iou"].shape == (2, 2, 2) and facts["networks"] == 2
    values = [5 / 45, 1]
    assert facts["total"]["iou"]["mean"][0][1] == pytest.approx(np.mean(values))
    assert facts["total"]["iou"]["std"][0][1] == pytest.approx(np.std(values, ddof=1))
    assert "0.56 ± 0.63" in printed
    error = command("overlap", f"first={found / 'first'}.npz", f"second={tmp_path / 'second2'}.npz", code=1)
    assert "second and first of network 1 are of different weights" in error
    error = command("overlap", *lists[:3], code=1)
    assert "first has 2, second has 1" in error


def test_networks_of_other_tensors_or_words_are_not_compared(found, command, tmp_path):
    arrays, facts = dict(np.load(found / "first.npz")), json.loads((found / "first.json").read_text())
    masks = from_arrays(arrays)
    ones = {name: torch.ones(mask.shape) for name, mask in masks.items()}
    fewer = dict(list(ones.items())[1:])
    wider = {name: torch.ones(17, *ones[name].shape) if name not in fewer else ones[name] for name in ones}
    others = {layer: words[::-1] for layer, words in facts["outputs"].items()}
    for logits, outputs, what in (
        (fewer, facts["outputs"], f"other tensors ({next(iter(ones))})"),
        (ones | {"more": torch.ones(2)}, facts["outputs"], "other tensors (more)"),
        (wider, facts["outputs"], f"other tensors ({next(iter(ones))})"),
        (ones, others, "other words in the output layer"),
    ):
        np.savez(tmp_path / "second.npz", **to_arrays(logits))
        (tmp_path / "second.json").write_text(json.dumps(facts | {"network": "another", "outputs": outputs}))
        pair = [f"{found}/first.npz", f"{tmp_path}/second.npz"]
        error = command("overlap", f"a={pair[0]}", pair[1], f"b={pair[0]}", pair[1], code=1)
        assert f"network 2 has {what} than network 1 (" in error
    assert not list(tmp_path.glob("out*"))


def test_shares_by_word_are_means_over_the_networks_that_have_the_row():
    def network(control: list, mask: list) -> dict[str, Result]:
        arrays = {"control": np.array(control, dtype=bool), "a": np.array(mask, dtype=bool)}
        return {name: Result({"w": rows}, {"outputs": {"w": ["x", "y", "z"]}}) for name, rows in arrays.items()}

    networks = [
        network([[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]], [[0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]),
        network([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]], [[0, 1, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1]]),
    ]
    assert by_word(networks, ["a"]) == {"w": {"a": {"x": (25 + 100) / 2, "y": 50}}}


@pytest.mark.parametrize("out", ["first", "./first.svg", "link"])
def test_overlap_does_not_overwrite_what_it_reads(out, found, capsys, tmp_path):
    for name in ("first", "second"):
        for end in ("npz", "json"):
            shutil.copy(found / f"{name}.{end}", tmp_path)
    (tmp_path / "link.npz").hardlink_to(tmp_path / "first.npz")
    before = (tmp_path / "first.npz").read_bytes()
    files = [f"a={tmp_path}/first.npz", f"b={tmp_path}/second.npz"]
    assert main(["overlap", *files, "--out", f"{tmp_path}/{out}"]) == 1
    assert f"would overwrite {tmp_path}/first.npz, which the command reads" in capsys.readouterr().err
    assert (tmp_path / "first.npz").read_bytes() == before and not list(tmp_path.glob("*.svg"))


def test_a_masked_model_is_an_ordinary_checkpoint(found, planted, command, tmp_path):
    """fairseq-validate and ``evaluate`` give the accuracies that ``masks`` gives; so does ``masks`` on it."""
    rows = json.loads((found / "first.json").read_text())["evaluation"]["valid"]
    path, data = found / "models" / "first.pt", planted[0].parent / "data"
    assert evaluate([str(path), "--device", "cpu", "--json", str(tmp_path / "numbers.json")]) == 0
    numbers = json.loads((tmp_path / "numbers.json").read_text())["subsets"]["valid"]
    assert numbers["accuracy"] == rows["all"]["mask"] == 60
    assert {name: part["accuracy"] for name, part in numbers["types"].items()} == {"first": 100, "second": 20}
    arguments = "--user-dir fairseq_sg --task sg_classification --cpu --valid-subset valid --batch-size 7".split()
    log = succeed("fairseq-validate", data, *arguments, "--path", path, "--log-format", "json", "--num-workers", 0)
    assert metrics(log, "valid")[0]["accuracy"] == 60
    state, before = (torch.load(file, weights_only=True) for file in (path, planted[0]))
    masks = from_arrays(np.load(found / "first.npz"))
    for name, weight in before["model"].items():
        assert torch.equal(state["model"][name], weight * masks[name] if name in masks else weight), name
    _, facts, _ = command("masks", path, "--steps", 1, "--batch-size", 4, "--parameters", "fc1")
    assert facts["evaluation"]["valid"]["all"]["unmasked"] == 60


def other_folder(folder: Path, before: Path) -> Path:
    """The same sentences under other numbers: a further subset has words that come first in the dictionaries."""
    subsets = {}
    for name in ("train", "valid", "gen"):
        sides = ((before / "raw" / f"{name}.{side}").read_text().splitlines() for side in ("src", "tgt"))
        subsets[name] = Subset([Pair(*pair) for pair in zip(*sides, strict=True)])
    subsets["more"] = Subset([Pair("s t u v w", "A"), Pair("first s", "0 A")])
    corpus = Corpus(subsets, "drawn", "drawn", {"generator": "tests"})
    write(folder, corpus, {"dataset": "tests", "raw_only": False})
    return folder


SHORT = "--steps 5 --batch-size 6 --samples 4 --evaluate valid".split()


def test_another_folder_is_encoded_again_by_word(saved, folders, command, tmp_path):
    """Its dictionaries have other numbers; the masks are the same bit for bit, and so are the accuracies."""
    other = other_folder(tmp_path / "other", folders["pairs"])
    words = [(folder / "dict.src.txt").read_text().split()[::2] for folder in (folders["pairs"], other)]
    assert words[1] == ["first", *words[0]]
    here, facts, _ = command("masks", saved("softmax"), *SHORT, "--where", "s,t")
    there, others, _ = command("masks", saved("softmax"), *SHORT, "--where", "s,t", "--data", other, out="other-masks")
    assert here.keys() == there.keys() and all(np.array_equal(here[key], there[key]) for key in here)
    assert others["evaluation"]["other:valid"] == facts["evaluation"]["valid"]
    assert others["examples"]["subset"] == "other:train"
    loaded = load(saved("softmax"))
    own, found = (open_examples(loaded, name) for name in ("gen", f"{other}:gen"))
    for i in range(len(own)):
        assert torch.equal(own.dataset[i]["source"], found.dataset[i]["source"])
        assert torch.equal(own.dataset[i]["target"], found.dataset[i]["target"])
    twice = ["--evaluate", f"{other}:valid,{other.parent}/./{other.name}:valid"]
    error = command("masks", saved("softmax"), *SHORT, *twice, code=1)
    assert "--evaluate has two subsets with the name other:valid in tables" in error
    error = command("masks", saved("softmax"), *SHORT, "--evaluate", f"valid,{other}:more", code=1)
    assert "has the source word 'first' in sample 1, which the model does not know" in error


def test_labels_of_another_folder_are_scored_by_the_words(tmp_path):
    """Its dictionary lacks a word, so that numbers differ; bits are those of the words, and a blank is one."""
    folder, other = write_labelled_words(tmp_path / "all"), tmp_path / "some"
    subsets = {}
    for name in ("train", "valid", "gen"):
        sides = ((folder / "raw" / f"{name}.{side}").read_text().splitlines() for side in ("src", "tgt"))
        subsets[name] = Subset([Pair(*pair) for pair in zip(*sides, strict=True) if "000" not in pair[0]])
    manifest = json.loads((folder / "dataset.json").read_text())
    form = {"no_label": manifest["no_label"], "bits": manifest["bits"]}
    write(
        other, Corpus(subsets, "some", "drawn", {"generator": "tests"}, **form), {"dataset": "tests", "raw_only": False}
    )
    succeed(
        "fairseq-train", *training(folder, tmp_path / "checkpoints", *TAGGERS["sg_lstm"].split(), "--max-update", 1)
    )
    loaded = load(str(tmp_path / "checkpoints" / "checkpoint_last.pt"))
    found = open_examples(loaded, "valid", str(other))
    task = found.loaded.task
    assert len(found) == len(subsets["valid"].pairs) and task.no_label == loaded.task.no_label
    for i, pair in enumerate(subsets["valid"].pairs):
        target = found.dataset[i]["target"]
        rows = [{".": "0000", "<copy>": "0001"}.get(word, f"{word}0") for word in pair.target.split()]
        assert task.target_bits[target].int().tolist() == [[*map(int, row)] for row in rows]
        assert task.asked(target[None]).tolist() == [[word != manifest["no_label"] for word in pair.target.split()]]
    plain = write_labelled_words(tmp_path / "plain", bits=False)
    with pytest.raises(UsageError, match=r"plain has other labels than .*all \(bits of their dataset.json differs\)"):
        open_examples(loaded, "valid", str(plain))


def test_resumed_masks_are_equal_to_the_bit(saved, command, tmp_path):
    options = [saved("softmax"), "--batch-size", 6, "--evaluate", "valid", "--save-interval", 2]
    whole, *_ = command("masks", *options, "--steps", 6, out="whole")
    command("masks", *options, "--steps", 3, out="parts")
    parts, _, printed = command("masks", *options, "--steps", 6, "--resume", out="parts")
    assert "resuming from step 3" in printed
    assert whole.keys() == parts.keys() and all(np.array_equal(whole[key], parts[key]) for key in whole)
    again, facts, printed = command("masks", *options, "--steps", 6, "--resume", "--inverse", out="parts")
    assert "step 6 of 6" not in printed and "inverse" in facts["evaluation"]["valid"]["all"]
    other, *_ = command("masks", *options, "--steps", 6, "--seed", 2, out="other")
    assert any(not np.array_equal(whole[key], other[key]) for key in whole)
    resumed = (*options, "--resume")
    assert "has 6 steps already" in command("masks", *resumed, "--steps", 5, out="parts", code=1)
    fresh, *_ = command("masks", *options, "--steps", 3, "--lr", 0.02, out="fresh")
    found, _, printed = command("masks", *resumed, "--steps", 3, "--lr", 0.02, out="parts")
    assert "(lr was 0.01, and is 0.02): the masks are trained from the start" in printed
    assert all(np.array_equal(fresh[key], found[key]) for key in fresh)
    (tmp_path / "parts.state.pt").write_bytes(b"PK")
    assert "parts.state.pt cannot be read" in command("masks", *resumed, out="parts", code=1)


def test_resuming_asks_for_the_same_examples(saved, command, tmp_path):
    """Other words on the same lines are other examples."""
    options = [saved("softmax"), "--batch-size", 6, "--steps", 2]
    command("masks", *options, out="one")
    state = torch.load(tmp_path / "one.state.pt", weights_only=True)
    state["request"]["text"] = "others"
    torch.save(state, tmp_path / "one.state.pt")
    assert "(text was others, and is " in command("masks", *options, "--resume", out="one")[2]
    state["request"].pop("text")
    torch.save(state, tmp_path / "one.state.pt")
    assert "(text was None, and is " in command("masks", *options, "--resume", out="one")[2]
    assert "resuming from step 2" in command("masks", *options, "--resume", out="one")[2]

    def hashed(*rows):
        dataset = [{"id": 0, "source": torch.tensor(row), "target": torch.tensor([1])} for row in rows]
        return mask_training.hash_of(SimpleNamespace(is_text=False, dataset=dataset), np.array([0, 2]))

    assert hashed([1], [2], [3]) == hashed([1], [9], [3]) != hashed([1], [2], [4])


def test_masks_of_other_overrides_are_not_resumed(saved, command, tmp_path):
    """The weights are the same, the outputs are not. A state that is older than the comparison had no overrides."""
    options = [saved("linear"), "--batch-size", 6, "--steps", 2, "--resume", "--evaluate", "valid"]
    overrides = ["--model-overrides", "{'encoder_layers': 4}"]
    one, *_ = command("masks", *options, out="one")
    fresh, *_ = command("masks", *options, *overrides, out="fresh")
    found, _, printed = command("masks", *options, *overrides, out="one")
    assert "(model_overrides was {}, and is {'encoder_layers': 4}): the masks are trained from the start" in printed
    assert all(np.array_equal(fresh[key], found[key]) for key in fresh)
    assert any(not np.array_equal(one[key], found[key]) for key in one)
    state = torch.load(tmp_path / "fresh.state.pt", weights_only=True)
    state["request"].pop("model_overrides")
    torch.save(state, tmp_path / "fresh.state.pt")
    assert "(model_overrides was {}, and" in command("masks", *options, *overrides, out="fresh")[2]


def test_the_loss_and_the_penalty_are_those_of_one_example(saved, command, monkeypatch):
    """Whatever the number of samples of the masks in a batch; those of so large logits are all 1."""
    asked, training = [], mask_training.MaskTraining
    monkeypatch.setattr(
        mask_training, "MaskTraining", lambda *a, **how: asked.append(how["alpha"]) or training(*a, **how)
    )
    options = [saved("encoder"), *"--batch-size 8 --beta 0.5 --initial-logit 100 --steps 1 --evaluate valid".split()]
    printed = [command("masks", *options, "--samples", number)[2] for number in (1, 4)]
    assert asked == [0.5 / 8] * 2
    losses = [float(re.search(r"step 1 of 1: loss ([0-9.]+)", text)[1]) for text in printed]
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)


def test_search_takes_the_largest_beta_that_keeps_the_accuracy(planted, command):
    arrays, facts, printed = command("masks", planted[0], *FAST, "--search-beta", "1000,1e-4,5e-5")
    assert facts["training"]["beta"] == 1e-4
    assert [(row["beta"], row["accuracy"], row["enough"]) for row in facts["search"]] == [
        (5e-5, 100, True), (1e-4, 100, True), (1000, 20, False),
    ]  # fmt: skip
    assert sum(int(mask.sum()) for mask in from_arrays(arrays).values()) == 45
    *_, printed = command("masks", planted[0], "--steps", 80, *FAST[2:], "--search-beta", 1000, out="none")
    assert "no β has 95 % of the accuracy: these are the masks of the smallest" in printed


def test_search_needs_examples_of_the_masks_in_the_first_subset(planted, command, tmp_path):
    """Only ``train`` has sources of one word."""
    options = [planted[0], *SHORT[:-1], "train,valid", "--lengths", 1, "--search-beta", 1]
    _, facts, _ = command("masks", *options)
    assert facts["search"][0]["accuracy"] == facts["evaluation"]["train"]["chosen"]["mask"]
    options[options.index("train,valid")] = "valid,train"
    error = command("masks", *options, out="none", code=1)
    assert "and valid has none: name a subset with some first in --evaluate, such as train" in error
    assert not list(tmp_path.glob("none*"))  # before the masks are trained


def test_search_needs_an_accuracy_to_keep(saved, command, tmp_path):
    options = [saved("softmax"), *SHORT[:-1], "gen,valid", "--subset", "gen", "--types", "depth_2", "--search-beta", 1]
    assert "the model has 0 % on the masks' examples in gen" in command("masks", *options, out="none", code=1)
    assert not list(tmp_path.glob("none*"))  # before the masks are trained


def test_the_models_folder_is_gone(folders, command, tmp_path):
    """The option of the error is the one that helps: ``--data`` is the folder of the masks."""
    data = shutil.copytree(folders["pairs"], tmp_path / "data")
    path = checkpoint(tmp_path / "model.pt", data, "softmax")
    shutil.rmtree(data)
    for options in ([], ["--data", folders["pairs"]]):
        error = command("masks", path, *SHORT, *options, code=1)
        assert f"{data}, which the checkpoint was trained on, does not exist: give one with --model-overrides" in error
    fix = error.strip().rpartition("--model-overrides ")[2].strip('"').replace("FOLDER", str(folders["pairs"]))
    command("masks", path, *SHORT, "--model-overrides", fix)


def test_language_models_have_a_perplexity(saved, command, tmp_path):
    _, facts, printed = command("masks", saved("lm"), "--steps", 3, "--batch-size", 8, "--inverse")
    assert (
        evaluate([saved("lm"), "--device", "cpu", "--batch-size", "8", "--json", str(tmp_path / "numbers.json")]) == 0
    )
    numbers = json.loads((tmp_path / "numbers.json").read_text())["subsets"]
    assert facts["metric"] == "perplexity"
    for name, found in facts["evaluation"].items():
        assert found["all"]["unmasked"] == pytest.approx(numbers[name]["ppl"], rel=1e-5)
        assert found["all"]["inverse"] != found["all"]["unmasked"]
    for option in ("--where", "--only"):
        assert f"{option} is for sentences" in command("masks", saved("lm"), "--steps", 1, option, "a", code=1)


def test_parts_by_words_and_types(saved, folders):
    loaded = load(saved("softmax"))
    gen = open_examples(loaded, "gen")
    lines = [set(line.split()) for line in (folders["pairs"] / "raw/gen.src").read_text().splitlines()]
    types = (folders["pairs"] / "raw/gen.type").read_text().splitlines()
    found = gen.choose(Part(["s", "t"], ["u"], ["depth_2", "depth_10"]))
    expected = [bool(w & {"s", "t"}) and "u" not in w and t != "depth_1" for w, t in zip(lines, types)]
    assert found.tolist() == expected and 0 < found.sum() < len(found)
    lines = [line.split() for line in (folders["pairs"] / "raw/train.src").read_text().splitlines()]
    train = open_examples(loaded, "train")
    assert train.choose(Part(lengths=[1, 3])).tolist() == [len(line) in (1, 3) for line in lines]
    only = train.only(["s", "t"])
    assert only["only s"].tolist() == ["s" in line and "t" not in line for line in lines]
    assert only["only t"].tolist() == ["t" in line and "s" not in line for line in lines]


def test_random_masks_are_drawn_by_seeds_of_their_own():
    args = argparse.Namespace(inverse=False, halves=False, random=2, seed=1)
    kept = {"w": torch.arange(40) < 20}
    one, other = (masks.variants(kept, args)[f"random {number}"]["w"] for number in (1, 2))
    assert one.sum() == other.sum() == 20 and not torch.equal(one, other)
    assert torch.equal(masks.variants(kept, argparse.Namespace(**vars(args) | {"seed": 2}))["random 1"]["w"], other)


def test_halves_of_the_layers():
    names = ["encoder.layers.0.a", "encoder.layers.1.a", "decoder.layers.0.a", "decoder.layers.1.a", "output"]
    masks = {name: torch.ones(1, dtype=torch.bool) for name in names}
    found = halves(masks)
    assert list(found["early"]) == names[:2] and list(found["late"]) == names[2:]


@pytest.mark.parametrize("kind", [SGEncoder, SGTransformerLM])
def test_rows_of_a_labelling_model_are_labels(kind):
    labels = dictionary(3)
    task = SimpleNamespace(source_dictionary=dictionary(5), target_dictionary=labels, num_classes=3, labels_words=True)
    task.cfg = SimpleNamespace(left_pad_source=True)
    side = "encoder" if kind is SGEncoder else "decoder"
    sizes = {"embed_dim": 8, "ffn_embed_dim": 8, "attention_heads": 2, "layers": 2}
    model = kind.build_model(argparse.Namespace(**{f"{side}_{name}": size for name, size in sizes.items()}), task)
    loaded = Loaded(model, task, "", "", torch.device("cpu"), None, 0, "")
    names = output_words(loaded, {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()})
    assert list(names.values()) == [["w0", "w1", "w2"]]


@pytest.mark.parametrize(
    ("model", "options"), [(SGTransformerLM, {}), (SGTransformer, {"untied_output": True})], ids=["lm", "seq2seq"]
)
def test_the_output_layer_is_in_the_late_half(model, options):
    names = [name for name, _ in build(model, **options).named_parameters()]
    found = halves({name: torch.ones(1, dtype=torch.bool) for name in names})
    layer = re.compile(r"(\w+)\.stack\.layers\.(\d)")
    sides = {half: {layer.match(name).groups() for name in of if layer.match(name)} for half, of in found.items()}
    assert not sides["early"] & sides["late"] and len(sides["early"]) == len(sides["late"])
    assert {"decoder.output_weight", "decoder.output_bias"} <= set(found["late"])


@settings(max_examples=25)
@given(st.lists(st.integers(1, 5), min_size=0, max_size=3), st.integers(0, 2**32 - 1))
def test_packed_masks_are_read_as_written(shape, seed):
    logits = {"a.weight": torch.randn(shape, generator=torch.Generator().manual_seed(seed))}
    arrays = to_arrays(logits)
    assert arrays["a.weight.mask"].size == -(-logits["a.weight"].numel() // 8)
    assert torch.equal(from_arrays(arrays)["a.weight"], logits["a.weight"] > 0)


def test_pictures(found, planted, tmp_path):
    out = str(tmp_path / "overlap.svg")
    files = [f"{name}={found / name}.npz" for name in ("first", "second", "control")]
    assert main(["overlap", *files, "--tensors", "--out", out]) == 0
    written = {path.name for path in tmp_path.glob("*.svg")}
    assert written == {"overlap.svg", "overlap.tensors.svg", "overlap.words.svg"}
    arguments = [str(planted[0]), "--steps", "1", "--inverse", "--random", "2", "--device", "cpu"]
    assert main(["masks", *arguments, "--out", str(tmp_path / "masks.svg")]) == 0
    text = (tmp_path / "masks.accuracy.svg").read_text()
    assert all(word in text for word in ("unmasked", "inverse", "random", "valid: first"))
    assert "fc1" in (tmp_path / "masks.kept.svg").read_text()


@pytest.mark.parametrize(
    "options,message",
    [
        ("--subset nothing", "has no subset 'nothing'"),
        ("--where nothing", "--where has the word 'nothing', which is not in the source dictionary"),
        ("--where-not nothing", "--where-not has the word 'nothing'"),
        ("--where s --where-not s", "no example of train has --where, --where-not, --types and --lengths together"),
        ("--lengths 7-9", "no example of train has"),
        ("--only s,nothing", "--only has the word 'nothing'"),
        ("--types depth_2", "has no types"),
        ("--subset gen --types depth_3", "--types has 'depth_3', which no example of gen has: did you mean"),
        ("--subset data:train", "--subset data:train: give the folder as --data, and its subset as --subset"),
        ("--evaluate nothing", "has no subset 'nothing'"),
        ("--evaluate ,", "--evaluate names no subset"),
        ("--data nowhere", "there is no data folder nowhere"),
        ("--parameters nothing", "--parameters: no parameter matches 'nothing'"),
        ("--parameters (", "'(' is no regular expression"),
        ("--save-checkpoint /dev/null/file.pt", "--save-checkpoint /dev/null/file.pt cannot be written: /dev/null: "),
        (
            "--save-checkpoint x.pt --model-overrides {'dropout':0.1}",
            "the model's own options, and not those of --model-",
        ),
    ],
)
def test_errors_take_one_line(options, message, saved, command, tmp_path):
    assert message in command("masks", saved("softmax"), *options.split(), code=1)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "options",
    [
        "--beta 0",
        "--beta -1",
        "--beta x",
        "--search-beta 1,0",
        "--clip-norm -1",
        "--initial-logit nan",
        "--initial-logit 1e39",
        "--initial-logit -101",
        "--lengths 3-2",
    ],
)
def test_wrong_numbers(options, saved, capsys):
    with pytest.raises(SystemExit):
        main(["masks", saved("softmax"), *options.split()])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(f"error: argument {options.split()[0]}: ")


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_loss_that_diverges_ends_the_training(loss, saved, command, monkeypatch, tmp_path):
    monkeypatch.setattr(mask_training.MaskTraining, "step", lambda *_: float(loss))
    error = command("masks", saved("softmax"), *SHORT, code=1)
    assert f"the loss of the masks is {loss} at step 0: lower --lr" in error
    assert not list(tmp_path.iterdir())


def test_masks_of_parameters_without_effect(planted, command):
    """Attention to every column alike: queries and keys are 0."""
    error = command("masks", planted[0], *SHORT, "--parameters", ".*q_proj.*", code=1)
    assert "--parameters .*q_proj.*: no output depends on " in error and "q_proj.weight" in error


def test_a_masked_model_of_another_checkpoint_is_not_written(saved, tmp_path):
    with pytest.raises(UsageError, match=r"--save-checkpoint: .* has other weights than the model: decoder\."):
        masks.save_checkpoint(load(saved("softmax")), {}, saved("linear"), str(tmp_path / "masked.pt"))
    assert not list(tmp_path.iterdir())


def test_the_masked_model_does_not_replace_the_model(saved, command, tmp_path):
    model = tmp_path / "model.pt"
    shutil.copy(saved("softmax"), model)
    before = model.read_bytes()
    error = command("masks", model, *SHORT, "--save-checkpoint", f"{tmp_path}/./model.pt", code=1)
    assert "which the command reads: name another file" in error and model.read_bytes() == before


def test_halves_need_layers(saved, command, tmp_path):
    error = command("masks", saved("linear"), *SHORT, "--halves", code=1)
    assert "--halves needs a model with several layers of their own" in error
    assert not list(tmp_path.iterdir())  # before the masks are trained
    _, facts, _ = command("masks", saved("softmax"), *SHORT, "--halves", "--where", "s", out="halves")
    assert {"early", "late"} < set(facts["evaluation"]["valid"]["all"])


def test_titles_of_tensors_do_not_overlap():
    layer = "decoder.stack.layers.0"
    tensors = ["classifier.weight", *(f"{layer}.{part}.weight" for part in ("encoder_attn.out_proj", "update.ffn.fc1"))]
    names = [f"{tensor}.iou" for tensor in tensors] + ["iou", "iomin", "chance_iou", "chance_iomin"]
    arrays = {name: np.ones((1, 2, 2)) for name in names}
    result = Result(arrays, {"masks": ["a", "b"], "tensors": dict.fromkeys(tensors)})
    figure = draw_overlap(result, argparse.Namespace(tensors=True))["tensors"]
    figure.draw_without_rendering()
    titles = [ax.title.get_window_extent() for ax in figure.axes if ax.get_title()]
    assert len(titles) == 3 and all(a.x1 < b.x0 for a, b in itertools.pairwise(titles))


def test_files_that_are_no_masks(saved, found, command, tmp_path):
    first = f"first={found / 'first'}.npz"
    np.savez(tmp_path / "other.npz", a=np.ones(1))
    shutil.copy(found / "first.json", tmp_path / "other.json")
    (tmp_path / "cut.npz").write_bytes((found / "first.npz").read_bytes()[:400])
    shutil.copy(found / "first.json", tmp_path / "cut.json")
    assert "overlap compares two masks or more" in command("overlap", first.partition("=")[2], code=1)
    assert "overlap compares two masks or more" in command("overlap", first, code=1)
    assert "is no file of masks: name OUT.npz" in command("overlap", first, f"b={saved('softmax')}", code=1)
    assert "other.npz has no masks" in command("overlap", first, f"b={tmp_path}/other.npz", code=1)
    assert "cut.npz or" in command("overlap", first, f"b={tmp_path}/cut.npz", code=1)
    assert "no file" in (said := command("overlap", first, f"b={tmp_path}/absent.npz", code=1)) and "absent.npz" in said
    (tmp_path / "cut.json").unlink()
    assert "there is no file" in command("overlap", first, f"b={tmp_path}/cut.npz", code=1)
