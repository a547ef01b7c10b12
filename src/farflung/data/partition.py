"""Splits one data set among replicas: evenly, by class, by Dirichlet shares, or by order.

Each function gives one tensor of ids per part; together the parts hold every sample exactly once. Random choices
come from NumPy's ``RandomState``, whose streams are frozen, so that a seed means the same split with every version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farflung.errors import ConfigError, DataError
from farflung.seeding import derive
from farflung.types import Dataset, Json, SampleIds
from farflung.types.data import Partition

__all__ = [
    "IID",
    "PARTITIONS",
    "ByOrder",
    "Dirichlet",
    "Labels",
    "Partition",
    "Share",
    "by_label",
    "describe",
    "dirichlet",
    "iid",
    "in_order",
]


@dataclass(frozen=True, slots=True)
class IID:
    """A random equal split, see :func:`iid`."""

    def split(self, data: Dataset, parts: int, *, seed: int = 0) -> list[SampleIds]:
        return iid(len(data), parts, seed=seed)


@dataclass(frozen=True, slots=True)
class ByOrder:
    """Consecutive runs, see :func:`in_order`."""

    def split(self, data: Dataset, parts: int, *, seed: int = 0) -> list[SampleIds]:
        del seed
        return in_order(len(data), parts)


@dataclass(frozen=True, slots=True)
class Labels:
    """``k`` labels each, see :func:`by_label`."""

    k: int = 1

    def __post_init__(self) -> None:
        number: object = self.k  # options come out of text, so it may be anything
        if not isinstance(number, int) or number < 1:
            raise ConfigError(f"partition labels(k={number!r}): k must be a whole number, 1 or more")

    def split(self, data: Dataset, parts: int, *, seed: int = 0) -> list[SampleIds]:
        return by_label(_classes("labels", data), parts, self.k, seed=seed)


@dataclass(frozen=True, slots=True)
class Dirichlet:
    """Shares of each class from a Dirichlet distribution of concentration ``alpha``, see :func:`dirichlet`."""

    alpha: float = 0.5

    def __post_init__(self) -> None:
        number: object = self.alpha  # options come out of text, so it may be anything
        if not isinstance(number, int | float) or not 0 < number < math.inf:
            raise ConfigError(f"partition dirichlet(alpha={number!r}): alpha must be a number above 0")

    def split(self, data: Dataset, parts: int, *, seed: int = 0) -> list[SampleIds]:
        return dirichlet(_classes("dirichlet", data), parts, self.alpha, seed=seed)


PARTITIONS: dict[str, Callable[..., Partition]] = {
    "by_order": ByOrder,
    "dirichlet": Dirichlet,
    "iid": IID,
    "labels": Labels,
}
"""All of them by name; each is made from its options."""


def iid(samples: int, parts: int, *, seed: int = 0) -> list[SampleIds]:
    """A random equal split; sizes differ by at most one.

    >>> [len(part) for part in iid(10, 4)]
    [3, 3, 2, 2]
    """
    _check(samples, parts)
    return _cut(_random(seed, "iid").permutation(samples), parts)


def in_order(samples: int, parts: int) -> list[SampleIds]:
    """Consecutive runs of nearly equal length: the natural split of data that is ordered by place or time.

    >>> in_order(5, 2)
    [tensor([0, 1, 2]), tensor([3, 4])]
    """
    _check(samples, parts)
    return _cut(np.arange(samples), parts)


def by_label(labels: Tensor, parts: int, per_part: int = 1, *, seed: int = 0) -> list[SampleIds]:
    """``per_part`` consecutive labels for each part: part ``p`` holds labels ``p k, ..., p k + k - 1`` (modulo).

    With 10 classes and 10 parts of one label, or 100 classes and 25 parts of four, this is the split of ScaDLES.
    A label that several parts hold is divided evenly between them, at random.

    Args:
      labels: class of each sample, 0 to C - 1.
      parts: how many replicas.
      per_part: labels each, at most C.
      seed: for the division of a shared label, and for the order within a part.

    Raises:
      ConfigError: fewer places than labels, which would leave samples out; or more labels each than exist.
    """
    _check(len(labels), parts)
    classes = int(labels.max()) + 1
    if not 0 < per_part <= classes:
        raise ConfigError(f"{per_part} labels each: this data set has {classes}")
    if parts * per_part < classes:
        raise ConfigError(
            f"{parts} parts of {per_part} labels leave {classes - parts * per_part} of {classes} labels out; "
            f"take at least {-(-classes // parts)} labels each"
        )
    random = _random(seed, "labels")
    holders: list[list[int]] = [[] for _ in range(classes)]
    for part in range(parts):
        for offset in range(per_part):
            holders[(part * per_part + offset) % classes].append(part)
    held: list[list[np.ndarray]] = [[] for _ in range(parts)]
    for label, owners in enumerate(holders):
        members = random.permutation(np.flatnonzero(labels.numpy() == label))
        for owner, piece in zip(owners, np.array_split(members, len(owners)), strict=True):
            held[owner].append(piece)
    return [_shuffled(random, pieces) for pieces in held]


def dirichlet(
    labels: Tensor, parts: int, alpha: float, *, seed: int = 0, smallest: int = 10, balanced: bool = True
) -> list[SampleIds]:
    r"""Shares of each class drawn from a Dirichlet distribution.

    For every class, :math:`q \sim \mathrm{Dir}(\alpha, \ldots, \alpha)` over the parts, and part :math:`p` gets the
    share :math:`q_p`. Small ``alpha`` gives parts of few classes, large ``alpha`` nearly equal ones.

    Args:
      labels: class of each sample, 0 to C - 1.
      parts: how many replicas.
      alpha: concentration, above 0.
      seed: for everything random.
      smallest: draws again until each part has this many samples.
      balanced: a part that already has its even share gets nothing of the classes that follow (as in the code of
        Mercury and FedML); sizes then stay within about one class of each other.

    Raises:
      ConfigError: ``alpha`` not above 0, or no draw out of 1,000 gives every part its smallest number.

    References: Hsu, Qi, Brown 2019, arXiv:1909.06335.
    """
    _check(len(labels), parts)
    if not alpha > 0:
        raise ConfigError(f"Dirichlet concentration {alpha} is not above 0")
    random = _random(seed, "dirichlet")
    total = len(labels)
    members = [np.flatnonzero(labels.numpy() == label) for label in range(int(labels.max()) + 1)]
    for _ in range(1_000):
        held: list[list[np.ndarray]] = [[] for _ in range(parts)]
        sizes = np.zeros(parts)
        for ids in members:
            shares = random.dirichlet(np.full(parts, alpha))
            if balanced:
                shares = shares * (sizes < total / parts)
            if (
                not shares.sum() > 0
            ):  # underflow at tiny alpha, or all parts have enough: the smallest gets all
                shares = np.zeros(parts)
                shares[int(sizes.argmin())] = 1.0
            cuts = np.round(np.cumsum(shares / shares.sum())[:-1] * len(ids)).astype(int)
            for part, piece in enumerate(np.split(random.permutation(ids), cuts)):
                held[part].append(piece)
                sizes[part] += len(piece)
        if sizes.min() >= min(smallest, total // parts):
            return [_shuffled(random, pieces) for pieces in held]
    raise ConfigError(
        f"no Dirichlet({alpha}) split of {total} samples gives each of {parts} parts {smallest}; "
        "take a larger concentration or fewer parts"
    )


@dataclass(frozen=True, slots=True)
class Share:
    """One part of a partition in numbers.

    Args:
      size: samples.
      histogram: samples of each class; empty where there are no classes.
    """

    size: int
    histogram: tuple[int, ...]

    def to_json(self) -> dict[str, Json]:
        """For summaries."""
        return {"samples": self.size, "labels": list(self.histogram)}


def describe(parts: Sequence[SampleIds], labels: Tensor | None = None) -> list[Share]:
    """Size and label histogram of each part.

    >>> describe(in_order(4, 2), torch.tensor([0, 0, 1, 0]))
    [Share(size=2, histogram=(2, 0)), Share(size=2, histogram=(1, 1))]
    """
    if labels is None:
        return [Share(len(part), ()) for part in parts]
    classes = int(labels.max()) + 1 if len(labels) else 0
    return [
        Share(len(part), tuple(torch.bincount(labels[part], minlength=classes).tolist())) for part in parts
    ]


def _classes(how: str, data: Dataset) -> Tensor:
    if data.labels is None:
        raise DataError(f"partition {how} needs classes, and this data set has none; use iid or by_order")
    return data.labels


def _check(samples: int, parts: int) -> None:
    if parts < 1:
        raise ConfigError(f"cannot split into {parts} parts")
    if samples < parts:
        raise ConfigError(f"cannot split {samples} samples into {parts} parts")


def _random(seed: int, label: str) -> np.random.RandomState:
    value = derive(seed, "partition", label)
    return np.random.RandomState([value & 0xFFFFFFFF, value >> 32])


def _cut(ids: np.ndarray, parts: int) -> list[SampleIds]:
    return [torch.from_numpy(piece.astype(np.int64)) for piece in np.array_split(ids, parts)]


def _shuffled(random: np.random.RandomState, pieces: list[np.ndarray]) -> SampleIds:
    return torch.from_numpy(random.permutation(np.concatenate(pieces)).astype(np.int64))
