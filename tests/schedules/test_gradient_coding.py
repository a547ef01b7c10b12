"""Gradient coding: synchronous SGD's means without the slowest, when they are there, and what follows from the log."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farflung.data import TensorDataset
from farflung.decisions import DecisionLog
from farflung.devices import CodingRates, DeviceProfile
from farflung.errors import ConfigError, DeadlinePassed, NonFinite, PeerLost
from farflung.faults import FaultPlan
from farflung.network import Link, NetworkProfile, Site
from farflung.sim import LinkModel
from farflung.types import Batch, Dataset, Decision, Decode
from farflung.workloads import Quadratic
from tests.helpers import same_bits
from tests.schedules.runs import APART, InPieces, Run, distance

SIZE, STEPS = 4, 24
LATENCY_S = 0.01
FORWARD_S = 0.01 / 4
LINK = LinkModel(LATENCY_S)
SHARE_S = 0.03
"""What a share of four samples computes."""
CODES = ["cyclic", "fractional_repetition"]


class Doubles(InPieces):
    """A quadratic in float64."""

    def model(self, generator: torch.Generator) -> nn.Module:
        return super().model(generator).double()

    def datasets(self) -> tuple[Dataset, Dataset]:
        centres, labels = self.centres()
        data = TensorDataset(centres.double(), labels, labels)
        return data, data


class Drawing(Doubles):
    """A network in float64 that draws random numbers, and whose losses hang on the others of their batch."""

    def model(self, generator: torch.Generator) -> nn.Module:
        torch.manual_seed(1)
        layers = nn.Sequential(
            nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2)
        )
        return layers.double()

    def datasets(self) -> tuple[Dataset, Dataset]:
        centres, labels = self.centres()
        data = TensorDataset(centres.double(), labels, augment=lambda x: x + 0.3 * torch.randn_like(x))
        return data, data

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        wanted = torch.stack([batch.targets, batch.targets % 3], dim=1).double()
        found: Tensor = model(batch.inputs)
        return (found - wanted).square().mean(dim=1)


def slow(*ranks: int, factor: float = 9.0, size: int = SIZE, **more: Any) -> list[DeviceProfile]:
    """Devices of which some take so many times as long."""
    return [DeviceProfile(forward_s=FORWARD_S * (factor if r in ranks else 1), **more) for r in range(size)]


def coded(
    devices: Sequence[DeviceProfile],
    stragglers: int = 1,
    construction: str = "auto",
    *,
    schedule: str = "",
    workload: type[Quadratic] = Doubles,
    folder: Path | None = None,
    around: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Replicas that train together on one clock."""
    return Run(
        schedule or f"gradient_coding({stragglers}, {construction!r})",
        len(devices),
        APART,
        LINK,
        workload=lambda: workload(dim=12, samples=64),
        settings={"steps": STEPS, "momentum": 0.9, **settings},
        folder=folder,
        around={"device": devices, **(around or {})},
    )


def ends(run: Run, rank: int) -> list[float]:
    return [float(str(event["t"])) for event in run.step_events(rank)]


def decided(run: Run, name: str) -> dict[tuple[int | None, int], Any]:
    """The decisions of a name, by rank and step."""
    return {(d.rank, d.step): d.value for d in run.world.decisions.entries if d.name == name}


def left_out(run: Run, rank: int) -> list[int]:
    """The steps that a replica did not compute."""
    return [step for (whose, step), value in decided(run, "left_out").items() if whose == rank and value]


# --- the same means -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", range(SIZE))
@pytest.mark.parametrize("construction", CODES)
def test_it_is_synchronous_sgd_whoever_is_missing(construction: str, missing: int) -> None:
    one = coded(slow(missing), 1, construction, clip_norm=2.0).whole()
    other = coded(slow(missing), schedule="synchronous", clip_norm=2.0).whole()
    assert all(missing not in ranks for (_, at), ranks in decided(one, "decoded").items() if at < 4)
    assert all(same_bits(one.weights(rank), one.weights()) for rank in range(SIZE))
    assert distance(one.weights(), other.weights()) < 1e-12
    for field in ("mean_loss", "samples"):
        found, wanted = ([event[field] for event in run.step_events()] for run in (one, other))
        assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("size", "stragglers"), [(2, 1), (3, 1), (5, 2), (6, 2), (4, 3), (4, 0), (1, 0)])
