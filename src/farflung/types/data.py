"""Interfaces of data: samples, workloads, streams and sharing."""

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
    "Gate",
    "Partition",
    "SampleBatch",
    "Samples",
    "Sharing",
    "Stream",
    "StreamContext",
    "Workload",
]


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of samples; ``inputs`` and ``targets`` share their first dimension."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


class Samples(Protocol):
    """Samples by number, as stored and as prepared for a model."""

    def get_rows(self, ids: SampleIds) -> Batch:
        """Returns the samples ``ids`` as stored, which is also the form in which samples are sent."""
        ...

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        """Converts stored rows, of this or another replica, to the model's input.

        With ``train``, they are augmented by draws from torch's current random state.
        """
        ...


class Dataset(Samples, Protocol):
    """Fixed number of samples, addressed by index."""

    @property
    def labels(self) -> Tensor | None:
        """Class of each sample, shape ``(n,)``, int64, for partitioners; ``None`` if there are no classes."""
        ...

    def __len__(self) -> int: ...

    def take(self, ids: SampleIds, *, train: bool) -> Batch:
        """Returns ``prepare(get_rows(ids), train=train)``."""
        ...


class Partition(Protocol):
    """Rule that splits a data set among replicas."""

    def split(self, data: Dataset, num_parts: int, *, seed: int = 0) -> list[SampleIds]:
        """Returns the ids of each part; every sample is in exactly one part, and repeated calls give equal results.

        Raises:
          ConfigError: the numbers are impossible.
          DataError: the split needs classes and the data has none.
        """
        ...


class Workload(Protocol):
    """Training task: model, per-sample loss, metric and data.

    If model, loss and data draw from torch's random state only, set the attribute ``draws_from_torch_alone = True``.
    The simulation of many replicas then does not switch the random states of numpy and Python.
    """

    @property
    def name(self) -> str:
        """Name in the form ``family/model``."""
        ...

    @property
    def defaults(self) -> Mapping[str, Json]:
        """Default settings: ``batch_size``, ``learning_rate``, ``momentum``, ``weight_decay``, ``steps``."""
        ...

    def build_model(self, generator: torch.Generator) -> nn.Module:
        """Returns a new model whose initial weights depend on ``generator`` only."""
        ...

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns one loss per sample, shape ``(len(batch),)``; the replica takes the weighted mean."""
        ...

    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns one score per sample, shape ``(len(batch),)``; higher is better.

        A metric that is no mean over samples, such as average precision, returns a row of numbers per sample, shape
        ``(len(batch), n)``. A method ``metric_of`` then computes the metric from their sums over the test set, shape
        ``(n,)``.
        """
        ...

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        """Returns the training and the test set.

        Raises:
          DataError: files are missing, truncated or altered; the message has the command that fetches them.
        """
        ...


