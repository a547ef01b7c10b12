"""When steps end on slow networks: some are simulated, and those to come take as long as the last blocks of these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Kept
from benchmarks.common.worlds import replicas_in
from benchmarks.presets.language import CORPUS, DEVICE, NODES
from farflung.calibration import count_forward_flops
from farflung.config import Training
from farflung.devices import find_device
from farflung.loop import Replica
from farflung.network import find_network
from farflung.recipes import Recipe
from farflung.reducers import REDUCERS, PowerSGD
from farflung.runs import SimulatedConfig
from farflung.runs.simulation import limit_to_one_thread, summarize_rank0_coding
from farflung.schedules import SCHEDULES, Delayed, DiLoCo, Pipelined, PostLocalSGD
from farflung.sim import VirtualWorld
from farflung.spec import format_spec
from farflung.telemetry import Event
from farflung.types import Schedule, Workload
from farflung.workloads import create_workload

__all__ = ["Pace", "Paces", "block", "paces"]

AT_LEAST = 40
"""Steps before those whose time is taken as that of all to come, and as many of these; in whole blocks."""


@dataclass(frozen=True)
class Pace:
    """When steps end.

    Args:
      ends_s: of steps that were simulated.
      window: the last steps that are repeated, not counting an unfinished block.
      repeats_from: the step behind which they begin.
      steps: that follow this pace.
      flush_s: what is under way at its end takes so long.
      sent: bytes of all replicas in the window.
    """

    ends_s: Sequence[float]
    window: int
    repeats_from: int
    steps: int
    flush_s: float
    sent: int

    @property
    def window_s(self) -> float:
        """What the window takes."""
        before = self.ends_s[self.repeats_from - 1] if self.repeats_from else 0.0
        return self.ends_s[self.repeats_from + self.window - 1] - before

    def end_s(self, step: int) -> float:
        """Seconds until so many steps are through."""
        times = max(0, math.ceil((step - len(self.ends_s)) / self.window))
        place = step - times * self.window
        return times * self.window_s + (self.ends_s[place - 1] if place else 0.0)


@dataclass(frozen=True)
class Paces:
    """One after the other.

    Args:
      parts: all but the last end with nothing under way.
      not_charged: methods for some of whose coding the device has no rate.
    """

    parts: Sequence[Pace]
    not_charged: Sequence[str]

    @property
    def sent_a_step(self) -> float:
        """Bytes of all replicas, where nothing changes any more."""
        return self.parts[-1].sent / self.parts[-1].window

    def end_s(self, step: int) -> float:
        """Seconds until so many steps are through, and behind the last one what was under way."""
        total, left = 0.0, step
        for pace in self.parts:
            here = min(left, pace.steps)
            total, left = total + pace.end_s(here), left - here
        return total + (self.parts[-1].flush_s if step == sum(pace.steps for pace in self.parts) else 0.0)


def block(schedule: Schedule) -> int:
    """Steps after which times repeat: a block, and where results are late, what they are late by."""
    match schedule:
        case Delayed(delay=int(delay)):
            return delay + schedule.period
        case Pipelined():
            return schedule.width
        case DiLoCo(warmup=int(warmup)) if warmup:
            return warmup
        case _:
            return int(getattr(schedule, "sync_every", 1))


def paces(recipe: str, network: str, steps: int, *, quick: bool = False) -> Paces:
    """Of all steps of a training, simulated now unless they are kept."""
    task = create_workload("synthetic/quadratic" if quick else CORPUS)
    kept = Kept(Path(__file__).parent, "paces", quick=quick)
    found = []
    config = SimulatedConfig.resolve({"recipe": recipe, "workload": CORPUS, "network": network})
    for parts, part in _phases(config.recipe, steps):
        key = {"parts": dict(parts), "network": network, "steps": part}
        found.append(kept.once(key, partial(_simulated, task, network, parts, part)))
    unknown = dict.fromkeys(method for one in found for method in one["not_charged"])
    return Paces([Pace(**one["pace"]) for one in found], list(unknown))


def _phases(recipe: Recipe, steps: int) -> list[tuple[Mapping[str, Any], int]]:
    """Return the members that do the same again and again, and for how many steps."""
    plain, parts = recipe.settings, recipe.build_components(0)
    first: Mapping[str, Any] = {"schedule": "synchronous"}
    then, until = plain, 0
    if isinstance(parts.schedule, PostLocalSGD):
        then = {**plain, "schedule": f"local_sgd(sync_every={parts.schedule.sync_every})"}
        until = parts.schedule.warmup
    elif isinstance(parts.schedule, DiLoCo) and parts.schedule.warmup:
        first, until = plain, parts.schedule.warmup
        then = {**plain, "schedule": format_spec(replace(parts.schedule, warmup=0), SCHEDULES)}
    elif isinstance(parts.reducer, PowerSGD):
        then = {
            **plain,
            "reducer": format_spec(replace(parts.reducer, dense_steps=0, collective="direct"), REDUCERS),
        }
        until = parts.reducer.with_run_length(steps, 0).dense_steps or 0
    phases = [(first, min(until, steps)), (then, steps - until)]
    return [(members, count) for members, count in phases if count > 0]


def _simulated(task: Workload, network: str, parts: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """A pace, as JSON."""
    device = find_device(DEVICE, forward_flops=count_forward_flops(task))
    world = VirtualWorld(NODES, network=find_network(network).with_nodes(NODES), device=device)
    events: list[Event] = []
    how = Training.resolve(task.defaults, {"steps": steps})
    with limit_to_one_thread():
        replicas = replicas_in(world, task, how, parts, events.append)
        of_block = block(replicas[0].components.schedule)
        whole = of_block * math.ceil(min(AT_LEAST, steps) / of_block)
        seen = min(steps, 2 * whole + steps % of_block)
        window = min(whole, seen)
        starts = seen - steps % of_block - window if seen < steps else seen - window

        async def train(replica: Replica) -> list[int]:
            sent = []
            for _ in range(seen):
                await replica.step()
                sent.append(replica.sent_nbytes)
            await replica.flush()
            return sent

        of_replicas = world.run([train(replica) for replica in replicas])
    ends = [float(event["t"]) for event in events if event["event"] == "step"]  # type: ignore[arg-type]
    sent = [0, *map(sum, zip(*of_replicas, strict=True))]
    return {
        "pace": {
            "ends_s": ends,
            "window": window,
            "repeats_from": starts,
            "steps": steps,
            "flush_s": max(0.0, world.clock.time() - ends[-1]),
            "sent": sent[starts + window] - sent[starts],
        },
        "not_charged": summarize_rank0_coding(world, is_resumed=False).get("coding_not_charged", []),
    }
