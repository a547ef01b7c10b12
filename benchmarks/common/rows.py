"""Rows: what is expected, what was measured, and how the two compare."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import platform
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeAlias

__all__ = ["Expected", "Stored", "Verdict", "all_but", "load_expected", "source_hash", "verdict", "versions"]

ROOT = Path(__file__).resolve().parents[2]
Verdict: TypeAlias = Literal["ahead", "equal", "short", "stale", "missing"]


@dataclass(frozen=True, slots=True)
class Expected:
    """One row of ``expected.toml``: the published figure, where it stands, and the goal."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    goal: float | None = None
    published: float | None = None
    at: str = ""
    needs: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """One measurement, as ``results/rows.jsonl`` keeps it."""

    name: str
    ours: float
    spread: tuple[float, float]
    simulated: bool
    sources: str
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    when: str = ""

    def to_line(self) -> str:
        """For the file."""
        return json.dumps(asdict(self))


def load_expected(folder: Path) -> list[Expected]:
    """The rows of a benchmark's ``expected.toml``."""
    rows = tomllib.loads((folder / "expected.toml").read_text(encoding="utf-8"))["row"]
    return [Expected(**row) for row in rows]


def load_stored(folder: Path) -> dict[str, Stored]:
    """The newest measurement of each row."""
    path = folder / "results" / "rows.jsonl"
    if not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line)
    return {line["name"]: Stored(**{**line, "spread": tuple(line["spread"])}) for line in lines}


def store(folder: Path, row: Stored) -> None:
    """Adds a measurement."""
    path = folder / "results" / "rows.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(row.to_line() + "\n")


def source_hash(patterns: Iterable[str]) -> str:
    """A hash of the files that a measurement depends on. Comments, docstrings and layout of Python do not count.

    Args:
      patterns: relative to the repository; those after a ``!`` are left out.
    """
    found: dict[bool, set[Path]] = {True: set(), False: set()}
    for pattern in patterns:
        found[not pattern.startswith("!")].update(ROOT.glob(pattern.removeprefix("!")))
    whole = hashlib.sha256()
    for file in sorted(file for file in found[True] - found[False] if file.is_file()):
        whole.update(str(file.relative_to(ROOT)).encode())
        text = file.read_text(encoding="utf-8")
        whole.update((_code(text) if file.suffix == ".py" else text).encode())
    return whole.hexdigest()[:16]


def all_but(folder: str, *used: str) -> list[str]:
    """Patterns that leave out the modules of a folder that a measurement does not run.

    Args:
      folder: relative to the repository.
      used: the modules that stay.
    """
    names = sorted(file.stem for file in (ROOT / folder).glob("*.py"))
    missing = set(used) - set(names)
    if missing:
        raise ValueError(f"no {', '.join(sorted(missing))} in {folder}")
    return [f"!{folder}/{name}.py" for name in names if name not in used]


@functools.cache
def _code(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(statement: ast.AST) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def versions() -> dict[str, str]:
    """Of what a measurement ran on."""
    packages = {name: version(name) for name in ("torch", "pyzmq", "numpy", "farflung")}
    return {"python": platform.python_version(), **packages}


def verdict(expected: Expected, stored: Stored | None, current_sources: str) -> Verdict:
    """Ahead: at the goal or beyond it. Equal: short of it, but the goal lies within the spread.

    A row without a goal is ahead as soon as it is measured: it only reports.
    """
    if stored is None:
        return "missing"
    if stored.sources != current_sources:
        return "stale"
    if expected.goal is None:
        return "ahead"
    sign = 1 if expected.better == "higher" else -1
    if sign * stored.ours >= sign * expected.goal:
        return "ahead"
    low, high = stored.spread
    return "equal" if low <= expected.goal <= high else "short"