def test_with_any_number_of_replicas(size: int, stragglers: int) -> None:
    devices = slow(*range(1, 1 + stragglers), size=size)
    one = coded(devices, stragglers).whole()
    assert distance(one.weights(), coded(devices, schedule="synchronous").whole().weights()) < 1e-11


@pytest.mark.parametrize("construction", CODES)
def test_shares_are_alike_wherever_they_are_computed(construction: str) -> None:
    """Though they are augmented, dropped out and normalized."""
    runs = [coded(slow(*ranks), 1, construction, workload=Drawing).whole() for ranks in ((), (0,), (2,))]
    decoders = [decided(run, "decoded")[0, 0] for run in runs]
    assert decoders[1] != decoders[2]
    for run in runs:
        assert distance(run.weights(), runs[0].weights()) < 1e-11
    other = coded(slow(), 1, construction, workload=Drawing, seed=4).whole()
    assert distance(other.weights(), runs[0].weights()) > 1e-3


def test_random_numbers_differ_between_shares_and_steps() -> None:
    run = coded(slow(), 1, workload=Drawing)
    seen: list[Tensor] = []
    replica = run.replicas[0]
    plain = replica.workload.loss

    def watched(model: nn.Module, batch: Batch) -> Tensor:
        seen.append(torch.rand(1))
        return plain(model, batch)

    replica.workload.loss = watched  # type: ignore[method-assign]
    run.steps(3)
    assert len({float(number) for number in seen}) == 6


# --- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", range(SIZE))
@pytest.mark.parametrize("construction", CODES)
def test_a_step_takes_as_long_as_the_fastest_that_are_enough(construction: str, missing: int) -> None:
    run = coded(slow(missing), 1, construction).whole()
    step_s = 2 * SHARE_S + 2 * LATENCY_S
    for rank in set(range(SIZE)) - {missing}:
        answered_s = 0.0 if rank else LATENCY_S
        wanted = [step_s * (step + 1) - answered_s for step in range(STEPS)]
        assert ends(run, rank) == pytest.approx(wanted)


def test_who_is_late_goes_on_where_the_others_are() -> None:
    run = coded(slow(3)).whole()
    late = 18 * SHARE_S
    computed = sorted(set(range(STEPS)) - set(left_out(run, 3)))
    assert computed == [0, 6, 13, 20]
    assert all(event["loss"] is None for event in run.step_events(3) if event["step"] not in computed)
    assert ends(run, 3)[computed[1] - 1] == pytest.approx(late)
    assert ends(run, 3)[-1] == pytest.approx(4 * late)
    assert [left_out(run, rank) for rank in range(3)] == [[], [], []]
    assert run.replicas[3].sent_nbytes == 4 * run.replicas[1].sent_nbytes // STEPS


def test_late_sums_are_dropped_and_counted() -> None:
    run = coded(slow(3)).whole()
    assert run.world.network.mailboxes[0].dropped == 4 * 4
    assert coded(slow(0)).whole().world.network.mailboxes[0].dropped == 0


def test_two_slow_ones_are_waited_for_where_one_is_tolerated() -> None:
    one, two = (coded(slow(1, 2, factor=3.0), stragglers).whole() for stragglers in (1, 2))
    assert ends(one, 3)[0] == pytest.approx(6 * SHARE_S + 2 * LATENCY_S)
    assert ends(two, 3)[0] == pytest.approx(3 * SHARE_S + 2 * LATENCY_S)


def test_a_replica_behind_a_slow_link_has_one_sum_on_its_way_at_most() -> None:
    """It goes on once that has left, and leaves out what the others have come to meanwhile."""
    uplink = Site("uplink", 1, up_bps=8000.0)
    network = NetworkProfile("uneven", (Site("fast", 3), uplink), default=Link(LATENCY_S))
    run = coded(slow(), around={"network": network}).whole()
    computed = sorted(set(range(STEPS)) - set(left_out(run, 3)))
    sum_s = 8 * run.replicas[3].sent_nbytes / len(computed) / 8000
    assert sum_s > 2 * SHARE_S
    begun = [ends(run, 3)[step] for step in computed]
    assert all(later - sooner > sum_s for sooner, later in pairwise(begun))
    assert ends(run, 1)[-1] == pytest.approx(STEPS * (2 * SHARE_S + 2 * LATENCY_S))


