"""How far a row of runs has come: a line for each, an estimate from what was simulated here alone."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from farflung.cli.progress import ComparisonProgress
from farflung.telemetry import Event


class Clock:
    """A clock that shows what it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(rank: int = 0) -> Event:
    return {"event": "step", "rank": rank}


def said(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def counted(console: Console, *, quiet: bool = False) -> str:
    """Three runs of ten steps, of which the first is there already; a step takes two seconds."""
    clock = Clock()
    with ComparisonProgress(30, 3, quiet=quiet, console=console, clock=clock) as count:
        count.begin("ring, seed 0", 10)
        count.end()
        for name in ("ring, seed 1", "ring, seed 2"):
            count.begin(name, 10)
            for _ in range(10):
                clock.now += 2.0
                count(step())
                count(step(rank=1))
                count({"event": "evaluation", "rank": 0})
            count.end()
    return said(console)


def test_a_line_for_each_run_where_there_is_no_terminal() -> None:
    assert counted(Console(file=StringIO(), width=20)).splitlines() == [
        "run 1 of 3: ring, seed 0",
        "run 2 of 3: ring, seed 1; about 0:00:20 left",
        "run 3 of 3: ring, seed 2",
    ]


def test_a_bar_in_a_terminal_and_nothing_when_quiet() -> None:
    drawn = counted(Console(file=StringIO(), width=100, force_terminal=True, force_interactive=True))
    assert "3 of 3" in drawn
    assert "run 1 of 3" not in drawn
    assert counted(Console(file=StringIO()), quiet=True) == ""
