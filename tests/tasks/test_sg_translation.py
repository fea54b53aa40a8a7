"""The task: sources with a begin symbol, batches that leave nothing out, windows of like lengths, unfit data."""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace

import numpy as np
import pytest

pytest.importorskip("fairseq")

import torch
from fairseq import options, tasks
from fairseq.criterions.cross_entropy import CrossEntropyCriterionConfig
from fairseq.data import data_utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.search import LexicallyConstrainedBeamSearch
from fairseq.tasks.translation import TranslationTask
from fairseq.token_generation_constraints import pack_constraints
from fairseq.trainer import Trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.mixin import SGTask
from fairseq_sg.tasks.sg_translation import SGTranslationConfig, SGTranslationTask, WindowedPairDataset
from helpers.small_folders import SOURCE_WORDS, TARGET_WORDS, random_pairs, write_folder

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
BOS, PAD, EOS = 0, 1, 2


def task(folder, subsets=("train", "valid", "gen"), **values) -> SGTranslationTask:
    defaults = dict(train_subset="train", dataset_impl=None, required_seq_len_multiple=1)
    built = SGTranslationTask.setup_task(SGTranslationConfig(data=str(folder), **(defaults | values)))
    for subset in subsets:
        built.load_dataset(subset)
    return built


def collated(dataset):
    return dataset.collater([dataset[i] for i in range(len(dataset))])


def ids(iterator) -> list:
    """Sample numbers of an epoch, batch by batch."""
    return [batch["id"].tolist() for batch in iterator.next_epoch_itr(shuffle=False) if batch]


def test_diverse_beams_are_refused(tmp_path):
    """fairseq's search reads the penalties of a row by the number of its sample."""
    of = task(write_folder(tmp_path, {"train": random_pairs(4, 3)}), ())
    with pytest.raises(UsageError, match="--diverse-beam-groups mixes up the sentences of a batch: leave it out"):
        of.build_generator([], Namespace(diverse_beam_groups=2))


def test_constraints_without_any_are_refused(tmp_path):
    """``fairseq-generate`` has none to hand on, and fairseq's search iterates over them."""
    of = task(write_folder(tmp_path, {"train": random_pairs(4, 3)}), ())
    search = LexicallyConstrainedBeamSearch(of.target_dictionary, "ordered")
    with pytest.raises(UsageError, match="^--constraints are read with the inputs of fairseq-interactive"):
        of.inference_step(Namespace(search=search), [], {})


def test_a_checkpoint_with_options_of_no_effect_loads(tmp_path):
    """Earlier versions took them."""
    cfg = SGTranslationConfig(
        data=str(write_folder(tmp_path, {"train": random_pairs(4, 3)})), upsample_primary=2, eval_bleu_remove_bpe="@@ "
    )
    with pytest.raises(UsageError, match="--upsample-primary has no effect"):
        SGTranslationTask.setup_task(cfg)
    SGTranslationTask.setup_task(cfg, from_checkpoint=True)


def test_an_output_under_constraints_is_not_empty(tmp_path):
    """At the first step, fairseq's search forbids the end symbol by ``min_len`` alone."""
    of = task(write_folder(tmp_path, {"train": random_pairs(4, 3)}), ())
    assert of.build_generator([torch.nn.Module()], GenerationConfig(min_len=0)).min_len == 0
    assert of.build_generator([torch.nn.Module()], GenerationConfig(min_len=0, constraints="ordered")).min_len == 1


def test_references_padded_on_the_left_are_not_forced(tmp_path):
    folder = write_folder(tmp_path, {"train": random_pairs(4, 3)})
    with pytest.raises(UsageError, match="where --left-pad-target has padding"):
        task(folder, (), left_pad_target=True).build_generator([], GenerationConfig(prefix_size=1))


