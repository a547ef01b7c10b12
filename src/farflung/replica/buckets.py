"""Flat gradient buckets: gradients become views of a few contiguous tensors that fill from the output side."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from farflung.config import BUCKET_NBYTES
from farflung.errors import ConfigError, Unsupported
from farflung.types import Bucket, Json, Placed, TensorSpec

__all__ = ["Filling", "GradientBuckets", "fillings"]

FIRST_NBYTES = 1 << 20
"""The first bucket is smaller, so that the first exchange starts early; DistributedDataParallel's choice too."""


@dataclass(slots=True)
class Filling:
    """A flat tensor that fills with the gradients of some parameters; all views of it, in their order.

    The elements of a parameter lie in the order of its memory, so that its view has its strides: fused optimizers step
    on memory, as if both had the same layout.
    """

    flat: Tensor
    names: list[str]
    parameters: list[nn.Parameter]
    views: list[Tensor]
    orders: list[tuple[int, ...]]
    """Dimensions of each parameter, outermost in memory first."""
    missing: set[int]
    gradients: list[Tensor] = field(init=False)
    """What parameters have as gradients: the views, as other tensors, since a loop may set their ``data``."""
    restrided: set[int] = field(default_factory=set)
    """Places of parameters whose strides are not those of their views: gradients are copied."""
    absent: tuple[int, ...] = ()
    """Places that had no gradient when the last backward pass was through, in ascending order."""
    gaps: list[Tensor] = field(default_factory=list)
    """Their elements of the flat tensor, a view for each run of neighbours."""

    def __post_init__(self) -> None:
        self.gradients = [view.detach() for view in self.views]

    def give(self, place: int) -> None:
        """Makes a part of the flat tensor the gradient of its parameter."""
        view, gradient, parameter = self.views[place], self.gradients[place], self.parameters[place]
        if place in self.restrided:
            parameter.grad = torch.empty_like(parameter).copy_(view)
            return
        if gradient.data_ptr() != view.data_ptr():
            gradient = self.gradients[place] = view.detach()
        parameter.grad = gradient

    @property
    def spec(self) -> TensorSpec:
        """The flat tensor's, with what it is made of; shapes are in the order of memory."""
        places, start = [], 0
        for parameter, order in zip(self.parameters, self.orders, strict=True):
            places.append(Placed(tuple(parameter.shape[dim] for dim in order), start))
            start += parameter.numel()
        return replace(TensorSpec.of(self.flat), parts=tuple(places))

    @property
    def layout(self) -> list[Json]:
        """Shapes of the parameters, and the order of their dimensions in memory."""
        return [[list(p.shape), list(order)] for p, order in zip(self.parameters, self.orders, strict=True)]

    def view(self, flat: Tensor) -> list[Tensor]:
        """Returns views of a contiguous tensor of this size, one in the shape and strides of each parameter."""
        offset = flat.storage_offset()
        return [flat.as_strided(v.shape, v.stride(), offset + v.storage_offset()) for v in self.views]


