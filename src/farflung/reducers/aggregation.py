"""Exchange of one encoded tensor: summed dense, gathered, encoded again on hops, or in two phases."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from farflung.codecs import ErrorFeedback
from farflung.codecs.base import TransformCodec, accumulate, get_nested_state
from farflung.codecs.feedback import with_residual
from farflung.comm import Coding
from farflung.comm.collectives.segments import cut_segments, list_peers, sum_in_order
from farflung.comm.pool import allocate_like
from farflung.comm.staging import copy_to_device
from farflung.errors import Unsupported
from farflung.reducers.base import clamp_finite
from farflung.trees import clone_shared, has_only_seeds, map_tensors
from farflung.types import Channel, Codec, CodecState, Payload, Seeds, Segment, TensorSpec

__all__ = [
    "CodecExchange",
    "StartedAggregation",
    "Sums",
    "check_segmentable",
    "start_all_gather",
    "start_hops",
    "start_linear",
    "start_two_phases",
    "strip_feedback",
]

Sums: TypeAlias = tuple[Tensor, Tensor]
"""Sums of a flat tensor and of the metadata, over all ranks."""


@dataclass(frozen=True, slots=True)
class CodecExchange:
    """Parameters that all paths of one exchange share.

    Args:
      channel: Channel of the exchange.
      collective: Name in :data:`farflung.comm.COLLECTIVES`.
      metadata: float64 numbers, summed in rank order beside the tensor; the first is the weight.
      step: Step passed to the codecs.
      dtype: Dtype of the gradient; None if it equals that of the summed tensors.
    """

    channel: Channel
    collective: str
    metadata: Tensor
    step: int
    dtype: torch.dtype | None = None

    def sum(self, tensor: Tensor, coding: Coding | None = None) -> Awaitable[Sums]:
        """Returns the sums of a flat tensor, which may be overwritten, and of the metadata."""
        all_reduce = self.channel.get_collective(self.collective)
        return all_reduce(self.channel, tensor, self.metadata, coding=coding)

    async def sum_dense(self, tensor: Tensor) -> Sums:
        """Sums a flat tensor, which may be overwritten, in the dtype of the gradient, and the metadata.

        In float16 the tensor is divided by the number of replicas before the sum and multiplied after it, so that
        sums do not overflow if the mean is in range. If all weights are 1, the mean equals that of
        DistributedDataParallel bit for bit. A residual in the tensor is clamped to the range of a gradient.
        """
        if self.dtype is None or self.dtype == tensor.dtype:
            return await self.sum(tensor)
        size, info = self.channel.size, torch.finfo(self.dtype)
        # Each number, and each sum but the first, may be rounded up.
        limit = max(float(self.metadata[0]), 1.0) * info.max / size * (1.0 - (size - 1) * info.eps)
        self.channel.charge("copy", tensor.numel())
        total, metadata = await self.sum(clamp_finite(tensor.mul(1 / size), limit).to(self.dtype))
        self.channel.charge("copy", tensor.numel())
        return tensor.copy_(total).mul_(size), metadata

    def encode(
        self, codec: Codec, method: str, state: CodecState, tensor: Tensor
    ) -> tuple[Payload, CodecState]:
        """Encodes the whole tensor of this rank."""
        self.channel.charge("encode", tensor.numel(), method)
        return codec.encode(state, tensor, step=self.step, count=1)

    def send(self, payloads: Sequence[Payload]) -> int:
        """Sends each other rank its payload and the metadata; returns the hop."""
        hop = self.channel.reserve_hops(1)
        for peer in list_peers(self.channel):
            self.channel.send(Payload((payloads[peer], self.metadata)), peer, hop)
        return hop

    async def recv(
        self, src: int, hop: int, local_payload: Payload, device: torch.device
    ) -> tuple[Payload, Tensor]:
        """Receives a rank's payload on ``device``, and its metadata; returns the local ones for this rank itself."""
        if src == self.channel.rank:
            return local_payload, self.metadata
        expect = (
            *map(TensorSpec.from_tensor, local_payload.iter_tensors()),
            TensorSpec.from_tensor(self.metadata),
        )
        encoded, metadata = (await self.channel.recv(src, hop, expect)).parts
        assert isinstance(encoded, Payload)
        assert isinstance(metadata, Tensor)
        return copy_to_device(encoded, device), metadata


