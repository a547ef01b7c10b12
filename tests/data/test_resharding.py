"""Samples that are swapped for good: with whom, which, and what their messages do."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from farflung.comm import ExchangeChannel
from farflung.data import Resharding, TensorDataset
from farflung.engine.gate import LinkGate
from farflung.errors import ConfigError, ProtocolError
from farflung.sampling import UniformSampler
from farflung.sim import LinkModel, VirtualWorld
from farflung.types import Payload, Runtime, SampleBatch
from tests.carrying import Carrying
from tests.helpers import same_bits

WHOLE = TensorDataset(torch.arange(60.0).reshape(30, 2), torch.arange(30, dtype=torch.uint8))
SAMPLE_NBYTES = 8 + 2 * 4 + 1 + 4
"""Its id, its row with the target, its score."""
pytestmark = pytest.mark.usefixtures("unframed")

LINK = LinkModel(latency_s=0.25, bandwidth_bps=8.0 * SAMPLE_NBYTES)
"""On which a sample leaves in a second."""


def moved(*ids: int, scores: bool = True) -> SampleBatch:
    found = torch.tensor(ids)
    return SampleBatch(found, WHOLE.get_rows(found), found / 2 if scores else None)


def always_open(runtime: Runtime) -> LinkGate:
    return LinkGate(runtime, lambda: False, has_overlap=False)


class Pair:
    """Two replicas and what each has sent: when it began, when it was there, its bytes."""

    def __init__(self, link: LinkModel = LINK) -> None:
        self.world = VirtualWorld(2, link)
        self.runtimes = self.world.runtimes
        self.channels = [ExchangeChannel(runtime.comm, 1, 0) for runtime in self.runtimes]
        self.sent: list[list[tuple[float, float, int]]] = [[], []]
        carry = self.world.network.send

        def noted(src: int, dst: int, tag: Any, payload: Payload, priority: int = 0) -> Any:
            began = self.world.clock.time()
            left = carry(src, dst, tag, payload, priority)
            arrives = began + LINK.latency_s + payload.nbytes / SAMPLE_NBYTES
            self.sent[src].append((began, arrives, payload.nbytes))
            return left

        self.world.network.send = noted  # type: ignore[method-assign]

    def swap(
        self,
        given: list[SampleBatch],
        make_gate: Callable[[Runtime], LinkGate] = always_open,
        **options: Any,
    ) -> list[SampleBatch]:
        sharing = Resharding(5, **options)
        gates = [make_gate(runtime) for runtime in self.runtimes]
        return self.world.run(
            [sharing.swap(self.channels[rank], 1 - rank, given[rank], gates[rank]) for rank in range(2)]
        )


# --- who and which ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7])
def test_each_has_one_partner_and_one_of_an_odd_number_rests(size: int) -> None:
    sharing = Resharding(3)
    met = Counter[frozenset[int]]()
    rested = Counter[int]()
    for step in range(200):
        partners = [sharing.find_partner(step, rank, size) for rank in range(size)]
        assert partners == [Resharding(3).find_partner(step, rank, size) for rank in range(size)]
        for rank, other in enumerate(partners):
            assert other != rank
            if other is not None:
                assert partners[other] == rank
                met[frozenset((rank, other))] += 1
            else:
                rested[rank] += 1
        assert partners.count(None) == size % 2
    assert len(met) == size * (size - 1) // 2
    assert len(rested) == (size if size % 2 else 0)


def test_rounds_begin_and_end_at_steps_that_are_known() -> None:
    plain, prompt = Resharding(0, every=5), Resharding(0, every=5, within=2)
    assert [step for step in range(16) if plain.should_begin(step)] == [5, 10, 15]
    assert (plain.get_due_step(5), prompt.get_due_step(5)) == (10, 7)


def test_samples_are_chosen_at_random_by_the_baseline() -> None:
    sharing = Resharding(1, samples=4, by="uniform")
    assert not sharing.needs_scores
    chosen = [
        sharing.choose_outgoing(9, UniformSampler(0), step=step, rank=rank).tolist()
        for step in range(50)
        for rank in (0, 1)
    ]
    assert all(len(set(each)) == 4 for each in chosen)
    assert {place for each in chosen for place in each} == set(range(9))
    assert len({tuple(each) for each in chosen}) > 90, "by step and by rank"
    assert sorted(sharing.choose_outgoing(3, UniformSampler(0), step=0, rank=0).tolist()) == [0, 1, 2]


def test_samples_are_chosen_by_what_the_sampler_knows() -> None:
    sampler, sharing = Carrying(0), Resharding(1, samples=3)
    sampler.known = torch.tensor([0.0, 5.0, 1.0, 7.0, 6.0])
    assert sharing.needs_scores
    orders = {tuple(sharing.choose_outgoing(5, sampler, step=step, rank=0).tolist()) for step in range(30)}
    assert {frozenset(order) for order in orders} == {frozenset({1, 3, 4})}
    assert len(orders) > 1, "the smaller of two shares cuts the list, which must not go by groups"


# --- the messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("piece", "scores"), [(1, True), (2 * SAMPLE_NBYTES, False), (1 << 16, True)])
def test_both_have_what_the_other_had(piece: int, scores: bool) -> None:
    given = [moved(3, 1, 4, 15, 9, scores=scores), moved(26, 5, 28, 0, 7, scores=scores)]
    found = Pair().swap(given, piece_nbytes=piece)
    for one, other in zip(found, reversed(given), strict=True):
        assert same_bits(one.ids, other.ids)
        assert same_bits(one.rows.inputs, other.rows.inputs)
        assert same_bits(one.rows.targets, other.rows.targets)
        if other.scores is None:
            assert one.scores is None
        else:
            assert one.scores is not None
            assert same_bits(one.scores, other.scores)


def test_of_unlike_numbers_the_smaller_is_swapped() -> None:
    pair = Pair()
    found = pair.swap([moved(3, 1, 4, 15, 9), moved(26, 5)])
    assert [one.ids.tolist() for one in found] == [[26, 5], [3, 1]]
    assert [channel.sent_nbytes for channel in pair.channels] == [8 + 2 * SAMPLE_NBYTES] * 2


@pytest.mark.parametrize(
    ("piece", "sizes"),
    [(1, [1] * 5), (SAMPLE_NBYTES, [1] * 5), (3 * SAMPLE_NBYTES - 1, [2, 2, 1]), (1 << 16, [5])],
)
def test_pieces_are_no_larger_than_said_and_each_is_answered(piece: int, sizes: list[int]) -> None:
    pair = Pair()
    pair.swap([moved(3, 1, 4, 15, 9), moved(26, 5, 28, 0, 7)], piece_nbytes=piece)
    asked, answered = pair.sent
    for own in pair.sent:
        assert [nbytes for _, _, nbytes in own] == [8, *(count * SAMPLE_NBYTES for count in sizes)]
    assert [began_s for began_s, _, _ in answered] == pytest.approx([there_s for _, there_s, _ in asked])
    assert [began_s for began_s, _, _ in asked[1:]] == pytest.approx(
        [there_s for _, there_s, _ in answered[:-1]]
    )
    assert pair.world.clock.time() == pytest.approx(2 * (0.25 + 8 / SAMPLE_NBYTES + 5 + 0.25 * len(sizes)))


def test_who_was_held_up_sends_one_piece_and_not_two() -> None:
    pair = Pair()

    def timed(runtime: Runtime) -> LinkGate:
        gate = LinkGate(runtime, lambda: True, has_overlap=False)
        if runtime.comm.rank == 1:
            pair.world.clock.call_at(2.0, gate.close)
            pair.world.clock.call_at(30.0, gate.release)
        return gate

    pair.swap([moved(3, 1, 4, 15, 9), moved(26, 5, 28, 0, 7)], timed, piece_nbytes=1)
    late = [began_s for began_s, _, _ in pair.sent[1] if began_s >= 30.0]
    assert late[0] == 30.0
    assert min(later - earlier for earlier, later in itertools.pairwise(late)) > 1.0, "one has left by then"


@pytest.mark.parametrize(("share", "under_way"), [(0.125, True), (1.0, True), (0.01, True), (0.125, False)])
def test_beside_exchanges_samples_are_on_the_link_for_a_share_of_the_time(
    share: float, under_way: bool
) -> None:
    """But no rest is so long that the partner takes a replica for lost."""
    pair = Pair()
    pair.swap(
        [moved(*range(8)), moved(*range(8, 16))],
        lambda runtime: LinkGate(runtime, lambda: under_way, has_overlap=True),
        piece_nbytes=SAMPLE_NBYTES,
        share=share,
    )
    asked, answered = pair.sent
    for (began_s, there_s, _), (answers_s, back_s, _), following in zip(
        asked, answered, asked[1:], strict=False
    ):
        assert answers_s == there_s, "the other answers at once"
        rest_s = min(20.0, (back_s - began_s) * (1 / share - 1)) if under_way else 0.0
        assert following[0] == pytest.approx(back_s + rest_s)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([torch.tensor([0])], "rank 1 would give 0 samples"),
        ([torch.tensor([-3])], "rank 1 would give -3 samples"),
        ([torch.tensor([2]), torch.zeros(3)], "rank 1 sent float32"),
    ],
)
def test_a_partner_that_sends_something_else_is_refused(messages: list[torch.Tensor], says: str) -> None:
    pair = Pair()

    async def other() -> None:
        for message in messages:
            pair.channels[1].send(Payload((message,)), 0, pair.channels[1].reserve_hops(1))

    swap = Resharding(0).swap(pair.channels[0], 1, moved(1, 2), always_open(pair.runtimes[0]))
    with pytest.raises(ProtocolError, match=says):
        pair.world.run([swap, other()])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"samples": 0}, "samples 0 must be at least 1"),
        ({"every": 0}, "every 0 must be at least 1"),
        ({"every": 5, "within": 6}, "within 6 must be 1 to 5"),
        ({"within": 0}, "within 0 must be 1 to 50"),
        ({"by": "size"}, "by 'size' must be 'importance' or 'uniform'"),
        ({"piece_nbytes": 0.5}, "piece_nbytes 0.5 must be a whole number"),
        ({"share": 0.0}, "share 0.0 must be above 0 and at most 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"sharing resharding: {says}"):
        Resharding(0, **options)
