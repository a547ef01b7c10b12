"""Importance sampling in any training loop with a torch ``DataLoader``."""

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
from farflung.options import check_choice, check_integer
from farflung.sampling import Gain, UniformSampler
from farflung.sampling.rules import CANDIDATES_PER_SAMPLE, SCORE_RULES, UNSCORED, DrawRule
from farflung.sampling.scores import check_scores, compute_scores
from farflung.seeding import create_generator, derive_seed
from farflung.types import DrawContext, SampleIds, ScoreKind, State
from farflung.wall import LaunchEnv

__all__ = ["BatchIterator", "DrawnBatch", "ImportanceSampler"]

_NAME = "ImportanceSampler"


@dataclass(frozen=True, slots=True, eq=False)
class DrawnBatch:
    """Samples that an :class:`ImportanceSampler` drew for one batch.

    Args:
      ids: Indices of the samples in the data set; int64.
      weights: Weights of the samples' losses in the mean; float32.
    """

    ids: SampleIds
    weights: Tensor

    def reduce_losses(self, losses: Tensor) -> Tensor:
        """Returns the weighted mean of the batch's losses, on which to call ``backward()``.

        Args:
          losses: Loss of each sample, in the order of the batch.

        Raises:
          ConfigError: The tensor does not have one loss for each sample.
        """
        shape = getattr(losses, "shape", None)
        if shape != (len(self.ids),):
            actual = type(losses).__name__ if shape is None else tuple(shape)
            raise ConfigError(
                f"{_NAME}: losses {actual} for {len(self.ids)} samples: give one for each; torch's losses do with "
                "reduction='none'"
            )
        return (self.weights.to(losses) * losses).mean()


@dataclass(slots=True, eq=False)
class _Candidates:
    """Candidates of a batch: indices in the rank's share, weights, and scores once computed.

    Under rule ``uniform`` they are the batch itself.
    """

    places: Tensor
    weights: Tensor
    rule: str
    number: int
    scores: Tensor | None = None

    def to_state(self) -> State:
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in state.items() if value is not None}


class _Pass:
    """Pass over the candidates of a sampler, which the loader iterates ahead of the training loop.

    Args:
      sampler: Sampler that chooses candidates.
    """

    def __init__(self, sampler: ImportanceSampler) -> None:
        self._sampler, self._has_started = sampler, False
        self.num_delivered = 0
        """Number of batches delivered to the loop."""
        self.requested_candidates: deque[_Candidates] = deque()
        """Candidates that the loader has requested and the loop has not received."""
        self.saved_candidates: deque[_Candidates] = deque()
        """Candidates from a checkpoint that this loader has not requested yet."""

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if not self._has_started:  # a loader may create two passes and use only the second
            self._has_started = True
            if (resumed_pass := self._sampler._resumed_pass) is not None:
                self.num_delivered = resumed_pass.num_delivered
                self.saved_candidates = resumed_pass.saved_candidates
                self._sampler._resumed_pass = None
        if self.saved_candidates:
            candidates = self.saved_candidates.popleft()
        elif self.num_delivered + len(self.requested_candidates) < len(self._sampler):
            candidates = self._sampler._choose_candidates()
        else:
            raise StopIteration
        self.requested_candidates.append(candidates)
        ids: list[int] = self._sampler.share[candidates.places].tolist()
        return ids


class BatchIterator(Iterator[tuple[DrawnBatch, Any]]):
    """Iterator over the batches of one pass; see :meth:`ImportanceSampler.iter_batches`."""

    def __init__(
        self,
        sampler: ImportanceSampler,
        loader: DataLoader[Any],
        model: nn.Module,
        losses: Callable[[nn.Module, Any], Tensor],
    ) -> None:
        self._sampler, self._model, self._losses = sampler, model, losses
        self._loader_iterator = iter(loader)
        self._pass, self._next_batch = sampler._current_pass, list[Any]()

    def prefetch(self) -> None:
        """Loads and scores the next candidates unless that is done or the pass ends.

        Call this between ``backward()`` and the optimizer's step to overlap scoring with the exchange of gradients
        under :func:`farflung.attach`. Otherwise candidates are scored when the next batch is requested.
        """
        if not self._next_batch and (batch := next(self._loader_iterator, self)) is not self:
            self._next_batch.append(batch)
            candidates = self._pass.requested_candidates[0]
            if candidates.scores is None:
                self._sampler._score_candidates(
                    candidates, self._model, lambda model: self._losses(model, batch)
                )

    @override
    def __next__(self) -> tuple[DrawnBatch, Any]:
        self.prefetch()
        if not self._next_batch:
            raise StopIteration
        self._pass.num_delivered += 1
        return self._sampler._draw_batch(self._pass.requested_candidates.popleft(), self._next_batch.pop())


