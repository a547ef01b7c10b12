"""Checks of the options of registered parts."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from farflung.errors import ConfigError

__all__ = [
    "MAX_CONNECTIONS",
    "check_choice",
    "check_coefficient",
    "check_factor",
    "check_flag",
    "check_fraction",
    "check_integer",
    "check_number",
    "check_seconds",
    "check_text",
    "require",
]

MAX_CONNECTIONS = 64
"""Largest number of TCP connections between two replicas."""


def check_choice(name: str, option: str, value: object, choices: Sequence[str]) -> None:
    """Checks that an option is one of the allowed values.

    Raises:
      ConfigError: The value is not allowed.
    """
    if value not in choices:
        raise ConfigError(f"{name}: {option} {value!r} must be {' or '.join(map(repr, choices))}")


def check_flag(name: str, option: str, value: object) -> None:
    """Checks that an option is True or False.

    Raises:
      ConfigError: The value is not a bool.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: {option} {value!r} must be True or False")


def check_coefficient(name: str, option: str, share: object) -> None:
    """Checks that an option, such as a momentum, is in [0, 1).

    Raises:
      ConfigError: The value is out of range or not a number.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"{name}: {option} {share!r} must be at least 0 and below 1")


def check_fraction(name: str, option: str, fraction: object) -> None:
    """Checks that an option, such as a density, is in (0, 1].

    Raises:
      ConfigError: The value is out of range or not a number.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ConfigError(f"{name}: {option} {fraction!r} must be above 0 and at most 1")


def check_number(name: str, option: str, value: object, low: float) -> None:
    """Checks that an option is a finite number of at least ``low``.

    Raises:
      ConfigError: The value is below ``low``, infinite or not a number.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not low <= value <= sys.float_info.max
    ):
        raise ConfigError(f"{name}: {option} {value!r} must be a number of at least {low}")


def check_text(name: str, option: str, value: object) -> None:
    """Checks that an option is a nonempty string.

    Raises:
      ConfigError: The value is empty or not a string.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}: {option} {value!r} must be text")


def check_integer(name: str, option: str, value: int, low: int, high: int | None = None) -> None:
    """Checks that an option is an integer from ``low`` to ``high``, which may be open.

    Raises:
      ConfigError: The value is out of range or not an integer.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: {option} {value!r} must be a whole number")
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"{low} to {high}"
        raise ConfigError(f"{name}: {option} {value} must be {span}")


def require(is_valid: bool, name: str, value: object, requirement: str) -> None:
    """Raises an error unless a field's value is valid.

    Raises:
      ConfigError: The value is invalid; the message states the requirement.
    """
    if not is_valid:
        raise ConfigError(f"{name} = {value}: must be {requirement}")


def check_seconds(name: str, seconds: float) -> None:
    """Checks that a duration is finite and at least 0.

    Raises:
      ConfigError: The duration is negative or infinite.
    """
    require(0 <= seconds < math.inf, name, seconds, "a number of seconds, 0 or more")


def check_factor(name: str, factor: float) -> None:
    """Checks that a slowdown factor is finite and above 0.

    Raises:
      ConfigError: The factor is 0, negative or infinite.
    """
    require(0 < factor < math.inf, name, factor, "above 0; 2 takes twice as long")
