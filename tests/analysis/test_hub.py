"""``fairseq_sg.load``: the answers of fairseq's commands, the numbers of ``fairseq_sg.evaluate``, one-line errors."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

import numpy as np
import torch

import fairseq_sg
from data_prep.__main__ import main as data_prep
from fairseq_sg.analysis import attention_maps
from fairseq_sg.analysis import load as load_for_analysis
from fairseq_sg.errors import UsageError
from fairseq_sg.evaluate import main as evaluate
from helpers.analysis_models import checkpoint

PARTS = ("plain.src", "src", "tgt")
SENTENCES = ["s t", "u v w x y z", "y", "z z s"]


@pytest.fixture
def model(saved):
    return lambda *which, **more: fairseq_sg.load(saved(*which), device="cpu", **more)


def test_importing_the_package_imports_nothing_and_load_keeps_the_logging(saved):
    code = f"""
import logging, sys
import fairseq_sg
assert not {{"torch", "fairseq"}} & set(sys.modules)
fairseq_sg.load({saved("softmax")!r})
root = logging.getLogger()
assert (root.level, root.handlers) == (logging.WARNING, []), (root.level, root.handlers)
import fairseq_sg.hub
assert fairseq_sg.load is fairseq_sg.hub.load
try:
    fairseq_sg.laod
except AttributeError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("module 'fairseq_sg' has no attribute 'laod'\n", "")


@pytest.mark.parametrize("kind", ["mixed", "gated"])
@pytest.mark.parametrize("search", [{}, {"beam": 3, "lenpen": 0.5}], ids=["greedy", "beam"])
def test_translations_are_those_of_fairseqs_generator(kind, search, saved, model):
    task_of_its_own = load_for_analysis(saved(kind))
    task, dictionary = task_of_its_own.task, task_of_its_own.task.target_dictionary
    search = search | {"min_len": 1}
    given = Namespace(**({"beam": 1, "max_len_b": 12} | search))
    expected = []
    for sentence in SENTENCES:
        tokens = task.source_dictionary.encode_line(sentence, add_if_not_exist=False)
        dataset = task.build_dataset_for_inference([tokens], [len(tokens)])
        generator = task.build_generator([task_of_its_own.model], given)
        best = task.inference_step(generator, [task_of_its_own.model], dataset.collater([dataset[0]]))[0][0]
        expected.append(dictionary.string(best["tokens"]))
    loaded = model(kind)
    assert loaded.translate(SENTENCES, max_len_b=12, **search) == expected
    assert loaded.translate(SENTENCES, max_len_b=12, batch_size=1, **search) == expected
    assert loaded.translate(SENTENCES[1], max_len_b=12, **search) == expected[1]
    assert loaded.translate([]) == [] and len(set(expected)) > 1


def test_a_model_that_has_translated_is_still_a_model(model):
    """fairseq's search makes a model that can neither be trained nor pickled."""
    found = model("mixed")
    found.translate("s t")
    again = pickle.loads(pickle.dumps(found.loaded.model))
    assert again.train().training and not found.loaded.model.training


def test_outputs_of_a_length_by_the_source_do_not_depend_on_the_batch(model):
    """fairseq's length is that of the longest source of a batch."""
    search = {"max_len_a": 1, "max_len_b": 0, "min_len": 1}
    found = model("mixed").translate(SENTENCES, **search)
    assert found == model("mixed").translate(SENTENCES, batch_size=1, **search)
    assert len({len(output.split()) for output in found}) > 1
    assert model("mixed").translate(sentence for sentence in SENTENCES[:2]) == model("mixed").translate(SENTENCES[:2])


@pytest.mark.parametrize("kind", ["encoder", "lstm"])
def test_classes_are_those_of_the_numbers(kind, model):
    loaded = model(kind)
    raw = Path(loaded.loaded.data) / "raw"
    sources, targets = ((raw / f"gen.{side}").read_text().splitlines() for side in ("src", "tgt"))
    found = loaded.classify(sources)
    right = [answer == target for answer, target in zip(found, targets, strict=True)]
    assert loaded.accuracy("gen") == 100 * np.mean(right) and set(found) <= set("0123")
    assert loaded.classify(sources, batch_size=1) == found and loaded.classify(sources[5]) == found[5]


@pytest.mark.parametrize("kind", ["softmax", "encoder"])
def test_numbers_are_those_of_evaluate_to_the_digit(kind, saved, model, tmp_path):
    assert evaluate([saved(kind), "--device", "cpu", "--json", str(tmp_path / "numbers.json")]) == 0
    expected = json.loads((tmp_path / "numbers.json").read_text())["subsets"]
    loaded = model(kind)
    assert {name: loaded.evaluate(name) for name in expected} == expected
    assert {name: loaded.accuracy(name) for name in expected} == {k: v["accuracy"] for k, v in expected.items()}