def test_decoding_is_charged_for() -> None:
    rates = CodingRates({("add", ""): ((1, 0.001),)})
    run = coded(slow(coding=rates), steps=1).whole()
    each_s = 3 * 0.001  # of three sums; parts of three parameters, one after the other
    assert ends(run, 1)[0] == pytest.approx(2 * SHARE_S + 2 * LATENCY_S + 4 * 3 * each_s)


# --- the log --------------------------------------------------------------------------------------------------------


def test_a_replay_on_other_devices_ends_with_the_same_bits() -> None:
    settings: dict[str, Any] = {"workload": Drawing, "evaluate_every": 3, "checkpoint_every": 6}
    first = coded(slow(3, factor=4.0), 1, "cyclic", **settings).whole()
    log = first.world.decisions.entries
    others = slow(1, factor=6.0)
    again = coded(others, 1, "cyclic", around={"decisions": DecisionLog(replay=log)}, **settings).whole()
    elsewhere = coded(others, 1, "cyclic", **settings).whole()
    for rank in range(SIZE):
        states = [run.replicas[rank].model.state_dict() for run in (first, again)]
        assert all(same_bits(states[0][name], states[1][name]) for name in states[0])
    assert not same_bits(elsewhere.weights(), first.weights())
    for kind, field in (("step", "loss"), ("step", "bytes_sent"), ("evaluation", "loss")):
        for rank in range(SIZE):
            told = [[e[field] for e in run.events[rank] if e["event"] == kind] for run in (first, again)]
            assert told[0] == told[1]
    for name in ("decoded", "left_out"):
        assert decided(again, name) == decided(first, name)


@pytest.mark.parametrize("value", [[0, 1], [0, 1, 4], [2, 1, 0], [0, 1, 1], [0, 1, "2"], 3, None, "012"])
def test_a_log_of_another_run_is_refused(value: Any) -> None:
    log = coded(slow()).whole().world.decisions.entries
    log = [Decision("decoded", 5, value, rank=0) if (d.name, d.step) == ("decoded", 5) else d for d in log]
    with pytest.raises(ConfigError, match="--replay: decision 'decoded' at step 5"):
        coded(slow(), around={"decisions": DecisionLog(replay=log)}).whole()


def test_a_log_that_says_neither_yes_nor_no_is_refused() -> None:
    log = coded(slow()).whole().world.decisions.entries
    wrong = ("left_out", 3, 0)
    log = [Decision(d.name, 3, "no", rank=0) if (d.name, d.step, d.rank) == wrong else d for d in log]
    with pytest.raises(ConfigError, match="--replay: decision 'left_out' at step 3"):
        coded(slow(), around={"decisions": DecisionLog(replay=log)}).whole()


def test_a_log_that_ends_too_early_is_refused() -> None:
    log = [d for d in coded(slow()).whole().world.decisions.entries if d.name != "decoded" or d.step < 9]
    with pytest.raises(ConfigError, match="holds no decision 'decoded' of rank 0 at step 9"):
        coded(slow(), around={"decisions": DecisionLog(replay=log)}).whole()


# --- evaluations, checkpoints, bytes --------------------------------------------------------------------------------


def test_evaluations_change_nothing() -> None:
    often, never = (coded(slow(2), evaluate_every=every).whole() for every in (1, 0))
    assert same_bits(often.weights(), never.weights())
    assert [ends(often, rank) for rank in range(SIZE)] == [ends(never, rank) for rank in range(SIZE)]


