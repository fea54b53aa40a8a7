"""The criterion of labels: its value by hand, what counts, accuracy of sentences and labels, by type too."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
import torch.nn.functional as F
from fairseq.logging import metrics

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.criterions.tagging import Tagging, TaggingConfig
from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.breakdown import Breakdown
from fairseq_sg.tasks.sg_tagging import SGTaggingConfig, SGTaggingTask
from helpers.labelled_words import write_labelled_words

ROWS = [["101", "<copy>", ".", "."], ["<copy>", "."]]
LABELS = [[".", ".", "101", "<copy>"], [".", "<copy>"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_labelled_words(tmp_path_factory.mktemp("words") / "bin")


def make(folder, output="bits", **options):
    task = SGTaggingTask.setup_task(SGTaggingConfig(data=str(folder), output=output, accuracy_by="types"))
    return task, Tagging(TaggingConfig(**({"sentence_avg": False} | options)), task)


def sample(task, **more):
    target = torch.full((2, 4), task.target_dictionary.pad())
    for row, labels in zip(target, LABELS, strict=True):
        row[: len(labels)] = torch.tensor([task.target_dictionary.index(word) for word in labels])
    return {"target": target, "net_input": {"src_tokens": target}, "nsentences": 2, "ntokens": 6} | more


def run(task, criterion, logits, batch):
    return criterion(lambda **inputs: (logits, {}), batch)


@pytest.mark.parametrize("blanks", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_bits(folder, blanks, average):
    task, criterion = make(folder, score_blanks=blanks, sentence_avg=average)
    logits = torch.randn(2, 4, 4)
    logits[1, 2:] = 1e30  # at padding
    loss, size, logs = run(task, criterion, logits, sample(task))
    bits = task.target_bits[sample(task)["target"]]
    each = F.binary_cross_entropy_with_logits(logits, bits, reduction="none").sum(-1)
    counted = each[0].sum() + each[1, :2].sum() if blanks else each[0, 2:].sum() + each[1, 1]
    torch.testing.assert_close(loss, counted)
    assert int(size) == (2 if average else 3) and int(logs["ntokens"]) == 3


def test_bits_are_copied_to_a_device_once(folder):
    task, _ = make(folder)
    assert task.bits_on(torch.device("cpu")) is task.bits_on(torch.device("cpu"))
    assert torch.equal(task.bits_on(torch.device("cpu")), task.target_bits)
    on_meta = task.bits_on(torch.device("meta"))
    assert on_meta.device.type == "meta" and task.bits_on(torch.device("meta")) is on_meta


def test_words_with_label_smoothing(folder):
    task, criterion = make(folder, "words", label_smoothing=0.1)
    logits = torch.randn(2, 4, task.num_classes)
    loss, _, logs = run(task, criterion, logits, sample(task))
    classes = sample(task)["target"] - 4
    places = [(0, 2), (0, 3), (1, 1)]
    for value, smoothing in ((loss, 0.1), (logs["nll_loss"], 0.0)):
        expected = sum(F.cross_entropy(logits[at][None], classes[at][None], label_smoothing=smoothing) for at in places)
        torch.testing.assert_close(value, expected)


def test_accuracies(folder):
    """One of two sentences is right, two of three labels; blanks are wrong and do not count."""
    task, criterion = make(folder)
    bits = task.target_bits[sample(task)["target"]]
    logits = 3 * (2 * bits - 1)
    logits[0, 0] = logits[1, 0] = 5.0
    logits[0, 3] *= -1
    batch = sample(task, type=torch.tensor([0, 1]))
    criterion.eval()
    task.breakdown = Breakdown.__new__(Breakdown)
    task.breakdown.types, task.breakdown.reports = ["a", "b"], {"a": [0], "b": [1]}
    with metrics.aggregate() as logged:
        Tagging.reduce_metrics([run(task, criterion, logits, batch)[2]] * 2)
    found = logged.get_smoothed_values()
    expected = {"accuracy": 50, "token_accuracy": 66.6667, "word_error": 33.3333, "accuracy_a": 0, "accuracy_b": 100}
    expected |= {"word_error_a": 50, "word_error_b": 0, "mean_word_error": 25}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-3), name
    right, wrong = math.log1p(math.exp(-3)), math.log1p(math.exp(3))
    assert found["loss"] == pytest.approx((8 * right + 4 * wrong) / 3 / math.log(2), abs=1e-3)


def test_calls_are_weighed_by_their_labels(folder):
    """A validation reduces the logs of each batch by themselves. Here the two labels of the first are wrong."""
    task, criterion = make(folder)
    criterion.eval()
    bits = task.target_bits[sample(task)["target"]]
    logits = 3 * (2 * bits - 1)
    logits[0] *= -1
    task.breakdown = Breakdown.__new__(Breakdown)
    task.breakdown.types, task.breakdown.reports = ["a"], {"a": [0]}
    logs = []
    for row in range(2):
        batch = sample(task, type=torch.tensor([0]), nsentences=1)
        batch["target"] = batch["target"][row : row + 1]
        logs.append(run(task, criterion, logits[row : row + 1], batch)[2])
    with metrics.aggregate() as logged:
        for log in logs:
            Tagging.reduce_metrics([log])
    found = logged.get_smoothed_values()
    for name in ("word_error", "word_error_a", "mean_word_error"):
        assert found[name] == pytest.approx(200 / 3, abs=1e-3), name
    assert found["accuracy"] == found["accuracy_a"] == 50


def test_wrong_options(folder):
    with pytest.raises(UsageError, match="--label-smoothing is for labels that are words"):
        make(folder, label_smoothing=0.1)
    with pytest.raises(UsageError, match="--criterion tagging needs a label for every word"):
        Tagging(TaggingConfig(sentence_avg=False), SimpleNamespace(target_dictionary=None))
