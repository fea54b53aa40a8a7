"""The task of labels: what a batch has, which vectors words are, what counts as right, what is refused."""

from __future__ import annotations

import shutil
from argparse import Namespace

import pytest

pytest.importorskip("fairseq")

import torch

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.bits import BitEmbedding, bits_of
from fairseq_sg.tasks.sg_tagging import SGTaggingConfig, SGTaggingTask
from helpers.labelled_data import write_labelled
from helpers.labelled_words import SUBSETS, write_labelled_words


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return write_labelled_words(tmp_path_factory.mktemp("words") / "bin")


def task(folder, **values) -> SGTaggingTask:
    defaults = dict(train_subset="train", dataset_impl=None, required_seq_len_multiple=1)
    built = SGTaggingTask.setup_task(SGTaggingConfig(data=str(folder), **(defaults | values)))
    for subset in SUBSETS:
        built.load_dataset(subset)
    return built


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_a_batch_has_every_row_beside_its_label(words, subset, left):
    built = task(words, left_pad_source=left)
    dataset = built.dataset(subset)
    batch = dataset.collater([dataset[i] for i in range(len(dataset))])
    assert set(batch["net_input"]) == {"src_tokens", "src_lengths"}
    texts = [(words / "raw" / f"{subset}.{side}").read_text().splitlines() for side in ("src", "tgt")]
    pad = built.source_dictionary.pad()
    for tokens, target, number in zip(batch["net_input"]["src_tokens"], batch["target"], batch["id"].tolist()):
        assert torch.equal(tokens.eq(pad), target.eq(pad))
        real = tokens.ne(pad)
        assert real[-1 if left else 0]
        assert built.source_dictionary.string(tokens[real]) == texts[0][number]
        assert built.target_dictionary.string(target[real]) == texts[1][number]
    assert dataset.size(0) == (len(texts[0][0].split()),) * 2
    assert ("type" in batch) == (subset != "train" and bool(built.breakdown.reports))


def test_words_are_the_published_vectors():
    markers = {"<a>": "01", "<b>": "11"}
    rows = bits_of(["011", "<a>", ".", "1.."], 3, markers)
    assert rows.tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 0, 1], [0] * 5, [1, 0, 0, 0, 0]]
    assert bits_of(["01|10", "..|01"], 4, {}).tolist() == [[0, 1, 1, 0], [0, 0, 0, 1]]
    assert BitEmbedding(rows)(torch.tensor([1])).tolist() == [[-1, -1, -1, -1, 1]]
    with torch.autocast("cpu", torch.bfloat16):
        embedded = BitEmbedding(rows, 7)(torch.tensor([[1, 0]]))
    assert embedded.shape == (1, 2, 7) and embedded.dtype == torch.float32
    with pytest.raises(UsageError, match="'0110' is no word of 3 bits"):
        bits_of(["0110"], 3, markers)


def test_labels_of_bits_and_of_words(words):
    for output, size in (("bits", 4), ("words", 10)):  # 3 bits and a flag; 8 words, the marker and the blank
        built = task(words, output=output)
        assert built.num_classes == size
        target = torch.tensor([[built.target_dictionary.index(w) for w in (".", "011", "<copy>", "<pad>")]])
        if output == "bits":
            logits = torch.tensor([[[1.0, 1, 1, 1], [-1, 2, 3, -4], [-1, -1, 1, 1], [1, 1, 1, 1]]])
        else:
            logits = torch.nn.functional.one_hot((target - 4).clamp(min=0), size).float()
            logits[0, 2] = logits[0, 0]
        assert built.asked(target).tolist() == [[False, True, True, False]]
        assert built.right(logits, target).tolist() == [[False, True, False, False]]
        zeros = torch.tensor([[built.target_dictionary.index("000")]])  # the label of NaN
        assert not built.right(torch.full((1, 1, size), torch.nan), zeros).any()
        nll = built.nll(logits, target)
        expected = {
            "bits": torch.tensor([1.0, 2, 3, 4]).neg().exp().log1p().sum(),
            "words": torch.log(torch.tensor(9 + torch.e)) - 1,
        }
        torch.testing.assert_close(nll[0, 1], expected[output])


def test_a_right_word_of_zeros_is_told(words):
    """A blank has the same bits, which are read as a blank where no right label is known."""
    built = task(words)
    target = torch.tensor([built.target_dictionary.index(word) for word in ("000", ".", "101")])
    zeros = torch.full((3, built.num_classes), -1.0)
    assert built.right(zeros[None], target[None]).tolist() == [[True, False, False]]
    assert built.words_of(zeros, target) == ["000", ".", "."] and built.words_of(zeros) == [".", ".", "."]


def test_words_without_bits(tmp_path):
    plain = write_labelled_words(tmp_path / "plain", bits=False)
    built = task(plain)
    assert built.source_bits is None and built.target_bits is None and built.num_classes == 10
    with pytest.raises(UsageError, match=f"--output bits needs words of bits, and {plain} has others"):
        task(plain, output="bits")


def test_folder_without_labels_of_words(tmp_path):
    classes = write_labelled(tmp_path / "classes")
    with pytest.raises(UsageError, match=f"the targets of {classes} are not aligned with its sources"):
        task(classes)


def test_folders_with_different_labels(words, tmp_path):
    plain = write_labelled_words(tmp_path / "plain", bits=False)
    shutil.copy(words / "dict.src.txt", plain)
    shutil.copy(words / "dict.tgt.txt", plain)
    with pytest.raises(UsageError, match=f"{plain} has other labels than {words} \\(bits of their dataset.json"):
        task(f"{words}:{plain}")


def test_nothing_is_generated(words):
    with pytest.raises(UsageError, match="labels are not generated"):
        task(words).build_generator([torch.nn.Linear(1, 1)], Namespace())
    with pytest.raises(UsageError, match="--eval-bleu is for translations"):
        task(words, eval_bleu=True)
    with pytest.raises(UsageError, match="--oracle-length is for outputs with an end symbol: leave it out"):
        task(words, oracle_length=True)