@pytest.mark.parametrize("missing", [0, 3])
def test_a_resumed_run_is_the_run_that_was_never_stopped(missing: int, tmp_path: Path) -> None:
    """By its decisions: from a checkpoint on replicas set out at one time."""
    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint_every": 6, "workload": Drawing}
    whole = coded(slow(missing), 1, "cyclic", **settings).whole()
    log = whole.world.decisions.entries
    for start in (6, 18):
        around = {"decisions": DecisionLog(replay=log)}
        resumed = coded(slow(1), 1, "cyclic", around=around, **settings)
        for replica in resumed.replicas:
            replica.resume(start)
        resumed.whole()
        for rank in range(SIZE):
            assert same_bits(resumed.weights(rank), whole.weights(rank))
            told = [[e["loss"] for e in run.step_events(rank)] for run in (resumed, whole)]
            assert told[0] == told[1][start:]
            sent = [next(e for e in run.events[rank] if e["event"] == "end") for run in (resumed, whole)]
            assert sent[0]["bytes_sent_to"]["gradients"] == sent[1]["bytes_sent_to"]["gradients"]  # type: ignore[index,call-overload]
            assert resumed.replicas[rank].sent_nbytes == whole.replicas[rank].sent_nbytes


@pytest.mark.parametrize("missing", [0, 3])
def test_bytes_are_those_of_sums_and_means(missing: int) -> None:
    run = coded(slow(missing)).whole()
    numbers = 12 * 8 + 4 * 8 * 6  # of four parts, each with a weight and five votes
    computed = [STEPS - len(left_out(run, rank)) for rank in range(SIZE)]
    assert computed[missing] < STEPS
    wanted = [STEPS * (SIZE - 1) * numbers, *[steps * numbers for steps in computed[1:]]]
    assert [replica.sent_nbytes for replica in run.replicas] == wanted
    assert [replica._exchanges.channels for replica in run.replicas] == [[]] * SIZE
    decoder = run.replicas[0]._exchanges._launcher._carriers[Decode]._decoder  # type: ignore[attr-defined]
    assert not decoder._inside._messages, "late sums of rank 0's own are kept nowhere"


# --- stops, losses that are not finite, and who is lost -------------------------------------------------------------


@pytest.mark.parametrize("asked", [0, 1])
def test_who_is_asked_to_stop_stops_all_at_one_step_and_a_replay_too(asked: int) -> None:
    run = coded(slow(3))
    replica = run.replicas[asked]
    replica._stop._is_wanted = lambda: replica.step_done == 5
    run.whole()
    again = coded(slow(2), around={"decisions": DecisionLog(replay=run.world.decisions.entries)}).whole()
    (steps,) = {replica.step_done for one in (run, again) for replica in one.replicas}
    assert 6 <= steps <= 7
    assert all(same_bits(again.weights(rank), run.weights()) for rank in range(SIZE))


class Spoilt(Doubles):
    """One of whose samples has no finite loss."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = super().loss(model, batch)
        return torch.where(
            batch.inputs[:, 0] == self.datasets()[0].rows(torch.tensor([9])).inputs[0, 0], torch.inf, losses
        )


def test_a_loss_that_is_not_finite_stops_all() -> None:
    with pytest.raises(NonFinite, match="non-finite loss at step"):
        coded(slow(3), workload=Spoilt).whole()


@pytest.mark.parametrize("policy", ["skip", "exclude"])
@pytest.mark.parametrize("construction", CODES)
def test_a_step_without_a_finite_mean_is_skipped(construction: str, policy: str) -> None:
    run = coded(slow(3), 1, construction, workload=Spoilt, on_nonfinite=policy, steps=16).whole()
    other = coded(slow(3), schedule="synchronous", workload=Spoilt, on_nonfinite="skip", steps=16).whole()
    assert distance(run.weights(), other.weights()) < 1e-12
    bad = [[e["step"] for e in one.step_events() if e["nonfinite"]] for one in (run, other)]
    assert bad[0] == bad[1] != []


@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_replica_ends_the_run_with_its_name(lost: int) -> None:
    with pytest.raises(PeerLost, match=f"lost rank {lost}"):
        coded(slow(), around={"faults": FaultPlan().crash(lost, at_step=5)}).whole()


def test_a_replica_that_hangs_holds_nobody_up_before_the_end() -> None:
    run = coded(slow(), around={"faults": FaultPlan().hang(2, at_step=5), "deadline_s": 2.0})
    with pytest.raises(DeadlinePassed, match="lost rank 2"):
        run.whole()
    assert [len(run.step_events(rank)) for rank in (0, 1, 3)] == [STEPS] * 3
    assert run.world.clock.now() == pytest.approx(STEPS * 0.08 + 2.0, abs=0.1)
