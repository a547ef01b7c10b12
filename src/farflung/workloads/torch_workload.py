"""Workload of any module, loss and map-style data sets of torch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from typing_extensions import override

from farflung.errors import ConfigError
from farflung.seeding import RandomState, create_generator, derive_seed
from farflung.types import Batch, Dataset, Json, SampleIds
from farflung.workloads.classification import build_model, build_settings

__all__ = ["TorchWorkload"]


class MapDataset(Protocol):
    """Data set of torch that gives ``(input, target)`` by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class TorchWorkload:
    """Workload of a module, a loss, and two data sets.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(20, 3), torch.randint(2, (20,)))
    >>> task = TorchWorkload(lambda: nn.Linear(3, 2), data, data, nn.functional.cross_entropy)
    >>> model, data = task.build_model(create_generator(0, "model")), task.load_datasets()[0]
    >>> task.compute_losses(model, data.take(torch.arange(4), train=True)).shape
    torch.Size([4])

    Samples are collated by torch's ``default_collate``. Random data sets have to draw from torch's random state alone.

    Args:
      model: Function that builds the module under the run's seed; or a module, of which every replica trains a copy.
      train: Training set, with ``len(train)`` and ``train[index]``, an ``(input, target)``.
      test: Test set, likewise.
      loss: Function of outputs and targets with a number for each sample: one of :mod:`torch.nn.functional`, a module
        of torch with ``reduction='none'``, or a custom one. Dimensions after that of samples are averaged.
      metric: Function of outputs and targets with a score for each sample, the higher the better; when not given, the
        accuracy, or minus the loss if targets are no classes.
      name: ``family/model`` for display; when not given, that of the module.
      defaults: Settings that train it well: ``batch_size``, ``learning_rate``, ``momentum``, ``weight_decay``,
        ``steps``, or others of :class:`farflung.config.Training`.

    Raises:
      ConfigError: Parts are incompatible, by a check on two samples; names them in one line.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module] | nn.Module,
        train: MapDataset,
        test: MapDataset,
        loss: Callable[..., Tensor],
        metric: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        name: str | None = None,
        defaults: Mapping[str, Json] | None = None,
    ) -> None:
        self._model, self._metric = model, metric
        self._loss = _build_sample_loss(loss)
        self._train, self._test = _DatasetAdapter("train", train), _DatasetAdapter("test", test)
        module = self.build_model(create_generator(0, "model"))
        self.name: str = name or f"own/{type(module).__name__}"
        """Name for display."""
        self.defaults: Mapping[str, Json] = {
            **build_settings(batch_size=32, learning_rate=0.01, steps=1000),
            **(defaults or {}),
        }
        """Settings that apply when none are given."""
        self._check_samples(module)

    @override
    def __repr__(self) -> str:
        return f"TorchWorkload({self.name}, {len(self._train)} + {len(self._test)} samples)"

    def build_model(self, generator: torch.Generator) -> nn.Module:
        """Builds a module under ``generator``, or copies the given one."""
        if isinstance(self._model, nn.Module):
            return copy.deepcopy(self._model)
        module = build_model(self._model, generator)
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"TorchWorkload: model {self._model!r} makes {type(module).__name__}, not an nn.Module"
            )
        return module

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._average_per_sample("loss", self._loss(model(batch.inputs), batch.targets), batch)

    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns each sample's metric; by default 1 or 0 for its class being right, otherwise minus its loss."""
        outputs: Tensor = model(batch.inputs)
        if self._metric is not None:
            return self._average_per_sample("metric", self._metric(outputs, batch.targets), batch)
        has_scores = outputs.dim() == 2 and outputs.shape[1] > 1  # one logit names no class
        if has_scores and batch.targets.dim() == 1 and not batch.targets.is_floating_point():
            return (outputs.argmax(dim=-1) == batch.targets).to(torch.float32)
        return -self._average_per_sample("loss", self._loss(outputs, batch.targets), batch)

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        return self._train, self._test

    def _average_per_sample(self, label: str, values: object, batch: Batch) -> Tensor:
        if not isinstance(values, torch.Tensor) or values.dim() == 0 or len(values) != len(batch):
            shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise ConfigError(
                f"{self.name}: {label} gives {shape} for {len(batch)} samples, not a number for each; "
                "torch's losses do with reduction='none'"
            )
        return values if values.dim() == 1 else values.flatten(1).mean(dim=1)

    def _check_samples(self, model: nn.Module) -> None:
        """Checks model, loss and metric on two samples, before anything runs."""
        with RandomState.preserve_globals(), torch.no_grad():
            RandomState(derive_seed(0, "replica", 0)).install()
            model.eval()
            for data in (self._train, self._test):
                batch = data.take(torch.arange(min(2, len(data))), train=False)
                try:
                    self.compute_losses(model, batch)
                    self.compute_metrics(model, batch)
                except ConfigError:
                    raise
                except Exception as error:
                    reason = (str(error).splitlines() or [type(error).__name__])[0]
                    raise ConfigError(
                        f"{self.name}: model, loss or metric cannot take the samples of {data.name}, inputs "
                        f"{tuple(batch.inputs.shape)} and targets {tuple(batch.targets.shape)}: {reason}"
                    ) from error


