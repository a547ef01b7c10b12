"""Delayed updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from farflung.errors import ConfigError
from farflung.options import part_option, whole_option
from farflung.schedules.merges import Pull, Swap
from farflung.types import (
    Bucket,
    Merge,
    Part,
    Schedule,
    SharedStats,
    State,
    Transfer,
)

__all__ = ["Delayed"]


FIRST, EVERY = 4, 32
"""The exchange that a delay is first chosen at, and how many pass between two choices."""


@dataclass(frozen=True, slots=True)
class Delayed(Schedule):
    r"""Each replica applies its own updates at once, and exchanges them for their mean when it arrives.

    At the end of each block of K steps the sum :math:`B_j` of the block's applied updates starts on its way. The mean
    over the replicas is there ``delay`` steps later, and moves an anchor a, which has the same bits on all: where all
    began, plus every mean that has arrived. What becomes of the own parameters is one of two things.

    **Swap**: the block is taken back at once, and the mean stands in its place.

    .. math::
        B_j = \sum_{n \in \text{block}} \Delta w_{n,j}, \qquad
        w_j \leftarrow w_j + \Delta w_{n,j} + \bar B - B_j

    Replicas differ by their own last updates alone. Parameters are computed anew as anchor plus pending blocks at each
    swap, so rounding cannot drift.

    **Pull**: the block is forgotten slowly. With :math:`u_j` the updates since the last block,

    .. math::
        a \leftarrow a + \bar B, \qquad w_j - u_j \leftarrow (1 - \rho)^K (w_j - u_j) + (1 - (1 - \rho)^K)\, a, \qquad
        \rho = \min\left(1 - \mu, \frac{1}{D + K + 1}\right)

    with :math:`\mu` the optimizer's momentum (Adam: its first beta) and D the delay that is in force; without a delay
    :math:`\rho` is 1, and that is the swap, to the bit. Replicas differ by a past that fades in :math:`1 / \rho` steps,
    and so does what rounding has done. Where an exchange brings nothing, because of a loss that is not finite, what is
    left of the own block is taken out at once.

    Updates are what the optimizer made of the own gradient, after learning rate, momentum, weight decay or Adam, so
    any optimizer and any change of the learning rate will do; the optimizer's state stays local, and a gradient is
    clipped before its local step.

    **Memory**: one copy of the parameters for the anchor, with the pull another for :math:`w_j - u_j`, and two for each
    block under way: the block, and what is sent, whose place the mean takes. Between two steps
    :math:`\lceil \text{delay} / K \rceil` blocks are under way, and one more where a block ends, since it starts before
    the oldest is merged. What the reducer holds comes on top. A swap adds up the blocks; a pull does not, and they are
    kept for checkpoints and losses that are not finite alone.

    A delay hides latency: it costs nothing as long as an exchange takes less than ``delay`` steps. It does not save
    bytes; ``period`` and codecs do. With a lossy codec wrap it in error feedback; the residual is then one of updates.

    **Learning rate**: with the swap, the longer the delay and the momentum last, the smaller it has to be, or replicas
    part. With :math:`\lambda` the curvature of a quadratic, and a period of 1, they stay together while
    :math:`\eta\lambda` is below 1 without momentum, whatever the delay, and with momentum 0.9 below 0.22, 0.069, 0.037
    and 0.025 at delays of 5, 10, 15 and 20. Synchronous SGD allows 2, and 3.8 with that momentum. With the pull,
    replicas stay together and their mean is stable up to three quarters of what synchronous SGD allows, at delays up to
    100 and momenta up to 0.99; with a longer period, narrow bands of rates below that resonate. The analysis is ours,
    and for Adam there is none.

    With a delay of 0 and a period of 1 this is synchronous SGD up to rounding, with momentum too. With Adam it is
    not: the mean of the updates is not the update of the mean. Replicas with identical batches are one worker alone
    with the swap, at any delay, and not with the pull.

    Evaluation sees the mean of the replicas' parameters with the swap, and the anchor with the pull. At the end of a
    run all that is under way is merged, with the pull what is left of the way to the anchor is gone at once, and the
    parameters are averaged where a block was unfinished.

    Args:
      delay: steps between the start of an exchange and its use; ``"auto"``: begins with 0, and is chosen by one
        decider from its measured times, as the time of an exchange over that of a step, rounded up, first at the
        fourth exchange and then at every 32nd (our choice).
      period: K, steps in a block.
      most: the largest delay that ``"auto"`` may choose.
      pull: ``"auto"``: the pull, with :math:`\rho` as above; :math:`\rho` itself, above 0 and at most 1; or ``"swap"``.
      warmup: steps at the start whose results are due at once: synchronous SGD up to rounding.

    Raises:
      ConfigError: an option out of its range.

    References: Zhu et al. 2019 (DTS); Zhu et al. 2021 (DGA), Alg. 1. They exchange raw gradients of plain SGD, for
    which both are the same. Applied updates, the anchor, the pull and ``"auto"`` are our choice. Relatives of the pull
    are EASGD (Zhang, Choromanska & LeCun 2015) and Overlap Local-SGD (Wang, Liang & Joshi 2020), which pull towards a
    mean of parameters, without this rule.
    """

    delay: int | str = 4
    period: int = 1
    most: int = 64
    pull: float | str = "auto"
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.delay != "auto":
            if isinstance(self.delay, str):
                raise ConfigError(f"delayed: delay {self.delay!r} must be a whole number or 'auto'")
            whole_option("delayed", "delay", self.delay, 0)
        whole_option("delayed", "period", self.period, 1)
        whole_option("delayed", "most", self.most, 1)
        whole_option("delayed", "warmup", self.warmup, 0)
        if self.pull not in ("swap", "auto"):
            if isinstance(self.pull, str):
                raise ConfigError(f"delayed: pull {self.pull!r} must be 'swap', 'auto' or a share")
            part_option("delayed", "pull", self.pull)

    @override
    def check(self, size: int) -> None:
        """Refuses a single replica, which would be pulled towards its own past.

        Raises:
          ConfigError: says what to do instead.
        """
        if size == 1:
            raise ConfigError(
                "schedule delayed averages replicas, and there is one: use --workers 2 or more, or --schedule "
                "synchronous"
            )

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        """The swap or the pull."""
        return (self._merge,)

    @property
    @override
    def late(self) -> bool:
        """With a delay, or one that is yet to be chosen."""
        return self.delay != 0

    @override
    def parts(self, buckets: Sequence[Bucket]) -> Sequence[Part]:
        return buckets

    @override
    def init(self) -> State:
        """The delay at the beginning, and the earliest step that a result may be due at."""
        return {"delay": 0 if isinstance(self.delay, str) else self.delay, "not_before": 0}

    @property
    @override
    def reach(self) -> int:
        return 0 if isinstance(self.delay, str) else self.delay + self.period

    @override
    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        """At the end of a block, one transfer for each bucket; in the warm-up at every step, due at once."""
        due = step
        if step >= self.warmup:
            if (step + 1) % self.period:
                return []
            due = max(step + state["delay"], state["not_before"])
        return [Transfer(part, due, self._merge) for part in parts]

    @override
    def asks(self, state: State, step: int) -> bool:
        """At the exchanges at which a delay is chosen."""
        del state
        number, rest = divmod(step + 1, self.period)
        return self.delay == "auto" and not rest and number >= FIRST and (number - FIRST) % EVERY == 0

    @override
    def observe(self, state: State, stats: SharedStats) -> State:
        """Chooses a delay, where the stats have times; results stay in order when it becomes shorter."""
        if stats.step_s is None or stats.exchange_s is None:
            return state
        delay = math.ceil(stats.exchange_s / stats.step_s) if stats.step_s > 0 else self.most
        under_way = max(state["not_before"], stats.step + 2 * int(state["delay"]))
        return {**state, "delay": min(delay, self.most), "not_before": under_way}

    @property
    def _merge(self) -> Merge:
        if self.pull == "swap":
            return Swap()
        return Pull(None if isinstance(self.pull, str) else self.pull, self.period)