@dataclass(frozen=True, slots=True)
class StreamContext:
    """Training data and settings from which one replica's stream delivers.

    Args:
      data: Training samples that the replica draws from.
      rank: Rank of this replica.
      size: Number of replicas.
      is_shared: True if all replicas draw from ``data``; False if it is this replica's share.
      batch_size: Batch size of the run, per replica.
      seed: Seed of the run.
      decide: :meth:`farflung.types.Runtime.decide_locally`; every choice of a stream by time or arrival goes through
        it.
    """

    data: Dataset
    rank: int
    size: int
    is_shared: bool
    batch_size: int
    seed: int
    decide: Callable[[str, int, Callable[[], Json]], Decision]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Contents of a stream, and the samples that the next step trains on.

    Args:
      ids: All samples that have arrived and are not committed, oldest first.
      next_poll: Next time to poll in seconds on the runtime's clock, or a pending that another thread may complete.
        ``None`` if the step can be trained now. An error of the pending ends the run.
      count: Number of the oldest samples that make up the step; ``None`` for the run's batch size.
      weight: Weight of the step in the mean; ``None`` for its number of samples over the run's batch size.
      metrics: Telemetry of the stream at this step, for example ``held``, which defaults to the number of ``ids``.
    """

    ids: SampleIds
    next_poll: Pending[None] | float | None = None
    count: int | None = None
    weight: float | None = None
    metrics: Mapping[str, Json] = field(default_factory=dict)


class Stream(ABC):
    """Source of a replica's samples, with their rate and the policy for unused ones.

    A sample is held from its arrival until :meth:`commit` removes it, even if it has been polled several times. A
    replica commits a step's samples once it has contributed their gradient. An interrupted step or a resumed run thus
    loses none.

    Waiting for samples counts against no deadline of the run. A stream whose source may fall silent has a deadline of
    its own, and fails :attr:`Arrivals.next_poll` with an error that names the source.
    """

    has_random_access: bool = False
    """True if the whole data set is available at any time, so that a sampler may pick any sample."""
    is_live: bool = False
    """True if an external source sends samples in real time, so that virtual time cannot model the stream."""

    @abstractmethod
    def start(self, context: StreamContext) -> Samples:
        """Starts delivery and returns the samples that the ids of :meth:`poll` refer to.

        Raises:
          ConfigError: the settings do not fit the run.
        """

    @abstractmethod
    def poll(self, time_s: float, step: int) -> Arrivals:
        """Returns all held samples and tells if ``step`` can be trained; never blocks and removes nothing."""

    def commit(self, ids: SampleIds, *, step: int) -> None:  # noqa: B027
        """Removes the samples of a step whose gradient has been contributed."""

    def state_dict(self) -> State:
        """Returns the position to resume from, with all held samples."""
        return {}

    def load_state_dict(self, state: State) -> None:  # noqa: B027
        """Restores a position from :meth:`state_dict`; called after :meth:`start`."""

    def close(self) -> None:  # noqa: B027
        """Stops delivery, threads and connections; may be called without :meth:`start`, and twice."""

    def report_metadata(self) -> Mapping[str, float]:
        """Returns numbers of the step by constant names, to be summed in :attr:`SharedStats.sums`."""
        return {}


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Samples that move to another replica.

    Args:
      ids: Index of each sample in the whole training set.
      rows: Samples as stored.
      scores: Importance score of each by the previous owner's sampler, float32; ``None`` if it keeps no scores.
    """

    ids: SampleIds
    rows: Batch
    scores: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)


class Gate(Protocol):
    """Gate for samples that change owner: open while no step waits for this replica's exchanges."""

    def read_clock(self) -> float:
        """Returns the seconds on the run's clock."""
        ...

    async def wait_open(self, idle_s: float = 0.0) -> float:
        """Waits until the gate is open.

        Args:
          idle_s: Seconds to leave the link idle first, if exchanges are in flight that no step waits for yet.

        Returns:
          Time at which it is open.
        """
        ...


class Sharing:
    """Policy for sending samples to other replicas, for one step or permanently; this base class sends none.

    To lend samples, override :meth:`is_injection_due` and :meth:`inject_samples`. A sharing that moves samples
    permanently derives from
    :class:`farflung.data.PermanentSharing`.
    """

    has_data_transfers: bool = False
    """True if samples are sent to other replicas."""

    def is_injection_due(self, step: int) -> bool:
        """Returns True if samples are injected at ``step``; equal on all replicas."""
        del step
        return False

    def get_local_batch_size(self, batch_size: int, size: int) -> int:
        """Returns the number of samples that a replica draws itself, so that received samples fit in its batch."""
        del size
        return batch_size

    async def inject_samples(self, channel: Channel, samples: Samples, rows: Batch, *, step: int) -> Batch:
        """Sends samples to other replicas for ``step``; returns the rows to train on, local ones first.

        Args:
          channel: Channel of this round.
          samples: Samples of this replica.
          rows: Rows of the step.
          step: Number of the step.

        Returns:
          The rows that the step trains on: ``rows`` first, possibly followed by others.
        """
        del channel, samples, step
        return rows

    def report_metadata(self) -> Mapping[str, float]:
        """Returns numbers of the step by constant names, to be summed in :attr:`SharedStats.sums`."""
        return {}

    is_permanent: bool = False
    """True if samples change their owner permanently."""
    needs_scores: bool = False
    """True if the sampler chooses by importance scores; it then has to be one that can transfer scores."""

    def build_extensions(self, loop: Any) -> Sequence[Any]:
        """Returns the sharing's extensions; see :meth:`farflung.types.Sampler.build_extensions`.

        Raises:
          ConfigError: the run does not support the sharing.
        """
        del loop
        return ()
