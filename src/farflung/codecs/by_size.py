"""A codec for large tensors, another for small ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from farflung.codecs.identity import Identity
from farflung.codecs.int8 import Int8
from farflung.codecs.options import codec_option
from farflung.codecs.routed import Routed
from farflung.options import whole_option
from farflung.types import Codec, CodecState, Seeds, TensorSpec

__all__ = ["BySize", "by_size"]


@dataclass(frozen=True, slots=True)
class BySize(Routed):
    """Encodes a tensor of at least ``numel`` elements by one codec, and a smaller one by another.

    What a small tensor would save is less than what its rounding costs: Alistarh et al. 2017 leave those below
    10,000 elements as they are.

    Args:
      small: for tensors below ``numel`` elements.
      large: for the others.
      numel: where large begins.

    Raises:
      ConfigError: not codecs, or a negative number.
    """

    small: Codec = field(default_factory=Identity)
    large: Codec = field(default_factory=Int8)
    numel: int = 10_000

    def __post_init__(self) -> None:
        codec_option("by_size", self.small)
        codec_option("by_size", self.large)
        whole_option("by_size", "numel", self.numel, 0)

    @property
    @override
    def codecs(self) -> Mapping[str, Codec]:
        """Both."""
        return {"small": self.small, "large": self.large}

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Which of the two, and its state."""
        size = "large" if spec.numel >= self.numel else "small"
        return self.route_to({size: spec}, {size: [[0, spec.numel]]}, seeds)


def by_size(small: Codec | None = None, large: Codec | None = None, numel: int = 10_000) -> BySize:
    """:class:`BySize`; small tensors dense and large ones in 8 bits where nothing else is said."""
    return BySize(Identity() if small is None else small, Int8() if large is None else large, numel)
