"""What every sampler promises, tried on a table of all of them; and uniform: each sample once per pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.sampling import SAMPLERS, BalancedSampler, GroupedImportance, UniformSampler
from farflung.sampling.scoring import ScoringSampler
from farflung.state_trees import load_tree, save_tree
from farflung.types import Decision, Draw, DrawContext, Json, Sampler, ScoringTimes, State
from tests.helpers import same_bits, same_tree


@dataclass(frozen=True)
class Row:
    """One sampler to try: adding a sampler is adding a row.

    Args:
      make: from a seed that is equal on all replicas.
      fewest: samples that it can pick from.
    """

    make: Callable[[int], Sampler]
    fewest: int = 1


def in_a_run(seed: int) -> GroupedImportance:
    """One that is told of gradients, and uniform until it has learned enough."""
    sampler = GroupedImportance(seed)
    assert sampler.gain is not None
    sampler.gain.begin_run("")
    return sampler


def shared_out(seed: int) -> BalancedSampler:
    """One whose batches were decided."""
    sampler = BalancedSampler(seed)
    sampler.set_rank(0, 2)
    sampler.set_counts([8, 8])
    return sampler


ROWS: dict[str, Row] = {
    "balanced": Row(BalancedSampler),
    "balanced (shared out)": Row(shared_out),
    "grouped_importance": Row(GroupedImportance),
    "grouped_importance (two)": Row(partial(GroupedImportance, rule="two", groups=10), fewest=10),
    "grouped_importance (by time)": Row(partial(GroupedImportance, groups="bacc", chunk=3, every=2)),
    "grouped_importance (paper)": Row(partial(GroupedImportance, rule="paper"), fewest=8),
    "grouped_importance (paper, by time)": Row(
        partial(GroupedImportance, rule="paper", groups="bacc", chunk=3, every=2)
    ),
    "grouped_importance (in a run)": Row(in_a_run),
    "grouped_importance (fill)": Row(partial(GroupedImportance, rule="fill", groups=4), fewest=4),
    "grouped_importance (half)": Row(partial(GroupedImportance, rule="half", groups=4), fewest=4),
    "uniform": Row(UniformSampler),
}
"""Keys are names in SAMPLERS, with a word in brackets where one name has several rows."""

POOL = 50


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> Row:
    return ROWS[request.param]


@pytest.fixture
def make(row: Row) -> Callable[[int], Sampler]:
    return row.make


def view(step: int, rank: int = 0, size: int = 2, batch_size: int = 8, pool: int = POOL) -> DrawContext:
    return DrawContext(step, rank, size, batch_size, pool)


def draws(sampler: Sampler, steps: range, rank: int = 0) -> list[Draw]:
    taken = []
    for step in steps:
        taken.append(sampler.draw(view(step, rank)))
        if isinstance(sampler, ScoringSampler):
            score(sampler, view(step, rank))
    return taken


def score(sampler: ScoringSampler, seen: DrawContext) -> None:
    """What a replica does in the wait of a step: a sample's score falls with its number, and as steps go by."""

    def decide(name: str, step: int, local: Callable[[], Json]) -> Decision:
        return Decision(name, step, local(), rank=seen.rank)

    count = 0
    for ids in sampler.plan_wait(seen, decide).scores:
        sampler.record_scores(ids, 3.0 / (1 + ids + seen.step), seen.step)
        count += len(ids)
    sampler.record_times(ScoringTimes(1.0, 0.5 + seen.step % 3, 0.1 * count, count, has_overlap=False))


def same_draws(one: list[Draw], other: list[Draw]) -> bool:
    def same(a: Draw, b: Draw) -> bool:
        if a.weights is None or b.weights is None:
            return a.weights is b.weights and same_bits(a.ids, b.ids)
        return same_bits(a.ids, b.ids) and same_bits(a.weights, b.weights)

    return len(one) == len(other) and all(map(same, one, other))


def test_the_table_has_every_sampler() -> None:
    assert {name.partition(" ")[0] for name in ROWS} == set(SAMPLERS)


def test_a_batch_is_ids_of_the_pool_and_their_weights(make: Callable[[int], Sampler]) -> None:
    for rank in range(2):
        for draw in draws(make(3), range(20), rank):
            assert draw.ids.dtype == torch.int64
            assert draw.ids.shape == (8,)
            assert 0 <= int(draw.ids.min()) <= int(draw.ids.max()) < POOL
            if draw.weights is not None:
                assert draw.weights.shape == (8,)
                assert (draw.weights > 0).all()


