"""Streams through the loop, in virtual time: nothing lost, exact times, true counts."""

from __future__ import annotations

import json
import re
import runpy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from farflung.config import Training
from farflung.data import InMemory
from farflung.decisions import DecisionLog, read_decisions
from farflung.errors import ConfigError, DataError, DeadlinePassed
from farflung.faults import FaultPlan
from farflung.loop import Checkpoints, Replica
from farflung.recipes import parse_recipe
from farflung.sim import LinkModel, VirtualWorld
from farflung.streams import RateLimited, iterator
from farflung.telemetry import Event, Telemetry
from farflung.types import (
    Arrivals,
    Batch,
    Channel,
    Payload,
    SampleIds,
    Samples,
    Sharing,
    Stream,
    TensorSpec,
)
from farflung.workloads import Quadratic
from tests.fed import Fed
from tests.helpers import PATIENCE_S

SAMPLES = 64
LINK = LinkModel()


class Streamed:
    """Replicas that train a small quadratic from streams.

    Args:
      streams: what makes each one's.
      schedule: as text.
      sharing: what makes each one's.
      steps: how many.
      log: where decisions are kept.
      plan: of what goes wrong.
      folder: of checkpoints.
      seconds_per_sample: of a forward pass; a backward pass takes twice that.
      deadline_s: of messages.
      link: between any two.
      rates: what becomes of the learning rate.
      scaling: how it follows the size of a batch.
    """

    def __init__(
        self,
        *streams: Callable[[], Stream],
        schedule: str = "synchronous",
        sharing: Callable[[], Sharing] | None = None,
        steps: int = 6,
        log: DecisionLog | None = None,
        plan: FaultPlan | None = None,
        folder: Path | None = None,
        seconds_per_sample: float = 0.0,
        deadline_s: float = 60.0,
        link: LinkModel = LINK,
        rates: str = "constant",
        scaling: str = "none",
    ) -> None:
        size = len(streams)
        self.world = VirtualWorld(
            size, link, seconds_per_sample, decisions=log, faults=plan, deadline_s=deadline_s
        )
        self.events: list[list[Event]] = [[] for _ in range(size)]
        self.replicas = []
        for rank, make in enumerate(streams):
            parts = (
                parse_recipe("synchronous")
                .with_components(schedule=schedule, scaling=scaling)
                .build_components(3)
            )
            parts = replace(parts, stream=make())
            if sharing is not None:
                parts = replace(parts, sharing=sharing())
            self.replicas.append(
                Replica(
                    self.world.runtimes[rank],
                    Quadratic(dim=6, samples=SAMPLES),
                    Training(steps, 4, 0.05, seed=3, learning_rate_schedule=rates),
                    parts,
                    Telemetry(rank, self.events[rank].append),
                    None if folder is None else Checkpoints(folder, rank, size, is_leader=rank == 0),
                )
            )

    def whole(self) -> Streamed:
        self.summaries = self.world.run([replica.run() for replica in self.replicas])
        return self

    def steps(self, count: int) -> Streamed:
        async def go(replica: Replica) -> None:
            for _ in range(count):
                await replica.step()

        self.world.run([go(replica) for replica in self.replicas])
        return self

    def of_steps(self, key: str, rank: int = 0) -> list[Any]:
        return [event[key] for event in self.events[rank] if event["event"] == "step"]

    def weights(self, rank: int = 0) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.replicas[rank].model.parameters()]).clone()


class Counted(InMemory):
    """Steps of so many samples.

    Args:
      counts: of each step.
    """

    has_random_access = False

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts

    def poll(self, time_s: float, step: int) -> Arrivals:
        return Arrivals(torch.arange(SAMPLES), count=self._counts[step])


