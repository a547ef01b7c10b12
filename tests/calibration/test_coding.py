"""A stopwatch around what exchanges compute, on a clock that the work moves itself; and a machine that is shared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from farflung.calibration import (
    CodingTask,
    ProcessorLoad,
    build_coding_tasks,
    build_ladder,
    measure_coding,
    measure_message_cpu_costs,
    run_neighbour_processes,
    select_specs,
)
from farflung.errors import BadInput, ConfigError, RunLost
from farflung.reducers import CodecReducer
from farflung.types import (
    Channel,
    CodecState,
    Contribution,
    ParameterSpan,
    Reducer,
    ReduceResult,
    Seeds,
    StateSlot,
    TensorSpec,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Slow(Reducer):
    """Computes a second for each number of the tensor, and twice as long in the first exchanges."""

    clock: Clock
    exchanges: int = 0

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        del spec, seeds
        return CodecState()

    async def reduce(
        self, channel: Channel, slot: StateSlot, contribution: Contribution, *, step: int
    ) -> ReduceResult:
        del slot, step
        self.exchanges += 1
        numel = contribution.tensor.numel()

        def pass_by() -> None:
            self.clock.now += numel * (2.0 if self.exchanges <= 4 else 1.0)

        self.clock.now += 1e6  # no charge came before it
        channel.charge("encode", numel, "slow(speed=2)")
        pass_by()
        channel.charge("add", numel // 2)
        pass_by()
        channel.reserve_hops(1)
        self.clock.now += 1e6
        return ReduceResult(contribution.tensor, 1.0, contribution.metadata)


def test_what_is_computed_is_timed_by_what_it_is_charged_as() -> None:
    clock = Clock()
    begun: list[str] = []
    specs = [TensorSpec((8,)), TensorSpec((4,))]
    reducers = (Slow(clock), Slow(clock))  # the same costs twice: all of them count
    found = measure_coding(
        [CodingTask("slow", reducers)], specs, rounds=3, clock=clock, on_begin=begun.append
    )
    assert found == {
        ("encode", "slow(speed=2)"): ((4, 4.0), (8, 8.0)),
        ("add", ""): ((2, 4.0), (4, 8.0)),
    }
    assert begun == ["slow"]


def test_every_codec_and_reducer_can_be_measured() -> None:
    """In each way that it can travel; what is charged is measured by construction."""
    tasks = build_coding_tasks()
    assert {"identity", "int8", "topk", "powersgd", "shared_scale_qsgd"} <= {task.name for task in tasks}
    found = measure_coding(tasks, build_ladder(1 << 10), rounds=1)
    assert {"int8", "topk", "powersgd", ""} <= {method for _, method in found}
    assert all(seconds > 0 for points in found.values() for _, seconds in points)


def test_kinds_of_exchanges_that_come_seldom_are_waited_for() -> None:
    tasks = build_coding_tasks(reducers=["gradiveq(sample_steps=20,sample_bits=None)"])
    found = measure_coding(tasks, build_ladder(1 << 10), rounds=1)
    assert {"encode", "decode", "hash", "learn", "pca"} <= {
        operation for operation, method in found if method
    }


def test_what_is_measured() -> None:
    (plain, asked) = build_coding_tasks(["topk(density=0.1)"])
    assert (plain.name, asked.name) == ("identity", "topk(density=0.1)")
    assert [reducer.phases for reducer in asked.reducers if isinstance(reducer, CodecReducer)] == [
        "gather",
        "two",
        "hops",
    ]
    assert [task.name for task in build_coding_tasks(reducers=["powersgd(rank=4)"])] == [
        "identity",
        "powersgd(rank=4)",
    ]
    with pytest.raises(BadInput, match="unknown codec 'top'"):
        build_coding_tasks(["top"])


def test_sizes() -> None:
    assert [spec.numel for spec in build_ladder(1 << 14)] == [1 << 10, 1 << 12, 1 << 14]
    assert build_ladder(1 << 12)[-1].spans == (ParameterSpan((64, 64), 0),)
    bucket = TensorSpec((5000,), spans=(ParameterSpan((50, 100), 0),))
    assert select_specs([bucket, TensorSpec((1 << 30,))])[-1] is bucket
    assert [spec.numel for spec in select_specs([bucket])] == [
        1 << 10,
        5000,
    ]  # 4096 is too close to the bucket
    assert [spec.numel for spec in select_specs([TensorSpec((7000,))])] == [1 << 10, 1 << 12, 7000]


def test_messages_on_real_sockets() -> None:
    found = measure_message_cpu_costs(rounds=1)
    assert 0 < found.message_s < 0.1
    assert 0 < found.copy_s_per_byte < 1e-6
    assert 0 <= found.encrypt_s_per_byte < 1e-6


@pytest.mark.parametrize(
    ("sharing", "turns", "cores"),
    [
        (ProcessorLoad(1, 1, 8), 1.0, 2.0),
        (ProcessorLoad(1, 1, 1), 1.0, 1.0),
        (ProcessorLoad(2, 1, 2), 1.0, 1.0),
        (ProcessorLoad(4, 1, 2), 2.0, 0.5),
        (ProcessorLoad(1, 3, 4), 1.0, 2.0),
        (ProcessorLoad(1, 4, 4), 1.0, 1.6),
    ],
)
def test_turns_and_cores(sharing: ProcessorLoad, turns: float, cores: float) -> None:
    assert (sharing.slowdown, sharing.cores) == (turns, cores)


def test_threads_that_would_take_turns_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--threads 2: 4 replicas .* 4 processors: give each one"):
        ProcessorLoad(4, 2, 4)


def test_company_works_and_ends(tmp_path: Path) -> None:
    def work() -> Iterator[None]:
        while True:
            (tmp_path / str(os.getpid())).touch()
            yield

    with run_neighbour_processes(2, work):
        while len([*tmp_path.iterdir()]) < 2:
            os.sched_yield()
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


def test_company_that_fails_is_noticed() -> None:
    def work() -> Iterator[None]:
        yield from ()

    def measure() -> None:
        with run_neighbour_processes(1, work):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)

    with pytest.raises(RunLost, match="1 of 1 processes"):
        measure()
