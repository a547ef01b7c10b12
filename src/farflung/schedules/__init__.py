"""Schedules: which transfers start at a step, and when their results are due."""

from collections.abc import Callable

from farflung.schedules.delayed import Delayed
from farflung.schedules.delayed_gradient import DelayedGradient
from farflung.schedules.pipelined import Pipelined
from farflung.schedules.synchronous import Synchronous
from farflung.types import Schedule

__all__ = ["SCHEDULES", "Delayed", "DelayedGradient", "Pipelined", "Synchronous"]

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "delayed": Delayed,
    "delayed_gradient": DelayedGradient,
    "pipelined": Pipelined,
    "synchronous": Synchronous,
}
"""All of them by name."""
