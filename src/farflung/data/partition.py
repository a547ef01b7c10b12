"""Partitions of a data set among replicas: even, by class, by Dirichlet shares, or by order.

Each split gives one tensor of ids per part; together the parts hold every sample exactly once. Random choices come
from NumPy's ``RandomState``, whose streams are frozen, so a seed gives one split with every version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farflung.errors import ConfigError, DataError
from farflung.options import check_integer, check_number
from farflung.seeding import derive_seed
from farflung.types import Dataset, Json, SampleIds
from farflung.types.data import Partition

__all__ = ["IID", "PARTITIONS", "ByOrder", "Dirichlet", "Labels", "Partition", "Share", "describe_parts"]

_MIN_SAMPLES = 10
"""Minimum samples of each part of a Dirichlet split, unless the set is too small."""
_MAX_DRAWS = 1_000
"""Maximum number of Dirichlet draws for one split."""
_MIN_ALPHA = 1e-6
"""Lowest concentration; below, all samples of a class go to one part."""


@dataclass(frozen=True, slots=True)
class IID:
    """Random equal split; sizes differ by at most one.

    >>> from farflung.data import TensorDataset
    >>> [len(part) for part in IID().split(TensorDataset(torch.zeros(10), torch.zeros(10)), 4)]
    [3, 3, 2, 2]
    """

    def split(self, data: Dataset, num_parts: int, *, seed: int = 0) -> list[SampleIds]:
        _check_size(len(data), num_parts)
        return _split_evenly(_create_random(seed, "iid").permutation(len(data)), num_parts)


@dataclass(frozen=True, slots=True)
class ByOrder:
    """Split into consecutive runs of nearly equal length, for data that is ordered by place or time."""

    def split(self, data: Dataset, num_parts: int, *, seed: int = 0) -> list[SampleIds]:
        del seed
        _check_size(len(data), num_parts)
        return _split_evenly(np.arange(len(data)), num_parts)


@dataclass(frozen=True, slots=True)
class Labels:
    """Split with ``k`` consecutive labels for each part: part ``p`` holds labels ``p k, ..., p k + k - 1`` (modulo).

    With 10 classes and 10 parts of one label, or 100 classes and 25 parts of four, this is the split of ScaDLES. A
    label that several parts hold is divided evenly between them, at random.

    Args:
      k: Labels of each part, at most the number of classes.

    Raises:
      ConfigError: ``k`` is not a whole number of 1 or more. In a split: places are fewer than labels, or ``k`` is
        larger than the number of labels.
      DataError: In a split: the data set has no classes.
    """

    k: int = 1

    def __post_init__(self) -> None:
        check_integer("partition labels", "k", self.k, 1)

    def split(self, data: Dataset, num_parts: int, *, seed: int = 0) -> list[SampleIds]:
        labels, k = _get_labels("labels", data, num_parts), self.k
        classes = int(labels.max()) + 1
        if k > classes:
            raise ConfigError(f"{k} labels each: this data set has {classes}")
        if num_parts * k < classes:
            raise ConfigError(
                f"{num_parts} parts of {k} labels leave {classes - num_parts * k} of {classes} labels out; "
                f"take at least {-(-classes // num_parts)} labels each"
            )
        random = _create_random(seed, "labels")
        places = [place % classes for place in range(num_parts * k)]
        part_pieces: list[list[np.ndarray]] = [[] for _ in range(num_parts)]
        for label in range(classes):
            owners = [place // k for place, place_label in enumerate(places) if place_label == label]
            members = random.permutation(np.flatnonzero(labels == label))
            for owner, piece in zip(owners, np.array_split(members, len(owners)), strict=True):
                part_pieces[owner].append(piece)
        return _shuffle_parts(random, part_pieces)


@dataclass(frozen=True, slots=True)
class Dirichlet:
    r"""Split by shares of each class that are drawn from a Dirichlet distribution.

    For every class, :math:`q \sim \mathrm{Dir}(\alpha, \ldots, \alpha)` over the parts, and part :math:`p` gets the
    share :math:`q_p`. Small ``alpha`` gives parts of few classes, large ``alpha`` nearly equal ones.

    Draws are repeated until each part has 10 samples. A part that has reached its even share gets nothing of later
    classes, as in the code of Mercury and FedML. Sizes thus differ by about one class at most.

    Args:
      alpha: Concentration, at least 1e-6.

    Raises:
      ConfigError: ``alpha`` is out of range. In a split: none of 1,000 draws gives every part its minimum.
      DataError: In a split: the data set has no classes.

    References: Hsu, Qi, Brown 2019, arXiv:1909.06335.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        check_number("partition dirichlet", "alpha", self.alpha, _MIN_ALPHA)

    def split(self, data: Dataset, num_parts: int, *, seed: int = 0) -> list[SampleIds]:
        labels, random = _get_labels("dirichlet", data, num_parts), _create_random(seed, "dirichlet")
        total = len(labels)
        members = [np.flatnonzero(labels == label) for label in range(int(labels.max()) + 1)]
        for _ in range(_MAX_DRAWS):
            part_pieces: list[list[np.ndarray]] = [[] for _ in range(num_parts)]
            sizes = np.zeros(num_parts)
            for ids in members:
                shares = random.dirichlet(np.full(num_parts, float(self.alpha))) * (sizes < total / num_parts)
                if not shares.sum() > 0:  # underflow, or all parts are full: the smallest gets all
                    shares = (np.arange(num_parts) == sizes.argmin()).astype(float)
                cuts = np.round(np.cumsum(shares / shares.sum())[:-1] * len(ids)).astype(int)
                for part, piece in enumerate(np.split(random.permutation(ids), cuts)):
                    part_pieces[part].append(piece)
                    sizes[part] += len(piece)
            if sizes.min() >= min(_MIN_SAMPLES, total // num_parts):
                return _shuffle_parts(random, part_pieces)
        raise ConfigError(
            f"no Dirichlet({self.alpha}) split of {total} samples gives each of {num_parts} parts {_MIN_SAMPLES}; "
            "take a larger concentration or fewer parts"
        )


PARTITIONS: dict[str, Callable[..., Partition]] = {
    "by_order": ByOrder,
    "dirichlet": Dirichlet,
    "iid": IID,
    "labels": Labels,
}
"""Partitions by name; each is built from its options."""


@dataclass(frozen=True, slots=True)
class Share:
    """Sizes of one part of a partition.

    Args:
      size: Number of samples.
      histogram: Number of samples of each class, by ascending label; empty without classes.
    """

    size: int
    histogram: tuple[int, ...]

    def to_json(self) -> dict[str, Json]:
        return {"samples": self.size, "labels": list(self.histogram)}


def describe_parts(parts: Sequence[SampleIds], labels: Tensor | None = None) -> list[Share]:
    """Returns size and label histogram of each part.

    >>> describe_parts([torch.tensor([0, 1]), torch.tensor([2, 3])], torch.tensor([0, 0, 1, 0]))
    [Share(size=2, histogram=(2, 0)), Share(size=2, histogram=(1, 1))]
    """
    if labels is None:
        return [Share(len(part), ()) for part in parts]
    values, classes = labels.unique(return_inverse=True)
    return [
        Share(len(part), tuple(torch.bincount(classes[part], minlength=len(values)).tolist()))
        for part in parts
    ]


def _get_labels(name: str, data: Dataset, parts: int) -> np.ndarray:
    if data.labels is None:
        raise DataError(f"partition {name} needs classes, and this data set has none; use iid or by_order")
    _check_size(len(data.labels), parts)
    classes: np.ndarray = np.unique(data.labels.numpy(), return_inverse=True)[1]  # labels may be any numbers
    return classes


def _check_size(samples: int, parts: int) -> None:
    if not 1 <= parts <= samples:
        raise ConfigError(f"cannot split {samples} samples into {parts} parts")


def _create_random(seed: int, label: str) -> np.random.RandomState:
    value = derive_seed(seed, "partition", label)
    return np.random.RandomState([value & 0xFFFFFFFF, value >> 32])


def _split_evenly(ids: np.ndarray, parts: int) -> list[SampleIds]:
    return [torch.from_numpy(piece.astype(np.int64)) for piece in np.array_split(ids, parts)]


def _shuffle_parts(
    random: np.random.RandomState, pieces_by_part: Sequence[Sequence[np.ndarray]]
) -> list[SampleIds]:
    return [
        torch.from_numpy(random.permutation(np.concatenate(pieces)).astype(np.int64))
        for pieces in pieces_by_part
    ]
