"""Samples scored in the wait for exchanges: what a score is, that it leaves no trace, and when it is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from farflung.config import Training
from farflung.devices import DeviceProfile
from farflung.engine import AccumulatedGradient
from farflung.errors import ConfigError
from farflung.loop import Replica
from farflung.recipes import parse_recipe
from farflung.runs import make_replica
from farflung.sampling import GroupedImportance, UniformSampler
from farflung.sampling.scoring import ScoringSampler, freeze_batch_norm, score_batch
from farflung.sim import LinkModel, VirtualWorld
from farflung.telemetry import Event, Telemetry
from farflung.types import Batch, Decision, Draw, DrawContext, Json, SampleIds, ScoringTimes, WaitWork
from farflung.workloads import Quadratic
from tests.covering import thorough
from tests.helpers import same_bits


class Scored(ScoringSampler, UniformSampler):
    """Uniform sampling that has some samples scored all the same.

    Args:
      seed: of the order.
      chunks: how many samples each.
      by: what they are scored by.
      statistics: what running statistics are updated by.
    """

    def __init__(
        self, seed: int, chunks: Sequence[int] = (3, 2), by: Any = "loss", statistics: Any = "batch"
    ) -> None:
        super().__init__(seed)
        self.scored_by, self.statistics, self._chunks = by, statistics, chunks
        self.seen: list[tuple[int, list[int], Tensor]] = []
        self.spares: list[ScoringTimes] = []

    def plan_wait(
        self, context: DrawContext, decide: Callable[[str, int, Callable[[], Json]], Decision]
    ) -> WaitWork:
        assert isinstance(context.pool, int)
        return WaitWork([torch.arange(count) for count in self._chunks])

    def record_scores(self, ids: SampleIds, scores: Tensor, step: int) -> None:
        self.seen.append((step, ids.tolist(), scores))

    def record_times(self, times: ScoringTimes) -> None:
        self.spares.append(times)


class Net(nn.Module):
    """Has all that a score must leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.drop(self.norm(self.first(inputs))))
        return outputs


class Classes:
    """A workload of three classes."""

    name = "own/classes"

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch.inputs), batch.targets, reduction="none")


def some(count: int = 5) -> Batch:
    torch.manual_seed(3)
    return Batch(torch.randn(count, 4), torch.randint(3, (count,)))


