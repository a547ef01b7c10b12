"""The table of a run's end: every figure, with its unit."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from farflung.errors import DataError
from farflung.loop import Summary, TimeSplit
from farflung.report import format_score, render_summary_table

SPLIT = TimeSplit(compute=2000.0, exposed_communication=2900.0, data_wait=0.0, other=100.0)
SUMMARY = Summary(
    steps=1000,
    samples=128_000,
    final_accuracy=0.8731,
    final_loss=0.41234,
    bytes_sent=34_567_890,
    duration_s=5025.2,
    time_s=SPLIT,
    is_stopped=False,
)


def rendered(**kwargs: Any) -> list[list[str]]:
    """The cells of each row, as printed."""
    console = Console(file=StringIO(), width=100, force_terminal=False)
    console.print(render_summary_table(**kwargs))
    out = console.file
    assert isinstance(out, StringIO)
    lines = [line for line in out.getvalue().splitlines() if "│" in line]
    return [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines]


def test_long_names_take_several_lines() -> None:
    methods = ["error_feedback(topk(density=0.01))", "mine:Coarse(unit=0.001)", "mine:Signs(unit=0.001)"]
    rows = rendered(summary={**SUMMARY.to_json(), "coding_not_charged": methods})
    first = next(place for place, row in enumerate(rows) if row[0] == "coding not charged")
    assert " ".join(row[-1] for row in rows[first:]) == ", ".join(methods)


def test_every_figure_has_its_row() -> None:
    assert rendered(summary=SUMMARY.to_json()) == [
        ["test accuracy", "87.3 %"],
        ["test loss", "0.4123"],
        ["steps", "1,000"],
        ["samples", "128,000"],
        ["sent per replica", "34.6 MB"],
        ["duration", "1:23:45"],
        ["compute", "0:33:20   40.0 %"],
        ["exposed communication", "0:48:20   58.0 %"],
        ["data wait", "0 s    0.0 %"],
        ["evaluation, checkpoints", "0 s    0.0 %"],
        ["other", "0:01:40    2.0 %"],
    ]


def test_a_run_that_was_stopped_and_simulated_says_so() -> None:
    summary = {**SUMMARY.to_json(), "stopped": True}
    assert (
        str(render_summary_table(summary, title="ring", is_simulated=True).title) == "ring; simulated times"
    )
    rows = dict(rendered(summary=summary, is_simulated=True))
    assert rows["steps"] == "1,000, stopped early"
    assert rows["duration"] == "1:23:45"


def test_a_run_that_was_stopped_before_its_first_evaluation_says_so() -> None:
    rows = dict(rendered(summary={**SUMMARY.to_json(), "stopped": True, "final_accuracy": None}))
    assert rows["test accuracy"] == "not evaluated yet"


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (
            {"gain": 1.746, "steps": {"uniform": 100, "pool": 400, "two": 1000}},
            "1,400 steps, gain 1.75 predicted",
        ),
        ({"gain": None, "steps": {"uniform": 100, "pool": 0, "two": 0}}, "0 steps"),
        (
            {"gain": None, "steps": {"uniform": 9, "pool": 0, "two": 0}, "undefined": "one replica"},
            "0 steps; no gain known: one replica",
        ),
    ],
)
def test_what_was_drawn_by_scores_is_told(sampling: dict[str, Any], words: str) -> None:
    rows = dict(rendered(summary={**SUMMARY.to_json(), "sampling": sampling}))
    assert rows["drawn by scores"] == words


def test_short_times_are_in_seconds_and_no_time_has_no_shares() -> None:
    summary = {**SUMMARY.to_json(), "duration_s": 12.345, "time_s": TimeSplit().to_json()}
    rows = dict(rendered(summary=summary))
    assert rows["duration"] == "12.3 s"
    assert rows["compute"] == "0 s"


@pytest.mark.parametrize(
    ("seconds", "words"), [(99.94, "99.9 s"), (99.96, "0:01:40"), (90061.0, "1 day, 1:01:01")]
)
def test_durations(seconds: float, words: str) -> None:
    assert dict(rendered(summary={**SUMMARY.to_json(), "duration_s": seconds}))["duration"] == words


def test_the_title_is_no_markup() -> None:
    console = Console(file=StringIO(), width=100, force_terminal=False)
    console.print(render_summary_table(SUMMARY.to_json(), title="run [bold]7[/x]"))
    assert isinstance(console.file, StringIO)
    assert "run [bold]7[/x]" in console.file.getvalue()


@pytest.mark.parametrize(
    ("score", "words"),
    [
        (0.0, ("accuracy", "0.0 %")),
        (1.0, ("accuracy", "100.0 %")),
        (-2.5, ("score", "-2.5")),
        (1234.5678, ("score", "1235")),
    ],
)
def test_only_what_can_be_an_accuracy_is_called_one(score: float, words: tuple[str, str]) -> None:
    assert format_score(score) == words
    rows = dict(rendered(summary={**SUMMARY.to_json(), "final_accuracy": score}))
    assert rows[f"test {words[0]}"] == words[1]


@pytest.mark.parametrize("name", sorted(SUMMARY.to_json().keys() - {"bytes_sent_to", "stopped"}))
def test_an_absent_figure_is_named(name: str) -> None:
    summary = SUMMARY.to_json()
    del summary[name]
    with pytest.raises(DataError, match=f"has no .*{name}"):
        render_summary_table(summary)


@pytest.mark.parametrize("name", sorted(SPLIT.to_json()))
def test_an_absent_part_of_the_time_is_named(name: str) -> None:
    split = SPLIT.to_json()
    del split[name]
    with pytest.raises(DataError, match=f"no number {name}"):
        render_summary_table({**SUMMARY.to_json(), "time_s": split})
