"""DiLoCo and Streaming DiLoCo: long blocks of local steps, and an outer optimizer on their mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from typing_extensions import override

from farflung.errors import ConfigError
from farflung.options import check_coefficient, check_flag, check_integer
from farflung.schedules.base import check_outer_options, check_state_option
from farflung.schedules.merges import Outer
from farflung.types import Bucket, Fragment, Merge, OptimizerState, Schedule, State, SyncUnit, Transfer

__all__ = ["DiLoCo", "StreamingDiLoCo"]


@dataclass(frozen=True, slots=True)
class DiLoCo(Schedule):
    r"""Each replica makes ``sync_every`` local steps, and an outer optimizer steps on the mean of the updates.

    .. math::
        \Delta = \frac{1}{n} \sum_j (w_j - a), \qquad v \leftarrow \mu v + \Delta, \qquad
        a \leftarrow a + \eta (\Delta + \mu v), \qquad w_j \leftarrow a

    All replicas start from the anchor a. Rate 1 without momentum equals :class:`farflung.schedules.LocalSGD` bit for
    bit. An exchange that no step follows sets the parameters to the plain mean (our choice; needs a known run length).

    Args:
      sync_every: H, number of steps between two exchanges.
      warmup: Number of steps with shorter blocks; 0 for none. After step s a block has max(1, H s / ``warmup``) steps,
        rounded down, and its exchange sets the parameters to the plain mean. Our choice.
      outer_rate: :math:`\eta`.
      outer_momentum: :math:`\mu`.
      nesterov: True for Nesterov momentum; otherwise :math:`a \leftarrow a + \eta v`.
      optimizer_state: State of the inner optimizer; see :class:`farflung.schedules.LocalSGD`.

    Raises:
      ConfigError: an option is out of range.

    References: Douillard et al. 2023 (DiLoCo), Alg. 1, with the settings of its experiments as defaults: AdamW with
    learning rate 4e-4, warm-up and cosine inside, and inner state kept.
    """

    sync_every: int = 500
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    optimizer_state: OptimizerState = "kept"
    warmup: int = 0

    def __post_init__(self) -> None:
        check_integer("diloco", "sync_every", self.sync_every, 1)
        check_integer("diloco", "warmup", self.warmup, 0)
        check_outer_options("diloco", self.outer_rate, self.outer_momentum, self.nesterov)
        check_state_option("diloco", self.optimizer_state)

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        return (
            Outer(self.outer_rate, self.outer_momentum, self.nesterov, optimizer_state=self.optimizer_state),
        )

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
        """Returns one transfer for each bucket at the end of a block; blocks of the warm-up are shorter."""
        del state
        num_steps = step + 1
        if num_steps <= self.warmup:
            plain = Outer(optimizer_state=self.optimizer_state)
            is_block_end = num_steps in _list_warmup_ends(self.sync_every, self.warmup)
            return [Transfer(unit, step, plain) for unit in units if is_block_end]
        if (num_steps - self.warmup) % self.sync_every:
            return []
        return [Transfer(unit, step, *self.merges) for unit in units]


@cache
def _list_warmup_ends(sync_every: int, warmup: int) -> Collection[int]:
    """Returns the steps after which the blocks of a warm-up end."""
    ends, end = set[int](), 0
    while end < warmup:
        end = min(warmup, end + max(1, sync_every * end // warmup))
        ends.add(end)
    return ends


@dataclass(frozen=True, slots=True)
class StreamingDiLoCo(Schedule):
    r"""DiLoCo for one fragment of the model after the other, whose means are merged ``delay`` steps late.

    Every H / P steps the next of P fragments starts its exchange of the current :math:`\Delta_j = w_j - a`. ``delay``
    steps later the mean arrives. A fragment has every P-th gradient bucket.

    .. math::
        v \leftarrow \mu v + \bar\Delta, \qquad a \leftarrow a + \eta (\bar\Delta + \mu v), \qquad
        w_j \leftarrow (1 - \alpha)\, a + \alpha\, w_j

    Args:
      sync_every: H, number of steps between two exchanges of a fragment; a multiple of ``fragments``.
      fragments: P, number of fragments.
      delay: :math:`\tau`, number of steps between the start of an exchange and its use; below H / P.
      mix: :math:`\alpha`, share of the local parameters that remains, at least 0 and below 1.
      keep: True to add local updates since an exchange began to its result; our choice, not the paper's.
      outer_rate: :math:`\eta`.
      outer_momentum: :math:`\mu`.
      nesterov: True for Nesterov momentum.
      optimizer_state: See :class:`farflung.schedules.LocalSGD`; averages are computed when a fragment is merged.

    Raises:
      ConfigError: an option is out of range.

    References: Douillard et al. 2025 (Streaming DiLoCo), Alg. 2. Fragments of buckets are our choice.
    """

    sync_every: int = 100
    fragments: int = 4
    delay: int = 1
    mix: float = 0.5
    keep: bool = False
    outer_rate: float = 0.4
    outer_momentum: float = 0.9
    nesterov: bool = True
    optimizer_state: OptimizerState = "kept"

    def __post_init__(self) -> None:
        name = "streaming_diloco"
        check_integer(name, "sync_every", self.sync_every, 1)
        check_integer(name, "fragments", self.fragments, 1)
        if self.sync_every % self.fragments:
            raise ConfigError(
                f"{name}: sync_every {self.sync_every} is no multiple of fragments {self.fragments}: each has a turn "
                "after as many steps"
            )
        check_integer(name, "delay", self.delay, 0)
        if self.delay >= self._turn_period:
            raise ConfigError(
                f"{name}: delay {self.delay} must be below sync_every / fragments, which is {self._turn_period}"
            )
        check_coefficient(name, "mix", self.mix)
        check_flag(name, "keep", self.keep)
        check_outer_options(name, self.outer_rate, self.outer_momentum, self.nesterov)
        check_state_option(name, self.optimizer_state)

    @property
    def _turn_period(self) -> int:
        """Number of steps between two turns."""
        return self.sync_every // self.fragments

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        """Outer step, mixed with the local parameters."""
        outer = Outer(
            self.outer_rate, self.outer_momentum, self.nesterov, self.mix, self.keep, self.optimizer_state
        )
        return (outer,)

    @property
    @override
    def has_late_results(self) -> bool:
        return self.delay > 0

    @override
    def build_units(self, buckets: Sequence[Bucket]) -> Sequence[SyncUnit]:
        """Returns fragments of every P-th bucket, separate by dtype, whose numbers modulo P are their turns."""
        turns: dict[tuple[torch.dtype, int], list[Bucket]] = {}
        for bucket in buckets:
            turns.setdefault((bucket.spec.dtype, bucket.index % self.fragments), []).append(bucket)
        dtypes = list(dict.fromkeys(dtype for dtype, _ in turns))
        return [
            Fragment(dtypes.index(dtype) * self.fragments + turn, tuple(buckets_of_turn))
            for (dtype, turn), buckets_of_turn in turns.items()
        ]

    @property
    @override
    def period(self) -> int:
        return self.sync_every

    @property
    @override
    def max_steps_ahead(self) -> int:
        return self.sync_every + self.delay  # a turn may have no fragment

    @override
    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        """Returns the transfers of one fragment at a turn."""
        del state
        turns, remainder = divmod(step + 1, self._turn_period)
        if remainder:
            return []
        turn = (turns - 1) % self.fragments
        return [
            Transfer(unit, step + self.delay, *self.merges)
            for unit in units
            if unit.index % self.fragments == turn
        ]
