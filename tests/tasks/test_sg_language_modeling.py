"""Streams, memories and metrics of the language modelling task: every token once, with the memory before it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.data import Dictionary
from fairseq.logging import metrics
from fairseq.models import FairseqDecoder, FairseqLanguageModel
from torch import nn

import fairseq_sg.plugin  # noqa: F401
from data_prep.__main__ import main as data_prep
from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.segment_memory import SegmentMemories
from fairseq_sg.tasks.sg_language_modeling import SGLanguageModelingConfig, SGLanguageModelingTask
from fairseq_sg.tasks.streams import Streams, Text

EOS, PAD = 2, 1
WORDS = ["lines", "of", "three", "words,", "Zügen"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A text by bytes, with letters of two bytes; 2,700 bytes to train on."""
    made = tmp_path_factory.mktemp("lm")
    lines = (" ".join(WORDS[(n * k) % 5] for k in (1, 2, 3)) for n in range(150))
    (made / "text").write_text("\n".join(lines), encoding="utf-8")
    assert not data_prep(["text", "--unit", "bytes", "--input", str(made / "text"), "--out", str(made / "bin")])
    return made / "bin"


def make_task(folder: Path, **options) -> SGLanguageModelingTask:
    config = SGLanguageModelingConfig(**{"data": str(folder), "update_freq": [1], "tokens_per_sample": 8, **options})
    return SGLanguageModelingTask.setup_task(config)


def text_of(length: int, entry: int = 7) -> Text:
    """Tokens 10, 11, 12, … in entries of a few."""
    entries = torch.arange(10, 10 + length, dtype=torch.int32).split(entry)
    return Text(entries, [len(e) for e in entries], Dictionary(), "valid", {"bytes": 1.0, "characters": 0.5})


# Streams.


def test_reading_across_entries():
    text = text_of(40)
    assert len(text) == 40
    for start in range(41):
        for end in range(start, 41):
            assert text.read(start, end).tolist() == list(range(10 + start, 10 + end))


@pytest.mark.parametrize("length", [1, 5, 6, 24, 25, 37, 48, 53])
@pytest.mark.parametrize("count,rows", [(1, 1), (3, 3), (4, 2), (6, 2), (6, 1)])
@pytest.mark.parametrize("all_tokens", [True, False])
def test_every_token_is_a_target_once_and_follows_its_predecessor(length, count, rows, all_tokens):
    streams = Streams(text_of(length), count, rows, segment=4, all_tokens=all_tokens)
    read = {stream: [] for stream in range(count)}
    inputs = {stream: [] for stream in range(count)}
    groups, ends = [], []
    for batch in streams.batches():
        sample = streams.collater([streams[index] for index in batch])
        segment = sample["segment"]
        groups.append((segment["start"], segment["group"]))
        ends.append(segment["last"])
        lengths = sample["net_input"]["src_lengths"].tolist()
        assert sample["ntokens"] == sum(lengths) > 0 and sample["nsentences"] == sum(length > 0 for length in lengths)
        assert sample["units"] == {"bytes": sum(lengths), "characters": sum(lengths) / 2}
        for row, n in enumerate(lengths):
            stream = segment["group"] * rows + row
            assert n == 0 or len(read[stream]) == segment["start"]
            for tokens in (sample["target"], sample["net_input"]["src_tokens"]):
                assert tokens[row, n:].eq(PAD).all()
            read[stream] += sample["target"][row, :n].tolist()
            inputs[stream] += sample["net_input"]["src_tokens"][row, :n].tolist()
    assert groups == sorted(groups) and ends == [start == groups[-1][0] for start, _ in groups]
    everything = [token for stream in range(count) for token in read[stream]]
    kept = length if all_tokens else length // count * count
    assert everything == list(range(10, 10 + kept))
    assert [token for stream in range(count) for token in inputs[stream]] == [EOS, *range(10, 9 + kept)][:kept]
    lengths = [len(tokens) for tokens in read.values()]
    assert max(lengths) - min(lengths) <= all_tokens
    # A group that runs out of batches is followed by none: each worker's batches stay its own.
    last = [group for start, group in groups if groups and start == groups[-1][0]]
    assert last == list(range(len(last)))


