"""Means in place of own gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.replica.buckets import GradientBuckets
from farflung.replica.in_flight import InFlight
from farflung.replica.merges.merger import Merger
from farflung.replica.merges.prediction import check_predictable, predictable, predicted
from farflung.types import Replace, Transfer

__all__ = ["Replacing"]


class Replacing(Merger):
    """Carries out :class:`farflung.types.Replace`: replicas apply the same means in the same order, and never differ.

    A gradient that is due at its own step is given away, and no copy of it is made.
    """

    takes_gradient: ClassVar[bool] = True

    def __init__(self, merge: Replace, buckets: GradientBuckets) -> None:
        super().__init__(merge, buckets)
        self._predict = merge.predict

    @staticmethod
    @override
    def needs_the_loop(merge: Replace) -> str:
        return "predicted weights need hold of the forward pass" if merge.predict else ""

    @override
    def goes_with(self, optimizer: torch.optim.Optimizer) -> None:
        if self._predict is None:
            self._predict = predictable(optimizer)
        elif self._predict:
            check_predictable(optimizer)

    @override
    def taking(
        self, optimizer: torch.optim.Optimizer, exchanges: Sequence[InFlight]
    ) -> AbstractContextManager[None]:
        if not self._predict:
            return nullcontext()
        missing: dict[int, dict[int, Tensor]] = {}
        for exchange in exchanges:
            for index, kept in exchange.kept.items():
                missing.setdefault(exchange.step, {})[index] = kept["own"]
        return predicted(optimizer, self._buckets, list(missing.values()))

    @override
    def give(self, index: int, transfer: Transfer, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The bucket itself, or a copy where it is needed again."""
        assert isinstance(transfer.merge, Replace)
        gradient = self._buckets.flat(index)
        if transfer.due_step == step:
            return gradient, {}
        kept = {"own": gradient.clone()}
        if transfer.merge.correction:
            kept["at"] = self._buckets.weights(index)
        return kept["own"].clone(), kept

    @override
    def put(self, index: int, exchange: InFlight, mean: Tensor | None) -> None:
        """Replaces the gradient by the mean, corrected where the parameters have moved; does nothing without a mean."""
        assert isinstance(exchange.transfer.merge, Replace)
        if mean is None:
            return
        if "at" in exchange.kept[index]:
            moved = self._buckets.weights(index).sub_(exchange.kept[index]["at"])
            mean = mean + exchange.transfer.merge.correction * mean * mean * moved
        self._buckets.load(index, mean, exchange.unused.get(index, ()), exchange.never.get(index, ()))

    @override
    def steps(self, *, merged: bool, finite: bool) -> bool:
        del finite
        return merged

    @override
    def diverged(self, *, pending: bool) -> bool:
        del pending
        return False