class GradientBuckets:
    """Buckets of a model's gradients, in backward order.

    Parameters are taken in reverse order of registration, frozen ones left out, tied ones once, each dtype in
    buckets of its own. After a backward pass ``p.grad`` is a view of its bucket; ``zero_grad(set_to_none=True)`` may
    take it away at any time, the next backward puts it back. A parameter that no loss reached contributes zeros,
    which is said once, and keeps no gradient, so that an optimizer leaves it alone.

    Args:
      named_parameters: as :meth:`torch.nn.Module.named_parameters` gives them.
      bucket_nbytes: a bucket is closed once it holds this many bytes; the first at 1 MiB, where that is less.

    Raises:
      ConfigError: there is nothing to train.
      Unsupported: complex parameters.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], bucket_nbytes: int = BUCKET_NBYTES
    ) -> None:
        trained = [(name, p) for name, p in named_parameters if p.requires_grad]
        if not trained:
            raise ConfigError("the model has no parameter that requires a gradient")
        for name, p in trained:
            if p.is_complex():
                raise Unsupported(f"parameter {name} is complex: make its torch.view_as_real the parameter")
        self._fillings = fillings(trained, bucket_nbytes)
        self.buckets = tuple(Bucket(index, filling.spec) for index, filling in enumerate(self._fillings))
        self.numels = tuple(bucket.spec.numel for bucket in self.buckets)
        """Parameters in each bucket."""
        self._ready: Callable[[int], None] | None = None
        self._watcher: Callable[[nn.Parameter], None] | None = None
        self.lock = threading.RLock()
        """Held while a gradient is taken: autograd has a thread for each device."""
        self._said_unused = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index, place))
            for index, filling in enumerate(self._fillings)
            for place, parameter in enumerate(filling.parameters)
        ]

    @property
    def layout(self) -> list[Json]:
        """Layouts of the buckets, see :attr:`Filling.layout`."""
        return [filling.layout for filling in self._fillings]

    @property
    def nbytes(self) -> int:
        """Bytes of one dense gradient."""
        return sum(bucket.spec.nbytes for bucket in self.buckets)

    def flat(self, index: int) -> Tensor:
        return self._fillings[index].flat

    def parameters(self, index: int) -> list[nn.Parameter]:
        """The parameters whose gradients are in a bucket, in its order."""
        return self._fillings[index].parameters

    def backward(self, loss: Tensor, ready: Callable[[int], None]) -> None:
        """Runs autograd; ``ready(index)`` is called as each bucket fills, once for each and by one thread at a time."""
        self.arm(ready)
        try:
            loss.backward()
            self.finish()
        finally:
            self._ready = None

    def watch(self, watcher: Callable[[nn.Parameter], None]) -> None:
        """Calls ``watcher`` inside autograd whenever a gradient has arrived, before it counts: it may :meth:`arm`."""
        self._watcher = watcher

    def arm(self, ready: Callable[[int], None]) -> None:
        """From here to :meth:`finish`, ``ready(index)`` is called as each bucket fills."""
        for filling in self._fillings:
            filling.missing = set(range(len(filling.parameters)))
        self._ready = ready

    @property
    def left(self) -> list[str]:
        """The parameters that no gradient has reached since :meth:`arm`, by name."""
        return [filling.names[place] for filling in self._fillings for place in sorted(filling.missing)]

    def finish(self) -> None:
        """Autograd is through: parameters that no gradient reached contribute zeros."""
        assert self._ready is not None
        unused = [] if self._said_unused else self.left
        self._fill(self._ready)
        self._ready = None
        if unused:
            self._said_unused = True
            warnings.warn(
                f"{len(unused)} parameters had no part in the loss and contribute zeros: {', '.join(unused[:4])}"
                + (" ..." if len(unused) > 4 else ""),
                stacklevel=2,
            )

    def without_data(self, ready: Callable[[int], None]) -> None:
        """In place of a backward pass: all contribute zeros."""
        self.clear()
        self.arm(ready)
        self._fill(ready)
        self._ready = None

    def absent(self, index: int) -> tuple[int, ...]:
        """The places in a bucket that had no gradient when the last backward pass was through, in ascending order."""
        return self._fillings[index].absent

    def load(
        self, index: int, mean: Tensor, unused: Collection[int] = (), never: Collection[int] = ()
    ) -> None:
        """Makes ``mean`` the gradient of a bucket's parameters, but for those that have been frozen.

        Args:
          index: of the bucket.
          mean: as flat as the bucket.
          unused: places that no replica had a gradient for; they get none, unless the mean has something for them,
            which a codec had held back from earlier steps.
          never: places that none has ever had one for; they get none.
        """
        filling = self._fillings[index]
        if mean.data_ptr() != filling.flat.data_ptr():
            filling.flat.copy_(mean)
        for place, (parameter, view) in enumerate(zip(filling.parameters, filling.views, strict=True)):
            if place in never or not parameter.requires_grad or (place in unused and not view.any()):
                parameter.grad = None
            else:
                filling.give(place)

    def weights(self, index: int) -> Tensor:
        """A copy of a bucket's parameters, flat and in its order."""
        filling = self._fillings[index]
        ordered = zip(filling.parameters, filling.orders, strict=True)
        return torch.cat([p.detach().permute(order).reshape(-1) for p, order in ordered])

    def view(self, index: int, flat: Tensor) -> list[Tensor]:
        """Returns views of a tensor as flat as a bucket, one in the shape and strides of each of its parameters."""
        return self._fillings[index].view(flat)

    def copied(self, index: int, flat: Tensor) -> Tensor:
        """Copies a tensor of a bucket's size to the device of the bucket."""
        return flat.to(self._fillings[index].flat.device, copy=True)

    def load_weights(self, index: int, flat: Tensor) -> None:
        """Overwrites a bucket's parameters."""
        filling = self._fillings[index]
        with torch.no_grad():
            for parameter, values in zip(filling.parameters, filling.view(flat), strict=True):
                parameter.copy_(values)

    def named(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Flat tensors, one for each bucket, as tensors by the names of the parameters."""
        return {
            name: values
            for filling, flat in zip(self._fillings, flats, strict=True)
            for name, values in zip(filling.names, filling.view(flat), strict=True)
        }

    def has_kept_gradients(self, arriving: nn.Parameter) -> bool:
        """Returns True if the last pass's gradients are still there when ``arriving`` gets the first one of another."""
        return any(bool(gradient.any()) for gradient in self._find_kept(arriving))

    def has_zeroed_gradients(self, arriving: nn.Parameter | None = None) -> bool:
        """Returns True if the gradients of the last pass have been overwritten with zeros, and not taken away."""
        held = [*self._find_kept(arriving)]
        return bool(held) and not any(bool(gradient.any()) for gradient in held)

    def _find_kept(self, arriving: nn.Parameter | None) -> Iterator[Tensor]:
        for filling in self._fillings:
            for parameter, view in zip(filling.parameters, filling.views, strict=True):
                grad = parameter.grad
                if parameter is not arriving and grad is not None and grad.data_ptr() == view.data_ptr():
                    yield grad

    def is_finite(self) -> bool:
        """Returns True if the gradients of the last pass, which may have been taken away since, are all numbers."""
        return all(bool(filling.flat.isfinite().all()) for filling in self._fillings)

    def has_replaced_gradients(self) -> bool:
        """Returns True if a gradient has been taken away or replaced since it was filled in."""
        return any(
            (grad := parameter.grad) is not filling.gradients[place]
            and place not in exempt
            and (grad is None or grad.data_ptr() != filling.views[place].data_ptr())
            for filling in self._fillings
            for exempt in [filling.restrided.union(filling.absent)]
            for place, parameter in enumerate(filling.parameters)
        )

    def clear(self) -> None:
        """Takes all gradients away, so that an optimizer's step does nothing."""
        for filling in self._fillings:
            for parameter in filling.parameters:
                parameter.grad = None

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, index: int, place: int) -> Callable[[Tensor], None]:
        parameter = self._fillings[index].parameters[place]

        def accumulated(_: Tensor) -> None:
            with self.lock:
                if self._watcher is not None:
                    self._watcher(parameter)
                if self._ready is not None:
                    self._arrived(index, place, self._ready)

        return accumulated

    def _arrived(self, index: int, place: int, ready: Callable[[int], None]) -> None:
        filling = self._fillings[index]
        if place not in filling.missing:
            raise Unsupported(
                f"parameter {filling.names[place]} got its gradient in two parts in one backward pass, as where a "
                "layer is used by several reentrant checkpoints: give torch.utils.checkpoint use_reentrant=False"
            )
        filling.missing.remove(place)
        if not filling.missing:
            _gather(filling)
            ready(index)

    def _fill(self, ready: Callable[[int], None]) -> None:
        for index, filling in enumerate(self._fillings):
            if not filling.missing:
                continue
            filling.missing = set()
            _gather(filling)
            ready(index)


