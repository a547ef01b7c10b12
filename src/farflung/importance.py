"""Importance sampling in a training loop of one's own, for any ``DataLoader`` of torch's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from typing_extensions import override

from farflung.errors import CheckpointError, ConfigError
from farflung.options import choice_option, whole_option
from farflung.sampling import Gain, Uniform
from farflung.sampling.rules import CANDIDATES, NEVER, TWO_STAGE, Rule
from farflung.sampling.scores import check_scores, scores_by
from farflung.seeding import derive, generator
from farflung.types import PoolView, SampleIds, ScoredBy, State
from farflung.wall import LaunchEnv

__all__ = ["Batches", "Drawn", "ImportanceSampler"]

_NAME = "ImportanceSampler"


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The samples that an :class:`ImportanceSampler` has drawn for one batch.

    Args:
      ids: of the samples in the data set; int64.
      weights: of each one's loss in the mean, float32.
    """

    ids: SampleIds
    weights: Tensor

    def weigh(self, losses: Tensor) -> Tensor:
        """The weighted mean of the batch's losses, to call ``backward()`` of.

        Args:
          losses: of each sample, in the batch's order.

        Raises:
          ConfigError: not one loss for each sample.
        """
        shape = getattr(losses, "shape", None)
        if shape != (len(self.ids),):
            found = type(losses).__name__ if shape is None else tuple(shape)
            raise ConfigError(
                f"{_NAME}: losses {found} for {len(self.ids)} samples: give one for each; torch's losses do with "
                "reduction='none'"
            )
        return (self.weights.to(losses) * losses).mean()


@dataclass(slots=True, eq=False)
class _Candidates:
    """The samples that a batch is drawn from: their places in the share, weights, and scores once they are made.

    Under rule ``uniform`` they are the batch itself.
    """

    places: Tensor
    weights: Tensor
    rule: str
    number: int
    scores: Tensor | None = None

    def to_state(self) -> State:
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in state.items() if value is not None}


class _Pass:
    """Chooses candidates as a loader asks for them, and keeps those whose batch has not come to the loop yet.

    Args:
      sampler: that chooses.
    """

    def __init__(self, sampler: ImportanceSampler) -> None:
        self._sampler, self._begun = sampler, False
        self.given = 0
        """Batches that have come to the loop."""
        self.asked: deque[_Candidates] = deque()
        """Those that the loader has asked for."""
        self.left: deque[_Candidates] = deque()
        """Those that a checkpoint holds and that this loader has not asked for."""

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if not self._begun:  # a loader may make two passes, to use the second alone
            self._begun = True
            if (resumed := self._sampler._resumed) is not None:
                self.given, self.left, self._sampler._resumed = resumed.given, resumed.left, None
        if self.left:
            candidates = self.left.popleft()
        elif self.given + len(self.asked) < len(self._sampler):
            candidates = self._sampler._choose()
        else:
            raise StopIteration
        self.asked.append(candidates)
        ids: list[int] = self._sampler.share[candidates.places].tolist()
        return ids


class Batches(Iterator[tuple[Drawn, Any]]):
    """One pass over a loader of candidates; see :meth:`ImportanceSampler.batches`."""

    def __init__(
        self,
        sampler: ImportanceSampler,
        loader: DataLoader[Any],
        model: nn.Module,
        losses: Callable[[nn.Module, Any], Tensor],
    ) -> None:
        self._sampler, self._model, self._losses = sampler, model, losses
        self._loaded = iter(loader)
        self._pass, self._next = sampler._made, list[Any]()

    def ahead(self) -> None:
        """Loads the next candidates and scores them by the model as it is; nothing where that is done or none come.

        Called between ``backward()`` and the optimizer's step, this fills the wait for gradients of
        :func:`farflung.attach`. Otherwise the next batch is scored when it is asked for.
        """
        if not self._next and (loaded := next(self._loaded, self)) is not self:
            self._next.append(loaded)
            candidates = self._pass.asked[0]
            if candidates.scores is None:
                self._sampler._score(candidates, self._model, lambda model: self._losses(model, loaded))

    @override
    def __next__(self) -> tuple[Drawn, Any]:
        self.ahead()
        if not self._next:
            raise StopIteration
        self._pass.given += 1
        return self._sampler._draw(self._pass.asked.popleft(), self._next.pop())


