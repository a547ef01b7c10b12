"""Means of the replicas that come first: which gradients they are made of, and what that saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import farflung
from farflung.decisions import DecisionLog
from farflung.devices import DeviceProfile
from farflung.faults import FaultPlan
from farflung.types import Decision
from tests.schedules.runs import Run
from tests.schedules.test_rewrites import Network, gradient, mean

SIZE, STEPS, RATE = 3, 30, 0.05
SLOW = FaultPlan().slow(2, factor=2.5, at_s=0.0)


def trained(schedule: str, replay: list[Decision] | None = None) -> tuple[Run, list[Network], DecisionLog]:
    networks: list[Network] = []

    def network() -> Network:
        networks.append(Network(samples=64))
        return networks[-1]

    log = DecisionLog(replay=replay)
    settings = {"steps": STEPS, "learning_rate": RATE}
    around = {"faults": SLOW if replay is None else FaultPlan(), "decisions": log}
    run = Run(schedule, SIZE, workload=network, settings=settings, seconds_per_sample=0.01, around=around)
    return run, networks, log


def parameters(run: Run, rank: int = 0) -> torch.Tensor:
    last_first = reversed(list(run.replicas[rank].model.parameters()))
    return torch.cat([p.detach().reshape(-1) for p in last_first])


def decided(log: DecisionLog, late: bool) -> tuple[dict[int, Any], set[tuple[int, int]]]:
    """The gradients of each mean, by step and rank, and what was not computed."""
    means, out = {}, set[tuple[int, int]]()
    for each in log.entries:
        value: Any = each.value
        if each.name == "decoded":
            ranks, others = value if late else (value, [])
            means[each.step] = [(each.step, rank) for rank in ranks] + [(step, rank) for step, rank in others]
        elif each.name == "left_out" and value:
            assert each.rank is not None
            out.add((each.step, each.rank))
    return means, out


@pytest.mark.parametrize(
    "schedule",
    [
        "backup_workers",
        "backup_workers(late_steps=4)",
        "backup_workers(grace_s=0.2)",
        "backup_workers(2, late_steps=9)",
    ],
)
def test_a_mean_is_of_the_gradients_that_were_decided(schedule: str) -> None:
    """Chen et al. 2016, by the decisions of the run, with gradients at the parameters of their own steps."""
    run, networks, log = trained(schedule)
    w = parameters(run)
    run.whole()
    late = "late" in schedule
    means, out = decided(log, late)
    left = [iter(network.batches) for network in networks]
    gradients = {}
    for step in range(STEPS):
        for rank in range(SIZE):
            if (step, rank) not in out:
                gradients[step, rank] = gradient(w, next(left[rank]))
        w = w - RATE * mean([gradients[at] for at in means[step]])
    for rank in range(SIZE):
        torch.testing.assert_close(parameters(run, rank), w, rtol=0.0, atol=1e-12)
    taken = [at for ats in means.values() for at in ats]
    assert len(taken) == len(set(taken)), "none counts twice"
    slow = {at for at in gradients if at[1] == 2}
    if late:
        assert slow & set(taken), "what was late counts later"
        assert any(step != at[0] for step, ats in means.items() for at in ats)
    elif "grace" not in schedule:
        assert out, "steps whose means are there are not computed"
        assert len(slow & set(taken)) < STEPS / 3


@pytest.mark.parametrize("schedule", ["backup_workers", "backup_workers(grace_s=0.05, late_steps=4)"])
def test_a_replay_has_equal_bits_at_other_speeds(schedule: str) -> None:
    run, _, log = trained(schedule)
    run.whole()
    again, _, _ = trained(schedule, replay=log.entries)
    again.whole()
    assert torch.equal(parameters(run), parameters(again))


def test_a_slow_device_does_not_hold_up_the_others() -> None:
    took = {}
    for schedule in ("synchronous", "backup_workers"):
        run = farflung.simulate(
            "synthetic/quadratic", workers=4, steps=20, batch_size=8, schedule=schedule, network="lan-1g",
            device=DeviceProfile("slow", 0.01), faults=FaultPlan().slow(3, factor=3.0, at_s=0.0),
        )  # fmt: skip
        took[schedule] = float(str(run.summary["duration_s"]))
    assert took["backup_workers"] < 0.6 * took["synchronous"]


def test_real_replicas_agree_and_virtual_time_repeats_them(tmp_path: Any) -> None:
    settings: dict[str, Any] = {
        "workload": "synthetic/quadratic", "workers": 3, "steps": 20, "batch_size": 8,
        "schedule": "backup_workers(late_steps=3)",
    }  # fmt: skip
    real = farflung.train(**settings, out=tmp_path / "real")
    again = farflung.simulate(**settings, network="lan-1g", replay=tmp_path / "real" / "decisions.jsonl")
    for name, tensor in real.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
