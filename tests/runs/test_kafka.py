"""Training from Kafka: real workers, a real broker where there is one, and nothing lost or used twice."""

from __future__ import annotations

import contextlib
import select
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from farflung import extras
from farflung.cli.main import main
from farflung.errors import BadInput, CheckpointError, ConfigError, DataError, MissingExtra
from farflung.streams import LiveStream, as_messages, kafka
from farflung.streams.kafka_topic import KafkaSource
from farflung.telemetry import read_events
from farflung.workloads import create_workload
from tests.broker import HOME, READY_S, Broker
from tests.forks import Fork, farflung, ran, script
from tests.logged_stream import used
from tests.streams.test_live import DATA, VALUES, step
from tests.streams.test_streams import feed

AWAY_S = 4.0
"""How long the broker is away; longer than the deadline of messages."""
WORKERS, STEPS, BATCH = 4, 200, 4
PRODUCE = Path(__file__).parents[2] / "examples" / "produce.py"
KINDS = [pytest.param(True, id="kafka", marks=[pytest.mark.kafka, pytest.mark.thorough])]
if not HOME:
    KINDS.append(pytest.param(False, id="imitation"))


@pytest.fixture(scope="module", params=KINDS)
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = Broker(tmp_path_factory.mktemp("broker"), real=request.param)
    yield made
    made.close()


Open = Callable[..., tuple[LiveStream, Any]]


@pytest.fixture
def opened(broker: Broker) -> Iterator[Open]:
    """Makes streams of that broker, and what their ids stand for."""
    made: list[LiveStream] = []

    def make(topic: str, rank: int = 0, size: int = 4, **options: Any) -> tuple[LiveStream, Any]:
        made.append(kafka(broker.servers, topic, **options))
        return made[-1], made[-1].start(feed(None, rank, size, data=DATA, batch_size=BATCH))

    yield make
    for each in made:
        each.close()


# --- the stream -------------------------------------------------------------------------------------------------


def test_each_replica_reads_partitions_of_its_own(broker: Broker, opened: Open) -> None:
    broker.make("shared", 4)
    for partition in range(4):
        broker.put("shared", partition, VALUES[10 * partition : 10 * partition + 8])
    for rank in range(4):
        assert step(*opened("shared", rank), 0) == [10 * rank + k for k in range(4)]
    both = step(*opened("shared", 1, 2, least=16), 0)
    assert sorted(both) == [*range(10, 18), *range(30, 38)]


def test_each_replica_may_have_a_topic(broker: Broker, opened: Open) -> None:
    for rank in range(2):
        broker.make(f"own-{rank}", 4)
        broker.put(f"own-{rank}", 3, VALUES[50 * rank : 50 * rank + 4])
    for rank in range(2):
        assert step(*opened("own-{rank}", rank, 2), 0) == [50 * rank + k for k in range(4)]


def test_a_position_is_gone_back_to_and_the_group_is_told(broker: Broker, opened: Open) -> None:
    broker.make("again", 4)
    broker.put("again", 0, VALUES[:12])
    stream, samples = opened("again", group="watchers")
    assert step(stream, samples, 0) == [0, 1, 2, 3]
    state = stream.state_dict()
    assert step(stream, samples, 1) == [4, 5, 6, 7]
    stream.close()
    later, samples = opened("again", group="watchers")
    later.load_state_dict(state)
    assert step(later, samples, 1) == [4, 5, 6, 7]
    later.close()
    assert step(*opened("again", group="watchers", begin="committed"), 0) == [8, 9, 10, 11]
    assert step(*opened("again", group="strangers", begin="committed"), 0) == [0, 1, 2, 3]


def test_a_run_may_begin_behind_what_is_there(broker: Broker, opened: Open) -> None:
    broker.make("latest", 4)
    broker.put("latest", 0, VALUES[:9])
    stream, samples = opened("latest", begin="latest")
    assert stream.poll(0.0, 0).next_poll is not None
    broker.put("latest", 0, VALUES[20:24])
    assert step(stream, samples, 0) == [20, 21, 22, 23]