class Greedy(Stream):
    """Everything is there after a step or two, and all of it is shown; the 4 oldest are trained on."""

    has_random_access = False

    def __init__(self) -> None:
        self.held: list[int] = []
        self.arrived = 0
        self.used: list[int] = []

    def start(self, context: Any) -> Samples:
        data: Samples = context.data
        return data

    def poll(self, time_s: float, step: int) -> Arrivals:
        del time_s, step
        new = range(self.arrived, min(self.arrived + 10, SAMPLES))
        self.held += new
        self.arrived += len(new)
        return Arrivals(torch.tensor(self.held), None, 4)

    def commit(self, ids: SampleIds, *, step: int) -> None:
        del step
        for index in ids.tolist():
            self.held.remove(index)
        self.used += ids.tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"held": torch.tensor(self.held), "arrived": self.arrived}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held, self.arrived = state["held"].tolist(), state["arrived"]

    def close(self) -> None:
        pass


# --- nothing is lost --------------------------------------------------------------------------------------------


def test_what_arrives_between_steps_is_trained_on_later() -> None:
    run = Streamed(Greedy, Greedy, steps=16).whole()
    for replica in run.replicas:
        assert isinstance(replica.components.stream, Greedy)
        assert replica.components.stream.used == list(range(SAMPLES))


def test_a_step_that_is_broken_off_loses_no_sample() -> None:
    run, unbroken = Streamed(Greedy), Streamed(Greedy).steps(5)
    (replica,) = run.replicas
    loss = replica.workload.compute_losses

    def broken(model: Any, batch: Batch) -> torch.Tensor:
        del model, batch
        raise DataError("out of memory")

    async def go() -> None:
        for step in range(6):
            replica.workload.compute_losses = broken if step == 2 else loss  # type: ignore[method-assign]
            if step == 2:
                with pytest.raises(DataError, match="out of memory"):
                    await replica.step()
            else:
                await replica.step()

    run.world.run([go()])
    assert torch.equal(run.weights(), unbroken.weights())
    assert isinstance(replica.components.stream, Greedy)
    assert replica.components.stream.used == list(range(20))


def test_a_checkpoint_in_the_middle_of_a_step_keeps_its_samples(tmp_path: Path) -> None:
    unbroken = Streamed(Greedy).steps(6)
    run = Streamed(Greedy, folder=tmp_path).steps(3)
    (replica,) = run.replicas

    async def fetched() -> None:
        await replica.batch_loader.load_batch(replica.completed_steps)
        await replica.save()

    run.world.run([fetched()])
    again = Streamed(Greedy, folder=tmp_path)
    again.replicas[0].resume(3)
    again.steps(3)
    assert torch.equal(again.weights(), unbroken.weights())
    assert isinstance(again.replicas[0].components.stream, Greedy)
    assert again.replicas[0].components.stream.used == list(range(12, 24))


@pytest.mark.parametrize("schedule", ["synchronous", "pipelined(width=2)", "delayed(delay=2, period=2)"])
def test_a_resumed_run_goes_on_with_what_was_held(schedule: str, tmp_path: Path) -> None:
    streams: list[Callable[[], Stream]] = [lambda: RateLimited([8.0, 40.0], backlog=30)] * 2
    unbroken = Streamed(*streams, schedule=schedule).whole()
    run = Streamed(*streams, schedule=schedule, folder=tmp_path).steps(3)
    run.world.run([replica.save() for replica in run.replicas])
    again = Streamed(*streams, schedule=schedule, folder=tmp_path)
    for replica in again.replicas:
        replica.resume(3)
    again.whole()
    for rank in range(2):
        assert torch.equal(again.weights(rank), unbroken.weights(rank))
    assert again.summaries[0].samples == unbroken.summaries[0].samples == 48


# --- time -------------------------------------------------------------------------------------------------------


def test_steps_begin_when_their_samples_have_arrived() -> None:
    run = Streamed(*[lambda: RateLimited([4.0, 16.0])] * 2, steps=4, seconds_per_sample=0.125).whole()
    # A batch of 4 takes 1 s to arrive at the slower, and 1.5 s to compute: it waits once, and then they are there.
    assert run.of_steps("t", 0) == [2.5, 4.0, 5.5, 7.0]
    assert run.of_steps("data_s", 0) == [1.0, 0.0, 0.0, 0.0]
    assert run.of_steps("t", 1) == [2.5, 4.0, 5.5, 7.0]
    assert run.of_steps("data_s", 1) == [0.25, 0.0, 0.0, 0.0]
    assert run.of_steps("buffered", 1) == [4, 36, 56, 76]  # 16 per second, less those used
    row = 6 * 4 + 8
    assert run.of_steps("buffered_nbytes", 1) == [4 * row, 36 * row, 56 * row, 76 * row]
    assert run.of_steps("dropped", 1) == [0, 0, 0, 0]
    assert run.summaries[0].time_s.data_wait == 1.0


