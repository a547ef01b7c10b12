"""Parameters kept once for simulated replicas that never differ in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from farflung.data import InMemory, NoSharing
from farflung.sampling import Uniform
from farflung.schedules import Synchronous
from farflung.types import Sampler, Schedule, Sharing, Stream

__all__ = ["Lockstep", "keep_once"]


class _Parts(Protocol):
    @property
    def schedule(self) -> Schedule: ...
    @property
    def sampler(self) -> Sampler: ...
    @property
    def stream(self) -> Stream: ...
    @property
    def sharing(self) -> Sharing: ...


class _Replica(Protocol):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    lockstep: Lockstep | None

    @property
    def parts(self) -> _Parts: ...


def keep_once(replicas: Sequence[_Replica]) -> bool:
    """Shares one copy of parameters and optimizer among the replicas of a virtual world, where that changes no bit.

    Under the synchronous schedule every replica applies the same mean to the same parameters, and no replica steps
    before all have computed their gradients, so the old parameters are not needed again. One replica steps for all; a
    thousand replicas then take the memory of their gradients alone. Buffers, such as the statistics of a batch norm,
    are kept by each replica. Not for worlds in which replicas are lost or come back.

    A sampler or sharing may use a model between its steps, when other replicas have stepped already, and a stream may
    have replicas begin their steps at different times. Copies are shared only where neither can happen.

    Args:
      replicas: all of the world, before the first step or after a resume.

    Returns:
      Whether it was done; not with other parts, or where parameters differ.
    """
    first = list(replicas[0].model.parameters())
    for other in replicas:
        pairs = zip(first, other.model.parameters(), strict=True)
        if not _in_step(other.parts) or not all(torch.equal(a, b) for a, b in pairs):
            return False
    together = Lockstep(replicas[0].model)
    for other in replicas:
        for own, kept in zip(other.model.parameters(), first, strict=True):
            own.data = kept.data
        other.optimizer, other.lockstep = replicas[0].optimizer, together
    return True


def _in_step(parts: _Parts) -> bool:
    """Whether nothing but the step itself reads the parameters, and no replica waits for anything but messages."""
    kinds = [type(part) for part in (parts.schedule, parts.sampler, parts.stream, parts.sharing)]
    return kinds == [Synchronous, Uniform, InMemory, NoSharing]


class Lockstep:
    """Whose turn it is to step.

    Args:
      model: the one whose parameters the optimizer has.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._next = 0

    def take(self, parameters: Iterable[nn.Parameter], step: int) -> list[nn.Parameter]:
        """For the first to come at a step: the optimizer's parameters, with its gradients; for others nothing.

        The optimizer's own replica needs its gradients no more or has not merged them yet.
        """
        if step < self._next:
            return []
        self._next = step + 1
        kept = list(self._model.parameters())
        for one, own in zip(kept, parameters, strict=True):
            one.grad = own.grad
        return kept
