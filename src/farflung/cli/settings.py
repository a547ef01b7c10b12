"""Settings in a file: the options of a command as keys of a TOML file, or the ``config.json`` of a run."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

from farflung.errors import ConfigError
from farflung.files import json_of, read_text, reading, toml_of

__all__ = ["Setting", "option_types", "read_settings"]

Setting: TypeAlias = str | int | float | bool | Path
"""The value of one option."""

WORDS: dict[type, str] = {
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    Path: "a path, in quotes",
    str: "text, in quotes",
}
"""What a file must hold for an option of each type."""


def option_types(command: type, without: Iterable[str]) -> dict[str, Any]:
    """The options of a command and the type of each, except ``without``; ``int | None`` is an int."""
    kinds = get_type_hints(command)
    hints = {field.name: kinds[field.name] for field in fields(command) if field.name not in without}
    return {
        name: Union[get_args(hint)[:-1]] if get_origin(hint) in (types.UnionType, Union) else hint  # noqa: UP007
        for name, hint in hints.items()
    }


def read_settings(path: Path, known: Mapping[str, Any], ignored: Collection[str] = ()) -> dict[str, Setting]:
    """The settings in a file; its keys are the names of options, with ``-`` or ``_``.

    Args:
      path: TOML, or JSON where the name ends in ``.json``.
      known: the options there are and the type of each.
      ignored: keys that another command has, and that are left alone here.

    Raises:
      ConfigError: the file cannot be read, or has a key or a value that it should not have; names file and key, and
        what should be there.
    """
    with reading(path, "holds no settings"):
        content = _parse(path)
    settings: dict[str, Setting] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in ignored:
            continue
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"
            raise ConfigError(f"{path}: unknown key {key!r}; {hint}")
        if name in settings:
            raise ConfigError(f"{path}: {key!r} is there twice, with - and with _")
        settings[name] = _checked(path, key, value, known[name])
    return settings


def _checked(path: Path, key: str, value: object, hint: Any) -> Setting:
    kind, *words = get_args(hint) or (hint,)
    if isinstance(value, str) and any(value in get_args(word) for word in words):
        return value
    if kind is float and type(value) is int:
        return float(value)
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    if type(value) is kind:
        assert isinstance(value, str | int | float)
        return value
    raise ConfigError(f"{path}: {key} must be {WORDS[kind]}, not {value!r}")


def _parse(path: Path) -> dict[str, object]:
    if path.suffix != ".json":
        return toml_of(path)
    with reading(path, "not JSON"):
        content = json_of(read_text(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys and values, found {type(content).__name__}")
    return dict(content)
