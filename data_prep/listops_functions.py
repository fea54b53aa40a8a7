"""The language of ListOps: values of expressions and the depth of the computation they depend on.

    expression  =  digit  |  operator expression expression … "]"     with 2 to 5 expressions, the arguments

    [MIN        the smallest argument
    [MAX        the greatest argument
    [MED        the median of the arguments, of an even number of them the mean of the middle two, rounded down
    [SM         the sum of the arguments modulo 10

The dependency depth is the number of nested operations that the value depends on (Csordás 2023, appendix D.3.2).
Arguments that are not selected do not count at any depth.

    digit       0
    [MIN, [MAX  1 + that of the selected argument, the first one of equals
    [MED        1 + the greatest one of the one or two arguments in the middle, when equals are in their given order
    [SM         1 + the greatest one of all arguments
"""

from __future__ import annotations

from typing import NamedTuple

from data_prep.dataset import DataError
from data_prep.text import shorten

DIGITS = "0123456789"
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSING = "]"
FEWEST, MOST = 2, 5  # arguments


class Meaning(NamedTuple):
    """The value of an expression, 0 to 9, and its dependency depth."""

    value: int
    depth: int


# The meanings of digits.
MEANINGS = {digit: Meaning(int(digit), 0) for digit in DIGITS}


def value_of(meaning: Meaning) -> int:
    """Sort key of arguments: ``min``, ``max`` and ``sorted`` then take the first of equals first."""
    return meaning.value


def apply(operator: str, arguments: list[Meaning]) -> Meaning:
    """Applies an operator to the meanings of its arguments."""
    if operator == "[MIN":
        selected = [min(arguments, key=value_of)]
    elif operator == "[MAX":
        selected = [max(arguments, key=value_of)]
    elif operator == "[MED":
        number = len(arguments)
        selected = sorted(arguments, key=value_of)[(number - 1) // 2 : number // 2 + 1]
    else:
        return Meaning(sum(map(value_of, arguments)) % 10, 1 + max(argument.depth for argument in arguments))
    value = sum(map(value_of, selected)) // len(selected)
    return Meaning(value, 1 + max(argument.depth for argument in selected))


def interpret(expression: str) -> Meaning:
    """Evaluates an expression, tokens separated by single spaces. Raises DataError if it is not one."""
    # Open operators with the arguments read so far; the first entry holds the whole expression.
    open_operators: list[tuple[str, list[Meaning]]] = [("", [])]
    for position, word in enumerate(expression.split(" "), start=1):
        operator, arguments = open_operators[-1]
        if not operator and arguments:
            raise DataError(f"not an expression: {shorten(word)} after its end, word {position}")
        if word in MEANINGS:
            arguments.append(MEANINGS[word])
        elif word in OPERATORS:
            open_operators.append((word, []))
        elif word == CLOSING and operator:
            if not FEWEST <= len(arguments) <= MOST:
                raise DataError(f"not an expression: {operator} has {len(arguments)} arguments, word {position}")
            open_operators.pop()
            open_operators[-1][1].append(apply(operator, arguments))
        else:
            raise DataError(f"not an expression: {shorten(word)} cannot be word {position}")
    operator, arguments = open_operators[-1]
    if operator or not arguments:
        raise DataError("not an expression: it ends too early")
    return arguments[0]
