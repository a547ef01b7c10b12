"""Checks of what the members of a family are made with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from farflung.errors import ConfigError

__all__ = [
    "check_factor",
    "check_seconds",
    "choice_option",
    "flag_option",
    "number_option",
    "part_option",
    "require",
    "share_option",
    "text_option",
    "whole_option",
]


def choice_option(name: str, option: str, value: object, known: Sequence[str]) -> None:
    """One of some words.

    Raises:
      ConfigError: none of them.
    """
    if value not in known:
        raise ConfigError(f"{name}: {option} {value!r} must be {' or '.join(map(repr, known))}")


def flag_option(name: str, option: str, value: object) -> None:
    """True or False.

    Raises:
      ConfigError: neither.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: {option} {value!r} must be True or False")


def share_option(name: str, option: str, share: object) -> None:
    """A factor such as a momentum.

    Raises:
      ConfigError: outside [0, 1).
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"{name}: {option} {share!r} must be at least 0 and below 1")


def part_option(name: str, option: str, part: object) -> None:
    """A part of something, all of it at most.

    Raises:
      ConfigError: outside (0, 1].
    """
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        raise ConfigError(f"{name}: {option} {part!r} must be above 0 and at most 1")


def number_option(name: str, option: str, value: object, low: float) -> None:
    """A finite number that is not too small.

    Raises:
      ConfigError: below ``low``, infinite, or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < math.inf:
        raise ConfigError(f"{name}: {option} {value!r} must be a number of at least {low}")


def text_option(name: str, option: str, value: object) -> None:
    """Text that is not empty.

    Raises:
      ConfigError: it is, or no text.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}: {option} {value!r} must be text")


def whole_option(name: str, option: str, value: int, low: int, high: int | None = None) -> None:
    """A whole number.

    Raises:
      ConfigError: out of range, or not whole.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: {option} {value!r} must be a whole number")
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"{low} to {high}"
        raise ConfigError(f"{name}: {option} {value} must be {span}")


def require(is_valid: bool, name: str, value: object, what: str) -> None:
    """A value of a field.

    Raises:
      ConfigError: it is not valid; says what it must be.
    """
    if not is_valid:
        raise ConfigError(f"{name} = {value}: must be {what}")


def check_seconds(name: str, seconds: float) -> None:
    """A duration.

    Raises:
      ConfigError: below 0, or infinite.
    """
    require(0 <= seconds < math.inf, name, seconds, "a number of seconds, 0 or more")


def check_factor(name: str, factor: float) -> None:
    """A factor by which computations take longer.

    Raises:
      ConfigError: not above 0, or infinite.
    """
    require(0 < factor < math.inf, name, factor, "above 0; 2 takes twice as long")
