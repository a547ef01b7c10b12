"""Samples from Kafka: how fast they become batches, and whether any is lost or used twice."""

from __future__ import annotations

import contextlib
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.common import Benchmark, Group, Measured, main
from benchmarks.common.workers import environment
from benchmarks.kafka.producers import COUNTS, PRODUCE, RATES, THREADS, effective
from farflung.errors import LabError
from farflung.streams import as_messages, kafka
from farflung.streams.kafka_topic import QUEUE
from farflung.types import Batch, Dataset, Decision, StreamContext
from farflung.workloads import create_workload
from tests.broker import HOME, Broker
from tests.logged_stream import used

SPEED, LOST = "samples per second", "offsets lost or repeated over kill, resume and a broker restart"
BATCH = 64
FULL_ROUNDS, QUICK_ROUNDS = 11, 1
FULL_SAMPLES, QUICK_SAMPLES = 200_000, 20_000
WORKERS, STEP_SAMPLES = 4, 4
FROM = 16
"""Producers, of the row about them."""
NEEDS = "kafka: needs an installation of Kafka and Java: set KAFKA_HOME"
Rates = list[float]


@contextlib.contextmanager
def brought_up() -> Iterator[Broker]:
    """A broker that goes with the block."""
    if not HOME:
        raise LabError(NEEDS)
    with tempfile.TemporaryDirectory(prefix="farflung-kafka-") as folder:
        broker = Broker(Path(folder), real=True)
        try:
            yield broker
        finally:
            broker.close()


# --- from the broker to a batch -----------------------------------------------------------------------------------


