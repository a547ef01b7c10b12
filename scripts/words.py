"""Finds words that the project's text and names do without: ``python scripts/words.py``.

The subject of a sentence is a component (rank, peer, view, bucket), never a person, and names are the field's own: see
``docs/glossary.md``.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PERSONS = re.compile(
    r"\b(who|whom|whoever|nobody|somebody|everybody|anybody|someone|anyone|everyone)\b", re.IGNORECASE
)
BANNED = {
    "anew": "fresh",
    "apart": "diverged",
    "blame": "failure_detector",
    "errands": "background_tasks",
    "farewell": "leave",
    "forgotten": "cancelled",
    "in_words": "describe",
    "journey": "aggregation_path",
    "mend": "repair",
    "roster": "registry",
    "stands_for_all": "consensus_parameters",
    "votes": "metadata",
}
"""Identifiers, and what stands in their place."""
ELSEWHERE = ("docs/glossary.md", "scripts/words.py")
"""Files that quote the words."""


def found_in(path: Path) -> Iterator[str]:
    """Each occurrence in a file, with its line."""
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        for match in PERSONS.finditer(line):
            yield f"{path.relative_to(ROOT)}:{number}: '{match[0]}': name the component (rank, peer, view, bucket)"
    if path.suffix == ".py" and path.is_relative_to(ROOT / "src"):
        for name, number in defined(ast.parse(text)):
            if (plain := name.strip("_").lower()) in BANNED:
                yield f"{path.relative_to(ROOT)}:{number}: {name}: the field's word is {BANNED[plain]}"


def defined(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names of functions, classes, arguments and attributes that a module defines, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id, node.lineno


def files() -> list[Path]:
    """What git tracks of source and documentation."""
    patterns = (
        "src/*.py",
        "benchmarks/*.py",
        "scripts/*",
        "docs/*.md",
        "benchmarks/*.md",
        "*.md",
        ":(exclude)CHANGELOG.md",
    )
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name and name not in ELSEWHERE]
    return [path for path in paths if path.suffix in {".py", ".md", ""} and path.exists()]


def main() -> int:
    """Prints each occurrence; the exit code."""
    found = [line for path in files() for line in found_in(path)]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
