"""Results that take long, kept by what they depend on, so that a benchmark that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Kept"]


class Kept:
    """A file of JSON lines, each with what it depends on and what came of it.

    Args:
      path: of the file.
      quick: nothing is kept, and nothing that was kept is used.
    """

    def __init__(self, path: Path, *, quick: bool = False) -> None:
        self._path, self._quick = path, quick

    def find(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The first line with this key, or a part of it; ``None`` if there is none."""
        if not self._quick and self._path.exists():
            for text in self._path.read_text(encoding="utf-8").splitlines():
                line: dict[str, Any] = json.loads(text)
                if all(line.get(name) == value for name, value in key.items()):
                    return line
        return None

    def once(self, key: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The line with this key, measured now if there is none.

        Args:
          key: what the result depends on, a hash of its sources included.
          measure: makes it.
        """
        line = self.find(key)
        if line is not None:
            return line
        line = {**key, **measure()}
        if not self._quick:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")
        return line
