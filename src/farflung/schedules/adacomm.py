"""Schedule of AdaComm: local SGD with a period that shrinks as the loss falls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from farflung.errors import ConfigError
from farflung.options import check_coefficient, check_fraction, check_integer, check_number
from farflung.schedules.base import check_state_option
from farflung.schedules.merges import Outer
from farflung.types import Bucket, Merge, OptimizerState, Schedule, SharedStats, State, SyncUnit, Transfer

__all__ = ["AdaComm"]


@dataclass(frozen=True, slots=True)
class AdaComm(Schedule):
    r"""Local SGD whose period is adapted every ``interval_s`` seconds to the loss and the learning rate.

    .. math::
        \tau = \left\lceil \tau_0 \sqrt{\left(\frac{\eta_0}{\eta}\right)^{p} \frac{F}{F_0}}\, \right\rceil, \qquad
        u \leftarrow \beta u + \frac{1}{n} \sum_j (w_j - a), \qquad a \leftarrow a + u

    with F the mean training loss of all replicas over the last block, :math:`F_0` that over the first, and a the
    anchor from which all replicas start. One decider's clock is recorded, so a replay needs none.

    Args:
      sync_every: :math:`\tau_0`, number of steps in the first blocks.
      interval_s: Seconds between two adaptations.
      rule: ``"shrink"`` uses :math:`\lceil \gamma \tau \rceil` of the current period if the formula does not shorten
        it; ``"basic"`` uses the formula, by which the period may rise.
      shrink: :math:`\gamma`, above 0 and below 1.
      rate_power: p, the power by which a falling learning rate lengthens blocks; 0 disables this.
      max_period: Maximum number of steps in a block.
      block_momentum: :math:`\beta`.
      optimizer_state: See :class:`farflung.schedules.LocalSGD`; with block momentum ``"reset"`` is usual.

    Raises:
      ConfigError: an option is out of range.

    References: Wang & Joshi 2019 (AdaComm); block momentum as in Chen & Huo 2016. Details in the documentation.
    """

    sync_every: int = 20
    interval_s: float = 60.0
    rule: Literal["shrink", "basic"] = "shrink"
    shrink: float = 0.5
    rate_power: float = 1.0
    max_period: int = 200
    block_momentum: float = 0.0
    optimizer_state: OptimizerState = "kept"

    def __post_init__(self) -> None:
        check_integer("adacomm", "sync_every", self.sync_every, 1)
        check_number("adacomm", "interval_s", self.interval_s, 0)
        if not self.interval_s:
            raise ConfigError("adacomm: interval_s must be above 0")
        if self.rule not in ("shrink", "basic"):
            raise ConfigError(f"adacomm: rule {self.rule!r} must be 'shrink' or 'basic'")
        check_fraction("adacomm", "shrink", self.shrink)
        if self.shrink == 1:
            raise ConfigError("adacomm: shrink 1 would shrink nothing: it must be below 1")
        check_number("adacomm", "rate_power", self.rate_power, 0)
        check_integer("adacomm", "max_period", self.max_period, self.sync_every)
        check_coefficient("adacomm", "block_momentum", self.block_momentum)
        check_state_option("adacomm", self.optimizer_state)

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        """Mean, with block momentum if requested."""
        return (Outer(momentum=self.block_momentum, optimizer_state=self.optimizer_state),)

    @property
    @override
    def attach_refusal(self) -> str:
        return "the loss, which it does not see, decides how long blocks are"

    @property
    @override
    def has_late_results(self) -> bool:
        return False

    @override
    def build_units(self, buckets: Sequence[Bucket]) -> Sequence[SyncUnit]:
        return buckets

    @override
    def init(self) -> State:
        """Returns the period, the end of the block, the time of the next adaptation, and values of the first block."""
        return {
            "period": self.sync_every,
            "block_end": self.sync_every - 1,
            "next_choice_s": self.interval_s,
            "loss": None,
            "learning_rate": None,
        }

    @override
    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        """Returns one transfer for each bucket at the end of a block."""
        return [Transfer(unit, step, *self.merges) for unit in units] if step >= state["block_end"] else []

    @override
    def needs_times(self, state: State, step: int) -> bool:
        """Returns True at every exchange, for the clock."""
        return bool(step >= state["block_end"])

    @override
    def update_state(self, state: State, stats: SharedStats) -> State:
        """Records the first loss and rate, adapts the period after an interval, and sets the next block's end."""
        state = {**state}
        is_valid = stats.weight > 0 and 0 < stats.loss < math.inf
        if is_valid and state["loss"] is None:
            state.update(loss=stats.loss, learning_rate=stats.learning_rate)
        if stats.elapsed_s is not None and stats.elapsed_s >= state["next_choice_s"]:
            state["next_choice_s"] = (stats.elapsed_s // self.interval_s + 1) * self.interval_s
            if is_valid:
                state["period"] = self._choose_period(state, stats)
        state["block_end"] = stats.step + state["period"]
        return state

    def _choose_period(self, state: State, stats: SharedStats) -> int:
        previous, coupling = state["period"], 1.0
        if state["learning_rate"] and stats.learning_rate:
            coupling = (state["learning_rate"] / stats.learning_rate) ** self.rate_power
        period = math.ceil(self.sync_every * math.sqrt(coupling * stats.loss / state["loss"]))
        if self.rule == "shrink" and period >= previous:
            period = math.ceil(self.shrink * previous)
        return max(1, min(period, self.max_period))