class ImportanceSampler(Sampler[list[int]]):
    r"""A batch sampler that loads candidates, scores them and draws each batch from them, with weights.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(200, 3), torch.randn(200, 1))
    >>> model = torch.nn.Linear(3, 1)
    >>> def losses(model, batch):  # one for each sample
    ...     inputs, targets = batch
    ...     return (model(inputs) - targets).square().squeeze(1)
    >>> sampler = ImportanceSampler(data, batch_size=10)
    >>> loader = DataLoader(data, batch_sampler=sampler)
    >>> for drawn, batch in sampler.batches(loader, model, losses):
    ...     drawn.weigh(losses(model, batch)).backward()

    The rules are those of ``grouped_importance``, see :class:`farflung.sampling.Rule`: the loader's batches are
    the candidates, and a batch is drawn from their rows without replacement. Rule ``auto`` is ``pool`` or ``two``.
    Where :func:`farflung.attach` has been given this sampler, it is uniform besides while no more is worth it, see
    :class:`farflung.sampling.Gain`, and the loader loads no more than batches. The mean over the batches of R ranks,
    whose shares of n samples make N, expects to be the mean over all samples: weights are multiplied by :math:`n R /
    N`, which is 1 but for shares of unlike sizes. Under rule ``pool`` that holds over a pass, whose candidates take
    turns, and under ``two`` for each batch.

    Scores are made in evaluation mode, without a trace in the model. Each module is in its mode again afterwards.

    Under torch.distributed the ranks hold disjoint shares, as :class:`torch.utils.data.DistributedSampler` does: every
    R-th sample of a shuffled order. So they do where torchrun has started them. Elsewhere ``rank`` and ``size`` say
    which share is this one.

    A loader with workers asks for candidates before the loop has come to them, so under ``two`` they are drawn by older
    scores. A pass has as many batches as one without importance that leaves out the last if it is not full; it is no
    pass over all samples.

    Args:
      dataset: what the loader takes samples of, by index.
      batch_size: samples of each rank and step.
      rule: ``"auto"``, ``"pool"`` or ``"two"``.
      candidates: samples that are loaded and scored for each one of a batch.
      scored_by: see :data:`farflung.types.ScoredBy`.
      smoothing: c, above 0; the larger, the closer to uniform.
      seed: of shares and draws; equal on all ranks.
      rank: this rank; that of torch.distributed or of what started the process when not given, or 0.
      size: how many ranks there are, R.

    Raises:
      ConfigError: an option out of its range, fewer samples than a batch on some rank, or a data set without length.

    References: Katharopoulos & Fleuret 2018, arXiv:1803.00942, for candidates and their scores; Zeng et al. 2021
      (Mercury), doi 10.1145/3485730.3485930.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        rule: Literal["auto", "pool", "two"] = "auto",
        candidates: int = CANDIDATES,
        scored_by: ScoredBy = "gradient_bound",
        smoothing: float = 0.02,
        seed: int = 0,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        if (rank is None) != (size is None):
            raise ConfigError(f"{_NAME}: rank {rank} of size {size}: give both or none")
        if rank is None or size is None:
            if dist.is_available() and dist.is_initialized():
                rank, size = dist.get_rank(), dist.get_world_size()
            else:
                env = LaunchEnv.read() or LaunchEnv(0, 1, 0, 1)
                rank, size = env.rank, env.size
        whole_option(_NAME, "size", size, 1)
        whole_option(_NAME, "rank", rank, 0, size - 1)
        whole_option(_NAME, "batch_size", batch_size, 1)
        whole_option(_NAME, "seed", seed, 0)
        whole_option(_NAME, "candidates", candidates, 1)
        choice_option(_NAME, "scored_by", scored_by, get_args(ScoredBy))
        choice_option(_NAME, "rule", rule, TWO_STAGE)
        self._rule = Rule(_NAME, smoothing, derive(seed, "rule", rank))
        self.gain = Gain(rule)
        """What drawing by scores is worth; of a run, where :func:`farflung.attach` has this sampler."""
        self._uniform = Uniform(derive(seed, "uniform", rank))
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
        self.rank, self.size = rank, size
        """Which share this is, of how many."""
        self.batch_size = batch_size
        """Samples in a batch."""
        self.share: SampleIds = torch.randperm(samples, generator=generator(seed, "share"))[
            rank::size
        ].sort()[0]
        """The samples that are this rank's, ascending."""
        self._made_for = {
            "samples": samples,
            "batch_size": batch_size,
            "seed": seed,
            "rank": rank,
            "size": size,
            "candidates": candidates,
        }
        self._scored_by = scored_by
        self._factor = len(self.share) * size / samples
        self._count = samples // (size * batch_size)
        self._size = min(candidates * batch_size, len(self.share))
        self._chosen = self._drawn = 0
        self._scores = torch.full((len(self.share),), NEVER)
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

    def batches(
        self,
        loader: DataLoader[Any],
        model: nn.Module,
        losses: Callable[[nn.Module, Any], Tensor],
    ) -> Batches:
        """One pass over ``loader``: each batch, cut from its candidates, beside what was drawn for it.

        Args:
          loader: made with this sampler as its ``batch_sampler``. What it gives is a tensor with a row for each sample,
            or tuples, lists and dicts of such tensors.
          model: scores candidates; that which is trained, without a wrapper that exchanges gradients.
          losses: one for each sample, of a model and a batch as the loader gives it.

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
        return Batches(self, loader, model, losses)

    def state_dict(self) -> State:
        """Of this rank: scores, the rule's state, and the candidates of batches that have not come to the loop.

        Taken between two batches of a pass, it is continued with the next one, to the bit if the loader has as many
        workers.
        """
        now = self._resumed or self._made
        return {
            **self._made_for,
            "scores": self._scores.clone(),
            "rule": self._rule.state_dict(),
            "gain": self.gain.state_dict(),
            "uniform": self._uniform.state_dict(),
            "chosen": self._chosen,
            "drawn": self._drawn,
            "given": now.given % len(self),
            "ahead": {f"{place:06}": one.to_state() for place, one in enumerate([*now.asked, *now.left])},
        }

    def load_state_dict(self, state: State) -> None:
        """Continues from a state in the next pass, which is what is left of the one that it was taken in.

        Raises:
          CheckpointError: of another rank or number of them, data set, batch size, candidates or seed.
        """
        for name, value in self._made_for.items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"{_NAME}: the state is of {name} {state.get(name)}, and this is {value}"
                )
        self._scores = state["scores"].clone()
        self._rule.load_state_dict(state["rule"])
        self.gain.load_state_dict(state["gain"])
        self._uniform.load_state_dict(state["uniform"])
        self._chosen, self._drawn = state["chosen"], state["drawn"]
        self._resumed = _Pass(self)
        self._resumed.given = int(state["given"])
        self._resumed.left.extend(_Candidates(**one) for _, one in sorted(state["ahead"].items()))

    def _choose(self) -> _Candidates:
        number, rule = self._chosen, self.gain.rule
        self._chosen += 1
        if rule == "uniform":
            places = self._uniform.next(PoolView(number, 0, 1, self.batch_size, len(self.share))).ids
            return _Candidates(places, torch.ones(self.batch_size, dtype=torch.float64), rule, number)
        places, weights = self._rule.candidates(self._scores, self._size, number, two=rule == "two")
        return _Candidates(places, weights, rule, number)

    def _score(
        self, candidates: _Candidates, model: nn.Module, losses: Callable[[nn.Module], Tensor]
    ) -> None:
        if candidates.rule == "uniform" and not self.gain.scores_at(candidates.number):
            return
        modes = [(module, module.training) for module in model.modules()]
        try:
            scores = scores_by(_NAME, losses, model, len(candidates.places), self._scored_by)
        finally:
            for module, mode in modes:
                module.training = mode
        check_scores(_NAME, scores, self._drawn)
        self._scores[candidates.places] = candidates.scores = scores
        self.gain.judge(self._rule.moments(scores, candidates.weights), self.batch_size / self._size)

    def _draw(self, candidates: _Candidates, batch: Any) -> tuple[Drawn, Any]:
        """Draws a batch from candidates."""
        self._drawn += 1
        self.gain.steps[candidates.rule] += 1
        if candidates.rule == "uniform":
            return Drawn(self.share[candidates.places], self._factor * candidates.weights.float()), batch
        assert candidates.scores is not None
        rows, weights = self._rule.batch(
            candidates.scores, candidates.weights, self.batch_size, self._drawn - 1
        )
        drawn = Drawn(self.share[candidates.places[rows]], self._factor * weights)
        return drawn, _cut(batch, rows, self._size)


def _cut(batch: Any, rows: Tensor, count: int) -> Any:
    """Some rows of a batch of ``count`` samples.

    Raises:
      ConfigError: something in the batch is no tensor with a row for each sample.
    """
    if isinstance(batch, Tensor) and batch.shape[:1] == (count,):
        return batch[rows.to(batch.device)]
    if isinstance(batch, Mapping):
        return {key: _cut(value, rows, count) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [_cut(part, rows, count) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    found = f"a tensor of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
    raise ConfigError(
        f"{_NAME}: the loader gives {found} for {count} samples: give tensors with a row for each, in tuples, lists or "
        "dicts"
    )
