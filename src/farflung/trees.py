"""Payloads and states as trees."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from farflung.types import CodecState, Payload, State

__all__ = [
    "keys_of",
    "only_seeds",
    "pack_tensors",
    "rebuilt",
    "shares_memory",
    "unpack_tensors",
    "unshared",
]

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def rebuilt(payload: Payload, replace: Callable[[Tensor], Tensor]) -> Payload:
    """The same tree with other tensors, replaced depth first."""
    return Payload(
        tuple(
            rebuilt(part, replace) if isinstance(part, Payload) else replace(part) for part in payload.parts
        )
    )


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both are views of the same storage."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def unshared(payload: Payload, tensor: Tensor) -> Payload:
    """The same payload, sharing nothing with ``tensor``, which may then be overwritten."""
    return rebuilt(payload, lambda part: part.clone() if shares_memory(part, tensor) else part)


def only_seeds(state: CodecState) -> bool:
    """Whether a state is nothing but seeds: then a tensor may be cut anew at each step, and the state with it."""
    return _only_seeds(state.shared) and _only_seeds(state.local)


def _only_seeds(tree: State) -> bool:
    return all(key == "seed" or (isinstance(node, dict) and _only_seeds(node)) for key, node in tree.items())


def keys_of(tree: State, prefix: str = "") -> set[str]:
    """Lists the keys of nested dicts, those within one another joined by dots."""
    keys = {prefix + key for key in tree}
    return keys.union(
        *(keys_of(node, f"{prefix}{key}.") for key, node in tree.items() if isinstance(node, dict))
    )


def pack_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """Returns tensors as bytes; those that are mostly zeros by their other values, without a loss."""
    heads: list[list[Any]] = []
    parts: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten()
        head: list[Any] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), -1]
        size = tensor.dtype.itemsize
        if tensor.is_floating_point() and size in _BITS and len(flat) > 64:
            places = flat.view(_BITS[size]).nonzero().flatten()
            if len(places) * (4 + size) < flat.nbytes:
                head[2] = len(places)
                parts.append(places.to(torch.int32).view(torch.uint8))
                flat = flat[places]
        heads.append(head)
        parts.append(flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8))
    text = torch.frombuffer(bytearray(json.dumps(heads).encode()), dtype=torch.uint8)
    length = torch.tensor([len(text)], dtype=torch.int64).view(torch.uint8)
    return torch.cat([length, text, *parts])


def unpack_tensors(content: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors of :func:`pack_tensors`, as copies."""
    first = 8 + int(content[:8].clone().view(torch.int64))
    found = []

    def take(count: int, dtype: torch.dtype) -> Tensor:
        nonlocal first
        first, begin = first + count * dtype.itemsize, first
        return content[begin:first].clone().view(dtype)

    for name, shape, count in json.loads(bytes(content[8:first].numpy())):
        dtype, numel = getattr(torch, name), math.prod(shape)
        if count < 0:
            found.append(take(numel, dtype).view(shape))
        else:
            places = take(count, torch.int32).long()
            found.append(torch.zeros(numel, dtype=dtype).index_put((places,), take(count, dtype)).view(shape))
    return tuple(found)
