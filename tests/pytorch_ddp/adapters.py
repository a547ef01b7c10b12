"""What stands for DistributedDataParallel in PyTorch's tests of it: a DDP with the hook, or attach with DDP's face."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel, distributed

import farflung
from farflung.wall import LaunchEnv

DEADLINE_S = 30.0
OPTIONS = {
    "broadcast_buffers",
    "bucket_cap_mb",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
}
"""Arguments of DDP that change nothing under attach."""


def register_everywhere(how: str) -> None:
    """Registers ``ddp_hook(how)`` with each DDP before its first forward pass, unless the test registers a hook."""
    forward, register = DistributedDataParallel.forward, DistributedDataParallel.register_comm_hook

    def hooked_forward(self: Any, *args: Any, **keywords: Any) -> Any:
        if not self._comm_hooks:
            os.environ["RANK"] = str(dist.get_rank())
            register(self, *farflung.ddp_hook(how, group=self.process_group, deadline_s=DEADLINE_S))
        return forward(self, *args, **keywords)

    DistributedDataParallel.forward = hooked_forward  # type: ignore[method-assign]


class AttachedDDP(nn.Module):
    """Has DDP's face over :func:`farflung.attach`, by the recipe :attr:`how`.

    DDP knows no optimizer, so one with a learning rate of 0 stands for it. Arguments and methods of DDP that attach has
    no counterpart of are errors, by name.
    """

    how = "synchronous"

    def __init__(
        self,
        module: nn.Module,
        device_ids: object = None,
        output_device: object = None,
        process_group: dist.ProcessGroup | None = None,
        **options: object,
    ) -> None:
        super().__init__()
        del device_ids, output_device
        if unknown := options.keys() - OPTIONS:
            raise NotImplementedError(f"AttachedDDP: {sorted(unknown)}")
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained:
            raise RuntimeError("AttachedDDP: no parameter requires a gradient")
        self.module = module
        group = process_group or dist.group.WORLD
        assert group is not None
        rank, meeting = dist.get_rank(group), c10d._get_process_group_store(group)
        os.environ["RANK"] = str(dist.get_rank())
        self._handle = farflung.attach(
            module,
            torch.optim.SGD(trained, lr=0.0),
            self.how,
            launch_env=LaunchEnv(rank, dist.get_world_size(group), 0, 1),
            store=dist.PrefixStore(f"attached-{meeting.add(f'attached/{rank}', 1)}", meeting),
            deadline_s=DEADLINE_S,
        )

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.module(*args, **keywords)

    def no_sync(self) -> Any:
        return self._handle.no_sync()

    @contextlib.contextmanager
    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True) -> Iterator[None]:
        del divide_by_initial_world_size
        with self._handle.join() if enable else contextlib.nullcontext():
            yield


def attach_everywhere(how: str) -> None:
    """Puts :class:`AttachedDDP` in the place of DDP."""
    AttachedDDP.how = how
    for module in (nn.parallel, distributed):
        setattr(module, "DistributedDataParallel", AttachedDDP)  # noqa: B010


ADAPTERS: dict[str, Callable[[str], None]] = {
    "plain": lambda how: None,
    "hook": register_everywhere,
    "attach": attach_everywhere,
}
