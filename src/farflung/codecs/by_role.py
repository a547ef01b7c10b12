"""A codec for convolution weights, another for other matrices, and vectors as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from farflung.codecs.identity import Identity
from farflung.codecs.int8 import Int8
from farflung.codecs.options import codec_option
from farflung.codecs.routed import Routed
from farflung.types import Codec, CodecState, Placed, Seeds, TensorSpec

__all__ = ["ByRole", "by_role"]


@dataclass(frozen=True, slots=True)
class ByRole(Routed):
    """Encodes convolution weights by one codec and matrices by another; vectors and scalars are sent dense.

    A role is told by dimensions: three and more are a convolution's weight, two a matrix, fewer a bias or a
    normalisation's. What a bucket is made of says :attr:`farflung.types.TensorSpec.parts`; a tensor without parts is
    one part of its own shape. Parts of one role are one tensor to their codec.

    Args:
      convolution: for convolution weights.
      other: for matrices.

    Raises:
      ConfigError: not codecs.

    References: Yu et al. 2018 (GradiVeQ) compress convolutions alone; Vogels et al. 2019 and Lin et al. 2018 leave
    vectors dense.
    """

    convolution: Codec = field(default_factory=Int8)
    other: Codec = field(default_factory=Identity)

    def __post_init__(self) -> None:
        codec_option("by_role", self.convolution)
        codec_option("by_role", self.other)

    @property
    @override
    def codecs(self) -> Mapping[str, Codec]:
        """Both, and the one that changes nothing."""
        return {"convolution": self.convolution, "dense": Identity(), "other": self.other}

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Which elements are of which role, and the state of each codec."""
        parts: dict[str, list[Placed]] = {}
        runs: dict[str, list[list[int]]] = {}
        for part in spec.parts or (Placed(spec.shape, 0),):
            role = self._role(part)
            parts.setdefault(role, []).append(part)
            mine = runs.setdefault(role, [])
            if mine and sum(mine[-1]) == part.start:
                mine[-1][1] += part.numel
            else:
                mine.append([part.start, part.numel])
        specs = {role: _together(placed, spec) for role, placed in parts.items()}
        return self.route_to(specs, runs, seeds)

    def _role(self, part: Placed) -> str:
        if len(part.shape) >= 3:
            role = "convolution"
        else:
            role = "other" if len(part.shape) == 2 else "dense"
        # Whatever is sent as it is goes together.
        return "dense" if isinstance(self.codecs[role], Identity) else role


def _together(parts: list[Placed], whole: TensorSpec) -> TensorSpec:
    """The flat tensor that parts of one role make."""
    placed, start = [], 0
    for part in parts:
        placed.append(Placed(part.shape, start))
        start += part.numel
    return TensorSpec((start,), whole.dtype, tuple(placed))


def by_role(convolution: Codec | None = None, other: Codec | None = None) -> ByRole:
    """:class:`ByRole`; convolution weights in 8 bits and matrices dense where nothing else is said."""
    return ByRole(Int8() if convolution is None else convolution, Identity() if other is None else other)