class _DatasetAdapter:
    """Adapter of a map-style data set to :class:`farflung.types.Dataset`."""

    def __init__(self, name: str, data: MapDataset) -> None:
        self.name, self._data = name, data
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise ConfigError(
                f"TorchWorkload: {name} {type(data).__name__} is not map-style: it needs len({name}) and {name}[index]"
            )
        if not len(data):
            raise ConfigError(f"TorchWorkload: {name} has no sample")
        sample = data[0]
        if not (isinstance(sample, tuple | list) and len(sample) == 2):
            raise ConfigError(
                f"TorchWorkload: {name}[0] is {type(sample).__name__}, not an (input, target); wrap the data set"
            )
        self.take(torch.arange(1), train=False)

    def __len__(self) -> int:
        return len(self._data)

    @cached_property
    def labels(self) -> Tensor | None:
        """Targets as classes, from ``targets`` of the data set or all its samples; ``None`` unless integers."""
        stored = getattr(self._data, "targets", None)
        targets = [self._data[index][1] for index in range(len(self))] if stored is None else stored
        try:
            labels = torch.as_tensor(targets)
        except (TypeError, ValueError, RuntimeError):
            return None
        is_class = labels.shape == (len(self),) and not labels.is_floating_point() and not labels.is_complex()
        return labels.to(torch.int64) if is_class else None

    def take(self, ids: SampleIds, *, train: bool) -> Batch:
        return self.prepare(self.get_rows(ids), train=train)

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        """Returns the rows unchanged; the data set itself does random transforms."""
        del train
        return rows

    def get_rows(self, ids: SampleIds) -> Batch:
        inputs, targets = default_collate([tuple(self._data[index]) for index in ids.tolist()])
        if not (isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
            raise ConfigError(
                f"TorchWorkload: the samples of {self.name} collate to {type(inputs).__name__} and "
                f"{type(targets).__name__}, not to a tensor of inputs and one of targets; wrap the data set"
            )
        return Batch(inputs, targets)


def _build_sample_loss(loss: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function as a loss with ``reduction='none'``; rejects a module with another reduction."""
    if isinstance(loss, nn.Module):
        if getattr(loss, "reduction", "none") != "none":
            raise ConfigError(
                f"TorchWorkload: {type(loss).__name__} gives the mean of a batch; make it with reduction='none'"
            )
        return loss
    try:
        has_reduction = "reduction" in inspect.signature(loss).parameters
    except ValueError:  # some of torch's built-in functions have no signature
        has_reduction = False
    return (lambda outputs, targets: loss(outputs, targets, reduction="none")) if has_reduction else loss
