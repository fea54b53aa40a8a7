"""Benchmarks of training steps and decoding, and ``python -m benchmarks``, which runs all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fairseq")

from benchmarks import __main__ as run  # noqa: E402
from benchmarks import (  # noqa: E402
    attention,
    measure,
    memory,
    operators,
    points,
    preparation,
    recorded,
    report,
    step,
    summary,
    together,
)
from fairseq_sg.kernels import timing  # noqa: E402
from fairseq_sg.modules.attention.softmax import SoftmaxAttentionBase  # noqa: E402
from fairseq_sg.ops import torch_attention  # noqa: E402
from helpers.small_folders import random_pairs, write_folder  # noqa: E402


class TestAttention:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(attention, "SENTENCES", 2)
        monkeypatch.setattr(attention, "LOSS_POSITIONS", 20)
        monkeypatch.setattr(timing, "SHORTEST", 0.0)

    def test_every_attention_is_there(self):
        found = attention.models()
        assert set(attention.ATTENTION_REGISTRY) - {"linear"} <= set(found)
        assert {f"linear {name}" for name in attention.FEATURE_MAP_REGISTRY} <= set(found)
        assert {f"softmax {name}" for name in attention.POSITION_REGISTRY if name != "sinusoidal"} <= set(found)

    def test_step(self):
        section = attention.step_section(1, "cpu", ["linear elu"])
        assert [row[0] for row in section.rows] == ["softmax", "linear elu"]
        assert section.cell("softmax", "times softmax") == 1.0 and section.cell("linear elu", "MB kept") > 1

    def test_a_wrong_attention_is_not_timed(self, monkeypatch):
        """One that is right in float64 only."""
        loss_of = attention.loss_of

        def wrong(model, source, target):
            loss = loss_of(model, source, target)
            return loss if next(model.parameters()).dtype == torch.float64 else 1.1 * loss

        monkeypatch.setattr(attention, "loss_of", wrong)
        monkeypatch.setattr(attention, "medians", lambda *arguments: pytest.fail("timed"))
        with pytest.raises(SystemExit, match="error: softmax: .* is off by .*; nothing was timed"):
            attention.step_section(1, "cpu", ["softmax"])

    def test_decoding(self):
        section = attention.decoding_section(1, "cpu", (4, 40))
        assert [name for name, _ in section.columns][1:] == ["ms at 4", "ms at 40", "kB at 4", "kB at 40"]
        assert section.cell("linear elu", "kB at 4") == section.cell("linear elu", "kB at 40")
        assert section.cell("softmax", "kB at 4") < section.cell("softmax", "kB at 40")
        # Of one sentence: in each of 8 heads a matrix of 16 by 16 and a vector of 16.
        assert section.cell("linear elu", "kB at 4") == pytest.approx(4 * 8 * 16 * 17 / 1e3)

    def test_a_wrong_state_is_not_timed(self, monkeypatch):
        build = attention.decoder_attention

        def forgetful(options, width):
            found = build(options, width)
            extend = found.extend

            def wrong(*arguments, **options):
                out, state = extend(*arguments, **options)
                return 1.5 * out, state

            found.extend = wrong
            return found

        monkeypatch.setattr(attention, "decoder_attention", forgetful)
        with pytest.raises(SystemExit, match="error: softmax: value is off"):
            attention.decoding_section(1, "cpu", (4, 9))

    def test_orthogonality(self, monkeypatch):
        times = {"with": [3.0], "without": [2.0], "alone": [0.5], "encoder": [0.25]}
        assert attention.orthogonality_times(5, 1, "cpu").keys() == times.keys()
        monkeypatch.setattr(attention, "orthogonality_times", lambda *_: times)
        section = attention.orthogonality_section(1, "cpu", (5,))
        assert section.cell("5", "share") == pytest.approx(20)
        assert section.cell("5", "encoder alone") == pytest.approx(100 * 0.25 / 2.25, rel=1e-5)
        assert section.cell("5", "share by difference") == pytest.approx(100 / 3, rel=1e-5)

    def test_windows(self):
        section = attention.windows_section(1, "cpu", (8, 200))
        assert [name for name, _ in section.columns][1:] == ["ms at 8", "ms at 200", "MB kept at 200"]
        memory = {name: section.cell(name, "MB kept at 200") for name in ("relative", "relative, window 64")}
        assert memory["relative, window 64"] < memory["relative"]

    def test_a_wrong_window_is_not_timed(self, monkeypatch):
        block = SoftmaxAttentionBase._block
        monkeypatch.setattr(SoftmaxAttentionBase, "_block", lambda *given, **x: 1.5 * block(*given, **x))
        with pytest.raises(SystemExit, match="error: softmax, window 64 at 70: value is off"):
            attention.windows_section(1, "cpu", (70,))


class TestStep:
    def test_rows(self):
        results = [
            step.Result(batches, implementation, seconds, [3.0, 2.0, 1.0], 90.4, 100.0)
            for batches, implementation, seconds in (
                ("random", "ours", [0.4, 0.3, 0.5]),
                ("random", "reference", [0.8]),
                ("bucketed", "ours", [0.2]),
                ("bucketed", "reference", [0.5]),
            )
        ]
        rows = step.rows(results)
        assert rows[0] == ["ours, random", [0.4, 0.3, 0.5], 2.5, 90, 100, 2.0, 2.0, [3.0, 1.0]]
        assert rows[2][5:7] == [2.5, 4.0]
        assert step.rows(results[:1])[0][5:7] == [None, None]

    def test_tokens(self):
        """Of source and target of a batch, on average."""
        sides = [([[1, 4, 5], [4, 5, 6]], [[2, 5], [2, 1]]), ([[4]], [[2]])]
        names = ("src_tokens", "prev_output_tokens")
        batches = [{"net_input": dict(zip(names, map(torch.tensor, side), strict=True))} for side in sides]
        assert step.tokens(batches, pad=1) == {"real": (5 + 3 + 2) / 2, "padded": (6 + 4 + 2) / 2}

    def test_rounds(self, monkeypatch):
        """The first is a warm-up, whose losses count; seconds are means over the batches of a round."""

        class Step:
            parameters, task = 7, SimpleNamespace(source_dictionary=SimpleNamespace(pad=lambda: 1))

            def __init__(self, *_, **options):
                self.made = 0

            def batches(self, number):
                side = torch.tensor([[4, 5]])
                return [{"net_input": {"src_tokens": side, "prev_output_tokens": side}}] * number

            def step(self, batch):
                self.made += 1
                return step.Measured(100.0 if self.made <= 2 else self.made, 1 / self.made)

        monkeypatch.setattr(step, "OurStep", Step)
        monkeypatch.setattr(step.linear, "onednn_is_faster", lambda: False)
        (random, bucketed), parameters = step.measure("scan", [], Path("data"), None, 2, 2, "cpu")
        assert (random.batches, random.seconds) == ("random", [3.5, 5.5]) and parameters == {"ours": 7}
        assert random.losses == [1 / n for n in range(1, 7)] and bucketed.seconds[1] == 20.5

    def test_a_step_that_does_not_train(self):
        with pytest.raises(SystemExit, match="ours on random batches does not train: loss 1.0 -> 2.0"):
            step.check("ours on random batches", [1.0, 1.5, 2.0])

    def test_losses_of_steps_that_are_read_later(self, tmp_path):
        """As on a GPU, where the trainer runs ahead: they are those of steps that are read at once."""
        data = write_folder(tmp_path / "data", {"train": random_pairs(24, 1)})
        found = []
        for ahead in (False, True):
            ours = step.OurStep([*step.MODELS["scan"]["arguments"].split(), "--batch-size", "8"], data, "cpu")
            ours.trainer.ahead = ahead
            found.append([ours.step(batch) for batch in ours.batches(3)])
        assert [one.loss for one in found[0]] == pytest.approx([one.loss for one in found[1]], rel=1e-4)
        assert len({one.loss for one in found[0]}) == 3 and all(one.seconds > 0 for kind in found for one in kind)


class TestMemory:
    """Differentiable neural computers beside an LSTM and a transcription."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(timing, "SHORTEST", 0.0)

    def test_section(self):
        (times,) = memory.sections(1, "cpu", cells=(4,), words=(3, 6), sentences=2)
        assert [name for name, _ in times.columns] == ["model", "4 cells, 3 words", "4 cells, 6 words"]
        assert [row[0] for row in times.rows] == ["plain", "mds", "mds, transcribed", "LSTM"]
        assert times.cell("mds", "4 cells, 6 words")[:3] == [1.0, 1.0, 1.0]
        assert times.cell("LSTM", "4 cells, 6 words")[0] > 0 and times.cell("plain", "4 cells, 3 words")[3] > 0
        assert " words/s" in report.as_markdown(times)

    def test_words_a_second(self, monkeypatch):
        """Of all sentences of a batch: 2 · 6 in 3 ms."""
        monkeypatch.setattr(memory, "check", lambda *_: None)
        monkeypatch.setattr(memory, "interleaved", lambda runs, *_: {name: [3.0] for name in runs})
        (times,) = memory.sections(1, "cpu", cells=(4,), words=(6,), sentences=2)
        assert times.cell("mds", "4 cells, 6 words") == [1.0, 1.0, 1.0, 4000.0]

    def test_a_wrong_operator_is_not_timed(self, monkeypatch):
        monkeypatch.setattr(memory, "retention", lambda r, free: 1 - 0.5 * (r * free[:, :, None]).sum(1))
        with pytest.raises(SystemExit, match="transcribed: .* nothing was timed"):
            memory.check("mds", "cpu")


