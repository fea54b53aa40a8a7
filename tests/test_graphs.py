"""Recorded steps, in graphs of software (``helpers.software_graph``), and steps whose logs are read later."""

from __future__ import annotations

import gc
import math

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.logging import metrics

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.errors import UsageError
from fairseq_sg.graphs import StepGraphs
from fairseq_sg.tasks.sg_language_modeling import SGLanguageModelingTask
from fairseq_sg.trainer import SGTrainer, validate_and_save
from helpers.small_folders import random_pairs, write_folder
from helpers.software_graph import SoftwareGraphs
from helpers.trainers import build, groups, lasting, without_memory_for

MOST = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    subsets = {"train": random_pairs(60, 1), "valid": random_pairs(12, 2)}
    return write_folder(tmp_path_factory.mktemp("data") / "pairs", subsets)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Without what is for CPUs alone, and asks for values on the host."""
    monkeypatch.setattr("fairseq_sg.models.encoder.packing_for_training", lambda _: None)
    monkeypatch.setattr("fairseq_sg.models.decoder.packing_for_training", lambda _: None)
    monkeypatch.setattr("fairseq_sg.modules.attention.softmax.closed_form_is_faster", lambda *_: False)


# Any function.


def step_of(batches):
    (batch,) = batches
    return (batch["tokens"] * batch["scale"]).sum() / batch["ntokens"]


def test_a_shape_runs_once_is_recorded_and_is_then_replayed():
    ran = []

    def step(batches):
        ran.append(1)
        return step_of(batches)

    graphs = StepGraphs(step, MOST, SoftwareGraphs())
    for n in range(1, 6):
        batch = {"tokens": torch.arange(4.0) + n, "scale": 2.0, "ntokens": n}
        assert graphs([batch]).item() == pytest.approx((6 + 4 * n) * 2 / n)
    assert len(graphs) == 1 and len(ran) == 2


def test_a_shape_that_failed_is_not_recorded_before_it_has_run():
    """An optimizer makes its state in a step that runs."""
    calls = []

    def step(batches):
        calls.append(batches)
        if len(calls) == 1:
            raise RuntimeError("CUDA out of memory")
        return step_of(batches)

    graphs = StepGraphs(step, MOST, SoftwareGraphs())
    batch = {"tokens": torch.ones(4), "scale": 2.0, "ntokens": 2}
    with pytest.raises(RuntimeError):
        graphs([batch])
    for recorded in (0, 1):
        assert torch.equal(graphs([batch]), step_of([batch])) and len(graphs) == recorded


@pytest.mark.parametrize(
    "other",
    [{"tokens": torch.zeros(5)}, {"tokens": torch.zeros(4).double()}, {"scale": 3.0}, {"more": None}],
    ids=["size", "dtype", "number", "name"],
)
def test_another_shape_or_number_has_another_graph(other):
    graphs = StepGraphs(step_of, MOST, SoftwareGraphs())
    batch = {"tokens": torch.ones(4), "scale": 2.0, "ntokens": 2}
    for given in (batch, batch | other) * 3:
        expected = step_of([given])
        assert torch.equal(graphs([given]), expected)
    assert len(graphs) == 2


def test_segments_of_a_text_have_one_graph():
    """Their places differ, and matter to a memory alone."""
    graphs = StepGraphs(step_of, MOST, SoftwareGraphs())
    for start in range(5):
        batch = {"tokens": torch.ones(4), "scale": 2.0, "ntokens": 2, "segment": {"start": start}}
        assert torch.equal(graphs([SGLanguageModelingTask.recorded(batch)]), step_of([batch]))
    assert len(graphs) == 1


def test_beyond_the_most_graphs_steps_run_as_they_are():
    graphs = StepGraphs(step_of, 2, SoftwareGraphs())
    for _ in range(3):
        for size in (1, 2, 3, 4):
            batch = {"tokens": torch.ones(size), "scale": 2.0, "ntokens": 1}
            assert graphs([batch]).item() == 2 * size
    assert len(graphs) == 2


def test_a_step_that_waits_for_the_device_is_refused_in_one_line():
    graphs = StepGraphs(lambda batches: batches[0]["tokens"].sum().item(), MOST, SoftwareGraphs())
    batch = {"tokens": torch.ones(2)}
    graphs([batch])
    with pytest.raises(UsageError, match="--step-graphs: a step of this model cannot be recorded .the host waits"):
        graphs([batch])


def test_why_a_step_is_refused_is_said_and_not_how_its_recording_ended():
    class Broken:
        def record(self, function):
            try:
                function()
            finally:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def step(batches):
        steps.append(batches)
        if len(steps) == 2:
            raise RuntimeError("the host waits here")

    steps: list = []
    graphs = StepGraphs(step, MOST, Broken())
    batch = {"tokens": torch.ones(2)}
    graphs([batch])
    with pytest.raises(UsageError, match="cannot be recorded .the host waits here"):
        graphs([batch])


# Trainings.

CASES = {
    "translation": [],
    "accumulated": ["--update-freq", "2"],
    "clipped, a schedule": ["--clip-norm", "0.1", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "5"],
    "sentences": ["--sentence-avg", "--label-smoothing", "0.1", "--weight-decay", "0.1"],
    "autocast": ["--autocast", "bfloat16"],
    "relative, softmax": ["--encoder-attention", "relative", "--decoder-attention", "softmax", "--position", "rotary"],
    "router": ["--encoder-attention", "geometric", "--encoder-update", "copy_gate", "--depth", "shared"],
    "linear": ["--decoder-attention", "linear", "--cross-attention", "linear", "--feature-map", "hedgehog"],
}


def prepared(folder, how: str, *arguments: str, most: int = MOST) -> SGTrainer:
    """A trainer whose steps are read at once, later (``ahead``), or recorded (``graphs``)."""
    # The kink of a ReLU would magnify rounding.
    plain = ("--dropout", "0", "--length-window", "0", "--adam-eps", "1e-4", "--ffn-activation", "gelu")
    built = build(SGTrainer, folder, *plain, *arguments)
    built.ahead = how != "at once"
    if how == "graphs":
        built._graphs = StepGraphs(built._step_on_device, most, SoftwareGraphs())
    return built


def trained(built: SGTrainer, epochs: int = 3):
    with metrics.aggregate("train"):
        for _ in range(epochs):
            for samples in groups(built):
                with metrics.aggregate("train_inner"):
                    assert built.train_step(samples) is not None
        built.flush()
    averages = {k: float(v) for k, v in lasting(metrics.get_smoothed_values("train")).items()}
    return averages, built.model.state_dict(), built.optimizer.state_dict()


@pytest.mark.parametrize("case", CASES)
def test_steps_read_later_and_recorded_steps_are_the_same(folder, case, as_on_a_gpu):
    expected = trained(prepared(folder, "at once", *CASES[case]))
    averages, weights, state = trained(prepared(folder, "ahead", *CASES[case]))
    assert averages == expected[0]
    torch.testing.assert_close((weights, state), expected[1:], rtol=0, atol=0)
    recorded = prepared(folder, "graphs", *CASES[case])
    found = trained(recorded)
    assert 0 < len(recorded._graphs) < recorded.get_num_updates() / 2
    averages, weights, state = trained(prepared(folder, "graphs", *CASES[case], most=0))
    assert found[0] == averages
    torch.testing.assert_close(found[1:], (weights, state), rtol=0, atol=0)
    # The rate and the number of tokens of such a step are tensors. Products in bfloat16 magnify their rounding.
    near = 1e-2 if case == "autocast" else 1e-4
    if case == "autocast":  # which also decides which of two near words is the largest
        assert averages.pop("token_accuracy") == pytest.approx(expected[0].pop("token_accuracy"), abs=0.5)
    assert averages == pytest.approx(expected[0], rel=near)
    torch.testing.assert_close(weights, expected[1], rtol=near, atol=near)
    assert state["param_groups"] == expected[2]["param_groups"]


@pytest.mark.parametrize("how", ["ahead", "graphs"])
def test_a_gradient_that_is_not_finite_is_left_out_and_told_when_logs_are_read(folder, how, tmp_path, as_on_a_gpu):
    built = prepared(folder, how, "--save-dir", str(tmp_path), "--log-interval", "1000")
    samples = groups(built)[0]
    for _ in range(4):
        built.train_step(samples)
    weight = built.model.decoder.embedding.tokens.weight
    state = built.optimizer.optimizer.state[weight]
    with torch.no_grad():
        kept = weight[4].clone()
        weight[4] = math.nan
    before = [p.clone() for p in built.model.parameters()]
    steps = state["step"].clone()
    assert built.train_step(samples) == {}
    torch.testing.assert_close(list(built.model.parameters()), before, rtol=0, atol=0, equal_nan=True)
    assert state["step"] == steps
    with torch.no_grad():
        weight[4] = kept
    built.train_step(samples)
    assert state["step"] == steps + 1 and weight.isfinite().all()
    with pytest.raises(
        FloatingPointError, match="Nan/Inf at update 5, which was left out. The model after update 6 is"
    ):
        built.flush()
    assert (tmp_path / "crash.pt").exists()


def test_logs_are_read_at_the_first_step_and_at_every_interval(folder, monkeypatch):
    built = prepared(folder, "ahead", "--log-interval", "3")
    read = []
    monkeypatch.setattr(built, "_reduce_and_log_stats", lambda *_: read.append(built.get_num_updates()))
    for samples in groups(built)[:7]:
        built.train_step(samples)
    assert read == [1, 3, 3, 6, 6, 6]
    built.flush()
    assert read == [1, 3, 3, 6, 6, 6, 7]
    built.flush()
    assert len(read) == 7


def test_logs_are_read_before_a_validation_and_at_the_end_of_an_epoch(folder):
    built = prepared(folder, "ahead", "--log-interval", "1000", "--validate-interval-updates", "4")
    unread = []

    def fairseqs(*_):
        unread.append((built.get_num_updates(), len(built._unread)))
        return [None], False

    with metrics.aggregate("train"):
        for samples in groups(built)[:5]:
            built.train_step(samples)
            ends = built.get_num_updates() == 5
            validate_and_save(fairseqs, built.cfg, built, built.task, None, ["valid"], ends)
    assert unread == [(4, 0), (5, 0)]


def test_after_an_error_fairseqs_step_runs(folder, monkeypatch):
    built = prepared(folder, "ahead")
    first, second, *_ = groups(built)
    built.train_step(first)
    without_memory_for(built, first[0], monkeypatch)
    assert built.train_step(first) is None and built.get_num_updates() == 1
    assert built.train_step(second) == {} and built.get_num_updates() == 2


def test_after_an_error_of_a_step_that_is_not_recorded_fairseqs_step_runs(folder, monkeypatch):
    built = prepared(folder, "graphs")
    forward, (first, second, *_) = built.criterion.forward, groups(built)

    def failing(*_, **__):
        raise RuntimeError("CUDA out of memory")

    built.optimizer.optimizer.found_inf = torch.ones(())  # of a step before, in memory that graphs share
    monkeypatch.setattr(built.criterion, "forward", failing)
    assert built.train_step(first) is None and built.get_num_updates() == 0
    assert built.optimizer.optimizer.found_inf is None
    monkeypatch.setattr(built.criterion, "forward", forward)
    assert built.train_step(second) == {} and built.get_num_updates() == 1


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")], ids=str
)
def test_without_memory_for_another_graph_fewer_are_advised(error, folder):
    class Full:
        def record(self, function):
            raise error

    built = prepared(folder, "graphs")
    built._graphs.recorder = Full()
    samples = groups(built)[0]
    built.train_step(samples)
    with pytest.raises(UsageError, match="no memory for graph 1 .* use --step-graphs 0"):
        built.train_step(samples)


def test_a_checkpoint_of_recorded_steps_is_an_ordinary_one(folder, as_on_a_gpu):
    recorded, ordinary = (
        prepared(folder, how, "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "5")
        for how in ("graphs", "at once")
    )
    for built in (recorded, ordinary):
        for samples in groups(built):
            built.train_step(samples)
    state = recorded.optimizer.state_dict()
    assert state["param_groups"] == ordinary.optimizer.state_dict()["param_groups"]
    assert isinstance(state["param_groups"][0]["lr"], float) and recorded.get_lr() == ordinary.get_lr()
    resumed = prepared(folder, "at once", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "5")
    resumed.optimizer.load_state_dict(state)
    assert resumed.train_step(groups(resumed)[0])["loss"] > 0


@pytest.mark.parametrize(
    "arguments,said",
    [
        ([], "one worker that trains in float32 on a GPU"),
        (
            ["--feature-map", "performer", "--performer-redraw", "2", "--decoder-attention", "linear"],
            "--performer-redraw",
        ),
    ],
)
def test_where_steps_are_not_recorded_it_is_said_at_the_start(folder, arguments, said):
    with pytest.raises(UsageError, match=said):
        build(SGTrainer, folder, "--step-graphs", "8", *arguments)


def test_features_that_are_never_drawn_again_may_be_recorded(folder):
    """The refusal that remains is that of a CPU."""
    never = ["--feature-map", "performer", "--performer-redraw", "never", "--decoder-attention", "linear"]
    with pytest.raises(UsageError, match="one worker that trains in float32 on a GPU"):
        build(SGTrainer, folder, "--step-graphs", "8", *never)


@pytest.mark.parametrize("how", ["at once", "ahead", "graphs"])
def test_no_tensors_are_left_by_a_step(folder, how, as_on_a_gpu):
    built = prepared(folder, how, "--log-interval", "2", "--update-freq", "2")
    samples = groups(built)[0]

    def tensors_after(steps: int) -> int:
        for _ in range(steps):
            built.train_step(samples)
        gc.collect()
        return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())

    tensors_after(6)
    assert tensors_after(2) == tensors_after(8)
