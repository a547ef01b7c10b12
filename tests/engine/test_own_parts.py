"""Parts written outside of the package: a merge, an extension, and a sampler that moves its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from farflung.comm import ExchangeChannel, Purpose
from farflung.engine import Arrival, Extension, StepResult, TrainingLoop
from farflung.errors import CheckpointError
from farflung.sampling import UniformSampler
from farflung.schedules import DiLoCo, Synchronous
from farflung.tasks import Pending
from farflung.types import (
    Draw,
    DrawContext,
    Merge,
    MergeBucket,
    MergeState,
    Payload,
    Schedule,
    State,
    SyncUnit,
    TensorSpec,
    Transfer,
    get_anchor,
)
from tests.helpers import same_bits, same_tree
from tests.schedules.runs import APART, Run, distance, pieces

# --- a merge: SlowMo ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlowMo(Merge):
    r"""Slow momentum on the way of a block of local steps (Wang et al. 2020, Alg. 1).

    .. math:: u \leftarrow \beta u + \tfrac1\gamma (a - \bar w), \qquad a \leftarrow a - \alpha \gamma u
    """

    learning_rate: float
    rate: float = 1.0
    momentum: float = 0.6

    @override
    def init(self, weights: Tensor) -> MergeState:
        return MergeState(weights, {"slow": torch.zeros_like(weights)})

    @override
    def contribute(self, bucket: MergeBucket, state: MergeState, delay: int) -> tuple[Tensor, State]:
        own = get_anchor(state) - bucket.copy_weights()
        return own.clone(), {"contribution": own}

    @override
    def apply(
        self, bucket: MergeBucket, state: MergeState, saved: State, mean: Tensor | None, delay: int
    ) -> None:
        anchor, slow = get_anchor(state), state.shared["slow"]
        if mean is not None:
            slow.mul_(self.momentum).add_(mean, alpha=1 / self.learning_rate)
            anchor.sub_(slow, alpha=self.rate * self.learning_rate)
        bucket.load_weights(anchor)


@dataclass(frozen=True, slots=True)
class Blocks(Schedule):
    """A SlowMo step after every block of local steps."""

    merge: SlowMo
    sync_every: int = 4

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        return (self.merge,)

    @override
    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        return [] if (step + 1) % self.sync_every else [Transfer(part, step, self.merge) for part in units]


def test_a_merge_of_ones_own_equals_the_one_that_has_the_same_equation() -> None:
    """With a constant learning rate SlowMo is DiLoCo with SGD inside and momentum that is not Nesterov's."""
    settings = {"steps": 15, "learning_rate": 0.05}
    ours = Run(Blocks(SlowMo(0.05, 0.7, 0.6)), 3, APART, workload=pieces, settings=settings).steps(15)
    theirs = DiLoCo(sync_every=4, outer_rate=0.7, outer_momentum=0.6, nesterov=False)
    expected = Run(theirs, 3, APART, workload=pieces, settings=settings).steps(15)
    assert distance(ours.weights(), expected.weights()) < 1e-6


def test_a_merge_of_ones_own_is_saved_and_resumed_without_code_of_its_own(tmp_path: Path) -> None:
    def run(folder: str) -> Run:
        settings = {"steps": 12, "checkpoint_every": 3, "momentum": 0.9}
        return Run(Blocks(SlowMo(0.05)), workload=pieces, settings=settings, folder=tmp_path / folder)

    whole, resumed = run("whole").whole(), run("whole")
    for replica in resumed.replicas:
        replica.resume(6)
    assert same_bits(resumed.whole().weights(), whole.weights())


# --- an extension: the norm of the merged gradient ------------------------------------------------------------------


class GradientNorm(Extension):
    """Adds the norm of a step's merged gradient to its event."""

    def __init__(self) -> None:
        self._square = 0.0

    @override
    def handle_arrivals(self, arrivals: Sequence[Arrival]) -> None:
        self._square = sum(float(arrival.result.mean.square().sum()) for arrival in arrivals)

    @override
    async def finish_step(self, result: StepResult) -> None:
        result.report["gradient_norm"] = self._square**0.5


@dataclass(frozen=True, slots=True)
class Watched(Synchronous):
    """Synchronous SGD, of which the norms are reported."""

    @override
    def build_extensions(self, loop: TrainingLoop) -> Sequence[Extension]:
        return (GradientNorm(),)


