"""How many answers are enough: simulated, against published and exact probabilities."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.coded.codes import Masked
from farflung.coded import RLNC, Code, Decoder
from farflung.coded.codes import TOLERANCE
from tests.coded.generators import CODE_ROWS, coded_rows, generator_matrix

DRAWS = 5000


def full_rank(law: Literal["binary", "masked"], missing: int, extra: int) -> float:
    """How often ``missing + extra`` coded answers determine so many partitions.

    Coefficients are independent, so columns of one wide code are as good as many codes.
    """
    rows = coded_rows(Masked(values=law == "masked"), missing + extra, missing * DRAWS, 17).reshape(
        -1, DRAWS, missing
    )
    values = torch.linalg.svdvals(rows.movedim(0, 1))
    return float((values[:, -1] > TOLERANCE * values[:, 0]).double().mean())


def allowed(probability: float) -> float:
    """A point for what is published, and three standard errors for what is drawn: 3.1 points at most."""
    return 0.01 + 3 * float(np.sqrt(probability * (1 - probability) / DRAWS))


# Simulated, 20,000 draws each: with s missing raw answers and s + e coded ones, by s, for e from 0 to 5.
BINARY = {
    1: [0.50, 0.75, 0.88, 0.94, 0.97, 0.99],
    2: [0.38, 0.65, 0.82, 0.91, 0.95, 0.98],
    3: [0.34, 0.63, 0.81, 0.90, 0.95, 0.98],
    4: [0.35, 0.64, 0.82, 0.91, 0.95, 0.98],
    6: [0.42, 0.72, 0.87, 0.94, 0.97, 0.99],
}
MASKED = {
    1: [0.50, 0.75, 0.87, 0.94, 0.97, 0.99],
    2: [0.43, 0.72, 0.86, 0.93, 0.97, 0.98],
    3: [0.48, 0.76, 0.89, 0.95, 0.98, 0.99],
    4: [0.58, 0.83, 0.93, 0.97, 0.98, 0.99],
    6: [0.80, 0.94, 0.98, 0.99, 0.99, 1.0],
}


@pytest.mark.parametrize("missing", BINARY)
def test_binary_coefficients_are_of_full_rank_as_often_as_simulated_elsewhere(missing: int) -> None:
    for extra, expected in enumerate(BINARY[missing]):
        assert full_rank("binary", missing, extra) == pytest.approx(expected, abs=allowed(expected)), extra


@pytest.mark.parametrize("missing", MASKED)
def test_masked_coefficients_are_of_full_rank_as_often_as_simulated_elsewhere(missing: int) -> None:
    for extra, expected in enumerate(MASKED[missing]):
        assert full_rank("masked", missing, extra) == pytest.approx(expected, abs=allowed(expected)), extra


@pytest.mark.parametrize(("missing", "exact"), [(1, 1 / 2), (2, 3 / 8), (3, 174 / 512), (4, 22560 / 65536)])
def test_small_binary_matrices_are_of_full_rank_as_often_as_counted(missing: int, exact: float) -> None:
    assert full_rank("binary", missing, 0) == pytest.approx(exact, abs=allowed(exact) - 0.01)


# --- whole codes ------------------------------------------------------------------------------------------------


def needed(code: Code, devices: int, partitions: int, draws: int) -> Tensor:
    """Answers until all is decoded, in random order; all of them where even they are not enough."""
    orders = np.random.default_rng(5)
    counts = []
    for seed in range(draws):
        matrix = generator_matrix(code, devices - partitions, partitions, seed)
        decoder = Decoder[int](partitions)
        answers = 0
        for who in orders.permutation(devices).tolist():
            answers += 1
            decoder.add(who, matrix[who])
            if decoder.complete:
                break
        counts.append(answers)
    return torch.tensor(counts, dtype=torch.float64)


# P(exactly K are enough), P(K + 1 are), and the mean number needed.
WHOLE = [
    ("rlnc binary", 12, 8, 0.36, 0.68, 9.15),
    ("rlnc masked", 12, 8, 0.48, 0.74, 8.93),
    ("rlnc binary", 20, 16, 0.35, 0.65, 17.21),
    ("rlnc masked", 20, 16, 0.51, 0.74, 16.94),
]


@pytest.mark.parametrize(("name", "devices", "partitions", "first", "second", "mean"), WHOLE)
def test_whole_codes_need_as_many_answers_as_simulated_elsewhere(
    name: str, devices: int, partitions: int, first: float, second: float, mean: float
) -> None:
    draws = 800
    counts = needed(CODE_ROWS[name], devices, partitions, draws)
    for probability, enough in ((first, partitions), (second, partitions + 1)):
        error = (probability * (1 - probability) / draws) ** 0.5
        assert float((counts <= enough).double().mean()) == pytest.approx(probability, abs=0.01 + 3 * error)
    assert float(counts.mean()) == pytest.approx(mean, abs=0.02 + 3 * float(counts.std()) / draws**0.5)


@pytest.mark.parametrize(("devices", "partitions", "extra"), [(20, 16, 0.396), (12, 8, 0.412)])
def test_balanced_masks_need_few_answers_beyond_k(devices: int, partitions: int, extra: float) -> None:
    """Exact, by counting types of columns (Hall's condition, since the values are generic)."""
    draws = 1000
    counts = needed(RLNC(), devices, partitions, draws) - partitions
    assert float(counts.mean()) == pytest.approx(extra, abs=3 * float(counts.std()) / draws**0.5)


def test_of_many_blocks_balanced_masks_need_almost_no_answers_beyond_k() -> None:
    assert float(needed(RLNC(), 50, 40, 300).mean()) - 40 < 0.05
