"""The rule-based splits of SCAN as pure functions on the list of all commands; ``scan`` explains them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from numpy.random import RandomState

from data_prep.dataset import DataError, Pair, Subsets
from data_prep.scan.grammar import interpret

SHORTEST, LONGEST = 1, 48  # numbers of actions
LENGTH_LIMIT = 22
LENGTH_SIZES = {"train": 16_990, "gen": 3_920}
SIMPLE_SIZES = {"train": 16_728, "test": 4_182}
MCD_SIZES = {"train": 8_365, "dev": 1_046, "gen": 1_045}

REFERENCE_SEED = 1234
# Published cutoff -> sizes of train, valid and gen, and the sha256 of the reference's line numbers of `valid` in
# tasks.txt (from 0, ascending, joined by spaces).
CUTOFFS = {
    22: (15_292, 1_698, 3_920, "2f89cfc660fd7814c4feb5d1ffcd81e9401db5a1406584795142407adab5499c"),
    24: (15_594, 1_732, 3_584, "5f8eac20ce41ddd6d9e4eccab132bde29ed192f1a0257644c8723b57d25d1560"),
    25: (15_997, 1_777, 3_136, "9ede85adb2d04f39ed4ecbfee3126c36ff2845dddaf7b0610d099923fba4404e"),
    26: (16_458, 1_828, 2_624, "00bcaa38d6d77234a1167657970ccc70d066706bc1b345e19ea006200e20d0ec"),
    27: (16_861, 1_873, 2_176, "31ca9b12f93995abd526debd2f3ec23e31a8e1c0750f2a31bf87f767ffcd63b2"),
    28: (17_264, 1_918, 1_728, "37195908470083e469355569c546b8e05e84c292bd6e4cdccb465ff4e0837e3d"),
    30: (17_783, 1_975, 1_152, "5f153d252c12d3195678500106ac49c82027266639ca9ce29612b0235b3453b2"),
    32: (18_186, 2_020, 704, "6db15399e1169df7983c653e5f46b85f0ceff60af80c3b677861afad99b53cf6"),
    33: (18_416, 2_046, 448, "cb745c1b1cd064947fecbac955b67732f1446cfaa0696c6e8fa48e86409b8273"),
    36: (18_474, 2_052, 384, "50ef489291148374d6ea081c2688408d41b8a9771ba58eddfe26bc75d594d0c1"),
    40: (18_704, 2_078, 128, "2aace4aea4cda3e4075e233ddc6898d860ddb87f6f359bcd065d3f2957f53153"),
}


@dataclass(frozen=True)
class HeldOut:
    """A split by adjacent words in the command.

    ``gen`` has the commands with one of ``tested`` and none of ``dropped``. ``train`` has those with none of
    ``tested``, ``dropped`` and ``unseen``, and the command ``primitive``, repeated to a tenth of the lines.
    """

    train_size: int
    gen_size: int
    tested: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    primitive: str | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The published sizes."""
        return {"train": self.train_size, "gen": self.gen_size}

    @property
    def rule(self) -> str:
        """The rule in words."""
        dropped = f". Commands with {' | '.join(self.dropped)} are omitted" if self.dropped else ""
        primitive = ""
        if self.primitive:
            primitive = f". The bare command {self.primitive} is a tenth of train before a hold-out"
        return (
            f"gen has the commands with {' | '.join(self.tested)}. Train has those without "
            f"{' | '.join((*self.tested, *self.unseen))}{dropped}{primitive}"
        )

    def split(self, pairs: list[Pair], seed: int | None) -> Subsets:
        """The subsets in the order of ``pairs``; with a primitive, ``seed`` shuffles train."""
        train = [pair for pair in pairs if not mentions(pair, self.tested + self.dropped + self.unseen)]
        gen = [pair for pair in pairs if mentions(pair, self.tested) and not mentions(pair, self.dropped)]
        if self.primitive is not None:
            primitive = Pair(self.primitive, interpret(self.primitive))
            gen.remove(primitive)
            train += [primitive] * (len(train) // 9)
            train = [train[index] for index in RandomState(seed).permutation(len(train))]
        return {"train": train, "gen": gen}


def template(words: str) -> HeldOut:
    """``words`` are tested after every verb, and never seen after one."""
    tested = tuple(f"{verb} {words}" for verb in ("walk", "look", "run", "jump"))
    return HeldOut(15_225, 4_476, tested, dropped=(f"turn {words}",))


def jump_around_right(train_size: int, *unseen: str) -> HeldOut:
    """``jump around right`` is tested; ``around right`` is seen after walk, look and run,
    except those in ``unseen``.
    """
    return HeldOut(
        train_size,
        1_173,
        tested=("jump around right",),
        dropped=("turn around right",),
        unseen=tuple(f"{verb} around right" for verb in unseen),
    )


HELD_OUT = {
    "addprim_jump": HeldOut(14_670, 7_706, ("jump",), primitive="jump"),
    "addprim_turn_left": HeldOut(21_890, 1_208, ("turn left",), primitive="turn left"),
    "template_around_right": template("around right"),
    "template_jump_around_right": jump_around_right(18_528),
    "template_opposite_right": template("opposite right"),
    "template_right": template("right"),
    "filler_num0": jump_around_right(15_225, "look", "walk", "run"),
    "filler_num1": jump_around_right(16_290, "walk", "run"),
    "filler_num2": jump_around_right(17_391, "run"),
    "filler_num3": jump_around_right(18_528),
}


def mentions(pair: Pair, phrases: tuple[str, ...]) -> bool:
    """Whether one of the phrases is in the command, as adjacent whole words."""
    return any(f" {phrase} " in f" {pair.source} " for phrase in phrases)


def length(pair: Pair) -> int:
    """The number of actions."""
    return pair.target.count(" ") + 1


def split_by_length(pairs: list[Pair], limit: int) -> Subsets:
    """``train`` has the commands with at most ``limit`` actions, ``gen`` the others."""
    return {
        "train": [pair for pair in pairs if length(pair) <= limit],
        "gen": [pair for pair in pairs if length(pair) > limit],
    }


def draw_valid(pairs: list[Pair], cutoff: int) -> list[int]:
    """The positions in ``pairs`` of the validation set of the split by ``cutoff``, ascending.

    The reference (transformer_generalization) draws ⌊n · (1 − 0.9)⌋ of the n commands with at most ``cutoff`` actions,
    by numpy's legacy generator with seed 1234. In floating point, 1 − 0.9 is slightly below 0.1; this is reproduced.
    """
    short = [position for position, pair in enumerate(pairs) if length(pair) <= cutoff]
    drawn = RandomState(REFERENCE_SEED).choice(len(short), int(len(short) * (1 - 0.9)), replace=False)
    return sorted(short[index] for index in drawn)


def resplit(pairs: list[Pair], cutoff: int) -> Subsets:
    """The split by ``cutoff``, without ``valid`` if a tenth of the short commands is less than one (cutoff 1)."""
    drawn = set(draw_valid(pairs, cutoff))
    valid = {"valid": [pairs[position] for position in sorted(drawn)]} if drawn else {}
    rest = split_by_length([pair for position, pair in enumerate(pairs) if position not in drawn], cutoff)
    return {"train": rest["train"], **valid, "gen": rest["gen"]}


def check_draw(pairs: list[Pair], cutoff: int) -> None:
    """Raises DataError unless the draw from the official file, at a published cutoff, equals the reference's."""
    if cutoff not in CUTOFFS:
        return
    numbers = " ".join(map(str, draw_valid(pairs, cutoff)))
    found, expected = hashlib.sha256(numbers.encode("ascii")).hexdigest(), CUTOFFS[cutoff][-1]
    if found != expected:
        raise DataError(
            f"the valid of cutoff {cutoff} is not the published one: its line numbers have sha256 {found} instead of "
            f"{expected}. Check this numpy: RandomState({REFERENCE_SEED}) seems to draw other numbers"
        )


def resplit_sizes(cutoff: int) -> dict[str, int]:
    """The published sizes of the split by ``cutoff``; none for an unpublished cutoff."""
    return dict(zip(("train", "valid", "gen"), CUTOFFS.get(cutoff, ())))


def random_split(pairs: list[Pair], seed: int) -> Subsets:
    """A split of our own with the sizes of ``simple``."""
    drawn = set(RandomState(seed).permutation(len(pairs))[: SIMPLE_SIZES["test"]].tolist())
    return {
        "train": [pair for position, pair in enumerate(pairs) if position not in drawn],
        "test": [pair for position, pair in enumerate(pairs) if position in drawn],
    }
