"""The mutants that ``scripts/mutants`` draws: what changes and what does not."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.mutants import ROOMS, ROOT, mutants_of, nearest

SOURCE = '''"""Text."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import math

LEAST: int = 3


def step(x: int, *, whole: bool = True) -> float:
    """Text with 1 < 2."""
    if x < LEAST and not whole:
        raise ValueError(f"ä {x + 1} " + "x")
    _log.info("%d", x + 1)
    x -= 2
    del whole, found[x]
    del LEAST
    return x * 2.5
'''
CHANGES = [
    "3 -> (3 + 1)",
    "True -> False",
    "x < LEAST -> (x <= LEAST)",
    "x < LEAST and not whole -> (x < LEAST or not whole)",
    "not whole -> (whole)",
    'raise ValueError(f"ä {x + 1} " + "x") -> pass',
    "2 -> (2 + 1)",
    "x -= 2 -> pass",
    "x -= 2 -> x += 2",
    "del whole, found[x] -> pass",
    "2.5 -> (2.5 + 1)",
    "x * 2.5 -> (x / 2.5)",
]


def test_each_change_is_one_of_those_that_tests_can_notice() -> None:
    mutants = mutants_of("some.py", SOURCE)
    assert sorted(one.what for one in mutants) == sorted(CHANGES)
    for one in mutants:
        changed = one.apply(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
        assert changed.splitlines()[: one.line - 1] == SOURCE.splitlines()[: one.line - 1]


def test_every_mutant_of_the_core_can_be_compiled() -> None:
    for room in ("codecs", "schedules"):
        for path in (ROOT / "src" / "farflung" / room).glob("*.py"):
            source = path.read_text(encoding="utf-8")
            for one in mutants_of(path.as_posix(), source)[::10]:
                ast.parse(one.apply(source))


def test_the_tests_of_the_room_come_first() -> None:
    tests = nearest("src/farflung/codecs/topk.py", ROOT)
    assert {Path(test).parts[1] for test in tests[:2]} == {"codecs"}
    assert any(test.startswith("tests/reducers/") for test in tests)
    assert {Path(test).parts[1] for test in nearest("src/farflung/codecs/topk.py", ROOT, own=True)} == {
        "codecs"
    }
    for room in ROOMS:
        (path, *_) = sorted(
            (ROOT / "src" / "farflung").rglob(room if room.endswith(".py") else f"{room}/*.py")
        )
        assert nearest(path.relative_to(ROOT).as_posix(), ROOT, own=True)