def test_numbers_of_a_language_model(saved, model, tmp_path):
    assert evaluate([saved("lm"), "--device", "cpu", "--json", str(tmp_path / "numbers.json")]) == 0
    expected = json.loads((tmp_path / "numbers.json").read_text())["subsets"]
    assert {name: model("lm").evaluate(name) for name in expected} == expected


def test_the_score_of_a_text_is_its_cross_entropy(model):
    """All of a subset as one text, which the evaluation then reads as one segment of one stream."""
    loaded = model("lm", overrides={"tokens_per_sample": 1000, "memory_length": 0})
    text = (Path(loaded.loaded.data) / "raw" / "valid.txt").read_text()
    numbers = loaded.evaluate("valid", batch_size=1)
    assert "\n" in text and numbers["tokens"] == len(text)
    assert loaded.score(text) == pytest.approx(-numbers["nll_loss"] * numbers["tokens"], rel=1e-6)
    assert loaded.score([text[:9], text[9:30]]) == [loaded.score(text[:9]), loaded.score(text[9:30])]
    # The first letter after the end symbol: 256 bytes have a probability.
    letters = loaded.score([chr(number) for number in range(128)])
    assert 0 < sum(2**bits for bits in letters) < 1


@pytest.mark.parametrize("kind", ["linear", "mixed", "encoder"])
def test_attention_is_that_of_the_maps(kind, saved, model):
    source = "p q 3" if kind == "encoder" else "s t u"
    expected = attention_maps.measure(
        load_for_analysis(saved(kind)), Namespace(input=source, subset=None, target=None, max_len=None)
    )
    maps = model(kind).attention(source)
    found = {f"{role}.step{number}": x for role, steps in maps.weights.items() for number, x in enumerate(steps, 1)}
    assert found.keys() == expected.arrays.keys()
    assert all(np.array_equal(found[name], expected.arrays[name]) for name in found)
    for role, facts in expected.facts["roles"].items():
        assert (maps.queries[role], maps.keys[role]) == (facts["queries"], facts["keys"])
        assert maps.weights[role][0].shape[1:] == (len(maps.queries[role]), len(maps.keys[role]))
    assert maps.source == ["<s>", *source.split(), "</s>"] and maps.output == expected.facts["output"]
    assert "encoder 3 × 4 × 5 × 5" in repr(maps) or kind == "mixed"


def test_attention_to_a_target_of_ones_own(model):
    loaded = model("softmax")
    assert loaded.attention("s t", target="A B C").target == ["A", "B", "C", "</s>"]
    assert len(loaded.attention("s t", longest=3).target) == 3
    assert loaded.attention("s t").weights["cross"][0].dtype == np.float32


def test_another_folder_and_other_options(saved, folders, tmp_path):
    link = tmp_path / "elsewhere"
    link.symlink_to(folders["pairs"])
    loaded = fairseq_sg.load(Path(saved("linear")), data=link, device="cpu", overrides={"encoder_layers": 5})
    assert loaded.loaded.data == str(link) and len(loaded.attention("s").weights["encoder"]) == 5