class StartedAggregation(NamedTuple):
    """Started exchange of one tensor.

    Args:
      state: State after encoding.
      finish: Waits for the sums of tensor and metadata, bit-identical on all ranks.
      update_state: Returns the state at the merge of the result, from the sum over the number of ranks.
      is_sent: True if the payload has been sent, so that other parts should finish first.
    """

    state: CodecState
    finish: Callable[[], Awaitable[Sums]]
    update_state: Callable[[CodecState, Tensor], CodecState] = lambda state, average: state
    is_sent: bool = False


def check_segmentable(codec: Codec, state: CodecState) -> None:
    """Checks that a codec can encode segments of a tensor, in two phases or on every hop.

    Raises:
      Unsupported: The codec keeps state of a whole tensor, which a segment does not have.
    """
    if isinstance(codec, ErrorFeedback):
        state = get_nested_state(state, "codec")
    if not has_only_seeds(state):
        raise Unsupported(
            f"codec {strip_feedback(codec)!r} keeps more than seeds between steps and cannot encode segments: "
            "use phases='gather'"
        )


def strip_feedback(codec: Codec) -> Codec:
    """Returns the codec of segments; the path itself applies error feedback."""
    return codec.codec if isinstance(codec, ErrorFeedback) else codec


def start_linear(
    exchange: CodecExchange, codec: Codec, method: str, state: CodecState, tensor: Tensor
) -> StartedAggregation:
    """Encodes once; the collective sums the tensors of the payload, and the sums are decoded."""
    spec = TensorSpec.from_tensor(tensor)
    encoded, state = exchange.encode(codec, method, state, tensor)

    async def finish() -> Sums:
        """Runs one all-reduce for each dtype in the payload, of which there is rarely more than one."""
        parts_by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for part in encoded.iter_tensors():
            parts_by_dtype.setdefault(part.dtype, []).append(part)
        totals: dict[torch.dtype, Iterator[Tensor]] = {}
        metadata = exchange.metadata
        for dtype, parts in parts_by_dtype.items():
            flat = [part.reshape(-1) for part in parts]
            total, metadata = await exchange.sum(flat[0] if len(flat) == 1 else torch.cat(flat))
            totals[dtype] = iter(total.split([len(part) for part in flat]))
        payload = map_tensors(encoded, lambda part: next(totals[part.dtype]).view(part.shape))
        channel = exchange.channel
        channel.charge("decode", spec.numel, method)
        return codec.decode(state, payload, spec, step=exchange.step, count=channel.size), metadata

    return StartedAggregation(state, finish, partial(codec.update_state, step=exchange.step))


def start_all_gather(
    exchange: CodecExchange, codec: Codec, method: str, state: CodecState, tensor: Tensor
) -> StartedAggregation:
    """Starts an aggregation that sends one payload to all ranks, and sums decoded payloads in rank order.

    Takes one delay, but traffic grows with the number of ranks.
    """
    channel = exchange.channel
    payload, state = exchange.encode(codec, method, state, tensor)
    # Peers may still read the payload when the sum overwrites the tensor.
    local_payload = clone_shared(payload, tensor)
    hop = exchange.send([local_payload] * channel.size)

    async def finish() -> Sums:
        """Returns the sums, in rank order whatever the order of arrival."""
        tensor.zero_()
        metadata = torch.zeros_like(exchange.metadata)
        for rank in range(channel.size):
            payload, peer_metadata = await exchange.recv(rank, hop, local_payload, tensor.device)
            channel.charge("accumulate", tensor.numel(), method)
            if isinstance(codec, TransformCodec):
                codec.add_payload(state, payload, tensor)
            else:
                accumulate(codec, state, payload, tensor, step=exchange.step, count=1)
            metadata += peer_metadata
        if not isinstance(codec, TransformCodec):
            return tensor, metadata
        channel.charge("decode", tensor.numel(), method)
        return codec.invert(state, tensor), metadata

    return StartedAggregation(state, finish, partial(codec.update_state, step=exchange.step), is_sent=True)


