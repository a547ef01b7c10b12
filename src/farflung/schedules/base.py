"""What schedules have alike: those that adapt to nothing, and checks of options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from farflung.errors import ConfigError
from farflung.options import flag_option, number_option, share_option
from farflung.types import Bucket, Part, SharedStats, State
from farflung.types.schedule import OptimizerState

__all__ = ["Fixed", "outer_options", "state_option"]


class Fixed:
    """A schedule that moves every bucket by itself, and whose plan hangs on nothing but the step."""

    __slots__ = ()

    @property
    def late(self) -> bool:
        return False

    def parts(self, buckets: Sequence[Bucket]) -> Sequence[Part]:
        return buckets

    def init(self) -> State:
        return {}

    def asks(self, state: State, step: int) -> bool:
        del state, step
        return False

    def observe(self, state: State, stats: SharedStats) -> State:
        del stats
        return state


def state_option(name: str, state: object) -> None:
    """What becomes of an optimizer's state.

    Raises:
      ConfigError: none of the words there are for that.
    """
    if state not in get_args(OptimizerState):
        raise ConfigError(f"{name}: optimizer_state {state!r} must be 'kept', 'reset' or 'averaged'")


def outer_options(name: str, rate: object, momentum: object, nesterov: object) -> None:
    """An outer optimizer's learning rate and momentum, and whether that is Nesterov's.

    Raises:
      ConfigError: out of range.
    """
    number_option(name, "outer_rate", rate, 0)
    if not rate:
        raise ConfigError(f"{name}: outer_rate must be above 0")
    share_option(name, "outer_momentum", momentum)
    flag_option(name, "nesterov", nesterov)
