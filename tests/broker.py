"""A Kafka broker for tests: a real one of the installation at ``KAFKA_HOME``, or librdkafka's own imitation.

Both are processes of the tests, which end them by their ids.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message
    from confluent_kafka.admin import AdminClient

HOME = os.environ.get("KAFKA_HOME", "")
READY_S = 120.0
"""How long a broker may take to answer, on a busy machine."""
WAITING = 50_000
"""Messages that a client keeps for a broker that is slower; it would refuse 100,000."""

TIED = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
"""Before a command: where there is this tool, it ends with the tests, however they end."""

IMITATION = """\
import sys
from confluent_kafka import Producer
cluster = Producer({"test.mock.num.brokers": 1, "log_level": 0})
found = cluster.list_topics(timeout=60).brokers.values()
print(",".join(f"{one.host}:{one.port}" for one in found), flush=True)
sys.stdin.read()
"""


class Broker:
    """One broker.

    Args:
      folder: where a real one keeps what it has; empty.
      real: whether it is Kafka itself.
      settings: of a real one, beside those that it needs.
    """

    def __init__(self, folder: Path, *, real: bool, settings: Mapping[str, object] | None = None) -> None:
        self.real = real
        self._settings = settings or {}
        self._folder = folder
        self._paused = False
        if self.real:
            self._format()
        self._process = self._started()
        self._answers()

    def make(self, topic: str, partitions: int) -> None:
        """Makes a topic, and waits until clients see it; the imitation makes one of 4 partitions when it is asked."""
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewTopic

        admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        if not self.real:
            assert partitions == 4
            assert len(admin.list_topics(topic, timeout=READY_S).topics[topic].partitions) == 4
            return
        for future in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
            future.result(READY_S)
        self._shows(admin, topic, partitions)

    def enlarge(self, topic: str, partitions: int) -> None:
        """Adds partitions to a topic, and waits until clients see as many; the imitation cannot."""
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewPartitions

        assert self.real
        admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        for future in admin.create_partitions([NewPartitions(topic, partitions)]).values():
            future.result(READY_S)
        self._shows(admin, topic, partitions)

    def _shows(self, admin: AdminClient, topic: str, partitions: int) -> None:
        """Waits until the broker tells clients of so many partitions: its controller knows of them before."""
        until = time.monotonic() + READY_S
        while len(admin.list_topics(topic, timeout=READY_S).topics[topic].partitions) < partitions:
            assert time.monotonic() < until, f"the broker does not show {partitions} partitions of {topic}"

    def put(self, topic: str, partition: int, values: Iterable[bytes], **config: Any) -> None:
        """Sends messages, and waits until the broker has all of them."""
        from confluent_kafka import Producer

        lost: list[str] = []

        def delivered(error: KafkaError | None, message: Message) -> None:
            del message
            if error is not None:
                lost.append(error.str())

        producer = Producer({"bootstrap.servers": self.servers, "log_level": 0, "linger.ms": 0, **config})
        for value in values:
            if len(producer) >= WAITING:
                assert producer.flush(READY_S) == 0
            producer.produce(topic, value, partition=partition, on_delivery=delivered)
        assert producer.flush(READY_S) == 0
        assert not lost, f"{len(lost)} messages did not arrive: {lost[0]}"

    def stop(self) -> None:
        """It answers nobody, and keeps its connections."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(
            os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT
        )  # its threads go on for a while
        self._paused = True

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)
        self._paused = False

    def kill(self) -> None:
        """It is gone at once; a real one is found by :meth:`start_again` with all that it had acknowledged."""
        self._process.kill()
        self._process.wait()

    def start_again(self) -> None:
        assert self.real
        self._process = self._started()
        self._answers()

    def close(self) -> None:
        if self._paused:
            self.go_on()
        self.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    # --- how it is started --------------------------------------------------------------------------------------

    def _format(self) -> None:
        port, controller = _free_ports(2)
        self.servers = f"127.0.0.1:{port}"
        self._config = self._folder / "server.properties"
        own = {
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller}",
            "log.dirs": str(self._folder / "logs"),
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.listener.names": "CONTROLLER",
            "auto.create.topics.enable": "false",
            "offsets.topic.num.partitions": "1",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "broker.session.timeout.ms": "2000",
            "broker.heartbeat.interval.ms": "500",
            **self._settings,
        }
        self._config.write_text("".join(f"{name}={value}\n" for name, value in own.items()))
        storage = str(Path(HOME) / "bin" / "kafka-storage.sh")
        made = subprocess.run(
            [storage, "random-uuid"], capture_output=True, text=True, check=True, timeout=READY_S
        )
        subprocess.run(
            [storage, "format", "--standalone", "-t", made.stdout.split()[-1], "-c", str(self._config)],
            capture_output=True,
            check=True,
            timeout=READY_S,
        )

    def _started(self) -> subprocess.Popen[str]:
        if not self.real:
            process = subprocess.Popen(
                [sys.executable, "-c", IMITATION], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            self.servers = process.stdout.readline().strip()
            return process
        with (self._folder / "broker.log").open("a") as log:
            return subprocess.Popen(
                [*TIED, str(Path(HOME) / "bin" / "kafka-server-start.sh"), str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                env={**os.environ, "KAFKA_HEAP_OPTS": "-Xmx384m"},
            )

    def _answers(self) -> None:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        until = time.monotonic() + READY_S
        # One client for all attempts: on a busy machine an answer may take longer than any of them.
        client = AdminClient(
            {"bootstrap.servers": self.servers, "log_level": 0, "reconnect.backoff.max.ms": 500}
        )
        while True:
            assert self._process.poll() is None, "the broker has ended: see broker.log in its folder"
            with contextlib.suppress(KafkaException):
                client.list_topics(timeout=5.0)
                return
            assert time.monotonic() < until, f"no broker answers at {self.servers}"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in bound]
