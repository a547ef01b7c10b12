"""Sums and averages outside the gradient exchanges: shared state, running statistics, barriers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose, ResultCodec, start_exchange
from farflung.comm.broadcasts import BroadcastTree, choose_trees
from farflung.comm.wire import supports_dtype
from farflung.types import Payload, Runtime

if TYPE_CHECKING:
    from farflung.engine.buckets import GradientBucket
    from farflung.network import NetworkProfile

__all__ = [
    "average",
    "average_tensors",
    "average_weights",
    "barrier",
    "broadcast",
    "compute_fingerprint",
    "compute_sketch",
    "estimate_max_divergence",
    "find_unequal",
    "gather_steps",
    "load_values",
    "sum_over_ranks",
]

_EMPTY = torch.empty(0)
_MESSAGE_PARTS = 128
"""Maximum number of tensors in a message; the format allows 255."""
_MESSAGE_NBYTES = 4 << 20
"""Maximum number of bytes in a message."""
_MIN_NBYTES = 1 << 12
"""Minimum number of bytes for which a message is split further."""
_MIN_MESSAGES = 16
"""Minimum number of messages for each rank in a broadcast, since all wait until the last is forwarded."""
_NUM_GROUPS = 16
"""Number of sums in a sketch of a model."""
_HASHED_NUMEL = 1 << 18
"""Number of elements that a fingerprint hashes at a time."""
_COMPARISON_PART = 15
"""Part number of the exchange that compares tensors, distinct from those that average or score them."""
_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by bytes of an element."""
_SUMS: ResultCodec[tuple[Tensor, Tensor]] = ResultCodec(
    lambda sums: sums, lambda tensors: (tensors[0], tensors[1])
)


async def sum_over_ranks(
    runtime: Runtime, tensor: Tensor, metadata: Tensor, number: int, *, part: int = 0, purpose: Purpose
) -> tuple[Tensor, Tensor]:
    """Sums ``tensor``, which is overwritten, and ``metadata`` by one direct all-reduce."""
    summed, _ = await _exchange_sums(runtime, tensor, metadata, purpose.build_exchange_id(number), part)
    return summed


async def _exchange_sums(
    runtime: Runtime, tensor: Tensor, metadata: Tensor, number: int, part: int
) -> tuple[tuple[Tensor, Tensor], int]:
    """Returns the sums, and the number of payload bytes sent."""

    async def exchange(channel: ExchangeChannel) -> tuple[Tensor, Tensor]:
        operand = tensor if runtime.elastic is None else tensor.clone()
        summed = await channel.get_collective("direct")(channel, operand, metadata)
        await channel.wait_computed()
        return summed

    started = start_exchange(runtime, number, part, exchange, _SUMS)
    return await started.wait(), started.channel.sent_nbytes


def compute_sketch(parameters: Sequence[Tensor]) -> Tensor:
    """Returns sums over groups of parameters, in float64 on the host.

    If two models differ randomly in each element, cross terms cancel, and the norm of the difference of their sketches
    approximates the norm of their difference.
    """
    groups = torch.zeros(_NUM_GROUPS, dtype=torch.float64)
    device = parameters[0].device
    sums = torch.stack([p.detach().sum(dtype=torch.float64).to(device) for p in parameters]).cpu()
    return groups.index_add_(0, torch.arange(len(parameters)) % _NUM_GROUPS, sums)


async def estimate_max_divergence(
    runtime: Runtime,
    parameters: Sequence[Tensor],
    number: int,
    *,
    part: int = 0,
    should_contribute: bool = True,
) -> float:
    """Estimates the largest distance of a rank's parameters from their mean, relative to their norm.

    Args:
      runtime: Runtime of this replica.
      parameters: Parameters of this replica.
      number: Number of the exchange; equal on all ranks.
      part: Part number of the exchange; equal on all ranks.
      should_contribute: False if this replica only receives the result.

    Returns:
      Exactly 0.0 if all sums are equal; equal on all ranks.
    """
    rows = torch.zeros(runtime.comm.size, _NUM_GROUPS + 2, dtype=torch.float64)
    if should_contribute:
        norm = torch.stack(
            [torch.linalg.vector_norm(p.detach(), dtype=torch.float64).cpu() for p in parameters]
        )
        row = (compute_sketch(parameters), torch.ones(1, dtype=torch.float64), norm.square().sum().reshape(1))
        rows[runtime.comm.rank] = torch.cat(row).nan_to_num()
    _, summed = await sum_over_ranks(
        runtime, _EMPTY, rows.flatten(), number, part=part, purpose=Purpose.COMPARISON
    )
    compared = summed.view(rows.shape)
    compared = compared[compared[:, _NUM_GROUPS] == 1]
    sums, squares = compared[:, :_NUM_GROUPS], compared[:, -1]
    if len(sums) < 2 or bool((sums == sums[0]).all()):
        return 0.0
    distances = torch.linalg.vector_norm(sums - sums.mean(0), dim=1)
    return float(distances.max() / squares.mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny))


