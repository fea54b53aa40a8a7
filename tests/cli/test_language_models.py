"""Language models through fairseq's commands: memory helps, every token counts, a resumed run is the same one."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

import fairseq_sg.plugin  # noqa: F401
from data_prep.__main__ import main as data_prep
from helpers.commands import in_two, metrics, run, succeed
from helpers.states import assert_same_state, tensors

#: Tokens of a segment, and of what the text says twice.
LENGTH = 8
MODEL = (
    "--arch sg_transformer_lm --pre-norm --decoder-layers 1 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 "
    "--decoder-attention-heads 2 --dropout 0 --criterion cross_entropy_orthogonality"
).split()
RELATIVE = "--decoder-attention relative --attention-scale learned --linear-init depth".split()
LINEAR = "--decoder-attention linear --position rotary".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Eight random letters, the same eight once more, eight others, and so on: 3 bits a letter, then none."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    parts = ("".join(draw.choices("abcdefgh", k=LENGTH)) * 2 for _ in range(3600))
    (folder / "letters").write_text("".join(parts))
    arguments = ["text", "--unit", "bytes", "--input", str(folder / "letters"), "--out", str(folder / "bin")]
    assert not data_prep(arguments)
    return folder / "bin"


def task(memory: int, *more: object) -> list[object]:
    fixed = f"--user-dir fairseq_sg --task sg_language_modeling --tokens-per-sample {LENGTH} --cpu --log-format json"
    return [*fixed.split(), "--memory-length", memory, *more]


def training(text: Path, folder: Path, memory: int, *more: object) -> list[object]:
    fixed = "--optimizer adam --lr 1e-2 --batch-size 32 --no-epoch-checkpoints --valid-subset valid,test".split()
    return [text, *task(memory), *MODEL, *fixed, "--save-dir", folder, *more]


@pytest.fixture(scope="module")
def copying(text, tmp_path_factory) -> tuple[Path, str]:
    """A model with a memory, trained for one epoch, and what the training printed."""
    folder = tmp_path_factory.mktemp("copying")
    printed = succeed("fairseq-train", *training(text, folder, LENGTH, *RELATIVE, "--max-epoch", "1"))
    return folder / "checkpoint_last.pt", printed


def validation(text: Path, checkpoint: Path, *more: object) -> dict[str, float]:
    arguments = ["--path", checkpoint, "--valid-subset", "valid", "--user-dir", "fairseq_sg", "--cpu"]
    arguments += ["--task", "sg_language_modeling", "--log-format", "json", *more]
    (found,) = metrics(succeed("fairseq-validate", text, *arguments), "valid")
    return found


def test_memory_learns_what_no_segment_shows(copying):
    """Without memory, one letter of sixteen repeats what its segment has: at best 45/16 = 2.81 bits a letter."""
    for subset in ("valid", "test"):
        (found,) = metrics(copying[1], subset)
        assert found["nll_loss"] == found["bpc"] == found["bpb"] < 2.5
        assert found["ppl"] == pytest.approx(2 ** found["nll_loss"], abs=0.01)
    (train,) = metrics(copying[1], "train")
    assert train["bpc"] == train["nll_loss"] < 3.2


def test_validation_is_that_of_the_training_and_knows_its_own_memory(copying, text):
    checkpoint, printed = copying
    (during,) = metrics(printed, "valid")
    after = validation(text, checkpoint, "--batch-size", "32")
    for name in ("loss", "nll_loss", "ppl", "bpc", "bpb"):
        assert after[name] == pytest.approx(during[name], abs=2e-4)
    # Rows are other streams: all tokens are scored whatever their number, 11 being no divisor of anything.
    longer = validation(text, checkpoint, "--batch-size", "11", "--eval-memory-length", 4 * LENGTH)
    assert 2.0 < longer["nll_loss"] < 2.81 and longer["nll_loss"] != after["nll_loss"]


def test_eval_lm_scores_the_same_blocks_without_memory(copying, text):
    """fairseq's own command and task, on the folder and the checkpoint as they are."""
    checkpoint, _ = copying
    without = validation(text, checkpoint, "--batch-size", "1", "--eval-memory-length", "0")
    assert without["nll_loss"] > 2.81
    arguments = f"--user-dir fairseq_sg --task language_modeling --sample-break-mode none --tokens-per-sample {LENGTH}"
    arguments += " --gen-subset valid --cpu --batch-size 7"
    printed = succeed("fairseq-eval-lm", text, *arguments.split(), "--path", checkpoint)
    assert float(re.search(r"Loss \(base 2\): (\S+),", printed)[1]) == pytest.approx(without["nll_loss"], abs=2e-4)


