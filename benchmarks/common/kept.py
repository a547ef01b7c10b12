"""Parts of rows that take long, kept per commit, so that a benchmark that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.provenance import commit_here

__all__ = ["Kept"]


class Kept:
    """A file of JSON lines beside the results, each with the settings and the outcome of one part.

    A part holds for the commit of the code that measured it. Git does not track the file.

    Args:
      folder: of the benchmark.
      name: of the file.
      quick: whether to keep nothing and use nothing that was kept.
    """

    def __init__(self, folder: Path, name: str, *, quick: bool = False) -> None:
        self._path, self._quick = folder / "results" / "parts" / f"{name}.jsonl", quick

    def find(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The first part of this commit with these settings, or with more; ``None`` if there is none."""
        if not self._quick and self._path.exists():
            wanted = {**key, "commit": commit_here()}
            for text in self._path.read_text(encoding="utf-8").splitlines():
                line: dict[str, Any] = json.loads(text)
                if all(line.get(name) == value for name, value in wanted.items()):
                    return line
        return None

    def once(self, key: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The part with these settings, measured now if there is none."""
        line = self.find(key)
        if line is not None:
            return line
        line = {**key, **measure()}
        if not self._quick:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({**line, "commit": commit_here()}) + "\n")
        return line
