"""Principal components of a window of summed gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from farflung.reducers.gradiveq.layout import Layer

__all__ = ["Group", "alike", "dimensions", "fingerprint", "groups", "principal"]

_DIGITS, _DIGIT_BYTES = 3, 2
"""Of a hash. A float64 sums the squares of 16-bit digits exactly for a thousand replicas."""


class Group(NamedTuple):
    """Consecutive slices of a layer that share a basis, found by principal components of the first of them.

    Args:
      layer: which one.
      first: slice of the layer.
      last: slice behind its last one.
    """

    layer: int
    first: int
    last: int

    @property
    def name(self) -> str:
        """What its basis is kept by."""
        return f"{self.layer:04}.{self.first:04}"


def groups(layers: Sequence[Layer], reuse: int | None) -> Iterator[Group]:
    """All of them, in order, of ``reuse`` slices each, the paper's s; ``None``: of a whole layer."""
    for number, layer in enumerate(layers):
        for first in range(0, layer.slices, reuse or layer.slices):
            yield Group(number, first, min(first + (reuse or layer.slices), layer.slices))


def dimensions(variances: Tensor, left_out: float) -> int:
    r"""The smallest d that explains all variance but a share.

    .. math:: \sum_{k \le d} s_k \ge (1 - \lambda) \sum_k s_k

    Args:
      variances: s, the largest first.
      left_out: :math:`\lambda`.

    Returns:
      At least 1, so that a slice that did not change in the window is not left out for ever, which is our choice.

    References: Yu et al. 2018, eq. (6).
    """
    explained = variances.double().cumsum(0)
    bound = (1.0 - left_out) * explained[-1]
    return min(int((explained < bound).sum()) + 1, len(variances))


def principal(samples: Tensor, left_out: float) -> Tensor:
    """The directions in which samples vary most, by a thin singular value decomposition.

    Samples less their mean have a rank below their number, so d is below it too.

    Args:
      samples: shape ``(n, K)``, finite, at least two.
      left_out: share of the variance that need not be explained.

    Returns:
      U, shape ``(K, d)``, its columns orthonormal.
    """
    _, singular, directions = torch.linalg.svd(samples - samples.mean(dim=0), full_matrices=False)
    largest = singular[: len(samples) - 1].square()
    basis: Tensor = directions[: dimensions(largest, left_out)].T.clone(memory_format=torch.contiguous_format)
    return basis


def fingerprint(tensors: Iterable[Tensor]) -> list[float]:
    """Numbers whose sums over the replicas say whether all have the same bits: digits of a hash and their squares."""
    found = hashlib.blake2b(digest_size=_DIGITS * _DIGIT_BYTES)
    for tensor in tensors:
        found.update(tensor.contiguous().cpu().view(torch.uint8).numpy().data)
    whole = found.digest()
    digits = [
        float(int.from_bytes(whole[at : at + _DIGIT_BYTES])) for at in range(0, len(whole), _DIGIT_BYTES)
    ]
    return [*digits, *(digit * digit for digit in digits)]


def alike(summed: Sequence[float], size: int) -> bool:
    """Whether fingerprints that sum to this over ``size`` replicas were equal.

    The inequality of Cauchy and Schwarz is an equality for equal numbers alone.
    """
    digits, squares = summed[:_DIGITS], summed[_DIGITS:]
    return all(size * square == digit * digit for digit, square in zip(digits, squares, strict=True))