# --- what a score is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["loss", "gradient_bound"])
def test_a_score_leaves_no_trace(by: Any) -> None:
    net, batch = Net(), some()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    scores = score_batch(Classes(), net, batch, by)  # type: ignore[arg-type]
    assert scores.dtype == torch.float32
    assert scores.shape == (5,)
    assert not scores.requires_grad
    assert same_bits(torch.get_rng_state(), random)
    assert all(same_bits(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_scores_are_losses_and_norms_of_their_gradients_by_the_output() -> None:
    net, batch = Net(), some()
    net.eval()
    outputs = net(batch.inputs).detach()
    losses = nn.functional.cross_entropy(outputs, batch.targets, reduction="none")
    norms = (outputs.softmax(dim=1) - nn.functional.one_hot(batch.targets, 3)).norm(dim=1)
    net.train()
    torch.testing.assert_close(score_batch(Classes(), net, batch, "loss"), losses)  # type: ignore[arg-type]
    torch.testing.assert_close(score_batch(Classes(), net, batch, "gradient_bound"), norms)  # type: ignore[arg-type]


def test_a_loss_that_is_not_per_sample_is_refused() -> None:
    class Mean(Classes):
        def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
            return super().compute_losses(model, batch).mean()

    with pytest.raises(ConfigError, match=r"own/classes: its loss of 5 samples has shape \(\)"):
        score_batch(Mean(), Net(), some(), "loss")  # type: ignore[arg-type]


def test_a_loss_that_is_not_of_the_output_has_no_bound() -> None:
    class Weights(Classes):
        def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
            del model
            return batch.inputs.sum(dim=1)

    with pytest.raises(ConfigError, match="choose scored_by='loss'"):
        score_batch(Weights(), Net(), some(), "gradient_bound")  # type: ignore[arg-type]


# --- when it is taken -------------------------------------------------------------------------------------------

LATENCY_S, SAMPLE_S, BATCH = 1.0, 0.125, 4
"""An exchange of two replicas takes one latency."""


def run(
    sampler: Callable[[int], Any],
    *,
    schedule: str = "synchronous",
    steps: int = 3,
    latency_s: float = LATENCY_S,
) -> tuple[list[Replica], list[list[Event]]]:
    world = VirtualWorld(2, LinkModel(latency_s), SAMPLE_S)
    events: list[list[Event]] = [[], []]
    replicas = [
        make_replica(
            runtime,
            Quadratic(dim=6, samples=64),
            parse_recipe("synchronous").with_components(schedule=schedule, sampler=sampler),
            Training(steps, BATCH, 0.05, seed=3),
            Telemetry(rank, events[rank].append),
            shares=[torch.arange(0, 40), torch.arange(40, 64)],
        )
        for rank, runtime in enumerate(world.runtimes)
    ]
    world.run([replica.run() for replica in replicas])
    return replicas, events


def steps_of(events: list[Event], key: str) -> list[Any]:
    return [event[key] for event in events if event["event"] == "step"]


def test_scores_are_taken_while_the_exchange_is_under_way() -> None:
    (first, _), events = run(Scored)
    computing = 3 * BATCH * SAMPLE_S
    assert steps_of(events[0], "duration_s") == [pytest.approx(computing + LATENCY_S)] * 3
    assert steps_of(events[0], "scoring_s") == [pytest.approx(5 * SAMPLE_S)] * 3
    assert steps_of(events[0], "exposed_s") == [pytest.approx(LATENCY_S - 5 * SAMPLE_S)] * 3
    sampler = first.components.sampler
    assert isinstance(sampler, Scored)
    assert [(step, ids) for step, ids, _ in sampler.seen] == [
        (step, ids) for step in range(3) for ids in ([0, 1, 2], [0, 1])
    ]
    for spare in sampler.spares:
        seconds = (spare.compute_s, spare.wait_s, spare.scoring_s)
        assert seconds == pytest.approx((computing, LATENCY_S, 5 * SAMPLE_S))
        assert (spare.num_scored, spare.has_overlap) == (5, False)


def test_what_takes_longer_than_the_exchange_is_waited_for_and_seen() -> None:
    (first, _), events = run(lambda seed: Scored(seed, [16]))
    computing = 3 * BATCH * SAMPLE_S
    assert steps_of(events[0], "duration_s") == [pytest.approx(computing + 16 * SAMPLE_S)] * 3
    assert steps_of(events[0], "exposed_s") == [pytest.approx(0)] * 3
    assert isinstance(first.components.sampler, Scored)
    assert [spare.wait_s for spare in first.components.sampler.spares] == [pytest.approx(LATENCY_S)] * 3
    end = events[0][-1]
    assert end["time_s"]["scoring"] == pytest.approx(3 * 16 * SAMPLE_S)  # type: ignore[index,call-overload]


def test_what_is_left_of_the_time_is_nothing_where_it_may_be_rounding_alone() -> None:
    (first, _), events = run(Scored)
    assert events[0][-1]["time_s"]["other"] == 0.0  # type: ignore[index,call-overload]
    for off_s, left_s in [(math.ulp(8.0), 0.0), (-math.ulp(8.0), 0.0), (1e-6, -1e-6), (-1e-6, 1e-6)]:
        first.time_s.compute += off_s
        assert first._build_leg().time_s.other == pytest.approx(left_s, abs=1e-12)
        assert bool(first._build_leg().time_s.other) == bool(left_s), "a part that is counted twice shows"
        first.time_s.compute -= off_s


def test_exchanges_beside_computing_say_so() -> None:
    (first, _), _ = run(Scored, schedule="pipelined(width=2)")
    assert isinstance(first.components.sampler, Scored)
    assert all(spare.has_overlap for spare in first.components.sampler.spares)


def test_scores_are_those_of_the_model_before_the_update_and_change_no_bit() -> None:
    scored, _ = run(Scored)
    plain, events = run(UniformSampler)
    for one, other in zip(scored, plain, strict=True):
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
            assert same_bits(a, b)
    assert all("scoring_s" not in event for event in events[0])
    assert isinstance(scored[0].components.sampler, Scored)
    fresh, _ = run(Scored, steps=1)
    assert isinstance(fresh[0].components.sampler, Scored)
    at_start = fresh[0].components.sampler.seen[0][2]
    assert same_bits(scored[0].components.sampler.seen[0][2], at_start)


def test_a_sampler_that_scores_needs_a_share() -> None:
    world = VirtualWorld(1)
    with pytest.raises(ConfigError, match="--partition iid"):
        make_replica(
            world.runtimes[0],
            Quadratic(dim=6, samples=64),
            parse_recipe("synchronous").with_components(sampler=Scored),
            Training(2, BATCH, 0.05),
        )


class Picks(Scored):
    """Takes every other sample of what a step may take, and has the others scored."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.pools: list[list[int]] = []
        self.left: list[list[int]] = []

    def draw(self, context: DrawContext) -> Draw:
        assert isinstance(context.pool, Tensor)
        self.pools.append(context.pool.tolist())
        return Draw(context.pool[::2][: context.batch_size].repeat_interleave(2)[: context.batch_size])

    def plan_wait(
        self, context: DrawContext, decide: Callable[[str, int, Callable[[], Json]], Decision]
    ) -> WaitWork:
        assert isinstance(context.pool, Tensor)
        self.left.append(context.pool.tolist())
        return WaitWork([context.pool])


def test_of_a_stream_all_that_a_step_may_take_is_to_pick_from_and_what_was_not_picked_stays() -> None:
    stream = "rate(100.0, least=4, most=12, backlog=12)"
    parts = parse_recipe("synchronous").with_components(sampler=Picks, stream=stream)
    training = Training(steps=6, batch_size=4, learning_rate=0.05, seed=3)
    world = VirtualWorld(1, seconds_per_sample=0.01)
    replica = make_replica(world.runtimes[0], Quadratic(dim=6, samples=64), parts, training)
    world.run([replica.run()])
    sampler = replica.components.sampler
    assert isinstance(sampler, Picks)
    for step, (pool, left) in enumerate(zip(sampler.pools, sampler.left, strict=True)):
        assert 4 <= len(pool) <= 12
        assert left == [one for one in pool if one not in pool[::2][:2]]
        assert all(one in later for later in sampler.pools[step + 1 : step + 2] for one in left)
    assert len(sampler.pools[-1]) == 12, "more came than was used"


class Weighed(UniformSampler):
    """Steps that weigh by the replica's share, with something to tell."""

    def draw(self, context: DrawContext) -> Draw:
        return Draw(super().draw(context).ids, weight=context.share, metrics={"said": context.step})


def test_a_draw_weighs_and_tells() -> None:
    replicas, events = run(Weighed, steps=1)
    assert steps_of(events[0], "said") == [0]
    task, shares = Quadratic(dim=6, samples=64), (torch.arange(40), torch.arange(40, 64))
    plain, training = parse_recipe("synchronous"), Training(1, BATCH, 0.05, seed=3)
    model = make_replica(VirtualWorld(1).runtimes[0], task, plain, training).model
    (parameter,) = model.parameters()
    gradient = torch.zeros_like(parameter)
    for rank, (share, weight) in enumerate(zip(shares, (40 / 32, 24 / 32), strict=True)):
        ids = plain.build_components(3, rank).sampler.draw(DrawContext(0, 0, 1, BATCH, len(share))).ids
        model.zero_grad()
        task.compute_losses(model, task.load_datasets()[0].take(share[ids], train=True)).mean().backward()
        assert parameter.grad is not None
        gradient += weight * parameter.grad / 2
    (moved,) = replicas[0].model.parameters()
    torch.testing.assert_close(moved.detach(), parameter.detach() - 0.05 * gradient)


# --- gradients and statistics in the wait -------------------------------------------------------------------------


class Fills(Scored):
    """Has the gradients of some samples computed."""

    @override
    def plan_wait(
        self, context: DrawContext, decide: Callable[[str, int, Callable[[], Json]], Decision]
    ) -> WaitWork:
        return WaitWork((), [torch.arange(4, 6), torch.arange(9, 10)])


def test_gradients_of_the_wait_are_in_the_next_steps_mean_by_their_samples() -> None:
    replicas, events = run(Fills, steps=2)
    assert steps_of(events[0], "scoring_s") == [pytest.approx(3 * 3 * SAMPLE_S)] * 2
    task, shares = Quadratic(dim=6, samples=64), (torch.arange(40), torch.arange(40, 64))
    plain, training = parse_recipe("synchronous"), Training(2, BATCH, 0.05, seed=3)
    model = make_replica(VirtualWorld(1).runtimes[0], task, plain, training).model
    (parameter,) = model.parameters()
    samplers = [plain.build_components(3, rank).sampler for rank in range(2)]

    def gradient(ids: Tensor) -> Tensor:
        batch = task.load_datasets()[0].take(ids, train=True)
        (found,) = torch.autograd.grad(task.compute_losses(model, batch).mean(), parameter)
        return found

    held: list[Tensor] = []
    for step in range(2):
        means = []
        for rank, (sampler, share) in enumerate(zip(samplers, shares, strict=True)):
            own = gradient(share[sampler.draw(DrawContext(step, 0, 1, BATCH, len(share))).ids])
            means.append((4 * own + 3 * held[rank]) / 7 if held else own)
        held = [gradient(share[torch.tensor([4, 5, 9])]) for share in shares]
        with torch.no_grad():
            parameter.sub_(0.05 * (means[0] + means[1]) / 2)
    (found,) = replicas[0].model.parameters()
    torch.testing.assert_close(found, parameter)


def test_what_is_held_goes_on_from_its_state_and_is_given_once() -> None:
    net, other = nn.Linear(3, 1), nn.Linear(3, 1)
    held, resumed = AccumulatedGradient(net), AccumulatedGradient(other)
    assert held.state_dict() == {}
    held.add(net(torch.ones(2, 3)).squeeze(1))
    resumed.load_state_dict(held.state_dict())
    assert held.compute_share(6) == resumed.compute_share(6) == 0.75
    for one, model in ((held, net), (resumed, other)):
        one.load_gradients(6)
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[0.25] * 3]
        model.weight.grad = None
        one.load_gradients(6)
        assert model.weight.grad is None


def test_gradients_that_are_not_finite_are_left_out() -> None:
    net = nn.Linear(3, 1)
    held = AccumulatedGradient(net)
    held.add(net(torch.tensor([[1.0, math.nan, 0.0]])).squeeze(1))
    assert held.compute_share(6) == 1


@pytest.mark.parametrize("momentum", [0.1, None])
def test_inside_still_no_running_statistics_move(momentum: float | None) -> None:
    net = Net()
    net.norm.momentum = momentum
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with freeze_batch_norm(net):
        moved = net(some().inputs)
    assert all(same_bits(value, before[name]) for name, value in net.state_dict().items())
    net.drop.p = 0.0
    with freeze_batch_norm(net):
        moved = net(some().inputs)
    torch.testing.assert_close(moved, net(some().inputs)), "the batch's own statistics are used"
    assert net.norm.momentum == momentum
    assert net.norm.num_batches_tracked == 1


# --- groups by time ---------------------------------------------------------------------------------------------


class ByTime(GroupedImportance):
    """Groups as large as there is time for; notes what each step has had to spare."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, rule="paper", groups="bacc", chunk=4, every=5)
        self.spares: list[ScoringTimes] = []

    def record_times(self, times: ScoringTimes) -> None:
        self.spares.append(times)
        super().record_times(times)


@pytest.mark.parametrize(
    ("speeds", "chunks", "mbps"),
    [
        ((1.0, 1.0, 1.0), 1, 10.0),
        ((1.0, 1.7, 2.9), 2, 50.0),
        *thorough(
            ((1.0, 1.0, 1.0), 1, 50.0),
            ((1.0, 3.0, 1.0), 1, 5.0),
            ((1.0, 3.0, 2.0), 2, 10.0),
            ((1.0, 1.7, 2.9), 2, 5.0),
            ((1.0, 2.0, 3.0), 2, 10.0),
        ),
    ],
)
def test_groups_by_time_end_within_a_chunk_of_the_aggregation(
    speeds: tuple[float, ...], chunks: int, mbps: float
) -> None:
    forward_s = [times * 5e-4 for times in speeds]
    devices = [DeviceProfile(forward_s=each, optimizer_s=0.0) for each in forward_s]
    world = VirtualWorld(3, LinkModel(0.002, mbps * 1e6), device=devices)
    task, whole = Quadratic(dim=4000, samples=900), torch.arange(900)
    replicas = [
        make_replica(
            runtime,
            task,
            parse_recipe("mercury").with_components(sharing="none", sampler=ByTime),
            Training(37, BATCH, 0.05, seed=3),
            shares=list(whole.chunk(3)),
        )
        for runtime in world.runtimes
    ]
    world.run([replica.run() for replica in replicas])
    # In step 0, which the first choice goes by, all begin together, as they do not later on where they are unlike. Who
    # is through within a chunk of its own time begins the next step by as much sooner or later than others, which their
    # waits follow: by some chunks of the slowest, until after some choices nobody is later than the exchange.
    first, settled = (1, 1) if len(set(speeds)) == 1 else (6, 26)
    most = 0
    for replica, own_s in zip(replicas, forward_s, strict=True):
        sampler = replica.components.sampler
        assert isinstance(sampler, ByTime)
        for spare in sampler.spares[first:]:
            most = max(most, spare.num_scored)
            assert abs(spare.wait_s - spare.scoring_s) <= chunks * 4 * max(forward_s) * (1 + 1e-9)
        for spare in sampler.spares[settled:]:
            assert -1e-9 <= spare.wait_s - spare.scoring_s <= 4 * own_s * (1 + 1e-9)
    assert most > 4, "more than the least, or this shows nothing"
