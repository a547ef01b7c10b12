"""Streams with an external source: a thread reads the source and buffers samples until they are used."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Condition, Thread
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from farflung.errors import CheckpointError, ConfigError, DataError, FarflungError
from farflung.files import wrap_decision_errors
from farflung.options import check_integer, check_number
from farflung.streams.buffer import Buffer
from farflung.streams.growth import Growth
from farflung.streams.messages import Decoder, MessageDecoder, import_function
from farflung.tasks import Pending
from farflung.types import Arrivals, Batch, Json, SampleIds, Samples, State, Stream, StreamContext

__all__ = ["CHUNK", "STRIDE", "LiveStream", "MessageSource", "PartitionRange", "Records"]

STRIDE = 1 << 16
"""Factor of ids: an id is the position of a message times this, plus its partition."""
BACKLOG = 1 << 16
"""Default maximum number of waiting samples; the source keeps the others."""
CHUNK = 1024
"""Maximum number of messages per read; more would not stay in a core's cache."""
MEASURE_S = 0.25
"""Minimum time between two requests for the growth of a source."""
MEASURE_SHARE = 0.1
"""Maximum share of the thread's time for these requests."""
FINALIZE_SPANS = 2
"""Number of spans after which a first measurement is finalized, if the clock of the source has not reached a full
span."""
COMMIT_S = 0.25
"""Minimum time between two commits of used positions to a source."""
PAUSE_S = 1.0
"""Time without room after which the source pauses, since resuming takes a while."""
WAIT_S = 0.1
"""Time that the thread waits for messages before it checks everything else."""
STOP_TIMEOUT_S = 5.0
"""Maximum time that the thread may take to end."""
_MAX_LEAD = 1 << 62


class Records(NamedTuple):
    """Messages of a partition, in order; at least one.

    Args:
      partition: Number of the partition.
      positions: Position of each message.
      values: Value of each message, as the decoder reads it.
    """

    partition: int
    positions: list[int]
    values: list[Any]


class PartitionRange(NamedTuple):
    """Range of positions that a source has of a partition.

    Args:
      first: Position of the oldest available message.
      end: Position after the newest.
      begin: First position of a run without a checkpoint.
    """

    first: int
    end: int
    begin: int


class MessageSource(ABC):
    """Partitions of messages that can be read from any position on; used by one thread at a time."""

    name: str
    """Name in errors."""
    trouble: str = ""
    """Latest problem that may resolve itself; empty once messages arrive."""

    @abstractmethod
    def connect(self, rank: int, size: int) -> Mapping[int, PartitionRange]:
        """Finds the partitions of one of ``size`` replicas.

        Raises:
          FarflungError: There are none, or the source does not answer.
        """

    @abstractmethod
    def start(self, positions: Mapping[int, int]) -> None:
        """Starts reading each partition from a position on."""

    @abstractmethod
    def read(self, max_messages: int, wait_s: float) -> list[Records]:
        """Returns up to ``max_messages`` new messages; waits up to ``wait_s`` seconds for the first.

        Raises:
          Exception: The source can no longer be read.
        """

    @abstractmethod
    def count_received(self) -> Mapping[int, tuple[float, int]]:
        """Returns for each partition a time and the number of messages that it had received by then, read or not.

        Times are seconds of a clock of the source, which may stop while the source is suspended. Partitions with an
        unknown count are omitted. Called only if the rate is measured.
        """

    def pause(self, is_paused: bool) -> None:  # noqa: B027
        """Pauses or resumes fetching."""

    def commit_positions(self, positions: Mapping[int, int], step: int) -> None:  # noqa: B027
        """Records that steps up to this one have used all messages before these positions."""

    @abstractmethod
    def close(self) -> None:
        """Closes connections and files."""


