"""The coordinator: it knows labels and weights, and who holds what; it sees no features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from farflung.coded.deadlines import Learned
from farflung.coded.inbox import Alarm, Answer, Back, Gone, Heard, Inbox
from farflung.coded.members import REPORTS, Members
from farflung.coded.messages import End, Failed, Malformed, Probe, unpacked
from farflung.coded.plan import Plans
from farflung.coded.record import Record
from farflung.coded.roster import Kind, Partition, Roster
from farflung.coded.rounds import Round
from farflung.coded.settings import Settings
from farflung.errors import RunLost
from farflung.files import deciding
from farflung.types import Decision, Json, Runtime

__all__ = ["Coordinator", "Counters", "PartitionsChanged"]

_BACK_S = 10.0
"""How long a coordinator that comes again waits for all devices, where those that are there would do."""
_LOOKS = 5.0
"""How often those that make blocks are asked for a sign of life, in times of the shortest deadline."""
_PLANS = 512
"""Sets of answers whose decoding is remembered; those of one round come again in the next."""


class PartitionsChanged(Exception):
    """Other samples are trained on from now on, so a product that was under way is of no use."""


@dataclass(slots=True)
class Counters:
    """What has happened beside training.

    Args:
      rounds: products and parts of products that devices were asked for.
      refused: messages that were not of their form, or that nobody was waiting for.
      late: answers that came for what was decoded before.
    """

    rounds: int = 0
    refused: int = 0
    late: int = 0


class Coordinator:
    """Rank 0 of a run: brings devices together, has data encoded, and multiplies the whole of it.

    Args:
      runtime: the world.
      settings: of the run.
      run: its name, by which devices know the blocks that they hold.
      record: keeps what happens, and what a coordinator that comes again has to know; ``None``: nothing is kept.
    """

    def __init__(
        self, runtime: Runtime, settings: Settings, *, run: str = "run", record: Record | None = None
    ) -> None:
        self.members = Members(runtime, settings, run, record)
        self.counters = Counters()
        self._runtime, self._settings = runtime, settings
        self._inbox = Inbox(runtime)
        self._plans = Plans[int](_PLANS)
        self._learned: dict[Kind, Learned] = {
            kind: Learned(settings.patience_s, least_s=settings.least_s) for kind in settings.kinds
        }
        self._rounds: dict[int, Round] = {}
        """Under way, by number."""
        self._gone: set[int] = set()
        """Ranks of which nothing is to be heard that they had sent before."""
        self._refused: Counter[int] = Counter()
        """Messages, by who has sent them."""
        self._alarm, self._overdue = 0, False
        self._look = self._inbox.alarm(runtime.now() + _LOOKS * settings.least_s)
        """When devices that make blocks are looked after."""

    @property
    def roster(self) -> Roster:
        """Who is there, and what they hold."""
        return self.members.roster

    # --- a run ------------------------------------------------------------------------------------------------------

    async def gather(self) -> None:
        """Waits for the devices and partitions that training begins with, and has their data encoded; once they are,
        there is nothing to be done.

        Raises:
          RunLost: they do not come, or are lost while data are encoded.
        """
        wanted, members, roster = self._settings, self.members, self.roster
        if members.encoded:
            return
        members.tell("begins")
        enough_at = self._runtime.now() + _BACK_S
        if members.again:
            self._inbox.alarm(enough_at)
        await self._until(
            lambda: (
                (len(roster.members) >= wanted.devices and len(members.brought()) >= wanted.partitions)
                or (members.again and self._runtime.now() >= enough_at and members.decodable())
            ),
            lambda: (
                f"{len(roster.members)} of {wanted.devices} devices and {len(members.brought())} of "
                f"{wanted.partitions} partitions have come"
            ),
        )
        members.begin()
        await self._until(
            lambda: not members.making() and members.decodable(), lambda: members.in_need(wanted.kinds[-1])
        )
        members.tell("encoded")

    def settle(self) -> list[Partition]:
        """The partitions that are trained on from now on, in the order of their samples."""
        return self.members.settle()

    @property
    def changed(self) -> bool:
        """Whether other partitions are there than those that are trained on."""
        return self.members.changed

    @property
    def samples(self) -> int:
        """Rows of all data that are trained on."""
        return sum(partition.rows for partition in self.roster.active)

    @property
    def features(self) -> int:
        return self.roster.features

    async def times(self, weights: Tensor) -> Tensor:
        """See :class:`farflung.coded.Products`.

        Raises:
          PartitionsChanged: some of the data are lost for good, and training goes on without them.
          RunLost: too few devices are left, and none has come for the patience of the run.
        """
        heights = [partition.rows for partition in self.roster.active]
        return torch.cat((await self._carry(self._round("rows", weights, (), heights))).products)

    async def transposed_times(self, residuals: Tensor) -> Tensor:
        active, bounds = self.roster.active, self.roster.bounds
        if self._settings.transposed == "repair":
            return await self._by_repair(active, residuals)
        widths = [end - begin for begin, end in pairwise(bounds)]
        numbers = tuple(partition.number for partition in active)
        return torch.cat((await self._carry(self._round("columns", residuals, numbers, widths))).products)

    async def _by_repair(self, active: Sequence[Partition], residuals: Tensor) -> Tensor:
        """Each partition's product from the device that has it; for one that does not answer, the product of all with
        its residuals.

        Rows alone are coded, so a coded answer is a sum over partitions with one operand, and of what it decodes to the
        other partitions' products are of no use.
        """
        features = self.roster.features
        parts = torch.split(residuals, [partition.rows for partition in active])
        own = {
            one.number: self._round("rows", part, (one.number,), [features], [one.number])
            for one, part in zip(active, parts, strict=True)
            if self.roster.raw(one) is not None
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
        for told in [self.members.send(rank, End(reason)) for rank in self.roster.members]:
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
            self.roster.unknowns(kind) if unknowns is None else unknowns,
            heights,
            operand.shape[1],
            operand.clone(),
            partitions,
            self._settings.pieces,
            self._plans,
            self._settings.max_condition,
            _told(self._runtime.decisions.replayed("answers", number, self._runtime.comm.rank)),
        )

    async def _carry(self, *rounds: Round, patiently: bool = True) -> Round:
        """Has rounds answered, side by side; the last of them.

        Args:
          rounds: of one kind.
          patiently: whether to wait for as long as it takes; otherwise until the deadline that was learned.
        """
        kind, begin = rounds[0].kind, self._runtime.now()
        self._rounds = {one.number: one for one in rounds}
        self._overdue, self.members.stirred = False, True
        for number in self._rounds:
            self._inbox.open(number)
        self._watch(kind)
        try:
            await self._until(
                lambda: all(one.complete for one in rounds) or (self._overdue and not patiently),
                lambda: self.members.in_need(kind),
            )
        finally:
            for number, one in self._rounds.items():
                self._inbox.shut(number)
                self.counters.late += one.late
            self._rounds = {}
        if not self._overdue:
            self._learned[kind].took(self._runtime.now() - begin)
        for one in rounds:
            if one.complete:
                self._runtime.decide_own("answers", one.number, partial(_as_json, one))
        return rounds[-1]

    def _ask(self) -> None:
        """Has every block that can answer multiplied."""
        for one in self._rounds.values():
            blocks = [block for block in self.roster.answering(one.kind) if one.serves(block)]
            for rank, task in one.tasks(blocks, min(self._rounds)).items():
                self.members.send(rank, task)

    def _watch(self, kind: Kind) -> None:
        self._alarm = self._inbox.alarm(self._runtime.now() + self._learned[kind].seconds)

    # --- what happens -----------------------------------------------------------------------------------------------

    async def _until(self, there: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Lets things happen until a condition holds.

        Raises:
          RunLost: nothing that brings it nearer has happened for the patience of the run.
        """
        patience_s = self._settings.patience_s
        since, alarm = self._runtime.now(), self._inbox.alarm(self._runtime.now() + patience_s)
        paused = False
        while True:
            if self.members.stirred:
                self.members.stirred = False
                self._ask()
                if not paused and any(not self.roster.decodable(one.kind) for one in self._rounds.values()):
                    paused = True
                    self.members.tell("paused", missing=missing())
            if there():
                break
            event = await self._inbox.next()
            if not isinstance(event, Alarm):
                if self._handle(event):
                    since = self._runtime.now()
            elif event.number == alarm:
                left_s = since + patience_s - self._runtime.now()
                if left_s <= 0:
                    raise RunLost(f"nobody came for {patience_s:g} s: {missing()}")
                alarm = self._inbox.alarm(self._runtime.now() + left_s)
            elif event.number == self._look:
                self.members.look_after()
                self._look = self._inbox.alarm(self._runtime.now() + _LOOKS * self._settings.least_s)
            elif event.number == self._alarm and self._rounds:
                self._passes_deadline()
        if paused:
            self.members.tell("goes_on")

    def _passes_deadline(self) -> None:
        """Devices that were asked and have answered nothing for as long count as silent."""
        self._overdue = True
        rounds = self._rounds.values()
        self.members.falls(set[int]().union(*[one.silent() for one in rounds]))
        self._watch(next(iter(rounds)).kind)

    def _handle(self, event: Heard | Answer | Gone | Back) -> bool:
        """Whether it was of use: a block that could not be made is ordered again, and may fail for ever."""
        if isinstance(event, Gone):
            self._gone.add(event.rank)
            for one in self._rounds.values():
                one.lose(event.rank)
            if self.members.lose(event.rank) and self._rounds:
                raise PartitionsChanged
            return False
        if isinstance(event, Back):
            self._gone.discard(event.rank)
            return False
        if event.rank in self._gone:
            return False
        try:
            if isinstance(event, Heard):
                report: Any = unpacked(event.payload, REPORTS)
                self.members.hear(event.rank, report)
                return not isinstance(report, (Probe, Failed))
            if event.round not in self._rounds:
                self.counters.late += 1
                return False
            self._rounds[event.round].take(event.rank, event.payload)
        except Malformed as error:
            self._refuse(event.rank, str(error))
            return False
        self.members.speaks(event.rank)
        return True

    def _refuse(self, rank: int, why: str) -> None:
        """Counts a message; of those of one device the 1st, 2nd, 4th, 8th and so on are told."""
        self.counters.refused += 1
        self._refused[rank] += 1
        if self._refused[rank].bit_count() == 1:
            self.members.tell("refused", rank=rank, why=why, count=self._refused[rank])


def _as_json(round: Round) -> Json:
    return [list(one) for one in round.used]


def _told(decision: Decision | None) -> list[frozenset[int]] | None:
    """Of a round that is made again, the blocks by which each piece was decoded."""
    if decision is None:
        return None
    with deciding(decision.name, decision.step):
        sets: Any = decision.value
        return [frozenset(map(int, one)) for one in sets]
