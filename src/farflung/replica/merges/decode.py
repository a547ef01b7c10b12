"""Means that are decoded in place of own gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from farflung.comm import ExchangeChannel
from farflung.gradient_coding import gradient_code
from farflung.replica.buckets import GradientBuckets
from farflung.replica.decoder import ByDecoder
from farflung.replica.in_flight import Carrier, InFlight
from farflung.replica.merges.merger import Merger
from farflung.replica.stopping import StopAgreement
from farflung.types import Decode, Runtime, Transfer

__all__ = ["Decoding"]


class Decoding(Merger):
    """Carries out :class:`farflung.types.Decode`: replicas apply the same means, and never differ."""

    takes_gradient: ClassVar[bool] = True
    takes_whole: ClassVar[str] = "whole gradients of equal batches are coded and decoded as they arrive"

    def __init__(self, merge: Decode, buckets: GradientBuckets) -> None:
        super().__init__(merge, buckets)
        self._merge = merge
        self._by_decoder: ByDecoder | None = None

    @property
    @override
    def channels(self) -> Sequence[ExchangeChannel]:
        return [] if self._by_decoder is None else self._by_decoder.channels

    @staticmethod
    @override
    def needs_the_loop(merge: Decode) -> str:
        del merge
        return "rank 0 makes means of what comes first, and a code weighs the shares of a batch"

    @override
    def carrier(
        self,
        runtime: Runtime,
        rider: int,
        seed: int,
        steps: int | None,
        meets: Callable[[int], bool],
        stop: StopAgreement | None,
    ) -> Carrier:
        del meets
        assert steps is not None
        assert stop is not None
        code = gradient_code(self._merge.construction, runtime.comm.size, self._merge.stragglers, seed)
        flats = {bucket.index: self._buckets.flat(bucket.index) for bucket in self._buckets.buckets}
        self._by_decoder = ByDecoder(runtime, code, flats, rider, steps, self._merge, stop)
        return self._by_decoder

    @override
    def opens(self, step: int) -> None:
        assert self._by_decoder is not None
        self._by_decoder.open(step)

    @override
    def ahead(self, step: int) -> bool:
        assert self._by_decoder is not None
        return self._by_decoder.ahead(step)

    @override
    def give(self, index: int, transfer: Transfer, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        del transfer, step
        return self._buckets.flat(index), {}

    @override
    def put(self, index: int, exchange: InFlight, mean: Tensor | None) -> None:
        del exchange
        if mean is not None:
            self._buckets.load(index, mean)

    @override
    def steps(self, *, merged: bool, finite: bool) -> bool:
        del finite
        return merged

    @override
    def diverged(self, *, pending: bool) -> bool:
        del pending
        return False