class ImportanceSampler(Sampler[list[int]]):
    """Batch sampler that scores candidates and draws each weighted batch from them.

    The loader's batches are the candidates; :meth:`iter_batches` draws from their rows without replacement, by the
    rules of :class:`farflung.sampling.DrawRule`. The mean over the batches of R ranks, whose shares of n samples make
    N, is an unbiased estimate of the mean over all samples. Weights are multiplied by :math:`n R / N`. Ranks have
    disjoint shares: every R-th sample of a shuffled order.

    Args:
      dataset: Map-style data set of the loader.
      batch_size: Number of samples of each rank and step.
      rule: ``"auto"``, ``"pool"`` or ``"two"``.
      candidates: Number of samples that are loaded and scored for each sample of a batch.
      scored_by: Score of a sample, see :data:`farflung.types.ScoreKind`.
      smoothing: Constant c above 0; the larger, the closer to uniform.
      seed: Seed of shares and draws, equal on all ranks.
      rank: Rank of this process; by default that of torch.distributed or of the launcher, or 0.
      size: Number of ranks, R.

    Raises:
      ConfigError: An option is out of range, a rank has fewer samples than a batch, or the data set has no length.

    References: Katharopoulos & Fleuret 2018, arXiv:1803.00942, for candidates and their scores; Zeng et al. 2021
      (Mercury), doi 10.1145/3485730.3485930.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        rule: Literal["auto", "pool", "two"] = "auto",
        candidates: int = CANDIDATES_PER_SAMPLE,
        scored_by: ScoreKind = "gradient_bound",
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
        check_integer(_NAME, "size", size, 1)
        check_integer(_NAME, "rank", rank, 0, size - 1)
        check_integer(_NAME, "batch_size", batch_size, 1)
        check_integer(_NAME, "seed", seed, 0)
        check_integer(_NAME, "candidates", candidates, 1)
        check_choice(_NAME, "scored_by", scored_by, get_args(ScoreKind))
        check_choice(_NAME, "rule", rule, SCORE_RULES)
        self._rule = DrawRule(_NAME, smoothing, derive_seed(seed, "rule", rank))
        self.gain = Gain(rule)
        """Predicted gain of importance sampling; over all ranks if :func:`farflung.attach` has this sampler."""
        self._uniform = UniformSampler(derive_seed(seed, "uniform", rank))
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
        """Index of this rank's share, and number of shares."""
        self.batch_size = batch_size
        """Number of samples in a batch."""
        self.share: SampleIds = torch.randperm(samples, generator=create_generator(seed, "share"))[
            rank::size
        ].sort()[0]
        """Indices of this rank's samples, ascending."""
        self._settings = {
            "samples": samples,
            "batch_size": batch_size,
            "seed": seed,
            "rank": rank,
            "size": size,
            "candidates": candidates,
        }
        self._scored_by = scored_by
        self._weight_factor = len(self.share) * size / samples
        self._num_batches = samples // (size * batch_size)
        self._num_candidates = min(candidates * batch_size, len(self.share))
        self._num_chosen = self._num_drawn = 0
        self._scores = torch.full((len(self.share),), UNSCORED)
        self._current_pass = _Pass(self)
        self._resumed_pass: _Pass | None = None

    def __len__(self) -> int:
        """Returns the number of batches in a pass, equal on all ranks."""
        return self._num_batches

    @override
    def __iter__(self) -> Iterator[list[int]]:
        """Starts a pass and yields the indices of each batch, for a loader."""
        self._current_pass = _Pass(self)
        return self._current_pass

    def iter_batches(
        self,
        loader: DataLoader[Any],
        model: nn.Module,
        losses: Callable[[nn.Module, Any], Tensor],
    ) -> BatchIterator:
        """Iterates over one pass of ``loader``: pairs of a :class:`DrawnBatch` and the batch's samples.

        Args:
          loader: Loader with this sampler as its ``batch_sampler``. It yields tensors with a row for each sample, or
            tuples, lists and dicts of such tensors.
          model: Trained model, which scores candidates, without a wrapper that exchanges gradients.
          losses: Function of a model and a batch of the loader that returns one loss for each sample.

        Raises:
          ConfigError: The loader has another batch sampler, or does not preserve the order of batches.
        """
        batch_sampler: object = getattr(loader, "batch_sampler", None)
        if batch_sampler is not self:
            raise ConfigError(
                f"{_NAME}: this loader's batches are not drawn here: make it with batch_sampler="
            )
        if not getattr(loader, "in_order", True):
            raise ConfigError(
                f"{_NAME}: a loader with in_order=False gives its batches in an order of its own"
            )
        return BatchIterator(self, loader, model, losses)

    def state_dict(self) -> State:
        """Returns this rank's scores, the rule's state, and candidates of batches not yet delivered to the loop.

        A state saved between two batches of a pass resumes with the next batch, bit for bit if the loader has the same
        number of workers.
        """
        current = self._resumed_pass or self._current_pass
        return {
            **self._settings,
            "scores": self._scores.clone(),
            "rule": self._rule.state_dict(),
            "gain": self.gain.state_dict(),
            "uniform": self._uniform.state_dict(),
            "num_chosen": self._num_chosen,
            "num_drawn": self._num_drawn,
            "num_delivered": current.num_delivered % len(self),
            "pending_candidates": {
                f"{i:06}": pool.to_state()
                for i, pool in enumerate([*current.requested_candidates, *current.saved_candidates])
            },
        }

    def load_state_dict(self, state: State) -> None:
        """Restores a state; the next pass is the remainder of the pass in which it was saved.

        Raises:
          CheckpointError: The state is of another rank, world size, data set, batch size, candidates or seed.
        """
        for name, value in self._settings.items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"{_NAME}: the state is of {name} {state.get(name)}, and this is {value}"
                )
        self._scores = state["scores"].clone()
        self._rule.load_state_dict(state["rule"])
        self.gain.load_state_dict(state["gain"])
        self._uniform.load_state_dict(state["uniform"])
        self._num_chosen, self._num_drawn = state["num_chosen"], state["num_drawn"]
        self._resumed_pass = _Pass(self)
        self._resumed_pass.num_delivered = int(state["num_delivered"])
        self._resumed_pass.saved_candidates.extend(
            _Candidates(**pool) for _, pool in sorted(state["pending_candidates"].items())
        )

    def _choose_candidates(self) -> _Candidates:
        number, rule = self._num_chosen, self.gain.rule
        self._num_chosen += 1
        if rule == "uniform":
            places = self._uniform.draw(DrawContext(number, 0, 1, self.batch_size, len(self.share))).ids
            return _Candidates(places, torch.ones(self.batch_size, dtype=torch.float64), rule, number)
        places, weights = self._rule.choose_candidates(
            self._scores, self._num_candidates, number, is_two_stage=rule == "two"
        )
        return _Candidates(places, weights, rule, number)

    def _score_candidates(
        self, candidates: _Candidates, model: nn.Module, losses: Callable[[nn.Module], Tensor]
    ) -> None:
        if candidates.rule == "uniform" and not self.gain.should_score(candidates.number):
            return
        modes = [(module, module.training) for module in model.modules()]
        try:
            scores = compute_scores(_NAME, losses, model, len(candidates.places), self._scored_by)
        finally:
            for module, mode in modes:
                module.training = mode
        check_scores(_NAME, scores, self._num_drawn)
        self._scores[candidates.places] = candidates.scores = scores
        self.gain.record_moments(
            self._rule.compute_moments(scores, candidates.weights), self.batch_size / self._num_candidates
        )

    def _draw_batch(self, candidates: _Candidates, batch: Any) -> tuple[DrawnBatch, Any]:
        """Draws a batch from its candidates."""
        self._num_drawn += 1
        self.gain.steps[candidates.rule] += 1
        if candidates.rule == "uniform":
            return DrawnBatch(
                self.share[candidates.places], self._weight_factor * candidates.weights.float()
            ), batch
        assert candidates.scores is not None
        rows, weights = self._rule.draw_batch(
            candidates.scores, candidates.weights, self.batch_size, self._num_drawn - 1
        )
        drawn = DrawnBatch(self.share[candidates.places[rows]], self._weight_factor * weights)
        return drawn, _select_rows(batch, rows, self._num_candidates)


def _select_rows(batch: Any, rows: Tensor, count: int) -> Any:
    """Selects rows of a batch of ``count`` samples.

    Raises:
      ConfigError: The batch has a leaf that is not a tensor with a row for each sample.
    """
    if isinstance(batch, Tensor) and batch.shape[:1] == (count,):
        return batch[rows.to(batch.device)]
    if isinstance(batch, Mapping):
        return {key: _select_rows(value, rows, count) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [_select_rows(part, rows, count) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    leaf = f"a tensor of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
    raise ConfigError(
        f"{_NAME}: the loader gives {leaf} for {count} samples: give tensors with a row for each, in tuples, lists or "
        "dicts"
    )
