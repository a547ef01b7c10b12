"""What can be set, read from where it is defined: the fields of a class and the ``Args:`` of its docstring."""

from __future__ import annotations

import inspect
import re
import types
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["Setting", "settings_of"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set: an option, a key of a file, an argument.

    Args:
      name: of the field.
      kind: ``int``, ``float``, ``bool``, ``str`` or ``Path``; what may be an object is text outside Python.
      about: what the docstring says of it, on one line, without markup.
      default: of the field; ``None`` where it has none.
    """

    name: str
    kind: type
    about: str
    default: object


def settings_of(owner: type) -> dict[str, Setting]:
    """The settings that the fields of a dataclass are, by name; those whose values are no numbers or text left out.

    Every one has to be named under ``Args:`` in the docstring of the class.
    """
    hints, about = get_type_hints(owner), _documented(owner)
    found = {}
    for field in fields(owner):
        kind = _kind(hints[field.name])
        if kind is not None and field.init:
            default = None if field.default is MISSING else field.default
            found[field.name] = Setting(field.name, kind, about[field.name], default)
    return found


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
        _, _, text = (inspect.getdoc(each) or "").partition("Args:\n")
        for name, words in re.findall(r"^  (\w+): (.*(?:\n    .*)*)", text, re.MULTILINE):
            plain = " ".join(words.split())
            about[name] = (plain[:1].upper() + plain[1:]).replace("``", "")
    return about
