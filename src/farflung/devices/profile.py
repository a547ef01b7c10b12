"""Computing times of a device, and of the arithmetic of exchanges."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeAlias

from farflung.devices.stragglers import Moment, Straggler
from farflung.errors import ConfigError
from farflung.options import check_factor, check_seconds, require
from farflung.types import Cost

__all__ = ["CodingRates", "DeviceProfile", "LayerProfile", "Points"]


Points: TypeAlias = "tuple[tuple[int, float], ...]"
"""Pairs of number of elements and seconds, in ascending order."""


@dataclass(frozen=True, slots=True)
class CodingRates:
    """Seconds that coding and messages take on a device's processor.

    Args:
      operations: Measured points of each operation of each method, by ``(operation, method)``. Seconds are
        interpolated between two sizes, constant below the first, and proportional to the size above the last.
      message_s: Seconds of a message, for its sender and for each receiver.
      copy_s_per_byte: Seconds of a byte of a message, at both ends.
      encrypt_s_per_byte: Additional seconds of a byte if messages are encrypted.

    Raises:
      ConfigError: Sizes do not rise, or seconds are out of range; begins with the name of the value.
    """

    operations: Mapping[tuple[str, str], Points] = field(default_factory=dict, hash=False)
    message_s: float = 0.0
    copy_s_per_byte: float = 0.0
    encrypt_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for points in self.operations.values():
            sizes, seconds = [numel for numel, _ in points], [duration_s for _, duration_s in points]
            is_ascending = bool(sizes) and sizes[0] >= 1 and all(low < high for low, high in pairwise(sizes))
            require(is_ascending, "numel", sizes, "whole numbers above 0, each above the one before")
            if not all(0 < duration_s < math.inf for duration_s in seconds):
                raise ConfigError(f"seconds = {seconds}: each must be above 0")
        for name in ("message_s", "copy_s_per_byte", "encrypt_s_per_byte"):
            check_seconds(name, getattr(self, name))

    def scale(self, coding_factor: float, message_factor: float) -> CodingRates:
        """Returns the rates of another device, whose times differ by a factor.

        Args:
          coding_factor: Factor of the time of arithmetic.
          message_factor: Factor of the time of messages.
        """
        operations = {
            key: tuple((numel, seconds * coding_factor) for numel, seconds in points)
            for key, points in self.operations.items()
        }
        fixed = (self.message_s, self.copy_s_per_byte, self.encrypt_s_per_byte)
        return CodingRates(operations, *(seconds * message_factor for seconds in fixed))

    def compute_seconds(self, operation: str, numel: int, method: str) -> float:
        """Computes the time of one operation on ``numel`` elements; 0 if it was not measured."""
        points = self.operations.get((operation, method))
        if not points:
            return 0.0
        (smallest, smallest_s), (largest, largest_s) = points[0], points[-1]
        if numel <= smallest:
            return smallest_s
        if numel >= largest:
            return largest_s * numel / largest
        for (low, low_s), (high, high_s) in pairwise(points):
            if numel <= high:
                return low_s + (high_s - low_s) * (numel - low) / (high - low)
        raise AssertionError("points are sorted")


BACKWARD_OVER_FORWARD = 2.0
"""A backward pass takes two products, by weights and by inputs, each of the size of the forward pass's one."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer of a model, in forward order.

    Args:
      numel: Number of its parameters; 0 if it has none.
      forward_s: Seconds of a forward pass per sample.
      backward_s: Seconds of a backward pass per sample.
    """

    numel: int
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        require(self.numel >= 0, "numel", self.numel, "0 or more")
        check_seconds("forward_s", self.forward_s)
        check_seconds("backward_s", self.backward_s)


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Computing times and memory of a device.

    Args:
      name: Name for display.
      forward_s: Seconds per sample of a forward pass, and of scoring or evaluation.
      backward_s: Seconds per sample of a backward pass; None for twice the forward pass, our choice.
      optimizer_s: Seconds of an optimizer step.
      layers: Layers of the model in forward order, in place of ``forward_s`` and ``backward_s``; buckets are then
        ready with their layers.
      slowdown: Factor of all times.
      stragglers: Causes of temporary slow-downs; their factors multiply.
      memory_nbytes: Bytes of memory; None if unknown.
      source: Source of the figures.
      coding: Times of the arithmetic of exchanges; None for zero.
      cores: Processors that a replica has for itself; with fewer than two, it does not compute while it codes.
      step_s: Other seconds of a step, charged before its forward pass: drawing and loading samples, bookkeeping.

    Raises:
      ConfigError: A value is out of range; begins with its name.
    """

    name: str = "device"
    forward_s: float = 0.0
    backward_s: float | None = None
    optimizer_s: float = 0.0
    layers: tuple[LayerProfile, ...] = ()
    slowdown: float = 1.0
    stragglers: tuple[Straggler, ...] = ()
    memory_nbytes: int | None = None
    source: str = ""
    coding: CodingRates | None = None
    cores: float = 2.0
    step_s: float = 0.0

    def __post_init__(self) -> None:
        if self.layers and (self.forward_s or self.backward_s is not None):
            raise ConfigError("layers: give them or forward_s and backward_s, not both")
        for name in ("forward_s", "backward_s", "optimizer_s", "step_s"):
            check_seconds(name, getattr(self, name) or 0.0)
        check_factor("slowdown", self.slowdown)
        require(
            self.memory_nbytes is None or self.memory_nbytes >= 1,
            "memory_nbytes",
            self.memory_nbytes,
            "1 or more",
        )
        require(0 < self.cores < math.inf, "cores", self.cores, "above 0")

    @property
    def can_overlap_coding(self) -> bool:
        """Returns True if computation continues while the device codes."""
        return self.cores >= 2

    def compute_seconds(self, cost: Cost, moment: Moment) -> float:
        """Computes the time of a computation that begins at a moment."""
        return self._compute_base_seconds(cost) * cost.share * self.compute_slowdown(moment)

    def compute_slowdown(self, moment: Moment) -> float:
        """Returns the factor of computing time at a moment: the device's slowdown times those of its stragglers."""
        factor = self.slowdown
        for straggler in self.stragglers:
            factor *= straggler.compute_slowdown(moment)
        return factor

    def _compute_base_seconds(self, cost: Cost) -> float:
        if cost.kind == "optimizer":
            return self.optimizer_s
        if cost.kind == "backward":
            return cost.samples * self.backward_per_sample_s
        if cost.kind in ("forward", "evaluate", "score"):
            step_s = self.step_s if cost.kind == "forward" else 0.0
            return step_s + cost.samples * self.forward_per_sample_s
        return 0.0

    @property
    def forward_per_sample_s(self) -> float:
        return math.fsum(layer.forward_s for layer in self.layers) if self.layers else self.forward_s

    @property
    def backward_per_sample_s(self) -> float:
        if self.layers:
            return math.fsum(layer.backward_s for layer in self.layers)
        return BACKWARD_OVER_FORWARD * self.forward_s if self.backward_s is None else self.backward_s

    def compute_ready_fractions(self, order: Sequence[int], numels: Sequence[int]) -> list[float]:
        """Computes the fraction of a backward pass after which each bucket of ``order`` is ready.

        Without layers or the buckets' sizes the shares are evenly spaced. With layers, a bucket is ready when the
        layer of its last parameter is done; layers without parameters take their time too.

        Args:
          order: Indices of the buckets in the order in which they filled.
          numels: Number of parameters in each bucket, by its index, from the output side; empty if unknown.

        Raises:
          ConfigError: The layers are those of another model.
        """
        if not self.layers or not numels:
            return [place / len(order) for place in range(1, len(order) + 1)]
        elapsed_s = list(accumulate(layer.backward_s for layer in reversed(self.layers)))
        total_s = elapsed_s[-1] or 1.0
        last_layers = self._find_last_layers(numels)
        return list(accumulate((elapsed_s[last_layers[bucket]] / total_s for bucket in order), max))

    def compute_use_fractions(self, order: Sequence[int], cost: Cost) -> list[float]:
        """Computes the fraction of a forward pass before which each bucket of ``order`` is not used.

        Without layers or the buckets' sizes the shares are evenly spaced. With layers, a bucket is used when the layer
        of its first parameter in forward order begins. The seconds before a pass come first.

        Args:
          order: Indices of the buckets in the order of their first use.
          cost: Cost of the forward pass, with the number of parameters in each bucket.

        Raises:
          ConfigError: The layers are those of another model.
        """
        forward_s = cost.samples * self.forward_per_sample_s
        if self.layers and cost.numels:
            remaining_s = list(accumulate(layer.forward_s for layer in reversed(self.layers)))
            last_layers = self._find_last_layers(cost.numels)
            starts_s = [forward_s - cost.samples * remaining_s[last_layers[bucket]] for bucket in order]
        else:
            starts_s = [forward_s * place / len(order) for place in range(len(order))]
        total_s = self.step_s + forward_s or 1.0
        return list(accumulate(((self.step_s + max(start_s, 0.0)) / total_s for start_s in starts_s), max))

    def _find_last_layers(self, numels: Sequence[int]) -> list[int]:
        """Returns the layer of each bucket that is closest to the input; layers are counted from the output side.

        Raises:
          ConfigError: The layers are those of another model.
        """
        cumulative_numel = list(accumulate(layer.numel for layer in reversed(self.layers)))
        if cumulative_numel[-1] != sum(numels):
            raise ConfigError(
                f"{self.name}: layers: they have {cumulative_numel[-1]} parameters, and the model has {sum(numels)}"
            )
        return [bisect_left(cumulative_numel, end) for end in accumulate(numels)]
