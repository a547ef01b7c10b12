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
from farflung.coded.blocks import MAX_PIECES, compute_column_bounds
from farflung.coded.codes import CODES, MAX_LOSS_SETS
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
    MalformedMessage,
    Meet,
    Multiply,
    Probe,
    Ready,
    Report,
    Welcome,
    decode_message,
    encode_message,
    send_message,
)
from farflung.coded.placement import Placement
from farflung.coded.record import Record
from farflung.coded.registry import Block, BlockRegistry, DevicePartition, DeviceState, Kind, PlacedBlock
from farflung.coded.rounds import Deadline, Round
from farflung.comm.failure_detector import ProgressTracker
from farflung.errors import BadSamples, ConfigError, RunLost, WaitEnded
from farflung.files import wrap_decision_errors
from farflung.options import check_choice, check_integer, check_number
from farflung.spec import build
from farflung.tasks import Pending
from farflung.types import Json, Payload, Runtime, Tag

__all__ = ["Coordinator", "Counters", "PartitionsChanged", "Settings"]

T = TypeVar("T")

_NAME = "coded training"
_REJOIN_WAIT_S = 10.0
"""Time for which a restarted coordinator waits for all devices, even if those present would suffice."""
_PROBE_FACTOR = 5.0
"""Time between two probes of devices that build blocks, in multiples of the shortest timeout."""
_REPORTS: tuple[type[Report], ...] = (Hello, Ready, Built, Failed, Leaving, Probe)
_OVERFLOW_TEXT = "a product of the samples is not finite in float64: the features are too large: scale them"
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
    min_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        check_integer(_NAME, "partitions", self.partitions, 1)
        check_integer(_NAME, "devices", self.devices, self.partitions)
        check_integer(_NAME, "redundancy", self.redundancy, 0)
        check_integer(_NAME, "pieces", self.pieces, 1, MAX_PIECES)
        check_choice(_NAME, "on_loss", self.on_loss, ("wait", "go_on"))
        check_choice(_NAME, "transposed", self.transposed, ("columns", "repair"))
        check_number(_NAME, "patience_s", self.patience_s, 0.001)
        check_number(_NAME, "min_timeout_s", self.min_timeout_s, 0.001)
        max_losses = min(self.redundancy, self.devices)
        sets = accumulate(math.comb(self.devices, losses) for losses in range(1, max_losses + 1))
        if any(num_sets > MAX_LOSS_SETS for num_sets in sets):
            raise ConfigError(
                f"{_NAME}: redundancy {self.redundancy}: with {self.devices} devices that is more than "
                f"{MAX_LOSS_SETS:,} "
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
    num_refused: int = 0
    num_late: int = 0
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
        saved = None if record is None else record.load_registry()
        self.registry = saved or BlockRegistry()
        """State of members, partitions and blocks."""
        self.has_new_partitions = False
        """True if partitions have become trainable that are not trained on."""
        self.check_labels: Callable[[Tensor], str] = lambda labels: ""
        """Describes the error in the labels of a new partition; returns an empty string if there is none."""
        self.counters = Counters()
        self._runtime, self._comm, self._settings = runtime, runtime.comm, settings
        self._run, self._record, self._start_s = run, record, runtime.read_clock()
        self._is_resumed = saved is not None
        self._is_encoded = False
        self._needs_dispatch = False
        """True if blocks may answer that devices have not been asked for yet."""
        code = build("code", settings.code, CODES)
        self._placement = Placement(code, settings.seed, settings.redundancy, settings.kinds)
        self._probed_ranks = set[int]()
        """Ranks that were probed and have not answered yet."""
        self._pending_meetings = dict[int, tuple[int, int]]()
        """Pairs of ranks that are about to connect, by meeting number; the first one prepares."""
        self._num_meetings = 0
        self._lost_ranks = set[int]()
        """Ranks whose earlier messages are ignored."""
        self._refusal_counts = Counter[int]()
        """Number of refused messages by sender."""
        self._rounds = dict[int, Round]()
        self._device_progress: dict[int, ProgressTracker] = {}
        """Progress of each device, by its answers to probes."""
        self._traffic_progress = ProgressTracker()
        """Progress of the bytes to and from devices."""
        self._deadlines: dict[Kind, Deadline] = {
            kind: Deadline(settings.patience_s, settings.min_timeout_s) for kind in settings.kinds
        }
        self._events = Queue[Callable[[], None]]()
        """Event handlers."""
        self._progress_s = 0.0
        """Time of the last event that counts as progress."""
        self._is_overdue = False
        """True once the deadline of the current rounds has passed."""
        self._schedule_probes()
        self._listen(messages.REPORT, None)
        runtime.launch(self._queue_events(self._comm.wait_for_leave, self._handle_loss))
        runtime.launch(self._queue_events(self._comm.wait_for_join, self._handle_arrival))

    # --- a run ------------------------------------------------------------------------------------------------------

    async def gather(self) -> None:
        """Waits for the initial devices and partitions, and for their encoding; later calls do nothing.

        Raises:
          RunLost: devices are missing for too long, or are lost before their data are encoded.
        """
        settings, registry = self._settings, self.registry
        if self._is_encoded:
            return
        self.record_event("begins")
        enough_at = self._runtime.read_clock() + _REJOIN_WAIT_S
        if self._is_resumed:
            self._call_at(enough_at, lambda: None)

        def count_partitions() -> int:
            return sum(registry.find_raw_block(partition) is not None for partition in registry.partitions)

        await self._process_events(
            lambda: (
                (len(registry.devices) >= settings.devices and count_partitions() >= settings.partitions)
                or (self._is_resumed and self._runtime.read_clock() >= enough_at and self._is_decodable())
            ),
            lambda: (
                f"{len(registry.devices)} of {settings.devices} devices and {count_partitions()} of "
                f"{settings.partitions} partitions have come"
            ),
        )
        self._is_encoded = True
        if not registry.active_partitions:
            for partition in registry.partitions:
                partition.is_active = registry.find_raw_block(partition) is not None
            if "columns" in settings.kinds:
                registry.bounds = compute_column_bounds(registry.features, len(registry.active_partitions))
        self._repair_blocks()
        await self._process_events(
            lambda: not registry.list_pending_blocks() and self._is_decodable(),
            lambda: self._describe_missing(settings.kinds[-1]),
        )
        self.record_event("encoded")

    def _is_decodable(self) -> bool:
        return all(self.registry.is_decodable(kind) for kind in self._settings.kinds)

    def activate_partitions(self) -> list[DevicePartition]:
        """Activates all partitions that can be trained on, and returns the active ones."""
        self.has_new_partitions = False
        for partition in self.registry.partitions:
            partition.is_active |= self.registry.is_trainable(partition, self._settings.kinds)
        self._repair_blocks()
        return self.registry.active_partitions

    @property
    def samples(self) -> int:
        """Number of rows that are trained on."""
        return sum(partition.rows for partition in self.registry.active_partitions)

    @property
    def features(self) -> int:
        return self.registry.features

    async def multiply(self, weights: Tensor) -> Tensor:
        """Multiplies all samples by weights; see :class:`farflung.coded.Products`.

        Raises:
          BadSamples: the product, or an answer for it, is not finite.
          PartitionsChanged: some data are lost for good, and training continues without them.
          RunLost: too few devices are left, and none has joined within the patience of the run.
        """
        heights = [partition.rows for partition in self.registry.active_partitions]
        return torch.cat((await self._run_rounds(self._create_round("rows", weights, (), heights))).products)

    async def multiply_transposed(self, residuals: Tensor) -> Tensor:
        active, bounds = self.registry.active_partitions, self.registry.bounds
        if self._settings.transposed == "repair":
            return await self._multiply_by_repair(active, residuals)
        widths = [end - begin for begin, end in pairwise(bounds)]
        numbers = tuple(partition.number for partition in active)
        return torch.cat(
            (await self._run_rounds(self._create_round("columns", residuals, numbers, widths))).products
        )

    async def _multiply_by_repair(self, active: Sequence[DevicePartition], residuals: Tensor) -> Tensor:
        """Multiplies each partition on its own device, or on all others if that device does not answer.

        Only rows are coded, so a coded answer is a sum over partitions with one operand. Of the decoded parts,
        only that of the missing partition is used.
        """
        features = self.registry.features
        parts = torch.split(residuals, [partition.rows for partition in active])
        own_rounds = {
            partition.number: self._create_round(
                "rows", part, (partition.number,), [features], [partition.number]
            )
            for partition, part in zip(active, parts, strict=True)
            if self.registry.find_raw_block(partition) is not None
        }
        if own_rounds:
            await self._run_rounds(*own_rounds.values(), must_complete=False)
        total = torch.zeros(features, residuals.shape[1], dtype=torch.float64)
        for place, (partition, part) in enumerate(zip(active, parts, strict=True)):
            own_round = own_rounds.get(partition.number)
            if own_round is not None and own_round.is_complete:
                total += own_round.products[0]
                continue
            round = await self._run_rounds(
                self._create_round("rows", part, (partition.number,), [features] * len(active))
            )
            total += round.products[place]
        return total

    async def end(self, reason: str = "") -> None:
        """Releases all devices."""
        for sending in [self._send(rank, End(reason)) for rank in self.registry.devices]:
            await sending

    @property
    def elapsed_s(self) -> float:
        """Seconds since the coordinator started, by the clock of its events."""
        return self._runtime.read_clock() - self._start_s

    def record_event(self, event: str, **values: Json) -> None:
        """Records an event with the current redundancy."""
        if self._record is not None:
            redundancy: Json = (
                [
                    self.registry.compute_redundancy(kind, self._settings.redundancy)
                    for kind in self._settings.kinds
                ]
                if self._is_encoded
                else None
            )
            self._record.record_event(event, t=self.elapsed_s, redundancy=redundancy, **values)

    # --- rounds -----------------------------------------------------------------------------------------------------

    def _create_round(
        self,
        kind: Kind,
        operand: Tensor,
        partitions: tuple[int, ...],
        heights: Sequence[int],
        unknowns: Sequence[int] | None = None,
    ) -> Round:
        if not bool(operand.isfinite().all()):
            raise BadSamples(_OVERFLOW_TEXT)
        self.counters.rounds += 1
        number, replayed = self.counters.rounds, None
        decision = self._runtime.decisions.find_replayed("answers", number, self._comm.rank)
        if decision is not None:
            with wrap_decision_errors(decision.name, decision.step):
                sets: Any = decision.value
                replayed = [frozenset(map(int, numbers)) for numbers in sets]
        return Round(
            number,
            kind,
            self.registry.list_unknowns(kind) if unknowns is None else unknowns,
            heights,
            operand.clone(),
            partitions,
            self._settings.pieces,
            replayed,
        )

    async def _run_rounds(self, *rounds: Round, must_complete: bool = True) -> Round:
        """Runs rounds concurrently and returns the last of them.

        Args:
          rounds: Rounds of one kind.
          must_complete: True to wait for all pieces; False to stop at the learned deadline.
        """
        kind, begin = rounds[0].kind, self._runtime.read_clock()
        self._rounds = {round.number: round for round in rounds}
        self._is_overdue, self._needs_dispatch = False, True
        for number in self._rounds:
            self._listen(messages.build_answer_tag(number), number)
        self._watch_deadline(kind)

        def is_hopeless() -> bool:
            return any(round.is_hopeless(self.registry.responsive_ranks) for round in rounds)

        try:
            await self._process_events(
                lambda: (
                    all(round.is_complete for round in rounds)
                    or (self._is_overdue and not must_complete)
                    or is_hopeless()
                ),
                lambda: self._describe_missing(kind),
            )
            if is_hopeless():
                raise BadSamples(_OVERFLOW_TEXT)
        finally:
            for number, round in self._rounds.items():
                self._runtime.launch(self._forget_round(number))
                self.counters.num_late += round.num_late
            self._rounds = {}
        if not self._is_overdue:
            self._deadlines[kind].record_duration(self._runtime.read_clock() - begin)
        for round in rounds:
            if round.is_complete:
                self._runtime.decide_locally("answers", round.number, round.list_decoding_blocks)
        return rounds[-1]

    def _dispatch_tasks(self) -> None:
        """Sends tasks for all blocks that can answer and have not been asked for."""
        for round in self._rounds.values():
            blocks = [
                block for block in self.registry.list_product_blocks(round.kind) if round.can_use_block(block)
            ]
            for rank, task in round.build_tasks(blocks, min(self._rounds)).items():
                self._send(rank, task)

    def _watch_deadline(self, kind: Kind) -> None:
        rounds = self._rounds

        def check_deadline() -> None:
            """Marks devices as silent that have answered nothing since the last deadline."""
            if rounds is self._rounds:
                self._is_overdue = True
                self._mark_silent(
                    set[int]().union(*(round.pop_silent_devices() for round in rounds.values()))
                )
                self._watch_deadline(kind)

        self._call_at(self._runtime.read_clock() + self._deadlines[kind].timeout_s, check_deadline)

    def _describe_missing(self, kind: Kind) -> str:
        registry = self.registry
        silent_ranks = [rank for rank, member in registry.devices.items() if member.is_silent]
        lost_partitions = [
            partition for partition in registry.active_partitions if not registry.is_recoverable(partition)
        ]
        texts = [f"{len(registry.responsive_ranks)} devices are heard of"]
        if silent_ranks:
            texts.append(f"silent: rank {', '.join(map(str, sorted(silent_ranks)))}")
        if lost_partitions:
            texts.append(
                f"lost with their devices: {', '.join(item.name or str(item.number) for item in lost_partitions)}"
            )
        elif kind == "columns" and not registry.is_decodable(kind):
            texts.append(
                f"column blocks {', '.join(map(str, registry.list_undetermined(kind)))} follow from none that are there"
            )
        return "; ".join(texts)

    # --- events -----------------------------------------------------------------------------------------------------

    async def _process_events(self, is_met: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Handles events until a condition holds.

        Raises:
          RunLost: no event has counted as progress within the patience of the run.
        """
        patience_s = self._settings.patience_s
        self._progress_s = self._runtime.read_clock()
        is_waiting, is_paused = True, False

        def check_patience() -> None:
            remaining_s = self._progress_s + patience_s - self._runtime.read_clock()
            if is_waiting and remaining_s <= 0:
                raise RunLost(
                    f"no device has joined, answered or got further with a block for {patience_s:g} s: {describe()}"
                )
            if is_waiting:
                self._call_at(self._runtime.read_clock() + remaining_s, check_patience)

        self._call_at(self._progress_s + patience_s, check_patience)
        try:
            while True:
                if self._needs_dispatch:
                    self._needs_dispatch = False
                    self._dispatch_tasks()
                    kinds = [round.kind for round in self._rounds.values()]
                    if not is_paused and not all(map(self.registry.is_decodable, kinds)):
                        is_paused = True
                        self.record_event("paused", missing=describe())
                if is_met():
                    break
                handle = await self._events.get()
                handle()
        finally:
            is_waiting = False
        if is_paused:
            self.record_event("goes_on")

    async def _count_bytes(self, stuck: Sequence[int]) -> None:
        """Counts bytes to and from devices as progress, for instance of an operand in transit.

        Args:
          stuck: Devices that do not count because their orders fail repeatedly.
        """
        moved = self._comm.get_traffic_nbytes
        nbytes = moved() - sum(map(moved, stuck))

        def count_traffic() -> None:
            time_s = self._runtime.read_clock()
            self._traffic_progress.update(0, nbytes, time_s, self._settings.patience_s)
            if self._traffic_progress.last_s == time_s:
                self._progress_s = time_s

        self._events.put(count_traffic)

    def _call_at(self, t: float, handle: Callable[[], None]) -> None:
        self._runtime.sleep_until(t).add_done_callback(lambda _: self._events.put(handle))

    def _listen(self, tag: Tag, round: int | None) -> None:
        """Queues the messages of a tag until its exchange is cancelled."""
        receive = partial(self._comm.recv_any, tag, deadline_s=math.inf)
        self._runtime.launch(
            self._queue_events(receive, lambda message: self._handle_message(*message, round))
        )

    async def _queue_events(self, receive: Callable[[], Pending[T]], handle: Callable[[T], None]) -> None:
        """Queues an event for each received item until the source ends."""
        with suppress(WaitEnded):
            while True:
                self._events.put(partial(handle, await receive()))

    async def _forget_round(self, round: int) -> None:
        self._comm.cancel_exchange(messages.build_answer_tag(round).exchange)

    def _handle_arrival(self, rank: int) -> None:
        """Accepts messages of a new device, which may have the rank of an earlier one."""
        self._lost_ranks.discard(rank)

    def _handle_message(self, rank: int, payload: Payload, round: int | None) -> None:
        """Handles a report, or an answer of a round, and counts it as progress.

        A failed block counts only if some of its rows have arrived; otherwise it could fail forever.
        """
        if rank in self._lost_ranks:
            return
        try:
            if round is None:
                self._handle_report(rank, decode_message(payload, _REPORTS))
                return
            if round not in self._rounds:
                self.counters.num_late += 1
                return
            self._rounds[round].add_answer(rank, payload)
        except MalformedMessage as error:
            self._refuse_message(rank, str(error))
            return
        self._mark_responsive(rank)
        self._progress_s = self._runtime.read_clock()

    def _has_progressed(self, rank: int, nbytes: int) -> bool:
        """Returns True if a device has exchanged rows for a block since its last probe."""
        time_s = self._runtime.read_clock()
        progress = self._device_progress.setdefault(rank, ProgressTracker())
        progress.update(0, nbytes, time_s, self._settings.patience_s)
        is_building = any(block.holder == rank for block in self.registry.list_pending_blocks())
        return is_building and not self.registry.devices[rank].is_stuck and progress.last_s == time_s

    def _refuse_message(self, rank: int, reason: str) -> None:
        """Counts a refused message; records the 1st, 2nd, 4th, 8th and so on of each device."""
        self.counters.num_refused += 1
        self._refusal_counts[rank] += 1
        if self._refusal_counts[rank].bit_count() == 1:
            self.record_event("refused", rank=rank, why=reason, count=self._refusal_counts[rank])

    # --- reports ----------------------------------------------------------------------------------------------------

    def _handle_report(self, rank: int, report: Report) -> None:
        """Handles a report of a device.

        Raises:
          MalformedMessage: it names an unknown block or device.
        """
        member = self.registry.devices.get(rank)
        if isinstance(report, Hello):
            self._handle_hello(rank, report)
            self._progress_s = self._runtime.read_clock()
            return
        if member is None:
            raise MalformedMessage("a report before a greeting")
        if isinstance(report, Ready):
            self._handle_ready(rank, report.number)
        elif isinstance(report, Leaving):
            member.is_leaving = True
            self.record_event("leaving", rank=rank)
            self._repair_blocks()
        elif isinstance(report, (Built, Failed)):
            self._handle_build_report(member, report)
        self._mark_responsive(rank)
        if isinstance(report, Probe):
            has_progressed = self._has_progressed(rank, report.nbytes)
        else:
            has_progressed = not (isinstance(report, Failed) and member.failures)
        if has_progressed:
            self._progress_s = self._runtime.read_clock()

    def _handle_ready(self, rank: int, meeting: int) -> None:
        """Tells the second device of a meeting to connect, unless one of the two has gone."""
        pair = self._pending_meetings.get(meeting)
        if meeting >= self._num_meetings or (pair is not None and pair[0] != rank):
            raise MalformedMessage("ready for a device that is not expected")
        if pair is not None:
            del self._pending_meetings[meeting]
            self._introduce(pair[1], rank, meeting, is_first=False)

    def _introduce(self, rank: int, peer: int, meeting: int, *, is_first: bool) -> None:
        self._send(rank, Meet(peer, meeting, is_first, self._runtime.get_address(peer)))

    def _handle_build_report(self, member: DeviceState, report: Built | Failed) -> None:
        """Handles the report that a block was built, or that building it failed."""
        block = self.registry.blocks.get(report.block)
        if block is None:
            raise MalformedMessage("a report on a block that there is not")
        if block.holder != member.rank:
            self._send(member.rank, Drop((block.number,)))
            return
        if isinstance(report, Built):
            self.registry.mark_built(block, report.partitions)
            member.failures = member.fetched_nbytes = 0
            if self._record is not None:
                self._record.save_registry(self.registry)
            self.record_event(
                "built",
                rank=member.rank,
                block=block.number,
                kind=block.kind,
                nbytes=report.fetched_nbytes,
                mds_nbytes=self._compute_mds_nbytes(block, report.fetched_nbytes),
            )
            if block.replaced_block is not None:
                old_block = self.registry.blocks[block.replaced_block]
                if old_block.holder is not None:
                    self._send(old_block.holder, Drop((old_block.number,)))
                self.registry.release_block(old_block)
        else:
            self.registry.mark_failed(block)
            self.record_event(
                "failed", rank=member.rank, block=block.number, blamed=report.rank, why=report.detail
            )
            if report.rank == member.rank:
                member.cannot_build = True
            else:
                member.count_failure(report.fetched_nbytes)
                self._mark_silent({report.rank})
        self._repair_blocks()

    def _handle_hello(self, rank: int, hello: Hello) -> None:
        registry = self.registry
        if rank in registry.devices:
            raise MalformedMessage("a second greeting")
        if reason := self._explain_refusal(hello):
            self.record_event("turned_away", rank=rank, why=reason)
            self._send(rank, End(reason))
            return
        raw = -1
        if hello.partition:
            registry.features = hello.features
            partition = registry.find_partition(hello.partition)
            if partition is None:
                labels, number = hello.labels.reshape(-1), len(registry.partitions)
                partition = DevicePartition(number, hello.partition, labels, registry.new_block_number)
                registry.partitions.append(partition)
            raw = partition.block
            registry.blocks[raw] = Block(raw, "rows", {partition.number: 1.0}, rank, is_ready=True)
        for peer in registry.devices:
            pair = min(rank, peer), max(rank, peer)
            self._pending_meetings[self._num_meetings] = pair
            self._introduce(pair[0], pair[1], self._num_meetings, is_first=True)
            self._num_meetings += 1
        registry.devices[rank] = DeviceState(rank)
        self._send(rank, Welcome(self._run, raw))
        unknown = []
        for number in hello.held:  # stored blocks count, unless another device has them by now
            block = registry.blocks.get(number)
            if hello.run == self._run and block is not None and block.holder is None:
                block.holder, block.is_ready = rank, True
            else:
                unknown.append(number)
        if unknown:
            self._send(rank, Drop(tuple(unknown)))
        self.record_event("came", rank=rank, partition=hello.partition, rows=hello.rows)
        self._repair_blocks()

    def _explain_refusal(self, hello: Hello) -> str:
        """Returns the reason why a device cannot take part; empty if it can."""
        if not hello.partition:
            return ""
        if hello.rows < 1 or not 1 <= hello.features <= _MAX_FEATURES or hello.labels.numel() != hello.rows:
            raise MalformedMessage("data without rows, or too wide, or with another number of labels")
        partition, features = self.registry.find_partition(hello.partition), self.registry.features
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
        if holder is not None and not self.registry.devices[holder].is_silent:
            return f"partition {hello.partition!r} is there already: give each device another one"
        if partition.rows != hello.rows or not torch.equal(partition.labels, hello.labels.reshape(-1)):
            return f"partition {hello.partition!r} was there with other labels: give it another name"
        return ""

    # --- losses and silence -----------------------------------------------------------------------------------------

    def _handle_loss(self, rank: int) -> None:
        """Handles the loss of a device, which never counts as progress.

        Raises:
          PartitionsChanged: training continues without some partitions.
        """
        self._lost_ranks.add(rank)
        for round in self._rounds.values():
            round.drop_device(rank)
        if rank not in self.registry.devices:
            return
        self.registry.remove_device(rank)
        self._pending_meetings = {
            number: pair for number, pair in self._pending_meetings.items() if rank not in pair
        }
        self.record_event("gone", rank=rank)
        for peer in self.registry.devices:
            self._send(peer, Lost(rank))
        has_dropped = self._is_encoded and self._did_drop_partitions()
        self._repair_blocks()
        if has_dropped and self._rounds:
            raise PartitionsChanged

    def _did_drop_partitions(self) -> bool:
        """Returns True if partitions were dropped because no remaining block determines them."""
        registry, has_dropped = self.registry, False
        while lost := [
            partition for partition in registry.active_partitions if not registry.is_recoverable(partition)
        ]:
            for partition in lost:
                self.record_event("lost", partition=partition.name)
            if self._settings.on_loss == "wait":
                return False
            for partition in lost:
                registry.drop_partition(partition)
            has_dropped = True
        if has_dropped and not registry.active_partitions:
            raise RunLost("no partition is left: all devices that had one are gone")
        return has_dropped

    def _mark_silent(self, ranks: Iterable[int]) -> None:
        """Marks and probes devices that missed a deadline; they are ignored until they respond."""
        for rank in ranks:
            member = self.registry.devices.get(rank)
            if member is None:
                continue
            if not member.is_silent:
                member.is_silent = True
                self.counters.silences += 1
                self.record_event("silent", rank=rank)
            self._send(rank, Probe())
        self._repair_blocks()

    def _schedule_probes(self) -> None:
        self._call_at(
            self._runtime.read_clock() + _PROBE_FACTOR * self._settings.min_timeout_s, self._probe_builders
        )

    def _probe_builders(self) -> None:
        """Probes devices that build blocks, and marks those as silent that did not answer the last probe.

        Devices that are backing off get one more try.
        """
        resting_members = [member for member in self.registry.devices.values() if member.is_backing_off]
        for member in resting_members:
            member.failures -= 1
        if resting_members:
            self._repair_blocks()
        builders = {block.holder for block in self.registry.list_pending_blocks() if block.holder is not None}
        silent_ranks = builders & self._probed_ranks
        self._probed_ranks = builders - silent_ranks
        for rank in self._probed_ranks:
            self._send(rank, Probe())
        if silent_ranks:
            self._mark_silent(silent_ranks)
        stuck_ranks = [rank for rank, member in self.registry.devices.items() if member.is_stuck]
        self._runtime.launch(self._count_bytes(stuck_ranks))
        self._schedule_probes()

    def _mark_responsive(self, rank: int) -> None:
        self._probed_ranks.discard(rank)
        member = self.registry.devices.get(rank)
        if member is not None and member.is_silent:
            member.is_silent = False
            self.record_event("heard", rank=rank)
            self._repair_blocks()

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _repair_blocks(self) -> None:
        """Orders missing blocks, and releases leaving devices if possible: before encoding, all of them."""
        registry, placed_blocks = self.registry, list[PlacedBlock]()
        while self._is_encoded and (placed_block := self._placement.choose_block(registry)) is not None:
            registry.add_block(placed_block)
            placed_blocks.append(placed_block)
        if placed_blocks and self._record is not None:  # before a device acts on it
            self._record.save_registry(registry)
        for placed_block in placed_blocks:
            assert placed_block.block.holder is not None
            self.record_event("ordered", rank=placed_block.block.holder, block=placed_block.block.number)
            self._send(placed_block.block.holder, placed_block.order)
        for member in list(registry.devices.values()):
            if member.is_leaving and (not self._is_encoded or registry.can_leave(member.rank)):
                self._send(member.rank, End())
        if self._is_encoded:
            kinds = self._settings.kinds
            self.has_new_partitions |= any(
                not partition.is_active and registry.is_trainable(partition, kinds)
                for partition in registry.partitions
            )
            self._needs_dispatch = True

    def _compute_mds_nbytes(self, block: Block, nbytes: int) -> int:
        """Computes the bytes that other devices would have sent for a block of all partitions."""
        if block.kind == "columns" or block.raw_unknown is not None or block.replaced_block is not None:
            return nbytes
        own_raw = {
            copy.raw_unknown for copy in self.registry.list_blocks("rows") if copy.holder == block.holder
        }
        rows = sum(
            partition.rows for partition in self.registry.active_partitions if partition.number not in own_raw
        )
        return 8 * rows * self.registry.features

    def _send(self, rank: int, message: Command) -> Pending[None]:
        tag = messages.OPERAND if isinstance(message, (Multiply, End)) else messages.COMMAND
        return self._runtime.launch(send_message(self._comm, encode_message(message), rank, tag))
