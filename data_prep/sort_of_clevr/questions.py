"""Questions on a scene and their answers. A and B are objects that a question names by colour, C any other object.

    type                bits                                  answer
    unary_shape         A                                     shape of A
    unary_left          A                                     x_A < 37.5?
    unary_up            A                                     y_A < 37.5?
    binary_nearest      A                                     shape of the C nearest to A
    binary_farthest     A                                     shape of the C farthest from A
    binary_count        A                                     number of C of A's shape
    ternary_box         A, B                                  number of C in the closed box whose corners are A and B
    ternary_line        A, B                                  is some C within 12 of the line through A and B?
    ternary_obtuse      A, B                                  number of C with a largest angle of ABC in [90°, 180°)

A question has 18 bits: the colour of A (6) and of B (6), its group (unary, binary, ternary), and its number within the
group. The ten classes of answers are ``ANSWERS``. The first object in the order of colours wins a tie.

``Rules`` says how published answers are computed where the words above say something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from data_prep.sort_of_clevr.scenes import COLOURS, PIXELS, Scene, Stream, Thing

ANSWERS = ("yes", "no", "rectangle", "circle", "0", "1", "2", "3", "4", "5")
GROUPS = {
    "unary": ("unary_shape", "unary_left", "unary_up"),
    "binary": ("binary_nearest", "binary_farthest", "binary_count"),
    "ternary": ("ternary_box", "ternary_line", "ternary_obtuse"),
}
#: Type 3 g + s is subtype s of group g.
TYPES = tuple(kind for kinds in GROUPS.values() for kind in kinds)
SUBTYPES = 3
OF_A_GROUP = 10  # questions of a group on a scene
QUESTIONS = OF_A_GROUP * len(GROUPS)  # on a scene
BITS = 2 * len(COLOURS) + len(GROUPS) + SUBTYPES
NAMED_IN_PAIRS = 5  # ternary questions never name the last colour
BAND = 12  # pixels on either side of a line
TOO_FAR = 999  # the squared distance that published answers have for A itself


class Question(NamedTuple):
    """A type, and the numbers of the colours it names; ``second`` in ternary questions alone."""

    kind: str
    first: int
    second: int | None = None


class Rules(NamedTuple):
    """How three answers are computed; the first choice of each makes the published ones.

    Attributes:
        nearest: ``published``, where A itself has the squared distance 999 and so is nearest to itself if all others
            are farther than 31.6 pixels; ``correct``, where it is not among the candidates.
        line: ``published``, the vertical distance to the line; ``perpendicular``, the distance to the line;
            ``segment``, the distance to the segment from A to B.
        obtuse: ``published``, angles in floating point, so that rounding decides on right angles and on three centres
            on a line; ``exact``, integers.
    """

    nearest: str = "published"
    line: str = "published"
    obtuse: str = "published"


def draw_questions(stream: Stream) -> list[Question]:
    """The 30 questions on a scene: 10 of each group, drawn independently, so that some repeat."""
    python, questions = stream.python, []
    for group in ("unary", "binary"):
        for _ in range(OF_A_GROUP):
            colour = python.randint(0, len(COLOURS) - 1)
            questions.append(Question(GROUPS[group][python.randint(0, SUBTYPES - 1)], colour))
    for _ in range(OF_A_GROUP):
        first, second = stream.numpy.permutation(NAMED_IN_PAIRS)[:2].tolist()
        questions.append(Question(GROUPS["ternary"][python.randint(0, SUBTYPES - 1)], first, second))
    return questions


def encode(question: Question) -> np.ndarray:
    """The bits of a question, uint8 (18,)."""
    group, subtype = divmod(TYPES.index(question.kind), SUBTYPES)
    bits = np.zeros(BITS, np.uint8)
    bits[[question.first, 2 * len(COLOURS) + group, 2 * len(COLOURS) + len(GROUPS) + subtype]] = 1
    if question.second is not None:
        bits[len(COLOURS) + question.second] = 1
    return bits


def types_of(questions: np.ndarray) -> np.ndarray:
    """Questions (…, 18) -> the numbers of their types in ``TYPES``, int64 (…)."""
    start = 2 * len(COLOURS)
    groups, subtypes = questions[..., start : start + len(GROUPS)], questions[..., start + len(GROUPS) :]
    return SUBTYPES * groups.argmax(-1) + subtypes.argmax(-1)


def words_of(bits: np.ndarray) -> str:
    """A question (18,) in words: ``ternary_line red blue``."""
    names = tuple(COLOURS)
    pair = bits[: 2 * len(names)].reshape(2, len(names))
    return " ".join([TYPES[int(types_of(bits))], *(names[int(row.argmax())] for row in pair if row.any())])


def answer(question: Question, scene: Scene, rules: Rules = Rules()) -> int:
    """The class of the answer, a position in ``ANSWERS``."""
    if question.second is None:
        value = ABOUT_ONE[question.kind](scene, question.first, rules)
    else:
        named = (question.first, question.second)
        others = [thing for number, thing in enumerate(scene) if number not in named]
        value = ABOUT_TWO[question.kind](scene[named[0]], scene[named[1]], others, rules)
    return ANSWERS.index(value)


# One object: the answers of unary and binary questions.


def shape(thing: Thing) -> str:
    return "rectangle" if thing.square else "circle"


def yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def squared_distances(scene: Scene, first: int) -> list[int]:
    a = scene[first]
    return [(a.x - c.x) ** 2 + (a.y - c.y) ** 2 for c in scene]


def nearest_shape(scene: Scene, first: int, rules: Rules) -> str:
    distances: list[float] = list(squared_distances(scene, first))
    distances[first] = TOO_FAR if rules.nearest == "published" else math.inf
    return shape(scene[distances.index(min(distances))])


def farthest_shape(scene: Scene, first: int, rules: Rules) -> str:
    distances = squared_distances(scene, first)
    return shape(scene[distances.index(max(distances))])


ABOUT_ONE: Mapping[str, Callable[[Scene, int, Rules], str]] = {
    "unary_shape": lambda scene, first, rules: shape(scene[first]),
    "unary_left": lambda scene, first, rules: yes_or_no(scene[first].x < PIXELS / 2),
    "unary_up": lambda scene, first, rules: yes_or_no(scene[first].y < PIXELS / 2),
    "binary_nearest": nearest_shape,
    "binary_farthest": farthest_shape,
    "binary_count": lambda scene, first, rules: str(sum(c.square == scene[first].square for c in scene) - 1),
}


# Two objects: the answers of ternary questions.


def between(value: int, one: int, two: int) -> bool:
    return min(one, two) <= value <= max(one, two)


def count_in_box(a: Thing, b: Thing, others: list[Thing], rules: Rules) -> str:
    return str(sum(between(c.x, a.x, b.x) and between(c.y, a.y, b.y) for c in others))


def is_on_line(a: Thing, b: Thing, others: list[Thing], rules: Rules) -> str:
    return yes_or_no(any(LINES[rules.line](a, b, c) for c in others))


def near_vertically(a: Thing, b: Thing, c: Thing) -> bool:
    """y_C = m x_C + q, up to 12 on either side; where x_A = x_B, the line is almost vertical."""
    m = (b.y - a.y) / (b.x - a.x + 1e-10)
    y = m * c.x + (a.y - m * a.x)
    return y - BAND <= c.y <= y + BAND


def near_line(a: Thing, b: Thing, c: Thing) -> bool:
    """|(B − A) × (C − A)| ≤ 12 |B − A|, in whole numbers."""
    dx, dy = b.x - a.x, b.y - a.y
    return (dx * (c.y - a.y) - dy * (c.x - a.x)) ** 2 <= BAND**2 * (dx**2 + dy**2)


def near_segment(a: Thing, b: Thing, c: Thing) -> bool:
    """As ``near_line`` where C is beside the segment, else the distance to its nearer end."""
    along = (b.x - a.x) * (c.x - a.x) + (b.y - a.y) * (c.y - a.y)
    if 0 <= along <= (b.x - a.x) ** 2 + (b.y - a.y) ** 2:
        return near_line(a, b, c)
    end = a if along < 0 else b
    return (c.x - end.x) ** 2 + (c.y - end.y) ** 2 <= BAND**2


LINES: Mapping[str, Callable[[Thing, Thing, Thing], bool]] = {
    "published": near_vertically,
    "perpendicular": near_line,
    "segment": near_segment,
}


def count_obtuse(a: Thing, b: Thing, others: list[Thing], rules: Rules) -> str:
    return str(sum(OBTUSE[rules.obtuse](a, b, c) for c in others))


def obtuse_in_floats(a: Thing, b: Thing, c: Thing) -> bool:
    """The largest angle by the law of cosines. On a line an angle may be NaN, and then its place among the three
    decides: ``max`` keeps a NaN that comes first, and passes over a later one.
    """
    bc, ca, ab = math.dist(b[:2], c[:2]), math.dist(c[:2], a[:2]), math.dist(a[:2], b[:2])
    largest = max(angle(bc, ca, ab), angle(ca, bc, ab), angle(ab, bc, ca))
    return 90 <= largest < 180


def angle(opposite: float, one: float, two: float) -> float:
    """The angle between two sides, in degrees; NaN where rounding makes its cosine more than 1."""
    cosine = (one * one + two * two - opposite * opposite) / (2 * one * two)
    return math.degrees(math.acos(cosine)) if abs(cosine) <= 1 else math.nan


def obtuse_in_integers(a: Thing, b: Thing, c: Thing) -> bool:
    """Not on a line, and the square over the longest side at least the sum of the other two."""
    if (b.x - a.x) * (c.y - a.y) == (b.y - a.y) * (c.x - a.x):
        return False
    short, middle, long = sorted((p.x - q.x) ** 2 + (p.y - q.y) ** 2 for p, q in ((a, b), (b, c), (c, a)))
    return long >= short + middle


OBTUSE: Mapping[str, Callable[[Thing, Thing, Thing], bool]] = {
    "published": obtuse_in_floats,
    "exact": obtuse_in_integers,
}
ABOUT_TWO: Mapping[str, Callable[[Thing, Thing, list[Thing], Rules], str]] = {
    "ternary_box": count_in_box,
    "ternary_line": is_on_line,
    "ternary_obtuse": count_obtuse,
}
