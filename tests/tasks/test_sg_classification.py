"""The task of classes: what a batch has, which number a class is, what is refused."""

from __future__ import annotations

from argparse import Namespace

import pytest

pytest.importorskip("fairseq")

import torch
from omegaconf import OmegaConf

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.criterions.base import SGCriterionConfig
from fairseq_sg.errors import UsageError
from fairseq_sg.models.sg_transformer import configuration
from fairseq_sg.tasks.sg_classification import SGClassificationTask
from fairseq_sg.tasks.sg_translation import SGTranslationConfig
from helpers.labelled_data import SUBSETS, WORDS, write_labelled


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    return write_labelled(tmp_path_factory.mktemp("labelled") / "bin")


def task(folder, **values) -> SGClassificationTask:
    defaults = dict(train_subset="train", dataset_impl=None, required_seq_len_multiple=1)
    built = SGClassificationTask.setup_task(SGTranslationConfig(data=str(folder), **(defaults | values)))
    for subset in SUBSETS:
        built.load_dataset(subset)
    return built


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize(
    "options",
    [{}, {"left_pad_source": True}, {"left_pad_target": True, "required_seq_len_multiple": 8}],
    ids=str,
)
def test_batch_has_every_sentence_its_class_and_its_symbols(labelled, subset, options):
    built = task(labelled, **options)
    dataset = built.dataset(subset)
    batch = dataset.collater([dataset[i] for i in range(len(dataset))])
    assert set(batch["net_input"]) == {"src_tokens", "src_lengths"}
    classes = built.classes(batch["target"])
    sources = (labelled / "raw" / f"{subset}.src").read_text().splitlines()
    assert built.num_classes == len(WORDS) and sorted(set(classes.tolist())) == list(range(len(WORDS)))
    for tokens, number, label in zip(batch["net_input"]["src_tokens"], batch["id"].tolist(), classes.tolist()):
        tokens = tokens[tokens.ne(built.source_dictionary.pad())]
        assert (tokens[0], tokens[-1]) == (built.source_dictionary.bos(), built.source_dictionary.eos())
        assert built.source_dictionary.string(tokens[1:-1]) == sources[number]
        assert built.target_dictionary[label + built.target_dictionary.nspecial] == sources[number].split()[1].upper()


def test_evaluation_drops_no_sample(labelled):
    built = task(labelled)
    for subset, (size, _) in SUBSETS.items():
        batches = built.get_batch_iterator(built.dataset(subset), max_sentences=16, required_batch_size_multiple=8)
        assert sum(len(batch["id"]) for batch in batches.next_epoch_itr(shuffle=False)) == size


def test_batches_of_like_lengths(labelled):
    def spread(window):
        built = task(labelled, length_window=window)
        dataset = built.dataset("train")
        batches = built.get_batch_iterator(dataset, max_sentences=10, seed=1, grouped_shuffling=False)
        lengths = [dataset.src_sizes[b["id"].numpy()] for b in batches.next_epoch_itr(shuffle=True) if b]
        return sum(int(x.max() > x.min()) for x in lengths)

    assert spread(300) <= 2 < 20 < spread(1)


@pytest.mark.parametrize("several", [False, True])
def test_folder_without_classes(labelled, tmp_path, several):
    plain = write_labelled(tmp_path / "plain", labels=False)
    with pytest.raises(UsageError, match=rf"the targets of {plain} are no classes .* choose --task sg_translation"):
        task(f"{labelled}:{plain}" if several else plain)


def test_model_with_a_decoder(labelled):
    sizes = {"encoder_embed_dim": 8, "decoder_embed_dim": 8}
    # The current class: a registration, of another test's mechanism too, replaces it.
    config = OmegaConf.structured(configuration.dataclass(_name="sg_transformer", **sizes))
    with pytest.raises(UsageError, match="this --arch has a decoder.* choose a classifier, such as sg_encoder"):
        task(labelled).build_model(config)


def test_criterion_of_sentences(labelled):
    config = SGCriterionConfig(_name="cross_entropy_orthogonality", sentence_avg=False)
    with pytest.raises(UsageError, match="--task sg_classification needs another criterion: choose --criterion class"):
        task(labelled).build_criterion(config)


def test_nothing_is_generated(labelled):
    with pytest.raises(UsageError, match="a classifier generates nothing: .* fairseq-validate reports"):
        task(labelled).build_generator([torch.nn.Linear(1, 1)], Namespace())
    with pytest.raises(UsageError, match="--eval-bleu is for translations"):
        task(labelled, eval_bleu=True)
    with pytest.raises(UsageError, match="--oracle-length is for outputs with an end symbol: leave it out"):
        task(labelled, oracle_length=True)
