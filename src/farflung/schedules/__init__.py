"""Schedules: which transfers start at a step, and when their results are due."""

from collections.abc import Callable

from farflung.schedules.synchronous import Synchronous
from farflung.types import Schedule

__all__ = ["SCHEDULES", "Synchronous"]

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "synchronous": Synchronous,
}
"""All of them by name."""
