"""BLEU of translations against plain text: ``python -m fairseq_sg.scoring.plain_bleu FOLDER SUBSET OUTPUT``.

FOLDER is made by ``python -m data_prep parallel`` (or ``iwslt_en_vi``). OUTPUT is the file that ``fairseq-generate
--results-path`` wrote for SUBSET, or its printed output. The hypotheses (lines ``H-…`) are put into the order of the
text and their subwords joined to words. sacreBLEU scores them against raw/SUBSET.plain.tgt, so scores do not depend on
the subwords. BLEU and chrF are printed with sacreBLEU's signatures, which make them comparable (Post 2018).

Use ``--tokenize none`` for text that was tokenized beforehand, such as IWSLT'15 en-vi: it is scored unchanged, as in
multi-bleu.perl. The default is sacreBLEU's own tokenization, 13a.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_sg.errors import UsageError
from fairseq_sg.parsers import Command

SPACE = "\u2581"  # SentencePiece's sign for a space
TOKENIZERS = ("13a", "none", "char", "intl", "zh")
Lines = dict[int, str]


def read_lines(path: Path) -> list[str]:
    """The lines of a text file; only newlines end them. Raises UsageError for an unreadable file."""
    try:
        return path.read_text("utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8") from None


def read_output(path: Path) -> tuple[Lines, Lines]:
    """The targets (``T-``) and the hypotheses (``H-``) of fairseq-generate by line number, from 0;
    other lines are skipped.

    Raises UsageError with the line for a repeated hypothesis or one of another form.
    """
    targets: Lines = {}
    hypotheses: Lines = {}
    for number, line in enumerate(read_lines(path), start=1):
        found = re.match(r"([TH])-([0-9]+)\t", line)
        if found is None:
            continue
        kind, index, rest = found[1], int(found[2]), line[found.end() :]
        if kind == "H":
            _, tab, rest = rest.partition("\t")
            if not tab:
                raise UsageError(
                    f"{path}:{number}: a hypothesis without a score: is this the output of fairseq-generate?"
                )
        if index in (known := targets if kind == "T" else hypotheses):
            raise UsageError(f"{path}:{number}: {kind}-{index} occurs twice: generate one subset, with --nbest 1")
        known[index] = rest
    return targets, hypotheses


def to_text(lines: Lines) -> Lines:
    """Lines of subwords as text, words between single spaces."""
    return {index: " ".join(line.replace(" ", "").replace(SPACE, " ").split()) for index, line in lines.items()}


def hypotheses_in_order(output: Path, references: Sequence[str]) -> list[str]:
    """The hypotheses as text, one for every reference.

    Raises UsageError for a missing or extra hypothesis, or if the targets in the output are not the references.
    """
    targets, hypotheses = read_output(output)
    missing = [index for index in range(len(references)) if index not in hypotheses]
    if missing:
        raise UsageError(
            f"{output}: {len(missing):,} of {len(references):,} sentences have no hypothesis, the first is "
            f"H-{missing[0]}: generate the complete subset, with --required-batch-size-multiple 1 (without it, "
            "fairseq's own tasks lose the last few), and without --quiet or --skip-invalid-size-inputs-valid-test"
        )
    foreign = next((index for index in hypotheses if index >= len(references)), None)
    if foreign is not None:
        raise UsageError(f"{output}: H-{foreign}, but there are {len(references):,} references: is it another subset?")
    # No sign for a space: --post-process sentencepiece has already joined the subwords.
    if any(SPACE in line for lines in (targets, hypotheses) for line in lines.values()):
        targets, hypotheses = to_text(targets), to_text(hypotheses)
    for index, text in targets.items():
        if index >= len(references) or text != references[index]:
            raise UsageError(f"{output}: T-{index} is not line {index + 1} of the references: is it another subset?")
    return [hypotheses[index] for index in range(len(references))]


def metrics(tokenize: str) -> dict[str, Any]:
    """sacreBLEU's BLEU and chrF2."""
    from sacrebleu.metrics import BLEU, CHRF

    # Without force, sacreBLEU warns of text that is tokenized: that is what ``none`` is for.
    return {"BLEU": BLEU(tokenize=tokenize, force=tokenize == "none"), "chrF2": CHRF()}


def score(hypotheses: Sequence[str], references: Sequence[str], tokenize: str) -> list[str]:
    """BLEU and chrF of a corpus in sacreBLEU's format, each with its signature."""
    found = []
    for metric in metrics(tokenize).values():
        result = metric.corpus_score(list(hypotheses), [list(references)])
        found.append(result.format(width=2, signature=str(metric.get_signature())))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the scores; returns the exit code: 0, or 2 for an error that the user can fix."""
    parser = Command(
        prog="python -m fairseq_sg.scoring.plain_bleu",
        description=__doc__,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("subset", metavar="SUBSET")
    parser.add_argument("output", type=Path, metavar="OUTPUT")
    parser.add_argument(
        "--tokenize", choices=TOKENIZERS, default="13a", help="tokenization by sacreBLEU (default: 13a)"
    )
    args = parser.parse_args(arguments)
    try:
        references = read_lines(args.folder / "raw" / f"{args.subset}.plain.tgt")
        print(*score(hypotheses_in_order(args.output, references), references, args.tokenize), sep="\n")
    except UsageError as error:
        print("error:", error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
