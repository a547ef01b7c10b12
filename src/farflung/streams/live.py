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
from farflung.files import deciding
from farflung.options import number_option, whole_option
from farflung.streams.buffer import Buffer
from farflung.streams.growth import Growth
from farflung.streams.messages import Decoder, Messages, function_named
from farflung.tasks import Pending
from farflung.types import Arrivals, Batch, Feed, Json, SampleIds, Samples, State, Stream

__all__ = ["CHUNK", "STRIDE", "LiveStream", "MessageSource", "Reach", "Records"]

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
SETTLE = 2
"""Number of spans after which a first measurement is finalized, if the clock of the source has not reached a full
span."""
TELL_S = 0.25
"""Minimum time between two commits of used positions to a source."""
PAUSE_S = 1.0
"""Time without room after which the source pauses, since resuming takes a while."""
WAIT_S = 0.1
"""Time that the thread waits for messages before it checks everything else."""
END_S = 5.0
"""Maximum time that the thread may take to end."""
_AHEAD = 1 << 62


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


class Reach(NamedTuple):
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
    def open(self, rank: int, size: int) -> Mapping[int, Reach]:
        """Finds the partitions of one of ``size`` replicas.

        Raises:
          FarflungError: There are none, or the source does not answer.
        """

    @abstractmethod
    def start(self, positions: Mapping[int, int]) -> None:
        """Starts reading each partition from a position on."""

    @abstractmethod
    def read(self, most: int, wait_s: float) -> list[Records]:
        """Returns up to ``max_messages`` new messages; waits up to ``wait_s`` seconds for the first.

        Raises:
          Exception: The source can no longer be read.
        """

    @abstractmethod
    def grown(self) -> Mapping[int, tuple[float, int]]:
        """Returns for each partition a time and the number of messages that it had received by then, read or not.

        Times are seconds of this machine's clock. Partitions with an unknown count are omitted. Called only if the
        rate is measured.
        """

    def pause(self, paused: bool) -> None:  # noqa: B027
        """Pauses or resumes fetching."""

    def used(self, positions: Mapping[int, int], step: int) -> None:  # noqa: B027
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
        whole_option("stream", "skip", skip, 0)
        number_option("stream", "deadline_s", deadline_s, 0.001)
        if buffer.get("policy", "persistence") == "persistence":
            buffer = {"backlog": BACKLOG, **buffer}
        self._source, self._decoder, self._skip, self._deadline_s = source, decoder, skip, deadline_s
        self._buffer = Buffer(**buffer)
        self._low = (buffer.get("backlog") or 0) // 2
        """Half of the backlog."""
        self._span_s = max(1.0, buffer.get("window_s") or 0.0)
        self._changed = Condition()
        self._thread: Thread | None = None
        self._opened = self._closed = False
        self._next: dict[int, int] = {}
        """Next position of each partition; empty until the begin is known."""
        self._held: dict[int, Any] = {}
        """Samples by id, as :meth:`MessageDecoder.build_rows` takes them."""
        self._again: set[int] = set()
        """Ids that the checkpoint held and that have not been read again yet."""
        self._skipped = 0
        self._paused = False
        self._read_at = 0.0
        self._growth: dict[int, Growth] = {}
        """Growth of each partition, if the rate is measured."""
        self._measure_at = 0.0
        self._settle_at = math.inf
        """Time at which a first measurement is finalized, however short."""
        self._ready: Pending[None] | None = None
        self._missing = 0
        self._silent_since = 0.0
        self._error: FarflungError | None = None
        self._used: int | None = None
        """Last step that used samples, until it is committed to the source."""
        self._told_at = -TELL_S

    @override
    def open(self, feed: Feed) -> Samples:
        self._feed = feed
        decoder = None if self._decoder is None else function_named("decoder", self._decoder)
        self._messages = Messages(feed.data.rows(torch.tensor([0])), decoder)
        self._opened = True
        self._reach = self._source.open(feed.rank, feed.size)
        if any(partition >= STRIDE for partition in self._reach):
            raise ConfigError(f"{self._source.name}: {STRIDE} partitions or more cannot be told apart")
        self._buffer.open(feed, lanes=len(self._reach), stride=STRIDE, ahead=_AHEAD, gone=self._forget)
        if self._buffer.measures:
            self._growth = {partition: Growth(self._span_s) for partition in self._reach}
        return self

    @override
    def poll(self, now: float, step: int) -> Arrivals:
        """Returns the samples of a step, as :meth:`farflung.types.Stream.poll`; starts reading at the first call."""
        del now
        with self._changed:
            if self._thread is None:
                self._begin(step)
            if self._error is not None:
                raise self._error
            if not self._is_ready():
                return self._wait(0, Arrivals(self._buffer.ids))
            missing, arrivals = self._buffer.poll(step, self._rate)
            if missing:
                return self._wait(missing, arrivals)
            return replace(arrivals, told={**arrivals.told, "skipped": self._skipped})

    def _wait(self, missing: int, arrivals: Arrivals) -> Arrivals:
        self._ready, self._missing = Pending(), missing
        self._silent_since = time.monotonic()
        self._changed.notify_all()
        return replace(arrivals, ready=self._ready)

    @override
    def commit(self, ids: SampleIds, *, step: int) -> None:
        with self._changed:
            self._buffer.commit(ids)
            self._used = step
            if self._has_room():
                self._changed.notify_all()

    @override
    def state_dict(self) -> State:
        """Returns the next position of each partition and the ids of held samples, without the samples themselves."""
        with self._changed:
            following = {str(partition): position for partition, position in self._next.items()}
            rates = {str(p): growth.rate for p, growth in self._growth.items() if growth.rate is not None}
            return {
                "buffer": self._buffer.state_dict(), "next": following, "rates": rates, "skipped": self._skipped
            }  # fmt: skip

    @override
    def seek(self, state: State) -> None:
        """Restores a position; see :meth:`farflung.types.Stream.load_state_dict`.

        Raises:
          CheckpointError: The source no longer has the messages that follow it.
        """
        self._buffer.seek(state["buffer"])
        self._skipped = int(state["skipped"])
        following = {int(partition): int(position) for partition, position in state["next"].items()}
        if not following:
            return  # saved before the first step
        self._next = {**{partition: reach.first for partition, reach in self._reach.items()}, **following}
        for partition, growth in self._growth.items():
            growth.rate = state["rates"].get(str(partition))
        self._again = set(self._buffer.ids.tolist())
        name = self._source.name
        for partition, position in self._starts().items():
            reach = self._reach.get(partition)
            if reach is None:
                raise CheckpointError(
                    f"{name}: partition {partition}, which the checkpoint goes on from, is gone"
                )
            if not reach.first <= position <= reach.end:
                raise CheckpointError(
                    f"{name}: the checkpoint goes on from position {position} of partition {partition}, which has "
                    f"{reach.first} to {reach.end}: what was to come is deleted there"
                )

    @override
    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(END_S)
        elif self._opened:
            self._opened = False
            self._source.close()

    def rows(self, ids: SampleIds) -> Batch:
        """Returns samples, as :meth:`farflung.types.Samples.get_rows`; waits for those that have to be read again."""
        sample_ids = ids.tolist()
        with self._changed:
            if self._again:
                if self._thread is None:
                    self._begin(0)
                has_arrived = self._changed.wait_for(
                    lambda: self._error is not None or self._again.isdisjoint(sample_ids), self._deadline_s
                )
                if self._error is not None:
                    raise self._error
                if not has_arrived:
                    raise self._silence(self._deadline_s)
            messages = [self._held[sample_id] for sample_id in sample_ids]
        return self._messages.rows(messages)

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        return self._feed.data.prepare(rows, train=train)

    def _forget(self, ids: SampleIds) -> None:
        for sample_id in ids.tolist():
            self._held.pop(sample_id, None)

    # --- where it begins ----------------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        if not self._next:
            fresh: Json = {str(partition): reach.begin for partition, reach in self._reach.items()}
            decision = self._feed.decide("positions", step, lambda: fresh)
            with deciding("positions", step):
                value: Any = decision.value
                positions = {int(partition): position for partition, position in value.items()}
                is_whole = all(type(p) is int and p >= 0 for p in positions.values())
                if positions.keys() != self._reach.keys() or not is_whole:
                    raise ValueError(f"{value!r} for partitions {', '.join(map(str, self._reach))}")
                self._next = positions
        self._thread = Thread(target=self._follow, args=(self._starts(),), name="stream", daemon=True)
        self._thread.start()

    def _starts(self) -> dict[int, int]:
        """Returns the first position to read of each partition, so that held samples are read again."""
        starts = dict(self._next)
        for sample_id in self._again:
            position, partition = divmod(sample_id, STRIDE)
            starts[partition] = min(position, starts[partition])
        return starts

    # --- the thread ---------------------------------------------------------------------------------------------

    def _follow(self, starts: Mapping[int, int]) -> None:
        try:
            self._source.start(starts)
            self._settle_at = time.monotonic() + SETTLE * self._span_s
            self._measure()
            while not self._closed:
                self._read()
                self._measure()
                self._tell_source()
                self._watch()
            self._tell_source()
        except FarflungError as error:
            self._fail(error)
        except Exception as error:
            self._fail(DataError(f"{self._source.name}: {type(error).__name__}: {error}"))
        finally:
            self._source.close()

    def _read(self) -> None:
        with self._changed:
            has_room = self._changed.wait_for(lambda: self._closed or self._has_room(), WAIT_S)
            room = self._room()
        if self._closed:
            return
        if has_room:
            self._paused, self._read_at = False, time.monotonic()
            self._source.pause(False)
            self._take(self._source.read(CHUNK if room is None else min(room, CHUNK), WAIT_S))
        elif time.monotonic() - self._read_at > PAUSE_S:
            self._paused = True
            self._source.pause(True)
            self._take(self._source.read(0, 0.0))

    def _room(self) -> int | None:
        return None if self._again else self._buffer.room

    def _has_room(self) -> bool:
        """Returns True if much room is left, or any room while a step waits."""
        room, threshold = self._room(), self._low if self._paused else min(self._low, CHUNK)
        return room is None or room > threshold or (room > 0 and self._ready is not None)

    def _take(self, came: Sequence[Records]) -> None:
        decoded = [self._decoded(records) for records in came]
        with self._changed:
            for records, (samples, refused) in zip(came, decoded, strict=True):
                self._take_in(records, samples, refused)
            if came:
                self._silent_since = time.monotonic()
                self._changed.notify_all()
        self._wake()

    def _wake(self) -> None:
        """Completes the wait of a step if its samples have arrived or the rate is known."""
        ready = None
        with self._changed:
            if self._missing <= 0 and self._is_ready():
                ready, self._ready = self._ready, None
        if ready is not None:
            ready.set(None)

    def _is_ready(self) -> bool:
        """Returns True if all held samples have been read again and the rate, if measured, is known."""
        return not self._again and all(growth.rate is not None for growth in self._growth.values())

    def _decoded(self, records: Records) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Decodes new or formerly held messages; returns samples by id, and errors by position."""
        samples: dict[int, Any] = {}
        refused: dict[int, Exception] = {}
        partition, first_new, keep = records.partition, self._next[records.partition], self._messages.keep
        for position, value in zip(records.positions, records.values, strict=True):
            sample_id = position * STRIDE + partition
            if position >= first_new or sample_id in self._again:
                try:
                    samples[sample_id] = keep(value)
                except Exception as error:
                    refused[position] = error
        return samples, refused

    def _take_in(self, records: Records, samples: dict[int, Any], refused: dict[int, Exception]) -> None:
        partition, following = records.partition, records.positions[-1] + 1
        self._next[partition] = max(self._next[partition], following)
        for position, error in refused.items():
            self._skipped += 1
            if self._skipped > self._skip:
                raise DataError(
                    f"{self._source.name}: {self._skipped} messages do not decode, the last at position {position} of "
                    f"partition {partition} ({error}): raise skip, or give a decoder for them"
                )
        self._held.update(samples)
        new = [i for i in samples if i not in self._again] if self._again else [*samples]
        self._again.difference_update(samples)
        self._buffer.put(torch.tensor(new, dtype=torch.int64))
        self._missing -= len(new)
        for i in self._again:  # held samples must still exist, up to the position that has been read
            position = i // STRIDE
            if i % STRIDE == partition and position < following:
                raise DataError(
                    f"{self._source.name}: the sample at position {position} of partition {partition} was held when "
                    "the checkpoint was made, and is deleted there"
                )

    def _tell_source(self) -> None:
        time_s = time.monotonic()
        with self._changed:
            step, is_early = self._used, time_s - self._told_at < TELL_S and not self._closed
            if step is None or is_early or self._again:
                return
            self._used, self._told_at = None, time_s
            positions, held_ids = dict(self._next), self._buffer.ids
            for partition in positions:
                lane_ids = held_ids[held_ids % STRIDE == partition]
                if len(lane_ids):
                    positions[partition] = int(lane_ids[0]) // STRIDE
        self._source.used(positions, step)

    def _watch(self) -> None:
        with self._changed:
            silent_s = time.monotonic() - self._silent_since
            ready = self._ready
            if ready is None or silent_s < self._deadline_s:
                return
            self._error = self._silence(silent_s)
        self._fail(self._error)

    def _silence(self, seconds: float) -> DataError:
        trouble = f" ({self._source.trouble})" if self._source.trouble else ""
        return DataError(
            f"{self._source.name}: nothing came for {seconds:.0f} s{trouble}; if it may be silent or away for longer, "
            "raise deadline_s of the stream"
        )

    def _fail(self, error: FarflungError) -> None:
        with self._changed:
            self._error = error
            ready, self._ready = self._ready, None
            self._closed = True
            self._changed.notify_all()
        if ready is not None:
            ready.fail(error)

    # --- its rate ----------------------------------------------------------------------------------------------------

    def _rate(self) -> float:
        """Returns samples per second, summed over all partitions."""
        return sum(growth.rate or 0.0 for growth in self._growth.values())

    def _measure(self) -> None:
        asked_at = time.monotonic()
        if not self._growth or asked_at < self._measure_at:
            return
        marks = self._source.grown()
        answered_at = time.monotonic()
        self._measure_at = answered_at + max(MEASURE_S, (answered_at - asked_at) / MEASURE_SHARE)
        with self._changed:
            if marks and not self._is_ready():
                self._silent_since = answered_at
            for partition, mark in marks.items():
                self._growth[partition].note(*mark)
                if answered_at >= self._settle_at:
                    self._growth[partition].settle()
        self._wake()
