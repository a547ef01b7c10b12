"""Data: samples, workloads, streams, samplers, sharing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from farflung.types.tensors import Json, SampleIds, State
from farflung.types.world import Channel, Cost

__all__ = [
    "Arrivals",
    "Batch",
    "Dataset",
    "Draw",
    "PoolView",
    "Sampler",
    "Sharing",
    "Stream",
    "Work",
    "Workload",
]


@dataclass(frozen=True, slots=True)
class Batch:
    """Some samples: ``inputs`` and ``targets`` share their first dimension."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


class Dataset(Protocol):
    """Samples by index."""

    @property
    def labels(self) -> Tensor | None:
        """Class of each sample, shape ``(n,)``, int64, for partitioners; ``None`` where there are no classes."""
        ...

    def __len__(self) -> int: ...

    def take(self, ids: SampleIds, *, train: bool) -> Batch:
        """The samples ``ids``; with ``train``, random augmentation drawn from torch's current random state."""
        ...


class Workload(Protocol):
    """A task to train: model, per-sample loss, metric and data."""

    @property
    def name(self) -> str:
        """``family/model``."""
        ...

    @property
    def defaults(self) -> Mapping[str, Json]:
        """Settings that train it well when none are given: ``batch_size``, ``learning_rate``, ``momentum``,
        ``weight_decay``, ``steps``.
        """
        ...

    def model(self, generator: torch.Generator) -> nn.Module:
        """A fresh model whose initial weights depend on ``generator`` alone."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """One loss per sample, shape ``(len(batch),)``; the replica takes the weighted mean."""
        ...

    def metric(self, model: nn.Module, batch: Batch) -> Tensor:
        """One score per sample, higher is better, shape ``(len(batch),)``; accuracy is its mean."""
        ...

    def datasets(self) -> tuple[Dataset, Dataset]:
        """The training and the test set.

        Raises:
          DataError: absent, truncated or altered files, with the command that would fetch them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What a stream has let go: ids not handed out before, and when the wanted number will be there."""

    ids: SampleIds
    ready_at: float | None
    """Seconds on the runtime's clock; ``None``: the wanted number is there now."""


class Stream(Protocol):
    """Where a replica's samples come from, at what rate, and what becomes of those not yet used."""

    @property
    def everything(self) -> bool:
        """Whether all of the data set is there at any time, so that a sampler may pick anything in it."""
        ...

    def poll(self, now: float, wanted: int) -> Arrivals:
        """What has arrived since the last poll; never blocks."""
        ...

    def commit(self, ids: SampleIds, *, step: int) -> None:
        """These were used by a step that stands."""
        ...

    def state_dict(self) -> State:
        """The position to resume from."""
        ...

    def seek(self, state: State) -> None:
        """Goes back to a position from :meth:`state_dict`."""
        ...


@dataclass(frozen=True, slots=True)
class PoolView:
    """What a sampler may pick from at one step."""

    step: int
    rank: int
    size: int
    batch_size: int
    pool: int | SampleIds
    """The number of samples when all of them are at hand, else the ids that are."""


class Draw(NamedTuple):
    """A batch: which samples, and each one's importance weight; ``None`` where all weigh 1."""

    ids: SampleIds
    weights: Tensor | None


@dataclass(frozen=True, slots=True)
class Work:
    """Work that may fill a wait: ``run`` it, charge its ``cost``."""

    cost: Cost
    run: Callable[[], None]


class Sampler(Protocol):
    """Picks a batch and its importance weights; deterministic given state and seed."""

    def next(self, view: PoolView) -> Draw:
        """The batch of this replica for one step."""
        ...

    def meanwhile(self, model: nn.Module, budget_s: float) -> Work | None:
        """Work for a wait of about ``budget_s`` seconds, if there is any."""
        ...

    def state_dict(self) -> State:
        """Cursor, caches and scores, as of the last :meth:`next`."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Continues from a state; the number of replicas may differ from when it was saved."""
        ...


class Sharing(Protocol):
    """Moves samples between replicas."""

    @property
    def data_leaves_device(self) -> bool:
        """Whether samples are sent to other replicas."""
        ...

    async def exchange(self, channel: Channel, samples: Dataset) -> None:
        """One round; pausable at message boundaries."""
        ...