def _gather(filling: Filling) -> None:
    """Copies gradients that are not views yet into the flat tensor, and puts the views in their place."""
    views, grads, absent = [], [], []
    for place, (parameter, view) in enumerate(zip(filling.parameters, filling.views, strict=True)):
        grad = parameter.grad
        if grad is None:
            absent.append(place)
            continue
        if grad.layout is not torch.strided:
            raise Unsupported(
                f"the gradient of parameter {filling.names[place]} is sparse: give the embedding sparse=False"
            )
        if grad.data_ptr() != view.data_ptr() or grad.numel() == 0:
            views.append(view)
            # A gradient of backward(create_graph=True) has a graph.
            grads.append(grad.detach() if grad.requires_grad else grad)
            if parameter.stride() == view.stride():
                filling.give(place)
            else:
                filling.restrided.add(place)
    if filling.absent != (places := tuple(absent)):
        filling.absent, filling.gaps = places, _gaps(filling, places)
    for gap in filling.gaps:
        gap.zero_()
    if views:
        torch._foreach_copy_(views, grads)


def _gaps(filling: Filling, places: Sequence[int]) -> list[Tensor]:
    """Returns the elements of some places, in ascending order, as few views of the flat tensor."""
    gaps: list[tuple[int, int]] = []
    for place in places:
        first = int(filling.views[place].storage_offset())
        last = first + filling.views[place].numel()
        if gaps and gaps[-1][1] == first:
            first = gaps.pop()[0]
        gaps.append((first, last))
    return [filling.flat[first:last] for first, last in gaps]


