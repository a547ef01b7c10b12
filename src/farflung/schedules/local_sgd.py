"""Synchronous SGD, local SGD or federated averaging, and post-local SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from farflung.options import check_integer
from farflung.schedules.base import check_state_option
from farflung.schedules.merges import Outer, Replace
from farflung.types import Merge, OptimizerState, Schedule, State, SyncUnit, Transfer

__all__ = ["LocalSGD", "PostLocalSGD", "Synchronous"]


@dataclass(frozen=True, slots=True)
class Synchronous(Schedule):
    """Every bucket's gradient starts as soon as it is ready and is due at the same optimizer step."""

    merges: ClassVar[tuple[Merge, ...]] = (Replace(),)

    @property
    @override
    def max_steps_ahead(self) -> int:
        return 1

    @override
    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        """Returns one transfer for each bucket."""
        del state
        return [Transfer(unit, step, Replace()) for unit in units]


@dataclass(frozen=True, slots=True)
class LocalSGD(Schedule):
    r"""Each replica steps on its own gradients; every ``sync_every`` steps parameters become their mean.

    .. math:: w_j \leftarrow \frac{1}{n} \sum_i w_i

    Replicas exchange their changes since the last exchange, so codecs see updates. They wait for the mean; a late mean
    is supported by :class:`farflung.schedules.Delayed`. Without a delay, and with SGD or any other optimizer whose
    state is kept, that schedule equals this one bit for bit. With ``sync_every`` 1 and SGD, with momentum too, it is
    synchronous SGD up to rounding; with Adam it is not.

    Bytes and latency fall by ``sync_every``. The cost is that the mean of n replicas' updates differs from the update
    of one that sees all samples. The difference grows with the length of blocks and the learning rate.

    Memory: one copy of the parameters; an exchange uses that of the gradient. A gradient is clipped before its step.
    Between exchanges evaluation uses the mean of the replicas' parameters, and a run ends with it.

    Args:
      sync_every: K, number of steps between two exchanges.
      optimizer_state: Treatment of momentum and moments when parameters become their mean: ``"kept"`` on each replica;
        ``"reset"`` to the initial state; or ``"averaged"`` over the replicas too, uncompressed and with a wait for one
        more exchange (SGD, Adam and AdamW).

    Raises:
      ConfigError: an option is out of range.

    References: Stich 2019, Alg. 1; McMahan et al. 2017, with all clients. Most implementations keep the state.
    """

    sync_every: int = 8
    optimizer_state: OptimizerState = "kept"

    def __post_init__(self) -> None:
        check_integer("local_sgd", "sync_every", self.sync_every, 1)
        check_state_option("local_sgd", self.optimizer_state)

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        return (Outer(optimizer_state=self.optimizer_state),)

    @property
    @override
    def period(self) -> int:
        return self.sync_every

    @property
    @override
    def max_steps_ahead(self) -> int:
        return self.sync_every

    @override
    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        """Returns one transfer for each bucket at the end of a block."""
        del state
        if (step + 1) % self.sync_every:
            return []
        return [Transfer(unit, step, *self.merges) for unit in units]


@dataclass(frozen=True, slots=True)
class PostLocalSGD(Schedule):
    """Synchronous SGD for the first ``warmup`` steps, then :class:`farflung.schedules.LocalSGD`.

    Early in training gradients change fast, and blocks of local steps cost most. Later, at a small learning rate, they
    cost little, and may find minima that generalize better.

    Args:
      warmup: Number of synchronous steps, best until the learning rate first falls.
      sync_every: H, number of steps between two later exchanges, counted from ``warmup``.
      optimizer_state: See :class:`farflung.schedules.LocalSGD`.

    Raises:
      ConfigError: an option is out of range.

    References: Lin et al. 2020, Alg. 1. Their examples have H = 16 from the first fall of the learning rate, and keep
    momentum local.
    """

    warmup: int = 1000
    sync_every: int = 16
    optimizer_state: OptimizerState = "kept"

    def __post_init__(self) -> None:
        check_integer("post_local_sgd", "warmup", self.warmup, 0)
        check_integer("post_local_sgd", "sync_every", self.sync_every, 1)
        check_state_option("post_local_sgd", self.optimizer_state)

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        """Mean of gradients, and later mean of parameters."""
        return (Replace(), Outer(optimizer_state=self.optimizer_state))

    @property
    @override
    def period(self) -> int:
        return self.sync_every

    @property
    @override
    def max_steps_ahead(self) -> int:
        return self.sync_every

    @override
    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        """Returns transfers of all gradients at warm-up steps, and of all updates at the end of later blocks."""
        del state
        replace, outer = self.merges
        if step < self.warmup:
            return [Transfer(unit, step, replace) for unit in units]
        if (step + 1 - self.warmup) % self.sync_every:
            return []
        return [Transfer(unit, step, outer) for unit in units]
