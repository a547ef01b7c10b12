"""Answers in any order decode to what an uncoded matrix gives, or to nothing."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.coded.codes import Masked, Replication
from farflung.coded import RLNC, Decoder, Plan, codes
from farflung.seeding import create_generator
from tests.coded.generators import CODE_ROWS, generator_matrix, raw, row_of


def randn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=create_generator(seed))


@pytest.fixture(autouse=True)
def fresh_plans() -> None:
    codes.get_plan.cache_clear()


def planned(matrix: Tensor, order: list[int]) -> Plan[int]:
    """The first plan that there is when rows are taken in that order."""
    decoder = Decoder[int](matrix.shape[1])
    for who in order:
        decoder.add(who, matrix[who])
        if (plan := decoder.find_plan()) is not None:
            return plan
    raise AssertionError("all answers together are of full rank")


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
    plan = planned(matrix, order)
    assert plan.condition <= 1e6
    assert unit_condition(matrix[list(plan.indices)]) == pytest.approx(plan.condition)

    W = randn(2 * partitions, 3)
    held = coded_blocks(matrix, list(X.split(heights)))
    found = plan.apply({index: held[index] @ W for index in plan.indices})
    found = [one[:height] for one, height in zip(found, heights, strict=True)]
    assert error(torch.cat(found), X @ W) < 1e-9

    R = randn(len(X), 3)
    held = coded_blocks(matrix, [block.T for block in X.split(2, dim=1)])
    found = plan.apply({index: held[index] @ R for index in plan.indices})
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
        rows, plan = matrix[came], decoder.find_plan()
        if len(came) >= partitions and unit_condition(rows) < 1e5:
            assert plan is not None
        if plan is None:
            continue
        assert torch.linalg.matrix_rank(rows[:-1]) < partitions or unit_condition(rows[:-1]) > 1e5
        assert set(plan.indices) <= set(came)
        known = {raw_partition(matrix[who]) for who in came} - {None}
        assert set(plan.missing_partitions) == set(range(partitions)) - known
        assert {raw_partition(matrix[index]) for index in plan.indices} - {None} == known
        return
    pytest.fail("all answers together are of full rank")


# --- what passes and what is solved -----------------------------------------------------------------------------


def test_raw_answers_pass_bit_for_bit() -> None:
    matrix = generator_matrix(RLNC(), 4, 8, 1)
    blocks = randn(8, 5, 2)
    answers = dict(enumerate(torch.tensordot(matrix, blocks, 1)))
    plan = planned(matrix, [8, 0, 9, 1, 2, 10, 3, 4, 5, 6, 7])
    found, missing = plan.apply(answers), plan.missing_partitions
    assert missing
    for k in range(8):
        assert (found[k] is answers[k]) == (k not in missing)
        assert error(found[k], blocks[k]) < 1e-12


def test_a_raw_answer_counts_though_the_rank_does_not_grow() -> None:
    decoder = Decoder[str](3)
    assert decoder.add("coded", row_of(1, 1, 0))
    assert decoder.add("first", raw(0, 3))
    assert not decoder.add("second", raw(1, 3))
    assert decoder.find_plan() is None
    assert decoder.add("third", raw(2, 3))
    plan = decoder.find_plan()
    assert plan is not None
    assert plan.indices == ("first", "second", "third")


def test_a_coded_block_of_one_partition_is_solved() -> None:
    plan = planned(torch.stack([row_of(0, -4.0), raw(0, 2)]), [0, 1])
    assert plan.missing_partitions == (1,)
    found = plan.apply({0: row_of(8).reshape(1, 1), 1: row_of(5).reshape(1, 1)})
    assert [one.item() for one in found] == [5, -2]


def test_of_two_copies_the_first_counts() -> None:
    plan = planned(generator_matrix(Replication(), 2, 2, 0), [3, 1, 0])
    assert plan.indices == (0, 3)
    found = plan.apply({3: row_of(7).reshape(1, 1), 0: row_of(6).reshape(1, 1)})
    assert [one.item() for one in found] == [6, 7]


def test_equal_sets_give_equal_bits_in_any_order() -> None:
    matrix = generator_matrix(Masked(), 6, 6, 1)
    answers = dict(enumerate(torch.tensordot(matrix, randn(6, 5, 2), 1)))
    used = [0, 4, 6, 7, 8, 9, 10]
    bits = set()
    for seed in range(10):
        order = torch.randperm(len(used), generator=create_generator(seed))
        rows = {used[i]: matrix[used[i]] for i in order}
        bits.add(torch.cat(Plan(rows).apply(answers)).numpy().tobytes())
    assert len(bits) == 1


def test_plans_are_made_once_for_equal_rows_in_any_order() -> None:
    matrix = generator_matrix(RLNC(), 4, 4, 1)
    first = planned(matrix, [0, 1, 2, 3])
    assert planned(matrix, [3, 1, 0, 2]) is first
    assert planned(matrix, [1, 2, 3, 4, 5, 6, 7]) is not first
    for factor in (1.0, 2.0):  # of rows, and not of names alone
        plan = planned(row_of(factor)[None], [0])
        assert plan.apply({0: row_of(6).reshape(1, 1)})[0].item() == 6 / factor


# --- what is not decoded ----------------------------------------------------------------------------------------


def test_nearly_dependent_answers_are_not_decoded() -> None:
    decoder = Decoder[str](2)
    assert decoder.add("a", row_of(1, 1))
    assert not decoder.add("b", row_of(1, 1 + 1e-7))
    assert decoder.rank == 1
    assert decoder.find_plan() is None
    assert decoder.add("c", row_of(1, -1))
    plan = decoder.find_plan()
    assert plan is not None
    assert plan.indices == ("a", "c")


def test_ill_conditioned_answers_wait_for_more_and_then_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "MAX_CONDITION", 10.0)
    monkeypatch.setattr(codes, "TOLERANCE", 0.1)
    matrix = row_of(1, 0.15, 0, 1, 0, 0.01, 1, 0.15, 0.2, 1, -1, 0, 1, 1, -2).reshape(5, 3)
    decoder = Decoder[int](3)
    assert [decoder.add(who, matrix[who]) for who in range(3)] == [True] * 3
    assert decoder.rank == 3
    assert 10 < Plan(dict(enumerate(matrix[:3]))).condition < 100
    assert decoder.find_plan() is None
    assert [decoder.add(who, matrix[who]) for who in (3, 4)] == [False] * 2
    plan = decoder.find_plan()
    assert plan is not None
    assert plan.indices == (0, 1, 2, 3, 4)
    blocks = randn(3, 4, 2)
    found = plan.apply(dict(enumerate(torch.tensordot(matrix, blocks, 1))))
    assert error(torch.stack(found), blocks) < 1e-12


def test_the_scale_of_a_row_does_not_matter() -> None:
    plan = planned(torch.stack([row_of(1e-100, 2e-100), row_of(3e100, 4e100)]), [0, 1])
    assert plan.condition == pytest.approx(unit_condition(row_of(1, 2, 3, 4).reshape(2, 2)))
