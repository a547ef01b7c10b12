r"""The timing models of Pipe-SGD: what one iteration takes, by equations.

Symbols are the paper's: p workers; :math:`\alpha` seconds of latency for each message, :math:`\beta` seconds per
byte, :math:`\gamma` seconds to add a byte, S seconds to synchronize for a collective, n bytes of a gradient; A the
seconds of computation and update of an iteration, C those of its communication.

References: Li et al. 2018 for the terms; the ring's time with :math:`\alpha, \beta, \gamma` is Thakur et al. 2005.
The period for links and processors that are limited and the server are derived here: the paper's own
forms were not at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from farflung.errors import ConfigError

__all__ = ["Cluster", "period_s", "ring_s", "server_s"]


@dataclass(frozen=True, slots=True)
class Cluster:
    r"""Workers on links that are alike.

    Args:
      workers: p.
      alpha_s: :math:`\alpha`, seconds for each message.
      beta_s: :math:`\beta`, seconds per byte.
      gamma_s: :math:`\gamma`, seconds to add a byte.
      sync_s: S, seconds to synchronize for each collective.

    Raises:
      ConfigError: a value out of its range.
    """

    workers: int
    alpha_s: float = 0.0
    beta_s: float = 0.0
    gamma_s: float = 0.0
    sync_s: float = 0.0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"workers {self.workers}: must be 1 or more")
        for name in ("alpha_s", "beta_s", "gamma_s", "sync_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} {getattr(self, name)}: must be 0 or more")


def ring_s(cluster: Cluster, nbytes: float) -> float:
    r"""An all-reduce around a ring.

    .. math:: 2 (p - 1) \alpha + 2 \frac{p - 1}{p} n \beta + \frac{p - 1}{p} n \gamma + S

    >>> round(ring_s(Cluster(4, beta_s=0.8e-9), 244e6), 3)
    0.293
    """
    p = cluster.workers
    if p == 1:
        return 0.0
    share = (p - 1) / p * nbytes
    return (
        2 * (p - 1) * cluster.alpha_s + 2 * share * cluster.beta_s + share * cluster.gamma_s + cluster.sync_s
    )


def server_s(cluster: Cluster, nbytes: float) -> float:
    r"""Through one parameter server, whose link all p pushes and p pulls share.

    .. math:: 2 \alpha + 2 p n \beta + p n \gamma
    """
    p = cluster.workers
    return 2 * cluster.alpha_s + 2 * p * nbytes * cluster.beta_s + p * nbytes * cluster.gamma_s


def period_s(compute_s: float, communication_s: float, width: int = 1, *, limited: bool = True) -> float:
    r"""What an iteration takes in the long run.

    .. math:: \max(A, C, (A + C) / K)

    Width 1 is synchronous: A + C. Without limits (as many processors and links as iterations under way) it is
    :math:`(A + C) / K`. Since :math:`(A + C) / 2 \le \max(A, C)`, width 2 is as fast as any larger one.

    Args:
      compute_s: A.
      communication_s: C.
      width: K.
      limited: whether a worker has one processor and one link.

    Raises:
      ConfigError: no width.

    >>> period_s(1.0, 1.0), period_s(1.0, 1.0, 2), period_s(1.0, 3.0, 2)
    (2.0, 1.0, 3.0)
    """
    if width < 1:
        raise ConfigError(f"width {width}: must be 1 or more")
    shared = (compute_s + communication_s) / width
    return max(compute_s, communication_s, shared) if limited else shared
