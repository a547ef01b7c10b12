"""How long a schedule's steps take, from the transfers that it plans: no arithmetic, no messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from farflung.errors import ConfigError
from farflung.types import Bucket, Schedule, SharedStats, Transfer

__all__ = ["Costs", "Move", "Timeline", "timeline"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What the parts of a step take, in seconds.

    Args:
      forward_s: of a step.
      backward_s: of a step; buckets fill at even parts of it.
      update_s: the optimizer's.
      latency_s: of an exchange, while the network may carry others.
      busy_s: how long an exchange keeps the network to itself.
    """

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    latency_s: float = 0.0
    busy_s: Callable[[Transfer], float] = lambda transfer: 0.0


@dataclass(frozen=True, slots=True)
class Move:
    """One transfer in time.

    Args:
      step: it started at.
      transfer: as planned.
      began_s: when it was ready to go.
      ended_s: when its result was there.
    """

    step: int
    transfer: Transfer
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps and transfers of a run.

    Args:
      ends_s: of each step.
      moves: in the order they started.
    """

    ends_s: tuple[float, ...]
    moves: tuple[Move, ...]

    def period_s(self, steps: int) -> float:
        """Seconds for each of the last so many steps."""
        if not 0 < steps < len(self.ends_s):
            raise ConfigError(
                f"steps {steps}: must be above 0 and below the {len(self.ends_s)} of the timeline"
            )
        return (self.ends_s[-1] - self.ends_s[-1 - steps]) / steps


def timeline(schedule: Schedule, buckets: Sequence[Bucket], costs: Costs, steps: int) -> Timeline:
    """Plays a schedule on one processor and one network that carries exchanges one after the other.

    Gradients start as their buckets fill, updates after the optimizer. What is due is waited for: gradients before
    the optimizer, updates after it. A schedule that asks for times is told those of this model.

    Args:
      schedule: whose transfers are played.
      buckets: of the model.
      costs: of steps and exchanges.
      steps: how many.
    """
    state, parts = schedule.init(), schedule.parts(buckets)
    now, free = 0.0, 0.0
    ends: list[float] = []
    moves: list[Move] = []
    waiting: list[Move] = []
    asked: set[int] = set()

    def start(step: int, transfer: Transfer, ready: float) -> None:
        nonlocal free
        free = max(free, ready) + costs.busy_s(transfer)
        waiting.append(Move(step, transfer, ready, free + costs.latency_s))
        moves.append(waiting[-1])

    def due(step: int, *, gradients: bool) -> list[Move]:
        found = [
            m
            for m in waiting
            if m.transfer.due_step <= step and (m.transfer.merge.moves == "gradient") == gradients
        ]
        waiting[:] = [m for m in waiting if m not in found]
        return found

    work_s = costs.forward_s + costs.backward_s + costs.update_s
    for step in range(steps):
        if schedule.asks(state, step):
            asked.add(step)
        planned = schedule.plan(state, parts, step)
        backward = now + costs.forward_s
        for place, transfer in enumerate(planned, start=1):
            if transfer.merge.moves == "gradient":
                start(step, transfer, backward + costs.backward_s * place / len(planned))
        arrived = due(step, gradients=True)
        now = max([backward + costs.backward_s, *(move.ended_s for move in arrived)]) + costs.update_s
        for transfer in planned:
            if transfer.merge.moves != "gradient":
                start(step, transfer, now)
        late = due(step, gradients=False)
        now = max([now, *(move.ended_s for move in late)])
        arrived += late
        for origin in sorted({move.step for move in arrived}):
            took = max(m.ended_s for m in arrived if m.step == origin) - min(
                m.began_s for m in arrived if m.step == origin
            )
            stats = SharedStats(origin, 0.0, 1.0)
            if origin in asked:
                stats = replace(stats, elapsed_s=now, step_s=work_s, exchange_s=took)
            state = schedule.observe(state, stats)
        ends.append(now)
    return Timeline(tuple(ends), tuple(moves))
