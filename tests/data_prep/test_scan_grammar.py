"""The language of SCAN: all commands and their meanings."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.dataset import Pair
from data_prep.scan.grammar import ACTIONS, WORDS, interpret

# Number of actions -> number of commands, of the official file.
LENGTHS = {
    1: 6, 2: 88, 3: 398, 4: 860, 5: 1184, 6: 1178, 7: 1104, 8: 1450, 9: 1256, 10: 1696, 11: 1072, 12: 1578, 13: 432,
    14: 848, 15: 688, 16: 304, 17: 512, 18: 784, 19: 448, 20: 464, 21: 64, 22: 576, 24: 336, 25: 448, 26: 512, 27: 448,
    28: 448, 30: 576, 32: 448, 33: 256, 36: 64, 40: 256, 48: 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "actions"),
    [
        ("jump", "I_JUMP"),
        ("turn left", "I_TURN_LEFT"),
        ("jump left", "I_TURN_LEFT I_JUMP"),
        ("turn opposite right", "I_TURN_RIGHT I_TURN_RIGHT"),
        ("walk opposite left", "I_TURN_LEFT I_TURN_LEFT I_WALK"),
        ("run around left", "I_TURN_LEFT I_RUN I_TURN_LEFT I_RUN I_TURN_LEFT I_RUN I_TURN_LEFT I_RUN"),
        ("jump twice and look thrice", "I_JUMP I_JUMP I_LOOK I_LOOK I_LOOK"),
        ("jump twice after look", "I_LOOK I_JUMP I_JUMP"),
    ],
)
def test_meaning(command: str, actions: str) -> None:
    assert interpret(command) == actions


@pytest.mark.parametrize(
    "command",
    [
        *("turn", "jump jump", "left", "jump twice thrice", "twice", "and", "jump and", "after jump", "jump around"),
        *("jump and run and walk", "jump and run after walk", "jump left around", "jump opposite around left"),
    ],
)
def test_not_a_command(command: str) -> None:
    with pytest.raises(ValueError, match=f"'{command}' is not a command of the grammar"):
        interpret(command)


@pytest.mark.parametrize("command", ["", "Jump", "jump  twice", " jump", "jump ", "jump\n", "fly twice"])
def test_unknown_word(command: str) -> None:
    with pytest.raises(ValueError, match="unknown word"):
        interpret(command)


def test_all_commands(generated: list[Pair]) -> None:
    assert len({pair.source for pair in generated}) == len(generated) == 20_910
    assert {word for pair in generated for word in pair.source.split()} == WORDS and len(WORDS) == 13
    assert {word for pair in generated for word in pair.target.split()} == ACTIONS and len(ACTIONS) == 6
    assert max(len(pair.source.split()) for pair in generated) == 9
    assert Counter(len(pair.target.split()) for pair in generated) == LENGTHS


def test_order_is_fixed(lines: list[str]) -> None:
    # --holdout and --cutoff draw by position, so another order would silently change the data.
    digest = hashlib.sha256("\n".join(lines).encode("ascii")).hexdigest()
    assert digest == "80ab837ad99325e2780c2c75388524ce6b9ed8cf70252a7744d9e37db720118d"
    # The same lines sorted have this hash in the official file too.
    digest = hashlib.sha256("\n".join(sorted(lines)).encode("ascii")).hexdigest()
    assert digest == "345bff3c25864652f326ba1960aa515d156b63f45067ea57268f71d7362a2440"


def test_meaning_of_every_official_command(official: list[Pair]) -> None:
    assert [interpret(pair.source) for pair in official] == [pair.target for pair in official]


def test_generated_are_the_official_commands(generated: list[Pair], official: list[Pair]) -> None:
    assert sorted(generated) == sorted(official)


@given(st.lists(st.sampled_from(sorted(WORDS)), max_size=10).map(" ".join))
def test_words_in_any_order_are_a_command_or_refused(generated: list[Pair], command: str) -> None:
    try:
        assert Pair(command, interpret(command)) in set(generated)
    except ValueError as error:
        assert command not in {pair.source for pair in generated}, error
