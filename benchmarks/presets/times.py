"""When steps end on slow networks: some are simulated, and those to come take as long as the last blocks of these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Kept
from benchmarks.common.worlds import replicas_in
from benchmarks.presets.language import Language, settings, world_on
from benchmarks.presets.methods import RATES, parts_of
from farflung.recipes import recipe
from farflung.replica import Replica
from farflung.runs.simulation import coding_told, one_thread
from farflung.schedules import Delayed, Pipelined, PostLocalSGD
from farflung.telemetry import Event
from farflung.types import Schedule
from farflung.workloads import workload

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
        case _:
            return int(getattr(schedule, "sync_every", 1))


def paces(preset: str, network: str, *, quick: bool = False) -> Paces:
    """Of all steps of a training, simulated now unless they are kept."""
    training = Language(preset, min(RATES), network)
    if quick:
        training = training.quickly()
    kept = Kept(Path(__file__).parent, "paces", quick=quick)
    found = []
    for parts, steps in _phases(preset, training.steps):
        key = {"parts": dict(parts), "network": network, "steps": steps}
        found.append(kept.once(key, partial(_simulated, training, parts, steps)))
    unknown = dict.fromkeys(method for one in found for method in one["not_charged"])
    return Paces([Pace(**one["pace"]) for one in found], list(unknown))


def _phases(preset: str, steps: int) -> list[tuple[Mapping[str, Any], int]]:
    """Parts whose schedule does the same again and again, and for how many steps."""
    plain, schedule = parts_of(preset), recipe(preset).parts(0).schedule
    if not isinstance(schedule, PostLocalSGD):
        return [(plain, steps)]
    until = min(schedule.until, steps)
    found: list[tuple[Mapping[str, Any], int]] = [({**plain, "schedule": "synchronous"}, until)]
    if until < steps:
        later = f"local_sgd(sync_every={schedule.sync_every})"
        found.append(({**plain, "schedule": later}, steps - until))
    return found


def _simulated(training: Language, parts: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """A pace, as JSON."""
    task = workload(training.workload)
    world = world_on(training.network, task)
    events: list[Event] = []
    how = settings(task, training.preset, training.steps, training.learning_rate)
    with one_thread():
        replicas = replicas_in(world, task, how, parts, events.append)
        of_block = block(replicas[0].parts.schedule)
        whole = of_block * math.ceil(min(AT_LEAST, training.steps) / of_block)
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
            "flush_s": max(0.0, world.clock.now() - ends[-1]),
            "sent": sent[starts + window] - sent[starts],
        },
        "not_charged": coding_told(world, resumed=False).get("coding_not_charged", []),
    }
