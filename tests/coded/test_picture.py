"""The picture of coded training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from farflung.coded.picture import draw_coded_picture
from farflung.errors import DataError
from farflung.telemetry import Event
from farflung.types import Json


def told(event: str, t: float, redundancy: Json = None, **values: Json) -> Event:
    return {"event": event, "t": t, "redundancy": redundancy, **values}


def session(t: float = 1.0) -> Iterator[Event]:
    """Rank 1 stays, 2 falls silent for a second, 3 encodes and vanishes, 4 leaves."""
    yield told("begins", t)
    for rank in (1, 2, 3, 4):
        yield told("came", t + 1, rank=rank, partition="")
    yield told("ordered", t + 2, [0, -1], rank=3, block=7)
    yield told("built", t + 3, [1, 1], rank=3, block=7, kind="rows", nbytes=8, mds_nbytes=16)
    yield told("encoded", t + 4, [1, 1])
    yield told("silent", t + 5, [0, 1], rank=2)
    yield told("heard", t + 6, [1, 1], rank=2)
    yield told("leaving", t + 6, [1, 1], rank=4)
    yield told("gone", t + 6.5, [1, 1], rank=4)
    yield told("gone", t + 7, [0, 0], rank=3)
    yield told("paused", t + 7, [0, 0], missing="")
    yield told("goes_on", t + 8, [0, 0])
    for place, objective in enumerate((5.0, 3.0, 2.0)):
        yield told("iterate", t + 8 + place, [1, 1], iterations=place, objective=objective, gap=0.1)


def bars(axes: Axes) -> dict[str, list[tuple[float, float, float]]]:
    """Of each state, by its colour's name in the legend: which device, from, to."""
    legend = axes.get_legend()
    assert legend is not None
    names = {
        patch.get_facecolor(): text.get_text()
        for patch, text in zip(legend.legend_handles, legend.get_texts(), strict=True)
        if isinstance(patch, Patch)
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names.values()}
    for bar in axes.patches:
        middle = bar.get_y() + bar.get_height() / 2  # type: ignore[attr-defined]
        end = bar.get_x() + bar.get_width()  # type: ignore[attr-defined]
        found[names[bar.get_facecolor()]].append((round(middle), bar.get_x(), end))  # type: ignore[attr-defined]
    return found


def test_it_has_what_devices_did(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_coded_picture(session(), tmp_path / "a.png", title="t")
    devices, redundancy, objective = drawn[0].axes
    seen = bars(devices)
    assert seen["encodes"] == [(2, 3.0, 4.0)]
    assert seen["silent"] == [(1, 6.0, 7.0)]
    assert seen["takes part"] == [
        (0, 5.0, 11.0), (1, 5.0, 6.0), (1, 7.0, 11.0), (2, 5.0, 8.0), (3, 5.0, 7.5),
    ]  # fmt: skip
    (cross,) = [line for line in devices.lines if line.get_marker() == "X"]
    assert np.asarray(cross.get_xydata()).tolist() == [[8.0, 2.0]], "who leaves does not vanish"
    rows, columns, _ = redundancy.lines
    assert np.asarray(rows.get_ydata()).tolist()[:2] == [0, 1]
    assert np.asarray(columns.get_ydata()).tolist()[:2] == [-1, 1]
    (line,) = objective.lines
    assert np.asarray(line.get_xydata()).tolist() == [[9.0, 1.5], [10.0, 0.5]]
    assert objective.get_xlim() == pytest.approx((2.0, 11.18)), "from when the first device came"


def test_a_run_that_goes_on_follows_in_time(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_coded_picture([*session(), *session(0.5)], tmp_path / "a.png", title="t")
    devices = drawn[0].axes[0]
    assert max(end for _, _, end in bars(devices)["takes part"]) == 21.5
    crosses = [line for line in devices.lines if line.get_marker() == "X"]
    assert len(crosses) == 2, "nobody vanishes when the coordinator comes again"


@pytest.mark.parametrize(
    "events",
    [
        [],
        [told("begins", 0.0)],
        [told("came", 0.0)],
        [told("came", 0.0, rank="one")],
        [told("came", 0.0, rank=1), told("iterate", 1.0, objective=None)],
        [told("came", 0.0, ["many"], rank=1)],
        [{"event": "came", "rank": 1}],
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, events: list[Event]) -> None:
    with pytest.raises(DataError):
        draw_coded_picture(events, tmp_path / "a.png", title="t")
    assert not list(tmp_path.iterdir())


def test_it_can_be_seen(tmp_path: Path) -> None:
    draw_coded_picture(session(), tmp_path / "a.png", title="t")
    assert (tmp_path / "a.png").stat().st_size > 15_000
