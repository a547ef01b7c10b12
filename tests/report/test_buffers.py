"""The picture of samples that arrive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from farflung.errors import DataError
from farflung.report import buffers_picture
from farflung.telemetry import Event


def session(rank: int, steps: range, t: float = 0.0) -> Iterator[Event]:
    """A step each second, of which rank many tenths are a wait."""
    yield {"event": "begin", "rank": rank, "t": t, "step": steps.start}
    for step in steps:
        t += 1.0
        told: Event = {"event": "step", "rank": rank, "t": t, "step": step, "data_s": 0.1 * rank}
        yield {**told, "held": 10 * step + rank, "batch": 8}


def lines(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    return {
        str(line.get_label()): [(x, y) for x, y in np.asarray(line.get_xydata(), float).tolist()]
        for line in axes.lines
    }


def test_it_has_what_was_held_and_what_was_waited(tmp_path: Path, drawn: list[Figure]) -> None:
    events = {rank: list(session(rank, range(4), t=5.0)) for rank in range(2)}
    assert buffers_picture(events, tmp_path / "a.png", title="t", simulated=False)
    held, waited = map(lines, drawn[0].axes)
    assert held["1"] == [(1.0, 1.0), (2.0, 11.0), (3.0, 21.0), (4.0, 31.0)]
    assert [y for _, y in waited["1"]] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert [y for _, y in waited["0"]] == [0.0] * 4


def test_a_resumed_run_goes_on_in_time(tmp_path: Path, drawn: list[Figure]) -> None:
    events = [*session(0, range(2)), *session(0, range(2, 4), t=100.0)]
    buffers_picture({0: events}, tmp_path / "a.png", title="t", simulated=True)
    assert lines(drawn[0].axes[0])["0"] == [(1.0, 0.0), (2.0, 10.0), (3.0, 20.0), (4.0, 30.0)]


def test_of_many_replicas_one_stands_out(tmp_path: Path, drawn: list[Figure]) -> None:
    events = {rank: list(session(rank, range(3))) for rank in range(21)}
    buffers_picture(events, tmp_path / "a.png", title="t", simulated=True)
    legend = drawn[0].axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["rank 10, in the middle at the end"]


def test_it_can_be_seen(tmp_path: Path) -> None:
    events = {rank: list(session(rank, range(30))) for rank in range(3)}
    assert buffers_picture(events, tmp_path / "a.png", title="t", simulated=True)
    assert (tmp_path / "a.png").stat().st_size > 15_000


def test_a_run_that_had_all_samples_from_the_start_has_none(tmp_path: Path) -> None:
    events = [{k: v for k, v in event.items() if k != "held"} for event in session(0, range(3))]
    assert not buffers_picture({0: events}, tmp_path / "a.png", title="t", simulated=True)
    assert not (tmp_path / "a.png").exists()


def test_damaged_events_are_named(tmp_path: Path) -> None:
    events = list(session(0, range(2)))
    events[2]["held"] = "many"
    with pytest.raises(DataError, match="rank 0: no number held"):
        buffers_picture({0: events}, tmp_path / "a.png", title="t", simulated=True)
