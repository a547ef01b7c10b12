"""Synchronous SGD, local SGD or federated averaging, and post-local SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from farflung.options import whole_option
from farflung.schedules.base import state_option
from farflung.schedules.merges import Outer, Replace
from farflung.types import Merge, OptimizerState, Part, Schedule, State, Transfer

__all__ = ["LocalSGD", "PostLocalSGD", "Synchronous"]


@dataclass(frozen=True, slots=True)
class Synchronous(Schedule):
    """Every bucket's gradient starts as soon as it is ready and is due at the same step's optimizer."""

    merges: ClassVar[tuple[Merge, ...]] = (Replace(),)

    @property
    @override
    def reach(self) -> int:
        return 1

    @override
    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        """One transfer for each bucket."""
        del state
        return [Transfer(part, step, Replace()) for part in parts]


@dataclass(frozen=True, slots=True)
class LocalSGD(Schedule):
    r"""Each replica steps on its own gradients; every ``sync_every`` steps parameters become their mean.

    .. math:: w_j \leftarrow \frac{1}{n} \sum_i w_i

    What is exchanged is how far each has come since the last time, so codecs see updates. The mean is waited for: for
    one that comes late there is :class:`farflung.schedules.Delayed`, which without a delay and with SGD or any other
    optimizer whose state is kept is this, to the bit. With ``sync_every`` 1 and SGD, with momentum too, it is
    synchronous SGD up to rounding; with Adam it is not.

    Bytes and latency fall by ``sync_every``. What that costs is that the mean of n replicas' ways is not the way of
    one that sees all samples: the longer the blocks and the larger the learning rate, the more is lost.

    Memory: one copy of the parameters, and one more while they are exchanged. A gradient is clipped before its local
    step. Between exchanges evaluation sees the mean of the replicas' parameters, and a run ends with it.

    Args:
      sync_every: K, steps between two exchanges.
      optimizer_state: what becomes of momentum and moments when parameters become their mean: ``"kept"`` on each
        replica; ``"reset"``, as they are at the start of a run; or ``"averaged"`` over the replicas too, uncompressed,
        which one more exchange is waited for (SGD, Adam and AdamW).

    Raises:
      ConfigError: an option out of its range.

    References: Stich 2019, Alg. 1; McMahan et al. 2017, with all clients. Keeping the state is what most
    implementations do.
    """

    sync_every: int = 8
    optimizer_state: OptimizerState = "kept"

    def __post_init__(self) -> None:
        whole_option("local_sgd", "sync_every", self.sync_every, 1)
        state_option("local_sgd", self.optimizer_state)

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        return (Outer(optimizer_state=self.optimizer_state),)

    @property
    @override
    def reach(self) -> int:
        return self.sync_every

    @override
    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        """At the end of a block, one transfer for each bucket."""
        del state
        if (step + 1) % self.sync_every:
            return []
        return [Transfer(part, step, *self.merges) for part in parts]


@dataclass(frozen=True, slots=True)
class PostLocalSGD(Schedule):
    """Synchronous SGD for the first ``until`` steps, and from there on :class:`farflung.schedules.LocalSGD`.

    Early in a training gradients change fast, and blocks of local steps cost most. Late in it, at a small learning
    rate, they cost little, and may find minima that generalize better.

    Args:
      until: steps that are synchronous, best until the learning rate first falls.
      sync_every: H, steps between two exchanges after them, counted from ``until``.
      optimizer_state: see :class:`farflung.schedules.LocalSGD`.

    Raises:
      ConfigError: an option out of its range.

    References: Lin et al. 2020, Alg. 1; their examples have H = 16 from the first fall of the learning rate on, and
    keep momentum local.
    """

    until: int = 1000
    sync_every: int = 16
    optimizer_state: OptimizerState = "kept"

    def __post_init__(self) -> None:
        whole_option("post_local_sgd", "until", self.until, 0)
        whole_option("post_local_sgd", "sync_every", self.sync_every, 1)
        state_option("post_local_sgd", self.optimizer_state)

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        """Gradients replaced by their mean, and later parameters by theirs."""
        return (Replace(), Outer(optimizer_state=self.optimizer_state))

    @property
    @override
    def reach(self) -> int:
        return self.sync_every

    @override
    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        """One transfer for each bucket, at every step and later at the end of a block."""
        del state
        at_once, of_block = self.merges
        if step < self.until:
            return [Transfer(part, step, at_once) for part in parts]
        if (step + 1 - self.until) % self.sync_every:
            return []
        return [Transfer(part, step, of_block) for part in parts]