def compute_fingerprint(tensor: Tensor) -> int:
    """Returns a nonzero hash of a tensor's bits, equal on all devices, of 52 bits, which float64 represents exactly."""
    flat = _view_as_real(tensor.detach()).contiguous().view(-1)
    weights = _create_hash_weights().to(flat.device)
    total = 0
    for piece in flat.view(_INTEGER_DTYPES[flat.element_size()]).split(_HASHED_NUMEL):
        total = (total * 0x9E3779B97F4A7C15 + int((piece.long() * weights[: len(piece)]).sum())) % (1 << 64)
    return total >> 12 or 1


@cache
def _create_hash_weights() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (_HASHED_NUMEL,), generator=generator)


async def find_unequal(
    runtime: Runtime, tensors: Sequence[Tensor], number: int, *, purpose: Purpose
) -> list[int]:
    """Returns the indices of tensors whose bits differ between replicas; equal on all ranks.

    Tensors of unequal sizes, such as tables that grow with the longest sequence so far, have no mean and are omitted.
    """
    size = runtime.comm.size
    if size == 1 or not tensors:
        return []
    rows = torch.zeros(size, 2, len(tensors), dtype=torch.float64)
    rows[runtime.comm.rank] = torch.tensor(
        [[f(tensor) for tensor in tensors] for f in (compute_fingerprint, Tensor.numel)]
    )
    _, summed = await sum_over_ranks(
        runtime, _EMPTY, rows.flatten(), number, part=_COMPARISON_PART, purpose=purpose
    )
    compared = summed.view(rows.shape)
    compared = compared[compared[:, 0, 0] != 0]  # drop lost ranks
    bits, sizes = (compared == compared[0]).all(0)
    return [int(index) for index in (~bits & sizes).nonzero()]


async def gather_steps(runtime: Runtime, step: int, number: int, *, purpose: Purpose) -> dict[int, int]:
    """Returns the step of each replica by rank, equal on all ranks; lost ranks are left out."""
    rows = torch.zeros(runtime.comm.size, 2, dtype=torch.float64)
    rows[runtime.comm.rank] = torch.tensor([1, step])
    _, summed = await sum_over_ranks(runtime, _EMPTY, rows.flatten(), number, purpose=purpose)
    return {rank: int(other) for rank, (is_there, other) in enumerate(summed.view(rows.shape)) if is_there}


async def barrier(runtime: Runtime, number: int, purpose: Purpose) -> None:
    """Waits until all replicas have called it."""
    await sum_over_ranks(runtime, _EMPTY, torch.zeros(1, dtype=torch.float64), number, purpose=purpose)


