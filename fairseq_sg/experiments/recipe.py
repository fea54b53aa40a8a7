"""Recipes: experiments as files ``recipes/NAME.yaml``, read by OmegaConf against `schema`.

A recipe may extend another (``extends``) and have ``variants``: changes of the same experiment, such as ``small``.
Mappings are merged, other values replaced; null removes a key. A file whose name begins with ``_`` is only a base.
The format is explained in ``docs/reproducing.md``.
"""

from __future__ import annotations

import difflib
import io
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    KeyValidationError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from fairseq_sg.experiments.checks import Checks
from fairseq_sg.experiments.schema import Recipe, RecipeError

FOLDER = Path(__file__).resolve().parent / "recipes"


def names() -> list[str]:
    """The names of the existing recipes, without bases, whose names begin with ``_``."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.yaml"))


def find(name: str) -> Path:
    """The file of a recipe, by its name or by a path that ends in ``.yaml``. Raises RecipeError if there is none."""
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if path.is_file():
        return path
    if name.endswith(".yaml"):
        raise RecipeError(f"there is no recipe {name!r}: give the path of a file that exists, or the name of a recipe")
    if name.endswith(".yml") or "/" in name:
        raise RecipeError(f"there is no recipe {name!r}: the path of a recipe's file ends in .yaml")
    close = difflib.get_close_matches(name, names(), cutoff=0.8)
    meant = f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(names())},"
    raise RecipeError(f"there is no recipe {name!r}: {meant} or give the path of a .yaml file")


def variants(path: Path) -> dict[str, Any]:
    """The variants of a recipe. Raises RecipeError for a file that cannot be read."""
    return _with_base(path)[1]


def read(path: Path, variant: str = "") -> Recipe:
    """Reads a recipe, or one of its variants.

    A variant is another experiment than the paper's, so the published numbers are not those of its rows.

    Raises:
        RecipeError: no YAML; a key unknown, missing or repeated; a value of another type or outside its choices; a
            file with the name of a recipe of fairseq_sg, and another content.
    """
    content, known = _with_base(path)
    if path.stem in names() and path.read_bytes() != find(path.stem).read_bytes():
        raise RecipeError(
            f"{path}: {path.stem} is the name of another recipe, which comes with fairseq_sg, and both would have one "
            "command and one folder of runs: rename the file"
        )
    if variant:
        if variant not in known:
            there = f"choose from {', '.join(known)}" if known else "it has none"
            raise RecipeError(f"{path}: there is no variant {variant!r}: {there}")
        rows = content.get("rows")
        for row in rows.values() if isinstance(rows, dict) else ():
            if isinstance(row, dict):
                row.pop("published", None)
        _check_only(f"{path}: variants.{variant}", content, known[variant])
        content = _without_null(_merged(content, known[variant]))
    if "name" in content or "variant" in content:
        raise RecipeError(f"{path}: the keys 'name' and 'variant' are unknown: the file's name is that of the recipe")
    recipe = _typed(str(path), content | {"name": path.stem, "variant": variant})
    if recipe.only is not None:
        lost = [name for name in recipe.only if name not in recipe.rows]
        if lost:
            raise RecipeError(f"{path}: only: there is no row {lost[0]!r}: {', '.join(recipe.rows)}")
        recipe.rows = {name: recipe.rows[name] for name in recipe.only}
    Checks(recipe, str(path)).run()
    return recipe


def from_dict(content: dict[str, Any], where: str = "recipe") -> Recipe:
    """The recipe that ``Recipe.as_dict`` gave. Raises RecipeError for content that is no recipe."""
    recipe = _typed(where, content, written=True)
    Checks(recipe, where).run()
    return recipe


def _check_only(where: str, below: dict[str, Any], change: dict[str, Any]) -> None:
    """Raises RecipeError for a row that a change adds below the ``only`` of another, which would leave it out."""
    only, rows = below.get("only"), change.get("rows")
    if "only" in change or not isinstance(only, list) or not isinstance(rows, dict):
        return
    for name, row in rows.items():
        if row is not None and name not in only:
            raise RecipeError(
                f"{where}: rows: {name!r} is not in the 'only' that is extended ({', '.join(only)}): give 'only' here"
            )


def _with_base(path: Path, seen: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of a file on that of the one it extends, and the variants of both."""
    if path.resolve() in seen:
        raise RecipeError(f"{path}: extends itself, by way of {' and '.join(p.name for p in seen[1:]) or 'nothing'}")
    try:
        content = OmegaConf.to_container(_parsed(path.read_text("utf-8")))
    except (OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeError, RecursionError) as error:
        raise RecipeError(f"{path}: {worded(error)}") from None
    content = _mapping(f"{path}", content)
    base = content.pop("extends", None)
    own = _mapping(f"{path}: variants", content.pop("variants", None) or {})
    own = {str(name): _mapping(f"{path}: variants.{name}", change or {}) for name, change in own.items()}
    if base is None:
        return content, own
    try:
        # A file is named from the folder of the one that extends it.
        named = str(path.parent / base) if str(base).endswith(".yaml") else str(base)
        below, others = _with_base(find(named), (*seen, path.resolve()))
    except RecipeError as error:
        raise RecipeError(f"{path}: extends: {error}") from None
    _check_only(f"{path}", below, content)
    if isinstance(below.get("chosen"), list) and isinstance(content.get("chosen"), list):
        content["chosen"] = below["chosen"] + content["chosen"]
    return _without_null(_merged(below, content)), _merged(others, own)


