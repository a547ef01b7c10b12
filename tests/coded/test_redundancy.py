"""How many rows may vanish, against taking away every set of them; and blocks made of others."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.coded.codes import Replication
from farflung.coded import MDS, RLNC, codes, compute_rank, compute_redundancy, find_combination
from farflung.coded.coordinator import Settings
from farflung.coded.registry import Block, BlockRegistry, DevicePartition, DeviceState
from farflung.errors import ConfigError
from farflung.seeding import create_generator
from tests.coded.generators import CODE_ROWS, generator_matrix, raw, row_of


def by_enumeration(rows: Tensor, partitions: int, holders: list[int] | None = None) -> int:
    holders = [*range(len(rows))] if holders is None else holders
    there = set(holders)
    for vanished in range(len(there) + 1):
        for left in itertools.combinations(there, len(there) - vanished):
            kept = [place for place, holder in enumerate(holders) if holder in left]
            if compute_rank(rows[kept]) < partitions:
                return vanished - 1
    raise AssertionError


def alive(name: str, partitions: int, extra: int, seed: int, gone: set[int]) -> Tensor:
    matrix = generator_matrix(CODE_ROWS[name], extra, partitions, seed)
    return matrix[[place for place in range(len(matrix)) if place not in gone]]


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(CODE_ROWS)),
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(0, 2**62),
    st.sets(st.integers(0, 9), max_size=3),
    st.integers(1, 5),
)
def test_it_is_what_taking_away_every_set_says(
    name: str, partitions: int, extra: int, seed: int, gone: set[int], devices: int
) -> None:
    rows = alive(name, partitions, extra, seed, gone)
    expected = by_enumeration(rows, partitions)
    assert compute_redundancy(rows) == expected
    assert compute_redundancy(rows, max_losses=1) == min(expected, 1)
    holders = [place % devices for place in range(len(rows))]
    assert compute_redundancy(rows, holders) == by_enumeration(rows, partitions, holders)


def test_of_known_codes() -> None:
    assert compute_redundancy(generator_matrix(MDS(), 4, 16, 1)) == 4
    assert compute_redundancy(generator_matrix(RLNC(), 4, 16, 1)) == 2, (
        "each partition is in two coded blocks"
    )
    assert compute_redundancy(generator_matrix(Replication(), 16, 8, 1)) == 2
    assert compute_redundancy(generator_matrix(Replication(), 4, 8, 1)) == 0
    assert compute_redundancy(generator_matrix(MDS(), 0, 8, 1)) == 0


def test_parallel_coded_rows_are_worth_one() -> None:
    """Without both raw rows and the last one, what is left is of rank 1, though it has both partitions."""
    rows = torch.stack([raw(0, 2), raw(1, 2), row_of(1, 1), row_of(2, 2), row_of(1, 2)])
    assert compute_redundancy(rows) == 2


@pytest.mark.thorough
def test_beyond_the_sets_that_are_tried_it_is_a_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = generator_matrix(MDS(), 10, 40, 1)
    assert compute_redundancy(rows) == 3
    monkeypatch.setattr(codes, "MAX_LOSS_SETS", 2000)
    assert compute_redundancy(rows) == 2


def test_that_of_100_devices_costs_what_is_lost_and_not_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4,950 pairs of devices, of 100 blocks of 80 partitions each: 40 million numbers."""
    registry = BlockRegistry()
    for place, row in enumerate(generator_matrix(MDS(), 20, 80, 1)):
        registry.devices[place] = DeviceState(place)
        if place < 80:
            registry.partitions.append(
                DevicePartition(place, str(place), torch.zeros(1), place, is_active=True)
            )
        coefficients = {k: float(weight) for k, weight in enumerate(row) if weight}
        registry.blocks[place] = Block(place, "rows", coefficients, place, is_ready=True)
    numbers, svdvals = list[int](), torch.linalg.svdvals

    def counted(matrices: Tensor) -> Any:
        numbers.append(matrices.numel())
        return svdvals(matrices)

    monkeypatch.setattr(torch.linalg, "svdvals", counted)
    assert registry.compute_redundancy("rows", 2) == 2
    assert sum(numbers) < 200_000


def test_of_two_orders_for_a_block_of_columns_each_is_there_when_it_was_made() -> None:
    registry = BlockRegistry()
    block = registry.blocks[0] = Block(0, "columns", {0: 1.0}, 1, is_ready=True, parts={0})
    block.pending_parts |= {1, 2}
    registry.mark_built(block, (1,))
    assert (block.parts, block.pending_parts) == ({0, 1}, {2})
    registry.mark_built(block, (2, 7))
    assert (block.parts, block.pending_parts) == ({0, 1, 2}, set()), "what was not ordered does not count"


