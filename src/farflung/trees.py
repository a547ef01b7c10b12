"""Payloads and states as trees."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from farflung.types import CodecState, Payload, State

__all__ = ["keys_of", "only_seeds", "rebuilt", "shares_memory", "unshared"]


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