def test_text_of_subwords(tmp_path):
    """Plain text in, plain text out, and the end of a line is the end symbol.

    White space is read as in preparing the data: all of it is blanks for pairs, and letters for a text.
    """
    lines = [f"the {animal} sees a {other}" for animal in ("cat", "dog", "cow") for other in ("hen", "fox")]
    for name, text in (
        ("a", lines),
        ("b", [line[::-1] for line in lines]),
        ("text", [line.replace("a ", "a\u00a0") for line in lines * 9]),
    ):
        (tmp_path / name).write_text("\n".join(text) + "\n")
    parallel = f"parallel --src {tmp_path}/a --tgt {tmp_path}/b --separate --model bpe --vocab-size 25 --test-share 0"
    assert data_prep([*parallel.split(), "--valid-share", "0.2", "--out", str(tmp_path / "pairs")]) == 0
    text = f"text --unit sentencepiece --vocab-size 272 --input {tmp_path}/text --out {tmp_path}/lm"
    assert data_prep(text.split()) == 0
    raw = tmp_path / "pairs" / "raw"
    plain, source, target = ((raw / f"train.{ending}").read_text().splitlines() for ending in PARTS)

    loaded = fairseq_sg.load(checkpoint(tmp_path / "pairs.pt", tmp_path / "pairs", "softmax"), device="cpu")
    maps = loaded.attention(plain[0], target=plain[0][::-1])
    assert maps.source == ["<s>", *source[0].split(), "</s>"] and maps.target == [*target[0].split(), "</s>"]
    assert loaded.attention(plain[0].replace(" ", "\u00a0", 1).replace(" ", "\t ", 1)).source == maps.source
    (found,) = loaded.translate([plain[0]], max_len_b=9)
    assert found and "\u2581" not in found
    assert found == "".join(loaded.attention(plain[0], longest=9).target).replace("\u2581", " ").strip()
    with pytest.raises(UsageError, match="sentence 2 has no words"):
        loaded.translate([plain[0], " \u2581"])

    loaded = fairseq_sg.load(checkpoint(tmp_path / "lm.pt", tmp_path / "lm", "lm"), device="cpu")
    tokens = loaded._read_text(f"{lines[0]}\n\nthe", "text 1")
    pieces = [loaded.loaded.task.source_dictionary[token] for token in tokens.tolist()]
    assert "".join(pieces).replace("\u2581", " ") == f" {lines[0]}</s></s> the" and pieces.count("</s>") == 2
    assert loaded.score(f"{lines[0]}\n") < loaded.score(lines[0]) < loaded.score(lines[0][:-4]) < 0
    text = (tmp_path / "lm" / "raw" / "valid.txt").read_text()
    data = loaded.loaded.subset("valid")
    assert "\u00a0" in text and any("\u00a0" in word for word in loaded.loaded.task.source_dictionary.symbols)
    assert loaded._read_text(text, "text 1").tolist() == data.read(0, len(data)).tolist()


@pytest.mark.parametrize(
    "arguments,message",
    [
        (dict(overrides={"encoder_layer": 7}), "`overrides` names 'encoder_layer', which is not an option in .*"),
        (dict(overrides={"encoder_embed_dim": 32}), "the checkpoint belongs to another model: .*`overrides` in .*"),
        (dict(data="nowhere"), "the data folder nowhere does not exist: give one with `data`; the checkpoint was .*"),
        (dict(data=5), "`data` is 5: give a path"),
        (dict(overrides="encoder_layers=3"), "`overrides` is 'encoder_layers=3': give a dict of options"),
        (dict(device="gpu"), "`device` is 'gpu': choose cpu, cuda, cuda:1 .*or auto"),
        (dict(user_dir="nowhere"), "there is no folder nowhere: .* with `user_dir`"),
    ],
)
def test_what_cannot_be_loaded(arguments, message, saved):
    with pytest.raises(UsageError, match=f"(?s)^{message}$"):
        fairseq_sg.load(saved("softmax"), **arguments)


