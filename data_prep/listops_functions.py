"""The language of ListOps, what its expressions evaluate to, and on how deep a computation that depends.

    expression  =  digit  |  operator expression expression … "]"     with 2 to 5 expressions, the arguments

    [MIN        the smallest argument
    [MAX        the greatest argument
    [MED        the median of the arguments, of an even number of them the mean of the middle two, rounded down
    [SM         the sum of the arguments modulo 10

The dependency depth is the number of operations inside one another that the value depends on (Csordás 2023, appendix
D.3.2): arguments that are not selected do not count, whatever is inside them.

    digit       0
    [MIN, [MAX  1 + that of the selected argument, the first one of equals
    [MED        1 + the greatest one of the one or two arguments in the middle, when equals are in their given order
    [SM         1 + the greatest one of all arguments
"""

from __future__ import annotations

from typing import NamedTuple

from data_prep.common import DataError
from data_prep.text import shorten

DIGITS = "0123456789"
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSING = "]"
FEWEST, MOST = 2, 5  # arguments


class Meaning(NamedTuple):
    """What an expression evaluates to, 0 to 9, and its dependency depth."""

    value: int
    depth: int


# What digits mean.
MEANINGS = {digit: Meaning(int(digit), 0) for digit in DIGITS}


def value_of(meaning: Meaning) -> int:
    """By what arguments are compared: ``min``, ``max`` and ``sorted`` then take the first one of equals first."""
    return meaning.value


def apply(operator: str, arguments: list[Meaning]) -> Meaning:
    """What an operator with these arguments means."""
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
    """What an expression, its tokens separated by single spaces, means. Raises DataError if it is not one."""
    # The operators whose arguments are being read, with those arguments; the first one stands for the whole.
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
