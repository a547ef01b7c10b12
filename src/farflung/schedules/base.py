"""Checks of options shared by several schedules."""

from __future__ import annotations

from typing import get_args

from farflung.errors import ConfigError
from farflung.options import flag_option, number_option, share_option
from farflung.types import OptimizerState

__all__ = ["outer_options", "state_option"]


def state_option(name: str, state: object) -> None:
    """Checks the treatment of an optimizer's state.

    Raises:
      ConfigError: the value is unknown.
    """
    if state not in get_args(OptimizerState):
        raise ConfigError(f"{name}: optimizer_state {state!r} must be 'kept', 'reset' or 'averaged'")


def outer_options(name: str, rate: object, momentum: object, nesterov: object) -> None:
    """Checks learning rate, momentum and the Nesterov flag of an outer optimizer.

    Raises:
      ConfigError: a value is out of range.
    """
    number_option(name, "outer_rate", rate, 0)
    if not rate:
        raise ConfigError(f"{name}: outer_rate must be above 0")
    share_option(name, "outer_momentum", momentum)
    flag_option(name, "nesterov", nesterov)