def test_the_slowest_stream_sets_the_pace_where_it_is_slower_than_the_step() -> None:
    run = Streamed(*[lambda: RateLimited([2.0, 16.0])] * 2, steps=3, seconds_per_sample=0.0625).whole()
    assert run.of_steps("t", 0) == [2.75, 4.75, 6.75]
    assert run.of_steps("data_s", 0) == [2.0, 1.25, 1.25]


def test_a_step_on_all_that_came_is_as_large_as_the_step_before_was_long() -> None:
    run = Streamed(lambda: RateLimited(8.0, least=2, most=64), steps=4, seconds_per_sample=0.125).whole()
    # 2 samples after 0.25 s; computed for 0.75 s, in which 6 come; then for 2.25 s, in which 18 come; 6.75 s, 54.
    assert run.of_steps("batch") == [2, 6, 18, 54]
    assert run.of_steps("t") == [1.0, 3.25, 10.0, 30.25]
    assert run.summaries[0].samples == 80


def test_a_truncated_buffer_does_not_grow() -> None:
    made = {
        "persistence": lambda: RateLimited(16.0),
        "truncation": lambda: RateLimited(16.0, policy="truncation"),
    }
    run = {policy: Streamed(make, steps=6, seconds_per_sample=0.125).whole() for policy, make in made.items()}
    # A step of 4 samples takes 1.5 s, in which 24 come.
    assert run["persistence"].of_steps("buffered") == [4, 24, 44, 64, 84, 104]
    assert run["truncation"].of_steps("buffered") == [4, 24, 24, 24, 24, 24]
    assert run["truncation"].of_steps("dropped") == [0, 20, 40, 60, 80, 100]


def test_windows_make_all_replicas_wait_alike() -> None:
    streams = [lambda: RateLimited([8.0, 32.0], window_s=2.0)] * 2
    run = Streamed(*streams, steps=3).whole()
    assert [run.of_steps("batch", rank) for rank in range(2)] == [[16] * 3, [64] * 3]
    assert run.of_steps("t", 0) == run.of_steps("t", 1) == [2.0, 4.0, 6.0]


# --- unlike batches ---------------------------------------------------------------------------------------------


def test_unlike_batches_count_as_one_large_batch() -> None:
    run = Streamed(*[lambda: RateLimited([2.0, 6.0], least=1, most=9)] * 2, steps=1)
    work = run.replicas[0].workload
    begin = run.weights()
    drawn: list[Batch] = []
    loss = work.compute_losses

    def kept(model: Any, batch: Batch) -> torch.Tensor:
        drawn.append(batch)
        return loss(model, batch)

    for replica in run.replicas:
        replica.workload.compute_losses = kept  # type: ignore[method-assign]
        stream = replica.components.stream
        stream.poll(-1.0, -1)  # so there are 2 and 6 when the first step asks
    run.steps(1)
    assert sorted(len(batch) for batch in drawn) == [2, 6]
    pooled = Batch(
        torch.cat([batch.inputs for batch in drawn]), torch.cat([batch.targets for batch in drawn])
    )
    model = Quadratic(dim=6, samples=SAMPLES).build_model(torch.Generator())
    with torch.no_grad():
        next(model.parameters()).copy_(begin)
    loss(model, pooled).mean().backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    assert torch.allclose(run.weights(), begin - 0.05 * gradient, atol=1e-6)
    assert run.of_steps("samples") == [8]


