"""Requests to stop under local steps: all replicas end at one step, which none of them had begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farflung.devices import DeviceProfile
from farflung.faults import FaultPlan
from farflung.runs import Run, simulate
from farflung.telemetry import Event
from tests.schedules.runs import Run as Replicas

LOCAL = "diloco(sync_every=500)"
STEPS, DEADLINE_S = 400, 5.0


def slow_by(*factors: float) -> list[DeviceProfile]:
    return [DeviceProfile(forward_s=0.01 * factor) for factor in factors]


@pytest.mark.parametrize("asked", [0, 1, 2])
@pytest.mark.parametrize("schedule", [LOCAL, "local_sgd(sync_every=200)", "streaming_diloco(sync_every=200)"])
def test_the_last_step_is_the_one_after_the_latest_that_has_begun(schedule: str, asked: int) -> None:
    run = Replicas(schedule, 3, settings={"steps": 150}, around={"device": slow_by(1.0, 3.1, 2.3)})
    replica = run.replicas[asked]
    replica._stop_agreement._is_requested_here = lambda: replica.completed_steps == 5
    run.whole()
    asked_s = float(str(run.step_events(asked)[4]["t"]))
    begun = [sum(float(str(event["t"])) <= asked_s for event in run.step_events(rank)) for rank in range(3)]
    begun[asked] -= 1  # it waits for the agreement at the end of its step
    assert {replica.completed_steps for replica in run.replicas} == {max(begun) + 2}


class Stops:
    """Asks for a stop once a rank has done a step; keeps all events."""

    def __init__(self, rank: int, step: int) -> None:
        self._rank, self._step, self.events, self.asked = rank, step, list[Event](), False

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if (event["event"], event["rank"], event.get("step")) == ("step", self._rank, self._step):
            self.asked = True

    def stopped(self, out: Path, faults: FaultPlan, **settings: Any) -> Run:
        return simulate(
            "synthetic/quadratic", sink=self, should_stop=lambda: self.asked, out=out, workers=3, steps=STEPS,
            network="4g", device=DeviceProfile(forward_s=0.01), schedule=LOCAL, elastic="1", deadline=DEADLINE_S,
            evaluate_every=0, checkpoint_every=0, faults=faults, **settings,
        )  # fmt: skip

    def steps_of(self, rank: int) -> int:
        return sum(event["event"] == "step" and event["rank"] == rank for event in self.events)


def asked_s(out: Path, faults: FaultPlan | None = None) -> float:
    """When the stop is asked for, if nothing else goes wrong."""
    stops = Stops(0, 5)
    stops.stopped(out, faults or FaultPlan())
    return next(float(str(e["t"])) for e in stops.events if e.get("step") == 5 and e["rank"] == 0)


@pytest.mark.parametrize("after_s", [-0.02, 0.0, 0.02, 0.04, 0.06, 0.08, 0.1])
@pytest.mark.parametrize("fault", ["crash", "hang", "leave"])
def test_those_that_are_left_agree(fault: str, after_s: float, tmp_path: Path) -> None:
    lasts = {"for_s": 60.0} if fault == "hang" else {}
    at_s = asked_s(tmp_path / "before") + after_s
    faults = getattr(FaultPlan(), fault)(1, at_s=at_s, **lasts)
    stops = Stops(0, 5)
    run = stops.stopped(tmp_path / "run", faults)
    steps = run.summary["steps"]
    assert run.summary["stopped"]
    assert stops.steps_of(0) == stops.steps_of(2) == steps
    assert run.files.get_checkpoints(0, 3, is_leader=True, allows_any_size=True).find_newest() == steps
    ends_s = [float(str(e["t"])) for e in stops.events if e["event"] == "end" and e["rank"] in (0, 2)]
    assert max(ends_s) < at_s + 4 * DEADLINE_S, "one that is silent is waited for no longer"


@pytest.mark.parametrize("after_s", [0.06, 0.08, 0.1, 0.12, 0.14, 0.16])
def test_a_step_that_one_member_knows_is_adopted_by_the_next_view(after_s: float, tmp_path: Path) -> None:
    """Rank 1, which is the furthest, reports to rank 0 alone, and is lost."""
    slow = FaultPlan().slow(0, factor=3.0, at_s=0.0).slow(2, factor=3.0, at_s=0.0)
    at_s = asked_s(tmp_path / "before", slow)
    faults = slow.cut(1, 2, at_s=at_s, for_s=60.0, one_way=True).crash(1, at_s=at_s + after_s)
    stops = Stops(0, 5)
    run = stops.stopped(tmp_path / "run", faults)
    assert stops.steps_of(0) == stops.steps_of(2) == run.summary["steps"]
    assert stops.steps_of(0) >= stops.steps_of(1)


def test_one_that_leaves_ends_with_its_step(tmp_path: Path) -> None:
    stops = Stops(0, STEPS)
    stops.stopped(tmp_path / "run", FaultPlan().leave(1, at_step=5))
    assert stops.steps_of(0) == STEPS
    assert 5 <= stops.steps_of(1) <= 15, "it leaves once the others have agreed, a few round trips later"
