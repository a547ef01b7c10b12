"""Bytes coded over GF(2^8) come back bit for bit; galois is the oracle."""

from __future__ import annotations

import galois
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.coded.gf256 import INVERSE, PRODUCT, Bytes, Elimination, encode, row

FIELD = galois.GF(2**8, irreducible_poly=0x11D)


def block(*labels: int, length: int = 100) -> Bytes:
    return np.random.default_rng(labels).integers(0, 256, length, dtype=np.uint8)


def raw(partition: int, partitions: int) -> Bytes:
    unit: Bytes = np.eye(partitions, dtype=np.uint8)[partition]
    return unit


def test_the_tables_are_those_of_the_field() -> None:
    elements = FIELD(np.arange(256, dtype=np.uint8))
    assert np.array_equal(PRODUCT, np.asarray(elements[:, None] * elements))
    assert np.array_equal(INVERSE[1:], np.asarray(FIELD(1) / elements[1:]))
    assert not PRODUCT.flags.writeable


def test_encoding_is_the_product_with_the_coefficients() -> None:
    blocks = [block(k) for k in range(6)]
    for index in range(10):
        coefficients = row(index, 6, 3)
        assert np.array_equal(
            encode(coefficients, blocks), np.asarray(FIELD(coefficients) @ FIELD(np.stack(blocks)))
        )


def test_shorter_blocks_count_as_padded() -> None:
    blocks = [block(0, length=3), block(1, length=7), block(2, length=0)]
    padded = [np.pad(one, (0, 7 - len(one))) for one in blocks]
    assert np.array_equal(encode(row(0, 3, 5), blocks), encode(row(0, 3, 5), padded))


def test_rows_depend_on_the_arguments_alone_and_are_never_zero() -> None:
    assert np.array_equal(row(4, 8, 3), row(4, 8, 3))
    assert not np.array_equal(row(4, 8, 3), row(5, 8, 3))
    assert all(row(index, 1, 0).any() for index in range(2000))
    assert len({int(one) for index in range(200) for one in row(index, 40, 1)}) == 256


@given(st.integers(1, 8), st.integers(0, 2**62), st.integers(0, 40), st.data())
def test_any_blocks_of_full_rank_give_all_partitions(
    partitions: int, seed: int, length: int, data: st.DataObject
) -> None:
    blocks = [block(seed, k, length=length) for k in range(partitions)]
    rows = [raw(k, partitions) for k in range(partitions)] + [
        row(i, partitions, seed) for i in range(partitions)
    ]
    came: list[Bytes] = []
    elimination = Elimination(partitions)
    for place in data.draw(st.permutations(range(2 * partitions))):
        before = int(np.linalg.matrix_rank(FIELD(np.stack(came)))) if came else 0
        came.append(rows[place])
        after = int(np.linalg.matrix_rank(FIELD(np.stack(came))))
        assert elimination.add(rows[place], encode(rows[place], blocks)) == (after > before)
        assert elimination.complete == (after == partitions)
        for partition, found in elimination.blocks().items():
            assert np.array_equal(found, blocks[partition])
    assert len(elimination.blocks()) == partitions


def test_a_raw_block_is_repaired_before_the_others_are_known() -> None:
    blocks = [block(k) for k in range(4)]
    coefficients = np.array([3, 0, 7, 0], dtype=np.uint8)
    elimination = Elimination(4)
    assert elimination.add(coefficients, encode(coefficients, blocks))
    assert not elimination.blocks()
    assert elimination.add(raw(2, 4), blocks[2])
    assert np.array_equal(elimination.blocks()[0], blocks[0])
    assert not elimination.complete


def test_floats_come_back_bit_for_bit() -> None:
    values = np.random.default_rng(0).standard_normal((3, 50))
    values[0, :3] = [np.nan, -0.0, np.inf]
    blocks = [one.view(np.uint8) for one in values]
    elimination = Elimination(3)
    for index in range(3):
        assert elimination.add(row(index, 3, 1), encode(row(index, 3, 1), blocks))
    found = [elimination.blocks()[k].view(np.float64) for k in range(3)]
    assert [one.tobytes() for one in found] == [one.tobytes() for one in values]


def test_what_is_given_is_left_as_it_is() -> None:
    given_rows = [row(index, 3, 1) for index in range(3)]
    given_blocks = [block(index) for index in range(3)]
    elimination = Elimination(3)
    for coefficients, one in zip(given_rows, given_blocks, strict=True):
        elimination.add(coefficients, one)
    assert all(np.array_equal(given_rows[index], row(index, 3, 1)) for index in range(3))
    assert all(np.array_equal(given_blocks[index], block(index)) for index in range(3))


def test_uniform_rows_are_of_full_rank_almost_always() -> None:
    """At q = 256, K rows fail with probability below 1 / 255."""
    failed = 0
    for seed in range(300):
        elimination = Elimination(4)
        for index in range(4):
            elimination.add(row(index, 4, seed), np.zeros(1, dtype=np.uint8))
        failed += not elimination.complete
    assert failed / 300 == pytest.approx(1 / 255, abs=3 * (1 / 255 / 300) ** 0.5)