async def broadcast(
    runtime: Runtime,
    tensors: Iterable[Tensor],
    number: int,
    *,
    src: int = 0,
    part: int = 0,
    purpose: Purpose = Purpose.START,
    network: NetworkProfile | None = None,
) -> None:
    """Overwrites ``tensors`` with those of rank ``src``; all ranks have equal numbers and shapes.

    Small messages travel down trees, so that no rank sends much more than the total bytes once, and few copies are held
    at a time; see :func:`farflung.comm.broadcasts.choose_trees`.

    Args:
      runtime: Runtime of this replica.
      tensors: Tensors of this replica.
      number: Number of the exchange; equal on all ranks.
      src: Rank whose tensors are sent.
      part: Part number of the exchange.
      purpose: Purpose of the messages.
      network: Network profile, equal on all ranks; ``None`` if unknown.
    """
    targets = [tensor.detach() for tensor in tensors]
    channel = ExchangeChannel(runtime.comm, purpose.build_exchange_id(number), part)
    nbytes = sum(tensor.nbytes for tensor in targets)
    max_nbytes = min(max(nbytes // (_MIN_MESSAGES * channel.size), _MIN_NBYTES), _MESSAGE_NBYTES)
    pieces = [piece for tensor in targets for piece in _cut_by_size(tensor, max_nbytes)]
    trees = choose_trees(channel.size, src, nbytes, network)
    shares: list[list[tuple[int, list[Tensor]]]] = [[] for _ in trees]
    loads = [0] * len(trees)
    for hop, message in enumerate(_group_by_size(pieces, max_nbytes)):
        tree_index = loads.index(min(loads))
        shares[tree_index].append((hop, message))
        loads[tree_index] += sum(tensor.nbytes for tensor in message)

    async def pass_down(tree: BroadcastTree, share: Sequence[tuple[int, Sequence[Tensor]]]) -> None:
        parent = tree.get(channel.rank)
        children = [rank for rank in tree if tree[rank] == channel.rank]
        for hop, message in share:
            if parent is None:
                payload = Payload(tuple(_encode_tensor(tensor) for tensor in message))
            else:
                payload = await channel.recv(parent, hop)
            for send in [channel.send(payload, child, hop) for child in children]:
                await send
            if parent is not None:
                for tensor, value in zip(message, payload.iter_tensors(), strict=True):
                    _decode_tensor(value, tensor)

    running = [runtime.launch(pass_down(tree, share)) for tree, share in zip(trees, shares, strict=True)]
    while running:  # the first that fails tells why
        await running.pop(await runtime.wait_any(*running))


def _cut_by_size(tensor: Tensor, max_nbytes: int) -> Sequence[Tensor]:
    """Returns views of at most ``max_nbytes`` bytes, or one element; depends on shape and dtype only."""
    if tensor.nbytes <= max_nbytes or not tensor.dim():
        return (tensor,)
    rows = len(tensor) * max_nbytes // tensor.nbytes
    if not rows:
        return [piece for row in tensor.unbind() for piece in _cut_by_size(row, max_nbytes)]
    pieces: Sequence[Tensor] = tensor.split(rows)
    return pieces


def _group_by_size(tensors: Sequence[Tensor], max_nbytes: int) -> Iterator[list[Tensor]]:
    """Yields the tensors of each message, in order."""
    message: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if message and (len(message) == _MESSAGE_PARTS or nbytes + tensor.nbytes > max_nbytes):
            yield message
            message, nbytes = [], 0
        message.append(tensor)
        nbytes += tensor.nbytes
    if message:
        yield message


def _encode_tensor(tensor: Tensor) -> Tensor:
    """Returns a flat copy of a tensor in a dtype that messages support: its bytes if its own is unsupported."""
    flat = (
        torch.empty_like(_view_as_real(tensor), memory_format=torch.contiguous_format)
        .copy_(_view_as_real(tensor))
        .view(-1)
    )
    return flat if supports_dtype(flat.dtype) else flat.view(torch.uint8)


def _decode_tensor(value: Tensor, tensor: Tensor) -> None:
    real = _view_as_real(tensor)
    real.copy_(value.view(real.dtype).view(real.shape))


async def average(
    runtime: Runtime, tensors: Sequence[Tensor], number: int, purpose: Purpose, *, first_part: int = 0
) -> None:
    """Overwrites each tensor with its mean over the replicas, in one exchange for each dtype."""
    if runtime.comm.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in map(_view_as_real, tensors):
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for part, group in enumerate(by_dtype.values(), start=first_part):
        await average_tensors(runtime, group, purpose.build_exchange_id(number), part)


async def average_tensors(runtime: Runtime, tensors: Sequence[Tensor], number: int, part: int) -> int:
    """Overwrites tensors of one dtype with their means over ranks; returns the payload bytes sent.

    They may be on several devices, since ranks may place a model differently. Summands are divided by a power of two,
    at least the number of replicas. So sums do not overflow if means are in range, and rounding is unchanged.

    Returns:
      Number of payload bytes sent.
    """
    share = 0.5 ** (runtime.comm.size - 1).bit_length()
    flat = torch.cat([tensor.reshape(-1).to(tensors[0].device) for tensor in tensors]).mul_(share)
    (total, count), nbytes = await _exchange_sums(
        runtime, flat, torch.ones(1, dtype=torch.float64), number, part
    )
    load_values(tensors, (total / (int(count) * share)).split([tensor.numel() for tensor in tensors]))
    return nbytes


async def average_weights(
    runtime: Runtime, buckets: Iterable[GradientBucket], number: int, purpose: Purpose, *, first_part: int = 0
) -> list[Tensor]:
    """Returns the mean parameters over the replicas, flat by bucket."""
    weights = [bucket.copy_weights() for bucket in buckets]
    await average(runtime, weights, number, purpose, first_part=first_part)
    return weights


def _view_as_real(tensor: Tensor) -> Tensor:
    """Returns a complex tensor as a view of its real and imaginary parts, since messages support real dtypes only."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def load_values(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Overwrites each tensor with a value of equal size."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value.reshape(tensor.shape))
