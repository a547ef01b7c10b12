"""How many answers decode, under each law of coefficients, and how often as many as there are unknowns do."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.coded.codes import LAWS, Masked
from benchmarks.coded.encoding import SIZES
from benchmarks.common import Measured
from farflung.coded import CODES, Code, Decoder
from farflung.coded.codes import TOLERANCE
from farflung.spec import build

__all__ = ["beyond", "extra_answers", "full_rank", "laws_of_coefficients", "needed", "tables"]

DRAWS = {20: 4_000, 50: 2_000}
"""By N."""
CELL_DRAWS = 100_000
EXACT = {1: 1 / 2, 2: 3 / 8, 3: 174 / 512, 4: 22560 / 65536}
"""Binary matrices of full rank, counted; the table has them to two places."""
TABLE: dict[Literal["binary", "masked"], dict[int, list[float]]] = {
    "binary": {
        1: [0.50, 0.75, 0.88, 0.94, 0.97, 0.99],
        2: [0.38, 0.65, 0.82, 0.91, 0.95, 0.98],
        3: [0.34, 0.63, 0.81, 0.90, 0.95, 0.98],
        4: [0.35, 0.64, 0.82, 0.91, 0.95, 0.98],
        6: [0.42, 0.72, 0.87, 0.94, 0.97, 0.99],
    },
    "masked": {
        1: [0.50, 0.75, 0.87, 0.94, 0.97, 0.99],
        2: [0.43, 0.72, 0.86, 0.93, 0.97, 0.98],
        3: [0.48, 0.76, 0.89, 0.95, 0.98, 0.99],
        4: [0.58, 0.83, 0.93, 0.97, 0.98, 0.99],
        6: [0.80, 0.94, 0.98, 0.99, 0.99, 1.00],
    },
}
"""With s missing raw answers and s + e coded ones, by s, for e from 0; simulated elsewhere, 20,000 draws each."""


def needed(code: Code, devices: int, partitions: int, draws: int) -> list[int | None]:
    """Answers beyond K until all is decoded, in random order; ``None`` where all N do not."""
    orders = np.random.default_rng(0)
    raw = torch.eye(partitions, dtype=torch.float64)
    counts: list[int | None] = []
    for seed in range(draws):
        rows = torch.cat(
            [
                raw,
                torch.stack(
                    [code.draw_row(index, partitions, seed) for index in range(devices - partitions)]
                ),
            ]
        )
        counts.append(beyond(rows, orders))
    return counts


def beyond(rows: Tensor, orders: np.random.Generator) -> int | None:
    """Answers beyond K until all is decoded, in one random order; ``None`` where all rows, (N, K), do not."""
    partitions = rows.shape[1]
    decoder = Decoder[int](partitions)
    for place, device in enumerate(orders.permutation(len(rows)).tolist(), 1):
        decoder.add(device, rows[device])
        if decoder.find_plan() is not None:
            return place - partitions
    return None


def extra_answers(devices: int, partitions: int, quick: bool) -> Measured:
    """The mean of the balanced law, the other laws beside it; a run that no N answers decode counts as N."""
    draws = 50 if quick else DRAWS[devices]
    curve: dict[str, Any] = {}
    means: dict[str, tuple[float, float]] = {}
    for law, text in [("mds", "mds")] if quick else [("mds", "mds"), *LAWS.items()]:
        code: Code = build("code", text, CODES)
        found = needed(code, devices, partitions, draws if law == "balanced" else draws // 4)
        counts = [devices - partitions if extra is None else extra for extra in found]
        means[law] = statistics.fmean(counts), statistics.stdev(counts) / len(counts) ** 0.5
        curve[law] = {
            "encoding_bytes_over_mds": 1.0 if law == "mds" else 0.5,
            "extra_answers": means[law][0],
            "standard_error": means[law][1],
            "exactly_k": counts.count(0) / len(counts),
            "k_plus_1": sum(extra <= 1 for extra in counts) / len(counts),
            "not_decoded_by_all": found.count(None) / len(found),
        }
    mean, error = means["mds" if quick else "balanced"]
    config = {"devices": devices, "partitions": partitions, "draws": draws, "laws": curve}
    return Measured(mean, (mean - 1.96 * error, mean + 1.96 * error), config, simulated=True)


def laws_of_coefficients(quick: bool) -> Mapping[str, Measured]:
    """Both sizes."""
    return {
        f"extra answers beyond K at half the bytes, ({n},{k})": extra_answers(n, k, quick) for n, k in SIZES
    }


def full_rank(law: Literal["binary", "masked"], missing: int, extra: int, draws: int) -> float:
    """How often ``missing + extra`` coded answers determine so many partitions.

    Coefficients are independent, so columns of one wide code are as good as many codes.
    """
    code = Masked(values=law == "masked")
    rows: Tensor = torch.stack([code.draw_row(index, missing * draws, 0) for index in range(missing + extra)])
    values = torch.linalg.svdvals(rows.reshape(-1, draws, missing).movedim(0, 1))
    return float((values[:, -1] > TOLERANCE * values[:, 0]).double().mean())


def tables(quick: bool) -> Mapping[str, Measured]:
    """The largest error over both tables."""
    draws = 2_000 if quick else CELL_DRAWS
    found = {
        law: {s: [full_rank(law, s, extra, draws) for extra in range(len(row))] for s, row in table.items()}
        for law, table in TABLE.items()
    }
    errors = {
        f"{law}, {s} missing, {extra} more": 100 * abs(found[law][s][extra] - due)
        for law, table in TABLE.items()
        for s, row in table.items()
        for extra, due in enumerate(row)
    }
    worst = max(errors, key=lambda cell: errors[cell])
    config = {
        "draws_of_a_cell": draws,
        "found": {law: {str(s): row for s, row in table.items()} for law, table in found.items()},
        "worst_cell": worst,
        "error_against_counted_points": {
            str(s): 100 * abs(found["binary"][s][0] - exact) for s, exact in EXACT.items()
        },
    }
    row = "decode probability from exactly K against methods/coded.md 1.5"
    return {
        row: Measured(
            errors[worst], (statistics.median(errors.values()), errors[worst]), config, simulated=True
        )
    }
