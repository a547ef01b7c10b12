"""Uses of gradient buckets in a forward pass: a watcher that acts before the first use of each, and a trace of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from farflung._torch import tree_leaves
from farflung.engine.buckets import GradientBuckets
from farflung.errors import Unsupported
from farflung.types import ForwardTrace

__all__ = ["ForwardWatcher", "trace_forward"]

_METADATA = frozenset(
    "dim dtype device element_size is_complex is_contiguous is_cuda is_floating_point is_leaf is_meta layout ndim "
    "ndimension nelement numel requires_grad shape size storage_offset stride".split()
)
"""Names of functions and properties that do not read the values of a tensor."""


class ForwardWatcher(TorchFunctionMode):
    """Context of a forward pass that calls ``on_use(index)`` before a bucket's parameters are first used.

    Parameters are found among the arguments of torch's functions by their storage, so views and other modules'
    parameters count, with and without a gradient.

    Args:
      buckets: Buckets of the model.
      on_use: Function that is called once for each bucket.
    """

    def __init__(self, buckets: GradientBuckets, on_use: Callable[[int], None]) -> None:
        super().__init__()
        self._buckets, self._on_use = buckets, on_use
        self._indices: dict[int, set[int]] = defaultdict(set)
        for bucket in buckets:
            for parameter in bucket.parameters:
                self._indices[_get_key(parameter)].add(bucket.index)
        self._seen_keys: set[int] = set()
        self.order: list[int] = []
        """Buckets that have been used, in order."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if name not in _METADATA:
            for key in _list_keys((args, kwargs)):
                for index in self._indices.get(key, ()):
                    self._seen_keys.add(key)
                    if index not in self.order:
                        self.order.append(index)
                        self._on_use(index)
        return func(*args, **kwargs)

    def check_gradients(self) -> None:
        """Checks after the backward pass that every parameter with a gradient was seen in the forward pass.

        Raises:
          Unsupported: one was used by code that torch does not show.
        """
        for bucket in self._buckets:
            for place, parameter in enumerate(bucket.parameters):
                if place not in bucket.zero_places and _get_key(parameter) not in self._seen_keys:
                    raise Unsupported(
                        f"parameter {bucket.names[place]} is used by compiled or native code, where no update can be "
                        "waited for: choose --schedule synchronous"
                    )


class _ForwardTracer(ForwardWatcher):
    """Watcher that records what each operation depends on."""

    def __init__(self, buckets: GradientBuckets) -> None:
        super().__init__(buckets, lambda index: None)
        self._needs: dict[int, frozenset[int]] = {key: frozenset(found) for key, found in self._indices.items()}
        self._storages: list[Any] = []
        """Storages of all results, so that none is used again."""
        self.dependencies: list[frozenset[int]] = []
        self.flops: list[float] = []

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = super().__torch_function__(func, types, args, kwargs)
        needs = frozenset[int]().union(
            *(self._needs.get(key, frozenset()) for key in _list_keys((args, kwargs)))
        )
        self.dependencies.append(needs)
        self.flops.append(float(counter.get_total_flops()))
        for key in _list_keys(result):
            if key not in self._indices:
                self._needs[key] = self._needs.get(key, frozenset()) | needs
        self._storages += (leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def trace_forward(buckets: GradientBuckets, fn: Callable[[], object]) -> ForwardTrace:
    """Runs a forward pass and returns its uses of buckets, and what each operation depends on."""
    with _ForwardTracer(buckets) as tracer:
        fn()
    return ForwardTrace(tuple(tracer.order), tuple(tracer.dependencies), tuple(tracer.flops))


def _list_keys(tree: Any) -> Iterable[int]:
    """Returns keys of the storages of all tensors in nested containers."""
    return [_get_key(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _get_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
