"""Data: samples, workloads, streams, sharing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from farflung.tasks import Pending
from farflung.types.tensors import Json, SampleIds, State
from farflung.types.world import Channel, Decision

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = [
    "Arrivals",
    "Batch",
    "Dataset",
    "Feed",
    "Gate",
    "Moved",
    "Partition",
    "Samples",
    "Sharing",
    "Stream",
    "Workload",
]


@dataclass(frozen=True, slots=True)
class Batch:
    """Some samples: ``inputs`` and ``targets`` share their first dimension."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


class Samples(Protocol):
    """Samples by number: as they are stored, and made ready for a model."""

    def rows(self, ids: SampleIds) -> Batch:
        """The samples ``ids`` as stored; what is sent where samples are sent."""
        ...

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        """Rows, also those of another replica, as the model takes them.

        With ``train``, augmented by what torch's current random state draws.
        """
        ...


class Dataset(Samples, Protocol):
    """A fixed number of samples, by index."""

    @property
    def labels(self) -> Tensor | None:
        """Class of each sample, shape ``(n,)``, int64, for partitioners; ``None`` where there are no classes."""
        ...

    def __len__(self) -> int: ...

    def take(self, ids: SampleIds, *, train: bool) -> Batch:
        """``prepare(rows(ids), train=train)``."""
        ...


class Partition(Protocol):
    """A way to split a data set among replicas."""

    def split(self, data: Dataset, parts: int, *, seed: int = 0) -> list[SampleIds]:
        """The ids of each part: every sample in exactly one of them, the same at each call.

        Raises:
          ConfigError: numbers that cannot work.
          DataError: a split by class of data without classes.
        """
        ...


class Workload(Protocol):
    """A task to train: model, per-sample loss, metric and data.

    Where model, loss and data draw from torch's random state alone, an attribute ``draws_from_torch_alone = True``
    saves the simulation of many replicas the switching of numpy's and Python's.
    """

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
        """One score per sample, higher is better, shape ``(len(batch),)``; accuracy is its mean.

        What is no mean of samples, such as average precision, comes as a row of numbers per sample, shape
        ``(len(batch), n)``; a method ``metric_of`` makes the metric of their sums over the test set, shape ``(n,)``.
        """
        ...

    def datasets(self) -> tuple[Dataset, Dataset]:
        """The training and the test set.

        Raises:
          DataError: absent, truncated or altered files, with the command that would fetch them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Feed:
    """What one replica gives its stream to deliver from.

    Args:
      data: the training samples that the replica draws from.
      rank: this replica.
      size: number of replicas.
      shared: whether all replicas draw from ``data``; otherwise it is this one's share.
      batch_size: of the run, per replica.
      seed: of the run.
      decide: :meth:`farflung.types.Runtime.decide_own`; whatever a stream chooses by time or arrival goes through it.
    """

    data: Dataset
    rank: int
    size: int
    shared: bool
    batch_size: int
    seed: int
    decide: Callable[[str, int, Callable[[], Json]], Decision]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What a stream holds, and what a step is to train on.

    Args:
      ids: all that has arrived and has not been taken out, oldest first.
      ready: ``None``: train now. Otherwise poll again at this time on the runtime's clock, in seconds, or when this is
        done, which another thread may see to; an error in it ends the run.
      count: how many of the oldest the step is made of; ``None``: as many as the run's batch.
      weight: of the step in the mean; ``None``: its samples by those of the run's batch.
      told: what telemetry says of the stream at this step, for example ``held``: the number of ``ids`` if not told.
    """

    ids: SampleIds
    ready: Pending[None] | float | None = None
    count: int | None = None
    weight: float | None = None
    told: Mapping[str, Json] = field(default_factory=dict)