def iterate(task, subset: str, batch_size: int, workers: int = 1, worker: int = 0, training: bool = True, **more):
    task.load_dataset(subset)
    options = dict(max_sentences=batch_size, num_shards=workers, shard_id=worker, required_batch_size_multiple=8)
    if training:
        options["grouped_shuffling"] = False
    return task.get_batch_iterator(task.dataset(subset), **options, **more)


@pytest.mark.parametrize("batch_size,updates,workers", [(2, 1, 1), (2, 3, 1), (2, 1, 2), (1, 2, 3)])
def test_streams_over_batches_workers_and_accumulated_updates(folder, batch_size, updates, workers):
    """All batches of one update are one segment of all streams; a group has one worker; nothing is shuffled."""
    task = make_task(folder, update_freq=[1, updates])
    count = batch_size * updates * workers
    of_workers = []
    for worker in range(workers):
        iterator = iterate(task, "train", batch_size, workers, worker, epoch=2)
        first = [sample["id"].tolist() for sample in iterator.next_epoch_itr(shuffle=True)]
        assert first == [sample["id"].tolist() for sample in iterator.next_epoch_itr(shuffle=True)]
        samples = list(iterator.next_epoch_itr(shuffle=True))
        assert len(samples) % updates == 0
        for n, sample in enumerate(samples):
            assert sample["segment"]["start"] == n // updates * 8
            assert sample["segment"]["group"] == n % updates * workers + worker
        of_workers.append(samples)
    ids = sorted(i for samples in of_workers for sample in samples for i in sample["id"].tolist())
    assert ids == list(range(len(ids))) and len(ids) % count == 0
    tokens = sum(sample["ntokens"] for samples in of_workers for sample in samples)
    assert tokens == len(task.dataset("train")) // count * count


def test_an_iterator_goes_on_where_it_was(folder):
    task = make_task(folder)
    iterator = iterate(task, "train", 4)
    batches = iterator.next_epoch_itr()
    for _ in range(5):
        next(batches)
    other = iterate(make_task(folder), "train", 4)
    other.load_state_dict(iterator.state_dict())
    assert next(other.next_epoch_itr())["id"].tolist() == next(batches)["id"].tolist()


def test_evaluation_has_every_token(folder):
    task = make_task(folder, update_freq=[7])
    for workers in (1, 3):
        samples = [
            s
            for w in range(workers)
            for s in iterate(task, "valid", 5, workers, w, training=False).next_epoch_itr(shuffle=False)
        ]
        subsets = json.loads((folder / "dataset.json").read_text())["subsets"]
        assert sum(sample["ntokens"] for sample in samples if sample) == subsets["valid"]["bytes"]


# Memories.


class Recorder(nn.Module):
    """A model whose memory is the inputs themselves, and whose logits are wrong by a constant number of bits."""

    remembers = True

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.calls = []

    def set_num_updates(self, updates):
        self.updates = updates

    def forward(self, src_tokens, src_lengths=None, memory=None, memory_length=0):
        self.calls.append((src_tokens, memory, memory_length, self.training))
        before = src_tokens.new_empty(0, src_tokens.size(0), 1).float() if memory is None else memory["hidden"][0]
        h = torch.cat([before, src_tokens.t().unsqueeze(-1).float()])[-memory_length:]
        start = 0 if memory is None else memory["position"]
        logits = torch.zeros(*src_tokens.shape, 260) + self.weight
        return logits, {"memory": {"hidden": [h], "position": start + src_tokens.size(1)}}

    def get_normalized_probs(self, net_output, log_probs, sample=None):
        return net_output[0].log_softmax(-1)

    def get_targets(self, sample, net_output):
        return sample["target"]


class Optimizer:
    def backward(self, loss):
        loss.backward()


def train(task, model, sample, **more):
    criterion = CrossEntropyCriterion(task, sentence_avg=False)
    return task.train_step(sample, model, criterion, Optimizer(), 0, **more)


