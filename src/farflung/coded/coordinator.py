"""The coordinator: it knows labels and weights, and who holds what; it sees no features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farflung.coded import tags
from farflung.coded.codes import CODES
from farflung.coded.deadlines import Learned
from farflung.coded.inbox import Alarm, Answer, Back, Gone, Heard, Inbox
from farflung.coded.messages import (
    Built,
    Command,
    Drop,
    End,
    Failed,
    Hello,
    Leaving,
    Malformed,
    Meet,
    Multiply,
    Probe,
    Ready,
    Report,
    Welcome,
    packed,
    unpacked,
)
from farflung.coded.plan import Plans
from farflung.coded.planning import Order, Planner
from farflung.coded.record import Record
from farflung.coded.roster import Block, Kind, Member, Partition, Roster, names
from farflung.coded.rounds import Round
from farflung.coded.sending import sent
from farflung.coded.settings import Settings
from farflung.errors import RunLost
from farflung.files import deciding
from farflung.spec import build
from farflung.tasks import Pending
from farflung.types import Decision, Json, Runtime

__all__ = ["Coordinator", "PartitionsChanged"]

_REPORTS: tuple[type[Report], ...] = (Hello, Ready, Built, Failed, Leaving, Probe)

_BACK_S = 10.0
"""How long a coordinator that comes again waits for all devices, where those that are there would do."""
_PLANS = 512
"""Sets of answers whose decoding is remembered; those of one round come again in the next."""


class PartitionsChanged(Exception):
    """Other samples are trained on from now on, so a product that was under way is of no use."""


@dataclass(slots=True)
class Counters:
    """What has happened beside training.

    Args:
      refused: messages that were not of their form, or that nobody was waiting for.
      late: answers that came for pieces that were decoded before.
    """

    refused: int = 0
    late: int = 0
    rounds: int = 0
    silences: int = 0


class Coordinator:
    """Rank 0 of a run: brings devices together, has data encoded, and multiplies the whole of it.

    Args:
      runtime: the world.
      settings: of the run.
      run: its name, by which devices know the blocks that they hold.
      record: keeps what happens, and what a coordinator that comes again has to know.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: Settings,
        *,
        run: str = "run",
        record: Record | None = None,
    ) -> None:
        before = None if record is None else record.roster()
        self.roster, self.counters = before or Roster(), Counters()
        self._runtime, self._comm, self._settings, self._run = runtime, runtime.comm, settings, run
        self._record, self._again = record, before is not None
        self._inbox = Inbox(runtime)
        code = build("code", settings.code, CODES)
        self._planner = Planner(
            code, settings.seed, settings.first_coded, settings.redundancy, settings.kinds
        )
        self._plans = Plans(_PLANS)
        self._learned: dict[Kind, Learned] = {
            kind: Learned(settings.patience_s, least_s=settings.least_s) for kind in settings.kinds
        }
        self._rounds: dict[int, Round] = {}
        """Under way, by number."""
        self._gone: set[int] = set()
        self._alarm, self._overdue = 0, False
        self._encoded = False
        self._changed = False

    # --- a run ------------------------------------------------------------------------------------------------------

    async def gather(self) -> None:
        """Waits for the devices and partitions that training begins with, and has their data encoded.

        Raises:
          RunLost: they do not come, or are lost while data are encoded.
        """
        wanted, roster = self._settings, self.roster
        enough_at = self._runtime.now() + _BACK_S
        if self._again:
            self._inbox.alarm(enough_at)
        await self._until(
            lambda: (
                (len(roster.members) >= wanted.devices and len(self._brought()) >= wanted.partitions)
                or (self._again and self._runtime.now() >= enough_at and self._decodable())
            ),
            lambda: (
                f"{len(roster.members)} of {wanted.devices} devices and {len(self._brought())} of "
                f"{wanted.partitions} partitions have come"
            ),
        )
        self._encoded = True
        if roster.bounds:
            self._mend()
        else:
            for partition in self._brought():
                partition.active = True
            self._order(self._planner.begin(roster))
        await self._until(
            lambda: not self._making() and self._decodable(),
            lambda: self._in_need(wanted.kinds[-1]),
        )
        self._tell("encoded")

    def settle(self) -> list[Partition]:
        """The partitions that are trained on from now on, in the order of their samples."""
        self._changed = False
        for partition in self.roster.partitions:
            if not partition.active and self._can_be_trained_on(partition):
                partition.active = True
        self._mend()
        return self.roster.active

    @property
    def changed(self) -> bool:
        """Whether other partitions are there than those that are trained on."""
        return self._changed

    @property
    def samples(self) -> int:
        """Rows of all data that are trained on."""
        return sum(partition.rows for partition in self.roster.active)

    @property
    def features(self) -> int:
        """Columns of the data."""
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
        """See :meth:`times`."""
        active, bounds = self.roster.active, self.roster.bounds
        if self._settings.transposed == "repair":
            parts = torch.split(residuals, [partition.rows for partition in active])
            return await self._by_repair(active, parts)
        widths = [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]
        numbers = tuple(partition.number for partition in active)
        return torch.cat((await self._carry(self._round("columns", residuals, numbers, widths))).products)

    async def _by_repair(self, active: Sequence[Partition], residuals: Sequence[Tensor]) -> Tensor:
        """Each partition's product from the device that has it; for one that is silent, the product of all with its residuals.

        Rows alone are coded, so a coded answer is a sum over partitions with one operand, and of what it decodes to the
        other partitions' products are of no use.
        """
        features = self.roster.features
        own = {
            one.number: self._round("rows", part, (one.number,), [features], [one.number])
            for one, part in zip(active, residuals, strict=True)
            if self.roster.raw(one) is not None
        }
        if own:
            await self._carry(*own.values(), patiently=False)
        total = torch.zeros(features, residuals[0].shape[1], dtype=torch.float64)
        for place, (one, part) in enumerate(zip(active, residuals, strict=True)):
            found = own.get(one.number)
            if found is not None and found.complete:
                total += found.products[0]
                continue
            whole = await self._carry(self._round("rows", part, (one.number,), [features] * len(active)))
            total += whole.products[place]
        return total

    async def end(self, reason: str = "") -> None:
        """Lets all devices go."""
        for told in [self._send(rank, End(reason)) for rank in self.roster.members]:
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
            _told(self._runtime.decisions.replayed("answers", number, self._comm.rank)),
        )

    async def _carry(self, *rounds: Round, patiently: bool = True) -> Round:
        """Has rounds answered, side by side; the last of them.

        Args:
          rounds: of one kind.
          patiently: whether to wait for as long as it takes; otherwise until the deadline that was learned.
        """
        kind, begin = rounds[0].kind, self._runtime.now()
        self._rounds = {one.number: one for one in rounds}
        self._overdue = False
        for number in self._rounds:
            self._inbox.open(number)
        self._ask()
        self._watch_rounds(kind)
        try:
            await self._until(
                lambda: all(one.complete for one in rounds) or (self._overdue and not patiently),
                lambda: self._in_need(kind),
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
                self._send(rank, task)

    def _watch_rounds(self, kind: Kind) -> None:
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
        while not there():
            event = await self._inbox.next()
            if isinstance(event, Alarm):
                if event.number == alarm:
                    left_s = since + patience_s - self._runtime.now()
                    if left_s <= 0:
                        raise RunLost(f"nobody came for {patience_s:g} s: {missing()}")
                    alarm = self._inbox.alarm(self._runtime.now() + left_s)
                elif event.number == self._alarm and self._rounds:
                    self._overdue = True
                    self._falls_silent()
                    self._watch_rounds(next(iter(self._rounds.values())).kind)
            elif self._handle(event):
                since = self._runtime.now()
            if not paused and any(not self.roster.decodable(one.kind) for one in self._rounds.values()):
                paused = True
                self._tell("paused", missing=missing())
        if paused:
            self._tell("goes_on")

    def _handle(self, event: Heard | Answer | Gone | Back) -> bool:
        """Whether it was of use."""
        if isinstance(event, Gone):
            self._gone.add(event.rank)
            self._lose(event.rank)
            return False
        if isinstance(event, Back):
            self._gone.discard(event.rank)
            return False
        if event.rank in self._gone:  # what it had sent before
            return False
        member = self.roster.members.get(event.rank)
        try:
            if isinstance(event, Answer):
                if event.round not in self._rounds:
                    self.counters.late += 1
                    return False
                self._rounds[event.round].take(event.rank, event.payload)
            else:
                self._report(event.rank, unpacked(event.payload, _REPORTS))
        except Malformed as error:
            self.counters.refused += 1
            self._tell("refused", rank=event.rank, why=str(error))
            return False
        if member is not None and member.silent:
            self._speaks_again(member)
        return True

    def _report(self, rank: int, report: Any) -> None:
        if isinstance(report, Hello):
            self._hello(rank, report)
            return
        member = self.roster.members.get(rank)
        if member is None:
            raise Malformed("a report before a greeting")
        if isinstance(report, Leaving):
            member.leaving = True
            self._tell("leaving", rank=rank)
            self._mend()
            return
        if isinstance(report, Ready):
            if report.rank in self.roster.members:
                self._send(report.rank, Meet(rank, first=False))
            return
        if isinstance(report, Probe):
            return
        block = self.roster.blocks.get(report.block)
        if block is None:
            raise Malformed("a report on a block that there is not")
        if block.holder != rank:
            self._send(rank, Drop((block.number,)))
            return
        if isinstance(report, Built):
            self.roster.built(block)
            if self._record is not None:
                self._record.keep_roster(self.roster)
            self._tell("built", rank=rank, block=block.number, kind=block.kind)
            self._replaced(block)
        else:
            self.roster.failed(block)
            self._tell("failed", rank=rank, block=block.number, blamed=report.rank)
            blamed = self.roster.members.get(report.rank)
            if blamed is not None and report.rank != rank:
                self._falls(blamed)
        self._mend()

    # --- members ----------------------------------------------------------------------------------------------------

    def _hello(self, rank: int, hello: Hello) -> None:
        roster = self.roster
        if rank in roster.members:
            raise Malformed("a second greeting")
        if reason := self._unfit(hello):
            self._tell("turned_away", rank=rank, why=reason)
            self._send(rank, End(reason))
            return
        raw = -1
        if hello.partition:
            roster.features = hello.features
            partition = roster.named(hello.partition)
            if partition is None:
                partition = Partition(
                    len(roster.partitions), hello.partition, hello.labels.reshape(-1), roster.number()
                )
                roster.partitions.append(partition)
            raw = partition.block
            roster.blocks[raw] = Block(raw, "rows", {partition.number: 1.0}, rank, ready=True)
        for other in roster.members:
            self._send(min(rank, other), Meet(max(rank, other), first=True))
        roster.members[rank] = Member(rank, late=self._encoded)
        self._send(rank, Welcome(self._run, raw, self._settings.code, self._settings.seed))
        self._keeps(rank, hello)
        self._tell("came", rank=rank, partition=hello.partition, rows=hello.rows)
        self._mend()

    def _unfit(self, hello: Hello) -> str:
        """Why a device cannot take part; empty: it can."""
        if not hello.partition:
            return ""
        if hello.rows < 1 or hello.features < 1 or hello.labels.numel() != hello.rows:
            raise Malformed("data without rows, or with another number of labels")
        known, features = self.roster.named(hello.partition), self.roster.features
        if features and hello.features != features:
            return (
                f"partition {hello.partition!r} has {hello.features} features, and those that are there have {features}: "
                "give all devices the same columns"
            )
        if known is None:
            return ""
        holder = self.roster.blocks[known.block].holder
        if holder is not None and not self.roster.members[holder].silent:
            return f"partition {hello.partition!r} is there already: give each device another one"
        if known.rows != hello.rows or not torch.equal(known.labels, hello.labels.reshape(-1)):
            return f"partition {hello.partition!r} was there with other labels: give it another name"
        return ""

    def _keeps(self, rank: int, hello: Hello) -> None:
        """Blocks that a device has kept from an earlier meeting, as far as nobody else has them."""
        forgotten = []
        for number in hello.held:
            block = self.roster.blocks.get(number)
            if hello.run == self._run and block is not None and block.holder is None:
                block.holder, block.ready = rank, True
            else:
                forgotten.append(number)
        if forgotten:
            self._send(rank, Drop(tuple(forgotten)))

    def _lose(self, rank: int) -> None:
        if rank not in self.roster.members:
            return
        self.roster.lose(rank)
        for one in self._rounds.values():
            one.lose(rank)
        self._tell("gone", rank=rank)
        changed = self._encoded and self._loses_partitions()
        self._mend()
        if changed and self._rounds:
            raise PartitionsChanged

    def _loses_partitions(self) -> bool:
        """Whether training goes on without some: no device that is there has them, nor anything that they follow from."""
        changed = False
        while lost := [one for one in self.roster.active if not self.roster.recoverable(one)]:
            for partition in lost:
                self._tell("lost", partition=partition.name)
            if self._settings.on_loss == "wait":
                return False
            for partition in lost:
                self.roster.forsake(partition)
            changed = True
        if changed and not self.roster.active:
            raise RunLost("no partition is left: all devices that had one are gone")
        return changed

    def _falls_silent(self) -> None:
        """Devices that were asked and have answered nothing by the deadline of the round."""
        asked = {rank for one in self._rounds.values() for rank in one.asked.keys() - one.answered}
        for rank in asked:
            member = self.roster.members.get(rank)
            if member is not None:
                self._falls(member)
        self._mend()

    def _falls(self, member: Member) -> None:
        if not member.silent:
            member.silent = True
            self.counters.silences += 1
            self._tell("silent", rank=member.rank)
        self._send(member.rank, Probe(self.counters.rounds))

    def _speaks_again(self, member: Member) -> None:
        member.silent = False
        self._tell("heard", rank=member.rank)
        self._mend()

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _mend(self) -> None:
        """Orders what is missing, lets go who may go, and asks whoever can answer now."""
        if not self._encoded:
            return
        self._order(self._planner.mend(self.roster))
        for member in list(self.roster.members.values()):
            if member.leaving and self._can_go(member.rank):
                self._send(member.rank, End())
        for partition in self.roster.partitions:
            self._changed |= not partition.active and self._can_be_trained_on(partition)
        self._ask()

    def _order(self, orders: Iterable[tuple[int, Order]]) -> None:
        """Has blocks made; what is in them is kept before anybody makes them."""
        for_whom = list(orders)
        if for_whom and self._record is not None:
            self._record.keep_roster(self.roster)
        for rank, order in for_whom:
            self._tell("ordered", rank=rank, block=order.block)
            self._send(rank, order)

    def _send(self, rank: int, message: Command) -> Pending[None]:
        tag = tags.OPERAND if isinstance(message, (Multiply, End)) else tags.COMMAND
        return self._runtime.launch(sent(self._comm, packed(message), rank, tag))

    def _tell(self, event: str, **values: Json) -> None:
        if self._record is not None:
            redundancy = (
                [self.roster.redundancy(kind, self._settings.redundancy) for kind in self._settings.kinds]
                if self._encoded
                else None
            )
            self._record.tell(event, t=self._runtime.now(), redundancy=redundancy, **values)

    def _decodable(self) -> bool:
        return all(self.roster.decodable(kind) for kind in self._settings.kinds)

    def _making(self) -> list[Block]:
        """Blocks under way."""
        return [
            block
            for block in self.roster.blocks.values()
            if block.holder is not None and (not block.ready or block.making)
        ]

    def _replaced(self, block: Block) -> None:
        """The one that it takes the place of may go."""
        if block.replaces is not None:
            old = self.roster.blocks[block.replaces]
            if old.holder is not None:
                self._send(old.holder, Drop((old.number,)))
            self.roster.discard(old)

    def _can_go(self, rank: int) -> bool:
        """Whether nothing of what a device holds is missing without it."""
        for kind in self._settings.kinds:
            others = [block for block in self.roster.there(kind) if block.holder != rank]
            for block in self.roster.there(kind):
                if block.holder == rank and block.raw is not None:
                    if not any(other.raw == block.raw and other.parts >= block.parts for other in others):
                        return False
        return True

    def _brought(self) -> list[Partition]:
        """Partitions that are there."""
        return [one for one in self.roster.partitions if self.roster.raw(one) is not None]

    def _can_be_trained_on(self, partition: Partition) -> bool:
        """Whether it can be trained on: enough blocks of columns have its rows."""
        roster = self.roster
        if "columns" not in self._settings.kinds:
            return roster.raw(partition) is not None
        blocks = [block for block in roster.there("columns") if partition.number in block.parts]
        unknowns = roster.unknowns("columns")
        return bool(unknowns) and roster.rank(blocks, unknowns) == len(unknowns)

    def _in_need(self, kind: Kind) -> str:
        """What is missing, for people."""
        roster = self.roster
        silent = [rank for rank, member in roster.members.items() if member.silent]
        lost = [one for one in roster.active if not roster.recoverable(one)]
        texts = [f"{len(roster.heard)} devices are heard of"]
        if silent:
            texts.append(f"silent: rank {', '.join(map(str, sorted(silent)))}")
        if lost:
            texts.append(f"lost with their devices: {names(lost)}")
        elif kind == "columns" and not roster.decodable(kind):
            texts.append(
                f"column blocks {', '.join(map(str, roster.missing(kind)))} follow from none that are there"
            )
        return "; ".join(texts)


def _told(decision: Decision | None) -> list[frozenset[int]] | None:
    """Of a round that is made again, the blocks by which each piece was decoded."""
    if decision is None:
        return None
    with deciding(decision.name, decision.step):
        sets: Any = decision.value
        return [frozenset(map(int, one)) for one in sets]


def _as_json(round: Round) -> Json:
    return [list(one) for one in round.used]