def test_the_seed_alone_decides(make: Callable[[int], Sampler]) -> None:
    torch.manual_seed(1)
    first = draws(make(3), range(10))
    torch.manual_seed(2)
    assert same_draws(draws(make(3), range(10)), first)
    assert not same_draws(draws(make(4), range(10)), first)


def test_drawing_leaves_the_global_random_state_alone(make: Callable[[int], Sampler]) -> None:
    sampler, before = make(3), torch.get_rng_state()
    draws(sampler, range(10))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("done", [0, 1, 7])
def test_it_resumes_where_it_was_saved(make: Callable[[int], Sampler], done: int, tmp_path: Path) -> None:
    sampler = make(3)
    draws(sampler, range(done))
    save_tree(tmp_path / "sampler.safetensors", {"sampler": sampler.state_dict()})
    saved: State = load_tree(tmp_path / "sampler.safetensors")["sampler"]
    wanted = draws(sampler, range(done, done + 10))
    resumed = make(3)
    draws(resumed, range(2))
    resumed.load_state_dict(saved)
    assert same_tree(resumed.state_dict(), saved)
    assert same_draws(draws(resumed, range(done, done + 10)), wanted)


def test_as_few_samples_as_it_takes_serve(row: Row) -> None:
    draw = row.make(3).draw(view(0, rank=1, size=3, pool=row.fewest))
    assert draw.ids.shape == (8,)
    assert set(draw.ids.tolist()) <= set(range(row.fewest))


# --- uniform ----------------------------------------------------------------------------------------------------


def sequence_of(pool: int, plan: list[tuple[int, int]], seed: int = 0) -> tuple[list[int], list[Draw]]:
    """The ids drawn, in the order of the global sequence, for steps of ``(replicas, batch size)``."""
    state: State | None = None
    sequence: list[int] = []
    taken: list[Draw] = []
    for step, (size, batch_size) in enumerate(plan):
        after = []
        for rank in range(size):
            sampler = UniformSampler(seed)
            if state is not None:
                sampler.load_state_dict(state)
            draw = sampler.draw(view(step, rank, size, batch_size, pool))
            taken.append(draw)
            sequence += draw.ids.tolist()
            after.append(sampler.state_dict())
        assert all(other == after[0] for other in after)
        state = after[0]
    return sequence, taken


@given(
    pool=st.integers(1, 40),
    plan=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 12)), min_size=1, max_size=12),
    seed=st.integers(0, 3),
)
def test_each_sample_comes_once_per_pass_whatever_the_number_of_replicas(
    pool: int, plan: list[tuple[int, int]], seed: int
) -> None:
    sequence, _ = sequence_of(pool, plan, seed)
    assert len(sequence) == sum(size * batch_size for size, batch_size in plan)
    for start in range(0, len(sequence), pool):
        counts = Counter(sequence[start : start + pool])
        assert max(counts.values()) == 1
        if len(sequence) - start >= pool:
            assert counts.keys() == set(range(pool))


def test_the_sequence_does_not_depend_on_how_it_is_shared_out() -> None:
    alone, _ = sequence_of(30, [(1, 4)] * 15)
    for plan in ([(2, 2)] * 15, [(4, 1)] * 15, [(3, 4)] * 5, [(2, 2)] * 5 + [(4, 1)] * 5 + [(1, 20)]):
        assert sequence_of(30, plan)[0] == alone


def test_passes_are_shuffled_each_in_its_own_order() -> None:
    sequence, _ = sequence_of(40, [(2, 10)] * 6)
    passes = [sequence[start : start + 40] for start in (0, 40, 80)]
    assert len({tuple(p) for p in [*passes, list(range(40))]}) == 4


def test_one_sampler_through_many_passes_equals_fresh_ones() -> None:
    sampler = UniformSampler(0)
    kept = torch.cat([sampler.draw(view(step, 0, 1, 7, 11)).ids for step in range(20)])
    fresh, _ = sequence_of(11, [(1, 7)] * 20)
    assert kept.tolist() == fresh


def test_no_weights() -> None:
    assert all(draw.weights is None for draw in draws(UniformSampler(1), range(5)))


def test_where_part_of_the_data_is_at_hand_the_oldest_come_first() -> None:
    arrived = torch.tensor([9, 4, 7, 1])
    assert UniformSampler(0).draw(DrawContext(0, 1, 2, 3, arrived)).ids.tolist() == [9, 4, 7]