def measure_speed(quick: bool) -> Mapping[str, Measured]:
    """A ratio for each round, in which both sides read the same messages."""
    torch.set_num_threads(1)
    rounds, samples = (QUICK_ROUNDS, QUICK_SAMPLES) if quick else (FULL_ROUNDS, FULL_SAMPLES)
    data, _ = create_workload("fashion-mnist/cnn", data="packaged").load_datasets()
    values = as_messages(data.get_rows(torch.arange(samples) % len(data)))
    sides: dict[str, Callable[[str], float]] = {
        "farflung": lambda servers: by_stream(servers, data, samples // BATCH),
        "bare": lambda servers: by_hand(servers, data, values[0], samples // BATCH),
    }
    found: dict[str, Rates] = {name: [] for name in sides}
    with brought_up() as broker:
        broker.make("samples", 1)
        broker.put("samples", 0, values, **{"linger.ms": 20})
        for round_ in range(rounds):
            for name in sorted(sides, reverse=round_ % 2 == 1):
                found[name].append(sides[name](broker.servers))
    ratios = [ours / bare for ours, bare in zip(found["farflung"], found["bare"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    config: dict[str, Any] = {
        "samples": samples,
        "batch": BATCH,
        "message_nbytes": len(values[0]),
        "rounds": rounds,
        "samples_per_second": {name: round(statistics.median(rates)) for name, rates in found.items()},
    }
    return {SPEED: Measured(middle, (low, high), config)}


def by_stream(servers: str, data: Dataset, batches: int) -> float:
    """Samples per second of the stream, from its first batch on."""
    stream = kafka(servers, "samples", least=BATCH)

    def decide(name: str, step: int, choose: Callable[[], Any]) -> Decision:
        return Decision(name, step, choose())

    samples = stream.start(StreamContext(data, 0, 1, False, BATCH, 0, decide))
    begin = 0.0
    for step in range(batches):
        arrivals = stream.poll(0.0, step)
        while arrivals.next_poll is not None:
            assert not isinstance(arrivals.next_poll, float)
            arrivals.next_poll.wait()
            arrivals = stream.poll(0.0, step)
        ids = arrivals.ids[: arrivals.count]
        rows = samples.get_rows(ids)
        assert len(rows) == BATCH
        stream.commit(ids, step=step)
        begin = begin or time.perf_counter()
    rate = (batches - 1) * BATCH / (time.perf_counter() - begin)
    stream.close()
    return rate


def by_hand(servers: str, data: Dataset, value: bytes, batches: int) -> float:
    """The same of a consumer in a loop, which knows where the tensors are in a message."""
    from confluent_kafka import Consumer, TopicPartition

    row = data.get_rows(torch.tensor([0]))
    inputs_at = value.index(row.inputs.numpy().tobytes())
    targets_at = value.rindex(row.targets.numpy().tobytes())
    own = {"bootstrap.servers": servers, "group.id": "bare", "enable.auto.commit": False}
    consumer = Consumer({**QUEUE, **own})
    consumer.assign([TopicPartition("samples", 0, 0)])
    begin = 0.0
    for _ in range(batches):
        messages = consumer.consume(BATCH, 10.0)
        whole = torch.frombuffer(bytearray().join(one.value() or b"" for one in messages), dtype=torch.uint8)
        table = whole.view(len(messages), len(value))
        rows = Batch(_cut(table, inputs_at, row.inputs), _cut(table, targets_at, row.targets))
        assert len(rows) == BATCH
        begin = begin or time.perf_counter()
    rate = (batches - 1) * BATCH / (time.perf_counter() - begin)
    consumer.close()
    return rate


def _cut(table: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    piece = table[:, begin : begin + like.nbytes].clone(memory_format=torch.contiguous_format)
    return piece.view(like.dtype).reshape(len(table), *like.shape[1:])


# --- producers ----------------------------------------------------------------------------------------------------

REACHED = "rate reached where 16 and 32 producers are asked for 600 samples per second each"
SECONDS = 5.0


def measure_producers(quick: bool) -> Mapping[str, Measured]:
    """The least of what is reached with as many threads of the broker as in the paper, a topic each."""
    if not HOME:
        raise LabError(NEEDS)
    counts, rates = ((2,), (600,)) if quick else (COUNTS, RATES)
    threads = THREADS[:1] if quick else THREADS
    table = effective(counts=counts, rates=rates, seconds=1.0 if quick else SECONDS, threads=threads)
    judged = [
        one["reached"] / one["asked"]
        for one in table
        if one["threads"] == list(THREADS[0])
        and one["layout"] == "a topic each"
        and one["asked"] == max(rates)
        and (quick or one["producers"] >= FROM)
    ]
    config = {"seconds": SECONDS, "table": table}
    return {REACHED: Measured(min(judged), (min(judged), max(judged)), config)}


# --- nothing lost, nothing twice ----------------------------------------------------------------------------------


def measure_lost(quick: bool) -> Mapping[str, Measured]:
    """Four replicas at four rates; the broker is killed and comes back, then the run is killed and resumed."""
    if quick:
        return {}
    steps, away_s = 200, 10.0
    with brought_up() as broker, tempfile.TemporaryDirectory(prefix="farflung-kafka-") as scratch:
        broker.make("readings", WORKERS)
        folder = Path(scratch)
        _disturbed(broker, folder, steps, away_s)
        wrong = 0
        for rank in range(WORKERS):
            count = Counter(place for places in used(folder, rank).values() for place in places)
            wanted = {(rank, offset) for offset in range(STEP_SAMPLES * steps)}
            wrong += len(wanted ^ count.keys()) + sum(times - 1 for times in count.values())
    config = {"workers": WORKERS, "steps": steps, "samples_per_step": STEP_SAMPLES, "away_s": away_s}
    return {LOST: Measured(float(wrong), (float(wrong), float(wrong)), config)}


def _disturbed(broker: Broker, folder: Path, steps: int, away_s: float) -> None:
    stream = f"tests.logged_stream:logged({str(folder)!r}, servers={broker.servers!r}, topic='readings')"
    work = ["--workload", "synthetic/quadratic"]
    every = steps // 4
    train = [
        "-m", "farflung", "train", *work, "--workers", str(WORKERS), "--batch-size", str(STEP_SAMPLES),
        "--steps", str(steps), "--stream", stream, "--checkpoint-every", str(every), "--evaluate-every", "0",
        "--out", str(folder / "run"),
    ]  # fmt: skip
    produce = [
        str(PRODUCE), *work, "--servers", broker.servers, "--topic", "readings", "--devices", str(WORKERS), "--rate",
    ]  # fmt: skip
    with _python(*train) as first:
        few = str(STEP_SAMPLES * (every + every // 4))
        with _python(*produce, "300", "--samples", few) as source:
            source.communicate()
        _until(first, every)
        with _python(*produce, "80", "120", "160", "200") as source:
            _until(first, 2 * every)
            broker.kill()
            assert first.stderr is not None
            while select.select([first.stderr], [], [], away_s)[0] and first.stderr.readline():
                pass
            broker.start_again()
            _until(first, 3 * every)
            first.kill()
            with _python("-m", "farflung", "train", "--resume", str(folder / "run")) as again:
                _, said = again.communicate()
                if again.returncode != 0:
                    raise RuntimeError(f"the resumed run failed: {said}")
            source.send_signal(signal.SIGINT)


def _python(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *args],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _until(process: subprocess.Popen[str], step: int) -> None:
    """Waits for the checkpoint of a step."""
    stream: IO[str] | None = process.stderr
    assert stream is not None
    said = []
    for line in stream:
        said.append(line)
        if f"step-{step:08d}" in line:
            return
    raise RuntimeError(f"the run ended before step {step}: {''.join(said)}")


CANARIES = ("preset scadles",)
BENCHMARK = Benchmark(
    Path(__file__).parent,
    [
        Group((SPEED,), measure_speed, "measured", 3.0, CANARIES),
        Group((REACHED,), measure_producers, "measured", 9.0, CANARIES),
        Group((LOST,), measure_lost, "measured", 2.0, CANARIES),
    ],
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
