"""Batches as large as replicas are fast: shares, draws, decisions and their replay."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import farflung
from farflung.devices import DeviceProfile
from farflung.errors import ConfigError
from farflung.faults import FaultPlan
from farflung.sampling import Balanced, balanced_counts
from farflung.telemetry import Event
from farflung.types import PoolView

QUADRATIC: dict[str, Any] = {"workload": "synthetic/quadratic", "batch_size": 12, "network": "wifi-100mbps"}
DEVICE = DeviceProfile("slow", 0.05 / 3)
SLOW = FaultPlan().slow(3, factor=3.0, at_s=0.0)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), st.integers(9, 500))
def test_shares_are_whole_and_in_proportion(speeds: list[float], total: int) -> None:
    counts = balanced_counts(speeds, total)
    assert sum(counts) == total
    assert min(counts) >= 1
    exact = [total * speed / sum(speeds) for speed in speeds]
    raised = sum(max(0.0, 1 - share) for share in exact)
    assert all(abs(count - share) <= 1 + raised for count, share in zip(counts, exact, strict=True))


def test_each_sample_comes_once_in_a_pass_while_shares_change() -> None:
    samplers = [Balanced(7) for _ in range(3)]
    drawn: list[int] = []
    for rank, sampler in enumerate(samplers):
        sampler.meet(rank, 3)
    for step in range(10):
        for rank, sampler in enumerate(samplers):
            sampler.share([[2, 2, 2], [3, 2, 1], [1, 4, 1]][step % 3])
            drawn += sampler.next(PoolView(step, rank, 3, 2, 60, 1.0)).ids.tolist()
    assert sorted(drawn) == list(range(60))


def told(**settings: Any) -> tuple[farflung.Run, list[Event]]:
    events: list[Event] = []
    return farflung.simulate(**{**QUADRATIC, **settings}, show=events.append), events


def shares(events: list[Event], rank: int = 0) -> list[Any]:
    return [event["samples"] for event in events if event["event"] == "shares" and event["rank"] == rank]


def test_all_end_their_computation_together_and_a_step_takes_as_many_samples() -> None:
    both = {"workers": 4, "steps": 40, "device": DEVICE, "faults": SLOW}
    plain, _ = told(**both)
    run, events = told(sampler="balanced(every=4)", **both)
    assert shares(events)[0] == [14, 15, 14, 5] or sorted(shares(events)[0]) == [5, 14, 14, 15]
    assert run.summary["samples"] == plain.summary["samples"] == 40 * 48
    assert shares(events) == shares(events, 3)
    late = [event for event in events if event["event"] == "step" and int(str(event["step"])) > 30]
    took = [
        statistics.median(float(str(e["compute_s"])) for e in late if e["rank"] == rank) for rank in range(4)
    ]
    assert max(took) < 1.1 * min(took)
    assert float(str(run.summary["duration_s"])) < 0.6 * float(str(plain.summary["duration_s"]))
    assert run.summary["final_loss"] == pytest.approx(plain.summary["final_loss"], rel=0.01)


def test_little_gained_changes_nothing() -> None:
    _, events = told(
        workers=2, steps=20, sampler="balanced(every=4)", faults=FaultPlan().slow(1, factor=1.1, at_s=0.0)
    )
    assert {tuple(each) for each in shares(events)} == {(12, 12)}


@pytest.mark.parametrize("schedule", ["synchronous", "pipelined(width=2)", "local_sgd(sync_every=2)"])
def test_a_replay_has_equal_bits(schedule: str, tmp_path: Path) -> None:
    """Real replicas, whose batches follow their measured speeds, and virtual time."""
    settings: dict[str, Any] = {
        "workload": "synthetic/quadratic", "workers": 2, "steps": 30, "batch_size": 12, "schedule": schedule,
        "sampler": "balanced(every=4, least_gain=0)", "collective": "direct",
    }  # fmt: skip
    real = farflung.train(**settings, out=tmp_path / "real")
    again = farflung.simulate(
        **settings, network="wifi-100mbps", replay=tmp_path / "real" / "decisions.jsonl"
    )
    assert '"shares"' in (tmp_path / "real" / "decisions.jsonl").read_text()
    for name, tensor in real.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_shares_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    both = {"workers": 4, "faults": SLOW, "device": DEVICE, "sampler": "balanced(every=4)"}
    _, events = told(**both, steps=20, out=tmp_path / "run")
    more: list[Event] = []
    farflung.simulate(resume=tmp_path / "run", steps=24, faults=SLOW, device=DEVICE, show=more.append)
    first = [event["batch"] for event in more if event["event"] == "step" and event["step"] == 20]
    assert sorted(map(int, map(str, first))) == sorted(shares(events)[-1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"partition": "iid"}, "leave out --partition"),
        ({"stream": "rate(20)"}, "leave out --stream and --sharing"),
        ({"elastic": "1"}, "leave out --sampler"),
        ({"sampler": "balanced(every=0)"}, "every"),
        ({"sampler": "balanced(least_gain=1)"}, "least_gain"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        told(**{"workers": 2, "steps": 4, "sampler": "balanced", **options})
