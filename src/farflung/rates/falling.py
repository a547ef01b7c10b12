"""What falls from the whole learning rate to a last one."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from farflung.errors import ConfigError
from farflung.options import number_option, whole_option
from farflung.rates.warm_up import WarmUp

__all__ = ["Falling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Falling(WarmUp):
    """A fall that begins once the rate is warm, and ends at the end of the run or before.

    Args:
      warmup: steps or samples of a straight rise; see :class:`farflung.rates.WarmUp`.
      by: what is counted.
      final: the share of the rate that is left at the end, in [0, 1].
      until: steps or samples after which ``final`` is reached; the whole run when not given.

    Raises:
      ConfigError: an option out of its range.
    """

    final: float = 0.0
    until: int | None = None

    @override
    def __post_init__(self) -> None:
        WarmUp.__post_init__(self)
        number_option(self._name, "final", self.final, 0)
        if self.final > 1:
            raise ConfigError(f"{self._name}: final {self.final!r} must be at most 1")
        if self.until is not None:
            whole_option(self._name, "until", self.until, self.warmup + 1)

    def _fallen(self, done: int, total: int) -> float:
        """How much of the way lies behind, in [0, 1]."""
        end = total if self.until is None else self.until
        return min(1.0, max(0, done - self.warmup) / max(1, end - self.warmup))
