"""Top-k where it keeps enough of the gradient, and the whole gradient elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs import ErrorFeedback, TopK
from farflung.codecs.base import Sparse, add_entries, density_option, floating
from farflung.codecs.selection import kept, largest
from farflung.errors import ConfigError
from farflung.options import number_option, part_option, whole_option
from farflung.reducers.aggregation import AggregationPath, Exchange, Gathered, Parcel, Summed
from farflung.reducers.base import (
    carried_spec,
    check_rounds,
    method_of,
    method_of_rounds,
    numerator,
    reduced,
    side_of,
)
from farflung.types import (
    Channel,
    CodecState,
    CodingCost,
    Contribution,
    Json,
    Payload,
    Reduced,
    Reducer,
    Seeds,
    State,
    StateSlot,
    TensorSpec,
)

__all__ = ["AdaptiveTopK"]

_NUMBERS = 2
"""That a replica says of its tensor: squared norms of all of it, and of its largest entries."""


@dataclass(frozen=True, slots=True)
class AdaptiveTopK(Reducer):
    r"""Sends the largest entries of a gradient if little is left out, else all of them.

    With the residual added, the replicas' gradients p leave out the share

    .. math:: \rho = 1 - \sum_i \|\mathrm{top}_k(p_i)\|^2 \Big/ \sum_i \|p_i\|^2

    of their squares. Where its exponential average is at most ``threshold``, each replica sends its largest entries to
    all others and keeps the rest as residual; otherwise the collective sums gradients and residuals as they are, and
    nothing is kept.

    All replicas decide alike, from numbers that ride on the exchanges. By default they are those of the step before,
    of the whole gradient, so that no exchange waits for them; the first step is dense.

    The rule ``released`` is that of the code released with the paper, for comparison. It keeps k entries of each
    parameter, not of the whole. The share left out is measured by norms, of the gradient g alone and of the largest
    entries of gradient and residual c, summed over the parameters,

    .. math:: \rho_i = \Big|\sum_t \|g_{i,t}\| - \sum_t \|\mathrm{top}_k(c_{i,t})\|\Big| \Big/ \sum_t \|g_{i,t}\|

    and averaged over all steps of an epoch so far. Each replica votes by its own average, in a round of its own before
    the gradient's; half of the replicas, rounded down, are enough. The residual is the rest beside the largest entries
    in dense steps too, although these have sent all of the gradient: part of it is sent twice.

    Args:
      density: fraction of the entries of a bucket that are sent; with the rule ``released`` of each parameter's.
      threshold: :math:`\delta`, the most that may be left out.
      smoothing: weight of the newest share in the average, in (0, 1]; 1: it alone. Not of the rule ``released``.
      decide: ``"last"`` by the whole gradient of the step before, ``"bucket"`` by each bucket's own of then,
        ``"exact"`` by this step's: two numbers travel first, one delay more, and the run must have one bucket. Not of
        the rule ``released``, which must have one bucket too.
      collective: of dense steps and votes, a name in :data:`farflung.comm.COLLECTIVES`.
      rule: ``"paper"`` or ``"released"``.
      epoch_steps: with the rule ``released``, steps after which the average begins afresh; ``None``: never.

    Raises:
      ConfigError: an option out of its range, or of the other rule.
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
    rule: Literal["paper", "released"] = "paper"
    epoch_steps: int | None = None
    method: str = field(init=False, repr=False, compare=False)
    """Names the costs of the arithmetic."""
    _codec: ErrorFeedback = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = "adaptive_topk"
        density_option(name, self.density)
        number_option(name, "threshold", self.threshold, 0)
        part_option(name, "smoothing", self.smoothing)
        if self.decide not in ("last", "bucket", "exact"):
            raise ConfigError(f"{name}: decide {self.decide!r} must be 'last', 'bucket' or 'exact'")
        if self.rule not in ("paper", "released"):
            raise ConfigError(f"{name}: rule {self.rule!r} must be 'paper' or 'released'")
        if self.rule == "released" and (self.smoothing, self.decide) != (0.1, "last"):
            raise ConfigError(f"{name}: smoothing and decide are not of rule='released'")
        if self.rule == "paper" and self.epoch_steps is not None:
            raise ConfigError(f"{name}: epoch_steps is of rule='released' alone")
        if self.epoch_steps is not None:
            whole_option(name, "epoch_steps", self.epoch_steps, 1)
        check_rounds(name, self.collective)
        codec = ErrorFeedback(TopK(self.density))
        object.__setattr__(self, "_codec", codec)
        method = method_of(codec) if self.rule == "paper" else method_of_rounds(name, self)
        object.__setattr__(self, "method", method)

    @override
    def check(self, specs: Sequence[TensorSpec], steps: int | None = None) -> None:
        """Refuses several buckets where the decision is on the whole gradient.

        Raises:
          ConfigError: there are several.
        """
        del steps
        if len(specs) > 1 and (self.rule == "released" or self.decide == "exact"):
            what = "rule='released'" if self.rule == "released" else "decide='exact'"
            raise ConfigError(
                f"adaptive_topk: {what} needs the whole gradient in one bucket, and there are {len(specs)}: raise "
                "bucket_nbytes, or use decide='last' where buckets are DistributedDataParallel's"
            )

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Dense at first, with a residual of zero.

        Raises:
          Unsupported: the tensor is not floating.
        """
        spec = carried_spec(spec)
        if self.rule == "released":
            floating("adaptive_topk", spec)
            runs = [[part.start, part.numel] for part in spec.parts] or [[0, spec.numel]]
            local = {"residual": torch.zeros(spec.numel, dtype=spec.dtype), "left_out": 0.0, "averaged": 0}
            return CodecState({"runs": runs, "steps": 0, "compressed": 0}, local)
        inner = self._codec.init(spec, seeds)
        known = {"left_out": None, "compress": False, "seen": [0.0] * _NUMBERS, "compressed": 0, "steps": 0}
        return CodecState({**known, "codec": inner.shared}, inner.local)

    @override
    def summed_nbytes(self, spec: TensorSpec, size: int) -> Sequence[int]:
        """Those of a dense step; numbers that travel before it are summed beside an empty tensor."""
        return (0, spec.nbytes) if self.rule == "released" or self.decide == "exact" else (spec.nbytes,)

    @override
    async def reduce(self, channel: Channel, slot: StateSlot, own: Contribution, *, step: int) -> Reduced:
        """One exchange; with the rule ``released`` a round of votes before it."""
        rule = self._released if self.rule == "released" else self._paper
        return await rule(channel, slot, own, step)

    @override
    def report(self, states: Sequence[State]) -> Mapping[str, Json]:
        """``cnc`` of Tyagi & Swany 2022: exchanges that were compressed over all of them, of all buckets."""
        steps = sum(state["steps"] for state in states)
        return {"cnc": sum(state["compressed"] for state in states) / steps if steps else 0.0}

    async def _paper(self, channel: Channel, slot: StateSlot, own: Contribution, step: int) -> Reduced:
        tensor = numerator(channel, own)
        cost = CodingCost("norms", self.method, tensor.numel())
        said = channel.compute(cost, partial(self._norms, slot.state, tensor))
        shared = slot.state.shared
        if self.decide == "exact":
            first = Exchange(channel, self.collective, said, step)
            _, sums = await first.sum(tensor.new_empty(0))
            shared = self._with(shared, sums.tolist())
        side = torch.cat((side_of(own), said))
        exchange = Exchange(channel, self.collective, side, step, own.tensor.dtype)
        path = self._started(exchange, slot, tensor, shared["compress"])
        total, side = await path.finish()
        result = reduced(channel, total, side, own.tensor.dtype)
        rider, sums = result.rider.split([len(own.rider), _NUMBERS])
        return replace(
            result,
            rider=rider,
            learn=partial(self._learned, compressed=shared["compress"], sums=sums.tolist()),
            learn_together=self._decided if self.decide == "last" else None,
        )

    def _started(
        self, exchange: Exchange, slot: StateSlot, tensor: Tensor, compress: bool
    ) -> AggregationPath:
        state = CodecState(slot.state.shared["codec"], slot.state.local)
        if compress:
            path: AggregationPath = Gathered(
                exchange, Parcel(self._codec, self.method, state, tensor, Seeds(0, 0))
            )
            state = path.state
        else:
            cost = CodingCost("add", "", tensor.numel())
            tensor, state = exchange.channel.compute(cost, partial(self._codec.flush, state, tensor))
            path = Summed(exchange, state, tensor)
        slot.state = CodecState({**slot.state.shared, "codec": state.shared}, state.local)
        return path

    def _norms(self, state: CodecState, tensor: Tensor) -> Tensor:
        """Squared norms of the tensor with its residual, and of the largest entries of that; float64."""
        whole = tensor + state.local["residual"].to(tensor.device)
        entries = whole[largest(whole, kept(whole.numel(), self.density))]
        return torch.stack([whole.double().square().sum(), entries.double().square().sum()]).cpu()

    def _learned(self, now: CodecState, *, compressed: bool, sums: list[float]) -> CodecState:
        shared = {**_counted(now.shared, compressed), "seen": sums}
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

    async def _released(self, channel: Channel, slot: StateSlot, own: Contribution, step: int) -> Reduced:
        tensor, shared, local = numerator(channel, own), slot.state.shared, slot.state.local
        cost = partial(CodingCost, method=self.method, numel=tensor.numel())
        fed, chosen, left_out = channel.compute(
            cost("select"), partial(self._selected, shared["runs"], tensor, local["residual"])
        )
        averaged = 0 if self.epoch_steps and step % self.epoch_steps == 0 else local["averaged"]
        mean = (averaged * local["left_out"] + left_out) / (averaged + 1) if averaged else left_out
        entries = _Entries(chosen)
        residual = channel.compute(cost("residual"), partial(entries.without, fed))
        slot.state = CodecState(shared, {"residual": residual, "left_out": mean, "averaged": averaged + 1})

        vote = torch.tensor([float(mean <= self.threshold)], dtype=torch.float64)
        _, in_favour = await Exchange(channel, self.collective, vote, step).sum(tensor.new_empty(0))
        compress = float(in_favour) >= channel.size // 2
        exchange = Exchange(channel, self.collective, side_of(own), step, own.tensor.dtype)
        if compress:
            parcel = Parcel(entries, self.method, CodecState(), fed, Seeds(0, 0))
            path: AggregationPath = Gathered(exchange, parcel)
        else:
            path = Summed(exchange, CodecState(), tensor)
        result = reduced(channel, *await path.finish(), own.tensor.dtype)

        def learn(now: CodecState) -> CodecState:
            return CodecState(_counted(now.shared, compress), now.local)

        return Reduced(result.mean, result.weight, result.rider, learn)

    def _selected(
        self, runs: Sequence[Sequence[int]], tensor: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor, float]:
        """Gradient and residual, which of their entries are the largest, and what these leave out."""
        fed = tensor + residual.to(tensor.device)
        chosen, whole, of_largest = [], 0.0, 0.0
        for start, length in runs:
            piece = fed[start : start + length]
            places = largest(piece, min(length, max(1, int(self.density * length))))
            whole += float(tensor[start : start + length].norm())
            of_largest += float(piece[places].norm())
            chosen.append(places + start)
        left_out = abs(whole - of_largest) / whole if whole else 0.0
        return fed, torch.cat(chosen), left_out if math.isfinite(left_out) else 1.0


def _counted(state: State, compressed: bool) -> State:
    """The state with one exchange more in the CNC ratio."""
    return {**state, "steps": state["steps"] + 1, "compressed": state["compressed"] + compressed}


@dataclass(frozen=True, slots=True, eq=False)
class _Entries(Sparse):
    """Sends these entries.

    Args:
      places: where they are, ascending.
    """

    places: Tensor

    unbiased: ClassVar[bool] = False
    stateless: ClassVar[bool] = True
    per_hop: ClassVar[bool] = False

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        del spec, seeds
        return CodecState()

    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        del step, count
        return Payload((grad[self.places], self.places.to(torch.int32))), state

    @override
    def accumulate(
        self, state: CodecState, payload: Payload, total: Tensor, *, step: int, count: int, alpha: float = 1.0
    ) -> None:
        del state, step, count
        values, places = payload.tensors()
        add_entries(total, values, places, alpha)

    def linear(self, state: CodecState) -> bool:
        del state
        return False

    def without(self, tensor: Tensor) -> Tensor:
        """The other entries; 0 where one is not finite."""
        rest = tensor.clone()
        rest[self.places] = 0.0
        return rest.nan_to_num_(0.0, 0.0, 0.0)
