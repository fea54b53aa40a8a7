"""Benchmarks: their output, and that wrong results are not timed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import __main__ as run
from benchmarks import measure, operators, peers, report
from fairseq_sg.ops import linear_attention

MACHINE = measure.Machine(((1 << 18, 2e10), (1 << 22, 1e10)), 1e11)


@pytest.fixture(autouse=True)
def threads():
    """Restores the number of threads, which the benchmarks set for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The files and the return value of one quick run."""
    out = tmp_path_factory.mktemp("benchmarks") / "all"
    code = run.main(["--suite", "ops", "--quick", "--rounds", "2", "--device", "cpu", "--out", str(out)])
    return out, code


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


class TestRun:
    def test_everything_is_right(self, quick):
        assert quick[1] == 0

    def test_json(self, quick):
        out, _ = quick
        found = json.loads(out.with_name("all.json").read_text())
        assert {"command", "where", "device", "dtype", "rounds", "suites"} <= found.keys()
        assert (found["device"], found["rounds"], list(found["suites"])) == ("cpu", 2, ["ops"])
        ops = found["suites"]["ops"]
        assert {"machine", "setting", "peers", "rows", "targets", "title", "text"} <= ops.keys()
        assert all(rate > 0 for _, rate in ops["machine"]["bandwidths"]) and ops["machine"]["flops"] > 0
        for operator in operators.OPERATORS:
            rows = [row for row in ops["rows"] if row["operator"] == operator.name]
            assert {row["size"] for row in rows} == set(operator.quick)
            assert any(row["status"] == "timed" and row["ours"] for row in rows)
        for row in ops["rows"]:
            assert row["floor"] > 0 and row["floor_of"] in ("bytes", "FLOPs")
            if row["status"] == "timed":
                assert len(row["times"]) == 2 and row["low"] <= row["median"] <= row["high"]
                assert row["peak"] > 0 and 0 <= row["error"] <= measure.ALLOWED[torch.float32]
            else:
                assert row["status"] == "skipped" and row["reason"] and row["median"] is None
        assert all({"text", "bound", "least", "ratio", "met"} == target.keys() for target in ops["targets"])

    def test_every_implementation_has_a_row(self, quick):
        rows = json.loads(quick[0].with_name("all.json").read_text())["suites"]["ops"]["rows"]
        found = {(row["operator"], row["contender"]) for row in rows}
        for name, table in (
            ("causal_linear_attention", operators.LINEAR),
            ("linear_attention", operators.LINEAR),
            ("orthogonality_loss", operators.ORTHOGONALITY),
            ("geometric_attention", operators.GEOMETRIC),
            ("relative_logits", operators.RELATIVE_LOGITS),
            ("relative_attention", operators.RELATIVE_ATTENTION),
            ("cvmm", operators.CVMM),
        ):
            assert {(name, implementation) for implementation in ("auto", *table)} <= found
        assert {("cvmm", "torch grouped_mm"), ("geometric_attention", "sums of logarithms")} <= found

    def test_markdown(self, quick):
        text = quick[0].with_name("all.md").read_text()
        tables = report.tables(text)
        assert len(tables) == len(operators.OPERATORS) + 2  # and those of peers and targets
        assert all(len(row) == len(table["header"]) for table in tables for row in table["rows"])
        assert text.count("floor (") == sum(len(operator.quick) for operator in operators.OPERATORS)
        for one in peers.PEERS:
            assert any(row[0] == one.name for table in tables for row in table["rows"]), one.name

    def test_plots(self, quick):
        pytest.importorskip("matplotlib")
        for operator in operators.OPERATORS:
            path = quick[0].with_name(f"all-{operator.name}.png")
            assert path.read_bytes().startswith(b"\x89PNG") and path.name in quick[0].with_name("all.md").read_text()

    @pytest.mark.parametrize(
        "line,word",
        [
            (["--rounds", "0"], "--rounds"),
            (["--suite", "ops", "--reference", "x"], "--reference"),
            (["--suite", "all"], "--suite"),
            (["--suite", "step", "--only", "cvmm"], "--only"),
        ],
    )
    def test_refuses(self, line, word, capsys):
        with pytest.raises(SystemExit):
            run.parse([*line, "--device", "cpu"])
        assert word in capsys.readouterr().err

    def test_some_operators(self, capsys):
        assert run.main("--suite ops --quick --rounds 1 --device cpu --only orthogonality_loss".split()) == 0
        printed = capsys.readouterr().out
        assert "### orthogonality_loss" in printed and "### cvmm" not in printed

    def test_refuses_an_unknown_operator(self):
        with pytest.raises(SystemExit, match="--only cvm: choose from .*cvmm"):
            run.main(["--suite", "ops", "--only", "cvm", "--device", "cpu"])

    @pytest.mark.parametrize("status", ["wrong", "failed"])
    def test_a_wrong_implementation_is_an_error(self, status, monkeypatch, capsys):
        row = {"operator": "o", "contender": "c", "size": 3, "reason": "because", "status": status, "ours": True}
        monkeypatch.setitem(run.RUN, "ops", lambda args: {"rows": [row]})
        assert run.main(["--suite", "ops", "--device", "cpu"]) == 1
        assert f"{status}: o c at 3: because" in capsys.readouterr().err
        monkeypatch.setitem(run.RUN, "ops", lambda args: {"rows": [row | {"ours": False}]})
        assert run.main(["--suite", "ops", "--device", "cpu"]) == 0

    def test_other_suites(self, monkeypatch, tmp_path):
        """Their sections are collected, and their targets computed from their files."""
        seen = []

        class Module:
            def __init__(self, name, written):
                self.name, self.written = name, written

            def main(self, argv):
                seen.append((self.name, *argv))
                report.publish(self.name, f"text\n\n{report.table(('a', 'b'), [('1', '2')])}", Path(argv[-1]))
                if "--json" in argv:
                    Path(argv[argv.index("--json") + 1]).write_text(json.dumps(self.written))

        result = [("random", "ours", 0.4), ("random", "reference", 0.8), ("bucketed", "ours", 0.4)]
        result = [dict(zip(("batches", "implementation", "median"), one, strict=True)) for one in result]
        modules = {
            "step": Module("step", {"results": result}),
            "orthogonality_share": Module("share", [{"length": 10, "share": 0.02}, {"length": 32, "share": 0.04}]),
            "attention": Module("attention", None),
            "preparation": Module("preparation", None),
        }
        monkeypatch.setattr(run.importlib, "import_module", lambda name: modules[name.removeprefix("benchmarks.")])
        results = tmp_path / "RESULTS.md"
        line = ["--suite", "step", "decode", "data", "--reference", "THERE", "--rounds", "3", "--device", "cpu"]
        assert run.main([*line, "--results", str(results), "--out", str(tmp_path / "new" / "x")]) == 0
        assert [one[0] for one in seen] == ["step", "share", "attention", "attention", "preparation"]
        assert "THERE" in seen[0] and all("3" in one for one in seen[:4])
        found = json.loads((tmp_path / "new" / "x.json").read_text())["suites"]
        assert [target["met"] for target in found["step"]["targets"]] == [True, False, True, False]
        assert found["step"]["targets"][0]["ratio"] == pytest.approx(2.0)
        assert found["data"]["sections"][0]["tables"] == [{"header": ["a", "b"], "rows": [["1", "2"]]}]
        for file in (results, tmp_path / "new" / "x.md"):
            assert all(f"## {title}\n" in file.read_text() for title in ("step", "share", "attention", "preparation"))


class TestMeasure:
    def test_right(self, monkeypatch):
        rows, timed = rows_of(small_case(partial(linear_attention, implementation="naive")), monkeypatch)
        assert timed == ["chunked", "other"]
        assert (rows["other"].low, rows["other"].median, rows["other"].high) == (1.5, 2.0, 2.5)
        assert rows["other"].times == [3.0, 1.0, 2.0]

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
        assert measure.kept_activations(layer, lambda: layer(torch.ones(5, 8)).exp()) == 4 * (5 * 8 + 5 * 4)

    def test_floor(self):
        # Working sets that fit into the smaller copy or not; and more FLOPs than bytes.
        assert MACHINE.floor(1 << 19, 20_000, 0.0) == (pytest.approx(1e-3), "bytes")
        assert MACHINE.floor(1 << 23, 20_000, 0.0) == (pytest.approx(2e-3), "bytes")
        assert MACHINE.floor(1, 20_000, 0.0) == (pytest.approx(1e-3), "bytes")
        assert MACHINE.floor(1 << 23, 20_000, 1e9) == (pytest.approx(10.0), "FLOPs")

    def test_interleaved(self, monkeypatch):
        order = []
        monkeypatch.setattr(measure, "milliseconds", lambda run, calls, device: run() or (99.0 if calls == 1 else 5.0))
        times = measure.interleaved({name: partial(order.append, name) for name in "abc"}, 20, "cpu")
        assert order[: 3 * measure.WARM_UP] == [name for name in "abc" for _ in range(measure.WARM_UP)]
        rounds = ["".join(order[start : start + 3]) for start in range(3 * measure.WARM_UP, len(order), 3)]
        assert len(rounds) == 20 and {"".join(sorted(one)) for one in rounds} == {"abc"}
        assert len(set(rounds)) > 3  # orders
        assert times == {name: [99.0] * 20 for name in "abc"}

    def test_short_runs_are_repeated(self, monkeypatch):
        seen = []
        monkeypatch.setattr(measure, "milliseconds", lambda run, calls, device: seen.append(calls) or 0.5)
        measure.interleaved({"a": lambda: seen.append("uncounted")}, 2, "cpu")
        assert seen == [1] * measure.WARM_UP + ["uncounted", int(measure.SHORTEST / 0.5)] * 2


class TestTargets:
    @staticmethod
    def rows(**medians):
        found = []
        for name, median in medians.items():
            operator, size, contender = name.split("__")
            names = {"softmax": "softmax: torch SDPA", "logs": "sums of logarithms", "dense": "dense, same parameters"}
            found.append(
                measure.Row(operator, int(size), names.get(contender, contender), True, "timed", median=median)
            )
        return found

    def test_operators(self):
        rows = self.rows(
            causal_linear_attention__64__auto=1.2,
            causal_linear_attention__64__softmax=1.0,
            causal_linear_attention__256__auto=1.0,
            causal_linear_attention__256__softmax=2.0,
            geometric_attention__50__auto=1.0,
            geometric_attention__50__logs=1.9,
            sigma_moe__16__sigma_moe=1.0,
            sigma_moe__16__dense=3.5,
        )
        found = {target.text: target for target in run.operator_targets(rows, "cpu")}
        measured = {text: (target.ratio, target.met) for text, target in found.items() if target.ratio is not None}
        assert list(measured.values()) == [(1.2, False), (2.0, True), (1.9, False), (3.5, True)]
        assert sum(target.met is None for target in found.values()) == len(found) - 4
        table = run.targets_table(list(found.values()))
        assert "| ≤ 1.1 | 1.2 | not met |" in table and "| ≥ 10 | – | not measured |" in table

    def test_gpu(self):
        texts = [target.text for target in run.operator_targets([], "cuda")]
        assert all(any(peer in text for text in texts) for peer in ("flash-linear", "scattermoe", "grouped_mm"))


class TestReport:
    def test_a_section_takes_the_place_of_its_title(self, tmp_path, capsys):
        file = tmp_path / "RESULTS.md"
        for title, text in (("one", "1"), ("one more", "2"), ("one", "3\n\n### part\n\n4")):
            report.publish(title, text, file)
        assert file.read_text() == "# Benchmarks\n\n## one\n\n3\n\n### part\n\n4\n\n## one more\n\n2\n"
        assert capsys.readouterr().out.count("## one\n") == 2

    def test_tables(self):
        text = f"words\n\n{report.table(('a', ''), [('1', ''), ('–', 'x-y')])}\n\n{report.table(('b',), [('2',)])}\n"
        expected = [{"header": ["a", ""], "rows": [["1", ""], ["–", "x-y"]]}, {"header": ["b"], "rows": [["2"]]}]
        assert report.tables(text) == expected


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
