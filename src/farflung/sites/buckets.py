"""Gradient buckets of one process of a site, which exchanges its share of the site's replica."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from farflung.config import BUCKET_NBYTES
from farflung.engine import GradientBucket, GradientBuckets
from farflung.engine.buckets import create_views, group_parameters
from farflung.engine.placement import record_stream, to_local
from farflung.sites.site import Holders, ReplicaSite
from farflung.types import TensorSpec

__all__ = ["SiteBucket", "SiteBuckets"]


class SiteBucket(GradientBucket):
    """Flat tensor of the parts that this process holds of some parameters, all with equal holders.

    Each of m holders exchanges 1/m of it, which is :attr:`gradient`; results are gathered among them. So copies inside
    a site are equal by construction. A share has at least one element, so that every process takes part in every
    decision.

    Args:
      index: Index in backward order.
      named_parameters: Names and parameters.
      site: ReplicaSite of this process.
      partition: Processes of the site, grouped by the parts that they hold.
      num_replicas: Number of holders that torch keeps equal, as the placements of the parameters say. If there are more
        holders, each computes gradients from a batch of its own, and they are averaged.
    """

    def __init__(
        self,
        index: int,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        site: ReplicaSite,
        partition: Holders,
        num_replicas: int,
    ) -> None:
        holders = site.find_own(partition)
        names, parameters = (
            [name for name, _ in named_parameters],
            [parameter for _, parameter in named_parameters],
        )
        tensors = [to_local(parameter) for parameter in parameters]
        self._site, self._num_holders, self._is_averaged = site, len(holders), len(holders) > num_replicas
        self._group = site.get_group(holders) if len(holders) > 1 else None
        self._numel = sum(tensor.numel() for tensor in tensors)
        share_numel = max(1, math.ceil(self._numel / len(holders)))
        self._padded_numel = share_numel * len(holders)
        self._start = holders.index(site.rank) * share_numel
        # Behind the gradients is a flag for each parameter: the number of holders that have a gradient.
        self._flat = tensors[0].new_zeros(self._padded_numel + len(parameters) * self._is_averaged)
        views, orders = create_views(self._flat, tensors)
        super().__init__(
            index, self._flat[self._start : self._start + share_numel], names, parameters, views, orders
        )
        self._gradients = [self._wrap(place) for place in range(len(parameters))]

    @property
    @override
    def tensors(self) -> list[Tensor]:
        return [to_local(parameter) for parameter in self.parameters]

    @property
    @override
    def spec(self) -> TensorSpec:
        """Spec of the share; without parameters if it cuts through them because other holders have the rest."""
        return super().spec if self._group is None else TensorSpec.from_tensor(self.gradient)

    @property
    def is_finite(self) -> bool:
        """Returns True if all gradients of this process are finite."""
        return bool(self._flat.isfinite().all())

    @override
    def copy_weights(self, out: Tensor | None = None) -> Tensor:
        """Returns a flat copy of this process's share of the parameters, in ``out`` if it is given."""
        flat = super().copy_weights()
        if self._padded_numel > self._numel:
            flat = torch.cat([flat, flat.new_zeros(self._padded_numel - self._numel)])
        share = flat[self._start : self._start + self.gradient.numel()]
        if out is not None:
            return out.copy_(share)
        return share if self._group is None else share.clone()

    @override
    def view(self, flat: Tensor) -> list[Tensor]:
        """Returns the parts of a tensor of which each holder has a share; all holders call this."""
        return super().view(self._gather_shares(flat))

    @override
    def load_gradient(self, mean: Tensor) -> None:
        """Sets each ``p.grad`` from the holders' shares of the mean; all holders call this."""
        if self._group is not None or mean.data_ptr() != self._flat.data_ptr():
            self._flat[: self._padded_numel].copy_(self._gather_shares(mean))
        self.assign_gradients()

    @override
    def has_values(self, view: Tensor) -> bool:
        """Returns True if a part of the mean is not all zeros on any process."""
        return self._site.has_any(super().has_values(view))

    @override
    def gather(self) -> None:
        """Copies gradients outside the flat tensor into it, replaces them by views, and zeros missing ones."""
        views, grads, zero_places = [], [], []
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.grad is None:
                zero_places.append(place)
                continue
            grad = _get_local_gradient(parameter)
            if grad.data_ptr() != view.data_ptr() or not grad.numel():
                views.append(view)
                grads.append(grad)
                self._set_gradient(place)
        self.zero_missing_gradients(zero_places)
        if views:
            torch._foreach_copy_(views, grads)

    def average(self) -> None:
        """Averages gradients that the holders computed from batches of their own; all holders call this.

        A gradient that only some of them lack counts as zeros.
        """
        if not self._is_averaged:
            return
        flags = self._flat[self._padded_numel :].fill_(1)
        flags[list(self.zero_places)] = 0
        summed = self._site.move_to_group(self._flat)
        with self._site.wrap_errors():
            dist.all_reduce(summed, group=self._group)
        self._flat.copy_(summed)
        self._flat[: self._numel].div_(self._num_holders)
        if self.zero_places:
            local_places, used = self.zero_places, flags.tolist()
            self.zero_missing_gradients([place for place in local_places if not used[place]])
            for place in set(local_places).difference(self.zero_places):
                self._set_gradient(place)

    def _gather_shares(self, share: Tensor) -> Tensor:
        """Returns the flat tensor of which each holder has a share."""
        if self._group is None:
            return share
        sent = self._site.move_to_group(share.contiguous()).view(
            torch.uint8
        )  # backends differ in their dtypes
        gathered = sent.new_empty(sent.numel() * self._num_holders)
        with self._site.wrap_errors():
            dist.all_gather(list(gathered.chunk(self._num_holders)), sent, self._group)
        return gathered.view(share.dtype).to(share.device)

    @override
    def _set_gradient(self, place: int) -> None:
        if to_local(self._gradients[place]).data_ptr() != self.views[place].data_ptr():
            self._gradients[place] = self._wrap(place)
        self.parameters[place].grad = self._gradients[place]

    def _wrap(self, place: int) -> Tensor:
        """Returns the gradient of a parameter with the layout of the parameter, in the memory of its view."""
        parameter: Any = self.parameters[place]
        view = self.views[place].detach()
        if not hasattr(parameter, "device_mesh"):
            return view
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            view,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


