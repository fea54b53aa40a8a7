"""Sort-of-CLEVR (Santoro et al. 2017, as Mittal et al. 2022 have it): questions on images of six coloured objects.

    unary_shape green           ->  circle
    binary_count red            ->  3
    ternary_obtuse blue gray    ->  3

These are about the first image of test. An image has 75 × 75 pixels and 30 questions: 10 on one object (unary), 10 on
one object and its relation to others (binary), and 10 on two objects (ternary). The ten answers are yes, no, rectangle,
circle, and the numbers 0 to 5.

The defaults repeat the published generator byte for byte, for any --seed; its own is 1. It has quirks:

    --nearest     published: an object is nearest to itself if all others are farther than 31.6 pixels
                  correct: the nearest other object
    --line        published: up to 12 pixels above or below the line through both objects, without ends
                  perpendicular: up to 12 pixels from that line
                  segment: up to 12 pixels from the segment between both objects
    --obtuse      published: angles in floating point, so that rounding decides on right angles
                  exact: whole numbers; a right angle counts, three centres on a line do not
    --placement   free: as published; objects may touch or overlap
                  grid: an object in the middle of each of six of the 5 × 5 patches; our own small set

SUBSET.images.npy has the images (S, 75, 75, 3), RGB; SUBSET.questions.npy (S, 30, 18) and SUBSET.answers.npy (S, 30)
have the questions and the classes of their answers, all uint8. SUBSET.scenes.npy (S, 6, 3) has column, row and whether
it is a square of every object, int16.

Source: generated; Mittal et al. 2022 and github.com/sarthmit/Compositional-Attention, with its flag `ood` off.
"""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.arrays import ArrayMaterial, Arrays
from data_prep.dataset import DataError, Dataset, Json, Options, Sources, option, shell_word, whole_number
from data_prep.draws import seed_option
from data_prep.sort_of_clevr.questions import (
    ANSWERS,
    GROUPS,
    LINES,
    OBTUSE,
    OF_A_GROUP,
    QUESTIONS,
    TYPES,
    Rules,
    answer,
    draw_questions,
    encode,
    types_of,
)
from data_prep.sort_of_clevr.scenes import PLACEMENTS, Stream, draw_scene, paint

