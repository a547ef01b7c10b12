"""Blocks made of blocks are what their rows say."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farflung.coded import MDS, RLNC, combination, rank
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


def test_of_coded_blocks_the_sparsest_is_taken() -> None:
    rows = {0: raw(0, 4), 1: raw(1, 4), 2: raw(2, 4), 4: row_of(1, 2, 3, 4), 5: row_of(0, 1, 0, 2)}
    assert combination(raw(3, 4), rows) == {5: 0.5, 1: -0.5}


def test_what_would_magnify_errors_too_much_is_impossible() -> None:
    rows = {0: raw(0, 2), 2: row_of(1, 1e-7)}
    assert combination(raw(1, 2), rows) is None


def test_as_many_coded_blocks_are_taken_as_partitions_are_gone() -> None:
    matrix = generator_matrix(MDS(), 30, 12, 3)
    rows = without(matrix, *range(6))
    found = combination(raw(0, 12), rows)
    assert found is not None
    assert sum(index >= 12 for index in found) == 6
    assert float((made(found, rows) - raw(0, 12)).abs().max()) < 1e-9