def start_hops(
    exchange: CodecExchange, codec: Codec, method: str, state: CodecState, tensor: Tensor, seeds: Seeds
) -> StartedAggregation:
    """Encodes partial sums again on every hop of the collective.

    With error feedback the residual is taken out of the state when the exchange starts, and the errors of this
    rank's encodings are added when the result is merged. Nothing is lost or sent twice.

    References: Li et al. 2018 (Pipe-SGD), compression inside AllReduce; error feedback on hops is our choice.
    """
    inner, unsent = strip_feedback(codec), None
    if isinstance(codec, ErrorFeedback):
        residual = state.local["residual"]
        exchange.channel.charge("add", tensor.numel())
        tensor.add_(residual.to(tensor.device), alpha=codec.decay)
        unsent, state = torch.zeros_like(tensor), with_residual(state, torch.zeros_like(residual))
    coding = Coding(inner, seeds, exchange.step, unsent, method)

    def learn(state: CodecState, average: Tensor) -> CodecState:
        return (
            state
            if unsent is None
            else with_residual(state, state.local["residual"].to(unsent.device) + unsent)
        )

    return StartedAggregation(state, partial(exchange.sum, tensor, coding), learn)


def start_two_phases(
    exchange: CodecExchange, codec: Codec, method: str, state: CodecState, tensor: Tensor, seeds: Seeds
) -> StartedAggregation:
    """Starts a reduce-scatter of payloads to the shards' owners, and an all-gather of payloads of the sums.

    Takes two delays, and traffic does not grow with the number of ranks; each number is encoded twice. With error
    feedback the owner adds the error of the second encoding to its own residual. The residual covers the whole
    tensor, so the number of ranks may change.

    References: Tang et al. 2019, DoubleSqueeze, which keeps a second residual at the server; adding it to the
    owner's residual is our choice.
    """
    channel, inner = exchange.channel, strip_feedback(codec)
    rank, size, has_feedback = channel.rank, channel.size, isinstance(codec, ErrorFeedback)
    coding = Coding(inner, seeds, exchange.step)
    segments, inputs = cut_segments(tensor.numel(), size), tensor
    if isinstance(codec, ErrorFeedback):
        channel.charge("add", tensor.numel())
        residual = state.local["residual"].to(tensor.device)
        inputs = torch.add(tensor, residual, alpha=codec.decay, out=allocate_like(tensor))

    def encode(part: Tensor, segment: Segment, count: int) -> Payload:
        channel.charge("encode", segment.length, method)
        return clone_shared(coding.encode(part, segment, count), part)

    def decode(payload: Payload, segment: Segment, count: int) -> Tensor:
        channel.charge("decode", segment.length, method)
        return coding.decode(payload, TensorSpec((segment.length,), tensor.dtype), segment, count)

    payloads = [encode(segment.narrow(inputs), segment, 1) for segment in segments]
    hop, return_hop, sum_error = exchange.send(payloads), channel.reserve_hops(1), tensor[:0]
    if has_feedback:
        decoded = [decode(payload, segment, 1) for payload, segment in zip(payloads, segments, strict=True)]
        channel.charge("subtract", tensor.numel())
        residual = inputs.sub_(torch.cat(decoded)).nan_to_num_(0.0, 0.0, 0.0)
        state = with_residual(state, residual)

    async def finish() -> Sums:
        nonlocal sum_error
        shard, parts, metadata_by_rank = segments[rank], [], []
        for peer in range(size):
            payload, metadata = await exchange.recv(peer, hop, payloads[rank], tensor.device)
            parts.append(decode(payload, shard, 1))
            metadata_by_rank.append(metadata)
        channel.charge("add", (size - 1) * shard.length)
        total = sum_in_order(parts)
        packed = encode(total, shard, size)
        for peer in list_peers(channel):
            channel.send(packed, peer, return_hop)
        for owner, segment in enumerate(segments):
            payload = packed
            if owner != rank:
                payload = copy_to_device(await channel.recv(owner, return_hop), tensor.device)
            dense = decode(payload, segment, size)
            channel.charge("copy", segment.length)
            segment.narrow(tensor).copy_(dense)
        if has_feedback:
            channel.charge("subtract", shard.length)
            sum_error = total.sub_(shard.narrow(tensor)).nan_to_num_(0.0, 0.0, 0.0)
        return tensor, sum_in_order(metadata_by_rank)

    def learn(state: CodecState, average: Tensor) -> CodecState:
        if not has_feedback:
            return state
        residual = state.local["residual"].clone()
        segments[rank].narrow(residual).add_(sum_error)
        return with_residual(state, residual)

    return StartedAggregation(state, finish, learn, is_sent=True)