def test_a_stream_says_what_its_step_weighs() -> None:
    def fed(weight: float) -> Callable[[], Stream]:
        def make() -> Stream:
            stream = Fed(4, weight=weight)
            stream.put(*(range(4) if weight == 3.0 else range(4, 8)))
            return stream

        return make

    run = Streamed(fed(3.0), fed(1.0), steps=1)
    begin = run.weights()
    run.steps(1)
    own = []
    for rank, share in enumerate((range(4), range(4, 8))):
        alone = Quadratic(dim=6, samples=SAMPLES)
        model = run.replicas[rank].model
        with torch.no_grad():
            next(model.parameters()).copy_(begin)
        model.zero_grad()
        alone.compute_losses(
            model, alone.load_datasets()[0].take(torch.tensor(list(share)), train=True)
        ).mean().backward()
        own.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
    moved = (begin - 0.05 * (3 * own[0] + own[1]) / 4).tolist()
    run = Streamed(fed(3.0), fed(1.0), steps=1).steps(1)
    assert run.weights().tolist() == pytest.approx(moved, abs=1e-6)


@pytest.mark.parametrize(
    "schedule", ["synchronous", "pipelined(width=3)", "delayed(delay=2)", "delayed(delay=4, period=4)"]
)
def test_all_samples_are_counted_in_the_end(schedule: str) -> None:
    run = Streamed(
        *[lambda: RateLimited([9.0, 31.0], least=1, most=7)] * 2,
        schedule=schedule,
        steps=7,
        seconds_per_sample=0.0625,
    ).whole()
    used = sum(run.of_steps("batch", 0)) + sum(run.of_steps("batch", 1))
    assert used != 2 * 7 * 4
    assert [summary.samples for summary in run.summaries] == [used, used]
    assert run.of_steps("samples", 0) == run.of_steps("samples", 1)


@pytest.mark.parametrize("schedule", ["synchronous", "pipelined(width=2)"])
def test_a_learning_rate_by_samples_follows_the_true_count(schedule: str) -> None:
    run = Streamed(
        *[lambda: RateLimited([9.0, 31.0], least=1, most=7)] * 2,
        schedule=schedule,
        seconds_per_sample=0.0625,
        rates="linear(unit='samples')",
    ).whole()
    planned = 6 * 2 * 4
    known = [0, *run.of_steps("samples")[:-1]]  # what all had heard of before the step
    assert run.of_steps("learning_rate") == pytest.approx(
        [0.05 * max(0.0, 1 - count / planned) for count in known]
    )
    assert torch.equal(run.weights(0), run.weights(1))


def test_nothing_more_rides_where_batches_are_alike() -> None:
    def bytes_of(stream: str) -> int:
        work = Quadratic(dim=6, samples=SAMPLES)
        training = Training(steps=1, batch_size=4, learning_rate=0.05)
        world = VirtualWorld(2)
        parts = parse_recipe("synchronous").with_components(stream=stream)
        replicas = [
            Replica(r, work, training, parts.build_components(0), Telemetry(r.comm.rank))
            for r in world.runtimes
        ]

        async def one(replica: Replica) -> None:
            await replica.step()

        world.run([one(replica) for replica in replicas])
        return replicas[0].engine.sent_nbytes

    assert bytes_of("rate(5)") - bytes_of("in_memory") == 2 * 8 - 8


class Telling(RateLimited):
    """Tells how fast it is."""

    def report_metadata(self) -> Mapping[str, float]:
        return {"rates": self._course.get_rate(0.0) if hasattr(self, "_course") else 0.0}


def test_a_stream_tells_numbers_of_its_own() -> None:
    run = Streamed(*[lambda: Telling([9.0, 31.0])] * 2)
    found = []

    async def go(replica: Replica) -> None:
        found.append((await replica.step()).stats)

    run.world.run([go(replica) for replica in run.replicas])
    for stats in found:
        assert stats is not None
        assert stats.sums == {"samples": 8.0, "rates": 40.0}


# --- other threads ----------------------------------------------------------------------------------------------


