"""Private attributes of torch that farflung uses; importing this module fails with the name of a missing one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farflung.errors import Unsupported

__all__ = ["DispatchMode", "StorageRef", "after_backward", "current_node", "graph_task_id", "tree_leaves"]


def _part(path: str) -> Any:
    """Imports an attribute of torch by its dotted path.

    Raises:
      Unsupported: The installed torch does not have it.
    """
    import importlib

    module, _, name = path.rpartition(".")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        owner = _part(module)
    try:
        return getattr(owner, name)
    except AttributeError:
        raise Unsupported(
            f"torch {torch.__version__} has no {path}, which farflung uses; the versions that it is tested with are in "
            "constraints.txt"
        ) from None


graph_task_id: Callable[[], int] = _part("torch._C._current_graph_task_id")
"""Returns the id of the current autograd task inside a hook, and -1 outside a backward pass."""
current_node: Callable[[], Any] = _part("torch._C._current_autograd_node")
"""Returns the autograd node whose backward runs in this thread, if any."""
after_backward: Callable[[Callable[[], None]], None] = _part(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
"""Queues a callback for the end of the current backward pass; call it inside a hook."""
DispatchMode: Any = _part("torch.utils._python_dispatch.TorchDispatchMode")
"""Base class of context managers that intercept each operation."""
tree_leaves: Callable[[Any], list[Any]] = _part("torch.utils._pytree.tree_leaves")
"""Returns all leaves of nested containers."""
StorageRef: Any = _part("torch.multiprocessing.reductions.StorageWeakRef")
"""Weak reference to a tensor's storage."""
