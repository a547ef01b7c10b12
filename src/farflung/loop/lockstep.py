"""Parameters stored once for simulated replicas that never differ in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from farflung.data import InMemory, NoSharing
from farflung.sampling import UniformSampler
from farflung.schedules import Synchronous
from farflung.types import Sampler, Schedule, Sharing, Stream

__all__ = ["Lockstep", "share_parameters"]


class _Components(Protocol):
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
    def components(self) -> _Components: ...


def share_parameters(replicas: Sequence[_Replica]) -> bool:
    """Shares one copy of parameters and optimizer among the replicas of a virtual world, if that changes no bit.

    Under the synchronous schedule every replica applies the same mean to the same parameters. No replica steps before
    all have computed their gradients, so the old parameters are not needed again. One replica steps for all, and a
    thousand replicas take the memory of their gradients alone. Each replica keeps its buffers, such as the statistics
    of a batch norm. Not for worlds in which replicas are lost or join again.

    A sampler or sharing may use a model between its steps, when other replicas have stepped already. A stream may
    have replicas begin their steps at different times. Copies are shared only if neither can happen.

    Args:
      replicas: All replicas of the world, before the first step or after a resume.

    Returns:
      True if parameters are shared; False with other components or different parameters.
    """
    first = list(replicas[0].model.parameters())
    for replica in replicas:
        pairs = zip(first, replica.model.parameters(), strict=True)
        if not _can_share(replica.components) or not all(torch.equal(a, b) for a, b in pairs):
            return False
    lockstep = Lockstep(replicas[0].model)
    for replica in replicas:
        for parameter, shared_parameter in zip(replica.model.parameters(), first, strict=True):
            parameter.data = shared_parameter.data
        replica.optimizer, replica.lockstep = replicas[0].optimizer, lockstep
    return True


def _can_share(components: _Components) -> bool:
    """Returns True if only the step itself reads the parameters, and replicas wait for messages alone."""
    kinds = [
        type(part)
        for part in (components.schedule, components.sampler, components.stream, components.sharing)
    ]
    return kinds == [Synchronous, UniformSampler, InMemory, NoSharing]


class Lockstep:
    """State that lets the first replica at a step update the shared parameters.

    Args:
      model: Model whose parameters the optimizer updates.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._next_step = 0

    def take_gradients(self, parameters: Iterable[nn.Parameter], step: int) -> list[nn.Parameter]:
        """Returns the optimizer's parameters with this replica's gradients if it is first at a step, else [].

        The optimizer's own replica has already used its gradients, or has not merged them yet.
        """
        if step < self._next_step:
            return []
        self._next_step = step + 1
        shared_parameters = list(self._model.parameters())
        for target, source in zip(shared_parameters, parameters, strict=True):
            target.grad = source.grad
        return shared_parameters
