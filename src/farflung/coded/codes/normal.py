"""Standard normal numbers from counters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from farflung.noise import uniform_row

__all__ = ["normal_row"]


def normal_row(seed: int, *counters: int | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """As :func:`farflung.noise.uniform_row`, but standard normal (Box & Muller 1958)."""
    radius = np.sqrt(-2 * np.log1p(-uniform_row(seed, *counters, 0)))
    normal: npt.NDArray[np.float64] = radius * np.cos(2 * np.pi * uniform_row(seed, *counters, 1))
    return normal
