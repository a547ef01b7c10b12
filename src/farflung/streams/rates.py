"""Sample rates of devices: sets of rates, and rates that change over time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import torch

from farflung.errors import ConfigError, DataError
from farflung.files import read_number_pairs, wrap_read_errors
from farflung.seeding import create_generator

__all__ = ["RATE_SETS", "RateCourse", "RateSet", "Rates", "build_courses", "draw_rates"]

Pairs: TypeAlias = Sequence[tuple[float, float]]
Rates: TypeAlias = float | str | Sequence[float | tuple[float, float] | Pairs]
"""One rate for all replicas, one for each, or a name; see :func:`build_courses`."""

MIN_RATE = 8.0
"""Minimum rate of a device; the smallest batch of Tyagi & Swany, at one second."""
TRACE_PREFIX = "trace "
"""Prefix of the name of a trace file."""


@dataclass(frozen=True, slots=True)
class RateSet:
    """Distribution of rates.

    Args:
      law: ``"uniform"`` or ``"normal"``.
      mean: Mean in samples per second.
      deviation: Standard deviation.
    """

    law: str
    mean: float
    deviation: float


RATE_SETS = {
    "S1": RateSet("uniform", 38, 24),
    "S2": RateSet("uniform", 300, 112),
    "S1'": RateSet("normal", 64, 24),
    "S2'": RateSet("normal", 256, 28),
}
"""Tyagi & Swany 2022 (ScaDLES), Table I."""


def draw_rates(name: str, count: int, seed: int) -> list[float]:
    """Draws the rates of ``count`` devices, whole numbers of at least 8.

    Args:
      name: Name in :data:`RATE_SETS`.
      count: Number of devices.
      seed: Seed, equal on all devices.
    """
    law = RATE_SETS[name]
    noise = create_generator(seed, "rates", name)
    if law.law == "uniform":
        half = math.sqrt(3.0) * law.deviation
        rates = law.mean + half * (2.0 * torch.rand(count, generator=noise, dtype=torch.float64) - 1.0)
    else:
        rates = law.mean + law.deviation * torch.randn(count, generator=noise, dtype=torch.float64)
    return [max(MIN_RATE, float(round(rate))) for rate in rates.tolist()]


@dataclass(frozen=True, slots=True)
class RateCourse:
    """Piecewise constant rate over time; the last value has no end.

    Args:
      begins: Begin of each value in seconds, the first 0.
      rates: Values in samples per second, above 0.
    """

    begins: tuple[float, ...]
    rates: tuple[float, ...]

    @property
    def constant_rate(self) -> float | None:
        """Rate that never changes, or ``None``."""
        return self.rates[0] if len(self.rates) == 1 else None

    def get_rate(self, t: float) -> float:
        """Returns samples per second at a time."""
        return self.rates[bisect_right(self.begins, t) - 1]

    def compute_delay(self, number: int, start_s: float) -> float:
        """Returns the delay from ``start_s`` to the arrival of a sample, counted from 1 since then."""
        remaining = float(number)
        for begin, end, rate in self._iter_spans(start_s):
            room = (end - begin) * rate
            if remaining <= room:
                return begin - start_s + remaining / rate
            remaining -= room
        raise AssertionError("the last rate has no end")

    def count_sent(self, start_s: float, seconds: float) -> float:
        """Returns the number of samples sent in ``seconds`` from ``start_s``, with the fraction of the last one."""
        end_s = start_s + seconds
        return sum(max(0.0, min(end, end_s) - begin) * rate for begin, end, rate in self._iter_spans(start_s))

    def _iter_spans(self, start_s: float) -> Iterator[tuple[float, float, float]]:
        """Yields begin, end and value of each rate from a time on."""
        ends = (*self.begins[1:], math.inf)
        for begin, end, rate in zip(self.begins, ends, self.rates, strict=True):
            if end > start_s:
                yield max(begin, start_s), end, rate


def build_courses(rate: Rates, size: int, seed: int) -> list[RateCourse]:
    """Builds the rate over time of each of ``size`` replicas.

    Args:
      rate: One rate for all, or one for each: a number of samples per second, or pairs of a begin in seconds and a
        number. Otherwise the name of a distribution, or ``"trace FILE"`` for a CSV file of such pairs, for all.
      size: Number of replicas.
      seed: Seed of the draw, equal on all replicas.

    Raises:
      ConfigError: The name is unknown, the number of rates is wrong, begins are out of order, or a rate is not above
        0.
      DataError: The file cannot be read.
    """
    if isinstance(rate, str) and rate.startswith(TRACE_PREFIX):
        path = Path(rate.removeprefix(TRACE_PREFIX))
        with wrap_read_errors(
            path, "must hold lines of seconds,samples per second, the first at 0 seconds", DataError
        ):
            return [_build_course(read_number_pairs(path))] * size
    if isinstance(rate, str):
        if rate not in RATE_SETS:
            names = ", ".join([*RATE_SETS, f"{TRACE_PREFIX}FILE"])
            raise ConfigError(f"stream rate({rate!r}): no such rates; there are {names}")
        return [RateCourse((0.0,), (value,)) for value in draw_rates(rate, size, seed)]
    if _is_number(rate):
        return [_build_course(rate)] * size
    if not isinstance(rate, Sequence):
        return [_build_course(rate)]
    if rate and all(_is_pair(value) for value in rate):
        return [_build_course(rate)] * size
    if len(rate) != size:
        raise ConfigError(f"stream rate: {len(rate)} rates for {size} replicas: give one, or one for each")
    return [_build_course(value) for value in rate]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_pair(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(map(_is_number, value))


def _build_course(rate: object) -> RateCourse:
    pairs = [(0.0, rate)] if _is_number(rate) else rate
    if isinstance(pairs, Sequence) and pairs and all(map(_is_pair, pairs)):
        begins, rates = zip(*pairs, strict=True)
        is_valid = begins[0] == 0 and all(a < b < math.inf for a, b in pairwise(begins))
        if is_valid and all(0 < value < math.inf for value in rates):
            return RateCourse(tuple(map(float, begins)), tuple(map(float, rates)))
    raise ConfigError(
        f"stream rate({rate}): must be a number of samples per second above 0, or pairs of a begin in seconds and a "
        "number, the first begin 0"
    )