class LiveStream(Stream):
    """Stream of samples from an external source, each used once and found again after a restart.

    A thread reads ahead of the steps into a :class:`Buffer`. A checkpoint stores the positions of held samples and the
    next position of each partition; a resumed run reads the held samples again. With several partitions the order
    among them is a decision. The rate is measured by the growth of the source over the last second or window, also
    before the first step. A resumed run begins with the rate of its checkpoint.

    Args:
      source: Source of messages.
      decoder: Decoder of messages that are not safetensors; see :func:`as_messages`.
      skip: Number of undecodable messages that may be skipped; one more ends the run.
      deadline_s: Maximum time in seconds that a step waits without a new message.
      buffer: Options of :class:`Buffer`.

    Raises:
      ConfigError: A value is out of range.
    """

    is_live = True

    def __init__(
        self,
        source: MessageSource,
        decoder: str | Decoder | None,
        skip: int,
        deadline_s: float,
        buffer: Mapping[str, Any],
    ) -> None:
        check_integer("stream", "skip", skip, 0)
        check_number("stream", "deadline_s", deadline_s, 0.001)
        if buffer.get("policy", "persistence") == "persistence":
            buffer = {"backlog": BACKLOG, **buffer}
        self._source, self._decoder, self._skip, self._deadline_s = source, decoder, skip, deadline_s
        self._buffer = Buffer(**buffer)
        self._half_backlog = (buffer.get("backlog") or 0) // 2
        """Half of the backlog."""
        self._span_s = max(1.0, buffer.get("window_s") or 0.0)
        self._condition = Condition()
        self._thread: Thread | None = None
        self._is_open = self._is_closed = False
        self._next_positions: dict[int, int] = {}
        """Next position of each partition; empty until the begin is known."""
        self._samples: dict[int, Any] = {}
        """Samples by id, as :meth:`MessageDecoder.build_rows` takes them."""
        self._reread_ids: set[int] = set()
        """Ids that the checkpoint held and that have not been read again yet."""
        self._num_skipped = 0
        self._is_paused = False
        self._last_read_s = 0.0
        self._growth: dict[int, Growth] = {}
        """Growth of each partition, if the rate is measured."""
        self._next_measure_s = 0.0
        self._finalize_s = math.inf
        """Time at which a first measurement is finalized, however short."""
        self._step_ready: Pending[None] | None = None
        self._num_missing = 0
        self._silent_since = 0.0
        self._error: FarflungError | None = None
        self._used_step: int | None = None
        """Last step that used samples, until it is committed to the source."""
        self._last_commit_s = -COMMIT_S

    @override
    def start(self, context: StreamContext) -> Samples:
        self._feed = context
        decoder = None if self._decoder is None else import_function("decoder", self._decoder)
        self._messages = MessageDecoder(context.data.get_rows(torch.tensor([0])), decoder)
        self._is_open = True
        self._ranges = self._source.connect(context.rank, context.size)
        if any(partition >= STRIDE for partition in self._ranges):
            raise ConfigError(f"{self._source.name}: {STRIDE} partitions or more cannot be told apart")
        self._buffer.prepare(
            context,
            lanes=len(self._ranges),
            stride=STRIDE,
            max_replay_lead=_MAX_LEAD,
            on_remove=self._drop_samples,
        )
        if self._buffer.needs_rate:
            self._growth = {partition: Growth(self._span_s) for partition in self._ranges}
        return self

    @override
    def poll(self, time_s: float, step: int) -> Arrivals:
        """Returns a step's samples, or a wait for missing ones; ignores the time, and reads from the first call on."""
        del time_s
        with self._condition:
            if self._thread is None:
                self._start_thread(step)
            if self._error is not None:
                raise self._error
            if not self._is_ready():
                return self._wait_for_samples(0, Arrivals(self._buffer.ids))
            missing, arrivals = self._buffer.poll(step, self._sum_rates)
            if missing:
                return self._wait_for_samples(missing, arrivals)
            return replace(arrivals, metrics={**arrivals.metrics, "skipped": self._num_skipped})

    def _wait_for_samples(self, missing: int, arrivals: Arrivals) -> Arrivals:
        self._step_ready, self._num_missing = Pending(), missing
        self._silent_since = time.monotonic()
        self._condition.notify_all()
        return replace(arrivals, next_poll=self._step_ready)

    @override
    def commit(self, ids: SampleIds, *, step: int) -> None:
        """Removes used samples; the thread commits their positions to the source later."""
        with self._condition:
            self._buffer.commit(ids)
            self._used_step = step
            if self._has_room():
                self._condition.notify_all()

    @override
    def state_dict(self) -> State:
        """Returns the next position of each partition and the ids of held samples, without the samples themselves."""
        with self._condition:
            following = {str(partition): position for partition, position in self._next_positions.items()}
            rates = {str(p): growth.rate for p, growth in self._growth.items() if growth.rate is not None}
            return {
                "buffer": self._buffer.state_dict(), "next": following, "rates": rates, "skipped": self._num_skipped
            }  # fmt: skip

    @override
    def load_state_dict(self, state: State) -> None:
        """Restores a position; see :meth:`farflung.types.Stream.load_state_dict`.

        Raises:
          CheckpointError: The source no longer has the messages that follow it.
        """
        self._buffer.load_state_dict(state["buffer"])
        self._num_skipped = int(state["skipped"])
        following = {int(partition): int(position) for partition, position in state["next"].items()}
        if not following:
            return  # saved before the first step
        self._next_positions = {
            **{partition: reach.first for partition, reach in self._ranges.items()},
            **following,
        }
        for partition, growth in self._growth.items():
            growth.rate = state["rates"].get(str(partition))
        self._reread_ids = set(self._buffer.ids.tolist())
        name = self._source.name
        for partition, position in self._compute_starts().items():
            reach = self._ranges.get(partition)
            if reach is None:
                raise CheckpointError(
                    f"{name}: partition {partition}, from which the checkpoint continues, is gone"
                )
            if not reach.first <= position <= reach.end:
                raise CheckpointError(
                    f"{name}: the checkpoint continues from position {position} of partition {partition}, which has "
                    f"{reach.first} to {reach.end}: what was to come is deleted there"
                )

    @override
    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
        elif self._is_open:
            self._is_open = False
            self._source.close()

    def get_rows(self, ids: SampleIds) -> Batch:
        """Returns samples, as :meth:`farflung.types.Samples.get_rows`; waits for those that have to be read again."""
        sample_ids = ids.tolist()
        with self._condition:
            if self._reread_ids:
                if self._thread is None:
                    self._start_thread(0)
                begin_s = time.monotonic()
                while self._error is None and not self._reread_ids.isdisjoint(sample_ids):
                    silent_s = time.monotonic() - max(begin_s, self._silent_since)
                    if silent_s >= self._deadline_s:
                        raise self._build_silence_error(silent_s)
                    self._condition.wait(self._deadline_s - silent_s)
                if self._error is not None:
                    raise self._error
            messages = [self._samples[sample_id] for sample_id in sample_ids]
        return self._messages.build_rows(messages)

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        return self._feed.data.prepare(rows, train=train)

    def _drop_samples(self, ids: SampleIds) -> None:
        for sample_id in ids.tolist():
            self._samples.pop(sample_id, None)

    # --- where it begins ----------------------------------------------------------------------------------------

    def _start_thread(self, step: int) -> None:
        """Starts the thread at the checkpoint's positions, or at those decided at ``step``."""
        if not self._next_positions:
            fresh: Json = {str(partition): reach.begin for partition, reach in self._ranges.items()}
            decision = self._feed.decide("positions", step, lambda: fresh)
            with wrap_decision_errors("positions", step):
                value: Any = decision.value
                positions = {int(partition): position for partition, position in value.items()}
                is_whole = all(type(p) is int and p >= 0 for p in positions.values())
                if positions.keys() != self._ranges.keys() or not is_whole:
                    raise ValueError(f"{value!r} for partitions {', '.join(map(str, self._ranges))}")
                self._next_positions = positions
        self._thread = Thread(
            target=self._run_thread, args=(self._compute_starts(),), name="stream", daemon=True
        )
        self._thread.start()

    def _compute_starts(self) -> dict[int, int]:
        """Returns the first position to read of each partition, so that held samples are read again."""
        starts = dict(self._next_positions)
        for sample_id in self._reread_ids:
            position, partition = divmod(sample_id, STRIDE)
            starts[partition] = min(position, starts[partition])
        return starts

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run_thread(self, starts: Mapping[int, int]) -> None:
        try:
            self._source.start(starts)
            self._finalize_s = time.monotonic() + FINALIZE_SPANS * self._span_s
            self._measure_rates()
            while not self._is_closed:
                self._read_chunk()
                self._measure_rates()
                self._commit_used()
                self._fail_if_silent()
            self._commit_used()
        except FarflungError as error:
            self._fail(error)
        except Exception as error:
            self._fail(DataError(f"{self._source.name}: {type(error).__name__}: {error}"))
        finally:
            self._source.close()

    def _read_chunk(self) -> None:
        """Reads one chunk if there is room; pauses the source after ``PAUSE_S`` seconds without room."""
        with self._condition:
            has_room = self._condition.wait_for(lambda: self._is_closed or self._has_room(), WAIT_S)
            room = self._compute_room()
        if self._is_closed:
            return
        if has_room:
            self._is_paused, self._last_read_s = False, time.monotonic()
            self._source.pause(False)
            self._take_records(self._source.read(CHUNK if room is None else min(room, CHUNK), WAIT_S))
        elif time.monotonic() - self._last_read_s > PAUSE_S:
            self._is_paused = True
            self._source.pause(True)
            self._take_records(self._source.read(0, 0.0))

    def _compute_room(self) -> int | None:
        return None if self._reread_ids else self._buffer.room

    def _has_room(self) -> bool:
        """Returns True if much room is left, or any room while a step waits."""
        room = self._compute_room()
        threshold = self._half_backlog if self._is_paused else min(self._half_backlog, CHUNK)
        return room is None or room > threshold or (room > 0 and self._step_ready is not None)

    def _take_records(self, batches: Sequence[Records]) -> None:
        decoded = [self._decode_records(records) for records in batches]
        with self._condition:
            for records, (samples, refused) in zip(batches, decoded, strict=True):
                self._store_records(records, samples, refused)
            if batches:
                self._silent_since = time.monotonic()
                self._condition.notify_all()
        self._wake()

    def _wake(self) -> None:
        """Completes the wait of a step if its samples have arrived or the rate is known."""
        ready = None
        with self._condition:
            if self._num_missing <= 0 and self._is_ready():
                ready, self._step_ready = self._step_ready, None
        if ready is not None:
            ready.set_result(None)

    def _is_ready(self) -> bool:
        """Returns True if all held samples have been read again and the rate, if measured, is known."""
        return not self._reread_ids and all(growth.rate is not None for growth in self._growth.values())

    def _decode_records(self, records: Records) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Decodes new or formerly held messages; returns samples by id, and errors by position."""
        samples: dict[int, Any] = {}
        refused: dict[int, Exception] = {}
        partition = records.partition
        first_new = self._next_positions[records.partition]
        keep = self._messages.check_message
        for position, value in zip(records.positions, records.values, strict=True):
            sample_id = position * STRIDE + partition
            if position >= first_new or sample_id in self._reread_ids:
                try:
                    samples[sample_id] = keep(value)
                except Exception as error:
                    refused[position] = error
        return samples, refused

    def _store_records(
        self, records: Records, samples: dict[int, Any], refused: dict[int, Exception]
    ) -> None:
        partition, following = records.partition, records.positions[-1] + 1
        self._next_positions[partition] = max(self._next_positions[partition], following)
        for position, error in refused.items():
            self._num_skipped += 1
            if self._num_skipped > self._skip:
                raise DataError(
                    f"{self._source.name}: {self._num_skipped} messages do not decode, the last at position "
                    f"{position} of "
                    f"partition {partition} ({error}): raise skip, or give a decoder for them"
                )
        self._samples.update(samples)
        new = [i for i in samples if i not in self._reread_ids] if self._reread_ids else [*samples]
        self._reread_ids.difference_update(samples)
        self._buffer.add_arrivals(torch.tensor(new, dtype=torch.int64))
        self._num_missing -= len(new)
        for i in self._reread_ids:  # held samples must still exist, up to the position that has been read
            position = i // STRIDE
            if i % STRIDE == partition and position < following:
                raise DataError(
                    f"{self._source.name}: the sample at position {position} of partition {partition} was held when "
                    "the checkpoint was made, and is deleted there"
                )

    def _commit_used(self) -> None:
        time_s = time.monotonic()
        with self._condition:
            step, is_early = self._used_step, time_s - self._last_commit_s < COMMIT_S and not self._is_closed
            if step is None or is_early or self._reread_ids:
                return
            self._used_step, self._last_commit_s = None, time_s
            positions, held_ids = dict(self._next_positions), self._buffer.ids
            for partition in positions:
                lane_ids = held_ids[held_ids % STRIDE == partition]
                if len(lane_ids):
                    positions[partition] = int(lane_ids[0]) // STRIDE
        self._source.commit_positions(positions, step)

    def _fail_if_silent(self) -> None:
        with self._condition:
            silent_s = time.monotonic() - self._silent_since
            ready = self._step_ready
            if ready is None or silent_s < self._deadline_s:
                return
            self._error = self._build_silence_error(silent_s)
        self._fail(self._error)

    def _build_silence_error(self, seconds: float) -> DataError:
        trouble = f" ({self._source.trouble})" if self._source.trouble else ""
        return DataError(
            f"{self._source.name}: nothing arrived for {seconds:.0f} s{trouble}; if it may be silent or away for "
            "longer, raise deadline_s of the stream"
        )

    def _fail(self, error: FarflungError) -> None:
        with self._condition:
            self._error = error
            ready, self._step_ready = self._step_ready, None
            self._is_closed = True
            self._condition.notify_all()
        if ready is not None:
            ready.set_exception(error)

    # --- its rate ----------------------------------------------------------------------------------------------------

    def _sum_rates(self) -> float:
        """Returns samples per second, summed over all partitions."""
        return sum(growth.rate or 0.0 for growth in self._growth.values())

    def _measure_rates(self) -> None:
        asked_at = time.monotonic()
        if not self._growth or asked_at < self._next_measure_s:
            return
        marks = self._source.count_received()
        answered_at = time.monotonic()
        self._next_measure_s = answered_at + max(MEASURE_S, (answered_at - asked_at) / MEASURE_SHARE)
        with self._condition:
            if marks and not self._is_ready():
                self._silent_since = answered_at
            for partition, mark in marks.items():
                self._growth[partition].record_count(*mark)
                if answered_at >= self._finalize_s:
                    self._growth[partition].finalize()
        self._wake()
