"""Members of a run: reports of devices change the registry, and missing blocks are ordered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from farflung.coded import messages
from farflung.coded.blocks import bounds_of
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
    sent,
)
from farflung.coded.placement import Placement
from farflung.coded.record import Record
from farflung.coded.registry import Block, Kind, Member, Partition, Placed, Registry
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
    """Keeps the registry up to date, and orders the blocks that are missing.

    Args:
      runtime: the world.
      settings: of the run.
      run: its name, by which devices know their blocks.
      record: keeps events, and the registry for a restarted coordinator; ``None``: nothing is kept.
    """

    def __init__(self, runtime: Runtime, settings: Settings, run: str, record: Record | None) -> None:
        before = None if record is None else record.registry()
        self.registry = before or Registry()
        self.again = before is not None
        """Whether the run goes on from a record."""
        self.encoded = False
        """Whether the first blocks have been ordered."""
        self.changed = False
        """Whether there are other partitions than those that are trained on."""
        self.stirred = False
        """Whether other blocks may answer than before; the reader sets it back."""
        self.check_labels: Callable[[Tensor], str] = lambda labels: ""
        """Describes what is wrong with the labels of a partition that comes; empty: nothing."""
        self.silences = 0
        """The number of times that a device has fallen silent."""
        self._probed = set[int]()
        """Devices that were probed and have not answered yet."""
        self._to_meet = dict[int, tuple[int, int]]()
        """Devices that get ready for a later one, and that one, by the number of their meeting."""
        self._meetings = 0
        self._runtime, self._settings, self._run, self._record = runtime, settings, run, record
        self._began = runtime.now()
        code = build("code", settings.code, CODES)
        self._placement = Placement(code, settings.seed, settings.redundancy, settings.kinds)

    def begin(self) -> None:
        """Orders the first blocks, or in a run that goes on, those that are missing."""
        registry = self.registry
        self.encoded = True
        if not registry.active:
            for partition in registry.partitions:
                partition.active = registry.raw(partition) is not None
            if "columns" in self._settings.kinds:
                registry.bounds = bounds_of(registry.features, len(registry.active))
        self.repair()

    def decodable(self) -> bool:
        """Tells whether devices that are heard can answer for all that is trained on."""
        return all(self.registry.decodable(kind) for kind in self._settings.kinds)

    def settle(self) -> list[Partition]:
        """Takes in all partitions that can be trained on, and lists those that are trained on from now on."""
        self.changed = False
        for partition in self.registry.partitions:
            partition.active |= self.registry.trainable(partition, self._settings.kinds)
        self.repair()
        return self.registry.active

    def in_need(self, kind: Kind) -> str:
        """Describes what is missing for products."""
        registry = self.registry
        silent = [rank for rank, member in registry.members.items() if member.silent]
        lost = [one for one in registry.active if not registry.recoverable(one)]
        texts = [f"{len(registry.heard)} devices are heard of"]
        if silent:
            texts.append(f"silent: rank {', '.join(map(str, sorted(silent)))}")
        if lost:
            texts.append(f"lost with their devices: {', '.join(one.name or str(one.number) for one in lost)}")
        elif kind == "columns" and not registry.decodable(kind):
            texts.append(
                f"column blocks {', '.join(map(str, registry.missing(kind)))} follow from none that are there"
            )
        return "; ".join(texts)

    # --- reports ----------------------------------------------------------------------------------------------------

    def take(self, rank: int, report: Any) -> None:
        """Takes in a report of a device.

        Raises:
          Malformed: it speaks of a block or device that there is not.
        """
        if isinstance(report, Hello):
            self._hello(rank, report)
        else:
            self._report(rank, report)
            self.heard(rank)

    def _report(self, rank: int, report: Any) -> None:
        member = self.registry.members.get(rank)
        if member is None:
            raise Malformed("a report before a greeting")
        if isinstance(report, Probe):
            return
        if isinstance(report, Ready):
            self._ready(rank, report.number)
            return
        if isinstance(report, Leaving):
            member.leaving = True
            self.tell("leaving", rank=rank)
        else:
            block = self.registry.blocks.get(report.block)
            if block is None:
                raise Malformed("a report on a block that there is not")
            if block.holder != rank:
                self.send(rank, Drop((block.number,)))
                return
            if isinstance(report, Built):
                self._built(member, block, report)
            else:
                self._failed(member, block, report)
        self.repair()

    def _ready(self, rank: int, meeting: int) -> None:
        """Has the second device of a meeting connect, unless one of the two has gone in the meantime."""
        pair = self._to_meet.get(meeting)
        if meeting >= self._meetings or (pair is not None and pair[0] != rank):
            raise Malformed("ready for a device that is not expected")
        if pair is not None:
            del self._to_meet[meeting]
            self.send(pair[1], Meet(rank, meeting, first=False))

    def _built(self, member: Member, block: Block, report: Built) -> None:
        self.registry.built(block, report.partitions)
        member.failures = 0
        if self._record is not None:
            self._record.keep_registry(self.registry)
        nbytes = report.fetched_nbytes
        self.tell(
            "built",
            rank=member.rank,
            block=block.number,
            kind=block.kind,
            nbytes=nbytes,
            mds_nbytes=self._under_mds(block, nbytes),
        )
        if block.replaces is not None:
            old = self.registry.blocks[block.replaces]
            if old.holder is not None:
                self.send(old.holder, Drop((old.number,)))
            self.registry.discard(old)

    def _failed(self, member: Member, block: Block, report: Failed) -> None:
        self.registry.failed(block)
        self.tell("failed", rank=member.rank, block=block.number, blamed=report.rank, why=report.detail)
        if report.rank == member.rank:
            member.unable = True
        else:
            member.failures += 1
            self.silence({report.rank})

    def _hello(self, rank: int, hello: Hello) -> None:
        registry = self.registry
        if rank in registry.members:
            raise Malformed("a second greeting")
        if reason := self._unfit(hello):
            self.tell("turned_away", rank=rank, why=reason)
            self.send(rank, End(reason))
            return
        raw = -1
        if hello.partition:
            registry.features = hello.features
            partition = registry.named(hello.partition)
            if partition is None:
                labels, number = hello.labels.reshape(-1), len(registry.partitions)
                partition = Partition(number, hello.partition, labels, registry.numbers)
                registry.partitions.append(partition)
            raw = partition.block
            registry.enter(Block(raw, "rows", {partition.number: 1.0}, rank, ready=True))
        for other in registry.members:
            pair = min(rank, other), max(rank, other)
            self._to_meet[self._meetings] = pair
            self.send(pair[0], Meet(pair[1], self._meetings, first=True))
            self._meetings += 1
        registry.members[rank] = Member(rank)
        self.send(rank, Welcome(self._run, raw))
        self._take_held(rank, hello)
        self.tell("came", rank=rank, partition=hello.partition, rows=hello.rows)
        self.repair()

    def _unfit(self, hello: Hello) -> str:
        """Says why a device cannot take part; empty: it can."""
        if not hello.partition:
            return ""
        if hello.rows < 1 or not 1 <= hello.features <= _MAX_FEATURES or hello.labels.numel() != hello.rows:
            raise Malformed("data without rows, or too wide, or with another number of labels")
        known, features = self.registry.named(hello.partition), self.registry.features
        if features and hello.features != features:
            return (
                f"partition {hello.partition!r} has {hello.features} features, and those that are there have "
                f"{features}: give all devices the same columns"
            )
        if strange := self.check_labels(hello.labels):
            return f"partition {hello.partition!r}: {strange}"
        if known is None:
            return ""
        holder = self.registry.blocks[known.block].holder
        if holder is not None and not self.registry.members[holder].silent:
            return f"partition {hello.partition!r} is there already: give each device another one"
        if known.rows != hello.rows or not torch.equal(known.labels, hello.labels.reshape(-1)):
            return f"partition {hello.partition!r} was there with other labels: give it another name"
        return ""

    def _take_held(self, rank: int, hello: Hello) -> None:
        """Takes in the blocks that a device has kept, unless they are unknown or another device has them."""
        unknown = []
        for number in hello.held:
            block = self.registry.blocks.get(number)
            if hello.run == self._run and block is not None and block.holder is None:
                block.holder, block.ready = rank, True
            else:
                unknown.append(number)
        if unknown:
            self.send(rank, Drop(tuple(unknown)))

    # --- losses and silence -----------------------------------------------------------------------------------------

    def lose(self, rank: int) -> bool:
        """Takes in the loss of a device; tells whether training goes on without some of the partitions."""
        if rank not in self.registry.members:
            return False
        self.registry.lose(rank)
        self._to_meet = {number: pair for number, pair in self._to_meet.items() if rank not in pair}
        self.tell("gone", rank=rank)
        for other in self.registry.members:
            self.send(other, Lost(rank))
        changed = self.encoded and self._loses_partitions()
        self.repair()
        return changed

    def _loses_partitions(self) -> bool:
        """Tells whether training goes on without partitions that follow from no remaining block."""
        registry, changed = self.registry, False
        while lost := [one for one in registry.active if not registry.recoverable(one)]:
            for partition in lost:
                self.tell("lost", partition=partition.name)
            if self._settings.on_loss == "wait":
                return False
            for partition in lost:
                registry.forsake(partition)
            changed = True
        if changed and not registry.active:
            raise RunLost("no partition is left: all devices that had one are gone")
        return changed

    def silence(self, ranks: Iterable[int]) -> None:
        """Counts devices that have let a deadline pass as absent until they are heard, and probes them."""
        for rank in ranks:
            member = self.registry.members.get(rank)
            if member is None:
                continue
            if not member.silent:
                member.silent = True
                self.silences += 1
                self.tell("silent", rank=rank)
            self.send(rank, Probe())
        self.repair()

    def look_after(self) -> None:
        """Probes the devices that make blocks; those that have not answered since the last call count as silent.

        Devices that rest may try once more.
        """
        resting = [member for member in self.registry.members.values() if member.rests]
        for member in resting:
            member.failures -= 1
        if resting:
            self.repair()
        makers = {block.holder for block in self.registry.making() if block.holder is not None}
        silent = makers & self._probed
        self._probed = makers - silent
        for rank in self._probed:
            self.send(rank, Probe())
        if silent:
            self.silence(silent)

    def heard(self, rank: int) -> None:
        """Takes in a sign of life."""
        self._probed.discard(rank)
        member = self.registry.members.get(rank)
        if member is not None and member.silent:
            member.silent = False
            self.tell("heard", rank=rank)
            self.repair()

    # --- blocks -----------------------------------------------------------------------------------------------------

    def repair(self) -> None:
        """Orders the blocks that are missing, and lets devices go that may: all of them, before there are blocks."""
        registry, ordered = self.registry, list[Placed]()
        while self.encoded and (placed := self._placement.next(registry)) is not None:
            registry.place(placed)
            ordered.append(placed)
        if ordered and self._record is not None:  # before a device acts on it
            self._record.keep_registry(registry)
        for placed in ordered:
            assert placed.block.holder is not None
            self.tell("ordered", rank=placed.block.holder, block=placed.block.number)
            self.send(placed.block.holder, placed.order)
        for member in list(registry.members.values()):
            if member.leaving and (not self.encoded or registry.can_go(member.rank)):
                self.send(member.rank, End())
        if self.encoded:
            kinds = self._settings.kinds
            self.changed |= any(
                not partition.active and registry.trainable(partition, kinds)
                for partition in registry.partitions
            )
            self.stirred = True

    def _under_mds(self, block: Block, nbytes: int) -> int:
        """Computes the bytes that other devices would have given for a block with all partitions in it."""
        if block.kind == "columns" or block.raw is not None or block.replaces is not None:
            return nbytes
        own = {one.raw for one in self.registry.of("rows") if one.holder == block.holder}
        rows = sum(one.rows for one in self.registry.active if one.number not in own)
        return 8 * rows * self.registry.features

    def send(self, rank: int, message: Command) -> Pending[None]:
        """Sends a command to a device; done when it is on its way."""
        tag = messages.OPERAND if isinstance(message, (Multiply, End)) else messages.COMMAND
        return self._runtime.launch(sent(self._runtime.comm, packed(message), rank, tag))

    @property
    def elapsed_s(self) -> float:
        """Seconds since the coordinator began, by the clock of its events."""
        return self._runtime.now() - self._began

    def tell(self, event: str, **values: Json) -> None:
        """Records an event, with the redundancy at that time."""
        if self._record is not None:
            redundancy: Json = (
                [self.registry.redundancy(kind, self._settings.redundancy) for kind in self._settings.kinds]
                if self.encoded
                else None
            )
            self._record.tell(event, t=self.elapsed_s, redundancy=redundancy, **values)
