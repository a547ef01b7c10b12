"""Schedule of TicTac and P3: synchronous SGD whose exchanges overlap with the next forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from typing_extensions import override

from farflung.engine import Extension, TrainingLoop
from farflung.errors import ConfigError
from farflung.moments import get_optimizer_name, is_separable
from farflung.options import check_choice, check_number
from farflung.schedules.merges import Replace
from farflung.schedules.orders import rank_by_tac, rank_by_tic
from farflung.types import ForwardTrace, Merge, Schedule, State, SyncUnit, Transfer

__all__ = ["Priority"]


@dataclass(frozen=True, slots=True)
class Priority(Schedule):
    r"""Synchronous SGD without a barrier: each bucket's mean is awaited where the next forward pass first uses it.

    The optimizer steps bucket by bucket, right before the use. Parameters are those of
    :class:`farflung.schedules.Synchronous` with equal buckets, bit for bit. Messages of buckets that are needed first
    leave first. The order of use is traced from one forward pass before the first step.

    Args:
      order: ``"tic"`` ranks buckets by the number of means without which an operation cannot begin; ``"tac"`` weighs
        the computation that a mean unlocks against its transfer; ``"forward"`` is the order of first use, as in P3.
      flops_per_byte: Floating-point operations of a device in the time in which it receives a byte, for ``"tac"``.

    Raises:
      ConfigError: an option is out of range.

    References: Hashemi et al. 2019 (TicTac), TIC and TAC; Jayarajan et al. 2019 (P3). Details in the documentation.
    """

    order: Literal["tic", "tac", "forward"] = "tic"
    flops_per_byte: float = 1000.0

    merges: ClassVar[tuple[Merge, ...]] = (Replace(),)

    def __post_init__(self) -> None:
        check_choice("priority", "order", self.order, ("tic", "tac", "forward"))
        check_number("priority", "flops_per_byte", self.flops_per_byte, 0)

    @override
    def build_extensions(self, loop: TrainingLoop) -> Sequence[Extension]:
        """Rejects what needs all gradients at once.

        Raises:
          ConfigError: gradients are clipped by their norm, or the optimizer is unknown.
        """
        if loop.training.clip_norm:
            raise ConfigError(
                "schedule priority steps bucket by bucket, before the norm of the whole gradient is known: leave out "
                "--clip-norm, or choose --schedule synchronous"
            )
        if not is_separable(loop.optimizer):
            raise ConfigError(
                f"schedule priority steps bucket by bucket, which {get_optimizer_name(loop.optimizer)} may not "
                "support: use an optimizer of torch.optim, or choose --schedule synchronous"
            )
        return ()

    @property
    @override
    def attach_refusal(self) -> str:
        return "updates before parameters are used need hold of the forward pass"

    @property
    @override
    def has_deferred_updates(self) -> bool:
        return True

    @override
    def init(self) -> State:
        """Returns an empty list of priorities, which a trace fills."""
        return {"priorities": []}

    @override
    def record_trace(self, state: State, units: Sequence[SyncUnit], trace: ForwardTrace) -> State:
        """Ranks the buckets; those that no operation uses come last."""
        if self.order == "tac":
            transfers = {unit.index: self.flops_per_byte * unit.buckets[0].spec.nbytes for unit in units}
            ranks = rank_by_tac(
                trace.dependencies, trace.flops, {index: transfers[index] for index in trace.order}
            )
        elif self.order == "tic":
            ranks = rank_by_tic(trace.dependencies, trace.order)
        else:
            ranks = {index: rank for rank, index in enumerate(trace.order)}
        return {"priorities": [ranks.get(unit.index, len(units)) for unit in units]}

    @override
    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        """Returns one transfer for each bucket."""
        priorities = state["priorities"] or [0] * len(units)
        return [
            Transfer(unit, step, Replace(), priority=priority)
            for unit, priority in zip(units, priorities, strict=True)
        ]
