"""Private parts of torch that farflung uses, in one place; an import fails with the name of a part that is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farflung.errors import Unsupported

__all__ = ["DispatchMode", "StorageRef", "after_backward", "current_node", "graph_task_id", "tree_leaves"]


def _part(path: str) -> Any:
    """The attribute of torch with this path.

    Raises:
      Unsupported: the installed torch does not have it.
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
"""Returns the number of the backward pass that calls a hook, -1 outside one."""
current_node: Callable[[], Any] = _part("torch._C._current_autograd_node")
"""Returns the node of the graph whose backward runs in this thread, if any."""
after_backward: Callable[[Callable[[], None]], None] = _part(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
"""Calls a function at the end of the backward pass that calls a hook."""
DispatchMode: Any = _part("torch.utils._python_dispatch.TorchDispatchMode")
"""Context in which a subclass sees each operation."""
tree_leaves: Callable[[Any], list[Any]] = _part("torch.utils._pytree.tree_leaves")
"""Returns all leaves of nested containers."""
StorageRef: Any = _part("torch.multiprocessing.reductions.StorageWeakRef")
"""Weak reference to a tensor's storage."""
