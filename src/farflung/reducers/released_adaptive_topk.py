"""Adaptive Top-k as the code does it that its authors released."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs.options import density_option, floating
from farflung.codecs.selection import largest
from farflung.codecs.sparse import Sparse, add_entries
from farflung.errors import ConfigError
from farflung.options import number_option, whole_option
from farflung.reducers.adaptive_topk import compressed_share, counted
from farflung.reducers.journeys import Exchange, Gathered, Journey, Parcel, Summed
from farflung.reducers.methods import method_of_rounds
from farflung.reducers.rounds import check_rounds
from farflung.reducers.weights import numerator, reduced, side_of
from farflung.types import (
    Channel,
    CodecState,
    CodingCost,
    Contribution,
    Json,
    Payload,
    Reduced,
    Seeds,
    State,
    StateSlot,
    TensorSpec,
)

__all__ = ["ReleasedAdaptiveTopK"]


@dataclass(frozen=True, slots=True)
class ReleasedAdaptiveTopK:
    r"""Sends the largest entries of each parameter if most replicas would, else the whole gradient.

    For comparison with :class:`farflung.reducers.AdaptiveTopK`, from which it differs as the released code differs
    from the paper: k entries of each parameter are kept, not of the whole; what is left out is measured by norms, of
    the gradient g alone and of the largest entries of gradient and residual c, summed over the parameters,

    .. math:: \rho_i = \Big|\sum_t \|g_{i,t}\| - \sum_t \|\mathrm{top}_k(c_{i,t})\|\Big| \Big/ \sum_t \|g_{i,t}\|

    and averaged over all steps of an epoch so far. Each replica votes by its own average, in a round of its own before
    the gradient's; half of them, rounded down, are enough. The residual is what the largest entries leave out in
    dense steps too, although these have sent all of the gradient: part of it is sent twice.

    Args:
      density: fraction of each parameter's entries, rounded down, that are sent; one at least.
      threshold: :math:`\delta`, the most that may be left out on average.
      epoch_steps: steps after which the average begins anew; ``None``: never.
      collective: of votes and dense steps, a name in :data:`farflung.comm.COLLECTIVES`.

    Raises:
      ConfigError: an option out of its range.
      UnknownName: no such collective.
      Unsupported: collective ``native``, which cannot carry Top-k.

    References: the code published with Tyagi & Swany 2022 (ScaDLES).
    """

    density: float = 0.1
    threshold: float = 0.3
    epoch_steps: int | None = None
    collective: str = "direct"
    method: str = field(init=False, repr=False, compare=False)
    """What the costs of its arithmetic are called by."""

    def __post_init__(self) -> None:
        name = "released_adaptive_topk"
        density_option(name, self.density)
        number_option(name, "threshold", self.threshold, 0)
        if self.epoch_steps is not None:
            whole_option(name, "epoch_steps", self.epoch_steps, 1)
        check_rounds(name, self.collective)
        object.__setattr__(self, "method", method_of_rounds(name, self))

    def check(self, specs: Sequence[TensorSpec], steps: int | None = None) -> None:
        """Refuses a gradient in several buckets.

        Raises:
          ConfigError: there are several.
        """
        del steps
        if len(specs) > 1:
            raise ConfigError(
                f"released_adaptive_topk: votes on the whole gradient, which has to be in one bucket, and there are "
                f"{len(specs)}: raise bucket_nbytes, or take adaptive_topk where buckets are DistributedDataParallel's"
            )

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """No residual, and nothing averaged.

        Raises:
          Unsupported: the tensor is not floating.
        """
        del seeds
        floating("released_adaptive_topk", spec)
        runs = [[part.start, part.numel] for part in spec.parts] or [[0, spec.numel]]
        local = {"residual": torch.zeros(spec.numel, dtype=spec.dtype), "left_out": 0.0, "averaged": 0}
        return CodecState({"runs": runs, "steps": 0, "compressed": 0}, local)

    async def reduce(self, channel: Channel, slot: StateSlot, own: Contribution, *, step: int) -> Reduced:
        """A round of votes, then the gradient."""
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
        _, votes = await Exchange(channel, self.collective, vote, step).sum(tensor.new_empty(0))
        compress = float(votes) >= channel.size // 2
        exchange = Exchange(channel, self.collective, side_of(own), step)
        if compress:
            parcel = Parcel(entries, self.method, CodecState(), fed, Seeds(0, 0))
            journey: Journey = Gathered(exchange, parcel)
        else:
            journey = Summed(exchange, CodecState(), tensor)
        result = reduced(channel, *await journey.finish())

        def learn(now: CodecState) -> CodecState:
            return CodecState(counted(now.shared, compress), now.local)

        return Reduced(result.mean, result.weight, result.rider, learn)

    def report(self, states: Sequence[State]) -> Mapping[str, Json]:
        """``cnc``: exchanges that were compressed over all of them."""
        return {"cnc": compressed_share(states)}

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
