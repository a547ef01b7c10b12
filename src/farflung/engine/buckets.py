"""Flat gradient buckets: gradients become views of a few contiguous tensors that fill from the output side."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from farflung.config import BUCKET_NBYTES
from farflung.engine.placement import to_local
from farflung.errors import ConfigError, Unsupported
from farflung.types import Bucket, Json, ParameterSpan, TensorSpec

__all__ = ["GradientBucket", "GradientBuckets", "build_buckets", "create_views", "group_parameters"]

FIRST_BUCKET_NBYTES = 1 << 20
"""Size of the first bucket. It is small so that the first exchange starts early, as in DistributedDataParallel."""


@dataclass(slots=True, eq=False)
class GradientBucket:
    """Flat tensor of the gradients of some parameters; ``p.grad`` of each becomes a view of it.

    The elements of a parameter are in the order of its memory, so that its view has its strides. Fused optimizers step
    on memory, as if both had equal layouts.

    Args:
      index: Index in backward order.
      gradient: Flat tensor.
      names: Names of the parameters.
      parameters: Parameters in the order of their places.
      views: Views of the flat tensor in the same order.
      orders: Dimensions of each parameter, outermost in memory first.
    """

    index: int
    gradient: Tensor
    names: list[str]
    parameters: list[nn.Parameter]
    views: list[Tensor]
    orders: list[tuple[int, ...]]
    optimizer: torch.optim.Optimizer | None = None
    """Optimizer of the parameters; ``None`` if unknown."""
    missing_places: set[int] = field(default_factory=set)
    """Places that the current backward pass has not reached."""
    zero_places: tuple[int, ...] = ()
    """Places without a gradient in the last backward pass, ascending."""
    unused_places: Collection[int] = ()
    """Places without a gradient on any rank, in the exchange whose mean is applied."""
    unreached_places: Collection[int] = ()
    """Places that have never had a gradient on any rank."""
    restrided_places: set[int] = field(default_factory=set)
    """Places of parameters whose strides differ from those of their views: gradients are copied."""
    _gradients: list[Tensor] = field(init=False)
    """Gradients of the parameters: the views as separate tensors, since a loop may set their ``data``."""
    _gaps: list[Tensor] = field(default_factory=list)
    """Elements of ``zero_places``, one view for each contiguous run."""

    def __post_init__(self) -> None:
        self._gradients = [view.detach() for view in self.views]

    @property
    def tensors(self) -> list[Tensor]:
        """Values of the parameters on this process, for reading and writing."""
        return [parameter.detach() for parameter in self.parameters]

    @property
    def spec(self) -> TensorSpec:
        """Spec of the flat tensor and its parameters; shapes are in the order of memory."""
        spans, start = [], 0
        for tensor, order in zip(self.tensors, self.orders, strict=True):
            spans.append(ParameterSpan(tuple(tensor.shape[dim] for dim in order), start))
            start += tensor.numel()
        return replace(TensorSpec.from_tensor(self.gradient), spans=tuple(spans))

    @property
    def layout(self) -> list[Json]:
        """Shapes of the parameters, and the order of their dimensions in memory."""
        return [[list(t.shape), list(order)] for t, order in zip(self.tensors, self.orders, strict=True)]

    def view(self, flat: Tensor) -> list[Tensor]:
        """Returns views of a contiguous tensor of this size, one in the shape and strides of each parameter."""
        offset = flat.storage_offset()
        return [flat.as_strided(v.shape, v.stride(), offset + v.storage_offset()) for v in self.views]

    def copy_weights(self, out: Tensor | None = None) -> Tensor:
        """Returns a flat copy of the parameters, in ``out`` if it is given."""
        ordered = zip(self.tensors, self.orders, strict=True)
        return torch.cat([tensor.permute(order).reshape(-1) for tensor, order in ordered], out=out)

    def load_weights(self, flat: Tensor) -> None:
        """Overwrites the parameters."""
        for tensor, values in zip(self.tensors, self.view(flat), strict=True):
            tensor.copy_(values)

    def load_gradient(self, mean: Tensor) -> None:
        """Sets each ``p.grad`` to its part of ``mean``; ``None`` if it is frozen, or unused with a part of zeros.

        Places in ``unused_places`` get none, unless the mean is nonzero there because a codec held it back from earlier
        steps. Places in ``unreached_places`` get none.
        """
        if mean.data_ptr() != self.gradient.data_ptr():
            self.gradient.copy_(mean)
        self.assign_gradients()

    def assign_gradients(self) -> None:
        """Sets each ``p.grad`` to its part of the flat tensor, or to ``None``; see :meth:`load_gradient`."""
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if (
                place in self.unreached_places
                or not parameter.requires_grad
                or (place in self.unused_places and not self.has_values(view))
            ):
                parameter.grad = None
            else:
                self._set_gradient(place)

    def has_values(self, view: Tensor) -> bool:
        """Returns True if a part of the mean is not all zeros."""
        return bool(view.any())

    def gather(self) -> None:
        """Copies gradients outside the flat tensor into it, replaces them by views, and zeros missing ones."""
        views, grads, zero_places = [], [], []
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            grad = parameter.grad
            if grad is None:
                zero_places.append(place)
                continue
            if grad.layout is not torch.strided:
                raise Unsupported(
                    f"the gradient of parameter {self.names[place]} is sparse: give the embedding sparse=False"
                )
            if grad.data_ptr() != view.data_ptr() or grad.numel() == 0:
                views.append(view)
                # A gradient of backward(create_graph=True) has a graph.
                grads.append(grad.detach() if grad.requires_grad else grad)
                if parameter.stride() == view.stride():
                    self._set_gradient(place)
                else:
                    self.restrided_places.add(place)
        self.zero_missing_gradients(zero_places)
        if views:
            torch._foreach_copy_(views, grads)

    def zero_missing_gradients(self, places: Sequence[int]) -> None:
        """Zeroes gradients that this backward pass did not compute, by ascending index of their parameters."""
        if self.zero_places != (absent := tuple(places)):
            self.zero_places, self._gaps = absent, self._find_gaps(absent)
        for gap in self._gaps:
            gap.zero_()

    def has_replaced_gradients(self) -> bool:
        """Returns True if a gradient has been removed or replaced since the bucket filled."""
        exempt = self.restrided_places.union(self.zero_places)
        return any(
            (grad := parameter.grad) is not self._gradients[place]
            and place not in exempt
            and (grad is None or to_local(grad).data_ptr() != self.views[place].data_ptr())
            for place, parameter in enumerate(self.parameters)
        )

    def _set_gradient(self, place: int) -> None:
        """Sets the gradient of a parameter to its part of the flat tensor, or to a copy if their strides differ."""
        view, gradient, parameter = self.views[place], self._gradients[place], self.parameters[place]
        if place in self.restrided_places:
            parameter.grad = torch.empty_like(parameter).copy_(view)
            return
        if gradient.data_ptr() != view.data_ptr():
            gradient = self._gradients[place] = view.detach()
        parameter.grad = gradient

    def _find_gaps(self, places: Sequence[int]) -> list[Tensor]:
        """Returns the elements of places, ascending, as a minimal number of views of the flat tensor."""
        gaps: list[tuple[int, int]] = []
        for place in places:
            first = int(self.views[place].storage_offset())
            last = first + self.views[place].numel()
            if gaps and gaps[-1][1] == first:
                first = gaps.pop()[0]
            gaps.append((first, last))
        return [self.gradient.as_strided((last - first,), (1,), first) for first, last in gaps]


class GradientBuckets:
    """Buckets of a model's gradients, in backward order.

    Parameters are taken in reverse order of registration, without frozen ones and tied ones only once. Each dtype has
    its own buckets. After a backward pass ``p.grad`` is a view of its bucket. ``zero_grad(set_to_none=True)`` may
    remove it at any time, and the next backward pass restores it. A parameter outside the loss contributes zeros, which
    is warned about once, and gets no gradient, so that an optimizer skips it.

    Args:
      named_parameters: Pairs as from :meth:`torch.nn.Module.named_parameters`.
      bucket_nbytes: Size in bytes at which a bucket is closed; the first at 1 MiB if that is less.

    Raises:
      ConfigError: no parameter is trainable.
      Unsupported: a parameter is complex.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], bucket_nbytes: int = BUCKET_NBYTES
    ) -> None:
        trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
        if not trainable:
            raise ConfigError("the model has no parameter that requires a gradient")
        for name, p in trainable:
            if p.is_complex():
                raise Unsupported(f"parameter {name} is complex: make its torch.view_as_real the parameter")
        self._buckets = self._build(trainable, bucket_nbytes)
        self.buckets = tuple(Bucket(bucket.index, bucket.spec) for bucket in self._buckets)
        """Buckets as passed to schedules."""
        self.numels = tuple(bucket.spec.numel for bucket in self.buckets)
        """Number of parameters in each bucket."""
        self._on_ready: Callable[[int], None] | None = None
        self._watcher: Callable[[nn.Parameter], None] | None = None
        self.lock = threading.RLock()
        """Lock held while a gradient is recorded, since autograd has a thread for each device."""
        self._has_warned = False
        self._had_values: Sequence[Tensor | bool] = (True,)
        """For each bucket a tensor that is true if it was not all zero; read only when needed, so no device waits."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._create_hook(bucket, place))
            for bucket in self._buckets
            for place, parameter in enumerate(bucket.parameters)
        ]

    def _build(
        self, trainable: Sequence[tuple[str, nn.Parameter]], bucket_nbytes: int
    ) -> Sequence[GradientBucket]:
        return build_buckets(trainable, bucket_nbytes)

    def __getitem__(self, index: int) -> GradientBucket:
        return self._buckets[index]

    def __iter__(self) -> Iterator[GradientBucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def layout(self) -> list[Json]:
        """Layouts of the buckets, see :attr:`GradientBucket.layout`."""
        return [bucket.layout for bucket in self._buckets]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of all buckets, in their order."""
        return [parameter for bucket in self._buckets for parameter in bucket.parameters]

    @property
    def tensors(self) -> list[Tensor]:
        """Values of the parameters on this process, in the order of :attr:`parameters`."""
        return [tensor for bucket in self._buckets for tensor in bucket.tensors]

    @property
    def nbytes(self) -> int:
        """Number of bytes of one dense gradient."""
        return sum(bucket.spec.nbytes for bucket in self.buckets)

    def run_backward(self, loss: Tensor | None, ready: Callable[[int], None]) -> None:
        """Runs autograd and calls ``ready(index)`` once as each bucket fills, from one thread at a time.

        Without a loss, all parameters contribute zeros.
        """
        if loss is None:
            self.clear()
        self.arm(ready)
        try:
            if loss is not None:
                loss.backward()
            self.finish(may_warn=loss is not None)
        finally:
            self._on_ready = None

    def watch(self, watcher: Callable[[nn.Parameter], None]) -> None:
        """Calls ``watcher`` inside autograd for each gradient, before it is recorded; it may call :meth:`arm`."""
        self._watcher = watcher

    def arm(self, ready: Callable[[int], None]) -> None:
        """Starts to call ``ready(index)`` as each bucket fills, until :meth:`finish`."""
        for bucket in self._buckets:
            bucket.missing_places = set(range(len(bucket.parameters)))
        self._on_ready = ready

    @property
    def missing_names(self) -> list[str]:
        """Names of the parameters without a gradient since :meth:`arm`, or one kept from before."""
        return [
            bucket.names[place]
            for bucket in self._buckets
            for place in sorted(bucket.missing_places)
            if bucket.parameters[place].grad is None
        ]

    def finish(self, *, may_warn: bool = True) -> None:
        """Ends the backward pass: parameters without a gradient contribute zeros, with a warning if ``may_warn``."""
        assert self._on_ready is not None
        unused = self.missing_names if may_warn and not self._has_warned else []
        self._fill_missing(self._on_ready)
        self._on_ready = None
        if unused:
            self._has_warned = True
            warnings.warn(
                f"{len(unused)} parameters had no part in the loss and contribute zeros: {', '.join(unused[:4])}"
                + (" ..." if len(unused) > 4 else ""),
                stacklevel=2,
            )

    def unflatten(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns flat tensors, one for each bucket, as tensors by parameter name."""
        return {
            name: values
            for bucket, flat in zip(self._buckets, flats, strict=True)
            for name, values in zip(bucket.names, bucket.view(flat), strict=True)
        }

    def has_kept_gradients(self, parameter: nn.Parameter) -> bool:
        """Returns True if the last pass's gradients still exist when ``parameter`` gets the first one of another."""
        return any(bool(gradient.any()) for gradient in self._iter_kept(parameter))

    def record_zeros(self) -> None:
        """Records which gradients of the last pass are zero, since zeros may mean later that the loop zeroed them."""
        self._had_values = [bucket.gradient.any() for bucket in self._buckets]

    def has_zeroed_gradients(self, arriving: nn.Parameter | None = None) -> bool:
        """Returns True if the gradients of the last pass have been overwritten with zeros, but not removed."""
        gradients = [*self._iter_kept(arriving)]
        return (
            bool(gradients) and any(map(bool, self._had_values)) and not any(bool(g.any()) for g in gradients)
        )

    def _iter_kept(self, arriving: nn.Parameter | None) -> Iterator[Tensor]:
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                grad = parameter.grad
                if (
                    parameter is not arriving
                    and grad is not None
                    and (values := to_local(grad)).data_ptr() == view.data_ptr()
                ):
                    yield values

    def is_finite(self) -> bool:
        """Returns True if the gradients of the last pass, which may have been removed since, are finite."""
        return all(bool(bucket.gradient.isfinite().all()) for bucket in self._buckets)

    def has_replaced_gradients(self) -> bool:
        """Returns True if a gradient has been removed or replaced since its bucket filled."""
        return any(bucket.has_replaced_gradients() for bucket in self._buckets)

    def clear(self) -> None:
        """Removes all gradients, so that an optimizer step does nothing."""
        for parameter in self.parameters:
            parameter.grad = None

    def remove(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _create_hook(self, bucket: GradientBucket, place: int) -> Callable[[Tensor], None]:
        # Python's collector does not see cycles through a parameter's hooks: a strong reference would keep the model.
        reference, index = weakref.ref(self), bucket.index

        def handle_gradient(_: Tensor) -> None:
            buckets = reference()
            if buckets is None:
                return
            bucket = buckets[index]
            with buckets.lock:
                if buckets._watcher is not None:
                    buckets._watcher(bucket.parameters[place])
                if buckets._on_ready is None:
                    return
                if place not in bucket.missing_places:
                    raise Unsupported(
                        f"parameter {bucket.names[place]} got its gradient in two parts in one backward pass, as where "
                        "a layer is used by several reentrant checkpoints: give torch.utils.checkpoint "
                        "use_reentrant=False"
                    )
                bucket.missing_places.remove(place)
                if not bucket.missing_places:
                    bucket.gather()
                    buckets._on_ready(index)

        return handle_gradient

    def _fill_missing(self, ready: Callable[[int], None]) -> None:
        for bucket in self._buckets:
            if bucket.missing_places:
                bucket.missing_places = set()
                bucket.gather()
                ready(bucket.index)


def build_buckets(
    named_parameters: Sequence[tuple[str, nn.Parameter]], bucket_nbytes: int = BUCKET_NBYTES
) -> list[GradientBucket]:
    """Returns buckets of named parameters in reverse order; each dtype and device has its own buckets."""
    groups = group_parameters(reversed(named_parameters), bucket_nbytes, lambda _, p: (p.dtype, p.device))
    return [_build_bucket(index, group) for index, group in enumerate(groups)]


def group_parameters(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    bucket_nbytes: float,
    get_key: Callable[[str, nn.Parameter], object],
) -> list[list[tuple[str, nn.Parameter]]]:
    """Groups parameters with equal keys by size, in their order.

    Args:
      named_parameters: Names and parameters.
      bucket_nbytes: Size in bytes at which a group is closed.
      get_key: Function that returns the key of a parameter.
    """
    groups: list[list[tuple[str, nn.Parameter]]] = []
    open_group: dict[object, list[tuple[str, nn.Parameter]]] = {}
    filled: dict[object, int] = {}
    first = True
    for name, parameter in named_parameters:
        key = get_key(name, parameter)
        if key not in open_group:
            open_group[key], filled[key] = [], 0
            groups.append(open_group[key])
        open_group[key].append((name, parameter))
        filled[key] += parameter.nbytes
        if filled[key] >= (min(FIRST_BUCKET_NBYTES, bucket_nbytes) if first else bucket_nbytes):
            del open_group[key]
            first = False
    return groups


def _build_bucket(index: int, group: list[tuple[str, nn.Parameter]]) -> GradientBucket:
    names = [name for name, _ in group]
    parameters = [parameter for _, parameter in group]
    numel = sum(parameter.numel() for parameter in parameters)
    flat = torch.zeros(numel, dtype=parameters[0].dtype, device=parameters[0].device)
    views, orders = create_views(flat, parameters)
    return GradientBucket(index, flat, names, parameters, views, orders)


def create_views(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """Returns views of a flat tensor in the shapes and strides of tensors, and the order of their dimensions."""
    orders = [_find_memory_order(tensor) for tensor in tensors]
    views, start = [], 0
    for tensor, order in zip(tensors, orders, strict=True):
        if tensor.permute(order).is_contiguous():
            views.append(flat.as_strided(tensor.shape, tensor.stride(), start))
        else:
            views.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return views, orders


def _find_memory_order(parameter: Tensor) -> tuple[int, ...]:
    """Returns the dimensions of a tensor, outermost in memory first; unchanged if memory has gaps or overlaps."""
    dims, strides = tuple(range(parameter.dim())), parameter.stride()
    order = tuple(sorted(dims, key=strides.__getitem__, reverse=True))
    return order if not parameter.is_contiguous() and parameter.permute(order).is_contiguous() else dims
