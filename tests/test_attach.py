"""farflung in a user's own loop does what DistributedDataParallel does there, bit for bit at two ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

import farflung
from tests import attach_jobs
from tests.pool import Pool


@pytest.mark.parametrize("loop", attach_jobs.LOOPS)
def test_a_loop_ends_as_under_ddp(pool: Pool, loop: str) -> None:
    ends = pool.run(2, "tests.attach_jobs.compare", loop=loop)
    assert {end["ours"] for end in ends} == {end["theirs"] for end in ends}
    assert len({end["ours"] for end in ends}) == 1


def test_a_compiled_model(pool: Pool) -> None:
    ends = pool.run(2, "tests.attach_jobs.compare", loop="plain", compiled=True)
    assert len({end["ours"] for end in ends}) == 1
    assert ends[0]["ours"] == ends[0]["theirs"]


def test_all_start_as_rank_0(pool: Pool) -> None:
    assert len(set(pool.run(2, "tests.attach_jobs.starts_alike"))) == 1


def test_running_statistics_are_averaged_for_evaluation_only(pool: Pool) -> None:
    one, other = pool.run(2, "tests.attach_jobs.averages_buffers")
    assert torch.equal(one["mean"], other["mean"])
    assert torch.allclose(one["mean"], (one["own"] + other["own"]) / 2)
    assert not torch.equal(one["own"], other["own"])
    assert one["kept"]
    assert other["kept"]


def test_a_backward_pass_that_broke_off_is_named(pool: Pool) -> None:
    said = pool.run(2, "tests.attach_jobs.breaks_off")
    assert "broke off on rank 1" in said[0]
    assert "broke off on rank 1" in said[1]


def test_one_replica_needs_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    handle = farflung.attach(model := attach_jobs.Net(), torch.optim.SGD(model.parameters(), lr=0.1))
    attach_jobs.plain(model, handle._optimizer, handle.no_sync, 0)
    assert handle.step == attach_jobs.STEPS
    handle.finish()


PIPELINED = ["pipelined(2)", "pipelined(3, warmup=2, correction=0.1)"]
DELAYED = ["delayed(2)", "delayed(3, 2)", "delayed('auto')"]
LATE = [
    *itertools.product(PIPELINED, ["plain", "accumulated", "two_backwards", "caught"]),
    *itertools.product(DELAYED, ["plain", "accumulated", "two_backwards", "caught", "scaled_alone"]),
]


@pytest.mark.parametrize(("how", "loop"), LATE)
def test_late_schedules_in_a_loop_of_ones_own(pool: Pool, how: str, loop: str) -> None:
    ends = pool.run(2, "tests.attach_jobs.delayed", how=how, loop=loop)
    assert ends[0]["end"] == ends[1]["end"]
    assert ends[0]["averaged"] == ends[1]["averaged"]
    if "auto" not in how:  # that depends on the clock, and may be no delay
        assert (ends[0]["own"] == ends[1]["own"]) == how.startswith("pipelined")
    for end in ends:
        assert end["own"] == end["after"]


@pytest.mark.parametrize("how", ["pipelined(3)", "delayed(3, 2)"])
def test_a_loop_goes_on_with_exchanges_under_way(pool: Pool, how: str) -> None:
    whole = pool.run(2, "tests.attach_jobs.delayed", how=how, loop="plain")
    parts = pool.run(2, "tests.attach_jobs.delayed", how=how, loop="plain", cut=3)
    assert [end["own"] for end in parts] == [end["own"] for end in whole]
    assert [end["end"] for end in parts] == [end["end"] for end in whole]
