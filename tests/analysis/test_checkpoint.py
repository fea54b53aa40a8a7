"""Loading a checkpoint, reading a sentence, and the errors of both."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

import torch

from fairseq_sg.analysis import checkpoint, load, read_sentence
from fairseq_sg.analysis.__main__ import COMMANDS
from fairseq_sg.errors import UsageError


def test_the_model_is_that_of_the_file(saved):
    loaded = load(saved("linear"))
    state = torch.load(saved("linear"), weights_only=True)["model"]
    assert not loaded.model.training and loaded.arch == "sg_transformer" and loaded.device.type == "cpu"
    assert all(torch.equal(x, state[name]) for name, x in loaded.model.state_dict().items())


def test_more_steps_by_an_override(saved):
    loaded = load(saved("linear"), overrides={"encoder_layers": 7})
    assert (loaded.model.encoder.stack.steps, loaded.model.decoder.stack.steps) == (7, 3)


def test_another_data_folder(saved, folders, tmp_path):
    link = tmp_path / "elsewhere"
    link.symlink_to(folders["pairs"])
    assert load(saved("softmax"), data=str(link)).task.cfg.data == str(link)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (dict(overrides={"encoder_layer": 7}), "--model-overrides names 'encoder_layer', which is not an option in .*"),
        (
            dict(overrides={"encoder_layers": "7"}),
            "--model-overrides has an invalid value: --encoder-layers is '7': choose a whole number",
        ),
        (
            dict(overrides={"encoder_embed_dim": 32}),
            "the checkpoint belongs to another model: other sizes of .*--model-overrides .*",
        ),
        (
            dict(data="nowhere"),
            "the data folder nowhere does not exist: give one with --data; the checkpoint was trained on .*",
        ),
    ],
)
def test_what_cannot_be_loaded(arguments, message, saved):
    with pytest.raises(UsageError, match=f"(?s)^{message}$"):
        load(saved("softmax"), **arguments)


@pytest.mark.parametrize("option,value", [("task", "sg_translation"), ("arch", "sg_transformer")])
def test_a_task_or_model_of_a_users_own_without_its_folder(option, value, saved, monkeypatch):
    for name in ("TASK_REGISTRY",) if option == "task" else ("MODEL_REGISTRY", "ARCH_MODEL_REGISTRY"):
        known = getattr(checkpoint, name)
        monkeypatch.setattr(checkpoint, name, {key: known[key] for key in known if key != value})
    message = f"was trained with --{option} {value}, which is not registered: give the --user-dir that registers it"
    with pytest.raises(UsageError, match=message):
        load(saved("softmax"))


def test_no_file_and_a_broken_file(saved, tmp_path):
    folder = str(Path(saved("softmax")).parent)
    with pytest.raises(UsageError, match="^there is no checkpoint nowhere.pt$"):
        load("nowhere.pt")
    with pytest.raises(UsageError, match=f"^{folder} is a folder: give a checkpoint in it, such as {folder}/.*pt$"):
        load(folder)
    with pytest.raises(UsageError, match=r"^there is no checkpoint .*/sofmax-pairs.pt: did you mean softmax-pairs.pt"):
        load(f"{folder}/sofmax-pairs.pt")
    with pytest.raises(UsageError, match="^there is no checkpoint .*/nowhere/x.pt: there is no folder .*/nowhere$"):
        load(f"{folder}/nowhere/x.pt")
    with pytest.raises(
        UsageError,
        match="^there is no checkpoint a=.*: only `accuracy`, `consistency`, `operator` and `regression` .*, omit a=$",
    ):
        load(f"a={saved('softmax')}")
    broken = tmp_path / "broken.pt"
    broken.write_bytes(open(saved("softmax"), "rb").read()[:1000])
    with pytest.raises(UsageError, match="cannot be read: it was cut off"):
        load(str(broken))


def test_messages_name_the_commands_that_take_names_and_language_models(saved):
    def named(message: str) -> set[str]:
        return set(re.findall("`(\\w+)`", message))

    several = {name for name, module in COMMANDS.items() if hasattr(module, "combine") and not hasattr(module, "READS")}
    assert named(checkpoint.absent(f"a={saved('softmax')}")) == several
    with pytest.raises(UsageError, match="is a language model") as error:
        load(saved("lm"))
    assert named(str(error.value)) == {
        name for name, module in COMMANDS.items() if "text" in getattr(module, "KINDS", ())
    }


@pytest.mark.parametrize("kind", ["softmax", "gated"])
def test_its_own_output_is_that_of_fairseqs_generator(kind, loaded):
    loaded = loaded(kind)
    generator = loaded.task.build_generator([loaded.model], Namespace(beam=1, max_len_a=0, max_len_b=19, min_len=0))
    for line in ("s t", "u v w x y z", "y"):
        sentence = read_sentence(loaded, line, longest=20)
        best = generator.generate([loaded.model], {"net_input": sentence.inputs | {"prev_output_tokens": None}})[0][0]
        expected = [loaded.task.target_dictionary[i] for i in best["tokens"].tolist()]
        assert sentence.expected[:19] == expected[:19]
        assert sentence.complete == (sentence.expected[-1] == "</s>") and sentence.predicted == sentence.expected


def test_its_own_output_is_no_longer_than_the_longest_target_of_the_data(loaded):
    model = loaded("softmax")
    raw = Path(model.data) / "raw"
    longest = max(len(line.split()) for path in raw.glob("*.tgt") for line in path.read_text().splitlines())
    assert model.longest_target == longest + 1  # the end symbol
    # This random model never predicts the end symbol.
    assert not read_sentence(model, "s t", longest=30).complete
    sentence = read_sentence(model, "s t")
    assert len(sentence.expected) == longest + 1 and not sentence.complete
    assert "cut at the longest target of the data" in sentence.summary()[1]
    assert len(read_sentence(model, "s t", " ".join("A" * 40)).expected) == 41


def test_sentences_as_the_model_was_trained_on_them(loaded):
    model = loaded("softmax")
    sentence = read_sentence(model, "s t u", "A B")
    assert sentence.source == ["<s>", "s", "t", "u", "</s>"]
    assert sentence.previous == ["</s>", "A", "B"] and sentence.expected == ["A", "B", "</s>"]
    dataset = model.subset("valid")
    source, target = (dictionary.string(dataset[3][side]) for side, dictionary in sides(model))
    batch = dataset.collater([dataset[3]])["net_input"]
    again = read_sentence(model, source.replace("<s> ", ""), target).inputs
    assert batch.keys() == again.keys() and all(torch.equal(batch[name], again[name]) for name in batch)
    classifier = read_sentence(loaded("encoder"), "p q 3")
    assert classifier.previous == classifier.expected == [] and classifier.predicted[0] in "0123"


def sides(loaded):
    return ("source", loaded.task.source_dictionary), ("target", loaded.task.target_dictionary)


@pytest.mark.parametrize(
    "source,target,message",
    [
        ("s q t", None, "--input has the word 'q', which is not in the source dictionary of .*"),
        ("s </s>", None, "--input has the word '</s>', which .*"),
        ("stu", "A", "--input has the word 'stu', which is not in the source dictionary of .*"),
        ("s", "a", "--target has the word 'a', which is not in the target dictionary of .*: did you mean A."),
        ("s", "A s", "--target has the word 's', which is not in the target dictionary of .*"),
        (" ", None, "--input has no words"),
        ("s", "", "--target has no words"),
    ],
)
def test_unknown_words(source, target, message, loaded):
    with pytest.raises(UsageError, match=f"^{message}$"):
        read_sentence(loaded("softmax"), source, target)


def test_no_target_for_a_classifier(loaded):
    with pytest.raises(UsageError, match="^sg_encoder has no decoder: omit --target$"):
        read_sentence(loaded("encoder"), "p 1", "1")
