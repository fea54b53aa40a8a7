"""The language of SCAN (Lake & Baroni 2018, fig. 6 and 7): all commands with their meanings.

    command  =  clause  |  clause "and" clause  |  clause "after" clause
    clause   =  phrase  |  phrase "twice"  |  phrase "thrice"
    phrase   =  verb | move direction | move "opposite" direction | move "around" direction
    verb     =  "walk" | "look" | "run" | "jump"        move = verb | "turn"        direction = "left" | "right"

That is 34 phrases, 102 clauses and 102 + 2 · 102² = 20,910 commands. With A the action of the verb (none for ``turn``)
and T the turn towards the direction:

    verb -> A               move direction -> T A   move opposite direction -> T T A
    x twice -> x x          x thrice -> x x x       move around direction   -> T A T A T A T A
    x and y -> x y          x after y -> y x
"""

from __future__ import annotations

from collections.abc import Iterator

from data_prep.dataset import Pair, shorten

VERBS = {"walk": ("I_WALK",), "look": ("I_LOOK",), "run": ("I_RUN",), "jump": ("I_JUMP",)}
MOVES = {**VERBS, "turn": ()}
TURNS = {"left": ("I_TURN_LEFT",), "right": ("I_TURN_RIGHT",)}
TIMES = {"twice": 2, "thrice": 3}
WORDS = {*MOVES, *TURNS, *TIMES, "opposite", "around", "and", "after"}
ACTIONS = {action for actions in (*MOVES.values(), *TURNS.values()) for action in actions}


def interpret(command: str) -> str:
    """The actions of a command, separated by spaces. Raises ValueError if it is not a command of SCAN."""
    words = command.split(" ")
    for word in words:
        if word not in WORDS:
            raise ValueError(f"unknown word {shorten(word)}")
    try:
        return " ".join(mean_command(words))
    except ValueError:
        raise ValueError(f"{shorten(command)} is not a command of the grammar") from None


def mean_command(words: list[str]) -> tuple[str, ...]:
    """The actions of a command. Raises ValueError, as the two functions below do."""
    for conjunction in ("and", "after"):
        if conjunction in words:
            middle = words.index(conjunction)
            first, second = mean_clause(words[:middle]), mean_clause(words[middle + 1 :])
            return first + second if conjunction == "and" else second + first
    return mean_clause(words)


def mean_clause(words: list[str]) -> tuple[str, ...]:
    """The actions of a clause."""
    if words and words[-1] in TIMES:
        return mean_phrase(words[:-1]) * TIMES[words[-1]]
    return mean_phrase(words)


def mean_phrase(words: list[str]) -> tuple[str, ...]:
    """The actions of a phrase."""
    match words:
        case [verb] if verb in VERBS:
            return VERBS[verb]
        case [move, direction] if move in MOVES and direction in TURNS:
            return TURNS[direction] + MOVES[move]
        case [move, "opposite", direction] if move in MOVES and direction in TURNS:
            return TURNS[direction] * 2 + MOVES[move]
        case [move, "around", direction] if move in MOVES and direction in TURNS:
            return (TURNS[direction] + MOVES[move]) * 4
    raise ValueError(f"not a phrase: {words}")


def phrases() -> Iterator[str]:
    """The 34 phrases."""
    yield from VERBS
    for manner in ("", "opposite ", "around "):
        for move in MOVES:
            for direction in TURNS:
                yield f"{move} {manner}{direction}"


def generate() -> list[Pair]:
    """All 20,910 commands with their actions, in grammar order: single clauses, then ``and``, then ``after``."""
    clauses = [phrase + times for phrase in phrases() for times in ("", " twice", " thrice")]
    commands = clauses + [f"{x} {word} {y}" for word in ("and", "after") for x in clauses for y in clauses]
    return [Pair(command, interpret(command)) for command in commands]