def test_each_group_has_its_own_memory_and_validation_another(folder):
    task = make_task(folder, update_freq=[2], memory_length=5, eval_memory_length=20)
    model, streams = Recorder(), {}
    criterion = CrossEntropyCriterion(task, sentence_avg=False)
    for n, sample in enumerate(iterate(task, "train", 3).next_epoch_itr()):
        train(task, model, sample)
        tokens, memory, length, training = model.calls[-1]
        assert length == 5 and training
        group, start = sample["segment"]["group"], sample["segment"]["start"]
        past = streams.setdefault(group, torch.empty(3, 0, dtype=torch.long))
        assert past.size(1) == start
        if start == 0:
            assert memory is None
        else:
            assert memory["position"] == start
            assert torch.equal(memory["hidden"][0][..., 0].t().long(), past[:, -5:])
        streams[group] = torch.cat([past, tokens], dim=1)
        if n in (2, 5):
            validation = list(iterate(task, "valid", 2, training=False).next_epoch_itr(shuffle=False))
            for one in validation[: len(validation) if n == 2 else 2]:
                task.valid_step(one, model, criterion)
                _, memory, length, training = model.calls[-1]
                position = one["segment"]["start"]
                assert length == 20 and not training
                assert (memory is None) == (position == 0)
                assert memory is None or memory["hidden"][0].size(0) == min(position, 20)
            if n == 5:  # cut short
                assert task.evaluated.state()
        else:
            assert not task.evaluated.state()
    assert set(streams) == {0, 1} and task.get_checkpoint_dict() == {}  # nothing to remember after the last segment


def test_a_new_epoch_begins_without_memory(folder):
    task = make_task(folder, memory_length=5)
    model = Recorder()
    for _ in range(2):
        for sample in iterate(task, "train", 200).next_epoch_itr():
            train(task, model, sample)
    begun = [memory is None for _, memory, _, _ in model.calls]
    assert begun == [True, False] * 2


def test_a_batch_is_computed_again_from_the_same_memory_and_a_dummy_changes_none(folder):
    task = make_task(folder, memory_length=5)
    model = Recorder()
    first, second, third = (s for s, _ in zip(iterate(task, "train", 3).next_epoch_itr(), range(3)))
    train(task, model, first)
    train(task, model, second)
    train(task, model, second)
    assert model.calls[-1][1]["position"] == model.calls[-2][1]["position"] == 8
    train(task, model, first, ignore_grad=True)
    assert model.calls[-1][1:3] == (None, 0)
    train(task, model, third)
    assert model.calls[-1][1]["position"] == 16


def test_a_step_without_memory_alone_may_be_recorded(folder):
    assert make_task(folder, memory_length=0).not_recorded == ""
    assert "--memory-length" in make_task(folder, memory_length=4).not_recorded


def test_without_memory_length_the_model_gets_no_argument(folder):
    task = make_task(folder)
    model = Recorder()
    model.forward = lambda src_tokens, src_lengths: (torch.zeros(*src_tokens.shape, 260, requires_grad=True), {})
    sample = next(iterate(task, "train", 3).next_epoch_itr())
    assert train(task, model, sample)[1] == 24


def test_state_is_saved_as_plain_data_and_restored(folder, tmp_path):
    task = make_task(folder, memory_length=5, update_freq=[2])
    model = Recorder()
    samples = list(iterate(task, "train", 3).next_epoch_itr())
    for sample in samples[:4]:
        train(task, model, sample)
    state = task.get_checkpoint_dict()
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)["SGLanguageModelingTask"]
    assert sorted(loaded["trained"]) == [0, 1]
    other = make_task(folder, memory_length=5, update_freq=[2])
    iterate(other, "train", 3)
    other.set_checkpoint_dict(loaded)
    for sample in samples[4:6]:
        train(task, model, sample)
        expected = model.calls[-1][1]
        train(other, model, sample)
        assert torch.equal(model.calls[-1][1]["hidden"][0], expected["hidden"][0])
    # Of two workers, each takes what is its own.
    of_second = make_task(folder, memory_length=5)
    iterate(of_second, "train", 3, workers=2, worker=1)
    of_second.set_checkpoint_dict(loaded)
    assert sorted(of_second.trained.state()) == [1]


