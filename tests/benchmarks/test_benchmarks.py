"""Benchmarks: their output, and that wrong results are not timed."""

from __future__ import annotations

import importlib.util
import re
from functools import partial

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
import torch.nn.functional as F

from benchmarks import measure, operators, peers, report, summary
from fairseq_sg.ops import linear_attention
from helpers.comparison import assert_all_close, with_gradients

MACHINE = measure.Machine(((1 << 18, 2e10), (1 << 22, 1e10)), 1e11)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The folder and the return value of one quick run."""
    out = tmp_path_factory.mktemp("benchmarks") / "all"
    return out, operators.main(["--quick", "--rounds", "2", "--device", "cpu", "--figures", "--out", str(out)])


def small_case(function, ours=True, **changes):
    """Full linear attention at length 5 with one more contender."""
    setting = operators.Setting("cpu", torch.float32, heads=2, dim=3, positions=20)
    case = operators.linear_attention_case(5, setting, causal=False)
    contender = measure.Contender("other", function, ours=ours)
    keep = [one for one in case.contenders if one.name == "chunked"]
    return measure.Case(**vars(case) | {"contenders": [*keep, contender]} | changes)


def rows_of(case, monkeypatch):
    """Rows of a case by name, and the names of the timed ones."""
    timed = []

    def interleaved(runs, rounds, device):
        timed.extend(runs)
        return {name: [3.0, 1.0, 2.0] for name in runs}

    monkeypatch.setattr(measure, "interleaved", interleaved)
    return {row.contender: row for row in measure.measure(case, 3, "cpu", MACHINE)}, timed


class TestOperators:
    def test_everything_is_right(self, quick):
        assert quick[1] == 0

    def test_sections(self, quick):
        found = {section.title.split()[0]: section for section in report.load(quick[0])}
        assert list(found) == list(operators.OPERATORS)
        for name, section in found.items():
            assert (section.kind, section.device) == ("operator", "cpu")
            assert section.command.startswith("python -m benchmarks.operators --quick --rounds 2 ")
            assert section.machine and section.commit and "2 rounds; floor from copies" in section.note
            rows = section.measured()
            assert {row.size for row in rows} == set(operators.OPERATORS[name].quick)
            assert any(row.status == "timed" and row.ours for row in rows)
            for row in rows:
                assert row.floor > 0 and row.floor_of in ("bytes", "FLOPs")
                assert row.status == "timed" and row.low <= row.median <= row.high
                assert row.peak > 0 and 0 <= row.error <= measure.ALLOWED[torch.float32]
                assert (row.kept is None) == (name not in ("sigma_moe", "cvmm"))

    def test_every_implementation_has_a_row(self, capsys):
        """Also the ones that cannot run here, with the reason."""
        setting = operators.setting_on("cpu", quick=True)
        for name, operator in operators.OPERATORS.items():
            case = operator.case(operator.quick[0], setting)
            rows = {row.contender: row for row in measure.measure(case, 1, "cpu", MACHINE)}
            if name != "sigma_moe":
                assert {"auto", *operator.implementations} <= set(rows)
            assert {peer.name for peer in setting.peers if name in peer.operators} <= set(rows)
            for contender, row in rows.items():
                if contender == "triton":
                    assert row.status == "skipped" and row.reason and row.median is None
                else:
                    assert row.status == "timed" and row.low == row.median == row.high is not None
        assert {peer.name for peer in setting.peers} >= {"torch grouped_mm", "sums of logarithms"}
        remarks = capsys.readouterr().err
        assert all(f"peer {peer.name}: " in remarks for peer in peers.PEERS)

    def test_page(self, quick):
        text = (quick[0] / "RESULTS.md").read_text()
        tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("| ")]
        assert len(tables) == len(operators.OPERATORS) + 2  # and those of answers and promises
        assert all(len({line.count(" | ") for line in lines}) == 1 for lines in tables)
        floors = [line.strip("| ").split(" | ") for lines in tables for line in lines if line.startswith("| floor |")]
        sizes = [len(operator.quick) for operator in operators.OPERATORS.values()]
        assert [sum(cell.strip() != "" for cell in floor) - 1 for floor in floors] == sizes

    def test_figures(self, quick):
        pytest.importorskip("matplotlib")
        page = (quick[0] / "RESULTS.md").read_text()
        for section in report.load(quick[0]):
            path = quick[0] / "figures" / section.figure
            assert path.read_bytes().startswith(b"\x89PNG") and f"(figures/{path.name})" in page

    def test_some_operators(self, capsys):
        assert operators.main("orthogonality_loss --quick --rounds 1 --device cpu --sizes 3 7".split()) == 0
        printed = capsys.readouterr().out
        assert "### orthogonality_loss" in printed and "### cvmm" not in printed
        assert "| ms by length | 3 | 7 |" in printed

    def test_options_change_the_setting(self, capsys):
        line = "sigma_moe --quick --rounds 1 --device cpu --sizes 3 --tokens 5 --model-dim 4 --expert-dim 2 --chosen 1"
        assert operators.main(line.split()) == 0
        assert "### sigma_moe (cpu, float32, 5 tokens of width 4, 1 experts of 2)" in capsys.readouterr().out

    def test_only_some_implementations(self, capsys):
        line = "cvmm sigma_moe relative_logits --implementation grouped naive --quick --rounds 1 --device cpu --sizes 3"
        assert operators.main(line.split()) == 0
        printed = capsys.readouterr().out
        for row in (
            "| naive |",
            "| grouped |",
            "| torch grouped_mm |",
            "| sigma_moe, grouped |",
            "| sigma_moe, naive |",
        ):
            assert row in printed, row
        assert "| auto |" not in printed and "| blocks |" not in printed and "| shift |" not in printed

    def test_one_that_cannot_run_is_an_error(self, capsys):
        line = "cvmm --implementation triton --quick --rounds 1 --device cpu --sizes 3"
        assert operators.main(line.split()) == 1
        assert "skipped: cvmm triton at 3: cvmm cannot run its implementation 'triton' here" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "line,word",
        [
            ("--rounds 0", "--rounds: '0' is not a number from 1 on"),
            ("cvm", "no operator cvm: choose from .*cvmm"),
            ("relative_logits --implementation grouped", "--implementation grouped: choose from auto, naive, shift"),
            ("--figures", "--figures needs --out"),
            (f"--quick --out {report.FOLDER}", "--quick gives numbers that mean nothing"),
            ("cvmm --sizes 2 0", "--sizes: '0' is not a number from 1 on"),
            ("sigma_moe --tokens 0", "--tokens: '0' is not a number from 1 on"),
            ("sigma_moe --model-dim -1", "--model-dim: '-1' is not a number from 1 on"),
        ],
    )
    def test_refuses(self, line, word, capsys):
        with pytest.raises(SystemExit):
            operators.main([*line.split(), "--device", "cpu"])
        assert re.search(word, capsys.readouterr().err)

    @pytest.mark.parametrize(
        "content,word",
        [(None, "File exists|Not a directory"), ("{bad", "no sections"), ('[{"kind": 1}]', "no sections")],
    )
    def test_a_place_that_takes_no_results_is_refused_first(self, content, word, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(operators, "run", None)
        if content is None:
            (tmp_path / "out").touch()
        else:
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "results.json").write_text(content)
        with pytest.raises(SystemExit):
            operators.main(["cvmm", "--quick", "--device", "cpu", "--out", str(tmp_path / "out")])
        assert re.search(f"--out {tmp_path / 'out'}: .*({word}).*: choose another folder", capsys.readouterr().err)

    def test_problems(self):
        def row(status, ours=True):
            return measure.Row("o", 3, "c", ours, status, reason="because")

        for status in ("wrong", "failed"):
            assert operators.problems([row(status)], ()) == [f"{status}: o c at 3: because"]
            assert operators.problems([row(status, ours=False)], ()) == []
        assert operators.problems([row("timed"), row("skipped")], ()) == []

    @pytest.mark.parametrize("causal", [False, True])
    def test_large_relative_attention_is_compared_with_the_shift(self, causal):
        """The naive form in float64 would not fit into the memory of a GPU; both must be the same."""
        cases = [
            operators.relative_attention_case(6, operators.Setting("cpu", torch.float64, 2, 4, 12, limit=limit), causal)
            for limit in (1 << 30, 1)
        ]
        assert [case.exact.keywords["implementation"] for case in cases] == ["naive", "shift"]
        inputs = cases[0].inputs
        torch.testing.assert_close(cases[0].exact(*inputs), cases[1].exact(*inputs))


class TestMeasure:
    def test_right(self, monkeypatch):
        rows, timed = rows_of(small_case(partial(linear_attention, implementation="naive")), monkeypatch)
        assert timed == ["chunked", "other"]
        assert (rows["other"].low, rows["other"].median, rows["other"].high) == (1.5, 2.0, 2.5)
        # q, k, v and their gradients: read in both passes and written once; the output is written, its gradient read.
        one = 4 * (4 * 2 * 5 * 3)
        assert rows["other"].floor == pytest.approx(1e3 * (9 * one + 2 * one) / 2e10)

    @pytest.mark.parametrize(
        "function,word",
        [
            (lambda q, k, v: 1.001 * linear_attention(q, k, v), "off by"),
            (lambda q, k, v: linear_attention(q.detach(), k, v) + 0 * q, "gradient of input 1"),
            (lambda q, k, v: linear_attention(q, k, v).clone().fill_(float("nan")) + 0 * (q + k + v), "off by"),
        ],
    )
    def test_wrong_is_not_timed(self, function, word, monkeypatch):
        rows, timed = rows_of(small_case(function), monkeypatch)
        assert timed == ["chunked"]
        assert rows["other"].status == "wrong" and word in rows["other"].reason
        assert rows["other"].median is None and rows["other"].peak is None

    def test_the_naive_form_decides(self, monkeypatch):
        """Even if all contenders agree."""
        case = small_case(linear_attention, exact=lambda q, k, v: 2 * linear_attention(q, k, v, implementation="naive"))
        rows, timed = rows_of(case, monkeypatch)
        assert timed == [] and {row.status for row in rows.values()} == {"wrong"}

    def test_failures(self, monkeypatch):
        def fails(*inputs):
            raise ValueError("not here\nmore")

        ours, timed = rows_of(small_case(fails), monkeypatch)
        theirs, _ = rows_of(small_case(fails, ours=False), monkeypatch)
        assert timed == ["chunked"]
        assert (ours["other"].status, ours["other"].reason) == ("skipped", "not here")
        assert (theirs["other"].status, theirs["other"].reason) == ("failed", "ValueError: not here")
        other_shape, _ = rows_of(small_case(lambda q, k, v: linear_attention(q, k, v)[:1]), monkeypatch)
        assert other_shape["other"].status == "failed"

    def test_a_part_is_checked_all_is_timed(self, monkeypatch):
        seen = []

        def function(q, k, v):
            seen.append(len(q))
            return linear_attention(q, k, v)

        setting = operators.Setting("cpu", torch.float32, heads=3, dim=3, positions=20, limit=1)
        case = operators.linear_attention_case(5, setting, causal=False)
        assert all(case.part(x).shape[:2] == (1, 1) for x in case.inputs)
        case = measure.Case(**vars(case) | {"contenders": [measure.Contender("one", function)]})
        rows, _ = rows_of(case, monkeypatch)
        assert rows["one"].status == "timed" and set(seen) == {4}

    def test_corners(self):
        x = torch.arange(24).reshape(2, 3, 4)
        assert operators.corners(x, 4).tolist() == x[:, [0, 2]].tolist()
        assert operators.corners(x, 3).tolist() == x[1:, 2:].tolist()
        assert operators.corners(x[:1, :1], 4).shape == (1, 1, 4)

    def test_sums_before_a_relu_are_exact(self):
        """Otherwise a sign decided by rounding would make a correct gradient wrong."""
        setting = operators.Setting("cpu", torch.float32, tokens=64, model_dim=512, expert_dim=16)
        x, a, *_ = operators.cvmm_case(4, setting).inputs
        assert torch.equal((x @ a[0]).double(), x.double() @ a[0].double())
        for contender in operators.sigma_moe_case(4, setting).contenders:
            x, first = contender.inputs[:2]
            first = first.reshape(512, -1) if contender.name == "sigma_moe" else first.t()
            assert torch.equal((x @ first).double(), x.double() @ first.double()), contender.name

    def test_error(self):
        truth = [torch.tensor([100.0, -1.0]).double(), torch.tensor([1e-9]).double()]
        found = [torch.tensor([100.0, -0.9]), torch.tensor([0.01])]
        assert measure.error(found, truth) == (pytest.approx(0.01), "gradient of input 1")
        assert measure.error(found[:1], truth[:1]) == (pytest.approx(0.001), "value")
        assert measure.error([torch.zeros(3)], truth[:1])[0] == float("inf")
        # A comparison with NaN is false and must not count as a small error.
        assert measure.error([truth[0], torch.tensor([float("nan")])], truth) == (float("inf"), "gradient of input 1")

    def test_peak_memory(self):
        def run_it():
            x = torch.zeros(1000)
            y = x + 1
            del x
            return y + 1

        assert 8000 <= measure.peak_memory(run_it, "cpu") < 8500

    def test_kept_activations(self):
        layer = torch.nn.Linear(8, 4)
        assert measure.kept_activations(layer.parameters(), lambda: layer(torch.ones(5, 8)).exp()) == 4 * (
            5 * 8 + 5 * 4
        )

    def test_machine(self, monkeypatch):
        """Bytes and FLOPs per second, where each copy and product takes 2 ms."""
        monkeypatch.setattr(measure, "interleaved", lambda runs, *_: {name: [1.0, 2.0, 9.0] for name in runs})
        found = measure.measure_machine("cpu", torch.float32, quick=True)
        assert found.bandwidths == [(1 << 20, pytest.approx((1 << 20) / 2e-3))]
        assert found.flops == pytest.approx(2 * 128**3 / 2e-3)

    def test_floor(self):
        # Working sets that fit into the smaller copy or not; and more FLOPs than bytes.
        assert MACHINE.floor(1 << 19, 20_000, 0.0) == (pytest.approx(1e-3), "bytes")
        assert MACHINE.floor(1 << 23, 20_000, 0.0) == (pytest.approx(2e-3), "bytes")
        assert MACHINE.floor(1, 20_000, 0.0) == (pytest.approx(1e-3), "bytes")
        assert MACHINE.floor(1 << 23, 20_000, 1e9) == (pytest.approx(10.0), "FLOPs")


class TestPromises:
    @staticmethod
    def section(**medians):
        rows = {}
        names = {"softmax": "softmax: torch SDPA", "logs": "sums of logarithms", "dense": "dense, same parameters"}
        for name, median in medians.items():
            operator, size, contender = name.split("__")
            row = measure.Row(operator, int(size), names.get(contender, contender), True, "timed", median=median)
            rows.setdefault(operator, []).append(row)
        return [report.operator_section(of, f"{name} (cpu)", "cpu", "length", "") for name, of in rows.items()]

    def test_operators(self):
        sections = self.section(
            causal_linear_attention__64__auto=1.2,
            causal_linear_attention__64__softmax=1.0,
            causal_linear_attention__256__auto=1.0,
            causal_linear_attention__256__softmax=2.0,
            geometric_attention__50__auto=1.0,
            geometric_attention__50__logs=1.9,
            sigma_moe__16__sigma_moe=1.0,
            sigma_moe__16__dense=3.5,
        )
        found = summary.promises(summary.Found(sections, "cpu"))
        measured = [(one.ratio, one.met) for one in found if one.ratio is not None]
        assert measured == [(1.2, False), (2.0, True), (1.9, False), (3.5, True)]
        assert sum(one.met is None for one in found) == len(found) - 4
        page = report.page(sections)
        assert "| CPU | ≤ 1.1 | 1.2 | **not met** |" in page and "| CPU | ≥ 10 | – | not measured |" in page

    def test_the_first_of_several_settings_counts(self):
        one, other = self.section(sigma_moe__16__sigma_moe=1.0), self.section(sigma_moe__16__sigma_moe=5.0)
        assert summary.Found([*one, *other], "cpu").of("sigma_moe", 16, "sigma_moe") == 1.0

    def test_gpu(self):
        texts = [one.text for one in summary.promised_operators(summary.Found([], "cuda"))]
        assert all(any(peer in text for text in texts) for peer in ("flash-linear", "scattermoe", "grouped_mm"))

    def test_answers(self):
        names = {"auto": (2.0, 2.0, 2.0), "softmax": (4.0, 1.0, 8.0)}
        medians = {
            f"linear_attention__{size}__{name}": values[place]
            for name, values in names.items()
            for place, size in enumerate((16, 64, 256))
        }
        sections = self.section(**medians)
        assert summary.linear_attention(summary.Found(sections, "cpu"), "linear_attention") == (
            "from **256** on: 2 × at 16, 0.5 × at 64, 4 × at 256"
        )
        answers = {question: on for question, _, *on in summary.answers(sections)}
        assert len(answers) == 10
        assert [on for on in answers.values() if on != ["not measured", "not measured"]] == [
            ["from **256** on: 2 × at 16, 0.5 × at 64, 4 × at 256", "not measured"]
        ]

    def test_what_was_never_measured(self):
        text = "; ".join(summary.unmeasured(self.section(linear_attention__16__softmax=1.0)))
        assert "GPU" in text and "scattermoe" in text and "softmax" not in text
        recorded = [report.Section("recorded", "SCAN (cuda)", "cuda", [], [])]
        assert summary.unmeasured(recorded)[0] == summary.unmeasured([])[0]
        step = [report.Section("step", "SCAN (cuda)", "cuda", [], [])]
        assert "GPU" not in "; ".join(summary.unmeasured(step))


class TestReport:
    @staticmethod
    def section(title, cell, **more):
        return report.Section("decoding", title, "cpu", [("a", "{}"), ("b", "{:.1f} [{:.1f}]")], [["x", cell]], **more)

    def test_a_section_takes_the_place_of_its_title(self, tmp_path, capsys):
        for title, cell in (("one", [1.0, 2.0]), ("one more", [2.0, 3.0]), ("one", [3.0, 4.0])):
            report.publish(self.section(title, cell), "command", tmp_path)
        found = report.load(tmp_path)
        assert [(section.title, section.rows) for section in found] == [
            ("one", [["x", [3.0, 4.0]]]),
            ("one more", [["x", [2.0, 3.0]]]),
        ]
        assert "### one\n\n| a | b |\n| --- | ---: |\n| x | 3.0 [4.0] |\n" in (tmp_path / "RESULTS.md").read_text()
        assert capsys.readouterr().out.count("### one\n") == 2

    def test_what_is_stored_is_read_again(self, tmp_path):
        sections = [self.section("one", None, about="…", note="n"), self.section("two", [0.5, 1e-7])]
        report.store(sections, tmp_path)
        again = report.load(tmp_path)
        report.store(again, tmp_path / "again")
        assert [vars(one) | {"columns": None} for one in again] == [vars(one) | {"columns": None} for one in sections]
        for name in ("results.json", "RESULTS.md"):
            assert (tmp_path / name).read_text() == (tmp_path / "again" / name).read_text()
        assert "| x | – |" in (tmp_path / "RESULTS.md").read_text()

    def test_small_print(self):
        """Once for sections that share it."""
        sections = [self.section(str(place), [1.0, 1.0], command=command) for place, command in enumerate("AAB")]
        page = report.page(sections)
        assert page.count("<sub>") == 2 and page.index("### 1") < page.index("<sub>`A`") < page.index("### 2")

    def test_cells_of_operators(self):
        def row(size, name, status="timed", median=None, spread=0.0, **more):
            low = None if median is None else median - spread / 2
            high = None if median is None else median + spread / 2
            return measure.Row("o", size, name, True, status, low=low, median=median, high=high, **more)

        rows = [
            row(3, "sure", median=1.0, spread=0.05, error=1e-7, peak=1),
            row(3, "unsure", median=1234.5, spread=400.0, error=3e-6, peak=2_000_000),
            row(9, "sure", "wrong", reason="value is off", error=0.5),
            row(9, "unsure", median=0.5, error=1e-6, peak=3_000_000, floor=0.1),
            row(9, "elsewhere", "skipped"),
        ]
        section = report.operator_section(rows, "o (cpu)", "cpu", "length", "")
        assert report.as_markdown(section) == (
            "### o (cpu)\n\n"
            "| ms by length | 3 | 9 | MB | error |\n"
            "| --- | ---: | ---: | ---: | ---: |\n"
            "| floor | – | 0.1 |  |  |\n"
            "| sure | 1 | wrong | – | 5e-01 |\n"
            "| unsure | ~1,234 | 0.5 | 3 | 3e-06 |\n\n"
            "sure at 9 is wrong: value is off"
        )

    def test_the_committed_page_is_what_the_measurements_give(self):
        sections = report.load(report.FOLDER)
        assert (report.FOLDER / "RESULTS.md").read_text("utf-8") == report.page(sections)
        figures = {section.figure for section in sections if section.figure}
        assert figures == {path.name for path in (report.FOLDER / "figures").iterdir()}

    def test_the_commands_of_the_committed_page_are_those_of_today(self):
        for section in report.load(report.FOLDER):
            words = section.command.split()
            assert words[:2] == ["python", "-m"] and importlib.util.find_spec(words[2]), section.command

    def test_a_command_has_no_path_of_this_machine(self):
        line = ["--reference", "/a b/c", "--rounds", "3", "--out=/d/e", "--arguments=--lr 1e-3"]
        expected = "python -m benchmarks.step --reference PATH --rounds 3 --out=PATH '--arguments=--lr 1e-3'"
        assert report.command("benchmarks.step", line) == expected

    def test_machine(self):
        assert re.search(r"cores of .+, Python 3\..+, torch ", report.where("cpu"))


class TestPeers:
    def test_left_out_with_a_reason(self, monkeypatch):
        broken = peers.Peer("broken", ("x",), lambda: None, module="no_such_module", package="broken")
        gpu = peers.Peer("gpu", ("x",), lambda: None, cuda_only=True)
        monkeypatch.setattr(peers, "PEERS", [*peers.PEERS, broken, gpu])
        found, remarks = peers.find("cpu", installed=True)
        assert "no_such_module" in remarks["broken"] and "GPU" in remarks["gpu"]
        assert not {"broken", "gpu"} & {one.name for one in found}
        assert "--peers" in peers.find("cpu", installed=False)[1]["broken"]
        assert "torch" in remarks["torch grouped_mm"]

    def test_an_adapter_that_fails_is_skipped(self):
        def adapter():
            raise ImportError("half installed")

        (contender,) = peers.contenders("x", [peers.Peer("half", ("x",), adapter)])
        assert contender.skip == "ImportError: half installed" and not contender.ours

    def test_softmax(self):
        q, k, v = torch.randn(3, 2, 2, 7, 4).double()
        for causal in (False, True):
            expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            torch.testing.assert_close(peers.softmax_attention(q, k, v, causal), expected)

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    @pytest.mark.parametrize("causal", [False, True])
    def test_flex_attention(self, causal, monkeypatch):
        """Its equations on a CPU, where torch has a backward pass but does not let anyone call it."""
        monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None, raising=False)
        inputs = {name: torch.randn(2, 3, 9, 4).double() for name in "qkv"} | {"p": torch.randn(3, 17, 4).double()}
        with monkeypatch.context() as uncompiled:
            uncompiled.setattr(torch, "compile", lambda function: function)
            flex = peers.flex_relative_attention(causal)
        naive = partial(operators.attend, causal=causal, implementation="naive")
        results = (with_gradients(lambda of=of, **x: {"out": of(**x)}, inputs) for of in (flex, naive))
        assert_all_close(*results, 1e-11, 1e-12)
