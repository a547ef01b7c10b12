r"""The timing models of delayed updates (DTS) and delayed gradient averaging (DGA): seconds for each step.

With :math:`t_c` the seconds of a step's computation, L the latency of an exchange and b the seconds that its bytes
keep the network busy.

References: Zhu et al. 2019 and 2021 for the models of synchronous SGD, FedAvg and DGA; what is left over where a
delay is too short is derived here.
"""

from __future__ import annotations

import math

from farflung.errors import ConfigError

__all__ = ["delayed_s", "fedavg_s", "scalability", "synchronous_s"]


def synchronous_s(compute_s: float, latency_s: float, busy_s: float = 0.0) -> float:
    r"""Synchronous SGD: :math:`t_c + L + b`."""
    return compute_s + latency_s + busy_s


def fedavg_s(compute_s: float, latency_s: float, busy_s: float = 0.0, *, period: int = 1) -> float:
    r"""FedAvg with K local steps for each exchange: :math:`t_c + (L + b) / K`."""
    _check(0, period)
    return compute_s + (latency_s + busy_s) / period


def delayed_s(
    compute_s: float, latency_s: float, busy_s: float = 0.0, *, delay: int, period: int = 1
) -> float:
    r"""A delay of D steps and blocks of K.

    .. math::
        \max\Big( t_c,\ \frac{b}{K},\ \frac{(m K - D)\, t_c + L + b}{m K} \Big),
        \qquad m = \Big\lceil \frac{D + 1}{K} \Big\rceil

    So nothing is waited for if :math:`L + b \le D t_c` and :math:`b \le K t_c`, and with K = 1 what sticks out of a
    delay that is too short is waited for once in D + 1 steps.
    """
    _check(delay, period)
    steps = math.ceil((delay + 1) / period) * period
    waiting = ((steps - delay) * compute_s + latency_s + busy_s) / steps
    return max(compute_s, busy_s / period, waiting)


def scalability(alone_s: float, together_s: float) -> float:
    """Throughput of n workers over n times that of one: a step alone over a step together."""
    return alone_s / together_s


def _check(delay: int, period: int) -> None:
    if delay < 0:
        raise ConfigError(f"delay {delay}: must be 0 or more")
    if period < 1:
        raise ConfigError(f"period {period}: must be 1 or more")
