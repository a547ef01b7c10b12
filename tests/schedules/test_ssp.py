"""A parameter server with bounded staleness: who may go on, what a replica reads, and what follows from the log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farflung.decisions import DecisionLog
from farflung.devices import DeviceProfile
from farflung.errors import ConfigError, DeadlinePassed, PeerLost
from farflung.faults import FaultPlan
from farflung.sim import LinkModel
from farflung.types import Batch, Decision
from farflung.workloads import Quadratic
from tests.helpers import same_bits
from tests.schedules.runs import APART, Pieces, Run, distance, pieces

SIZE, STEPS = 4, 24
LINK = LinkModel(0.01, 1e6)
FORWARD_S = 0.01 / 4
"""A step of four samples computes for 0.03 s."""
BOUNDS = [0, 1, 3, None]


class Counts(Quadratic):
    """Parameters that count how many updates of each replica are in them, in units of the learning rate."""

    rank = 0

    def model(self, generator: torch.Generator) -> nn.Module:
        return Pieces(self.dim, 1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        (counts,) = model.parameters()
        return -counts[self.rank].expand(len(batch))

    def metric(self, model: nn.Module, batch: Batch) -> Tensor:
        (counts,) = model.parameters()
        return counts.sum().expand(len(batch))


def with_slow(*factors: float) -> list[DeviceProfile]:
    """Devices that take so many times as long."""
    return [DeviceProfile(forward_s=FORWARD_S * factor) for factor in factors]


def counting(
    bound: int | None, devices: Sequence[DeviceProfile], link: LinkModel = LINK, **settings: Any
) -> Run:
    """Replicas that count from 0; an update of one adds 1."""
    settings = {"steps": STEPS, "learning_rate": float(len(devices)), **settings}
    run = Run(
        f"ssp({bound})",
        len(devices),
        link=link,
        workload=lambda: Counts(dim=len(devices), samples=64),
        settings=settings,
        around={"device": devices},
    )
    for rank, replica in enumerate(run.replicas):
        replica.workload.rank = rank  # type: ignore[attr-defined]
    return run


def arrivals(run: Run) -> list[int]:
    """Whose updates the server added, in its order."""
    return [int(str(d.value)) for d in run.world.decisions.entries if d.name == "update"]


def by_the_log(order: Sequence[int], bound: int | None, size: int, steps: int) -> list[list[list[int]]]:
    """What each replica reads at each of its clocks: how many updates of each are in it."""
    clocks, read = [0] * size, [[[0] * size] for _ in range(size)]
    for rank in order:
        clocks[rank] += 1
        lowest = min(clocks)
        for each, clock in enumerate(clocks):
            ahead = 0 if clock == steps else bound
            if len(read[each]) == clock and (ahead is None or clock - lowest <= ahead):
                read[each].append([*clocks])
    return read


def waits(run: Run, rank: int) -> list[float]:
    """Seconds for which a replica waited at each step."""
    return [float(str(event["exposed_s"])) for event in run.step_events(rank)]


SLOW = {"first": (4, 1, 1, 1), "last": (1, 1, 1.5, 4), "none": (1, 1, 1, 1)}


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("bound", BOUNDS)
def test_what_a_replica_reads_is_new_enough_and_follows_from_the_log(bound: int | None, slow: str) -> None:
    run = counting(bound, with_slow(*SLOW[slow]))
    read: list[list[list[int]]] = [[] for _ in range(SIZE)]
    run.steps(STEPS, before=lambda replica, _: read[replica.runtime.comm.rank].append(_counts(replica.model)))
    ends = [_counts(replica.model) for replica in run.replicas]
    order = arrivals(run)
    for rank, own in enumerate(read):
        for clock, counts in enumerate(own):
            assert counts[rank] == clock
            assert bound is None or min(counts) >= clock - bound
        assert [*own, ends[rank]] == by_the_log(order, bound, SIZE, STEPS)[rank]
    assert ends == [[STEPS] * SIZE] * SIZE


def _counts(model: nn.Module) -> list[int]:
    (counts,) = model.parameters()
    return [int(count) for count in counts]


@pytest.mark.parametrize("bound", [1, 2, 5])
def test_nobody_is_further_ahead_of_the_slowest_than_the_bound(bound: int) -> None:
    run = counting(bound, with_slow(1, 1, 4), LinkModel(0.01)).whole()
    clocks, most = [0] * 3, 0
    for rank in arrivals(run):
        most = max(most, clocks[rank] - min(clocks))
        clocks[rank] += 1
    assert most == bound
    fast, slow = (waits(run, rank) for rank in (1, 2))
    assert slow == pytest.approx([0.02] * STEPS)
    assert fast[:bound] == pytest.approx([0.02] * bound)
    assert sum(fast) == pytest.approx(sum(slow) + 0.09 * STEPS)


def test_without_a_bound_nobody_waits_for_another() -> None:
    run = counting(None, with_slow(1, 1, 4), LinkModel(0.01)).whole()
    for rank, step_s in ((0, 0.03), (1, 0.03 + 0.02), (2, 0.12 + 0.02)):
        ends = [event["t"] for event in run.step_events(rank)]
        assert ends[:-1] == pytest.approx([step_s * (step + 1) for step in range(STEPS - 1)])
    for rank, latency_s in ((0, 0.0), (1, 0.01)):
        assert run.step_events(rank)[-1]["t"] == pytest.approx(0.14 * STEPS - 0.01 + latency_s)


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"clip_norm": 0.0}], ids=str
)
@pytest.mark.parametrize("parts", [{}, APART], ids=str)
def test_a_bound_of_0_is_synchronous_sgd(parts: dict[str, Any], settings: dict[str, Any]) -> None:
    one, other = (
        Run(
            schedule,
            SIZE,
            parts,
            LINK,
            workload=pieces,
            settings=settings,
            around={"device": with_slow(1, 3, 1, 2)},
        )
        for schedule in ("ssp(bound=0)", "synchronous")
    )
    one.whole(), other.whole()
    assert distance(one.weights(), other.weights()) < 1e-6
    assert [event["mean_loss"] for event in one.step_events()] == pytest.approx(
        [event["mean_loss"] for event in other.step_events()], rel=1e-5
    )


@pytest.mark.parametrize("bound", BOUNDS)
def test_all_end_alike(bound: int | None) -> None:
    run = uneven(bound).whole()
    assert all(same_bits(run.weights(rank), run.weights()) for rank in range(SIZE))
    assert bound == 0 or distance(run.weights(), uneven(0).whole().weights()) > 1e-3


def uneven(
    bound: int | None, *, folder: Path | None = None, around: dict[str, Any] | None = None, **settings: Any
) -> Run:
    """A small training of replicas of unlike speed."""
    return Run(
        f"ssp(bound={bound})",
        SIZE,
        APART,
        LINK,
        workload=pieces,
        settings={"momentum": 0.9, "steps": 16, **settings},
        folder=folder,
        around={"device": with_slow(1, 3, 1, 2), **(around or {})},
    )


@pytest.mark.parametrize("bound", [2, None])
def test_a_replay_on_other_devices_ends_with_the_same_bits(bound: int | None) -> None:
    settings: dict[str, Any] = {"evaluate_every": 3, "checkpoint_every": 6}
    first = uneven(bound, **settings).whole()
    log = first.world.decisions.entries
    others = {"device": with_slow(4, 1, 2, 1)}
    again = uneven(bound, around={**others, "decisions": DecisionLog(replay=log)}, **settings).whole()
    elsewhere = uneven(bound, around=others, **settings).whole()
    assert same_bits(again.weights(), first.weights())
    assert not same_bits(elsewhere.weights(), first.weights())
    for kind, field in (("step", "loss"), ("step", "bytes_sent"), ("evaluation", "loss")):
        for rank in range(SIZE):
            told = [[e[field] for e in run.events[rank] if e["event"] == kind] for run in (first, again)]
            assert told[0] == told[1]
    assert again.world.decisions.entries == log


@pytest.mark.parametrize("value", ["0", 4, -1, True, None, [0], 3])
def test_a_log_of_another_run_is_refused(value: Any) -> None:
    """Its third update cannot be rank 3's, which has sent one and waits, or that of nobody."""
    log = DecisionLog(
        replay=[
            Decision("collective", 0, {}, timing=False),
            Decision("update", 0, 3, rank=0),
            Decision("update", 1, value, rank=0),
        ]
    )
    with pytest.raises(ConfigError, match="--replay: decision 'update' at step 1"):
        uneven(0, around={"decisions": log}).whole()


