"""Answers in any order decode to what an uncoded matrix gives, or to nothing."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.coded.codes import Masked, Replication
from farflung.coded import MDS, RLNC, Decoder, Plan, Plans, codes
from farflung.coded.codes import Undecodable
from farflung.seeding import generator
from tests.coded.generators import CODE_ROWS, generator_matrix, raw, row_of


def randn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def collected(decoder: Decoder[int], matrix: Tensor, order: list[int]) -> Decoder[int]:
    """Takes rows in that order until the decoder is complete."""
    for who in order:
        if not decoder.complete:
            decoder.add(who, matrix[who])
    return decoder


def raw_partition(row: Tensor) -> int | None:
    places = row.nonzero().flatten().tolist()
    return places[0] if len(places) == 1 and row[places[0]] == 1 else None


def unit_condition(rows: Tensor) -> float:
    return float(torch.linalg.cond(rows / rows.norm(dim=1, keepdim=True)))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


# --- both products ----------------------------------------------------------------------------------------------


def coded_blocks(matrix: Tensor, blocks: list[Tensor]) -> list[Tensor]:
    """What each device holds: raw blocks as they are, coded ones padded below to the highest."""
    height = max(map(len, blocks))
    padded = torch.zeros(len(blocks), height, blocks[0].shape[1], dtype=torch.float64)
    for place, block in zip(padded, blocks, strict=True):
        place[: len(block)] = block
    return [*blocks, *torch.tensordot(matrix[len(blocks) :], padded, 1)]


cases = st.tuples(
    st.sampled_from(list(CODE_ROWS)),
    st.integers(1, 12),
    st.integers(0, 6),
    st.integers(0, 2**62),
    st.randoms(use_true_random=False),
)


@given(cases, st.data())
def test_both_products_equal_the_uncoded_ones(
    case: tuple[str, int, int, int, random.Random], data: st.DataObject
) -> None:
    name, partitions, extra, seed, shuffled = case
    matrix = generator_matrix(CODE_ROWS[name], extra, partitions, seed)
    heights = data.draw(st.lists(st.integers(1, 5), min_size=partitions, max_size=partitions))
    X = randn(sum(heights), 2 * partitions, seed=seed)
    order = list(range(len(matrix)))
    shuffled.shuffle(order)
    decoder = collected(Decoder[int](partitions), matrix, order)
    plan = decoder.plan()
    assert plan.condition <= 1e6
    assert unit_condition(matrix[list(decoder.used)]) == pytest.approx(decoder.condition)

    W = randn(2 * partitions, 3)
    held = coded_blocks(matrix, list(X.split(heights)))
    found = plan.apply({index: held[index] @ W for index in decoder.used})
    found = [one[:height] for one, height in zip(found, heights, strict=True)]
    assert error(torch.cat(found), X @ W) < 1e-9

    R = randn(len(X), 3)
    held = coded_blocks(matrix, [block.T for block in X.split(2, dim=1)])
    found = plan.apply({index: held[index] @ R for index in decoder.used})
    assert error(torch.cat(found), X.T @ R) < 1e-9


@given(cases)
def test_it_is_complete_with_the_first_answers_that_can_be_decoded(
    case: tuple[str, int, int, int, random.Random],
) -> None:
    name, partitions, extra, seed, shuffled = case
    matrix = generator_matrix(CODE_ROWS[name], extra, partitions, seed)
    order = list(range(len(matrix)))
    shuffled.shuffle(order)
    decoder = Decoder[int](partitions)
    came: list[int] = []
    for who in order:
        before = decoder.rank
        grew = decoder.add(who, matrix[who])
        came.append(who)
        assert decoder.rank == before + grew
        rows = matrix[came]
        if len(came) >= partitions and unit_condition(rows) < 1e5:
            assert decoder.complete
        if not decoder.complete:
            continue
        assert torch.linalg.matrix_rank(rows[:-1]) < partitions or unit_condition(rows[:-1]) > 1e5
        assert set(decoder.used) <= set(came)
        known = {raw_partition(matrix[who]) for who in came} - {None}
        assert set(decoder.plan().missing) == set(range(partitions)) - known
        assert {raw_partition(matrix[index]) for index in decoder.used} - {None} == known
        return
    pytest.fail("all answers together are of full rank")


def test_of_an_mds_code_any_k_answers_are_enough() -> None:
    matrix = generator_matrix(MDS(), 4, 16, 3)
    for seed in range(50):
        decoder = Decoder[int](16)
        for who in torch.randperm(20, generator=generator(seed))[:16].tolist():
            assert decoder.add(who, matrix[who])
        assert decoder.complete


# --- what passes and what is solved -----------------------------------------------------------------------------


def test_raw_answers_pass_bit_for_bit() -> None:
    matrix = generator_matrix(RLNC(), 4, 8, 1)
    blocks = randn(8, 5, 2)
    answers = dict(enumerate(torch.tensordot(matrix, blocks, 1)))
    decoder = collected(Decoder(8), matrix, [8, 0, 9, 1, 2, 10, 3, 4, 5, 6, 7])
    found = decoder.plan().apply(answers)
    missing = decoder.plan().missing
    assert missing
    for k in range(8):
        assert (found[k] is answers[k]) == (k not in missing)
        assert error(found[k], blocks[k]) < 1e-12


def test_a_raw_answer_counts_though_the_rank_does_not_grow() -> None:
    decoder = Decoder[str](3)
    assert decoder.add("coded", row_of(1, 1, 0))
    assert decoder.add("first", raw(0, 3))
    assert not decoder.add("second", raw(1, 3))
    assert decoder.used == ("first", "second")
    assert decoder.add("third", raw(2, 3))
    assert decoder.complete
    assert "third" in decoder.used


def test_a_coded_block_of_one_partition_is_solved() -> None:
    decoder = Decoder[str](2)
    decoder.add("a", row_of(0, -4.0))
    decoder.add("b", raw(0, 2))
    assert decoder.plan().missing == (1,)
    found = decoder.plan().apply({"a": row_of(8).reshape(1, 1), "b": row_of(5).reshape(1, 1)})
    assert [one.item() for one in found] == [5, -2]


def test_of_two_copies_the_first_counts() -> None:
    decoder = collected(Decoder(2), generator_matrix(Replication(), 2, 2, 0), [3, 1, 0])
    assert decoder.complete
    assert decoder.used == (3, 0)
    found = decoder.plan().apply({3: row_of(7).reshape(1, 1), 0: row_of(6).reshape(1, 1)})
    assert [one.item() for one in found] == [6, 7]


def test_equal_sets_give_equal_bits_in_any_order() -> None:
    matrix = generator_matrix(Masked(), 6, 6, 1)
    answers = dict(enumerate(torch.tensordot(matrix, randn(6, 5, 2), 1)))
    used = [0, 4, 6, 7, 8, 9, 10]
    bits = set()
    for seed in range(10):
        order = torch.randperm(len(used), generator=generator(seed))
        rows = {used[i]: matrix[used[i]] for i in order}
        bits.add(torch.cat(Plan(rows).apply(answers)).numpy().tobytes())
    assert len(bits) == 1


def test_decoders_share_plans_of_equal_sets() -> None:
    plans, matrix = Plans[int](most=2), generator_matrix(RLNC(), 4, 4, 1)

    def plan(order: list[int]) -> Plan[int]:
        return collected(Decoder(4, plans=plans), matrix, order).plan()

    first = plan([0, 1, 2, 3])
    assert plan([3, 1, 0, 2]) is first
    assert plan([1, 2, 3, 4, 5, 6, 7]) is not first
    assert plan([0, 1, 2, 3]) is first
    plan([0, 2, 3, 4, 5, 6, 7])
    assert plan([0, 1, 2, 3]) is first, "used lately, so it was kept"


def test_a_plan_is_of_rows_and_not_of_names_alone() -> None:
    plans = Plans[str]()
    for factor in (1.0, 2.0):
        decoder = Decoder(1, plans=plans)
        decoder.add("a", row_of(factor))
        assert decoder.plan().apply({"a": row_of(6).reshape(1, 1)})[0].item() == 6 / factor


# --- what is not decoded ----------------------------------------------------------------------------------------


def test_nearly_dependent_answers_are_not_decoded() -> None:
    decoder = Decoder[str](2)
    assert decoder.add("a", row_of(1, 1))
    assert not decoder.add("b", row_of(1, 1 + 1e-7))
    assert decoder.rank == 1
    assert decoder.condition == math.inf
    assert not decoder.complete
    with pytest.raises(Undecodable, match="2 answers do not determine 2 partitions: they are of rank 1;"):
        decoder.plan()
    assert decoder.add("c", row_of(1, -1))
    assert decoder.complete
    assert decoder.used == ("a", "c")


def test_ill_conditioned_answers_wait_for_more_and_then_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "MAX_CONDITION", 10.0)
    monkeypatch.setattr(codes, "TOLERANCE", 0.1)
    matrix = row_of(1, 0.15, 0, 1, 0, 0.01, 1, 0.15, 0.2, 1, -1, 0, 1, 1, -2).reshape(5, 3)
    decoder = Decoder[int](3)
    assert [decoder.add(who, matrix[who]) for who in range(3)] == [True] * 3
    assert decoder.rank == 3
    assert 10 < decoder.condition < 100
    assert not decoder.complete
    with pytest.raises(Undecodable, match=r"their condition is [\d.]+e\+01, above 1\.0e\+01; wait for more"):
        decoder.plan()
    assert not decoder.add(3, matrix[3])
    assert not decoder.add(4, matrix[4])
    assert decoder.complete
    assert decoder.used == (0, 1, 2, 3, 4)
    blocks = randn(3, 4, 2)
    found = decoder.plan().apply(dict(enumerate(torch.tensordot(matrix, blocks, 1))))
    assert error(torch.stack(found), blocks) < 1e-12


def test_the_scale_of_a_row_does_not_matter() -> None:
    rows = {"a": row_of(1e-100, 2e-100), "b": row_of(3e100, 4e100)}
    decoder = Decoder[str](2)
    assert [decoder.add(who, row) for who, row in rows.items()] == [True, True]
    assert decoder.condition == pytest.approx(unit_condition(row_of(1, 2, 3, 4).reshape(2, 2)))


@pytest.mark.parametrize("row", [row_of(1), row_of(1, 2, 3), row_of(1, math.nan), row_of(1, math.inf)])
def test_rows_that_are_none_are_refused(row: Tensor) -> None:
    with pytest.raises(ValueError, match="2 finite coefficients are needed"):
        Decoder[str](2).add("a", row)


def test_a_second_answer_is_refused() -> None:
    decoder = Decoder[str](2)
    decoder.add("a", raw(0, 2))
    with pytest.raises(ValueError, match="a second answer of 'a'"):
        decoder.add("a", raw(1, 2))
