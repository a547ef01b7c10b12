"""Reducer around a codec: payloads are summed by the collective, gathered, or sent in two phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs import QSGD, CodecRoute, ErrorFeedback, Identity, Int8, RoutedCodec, Sign
from farflung.codecs.base import check_codecs, get_nested_state, list_summed_specs, with_nested_state
from farflung.codecs.feedback import has_residual
from farflung.codecs.routed import gather_runs, scatter_runs
from farflung.comm import find_collective
from farflung.errors import Unsupported
from farflung.options import check_choice
from farflung.reducers.aggregation import (
    CodecExchange,
    StartedAggregation,
    Sums,
    check_segmentable,
    start_all_gather,
    start_hops,
    start_linear,
    start_two_phases,
    strip_feedback,
)
from farflung.reducers.base import (
    build_result,
    compute_numerator,
    format_codec,
    get_divisor,
    get_numerator_spec,
    pack_metadata,
)
from farflung.seeding import derive_seed
from farflung.types import (
    Channel,
    Codec,
    CodecState,
    Contribution,
    Reducer,
    ReduceResult,
    Seeds,
    StateSlot,
    TensorSpec,
)

__all__ = ["CodecReducer"]

TWO_PHASES_NUMEL = 1 << 21
"""Length of a tensor from which ``auto`` takes two phases: with 4 bits a payload of 1 MB, so that bytes count more than
delays (our choice)."""


@dataclass(frozen=True, slots=True)
class CodecReducer(Reducer):
    r"""Reducer of the weighted mean of encoded gradients.

    .. math:: \bar g = \sum_i D(C(w_i g_i)) \,/\, \sum_i w_i

    Numerator and sum of weights travel in one exchange. The numerator is encoded, so residuals are in its units. With
    codec identity the collective sums the tensor. A linear codec encodes once, and the collective sums the payloads.
    The parts of :func:`farflung.codecs.by_size` and :func:`farflung.codecs.by_role` travel in parallel.

    Args:
      codec: Codec of the gradients.
      collective: Name in :data:`farflung.comm.COLLECTIVES`; matters for sums and hops alone.
      phases: Exchange pattern of a codec that is not linear. Segments, of owners or of hops, need a codec that keeps
        no state but seeds, with or without error feedback.

        * ``"gather"``: encoded once and sent to all, in one delay; traffic grows with the number of ranks.
        * ``"two"``: shards go to owners, which sum and encode again; two delays, and traffic does not grow.
        * ``"hops"``: partial sums are encoded again on every hop of the collective; a single replica sends nothing.
        * ``"auto"``: hops if :attr:`farflung.types.Codec.can_requantize`; two phases for error feedback around a codec
          that keeps every entry, between three or more ranks, from :data:`TWO_PHASES_NUMEL` numbers on; else gather.

    Raises:
      UnknownName: There is no such collective.
      ConfigError: There are no such phases.
      Unsupported: The collective cannot carry the codec.
    """

    is_repeatable: ClassVar[bool] = True

    codec: Codec = field(default_factory=Identity)
    collective: str = "direct"
    phases: Literal["auto", "gather", "two", "hops"] = "auto"

    def __post_init__(self) -> None:
        find_collective(self.collective)
        check_choice("codec", "phases", self.phases, ("auto", "gather", "two", "hops"))
        check_codecs("reducer codec", self.codec)

    @property
    @override
    def compresses_matrices(self) -> bool:
        return getattr(self.codec, "compresses_matrices", False)

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns the state of the codec, with seeds if the tensor is cut into segments.

        Raises:
          Unsupported: The codec cannot be carried in this way.
        """
        state = self.codec.init(get_numerator_spec(spec, has_residual=has_residual(self.codec)), seeds)
        self._check(self.codec, state)
        if not self._needs_segment_seeds:
            return state
        return with_nested_state(CodecState({"seed": seeds.shared}, {"seed": seeds.local}), "codec", state)

    @override
    def list_summed_nbytes(self, spec: TensorSpec, size: int) -> Sequence[int]:
        """Lists the bytes of dense tensors and of payloads of linear codecs with a known size."""
        return tuple(_iter_summed_nbytes(self.codec, spec, has_residual(self.codec)))

    @override
    async def reduce(
        self, channel: Channel, slot: StateSlot, contribution: Contribution, *, step: int
    ) -> ReduceResult:
        exchange = CodecExchange(
            channel, self.collective, pack_metadata(contribution), step, contribution.tensor.dtype
        )
        tensor = compute_numerator(channel, contribution, has_residual=has_residual(self.codec))
        if isinstance(self.codec, Identity):
            return build_result(channel, *await exchange.sum_dense(tensor), contribution.tensor.dtype)
        state, seeds = self._unwrap_state(slot.state)
        path = self._start(exchange, self.codec, state, tensor, seeds)
        slot.state = self._wrap_state(slot.state, path.state)
        total, metadata = await path.finish()
        result = build_result(channel, total, metadata, contribution.tensor.dtype)
        if self.codec.is_stateless and not self._needs_segment_seeds:
            return result
        # By now ``total`` is the mean, in the dtype of the numerators.
        average_factor = get_divisor(metadata) / channel.size

        def learn(state: CodecState) -> CodecState:
            channel.charge("learn", total.numel(), format_codec(self.codec))
            average = total if average_factor == 1.0 else total * average_factor
            return self._wrap_state(state, path.update_state(self._unwrap_state(state)[0], average))

        return replace(result, update_state=learn)

    def _start(
        self, exchange: CodecExchange, codec: Codec, state: CodecState, tensor: Tensor, seeds: Seeds
    ) -> StartedAggregation:
        if isinstance(codec, RoutedCodec):
            return self._start_routes(exchange, codec, state, tensor, seeds)
        if isinstance(codec, Identity):  # of some parameters alone
            return StartedAggregation(state, partial(exchange.sum_dense, tensor))
        path = self._choose_phases(codec, state, tensor.numel(), exchange.channel.size)
        if path == "two" and exchange.channel.size > 1:
            method = format_codec(strip_feedback(codec))
            return start_two_phases(exchange, codec, method, state, tensor, seeds)
        method = format_codec(codec)
        if path == "hops":
            return start_hops(exchange, codec, method, state, tensor, seeds)
        start = start_linear if path == "linear" else start_all_gather
        return start(exchange, codec, method, state, tensor)

    def _start_routes(
        self, exchange: CodecExchange, codec: RoutedCodec, state: CodecState, tensor: Tensor, seeds: Seeds
    ) -> StartedAggregation:
        paths: list[tuple[CodecRoute, StartedAggregation]] = []
        for route in codec.list_routes(state):
            route_seeds = Seeds(derive_seed(seeds.shared, route.name), derive_seed(seeds.local, route.name))
            part = gather_runs(tensor, route.runs)
            paths.append((route, self._start(exchange, route.codec, route.state, part, route_seeds)))

        async def finish() -> Sums:
            """Waits for all parts; those already sent come last."""
            metadata_by_route = []
            for route, path in sorted(paths, key=lambda pair: pair[1].is_sent):
                total, metadata = await path.finish()
                scatter_runs(tensor, route.runs, total)
                metadata_by_route.append(metadata)
            return tensor, metadata_by_route[0]

        def learn(state: CodecState, average: Tensor) -> CodecState:
            states = {
                route.name: path.update_state(route.state, gather_runs(average, route.runs))
                for route, (_, path) in zip(codec.list_routes(state), paths, strict=True)
            }
            return codec.with_states(state, states)

        states = {route.name: path.state for route, path in paths}
        return StartedAggregation(codec.with_states(state, states), finish, learn)

    def _choose_phases(self, codec: Codec, state: CodecState, numel: int, size: int) -> str:
        if codec.is_linear(state):
            return "linear"
        if self.phases != "auto":
            return self.phases
        if _has_quantizer(codec) and numel >= TWO_PHASES_NUMEL and size > 2:
            return "two"
        return "hops" if codec.can_requantize else "gather"

    def _check(self, codec: Codec, state: CodecState) -> None:
        is_by_backend = find_collective(self.collective).is_native
        if isinstance(codec, RoutedCodec):
            routes = codec.list_routes(state)
            if is_by_backend and len(routes) > 1:
                raise Unsupported(
                    f"collective {self.collective!r} matches sums by their order, which the parts of codec {codec!r} "
                    "do not have: use ring or direct"
                )
            for route in routes:
                self._check(route.codec, route.state)
            return
        path = self._choose_phases(codec, state, numel=0, size=1)
        if path == "linear":
            return
        if is_by_backend:
            raise Unsupported(
                f"collective {self.collective!r} cannot carry a codec such as {codec!r}: use ring or direct"
            )
        if path != "gather":
            check_segmentable(codec, state)

    @property
    def _needs_segment_seeds(self) -> bool:
        """Returns True if segments may need seeds; codecs that ``auto`` sends by hops are stateless."""
        return self.phases in ("two", "hops") or (self.phases == "auto" and _has_quantizer(self.codec))

    def _unwrap_state(self, state: CodecState) -> tuple[CodecState, Seeds]:
        """Returns the state of the codec, and the seeds for segments."""
        if not self._needs_segment_seeds:
            return state, Seeds(0, 0)
        return get_nested_state(state, "codec"), Seeds(state.shared["seed"], state.local["seed"])

    def _wrap_state(self, state: CodecState, inner: CodecState) -> CodecState:
        return with_nested_state(state, "codec", inner) if self._needs_segment_seeds else inner


def _has_quantizer(codec: Codec) -> bool:
    """Returns True for error feedback around a codec that keeps every entry, also of one route only.

    Without error feedback a second encoding adds to the noise, and one of a sum of selected entries drops some.
    """
    if isinstance(codec, RoutedCodec):
        return any(map(_has_quantizer, codec.codecs.values()))
    return isinstance(codec, ErrorFeedback) and isinstance(codec.codec, Int8 | QSGD | Sign)


def _iter_summed_nbytes(codec: Codec, spec: TensorSpec, has_residual: bool) -> Iterator[int]:
    """Yields the bytes of each all-reduce of a tensor's parts."""
    if isinstance(codec, RoutedCodec):
        for name, (part, _) in codec.split_spec(spec).items():
            yield from _iter_summed_nbytes(codec.codecs[name], part, has_residual)
    else:
        nbytes_by_dtype: Counter[torch.dtype] = Counter()
        if not isinstance(codec, Identity):
            spec = get_numerator_spec(spec, has_residual=has_residual)
        for summed in list_summed_specs(codec, spec):
            nbytes_by_dtype[summed.dtype] += summed.nbytes
        yield from nbytes_by_dtype.values()
