"""Settings as the fields of dataclasses, with the ``Args:`` of their docstrings; recipes with changes, as text."""

from __future__ import annotations

import ast
import re
import types
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Literal, Union, get_args, get_origin, get_type_hints

from farflung._docstrings import docstring_of
from farflung.config import Training
from farflung.errors import ConfigError
from farflung.recipes import Recipe
from farflung.recipes.changes import changes_of
from farflung.spec import unparse
from farflung.types import Json

__all__ = ["AUTO", "Setting", "settings_of", "training_settings", "variant"]

AUTO = "auto"
"""A batch size by which each replica takes its share of a step's samples."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set: an option, a key of a file, an argument.

    Args:
      name: of the field.
      kind: ``int``, ``float``, ``bool``, ``str`` or ``Path``; what may be an object is text outside Python.
      about: what the docstring says of it, on one line, without markup.
      default: of the field; ``None`` where it has none.
      words: text that it may be besides.
    """

    name: str
    kind: type
    about: str
    default: object
    words: tuple[str, ...] = ()


def settings_of(owner: type) -> dict[str, Setting]:
    """The settings that the fields of a dataclass are, by name; those whose values are no numbers or text left out.

    What each is about is said under ``Args:`` in the docstring of the class.
    """
    hints, about = get_type_hints(owner), _documented(owner)
    found = {}
    for field in fields(owner):
        kind = _kind(hints[field.name])
        if kind is not None and field.init:
            default = None if field.default is MISSING else field.default
            found[field.name] = Setting(field.name, kind, about.get(field.name, ""), default)
    return found


def training_settings() -> dict[str, Setting]:
    """Those of :class:`farflung.config.Training`, as they can be said."""
    found = settings_of(Training)
    about = (
        "samples per replica and step; auto: as many as by the workload's own in a step of all, of which each replica "
        "takes as many as it is fast (the sampler balanced)"
    )
    return {**found, "batch_size": replace(found["batch_size"], about=about.capitalize(), words=(AUTO,))}


def _kind(hint: object) -> type | None:
    """The first type of a hint that can be written on a command line."""
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0])
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    return next((kind for kind in kinds if kind in (bool, int, float, str, Path)), None)


def _documented(owner: type) -> dict[str, str]:
    """What each argument is, by the docstrings of a class and of those that it is made from."""
    about: dict[str, str] = {}
    for each in reversed(owner.__mro__):
        _, _, text = docstring_of(each).partition("Args:\n")
        for name, words in re.findall(r"^  (\w+): (.*(?:\n    .*)*)", text, re.MULTILINE):
            plain = " ".join(words.split())
            about[name] = (plain[:1].upper() + plain[1:]).replace("``", "")
    return about


def variant(text: str) -> dict[str, Json]:
    """The settings that a recipe with changes stands for; whether its values are good is found out later.

    >>> variant("synchronous(codec=topk(density=0.01), learning_rate=0.02)")
    {'recipe': 'synchronous', 'codec': 'topk(density=0.01)', 'learning_rate': 0.02}

    Raises:
      ConfigError: not of this form, or a setting that a recipe cannot change.
    """
    known = {name: setting for name, setting in training_settings().items() if name != "seed"}
    known |= {name: setting for name, setting in settings_of(Recipe).items() if name in Recipe().settings}
    name, changes = changes_of(text, known)
    return {
        "recipe": name,
        **{changed: _value(text, known[changed], node) for changed, node in changes.items()},
    }


def _value(text: str, setting: Setting, node: ast.expr) -> Json:
    """Text for what may be a part, else the number or text that is there."""
    name, kind = setting.name, setting.kind
    if unparse(node) in setting.words:
        return unparse(node)
    if kind is str and not isinstance(node, ast.Constant):
        return unparse(node)
    value = node.value if isinstance(node, ast.Constant) else None
    if type(value) is int and kind is float:
        return float(value)
    if type(value) is kind and isinstance(value, int | float | str):
        return value
    raise ConfigError(f"recipe {text!r}: {name} = {unparse(node)}: must be of type {kind.__name__}")
