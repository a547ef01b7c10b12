"""The coordinator: it has labels, weights and the registry, turns products into rounds, and sees no features."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from farflung.coded import messages
from farflung.coded.decoding import Plans
from farflung.coded.members import REPORTS, Members
from farflung.coded.messages import End, Failed, Malformed, Probe, unpacked
from farflung.coded.queues import Queue
from farflung.coded.record import Record
from farflung.coded.registry import Kind, Partition, Registry
from farflung.coded.rounds import Deadline, Round
from farflung.coded.settings import Settings
from farflung.errors import RunLost, WaitEnded
from farflung.files import deciding
from farflung.types import Decision, Json, Payload, Runtime, Tag

__all__ = ["Coordinator", "Counters", "PartitionsChanged"]

_BACK_S = 10.0
"""The time for which a restarted coordinator waits for all devices, where those that are there would do."""
_LOOKS = 5.0
"""Time between two probes of devices that make blocks, in times of the shortest deadline."""
_PLANS = 512
"""Sets of answers whose decoding is remembered; those of one round come again in the next."""


class PartitionsChanged(Exception):
    """Other samples are trained on from now on, so a product that was under way is of no use."""


@dataclass(slots=True)
class Counters:
    """Counts of a run.

    Args:
      rounds: products and parts of products that devices were asked for.
      refused: messages that were not of their form, or that were not expected.
      late: answers for pieces that were decoded before.
    """

    rounds: int = 0
    refused: int = 0
    late: int = 0


@dataclass(frozen=True, slots=True)
class _Told:
    """A message of a device: a report, or a piece of the product of a round."""

    rank: int
    payload: Payload
    round: int | None = None


@dataclass(frozen=True, slots=True)
class _Moved:
    """A device is gone, or one has come that may have the rank of an earlier one."""

    rank: int
    gone: bool


@dataclass(frozen=True, slots=True)
class _Alarm:
    """A time that was asked for has come."""

    number: int


_Event: TypeAlias = _Told | _Moved | _Alarm


class Coordinator:
    """Rank 0 of a run: gathers devices, orders blocks, and computes the two products of all samples.

    Args:
      runtime: the world.
      settings: of the run.
      run: its name, by which devices know their blocks.
      record: keeps events, and the registry for a restarted coordinator; ``None``: nothing is kept.
    """

    def __init__(
        self, runtime: Runtime, settings: Settings, *, run: str = "run", record: Record | None = None
    ) -> None:
        self.members = Members(runtime, settings, run, record)
        self.counters = Counters()
        self._runtime, self._comm, self._settings = runtime, runtime.comm, settings
        self._events = Queue[_Event]()
        self._plans = Plans[int](_PLANS)
        self._deadlines: dict[Kind, Deadline] = {
            kind: Deadline(settings.patience_s, least_s=settings.least_s) for kind in settings.kinds
        }
        self._rounds: dict[int, Round] = {}
        """Under way, by number."""
        self._gone: set[int] = set()
        """Ranks whose messages from before their loss are ignored."""
        self._refused: Counter[int] = Counter()
        """Messages, by sender."""
        self._alarms, self._alarm, self._overdue = 0, 0, False
        self._look = self._alarm_at(runtime.now() + _LOOKS * settings.least_s)
        for service in (self._listen(messages.REPORT, None), self._departures(), self._arrivals()):
            runtime.launch(service)

    @property
    def registry(self) -> Registry:
        """The state of members, partitions and blocks."""
        return self.members.registry

    # --- a run ------------------------------------------------------------------------------------------------------

    async def gather(self) -> None:
        """Waits for the devices and partitions of the beginning, and has their data encoded; does nothing later.

        Raises:
          RunLost: they do not come, or are lost while data are encoded.
        """
        wanted, members, registry = self._settings, self.members, self.registry
        if members.encoded:
            return
        members.tell("begins")
        enough_at = self._runtime.now() + _BACK_S
        if members.again:
            self._alarm_at(enough_at)

        def brought() -> int:
            return sum(registry.raw(one) is not None for one in registry.partitions)

        await self._until(
            lambda: (
                (len(registry.members) >= wanted.devices and brought() >= wanted.partitions)
                or (members.again and self._runtime.now() >= enough_at and members.decodable())
            ),
            lambda: (
                f"{len(registry.members)} of {wanted.devices} devices and {brought()} of "
                f"{wanted.partitions} partitions have come"
            ),
        )
        members.begin()
        await self._until(
            lambda: not registry.making() and members.decodable(), lambda: members.in_need(wanted.kinds[-1])
        )
        members.tell("encoded")

    def settle(self) -> list[Partition]:
        """Lists the partitions that are trained on from now on, in the order of their samples."""
        return self.members.settle()

    @property
    def changed(self) -> bool:
        """Whether there are other partitions than those that are trained on."""
        return self.members.changed

    @property
    def samples(self) -> int:
        """Rows of all data that are trained on."""
        return sum(partition.rows for partition in self.registry.active)

    @property
    def features(self) -> int:
        return self.registry.features

    async def times(self, weights: Tensor) -> Tensor:
        """Multiplies all samples by weights; see :class:`farflung.coded.Products`.

        Raises:
          PartitionsChanged: some of the data are lost for good, and training goes on without them.
          RunLost: too few devices are left, and none has come for the patience of the run.
        """
        heights = [partition.rows for partition in self.registry.active]
        return torch.cat((await self._carry(self._round("rows", weights, (), heights))).products)

    async def transposed_times(self, residuals: Tensor) -> Tensor:
        active, bounds = self.registry.active, self.registry.bounds
        if self._settings.transposed == "repair":
            return await self._by_repair(active, residuals)
        widths = [end - begin for begin, end in pairwise(bounds)]
        numbers = tuple(partition.number for partition in active)
        return torch.cat((await self._carry(self._round("columns", residuals, numbers, widths))).products)

    async def _by_repair(self, active: Sequence[Partition], residuals: Tensor) -> Tensor:
        """Multiplies each partition on its own device, and on all others for a device that does not answer.

        Rows alone are coded, so a coded answer is a sum over partitions with one operand. Of its decoded parts, those
        of the other partitions are of no use.
        """
        features = self.registry.features
        parts = torch.split(residuals, [partition.rows for partition in active])
        own = {
            one.number: self._round("rows", part, (one.number,), [features], [one.number])
            for one, part in zip(active, parts, strict=True)
            if self.registry.raw(one) is not None
        }
        if own:
            await self._carry(*own.values(), patiently=False)
        total = torch.zeros(features, residuals.shape[1], dtype=torch.float64)
        for place, (one, part) in enumerate(zip(active, parts, strict=True)):
            found = own.get(one.number)
            if found is not None and found.complete:
                total += found.products[0]
                continue
            whole = await self._carry(self._round("rows", part, (one.number,), [features] * len(active)))
            total += whole.products[place]
        return total

    async def end(self, reason: str = "") -> None:
        """Lets all devices go."""
        for told in [self.members.send(rank, End(reason)) for rank in self.registry.members]:
            await told

    # --- rounds -----------------------------------------------------------------------------------------------------

    def _round(
        self,
        kind: Kind,
        operand: Tensor,
        partitions: tuple[int, ...],
        heights: Sequence[int],
        unknowns: Sequence[int] | None = None,
    ) -> Round:
        self.counters.rounds += 1
        number = self.counters.rounds
        return Round(
            number,
            kind,
            self.registry.unknowns(kind) if unknowns is None else unknowns,
            heights,
            operand.clone(),
            partitions,
            self._settings.pieces,
            self._plans,
            self._settings.max_condition,
            _replayed(self._runtime.decisions.replayed("answers", number, self._comm.rank)),
        )

    async def _carry(self, *rounds: Round, patiently: bool = True) -> Round:
        """Has rounds answered, side by side; returns the last of them.

        Args:
          rounds: of one kind.
          patiently: whether to wait until they are complete; otherwise until the learned deadline.
        """
        kind, begin = rounds[0].kind, self._runtime.now()
        self._rounds = {one.number: one for one in rounds}
        self._overdue, self.members.stirred = False, True
        for number in self._rounds:
            self._runtime.launch(self._listen(messages.answers(number), number))
        self._watch(kind)
        try:
            await self._until(
                lambda: all(one.complete for one in rounds) or (self._overdue and not patiently),
                lambda: self.members.in_need(kind),
            )
        finally:
            for number, one in self._rounds.items():
                self._runtime.launch(self._forget(number))
                self.counters.late += one.late
            self._rounds = {}
        if not self._overdue:
            self._deadlines[kind].learn(self._runtime.now() - begin)
        for one in rounds:
            if one.complete:
                self._runtime.decide_own("answers", one.number, partial(_as_json, one))
        return rounds[-1]

    def _ask(self) -> None:
        """Has all blocks multiplied that can answer and were not asked yet."""
        for one in self._rounds.values():
            blocks = [block for block in self.registry.answering(one.kind) if one.serves(block)]
            for rank, task in one.tasks(blocks, min(self._rounds)).items():
                self.members.send(rank, task)

    def _watch(self, kind: Kind) -> None:
        self._alarm = self._alarm_at(self._runtime.now() + self._deadlines[kind].seconds)

    # --- events -----------------------------------------------------------------------------------------------------

    async def _until(self, there: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Takes in events until a condition holds.

        Raises:
          RunLost: no event has brought it nearer for the patience of the run.
        """
        patience_s = self._settings.patience_s
        since, alarm = self._runtime.now(), self._alarm_at(self._runtime.now() + patience_s)
        paused = False
        while True:
            if self.members.stirred:
                self.members.stirred = False
                self._ask()
                if not paused and any(not self.registry.decodable(one.kind) for one in self._rounds.values()):
                    paused = True
                    self.members.tell("paused", missing=missing())
            if there():
                break
            event = await self._events.next()
            if not isinstance(event, _Alarm):
                if self._take(event):
                    since = self._runtime.now()
            elif event.number == alarm:
                left_s = since + patience_s - self._runtime.now()
                if left_s <= 0:
                    raise RunLost(f"no device came for {patience_s:g} s: {missing()}")
                alarm = self._alarm_at(self._runtime.now() + left_s)
            elif event.number == self._look:
                self.members.look_after()
                self._look = self._alarm_at(self._runtime.now() + _LOOKS * self._settings.least_s)
            elif event.number == self._alarm and self._rounds:
                self._pass_deadline()
        if paused:
            self.members.tell("goes_on")

    def _pass_deadline(self) -> None:
        """Counts devices as silent that were asked and have answered nothing since the last deadline."""
        self._overdue = True
        rounds = self._rounds.values()
        self.members.silence(set[int]().union(*[one.silent() for one in rounds]))
        self._watch(next(iter(rounds)).kind)

    def _take(self, event: _Told | _Moved) -> bool:
        """Takes in an event; tells whether it was of use.

        A failed block is not: it is ordered again, and may fail for ever.
        """
        if isinstance(event, _Moved):
            if not event.gone:
                self._gone.discard(event.rank)
                return False
            self._gone.add(event.rank)
            for one in self._rounds.values():
                one.lose(event.rank)
            if self.members.lose(event.rank) and self._rounds:
                raise PartitionsChanged
            return False
        if event.rank in self._gone:
            return False
        try:
            if event.round is None:
                report: Any = unpacked(event.payload, REPORTS)
                self.members.take(event.rank, report)
                return not isinstance(report, (Probe, Failed))
            if event.round not in self._rounds:
                self.counters.late += 1
                return False
            self._rounds[event.round].take(event.rank, event.payload)
        except Malformed as error:
            self._refuse(event.rank, str(error))
            return False
        self.members.heard(event.rank)
        return True

    def _refuse(self, rank: int, why: str) -> None:
        """Counts a message; of those of one device the 1st, 2nd, 4th, 8th and so on are recorded."""
        self.counters.refused += 1
        self._refused[rank] += 1
        if self._refused[rank].bit_count() == 1:
            self.members.tell("refused", rank=rank, why=why, count=self._refused[rank])

    def _alarm_at(self, t: float) -> int:
        """Asks for an event at a time; gives its number."""
        self._alarms += 1
        event = _Alarm(self._alarms)
        self._runtime.sleep_until(t).on_done(lambda _: self._events.put(event))
        return event.number

    async def _listen(self, tag: Tag, round: int | None) -> None:
        """Takes in the messages of a tag, until its exchange is forgotten."""
        try:
            while True:
                rank, payload = await self._comm.recv_any(tag, deadline_s=math.inf)
                self._events.put(_Told(rank, payload, round))
        except WaitEnded:
            return

    async def _forget(self, round: int) -> None:
        self._comm.forget(messages.answers(round).exchange)

    async def _departures(self) -> None:
        while True:
            self._events.put(_Moved(await self._comm.departure(), gone=True))

    async def _arrivals(self) -> None:
        while True:
            self._events.put(_Moved(await self._comm.arrival(), gone=False))


def _as_json(round: Round) -> Json:
    return [list(one) for one in round.used]


def _replayed(decision: Decision | None) -> list[frozenset[int]] | None:
    """Gives, in a replay, the blocks by which each piece was decoded."""
    if decision is None:
        return None
    with deciding(decision.name, decision.step):
        sets: Any = decision.value
        return [frozenset(map(int, one)) for one in sets]
