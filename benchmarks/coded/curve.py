"""What fewer bytes of encoding cost in answers: ``python -m benchmarks.coded.curve`` stores a curve and draws it.

One point for each law of coefficients and density, that is the share of coefficients that are not zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.coded.answers import beyond
from benchmarks.coded.codes import LAWS, Masked
from benchmarks.coded.encoding import SIZES
from benchmarks.coded.pictures import draw_curve
from benchmarks.common.kept import Kept
from farflung.coded import CODES, Code
from farflung.spec import build

__all__ = ["Point", "main", "measure", "points"]

FOLDER = Path(__file__).parent
PICTURE = FOLDER.parents[1] / "docs" / "coded_bytes.svg"
DENSITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
DRAWS = {20: 4_000, 50: 2_000}
"""By N."""


@dataclass(frozen=True, slots=True)
class Point:
    """A code of one size.

    Args:
      devices: N.
      partitions: K.
      law: ``binary``, ``masked`` (normal values) or ``balanced`` coefficients, or ``mds``.
      density: the share of coefficients that are not zero, in expectation.
    """

    devices: int
    partitions: int
    law: str
    density: float

    def rows(self, seed: int) -> Tensor:
        """Coefficients of all raw and coded blocks, (N, K) float64."""
        raw = torch.eye(self.partitions, dtype=torch.float64)
        return torch.cat(
            [raw, torch.stack([self._row(index, seed) for index in range(self.devices - self.partitions)])]
        )

    def _row(self, index: int, seed: int) -> Tensor:
        if self.law in ("binary", "masked"):
            return Masked(self.law == "masked", self.density).draw_row(index, self.partitions, seed)
        code: Code = build("code", LAWS.get(self.law, self.law), CODES)
        return code.draw_row(index, self.partitions, seed)


def points() -> list[Point]:
    """All of both sizes."""
    return [
        Point(*size, law, density)
        for size in SIZES
        for law, densities in (
            ("binary", DENSITIES),
            ("masked", DENSITIES),
            ("balanced", (0.5,)),
            ("mds", (1.0,)),
        )
        for density in densities
    ]


def measure(point: Point, draws: int) -> dict[str, Any]:
    """Encoding bytes over those of MDS, and answers beyond K in random order; each draw is a code of its own.

    A coded block of rows fetches a partition for each coefficient that is not zero. Blocks of columns add N - 1
    partitions under any code. Where all N answers do not decode, N - K counts.
    """
    devices, partitions = point.devices, point.partitions
    orders, coded = np.random.default_rng(0), devices - partitions
    found: list[int | None] = []
    fetched = 0
    for seed in range(draws):
        rows = point.rows(seed)
        fetched += int((rows[partitions:] != 0).sum())
        found.append(beyond(rows, orders))
    of_rows, most, columns = fetched / draws, coded * partitions, devices - 1
    counts = [coded if extra is None else extra for extra in found]
    return {
        "draws": draws,
        "encoding_bytes_over_mds": {
            "rows": of_rows / most,
            "rows and columns": (of_rows + columns) / (most + columns),
        },
        "extra_answers": statistics.fmean(counts),
        "standard_error": statistics.stdev(counts) / draws**0.5,
        "exactly_k": counts.count(0) / draws,
        "not_decoded_by_all": found.count(None) / draws,
    }


def stored(found: Sequence[Point], kept: Kept) -> list[Mapping[str, Any]]:
    """A line for each point, measured where there is none."""

    def line(point: Point) -> Mapping[str, Any]:
        key = {name: getattr(point, name) for name in ("devices", "partitions", "law", "density")}
        return kept.once(
            {**key, "seeds": f"0 to {DRAWS[point.devices] - 1}"},
            lambda: measure(point, DRAWS[point.devices]),
        )

    return [line(point) for point in found]


def main() -> None:
    """Measures what is not stored, and draws all."""
    torch.set_num_threads(1)
    draw_curve(PICTURE, stored(points(), Kept(FOLDER, "curve")))


if __name__ == "__main__":
    main()