def test_a_constraint_with_an_unknown_word_is_refused(tmp_path):
    of = task(write_folder(tmp_path, {"train": random_pairs(4, 3)}), ())
    unknown, known = of.target_dictionary.unk(), of.target_dictionary.nspecial
    sources, lengths = [torch.tensor([known, EOS]), torch.tensor([known + 1, EOS])], [2, 2]
    # The number of constraints, then each with 0 at its end.
    several = pack_constraints([[torch.tensor([known])] * unknown, [torch.tensor([known, known])]])
    assert of.build_dataset_for_inference(sources, lengths, several).constraints is several
    wrong = pack_constraints([[torch.tensor([known])], [torch.tensor([known, unknown])]])
    message = f"--constraints '{TARGET_WORDS[0]} <unk>' of the input '{SOURCE_WORDS[1]}': <unk> stands for a word that"
    with pytest.raises(UsageError, match=f"^{message} no output can have$"):
        of.build_dataset_for_inference(sources, lengths, wrong)


# Sources.


@pytest.mark.parametrize("subset", ["train", "valid", "gen"])
@pytest.mark.parametrize("no_source_bos", [False, True])
def test_source_starts_with_the_begin_symbol_and_ends_with_the_end(folder, subset, no_source_bos):
    seeds = {"train": (100, 1), "valid": (100, 2), "gen": (13, 3)}
    built = task(folder, no_source_bos=no_source_bos)
    dataset = built.dataset(subset)
    start = [] if no_source_bos else [BOS]
    for i, (source, target) in enumerate(random_pairs(*seeds[subset])):
        expected = [4 + SOURCE_WORDS.index(word) for word in source.split()]
        assert dataset[i]["source"].tolist() == [*start, *expected, EOS]
        assert dataset[i]["target"].tolist() == [4 + TARGET_WORDS.index(word) for word in target.split()] + [EOS]
        assert dataset.src_sizes[i] == dataset.sizes[i][0] == dataset.size(i)[0] == len(dataset[i]["source"])
        assert dataset.num_tokens(i) == max(map(len, (dataset[i]["source"], dataset[i]["target"])))
    assert built.source_dictionary.bos() == BOS


