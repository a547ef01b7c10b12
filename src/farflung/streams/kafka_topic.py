"""Stream of samples from Apache Kafka."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from typing_extensions import override

from farflung.errors import ConfigError, DataError
from farflung.extras import require_modules
from farflung.files import read_text, wrap_read_errors
from farflung.options import check_choice, check_text
from farflung.streams.buffer import with_buffer_options
from farflung.streams.live import LiveStream, MessageSource, PartitionRange, Records
from farflung.streams.messages import Decoder

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message

__all__ = ["QUEUE", "Begin", "KafkaSource", "kafka"]

Begin = Literal["earliest", "latest", "committed"]
T = TypeVar("T")

ANSWER_S = 10.0
"""Maximum time that a broker may take to answer requests at the start."""
GROWTH_ANSWER_S = 1.0
"""Maximum time that a broker may take to return the end of a partition."""
RETRY_S = 0.1
"""Delay before a request to a broker that was not ready is repeated."""
NOT_READY_ERRORS = frozenset(
    {
        "COORDINATOR_LOAD_IN_PROGRESS",
        "COORDINATOR_NOT_AVAILABLE",
        "LEADER_NOT_AVAILABLE",
        "NOT_COORDINATOR",
        "NOT_LEADER_FOR_PARTITION",
        "OFFSET_NOT_AVAILABLE",
        "_WAIT_COORD",
    }
)
"""Errors of brokers while a partition has no leader: right after the creation of a topic or the restart of a
broker."""

QUEUE = {"fetch.queue.backoff.ms": 20}
"""Time for which the client fetches nothing after it has read far ahead; its default of 1 s outlasts its queue."""


@with_buffer_options
def kafka(
    servers: str,
    topic: str,
    begin: Begin = "earliest",
    group: str = "farflung",
    properties: str | None = None,
    decoder: str | Decoder | None = None,
    skip: int = 100,
    deadline_s: float = 60.0,
    **buffer: Any,
) -> LiveStream:
    r"""Streams samples from Apache Kafka, one per message, in the format of :func:`as_messages`.

    Each replica has a consumer of its own with a fixed assignment of partitions. If the topic's name contains
    ``{rank}``, the replica reads all partitions of its own topic. Otherwise it reads partitions :math:`p` with
    :math:`p \bmod n` its rank, of one topic for all :math:`n` replicas. There is no rebalancing.

    A run resumes from its checkpoint alone. Offsets are also committed to the broker, for monitors of the group, once
    the exchange that used the samples has finished. The stream waits for a broker that is unavailable.

    Args:
      servers: Bootstrap servers, ``host:port``, separated by commas.
      topic: Name of the topic; ``"readings-{rank}"`` is a topic for each replica.
      begin: Begin of a run without a checkpoint: the oldest message, the end, or the offset committed for the group
        (the oldest message if there is none).
      group: Consumer group under which offsets are committed.
      properties: File of further client properties, lines of ``name=value``, such as those for TLS and SASL. The run's
        folder keeps its name and not its content.
      decoder: Function, or its name as ``module:function``, that returns inputs and targets of the sample in a
        message's bytes, and raises if there is none; ``None``: messages are safetensors.
      skip: Number of undecodable messages that may be skipped; one more ends the run.
      deadline_s: Maximum time in seconds that a step waits without a new message or for the broker.
      buffer: Options of :class:`Buffer`. The default backlog is 65,536 samples; the broker keeps the others.

    Raises:
      ConfigError: A value is out of range.
    """
    check_choice("stream kafka", "begin", begin, get_args(Begin))
    for name, value in (("servers", servers), ("topic", topic), ("group", group)):
        check_text("stream kafka", name, value)
    source = KafkaSource(servers, topic, begin, group, None if properties is None else Path(properties))
    return LiveStream(source, decoder, skip, deadline_s, buffer)


class KafkaSource(MessageSource):
    """Source of the partitions of a topic; the arguments are those of :func:`kafka`."""

    _kafka: Any
    """Module of the client, once it is opened."""
    _consumer: Consumer

    def __init__(self, servers: str, topic: str, begin: Begin, group: str, properties: Path | None) -> None:
        self._servers, self._topic, self._begin, self._group = servers, topic, begin, group
        self._properties = properties
        self._close: Callable[[], object] = lambda: None
        self._partitions: list[int] = []
        self._is_paused = False
        self.name = f"topic {topic} at {servers}"

    @override
    def connect(self, rank: int, size: int) -> Mapping[int, PartitionRange]:
        """Requests the topic's partitions and offsets from the broker.

        Raises:
          MissingExtra: confluent-kafka is not installed.
          ConfigError: The client rejects its properties.
          DataError: No broker answers, or the topic has no partition for this replica.
        """
        require_modules("the stream kafka", "confluent_kafka", extra="kafka")
        import confluent_kafka

        self._kafka = confluent_kafka
        settings = {
            "bootstrap.servers": self._servers,
            "group.id": self._group,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "error_cb": self._handle_error,
            "logger": SILENT_LOGGER,
            "reconnect.backoff.max.ms": 1000,
        }
        has_own_topic = "{rank}" in self._topic
        self._topic = self._topic.replace("{rank}", str(rank))
        self.name = f"topic {self._topic} at {self._servers}"
        try:
            self._consumer = self._kafka.Consumer(
                {**QUEUE, **_read_client_settings(self._properties), **settings}
            )
            self._close = self._consumer.close
        except (self._kafka.KafkaException, ValueError, TypeError) as error:
            raise ConfigError(f"stream kafka: {_get_reason(error)}") from None
        consumer = self._consumer
        try:
            topic = self._ask_broker(
                lambda: consumer.list_topics(self._topic, timeout=ANSWER_S).topics[self._topic]
            )
            if topic.error is not None:
                raise DataError(f"{self.name}: {topic.error.str()}: make it, or name another")
            if not has_own_topic and len(topic.partitions) < size:
                raise DataError(
                    f"{self.name}: {len(topic.partitions)} partitions for {size} replicas: make as many, or a topic "
                    "for each and name it with {rank}"
                )
            self._partitions = [p for p in sorted(topic.partitions) if has_own_topic or p % size == rank]
            partitions = [self._kafka.TopicPartition(self._topic, p) for p in self._partitions]
            is_committed = self._begin == "committed"
            begins = (
                self._ask_broker(lambda: consumer.committed(partitions, ANSWER_S))
                if is_committed
                else partitions
            )
            return {p.partition: self._request_range(p) for p in begins}
        except self._kafka.KafkaException as error:
            raise DataError(
                f"{self.name}: {self.trouble or _get_reason(error)}: is a broker running there, and does it "
                f"advertise an "
                "address that can be reached from here?"
            ) from None

    @override
    def start(self, positions: Mapping[int, int]) -> None:
        self._consumer.assign([self._kafka.TopicPartition(self._topic, p, at) for p, at in positions.items()])

    @override
    def read(self, max_messages: int, wait_s: float) -> list[Records]:
        """Returns new messages by partition; raises fatal errors, and keeps others in ``trouble``."""
        first = self._consumer.poll(wait_s)  # consume() would wait for as many as it is asked for
        if first is None:
            return []
        batches: dict[int, list[Message]] = {}
        trouble = ""
        for message in (
            [first, *self._consumer.consume(max_messages - 1, 0.0)] if max_messages > 1 else [first]
        ):
            if (error := message.error()) is None:
                batches.setdefault(cast("int", message.partition()), []).append(message)
            else:
                trouble = self._judge_error(error)
        self.trouble = trouble
        return [_build_records(partition, messages) for partition, messages in batches.items()]

    @override
    def count_received(self) -> Mapping[int, tuple[float, int]]:
        """Requests the end offset of each partition, with the time of the answer; stops at the first failure."""
        counts: dict[int, tuple[float, int]] = {}
        for partition in self._partitions:
            try:
                offsets = self._consumer.get_watermark_offsets(
                    self._kafka.TopicPartition(self._topic, partition), timeout=GROWTH_ANSWER_S
                )
            except self._kafka.KafkaException:
                break
            if offsets is None:
                break
            counts[partition] = time.monotonic(), offsets[1]
        return counts

    @override
    def pause(self, is_paused: bool) -> None:
        if is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        change = self._consumer.pause if is_paused else self._consumer.resume
        change([self._kafka.TopicPartition(self._topic, p) for p in self._partitions])

    @override
    def commit_positions(self, positions: Mapping[int, int], step: int) -> None:
        """Commits offsets, with the step; does not wait for the answer."""
        metadata = f"step {step}"
        self._consumer.commit(
            offsets=[self._kafka.TopicPartition(self._topic, p, at, metadata) for p, at in positions.items()],
            asynchronous=True,
        )

    @override
    def close(self) -> None:
        self._close()

    def _request_range(self, partition: Any) -> PartitionRange:
        """Requests the offsets of a partition; ``partition.offset`` matters only if it begins at the committed one."""
        consumer = self._consumer
        first, end = self._ask_broker(lambda: consumer.get_watermark_offsets(partition, timeout=ANSWER_S))
        committed = partition.offset if first <= partition.offset <= end else first
        return PartitionRange(
            first, end, {"earliest": first, "latest": end, "committed": committed}[self._begin]
        )

    def _ask_broker(self, ask: Callable[[], T]) -> T:
        """Repeats a request until the broker is ready, and returns its answer."""
        not_ready = {getattr(self._kafka.KafkaError, name) for name in NOT_READY_ERRORS}
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                return ask()
            except self._kafka.KafkaException as error:
                if error.args[0].code() not in not_ready or time.monotonic() > deadline:
                    raise
            self._consumer.poll(RETRY_S)

    def _handle_error(self, error: KafkaError) -> None:
        """Records an error that the client repairs by itself, such as a broken connection."""
        self.trouble = error.str()

    def _judge_error(self, error: KafkaError) -> str:
        if error.fatal() or error.code() == self._kafka.KafkaError._AUTO_OFFSET_RESET:
            raise DataError(f"{self.name}: {error.str()}")
        return error.str()


def _build_records(partition: int, messages: list[Message]) -> Records:
    return Records(
        partition,
        cast("list[int]", [m.offset() for m in messages]),
        [m.value() or b"" for m in messages],
    )


def _read_client_settings(properties: Path | None) -> dict[str, str]:
    """Reads client properties from a file: lines of ``name=value``, without those that begin with ``#``.

    Raises:
      ConfigError: The file cannot be read, or a line has another form.
    """
    if properties is None:
        return {}
    settings = {}
    with wrap_read_errors(properties, "must hold lines of name=value"):
        for line in read_text(properties).splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                name, value = line.split("=", 1)
                settings[name.strip()] = value.strip()
    return settings


def _get_reason(error: Exception) -> str:
    """Returns the text of a client's error."""
    reason = error.args[0] if error.args else error
    return reason.str() if hasattr(reason, "str") else str(reason)


SILENT_LOGGER = logging.Logger("farflung.kafka", level=logging.CRITICAL)
"""Logger that discards the client library's output; its errors are reported otherwise."""
