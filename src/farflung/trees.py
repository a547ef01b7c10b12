"""Operations on payloads and states as trees, and packing of tensors into bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from farflung.types import CodecState, Payload, State

__all__ = [
    "clone_shared",
    "has_only_seeds",
    "has_shared_memory",
    "has_tensors",
    "list_keys",
    "map_tensors",
    "pack_tensors",
    "unpack_tensors",
]

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def map_tensors(payload: Payload, replace: Callable[[Tensor], Tensor]) -> Payload:
    """Builds an equal tree whose tensors are replaced by a function, depth first."""
    return Payload(
        tuple(
            map_tensors(part, replace) if isinstance(part, Payload) else replace(part)
            for part in payload.parts
        )
    )


def has_shared_memory(first: Tensor, second: Tensor) -> bool:
    """Returns True if both tensors are views of the same storage."""
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def clone_shared(payload: Payload, tensor: Tensor) -> Payload:
    """Clones the parts of a payload that share memory with ``tensor``, so that it can be overwritten."""
    return map_tensors(payload, lambda part: part.clone() if has_shared_memory(part, tensor) else part)


def has_only_seeds(state: CodecState) -> bool:
    """Returns True if a state consists of seeds, so that its tensor can be split differently at each step."""
    return _has_only_seeds(state.shared) and _has_only_seeds(state.local)


def _has_only_seeds(tree: State) -> bool:
    return all(
        key == "seed" or (isinstance(node, dict) and _has_only_seeds(node)) for key, node in tree.items()
    )


def has_tensors(tree: object) -> bool:
    """Returns True if nested dicts, lists and tuples hold any tensor with elements."""
    if isinstance(tree, Tensor):
        return tree.numel() > 0
    if isinstance(tree, dict):
        return any(map(has_tensors, tree.values()))
    return isinstance(tree, list | tuple) and any(map(has_tensors, tree))


def list_keys(tree: State, prefix: str = "") -> set[str]:
    """Lists the keys of nested dicts, joined by dots."""
    keys = {prefix + key for key in tree}
    return keys.union(
        *(list_keys(node, f"{prefix}{key}.") for key, node in tree.items() if isinstance(node, dict))
    )


def pack_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """Packs tensors into bytes losslessly; mostly zero tensors are stored sparsely."""
    heads: list[list[Any]] = []
    parts: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten()
        head: list[Any] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), -1]
        size = tensor.dtype.itemsize
        if tensor.is_floating_point() and size in _BITS and 64 < len(flat) <= 1 << 31:
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
    """Unpacks copies of the tensors of :func:`pack_tensors`."""
    offset = 8 + int(content[:8].clone().view(torch.int64))
    tensors = []

    def read(count: int, dtype: torch.dtype) -> Tensor:
        nonlocal offset
        offset, begin = offset + count * dtype.itemsize, offset
        return content[begin:offset].clone().view(dtype)

    for name, shape, count in json.loads(bytes(content[8:offset].numpy())):
        dtype, numel = getattr(torch, name), math.prod(shape)
        if count < 0:
            tensors.append(read(numel, dtype).view(shape))
        else:
            indices = read(count, torch.int32).long()
            values = read(count, dtype)
            tensors.append(torch.zeros(numel, dtype=dtype).index_put((indices,), values).view(shape))
    return tuple(tensors)