def test_a_full_backlog_pauses_the_consumer(broker: Broker, opened: Open) -> None:
    broker.make("much", 4)
    broker.put("much", 0, VALUES * 3)
    stream, samples = opened("much", backlog=10)
    labels = []
    for number in range(300 // BATCH):
        labels += step(stream, samples, number)
        assert len(stream.state_dict()["buffer"]["held"]) <= 10 + BATCH
    assert labels == [*range(100)] * 3


def test_what_does_not_decode_is_counted(broker: Broker, opened: Open) -> None:
    broker.make("mixed", 4)
    broker.put("mixed", 0, [*VALUES[:3], b"garbage", b"", VALUES[3]])
    stream, samples = opened("mixed", skip=2)
    assert step(stream, samples, 0) == [0, 1, 2, 3]
    broker.put("mixed", 0, [b"more"])
    with pytest.raises(
        DataError, match=r"topic mixed at .*: 3 messages do not decode, the last at position 6"
    ):
        step(stream, samples, 1)


def test_topics_that_do_not_fit_are_refused(broker: Broker, opened: Open) -> None:
    broker.make("narrow", 4)
    with pytest.raises(DataError, match=r"topic narrow at .*: 4 partitions for 5 replicas: make as many, or"):
        opened("narrow", 0, 5)
    if broker.real:
        with pytest.raises(
            DataError, match=r"topic absent at .*: Broker: Unknown topic or partition: make it"
        ):
            opened("absent")


def test_a_partition_that_is_gone_is_named(broker: Broker, opened: Open) -> None:
    broker.make("gone", 4)
    broker.put("gone", 2, VALUES[:9])
    stream, samples = opened("gone", 2)
    step(stream, samples, 0)
    state = stream.state_dict()
    with pytest.raises(
        CheckpointError, match=r"topic gone at .*: partition 2, from which the checkpoint continues"
    ):
        opened("gone", 3)[0].load_state_dict(state)
    state["next"]["2"] = 4000
    with pytest.raises(CheckpointError, match="which has 0 to 9: what was to come is deleted there"):
        opened("gone", 2)[0].load_state_dict(
            {**state, "buffer": {**state["buffer"], "held": torch.tensor([], dtype=torch.int64)}}
        )


def test_partitions_grow_by_what_the_broker_has(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.make("grows", 4)
    broker.put("grows", 2, VALUES[:3])
    source = KafkaSource(broker.servers, "grows", "latest", "farflung", None)
    source.connect(0, 2)
    before = source.count_received()
    broker.put("grows", 2, VALUES[:5])
    after = source.count_received()
    assert [(one, count) for one, (_, count) in before.items()] == [(0, 0), (2, 3)]
    assert [(one, count) for one, (_, count) in after.items()] == [(0, 0), (2, 8)]
    assert before[2][0] < after[2][0]
    monkeypatch.setattr(sys.modules[KafkaSource.__module__], "GROWTH_ANSWER_S", 0.1)
    broker.stop()
    try:
        assert source.count_received() == {}
    finally:
        broker.go_on()
        source.close()


def test_a_rate_is_measured_whatever_clocks_producers_have(broker: Broker, opened: Open) -> None:
    import confluent_kafka

    broker.make("clocks", 4)
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.servers, "log_level": 0})
    for number, value in enumerate(VALUES[: 2 * BATCH]):
        producer.produce("clocks", value, partition=0, timestamp=10**12 - 3_600_000 * (number % 2))
    assert producer.flush(READY_S) == 0
    stream, samples = opened("clocks", weigh="by_rate")
    assert step(stream, samples, 0) == [0, 1, 2, 3]
    (rate,) = stream.state_dict()["rates"].values()
    assert rate <= 1.0, "nothing has come since it was opened"


def test_a_broker_that_is_away_for_too_long_is_named(broker: Broker, opened: Open) -> None:
    broker.make("silent", 4)
    stream, samples = opened("silent", deadline_s=0.2)
    broker.stop()
    try:
        with pytest.raises(DataError, match=r"topic silent at .*: nothing arrived for 0 s.*raise deadline_s"):
            step(stream, samples, 0)
    finally:
        broker.go_on()


