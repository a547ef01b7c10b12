"""The settings that objectives share, by what becomes of the intercept."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.errors import ConfigError
from farflung.options import flag_option

__all__ = ["FreeIntercept", "PenalisedIntercept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeIntercept:
    """The intercept is not penalised, as in scikit-learn's ``LogisticRegression``.

    Args:
      C: weight of the losses, above 0.
      fit_intercept: whether there is an intercept.

    Raises:
      ConfigError: a setting out of its range.
    """

    C: float = 1.0
    fit_intercept: bool = True

    def __post_init__(self) -> None:
        _above_zero("C", self.C)
        flag_option("objective", "fit_intercept", self.fit_intercept)

    @property
    def intercept_scaling(self) -> float:
        """The constant feature is 1."""
        return 1.0

    @property
    def intercept_penalty(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PenalisedIntercept:
    """The intercept is the weight of a constant feature and penalised as such, as in liblinear and ``LinearSVC``.

    Args:
      C: weight of the losses, above 0.
      fit_intercept: whether there is an intercept.
      intercept_scaling: the constant feature, above 0: the larger, the less the penalty counts.

    Raises:
      ConfigError: a setting out of its range.
    """

    C: float = 1.0
    fit_intercept: bool = True
    intercept_scaling: float = 1.0

    def __post_init__(self) -> None:
        _above_zero("C", self.C)
        _above_zero("intercept_scaling", self.intercept_scaling)
        flag_option("objective", "fit_intercept", self.fit_intercept)

    @property
    def intercept_penalty(self) -> float:
        """That of any other weight."""
        return 1.0


def _above_zero(option: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"objective: {option} {value!r} must be a number above 0")
