"""DiLoCo and Streaming DiLoCo: long blocks of local steps, and an outer optimizer on their mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from typing_extensions import override

from farflung.errors import ConfigError
from farflung.options import flag_option, share_option, whole_option
from farflung.schedules.base import outer_options, state_option
from farflung.schedules.merges import Outer
from farflung.types import Bucket, Fragment, Merge, OptimizerState, Part, Schedule, State, Transfer

__all__ = ["DiLoCo", "StreamingDiLoCo"]


@dataclass(frozen=True, slots=True)
class DiLoCo(Schedule):
    r"""Each replica makes ``sync_every`` steps of its own; an outer optimizer steps on the mean of the ways they went.

    .. math::
        \Delta = \frac{1}{n} \sum_j (w_j - a), \qquad v \leftarrow \mu v + \Delta, \qquad
        a \leftarrow a + \eta (\Delta + \mu v), \qquad w_j \leftarrow a

    The anchor a is where all set out from. The outer optimizer is SGD with Nesterov's momentum; with ``outer_rate`` 1
    and ``outer_momentum`` 0 this is :class:`farflung.schedules.LocalSGD`, to the bit. The mean is waited for:
    :class:`farflung.schedules.StreamingDiLoCo` waits less.

    Anchor and outer momentum are alike on all replicas, and are kept once in a checkpoint. They take two copies of the
    parameters, and what is sent takes one more until it is merged. The optimizer of the run is the inner one, by the
    paper AdamW.

    Between exchanges evaluation sees the mean of the replicas' parameters, and a run ends with it; so let the number of
    steps be a multiple of ``sync_every``. An exchange that no step follows sets the parameters to the plain mean, as
    with rate 1 and no momentum: there the outer step would overshoot (ours; needs a run whose length is known).

    Early in a training replicas drift apart fast, and long blocks cost most. In a warm-up the exchange after that of
    step s follows max(1, H s / ``warmup``) steps later, rounded down, the last one after ``warmup`` steps, and sets the
    parameters to the plain mean: about (1 + ln H) ``warmup`` / H exchanges. This is ours; the paper starts from a model
    that was trained for 24,000 of its 88,000 steps without DiLoCo.

    Args:
      sync_every: H, steps between two exchanges.
      warmup: steps until exchanges are that far apart; 0: they are from the start.
      outer_rate: :math:`\eta`.
      outer_momentum: :math:`\mu`.
      nesterov: whether momentum is Nesterov's; without it, :math:`a \leftarrow a + \eta v`.
      optimizer_state: of the inner optimizer; see :class:`farflung.schedules.LocalSGD`.

    Raises:
      ConfigError: an option out of its range.

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
        whole_option("diloco", "sync_every", self.sync_every, 1)
        whole_option("diloco", "warmup", self.warmup, 0)
        outer_options("diloco", self.outer_rate, self.outer_momentum, self.nesterov)
        state_option("diloco", self.optimizer_state)

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        return (
            Outer(self.outer_rate, self.outer_momentum, self.nesterov, optimizer_state=self.optimizer_state),
        )

    @property
    @override
    def reach(self) -> int:
        return self.sync_every

    @override
    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        """At the end of a block, one transfer for each bucket."""
        del state
        done = step + 1
        if done <= self.warmup:
            plain = Outer(optimizer_state=self.optimizer_state)
            now = done in _growing(self.sync_every, self.warmup)
            return [Transfer(part, step, plain) for part in parts if now]
        if (done - self.warmup) % self.sync_every:
            return []
        return [Transfer(part, step, *self.merges) for part in parts]


