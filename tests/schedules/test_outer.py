"""Blocks of local steps, and outer steps on their mean: which of them are the same, and all by their equations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.loop import Replica
from farflung.schedules import AdaComm
from farflung.state_trees import load_tree
from farflung.types import SharedStats, State
from tests.covering import thorough
from tests.helpers import same_bits, same_tree
from tests.schedules.runs import APART, Run, distance, pieces
from tests.schedules.test_equalities import ADAM, SGD

OPTIMIZERS = [*SGD.values(), ADAM]
NAMES = [*SGD, "adam"]
RESIDUALS = {"codec": "error_feedback(topk(density=0.3))"}


def ends(schedule: str, size: int = 3, parts: dict[str, Any] | None = None, **settings: Any) -> list[Tensor]:
    run = Run(schedule, size, parts or {}, settings=settings).whole()
    return [run.weights(rank) for rank in range(size)]


# --- which are the same -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SGD.values(), ids=SGD)
@pytest.mark.parametrize(
    "schedule",
    [
        "local_sgd(1)",
        "local_sgd(1, 'averaged')",
        "post_local_sgd(warmup=7, sync_every=1)",
        "adacomm(sync_every=1)",
        "diloco(1, outer_rate=1, outer_momentum=0)",
    ],
)
def test_blocks_of_one_step_are_synchronous_within_rounding(schedule: str, settings: dict[str, Any]) -> None:
    ours, theirs = (ends(how, **settings, steps=30) for how in (schedule, "synchronous"))
    assert distance(ours[0], theirs[0]) < 1e-6
    assert all(same_bits(one, ours[0]) for one in ours)


SAME = {
    "delayed(0, {0})": "local_sgd({0})",
    "local_sgd({0})": "diloco({0}, outer_rate=1.0, outer_momentum=0.0)",
    "diloco({0})": "streaming_diloco({0}, 1, 0, 0.0, outer_rate=0.7)",
    "local_sgd({0}, 'reset')": "post_local_sgd(warmup=0, sync_every={0}, optimizer_state='reset')",
    "local_sgd({0}, 'averaged')": "adacomm({0}, optimizer_state='averaged')",
}


@pytest.mark.parametrize("parts", [RESIDUALS, *thorough({})], ids=["residuals", "identity"])
@pytest.mark.parametrize("settings", OPTIMIZERS, ids=NAMES)
@pytest.mark.parametrize("one", SAME)
def test_equal_to_the_bit(one: str, settings: dict[str, Any], parts: dict[str, Any]) -> None:
    """With a block that is unfinished at the end."""
    for period in (1, 4):
        ours, theirs = (ends(how.format(period), 3, parts, **settings, steps=18) for how in (one, SAME[one]))
        for rank in range(3):
            assert same_bits(ours[rank], theirs[rank])


def test_before_its_end_post_local_is_synchronous_to_the_bit() -> None:
    ours, theirs = (Run(how, 3).steps(12) for how in ("post_local_sgd(12, 4)", "synchronous"))
    assert same_bits(ours.weights(), theirs.weights())
    assert not same_bits(*(ours.steps(1).weights(rank) for rank in range(2)))


def test_local_blocks_count_from_where_the_synchronous_ones_ended() -> None:
    """Or the first of them would be as long as all that went before."""
    run = Run("post_local_sgd(12, 4)", 3, settings={"momentum": 0.9}).steps(12)
    end = run.weights()
    run.steps(2)
    for replica in run.replicas:
        common = replica.engine.get_anchor_parameters()
        assert common is not None
        assert same_bits(common["w"].reshape(-1), end)


@pytest.mark.parametrize(
    "schedule",
    [
        "local_sgd(4)",
        "streaming_diloco(8, 2, delay=0, mix=0.5, outer_rate=1, outer_momentum=0)",
        "streaming_diloco(8, 2, delay=3, mix=0.5, keep=True, outer_rate=1, outer_momentum=0)",
        "streaming_diloco(4, 1, delay=3, mix=0.0, keep=True, outer_rate=1, outer_momentum=0)",
    ],
)
def test_on_identical_batches_replicas_are_one_worker(schedule: str) -> None:
    settings = {"momentum": 0.9, "steps": 22}
    several = Run(schedule, 2, APART, alike=True, workload=pieces, settings=settings).whole()
    alone = Run("synchronous", 1, APART, alike=True, workload=pieces, settings=settings).whole()
    assert distance(several.weights(), alone.weights()) < 1e-6


# --- by the equations ---------------------------------------------------------------------------------------------


class Before:
    """The parameters of each replica after its own step, before anything is merged, by name."""

    def __init__(self, run: Run) -> None:
        self.found: list[dict[str, Tensor]] = [{} for _ in range(run.size)]
        for rank, replica in enumerate(run.replicas):
            replica.optimizer.register_step_post_hook(lambda *_, r=rank, m=replica: self._note(r, m))

    def _note(self, rank: int, replica: Replica) -> None:
        self.found[rank] = named(replica)


def named(replica: Replica) -> dict[str, Tensor]:
    return {name: p.detach().double() for name, p in replica.model.named_parameters()}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("mix", [0.0, 0.5])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_fragments_follow_their_equations(delay: int, mix: float, keep: bool) -> None:
    rate, momentum, every, fragments = 0.6, 0.8, 4, 2
    schedule = (
        f"streaming_diloco({every * fragments}, {fragments}, {delay}, {mix}, {keep}, {rate}, {momentum})"
    )
    run = Run(schedule, 3, APART, workload=pieces, settings={"momentum": 0.5, "steps": 99})
    before = Before(run)
    names = [buckets.names[0] for buckets in run.replicas[0].buckets]
    anchor = named(run.replicas[0])
    speed = {name: torch.zeros_like(value) for name, value in anchor.items()}
    given: dict[str, tuple[int, list[Tensor]]] = {}
    for step in range(40):
        run.steps(1)
        expected = [dict(own) for own in before.found]
        turns, rest = divmod(step + 1, every)
        if not rest:
            for name in names[(turns - 1) % fragments :: fragments]:
                given[name] = (step + delay, [own[name] for own in before.found])
        for name in [name for name, (due, _) in given.items() if due == step]:
            _, then = given.pop(name)
            mean = torch.stack(then).mean(dim=0) - anchor[name]
            speed[name] = momentum * speed[name] + mean
            anchor[name] = anchor[name] + rate * (mean + momentum * speed[name])
            for own, was in zip(expected, then, strict=True):
                since = own[name] - was if keep else 0.0
                own[name] = (1 - mix) * (anchor[name] + since) + mix * own[name]
        for replica, wanted in zip(run.replicas, expected, strict=True):
            for name, value in named(replica).items():
                assert distance(value, wanted[name]) < 1e-5, (step, name)


# --- the optimizer's state ----------------------------------------------------------------------------------------


def gathered(replica: Replica) -> dict[str, Tensor]:
    state = replica.optimizer.state[next(iter(replica.model.parameters()))]
    return {name: value.clone() for name, value in state.items() if value.dim()}


@pytest.mark.parametrize("settings", [SGD["momentum"], ADAM], ids=["momentum", "adam"])
def test_state_that_is_kept_differs_and_averaged_is_the_mean(settings: dict[str, Any]) -> None:
    kept, averaged = (
        Run(f"local_sgd(4, '{state}')", 3, settings=settings).steps(4) for state in ("kept", "averaged")
    )
    own = [gathered(replica) for replica in kept.replicas]
    for name in own[0]:
        assert not same_bits(own[0][name], own[1][name])
        mean = torch.stack([one[name].double() for one in own]).mean(dim=0)
        for replica in averaged.replicas:
            assert distance(gathered(replica)[name], mean) < 1e-6
            assert same_bits(gathered(replica)[name], gathered(averaged.replicas[0])[name])
    more = averaged.replicas[0].engine.sent_nbytes - kept.replicas[0].engine.sent_nbytes
    assert more > sum(value.nbytes for value in own[0].values())


@pytest.mark.parametrize("settings", [SGD["momentum"], ADAM], ids=["momentum", "adam"])
def test_state_that_is_reset_begins_anew(settings: dict[str, Any]) -> None:
    several = Run("local_sgd(4, 'reset')", 2, alike=True, settings=settings).steps(11)

    def begin_anew(replica: Replica, step: int) -> None:
        if step % 4 == 0:
            replica.optimizer.state.clear()

    alone = Run("synchronous", 1, alike=True, settings=settings).steps(11, begin_anew)
    assert distance(several.weights(), alone.weights()) < 1e-6


# --- AdaComm ------------------------------------------------------------------------------------------------------


def periods(schedule: AdaComm, told: Sequence[tuple[float, float, float | None]]) -> list[int]:
    """After each exchange, of which loss, seconds and learning rate are told."""
    state: State = schedule.init()
    found = []
    for loss, elapsed_s, rate in told:
        step = state["block_end"]
        assert not schedule.needs_times(state, step - 1)
        assert schedule.needs_times(state, step)
        state = schedule.update_state(
            state, SharedStats(step, loss, 4.0, elapsed_s=elapsed_s, learning_rate=rate)
        )
        assert state["block_end"] == step + state["period"]
        found.append(state["period"])
    return found


FALLS = [
    (4.0, 1.0, 0.1),
    (2.0, 9.0, 0.1),
    (1.0, 11.0, 0.1),
    (0.9, 12.0, 0.1),
    (1.0, 35.0, 0.1),
    (0.04, 47.0, 0.1),
]
"""Intervals of 10 s end at the third, fifth and last."""


def test_the_period_follows_the_root_of_the_loss() -> None:
    assert periods(AdaComm(16, 10.0, "basic"), FALLS) == [16, 16, 8, 8, 8, 2]


def test_where_the_loss_does_not_fall_the_period_shrinks() -> None:
    assert periods(AdaComm(16, 10.0), FALLS) == [16, 16, 8, 8, 4, 2]
    assert periods(AdaComm(16, 10.0, shrink=0.3), FALLS) == [16, 16, 8, 8, 3, 2]


def test_a_falling_rate_lengthens_blocks() -> None:
    told = [(4.0, 1.0, 0.1), (1.0, 11.0, 0.1), (1.0, 21.0, 0.025), (1.0, 31.0, 0.0001)]
    assert periods(AdaComm(16, 10.0, "basic"), told) == [16, 8, 16, 200]
    assert periods(AdaComm(16, 10.0, "basic", rate_power=3), told) == [16, 8, 64, 200]
    assert periods(AdaComm(16, 10.0, "basic", rate_power=0), told) == [16, 8, 8, 8]
    assert periods(AdaComm(16, 10.0), told) == [16, 8, 4, 2], "by the other rule it never rises"


def test_a_period_is_never_below_one_and_no_loss_changes_nothing() -> None:
    assert periods(AdaComm(4, 10.0), [(4.0, 1.0, None), (1e-9, 11.0, None), (1.0, 21.0, None)]) == [4, 1, 1]
    state = AdaComm(4, 10.0).init()
    unknown = SharedStats(3, 0.0, 0.0, elapsed_s=11.0)
    assert AdaComm(4, 10.0).update_state(state, unknown) == {**state, "block_end": 7, "next_choice_s": 20.0}


def test_all_replicas_choose_the_same_periods_by_one_clock() -> None:
    run = Run("adacomm(6, interval_s=1.0)", 3, seconds_per_sample=0.01, settings={"steps": 60}).whole()
    starts: list[list[Any]] = [
        [event["step"] for event in events if event["event"] == "exchange"] for events in run.events
    ]
    assert starts[0] == starts[1] == starts[2]
    blocks = [after - before for before, after in zip(starts[0], starts[0][1:], strict=False)]
    assert blocks[0] == 6
    assert blocks[-1] == 1
    assert blocks == sorted(blocks, reverse=True)
    decided = [decision.step for decision in run.world.decisions.entries if decision.timing]
    assert decided == starts[0]


# --- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [RESIDUALS["codec"], *thorough("identity")])
@pytest.mark.parametrize("state", ["kept", "reset", "averaged"])
@pytest.mark.parametrize("optimizer", [SGD["momentum"], ADAM], ids=["momentum", "adam"])
def test_a_run_goes_on_with_outer_momentum_and_a_fragment_under_way(
    codec: str, state: str, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    schedule = f"streaming_diloco(8, 2, 3, 0.5, optimizer_state='{state}')"

    def run(folder: str, steps: int) -> Run:
        settings = {**optimizer, "steps": steps, "checkpoint_every": 5}
        parts = {**APART, "codec": codec}
        return Run(schedule, 2, parts, workload=pieces, settings=settings, folder=tmp_path / folder)

    whole = run("whole", 24).whole()
    run("parts", 10).whole()
    shared = load_tree(tmp_path / "parts" / "step-00000010" / "shared.safetensors")
    own = load_tree(tmp_path / "parts" / "step-00000010" / "rank-1-of-2.safetensors")
    outer = shared["exchanges"]["merges"]["Outer"]
    assert [index for index, state in sorted(outer.items()) if "velocity" in state] == ["0", "2"]
    assert [flight["step"] for flight in own["exchanges"]["flights"].values()] == [7]
    assert own["exchanges"]["merges"]["Outer"] == {str(index): {"has_updates": True} for index in range(4)}
    for start in (5, 10):
        resumed = run("parts", 24)
        for replica in resumed.replicas:
            replica.resume(start)
        resumed.whole()
        for got, wanted in zip(resumed.replicas, whole.replicas, strict=True):
            assert same_tree(dict(got.model.state_dict()), dict(wanted.model.state_dict()))
            assert got.engine.sent_nbytes == wanted.engine.sent_nbytes