def test_a_log_that_ends_too_early_is_refused() -> None:
    log = [Decision("collective", 0, {}, timing=False), Decision("update", 0, 3, rank=0)]
    with pytest.raises(ConfigError, match="holds no decision 'update' of rank 0 at step 1"):
        uneven(2, around={"decisions": DecisionLog(replay=log)}).whole()


# --- evaluations, checkpoints, bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("bound", [2, None])
def test_evaluation_scores_the_servers_parameters_as_rank_0_has_them(bound: int | None, slow: str) -> None:
    run = counting(bound, with_slow(*SLOW[slow]), evaluate_every=5).whole()
    read = by_the_log(arrivals(run), bound, SIZE, STEPS)[0]
    wanted = {step: sum(read[step]) for step in (5, 10, 15, 20, STEPS)}
    for rank in range(SIZE):
        scores = [event for event in run.events[rank] if event["event"] == "evaluation"]
        assert {event["step"]: event["accuracy"] for event in scores} == wanted


@pytest.mark.parametrize("bound", [0, 2, None])
def test_evaluations_change_nothing(bound: int | None) -> None:
    often, never = (uneven(bound, evaluate_every=every).whole() for every in (1, 0))
    assert same_bits(often.weights(), never.weights())
    assert [e["t"] for e in often.step_events(1)] == [e["t"] for e in never.step_events(1)]


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_resumed_run_is_the_run_that_was_never_stopped(bound: int | None, tmp_path: Path) -> None:
    """By its decisions: from a checkpoint on replicas set out at one time."""
    whole = uneven(bound, folder=tmp_path / "whole", checkpoint_every=4).whole()
    log = whole.world.decisions.entries
    for start in (4, 8):
        around = {"decisions": DecisionLog(replay=log)}
        resumed = uneven(bound, folder=tmp_path / "whole", around=around, checkpoint_every=4)
        for replica in resumed.replicas:
            replica.resume(start)
        resumed.whole()
        for rank in range(SIZE):
            assert same_bits(resumed.weights(rank), whole.weights(rank))
            assert [e["loss"] for e in resumed.step_events(rank)] == [
                e["loss"] for e in whole.step_events(rank)[start:]
            ]
            assert resumed.replicas[rank].sent_nbytes == whole.replicas[rank].sent_nbytes


