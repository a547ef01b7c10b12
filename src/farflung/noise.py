"""Stateless random numbers from a seed and counters, equal for scalars and arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["draw_uniform", "draw_uniform_array"]

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def draw_uniform(seed: int, *counters: int) -> float:
    """Returns a number in ``[0, 1)`` by SplitMix64 (Steele, Lea & Flood 2014), one round for each counter."""
    state = _mix(seed & _MASK)
    for counter in counters:
        state = _mix((state ^ counter) & _MASK)
    return (_mix(state) >> 11) * 2.0**-53


def draw_uniform_array(seed: int, *counters: int | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns :func:`draw_uniform` for broadcast arrays of counters, bit for bit equal."""
    import numpy as np

    state = _mix_array(np.array([seed & _MASK], dtype=np.uint64))
    for counter in counters:
        state = _mix_array(state ^ np.asarray(counter).astype(np.uint64))
    return (_mix_array(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _mix_array(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    import numpy as np

    z = z + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))