def test_a_checkpoint_is_as_large_as_the_memory_and_contiguous(tmp_path):
    """fairseq broadcasts tensors to other workers as if they were contiguous."""
    memories = SegmentMemories()
    hidden = torch.randn(3, 100_000, 4).transpose(0, 1)[-2:]
    memories.after(0, None, {"hidden": [hidden], "position": 100_000})
    (kept,) = memories.state()[0]["hidden"]
    assert kept.is_contiguous() and torch.equal(kept, hidden)
    torch.save(memories.state(), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 10_000


def test_a_memory_that_is_not_there_or_of_other_rows():
    memories = SegmentMemories()
    with pytest.raises(UsageError, match="no memory for position 8 of the streams: resume with the --memory-length"):
        memories.before(0, 8, 2)
    memories.after(0, None, {"hidden": [torch.zeros(8, 3, 4)], "position": 8})
    assert memories.before(0, 8, 3)["position"] == 8
    for group, start, rows in ((0, 8, 2), (0, 16, 3), (1, 8, 3)):
        with pytest.raises(UsageError, match="no memory for position"):
            memories.before(group, start, rows)


# Metrics.


class Ours:
    """A criterion that logs the cross entropy beside another loss, and no perplexity."""

    @staticmethod
    def reduce_metrics(logs):
        metrics.log_scalar(
            "nll_loss", sum(float(log["nll_loss"]) for log in logs) / math.log(2) / sum(log["ntokens"] for log in logs)
        )


@pytest.mark.parametrize("keys", ["of cross_entropy", "of ours"])
def test_bits_per_character_byte_and_word(folder, keys):
    """A uniform model has log₂ 260 bits a byte; umlauts are two bytes, and line ends are words."""
    task = make_task(folder)
    criterion = CrossEntropyCriterion(task, sentence_avg=False)
    samples = iterate(task, "valid", 3, training=False).next_epoch_itr(shuffle=False)
    logs = [task.valid_step(sample, Recorder(), criterion)[2] for sample in samples]
    if keys == "of ours":
        logs = [{**log, "nll_loss": log["loss"], "loss": 5 * log["loss"]} for log in logs]
        criterion = Ours()
    with metrics.aggregate() as values:
        task.reduce_metrics(logs, criterion)
    found = values.get_smoothed_values()
    raw = (folder / "raw" / "valid.txt").read_bytes()
    characters, words = len(raw.decode()), len(raw.split()) + raw.count(b"\n") + (not raw.endswith(b"\n"))
    assert characters < len(raw)
    bits = math.log2(260) * len(raw)
    assert found["bpb"] == pytest.approx(math.log2(260), abs=1e-3)
    assert found["bpc"] == pytest.approx(bits / characters, abs=1e-3)
    assert found["word_ppl"] == pytest.approx(2 ** (bits / words), rel=1e-2)
    assert found["ppl"] == pytest.approx(260, abs=0.1)


def test_bits_of_batches_of_different_sizes_are_those_of_the_text(folder):
    """A validation reduces the logs of each batch by themselves."""
    task = make_task(folder)
    criterion = CrossEntropyCriterion(task, sentence_avg=False)
    sizes = [{"loss": loss, "ntokens": n, "nsentences": 1, "sample_size": n} for loss, n in ((3.0, 3), (50.0, 10))]
    logs = [log | {f"text_n_{unit}": log["ntokens"] / 2 for unit in ("characters", "bytes", "words")} for log in sizes]
    with metrics.aggregate() as values:
        for log in logs:
            task.reduce_metrics([log], criterion)
    for name in ("bpc", "bpb", "bits_per_word"):
        assert values[name].avg == pytest.approx(53 / math.log(2) / 6.5, abs=1e-3), name


# Refusals.


def copy(folder: Path, to: Path, **changes) -> Path:
    shutil.copytree(folder, to)
    manifest = json.loads((to / "dataset.json").read_text())
    (to / "dataset.json").write_text(json.dumps(manifest | changes))
    return to


@pytest.mark.parametrize("end,left", [("bin", -20), ("idx", -20), ("bin", 0), ("idx", 0), ("idx", 12), ("idx", 20)])
def test_a_file_that_is_cut_off(folder, tmp_path, end, left):
    path = copy(folder, tmp_path / "copy") / f"valid.{end}"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(UsageError, match="the files of subset 'valid' of .* cannot be read, and may be cut off"):
        make_task(path.parent).load_dataset("valid")


def test_folders_that_are_no_text(folder, tmp_path):
    with pytest.raises(UsageError, match=f"the data folder {tmp_path} has no dataset.json: make it with `python -m"):
        make_task(tmp_path)
    with pytest.raises(UsageError, match=f"the data folder {tmp_path}/none does not exist: make it with `python -m"):
        make_task(tmp_path / "none")
    with pytest.raises(UsageError, match="is no text for language models: make one with `python -m data_prep text`"):
        make_task(copy(folder, tmp_path / "pairs", subsets={"train": {"size": 3}}))
    with pytest.raises(UsageError, match="takes one folder"):
        make_task(f"{folder}:{folder}")
    with pytest.raises(UsageError, match="has no subset 'gen': it has train, valid, test"):
        make_task(folder).load_dataset("gen")
    subsets = json.loads((folder / "dataset.json").read_text())["subsets"]
    subsets["valid"]["tokens"] += 1
    with pytest.raises(UsageError, match="tokens, and dataset.json says"):
        make_task(copy(folder, tmp_path / "other", subsets=subsets)).load_dataset("valid")


@pytest.mark.parametrize("option", ["tokens_per_sample", "memory_length", "eval_memory_length"])
def test_wrong_lengths(folder, option):
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} is -1: choose [01] or more"):
        make_task(folder, **{option: -1})