def test_an_extension_reports_the_norm_of_the_merged_gradient() -> None:
    run = Run(Watched(), 2, APART, workload=pieces, settings={"learning_rate": 0.05})
    before = run.weights()
    for event in run.steps(1).step_events():
        assert event["gradient_norm"] == pytest.approx(float((run.weights() - before).norm()) / 0.05)
    plain = Run("synchronous", 2, APART, workload=pieces, settings={"learning_rate": 0.05}).steps(1)
    assert same_bits(plain.weights(), run.weights())
    assert "gradient_norm" not in plain.step_events()[0]


# --- a system: a sampler with a resharding of its own ---------------------------------------------------------------


class Rotating(UniformSampler):
    """Each rank draws from its own half of the ids in turn, and passes the half on to the next rank every few steps."""

    def __init__(self, seed: int, ids: Tensor, every: int) -> None:
        super().__init__(seed)
        self.ids, self.every = ids, every

    @override
    def draw(self, context: DrawContext) -> Draw:
        start = context.step * context.batch_size
        return Draw(self.ids[torch.arange(start, start + context.batch_size) % len(self.ids)])

    @override
    def build_extensions(self, loop: TrainingLoop) -> Sequence[Extension]:
        return (Rotation(self, loop),)


class Rotation(Extension):
    """Passes ids to the next rank beside training; they are in force from a step that all ranks know.

    A resumed run repeats a round that was in flight.
    """

    key: ClassVar[str] = "rotation"

    def __init__(self, sampler: Rotating, loop: TrainingLoop) -> None:
        self._sampler, self._runtime = sampler, loop.runtime
        self._round: tuple[int, Pending[Tensor]] | None = None

    @override
    async def prepare_step(self, step: int) -> None:
        if self._round is not None and step == self._round[0] + 2:
            self._sampler.ids, self._round = await self._round[1], None
        if step and step % self._sampler.every == 0:
            self._begin(step)

    def _begin(self, step: int) -> None:
        channel = ExchangeChannel(self._runtime.comm, Purpose.SHARING.build_exchange_id(step), 0)
        ids, hop = self._sampler.ids, channel.reserve_hops(1)

        async def swap() -> Tensor:
            channel.send(Payload((ids,)), (channel.rank + 1) % channel.size, hop)
            payload = await channel.recv(
                (channel.rank - 1) % channel.size, hop, (TensorSpec.from_tensor(ids),)
            )
            (moved,) = payload.iter_tensors()
            return moved.clone()

        self._round = step, self._runtime.launch(swap())

    @override
    def state_dict(self) -> State:
        return {"ids": self._sampler.ids, "round": -1 if self._round is None else self._round[0]}

    @override
    def load_state_dict(self, state: State) -> None:
        self._sampler.ids = state["ids"]
        if state["round"] >= 0:
            self._begin(state["round"])


def rotating(folder: Path) -> Run:
    """Returns a run of four ranks whose ids move every four steps."""
    return Run(
        "synchronous",
        4,
        APART,
        workload=pieces,
        settings={"steps": 15, "checkpoint_every": 1},
        folder=folder,
        sampler=lambda rank: Rotating(0, torch.arange(64)[rank::4].clone(), 4),
    )


def held(run: Run) -> list[Tensor]:
    samplers = [replica.sampler for replica in run.replicas]
    return [sampler.ids for sampler in samplers if isinstance(sampler, Rotating)]


def test_a_sampler_moves_its_samples_and_a_resumed_run_repeats_what_was_in_flight(tmp_path: Path) -> None:
    whole = rotating(tmp_path).whole()
    assert [int(ids[0]) for ids in held(whole)] == [1, 2, 3, 0], "three rounds of four ranks"
    assert sorted(torch.cat(held(whole)).tolist()) == list(range(64))
    for step in (5, 6, 9):  # in a round, after it, in the next
        resumed = rotating(tmp_path)
        for replica in resumed.replicas:
            replica.resume(step)
        resumed.whole()
        assert all(map(torch.equal, held(resumed), held(whole)))
        for ours, theirs in zip(resumed.replicas, whole.replicas, strict=True):
            assert same_tree(dict(ours.model.state_dict()), dict(theirs.model.state_dict()))


def test_a_state_without_its_extension_is_refused(tmp_path: Path) -> None:
    rotating(tmp_path).whole()
    plain = Run("synchronous", 4, APART, workload=pieces, folder=tmp_path)
    with pytest.raises(CheckpointError, match="not of this recipe"):
        plain.replicas[0].resume(6)
