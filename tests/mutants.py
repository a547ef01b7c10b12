"""Draws mutants of the core and runs the tests that are nearest to each: ``scripts/mutants``.

A mutant is the core with one change. A test that fails kills it; one that survives names a line that no test guards.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Mutant", "mutants_of", "nearest"]

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    "types", "codecs", "reducers", "schedules", "sampling", "comm", "membership", "engine", "loop", "wall", "sim",
    "handle.py", "step_tracker.py", "ddp.py",
)  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitXor, ast.BitXor: ast.BitAnd,
}  # fmt: skip
UNTOUCHED = ("__repr__", "__str__", "describe", "title")
"""Functions whose results are for display."""
LOGGING = re.compile(r"(_?log(ger|ging)?|warnings)\.")
LIMIT_S = 300
TYPICAL_S = 60
"""What a mutant takes on two quiet cores."""


class Mutant(NamedTuple):
    """One change of one file.

    Args:
      path: of the file, from the root.
      line: where it begins.
      what: the text before and after.
      begin: offset of the replaced bytes.
      end: offset behind them.
      text: their replacement.
    """

    path: str
    line: int
    what: str
    begin: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """Returns the source with the change."""
        encoded = source.encode()
        return (encoded[: self.begin] + self.text.encode() + encoded[self.end :]).decode()


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Returns all mutants of a file, in the order of its lines."""
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def mutant(node: ast.expr | ast.stmt, text: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = lines[node.lineno - 1] + node.col_offset
        end = lines[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(source.encode()[begin:end].decode().split())
        return Mutant(path, node.lineno, f"{before} -> {text}", begin, end, text)

    found = [mutant(node, text) for node, text in _changes(ast.parse(source))]
    return sorted(found, key=lambda one: (one.line, one.begin, one.text))


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yields each node below one that may change, with the text that replaces it."""
    for child in _children(node):
        if isinstance(child, ast.expr):
            yield from ((child, text) for text in _expressions(child))
        elif isinstance(child, ast.stmt):
            yield from ((child, text) for text in _statements(child))
        yield from _changes(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the children of a node in which a change can be noticed by a test."""
    match node:
        case ast.JoinedStr() | ast.Raise() | ast.Assert() | ast.AnnAssign(value=None):
            return  # texts of errors, and positions within formatted strings, which are wrong before Python 3.12
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            if node.name not in UNTOUCHED:
                yield from (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body)
        case ast.ClassDef():
            yield from node.body
        case ast.AnnAssign():
            yield from filter(None, (node.value,))
        case ast.If() if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        case ast.Assign() if "__all__" in ast.unparse(node.targets[0]):
            return
        case ast.Call() if LOGGING.match(ast.unparse(node.func)):
            return
        case _:
            yield from ast.iter_child_nodes(node)


def _expressions(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[op]):
            changed = ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators)
            yield f"({ast.unparse(changed)})"
        case ast.BinOp() if (
            type(node.op) in OPERATORS and not _is_text(node.left) and not _is_text(node.right)
        ):
            yield f"({ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))})"
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(other, node.values))})"
        case ast.UnaryOp(op=ast.Not()):
            yield f"({ast.unparse(node.operand)})"
        case ast.IfExp():
            yield f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
        case ast.Constant(value=bool()):
            yield str(not node.value)
        case ast.Constant(value=int() | float()):
            yield f"({node.value!r} + 1)"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _statements(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.Expr(value=ast.Call() as call) if not LOGGING.match(ast.unparse(call.func)):
            yield "pass"
        case ast.Delete(targets=targets) if all(isinstance(target, ast.Name) for target in targets):
            return  # of arguments that are not used
        case ast.Expr(value=ast.Await()) | ast.Raise() | ast.Break() | ast.Continue() | ast.Delete():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.AugAssign():
            yield "pass"
            if type(node.op) in OPERATORS and not _is_text(node.value):
                yield ast.unparse(ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value))


def nearest(path: str, root: Path, own: bool = False) -> list[str]:
    """Returns the files of tests to run for a mutant of a file, those first that are nearest to it.

    Args:
      path: of the mutated file, from the root.
      root: the tree.
      own: return the tests of the file's room alone, where it has any.
    """
    parts = Path(path).relative_to("src/farflung").with_suffix("").parts
    module = re.compile(rf"farflung\.{'.'.join(parts)}\b")
    room = re.compile(rf"farflung(\.{parts[0]}\b| import [^\n]*\b{parts[0]}\b)")

    def rank(test: Path) -> int:
        text = test.read_text(encoding="utf-8")
        if test.is_relative_to(root / "tests" / parts[0]) or test.stem == f"test_{parts[0]}":
            return 0 if parts[-1] in test.stem or module.search(text) else 1
        return 2 if module.search(text) else 3 if room.search(text) else 4

    ranks = {test: rank(test) for test in sorted((root / "tests").rglob("test_*.py"))}
    farthest = 1 if own and min(ranks.values()) <= 1 else 3
    tests = sorted((test for test in ranks if ranks[test] <= farthest), key=ranks.__getitem__)
    return [test.relative_to(root).as_posix() for test in tests]


