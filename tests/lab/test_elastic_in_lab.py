"""Elastic runs of real processes on slow links: broken connections, links that are cut, replicas that are killed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.elastic.run import durations, trained
from farflung.faults import FaultPlan

pytestmark = [pytest.mark.lab, pytest.mark.thorough, pytest.mark.timeout(200)]


@pytest.mark.slow
def test_one_that_was_cut_off_is_suspended_and_comes_back() -> None:
    events = trained(
        False, "wifi-100mbps", 4, FaultPlan().cut(3, at_step=10, for_s=6.0), 400, elastic="1", deadline=2.0
    )
    views = [(event["lost"], event["joined"]) for event in events[0] if event["event"] == "view"]
    assert views == [([3], []), ([], [3])]
    losses = [
        [e["mean_loss"] for e in told if e["event"] == "step" and int(str(e["step"])) >= 390]
        for told in events.values()
    ]
    assert len(losses[0]) == 10
    assert losses == [losses[0]] * 4


@pytest.mark.parametrize(
    ("plan", "lost"),
    [
        # Both halves are alive; then a pair is cut off from each other, whose messages another member relays.
        (FaultPlan().reset(0, group=(1,), at_step=10).cut(1, 2, at_step=20, for_s=30.0), [[], []]),
        # Two at once, and the last three are cut into two parts: the part with the majority goes on.
        pytest.param(
            FaultPlan().crash(1, at_step=10).crash(4, at_step=10).cut(0, at_step=20, for_s=30.0),
            [[1, 4], [0]],
            marks=pytest.mark.slow,
        ),
        # One that stands still for longer than the deadline hears that it is out; a short cut changes nothing.
        pytest.param(
            FaultPlan().hang(3, at_step=10, for_s=6.0).cut(0, at_step=20, for_s=0.5),
            [[3]],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            FaultPlan().leave(0, at_step=10).leave(3, at_step=20), [[0], [3]], marks=pytest.mark.slow
        ),
    ],
    ids=["broken connections", "kills and a partition", "a pause", "leaves"],
)
def test_what_is_left_goes_on(plan: FaultPlan, lost: list[list[int]]) -> None:
    gone = {rank for ranks in lost for rank in ranks}
    events = trained(False, "wifi-100mbps", 5, plan, 30, elastic="1", deadline=2.0)
    left = [told for rank, told in events.items() if rank not in gone]
    assert all(len(durations(told)) == 30 for told in left)
    for told in left:
        views: list[Any] = [event["lost"] for event in told if event["event"] == "view"]
        assert [set(ranks) for ranks in views if ranks] == [set(ranks) for ranks in lost if ranks]
    (ended,) = {tuple(e["mean_loss"] for e in told if e["event"] == "step") for told in left}
    assert len(ended) == 30