def test_interactive_continues_a_prompt(copying, text):
    """Step by step: the letters of the prompt, and letters of the text after them."""
    prompt = "abcdefgh"
    symbols = " ".join(f"<0x{ord(letter):02X}>" for letter in prompt)
    arguments = "--user-dir fairseq_sg --task sg_language_modeling --cpu --beam 1 --min-len 16 --max-len-b 16".split()
    printed = succeed("fairseq-interactive", text, *arguments, "--path", copying[0], text=symbols + "\n")
    said = re.search(r"^H-0\t\S+\t(.*)$", printed, re.MULTILINE)[1].split()
    assert said[:8] == symbols.split() and len(said) >= 15
    assert all(letter in symbols.split() for letter in said)


def test_a_prompt_longer_than_the_limit_is_refused(copying, text):
    arguments = "--user-dir fairseq_sg --task sg_language_modeling --cpu --beam 1 --max-len-b 8".split()
    result = run("fairseq-interactive", text, *arguments, "--path", copying[0], text="<0x61> " * 12 + "\n")
    assert result.code and "H-0" not in result.out
    assert "a prompt has 12 tokens, and with its continuation at most 8 are taken: choose a larger" in result.err


@pytest.mark.parametrize(
    "memory,options,message",
    [
        (0, "--eval-memory-length 8 --position randomized", "not segments of a stream: leave --eval-memory-length out"),
        (8, "--position randomized", "not segments of a stream: leave --memory-length out"),
        (
            8,
            "--eval-memory-length 32 --decoder-attention linear --feature-map cosformer --cosformer-horizon 32",
            "--eval-memory-length and --tokens-per-sample are 40 together, and the layers are defined for 32 positions",
        ),
        (
            0,
            "--eval-memory-length 8 --position learned --learned-positions 64",
            "with --eval-memory-length, positions count from the beginning of a stream. Those of 'valid' have",
        ),
        (
            8,
            "--eval-memory-length 0 --position learned --learned-positions 64",
            "with --memory-length, positions count from the beginning of a stream. Those of 'train' have",
        ),
    ],
)
def test_a_memory_that_the_model_cannot_serve_is_refused_at_the_start(memory, options, message, text, tmp_path):
    """Not at the first validation, after hours of training."""
    result = run("fairseq-train", *training(text, tmp_path, memory, *options.split()))
    assert result.code and message in result.err
    assert "train_inner" not in result.out + result.err and not list(tmp_path.glob("*.pt"))


# Resuming.


#: Not Adam, which blows rounding errors of small gradients up to whole steps.
SHORT = "--decoder-embed-dim 16 --optimizer sgd --momentum 0.9 --lr 0.5 --lr-scheduler cosine --max-update 30".split()


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> Path:
    """Thirty updates, each of two batches: the epoch has more."""
    folder = tmp_path_factory.mktemp("whole")
    succeed("fairseq-train", *training(text, folder, 12, *LINEAR, "--update-freq", "2", *SHORT))
    return folder / "checkpoint_last.pt"


def test_resumed_training_equals_an_uninterrupted_one(whole, text, tmp_path):
    """The memory of both groups of streams is in the checkpoint, which torch reads as plain data."""
    arguments = training(text, tmp_path, 12, *LINEAR, "--update-freq", "2", *SHORT)
    succeed("fairseq-train", *arguments, "--stop-time-hours", "0.000001")
    stopped = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert stopped["optimizer_history"][-1]["num_updates"] == 1
    memory = stopped["extra_state"]["SGLanguageModelingTask"]["trained"]
    assert sorted(memory) == [0, 1] and all(m["position"] == LENGTH for m in memory.values())
    succeed("fairseq-train", *arguments)
    assert_same_state(whole, tmp_path / "checkpoint_last.pt")


def test_two_workers_are_two_batches_an_update_and_resume(whole, text, tmp_path):
    """Both workers' memories are saved by the first: stopped and resumed, they end where one process does."""
    for stop in (["--stop-time-hours", "0.000001"], []):
        in_two(*training(text, tmp_path, 12, *LINEAR, *SHORT, *stop))
        last = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
        assert sorted(last["extra_state"]["SGLanguageModelingTask"]["trained"]) == [0, 1]
    one = torch.load(whole, weights_only=True)
    assert last["optimizer_history"][-1]["num_updates"] == one["optimizer_history"][-1]["num_updates"] == 30
    left, right = tensors(one["model"]), tensors(last["model"])
    for name, tensor in left.items():
        torch.testing.assert_close(right[name], tensor, rtol=1e-4, atol=1e-5)
    memories = [tensors(state["extra_state"]["SGLanguageModelingTask"]) for state in (one, last)]
    for name, tensor in memories[0].items():
        torch.testing.assert_close(memories[1][name], tensor, rtol=1e-4, atol=1e-5)
