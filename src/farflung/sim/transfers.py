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
      encode_s: how long it keeps the processor that codes, before it leaves.
      decode_s: the same once it has arrived.
    """

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    latency_s: float = 0.0
    busy_s: Callable[[Transfer], float] = lambda transfer: 0.0
    encode_s: Callable[[Transfer], float] = lambda transfer: 0.0
    decode_s: Callable[[Transfer], float] = lambda transfer: 0.0


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
    the optimizer, updates after it. A second processor codes beside the first, one piece after the other as they
    come. A schedule that asks for times is told those of this model.

    Args:
      schedule: whose transfers are played.
      buckets: of the model.
      costs: of steps and exchanges.
      steps: how many.
    """
    state, parts = schedule.init(), schedule.parts(buckets)
    now, free = 0.0, 0.0
    ends: list[float] = []
    lane = _Lane(costs)
    waiting: list[int] = []
    asked: set[int] = set()

    def start(step: int, transfer: Transfer, ready: float) -> None:
        nonlocal free
        free = max(free, lane.encoded_s(transfer, ready)) + costs.busy_s(transfer)
        waiting.append(lane.arrives(step, transfer, ready, free + costs.latency_s))

    def due(step: int, *, gradients: bool) -> list[Move]:
        found = []
        for number in [*waiting]:
            transfer = lane.moves[number].transfer
            if transfer.due_step <= step and (transfer.merge.moves == "gradient") == gradients:
                waiting.remove(number)
                found.append(lane.decoded(number))
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
    lane.decode_all()
    return Timeline(tuple(ends), tuple(lane.moves))


class _Lane:
    """The processor that codes: pieces in the order in which transfers are ready and arrive.

    Transfers are told of by rising times of both, and what is asked for is asked for in that order.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs, self._free_s, self._decoded = costs, 0.0, 0
        self.moves: list[Move] = []
        """Those that are not decoded end when they arrive."""

    def encoded_s(self, transfer: Transfer, ready: float) -> float:
        """When a transfer that is ready now has been encoded."""
        while self._decoded < len(self.moves) and self.moves[self._decoded].ended_s <= ready:
            self._decode()
        self._free_s = max(self._free_s, ready) + self._costs.encode_s(transfer)
        return self._free_s

    def arrives(self, step: int, transfer: Transfer, began_s: float, at_s: float) -> int:
        """A transfer will be there; its number."""
        self.moves.append(Move(step, transfer, began_s, at_s))
        return len(self.moves) - 1

    def decoded(self, number: int) -> Move:
        """A transfer once it has been decoded."""
        while self._decoded <= number:
            self._decode()
        return self.moves[number]

    def decode_all(self) -> None:
        """Whatever has been told of."""
        while self._decoded < len(self.moves):
            self._decode()

    def _decode(self) -> None:
        move = self.moves[self._decoded]
        self._free_s = max(self._free_s, move.ended_s) + self._costs.decode_s(move.transfer)
        self.moves[self._decoded] = replace(move, ended_s=self._free_s)
        self._decoded += 1