def test_virtual_time_stands_still_for_another_thread() -> None:
    stream = Fed(4)
    run = Streamed(lambda: stream, steps=3, seconds_per_sample=0.125)
    feeder = stream.feed(SAMPLES, [1, 3, 2, 2, 4])
    run.whole()
    feeder.join()
    assert run.of_steps("t") == [1.5, 3.0, 4.5]
    assert run.of_steps("data_s") == [0.0, 0.0, 0.0]
    assert stream.used == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_source_that_breaks_ends_the_run_and_the_stream() -> None:
    stream = Fed(4)
    run = Streamed(lambda: stream)
    thread = threading.Thread(target=lambda: stream.fail(DataError("camera: nothing for 30 s")))
    thread.start()
    with pytest.raises(DataError, match="camera: nothing for 30 s"):
        run.whole()
    thread.join()
    assert stream._closed


def test_the_iterator_in_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "streams.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    readings = runpy.run_path(str(tmp_path / "example.py"))["readings"]
    monkeypatch.chdir(tmp_path)
    rows = Quadratic(dim=6, samples=SAMPLES).load_datasets()[0].get_rows(torch.arange(14))
    lines = [
        json.dumps({"inputs": inputs, "targets": target}) + "\n"
        for inputs, target in zip(rows.inputs.tolist(), rows.targets.tolist(), strict=True)
    ]
    path = tmp_path / "readings-0.jsonl"
    path.write_text("".join(lines)[:100])
    stream = iterator(readings, deadline_s=PATIENCE_S)
    run = Streamed(lambda: stream, steps=3)
    thread = threading.Timer(0.1, lambda: path.write_text("".join(lines)))
    thread.start()
    run.whole()
    thread.join()
    assert run.summaries[0].samples == 12
    assert stream.state_dict()["next"]["0"] >= 12
    assert next(readings(0, 1, 13))[0] == 13


# --- deadlines --------------------------------------------------------------------------------------------------

WATCHED = FaultPlan().slow(0, factor=1.0, at_s=0.0)
"""Changes nothing, but deadlines are watched."""


def test_waiting_for_data_counts_against_no_deadline() -> None:
    run = Streamed(
        *[lambda: RateLimited([0.5, 100.0, 100.0])] * 3,
        plan=WATCHED,
        deadline_s=2.0,
        steps=3,
        link=LinkModel(0.1),
    ).whole()
    # The others have sent theirs long before, and wait for one message, which takes 0.1 s.
    assert run.of_steps("t", 0) == [8.0, 16.0, 24.0]
    assert run.of_steps("t", 1) == [8.1, 16.1, 24.1]
    assert [summary.steps for summary in run.summaries] == [3, 3, 3]


@pytest.mark.parametrize("during", ["its wait for data", "its computation"])
def test_who_falls_silent_is_put_out_all_the_same(during: str) -> None:
    at_s = 5.0 if during == "its wait for data" else 8.5
    run = Streamed(
        *[lambda: RateLimited([0.5, 100.0])] * 2,
        plan=FaultPlan().hang(0, at_s=at_s),
        deadline_s=2.0,
        seconds_per_sample=0.25,
    )
    with pytest.raises(DeadlinePassed, match="lost rank 0"):
        run.whole()
    assert run.world.clock.time() >= at_s + 1.0
    assert run.world.clock.time() <= max(at_s, 8.0) + 2.0


# --- decisions --------------------------------------------------------------------------------------------------


def test_each_replica_keeps_its_decisions_and_makes_them_again_on_other_devices(tmp_path: Path) -> None:
    streams: list[Callable[[], Stream]] = [
        lambda: RateLimited([9.0, 31.0], least=1, most=7, backlog=9, full="drop_oldest")
    ] * 2
    log = DecisionLog(tmp_path / "decisions.jsonl")
    first = Streamed(*streams, seconds_per_sample=0.0625, log=log).whole()
    log.write()
    assert not (tmp_path / "decisions.jsonl").exists()
    assert sorted(file.name for file in (tmp_path / "decisions").iterdir()) == [
        "rank-0.jsonl",
        "rank-1.jsonl",
    ]
    for seconds in (0.0, 0.5):
        replay = read_decisions(tmp_path / "decisions.jsonl")
        again = Streamed(*streams, seconds_per_sample=seconds, log=DecisionLog(replay=replay)).whole()
        assert torch.equal(again.weights(), first.weights())
        assert [again.of_steps("batch", rank) for rank in range(2)] == [
            first.of_steps("batch", rank) for rank in range(2)
        ]
    other = Streamed(*streams, seconds_per_sample=0.5).whole()
    assert not torch.equal(other.weights(), first.weights())


