"""Elastic runs in virtual time where a replica dies or hangs at any point of their start, as ``attach`` starts them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from farflung.comm import Purpose
from farflung.engine.averaging import broadcast, find_unequal
from farflung.errors import FarflungError
from farflung.faults import FaultPlan
from farflung.membership import PaxosMembership
from farflung.network import find_network
from farflung.runs.config import SimulatedConfig
from farflung.runs.replicas import make_replica
from farflung.runs.simulation import run_replica
from farflung.sim import VirtualRuntime, VirtualWorld
from farflung.telemetry import Event, Telemetry
from farflung.wall.visits import _agree_key
from tests.covering import thorough

STEPS, DEADLINE_S, TENSORS = 6, 2.0, 300
"""So many tensors are three messages."""


@dataclass
class Start:
    """How a run has ended.

    Args:
      stages: what each replica came to: ``start``, ``trains`` or ``ended``.
      errors: of those that ended with one.
      begun_s: when each began to train.
      ended_s: when each ended, in virtual seconds.
      models: of those that came to the end.
    """

    stages: dict[int, str]
    errors: dict[int, FarflungError]
    begun_s: dict[int, float]
    ended_s: dict[int, float]
    models: dict[int, Any]


def start(size: int, faults: FaultPlan, schedule: str = "synchronous", seed: int = 0) -> Start:
    """Starts replicas that have unlike parameters, and has them train."""
    config = SimulatedConfig.resolve(
        {"workload": "synthetic/quadratic", "workers": size, "steps": STEPS, "batch_size": 4, "seed": seed}
        | {"recipe": f"synchronous(schedule='{schedule}')"}
    )
    world = VirtualWorld(
        size,
        network=find_network("wifi-10mbps"),
        seconds_per_sample=0.001,
        faults=faults,
        needs_all_members=False,
        deadline_s=DEADLINE_S,
        count_evaluation=True,
        seed=seed,
    )
    ended = Start({}, {}, {}, {}, {})
    events = list[Event]()

    async def attach(runtime: VirtualRuntime) -> None:
        rank = runtime.comm.rank
        telemetry = Telemetry(rank, events.append, world.injector)
        replica = make_replica(runtime, config.task, config.recipe, config.training, telemetry)
        tensors = [torch.full((100,), float(rank)) for _ in range(TENSORS)]
        ended.stages[rank] = "start"
        try:
            unequal = await find_unequal(runtime, tensors, 0, purpose=Purpose.START)
            await broadcast(runtime, [tensors[index] for index in unequal], 0)
            assert all(not tensor.any() for tensor in tensors)
            key = await runtime.launch(_agree_key(runtime, range(size)))  # type: ignore[arg-type]
            runtime.elastic = PaxosMembership(
                runtime,
                key,
                patience_s=DEADLINE_S,
                max_steps_ahead=replica.components.schedule.max_steps_ahead,
            )
            ended.stages[rank], ended.begun_s[rank] = "trains", runtime.read_clock()
            _, ended.models[rank] = await run_replica(replica)
            ended.stages[rank] = "ended"
        except FarflungError as error:
            ended.errors[rank] = error
        finally:
            ended.ended_s[rank] = runtime.read_clock()

    world.run([attach(runtime) for runtime in world.runtimes])
    return ended


def plan(seed: int) -> tuple[int, int, float, str, str]:
    """Draws the replicas, the one that is lost, the part of the start after which it is, how, and the schedule.

    Half of the losses are about when the run becomes elastic.
    """
    draw = random.Random(seed)
    size = draw.choice([2, 2, 3, 4])
    schedule = draw.choice(["synchronous", "delayed(delay=2)", "local_sgd(sync_every=3)"])
    at = draw.uniform(0.0, 1.2) if draw.random() < 0.5 else draw.uniform(0.9, 1.05)
    return size, draw.randrange(size), at, draw.choice(["crash", "crash", "hang"]), schedule


def check(seed: int) -> Start:
    """Checks that all others train on as one, or stop by name, soon after one is lost."""
    size, lost, at, kind, schedule = plan(seed)
    at_s = at * max(start(size, FaultPlan(), schedule, seed).begun_s.values())
    faults = FaultPlan().crash(lost, at_s=at_s) if kind == "crash" else FaultPlan().hang(lost, at_s=at_s)
    ended = start(size, faults, schedule, seed)
    for rank in set(range(size)) - {lost}:
        assert rank in ended.models or rank in ended.errors, f"rank {rank} has not come to an end"
        assert ended.ended_s[rank] < at_s + 10 * DEADLINE_S
    models = [ended.models[rank] for rank in sorted(ended.models.keys() - {lost})]
    assert all(torch.equal(model[name], tensor) for model in models for name, tensor in models[0].items())
    if ended.errors:
        first = min(ended.errors, key=lambda rank: ended.ended_s[rank])
        assert re.search(rf"lost rank {lost}:|may be alive: {lost};", str(ended.errors[first]))
    return ended


@pytest.mark.parametrize("seed", [*range(8), *thorough(*range(8, 24))])
def test_where_one_is_lost_at_the_start_the_others_train_on_or_stop_by_name(seed: int) -> None:
    check(seed)