class TestTogether:
    """Many small trainings."""

    def test_ways(self):
        Way = together.Way
        assert together.ways(4, "cpu") == {"4 processes": Way(4), "one process": Way(1)}
        assert together.ways(4, "cpu", [4, 2]) == {"4 processes": Way(4), "2 processes": Way(2)}
        assert together.ways(4, "cpu", [4], stacked=True) == {
            "4 processes": Way(4),
            "one process, stacked": Way(1, stacked=True),
        }
        recorded = {
            "15 processes, graphs": Way(15, graphs=True),
            "3 processes, graphs": Way(3, graphs=True),
            "one process, graphs": Way(1, graphs=True),
        }
        assert together.ways(15, "cuda") == {"15 processes": Way(15), **recorded}
        assert together.ways(15, "cuda", [3], mps=True) == {
            "15 processes": Way(15),
            "3 processes, graphs": Way(3, graphs=True),
            "3 processes, graphs, MPS": Way(3, graphs=True, mps=True),
        }

    def test_mps_runs_while_trainings_do(self, tmp_path, monkeypatch):
        """It is started before them and quit after them; they have its variables."""
        program = tmp_path / "control"
        program.write_text(f'#!/bin/sh\necho "$*$(test $# = 0 && cat)" "$CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/seen\n')
        program.chmod(0o755)
        monkeypatch.setattr(together, "MPS", str(program))

        class Process:
            def wait(self):
                return 0

        def launch(entries, environment, output):
            assert (tmp_path / "seen").read_text() == f"-d {environment['CUDA_MPS_PIPE_DIRECTORY']}\n"
            log = [f'x | INFO | train_inner | {{"num_updates": "{n}", "ups": "7"}}' for n in (20, 40)]
            Path(entries[0]["log"]).write_text("\n".join(log))
            return Process()

        monkeypatch.setattr(together.groups, "launch", launch)
        assert together.rate(Path("data"), 1, together.Way(1, graphs=True, mps=True), 100, "cuda", 2) == 7
        first, last = (tmp_path / "seen").read_text().splitlines()
        assert last == first.replace("-d", "quit") and not Path(first.split()[1]).exists()

    @pytest.mark.parametrize(
        "options, message",
        [
            ("--mps", "--mps needs a GPU of NVIDIA and the program nvidia-cuda-mps-control: leave it out"),
            ("--models 3 --processes 4", "--processes 4: choose at most 3, the number of trainings"),
            ("--processes 0 1", "--processes: '0' is not a number from 1 on"),
        ],
    )
    def test_options_that_cannot_be(self, options, message, capsys):
        with pytest.raises(SystemExit):
            together.main([*options.split(), "--device", "cpu"])
        assert message in capsys.readouterr().err

    def test_rates_are_those_of_the_logs(self, monkeypatch):
        """The first interval, with the start, is left out."""
        monkeypatch.setattr(together, "environment", dict)

        class Process:
            def __init__(self, entries):
                for entry in entries:
                    log = [f'x | INFO | train_inner | {{"num_updates": "{n}", "ups": "{n}"}}' for n in (20, 40, 60, 80)]
                    Path(entry["log"]).write_text("\n".join(log))
                    given.append(entry["arguments"])

            def wait(self):
                return 0

        given = []
        monkeypatch.setattr(together.groups, "launch", lambda entries, *_: Process(entries))
        assert together.rate(Path("data"), 3, together.Way(2), 100, "cpu", 8, "--lr 3") == 3 * 60
        assert [words[words.index("--seed") + 1] for words in given] == ["1", "3", "2"]
        assert all("--cpu" in words and words[words.index("--step-graphs") + 1] == "0" for words in given)
        assert all(words[words.index("--cpu") - 2 :][:2] == ["--lr", "3"] for words in given)

    @pytest.mark.parametrize("stacked", [False, True])
    def test_trainings_whose_steps_are_made_at_once_are_a_stack(self, stacked, monkeypatch):
        class Process:
            def wait(self):
                return 0

        given = []
        monkeypatch.setattr(together.groups, "launch", lambda entries, *_: given.extend(entries) or Process())
        assert together.rate(Path("data"), 3, together.Way(1, stacked=stacked), 100, "cpu", 8) == 0  # without logs
        assert [entry["stack"] for entry in given] == ["all" if stacked else None] * 3

    def test_section(self, monkeypatch):
        monkeypatch.setattr(together, "rate", lambda _, models, way, *more: 2.0 * way.processes)
        section = together.section(together.ways(4, "cpu"), 4, 100, 3, "cpu", 8, Path("data"))
        assert section.rows == [["4 processes", 8.0, 1.0], ["one process", 2.0, 0.25]]
        assert section.note == "100 steps, 3 rounds" and section.kind in report.KINDS

    def test_a_training_that_fails_is_shown(self, monkeypatch):
        class Process:
            def wait(self):
                return 1

        def launch(entries, environment, output):
            output.write_text("killed")
            Path(entries[0]["log"]).write_text("out of memory")
            return Process()

        monkeypatch.setattr(together.groups, "launch", launch)
        with pytest.raises(SystemExit, match="a training failed: killedout of memory"):
            together.rate(Path("data"), 1, together.Way(1), 100, "cpu", 0)


