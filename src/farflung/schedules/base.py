"""Checks of options shared by several schedules."""

from __future__ import annotations

from typing import get_args

from farflung.errors import ConfigError
from farflung.options import check_coefficient, check_flag, check_number
from farflung.types import OptimizerState

__all__ = ["check_outer_options", "check_state_option"]


def check_state_option(name: str, state: object) -> None:
    """Checks the treatment of an optimizer's state.

    Raises:
      ConfigError: the value is unknown.
    """
    if state not in get_args(OptimizerState):
        raise ConfigError(f"{name}: optimizer_state {state!r} must be 'kept', 'reset' or 'averaged'")


def check_outer_options(name: str, rate: object, momentum: object, nesterov: object) -> None:
    """Checks learning rate, momentum and the Nesterov flag of an outer optimizer.

    Raises:
      ConfigError: a value is out of range.
    """
    check_number(name, "outer_rate", rate, 0)
    if not rate:
        raise ConfigError(f"{name}: outer_rate must be above 0")
    check_coefficient(name, "outer_momentum", momentum)
    check_flag(name, "nesterov", nesterov)