def test_at_a_checkpoint_all_are_alike(tmp_path: Path) -> None:
    run = counting(None, with_slow(1, 1, 4), checkpoint_every=7)
    read: dict[int, list[list[int]]] = {}
    run.steps(STEPS, before=lambda replica, step: read.setdefault(step, []).append(_counts(replica.model)))
    assert [step for step, counts in read.items() if all(each == [step] * 3 for each in counts)] == [
        0,
        7,
        14,
        21,
    ]


@pytest.mark.parametrize("bound", BOUNDS)
def test_who_is_asked_to_stop_stops_all_at_one_step_and_a_replay_too(bound: int | None) -> None:
    run = uneven(bound, steps=24)
    slow = run.replicas[1]
    slow._stop._is_wanted = lambda: slow.step_done == 3
    run.whole()
    again = uneven(
        bound, steps=24, around={"decisions": DecisionLog(replay=run.world.decisions.entries)}
    ).whole()
    steps = {replica.step_done for one in (run, again) for replica in one.replicas}
    assert len(steps) == 1
    assert steps < set(range(4, 24))
    for rank in range(SIZE):
        assert same_bits(run.weights(rank), run.weights())
        assert same_bits(again.weights(rank), run.weights())


def test_bytes_are_those_of_updates_and_answers() -> None:
    run = uneven(2).whole()
    numbers = 12 * 4 + 4 * 8 * 6  # of four parts, each with a weight and five votes
    flags = 4 * 8
    sent = [replica.sent_nbytes for replica in run.replicas]
    assert sent == [16 * (SIZE - 1) * (numbers + flags), *[16 * numbers] * (SIZE - 1)]


# --- who is lost ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_replica_ends_the_run_with_its_name(lost: int, bound: int | None) -> None:
    with pytest.raises(PeerLost, match=f"lost rank {lost}"):
        uneven(bound, around={"faults": FaultPlan().crash(lost, at_step=5)}).whole()
    run = uneven(bound, around={"faults": FaultPlan().hang(lost, at_step=5), "deadline_s": 2.0})
    with pytest.raises(DeadlinePassed, match=f"lost rank {lost}"):
        run.whole()
    hung = next(e["t"] for e in run.events[lost] if e["event"] == "step" and e["step"] == 4)
    assert float(str(hung)) + 1.9 < run.world.clock.now() < float(str(hung)) + 2.5


def test_who_waits_for_a_slow_one_is_not_lost() -> None:
    """At the end of a run, for longer than the deadline; each step of the slow one is within it."""
    around = {"faults": FaultPlan().slow(2, factor=1.0, at_s=0.0), "deadline_s": 2.5}
    run = uneven(None, around={"device": with_slow(1, 1, 60, 1), **around}).whole()
    assert min(waits(run, rank)[-1] for rank in (0, 1, 3)) > 20
