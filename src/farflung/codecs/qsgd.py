"""Stochastic quantization to a few levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import BaseCodec, check_floating
from farflung.codecs.bits import pack, unpack
from farflung.codecs.blocks import compute_bucket_norms
from farflung.codecs.stochastic import create_device_generator, from_level_codes, to_level_codes
from farflung.errors import ConfigError
from farflung.options import check_choice, check_integer
from farflung.types import CodecState, Payload, Seeds, TensorSpec

__all__ = ["QSGD", "resolve_levels"]


def resolve_levels(name: str, bits: int | None, levels: int | None) -> tuple[int, int]:
    """Returns the bits of each number and the levels on either side of zero; 4 bits if neither is set.

    Raises:
      ConfigError: Both are set, or one is out of range.
    """
    if bits is not None and levels is not None:
        raise ConfigError(f"{name}: give bits or levels, not both")
    if levels is not None:
        check_integer(name, "levels", levels, 1, 127)
        return (2 * levels).bit_length(), levels
    bits = 4 if bits is None else bits
    check_integer(name, "bits", bits, 2, 8)
    return bits, 2 ** (bits - 1) - 1


@dataclass(frozen=True, slots=True)
class QSGD(BaseCodec):
    r"""Unbiased codec that rounds each number at random to one of ``2 s + 1`` levels of its bucket's norm.

    .. math::
        C(v)_i = \|v\| \operatorname{sign}(v_i)\, \xi_i, \quad
        \xi_i = \tfrac1s \begin{cases} \ell + 1 & \text{with probability } a_i - \ell \\ \ell & \text{else}
        \end{cases}, \quad a_i = s |v_i| / \|v\|, \; \ell = \lfloor a_i \rfloor

    For a bucket of B numbers :math:`E \|C(v) - v\|_2^2 \le \min(B / s^2, \sqrt B / s) \|v\|_2^2`. With the
    maximum norm the error is at most that with :math:`B / 4 s^2`.

    Each number takes a fixed number of packed bits in place of the paper's Elias codes. With b bits
    :math:`s = 2^{b-1} - 1`: four bits give 7 levels, and the norms add ``32 / bucket_size`` bits to a number.
    Not linear, since replicas have different norms; :class:`farflung.reducers.SharedScaleQSGD` agrees on them first.
    A bucket with an infinity, a NaN, or a norm that overflows decodes to non-finite numbers.

    Args:
      bits: Bits of each number on the wire, 2 to 8; 4 if neither bits nor levels are set.
      levels: s of the paper, 1 to 127, in place of ``bits``.
      bucket_size: Number of elements that share a norm; B of the paper.
      norm: ``"max"``, as in the paper's experiments, or ``"l2"``, as in its analysis.

    Raises:
      ConfigError: An option is out of range.

    References: Alistarh et al. 2017, eq. (1), Lemma 3.1; bucket size 512 for 4 bits as in their section 5.
    """

    bits: int | None = None
    levels: int | None = None
    bucket_size: int = 512
    norm: Literal["max", "l2"] = "max"

    is_unbiased: ClassVar[bool] = True
    is_stateless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        resolve_levels("qsgd", self.bits, self.levels)
        check_integer("qsgd", "bucket_size", self.bucket_size, 1)
        check_choice("qsgd", "norm", self.norm, ("max", "l2"))

    @property
    def is_expansive(self) -> bool:
        """Returns True if an error may exceed what is encoded, so that errors would grow with error feedback."""
        _, levels = resolve_levels("qsgd", self.bits, self.levels)
        return self.norm == "l2" and self.bucket_size > levels**2

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns a state with the seed of this replica's rounding.

        Raises:
          Unsupported: The tensor is not floating.
        """
        check_floating("qsgd", spec)
        return CodecState(local={"seed": seeds.local})

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Returns packed levels, and one norm for each bucket."""
        bits, levels = resolve_levels("qsgd", self.bits, self.levels)
        flat = grad.reshape(-1)
        norms = compute_bucket_norms(flat, self.bucket_size, self.norm)
        noise = create_device_generator(flat.device, state.local["seed"], step, count)
        return Payload(
            (pack(to_level_codes(flat, norms, levels, self.bucket_size, noise), bits), norms)
        ), state

    @override
    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        bits, levels = resolve_levels("qsgd", self.bits, self.levels)
        packed, norms = payload.iter_tensors()
        codes = unpack(packed, bits, spec.numel)
        return from_level_codes(codes, norms, levels, self.bucket_size, spec.dtype).view(spec.shape)
