"""Tables of what was measured on GPUs."""

from __future__ import annotations

from benchmarks import kernels
from fairseq_sg.ops import tuning
from fairseq_sg.ops.tuning import Point, Tuning


def measured() -> Tuning:
    key = dict(zip(tuning.KEY, ("NVIDIA X100", "550.1", "2.13.0", "3.6.0", "0123456789abcdef"), strict=True))
    ms = {"chunked": [1.0, 1.0, 1.1], "triton": [0.4, 0.5, 0.6]}
    points = [
        Point("linear_attention", "float32", (1024, 64, 16), ms),
        Point("linear_attention", "bfloat16", (16, 16, 16), ms | {"triton": [1.0, 1.5, 2.0]}),
    ]
    verdicts = {"linear_attention": {"chunked": "", "triton": ""}, "cvmm": {"triton": "it crashed: SIGABRT"}}
    return Tuning(key, verdicts, points)


def test_the_page_is_up_to_date():
    """``python -m benchmarks.kernels`` writes it."""
    assert (kernels.FOLDER / "README.md").read_text(encoding="utf-8") == kernels.page()


def test_tables(tmp_path, capsys):
    assert kernels.NONE in kernels.page(tmp_path)
    tuning.write(measured(), tmp_path / "x100.json")
    text = kernels.page(tmp_path)
    assert kernels.NONE not in text and "## NVIDIA X100\n\n<sub>driver 550.1, torch 2.13.0, triton 3.6.0" in text
    assert "- `cvmm`, `triton` fails: it crashed: SIGABRT" in text
    assert "| dtype | heads | length | width | chunked | triton | runs |" in text
    assert "| float32 | 1,024 | 64 | 16 | 1 | 0.5 | `triton` |" in text
    assert "| bfloat16 | 16 | 16 | 16 | 1 | 1.5 | `chunked` |" in text
    assert kernels.main([str(tmp_path / "x100.json")]) == 0
    assert capsys.readouterr().out.startswith("## NVIDIA X100")


def test_a_damaged_file_is_named(tmp_path, capsys):
    (tmp_path / "y.json").write_text("{")
    assert kernels.main([str(tmp_path / "y.json")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'y.json'}: it is damaged\n"
