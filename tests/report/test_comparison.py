"""Several runs beside each other: every figure against arithmetic on paper."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from farflung.errors import DataError
from farflung.report import ComparisonRow, RunHistory, compare_runs, draw_comparison, render_comparison_table
from tests.covering import covered

SPLIT = {"compute": 1.0, "exposed_communication": 2.0, "data_wait": 1.0, "evaluation": 0.0, "other": 0.0}


def course(
    recipe: str,
    *scores: float,
    seed: int = 0,
    network: str = "wifi",
    pace_s: float = 1.0,
    step_nbytes: int = 1000,
) -> RunHistory:
    """One that is evaluated every ``pace_s`` seconds."""
    timed = tuple((pace_s * n, step_nbytes * n, score) for n, score in enumerate(scores, start=1))
    summary = {"bytes_sent_per_replica": timed[-1][1], "duration_s": timed[-1][0], "time_s": dict(SPLIT)}
    return RunHistory(recipe, network, seed, timed, summary)  # type: ignore[arg-type]


def test_a_course_is_read_from_events() -> None:
    events: list[dict[str, Any]] = [
        {"event": "begin", "rank": 0, "t": 2.0, "step": 0, "steps": 2},
        {"event": "step", "rank": 0, "t": 3.0, "step": 0, "bytes_sent": 10},
        {"event": "evaluation", "rank": 0, "t": 3.5, "step": 1, "accuracy": 0.25, "bytes_sent": 10},
        {"event": "step", "rank": 0, "t": 4.0, "step": 1, "bytes_sent": 20},
        {"event": "evaluation", "rank": 0, "t": 4.5, "step": 2, "accuracy": 0.75, "bytes_sent": 20},
        {"event": "end", "rank": 0, "t": 4.5},
    ]
    read = RunHistory.from_events("a", "wifi", 0, events, {})
    assert read.scores == ((1.5, 10, 0.25), (2.5, 20, 0.75))
    assert (read.max_score, read.find_target_cost(0.5), read.find_target_cost(0.8)) == (0.75, (2.5, 20), None)
    with pytest.raises(DataError, match="a on wifi, seed 0: it was never evaluated"):
        RunHistory.from_events("a", "wifi", 0, events[:2], {})
    with pytest.raises(DataError, match="its events are damaged"):
        RunHistory.from_events(
            "a", "wifi", 0, [{"event": "evaluation", "rank": 0, "t": None, "accuracy": 1}], {}
        )


def test_times_bytes_and_speed_up_are_means_over_seeds() -> None:
    courses = [
        course("slow", 0.2, 0.4, 0.6, pace_s=4.0),
        course("slow", 0.2, 0.6, 0.6, pace_s=4.0, seed=1),
        course("fast", 0.2, 0.5, 0.7, step_nbytes=100),
        course("fast", 0.2, 0.5, 0.5, step_nbytes=100, seed=1),
        course("never", 0.1, 0.2, 0.3),
        course("slow", 0.6, network="lan"),
    ]
    slow, fast, never, elsewhere = compare_runs(courses, 0.5)
    assert (slow.time_to_target_s, slow.bytes_to_target, slow.speed_up) == (10.0, 2500.0, 1.0)
    assert (fast.time_to_target_s, fast.bytes_to_target, fast.speed_up) == (2.0, 200.0, 5.0)
    assert fast.final_accuracy == pytest.approx(0.6)
    assert fast.final_accuracy_range == (0.5, 0.7)
    assert (never.num_reached, never.time_to_target_s, never.speed_up) == (0, None, None)
    assert (elsewhere.network, elsewhere.speed_up, elsewhere.time_to_target_s) == ("lan", 1.0, 1.0)
    assert slow.duration_s == 12.0
    assert slow.time_s == SPLIT
    assert slow.to_json()["final_accuracy_range"] == [0.6, 0.6]


def printed(rows: list[ComparisonRow], target: float, width: int) -> list[str]:
    """The lines of a table on a terminal of some width; no line is longer."""
    out = StringIO()
    Console(file=out, width=width, force_terminal=False).print(render_comparison_table(rows, target, width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return lines


def cells_of(lines: list[str]) -> list[list[str]]:
    """The cells of each line below the headings."""
    return [[cell.strip() for cell in line[1:-1].split("│")] for line in lines if "│" in line]


def test_the_table_says_what_is_simulated_and_what_was_not_reached() -> None:
    courses = [course("slow", 0.2, 0.6, pace_s=4.0), course("never", 0.1, 0.3)]
    lines = printed(compare_runs(courses, 0.5), 0.5, 160)
    assert lines[0].startswith("Simulated. Time to accuracy 50.0 %")
    assert lines[1].strip() == "All on wifi."
    assert cells_of(lines) == [
        ["slow", "8 s", "1.00", "60.0 %", "2.0 kB", "8 s", "25 %", "75 %"],
        ["never", "0 of 1 runs", "", "30.0 %", "2.0 kB", "2 s", "25 %", "75 %"],
    ]


RECIPES = {
    "as the README has them": ("synchronous(codec=truncate16)", "synchronous(codec=int8)"),
    "one is how another begins": (
        *("synchronous", "synchronous(codec=int8)", "synchronous(codec=error_feedback(topk(density=0.01)))"),
        "synchronous(codec=error_feedback(topk(density=0.02)))",
    ),
    "nested": ("delayed(codec=chain(topk(density=0.125), int8))", "delayed(codec=chain(topk(density=0.25), int8))"),
    "unlike ends": ("ring(codec=int8, batch_size=8)", "ring(codec=int8, batch_size=16)", "ring(codec=int8, steps=9)"),
    "names for people": ("as the paper has it, with momentum, gathered and in 4 bits", "ours"),
}  # fmt: skip
FIGURES = {
    "to target": {"1:40:00", "20 s"}, "speed-up": {"1.00", "300.00"}, "final accuracy": {"60.0 %", "62.3 %"},
    "rank 0 sent": {"123.5 GB", "1.2 MB"}, "duration": {"1:40:00", "20 s"}, "waiting": {"100 %"},
    "compute": {"0 %"}, "coding": {"31 %"}, "evaluation": {"0 %"},
}  # fmt: skip


def wide(recipe: str, network: str, place: int) -> RunHistory:
    """A course with long figures; of a first recipe, or of another."""
    seconds, nbytes, score = (20.0, 1_234_567, 0.6234) if place else (6000.0, 123_456_789_012, 0.6)
    split = {"compute": 0.1, "exposed_communication": 99.8, "data_wait": 0.0, "evaluation": 0.1, "other": 0.0}
    summary = {"bytes_sent_per_replica": nbytes, "duration_s": seconds, "time_s": split, "coding_s": 31.0}
    return RunHistory(recipe, network, 0, ((seconds, nbytes, score),), summary)  # type: ignore[arg-type]


@covered(
    "recipes,networks,width",
    RECIPES.values(),
    [("wifi",), ("wifi-10mbps", "my/own/networks/of-the-coast.toml")],
    [60, 80, 100, 120, 160, 200],
)
def test_recipes_can_be_told_apart_and_no_figure_is_cut(
    recipes: tuple[str, ...], networks: tuple[str, ...], width: int
) -> None:
    courses = [wide(recipe, network, place) for network in networks for place, recipe in enumerate(recipes)]
    lines = printed(compare_runs(courses, 0.5), 0.5, width)
    (head, body) = (
        [[cell.strip() for cell in line[1:-1].split(sign)] for line in lines if line[0] == sign]
        for sign in "┃│"
    )
    headings = [" ".join(filter(None, words)) for words in zip(*head, strict=True)]
    text = "\n".join(lines)
    left_out = (
        " ".join(text.partition("More in a wider terminal or with --json: ")[2].split())
        .rstrip(".")
        .split(", ")
    )
    assert {*headings} | {*left_out} - {""} >= FIGURES.keys()
    assert not {*headings} & {*left_out}
    assert left_out == [""] or width < 160
    assert "to target" in headings
    columns = dict(zip(headings, zip(*body, strict=True), strict=True))
    for name in FIGURES.keys() & columns.keys():
        assert {cell for cell in columns[name] if cell} == FIGURES[name]
    # A row begins where a time to the target stands; what is below belongs to it.
    told = [""] * len(networks) * len(recipes)
    row = -1
    for cell, begins in zip(columns["recipe"], columns["to target"], strict=True):
        row += bool(begins)
        told[row] += cell
    start, _, end = text.partition("All recipes: ")[2].partition("\n")[0].strip().partition("…")
    assert [(start + one + end).replace(" ", "") for one in told] == [
        one.replace(" ", "") for one in recipes
    ] * len(networks)
    if len(networks) > 1:
        assert "".join(columns["network"]) == "".join(networks)
    else:
        assert "All on wifi." in text


def test_several_seeds_have_their_range_below_their_mean() -> None:
    courses = [course("ring", 0.5, 0.5 + 0.1 * seed, seed=seed) for seed in range(3)]
    lines = printed(compare_runs(courses, 0.5), 0.5, 80)
    assert [line[3] for line in cells_of(lines)] == ["60.0 %", "50.0 % to 70.0 %"]


def test_the_picture(tmp_path: Path) -> None:
    courses = [
        course(f"recipe $x_{n}$", 0.1 * n, 0.1, 0.2, seed=seed, network=network)
        for n in range(9)
        for seed in range(2)
        for network in ("wifi", "lan")
    ]
    draw_comparison(courses, tmp_path / "new" / "compare.png", title="all $of$ them", target=0.15)
    assert (tmp_path / "new" / "compare.png").read_bytes().startswith(b"\x89PNG")
    draw_comparison([course("score", -3.0, -1.0)], tmp_path / "score.png", title="one", target=-2.0)
    assert (tmp_path / "score.png").exists()


def test_a_damaged_summary_is_named() -> None:
    damaged = RunHistory(
        "a", "wifi", 0, ((1.0, 1, 0.5),), {"duration_s": 1.0, "bytes_sent_per_replica": "much"}
    )
    with pytest.raises(DataError, match="a on wifi: its summary has no number bytes_sent_per_replica"):
        compare_runs([damaged], 0.5)
