"""One image, and the answers of a model to questions on it (Sort-of-CLEVR).

Every question on the image is printed with the model's answer, and the right one where that is another. OUT.json has
them all, OUT.npz the image. The picture, OUT.png, has the image and three questions of each group: one of each type,
where there is one.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from data_prep.sort_of_clevr.questions import GROUPS, QUESTIONS
from fairseq_sg.analysis import plots
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.options import add_subset
from fairseq_sg.analysis.result import Result
from fairseq_sg.analysis.sentence import read_questions
from fairseq_sg.errors import UsageError
from fairseq_sg.parsers import index

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The kinds of models that are accepted.
KINDS = ("words", "images")
SHOWN = 3  # questions of a group in the picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scene", type=index, default=0, metavar="S", help="number of the image, from 0 on (default: 0)"
    )
    add_subset(parser, "test")


def measure(loaded: Loaded, args: argparse.Namespace) -> Result:
    if not loaded.reads_images:
        raise UsageError(f"{loaded.arch} reads words: this analysis needs a model of images and questions")
    scenes = len(loaded.subset(args.subset)) // QUESTIONS
    if args.scene >= scenes:
        raise UsageError(f"--scene is {args.scene}: {args.subset} has the images 0 to {scenes - 1:,}")
    numbers = range(QUESTIONS * args.scene, QUESTIONS * (args.scene + 1))
    questions = read_questions(loaded, args.subset, numbers)
    result = Result({"image": questions[0].image}, {"subset": args.subset, "scene": args.scene})
    result.facts["questions"] = [
        {"index": q.index, "question": q.words_asked, "output": q.predicted[0], "answer": q.answer} for q in questions
    ]
    right = sum(q.predicted == [q.answer] for q in questions)
    result.summary = [f"image {args.scene} of {args.subset}: {right} of {QUESTIONS} answers are right"]
    result.summary += [f"  {q.index}  {q.words_asked}: {q.told}" for q in questions]
    return result


def choose(questions: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group -> ``SHOWN`` of its questions, the first of each type before further ones."""
    chosen = {}
    for group, kinds in GROUPS.items():
        of_types = [[q for q in questions if q["question"].split()[0] == kind] for kind in kinds]
        order = [of_type[turn] for turn in range(SHOWN) for of_type in of_types if turn < len(of_type)]
        chosen[group] = order[:SHOWN]
    return chosen


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    lines = {
        group: [(q["question"].partition("_")[2].replace("_", " "), q["output"], q["answer"]) for q in questions]
        for group, questions in choose(result.facts["questions"]).items()
    }
    return {"": plots.questions(result.arrays["image"], lines)}
