"""Ranges of options. The dataclass field of an option declares its range, and one function checks the values:

    dropout: float = field(default=0.1, metadata={"help": "…", "least": 0, "most": 1})

``least`` and ``most`` belong to the range, ``above`` and ``below`` do not. In a list, and in text such as JSON, every
number is checked. NaN is outside every range, and infinity outside every declared one. ``choices`` are all values that
an option may have beside None.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from fairseq_sg.errors import UsageError

_TYPES = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}
_INSIDE = {"least": operator.ge, "above": operator.gt, "most": operator.le, "below": operator.lt}


def check(options: type, values: Mapping[str, Any]) -> None:
    """Raises UsageError for the first of some ``values`` (name -> value) outside the range that its field declares."""
    for f in fields(options):
        if f.name in values:
            check_value(f.name, values[f.name], f.metadata)


def check_value(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    """Raises UsageError for an option's value outside the range in ``limits``; other keys of it are ignored."""
    choices = limits.get("choices")
    if choices is not None and value is not None and value not in choices:
        raise UsageError(f"{flag(name)} is {value!r}: choose from {', '.join(choices)}")
    declared = {key: limits[key] for key in _INSIDE if key in limits}
    for number in _numbers(value, of_text=bool(declared)):
        inside = math.isfinite(number) if declared else not math.isnan(number)
        if not inside or not all(_INSIDE[key](number, limit) for key, limit in declared.items()):
            raise UsageError(f"{flag(name)} is {value}: choose {wording(declared) or 'a number'}")


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raises UsageError where an option of the type ``kind``, or Optional of it, has a value of another type.

    An integer is a number, too. Types that are no single class are not checked.
    """
    kinds = [one for one in typing.get_args(kind) or (kind,) if one is not type(None)]
    wanted = kinds[0] if len(kinds) == 1 and typing.get_origin(kind) is not list else None
    if wanted not in _TYPES or value is None:
        return
    fits = isinstance(value, (int, float) if wanted is float else wanted)
    if not fits or isinstance(value, bool) != (wanted is bool):
        raise UsageError(f"{flag(name)} is {value!r}: choose {_TYPES[wanted]}")


def literal_dict(text: str) -> dict[Any, Any] | None:
    """The dict that a text writes as a Python literal, as fairseq reads ``--…-overrides``; None for another text."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def flag(name: str) -> str:
    """The option on the command line: ``qk_norm`` -> ``--qk-norm``."""
    return "--" + name.replace("_", "-")


def wording(limits: Mapping[str, Any]) -> str:
    """A range in words; empty where none is declared."""
    if "choices" in limits:
        return f"one of {', '.join(limits['choices'])}"
    from_ = f"from {limits['least']}" if "least" in limits else f"above {limits['above']}" if "above" in limits else ""
    to = f"to {limits['most']}" if "most" in limits else f"to below {limits['below']}" if "below" in limits else ""
    if from_ and to:
        if "above" in limits:
            to = f"and up {to}" if "most" in limits else f"and below {limits['below']}"
        return f"a number {from_} {to}"
    if "least" in limits:
        return f"{limits['least']} or more"
    return f"a number {from_ or to}" if from_ or to else ""


def _numbers(value: Any, of_text: bool) -> Iterator[float]:
    """The numbers in a value; none in text that is neither JSON nor a Python literal."""
    if isinstance(value, str):
        parsed = _parsed(value) if of_text else None
        if not isinstance(parsed, str):
            yield from _numbers(parsed, of_text)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (Mapping, Sequence)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item, of_text)


def _parsed(text: str) -> Any:
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError):
            pass
    return None
