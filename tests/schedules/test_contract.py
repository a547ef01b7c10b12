"""What every schedule promises, tried on a table of all of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch

from farflung.schedules import (
    SCHEDULES,
    AdaComm,
    Delayed,
    DiLoCo,
    LocalSGD,
    Pipelined,
    PostLocalSGD,
    Priority,
    StreamingDiLoCo,
    Synchronous,
)
from farflung.schedules.merges import Replace
from farflung.types import Bucket, Merge, Schedule, SharedStats, State, TensorSpec, Transfer

BUCKETS = tuple(
    Bucket(index, TensorSpec((numel,), dtype))
    for index, (numel, dtype) in enumerate([(100, torch.float32), (7, torch.float64), (3000, torch.float32)])
)
STEPS = 40


@dataclass(frozen=True)
class Row:
    """One schedule to try: adding a schedule is adding a row.

    Args:
      schedule: with the options to try it with.
      lag: the most steps that pass between a transfer's start and its due step.
      every: the most steps that pass between two transfers of a bucket.
    """

    schedule: Schedule
    lag: int = 0
    every: int = 1


ROWS: dict[str, Row] = {
    "adacomm": Row(AdaComm(sync_every=9, interval_s=1.0), every=9),
    "adacomm (basic)": Row(AdaComm(sync_every=9, interval_s=0.5, rule="basic"), every=9),
    "delayed": Row(Delayed(), lag=4),
    "delayed (auto)": Row(Delayed(delay="auto", max_delay=8), lag=8),
    "delayed (at once)": Row(Delayed(delay=0)),
    "delayed (of blocks)": Row(Delayed(delay=7, period=3, pull=0.1), lag=7, every=3),
    "delayed (warmed up)": Row(Delayed(warmup=10), lag=4),
    "delayed (swapped)": Row(Delayed(pull="swap"), lag=4),
    "delayed (swapped, auto)": Row(Delayed(delay="auto", max_delay=8, pull="swap"), lag=8),
    "delayed (swapped, in blocks)": Row(Delayed(delay=7, period=3, pull="swap"), lag=7, every=3),
    "diloco": Row(DiLoCo(sync_every=8), every=8),
    "diloco (warmed up)": Row(DiLoCo(sync_every=8, warmup=20), every=8),
    "local_sgd": Row(LocalSGD(), every=8),
    "pipelined": Row(Pipelined(), lag=1),
    "pipelined (corrected)": Row(Pipelined(correction=0.04), lag=1),
    "pipelined (predicted)": Row(Pipelined(predict=True), lag=1),
    "pipelined (warmed up)": Row(Pipelined(width=4, warmup=10), lag=3),
    "priority": Row(Priority()),
    "priority (traced)": Row(Priority(order="tac")),
    "post_local_sgd": Row(PostLocalSGD(warmup=11, sync_every=7), every=7),
    "streaming_diloco": Row(StreamingDiLoCo(sync_every=12, fragments=3, delay=2), lag=2, every=12),
    "streaming_diloco (of one fragment)": Row(
        StreamingDiLoCo(sync_every=6, fragments=1, delay=5), lag=5, every=6
    ),
    "synchronous": Row(Synchronous()),
}


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> Row:
    return ROWS[request.param]


def stats(step: int) -> SharedStats:
    return SharedStats(step, loss=1.0 / (1 + step), weight=4.0)


def run(schedule: Schedule, buckets: tuple[Bucket, ...] = BUCKETS) -> list[list[Transfer]]:
    """What it plans, told of each exchange when that is due, with the times it asks for."""
    state, parts = schedule.init(), schedule.build_units(buckets)
    plans: list[list[Transfer]] = []
    due: dict[int, list[SharedStats]] = {}
    for step in range(STEPS):
        transfers = schedule.plan(state, parts, step)
        plans.append(transfers)
        if transfers:
            told = stats(step)
            if schedule.needs_times(state, step):
                told = replace(told, elapsed_s=0.1 * step, step_s=0.1, exchange_s=0.55 if step < 20 else 0.15)
            due.setdefault(transfers[0].merge_step, []).append(told)
        for told in due.pop(step, []):
            state = schedule.update_state(state, told)
    return plans


def moved(transfers: list[Transfer]) -> list[int]:
    """The numbers of the buckets."""
    return [bucket.index for transfer in transfers for bucket in transfer.unit.buckets]


def test_the_table_has_every_schedule() -> None:
    assert {name.split(" ")[0] for name in ROWS} == set(SCHEDULES)
    for name, row in ROWS.items():
        assert isinstance(row.schedule, SCHEDULES[name.split(" ")[0]])  # type: ignore[arg-type]


def test_every_merge_it_names_is_carried_out_by_something(row: Row) -> None:
    assert row.schedule.merges
    assert all(isinstance(merge, Merge) for merge in row.schedule.merges)


def test_it_plans_no_merge_that_it_does_not_name(row: Row) -> None:
    named = {type(merge) for merge in row.schedule.merges}
    assert {type(transfer.merge) for transfers in run(row.schedule) for transfer in transfers} <= named


def test_all_ranks_plan_alike(row: Row) -> None:
    torch.manual_seed(1)
    first = run(row.schedule)
    torch.manual_seed(2)
    assert run(row.schedule) == first


def test_each_bucket_is_carried_often_enough_and_once_a_step(row: Row) -> None:
    last = dict.fromkeys(range(len(BUCKETS)), -1)
    parts = list(row.schedule.build_units(BUCKETS))
    assert sorted(b.index for part in parts for b in part.buckets) == list(range(len(BUCKETS)))
    assert all(bucket == BUCKETS[bucket.index] for part in parts for bucket in part.buckets)
    for step, transfers in enumerate(run(row.schedule)):
        order = [parts.index(transfer.unit) for transfer in transfers]
        assert order == sorted(set(order))
        for bucket in moved(transfers):
            assert step - last[bucket] <= row.every
            last[bucket] = step
    assert all(STEPS - 1 - step < row.every for step in last.values())


def test_nothing_is_due_before_it_starts_or_too_late(row: Row) -> None:
    for step, transfers in enumerate(run(row.schedule)):
        for transfer in transfers:
            assert step <= transfer.merge_step <= step + row.lag


def test_it_is_late_where_a_result_is_due_at_a_later_step(row: Row) -> None:
    due = [transfer.merge_step > step for step, plan in enumerate(run(row.schedule)) for transfer in plan]
    assert row.schedule.has_late_results == any(due)


def test_results_of_a_bucket_are_due_in_the_order_they_started(row: Row) -> None:
    for bucket in range(len(BUCKETS)):
        due = [t.merge_step for transfers in run(row.schedule) for t in transfers if bucket in moved([t])]
        assert due == sorted(due)


def test_the_state_is_a_value(row: Row) -> None:
    state: State = row.schedule.init()
    parts = row.schedule.build_units(BUCKETS)
    for step in range(5):
        kept = copy.deepcopy(state)
        first = row.schedule.plan(state, parts, step)
        assert row.schedule.plan(state, parts, step) == first
        after = row.schedule.update_state(state, stats(step))
        assert state == kept
        assert row.schedule.update_state(kept, stats(step)) == after
        state = after


def test_it_plans_for_any_number_of_buckets(row: Row) -> None:
    for count in (0, 1, 3):
        for transfers in run(row.schedule, BUCKETS[:count]):
            assert set(moved(transfers)) <= set(range(count))


def test_synchronous_is_every_bucket_at_every_step_due_at_once() -> None:
    for step, transfers in enumerate(run(Synchronous())):
        assert transfers == [Transfer(bucket, step, Replace()) for bucket in BUCKETS]
