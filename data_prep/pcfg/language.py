"""The language of PCFG SET: functions on strings in prefix notation, and their meaning (Hupkes et al. 2020, table 1).

    expression  =  unary expression  |  binary expression "," expression  |  letters
    letters     =  one or more of A1 … A20, B1 … Z20

A string of letters ends at the next comma or at the end, so no brackets are needed. With x and y strings:

    copy x -> x              reverse x -> x backwards              append x , y -> x y      remove_first x , y -> y
    repeat x -> x x          shift x -> x, its first letter last   prepend x , y -> y x     remove_second x , y -> x
    echo x -> x, its last letter twice                             swap_first_last x -> x, its ends exchanged

Two tests change the language by rewriting: an expression then means the value of its rewritten form.

Synonyms (substitutivity, section 7.4 there): FUNCTION_twin means the same as FUNCTION, for four functions.

Exceptions (overgeneralisation, section 7.6): two functions mean others where one stands directly before the other:

    reverse echo        ->  echo copy                   prepend remove_first  ->  remove_second append
    echo remove_first   ->  copy append                 prepend reverse       ->  remove_second echo

An expression has one exception: the first pair of this list that it contains, at its first place. This rule was
inferred from the official files, in which it gives every exceptional target; no official line has a pair twice.
"""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_uppercase

from data_prep.dataset import shorten

Letters = tuple[str, ...]

UNARY: dict[str, Callable[[Letters], Letters]] = {
    "copy": lambda x: x,
    "reverse": lambda x: x[::-1],
    "shift": lambda x: x[1:] + x[:1],
    "echo": lambda x: x + x[-1:],
    "swap_first_last": lambda x: x[-1:] + x[1:-1] + x[:1] if len(x) > 1 else x,
    "repeat": lambda x: x + x,
}
BINARY: dict[str, Callable[[Letters, Letters], Letters]] = {
    "append": lambda x, y: x + y,
    "prepend": lambda x, y: y + x,
    "remove_first": lambda x, y: y,
    "remove_second": lambda x, y: x,
}
FUNCTIONS = (*UNARY, *BINARY)
LETTERS = tuple(f"{letter}{number}" for letter in ascii_uppercase for number in range(1, 21))
WORDS = {*FUNCTIONS, *LETTERS, ","}
TWIN = "_twin"
TWINS = tuple(name + TWIN for name in ("append", "swap_first_last", "repeat", "remove_second"))
EXCEPTIONS = {
    "reverse echo": "echo copy",
    "prepend remove_first": "remove_second append",
    "echo remove_first": "copy append",
    "prepend reverse": "remove_second echo",
}
LIMIT = 10_000  # letters; the official targets have at most 736


def interpret(expression: str) -> str:
    """The letters that an expression means, separated by spaces.

    Raises ValueError if it is not an expression, or if any part of it means more than ``LIMIT`` letters.
    """
    words = expression.split(" ")
    for word in words:
        if word not in WORDS:
            raise ValueError(f"unknown word {shorten(word)}")
    # Open functions, with the first argument of a binary one once known.
    open_functions: list[tuple[str, Letters | None]] = []
    value: Letters | None = None
    for names, letters in arguments(words):
        if value is not None:
            raise ValueError("a comma too many")
        open_functions += [(name, None) for name in names]
        value = apply(open_functions, letters)
    if value is None:
        raise ValueError(f"{open_functions[-1][0]} has no second argument")
    return " ".join(value)


def apply(open_functions: list[tuple[str, Letters | None]], value: Letters) -> Letters | None:
    """Applies the open functions that end with the argument ``value``, innermost first, and removes them.

    Returns None if ``value`` becomes the first argument of a binary function, which stays open.
    """
    while open_functions:
        name, first = open_functions[-1]
        if name in BINARY and first is None:
            open_functions[-1] = (name, value)
            return None
        value = UNARY[name](value) if name in UNARY else BINARY[name](first, value)
        if len(value) > LIMIT:
            raise ValueError(f"means more than {LIMIT:,} letters")
        open_functions.pop()
    return value


def arguments(words: list[str]) -> list[tuple[list[str], Letters]]:
    """The text between commas: names of functions, and the letters after them. Raises ValueError."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == ",":
            parts.append([])
        else:
            parts[-1].append(word)
    return [cut(part) for part in parts]


def cut(part: list[str]) -> tuple[list[str], Letters]:
    """Separates the functions from the letters. Raises ValueError without letters, and for a
    function after a letter.
    """
    number = next((position for position, word in enumerate(part) if word not in FUNCTIONS), len(part))
    names, letters = part[:number], part[number:]
    if not letters:
        raise ValueError(f"{names[-1]} has no argument" if names else "nothing between commas")
    misplaced = next((word for word in letters if word in FUNCTIONS), None)
    if misplaced is not None:
        raise ValueError(f"{misplaced} after a letter without a comma")
    return names, tuple(letters)


def count_functions(expression: str) -> int:
    """The number of functions in an expression, including synonyms."""
    return sum(word in FUNCTIONS or word in TWINS for word in expression.split(" "))


def mentions(expression: str, words: str) -> bool:
    """Whether these words are adjacent in an expression."""
    return f" {words} " in f" {expression} "


def without_twins(expression: str) -> str:
    """The expression with functions instead of their synonyms."""
    return " ".join(word.removesuffix(TWIN) if word in TWINS else word for word in expression.split(" "))


def exception_in(expression: str) -> str | None:
    """The pair of functions that is an exception in an expression, or None."""
    return next((pair for pair in EXCEPTIONS if mentions(expression, pair)), None)


def with_exception(expression: str) -> str:
    """The expression with its exceptional pair rewritten; unchanged if it has none."""
    pair = exception_in(expression)
    return expression if pair is None else f" {expression} ".replace(f" {pair} ", f" {EXCEPTIONS[pair]} ", 1)[1:-1]