@pytest.mark.parametrize("left_pad_source", [None, False, True])
@pytest.mark.parametrize("left_pad_target", [False, True])
def test_padding(folder, left_pad_source, left_pad_target):
    values = {} if left_pad_source is None else {"left_pad_source": left_pad_source}
    dataset = task(folder, left_pad_target=left_pad_target, **values).dataset("gen")
    batch = collated(dataset)
    sides = {
        "source": (batch["net_input"]["src_tokens"], bool(left_pad_source)),
        "target": (batch["target"], left_pad_target),
        "input": (batch["net_input"]["prev_output_tokens"], left_pad_target),
    }
    for side, (tokens, left) in sides.items():
        for row, number in zip(tokens, batch["id"].tolist()):
            item = dataset[number]["source" if side == "source" else "target"]
            if side == "input":
                item = torch.cat([item[-1:], item[:-1]])
            padding = torch.full((len(row) - len(item),), PAD)
            assert torch.equal(row, torch.cat([padding, item] if left else [item, padding])), side


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(eval_bleu=True, eval_bleu_args="[2]"), "--eval-bleu-args is '.2.', and must be a JSON object"),
        (
            dict(eval_bleu=True, eval_bleu_args='{"beem": 2}'),
            "--eval-bleu-args has beem, which is no option of fairseq",
        ),
        (dict(eval_bleu=True, eval_bleu_detok="mosses"), "--eval-bleu-detok is 'mosses': choose from moses, nltk"),
        *(
            ({option: value}, f"--{option.replace('_', '-')} has no effect without --eval-bleu: add --eval-bleu, or")
            for option, value in {
                "eval_tokenized_bleu": True,
                "eval_bleu_remove_bpe": "@@ ",
                "eval_bleu_print_samples": True,
                "eval_bleu_detok": "moses",
                "eval_bleu_detok_args": '{"target_lang": "de"}',
                "eval_bleu_args": '{"beam": 2}',
            }.items()
        ),
        (dict(upsample_primary=2), "--upsample-primary has no effect, as a subset is one file"),
        (dict(load_alignments=True), "--load-alignments has no effect, as the data have none"),
        (dict(target_lang="bar"), "--target-lang is bar, and .* has no dict.bar.txt: leave the option out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_of_fairseq_s_that_do_not_fit(options, message, folder):
    with pytest.raises(UsageError, match=message):
        task(folder, **options)


def test_bleu_in_validations_is_of_outputs_that_are_not_empty(folder):
    """fairseq leaves a batch of empty ones out of the score."""
    assert json.loads(task(folder, eval_bleu=True).cfg.eval_bleu_args) == {"min_len": 1}
    given = task(folder, eval_bleu=True, eval_bleu_args='{"min_len": 0, "beam": 2}').cfg.eval_bleu_args
    assert json.loads(given) == {"min_len": 0, "beam": 2}


def test_a_model_of_the_other_direction(folder):
    of = task(folder)
    source, target = (of.trained_on["dictionaries"][side] for side in ("source", "target"))
    with pytest.raises(UsageError, match="give the --source-lang and --target-lang of the training"):
        of.check_dictionaries(of.trained_on | {"dictionaries": {"source": target, "target": source}})


def test_the_oracle_of_lengths_needs_our_criterion(folder):
    theirs = CrossEntropyCriterionConfig(_name="cross_entropy", sentence_avg=False)
    task(folder).build_criterion(theirs)
    with pytest.raises(UsageError, match="--oracle-length is for --criterion cross_entropy_orthogonality"):
        task(folder, oracle_length=True).build_criterion(theirs)


def checkpoint_options(kind: str, **task_options):
    """The options of a model as fairseq hands them over: a node of the configuration, or a namespace with all."""
    if kind == "namespace":
        return Namespace(**task_options)
    return OmegaConf.create({"model": {"_name": "x"}, "task": {"_name": "translation", **task_options}}).model


@pytest.mark.parametrize("kind", ["node", "namespace"])
def test_a_checkpoint_decides_the_form_of_its_sources(kind, folder, monkeypatch):
    """Also one of an older version, whose only record is the option of its training."""
    monkeypatch.setattr(TranslationTask, "build_model", lambda *_: torch.nn.Linear(1, 1))
    for trained in (False, True):
        built = task(folder, no_source_bos=not trained)
        built.build_model(checkpoint_options(kind), from_checkpoint=False)
        assert built.cfg.no_source_bos != trained
        for _ in range(2):
            built.build_model(checkpoint_options(kind, no_source_bos=trained), from_checkpoint=True)
            assert built.cfg.no_source_bos == trained
        with pytest.raises(UsageError, match="some of these models were trained with --no-source-bos and some without"):
            built.build_model(checkpoint_options(kind, no_source_bos=not trained), from_checkpoint=True)
    for other in (checkpoint_options(kind), OmegaConf.create({"_name": "x"})):  # of another task; by itself
        built = task(folder, no_source_bos=True)
        built.build_model(other, from_checkpoint=True)
        assert built.cfg.no_source_bos


@pytest.mark.parametrize("no_source_bos", [False, True])
@pytest.mark.parametrize("left_pad_source", [False, True])
def test_interactive_input_has_the_form_of_the_training_data(folder, no_source_bos, left_pad_source):
    built = task(folder, no_source_bos=no_source_bos, left_pad_source=left_pad_source)
    sources = [source for source, _ in random_pairs(13, 3)]
    tokens = [
        built.source_dictionary.encode_line(line, add_if_not_exist=False) for line in sources
    ]  # int32, as fairseq has them
    dataset = built.build_dataset_for_inference(tokens, [len(t) for t in tokens])
    prepared = built.dataset("gen")
    assert all(torch.equal(dataset[i]["source"], prepared[i]["source"]) for i in range(13))
    assert dataset.src_sizes.tolist() == prepared.src_sizes.tolist()
    got, expected = collated(dataset), collated(prepared)
    order = expected["id"].argsort()
    assert torch.equal(got["net_input"]["src_tokens"][got["id"].argsort()], expected["net_input"]["src_tokens"][order])
    iterator = built.get_batch_iterator(dataset=dataset, max_sentences=8, required_batch_size_multiple=8)
    assert sorted(sum(ids(iterator), [])) == list(range(13))


# Batches.


@pytest.mark.parametrize("subset", ["train", "valid", "gen"])
@pytest.mark.parametrize("max_sentences", [7, 64, 1000])
def test_evaluation_drops_no_sample(folder, subset, max_sentences):
    """As fairseq-validate and fairseq-generate ask for batches; fairseq's own task gives 96 of 100."""
    built = task(folder)
    dataset = built.dataset(subset)
    asked = dict(dataset=dataset, max_sentences=max_sentences, required_batch_size_multiple=8)
    batches = ids(built.get_batch_iterator(**asked))
    assert sorted(sum(batches, [])) == list(range(len(dataset)))
    assert max(map(len, batches)) == min(max_sentences, len(dataset))
    dropped = ids(super(SGTask, built).get_batch_iterator(**asked, disable_iterator_cache=True))
    assert len(sum(dropped, [])) < len(dataset)  # so the test is not vacuous


def trainer(folder, *arguments) -> Trainer:
    """fairseq's own trainer, as ``fairseq-train`` makes it."""
    sizes = [
        x
        for side in ("encoder", "decoder")
        for x in (f"--{side}-layers", "1", f"--{side}-embed-dim", "8", f"--{side}-ffn-embed-dim", "8")
    ]
    command = [
        str(folder),
        "--task",
        "sg_translation",
        "--arch",
        "sg_transformer",
        *sizes,
        "--optimizer",
        "torch_adam",
        "--lr",
        "0.01",
    ]
    command += ["--criterion", "cross_entropy_orthogonality", "--batch-size", "16", "--cpu", "--num-workers", "0"]
    config = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_training_parser(), [*command, *arguments])
    )
    built = tasks.setup_task(config.task)
    for subset in config.dataset.valid_subset.split(","):
        built.load_dataset(subset, combine=False, epoch=1)
    return Trainer(config, built, built.build_model(config.model), built.build_criterion(config.criterion))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "multiple,trained", [([], 96), (["--required-batch-size-multiple", "1"], 100)], ids=["default", "1"]
)
def test_trainer_trains_on_the_user_s_multiple_and_validates_on_everything(folder, multiple, trained):
    built = trainer(folder, "--valid-subset", "gen,valid,train", *multiple)
    for epoch in (1, 2):
        training = built.get_train_iterator(epoch=epoch, load_dataset=epoch == 1)
        assert sum(len(batch["id"]) for batch in training.next_epoch_itr(shuffle=True)) == trained
        for subset, size in (("gen", 13), ("valid", 100), ("train", 100)):
            batches = ids(built.get_valid_iterator(subset))
            assert sorted(sum(batches, [])) == list(range(size)), subset
        assert training.epoch == epoch  # validation on the training subset has an iterator of its own


