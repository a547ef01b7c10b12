"""Top-k if it keeps enough of the gradient, else the dense gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs import ErrorFeedback, TopK
from farflung.codecs.base import SparseCodec, check_floating, get_nested_state, with_nested_state
from farflung.codecs.selection import count_kept, find_largest
from farflung.errors import ConfigError
from farflung.options import check_choice, check_fraction, check_integer, check_number
from farflung.reducers.aggregation import CodecExchange, start_all_gather
from farflung.reducers.base import (
    build_result,
    check_rounds,
    compute_numerator,
    format_codec,
    format_reducer,
    get_numerator_spec,
    pack_metadata,
)
from farflung.types import (
    Channel,
    CodecState,
    Contribution,
    Json,
    Payload,
    Reducer,
    ReduceResult,
    Seeds,
    State,
    StateSlot,
    TensorSpec,
)

__all__ = ["AdaptiveTopK"]


@dataclass(frozen=True, slots=True)
class AdaptiveTopK(Reducer):
    r"""Reducer that sends the largest entries of a gradient if they leave out little, else all entries.

    The replicas' gradients p, with residuals added, leave out this share of their squares:

    .. math:: \rho = 1 - \sum_i \|\mathrm{top}_k(p_i)\|^2 \Big/ \sum_i \|p_i\|^2

    If its exponential average is at most ``threshold``, each replica sends its largest entries to all others and keeps
    the remainder as residual. Otherwise the collective sums gradients plus residuals in full.

    Args:
      density: Fraction of the entries of a bucket that is sent; of each parameter with the rule ``released``.
      threshold: :math:`\delta`, the largest share that may be left out.
      smoothing: Weight of the newest share in the average, in (0, 1]. Not for the rule ``released``.
      decide: ``"last"`` by the gradient of the previous step, ``"bucket"`` by each bucket's, ``"exact"`` by this step,
        which takes one more delay. ``"exact"`` and the rule ``released``, which has no choice, need a single bucket.
      collective: Collective of dense steps and votes, a name in :data:`farflung.comm.COLLECTIVES`.
      rule: ``"paper"`` or ``"released"``, the rule of the code released with the paper.
      epoch_steps: Steps after which the average of the rule ``released`` restarts; None for never.

    Raises:
      ConfigError: An option is out of range, or belongs to the other rule.
      UnknownName: There is no such collective.
      Unsupported: Collective ``native``, which cannot carry Top-k.

    References: Tyagi & Swany 2022 (ScaDLES), section IV-D. Residuals in dense steps, and ``decide``, are ours.
    """

    density: float = 0.1
    threshold: float = 0.3
    smoothing: float = 0.1
    decide: Literal["last", "bucket", "exact"] = "last"
    collective: str = "direct"
    rule: Literal["paper", "released"] = "paper"
    epoch_steps: int | None = None

    def __post_init__(self) -> None:
        name = "adaptive_topk"
        check_fraction(name, "density", self.density)
        check_number(name, "threshold", self.threshold, 0)
        check_fraction(name, "smoothing", self.smoothing)
        check_choice(name, "decide", self.decide, ("last", "bucket", "exact"))
        check_choice(name, "rule", self.rule, ("paper", "released"))
        if self.rule == "released" and (self.smoothing, self.decide) != (0.1, "last"):
            raise ConfigError(f"{name}: smoothing and decide are not of rule='released'")
        if self.rule == "paper" and self.epoch_steps is not None:
            raise ConfigError(f"{name}: epoch_steps is only for rule='released'")
        if self.epoch_steps is not None:
            check_integer(name, "epoch_steps", self.epoch_steps, 1)
        check_rounds(name, self.collective)

    @property
    def method(self) -> str:
        """Name of the arithmetic for coding costs."""
        return format_codec(self._codec) if self.rule == "paper" else format_reducer(self)

    @property
    def _codec(self) -> ErrorFeedback:
        return ErrorFeedback(TopK(self.density))

    @property
    def _needs_extra_round(self) -> bool:
        """Returns True if numbers of the whole gradient are exchanged before it."""
        return self.rule == "released" or self.decide == "exact"

    @override
    def check(self, specs: Sequence[TensorSpec], steps: int | None = None) -> None:
        """Checks that there is one bucket if the decision is on the whole gradient.

        Raises:
          ConfigError: There are several buckets.
        """
        if len(specs) > 1 and self._needs_extra_round:
            option = "rule='released'" if self.rule == "released" else "decide='exact'"
            raise ConfigError(
                f"adaptive_topk: {option} needs the whole gradient in one bucket, and there are {len(specs)}: raise "
                "bucket_nbytes, or use decide='last' where buckets are DistributedDataParallel's"
            )

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns a state with a zero residual, whose first step is dense.

        Raises:
          Unsupported: The tensor is not floating.
        """
        spec = get_numerator_spec(spec)
        check_floating("adaptive_topk", spec)
        if self.rule == "released":
            runs = [[part.start, part.numel] for part in spec.spans] or [[0, spec.numel]]
            local = {"residual": torch.zeros(spec.numel, dtype=spec.dtype), "left_out": 0.0, "averaged": 0}
            return CodecState({"runs": runs, "steps": 0, "compressed": 0}, local)
        shared = {"left_out": None, "compress": False, "sums": [0.0, 0.0], "compressed": 0, "steps": 0}
        return with_nested_state(CodecState(shared), "codec", self._codec.init(spec, seeds))

    @override
    def list_summed_nbytes(self, spec: TensorSpec, size: int) -> Sequence[int]:
        """Returns the bytes of a dense step; numbers of an extra round are metadata of an empty tensor."""
        return (0, spec.nbytes) if self._needs_extra_round else (spec.nbytes,)

    @override
    async def reduce(
        self, channel: Channel, slot: StateSlot, contribution: Contribution, *, step: int
    ) -> ReduceResult:
        rule = self._reduce_released if self.rule == "released" else self._reduce_by_shared_decision
        return await rule(channel, slot, contribution, step)

    @override
    def report(self, shared_states: Sequence[State]) -> Mapping[str, Json]:
        """Returns ``cnc`` of Tyagi & Swany 2022: the share of exchanges that were compressed, over all buckets."""
        steps = sum(state["steps"] for state in shared_states)
        return {"cnc": sum(state["compressed"] for state in shared_states) / steps if steps else 0.0}

    async def _reduce_by_shared_decision(
        self, channel: Channel, slot: StateSlot, contribution: Contribution, step: int
    ) -> ReduceResult:
        """Sends the largest entries or all, as all ranks decided by earlier norms, or by this step's if exact."""
        tensor, method, state = compute_numerator(channel, contribution), self.method, slot.state
        channel.charge("norms", tensor.numel(), method)
        norms = self._compute_norms(state, tensor)
        shared = state.shared
        if self.decide == "exact":
            _, sums = await CodecExchange(channel, self.collective, norms, step).sum(tensor.new_empty(0))
            shared = self._with_share(shared, sums.tolist())
        packed_metadata = torch.cat((pack_metadata(contribution), norms))
        inner = get_nested_state(slot.state, "codec")
        exchange = CodecExchange(channel, self.collective, packed_metadata, step, contribution.tensor.dtype)
        if shared["compress"]:
            path = start_all_gather(exchange, self._codec, method, inner, tensor)
            summed, inner = path.finish(), path.state
        else:
            channel.charge("add", tensor.numel())
            tensor, inner = self._codec.flush(inner, tensor)
            summed = exchange.sum_dense(tensor)
        slot.state = with_nested_state(slot.state, "codec", inner)
        result = build_result(channel, *await summed, contribution.tensor.dtype)
        metadata, sums = result.metadata.split([len(contribution.metadata), len(norms)])
        return replace(
            result,
            metadata=metadata,
            update_state=partial(self._update_state, is_compressed=shared["compress"], sums=sums.tolist()),
            update_all_states=self._update_all_states if self.decide == "last" else None,
        )

    def _compute_norms(self, state: CodecState, tensor: Tensor) -> Tensor:
        """Computes the squared norms of tensor plus residual, and of its largest entries, in float64."""
        accumulated = tensor + state.local["codec"]["residual"].to(tensor.device)
        largest = accumulated[find_largest(accumulated, count_kept(accumulated.numel(), self.density))]
        return torch.stack([accumulated.double().square().sum(), largest.double().square().sum()]).cpu()

    def _update_state(self, state: CodecState, *, is_compressed: bool, sums: list[float]) -> CodecState:
        shared = {**_record_exchange(state, is_compressed).shared, "sums": sums}
        return CodecState(shared if self.decide == "last" else self._with_share(shared, sums), state.local)

    def _update_all_states(self, states: Mapping[int, CodecState]) -> Mapping[int, CodecState]:
        """Returns all states with the next decision, made from squared norms summed over all buckets."""
        sums = [
            math.fsum(numbers)
            for numbers in zip(*(state.shared["sums"] for state in states.values()), strict=True)
        ]
        return {
            number: CodecState(self._with_share(state.shared, sums), state.local)
            for number, state in states.items()
        }

    def _with_share(self, shared: State, sums: Sequence[float]) -> State:
        """Returns a state with one more share in the average; a non-finite or zero sum is skipped."""
        total, largest = sums
        if not (math.isfinite(total) and total > 0):
            return shared
        share, average = 1.0 - largest / total, shared["left_out"]
        left_out = share if average is None else average + self.smoothing * (share - average)
        return {**shared, "left_out": left_out, "compress": left_out <= self.threshold}

    async def _reduce_released(
        self, channel: Channel, slot: StateSlot, contribution: Contribution, step: int
    ) -> ReduceResult:
        tensor = compute_numerator(channel, contribution)
        shared = slot.state.shared
        local = slot.state.local
        method = self.method
        channel.charge("select", tensor.numel(), method)
        accumulated, chosen, left_out = self._select(shared["runs"], tensor, local["residual"])
        num_steps = 0 if self.epoch_steps and step % self.epoch_steps == 0 else local["averaged"]
        mean = (num_steps * local["left_out"] + left_out) / (num_steps + 1) if num_steps else left_out
        channel.charge("residual", tensor.numel(), method)
        residual = accumulated.index_fill(0, chosen, 0.0).nan_to_num_(0.0, 0.0, 0.0)
        slot.state = CodecState(shared, {"residual": residual, "left_out": mean, "averaged": num_steps + 1})
        vote = torch.tensor([float(mean <= self.threshold)], dtype=torch.float64)
        _, num_votes = await CodecExchange(channel, self.collective, vote, step).sum(tensor.new_empty(0))
        should_compress = float(num_votes) >= channel.size // 2
        exchange = CodecExchange(
            channel, self.collective, pack_metadata(contribution), step, contribution.tensor.dtype
        )
        if should_compress:
            summed = start_all_gather(
                exchange, _FixedEntries(chosen), method, CodecState(), accumulated
            ).finish()
        else:
            summed = exchange.sum_dense(tensor)
        result = build_result(channel, *await summed, contribution.tensor.dtype)
        return replace(result, update_state=partial(_record_exchange, is_compressed=should_compress))

    def _select(
        self, runs: Sequence[Sequence[int]], tensor: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor, float]:
        """Returns gradient plus residual, the indices of its largest entries, and the share they leave out."""
        accumulated = tensor + residual.to(tensor.device)
        chosen, total_norm, largest_norm = [], 0.0, 0.0
        for start, length in runs:
            piece = accumulated[start : start + length]
            indices = find_largest(piece, min(length, max(1, int(self.density * length))))
            total_norm += float(tensor[start : start + length].norm())
            largest_norm += float(piece[indices].norm())
            chosen.append(indices + start)
        left_out = abs(total_norm - largest_norm) / total_norm if total_norm else 0.0
        return accumulated, torch.cat(chosen), left_out if math.isfinite(left_out) else 1.0


def _record_exchange(state: CodecState, is_compressed: bool) -> CodecState:
    """Records one exchange in the CNC ratio."""
    shared = state.shared
    counts = {"steps": shared["steps"] + 1, "compressed": shared["compressed"] + is_compressed}
    return CodecState({**shared, **counts}, state.local)


@dataclass(frozen=True, slots=True, eq=False)
class _FixedEntries(SparseCodec):
    """Codec that sends given entries.

    Args:
      indices: Ascending indices of the entries.
    """

    indices: Tensor

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        return Payload((grad[self.indices], self.indices.to(torch.int32))), state
