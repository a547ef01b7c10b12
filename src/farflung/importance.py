"""Importance sampling in somebody's own training loop, for any ``DataLoader`` of torch's."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from typing_extensions import override

from farflung.errors import CheckpointError, ConfigError
from farflung.options import number_option, whole_option
from farflung.sampling.importance import importance_weights, smoothed, with_replacement
from farflung.seeding import generator
from farflung.types import SampleIds, State

__all__ = ["Drawn", "ImportanceSampler"]

_NAME = "ImportanceSampler"


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """What an :class:`ImportanceSampler` has drawn for one batch.

    Args:
      ids: which samples of the data set, each as often as it was drawn; int64.
      weights: of each one's loss in the mean, float32.
      sampler: the one that has drawn them.
    """

    ids: SampleIds
    weights: Tensor
    sampler: ImportanceSampler = field(repr=False)

    def weigh(self, losses: Tensor, scores: Tensor | None = None) -> Tensor:
        """The weighted mean of the batch's losses, to call ``backward()`` of; the samples are scored by the way.

        That takes the scores to the host, which waits for the device.

        Args:
          losses: of each sample, in the batch's order.
          scores: of each sample; its loss when not given.

        Raises:
          ConfigError: not one loss or score for each sample, or one that is not finite, or a score below 0.
        """
        _check("losses", losses, len(self.ids))
        self.sampler.update(self.ids, losses if scores is None else scores)
        return (self.weights.to(losses) * losses).mean()


class _Pass:
    """Draws batches as a loader asks for them, and keeps those that have not come to the loop yet.

    Args:
      sampler: that draws.
    """

    def __init__(self, sampler: ImportanceSampler) -> None:
        self._sampler, self._begun = sampler, False
        self.given = 0
        """Batches that have come to the loop."""
        self.asked: deque[Drawn] = deque()
        """Those that the loader has asked for."""
        self.left: deque[Drawn] = deque()
        """Those that a checkpoint holds and that this loader has not asked for."""

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if not self._begun:  # a loader may make two passes, to use the second alone
            self._begun = True
            self._sampler._begin(self)
        if self.left:
            drawn = self.left.popleft()
        elif self.given + len(self.asked) < len(self._sampler):
            drawn = self._sampler._draw()
        else:
            raise StopIteration
        self.asked.append(drawn)
        ids: list[int] = drawn.ids.tolist()
        return ids

    def give(self) -> Drawn:
        """What was drawn for the batch that comes to the loop now."""
        self.given += 1
        return self.asked.popleft()


class ImportanceSampler(Sampler[list[int]]):
    r"""A batch sampler that draws samples by what they have been scored, and says how much each weighs.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(100, 3), torch.randn(100, 1))
    >>> model = torch.nn.Linear(3, 1)
    >>> sampler = ImportanceSampler(data, batch_size=10)
    >>> loader = DataLoader(data, batch_sampler=sampler)
    >>> for drawn, (inputs, targets) in sampler.batches(loader):
    ...     losses = (model(inputs) - targets).square().squeeze(1)  # one for each sample
    ...     drawn.weigh(losses).backward()

    Of the n samples of a rank's share, each of a batch is drawn independently, sample j with probability

    .. math:: q_j = I_j / \textstyle\sum_m I_m, \qquad I_j = s_j + c\, \bar{s}

    where :math:`s_j` is its last score, or the mean :math:`\bar{s}` of those there are if it has none. Its loss weighs

    .. math:: w_j = \frac{n R}{N} \cdot \frac{1}{n q_j} = \frac{n R}{N} \cdot \frac{\bar{I}}{I_j},

    so the mean over the batches of R ranks, whose shares make N samples, expects to be the mean over all samples,
    however old the scores. The first factor is 1 but for shares of unlike sizes; the second is at most
    :math:`(1 + c)/c`, and c keeps every sample within reach.

    Scores are what :meth:`Drawn.weigh` is told, so those of a sample are as old as its last batch and cost nothing.
    Whoever would rather have fresh ones tells them to :meth:`update`. What serves best is the norm of a sample's
    gradient; losses stand for it, and better the norm of the loss's gradient with respect to the model's output.

    Under torch.distributed the ranks hold disjoint shares, as :class:`torch.utils.data.DistributedSampler` does: every
    R-th sample of a shuffled order. Elsewhere ``rank`` and ``size`` say which share is this one.

    A loader with workers asks for batches before the loop has come to them, so scores come into effect some batches
    late. :meth:`batches` puts each batch together with what was drawn for it, whatever was left out or broken off
    before. A pass has as many batches as one without importance that leaves out the last if it is not full; it is no
    pass over all samples.

    Args:
      dataset: what the loader takes samples of, by index.
      batch_size: samples of each rank and step.
      smoothing: c, above 0. With 0.5 no weight exceeds 3; the larger, the closer to uniform.
      seed: of shares and draws; equal on all ranks.
      rank: this rank; that of torch.distributed when not given, or 0.
      size: how many ranks there are, R.

    Raises:
      ConfigError: an option out of its range, fewer samples than a batch on some rank, or a data set without length.

    References: Katharopoulos & Fleuret 2018, arXiv:1803.00942, for weights and the gradient with respect to the output;
      Zeng et al. 2021 (Mercury), doi 10.1145/3485730.3485930, whose released code scores by losses and smooths with
      c = 0.5. Unlike theirs, nothing is scored but what is trained on.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        smoothing: float = 0.5,
        seed: int = 0,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        if (rank is None) != (size is None):
            raise ConfigError(f"{_NAME}: rank {rank} of size {size}: give both or none")
        if rank is None or size is None:
            together = dist.is_available() and dist.is_initialized()
            rank, size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        whole_option(_NAME, "size", size, 1)
        whole_option(_NAME, "rank", rank, 0, size - 1)
        whole_option(_NAME, "batch_size", batch_size, 1)
        whole_option(_NAME, "seed", seed, 0)
        number_option(_NAME, "smoothing", smoothing, 0)
        if smoothing == 0:
            raise ConfigError(
                f"{_NAME}: smoothing 0: must be above 0, or samples scored 0 would never come again"
            )
        try:
            samples = len(dataset)
        except TypeError:
            raise ConfigError(
                f"{_NAME}: {type(dataset).__name__} has no length: it must be map-style"
            ) from None
        if samples // size < batch_size:
            raise ConfigError(
                f"{_NAME}: batch_size {batch_size} is more than the {samples // size} samples that each of {size} "
                f"ranks has of {samples}"
            )
        self.batch_size = batch_size
        """Samples in a batch."""
        self.share: SampleIds = torch.randperm(samples, generator=generator(seed, "share"))[
            rank::size
        ].sort()[0]
        """The samples that are this rank's, ascending."""
        self._smoothing = smoothing
        self._made_for = {
            "samples": samples,
            "batch_size": batch_size,
            "seed": seed,
            "rank": rank,
            "size": size,
        }
        self._factor = len(self.share) * size / samples
        self._count = samples // (size * batch_size)
        self._random = generator(seed, "draws", rank)
        self._scores = torch.full((len(self.share),), math.nan, dtype=torch.float64)
        self._made = _Pass(self)
        self._resumed: _Pass | None = None

    def __len__(self) -> int:
        """Batches in a pass, as many on every rank."""
        return self._count

    @override
    def __iter__(self) -> Iterator[list[int]]:
        """For a loader: the ids of each batch."""
        self._made = _Pass(self)
        return self._made

    def batches(self, loader: DataLoader[Any]) -> Iterator[tuple[Drawn, Any]]:
        """One pass over ``loader``: each batch beside what was drawn for it.

        Args:
          loader: made with this sampler as its ``batch_sampler``.

        Raises:
          ConfigError: a loader that takes its batches from elsewhere, or gives them in another order.
        """
        drawn_by: object = getattr(loader, "batch_sampler", None)
        if drawn_by is not self:
            raise ConfigError(
                f"{_NAME}: this loader's batches are not drawn here: make it with batch_sampler="
            )
        if not getattr(loader, "in_order", True):
            raise ConfigError(
                f"{_NAME}: a loader with in_order=False gives its batches in an order of its own"
            )
        return self._paired(loader)

    def update(self, ids: SampleIds | Sequence[int], scores: Tensor) -> None:
        """Scores samples; the last counts where one is named twice.

        Args:
          ids: samples of :attr:`share`.
          scores: of each, at least 0.

        Raises:
          ConfigError: not one score for each, or one that is not finite or below 0, or samples of another rank.
        """
        ids = torch.as_tensor(ids).cpu()
        if ids.dim() != 1 or (len(ids) and ids.is_floating_point()):
            raise ConfigError(
                f"{_NAME}: ids of shape {tuple(ids.shape)} and {ids.dtype} are no list of samples"
            )
        _check("scores", scores, len(ids))
        told = scores.detach().to("cpu", torch.float64)
        if bool((told < 0).any()):
            raise ConfigError(
                f"{_NAME}: score {told.min():g} is below 0: give scores= beside losses that may be"
            )
        places = torch.searchsorted(self.share, ids.long()).clamp(max=len(self.share) - 1)
        foreign = ids[self.share[places] != ids]
        if len(foreign):
            raise ConfigError(
                f"{_NAME}: sample {foreign[0]} is not among the {len(self.share)} of rank {self._made_for['rank']}"
            )
        self._scores.numpy()[places.numpy()] = (
            told.numpy()
        )  # of numpy's the last counts, of torch's it may be any

    def state_dict(self) -> State:
        """Of this rank: scores, random state, and what was drawn for batches that have not come to the loop.

        Taken between two batches of a pass, it is continued with the next one, to the bit if the loader has as many
        workers.
        """
        now = self._resumed or self._made
        drawn = [*now.asked, *now.left]
        shape = (len(drawn), self.batch_size)
        return {
            **self._made_for,
            "scores": self._scores.clone(),
            "random": self._random.get_state(),
            "given": now.given % len(self),
            "ids": torch.cat([self.share[:0], *(one.ids for one in drawn)]).view(shape),
            "weights": torch.cat([torch.empty(0), *(one.weights for one in drawn)]).view(shape),
        }

    def load_state_dict(self, state: State) -> None:
        """Continues from a state in the next pass, which is what is left of the one that it was taken in.

        Raises:
          CheckpointError: of another rank or number of them, data set, batch size or seed.
        """
        for name, value in self._made_for.items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"{_NAME}: the state is of {name} {state.get(name)}, and this is {value}"
                )
        self._scores = state["scores"].clone()
        self._random.set_state(state["random"])
        self._resumed = _Pass(self)
        self._resumed.given = int(state["given"])
        self._resumed.left.extend(
            Drawn(ids, weights, self) for ids, weights in zip(state["ids"], state["weights"], strict=True)
        )

    def _paired(self, loader: DataLoader[Any]) -> Iterator[tuple[Drawn, Any]]:
        batches = iter(loader)
        made = self._made
        for batch in batches:
            yield made.give(), batch

    def _begin(self, begun: _Pass) -> None:
        if self._resumed is not None:
            begun.given, begun.left = self._resumed.given, self._resumed.left
            self._resumed = None

    def _draw(self) -> Drawn:
        known = self._scores.nanmean().nan_to_num(1.0)
        importances = smoothed(self._scores.where(~self._scores.isnan(), known), self._smoothing)
        places = with_replacement(importances, self.batch_size, self._random)
        weights = self._factor * importance_weights(importances)[places]
        return Drawn(self.share[places], weights.float(), self)


def _check(what: str, values: object, count: int) -> None:
    """One finite number for each of ``count`` samples.

    Raises:
      ConfigError: anything else.
    """
    if not isinstance(values, Tensor) or values.shape != (count,):
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ConfigError(
            f"{_NAME}: {what} {found} for {count} samples: give one for each; torch's losses do with reduction='none'"
        )
    if not bool(values.isfinite().all()):
        raise ConfigError(
            f"{_NAME}: {what} that are not finite: {int((~values.isfinite()).sum())} of {count}"
        )