def test_no_path():
    with pytest.raises(UsageError, match="^`checkpoint` is None: give a path$"):
        fairseq_sg.load(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(saved):
    with pytest.raises(UsageError, match="^`device` is cuda:1, but PyTorch finds no GPU: choose cpu or auto$"):
        fairseq_sg.load(saved("softmax"), device="cuda:1")


def test_no_checkpoint_and_a_folder_that_has_moved(saved, folders, tmp_path):
    folder = Path(saved("softmax")).parent
    with pytest.raises(UsageError, match="^there is no checkpoint .*/sofmax-pairs.pt: did you mean softmax-pairs.pt"):
        fairseq_sg.load(folder / "sofmax-pairs.pt")
    text = tmp_path / "text.pt"
    text.write_text("no checkpoint")
    with pytest.raises(UsageError, match=f"^the checkpoint {text} cannot be read: .* name another checkpoint$"):
        fairseq_sg.load(text)
    link = tmp_path / "moved"
    link.symlink_to(folders["pairs"])
    path = checkpoint(tmp_path / "model.pt", link, "softmax")
    link.unlink()
    with pytest.raises(UsageError, match="moved, which the checkpoint was trained on, does not exist: .* `data`$"):
        fairseq_sg.load(path)


def calls(model):
    return [
        (lambda: model.translate(["s t", "s q"]), "sentence 2 has the word 'q', which is not in the source dictionary"),
        (lambda: model.translate(["s", " "]), "sentence 2 has no words"),
        (
            lambda: model.translate(["s"] * 2 + ["s " * 1500]),
            "sentence 3 has 1502 tokens: the model takes at most 1024",
        ),
        (lambda: model.translate(["s"], beem=4), ".translate has no argument 'beem': did you mean beam?"),
        (lambda: model.translate(["s"], nbest=4), ".translate has no argument 'nbest'"),
        (lambda: model.translate(["s"], beam=0), "`beam` is 0: choose 1 or more"),
        (lambda: model.translate(["s"], batch_size=0), "`batch_size` is 0: choose 1 or more"),
        (lambda: model.translate(["s"], beam=1.5), "`beam` is 1.5: choose a whole number"),
        (lambda: model.translate(["s"], max_len_b="5"), "`max_len_b` is '5': choose a whole number"),
        (
            lambda: model.translate(["s"], max_len_b=0, min_len=1),
            "refuses these arguments of .translate: min_len cannot be larger",
        ),
        (
            lambda: model.translate(["s"], sampling_topk=2),
            "refuses these arguments of .translate: `sampling_topk` requ",
        ),
        (lambda: model.translate(["s", 3]), "3 is no text: give a string"),
        (lambda: model.translate(None), "None is no text: give a string"),
        (lambda: model.translate(["s"], sampling_topp=1.5), "`sampling_topp` is 1.5: choose a number to 1"),
        (lambda: model.translate(["s"], lenpen=None), "`lenpen` is None: leave it out"),
        (lambda: model.translate(["s"], beam=None), "`beam` is None: leave it out"),
        (lambda: model.translate(["s"], sampling=True, sampling_topk=999), "`sampling_topk` is 999: the model has "),
        (lambda: model.translate(["s"], match_source_len=True), ".translate has no argument 'match_source_len'"),
        (lambda: model.attention(["s"]), "['s'] is no text: give a string"),
        (lambda: model.attention("s", longest="3"), "`longest` is '3': choose a whole number"),
        (lambda: model.attention("s", target="A", longest=3), "`longest` limits an output that the model generates"),
        (lambda: model.attention("s", longest=0), "`longest` is 0: choose 1 or more words"),
        (lambda: model.accuracy("genn"), "has no subset 'genn': did you mean gen?"),
        (lambda: model.accuracy(None), "`subset` is None: give the name of a subset"),
        (lambda: model.accuracy("gen", batch_size=-1), "`batch_size` is -1: choose 1 or more"),
        (lambda: model.attention("s q"), "`source` has the word 'q', which is not in the source dictionary"),
        (lambda: model.attention("s", target="a"), "`target` has the word 'a', which is not in the target dictionary"),
        (lambda: model.classify(["s"]), "is an encoder–decoder model and has no .classify: use .translate"),
        (lambda: model.score(["s"]), "is an encoder–decoder model and has no .score: use .translate"),
    ]


def calls_of_others(classifier, lm):
    return [
        (lambda: classifier.translate(["p 1"]), "sg_encoder is a classifier and has no .translate: use .classify"),
        (lambda: classifier.classify(["p 4"]), "sentence 1 has the word '4'"),
        (lambda: classifier.classify(["p", "p\np"]), "sentence 2 has a line break: give a list with a string for each"),
        (lambda: classifier.classify(["p 1"], batch_size=0), "`batch_size` is 0"),
        (lambda: classifier.classify(["p 1", None]), "None is no text: give a string"),
        (lambda: lm.score(["a", 1]), "1 is no text: give a string"),
        (lambda: classifier.attention("p 1", target="1"), "sg_encoder has no decoder: omit `target`"),
        (lambda: lm.translate(["a"]), "sg_transformer_lm is a language model and has no .translate: use .score, .eval"),
        (lambda: lm.accuracy("valid"), "has no .accuracy: use .score, .evaluate"),
        (lambda: lm.attention("a"), "has no .attention: use .score, .evaluate"),
        (lambda: lm.score(["a", ""]), "text 2 is empty"),
    ]


def test_mistakes_name_the_fix(model):
    for call, message in calls(model("softmax")) + calls_of_others(model("encoder"), model("lm")):
        with pytest.raises(UsageError, match=re.escape(message)):
            call()


def test_loading_draws_no_random_number(saved):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    fairseq_sg.load(saved("softmax"), device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_text_beyond_the_positions_of_the_model(folders, tmp_path):
    learned = "--decoder-attention softmax --position learned --learned-positions 20".split()
    loaded = fairseq_sg.load(checkpoint(tmp_path / "model.pt", folders["text"], "lm", *learned), device="cpu")
    assert loaded.score("a" * 20) < 0
    with pytest.raises(UsageError, match="^text 2 has 21 tokens: the model takes at most 20$"):
        loaded.score(["b", "a" * 21])


@pytest.mark.parametrize("kind,methods", [("softmax", ".translate"), ("encoder", ".classify"), ("lm", ".score")])
def test_it_says_what_it_is(kind, methods, model):
    assert methods in repr(model(kind)) and model(kind).loaded.data in repr(model(kind))
