"""Merges: settings to which state is passed in; one that is not named is refused before it starts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from farflung.engine import Extension, StepMetadata
from farflung.engine.buckets import GradientBucket
from farflung.errors import Unsupported
from farflung.schedules import Delayed
from farflung.schedules.merges import Replace, Swap
from farflung.state_trees import load_tree
from farflung.types import (
    AverageTarget,
    Bucket,
    Channel,
    CodecState,
    Contribution,
    Fragment,
    Merge,
    MergeBucket,
    MergeState,
    Reducer,
    ReduceResult,
    Schedule,
    Seeds,
    SharedStats,
    State,
    StateSlot,
    SyncUnit,
    TensorSpec,
    Transfer,
    get_anchor,
)
from tests.helpers import same_bits, same_tree
from tests.schedules.runs import APART, Run, distance, pieces

# --- a merge of one's own -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slow(Merge):
    """The mean of parameters feeds an outer optimizer: SGD with momentum on the way that replicas went."""

    average_target: ClassVar[AverageTarget] = "parameters"

    rate: float = 1.0
    momentum: float = 0.0

    @override
    def init(self, weights: Tensor) -> MergeState:
        return MergeState(weights)

    @override
    def contribute(self, bucket: MergeBucket, state: MergeState, delay: int) -> tuple[Tensor, State]:
        own = get_anchor(state) - bucket.copy_weights()
        return own.clone(), {"contribution": own}

    @override
    def apply(
        self, bucket: MergeBucket, state: MergeState, saved: State, mean: Tensor | None, delay: int
    ) -> None:
        anchor = get_anchor(state)
        since = anchor - bucket.copy_weights() - saved["contribution"]
        if mean is not None:
            speed = state.shared.setdefault("speed", torch.zeros_like(anchor))
            speed.mul_(self.momentum).add_(mean)
            anchor.sub_(speed, alpha=self.rate)
        bucket.load_weights(anchor - since)


@dataclass(frozen=True)
class Streaming(Schedule):
    """Fragments of buckets in turn, each averaged every ``period`` steps and merged ``delay`` steps later."""

    period: int
    delay: int = 0
    fragments: int = 1
    outer: Slow = Slow()

    @property
    @override
    def has_late_results(self) -> bool:
        return self.delay > 0

    @property
    def merges(self) -> tuple[Merge, ...]:
        return (self.outer,)

    @override
    def build_units(self, buckets: Sequence[Bucket]) -> Sequence[SyncUnit]:
        return [Fragment(i, tuple(buckets[i :: self.fragments])) for i in range(self.fragments)]

    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        every = self.period // self.fragments
        return [
            Transfer(part, step + self.delay, self.outer)
            for turn, part in enumerate(units)
            if (step + 1 - turn * every) % self.period == 0
        ]


def test_outer_steps_of_rate_one_are_delayed_updates() -> None:
    for period in (1, 4):
        ours = Run(Streaming(period), settings={"momentum": 0.9, "steps": 16}).whole()
        theirs = Run(f"delayed(0, {period}, pull='swap')", settings={"momentum": 0.9, "steps": 16}).whole()
        assert distance(ours.weights(), theirs.weights()) < 1e-6
        assert same_bits(ours.weights(0), ours.weights(1))


def test_fragments_on_identical_batches_are_one_worker() -> None:
    schedule = Streaming(4, delay=3, fragments=2)
    several = Run(schedule, 2, APART, alike=True, workload=pieces, settings={"steps": 14}).whole()
    alone = Run("synchronous", 1, APART, alike=True, workload=pieces, settings={"steps": 14}).whole()
    assert len(several.replicas[0].buckets.buckets) == 4
    assert distance(several.weights(), alone.weights()) < 1e-6


@pytest.mark.parametrize("codec", ["identity", "error_feedback(topk(density=0.3))"])
def test_what_a_merge_of_ones_own_keeps_goes_into_checkpoints(codec: str, tmp_path: Path) -> None:
    schedule = Streaming(4, delay=3, fragments=2, outer=Slow(0.7, 0.9))

    def run(folder: str, steps: int) -> Run:
        settings = {"steps": steps, "checkpoint_every": 3, "momentum": 0.9}
        return Run(
            schedule,
            2,
            {**APART, "codec": codec},
            workload=pieces,
            settings=settings,
            folder=tmp_path / folder,
        )

    whole = run("whole", 18).whole()
    run("parts", 9).whole()
    shared = load_tree(tmp_path / "parts" / "step-00000009" / "shared.safetensors")
    assert set(shared["exchanges"]["merges"]["Slow"]["0"]) == {"anchor", "has_diverged", "speed"}
    for start in (3, 9):
        resumed = run("parts", 18)
        for replica in resumed.replicas:
            replica.resume(start)
        resumed.whole()
        for got, wanted in zip(resumed.replicas, whole.replicas, strict=True):
            assert same_tree(dict(got.model.state_dict()), dict(wanted.model.state_dict()))
            assert got.engine.sent_nbytes == wanted.engine.sent_nbytes


# --- what is refused ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned(Schedule):
    """Whatever merges it is given."""

    merges: tuple[Merge, ...]
    planned: Merge
    by: int = 0

    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        return [Transfer(part, step + self.by, self.planned) for part in units]


def test_a_merge_that_was_not_named_never_starts() -> None:
    run = Run(Planned((Replace(),), Swap()))
    with pytest.raises(Unsupported, match="step 0: plans merge Swap, which is not among its merges"):
        run.steps(1)
    assert [replica.engine.sent_nbytes for replica in run.replicas] == [0, 0]


def test_a_late_result_of_a_schedule_that_is_not_late_never_starts() -> None:
    run = Run(Planned((Replace(),), Replace(), by=2))
    with pytest.raises(
        Unsupported,
        match="step 0: plans a result for step 2, and its has_late_results is False: make it True",
    ):
        run.steps(1)
    assert [replica.engine.sent_nbytes for replica in run.replicas] == [0, 0]


def test_a_merge_named_twice_is_refused() -> None:
    with pytest.raises(Unsupported, match="merge Replace is named twice"):
        Run(Planned((Replace(), Replace(0.1)), Replace()))


@dataclass(frozen=True)
class Some(Planned):
    """Only the first parts."""

    count: int = 1

    @override
    def build_units(self, buckets: Sequence[Bucket]) -> Sequence[SyncUnit]:
        return buckets[: self.count]


def test_a_bucket_that_nothing_moves_is_refused() -> None:
    with pytest.raises(Unsupported, match="none of its units contains bucket 3, which would train apart"):
        Run(Some((Replace(),), Replace(), count=3), parts=APART, workload=pieces)


# --- parts that go at different times -----------------------------------------------------------------------------


@dataclass(frozen=True)
class EveryOther(Delayed):
    """Even buckets at even steps, odd ones at odd steps."""

    @override
    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        return [t for t in Delayed.plan(self, state, units, step) if t.unit.index % 2 == step % 2]


def test_buckets_that_take_turns_each_count_their_own_steps() -> None:
    """Identical batches: every mean is the own part, so nothing may differ from one worker alone."""
    several = Run(
        EveryOther(delay=2, pull="swap"), 2, APART, alike=True, workload=pieces, settings={"momentum": 0.9}
    ).steps(14)
    alone = Run("synchronous", 1, APART, alike=True, workload=pieces, settings={"momentum": 0.9}).steps(14)
    assert distance(several.weights(), alone.weights()) < 1e-6


@dataclass(frozen=True)
class PostLocal(Schedule):
    """Synchronous for some steps, then blocks of own updates."""

    until: int
    period: int

    merges: ClassVar[tuple[Merge, ...]] = (Replace(), Swap())

    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        if step < self.until:
            return [Transfer(part, step, Replace()) for part in units]
        return [Transfer(part, step, Swap()) for part in units] if (step + 1) % self.period == 0 else []


def test_two_merges_in_one_run() -> None:
    run, plain = (Run(how, settings={"momentum": 0.9}) for how in (PostLocal(8, 4), "synchronous"))
    run.steps(8)
    plain.steps(8)
    assert same_bits(run.weights(), plain.weights())
    run.steps(3)
    assert not same_bits(run.weights(0), run.weights(1))
    run.steps(1)
    assert distance(run.weights(0), run.weights(1)) < 1e-6


@dataclass(frozen=True)
class Together(Schedule):
    """Synchronous SGD in a single exchange."""

    merges: ClassVar[tuple[Merge, ...]] = (Replace(),)

    @override
    def build_units(self, buckets: Sequence[Bucket]) -> Sequence[SyncUnit]:
        return [Fragment(0, tuple(buckets))]

    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        return [Transfer(part, step, Replace()) for part in units]


def test_several_buckets_in_one_exchange_are_the_same_training() -> None:
    runs = [Run(how, 3, APART, workload=pieces).whole() for how in (Together(), "synchronous")]
    assert same_bits(runs[0].weights(), runs[1].weights())
    exchanges = [sum(event["event"] == "exchange" for event in run.events[0]) for run in runs]
    assert exchanges == [20, 80]


# --- what rides beside, and what is learned together --------------------------------------------------------------


@dataclass(frozen=True)
class Hearing(EveryOther):
    """Adds up what it hears, in its state."""

    @override
    def update_state(self, state: State, stats: SharedStats) -> State:
        return {
            **state,
            "seen": state.get("seen", 0.0) + stats.sums["seen"],
            "heard": state.get("heard", 0) + 1,
        }


@pytest.mark.parametrize("rests", [0, 3])
def test_numbers_of_ones_own_are_summed_once(rests: int) -> None:
    """Whatever number of exchanges a step starts, or none."""

    class Seen(Extension):
        def __init__(self, rank: int) -> None:
            self._rank = rank

        @property
        @override
        def names(self) -> Sequence[str]:
            return ("seen",)

        @override
        def report_metadata(self, metadata: StepMetadata) -> Mapping[str, float]:
            return {"seen": 10.0**self._rank}

    run = Run(Hearing(delay=0, period=1 + rests), 3, APART, workload=pieces)
    for replica in run.replicas:
        replica.engine.extend(Seen(replica.runtime.comm.rank))
    run.steps(12)
    states = [replica.engine._schedule_state for replica in run.replicas]
    assert [state["seen"] for state in states] == [12 * 111.0] * 3
    assert states[0]["heard"] == 12 // (1 + rests)


class Learning(Reducer):
    """A reducer that counts, in every part's state, what is learned of all parts together."""

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        return CodecState({"steps": []}, {})

    async def reduce(
        self, channel: Channel, slot: StateSlot, contribution: Contribution, *, step: int
    ) -> ReduceResult:
        def together(states: Mapping[int, CodecState]) -> Mapping[int, CodecState]:
            return {n: CodecState({"steps": [*s.shared["steps"], step]}, {}) for n, s in states.items()}

        total, metadata = await channel.get_collective("direct")(
            channel, contribution.tensor, contribution.metadata
        )
        return ReduceResult(total / channel.size, channel.size, metadata, None, together)


def test_what_is_learned_of_all_parts_is_learned_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farflung.recipes.components._build_reducer", lambda recipe: Learning())
    run = Run("pipelined(2)", 2, APART, workload=pieces).steps(5)
    for replica in run.replicas:
        assert [slot.state.shared["steps"] for slot in replica.engine.reducer_states] == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize("schedule", ["diloco(4)", "delayed(2)", "delayed(2, pull='swap')"])
def test_a_restart_holds_no_second_copy_of_the_model(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Run(schedule, 2, APART, workload=pieces).replicas[0].engine
    copies: list[weakref.ref[Tensor]] = []
    held: list[int] = []
    weights = GradientBucket.copy_weights

    def watched(self: GradientBucket) -> Tensor:
        copy = weights(self)
        copies.append(weakref.ref(copy))
        held.append(sum(each() is not None for each in copies))
        return copy

    monkeypatch.setattr(GradientBucket, "copy_weights", watched)
    engine.restart()
    kept = held[-1]
    engine.restart()
    assert max(held) == kept
