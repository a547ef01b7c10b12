"""What every code promises, tried on a table of all of them; and what is particular to each."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.coded.codes import LAWS, Replication
from farflung.coded import CODES, MDS, RLNC, Code, Decoder
from farflung.coded.codes import draw_normal_row
from farflung.errors import ConfigError, UnknownName
from farflung.spec import build
from tests.coded.generators import CODE_ROWS, coded_rows, generator_matrix


@pytest.fixture(params=CODE_ROWS)
def code(request: pytest.FixtureRequest) -> Code:
    return CODE_ROWS[request.param]


# --- every code -------------------------------------------------------------------------------------------------


def test_codes_are_built_from_text() -> None:
    assert build("code", "mds", CODES) == MDS() == CODE_ROWS["mds"]
    assert build("code", LAWS["balanced"], CODES) == RLNC() == CODE_ROWS["rlnc"]
    for law in ("binary", "masked"):
        assert build("code", LAWS[law], CODES) == CODE_ROWS[f"rlnc {law}"], "codes of others are imported"
    with pytest.raises(UnknownName, match="unknown code 'uncoded'; known: mds, rlnc"):
        build("code", "uncoded", CODES)
    with pytest.raises(ConfigError):
        build("code", "rlnc(law='binary')", CODES)


def test_rows_are_vectors_of_float64_and_never_zero(code: Code) -> None:
    for partitions in (1, 2, 3, 7, 16):
        for index, seed in itertools.product(range(9), range(20)):
            row = code.draw_row(index, partitions, seed)
            assert row.shape == (partitions,)
            assert row.dtype == torch.float64
            assert row.isfinite().all()
            assert row.any(), (partitions, index, seed)


def test_rows_depend_on_nothing_but_the_arguments(code: Code) -> None:
    def rows() -> list[torch.Tensor]:
        return [code.draw_row(index, 6, 5) for index in range(9)]

    first = rows()
    states = random.getstate(), torch.get_rng_state()
    assert all(map(torch.equal, first, rows()))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


# --- RLNC -------------------------------------------------------------------------------------------------------


@given(st.integers(2, 50), st.integers(0, 6), st.integers(0, 2**62))
def test_balanced_pairs_are_complementary_and_of_equal_halves(partitions: int, pair: int, seed: int) -> None:
    first, second = (RLNC().draw_row(2 * pair + side, partitions, seed) != 0 for side in (0, 1))
    assert torch.equal(first, ~second)
    assert {int(first.sum()), int(second.sum())} == {partitions // 2, partitions - partitions // 2}


@given(st.integers(1, 12), st.integers(0, 3), st.integers(0, 2**62))
def test_over_two_balanced_pairs_the_four_types_of_columns_are_equally_often(
    fours: int, group: int, seed: int
) -> None:
    masks = [RLNC().draw_row(4 * group + 2 * pair, 4 * fours, seed) != 0 for pair in (0, 1)]
    types = masks[0].long() + 2 * masks[1].long()
    assert types.bincount(minlength=4).tolist() == [fours] * 4


def test_of_an_odd_number_the_larger_half_goes_to_either() -> None:
    larger = [int((RLNC().draw_row(0, 5, seed) != 0).sum()) == 3 for seed in range(1000)]
    assert abs(sum(larger) - 500) < 4 * 16


@pytest.mark.parametrize("law", ["binary", "masked", "balanced"])
def test_half_of_the_coefficients_are_zero(law: str) -> None:
    rows = coded_rows(CODE_ROWS["rlnc" if law == "balanced" else f"rlnc {law}"], 100, 40, 3)
    assert float((rows != 0).double().mean()) == pytest.approx(0.5, abs=4 * 0.5 / 4000**0.5)
    values = rows[rows != 0]
    if law == "binary":
        assert values.unique().tolist() == [1]
    else:
        assert float(values.mean()) == pytest.approx(0, abs=4 / 2000**0.5)
        assert float(values.var()) == pytest.approx(1, abs=4 * (2 / 2000) ** 0.5)


def test_normal_numbers_are_normal() -> None:
    values = np.sort(draw_normal_row(3, np.arange(20_000)))
    cumulative = torch.special.ndtr(torch.from_numpy(values)).numpy()
    distance = np.abs(cumulative - (np.arange(20_000) + 0.5) / 20_000).max()
    assert distance < 1.63 / 20_000**0.5  # Kolmogorov & Smirnov, 1 percent


def needed(code: Code, devices: int, partitions: int, draws: int) -> Tensor:
    """Answers until all is decoded, in random order."""
    orders = np.random.default_rng(5)
    counts = []
    for seed in range(draws):
        matrix = generator_matrix(code, devices - partitions, partitions, seed)
        decoder = Decoder[int](partitions)
        answers = 0
        for device in orders.permutation(devices).tolist():
            answers += 1
            decoder.add(device, matrix[device])
            if decoder.find_plan() is not None:
                break
        counts.append(answers)
    return torch.tensor(counts, dtype=torch.float64)


@pytest.mark.thorough
@pytest.mark.parametrize(("devices", "partitions", "extra"), [(20, 16, 0.396), (12, 8, 0.412)])
def test_balanced_masks_need_few_answers_beyond_k(devices: int, partitions: int, extra: float) -> None:
    """Exact, by counting types of columns (Hall's condition, since the values are generic)."""
    draws = 1000
    counts = needed(RLNC(), devices, partitions, draws) - partitions
    assert float(counts.mean()) == pytest.approx(extra, abs=3 * float(counts.std()) / draws**0.5)


def test_of_many_blocks_balanced_masks_need_almost_no_answers_beyond_k() -> None:
    assert float(needed(RLNC(), 50, 40, 60).mean()) - 40 < 0.15


# --- the others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "partitions"), [(4, 8), (2, 10), (3, 1)])
def test_any_partitions_many_of_an_mds_code_are_of_full_rank(blocks: int, partitions: int) -> None:
    matrix = generator_matrix(MDS(), blocks, partitions, 11)
    matrix /= matrix.norm(dim=1, keepdim=True)
    sets = torch.tensor(list(itertools.combinations(range(len(matrix)), partitions)))
    values = torch.linalg.svdvals(matrix[sets])
    assert float(values[:, -1].min()) > 1e-12
    assert float((values[:, 0] / values[:, -1]).max()) < 1e6


def test_replication_copies_one_after_the_other() -> None:
    assert torch.equal(coded_rows(Replication(), 6, 3, 0), torch.eye(3, dtype=torch.float64).repeat(2, 1))
