"""Covertype: rare classes against the rest, judged by average precision, and its 7 classes with a deeper network."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from typing_extensions import override

from farflung.data import covtype
from farflung.data.datasets import TensorDataset
from farflung.types import Batch, Workload
from farflung.workloads import Classification
from farflung.workloads.classification import build_settings

__all__ = ["RareClass", "aspen", "cottonwood", "mlp"]

_BINS, _WIDEST = 1024, 16.0
"""Of the difference of two logits, which is cut off beyond the widest."""
_DEFAULTS = build_settings(batch_size=32, learning_rate=0.0005, momentum=0.0, steps=6000, optimizer="adam")


@dataclass(slots=True)
class RareClass(Classification):
    """One class against the rest.

    The metric is average precision, the mean of the precision at each recall, over the samples' differences of logits
    in bins of 1/32: samples of one bin share a threshold, as equal scores do in scikit-learn.
    """

    @override
    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        """For each sample the bin that it is counted in, of its label's half of ``2 x bins``."""
        logits: Tensor = model(batch.inputs)
        margin = (logits[:, 1] - logits[:, 0]).clamp(-_WIDEST, _WIDEST)
        bins = ((margin + _WIDEST) * (_BINS / (2 * _WIDEST))).long().clamp(max=_BINS - 1)
        return nn.functional.one_hot(batch.targets * _BINS + bins, 2 * _BINS)

    def metric_of(self, counts: Tensor) -> float:
        """Average precision of counts of samples by label and bin."""
        negative, positive = counts.view(2, _BINS).flip(1).unbind()
        found, wrong = positive.cumsum(0), negative.cumsum(0)
        precision = found / (found + wrong).clamp(min=1)
        return float((precision * positive).sum() / positive.sum())


def cottonwood() -> Workload:
    """Cottonwood (0.5 % of the patches) against the rest."""
    return _rare("cottonwood", 3)


def aspen() -> Workload:
    """Aspen (1.6 % of the patches) against the rest."""
    return _rare("aspen", 4)


def mlp() -> Workload:
    """The 7 classes with two hidden layers of 128 and 64."""
    return Classification(
        name="covtype/mlp",
        build_network=partial(_network, 128, 64, 7),
        load_data=covtype.load,
        defaults=_DEFAULTS,
    )


def _rare(name: str, label: int) -> Workload:
    return RareClass(
        name=f"covtype/{name}",
        build_network=partial(_network, 64, 64, 2),
        load_data=partial(_against_the_rest, label),
        defaults=_DEFAULTS,
    )


def _against_the_rest(label: int) -> tuple[TensorDataset, TensorDataset]:
    train, test = covtype.load()
    return _binary(train, label), _binary(test, label)


def _binary(data: TensorDataset, label: int) -> TensorDataset:
    targets = (data.targets == label).long()
    return TensorDataset(data.inputs, targets, targets, data.transform, origin=data.origin)


def _network(first: int, second: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(54, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, classes)
    )
