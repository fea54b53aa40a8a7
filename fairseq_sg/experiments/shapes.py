"""The shapes of the JSON files of experiments, for those that were damaged, or written by something else."""

from __future__ import annotations

from typing import Any

from fairseq_sg.experiments.quantities import QUANTITIES

#: In a mapping, the shape of every other key.
ANY = "*"
_NUMBER = (int, float)
_NUMBERS = {ANY: _NUMBER}

_RESULT = {
    "steps": int,
    **{f"{name}?": _NUMBERS for name in QUANTITIES},
    "generated?": {ANY: _NUMBERS},
    "more?": {ANY: {ANY: _NUMBERS}},
    "analysed?": {ANY: (*_NUMBER, type(None))},
    "curve?": [{"step": _NUMBER, ANY: _NUMBER}],
}
_OF_BOTH = {
    "starts?": [{"step": _NUMBER, "commit": str, "machine": dict}],
    "commands?": [str],
    "diverged?": {"step": _NUMBER, "why?": str},
    "failed?": str,
    "minutes?": _NUMBER,
}
#: ``run.json``.
RUN = {"settings": {"data?": str, "arguments?": [str]}, "folder?": str, "result?": _RESULT, **_OF_BOTH}
#: A training in a results file.
RECORD = {"row": str, "data": str, "seed": int, "result?": {**_RESULT, "curve": _RESULT["curve?"]}, **_OF_BOTH}
_SCORE = {"score": _NUMBER, "ci": _NUMBER, "p": (*_NUMBER, type(None))}
_ENTRY = {"BLEU": _SCORE, "chrF2": _SCORE, "length_ratio": _NUMBER}
#: The comparisons of ``by_length`` in a results file.
BLEU = {
    ANY: {
        "baseline": str,
        "unit": str,
        "limit": _NUMBER,
        "samples": int,
        "signatures": {ANY: str},
        "subsets": {ANY: int},
        "buckets": [{"high": (int, type(None)), "label": str, "sentences": int}],
        "systems": [{"name": str, "seed": int, "subsets": {ANY: _ENTRY}, "buckets": [_ENTRY]}],
        "baselines?": {ANY: {ANY: [str]}},
    }
}


def check(found: Any, shape: Any, where: str = "it") -> None:
    """Raises ValueError, with the place in ``where``, for JSON of another shape.

    Args:
        shape: a type or several; a list of the shape of its items; or a mapping of keys to shapes. A key may be absent
            if its name there ends in "?".
    """
    kind = type(shape) if isinstance(shape, (dict, list)) else shape
    if not isinstance(found, kind):
        raise ValueError(f"{where} is {found!r:.40}")
    if isinstance(shape, list):
        for place, item in enumerate(found):
            check(item, shape[0], f"{where}.{place}")
    elif isinstance(shape, dict):
        for key in (key for key in shape if key not in found and key != ANY and not key.endswith("?")):
            raise ValueError(f"{where} has no {key!r}")
        for key, value in found.items():
            own = shape.get(key, shape.get(f"{key}?", shape.get(ANY)))
            if own is not None:
                check(value, own, f"{where}.{key}")
