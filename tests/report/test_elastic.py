"""The picture of a run whose members change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from farflung.cli.main import main
from farflung.errors import DataError
from farflung.report import elastic_picture
from farflung.report.pictures import LIGHT_BLUE, VERMILLION, YELLOW
from farflung.runs import RunFolder
from farflung.telemetry import Event

LOST: Event = {
    "event": "view",
    "view": 2,
    "step": 4,
    "members": [0, 1],
    "lost": [2],
    "joined": [],
    "again": [3],
}
JOINED: Event = {
    "event": "view",
    "view": 3,
    "step": 7,
    "members": [0, 1, 3],
    "lost": [],
    "joined": [3],
    "again": [],
}


def session(rank: int, steps: range, *views: Event) -> Iterator[Event]:
    """Steps of a tenth of a second, and a loss that falls by one with each; views are told before their first step."""
    yield {"event": "begin", "rank": rank, "t": 0.0, "step": steps.start}
    for step in steps:
        yield from ({**view, "rank": rank, "t": 0.1 * step} for view in views if view["step"] == step)
        yield {"event": "step", "rank": rank, "t": 0.1 * step, "step": step, "duration_s": 0.1 + 0.1 * rank,
               "mean_loss": 20.0 - step}  # fmt: skip


def bars(axes: Axes, colour: str) -> list[tuple[int, float, float]]:
    """Row, first and last step of each bar of a colour."""
    found = [
        bar for bar in axes.patches if isinstance(bar, Rectangle) and same_color(bar.get_facecolor(), colour)
    ]
    return sorted(
        (round(bar.get_y() + bar.get_height() / 2), bar.get_x() + 0.5, bar.get_x() + bar.get_width() - 0.5)
        for bar in found
    )


def marks(axes: Axes, marker: str) -> list[list[float]]:
    """Where there are marks of a kind."""
    return [np.asarray(line.get_xydata()).tolist()[0] for line in axes.lines if line.get_marker() == marker]


def test_it_has_members_and_what_was_made_again(tmp_path: Path, drawn: list[Figure]) -> None:
    events = {rank: list(session(rank, range(10), LOST, JOINED)) for rank in (0, 1)}
    events[2], events[3] = list(session(2, range(3))), list(session(3, range(7, 10)))
    assert elastic_picture(events, tmp_path / "a.png", title="t", simulated=True)
    members, durations, losses = drawn[0].axes
    assert bars(members, LIGHT_BLUE) == [(0, 0, 9), (1, 0, 9), (2, 0, 2), (3, 7, 9)]
    assert bars(members, YELLOW) == [(0, 3, 3), (1, 3, 3)]
    assert bars(members, VERMILLION) == [(2, 3, 3)]
    assert (marks(members, "X"), marks(members, ">")) == ([[3.5, 2]], [[6.5, 3]])
    assert [text.get_text() for text in members.texts] == ["view 2", "view 3"]
    assert np.asarray(durations.lines[0].get_ydata()) == pytest.approx([0.3] * 3 + [0.2] * 4 + [0.4] * 3)
    assert np.asarray(losses.lines[0].get_ydata()).tolist() == [20.0 - step for step in range(10)]


def test_the_loss_of_a_run_without_faults_stands_beside(tmp_path: Path, drawn: list[Figure]) -> None:
    events = {rank: list(session(rank, range(10), LOST)) for rank in (0, 1)}
    beside = {0: session(0, range(12))}
    elastic_picture(events, tmp_path / "a.png", title="t", simulated=False, beside=beside)
    other, own, *_ = drawn[0].axes[2].lines
    assert (other.get_label(), own.get_label()) == ("without faults", "this run")
    assert (len(np.asarray(other.get_xdata())), len(np.asarray(own.get_xdata()))) == (12, 10)


def test_a_resumed_run_has_the_members_since(tmp_path: Path, drawn: list[Figure]) -> None:
    later: Event = {**LOST, "step": 8, "again": [7]}
    events = {rank: [*session(rank, range(12), LOST), *session(rank, range(5, 10), later)] for rank in (0, 1)}
    events[2] = [*session(2, range(3)), *session(2, range(5, 7))]
    elastic_picture(events, tmp_path / "a.png", title="t", simulated=True)
    members, _, losses = drawn[0].axes
    assert bars(members, LIGHT_BLUE) == [(0, 5, 9), (1, 5, 9), (2, 5, 6)]
    assert np.asarray(losses.lines[0].get_ydata()).tolist() == [20.0 - step for step in range(10)]


def test_views_at_nearly_the_same_step_have_one_label(tmp_path: Path, drawn: list[Figure]) -> None:
    views: list[Event] = [LOST, {**JOINED, "step": 5}, {**JOINED, "view": 4, "step": 30}]
    events = {0: list(session(0, range(60), *views))}
    elastic_picture(events, tmp_path / "a.png", title="t", simulated=True)
    assert [text.get_text() for text in drawn[0].axes[0].texts] == ["view 2 to 3", "view 4"]


def test_a_simulated_run_leaves_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "run"
    plan.write_text("[[fault]]\nkind = 'crash'\nrank = 1\nat_step = 3\n")
    given = f"simulate --workload synthetic/quadratic --workers 3 --steps 8 --elastic 1 --faults {plan} --out {out}"
    assert main(given.split()) == 0
    assert f"members    {out / 'elastic.png'}" in capsys.readouterr().out
    assert (out / "elastic.png").stat().st_size > 15_000
    (view,) = [event for event in RunFolder(out).events()[0] if event["event"] == "view"]
    assert (view["lost"], view["again"], view["step"]) == ([1], [3], 4)


def test_a_run_whose_members_stay_has_none(tmp_path: Path) -> None:
    assert not elastic_picture({0: session(0, range(3))}, tmp_path / "a.png", title="t", simulated=True)
    assert not elastic_picture({}, tmp_path / "a.png", title="t", simulated=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [("members", 3), ("lost", ["2"]), ("again", [True]), ("step", None), ("view", "second")],
)
def test_damaged_events_are_named(tmp_path: Path, name: str, value: Any) -> None:
    events = list(session(0, range(9), LOST))
    next(event for event in events if event["event"] == "view")[name] = value
    with pytest.raises(DataError, match=f"rank 0: no numbers? {name} in an event"):
        elastic_picture({0: events}, tmp_path / "a.png", title="t", simulated=True)