#: Raised when equal requests give other arrays.
VERSION = 1
#: The order of the draws.
SUBSETS = ("test", "valid", "train")
PUBLISHED_SEED, PUBLISHED_SCENES, PUBLISHED_TEST_SCENES = 1, 9_800, 200
#: The first 16 digits of the SHA-256 of the arrays of the published generator with its seed: images, then questions
#: and answers of each group.
PUBLISHED_HASHES = {
    "test": (
        "fcda665166a53562", "c73d4cbdc6ad1c59", "d6e2bac6613b7320", "ca2483b19b4682d1", "e98f22fad92b9f62",
        "80ad4c7911ad75b5", "e0a08840e80a42d0",
    ),
    "valid": (
        "3f7125775099b22e", "37b69860d544acd3", "631cab42a7cee993", "c76883379471e994", "697f85934675bc32",
        "20d92e183d0284cf", "d9003addeef8ef30",
    ),
    "train": (
        "054d0df75a2ca364", "3ef53b8fd71bc80b", "eac799e2aa4386a8", "9582dda0eaf1adfe", "91f6876d21de45c8",
        "a455143a33d10b3c", "a42f56cb773a31c6",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class SortOfClevrOptions(Options):
    seed: int = seed_option(PUBLISHED_SEED, "all draws")
    scenes: int = option(
        PUBLISHED_SCENES, "images in train (default: %(default)s, the published number)", type=whole_number(1, 100_000)
    )
    test_scenes: int = option(
        PUBLISHED_TEST_SCENES,
        "images in valid and in test; another number also changes the images of valid and train "
        "(default: %(default)s, the published number)",
        type=whole_number(1, 100_000),
    )
    nearest: str = option("published", "rule of binary_nearest", choices=("published", "correct"))
    line: str = option("published", "rule of ternary_line", choices=tuple(LINES))
    obtuse: str = option("published", "rule of ternary_obtuse", choices=tuple(OBTUSE))
    placement: str = option("free", "where objects are", choices=tuple(PLACEMENTS))

    @property
    def rules(self) -> Rules:
        return Rules(self.nearest, self.line, self.obtuse)


class SortOfClevr(Dataset):
    """``python -m data_prep sort_of_clevr``."""

    name, title, source = "sort_of_clevr", "Sort-of-CLEVR", "its rule (Mittal et al. 2022)"
    licence, size = "none (generated)", "generated"
    arch = "sg_encoder_sort_of_clevr"
    splits = tuple(PLACEMENTS)
    options = SortOfClevrOptions
    binarizes = False

    def build(self, options: SortOfClevrOptions, sources: Sources) -> Scenes:
        stream = Stream(options.seed)
        sizes = {"train": options.scenes}
        return Scenes(options, {name: make(stream, sizes.get(name, options.test_scenes), options) for name in SUBSETS})


def make(stream: Stream, scenes: int, options: SortOfClevrOptions) -> dict[str, np.ndarray]:
    """The arrays of the next subset of a stream."""
    found: dict[str, list] = {"images": [], "questions": [], "answers": [], "scenes": []}
    for _ in range(scenes):
        scene = draw_scene(stream, options.placement)
        questions = draw_questions(stream)
        found["images"].append(paint(scene))
        found["questions"].append([encode(question) for question in questions])
        found["answers"].append([answer(question, scene, options.rules) for question in questions])
        found["scenes"].append(scene)
    return {name: np.array(rows, np.int16 if name == "scenes" else np.uint8) for name, rows in found.items()}


class Scenes(ArrayMaterial):
    """The arrays of all subsets."""

    origin = {"generator": "data_prep.sort_of_clevr", "version": VERSION}

    def __init__(self, options: SortOfClevrOptions, arrays: Arrays) -> None:
        kinds = {name: types_of(arrays[name]["questions"]).ravel() for name in arrays}  # each (30 S,)
        types = {name: [TYPES[kind] for kind in kinds[name]] for name in arrays if name != "train"}
        super().__init__({name: arrays[name] for name in ("train", "valid", "test")}, types, GROUPS)
        self.options, self.kinds = options, kinds
        #: The subsets that the published generator makes too.
        self.published = [name for name in SUBSETS if is_published(name, options)]
        self.rule = (
            f"six objects, placement {options.placement}; nearest {options.nearest}, line {options.line}, obtuse "
            f"{options.obtuse}"
        )
        same = f"published: {', '.join(self.published)}" if self.published else "drawn here"
        self.membership = f"{same} (the published generator with seed {options.seed})" if self.published else same

    def check(self) -> None:
        """Raises DataError where a subset of the published stream differs from it.

        A question on an angle would, on a machine that rounds another arccos.
        """
        super().check()
        for subset in self.published:
            wrong = hashes(self.arrays[subset]) != PUBLISHED_HASHES[subset]
            if wrong:
                raise DataError(
                    f"subset {subset} differs from the published one: this machine or this numpy computes other "
                    "numbers. Use --obtuse exact, whose answers do not depend on rounding, or another machine"
                )

    def describe(self) -> Json:
        return super().describe() | {"answers": list(ANSWERS)}

    def describe_subset(self, subset: str) -> Json:
        """Sizes, and in % the accuracy of the most frequent answer to each type of question, by group."""
        answers, kinds = self.arrays[subset]["answers"].ravel().astype(int), self.kinds[subset]
        most = [np.bincount(answers[kinds == kind], minlength=1).max() for kind in range(len(TYPES))]
        size = len(self.arrays[subset]["images"])
        guess = {
            group: round(100 * int(sum(most[TYPES.index(kind)] for kind in types)) / (OF_A_GROUP * size), 2)
            for group, types in GROUPS.items()
        }
        return {"size": QUESTIONS * size, "scenes": size, "most_frequent_answer": guess}

    def summary(self, description: Json) -> list[str]:
        subsets = description["subsets"]
        lines = [f"scenes: {self.membership}", f"{'subset':8}{'scenes':>8}{'questions':>11}"]
        lines += [f"{name:8}{entry['scenes']:>8,}{entry['size']:>11,}" for name, entry in subsets.items()]
        guess = ", ".join(f"{group} {value:.2f} %" for group, value in subsets["test"]["most_frequent_answer"].items())
        return [*lines, f"the most frequent answer to each type is right on test in: {guess}"]

    def training_commands(self, dataset: Dataset, out: Path) -> list[str]:
        """The published training: 100 epochs, each followed by an evaluation."""
        folder = shlex.quote(str(Path("checkpoints") / out.resolve().name))
        return [
            f"fairseq-train {shell_word(out)} --user-dir fairseq_sg --task sg_visual_qa --arch {dataset.arch} "
            f"--criterion classification --valid-subset valid,test --batch-size-valid 500 "
            f"--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --optimizer torch_adam --lr 1e-4 "
            f"--batch-size 64 --required-batch-size-multiple 1 --max-epoch 100 --no-epoch-checkpoints "
            f"--save-dir {folder}"
        ]


def is_published(subset: str, options: SortOfClevrOptions) -> bool:
    """Whether the published generator makes the subset too: test comes first in its stream, train last."""
    given = (options.seed, options.placement, options.rules)
    sizes = {"test": options.test_scenes, "valid": options.test_scenes, "train": options.scenes}
    published = {"test": PUBLISHED_TEST_SCENES, "valid": PUBLISHED_TEST_SCENES, "train": PUBLISHED_SCENES}
    drawn = SUBSETS[: SUBSETS.index(subset) + 1]
    return given == (PUBLISHED_SEED, "free", Rules()) and all(sizes[name] == published[name] for name in drawn)


def hashes(arrays: dict[str, np.ndarray]) -> tuple[str, ...]:
    """The first 16 digits of the SHA-256 of images, and of questions and answers of each group."""
    groups = [slice(first, first + OF_A_GROUP) for first in range(0, QUESTIONS, OF_A_GROUP)]
    parts = [arrays["images"]] + [arrays[name][:, group] for group in groups for name in ("questions", "answers")]
    return tuple(hashlib.sha256(np.ascontiguousarray(part).tobytes()).hexdigest()[:16] for part in parts)