class TestRecorded:
    """Recorded steps, here without a graph."""

    @pytest.fixture
    def data(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.setattr(timing, "SHORTEST", 0.0)
        monkeypatch.setattr(recorded, "ARGUMENTS", "--arch sg_transformer_scan --lr 1e-3 --batch-size 8 --dropout 0")
        monkeypatch.setattr(recorded, "kernels", lambda run, device: [("gemm", 0.125)] * 3 + [("add", 0.0625)] * 4)
        return write_folder(tmp_path / "data", {"train": random_pairs(16, 1)})

    def test_section(self, data):
        models, ways = ["relative", "linear-l2"], ["recorded", "TF32", "fused attention"]
        found = recorded.section(models, ways, 2, "cpu", data)
        assert [row[0] for row in found.rows] == [f"{model}: {way}" for model in models for way in ways]
        assert found.kind in report.KINDS and found.note == "2 rounds"
        assert all(row[1][1] <= row[1][0] <= row[1][2] and row[3:5] == [7, 0.625] for row in found.rows)
        for model in models:
            times = {way: found.cell(f"{model}: {way}", "ms")[0] for way in ways}
            ratios = [found.cell(f"{model}: {way}", "× recorded") for way in ways]
            assert ratios == pytest.approx([times["recorded"] / times[way] for way in ways], rel=1e-4)
        # Without dropout, the first loss of a model is the same in every way.
        first = {row[0]: row[-1][0] for row in found.rows}
        for model in models:
            assert first[f"{model}: fused attention"] == pytest.approx(first[f"{model}: recorded"], rel=1e-5)
        assert first["relative: recorded"] != first["linear-l2: recorded"]

    def test_a_way_holds_while_it_is_recorded(self, data, monkeypatch):
        seen = []
        precision, variable = torch.get_float32_matmul_precision, recorded.ENVIRONMENT_VARIABLE

        class Step:
            def __init__(self, arguments, *_):
                options = " ".join(word for word in arguments if word in ("--compile", "--autocast"))
                seen.append((precision(), os.environ.get(variable), torch_attention.FEW, options))
                raise RuntimeError("there is no such kernel\nand more")

        monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr(step, "OurStep", Step)
        before, few = precision(), torch_attention.FEW
        found = recorded.section(["relative"], list(recorded.WAYS), 1, "cpu", data)
        assert dict(zip(recorded.WAYS, seen, strict=True)) == {
            "recorded": (before, None, few, ""),
            "compiled": (before, None, few, "--compile"),
            "TF32": ("high", None, few, ""),
            "compiled, TF32": ("high", None, few, "--compile"),
            "bfloat16": (before, None, few, "--autocast"),
            "compiled, bfloat16": (before, None, few, "--autocast --compile"),
            "Triton": (before, "triton", few, ""),
            "fused attention": (before, None, 0, ""),
        }
        assert (precision(), os.environ.get(variable), torch_attention.FEW) == (before, None, few)
        assert found.rows[0] == ["relative: recorded", None, None, None, None, None]
        assert "relative: Triton failed: there is no such kernel" in found.note and "more" not in found.note
        assert "| relative: TF32 | – |" in report.as_markdown(found)

    def test_a_step_that_does_not_train(self, data, monkeypatch):
        monkeypatch.setattr(recorded, "ARGUMENTS", f"{recorded.ARGUMENTS} --lr 1e-30")
        with pytest.raises(SystemExit, match="does not train"):
            recorded.section(["relative"], ["recorded"], 1, "cpu", data)

    def test_kernels_are_the_events_of_the_gpu(self, monkeypatch):
        def event(kind, name, ns):
            return SimpleNamespace(device_type=lambda: kind, name=lambda: name, duration_ns=lambda: ns)

        events = [event(recorded.DeviceType.CUDA, "gemm", 2_000_000), event(recorded.DeviceType.CUDA, "add", 500_000)]
        events += [event(recorded.DeviceType.CUDA, "Memcpy DtoD", 9), event(recorded.DeviceType.CPU, "aten::add", 9)]
        results = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
        monkeypatch.setattr(recorded, "profile", lambda **_: contextlib.nullcontext(results))
        runs = []
        found = recorded.kernels(lambda: runs.append(1), "cpu")
        assert found == [("gemm", 2.0), ("add", 0.5)] and len(runs) == 2
        lines = recorded.by_name([*found, ("add", 3.0), ("copy", 0.25)], 2)
        assert [line.split() for line in lines] == [["3.500", "ms", "2", "×", "add"], ["2.000", "ms", "1", "×", "gemm"]]

    def test_without_a_gpu(self, capsys):
        with pytest.raises(SystemExit):
            recorded.main(["--device", "cpu"])
        assert "steps are recorded on a GPU alone" in capsys.readouterr().err


class TestPoints:
    """Operator models by number of points."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(timing, "SHORTEST", 0.0)

    def test_sections(self):
        times, memory = points.sections(1, "cpu", points=(32, 64), functions=1)
        assert [name for name, _ in times.columns] == ["attention", "32 points", "64 points"]
        assert [row[0] for row in times.rows] == [row[0] for row in memory.rows] == list(points.MODELS)
        assert times.cell("galerkin", "64 points")[:3] == [1.0, 1.0, 1.0]
        for name in points.MODELS:
            ratio, low, high, milliseconds = times.cell(name, "64 points")
            assert ratio == low == high > 0  # of one round
            assert milliseconds == pytest.approx(ratio * times.cell("galerkin", "64 points")[3], rel=1e-4)
            assert memory.cell(name, "32 points") < memory.cell(name, "64 points")
        assert "1.00 [1.00, 1.00]; " in report.as_markdown(times)

    def test_memory_is_of_activations_and_gradients(self):
        model, sample = points.model_of("galerkin"), points.sample_of(2, 64, "cpu")
        kept = measure.kept_activations(model.parameters(), lambda: points.loss_of(model, sample))
        gradients = sum(4 * p.numel() for p in model.parameters())
        _, memory = points.sections(1, "cpu", ["galerkin"], (64,))
        peak = 1e6 * memory.cell("galerkin", "64 points")
        assert max(kept, gradients) < peak < 1.5 * (kept + gradients)

    def test_models_have_their_attention(self):
        found = {name: points.model_of(name).config for name in points.MODELS}
        kinds = {name: config.encoder_attention for name, config in found.items() if config.encoder_layers}
        assert kinds == {"galerkin": "galerkin", "fourier": "fourier", "linear l2": "linear", "softmax": "softmax"}
        assert found["linear l2"].qk_norm == "l2" and found["no attention (FNO)"].encoder_layers == 0

    def test_functions_and_loss(self):
        """The loss by hand; the derivative is that of the target, in Fourier space."""
        sample, model = points.sample_of(3, 64, "cpu"), points.model_of("softmax")
        u = sample["target"]
        k = 2j * torch.pi * torch.arange(33)
        torch.testing.assert_close(torch.fft.irfft(k * torch.fft.rfft(u)), sample["gradient"])
        prediction = model(**sample["net_input"])[0]
        difference = (prediction.roll(-1, 1) - prediction.roll(1, 1)) * 32
        value = (prediction - u).norm(dim=1) / u.norm(dim=1)
        derivative = (difference - sample["gradient"]).norm(dim=1) / sample["gradient"].norm(dim=1)
        expected = (value + (0.1 / 64) ** 0.5 * derivative).mean()
        torch.testing.assert_close(points.loss_of(model, sample), expected)

    def test_a_wrong_model_is_not_timed(self, monkeypatch):
        """One that is right in float64 only, on no more points than the comparison is made on."""
        loss_of, seen = points.loss_of, set()

        def wrong(model, sample):
            seen.add(sample["target"].size(1))
            loss = loss_of(model, sample)
            return loss if next(model.parameters()).dtype == torch.float64 else 1.1 * loss

        monkeypatch.setattr(points, "loss_of", wrong)
        monkeypatch.setattr(points, "CHECKED", 40)
        monkeypatch.setattr(points, "interleaved", lambda *arguments: pytest.fail("timed"))
        with pytest.raises(SystemExit, match="error: galerkin: .* is off by .*; nothing was timed"):
            points.sections(1, "cpu", ["galerkin"], (32, 64))
        assert seen == {40}

    @pytest.mark.parametrize(
        "line,word",
        [
            (["--models", "cosine"], "choose from galerkin"),
            (["--at", "16"], "--at 16"),
            (["--functions", "0"], "--functions: '0' is not a number from 1 on"),
        ],
    )
    def test_refuses(self, line, word, capsys):
        with pytest.raises(SystemExit):
            points.main([*line, "--device", "cpu"])
        assert word in capsys.readouterr().err


class TestAll:
    """``python -m benchmarks``."""

    @pytest.mark.parametrize(
        "line,word",
        [
            (["--rounds", "0"], "--rounds"),
            (["--suite", "ops", "--reference", "x"], "--reference"),
            (["--suite", "all"], "--suite"),
            (["--suite", "step", "--peers"], "--peers"),
        ],
    )
    def test_refuses(self, line, word, capsys):
        with pytest.raises(SystemExit):
            run.parse([*line, "--device", "cpu"])
        assert word in capsys.readouterr().err

    def test_a_wrong_implementation_is_an_error(self, monkeypatch):
        for problems, code in ((["wrong: o c at 3: because"], 1), ([], 0)):
            monkeypatch.setattr(operators, "run", lambda *args, problems=problems, **options: problems)
            assert run.main(["--suite", "ops", "--device", "cpu"]) == code

    def test_suites(self, monkeypatch, tmp_path):
        """Every section gets the options, and all are on the page with the promises about them."""
        seen = []

        def section(kind, columns, rows):
            def make(*arguments, **options):
                seen.append((kind, *arguments, *options.values()))
                return report.Section(kind, "SCAN (cpu)", "cpu", [(name, "{}") for name in columns], rows)

            return make

        ratio = "× reference, random"
        steps = [["ours, random", 2.0], ["reference, random", 1.0], ["ours, bucketed", 2.0]]
        monkeypatch.setattr(step, "step_section", section("step", ["step", ratio], steps))
        monkeypatch.setattr(attention, "step_section", section("attentions", ["attention"], [["softmax"]]))
        losses = section("orthogonality", ["length", "share"], [["10", 2.0], ["32", 4.0]])
        monkeypatch.setattr(attention, "orthogonality_section", losses)
        monkeypatch.setattr(attention, "windows_section", section("windows", ["attention"], [["softmax"]]))
        one = section("points", ["attention"], [["galerkin"]])
        monkeypatch.setattr(points, "sections", lambda *on, **options: [one(*on)])
        cells = section("memory", ["model"], [["mds"]])
        monkeypatch.setattr(memory, "sections", lambda *on, **options: [cells(*on)])
        monkeypatch.setattr(attention, "decoding_section", section("decoding", ["a"], [["1"]]))
        monkeypatch.setattr(preparation, "preparation_section", section("preparation", ["b"], [["2"]]))
        monkeypatch.setattr(together, "section_of", section("together", ["c"], [["3"]]))
        line = [
            "--suite",
            "step",
            "decode",
            "data",
            "together",
            "--reference",
            "THERE",
            "--rounds",
            "3",
            "--device",
            "cpu",
        ]
        assert run.main([*line, "--out", str(tmp_path / "new")]) == 0
        models = ["step", "attentions", "orthogonality", "windows", "points", "memory"]
        assert [one[0] for one in seen] == [*models, "decoding", "preparation", "together"]
        assert Path("THERE") in seen[0] and all(3 in one and "cpu" in one for one in seen[:7])
        found = report.load(tmp_path / "new")
        assert {one.command for one in found} == {report.command("benchmarks", [*line, "--out", str(tmp_path / "new")])}
        met = [one.met for _, one in summary.all_promises(found) if one.met is not None]
        assert met == [True, False, True, False]
        page = (tmp_path / "new" / "RESULTS.md").read_text()
        shown = {heading for kind, (heading, _) in report.KINDS.items() if kind not in ("operator", "recorded")}
        assert all(f"## {heading}\n" in page for heading in shown)