def test_more_than_can_be_tried_is_refused() -> None:
    Settings(partitions=80, devices=255, redundancy=2)
    with pytest.raises(ConfigError, match="redundancy 3: with 100 devices that is more than 33,000 sets"):
        Settings(partitions=80, devices=100, redundancy=3)


def test_rank_counts_what_is_independent() -> None:
    eye = torch.eye(3, dtype=torch.float64)
    assert compute_rank(eye[:0]) == 0
    assert compute_rank(torch.stack([eye[0], eye[0], row_of(1, 1, 0), row_of(1, -1, 0)])) == 2
    assert compute_rank(eye) == 3
    assert compute_rank(torch.stack([row_of(1, 1, 0), row_of(1, 1 + 1e-8, 0), eye[2]])) == 2
    for rows in (eye[:0, :2], eye[:1, :2], eye[[0, 0, 0], :2]):
        assert compute_redundancy(rows) == -1, "what is lost has no redundancy"


# --- blocks that are made of others ------------------------------------------------------------------------------


def without(matrix: Tensor, *gone: int) -> dict[int, Tensor]:
    return {place: row for place, row in enumerate(matrix) if place not in gone}


def made(factors: Mapping[int, float], blocks: Mapping[int, Tensor]) -> Tensor:
    return torch.stack([factor * blocks[index] for index, factor in factors.items()]).sum(0)


CASES = st.tuples(
    st.sampled_from(["mds", "rlnc", "rlnc binary", "rlnc masked"]),
    st.integers(1, 10),
    st.integers(0, 6),
    st.integers(0, 2**62),
    st.sets(st.integers(0, 12), max_size=4),
)
Case = tuple[str, int, int, int, set[int]]


@given(CASES)
def test_a_block_is_made_whenever_its_row_is_spanned(case: Case) -> None:
    name, partitions, extra, seed, gone = case
    rows = without(generator_matrix(CODE_ROWS[name], extra, partitions, seed), *gone)
    for target in (raw(0, partitions), CODE_ROWS[name].draw_row(20, partitions, seed)):
        found = find_combination(target, rows)
        given = torch.stack([*rows.values()]) if rows else target.new_zeros(0, partitions)
        spanned = compute_rank(torch.cat([given, target[None]])) == compute_rank(given)
        assert (found is not None) == spanned
        if found is not None:
            assert all(found.values())
            assert float((made(found, rows) - target).abs().max()) <= 1e-9 * float(target.abs().max())


def test_the_blocks_have_the_combination_of_their_rows() -> None:
    blocks = torch.randn(8, 5, dtype=torch.float64, generator=create_generator(1))
    matrix = generator_matrix(RLNC(), 4, 8, 3)
    held = dict(enumerate(matrix @ blocks))
    found = find_combination(raw(2, 8), without(matrix, 2, 5))
    assert found is not None
    torch.testing.assert_close(made(found, held), blocks[2], rtol=0, atol=1e-12)


def test_what_is_there_raw_is_taken_as_it_is() -> None:
    rows = without(generator_matrix(RLNC(), 4, 8, 3))
    assert find_combination(raw(2, 8), rows) == {2: 1.0}
    wanted = RLNC().draw_row(9, 8, 3)
    assert find_combination(wanted, rows) == {k: float(wanted[k]) for k in range(8) if wanted[k]}


def test_of_coded_blocks_the_sparsest_is_taken() -> None:
    rows = {0: raw(0, 4), 1: raw(1, 4), 2: raw(2, 4), 4: row_of(1, 2, 3, 4), 5: row_of(0, 1, 0, 2)}
    assert find_combination(raw(3, 4), rows) == {5: 0.5, 1: -0.5}


def test_what_would_magnify_errors_too_much_is_impossible() -> None:
    rows = {0: raw(0, 2), 2: row_of(1, 1e-7)}
    assert find_combination(raw(1, 2), rows) is None


def test_as_many_coded_blocks_are_taken_as_partitions_are_gone() -> None:
    matrix = generator_matrix(MDS(), 30, 12, 3)
    rows = without(matrix, *range(6))
    found = find_combination(raw(0, 12), rows)
    assert found is not None
    assert sum(index >= 12 for index in found) == 6
    assert float((made(found, rows) - raw(0, 12)).abs().max()) < 1e-9
