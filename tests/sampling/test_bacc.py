"""Groups by time: as many chunks as the wait for exchanges has room for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.decisions import DecisionLog
from farflung.errors import ConfigError
from farflung.sampling import Bacc
from farflung.types import Decision, Json, ScoringTimes

PLENTY = 1000


class Deciding:
    """Decides as a replica does, and remembers what."""

    def __init__(self, replay: list[Decision] | None = None) -> None:
        self.log = DecisionLog(replay=replay)

    def __call__(self, name: str, step: int, local: Callable[[], Json]) -> Decision:
        return self.log.decide(name, step, local, rank=3)

    @property
    def made(self) -> list[tuple[str, int, Json]]:
        return [(each.name, each.step, each.value) for each in self.log.entries]


def wait(wait_s: float, scored: int = 64, scoring_s: float = 0.64) -> ScoringTimes:
    return ScoringTimes(1.0, wait_s, scoring_s, scored, has_overlap=False)


def sizes(
    bacc: Bacc, decide: Deciding, spares: list[ScoringTimes], most: int = PLENTY, first: int = 0
) -> list[int]:
    """The chunks of each step, where each has so much to spare."""
    found = []
    for step, spare in enumerate(spares, first):
        found.append(bacc.choose_chunks(step, most, decide))
        bacc.record_times(spare)
    return found


def test_a_group_fills_the_mean_wait_since_the_last_choice() -> None:
    decide = Deciding()
    waits = [2.0] + [3.0, 5.0, 4.9, 3.0] + [0.1] * 4 + [0.0]
    found = sizes(Bacc("x", chunk=10, every=4, share=0.5), decide, [wait(each) for each in waits])
    # A chunk of 10 takes 0.1 s: at step 1 the wait was 2 s, from 1 to 4 in the mean 3.975 s, from 5 to 8 0.1 s.
    assert found == [1] + [20] * 4 + [39] * 4 + [1]
    assert decide.made == [("group", 1, 20), ("group", 5, 39), ("group", 9, 1)]


def test_where_exchanges_overlap_with_computing_it_fills_a_share_of_that() -> None:
    bacc, decide = Bacc("x", chunk=4, every=10, share=0.25), Deciding()
    spare = ScoringTimes(compute_s=8.0, wait_s=100.0, scoring_s=1.0, num_scored=8, has_overlap=True)
    assert sizes(bacc, decide, [spare, spare]) == [1, 4]


def test_seconds_per_sample_are_of_all_that_were_scored() -> None:
    bacc, decide = Bacc("x", chunk=1, every=2, share=0.5), Deciding()
    few, many = wait(6.0, scored=1, scoring_s=3.0), wait(6.0, scored=9, scoring_s=2.0)
    assert sizes(bacc, decide, [wait(1.0, 1, 1.0), few, many, few])[-1] == 12


def test_one_chunk_is_scored_however_short_the_wait() -> None:
    assert sizes(Bacc("x", 64, 1, 0.5), Deciding(), [wait(0.0)] * 5) == [1] * 5


def test_no_more_is_scored_than_there_is() -> None:
    bacc, decide = Bacc("x", 10, 10, 0.5), Deciding()
    assert sizes(bacc, decide, [wait(2.0)] * 2, most=7) == [1, 7]
    assert bacc.choose_chunks(2, PLENTY, decide) == 20, "of a stream more may be held later"


def test_where_scoring_takes_no_time_all_are_scored() -> None:
    assert sizes(Bacc("x", 10, 10, 0.5), Deciding(), [wait(2.0, scoring_s=0.0)] * 2, most=7) == [1, 7]


def test_the_size_stays_where_nothing_was_scored() -> None:
    spares = [wait(2.0), *[wait(9.0, scored=0, scoring_s=0.0)] * 3]
    assert sizes(Bacc("x", 10, 1, 0.5), Deciding(), spares) == [1, 20, 20, 20]


@given(
    waits=st.lists(st.floats(0, 50), min_size=1, max_size=30), every=st.integers(1, 7), cut=st.integers(0, 30)
)
def test_it_goes_on_from_its_state_and_a_replay_asks_no_clock(
    waits: list[float], every: int, cut: int
) -> None:
    whole, decide = Bacc("x", 10, every, 0.5), Deciding()
    found = sizes(whole, decide, [wait(each) for each in waits])
    before, after = waits[:cut], waits[cut:]
    halves, again = Bacc("x", 10, every, 0.5), Deciding()
    first = sizes(halves, again, [wait(each) for each in before])
    resumed = Bacc("x", 10, every, 0.5)
    resumed.load_state_dict(halves.state_dict())
    assert first + sizes(resumed, again, [wait(each) for each in after], first=len(before)) == found
    assert again.made == decide.made
    replayed = Deciding(decide.log.entries)
    assert sizes(Bacc("x", 10, every, 0.5), replayed, [wait(1.0)] * len(waits)) == found


@pytest.mark.parametrize("value", [0, -3, 2.5, True, "all", None])
def test_a_decision_that_cannot_have_been_made_is_named(value: Json) -> None:
    bacc, decide = Bacc("x", 10, 10, 0.5), Deciding([Decision("group", 1, value, rank=3)])
    with pytest.raises(ConfigError, match="decision 'group' at step 1"):
        sizes(bacc, decide, [wait(1.0)] * 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chunk": 0}, "x: chunk 0 must be at least 1"),
        ({"every": 0.5}, "x: every 0.5 must be a whole number"),
        ({"share": 0}, "x: share 0 must be above 0 and at most 1"),
    ],
)
def test_bad_options(options: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Bacc("x", **{"chunk": 10, "every": 10, "share": 0.5, **options})  # type: ignore[arg-type]
