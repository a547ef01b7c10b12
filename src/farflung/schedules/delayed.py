"""Schedule of delayed updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from farflung.errors import ConfigError
from farflung.options import check_fraction, check_integer
from farflung.schedules.merges import Pull, Swap
from farflung.types import (
    Bucket,
    Merge,
    Schedule,
    SharedStats,
    State,
    SyncUnit,
    Transfer,
)

__all__ = ["Delayed"]


FIRST_CHOICE, CHOICE_PERIOD = 4, 32
"""First exchange at which a delay is chosen, and number of exchanges between two choices."""


@dataclass(frozen=True, slots=True)
class Delayed(Schedule):
    r"""Each replica applies its own updates immediately, and merges their mean when it arrives.

    At the end of each block of K steps the exchange of :math:`B_j`, the sum of the block's applied updates, starts. The
    mean over the replicas arrives ``delay`` steps later and moves an anchor a, which is bit-identical on all ranks: the
    initial parameters plus every mean that has arrived. The local parameters follow by one of two merges.

    **Swap**: the mean replaces the block.

    .. math::
        B_j = \sum_{n \in \text{block}} \Delta w_{n,j}, \qquad
        w_j \leftarrow w_j + \Delta w_{n,j} + \bar B - B_j

    Replicas differ by their own last updates only. Each swap recomputes the parameters as anchor plus pending blocks,
    so rounding cannot drift.

    **Pull**: the block fades gradually. With :math:`u_j` the updates since the last block,

    .. math::
        a \leftarrow a + \bar B, \qquad w_j - u_j \leftarrow (1 - \rho)^K (w_j - u_j) + (1 - (1 - \rho)^K)\, a, \qquad
        \rho = \min\left(1 - \mu, \frac{1}{D + K + 1}\right)

    with :math:`\mu` the optimizer's momentum (Adam: its first beta) and D the current delay. Without a delay
    :math:`\rho` is 1, which equals the swap bit for bit. Replicas differ by a past that fades in :math:`1 / \rho`
    steps, and so does rounding. If an exchange has no result because of a loss that is not finite, the rest of the own
    block is removed immediately.

    Updates are those of the optimizer for the local gradient, after learning rate, momentum, weight decay or Adam. Any
    optimizer and learning-rate schedule is supported. The optimizer's state stays local, and a gradient is clipped
    before its local step.

    **Memory**: one copy of the parameters for the anchor, another with the pull for :math:`w_j - u_j`, and two for each
    block in flight: the block, and the sent tensor, which the mean replaces. Between two steps :math:`\lceil
    \text{delay} / K \rceil` blocks are in flight. There is one more at the end of a block, since it starts before the
    oldest is merged. The reducer's state is additional. A swap sums the blocks; a pull keeps them only for checkpoints
    and losses that are not finite.

    A delay hides latency: it costs nothing if an exchange takes less than ``delay`` steps. It does not save bytes;
    ``period`` and codecs do. Wrap a lossy codec in error feedback; the residual is then one of updates.

    **Learning rate**: with the swap, a longer delay or a larger momentum needs a smaller learning rate, or replicas
    diverge. With :math:`\lambda` the curvature of a quadratic, and a period of 1, they stay together while
    :math:`\eta\lambda` is below 1 without momentum, for any delay. With momentum 0.9 the bounds are 0.22, 0.069, 0.037
    and 0.025 at delays of 5, 10, 15 and 20. Synchronous SGD allows 2, and 3.8 with that momentum. With the pull,
    replicas stay together and their mean is stable up to three quarters of what synchronous SGD allows, at delays up to
    100 and momenta up to 0.99. With a longer period, narrow bands of rates below that resonate. The analysis is ours
    and does not cover Adam.

    With a delay of 0 and a period of 1 this is synchronous SGD up to rounding, with momentum too. With Adam it is not:
    the mean of the updates is not the update of the mean. Replicas with identical batches equal a single worker with
    the swap, at any delay, but not with the pull.

    Evaluation uses the mean of the replicas' parameters with the swap, and the anchor with the pull. At the end of a
    run all exchanges in flight are merged, and the pull completes immediately. Parameters are averaged if a block was
    unfinished.

    Args:
      delay: Number of steps between the start of an exchange and its use. ``"auto"`` begins with 0 and lets one decider
        choose from its measured times: the time of an exchange over that of a step, rounded up. It chooses at the
        fourth exchange and then at every 32nd (our choice).
      period: K, number of steps in a block.
      max_delay: Maximum delay that ``"auto"`` may choose.
      pull: ``"auto"`` for the pull with :math:`\rho` as above; a number for :math:`\rho`, above 0 and at most 1; or
        ``"swap"``.
      warmup: Number of first steps whose results are due immediately: synchronous SGD up to rounding.

    Raises:
      ConfigError: an option is out of range.

    References: Zhu et al. 2019 (DTS); Zhu et al. 2021 (DGA), Alg. 1. They exchange raw gradients of plain SGD, for
    which both are equal. Applied updates, the anchor, the pull and ``"auto"`` are our choice. The pull is related to
    EASGD (Zhang, Choromanska & LeCun 2015) and Overlap Local-SGD (Wang, Liang & Joshi 2020), which pull towards a mean
    of parameters, without this rule.
    """

    delay: int | str = 4
    period: int = 1
    max_delay: int = 64
    pull: float | str = "auto"
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.delay != "auto":
            if isinstance(self.delay, str):
                raise ConfigError(f"delayed: delay {self.delay!r} must be a whole number or 'auto'")
            check_integer("delayed", "delay", self.delay, 0)
        check_integer("delayed", "period", self.period, 1)
        check_integer("delayed", "max_delay", self.max_delay, 1)
        check_integer("delayed", "warmup", self.warmup, 0)
        if self.pull not in ("swap", "auto"):
            if isinstance(self.pull, str):
                raise ConfigError(f"delayed: pull {self.pull!r} must be 'swap', 'auto' or a share")
            check_fraction("delayed", "pull", self.pull)

    @override
    def check(self, size: int) -> None:
        """Rejects a single replica, which would be pulled towards its own past.

        Raises:
          ConfigError: the run has one replica; the message has an alternative.
        """
        if size == 1:
            raise ConfigError(
                "schedule delayed averages replicas, and there is one: use --workers 2 or more, or --schedule "
                "synchronous"
            )

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        """Swap or pull."""
        return (self._merge,)

    @property
    @override
    def has_late_results(self) -> bool:
        """Returns True with a delay, or one that is chosen later."""
        return self.delay != 0

    @override
    def build_units(self, buckets: Sequence[Bucket]) -> Sequence[SyncUnit]:
        return buckets

    @override
    def init(self) -> State:
        """Returns the initial delay, and the earliest step at which a result may be due."""
        return {"delay": 0 if isinstance(self.delay, str) else self.delay, "earliest_step": 0}

    @property
    @override
    def max_steps_ahead(self) -> int:
        return 0 if isinstance(self.delay, str) else self.delay + self.period

    @override
    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        """Returns one transfer for each bucket at the end of a block, or without delay at every step of the warm-up."""
        merge_step = step
        if step >= self.warmup:
            if (step + 1) % self.period:
                return []
            merge_step = max(step + state["delay"], state["earliest_step"])
        return [Transfer(unit, merge_step, self._merge) for unit in units]

    @override
    def needs_times(self, state: State, step: int) -> bool:
        """Returns True for exchanges at which a delay is chosen."""
        del state
        number, remainder = divmod(step + 1, self.period)
        return (
            self.delay == "auto"
            and not remainder
            and number >= FIRST_CHOICE
            and (number - FIRST_CHOICE) % CHOICE_PERIOD == 0
        )

    @override
    def update_state(self, state: State, stats: SharedStats) -> State:
        """Chooses a delay if the stats have times; results stay in order if it becomes shorter."""
        if stats.step_s is None or stats.exchange_s is None:
            return state
        delay = math.ceil(stats.exchange_s / stats.step_s) if stats.step_s > 0 else self.max_delay
        earliest_step = max(state["earliest_step"], stats.step + 2 * int(state["delay"]))
        return {**state, "delay": min(delay, self.max_delay), "earliest_step": earliest_step}

    @property
    def _merge(self) -> Merge:
        if self.pull == "swap":
            return Swap()
        return Pull(None if isinstance(self.pull, str) else self.pull, self.period)