@pytest.mark.parametrize("window", [0, 1, 2, 5, 1000])
@settings(derandomize=True, max_examples=25)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=40),
    seed=st.integers(0, 1000),
)
def test_windows_are_a_permutation_sorted_inside(window, lengths, seed):
    sources, targets = zip(*lengths)
    dataset = pair_dataset(sources, targets, window)
    with data_utils.numpy_seed(seed):
        indices = dataset.ordered_indices()
    assert indices.dtype == np.int64 and sorted(indices.tolist()) == list(range(len(lengths)))
    if window == 0:  # fairseq's order, by source and then target
        assert [lengths[i] for i in indices] == sorted(lengths)
    by_length = [(targets[i], sources[i]) for i in indices]
    for start in range(0, len(lengths), window) if window > 1 else ():
        part = by_length[start : start + window]
        assert part == sorted(part)
    with data_utils.numpy_seed(seed):
        assert np.array_equal(dataset.ordered_indices(), indices)


def pair_dataset(sources, targets, window) -> WindowedPairDataset:
    from fairseq.data import Dictionary

    rows = [[torch.full((n,), 4) for n in lengths] for lengths in (sources, targets)]
    dataset = WindowedPairDataset(rows[0], list(sources), Dictionary(), rows[1], list(targets), Dictionary())
    dataset.length_window = window
    return dataset


