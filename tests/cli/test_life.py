"""The life of a model through fairseq's commands: train, resume, validate, generate, interactive."""

from __future__ import annotations

import re

import pytest
import torch
from fairseq import checkpoint_utils

import fairseq_sg.plugin  # noqa: F401
from helpers.commands import KINDS, check, evaluation, launch, metrics, run, succeed, training, translations

kinds = pytest.mark.parametrize("kind", KINDS)
SIZES = {"valid": 101, "gen": 45}


@pytest.fixture(scope="module")
def greedy(trained, data):
    """The output of ``fairseq-generate --beam 1 --scoring exact_match`` on ``valid``."""
    printed = {}

    def generate(kind: str) -> str:
        if kind not in printed:
            more = ["--gen-subset", "valid", "--beam", "1", "--scoring", "exact_match", "--batch-size", "64"]
            printed[kind] = succeed("fairseq-generate", *evaluation(data, trained(kind).checkpoint, *more))
        return printed[kind]

    return generate


def right_when_teacher_forced(checkpoint, subset: str) -> set[int]:
    """The sentences whose every argmax, given the target's prefix, is the target's next token."""
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    task.load_dataset(subset)
    right = set()
    with torch.no_grad():
        for sample in task.get_batch_iterator(task.dataset(subset), max_sentences=16).next_epoch_itr(shuffle=False):
            guess = models[0].eval()(**sample["net_input"])[0].argmax(-1)
            same = guess.eq(sample["target"]) | sample["target"].eq(task.target_dictionary.pad())
            right |= set(sample["id"][same.all(-1)].tolist())
    return right


@kinds
def test_training_learns_and_resumes(kind, trained):
    model = trained(kind)
    before, after = (metrics(log, "valid") for log in (model.first, model.resumed))
    assert [m["epoch"] for m in before + after] == list(range(1, KINDS[kind][1] + 1))
    assert after[-1]["loss"] < before[-1]["loss"] < before[0]["loss"]
    assert "Loaded checkpoint" in model.resumed
    assert ("orthogonality_encoder" in after[-1]) == (kind == "linear")
    assert len(metrics(model.resumed, "gen")) == len(after)


@kinds
def test_accuracy_is_the_exact_match_of_greedy_decoding(kind, trained, greedy, data):
    checkpoint = trained(kind).checkpoint
    more = ["--valid-subset", "valid,gen", "--batch-size", "64", "--log-format", "json"]
    validated = metrics(succeed("fairseq-validate", *evaluation(data, checkpoint, *more)), "valid")
    sentences = translations(greedy(kind))
    decoded = {i for i, sentence in sentences.items() if sentence.hypothesis == sentence.target}
    assert set(sentences) == set(range(SIZES["valid"]))
    # Some are right and some are wrong; how many depends on the processor.
    assert 0.1 * len(sentences) < len(decoded) < len(sentences)
    assert decoded == right_when_teacher_forced(checkpoint, "valid")
    percent = 100 * len(decoded) / len(sentences)
    assert f"exact_match = {percent:.4f} ({len(decoded)} of {len(sentences)})" in greedy(kind)
    assert validated[0]["accuracy"] == pytest.approx(percent, abs=1e-4)
    assert metrics(trained(kind).resumed, "valid")[-1]["accuracy"] == pytest.approx(percent, abs=1e-4)


@pytest.mark.parametrize(
    "kind,scoring,score",
    [("linear", "sacrebleu", "BLEU"), ("relative", "bleu", "BLEU4"), ("softmax", "exact_match", "exact_match")],
)
def test_beam_search_scores_every_sentence(kind, scoring, score, trained, data):
    more = ["--gen-subset", "gen", "--beam", "5", "--scoring", scoring, "--batch-size", "16"]
    printed = succeed("fairseq-generate", *evaluation(data, trained(kind).checkpoint, *more))
    assert len(translations(printed)) == SIZES["gen"]
    assert re.search(rf"^Generate gen with beam=5: {score} = \d+\.\d+", printed, re.MULTILINE)


@kinds
def test_interactive_gives_what_generate_gives(kind, trained, greedy, data):
    sources = (data / "raw" / "valid.src").read_text().splitlines()[:7]
    more = ["--beam", "1", "--buffer-size", "7", "--batch-size", "4"]
    printed = run(
        "fairseq-interactive", *evaluation(data, trained(kind).checkpoint, *more), text="\n".join(sources) + "\n"
    )
    assert printed.code == 0, printed.err
    generated = translations(greedy(kind))
    interactive = translations(printed.out)
    assert set(interactive) == set(range(7))
    for i, sentence in interactive.items():
        assert sentence.hypothesis == generated[i].hypothesis
        assert sentence.score == pytest.approx(generated[i].score, abs=1e-4)


def test_installed_commands_in_processes_of_their_own(data, trained):
    """Where an import would show its noise, as in trainings of test_user_dir and test_hydra; other tests fork."""
    checkpoint = trained("softmax").checkpoint
    more = ["--valid-subset", "gen", "--batch-size", 64, "--log-format", "json"]
    assert metrics(check(launch("fairseq-validate", *evaluation(data, checkpoint, *more))), "gen")
    more = ["--gen-subset", "gen", "--batch-size", 64, "--beam", 1, "--max-len-b", 8]
    assert len(translations(check(launch("fairseq-generate", *evaluation(data, checkpoint, *more))))) == SIZES["gen"]
    more = ["--beam", 1, "--max-len-b", 8]
    answered = launch("fairseq-interactive", *evaluation(data, checkpoint, *more), text="walk twice\n")
    assert answered.code == 0 and len(translations(answered.out)) == 1, answered.err


def test_a_model_gets_its_inputs_in_the_form_that_it_was_trained_on(data, trained, tmp_path):
    """Sources without a begin symbol, also where the command does not say so."""
    options = ["--no-source-bos", "--max-epoch", 2]
    succeed("fairseq-train", *training(data, tmp_path / "run", *options))
    checkpoint = tmp_path / "run" / "checkpoint_last.pt"
    written = []
    for more in ([], ["--no-source-bos"]):
        generation = evaluation(data, checkpoint, "--gen-subset", "valid", "--beam", "1", "--batch-size", "64", *more)
        printed = succeed("fairseq-generate", *generation)
        printed += succeed(
            "fairseq-interactive", *evaluation(data, checkpoint, "--beam", "1", *more), text="walk twice\n"
        )
        written.append(re.findall(r"^H-.*", printed, re.MULTILINE))
        assert len(written[-1]) == SIZES["valid"] + 1
    assert written[0] == written[1]
    both = run("fairseq-generate", *evaluation(data, f"{checkpoint}:{trained('softmax').checkpoint}"))
    assert "error: some of these models were trained with --no-source-bos and some without" in both.err
    goes_on = run("fairseq-train", *training(data, tmp_path / "run", "--max-epoch", 3))
    assert (
        goes_on.code == 0
        and "with those of this command: --no-source-bos True (here False)" in goes_on.out + goes_on.err
    )
