"""Positions of the passes that a lost replica had taken are taken again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farflung.sampling import UniformSampler
from farflung.types import DrawContext

N, BATCH = 40, 3


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)))), max_size=8
    )
)
def test_each_position_is_taken_once_more_than_it_is_given_back(
    steps: list[tuple[int, list[tuple[int, int]]]],
) -> None:
    """Replicas that draw in turn and give back alike share out what none has, whatever their number."""
    samplers = [UniformSampler(1) for _ in range(5)]
    sizes: list[int] = []
    left: set[tuple[int, int]] = set()
    ids: dict[tuple[int, int], list[int]] = {}
    for step, (size, returns) in enumerate(steps):
        for before, rank in returns:
            if before < step and rank < sizes[before] and (before, rank) not in left:
                left.add((before, rank))
                for sampler in samplers:
                    sampler.return_batch(before, rank)
        sizes.append(size)
        for rank, sampler in enumerate(samplers):
            draw = sampler.draw(DrawContext(step, rank if rank < size else 0, size, BATCH, N))
            if rank < size:
                ids[step, rank] = draw.ids.tolist()
    sampler = samplers[0]
    taken = sorted(one for key, drawn in ids.items() if key not in left for one in drawn)
    returned = [sampler._list_samples(one.start, len(one), N).tolist() for one in sampler._returned_ranges]
    everything = sampler._list_samples(0, sampler._cursor, N).tolist() if sampler._cursor else []
    assert sorted([*taken, *(one for part in returned for one in part)]) == sorted(everything)


def test_what_was_given_back_is_kept_in_the_state() -> None:
    one, other = UniformSampler(1), UniformSampler(1)
    one.draw(DrawContext(0, 0, 2, BATCH, N))
    assert one.state_dict() == {"cursor": 2 * BATCH}
    one.return_batch(0, 1)
    other.load_state_dict(one.state_dict())
    view = DrawContext(1, 0, 1, 2 * BATCH, N)
    assert one.draw(view).ids.tolist() == other.draw(view).ids.tolist()
