"""Publishes samples at given rates, to Kafka or to files, for streams to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from farflung.data.streams.followed import SUFFIX, append, whole_records
from farflung.data.streams.kafka import ANSWER_S, SILENT, client_settings, reason
from farflung.data.streams.messages import as_messages
from farflung.data.streams.rates import RateCourse
from farflung.errors import ConfigError, DataError
from farflung.extras import need
from farflung.files import writing
from farflung.types import Samples

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

__all__ = ["FileOutlet", "KafkaOutlet", "Outlet", "Published", "publish"]

CHUNK = 256
"""Samples of one device that are sent before the others have their turn."""
LOOK_S = 0.1
"""How long to wait at most before looking whether to stop."""
AT_ONCE_S = 1e-6
"""What is due so soon is due now."""


class Outlet(Protocol):
    """Where messages go."""

    @property
    def name(self) -> str:
        """In words."""
        ...

    def put(self, device: int, messages: Sequence[bytes]) -> None:
        """Sends messages of a device, in order.

        Raises:
          FarflungError: they cannot be sent.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Lets so much time pass."""
        ...

    def finish(self) -> None:
        """Returns when everything has been taken over.

        Raises:
          FarflungError: something cannot be.
        """
        ...


@dataclass(frozen=True, slots=True)
class Published:
    """What was published, device by device.

    Args:
      samples: how many.
      seconds: from the beginning to the last of them.
    """

    samples: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def rates(self) -> list[float]:
        """Samples per second."""
        pairs = zip(self.samples, self.seconds, strict=True)
        return [count / seconds if seconds > 0 else 0.0 for count, seconds in pairs]


def publish(
    outlet: Outlet,
    courses: Sequence[RateCourse],
    sources: Sequence[Samples],
    *,
    seconds: float | None = None,
    samples: int | None = None,
    stop_asked: Callable[[], bool] = lambda: False,
    tell: Callable[[Sequence[int], float], object] = lambda sent, elapsed_s: None,
    clock: Callable[[], float] = time.monotonic,
) -> Published:
    """Publishes until the end, or until somebody asks to stop.

    Sample k of a device is sent when its course says, by one clock; what is late makes nothing later that follows. So
    the mean rate is kept, as long as the outlet takes as much.

    Args:
      outlet: where to.
      courses: the rate of each device.
      sources: of each device, by the number of a sample, counted from 0.
      seconds: for how long; ``None``: without an end.
      samples: how many of each device; ``None``: any number.
      stop_asked: whether to stop.
      tell: hears how many each device has sent, and after how many seconds.
      clock: in seconds.
    """
    totals = [_total(course, seconds, samples) for course in courses]
    sent, last_s, begin = [0] * len(courses), [0.0] * len(courses), clock()
    while sent != totals and not stop_asked():
        now = clock() - begin
        for device, (course, source, total) in enumerate(zip(courses, sources, totals, strict=True)):
            due = _due(course, now)
            until = min(sent[device] + CHUNK, due if total is None else min(due, total))
            if until > sent[device]:
                outlet.put(device, as_messages(source.rows(torch.arange(sent[device], until))))
                sent[device], last_s[device] = until, now
        tell(sent, now)
        left = [at for at, total in enumerate(totals) if sent[at] != total]
        next_s = min((courses[at].delay(sent[at] + 1, 0.0) for at in left), default=0.0)
        outlet.wait(min(max(0.0, next_s - (clock() - begin)), LOOK_S))
    outlet.finish()
    return Published(tuple(sent), tuple(last_s))


def _due(course: RateCourse, seconds: float) -> int:
    """Samples that are to be sent by then, those in the very moment too."""
    return int(course.sent(0.0, seconds + AT_ONCE_S))


def _total(course: RateCourse, seconds: float | None, samples: int | None) -> int | None:
    bounds = [one for one in (None if seconds is None else _due(course, seconds), samples) if one is not None]
    return min(bounds, default=None)


class KafkaOutlet:
    """A topic for each device, or a partition for each of one topic.

    Args:
      servers: bootstrap servers.
      topic: its name; with ``{rank}`` in it one for each device.
      devices: how many.
      properties: a file of further client properties.
      make: whether to make topics that are not there.
      deadline_s: how long a message may take to be acknowledged, and the broker be away.

    Raises:
      MissingExtra: confluent-kafka is not installed.
      ConfigError: client properties that it does not take.
      DataError: no broker answers, or a topic is not there or has too few partitions.
    """

    def __init__(
        self,
        servers: str,
        topic: str,
        devices: int,
        properties: Path | None = None,
        *,
        make: bool = False,
        deadline_s: float = 60.0,
    ) -> None:
        need("publishing to Kafka", "confluent_kafka", extra="kafka")
        from confluent_kafka import KafkaException, Producer

        each = "{rank}" in topic
        self.name = f"topic {topic} at {servers}"
        self._servers, self._deadline_s, self._trouble = servers, deadline_s, ""
        self._failed: KafkaError | None = None
        self._places = [
            (topic.replace("{rank}", str(device)), 0 if each else device) for device in range(devices)
        ]
        partitions = {name: 1 if each else devices for name, _ in self._places}
        own = {
            "bootstrap.servers": servers,
            "enable.idempotence": True,
            "delivery.timeout.ms": int(1000 * deadline_s),
            "linger.ms": 5,
            "error_cb": self._hear,
            "logger": SILENT,
            "reconnect.backoff.max.ms": 1000,
        }
        settings: dict[str, Any] = {**client_settings(properties), **own}
        try:
            self._producer = Producer(settings)
        except (KafkaException, ValueError, TypeError) as error:
            raise ConfigError(f"Kafka: {reason(error)}") from None
        try:
            self._look(partitions, settings, make=make)
        except KafkaException as error:
            raise DataError(
                f"{self.name}: {self._trouble or reason(error)}: is a broker running there, and does it advertise an "
                "address that can be reached from here?"
            ) from None

    def put(self, device: int, messages: Sequence[bytes]) -> None:
        """Hands them to the client, which sends them in the background; waits while it has no room."""
        topic, partition = self._places[device]
        for message in messages:
            while True:
                try:
                    self._producer.produce(topic, message, partition=partition, on_delivery=self._delivered)
                    break
                except BufferError:
                    self.wait(LOOK_S)
        self.wait(0.0)

    def wait(self, seconds: float) -> None:
        """Hears of what was delivered meanwhile."""
        until = time.monotonic() + seconds
        self._producer.poll(seconds)
        while (left := until - time.monotonic()) > 0:
            self._producer.poll(left)
        if self._failed is not None:
            trouble = f" ({self._trouble})" if self._trouble else ""
            raise DataError(f"{self.name}: a message was not delivered: {self._failed.str()}{trouble}")

    def finish(self) -> None:
        """Waits for the broker's acknowledgements."""
        left = self._producer.flush(self._deadline_s)
        self.wait(0.0)
        if left:
            raise DataError(f"{self.name}: {left} messages were not acknowledged in {self._deadline_s:g} s")

    def _look(self, partitions: dict[str, int], settings: dict[str, Any], *, make: bool) -> None:
        """Whether all topics are there, with partitions enough."""
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewTopic

        known = self._producer.list_topics(timeout=ANSWER_S).topics
        missing = {name: count for name, count in partitions.items() if name not in known}
        if make and missing:
            client = {key: settings[key] for key in settings if key not in _PRODUCERS_OWN}
            wanted = [NewTopic(name, count) for name, count in missing.items()]
            admin = AdminClient(client)  # what it has begun ends with it
            for made in admin.create_topics(wanted, operation_timeout=ANSWER_S).values():
                made.result(2 * ANSWER_S)
        for name, count in partitions.items():
            found = self._producer.list_topics(name, timeout=ANSWER_S).topics[name]
            if found.error is not None:
                raise DataError(
                    f"topic {name} at {self._servers}: {found.error.str()}: make it, or give --make-topics"
                )
            if len(found.partitions) < count:
                raise DataError(
                    f"topic {name} at {self._servers}: {len(found.partitions)} partitions for {count} devices: make as "
                    "many, or a topic for each and name it with {rank}"
                )

    def _hear(self, error: KafkaError) -> None:
        self._trouble = error.str()

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        del message
        self._failed = self._failed or error


_PRODUCERS_OWN = {"enable.idempotence", "delivery.timeout.ms", "linger.ms"}


class FileOutlet:
    """A file for each device; see :func:`farflung.data.files`.

    Args:
      folder: where to; made if it is not there. Files that are there already are added to, behind their last whole
        record.
      devices: how many.

    Raises:
      StorageError: they cannot be written.
    """

    def __init__(self, folder: Path, devices: int) -> None:
        self.name = f"files in {folder}"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._paths = [folder / f"{device:04d}{SUFFIX}" for device in range(devices)]
        self._files = []
        for path in self._paths:
            with writing(path):
                file = path.open("r+b" if path.exists() else "w+b")
                file.truncate(whole_records(file))
                file.seek(0, 2)
                self._files.append(file)

    def put(self, device: int, messages: Sequence[bytes]) -> None:
        """Written at once."""
        with writing(self._paths[device]):
            append(self._files[device], messages)
            self._files[device].flush()

    def wait(self, seconds: float) -> None:
        """Does nothing meanwhile."""
        time.sleep(seconds)

    def finish(self) -> None:
        """Closes the files."""
        for path, file in zip(self._paths, self._files, strict=True):
            with writing(path):
                file.close()
