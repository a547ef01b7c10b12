"""Coordinator of coded training: holds labels, weights and the registry, and sees no features."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from farflung.coded import messages
from farflung.coded.blocks import MAX_PIECES, bounds_of
from farflung.coded.codes import CODES, MOST_SETS
from farflung.coded.device import Queue
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
    unpacked,
)
from farflung.coded.placement import Placement
from farflung.coded.record import Record
from farflung.coded.registry import Block, Kind, Member, Partition, Placed, Registry
from farflung.coded.rounds import Deadline, Round
from farflung.comm.failure_detector import Progress
from farflung.errors import BadSamples, ConfigError, RunLost, WaitEnded
from farflung.files import deciding
from farflung.options import choice_option, number_option, whole_option
from farflung.spec import build
from farflung.tasks import Pending
from farflung.types import Json, Payload, Runtime, Tag

__all__ = ["Coordinator", "Counters", "PartitionsChanged", "Settings"]

T = TypeVar("T")

_NAME = "coded training"
_BACK_S = 10.0
"""Time for which a restarted coordinator waits for all devices, even if those present would suffice."""
_LOOKS = 5.0
"""Time between two probes of devices that build blocks, in multiples of the shortest timeout."""
_REPORTS: tuple[type[Report], ...] = (Hello, Ready, Built, Failed, Leaving, Probe)
_OVERFLOW = "a product of the samples is not finite in float64: the features are too large: scale them"
_MAX_FEATURES = 1 << 28
"""Limit of columns: one column of weights for more would exceed the largest message."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the coordinator.

    Args:
      partitions: Number of partitions at the start, :math:`K`.
      devices: Number of devices at the start, :math:`N`, including those that bring partitions.
      code: Coefficients of coded blocks, as text; see :data:`farflung.coded.CODES`.
      seed: Seed of the code.
      redundancy: Number of devices that may vanish at any time, in the worst case; lost blocks are replaced.
      pieces: Number of pieces of each product; 1 sends whole blocks.
      transposed: Method for the product with residuals: coded ``"columns"``, or ``"repair"`` without them. Then
        each device multiplies its own partition, and for a lost one the others multiply their rows, a round for
        each.
      on_loss: Reaction to a lost partition that the remaining blocks do not determine: ``"wait"`` until it
        returns, or ``"go_on"`` without it.
      patience_s: Time for which training waits for missing devices, in seconds.
      min_timeout_s: Shortest time after which a device counts as silent, in seconds.

    Raises:
      ConfigError: a value is out of its range.
    """

    partitions: int
    devices: int
    code: str = "rlnc"
    seed: int = 0
    redundancy: int = 1
    pieces: int = 8
    transposed: Literal["columns", "repair"] = "columns"
    on_loss: Literal["wait", "go_on"] = "wait"
    patience_s: float = 300.0
    least_s: float = 1.0

    def __post_init__(self) -> None:
        whole_option(_NAME, "partitions", self.partitions, 1)
        whole_option(_NAME, "devices", self.devices, self.partitions)
        whole_option(_NAME, "redundancy", self.redundancy, 0)
        whole_option(_NAME, "pieces", self.pieces, 1, MAX_PIECES)
        choice_option(_NAME, "on_loss", self.on_loss, ("wait", "go_on"))
        choice_option(_NAME, "transposed", self.transposed, ("columns", "repair"))
        number_option(_NAME, "patience_s", self.patience_s, 0.001)
        number_option(_NAME, "least_s", self.least_s, 0.001)
        max_losses = min(self.redundancy, self.devices)
        sets = accumulate(math.comb(self.devices, losses) for losses in range(1, max_losses + 1))
        if any(num_sets > MOST_SETS for num_sets in sets):
            raise ConfigError(
                f"{_NAME}: redundancy {self.redundancy}: with {self.devices} devices that is more than {MOST_SETS:,} "
                "sets of devices that may vanish, and no more are tried: lower it"
            )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of blocks that are built."""
        return ("rows", "columns") if self.transposed == "columns" else ("rows",)


class PartitionsChanged(Exception):
    """Raised when the set of training samples has changed, so a running product is obsolete."""