class Tree:
    """A copy of the checkout in a temporary folder, whose tests run on its own sources.

    Args:
      root: the copy.
      limit_s: after which a run of tests is ended.
    """

    def __init__(self, root: Path, limit_s: float) -> None:
        self.root, self._limit_s = root, limit_s
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, root / name)

    def outcome(self, mutant: Mutant, own: bool) -> str:
        """Returns what became of a mutant: ``killed by ...``, ``survived`` or ``undecided: ...``."""
        path = self.root / mutant.path
        source = path.read_text(encoding="utf-8")
        self._write(path, mutant.apply(source))
        try:
            code, said = self._test(nearest(mutant.path, self.root, own))
        finally:
            self._write(path, source)
        if code is None:
            return "killed by the time limit"
        if code == 0:
            return "survived"
        failed = re.search(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - |$)", said, re.MULTILINE)
        if code not in (1, 2) or failed is None:
            return f"undecided: pytest ended with {code}: {said.strip()[-200:]!r}"
        if self._test([failed[1]])[0] not in (0, 5):
            return f"undecided: {failed[1]} fails without it too"
        return f"killed by {failed[1]}"

    def _write(self, path: Path, source: str) -> None:
        """Writes a source; what was compiled of it may look newer than it is."""
        path.write_text(source, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def _test(self, tests: list[str]) -> tuple[int | None, str]:
        """Runs tests until one fails; returns pytest's exit code, or None at the limit, and what it prints."""
        options = ["-x", "-q", "-n", "0", "-p", "no:randomly", "--lab", "without"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *tests, *options],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root / "src")},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        return process.returncode, said


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each mutant and a summary."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    option = parser.add_argument
    option("--count", type=int, default=60, help="mutants to draw (default: %(default)s)")
    option("--seed", type=int, help="of the draw; a random one when not given")
    option("--room", choices=ROOMS, action="append", help="mutate this part of the core alone; repeatable")
    option("--own", action="store_true", help="run the tests of the mutated room alone, which is faster")
    option("--limit", type=float, default=LIMIT_S, help="seconds for a mutant (default: %(default)s)")
    option("--out", type=Path, help="a file of results, row by row; the same command goes on from there")
    chosen = parser.parse_args(arguments)
    kept = chosen.out.read_text(encoding="utf-8") if chosen.out and chosen.out.exists() else ""
    rows = [json.loads(row) for row in kept.splitlines()]
    seed = chosen.seed if chosen.seed is not None else rows[0]["seed"] if rows else random.randrange(10**6)
    done = {(row["path"], row["line"], row["what"]): row["outcome"] for row in rows}

    paths = [path for room in chosen.room or ROOMS for path in _sources(ROOT / "src" / "farflung" / room)]
    every = [one for path in paths for one in mutants_of(path, (ROOT / path).read_text(encoding="utf-8"))]
    drawn = random.Random(seed).sample(every, min(chosen.count, len(every)))
    print(
        f"{len(drawn)} of {len(every)} mutants, seed {seed}: about {len(drawn) * TYPICAL_S / 60:.0f} minutes, at most "
        f"{len(drawn) * chosen.limit / 60:.0f}",
        flush=True,
    )
    outcomes = list[str]()
    with tempfile.TemporaryDirectory(prefix="farflung-mutants-") as folder:
        tree = Tree(Path(folder), chosen.limit)
        for mutant in drawn:
            began_s = time.monotonic()
            outcome = done.get((mutant.path, mutant.line, mutant.what))
            if outcome is None:
                outcome = tree.outcome(mutant, chosen.own)
                if chosen.out:
                    row = {"path": mutant.path, "line": mutant.line, "what": mutant.what, "outcome": outcome}
                    with chosen.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"seed": seed, **row}) + "\n")
            outcomes.append(outcome)
            took_s = time.monotonic() - began_s
            print(f"{mutant.path}:{mutant.line}: {mutant.what}: {outcome} ({took_s:.0f} s)", flush=True)
    for kind in ("killed", "survived", "undecided", "killed by the time limit"):
        print(f"{kind}: {sum(outcome.startswith(kind) for outcome in outcomes)}")
    return 0


def _sources(room: Path) -> list[str]:
    files = [room] if room.suffix else sorted(room.rglob("*.py"))
    return [file.relative_to(ROOT).as_posix() for file in files]


if __name__ == "__main__":
    sys.exit(main())