def fillings(
    trained: Sequence[tuple[str, nn.Parameter]], bucket_nbytes: int = BUCKET_NBYTES
) -> list[Filling]:
    """The buckets of some named parameters, in reverse order; a dtype and a device in buckets of its own."""
    return [_filling(group) for group in _grouped(reversed(trained), bucket_nbytes)]


def _grouped(
    named: Iterable[tuple[str, nn.Parameter]], bucket_nbytes: int
) -> list[list[tuple[str, nn.Parameter]]]:
    groups: list[list[tuple[str, nn.Parameter]]] = []
    open_group: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    first = True
    for name, parameter in named:
        key = (parameter.dtype, parameter.device)
        if key not in open_group:
            open_group[key], filled[key] = [], 0
            groups.append(open_group[key])
        open_group[key].append((name, parameter))
        filled[key] += parameter.nbytes
        if filled[key] >= (min(FIRST_NBYTES, bucket_nbytes) if first else bucket_nbytes):
            del open_group[key]
            first = False
    return groups


def _filling(group: list[tuple[str, nn.Parameter]]) -> Filling:
    names = [name for name, _ in group]
    parameters = [parameter for _, parameter in group]
    numel = sum(parameter.numel() for parameter in parameters)
    flat = torch.zeros(numel, dtype=parameters[0].dtype, device=parameters[0].device)
    orders = [_memory_order(parameter) for parameter in parameters]
    views, start = [], 0
    for parameter, order in zip(parameters, orders, strict=True):
        if parameter.permute(order).is_contiguous():
            views.append(flat.as_strided(parameter.shape, parameter.stride(), start))
        else:
            views.append(flat[start : start + parameter.numel()].view(parameter.shape))
        start += parameter.numel()
    return Filling(flat, names, parameters, views, orders, set())


def _memory_order(parameter: Tensor) -> tuple[int, ...]:
    """Returns the dimensions of a tensor, outermost in memory first; as they are where memory has gaps or overlaps."""
    dims, strides = tuple(range(parameter.dim())), parameter.stride()
    order = tuple(sorted(dims, key=strides.__getitem__, reverse=True))
    return order if not parameter.is_contiguous() and parameter.permute(order).is_contiguous() else dims