@dataclass(slots=True)
class Counters:
    """Counts of a run.

    Args:
      rounds: Number of products, and parts of products, that devices were asked for.
      num_refused: Number of malformed or unexpected messages.
      num_late: Number of answers for pieces that were already decoded.
      silences: Number of times that a device has fallen silent.
    """

    rounds: int = 0
    refused: int = 0
    late: int = 0
    silences: int = 0


class Coordinator:
    """Rank 0 of a run: gathers devices, orders blocks, and computes the two products of all samples.

    Args:
      runtime: Runtime of rank 0.
      settings: Settings of the run.
      run: Name of the run, by which devices recognize their blocks.
      record: Store of events and of the registry, for a restart; ``None`` stores nothing.
    """

    def __init__(
        self, runtime: Runtime, settings: Settings, *, run: str = "run", record: Record | None = None
    ) -> None:
        saved = None if record is None else record.registry()
        self.registry = saved or Registry()
        """State of members, partitions and blocks."""
        self.changed = False
        """True if partitions have become trainable that are not trained on."""
        self.check_labels: Callable[[Tensor], str] = lambda labels: ""
        """Describes the error in the labels of a new partition; returns an empty string if there is none."""
        self.counters = Counters()
        self._runtime, self._comm, self._settings = runtime, runtime.comm, settings
        self._run, self._record, self._began = run, record, runtime.now()
        self._again = saved is not None
        self._encoded = False
        self._stirred = False
        """True if blocks may answer that devices have not been asked for yet."""
        code = build("code", settings.code, CODES)
        self._placement = Placement(code, settings.seed, settings.redundancy, settings.kinds)
        self._probed = set[int]()
        """Ranks that were probed and have not answered yet."""
        self._to_meet = dict[int, tuple[int, int]]()
        """Pairs of ranks that are about to connect, by meeting number; the first one prepares."""
        self._meetings = 0
        self._gone = set[int]()
        """Ranks whose earlier messages are ignored."""
        self._refused = Counter[int]()
        """Number of refused messages by sender."""
        self._rounds = dict[int, Round]()
        self._progress: dict[int, Progress] = {}
        """Progress of each device, by its answers to probes."""
        self._carried = Progress()
        """Progress of the bytes to and from devices."""
        self._deadlines: dict[Kind, Deadline] = {
            kind: Deadline(settings.patience_s, settings.least_s) for kind in settings.kinds
        }
        self._events = Queue[Callable[[], None]]()
        """Event handlers."""
        self._progress_s = 0.0
        """Time of the last event that counts as progress."""
        self._overdue = False
        """True once the deadline of the current rounds has passed."""
        self._look_later()
        self._listen(messages.REPORT, None)
        runtime.launch(self._take_in(self._comm.departure, self._lose))
        runtime.launch(self._take_in(self._comm.arrival, self._expect))

    # --- a run ------------------------------------------------------------------------------------------------------

    async def gather(self) -> None:
        """Waits for the initial devices and partitions, and for their encoding; later calls do nothing.

        Raises:
          RunLost: devices are missing for too long, or are lost before their data are encoded.
        """
        settings, registry = self._settings, self.registry
        if self._encoded:
            return
        self.tell("begins")
        enough_at = self._runtime.now() + _BACK_S
        if self._again:
            self._call_at(enough_at, lambda: None)

        def count_partitions() -> int:
            return sum(registry.raw(partition) is not None for partition in registry.partitions)

        await self._until(
            lambda: (
                (len(registry.members) >= settings.devices and count_partitions() >= settings.partitions)
                or (self._again and self._runtime.now() >= enough_at and self._decodable())
            ),
            lambda: (
                f"{len(registry.members)} of {settings.devices} devices and {count_partitions()} of "
                f"{settings.partitions} partitions have come"
            ),
        )
        self._encoded = True
        if not registry.active:
            for partition in registry.partitions:
                partition.active = registry.raw(partition) is not None
            if "columns" in settings.kinds:
                registry.bounds = bounds_of(registry.features, len(registry.active))
        self._repair()
        await self._until(
            lambda: not registry.making() and self._decodable(), lambda: self._in_need(settings.kinds[-1])
        )
        self.tell("encoded")

    def _decodable(self) -> bool:
        return all(self.registry.decodable(kind) for kind in self._settings.kinds)

    def settle(self) -> list[Partition]:
        """Activates all partitions that can be trained on, and returns the active ones."""
        self.changed = False
        for partition in self.registry.partitions:
            partition.active |= self.registry.trainable(partition, self._settings.kinds)
        self._repair()
        return self.registry.active

    @property
    def samples(self) -> int:
        """Number of rows that are trained on."""
        return sum(partition.rows for partition in self.registry.active)

    @property
    def features(self) -> int:
        return self.registry.features

    async def times(self, weights: Tensor) -> Tensor:
        """Multiplies all samples by weights; see :class:`farflung.coded.Products`.

        Raises:
          BadSamples: the product, or an answer for it, is not finite.
          PartitionsChanged: some data are lost for good, and training continues without them.
          RunLost: too few devices are left, and none has joined within the patience of the run.
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
        """Multiplies each partition on its own device, or on all others if that device does not answer.

        Only rows are coded, so a coded answer is a sum over partitions with one operand. Of the decoded parts,
        only that of the missing partition is used.
        """
        features = self.registry.features
        parts = torch.split(residuals, [partition.rows for partition in active])
        own_rounds = {
            partition.number: self._round("rows", part, (partition.number,), [features], [partition.number])
            for partition, part in zip(active, parts, strict=True)
            if self.registry.raw(partition) is not None
        }
        if own_rounds:
            await self._carry(*own_rounds.values(), patiently=False)
        total = torch.zeros(features, residuals.shape[1], dtype=torch.float64)
        for place, (partition, part) in enumerate(zip(active, parts, strict=True)):
            own_round = own_rounds.get(partition.number)
            if own_round is not None and own_round.complete:
                total += own_round.products[0]
                continue
            round = await self._carry(
                self._round("rows", part, (partition.number,), [features] * len(active))
            )
            total += round.products[place]
        return total

    async def end(self, reason: str = "") -> None:
        """Releases all devices."""
        for sending in [self._send(rank, End(reason)) for rank in self.registry.members]:
            await sending

    @property
    def elapsed_s(self) -> float:
        """Seconds since the coordinator started, by the clock of its events."""
        return self._runtime.now() - self._began

    def tell(self, event: str, **values: Json) -> None:
        """Records an event with the current redundancy."""
        if self._record is not None:
            redundancy: Json = (
                [self.registry.redundancy(kind, self._settings.redundancy) for kind in self._settings.kinds]
                if self._encoded
                else None
            )
            self._record.tell(event, t=self.elapsed_s, redundancy=redundancy, **values)

    # --- rounds -----------------------------------------------------------------------------------------------------

    def _round(
        self,
        kind: Kind,
        operand: Tensor,
        partitions: tuple[int, ...],
        heights: Sequence[int],
        unknowns: Sequence[int] | None = None,
    ) -> Round:
        if not bool(operand.isfinite().all()):
            raise BadSamples(_OVERFLOW)
        self.counters.rounds += 1
        number, replayed = self.counters.rounds, None
        decision = self._runtime.decisions.replayed("answers", number, self._comm.rank)
        if decision is not None:
            with deciding(decision.name, decision.step):
                sets: Any = decision.value
                replayed = [frozenset(map(int, numbers)) for numbers in sets]
        return Round(
            number,
            kind,
            self.registry.unknowns(kind) if unknowns is None else unknowns,
            heights,
            operand.clone(),
            partitions,
            self._settings.pieces,
            replayed,
        )

    async def _carry(self, *rounds: Round, patiently: bool = True) -> Round:
        """Runs rounds concurrently and returns the last of them.

        Args:
          rounds: Rounds of one kind.
          must_complete: True to wait for all pieces; False to stop at the learned deadline.
        """
        kind, begin = rounds[0].kind, self._runtime.now()
        self._rounds = {round.number: round for round in rounds}
        self._overdue, self._stirred = False, True
        for number in self._rounds:
            self._listen(messages.answers(number), number)
        self._watch(kind)

        def is_hopeless() -> bool:
            return any(round.is_hopeless(self.registry.heard) for round in rounds)

        try:
            await self._until(
                lambda: (
                    all(round.complete for round in rounds)
                    or (self._overdue and not patiently)
                    or is_hopeless()
                ),
                lambda: self._in_need(kind),
            )
            if is_hopeless():
                raise BadSamples(_OVERFLOW)
        finally:
            for number, round in self._rounds.items():
                self._runtime.launch(self._forget(number))
                self.counters.late += round.late
            self._rounds = {}
        if not self._overdue:
            self._deadlines[kind].learn(self._runtime.now() - begin)
        for round in rounds:
            if round.complete:
                self._runtime.decide_own("answers", round.number, round.decision)
        return rounds[-1]

    def _ask(self) -> None:
        """Sends tasks for all blocks that can answer and have not been asked for."""
        for round in self._rounds.values():
            blocks = [block for block in self.registry.answering(round.kind) if round.serves(block)]
            for rank, task in round.tasks(blocks, min(self._rounds)).items():
                self._send(rank, task)

    def _watch(self, kind: Kind) -> None:
        rounds = self._rounds

        def check_deadline() -> None:
            """Marks devices as silent that have answered nothing since the last deadline."""
            if rounds is self._rounds:
                self._overdue = True
                self._silence(set[int]().union(*(round.silent() for round in rounds.values())))
                self._watch(kind)

        self._call_at(self._runtime.now() + self._deadlines[kind].seconds, check_deadline)

    def _in_need(self, kind: Kind) -> str:
        registry = self.registry
        silent_ranks = [rank for rank, member in registry.members.items() if member.silent]
        lost_partitions = [partition for partition in registry.active if not registry.recoverable(partition)]
        texts = [f"{len(registry.heard)} devices are heard of"]
        if silent_ranks:
            texts.append(f"silent: rank {', '.join(map(str, sorted(silent_ranks)))}")
        if lost_partitions:
            texts.append(
                f"lost with their devices: {', '.join(item.name or str(item.number) for item in lost_partitions)}"
            )
        elif kind == "columns" and not registry.decodable(kind):
            texts.append(
                f"column blocks {', '.join(map(str, registry.missing(kind)))} follow from none that are there"
            )
        return "; ".join(texts)

    # --- events -----------------------------------------------------------------------------------------------------

    async def _until(self, there: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Handles events until a condition holds.

        Raises:
          RunLost: no event has counted as progress within the patience of the run.
        """
        patience_s = self._settings.patience_s
        self._progress_s = self._runtime.now()
        is_waiting, is_paused = True, False

        def check_patience() -> None:
            remaining_s = self._progress_s + patience_s - self._runtime.now()
            if is_waiting and remaining_s <= 0:
                raise RunLost(
                    f"no device has joined, answered or got further with a block for {patience_s:g} s: {missing()}"
                )
            if is_waiting:
                self._call_at(self._runtime.now() + remaining_s, check_patience)

        self._call_at(self._progress_s + patience_s, check_patience)
        try:
            while True:
                if self._stirred:
                    self._stirred = False
                    self._ask()
                    kinds = [round.kind for round in self._rounds.values()]
                    if not is_paused and not all(map(self.registry.decodable, kinds)):
                        is_paused = True
                        self.tell("paused", missing=missing())
                if there():
                    break
                handle = await self._events.next()
                handle()
        finally:
            is_waiting = False
        if is_paused:
            self.tell("goes_on")

    async def _count_bytes(self, stuck: Sequence[int]) -> None:
        """Counts bytes to and from devices as progress, for instance of an operand in transit.

        Args:
          stuck: Devices that do not count because their orders fail repeatedly.
        """
        moved = self._comm.moved_nbytes
        nbytes = moved() - sum(map(moved, stuck))

        def count_traffic() -> None:
            time_s = self._runtime.now()
            self._carried.update(0, nbytes, time_s, self._settings.patience_s)
            if self._carried.last_s == time_s:
                self._progress_s = time_s

        self._events.put(count_traffic)

    def _call_at(self, t: float, take_in: Callable[[], None]) -> None:
        self._runtime.sleep_until(t).on_done(lambda _: self._events.put(take_in))

    def _listen(self, tag: Tag, round: int | None) -> None:
        """Queues the messages of a tag until its exchange is cancelled."""
        receive = partial(self._comm.recv_any, tag, deadline_s=math.inf)
        self._runtime.launch(self._take_in(receive, lambda message: self._take(*message, round)))

    async def _take_in(self, receive: Callable[[], Pending[T]], take: Callable[[T], None]) -> None:
        """Queues an event for each received item until the source ends."""
        with suppress(WaitEnded):
            while True:
                self._events.put(partial(take, await receive()))

    async def _forget(self, round: int) -> None:
        self._comm.forget(messages.answers(round).exchange)

    def _expect(self, rank: int) -> None:
        """Accepts messages of a new device, which may have the rank of an earlier one."""
        self._gone.discard(rank)

    def _take(self, rank: int, payload: Payload, round: int | None) -> None:
        """Handles a report, or an answer of a round, and counts it as progress.

        A failed block counts only if some of its rows have arrived; otherwise it could fail forever.
        """
        if rank in self._gone:
            return
        try:
            if round is None:
                self._report(rank, unpacked(payload, _REPORTS))
                return
            if round not in self._rounds:
                self.counters.late += 1
                return
            self._rounds[round].take(rank, payload)
        except Malformed as error:
            self._refuse(rank, str(error))
            return
        self._heard(rank)
        self._progress_s = self._runtime.now()

    def _gets_further(self, rank: int, nbytes: int) -> bool:
        """Returns True if a device has exchanged rows for a block since its last probe."""
        time_s = self._runtime.now()
        progress = self._progress.setdefault(rank, Progress())
        progress.update(0, nbytes, time_s, self._settings.patience_s)
        is_building = any(block.holder == rank for block in self.registry.making())
        return is_building and not self.registry.members[rank].is_stuck and progress.last_s == time_s

    def _refuse(self, rank: int, why: str) -> None:
        """Counts a refused message; records the 1st, 2nd, 4th, 8th and so on of each device."""
        self.counters.refused += 1
        self._refused[rank] += 1
        if self._refused[rank].bit_count() == 1:
            self.tell("refused", rank=rank, why=why, count=self._refused[rank])

    # --- reports ----------------------------------------------------------------------------------------------------

    def _report(self, rank: int, report: Report) -> None:
        """Handles a report of a device.

        Raises:
          MalformedMessage: it names an unknown block or device.
        """
        member = self.registry.members.get(rank)
        if isinstance(report, Hello):
            self._hello(rank, report)
            self._progress_s = self._runtime.now()
            return
        if member is None:
            raise Malformed("a report before a greeting")
        if isinstance(report, Ready):
            self._ready(rank, report.number)
        elif isinstance(report, Leaving):
            member.leaving = True
            self.tell("leaving", rank=rank)
            self._repair()
        elif isinstance(report, (Built, Failed)):
            self._ended(member, report)
        self._heard(rank)
        if isinstance(report, Probe):
            has_progressed = self._gets_further(rank, report.nbytes)
        else:
            has_progressed = not (isinstance(report, Failed) and member.failures)
        if has_progressed:
            self._progress_s = self._runtime.now()

    def _ready(self, rank: int, meeting: int) -> None:
        """Tells the second device of a meeting to connect, unless one of the two has gone."""
        pair = self._to_meet.get(meeting)
        if meeting >= self._meetings or (pair is not None and pair[0] != rank):
            raise Malformed("ready for a device that is not expected")
        if pair is not None:
            del self._to_meet[meeting]
            self._meet(pair[1], rank, meeting, first=False)

    def _meet(self, rank: int, other: int, meeting: int, *, first: bool) -> None:
        self._send(rank, Meet(other, meeting, first, self._runtime.address_of(other)))

    def _ended(self, member: Member, report: Built | Failed) -> None:
        """Handles the report that a block was built, or that building it failed."""
        block = self.registry.blocks.get(report.block)
        if block is None:
            raise Malformed("a report on a block that there is not")
        if block.holder != member.rank:
            self._send(member.rank, Drop((block.number,)))
            return
        if isinstance(report, Built):
            self.registry.built(block, report.partitions)
            member.failures = member.fetched_nbytes = 0
            if self._record is not None:
                self._record.keep_registry(self.registry)
            self.tell(
                "built",
                rank=member.rank,
                block=block.number,
                kind=block.kind,
                nbytes=report.fetched_nbytes,
                mds_nbytes=self._under_mds(block, report.fetched_nbytes),
            )
            if block.replaces is not None:
                old_block = self.registry.blocks[block.replaces]
                if old_block.holder is not None:
                    self._send(old_block.holder, Drop((old_block.number,)))
                self.registry.discard(old_block)
        else:
            self.registry.failed(block)
            self.tell("failed", rank=member.rank, block=block.number, blamed=report.rank, why=report.detail)
            if report.rank == member.rank:
                member.unable = True
            else:
                member.count_failure(report.fetched_nbytes)
                self._silence({report.rank})
        self._repair()

    def _hello(self, rank: int, hello: Hello) -> None:
        registry = self.registry
        if rank in registry.members:
            raise Malformed("a second greeting")
        if reason := self._unfit(hello):
            self.tell("turned_away", rank=rank, why=reason)
            self._send(rank, End(reason))
            return
        raw = -1
        if hello.partition:
            registry.features = hello.features
            partition = registry.named(hello.partition)
            if partition is None:
                labels, number = hello.labels.reshape(-1), len(registry.partitions)
                partition = Partition(number, hello.partition, labels, registry.next_number)
                registry.partitions.append(partition)
            raw = partition.block
            registry.blocks[raw] = Block(raw, "rows", {partition.number: 1.0}, rank, ready=True)
        for peer in registry.members:
            pair = min(rank, peer), max(rank, peer)
            self._to_meet[self._meetings] = pair
            self._meet(pair[0], pair[1], self._meetings, first=True)
            self._meetings += 1
        registry.members[rank] = Member(rank)
        self._send(rank, Welcome(self._run, raw))
        unknown = []
        for number in hello.held:  # stored blocks count, unless another device has them by now
            block = registry.blocks.get(number)
            if hello.run == self._run and block is not None and block.holder is None:
                block.holder, block.ready = rank, True
            else:
                unknown.append(number)
        if unknown:
            self._send(rank, Drop(tuple(unknown)))
        self.tell("came", rank=rank, partition=hello.partition, rows=hello.rows)
        self._repair()

    def _unfit(self, hello: Hello) -> str:
        """Returns the reason why a device cannot take part; empty if it can."""
        if not hello.partition:
            return ""
        if hello.rows < 1 or not 1 <= hello.features <= _MAX_FEATURES or hello.labels.numel() != hello.rows:
            raise Malformed("data without rows, or too wide, or with another number of labels")
        partition, features = self.registry.named(hello.partition), self.registry.features
        if features and hello.features != features:
            return (
                f"partition {hello.partition!r} has {hello.features} features, and those that are there have "
                f"{features}: give all devices the same columns"
            )
        if mismatch := self.check_labels(hello.labels):
            return f"partition {hello.partition!r}: {mismatch}"
        if partition is None:
            return ""
        holder = self.registry.blocks[partition.block].holder
        if holder is not None and not self.registry.members[holder].silent:
            return f"partition {hello.partition!r} is there already: give each device another one"
        if partition.rows != hello.rows or not torch.equal(partition.labels, hello.labels.reshape(-1)):
            return f"partition {hello.partition!r} was there with other labels: give it another name"
        return ""

    # --- losses and silence -----------------------------------------------------------------------------------------

    def _lose(self, rank: int) -> None:
        """Handles the loss of a device, which never counts as progress.

        Raises:
          PartitionsChanged: training continues without some partitions.
        """
        self._gone.add(rank)
        for round in self._rounds.values():
            round.lose(rank)
        if rank not in self.registry.members:
            return
        self.registry.lose(rank)
        self._to_meet = {number: pair for number, pair in self._to_meet.items() if rank not in pair}
        self.tell("gone", rank=rank)
        for peer in self.registry.members:
            self._send(peer, Lost(rank))
        has_dropped = self._encoded and self._loses_partitions()
        self._repair()
        if has_dropped and self._rounds:
            raise PartitionsChanged

    def _loses_partitions(self) -> bool:
        """Returns True if partitions were dropped because no remaining block determines them."""
        registry, has_dropped = self.registry, False
        while lost := [partition for partition in registry.active if not registry.recoverable(partition)]:
            for partition in lost:
                self.tell("lost", partition=partition.name)
            if self._settings.on_loss == "wait":
                return False
            for partition in lost:
                registry.forsake(partition)
            has_dropped = True
        if has_dropped and not registry.active:
            raise RunLost("no partition is left: all devices that had one are gone")
        return has_dropped

    def _silence(self, ranks: Iterable[int]) -> None:
        """Marks and probes devices that missed a deadline; they are ignored until they respond."""
        for rank in ranks:
            member = self.registry.members.get(rank)
            if member is None:
                continue
            if not member.silent:
                member.silent = True
                self.counters.silences += 1
                self.tell("silent", rank=rank)
            self._send(rank, Probe())
        self._repair()

    def _look_later(self) -> None:
        self._call_at(self._runtime.now() + _LOOKS * self._settings.least_s, self._look_after)

    def _look_after(self) -> None:
        """Probes devices that build blocks, and marks those as silent that did not answer the last probe.

        Devices that are backing off get one more try.
        """
        resting_members = [member for member in self.registry.members.values() if member.rests]
        for member in resting_members:
            member.failures -= 1
        if resting_members:
            self._repair()
        builders = {block.holder for block in self.registry.making() if block.holder is not None}
        silent_ranks = builders & self._probed
        self._probed = builders - silent_ranks
        for rank in self._probed:
            self._send(rank, Probe())
        if silent_ranks:
            self._silence(silent_ranks)
        stuck_ranks = [rank for rank, member in self.registry.members.items() if member.is_stuck]
        self._runtime.launch(self._count_bytes(stuck_ranks))
        self._look_later()

    def _heard(self, rank: int) -> None:
        self._probed.discard(rank)
        member = self.registry.members.get(rank)
        if member is not None and member.silent:
            member.silent = False
            self.tell("heard", rank=rank)
            self._repair()

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _repair(self) -> None:
        """Orders missing blocks, and releases leaving devices if possible: before encoding, all of them."""
        registry, placed_blocks = self.registry, list[Placed]()
        while self._encoded and (placed_block := self._placement.next(registry)) is not None:
            registry.place(placed_block)
            placed_blocks.append(placed_block)
        if placed_blocks and self._record is not None:  # before a device acts on it
            self._record.keep_registry(registry)
        for placed_block in placed_blocks:
            assert placed_block.block.holder is not None
            self.tell("ordered", rank=placed_block.block.holder, block=placed_block.block.number)
            self._send(placed_block.block.holder, placed_block.order)
        for member in list(registry.members.values()):
            if member.leaving and (not self._encoded or registry.can_go(member.rank)):
                self._send(member.rank, End())
        if self._encoded:
            kinds = self._settings.kinds
            self.changed |= any(
                not partition.active and registry.trainable(partition, kinds)
                for partition in registry.partitions
            )
            self._stirred = True

    def _under_mds(self, block: Block, nbytes: int) -> int:
        """Computes the bytes that other devices would have sent for a block of all partitions."""
        if block.kind == "columns" or block.raw is not None or block.replaces is not None:
            return nbytes
        own_raw = {copy.raw for copy in self.registry.of("rows") if copy.holder == block.holder}
        rows = sum(partition.rows for partition in self.registry.active if partition.number not in own_raw)
        return 8 * rows * self.registry.features

    def _send(self, rank: int, message: Command) -> Pending[None]:
        tag = messages.OPERAND if isinstance(message, (Multiply, End)) else messages.COMMAND
        return self._runtime.launch(sent(self._comm, packed(message), rank, tag))