@cache
def _growing(longest: int, warmup: int) -> Collection[int]:
    """The steps after which the blocks of a warm-up end."""
    ends, end = set[int](), 0
    while end < warmup:
        end = min(warmup, end + max(1, longest * end // warmup))
        ends.add(end)
    return ends


@dataclass(frozen=True, slots=True)
class StreamingDiLoCo(Schedule):
    r"""DiLoCo for one fragment of the model after the other, whose means are merged ``delay`` steps late.

    Every H / P steps the next of P fragments begins its exchange, with :math:`\Delta_j = w_j - a` as it is then.
    ``delay`` steps later the mean is there:

    .. math::
        v \leftarrow \mu v + \bar\Delta, \qquad a \leftarrow a + \eta (\bar\Delta + \mu v), \qquad
        w_j \leftarrow (1 - \alpha)\, a + \alpha\, w_j

    So as many bytes move as with :class:`farflung.schedules.DiLoCo`, in P pieces at even distances, beside the next
    steps. What a replica did in the steps of the delay survives with the share :math:`\alpha` alone. With ``keep`` it
    is added, :math:`w_j \leftarrow (1 - \alpha)(a + u_j) + \alpha w_j` with :math:`u_j` those updates; then replicas
    with identical batches, an outer rate of 1 and no outer momentum are one worker alone, at any delay.

    With one fragment, no delay and ``mix`` 0 this is DiLoCo. With ``mix`` above 0 replicas are never quite alike:
    evaluation sees the mean of their parameters, and a run ends with it.

    A fragment is made of gradient buckets, every P-th one, so that each has layers from all of the model. Make buckets
    small (``bucket_nbytes``), so that there are many times as many as fragments: where there are fewer, some turns
    move nothing. A fragment is one exchange for each dtype.

    Memory: two copies of the parameters, and two of a fragment while it is under way.

    Args:
      sync_every: H, steps between two exchanges of a fragment; a multiple of ``fragments``.
      fragments: P.
      delay: :math:`\tau`, steps between the start of an exchange and its use; below H / P.
      mix: :math:`\alpha`, the share of the own parameters that stays, at least 0 and below 1.
      keep: whether own updates since an exchange began are added to what it has led to; our choice, not the paper's.
      outer_rate: :math:`\eta`.
      outer_momentum: :math:`\mu`.
      nesterov: whether that is Nesterov's.
      optimizer_state: see :class:`farflung.schedules.LocalSGD`; averages are taken, and waited for, when a fragment is
        merged.

    Raises:
      ConfigError: an option out of its range.

    References: Douillard et al. 2025 (Streaming DiLoCo), Alg. 2. It exchanges in 4 bits, for which there are codecs.
    Its defaults here were taken from other's accounts. Making fragments of buckets is our choice.
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
        whole_option(name, "sync_every", self.sync_every, 1)
        whole_option(name, "fragments", self.fragments, 1)
        if self.sync_every % self.fragments:
            raise ConfigError(
                f"{name}: sync_every {self.sync_every} is no multiple of fragments {self.fragments}: each has a turn "
                "after as many steps"
            )
        whole_option(name, "delay", self.delay, 0)
        if self.delay >= self._every:
            raise ConfigError(
                f"{name}: delay {self.delay} must be below sync_every / fragments, which is {self._every}"
            )
        share_option(name, "mix", self.mix)
        flag_option(name, "keep", self.keep)
        outer_options(name, self.outer_rate, self.outer_momentum, self.nesterov)
        state_option(name, self.optimizer_state)

    @property
    def _every(self) -> int:
        """Steps between two turns."""
        return self.sync_every // self.fragments

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        """An outer step, mixed with the own parameters."""
        how = Outer(
            self.outer_rate, self.outer_momentum, self.nesterov, self.mix, self.keep, self.optimizer_state
        )
        return (how,)

    @property
    @override
    def late(self) -> bool:
        return self.delay > 0

    @override
    def parts(self, buckets: Sequence[Bucket]) -> Sequence[Part]:
        """Fragments of every P-th bucket, those of another dtype apart; their numbers leave their turns modulo P."""
        found: dict[tuple[torch.dtype, int], list[Bucket]] = {}
        for bucket in buckets:
            found.setdefault((bucket.spec.dtype, bucket.index % self.fragments), []).append(bucket)
        dtypes = list(dict.fromkeys(dtype for dtype, _ in found))
        return [
            Fragment(dtypes.index(dtype) * self.fragments + turn, tuple(of_turn))
            for (dtype, turn), of_turn in found.items()
        ]

    @property
    @override
    def reach(self) -> int:
        return self.sync_every + self.delay  # a turn may have no fragment

    @override
    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        """At a turn, the transfers of one fragment."""
        del state
        turns, rest = divmod(step + 1, self._every)
        if rest:
            return []
        turn = (turns - 1) % self.fragments
        return [
            Transfer(part, step + self.delay, *self.merges)
            for part in parts
            if part.index % self.fragments == turn
        ]
