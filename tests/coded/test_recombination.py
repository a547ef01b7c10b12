"""Blocks made of blocks are what their rows say."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farflung.coded import MDS, RLNC, combination, rank, recombined_row, redundancy
from farflung.seeding import generator
from tests.coded.generators import CODE_ROWS, generator_matrix, raw, row_of


def without(matrix: Tensor, *gone: int) -> dict[int, Tensor]:
    return {place: row for place, row in enumerate(matrix) if place not in gone}


def made(factors: Mapping[int, float], blocks: Mapping[int, Tensor]) -> Tensor:
    return torch.stack([factor * blocks[index] for index, factor in factors.items()]).sum(0)


cases = st.tuples(
    st.sampled_from(["mds", "rlnc", "rlnc binary", "rlnc masked"]),
    st.integers(1, 10),
    st.integers(0, 6),
    st.integers(0, 2**62),
    st.sets(st.integers(0, 12), max_size=4),
)
Case = tuple[str, int, int, int, set[int]]


# --- the repair of a block --------------------------------------------------------------------------------------


@given(cases)
def test_a_block_is_made_whenever_its_row_is_spanned(case: Case) -> None:
    name, partitions, extra, seed, gone = case
    rows = without(generator_matrix(CODE_ROWS[name], extra, partitions, seed), *gone)
    for target in (raw(0, partitions), CODE_ROWS[name].row(20, partitions, seed)):
        found = combination(target, rows)
        spanned = rank([*rows.values(), target], partitions) == rank(rows.values(), partitions)
        assert (found is not None) == spanned
        if found is not None:
            assert all(found.values())
            assert float((made(found, rows) - target).abs().max()) <= 1e-9 * float(target.abs().max())


def test_the_blocks_have_the_combination_of_their_rows() -> None:
    blocks = torch.randn(8, 5, dtype=torch.float64, generator=generator(1))
    matrix = generator_matrix(RLNC(), 4, 8, 3)
    held = dict(enumerate(matrix @ blocks))
    found = combination(raw(2, 8), without(matrix, 2, 5))
    assert found is not None
    torch.testing.assert_close(made(found, held), blocks[2], rtol=0, atol=1e-12)


def test_what_is_there_raw_is_taken_as_it_is() -> None:
    rows = without(generator_matrix(RLNC(), 4, 8, 3))
    assert combination(raw(2, 8), rows) == {2: 1.0}
    wanted = RLNC().row(9, 8, 3)
    assert combination(wanted, rows) == {k: float(wanted[k]) for k in range(8) if wanted[k]}


def test_a_copy_is_taken_as_it_is() -> None:
    matrix = generator_matrix(MDS(), 4, 8, 3)
    found = combination(matrix[9] * 2, without(matrix, 1))
    assert found == pytest.approx({9: 2.0})


def test_of_coded_blocks_the_sparsest_is_taken() -> None:
    rows = {0: raw(0, 4), 1: raw(1, 4), 2: raw(2, 4), 4: row_of(1, 2, 3, 4), 5: row_of(0, 1, 0, 2)}
    assert combination(raw(3, 4), rows) == {5: 0.5, 1: -0.5}


def test_costs_decide() -> None:
    rows = {0: raw(0, 4), 1: raw(1, 4), 2: raw(2, 4), 4: row_of(1, 2, 3, 4), 5: row_of(0, 1, 0, 2)}
    held = {0: 0.0, 1: 5.0, 2: 0.0}
    assert combination(raw(3, 4), rows, held) == {5: 0.5, 1: -0.5}, "both need block 1"
    assert combination(raw(3, 4), rows, {**held, 5: 3.0}) == {4: 0.25, 0: -0.25, 1: -0.5, 2: -0.75}
    copies = {"far": raw(0, 2), "near": raw(0, 2)}
    assert combination(raw(0, 2), copies, {"near": 0.5}) == {"near": 1.0}


def test_a_block_that_magnifies_less_is_taken_where_costs_are_equal() -> None:
    rows = {0: raw(0, 2), 2: row_of(1, 1e-3), 3: row_of(1, 1), 4: row_of(1, 1e-2)}
    assert combination(raw(1, 2), rows) == {3: 1.0, 0: -1.0}


def test_what_would_magnify_errors_too_much_is_impossible() -> None:
    rows = {0: raw(0, 2), 2: row_of(1, 1e-7)}
    assert combination(raw(1, 2), rows) is None


def test_where_sets_are_too_many_one_is_taken_greedily() -> None:
    matrix = generator_matrix(MDS(), 30, 12, 3)
    rows = without(matrix, *range(6))
    found = combination(raw(0, 12), rows)
    assert found is not None
    assert sum(index >= 12 for index in found) == 6
    assert float((made(found, rows) - raw(0, 12)).abs().max()) < 1e-9


# --- another coded block ----------------------------------------------------------------------------------------


def test_with_all_raw_blocks_it_is_the_codes_own_row() -> None:
    rows = without(generator_matrix(RLNC(), 2, 8, 3))
    found = recombined_row(RLNC(), 2, 3, rows)
    assert found is not None
    row, made_of = found
    assert torch.equal(row, RLNC().row(2, 8, 3))
    assert made_of == {k: float(row[k]) for k in range(8) if row[k]}


@given(cases)
def test_another_row_is_made_of_blocks_at_hand_and_helps(case: Case) -> None:
    name, partitions, extra, seed, gone = case
    rows = without(generator_matrix(CODE_ROWS[name], extra, partitions, seed), *gone)
    if not rows:
        return
    before = redundancy([*rows.values()], partitions)
    found = recombined_row(CODE_ROWS[name], 30, seed, rows, enough=2)
    if found is None:
        assert before == -1, "a dense combination of all blocks always helps, but where partitions are lost"
        return
    row, made_of = found
    torch.testing.assert_close(made(made_of, rows), row, rtol=0, atol=1e-12 * float(row.abs().max()))
    assert before >= 0, "what is made of blocks at hand adds nothing to what they span"
    assert redundancy([*rows.values(), row], partitions) >= min(before + 1, 2)


@pytest.mark.parametrize("seed", range(10))
def test_for_each_block_that_is_gone_another_one_stands_in(seed: int) -> None:
    """So a row in which all partitions are helps at once."""
    rows = without(generator_matrix(MDS(), 4, 8, seed), 0, 1, 2, 3)
    found = recombined_row(MDS(), 4, seed, rows)
    assert found is not None
    own = MDS().row(4, 8, seed)
    assert found[1].keys() == rows.keys()
    assert sorted(found[1].values()) == sorted(own.tolist())


def test_a_leaver_hands_on_what_it_has() -> None:
    """Partition 1 is in no coded block; its owner leaves."""
    rows = {0: raw(0, 3), 1: raw(1, 3), 2: raw(2, 3), 3: row_of(1, 0, 1)}
    staying = [0, 2, 3]
    assert rank([rows[who] for who in staying], 3) == 2
    found = recombined_row(RLNC(), 0, 3, rows, staying=staying)
    assert found is not None
    assert 1 in found[1]
    assert rank([*(rows[who] for who in staying), found[0]], 3) == 3


def test_a_row_that_does_not_help_is_drawn_again() -> None:
    """Partitions 0 and 1 are in no coded block, so a row that does not have both leaves the redundancy at 0."""
    rows = {k: raw(k, 6) for k in range(6)} | {6: row_of(0, 0, 1, 1, 1, 1)}
    plain = [RLNC("binary").row(9, 6, seed) for seed in range(30)]
    assert not all(row[0] and row[1] for row in plain)
    for seed in range(30):
        found = recombined_row(RLNC("binary"), 9, seed, rows)
        assert found is not None
        assert found[0][0]
        assert found[0][1]


def test_where_half_of_the_partitions_cannot_help_all_are_taken() -> None:
    """Each partition has only its owner, so every one has to be in the row."""
    rows = {k: raw(k, 24) for k in range(24)}
    found = recombined_row(RLNC(), 0, 3, rows)
    assert found is not None
    assert found[0].all()
