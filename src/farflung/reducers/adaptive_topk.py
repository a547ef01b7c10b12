"""Top-k where it keeps enough of the gradient, and the whole gradient elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from farflung.codecs import ErrorFeedback, TopK
from farflung.codecs.options import density_option
from farflung.codecs.selection import kept, largest
from farflung.errors import ConfigError
from farflung.options import number_option, part_option
from farflung.reducers.journeys import Exchange, Gathered, Journey, Parcel, Summed
from farflung.reducers.methods import method_of
from farflung.reducers.rounds import check_rounds
from farflung.reducers.weights import numerator, reduced, side_of
from farflung.types import (
    Channel,
    CodecState,
    CodingCost,
    Contribution,
    Json,
    Reduced,
    Seeds,
    State,
    StateSlot,
    TensorSpec,
)

__all__ = ["AdaptiveTopK", "compressed_share", "counted"]

_NUMBERS = 2
"""That a replica says of its tensor: squared norms of all of it, and of its largest entries."""


def compressed_share(states: Sequence[State]) -> float:
    """The CNC ratio of Tyagi & Swany 2022: exchanges that were compressed over all; 0 before the first."""
    counted = sum(state["steps"] for state in states)
    return sum(state["compressed"] for state in states) / counted if counted else 0.0


def counted(state: State, compressed: bool) -> State:
    """The state with one exchange more for :func:`compressed_share`."""
    return {**state, "steps": state["steps"] + 1, "compressed": state["compressed"] + compressed}


@dataclass(frozen=True, slots=True)
class AdaptiveTopK:
    r"""Sends the largest entries of a gradient if little is left out, else all of them.

    With the residual added, the replicas' gradients p leave out the share

    .. math:: \rho = 1 - \sum_i \|\mathrm{top}_k(p_i)\|^2 \Big/ \sum_i \|p_i\|^2

    of their squares. Where its exponential average is at most ``threshold``, each replica sends its largest entries to
    all others and keeps the rest as residual; otherwise the collective sums gradients and residuals as they are, and
    nothing is kept.

    All replicas decide alike, from numbers that ride on the exchanges. By default they are those of the step before,
    of the whole gradient, so that no exchange waits for them; the first step is dense.

    Args:
      density: fraction of the entries of a bucket that are sent.
      threshold: :math:`\delta`, the most that may be left out.
      smoothing: weight of the newest share in the average, in (0, 1]; 1: it alone.
      decide: ``"last"`` by the whole gradient of the step before, ``"bucket"`` by each bucket's own of then,
        ``"exact"`` by this step's: two numbers travel first, one delay more, and the run must have one bucket.
      collective: of dense steps, a name in :data:`farflung.comm.COLLECTIVES`.

    Raises:
      ConfigError: an option out of its range.
      UnknownName: no such collective.
      Unsupported: collective ``native``, which cannot carry Top-k.

    References: Tyagi & Swany 2022 (ScaDLES), section IV-D, whose window and factor of the average are not stated.
    That a dense step sends the residual, and decisions by the step before, are our choice.
    """

    density: float = 0.1
    threshold: float = 0.3
    smoothing: float = 0.1
    decide: Literal["last", "bucket", "exact"] = "last"
    collective: str = "direct"
    _codec: ErrorFeedback = field(init=False, repr=False, compare=False)
    _method: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = "adaptive_topk"
        density_option(name, self.density)
        number_option(name, "threshold", self.threshold, 0)
        part_option(name, "smoothing", self.smoothing)
        if self.decide not in ("last", "bucket", "exact"):
            raise ConfigError(f"{name}: decide {self.decide!r} must be 'last', 'bucket' or 'exact'")
        check_rounds(name, self.collective)
        codec = ErrorFeedback(TopK(self.density))
        object.__setattr__(self, "_codec", codec)
        object.__setattr__(self, "_method", method_of(codec))

    def check(self, specs: Sequence[TensorSpec], steps: int | None = None) -> None:
        """Refuses an exact decision over several buckets.

        Raises:
          ConfigError: there are several.
        """
        del steps
        if self.decide == "exact" and len(specs) > 1:
            raise ConfigError(
                f"adaptive_topk: decide='exact' needs the whole gradient in one bucket, and there are {len(specs)}: "
                "raise bucket_nbytes, or use decide='last'"
            )

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Dense at first, with a residual of zero.

        Raises:
          Unsupported: the tensor is not floating.
        """
        inner = self._codec.init(spec, seeds)
        known = {"left_out": None, "compress": False, "seen": [0.0] * _NUMBERS, "compressed": 0, "steps": 0}
        return CodecState({**known, "codec": inner.shared}, inner.local)

    async def reduce(self, channel: Channel, slot: StateSlot, own: Contribution, *, step: int) -> Reduced:
        """One exchange."""
        tensor = numerator(channel, own)
        cost = CodingCost("norms", self._method, tensor.numel())
        said = channel.compute(cost, partial(self._norms, slot.state, tensor))
        shared = slot.state.shared
        if self.decide == "exact":
            first = Exchange(channel, self.collective, said, step)
            _, sums = await first.sum(tensor.new_empty(0))
            shared = self._with(shared, sums.tolist())
        side = torch.cat((side_of(own), said))
        journey = self._started(
            Exchange(channel, self.collective, side, step), slot, tensor, shared["compress"]
        )
        total, side = await journey.finish()
        result = reduced(channel, total, side)
        rider, sums = result.rider.split([len(own.rider), _NUMBERS])
        return replace(
            result,
            rider=rider,
            learn=partial(self._learned, compressed=shared["compress"], sums=sums.tolist()),
            learn_together=self._decided if self.decide == "last" else None,
        )

    def report(self, states: Sequence[State]) -> Mapping[str, Json]:
        """``cnc``: exchanges that were compressed over all of them, of all buckets."""
        return {"cnc": compressed_share(states)}

    def _started(self, exchange: Exchange, slot: StateSlot, tensor: Tensor, compress: bool) -> Journey:
        state = CodecState(slot.state.shared["codec"], slot.state.local)
        if compress:
            journey: Journey = Gathered(
                exchange, Parcel(self._codec, self._method, state, tensor, Seeds(0, 0))
            )
            state = journey.state
        else:
            cost = CodingCost("add", "", tensor.numel())
            tensor, state = exchange.channel.compute(cost, partial(self._codec.flush, state, tensor))
            journey = Summed(exchange, state, tensor)
        slot.state = CodecState({**slot.state.shared, "codec": state.shared}, state.local)
        return journey

    def _norms(self, state: CodecState, tensor: Tensor) -> Tensor:
        """Squared norms of the tensor with its residual, and of the largest entries of that; float64."""
        whole = tensor + state.local["residual"].to(tensor.device)
        entries = whole[largest(whole, kept(whole.numel(), self.density))]
        return torch.stack([whole.double().square().sum(), entries.double().square().sum()]).cpu()

    def _learned(self, now: CodecState, *, compressed: bool, sums: list[float]) -> CodecState:
        shared = {**counted(now.shared, compressed), "seen": sums}
        return CodecState(shared if self.decide == "last" else self._with(shared, sums), now.local)

    def _decided(self, states: Mapping[int, CodecState]) -> Mapping[int, CodecState]:
        """All buckets, by the sums of all."""
        sums = [
            math.fsum(numbers)
            for numbers in zip(*(each.shared["seen"] for each in states.values()), strict=True)
        ]
        return {
            number: CodecState(self._with(each.shared, sums), each.local) for number, each in states.items()
        }

    def _with(self, shared: State, sums: Sequence[float]) -> State:
        """With one more share in the average; what is not finite, or zero, teaches nothing."""
        whole, of_largest = sums
        if not (math.isfinite(whole) and whole > 0):
            return shared
        share, before = 1.0 - of_largest / whole, shared["left_out"]
        left_out = share if before is None else before + self.smoothing * (share - before)
        return {**shared, "left_out": left_out, "compress": left_out <= self.threshold}
