"""Private attributes of torch that farflung uses; importing this module fails with the name of a missing one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farflung.errors import Unsupported
from farflung.types import Json

__all__ = [
    "DispatchMode",
    "StorageRef",
    "compute_local_part",
    "get_current_node",
    "get_graph_task_id",
    "queue_backward_callback",
    "tree_leaves",
]


def _import_private(path: str) -> Any:
    """Imports an attribute of torch by its dotted path.

    Raises:
      Unsupported: The installed torch does not have it.
    """
    import importlib

    module, _, name = path.rpartition(".")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        owner = _import_private(module)
    try:
        return getattr(owner, name)
    except AttributeError:
        raise Unsupported(
            f"torch {torch.__version__} has no {path}, which farflung uses; the versions that it is tested with are in "
            "constraints.txt"
        ) from None


get_graph_task_id: Callable[[], int] = _import_private("torch._C._current_graph_task_id")
"""Returns the id of the current autograd task inside a hook, and -1 outside a backward pass."""
get_current_node: Callable[[], Any] = _import_private("torch._C._current_autograd_node")
"""Returns the autograd node whose backward runs in this thread, if any."""
queue_backward_callback: Callable[[Callable[[], None]], None] = _import_private(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
"""Queues a callback for the end of the current backward pass; call it inside a hook."""
DispatchMode: Any = _import_private("torch.utils._python_dispatch.TorchDispatchMode")
"""Base class of context managers that intercept each operation."""
tree_leaves: Callable[[Any], list[Any]] = _import_private("torch.utils._pytree.tree_leaves")
"""Returns all leaves of nested containers."""
StorageRef: Any = _import_private("torch.multiprocessing.reductions.StorageWeakRef")
"""Weak reference to a tensor's storage."""


def compute_local_part(tensor: Any) -> list[Json]:
    """Returns the shape and the global offset of the part of a tensor that this process holds."""
    if not hasattr(tensor, "device_mesh"):
        return [list(tensor.shape), [0] * tensor.dim()]
    find_part = _import_private("torch.distributed.tensor._utils.compute_local_shape_and_global_offset")
    return [[*extents] for extents in find_part(tensor.shape, tensor.device_mesh, tensor.placements)]
