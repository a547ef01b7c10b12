"""How long to wait, learned from how long it has taken."""

from __future__ import annotations

__all__ = ["Learned"]


class Learned:
    r"""A deadline for what happens again and again.

    .. math:: d = f \, (\mu + 4 \sigma)

    with the mean :math:`\mu` and the mean deviation :math:`\sigma` of the times so far, smoothed as TCP does, by 1/8
    and 1/4. The factor :math:`f` is ours.

    Args:
      first_s: as long as there is no time yet, in seconds.
      least_s: it is never shorter.
      factor: :math:`f`.

    References: Jacobson & Karels 1988; RFC 6298.
    """

    def __init__(self, first_s: float, *, least_s: float = 1.0, factor: float = 3.0) -> None:
        self._first_s, self._least_s, self._factor = first_s, least_s, factor
        self._mean: float | None = None
        self._deviation = 0.0

    @property
    def seconds(self) -> float:
        """The deadline as it is now."""
        if self._mean is None:
            return self._first_s
        return max(self._least_s, self._factor * (self._mean + 4 * self._deviation))

    def took(self, seconds: float) -> None:
        """It has happened again."""
        if self._mean is None:
            self._mean, self._deviation = seconds, seconds / 2
            return
        self._deviation += (abs(seconds - self._mean) - self._deviation) / 4
        self._mean += (seconds - self._mean) / 8
