"""BLEU against plain text: order, joining of subwords, the score itself, and outputs that are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

import sacrebleu

from fairseq_sg.errors import UsageError
from fairseq_sg.scoring.plain_bleu import hypotheses_in_order, main, read_output, score

REFERENCES = [
    "the cat sat on the mat .",
    "it 's <unk> a long & winding road home",
    "Öl , and 3 @-@ 4 more words",
    "yes",
]
HYPOTHESES = ["the cat sat on a mat .", "it 's a long & winding road home", "Öl , and 3 @-@ 4 more words", ""]


def split(text: str) -> str:
    """Subwords of two letters."""
    marked = "".join(f"▁{word}" for word in text.split())
    return " ".join(marked[i : i + 2] for i in range(0, len(marked), 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "gen.plain.tgt").write_text("\n".join(REFERENCES) + "\n", "utf-8")
    return tmp_path


@pytest.fixture
def generated(tmp_path: Path) -> Callable[..., Path]:
    """Writes what fairseq-generate does, in its order of lengths, by `split`, without the lines in `without`."""

    def write(split: Callable[[str], str] = split, without: tuple[str, ...] = (), extra: str = "") -> Path:
        lines = ["2026-01-01 | INFO | fairseq_cli.generate | {'data': 'H-0\t1'}"]
        for index in random.Random(0).sample(range(4), 4):
            target, hypothesis = split(REFERENCES[index]), split(HYPOTHESES[index])
            lines += [f"S-{index}\tsource", f"T-{index}\t{target}", f"H-{index}\t-0.5\t{hypothesis}"]
            lines += [f"D-{index}\t-0.5\t{hypothesis}", f"P-{index}\t-0.1 -0.2"]
        lines = [line for line in lines if line.split("\t")[0] not in without]
        path = tmp_path / "generate-gen.txt"
        path.write_text("\n".join([*lines, extra, "Generate gen with beam=5: BLEU4 = 0.00"]) + "\n", "utf-8")
        return path

    return write


@pytest.mark.parametrize("tokenize", ["13a", "none"])
@pytest.mark.parametrize("joined", [False, True], ids=["subwords", "joined"])
def test_scores_are_those_of_sacrebleu(folder, generated, joined: bool, tokenize: str, capsys) -> None:
    output = generated(str) if joined else generated()
    assert main([str(folder), "gen", str(output), "--tokenize", tokenize]) == 0
    bleu, chrf = capsys.readouterr().out.splitlines()
    expected = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], tokenize=tokenize).score
    assert bleu.startswith("BLEU|nrefs:1|case:mixed") and f"|tok:{tokenize}|" in bleu and f"= {expected:.2f} " in bleu
    assert f"= {sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score:.2f}" in chrf and chrf.startswith("chrF2|")
    assert 30 < expected < 100


def test_text_that_was_tokenized_gives_a_warning_without_none_alone(caplog) -> None:
    lines = ["a cat sat on a mat ."] * 100
    assert score(lines, lines, "none")[0].startswith("BLEU|nrefs:1|case:mixed|eff:no|tok:none|smooth:exp|version:")
    assert not caplog.records
    score(lines, lines, "13a")
    assert "forgot to detokenize" in caplog.text


def test_order_and_text(generated) -> None:
    assert hypotheses_in_order(generated(), REFERENCES) == HYPOTHESES
    targets, hypotheses = read_output(generated())
    assert list(hypotheses) != sorted(hypotheses) and list(targets) == list(hypotheses)


def test_output_without_targets(generated) -> None:
    """As fairseq-interactive prints it."""
    assert hypotheses_in_order(generated(without=tuple(f"T-{i}" for i in range(4))), REFERENCES) == HYPOTHESES


@pytest.mark.parametrize(
    ("without", "extra", "message"),
    [
        (
            ("H-1", "H-3"),
            "",
            "2 of 4 sentences have no hypothesis, the first is H-1: .* --required-batch-size-multiple 1 ",
        ),
        ((), "H-2\t-0.7\t▁x", "H-2 occurs twice: generate one subset, with --nbest 1"),
        ((), "T-2\t▁x", "T-2 occurs twice"),
        ((), "H-4\t-0.7\t▁x", "H-4, but there are 4 references: is it another subset?"),
        (("T-2",), "T-2\t▁x", "T-2 is not line 3 of the references: is it another subset?"),
        (("H-2",), "H-2\t▁x", "a hypothesis without a score"),
    ],
)
def test_wrong_outputs(folder, generated, without: tuple[str, ...], extra: str, message: str, capsys) -> None:
    path = generated(without=without, extra=extra)
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        hypotheses_in_order(path, REFERENCES)
    assert main([str(folder), "gen", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"error: {path}:") and captured.err.count("\n") == 1


def test_files_that_are_not_there(folder, generated, capsys) -> None:
    assert main([str(folder), "test", str(generated())]) == 2
    assert capsys.readouterr().err == f"error: {folder}/raw/test.plain.tgt: No such file or directory\n"
    (folder / "binary").write_bytes(b"\xff")
    assert main([str(folder), "gen", str(folder / "binary")]) == 2
    assert capsys.readouterr().err == f"error: {folder}/binary: not UTF-8\n"
