"""What every code promises, tried on a table of all of them; and what is particular to each."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.coded import CODES, MDS, RLNC, Code, Replication, Uncoded
from farflung.coded.codes.normal import normal_row
from farflung.errors import ConfigError
from farflung.spec import build
from tests.coded.generators import CODE_ROWS, coded_rows, generator_matrix


@pytest.fixture(params=CODE_ROWS)
def code(request: pytest.FixtureRequest) -> Code:
    return CODE_ROWS[request.param]


def blocks_of(code: Code, partitions: int) -> range:
    most = code.most(partitions)
    return range(9 if most is None else min(9, most))


# --- every code -------------------------------------------------------------------------------------------------


def test_the_table_has_every_code() -> None:
    assert {name.split(" ")[0] for name in CODE_ROWS} == set(CODES)
    for name, code in CODE_ROWS.items():
        assert type(code) is type(CODES[name.split(" ")[0]]())


def test_codes_are_built_from_text() -> None:
    assert build("code", "rlnc(law='binary')", CODES) == RLNC("binary")
    assert build("code", "mds", CODES) == MDS()


def test_rows_are_vectors_of_float64_and_never_zero(code: Code) -> None:
    for partitions in (1, 2, 3, 7, 16):
        for index, seed in itertools.product(blocks_of(code, partitions), range(20)):
            row = code.row(index, partitions, seed)
            assert row.shape == (partitions,)
            assert row.dtype == torch.float64
            assert row.isfinite().all()
            assert row.any(), (partitions, index, seed)


def test_rows_depend_on_nothing_but_the_arguments(code: Code) -> None:
    def rows() -> list[torch.Tensor]:
        return [code.row(index, 6, 5) for index in blocks_of(code, 6)]

    first = rows()
    states = random.getstate(), torch.get_rng_state()
    assert all(map(torch.equal, first, rows()))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_grown_rows_keep_what_they_have(code: Code) -> None:
    for index in blocks_of(code, 3):
        row = code.row(index, 3, 5)
        grown = code.grown(row, index, 5, 6)
        assert torch.equal(grown[:3], row)
        assert grown.shape == (6,)
        assert torch.equal(code.grown(grown, index, 5, 6), grown)
        by_one = code.grown(code.grown(row, index, 5, 5), index, 5, 6)
        assert torch.equal(by_one, grown), "joins one after the other are as joins together"


@pytest.mark.parametrize("name", [name for name in CODE_ROWS if name != "replication"])
def test_a_grown_row_is_the_row_of_so_many_partitions(name: str) -> None:
    code = CODE_ROWS[name]
    for index in blocks_of(code, 12):
        row = code.row(index, 12, 5)
        assert torch.equal(code.grown(row[:8], index, 5, 12), row)


# --- RLNC -------------------------------------------------------------------------------------------------------


@given(st.integers(2, 50), st.integers(0, 6), st.integers(0, 2**62))
def test_balanced_pairs_are_complementary_and_of_equal_halves(partitions: int, pair: int, seed: int) -> None:
    first, second = (RLNC().row(2 * pair + side, partitions, seed) != 0 for side in (0, 1))
    assert torch.equal(first, ~second)
    assert {int(first.sum()), int(second.sum())} == {partitions // 2, partitions - partitions // 2}


@given(st.integers(1, 12), st.integers(0, 3), st.integers(0, 2**62))
def test_over_two_balanced_pairs_the_four_types_of_columns_are_equally_often(
    fours: int, group: int, seed: int
) -> None:
    masks = [RLNC().row(4 * group + 2 * pair, 4 * fours, seed) != 0 for pair in (0, 1)]
    types = masks[0].long() + 2 * masks[1].long()
    assert types.bincount(minlength=4).tolist() == [fours] * 4


def test_groups_of_balanced_rows_are_masked_independently() -> None:
    orders = [(coded_rows(RLNC(), 40, 12, seed)[::4] != 0).double() for seed in range(200)]
    agree = torch.stack([(order[:-1] == order[1:]).double().mean() for order in orders])
    assert abs(float(agree.mean()) - 0.5) < 4 * float(agree.std()) / len(orders) ** 0.5


def test_of_an_odd_number_the_larger_half_goes_to_either() -> None:
    larger = [int((RLNC().row(0, 5, seed) != 0).sum()) == 3 for seed in range(1000)]
    assert abs(sum(larger) - 500) < 4 * 16


def test_a_row_of_one_partition_is_not_masked_by_balance() -> None:
    assert all(RLNC().row(index, 1, seed).all() for index in range(8) for seed in range(20))


@pytest.mark.parametrize("law", ["binary", "masked", "balanced"])
def test_half_of_the_coefficients_of_rlnc_are_zero(law: str) -> None:
    rows = coded_rows(CODE_ROWS["rlnc" if law == "balanced" else f"rlnc {law}"], 100, 40, 3)
    assert float((rows != 0).double().mean()) == pytest.approx(0.5, abs=4 * 0.5 / 4000**0.5)
    values = rows[rows != 0]
    if law == "binary":
        assert values.unique().tolist() == [1]
    else:
        assert float(values.mean()) == pytest.approx(0, abs=4 / 2000**0.5)
        assert float(values.var()) == pytest.approx(1, abs=4 * (2 / 2000) ** 0.5)


def test_a_zero_row_is_drawn_again() -> None:
    """With two partitions, a fourth of the rows of independent masks would be zero."""
    for law in ("binary", "masked"):
        seen = {tuple((CODE_ROWS[f"rlnc {law}"].row(0, 2, seed) != 0).tolist()) for seed in range(100)}
        assert seen == {(True, False), (False, True), (True, True)}


def test_a_joining_partition_is_in_half_of_the_rows() -> None:
    held = torch.zeros(9, dtype=torch.float64)
    for code in (RLNC("binary"), RLNC("masked"), RLNC()):
        joins = [code.grown(held, index, 7, 10)[9] != 0 for index in range(400)]
        assert abs(sum(map(bool, joins)) - 200) < 4 * 10
        if code.law == "balanced":
            assert all(bool(one) != bool(other) for one, other in zip(joins[::2], joins[1::2], strict=True))


def test_normal_numbers_are_normal() -> None:
    values = np.sort(normal_row(3, np.arange(20_000)))
    cumulative = torch.special.ndtr(torch.from_numpy(values)).numpy()
    distance = np.abs(cumulative - (np.arange(20_000) + 0.5) / 20_000).max()
    assert distance < 1.63 / 20_000**0.5  # Kolmogorov & Smirnov, 1 percent


# --- MDS --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "partitions"), [(4, 8), (2, 10), (4, 4), (3, 1), (5, 3)])
def test_any_partitions_many_of_an_mds_code_are_of_full_rank(blocks: int, partitions: int) -> None:
    matrix = generator_matrix(MDS(), blocks, partitions, 11)
    matrix /= matrix.norm(dim=1, keepdim=True)
    sets = torch.tensor(list(itertools.combinations(range(len(matrix)), partitions)))
    values = torch.linalg.svdvals(matrix[sets])
    assert float(values[:, -1].min()) > 1e-12
    assert float((values[:, 0] / values[:, -1]).max()) < 1e6


# --- the others -------------------------------------------------------------------------------------------------


def test_replication_copies_one_after_the_other() -> None:
    assert torch.equal(coded_rows(Replication(), 6, 3, 0), torch.eye(3, dtype=torch.float64).repeat(2, 1))


def test_a_copy_takes_nothing_of_those_who_join() -> None:
    assert Replication().grown(torch.ones(2).double(), 2, 0, 4).tolist() == [1, 1, 0, 0]


def test_uncoded_has_no_coded_blocks() -> None:
    assert Uncoded().most(4) == 0
    with pytest.raises(ConfigError, match="no coded block 0"):
        Uncoded().row(0, 4, 0)
    with pytest.raises(ConfigError, match="no coded block 0"):
        Uncoded().grown(torch.ones(3), 0, 0, 4)


def test_a_law_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        build("code", "rlnc(law='dense')", CODES)