# --- what needs no broker ---------------------------------------------------------------------------------------


def test_nobody_there_is_said_with_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[KafkaSource.__module__], "ANSWER_S", 0.2)
    stream = kafka("127.0.0.1:1", "readings")
    with pytest.raises(
        DataError, match=r"topic readings at 127.0.0.1:1: .*is a broker running there"
    ) as caught:
        stream.start(feed(data=DATA))
    stream.close()
    assert "\n" not in str(caught.value)
    path = tmp_path / "client.properties"
    path.write_text("# TLS\nno.such.property = 3\n")
    with pytest.raises(ConfigError, match=r"stream kafka: No such configuration property: .no.such.property"):
        kafka("127.0.0.1:1", "readings", properties=str(path)).start(feed(data=DATA))
    path.write_text("nonsense\n")
    with pytest.raises(ConfigError, match=r"client.properties: must hold lines of name=value"):
        kafka("127.0.0.1:1", "readings", properties=str(path)).start(feed(data=DATA))


def test_a_client_that_is_not_installed_is_said_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    with pytest.raises(MissingExtra, match=r"the stream kafka needs confluent_kafka: .*farflung\[kafka\]"):
        kafka("127.0.0.1:1", "readings").start(feed(data=DATA))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"topic": ""}, "topic '' must be text"),
        ({"topic": "t", "begin": "now"}, "begin 'now' must be 'earliest' or 'latest' or 'committed'"),
        ({"topic": "t", "group": 3}, "group 3 must be text"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        kafka("127.0.0.1:1", **options)


def test_virtual_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    stream = "kafka('127.0.0.1:1', 'readings')"
    assert main(["simulate", "--workload", "synthetic/quadratic", "--stream", stream]) == 2
    said = capsys.readouterr().err
    assert "its samples come when they come, and virtual time would stand still meanwhile" in said


# --- whole runs -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def producing(broker: Broker, topic: str, *rates: str) -> Iterator[None]:
    """Samples arrive from a process of their own: the example's, a device for each replica."""
    options = ["--workload", "synthetic/quadratic", "--servers", broker.servers, "--topic", topic]
    sends = partial(script, PRODUCE, *options, "--devices", str(WORKERS), "--rate", *rates)
    with Fork(sends) as process:
        yield
        if "--samples" not in rates:
            process.send_signal(signal.SIGINT)
        out, err = process.finished()
    assert process.returncode == 0, err
    assert int(out.split()[0]) > 0


def readings(count: int) -> list[bytes]:
    data, _ = create_workload("synthetic/quadratic").load_datasets()
    return as_messages(data.get_rows(torch.arange(count) % len(data)))


def until(stream: IO[str], text: str) -> None:
    """Reads up to a line with ``text``."""
    said = []
    for line in stream:
        said.append(line)
        if text in line:
            return
    raise AssertionError(f"it ended without {text!r}: {''.join(said)}")


def silent(stream: IO[str], seconds: float) -> None:
    """Reads until nothing is said for so long."""
    while select.select([stream], [], [], seconds)[0]:
        assert stream.readline(), "it has ended"


@pytest.mark.thorough
def test_each_offset_is_trained_on_once_over_an_outage_and_a_kill(broker: Broker, tmp_path: Path) -> None:
    broker.make("readings", 4)
    stream = f"tests.logged_stream:logged({str(tmp_path)!r}, servers={broker.servers!r}, topic='readings')"
    run = tmp_path / "run"
    options = [
        "--workload", "synthetic/quadratic", "--workers", str(WORKERS), "--batch-size", str(BATCH),
        "--steps", str(STEPS), "--checkpoint-every", "50", "--evaluate-every", "0", "--deadline", str(AWAY_S / 2),
        "--stream", stream, "--out", str(run),
    ]  # fmt: skip
    with farflung("train", *options) as first:
        for partition in range(WORKERS):
            broker.put("readings", partition, readings(60 * BATCH))
        until(first.stderr, "step-00000050")
        with producing(broker, "readings", "80", "120", "160", "200", "--samples", str(110 * BATCH)):
            until(first.stderr, "step-00000100")
            broker.stop()
            if broker.real:
                broker.kill()
            silent(first.stderr, AWAY_S)
            if broker.real:
                broker.start_again()
            else:
                broker.go_on()
            until(first.stderr, "step-00000150")
            first.send_signal(signal.SIGKILL)  # before there is enough for all steps
    for partition in range(WORKERS):
        broker.put("readings", partition, readings(30 * BATCH))
    ran("train", "--resume", str(run))
    for rank in range(WORKERS):
        steps = used(tmp_path, rank)
        assert sorted(steps) == list(range(STEPS))
        taken = [one for number in sorted(steps) for one in steps[number]]
        assert taken == [(rank, offset) for offset in range(BATCH * STEPS)]


def test_a_run_that_cannot_go_on_ends_with_a_line(broker: Broker, tmp_path: Path) -> None:
    broker.make("spoilt", 4)
    for partition in range(WORKERS):
        broker.put("spoilt", partition, [b"garbage"] * 3)
    options = ["--workload", "synthetic/quadratic", "--workers", str(WORKERS), "--out", str(tmp_path / "run")]
    stream = f"kafka({broker.servers!r}, 'spoilt', skip=2)"
    with farflung("train", *options, "--stream", stream) as process:
        _, err = process.finished()
    assert process.returncode == 2
    (said,) = (line for line in err if line.startswith("farflung: "))
    assert "topic spoilt at " in said
    assert "3 messages do not decode, the last at position 2 of partition " in said
    assert said.endswith("raise skip, or give a decoder for them")
    assert said == err[-1]


def test_messages_for_a_partition_that_is_not_there_are_not_lost_in_silence(broker: Broker) -> None:
    broker.make("four", 4)
    with pytest.raises(AssertionError, match=r"2 messages did not arrive: .*[Uu]nknown partition"):
        broker.put("four", 4, VALUES[:2])


def test_more_partitions_are_taken_in_at_a_resume(broker: Broker, opened: Open) -> None:
    if not broker.real:
        pytest.skip("the imitation adds no partitions")
    broker.make("grown", 1)
    broker.put("grown", 0, VALUES[:8])
    stream, samples = opened("grown", 0, 1)
    assert step(stream, samples, 0) == [0, 1, 2, 3]
    state = stream.state_dict()
    broker.enlarge("grown", 2)
    broker.put("grown", 1, VALUES[20:24])
    again, samples = opened("grown", 0, 1, least=8)
    again.load_state_dict(state)
    assert sorted(step(again, samples, 1)) == [4, 5, 6, 7, 20, 21, 22, 23]


@pytest.mark.thorough
def test_truncation_holds_no_more_than_just_streamed_in(broker: Broker, tmp_path: Path) -> None:
    broker.make("fast", 4)
    stream = (
        f"tests.logged_stream:logged({str(tmp_path)!r}, servers={broker.servers!r}, topic='fast', "
        "policy='truncation', least=4, most=16)"
    )
    run = tmp_path / "run"
    with producing(broker, "fast", "80", "120", "200", "800"):
        options = [
            "--workload", "synthetic/quadratic", "--workers", str(WORKERS), "--steps", "50", "--evaluate-every", "0",
            "--stream", stream, "--out", str(run),
        ]  # fmt: skip
        ran("train", *options)
    for rank in range(WORKERS):
        events = [
            one for one in read_events(run / "telemetry" / f"rank-{rank}.jsonl") if one["event"] == "step"
        ]
        held, batch, dropped = (
            [int(str(one[key])) for one in events] for key in ("buffered", "batch", "dropped")
        )
        before = [0, *dropped[:-1]]
        assert [h - b for h, b in zip(held, batch, strict=True)] == [
            now - then for now, then in zip(dropped, before, strict=True)
        ]
        assert max(batch) <= 16
        steps = used(tmp_path, rank)
        taken = [offset for number in sorted(steps) for _, offset in steps[number]]
        assert taken == sorted(set(taken))
        assert taken[-1] + 1 == len(taken) + dropped[-1]
    assert dropped[-1] > 0, "the fastest brings more than its steps take"