def order(dataset, seed) -> list:
    with data_utils.numpy_seed(seed):
        return dataset.ordered_indices().tolist()


@pytest.mark.parametrize("window", [1, 10])
def test_order_changes_with_the_seed_and_not_with_the_lengths_alone(window):
    dataset = pair_dataset(range(1, 61), range(1, 61), window)
    orders = [order(dataset, seed) for seed in range(5)]
    assert len({tuple(o) for o in orders}) == 5
    # The samples of a window are drawn again in each epoch, uniformly: each is in the first about equally often.
    first = np.zeros(60)
    for seed in range(600):
        first[order(dataset, seed)[:10]] += 1
    assert 60 < first.min() and first.max() < 145  # 100 expected, standard deviation 9


def test_window_0_sorts_the_whole_epoch_and_1_nothing():
    lengths = [5, 3, 9, 1, 7, 2, 8, 6, 4, 10]
    assert order(pair_dataset(lengths, lengths, 0), 3) == sorted(range(10), key=lengths.__getitem__)
    drawn = order(pair_dataset(lengths, lengths, 1), 3)
    assert drawn != sorted(drawn, key=lengths.__getitem__)


def test_only_the_training_subset_is_drawn_at_random(folder):
    built = task(folder, length_window=20)
    assert built.dataset("train").length_window == 20
    assert (
        type(built.dataset("valid")) is not WindowedPairDataset
        and type(built.dataset("gen")) is not WindowedPairDataset
    )
    other = task(folder, train_subset="valid", length_window=20)
    assert (
        type(other.dataset("valid")) is WindowedPairDataset and type(other.dataset("train")) is not WindowedPairDataset
    )


def test_training_batches_of_a_window_have_like_lengths(folder):
    def spread(window):
        built = task(folder, length_window=window)
        dataset = built.dataset("train")
        batches = ids(built.get_batch_iterator(dataset=dataset, max_sentences=10, seed=1))
        return np.mean([np.ptp(dataset.tgt_sizes[batch]) for batch in batches])

    assert spread(100) < 2 < spread(50) < 4 < 10 < spread(1)


@pytest.mark.parametrize("window", [0, 1, 16])
def test_batches_are_drawn_by_seed_and_anew_each_epoch(folder, window):
    def epochs(seed, first=1):
        built = task(folder, length_window=window)
        iterator = built.get_batch_iterator(
            dataset=built.dataset("train"), max_sentences=8, seed=seed, epoch=first, grouped_shuffling=False
        )
        return [[b["id"].tolist() for b in iterator.next_epoch_itr(shuffle=True)] for _ in range(first, 4)]

    once, again, other = epochs(1), epochs(1), epochs(2)
    assert once == again != other
    batches = [{frozenset(batch) for batch in epoch} for epoch in once]
    assert batches[0] != batches[1] != batches[2]  # other batches, not only another order of the same ones
    assert epochs(1, first=3) == once[2:]  # what a resumed run sees


@pytest.mark.parametrize("window", [0, 1, 16])
@pytest.mark.parametrize("subset", ["valid", "train"])
def test_each_evaluation_has_the_same_batches(folder, subset, window):
    """However many came before: a resumed training has had fewer."""

    def evaluations(built, count):
        return [
            [
                batch["id"].tolist()
                for batch in built.get_batch_iterator(
                    dataset=built.dataset(subset), max_sentences=8, epoch=1
                ).next_epoch_itr(shuffle=False)
            ]
            for _ in range(count)
        ]

    first, second, third = evaluations(task(folder, length_window=window), 3)
    assert first == second == third == evaluations(task(folder, length_window=window), 1)[0]


@pytest.mark.parametrize("option,value", [("truncate_source", True), ("num_batch_buckets", 4)])
def test_inherited_options_that_do_harm_are_refused(folder, option, value):
    with pytest.raises(UsageError, match="--" + option.replace("_", "-")):
        task(folder, **{option: value})


