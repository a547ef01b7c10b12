"""Uses of gradient buckets in a forward pass: a watcher that acts before the first use of each, and a trace of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
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

_METADATA = frozenset((
    "device", "dim", "dtype", "element_size", "is_complex", "is_contiguous", "is_cuda", "is_floating_point", "is_leaf",
    "is_meta", "layout", "ndim", "ndimension", "nelement", "numel", "requires_grad", "shape", "size", "storage_offset",
    "stride",
))  # fmt: skip
"""Functions and properties that do not read the values of a tensor."""
_REMEDY = "choose --schedule synchronous"


class ForwardWatcher(TorchFunctionMode):
    """Context of a forward pass that calls ``on_use(index)`` before a bucket's parameters are first used.

    Parameters are found by their storage among the arguments of torch's functions. So views count, parameters that
    other modules use, and uses without a gradient.

    Args:
      buckets: Buckets of the model.
      on_use: Function that is called once for each bucket.
    """

    def __init__(self, buckets: GradientBuckets, on_use: Callable[[int], None]) -> None:
        super().__init__()
        self._buckets, self._on_use = buckets, on_use
        self._indices: dict[int, set[int]] = defaultdict(set)
        """Buckets with parameters in a storage, by its key."""
        for bucket in buckets:
            for parameter in bucket.parameters:
                self._indices[_get_key(parameter)].add(bucket.index)
        self._used_keys: set[int] = set()
        self.order: list[int] = []
        """Buckets that have been used, in order."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":  # of a property
            name = getattr(func.__self__, "__name__", name)
        if name not in _METADATA:
            for key in _list_keys((args, kwargs)):
                if key in self._indices and key not in self._used_keys:
                    self._used_keys.add(key)
                    for index in sorted(self._indices[key].difference(self.order)):
                        self.order.append(index)
                        self._on_use(index)
        return func(*args, **kwargs)

    def check_order(self, step: int, expected: Sequence[int]) -> None:
        """Checks that the buckets used so far are the first ones of a traced pass.

        Raises:
          Unsupported: another bucket is used.
        """
        for index, traced in zip(self.order, [*expected, None], strict=False):
            if index != traced:
                raise Unsupported(
                    f"step {step}: the forward pass uses parameter {self._buckets[index].names[0]} at another place "
                    f"than the traced one, and updates would come too late: {_REMEDY}"
                )

    def check_gradients(self, step: int) -> None:
        """Checks after the backward pass that all parameters with a gradient were seen in the forward pass.

        Raises:
          Unsupported: a parameter was not seen.
        """
        for bucket in self._buckets:
            for place, parameter in enumerate(bucket.parameters):
                if place not in bucket.zero_places and _get_key(parameter) not in self._used_keys:
                    raise Unsupported(
                        f"step {step}: parameter {bucket.names[place]} is used by compiled or scripted code, in which "
                        f"no use can be seen: {_REMEDY}"
                    )


class _ForwardTracer(ForwardWatcher):
    """Watcher that records what each operation depends on."""

    def __init__(self, buckets: GradientBuckets) -> None:
        super().__init__(buckets, lambda index: None)
        self._needs = {key: frozenset(indices) for key, indices in self._indices.items()}
        """Buckets on which the contents of a storage depend, by its key."""
        self._results: list[Any] = []
        """Results, whose storages must not be used again."""
        self.dependencies: list[frozenset[int]] = []
        self.flops: list[float] = []

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = super().__torch_function__(func, types, args, kwargs)
        inputs = [self._needs.get(key, frozenset()) for key in _list_keys((args, kwargs))]
        needs = frozenset[int]().union(*inputs)
        self.dependencies.append(needs)
        self.flops.append(float(counter.get_total_flops()))
        self._results.append(result)
        for key in _list_keys(result):
            if key not in self._indices:
                self._needs[key] = self._needs.get(key, frozenset()) | needs
        return result


def trace_forward(buckets: GradientBuckets, fn: Callable[[], object]) -> ForwardTrace:
    """Runs a forward pass; returns its uses of buckets, and what its operations depend on and cost."""
    with _ForwardTracer(buckets) as tracer:
        fn()
    return ForwardTrace(tuple(tracer.order), tuple(tracer.dependencies), tuple(tracer.flops))


def _list_keys(tree: Any) -> list[int]:
    """Returns keys of the storages of all tensors in nested containers."""
    return [_get_key(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _get_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
