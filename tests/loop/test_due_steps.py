"""The steps after which a replica is evaluated and writes a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.schedules.runs import Run


@pytest.mark.parametrize("every", [0, 1, 4, 9, 10])
def test_it_is_done_as_often_as_is_asked_for_and_at_the_end(every: int, tmp_path: Path) -> None:
    run = Run(
        "synchronous",
        settings={"steps": 9, "checkpoint_every": every, "evaluate_every": every},
        folder=tmp_path,
    ).whole()
    wanted = sorted({step for step in range(1, 10) if every and step % every == 0} | {9})
    for replica, events in zip(run.replicas, run.events, strict=True):
        assert replica.checkpoints is not None
        assert sorted(replica.checkpoints.list_complete()) == wanted
        assert [event["step"] for event in events if event["event"] == "checkpoint"] == wanted
    assert [event["step"] for event in run.events[0] if event["event"] == "evaluation"] == wanted
