"""Where the slices of weights are in a flat tensor, and principal components of a window of summed gradients."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from farflung.errors import ConfigError
from farflung.types import Placed, State, TensorSpec

__all__ = ["Fit", "Group", "Layer", "Layout", "alike", "dimensions", "fingerprint", "groups", "principal"]


Fit = Literal["nearest", "exact"]
"""Whether a slice is as near a wished size as fits each layer, or exactly of that size."""
AT_ONCE = 64
"""Positions that are written together, so that what is read with wide strides stays in the processor's cache."""


class Layer(NamedTuple):
    """A weight cut into slices of equal size.

    The numbers of a convolution are read in the order height, width, depth, filter, so entry ``(h, w, d, f)`` has the
    index ``((h * W + w) * D + d) * F + f``, and a slice is some positions of the kernel. A matrix of F outputs and P
    inputs is read as a kernel of P positions and depth 1, so a slice is some inputs with all their outputs.

    Args:
      start: where its first element is in the flat tensor.
      filters: F.
      depth: D.
      positions: P, height times width for a convolution.
      each: m, positions in a slice; divides them.

    References: Yu et al. 2018, section 2, with TensorFlow's order of a kernel's dimensions. Matrices are our choice.
    """

    start: int
    filters: int
    depth: int
    positions: int
    each: int

    @property
    def slice_numel(self) -> int:
        """K, numbers in a slice."""
        return self.each * self.depth * self.filters

    @property
    def slices(self) -> int:
        return self.positions // self.each

    @property
    def numel(self) -> int:
        """Numbers in all of it."""
        return self.positions * self.depth * self.filters

    def rows(self, tensor: Tensor, first: int, last: int) -> Tensor:
        """Slices from ``first`` up to ``last`` (excluded), shape ``(last - first, K)``."""
        return self._placed(tensor, first, last).reshape(last - first, self.slice_numel)

    def put(self, tensor: Tensor, first: int, rows: Tensor) -> None:
        """Writes slices from ``first`` on, shape ``(n, K)``, where they belong in the flat tensor."""
        place = self._placed(tensor, first, first + len(rows))
        for there, own in zip(place.split(AT_ONCE), rows.reshape(place.shape).split(AT_ONCE), strict=True):
            there.copy_(own)

    def _placed(self, tensor: Tensor, first: int, last: int) -> Tensor:
        """Shape ``(positions, D, F)``, a view."""
        whole = tensor.narrow(0, self.start, self.numel).view(self.filters, self.depth, self.positions)
        return whole.permute(2, 1, 0)[first * self.each : last * self.each]


@dataclass(frozen=True, slots=True)
class Layout:
    """The weights of a flat tensor that are cut, and what stays dense.

    Args:
      layers: those that are cut.
      dense: first element and length of each stretch of all else.
    """

    layers: tuple[Layer, ...]
    dense: tuple[tuple[int, int], ...]

    @staticmethod
    def of(spec: TensorSpec, wished: int, fit: Fit, *, matrices: bool = False) -> Layout:
        """Cuts each convolution, which is a parameter of three dimensions or more: torch's F, D and the kernel's sides.

        Args:
          spec: of the flat tensor.
          wished: K, numbers in a slice.
          fit: whether K may be another that fits.
          matrices: whether parameters of two dimensions are cut too.

        Raises:
          ConfigError: with ``fit="exact"``, a weight has no slices of ``wished`` numbers.
        """
        layers, dense = [], []
        for part in spec.parts or (Placed(spec.shape, 0),):
            if part.numel and len(part.shape) >= (2 if matrices else 3):
                layers.append(_cut(part, wished, fit))
            elif part.numel:
                dense.append((part.start, part.numel))
        return Layout(tuple(layers), tuple(dense))

    @staticmethod
    def of_state(state: State) -> Layout:
        return Layout(
            tuple(Layer(*layer) for layer in state["layers"]),
            tuple((start, numel) for start, numel in state["dense"]),
        )

    @property
    def state(self) -> dict[str, Any]:
        return {"layers": [list(layer) for layer in self.layers], "dense": [list(run) for run in self.dense]}

    def add(self, tensor: Tensor, numbers: Tensor) -> None:
        """Adds numbers in the order of the layers and their slices, flat, where they belong in the flat tensor."""
        for layer, own in zip(self.layers, numbers.split([one.numel for one in self.layers]), strict=True):
            rows = layer.rows(tensor, 0, layer.slices)
            layer.put(tensor, 0, rows + own.view(rows.shape))

    @property
    def sliced_numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    @property
    def dense_numel(self) -> int:
        return sum(numel for _, numel in self.dense)

    @property
    def offsets(self) -> list[int]:
        """Where each layer begins in a tensor of the layers alone."""
        return list(accumulate((layer.numel for layer in self.layers), initial=0))[:-1]


def _cut(part: Placed, wished: int, fit: Fit) -> Layer:
    filters, *others = part.shape
    depth, positions = (1, others[0]) if len(others) == 1 else (others[0], math.prod(others[1:]))
    step = filters * depth
    fitting = [each for each in range(1, positions + 1) if positions % each == 0]
    nearest = min(fitting, key=lambda each: abs(each * step - wished))
    if fit == "exact" and nearest * step != wished:
        raise ConfigError(
            f"gradiveq: slice_size {wished} does not fit a weight of shape {_shape(part.shape)}: it must be a multiple "
            f"of F x D = {step} that fills the layer; the nearest is {nearest * step} (fit='nearest' takes it)"
        )
    return Layer(part.start, filters, depth, positions, nearest)


def _shape(sides: Iterable[int]) -> str:
    return "x".join(map(str, sides))


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
