"""The members of a run as its coordinator knows them: they come, report, fall silent and go, and blocks are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from farflung.coded import tags
from farflung.coded.codes import CODES
from farflung.coded.messages import (
    Built,
    Command,
    Drop,
    End,
    Failed,
    Hello,
    Leaving,
    Lost,
    Malformed,
    Meet,
    Multiply,
    Probe,
    Ready,
    Report,
    Welcome,
    packed,
)
from farflung.coded.planning import Order, Planner
from farflung.coded.record import Record
from farflung.coded.roster import Block, Kind, Member, Partition, Roster, names
from farflung.coded.sending import sent
from farflung.coded.settings import Settings
from farflung.errors import RunLost
from farflung.spec import build
from farflung.tasks import Pending
from farflung.types import Json, Runtime

__all__ = ["REPORTS", "Members"]

REPORTS: tuple[type[Report], ...] = (Hello, Ready, Built, Failed, Leaving, Probe)
_MAX_FEATURES = 1 << 28
"""One column of weights for more would be larger than any message."""


class Members:
    """Keeps the roster true, and orders the blocks that are missing.

    Args:
      runtime: the world.
      settings: of the run.
      run: its name, by which devices know the blocks that they hold.
      record: keeps what happens, and what a coordinator that comes again has to know; ``None``: nothing is kept.
    """

    def __init__(self, runtime: Runtime, settings: Settings, run: str, record: Record | None) -> None:
        before = None if record is None else record.roster()
        self.roster = before or Roster()
        self.again = before is not None
        """Whether there was a coordinator before."""
        self.encoded = False
        """Whether the blocks to begin with have been ordered."""
        self.changed = False
        """Whether there are other partitions than those that are trained on."""
        self.stirred = False
        """Whether something has happened by which other blocks can answer; whoever looks sets it back."""
        self.strange: Callable[[Tensor], str] = lambda labels: ""
        """What is wrong with the labels of a partition that comes; empty: nothing."""
        self.silences = 0
        """How often a device has fallen silent."""
        self._probed = set[int]()
        """Devices that were asked for a sign of life, and have given none yet."""
        self._to_meet: set[tuple[int, int]] = set()
        """Devices that were told of one that is to come to them, and that one."""
        self._runtime, self._settings, self._run, self._record = runtime, settings, run, record
        self._began = runtime.now()
        self._planner = Planner(
            build("code", settings.code, CODES),
            settings.seed,
            settings.first_coded,
            settings.redundancy,
            settings.kinds,
        )

    # --- what is there ----------------------------------------------------------------------------------------------

    def brought(self) -> list[Partition]:
        return [one for one in self.roster.partitions if self.roster.raw(one) is not None]

    def decodable(self) -> bool:
        """Whether devices that are heard of can answer for all that is trained on."""
        return all(self.roster.decodable(kind) for kind in self._settings.kinds)

    def making(self) -> list[Block]:
        """Blocks under way, with devices that are heard."""
        heard = self.roster.heard
        return [
            block
            for block in self.roster.blocks.values()
            if block.holder in heard and (not block.ready or block.making)
        ]

    def can_be_trained_on(self, partition: Partition) -> bool:
        """Whether it can be trained on: enough blocks of columns have its rows."""
        roster = self.roster
        if "columns" not in self._settings.kinds:
            return roster.raw(partition) is not None
        blocks = [block for block in roster.there("columns") if partition.number in block.parts]
        unknowns = roster.unknowns("columns")
        return bool(unknowns) and roster.rank(blocks, unknowns) == len(unknowns)

    def in_need(self, kind: Kind) -> str:
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

    def begin(self) -> None:
        """Orders the blocks to begin with, or where there was a coordinator before, those that are missing."""
        self.encoded = True
        if self.roster.active:
            self.mend()
            return
        for partition in self.brought():
            partition.active = True
        self._order(self._planner.begin(self.roster))

    def settle(self) -> list[Partition]:
        """The partitions that are trained on from now on: all that can be."""
        self.changed = False
        for partition in self.roster.partitions:
            partition.active |= self.can_be_trained_on(partition)
        self.mend()
        return self.roster.active

    # --- what they say ---------------------------------------------------------------------------------------------

    def hear(self, rank: int, report: Any) -> None:
        """A device has told something.

        Raises:
          Malformed: it speaks of what there is not.
        """
        if isinstance(report, Hello):
            self._hello(rank, report)
        else:
            self._report(rank, report)
            self.speaks(rank)

    def _report(self, rank: int, report: Any) -> None:
        member = self.roster.members.get(rank)
        if member is None:
            raise Malformed("a report before a greeting")
        if isinstance(report, Leaving):
            member.leaving = True
            self.tell("leaving", rank=rank)
            self.mend()
            return
        if isinstance(report, Ready):
            if (rank, report.rank) not in self._to_meet:
                raise Malformed("ready for who was not to come")
            self._to_meet.discard((rank, report.rank))
            self.send(report.rank, Meet(rank, first=False))
            return
        if isinstance(report, Probe):
            return
        block = self.roster.blocks.get(report.block)
        if block is None:
            raise Malformed("a report on a block that there is not")
        if block.holder != rank:
            self.send(rank, Drop((block.number,)))
            return
        if isinstance(report, Built):
            self.roster.built(block, report.partitions)
            member.failures = 0
            if self._record is not None:
                self._record.keep_roster(self.roster)
            nbytes = report.fetched_nbytes
            self.tell(
                "built",
                rank=rank,
                block=block.number,
                kind=block.kind,
                nbytes=nbytes,
                mds_nbytes=self._under_mds(block, nbytes),
            )
            self._replaced(block)
        else:
            self.roster.failed(block)
            self.tell("failed", rank=rank, block=block.number, blamed=report.rank, why=report.detail)
            if report.rank == rank:
                member.unable = True
            else:
                member.failures += 1
                self.falls({report.rank})
        self.mend()

    def _hello(self, rank: int, hello: Hello) -> None:
        roster = self.roster
        if rank in roster.members:
            raise Malformed("a second greeting")
        if reason := self._unfit(hello):
            self.tell("turned_away", rank=rank, why=reason)
            self.send(rank, End(reason))
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
            pair = min(rank, other), max(rank, other)
            self._to_meet.add(pair)
            self.send(pair[0], Meet(pair[1], first=True))
        roster.members[rank] = Member(rank, late=self.encoded)
        self.send(rank, Welcome(self._run, raw, self._settings.code, self._settings.seed))
        self._keeps(rank, hello)
        self.tell("came", rank=rank, partition=hello.partition, rows=hello.rows)
        self.mend()

    def _unfit(self, hello: Hello) -> str:
        """Why a device cannot take part; empty: it can."""
        if not hello.partition:
            return ""
        if hello.rows < 1 or not 1 <= hello.features <= _MAX_FEATURES or hello.labels.numel() != hello.rows:
            raise Malformed("data without rows, or too wide, or with another number of labels")
        known, features = self.roster.named(hello.partition), self.roster.features
        if features and hello.features != features:
            return (
                f"partition {hello.partition!r} has {hello.features} features, and those that are there have "
                f"{features}: give all devices the same columns"
            )
        if strange := self.strange(hello.labels):
            return f"partition {hello.partition!r}: {strange}"
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
            self.send(rank, Drop(tuple(forgotten)))

    def lose(self, rank: int) -> bool:
        """A device is gone; whether training goes on without some of the partitions."""
        if rank not in self.roster.members:
            return False
        self.roster.lose(rank)
        self._to_meet = {pair for pair in self._to_meet if rank not in pair}
        self.tell("gone", rank=rank)
        for other in self.roster.members:
            self.send(other, Lost(rank))
        changed = self.encoded and self._loses_partitions()
        self.mend()
        return changed

    def _loses_partitions(self) -> bool:
        """Whether training goes on without some that no device has, nor anything that they follow from."""
        changed = False
        while lost := [one for one in self.roster.active if not self.roster.recoverable(one)]:
            for partition in lost:
                self.tell("lost", partition=partition.name)
            if self._settings.on_loss == "wait":
                return False
            for partition in lost:
                self.roster.forsake(partition)
            changed = True
        if changed and not self.roster.active:
            raise RunLost("no partition is left: all devices that had one are gone")
        return changed

    def falls(self, ranks: Iterable[int]) -> None:
        """Devices have let a deadline pass; they count as not there until they are heard of."""
        for rank in ranks:
            member = self.roster.members.get(rank)
            if member is None:
                continue
            if not member.silent:
                member.silent = True
                self.silences += 1
                self.tell("silent", rank=rank)
            self.send(rank, Probe(self.silences))
        self.mend()

    def look_after(self) -> None:
        """Devices that make blocks are asked for a sign of life; those that have given none since this was called
        before count as silent. Those that rest may try once more.
        """
        resting = [member for member in self.roster.members.values() if member.rests]
        for member in resting:
            member.failures -= 1
        if resting:
            self.mend()
        makers = {block.holder for block in self.making() if block.holder is not None}
        silent = makers & self._probed
        self._probed = makers - silent
        for rank in self._probed:
            self.send(rank, Probe(self.silences))
        if silent:
            self.falls(silent)

    def speaks(self, rank: int) -> None:
        """A device is heard of."""
        self._probed.discard(rank)
        member = self.roster.members.get(rank)
        if member is not None and member.silent:
            member.silent = False
            self.tell("heard", rank=rank)
            self.mend()

    def _can_go(self, rank: int) -> bool:
        """Whether nothing of what a device holds is missing without it."""
        for kind in self._settings.kinds:
            others = [block for block in self.roster.there(kind) if block.holder != rank]
            for block in self.roster.there(kind):
                if block.holder == rank and block.raw is not None:
                    if not any(other.raw == block.raw and other.parts >= block.parts for other in others):
                        return False
        return True

    # --- blocks -----------------------------------------------------------------------------------------------------

    def mend(self) -> None:
        """Orders the blocks that are missing, and lets go who may go: anybody, before there are blocks."""
        if self.encoded:
            self._order(self._planner.mend(self.roster))
        for member in list(self.roster.members.values()):
            if member.leaving and (not self.encoded or self._can_go(member.rank)):
                self.send(member.rank, End())
        if not self.encoded:
            return
        for partition in self.roster.partitions:
            self.changed |= not partition.active and self.can_be_trained_on(partition)
        self.stirred = True

    def _order(self, orders: Iterable[tuple[int, Order]]) -> None:
        """Has blocks made; what is in them is kept before anybody makes them."""
        for_whom = list(orders)
        if for_whom and self._record is not None:
            self._record.keep_roster(self.roster)
        for rank, order in for_whom:
            self.tell("ordered", rank=rank, block=order.block)
            self.send(rank, order)

    def _replaced(self, block: Block) -> None:
        """The one that it takes the place of may go."""
        if block.replaces is not None:
            old = self.roster.blocks[block.replaces]
            if old.holder is not None:
                self.send(old.holder, Drop((old.number,)))
            self.roster.discard(old)

    def _under_mds(self, block: Block, nbytes: int) -> int:
        """The bytes that other devices would have given for a block if all partitions were in it."""
        if block.kind == "columns" or block.raw is not None or block.replaces is not None:
            return nbytes
        own = {one.raw for one in self.roster.of("rows") if one.holder == block.holder}
        rows = sum(one.rows for one in self.roster.active if one.number not in own)
        return 8 * rows * self.roster.features

    def send(self, rank: int, message: Command) -> Pending[None]:
        """Tells a device; done when the message is on its way."""
        tag = tags.OPERAND if isinstance(message, (Multiply, End)) else tags.COMMAND
        return self._runtime.launch(sent(self._runtime.comm, packed(message), rank, tag))

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began here, by the clock of its events."""
        return self._runtime.now() - self._began

    def tell(self, event: str, **values: Json) -> None:
        """Keeps that something has happened, with the redundancy that there is."""
        if self._record is not None:
            redundancy: Json = (
                [self.roster.redundancy(kind, self._settings.redundancy) for kind in self._settings.kinds]
                if self.encoded
                else None
            )
            self._record.tell(event, t=self.elapsed_s, redundancy=redundancy, **values)