class SiteBuckets(GradientBuckets):
    """Buckets of one process of a site; those of all its processes have the same parameters.

    Args:
      named_parameters: Pairs as from :meth:`torch.nn.Module.named_parameters`.
      bucket_nbytes: Size in bytes of a process's share at which a bucket is closed.
      site: ReplicaSite of this process.
      should_check_gradients: True to agree in the site if gradients are finite. If they are not, all processes exchange
        NaN. This holds all buckets until the end of the backward pass, as do plain parameters beside sharded ones: an
        average of those would wait for processes that wait in FSDP2.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        bucket_nbytes: int = BUCKET_NBYTES,
        *,
        site: ReplicaSite,
        should_check_gradients: bool = False,
    ) -> None:
        self._site, self._should_check_gradients = site, should_check_gradients
        self._waits: dict[int, Callable[[], None]] = {}
        """Full buckets that have not been released, each with a function that waits for its copies."""
        self._ready: Callable[[int], None]
        self._next_index = 0
        """Next bucket to release; all processes release them in this order."""
        super().__init__(named_parameters, bucket_nbytes)

    @override
    def _build(
        self, trainable: Sequence[tuple[str, nn.Parameter]], bucket_nbytes: int
    ) -> Sequence[GradientBucket]:
        holders = self._site.find_holders(trainable)
        replicas = {name: _count_replicas(parameter) for name, parameter in trainable}

        def get_key(name: str, parameter: nn.Parameter) -> object:
            return parameter.dtype, parameter.device, holders[name], replicas[name]

        groups = group_parameters(reversed(trainable), bucket_nbytes * self._site.size, get_key)
        self._site_buckets = [
            SiteBucket(index, group, self._site, holders[group[0][0]], replicas[group[0][0]])
            for index, group in enumerate(groups)
        ]
        num_sharded = sum(hasattr(parameter, "device_mesh") for _, parameter in trainable)
        self._should_hold = self._should_check_gradients or 0 < num_sharded < len(trainable)
        self._site.check_equal("buckets", [[*bucket.names] for bucket in self._site_buckets])
        return self._site_buckets

    @override
    def arm(self, ready: Callable[[int], None]) -> None:
        def handle_full(index: int) -> None:
            self._waits[index] = record_stream(self[index].gradient.device)
            if not self._should_hold:
                self._release()

        self._waits.clear()
        self._next_index, self._ready = 0, ready
        super().arm(handle_full)

    @override
    def has_kept_gradients(self, parameter: nn.Parameter) -> bool:
        return self._site.has_any(super().has_kept_gradients(parameter))

    @override
    def has_zeroed_gradients(self, arriving: nn.Parameter | None = None) -> bool:
        gradients = list(self._iter_kept(arriving))
        have_values = any(bool(gradient.any()) for gradient in gradients)
        exist, have, had = self._site.reduce([bool(gradients), have_values, any(map(bool, self._had_values))])
        return min(exist, had) > have

    @override
    def is_finite(self) -> bool:
        return not self._site.has_any(not super().is_finite())

    @override
    def _fill_missing(self, ready: Callable[[int], None]) -> None:
        super()._fill_missing(ready)
        if self._should_check_gradients and self._site.has_any(
            not all(bucket.is_finite for bucket in self._site_buckets)
        ):
            self[0].gradient.fill_(math.nan)
        self._release()

    def _release(self) -> None:
        """Averages and announces full buckets by index, up to the first that is not full."""
        while (wait := self._waits.pop(self._next_index, None)) is not None:
            wait()
            bucket = self._site_buckets[self._next_index]
            bucket.average()
            self._next_index += 1
            self._ready(bucket.index)


def _count_replicas(parameter: Tensor) -> int:
    """Returns the number of processes on which torch keeps a part of a parameter equal."""
    placements = getattr(parameter, "placements", ())
    sizes: Sequence[int] = parameter.device_mesh.shape if placements else ()  # type: ignore[attr-defined]
    return math.prod(
        size for size, placement in zip(sizes, placements, strict=True) if placement.is_replicate()
    )


def _get_local_gradient(parameter: Tensor) -> Tensor:
    """Returns this process's part of a gradient, in the placements of its parameter."""
    grad: Any = parameter.grad
    if hasattr(grad, "placements") and grad.placements != parameter.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return to_local(grad)
