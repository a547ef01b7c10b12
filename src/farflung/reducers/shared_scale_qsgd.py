"""QSGD with scales shared by all replicas, so that its integers can be summed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from farflung.codecs.base import check_floating
from farflung.codecs.bits import pack_fields, unpack_fields
from farflung.codecs.blocks import compute_bucket_norms
from farflung.codecs.qsgd import resolve_levels
from farflung.codecs.stochastic import create_device_generator, from_level_codes, to_level_codes
from farflung.comm.collectives.segments import list_peers
from farflung.comm.staging import copy_to_device
from farflung.options import check_integer
from farflung.reducers.aggregation import CodecExchange
from farflung.reducers.base import (
    build_result,
    check_rounds,
    compute_numerator,
    format_reducer,
    pack_metadata,
)
from farflung.types import (
    Channel,
    CodecState,
    Contribution,
    Payload,
    Reducer,
    ReduceResult,
    Seeds,
    StateSlot,
    TensorSpec,
)

__all__ = ["SharedScaleQSGD"]


@dataclass(frozen=True, slots=True)
class SharedScaleQSGD(Reducer):
    r"""Reducer that agrees on the largest magnitude of each bucket, rounds to levels of it and sums the levels.

    .. math::
        M = \max_i \|w_i g_i\|_\infty, \quad
        l_i = \lfloor s\, w_i g_i / M + u_i \rfloor, \quad
        \bar g = \frac{M}{s} \sum_i l_i \Big/ \sum_i w_i

    Unbiased, with one rounding for any number of replicas and the traffic of an all-reduce. Levels of n replicas travel
    in fields of :math:`\lceil \log_2 (2 s n + 1) \rceil` bits, as many to a 32-bit word as fit. The magnitudes go
    first, which takes one more delay. Buckets with an infinity or a NaN have a result that is not finite.

    Args:
      bits: Bits of a number before the sum, 2 to 8; 4 if neither bits nor levels are set.
      levels: s, 1 to 127, in place of ``bits``.
      bucket_size: Number of elements that share a scale.
      collective: Name in :data:`farflung.comm.COLLECTIVES`.

    Raises:
      ConfigError: An option is out of range.
      UnknownName: There is no such collective.
      Unsupported: Collective ``native``, which cannot tell the rounds of several buckets apart.

    References: Vineeth S 2021, arXiv 2109.12497, QSGD-MaxNorm: quantization that an all-reduce may sum; scales for
    each bucket, and the fields, are our choice.
    """

    is_repeatable: ClassVar[bool] = True

    bits: int | None = None
    levels: int | None = None
    bucket_size: int = 512
    collective: str = "direct"

    def __post_init__(self) -> None:
        resolve_levels("shared_scale_qsgd", self.bits, self.levels)
        check_integer("shared_scale_qsgd", "bucket_size", self.bucket_size, 1)
        check_rounds("shared_scale_qsgd", self.collective)

    @property
    def method(self) -> str:
        """Name of the arithmetic for coding costs."""
        return format_reducer(self)

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns a state with the seed of this replica's rounding.

        Raises:
          Unsupported: The tensor is not floating.
        """
        check_floating("shared_scale_qsgd", spec)
        return CodecState(local={"seed": seeds.local})

    @override
    def list_summed_nbytes(self, spec: TensorSpec, size: int) -> Sequence[int]:
        """Returns the bytes of the words that hold the levels."""
        return (4 * math.ceil(spec.numel / (32 // self._compute_width(size))),)

    @override
    async def reduce(
        self, channel: Channel, slot: StateSlot, contribution: Contribution, *, step: int
    ) -> ReduceResult:
        _, levels = resolve_levels("shared_scale_qsgd", self.bits, self.levels)
        width = self._compute_width(channel.size)
        exchange = CodecExchange(channel, self.collective, pack_metadata(contribution), step)
        tensor, seed = compute_numerator(channel, contribution), slot.state.local["seed"]
        method = self.method
        channel.charge("scales", tensor.numel(), method)
        norms = compute_bucket_norms(tensor, self.bucket_size, "max")
        hop, scales = channel.reserve_hops(1), norms
        for peer in list_peers(channel):
            channel.send(Payload((norms,)), peer, hop)
        for peer in list_peers(channel):  # NaN if any replica has one
            received = await channel.recv(peer, hop, (TensorSpec.from_tensor(norms),))
            (peer_norms,) = copy_to_device(received, norms.device).iter_tensors()
            channel.charge("add", norms.numel())
            scales = torch.maximum(scales, peer_norms)
        channel.charge("encode", tensor.numel(), method)
        noise = create_device_generator(tensor.device, seed, step)
        words = pack_fields(to_level_codes(tensor, scales, levels, self.bucket_size, noise), width)
        words, metadata = await exchange.sum(words)
        channel.charge("decode", tensor.numel(), method)
        sums = unpack_fields(words, width, tensor.numel())
        total = from_level_codes(sums, scales, levels, self.bucket_size, tensor.dtype, channel.size)
        return build_result(channel, total, metadata, contribution.tensor.dtype)

    def _compute_width(self, size: int) -> int:
        """Returns the bits of a field that holds the sum of ``size`` replicas' levels."""
        _, levels = resolve_levels("shared_scale_qsgd", self.bits, self.levels)
        return (2 * levels * size).bit_length()