def test_batches_are_given_in_rows(folder):
    task = make_task(folder)
    task.load_dataset("train")
    for options in (dict(max_tokens=99), dict(max_tokens=99, max_sentences=2), dict(), dict(max_sentences=0)):
        with pytest.raises(UsageError, match="streams have as many rows as --batch-size says"):
            task.get_batch_iterator(task.dataset("train"), **options)
    with pytest.raises(
        UsageError, match="fewer than the 9000 streams of --batch-size 9000, --update-freq 1 and 1 workers"
    ):
        iterate(task, "train", 9000)


def test_models_and_commands_without_memory(folder, monkeypatch):
    built = FairseqLanguageModel(FairseqDecoder(None))
    monkeypatch.setattr("fairseq.models.build_model", lambda *args: built)
    monkeypatch.setattr("fairseq.quantization_utils.quantize_model_scalar", lambda model, cfg: model)
    make_task(folder).build_model(SimpleNamespace())
    for option in ("memory_length", "eval_memory_length"):
        with pytest.raises(UsageError, match="this --arch has no memory of earlier segments"):
            make_task(folder, **{option: 1}).build_model(SimpleNamespace())
    built = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="this --arch is no language model: choose one"):
        make_task(folder).build_model(SimpleNamespace())
    with pytest.raises(UsageError, match="use it with --task language_modeling"):
        make_task(folder).eval_lm_dataloader([])
    sample = next(iterate(make_task(folder), "valid", 2, training=False).next_epoch_itr(shuffle=False))
    for options in (dict(sample=sample), dict(sample={"net_input": {}}, constraints=[])):
        with pytest.raises(UsageError, match="use fairseq-interactive, not fairseq-generate"):
            make_task(folder).inference_step(None, [], **options)


def test_prompts_begin_as_texts_do(folder):
    task = make_task(folder)
    prompts = [torch.tensor([10, 11, EOS]), torch.tensor([12, 13, 14, EOS])]
    dataset = task.build_dataset_for_inference(prompts, [3, 4])
    (batch,) = task.get_batch_iterator(dataset, max_sentences=4, max_positions=99).next_epoch_itr(shuffle=False)
    assert batch["net_input"]["src_tokens"].tolist() == [[EOS, 10, 11, PAD], [EOS, 12, 13, 14]]
    asked = []

    def generate(models, sample, **options):
        asked.append((sample["net_input"]["src_tokens"].tolist(), options["prefix_tokens"].tolist()))
        assert options["bos_token"] == EOS
        return [f"after {prompt}" for prompt in options["prefix_tokens"].tolist()]

    search = SimpleNamespace(supports_constraints=False)
    generator = SimpleNamespace(generate=generate, search=search, max_len_a=0, max_len_b=4, max_len=99)
    assert task.inference_step(generator, [], batch) == ["after [10, 11]", "after [12, 13, 14]"]
    # Those of one length at a time.
    assert asked == [([[EOS, 10, 11]], [[10, 11]]), ([[EOS, 12, 13, 14]], [[12, 13, 14]])]
    for limit in ({"max_len_b": 3}, {"max_len": 4}):
        short = SimpleNamespace(**{**vars(generator), **limit})
        with pytest.raises(UsageError, match="a prompt has 3 tokens, and with its continuation at most 3 are taken"):
            task.inference_step(short, [], batch)