def test_negative_window(folder):
    with pytest.raises(ValueError, match="--length-window is -1: choose 0 or more"):
        task(folder, length_window=-1)


# Folders that do not fit.


def test_folder_without_manifest(tmp_path):
    folder = write_folder(tmp_path / "bin", {"train": random_pairs(3, 0)}, manifest=False)
    with pytest.raises(
        ValueError, match=rf"the data folder {folder} has no dataset.json: make it with `python -m data_prep`"
    ):
        task(folder)


def test_missing_folder_also_as_one_of_several(folder, tmp_path):
    with pytest.raises(
        ValueError, match=rf"the data folder {tmp_path}/none does not exist: make it with `python -m data_prep`"
    ):
        task(tmp_path / "none")
    with pytest.raises(ValueError, match=rf"the data folder {tmp_path}/none does not exist"):
        task(f"{folder}:{tmp_path}/none")


def test_folders_with_other_dictionaries(folder, tmp_path):
    """All folders are read by the first one's dictionaries."""
    other = write_folder(tmp_path / "other", {"train": random_pairs(3, 0)})
    task(f"{folder}:{other}", ["train"])
    words = (other / "dict.tgt.txt").read_text().splitlines(keepends=True)
    (other / "dict.tgt.txt").write_text("".join(reversed(words)))
    with pytest.raises(UsageError, match=f"{other}/dict.tgt.txt has other words than {folder}/dict.tgt.txt"):
        task(f"{folder}:{other}", ["train"])
    task(other, ["train"])


def test_a_folder_without_binary_pairs(tmp_path):
    """A text for language models, or one of --raw-only."""
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(
        UsageError, match=f"the data folder {tmp_path} has no pairs of sentences in binary form: it is text"
    ):
        task(tmp_path)


@pytest.mark.parametrize("data", [None, ""])
def test_no_folder(data):
    with pytest.raises(ValueError, match=r"the data folder \(none was given\) does not exist"):
        SGTranslationTask.setup_task(SGTranslationConfig(data=data))


def test_missing_subset(folder):
    with pytest.raises(UsageError, match="the data folder .* has no subset 'test'"):
        task(folder, subsets=("test",))


@pytest.mark.parametrize("end,left", [("bin", -20), ("idx", -20), ("bin", 0), ("idx", 0), ("idx", 12), ("idx", 20)])
@pytest.mark.parametrize("language", ["src", "tgt"])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_file_that_is_cut_off(tmp_path, end, left, language):
    folder = write_folder(tmp_path / "bin", {"train": random_pairs(30, 5), "gen": random_pairs(30, 6)})
    (path,) = folder.glob(f"gen.*.{language}.{end}")
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(UsageError, match="the files of subset 'gen' of .* cannot be read, and may be cut off"):
        task(folder, subsets=("gen",))


def test_a_dictionary_without_its_last_line(tmp_path):
    """It can be read, and its folder has numbers that it does not."""
    folder = write_folder(tmp_path / "bin", {"train": random_pairs(30, 5)})
    path = folder / "dict.tgt.txt"
    prepared = {"files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}}
    (folder / "dataset.json").write_text(json.dumps(prepared))
    task(folder, subsets=("train",))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UsageError, match="dict.tgt.txt cannot be read, or is not the file that was prepared"):
        task(folder, subsets=("train",))


@pytest.mark.parametrize(
    "side,pair", [("source", ("never s2", "T1")), ("source", ("s1 s2 never", "T1")), ("target", ("s1", "NEVER"))]
)
@pytest.mark.parametrize("position", [0, 17, 29])
def test_unknown_word_is_refused_by_subset_and_sample(tmp_path, side, pair, position):
    pairs = random_pairs(30, 5)
    pairs[position] = pair
    folder = write_folder(tmp_path / "bin", {"train": random_pairs(5, 0), "gen": pairs})
    built = task(folder, subsets=("train",))
    message = rf"sample {position} of subset 'gen' has an unknown word in its {side}: the dictionaries of {folder}"
    with pytest.raises(ValueError, match=message):
        built.load_dataset("gen")
