"""Sums and averages outside the gradient exchanges: shared state, running statistics, barriers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose, Values, start
from farflung.comm.broadcasts import Tree, choose_trees
from farflung.comm.wire import supports_dtype
from farflung.types import Payload, Runtime

if TYPE_CHECKING:
    from farflung.network import NetworkProfile

__all__ = [
    "average",
    "average_on",
    "barrier",
    "broadcast",
    "fingerprint",
    "load",
    "relative_spread",
    "sketch",
    "sum_everywhere",
    "unlike",
]

_NOTHING = torch.empty(0)
_MESSAGE_PARTS = 128
"""Maximum number of tensors in a message; the format allows 255."""
_MESSAGE_NBYTES = 4 << 20
"""Maximum number of bytes in a message."""
_LEAST_NBYTES = 1 << 12
"""Minimum number of bytes for which a message is split further."""
_FEWEST_MESSAGES = 16
"""Minimum number of messages for each rank in a broadcast, since all wait until the last is forwarded."""
_GROUPS = 16
"""Number of sums in a sketch of a model."""
_HASHED_NUMEL = 1 << 18
"""Number of elements that a fingerprint hashes at a time."""
_COMPARED = 15
"""Part number of the exchange that compares tensors, distinct from those that average or score them."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by bytes of an element."""
_SUMS: Values[tuple[Tensor, Tensor]] = Values(lambda sums: sums, lambda tensors: (tensors[0], tensors[1]))


async def sum_everywhere(
    runtime: Runtime, tensor: Tensor, side: Tensor, number: int, *, part: int = 0, purpose: Purpose
) -> tuple[Tensor, Tensor]:
    """Sums ``tensor``, which is overwritten, and ``metadata`` by one direct all-reduce."""
    summed, _ = await _sum_on(runtime, tensor, side, purpose.at(number), part)
    return summed


async def _sum_on(
    runtime: Runtime, tensor: Tensor, side: Tensor, number: int, part: int
) -> tuple[tuple[Tensor, Tensor], int]:
    """Returns the sums, and the number of payload bytes sent."""

    async def exchange(channel: ExchangeChannel) -> tuple[Tensor, Tensor]:
        operand = tensor if runtime.elastic is None else tensor.clone()
        summed = await channel.collective("direct")(channel, operand, side)
        await channel.computed()
        return summed

    started = start(runtime, number, part, exchange, _SUMS)
    return await started.bring(), started.channel.sent_nbytes


def sketch(parameters: Sequence[Tensor]) -> Tensor:
    """Returns sums over groups of parameters, in float64 on the host.

    If two models differ randomly in each element, cross terms cancel, and the norm of the difference of their sketches
    approximates the norm of their difference.
    """
    groups = torch.zeros(_GROUPS, dtype=torch.float64)
    device = parameters[0].device
    sums = torch.stack([p.detach().sum(dtype=torch.float64).to(device) for p in parameters]).cpu()
    return groups.index_add_(0, torch.arange(len(parameters)) % _GROUPS, sums)


async def relative_spread(
    runtime: Runtime, parameters: Sequence[Tensor], number: int, *, part: int = 0, takes_part: bool = True
) -> float:
    """Returns the distance of the replicas' parameters from their mean, estimated from sums, relative to their norm.

    Args:
      runtime: Runtime of this replica.
      parameters: Parameters of this replica.
      number: Number of the exchange; equal on all ranks.
      part: Part number of the exchange; equal on all ranks.
      is_compared: False if this replica only receives the result.

    Returns:
      Exactly 0.0 if all sums are equal; equal on all ranks.
    """
    rows = torch.zeros(runtime.comm.size, _GROUPS + 2, dtype=torch.float64)
    if takes_part:
        norm = torch.stack(
            [torch.linalg.vector_norm(p.detach(), dtype=torch.float64).cpu() for p in parameters]
        )
        row = (sketch(parameters), torch.ones(1, dtype=torch.float64), norm.square().sum().reshape(1))
        rows[runtime.comm.rank] = torch.cat(row).nan_to_num()
    _, summed = await sum_everywhere(
        runtime, _NOTHING, rows.flatten(), number, part=part, purpose=Purpose.COMPARISON
    )
    compared = summed.view(rows.shape)
    compared = compared[compared[:, _GROUPS] == 1]
    sums, squares = compared[:, :_GROUPS], compared[:, -1]
    if len(sums) < 2 or bool((sums == sums[0]).all()):
        return 0.0
    distances = torch.linalg.vector_norm(sums - sums.mean(0), dim=1)
    return float(distances.max() / squares.mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny))


def fingerprint(tensor: Tensor) -> int:
    """Returns a nonzero hash of a tensor's bits, equal on all devices, of 52 bits, which float64 represents exactly."""
    flat = _real(tensor.detach()).contiguous().view(-1)
    weights = _hash_weights().to(flat.device)
    total = 0
    for piece in flat.view(_INTEGERS[flat.element_size()]).split(_HASHED_NUMEL):
        total = (total * 0x9E3779B97F4A7C15 + int((piece.long() * weights[: len(piece)]).sum())) % (1 << 64)
    return total >> 12 or 1


@cache
def _hash_weights() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (_HASHED_NUMEL,), generator=generator)


