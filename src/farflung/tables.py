"""Tables of a TOML file, read key by key; every error is one line with file, table and key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from farflung.errors import ConfigError
from farflung.files import toml_of

__all__ = ["Readers", "Table", "open_toml"]

T = TypeVar("T")


def open_toml(path: Path) -> Table:
    """The top level of a file.

    Raises:
      ConfigError: absent, or no TOML.
    """
    return Table(str(path), toml_of(path))


class Table:
    """One table; the keys that are asked for are those it may have.

    Args:
      where: file and table, the beginning of every message.
      content: what is there.
    """

    def __init__(self, where: str, content: Mapping[str, Any]) -> None:
        self.where = where
        self._content = content
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self._asked.add(key)
        return key in self._content

    def number(self, key: str, default: float | None = None) -> float:
        """A number; infinity is one, NaN is not."""
        return self._as_number(key, self._get(key, default))

    def numbers(self, key: str) -> tuple[float, ...]:
        values = self._of(list, key, None, "must be a list of numbers")
        return tuple(self._as_number(key, one) for one in values)

    def whole(self, key: str) -> int:
        """A whole number."""
        return self._of(int, key, None, "must be a whole number")

    def wholes(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, 0 or more."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
            raise self.error(key, value, "must be a list of whole numbers")
        return tuple(value)

    def text(self, key: str, default: str | None = None) -> str:
        return self._of(str, key, default, "must be a string")

    def flag(self, key: str) -> bool:
        """True or false; false where it is not there."""
        return self._of(bool, key, False, "must be true or false")

    def number_or_text(self, key: str, default: float | None = None) -> float | str:
        """A number or a name."""
        value = self._get(key, default)
        return value if isinstance(value, str) else self._as_number(key, value)

    def table(self, key: str) -> Table:
        """A table in this one."""
        return Table(f"{self.where}: {key}", self._of(dict, key, None, "must be a table"))

    def tables(self, key: str) -> list[Table]:
        """The tables written as ``[[key]]``, known in messages by their ``name`` or their number."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
            raise self.error(key, value, f"must be written as [[{key}]]")
        return [
            Table(f"{self.where}: {key} {one.get('name', number)}", one)
            for number, one in enumerate(value, start=1)
        ]

    def values(self, kind: type, readers: Readers | None = None, **given: Any) -> dict[str, Any]:
        """Reads the fields of a dataclass, each by its declared type; a default stands for an absent key.

        Args:
          kind: the dataclass.
          readers: what reads a key, by the name of its type, besides numbers, text, flags and lists of numbers; fields
            of other types are no keys.
          given: the values of fields that are no keys either.
        """
        for field in fields(kind):
            read = {**_READERS, **(readers or {})}.get(str(field.type).removesuffix(" | None"))
            if read is None or field.name in given or not field.init:
                continue
            if field.name in self or (field.default is MISSING and field.default_factory is MISSING):
                given[field.name] = read(self, field.name)
        return given

    def build(self, kind: type[T], readers: Readers | None = None, **given: Any) -> T:
        """Makes a dataclass of this table; see :meth:`values` and :meth:`make`."""
        return self.make(partial(kind, **self.values(kind, readers, **given)))

    def make(self, build: Callable[[], T]) -> T:
        """What ``build`` makes of this table; an error of its own gets file and table in front.

        Raises:
          ConfigError: that error, or a key that was not read.
        """
        unknown = sorted(self._content.keys() - self._asked)
        if unknown:
            raise ConfigError(
                f"{self.where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(self._asked))}"
            )
        try:
            return build()
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from None

    def error(self, key: str, value: object, what: str) -> ConfigError:
        """About one key."""
        return ConfigError(f"{self.where}: {key} = {value!r}: {what}")

    def _get(self, key: str, default: Any) -> Any:
        if key in self:
            return self._content[key]
        if default is None:
            raise ConfigError(f"{self.where}: {key} is missing")
        return default

    def _of(self, kind: type[T], key: str, default: T | None, what: str) -> T:
        value = self._get(key, default)
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise self.error(key, value, what)
        return value

    def _as_number(self, key: str, value: Any) -> float:
        try:
            if not isinstance(value, bool) and isinstance(value, int | float) and not math.isnan(value):
                return float(value)
        except OverflowError:
            raise ConfigError(f"{self.where}: {key}: is too large a number") from None
        raise self.error(key, value, "must be a number")


Readers: TypeAlias = "Mapping[str, Callable[[Table, str], Any]]"
"""By the name of a type, what reads a key's value."""
_READERS: Readers = {
    "bool": Table.flag,
    "float": Table.number,
    "int": Table.whole,
    "str": Table.text,
    "tuple[float, ...]": Table.numbers,
    "tuple[int, ...]": Table.wholes,
}
