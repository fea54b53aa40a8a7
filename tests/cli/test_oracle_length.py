"""``--oracle-length`` in fairseq's commands: in a training, and for a checkpoint that was trained without it."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.commands import evaluation, metrics, run, succeed, training

GIVEN = ["--model-overrides", "{'oracle_length': True}"]


def validated(data, checkpoint, *more) -> dict[str, dict[str, float]]:
    options = ["--valid-subset", "valid,gen", "--batch-size", "50", "--log-format", "json", *more]
    printed = succeed("fairseq-validate", *evaluation(data, checkpoint, *options))
    return {name: metrics(printed, name)[0] for name in ("valid", "gen")}


def evaluated(checkpoint, folder, *more) -> dict[str, dict[str, float]]:
    succeed("fairseq_sg.evaluate", checkpoint, "--device", "cpu", "--json", folder / "numbers.json", *more)
    return json.loads((folder / "numbers.json").read_text())["subsets"]


def same(log, numbers) -> None:
    for name, values in numbers.items():
        for metric in ("accuracy", "token_accuracy", "nll_loss"):
            assert values[metric] == pytest.approx(log[name][metric], abs=1e-4), (name, metric)


def test_a_model_that_is_trained_without_the_end_symbol(data, tmp_path):
    options = ["--oracle-length", "--max-epoch", 4, "--label-smoothing", 0.1, "--orthogonality-weight", 1e-4]
    log = succeed("fairseq-train", *training(data, tmp_path / "run", *options))
    checkpoint = tmp_path / "run" / "checkpoint_last.pt"
    assert metrics(log, "valid")[-1]["nll_loss"] < metrics(log, "valid")[0]["nll_loss"]
    log, numbers = validated(data, checkpoint), evaluated(checkpoint, tmp_path)
    same(log, numbers)
    words = sum(len(line.split()) for line in (data / "raw" / "valid.tgt").read_text().splitlines())
    assert numbers["valid"]["tokens"] == words

    for command in (["fairseq-generate", "--gen-subset", "valid"], ["fairseq-interactive"]):
        refused = run(command[0], *evaluation(data, checkpoint, *command[1:]), text="walk twice\n")
        assert refused.code != 0 and "error: with --oracle-length the length of an output is given" in refused.err
    maps = run("fairseq_sg.analysis", "maps", checkpoint, "--input", "walk twice", "--out", tmp_path / "a.png")
    assert maps.code == 1 and "cannot end an output: give --target" in maps.err
    # Words without an end symbol are read, answered and drawn.
    for more, words in ((["--target", "I_WALK I_WALK I_JUMP"], 3), (["--max-len", 4], 4)):
        out = tmp_path / f"{words}.png"
        succeed("fairseq_sg.analysis", "maps", checkpoint, "--input", "walk twice", *more, "--out", out)
        facts = json.loads(out.with_suffix(".json").read_text())
        assert len(facts["output"]) == len(facts["target"]) == words and facts["complete"]
        assert not {"</s>", "<pad>"} & {*facts["output"], *facts["target"]}
        assert facts["target"] == (more[1].split() if words == 3 else facts["output"])
        keys = facts["roles"]["decoder"]["keys"]
        assert keys == ["</s>", *facts["target"][:-1]]


def test_a_checkpoint_also_from_before_the_option(data, trained, tmp_path):
    checkpoint, older = trained("softmax").checkpoint, tmp_path / "older.pt"
    state = torch.load(checkpoint, weights_only=True)
    del state["cfg"]["task"]["oracle_length"]
    torch.save(state, older)
    plain, given = validated(data, checkpoint), validated(data, checkpoint, *GIVEN)
    assert validated(data, checkpoint, "--oracle-length") == given
    same(given, evaluated(checkpoint, tmp_path, *GIVEN))
    assert validated(data, older) == plain and validated(data, older, *GIVEN) == given
    same(given, evaluated(older, tmp_path, *GIVEN))
    for name, values in given.items():
        assert values["accuracy"] >= plain[name]["accuracy"]
    # Longer commands have ends that the model has not seen.
    assert given["gen"]["accuracy"] > plain["gen"]["accuracy"]


def test_a_name_that_is_no_option_is_still_refused(data, trained):
    checkpoint = trained("softmax").checkpoint
    wrong = ["--model-overrides", "{'oracle_lenght': True}"]
    for command in (
        ["fairseq-validate", *evaluation(data, checkpoint, *wrong)],
        ["fairseq_sg.evaluate", checkpoint, *wrong],
    ):
        refused = run(*command)
        assert refused.code != 0 and "--model-overrides names 'oracle_lenght'" in refused.err
    kind = run("fairseq_sg.evaluate", checkpoint, "--model-overrides", "{'oracle_length': 'yes'}")
    assert kind.code == 1 and "oracle" in kind.err and "invalid value" in kind.err