async def unlike(runtime: Runtime, tensors: Sequence[Tensor], number: int, *, purpose: Purpose) -> list[int]:
    """Returns the indices of tensors whose bits differ between replicas; equal on all ranks.

    Tensors of unequal sizes, such as tables that grow with the longest sequence so far, have no mean and are omitted.
    """
    size = runtime.comm.size
    if size == 1 or not tensors:
        return []
    rows = torch.zeros(size, 2, len(tensors), dtype=torch.float64)
    rows[runtime.comm.rank] = torch.tensor(
        [[f(tensor) for tensor in tensors] for f in (fingerprint, Tensor.numel)]
    )
    _, summed = await sum_everywhere(
        runtime, _NOTHING, rows.flatten(), number, part=_COMPARED, purpose=purpose
    )
    compared = summed.view(rows.shape)
    compared = compared[compared[:, 0, 0] != 0]  # drop lost ranks
    bits, sizes = (compared == compared[0]).all(0)
    return [int(index) for index in (~bits & sizes).nonzero()]


async def barrier(runtime: Runtime, number: int, purpose: Purpose) -> None:
    """Waits until all replicas have called it."""
    await sum_everywhere(runtime, _NOTHING, torch.zeros(1, dtype=torch.float64), number, purpose=purpose)


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
    channel = ExchangeChannel(runtime.comm, purpose.at(number), part)
    nbytes = sum(tensor.nbytes for tensor in targets)
    max_nbytes = min(max(nbytes // (_FEWEST_MESSAGES * channel.size), _LEAST_NBYTES), _MESSAGE_NBYTES)
    pieces = [piece for tensor in targets for piece in _cut_by_size(tensor, max_nbytes)]
    trees = choose_trees(channel.size, src, nbytes, network)
    shares: list[list[tuple[int, list[Tensor]]]] = [[] for _ in trees]
    loads = [0] * len(trees)
    for hop, message in enumerate(_group_by_size(pieces, max_nbytes)):
        tree_index = loads.index(min(loads))
        shares[tree_index].append((hop, message))
        loads[tree_index] += sum(tensor.nbytes for tensor in message)

    async def pass_down(tree: Tree, share: Sequence[tuple[int, Sequence[Tensor]]]) -> None:
        parent = tree.get(channel.rank)
        children = [rank for rank in tree if tree[rank] == channel.rank]
        for hop, message in share:
            if parent is None:
                payload = Payload(tuple(_to_wire(tensor) for tensor in message))
            else:
                payload = await channel.recv(parent, hop)
            for send in [channel.send(payload, child, hop) for child in children]:
                await send
            if parent is not None:
                for tensor, value in zip(message, payload.tensors(), strict=True):
                    _from_wire(value, tensor)

    running = [runtime.launch(pass_down(tree, share)) for tree, share in zip(trees, shares, strict=True)]
    while running:  # the first that fails tells why
        await running.pop(await runtime.first_of(*running))


def _cut_by_size(tensor: Tensor, most: int) -> Sequence[Tensor]:
    """Returns views of at most ``max_nbytes`` bytes, or one element; depends on shape and dtype only."""
    if tensor.nbytes <= most or not tensor.dim():
        return (tensor,)
    rows = len(tensor) * most // tensor.nbytes
    if not rows:
        return [piece for row in tensor.unbind() for piece in _cut_by_size(row, most)]
    pieces: Sequence[Tensor] = tensor.split(rows)
    return pieces


def _group_by_size(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yields the tensors of each message, in order."""
    message: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if message and (len(message) == _MESSAGE_PARTS or nbytes + tensor.nbytes > most):
            yield message
            message, nbytes = [], 0
        message.append(tensor)
        nbytes += tensor.nbytes
    if message:
        yield message


def _to_wire(tensor: Tensor) -> Tensor:
    """Returns a flat copy of a tensor in a dtype that messages support: its bytes if its own is unsupported."""
    flat = (
        torch.empty_like(_real(tensor), memory_format=torch.contiguous_format).copy_(_real(tensor)).view(-1)
    )
    return flat if supports_dtype(flat.dtype) else flat.view(torch.uint8)


def _from_wire(value: Tensor, tensor: Tensor) -> None:
    real = _real(tensor)
    real.copy_(value.view(real.dtype).view(real.shape))


async def average(
    runtime: Runtime, tensors: Sequence[Tensor], number: int, purpose: Purpose, *, first_part: int = 0
) -> None:
    """Overwrites each tensor with its mean over the replicas, in one exchange for each dtype."""
    if runtime.comm.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in map(_real, tensors):
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for part, group in enumerate(by_dtype.values(), start=first_part):
        await average_on(runtime, group, purpose.at(number), part)


async def average_on(runtime: Runtime, tensors: Sequence[Tensor], number: int, part: int) -> int:
    """Overwrites tensors of one dtype with their means over the replicas, in one exchange.

    They may be on several devices, since ranks may place a model differently. Summands are divided by a power of two,
    at least the number of replicas. So sums do not overflow if means are in range, and rounding is unchanged.

    Returns:
      Number of payload bytes sent.
    """
    share = 0.5 ** (runtime.comm.size - 1).bit_length()
    flat = torch.cat([tensor.reshape(-1).to(tensors[0].device) for tensor in tensors]).mul_(share)
    (total, count), nbytes = await _sum_on(runtime, flat, torch.ones(1, dtype=torch.float64), number, part)
    load(tensors, (total / (int(count) * share)).split([tensor.numel() for tensor in tensors]))
    return nbytes


def _real(tensor: Tensor) -> Tensor:
    """Returns a complex tensor as a view of its real and imaginary parts, since messages support real dtypes only."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def load(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Overwrites each tensor with a value of equal size."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value.reshape(tensor.shape))