@cache
def _parsed(text: str) -> Any:
    """YAML as OmegaConf reads it: it refuses repeated keys, and 1e-4 is a number. Bases are read many times."""
    return OmegaConf.load(io.StringIO(text))


def _mapping(where: str, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise RecipeError(f"{where}: must be a mapping (key: value), not {content!r}")
    return content


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Mappings are merged, everything else is replaced."""
    found = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if both else value
    return found


def worded(error: Exception, written: bool = False) -> str:
    """What YAML or OmegaConf found, in one line: the key, and what is wrong with its value.

    Args:
        written: whether the file was written by fairseq_sg.
    """
    if isinstance(error, RecursionError):
        return "is nested without end: does an alias (*name) stand in what it names (&name)?"
    if not isinstance(error, OmegaConfBaseException):
        return " ".join(str(error).split())
    key, text = f"{error.full_key}: " if error.full_key else "", str(error).splitlines()[0]
    if isinstance(error, MissingMandatoryValue):
        text = "is missing"
    elif isinstance(error, (ConfigAttributeError, ConfigKeyError)) and written:
        text = "is unknown: a newer fairseq_sg may have written it; update fairseq_sg, or name another file"
    elif isinstance(error, (ConfigAttributeError, ConfigKeyError)) and is_dataclass(error.object_type):
        known = [f.name for f in fields(error.object_type) if f.name not in ("name", "variant")]
        known += ["extends", "variants"] if error.object_type is Recipe else []
        of_variant = str(error.full_key) in ("extends", "variants")
        text = "is for a recipe, not for a variant" if of_variant else f"is unknown: choose from {', '.join(known)}"
    elif isinstance(error, KeyValidationError):
        text += ": put it in quotes"
    elif "is not a ListConfig" in text:
        text = "must be a list"
    return key + text


def _without_null(content: Any) -> Any:
    """Null removes a key of the base, such as a row."""
    if not isinstance(content, dict):
        return content
    return {key: _without_null(value) for key, value in content.items() if value is not None}


def _typed(where: str, content: dict[str, Any], written: bool = False) -> Recipe:
    """The content as a Recipe, by OmegaConf's checks of keys and types."""
    chosen = content.get("chosen") if isinstance(content, dict) else None
    for sentence in chosen if isinstance(chosen, list) else ():
        # OmegaConf makes a text of a mapping.
        if isinstance(sentence, dict):
            raise RecipeError(f"{where}: chosen: {sentence} is no text: quote a sentence with a colon")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Recipe), content)
        assert isinstance(merged, DictConfig)
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{where}: {worded(error, written)}") from None