class Stream(ABC):
    """Where a replica's samples come from, at what rate, and what becomes of those not yet used.

    A sample is held from its arrival until :meth:`commit` takes it out, however often it is shown meanwhile. A replica
    keeps a step's samples until their gradient is given and commits them then, so that neither a step that is broken
    off nor a resumed run loses any.

    Waiting for samples counts against no deadline of the run. A stream whose source may fall silent for good has a
    deadline of its own, and lets :attr:`Arrivals.ready` fail with an error that names the source.
    """

    everything: bool = False
    """Whether all of the data set is there at any time, so that a sampler may pick anything in it."""
    is_live: bool = False
    """Whether a source outside sends samples in real time, so that virtual time cannot model the stream."""

    @abstractmethod
    def open(self, feed: Feed) -> Samples:
        """Begins to deliver; what the ids of :meth:`poll` stand for.

        Raises:
          ConfigError: settings that do not go with the run.
        """

    @abstractmethod
    def poll(self, now: float, step: int) -> Arrivals:
        """All that is held, and whether ``step`` can be trained; never blocks, and takes nothing out."""

    def commit(self, ids: SampleIds, *, step: int) -> None:  # noqa: B027
        """Takes out what a step has used, whose gradient is given."""

    def state_dict(self) -> State:
        """The position to resume from, with all that is held."""
        return {}

    def seek(self, state: State) -> None:  # noqa: B027
        """Goes back to a position from :meth:`state_dict`; after :meth:`open`."""

    def close(self) -> None:  # noqa: B027
        """Delivers no more; ends threads and connections. Also without :meth:`open`, and more than once."""

    def report_metadata(self) -> Mapping[str, float]:
        """Returns numbers of the step under way, always by the same names; summed in :attr:`SharedStats.sums`."""
        return {}


@dataclass(frozen=True, slots=True)
class Moved:
    """Samples that change owner.

    Args:
      ids: of each in the whole training set.
      rows: as stored.
      scores: what the sampler that had them knows of each, float32; ``None`` where it knows nothing.
    """

    ids: SampleIds
    rows: Batch
    scores: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)


class Gate(Protocol):
    """When samples that change owner may set out: while a step waits for none of this replica's exchanges."""

    def now(self) -> float:
        """Seconds on the run's clock."""
        ...

    async def opened(self, rest_s: float = 0.0) -> float:
        """Waits until it is open.

        Args:
          rest_s: seconds to leave the link alone before, if exchanges are under way that no step waits for yet.

        Returns:
          When that is.
        """
        ...


class Sharing:
    """Samples that other replicas get: lent for one step, or moved for good. This one does neither.

    To lend, override :meth:`due` and :meth:`exchange`. A sharing that moves samples for good derives from
    :class:`farflung.data.MovingSharing`.
    """

    data_leaves_device: bool = False
    """Whether samples are sent to other replicas."""

    def due(self, step: int) -> bool:
        """Returns True if samples are lent at ``step``; equal on all replicas."""
        del step
        return False

    def own(self, wanted: int, size: int) -> int:
        """Returns how many a replica draws itself for a step of ``wanted`` samples, among ``size`` replicas."""
        del size
        return wanted

    async def exchange(self, channel: Channel, samples: Samples, rows: Batch, *, step: int) -> Batch:
        """Lends samples, before the gradient of ``step`` is computed.

        Args:
          channel: of this round.
          samples: of this replica.
          rows: those of the step.
          step: the step.

        Returns:
          The rows that the step trains on: the first are ``rows``, others may follow.
        """
        del channel, samples, step
        return rows

    def report_metadata(self) -> Mapping[str, float]:
        """Returns numbers of the step under way, always by the same names; summed in :attr:`SharedStats.sums`."""
        return {}

    moves_samples: bool = False
    """Whether samples change their owner for good."""
    by_importance: bool = False
    """Whether the sampler chooses, by what it knows of samples; then it has to be one that carries scores."""

    def extensions(self, loop: Any) -> Sequence[Any]:
        """Returns what the sharing adds to a run; see :meth:`farflung.types.Sampler.extensions`.

        Raises:
          ConfigError: the run cannot have that.
        """
        del loop
        return ()
