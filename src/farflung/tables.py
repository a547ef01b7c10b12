"""Typed access to tables of TOML files, with errors that name file, table and key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from farflung.errors import ConfigError, UnknownName
from farflung.files import load_toml

__all__ = ["Readers", "Table", "load_table"]

T = TypeVar("T")


def load_table(path: Path) -> Table:
    """Loads the top-level table of a TOML file.

    Raises:
      ConfigError: The file is missing or not TOML.
    """
    return Table(str(path), load_toml(path))


class Table:
    """Table of a TOML file; keys that are never read are invalid.

    Args:
      location: File and table, as prefix of every message.
      content: Keys and values.
    """

    def __init__(self, location: str, content: Mapping[str, Any]) -> None:
        self.location = location
        self._content = content
        self._known_keys: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self._known_keys.add(key)
        return key in self._content

    def read_number(self, key: str, default: float | None = None) -> float:
        """Reads a number, which may be infinite but not NaN."""
        return self._to_number(key, self._get(key, default))

    def read_numbers(self, key: str) -> tuple[float, ...]:
        values = self._read_typed(list, key, None, "must be a list of numbers")
        return tuple(self._to_number(key, value) for value in values)

    def read_integer(self, key: str) -> int:
        """Reads an integer."""
        return self._read_typed(int, key, None, "must be a whole number")

    def read_integers(self, key: str) -> tuple[int, ...]:
        """Reads a list of integers of at least 0."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(type(entry) is int and entry >= 0 for entry in value):
            raise self.build_error(key, value, "must be a list of whole numbers")
        return tuple(value)

    def read_text(self, key: str, default: str | None = None) -> str:
        return self._read_typed(str, key, default, "must be a string")

    def read_flag(self, key: str) -> bool:
        """Reads a bool, by default False."""
        return self._read_typed(bool, key, False, "must be true or false")

    def read_number_or_text(self, key: str, default: float | None = None) -> float | str:
        """Reads a number or a string."""
        value = self._get(key, default)
        return value if isinstance(value, str) else self._to_number(key, value)

    def read_table(self, key: str) -> Table:
        """Reads a nested table."""
        return Table(f"{self.location}: {key}", self._read_typed(dict, key, None, "must be a table"))

    def read_tables(self, key: str) -> list[Table]:
        """Reads an array of tables ``[[key]]``; messages refer to them by ``name`` or number."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
            raise self.build_error(key, value, f"must be written as [[{key}]]")
        return [
            Table(f"{self.location}: {key} {entry.get('name', number)}", entry)
            for number, entry in enumerate(value, start=1)
        ]

    def read_fields(self, kind: type, readers: Readers | None = None, **fixed_values: Any) -> dict[str, Any]:
        """Reads the fields of a dataclass by their types; a missing key has the default.

        Args:
          kind: Dataclass.
          readers: Additional functions that read a key, by name of the field's type. Fields of other types are not
            read.
          fixed_values: Values of fields that are not read.
        """
        for field in fields(kind):
            read = {**_READERS, **(readers or {})}.get(str(field.type).removesuffix(" | None"))
            if read is None or field.name in fixed_values or not field.init:
                continue
            if field.name in self or (field.default is MISSING and field.default_factory is MISSING):
                fixed_values[field.name] = read(self, field.name)
        return fixed_values

    def build(self, kind: type[T], readers: Readers | None = None, **fixed_values: Any) -> T:
        """Builds a dataclass from this table; see :meth:`read_fields` and :meth:`build_with`."""
        return self.build_with(partial(kind, **self.read_fields(kind, readers, **fixed_values)))

    def build_with(self, factory: Callable[[], T]) -> T:
        """Calls a factory after the table was read; its errors are prefixed by file and table.

        Raises:
          ConfigError: The factory failed, or the table has a key that was not read.
        """
        unknown = sorted(self._content.keys() - self._known_keys)
        if unknown:
            raise ConfigError(f"{self.location}: {UnknownName('key', unknown[0], self._known_keys)}")
        try:
            return factory()
        except ConfigError as error:
            raise ConfigError(f"{self.location}: {error}") from None

    def build_error(self, key: str, value: object, requirement: str) -> ConfigError:
        """Builds the error for an invalid value of a key."""
        return ConfigError(f"{self.location}: {key} = {value!r}: {requirement}")

    def _get(self, key: str, default: Any) -> Any:
        if key in self:
            return self._content[key]
        if default is None:
            raise ConfigError(f"{self.location}: {key} is missing")
        return default

    def _read_typed(self, kind: type[T], key: str, default: T | None, requirement: str) -> T:
        value = self._get(key, default)
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise self.build_error(key, value, requirement)
        return value

    def _to_number(self, key: str, value: Any) -> float:
        try:
            if not isinstance(value, bool) and isinstance(value, int | float) and not math.isnan(value):
                return float(value)
        except OverflowError:
            raise ConfigError(f"{self.location}: {key}: is too large a number") from None
        raise self.build_error(key, value, "must be a number")


Readers: TypeAlias = "Mapping[str, Callable[[Table, str], Any]]"
"""Functions that read a key's value, by name of its type."""
_READERS: Readers = {
    "bool": Table.read_flag,
    "float": Table.read_number,
    "int": Table.read_integer,
    "str": Table.read_text,
    "tuple[float, ...]": Table.read_numbers,
    "tuple[int, ...]": Table.read_integers,
}
