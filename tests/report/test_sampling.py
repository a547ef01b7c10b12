"""The picture of how samples are scored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from farflung.errors import DataError
from farflung.report import sampling_picture
from farflung.telemetry import Event


def session(rank: int, steps: range, renewed: int = 3) -> Iterator[Event]:
    """Steps that tell of scores from the second on, and of ranks from a later one on."""
    yield {"event": "begin", "rank": rank, "t": 0.0, "step": steps.start}
    for step in steps:
        told: Event = {"event": "step", "rank": rank, "t": 1.0 * step, "step": step}
        scored = 0 if step == 0 else 64 * (rank + 1)
        told |= {"scored": scored, "groups": min(step + 1, 8), "variance_ratio": 0.5 + 0.1 * rank}
        told["score_quantiles"] = [step + 0.1 * at for at in range(5)] if scored else None
        anew = step >= renewed
        told |= {"rank_within_5": 0.5 if anew else None, "rank_within_10": 0.75 if anew else None}
        told["score_age"] = 8.0 if anew else None
        told["gain"] = 1.5 if step > 1 else None
        yield told
    yield {"event": "end", "rank": rank, "t": 1.0 * steps.stop}


def lines(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    return {
        str(line.get_label()): [(x, y) for x, y in np.asarray(line.get_xydata(), float).tolist()]
        for line in axes.lines
    }


def test_it_has_means_over_replicas_of_all_that_is_told(tmp_path: Path, drawn: list[Figure]) -> None:
    events = {rank: list(session(rank, range(5))) for rank in range(2)}
    assert sampling_picture(events, tmp_path / "a.png", title="t", simulated=False)
    scores, worth, sizes, ranks, numbers, ages = map(lines, drawn[0].axes)
    assert [step for step, _ in scores["median"]] == [1, 2, 3, 4]
    assert [middle for _, middle in scores["median"]] == pytest.approx([1.2, 2.2, 3.2, 4.2])
    assert [ratio for _, ratio in worth["second moment of the gradient, by scores"]] == pytest.approx(
        [0.55] * 4
    )
    assert worth["gain in steps, predicted"] == [(step, 1.5) for step in range(2, 5)]
    assert sizes["samples in the newest"] == [(step, 96.0) for step in range(1, 5)]
    assert numbers["groups"] == [(step, step + 1.0) for step in range(1, 5)]
    assert ranks["moved by less than 5 %"] == [(3.0, 50.0), (4.0, 50.0)]
    assert ranks["moved by less than 10 %"] == [(3.0, 75.0), (4.0, 75.0)]
    assert ages["age of the scores before"] == [(3.0, 8.0), (4.0, 8.0)]


def test_steps_that_were_done_again_count_once(tmp_path: Path, drawn: list[Figure]) -> None:
    events = [*session(0, range(6)), *session(0, range(2, 4), renewed=9)]
    sampling_picture({0: events}, tmp_path / "a.png", title="t", simulated=True)
    _, worth, _, ranks, *_ = map(lines, drawn[0].axes)
    assert [step for step, _ in worth["second moment of the gradient, by scores"]] == [1, 2, 3]
    assert not ranks


def test_it_can_be_seen(tmp_path: Path) -> None:
    events = {rank: list(session(rank, range(40))) for rank in range(2)}
    assert sampling_picture(events, tmp_path / "a.png", title="t", simulated=True)
    assert (tmp_path / "a.png").stat().st_size > 15_000


def test_a_run_whose_sampler_scores_nothing_has_none(tmp_path: Path) -> None:
    events: list[Event] = [{"event": "step", "rank": 0, "t": 1.0, "step": 0}]
    assert not sampling_picture({0: events}, tmp_path / "a.png", title="t", simulated=True)
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("name", "value"), [("variance_ratio", "much"), ("score_quantiles", [1.0]), ("scored", True)]
)
def test_damaged_events_are_named(tmp_path: Path, name: str, value: Any) -> None:
    events = list(session(0, range(3)))
    events[2][name] = value
    with pytest.raises(DataError, match=f"rank 0: no number {name}"):
        sampling_picture({0: events}, tmp_path / "a.png", title="t", simulated=True)