# --- sharing ----------------------------------------------------------------------------------------------------


class ToTheNext(Sharing):
    """Every second step each replica sends its first rows to the next one, which trains on them too."""

    has_data_transfers = True

    def is_injection_due(self, step: int) -> bool:
        return step % 2 == 1

    async def inject_samples(self, channel: Channel, samples: Samples, rows: Batch, *, step: int) -> Batch:
        del samples, step
        hop = channel.reserve_hops(1)
        channel.send(Payload((rows.inputs[:1], rows.targets[:1])), (channel.rank + 1) % channel.size, hop)
        expect = tuple(TensorSpec.from_tensor(tensor[:1]) for tensor in (rows.inputs, rows.targets))
        inputs, targets = (await channel.recv((channel.rank - 1) % channel.size, hop, expect)).iter_tensors()
        return Batch(torch.cat([rows.inputs, inputs]), torch.cat([rows.targets, targets]))


@pytest.mark.parametrize(("schedule", "late"), [("synchronous", 0), ("pipelined(width=3)", 2)])
@pytest.mark.parametrize(
    ("scaling", "factor"), [("linear", lambda share: share), ("root", lambda share: share**0.5)]
)
def test_a_learning_rate_follows_the_size_of_the_batch_that_is_merged(
    schedule: str, late: int, scaling: str, factor: Callable[[float], float]
) -> None:
    run = Streamed(
        *[lambda: RateLimited([9.0, 31.0], least=1, most=7)] * 2,
        schedule=schedule,
        seconds_per_sample=0.0625,
        rates="linear",
        scaling=scaling,
    ).whole()
    taken = [sum(pair) for pair in zip(run.of_steps("batch", 0), run.of_steps("batch", 1), strict=True)]
    assert len(set(taken)) > 1
    scales = [1.0] * late + [factor(count / (2 * 4)) for count in taken]
    wanted = [0.05 * (1 - step / 6) * scale for step, scale in zip(range(6), scales, strict=False)]
    assert run.of_steps("learning_rate") == run.of_steps("learning_rate", 1) == pytest.approx(wanted)
    assert torch.equal(run.weights(0), run.weights(1))


def test_a_step_of_the_usual_size_has_the_usual_rate_after_a_larger_one() -> None:
    def stream(*counts: int) -> Callable[[], Stream]:
        return lambda: Counted(counts)

    run = Streamed(stream(4, 8, 4), stream(4, 4, 4), steps=3, scaling="linear").whole()
    assert run.of_steps("learning_rate") == pytest.approx([0.05, 0.075, 0.05])


def test_no_rate_is_scaled_where_the_optimizer_does_not_wait() -> None:
    with pytest.raises(ConfigError, match="--scaling: under Delayed"):
        Streamed(*[lambda: RateLimited(20.0)] * 2, schedule="delayed(delay=2)", scaling="linear")


@pytest.mark.parametrize("schedule", ["synchronous", "pipelined(width=2)"])
def test_rows_that_are_shared_are_trained_on(schedule: str) -> None:
    streams: list[Callable[[], Stream]] = [lambda: RateLimited(20.0)] * 3
    run = Streamed(*streams, sharing=ToTheNext, schedule=schedule, steps=4).whole()
    plain = Streamed(*streams, schedule=schedule, steps=4).whole()
    assert run.of_steps("batch") == [4, 5, 4, 5]
    assert run.summaries[0].samples == 3 * (4 + 5 + 4 + 5)
    nbytes = 2 * (6 * 4 + 8)  # two rounds of a row of 6 floats and its label
    assert run.summaries[0].bytes_sent - plain.summaries[0].bytes_sent == nbytes
    assert len({tuple(run.weights(rank).tolist()) for rank in range(3)}) == 1
    assert not torch.equal(run.weights(), plain.weights())
