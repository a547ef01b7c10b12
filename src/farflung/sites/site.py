"""Processes of a site: which parts of the model each holds, and what they agree on."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farflung._torch import compute_local_part
from farflung.engine.placement import HOST, to_local
from farflung.errors import ConfigError, ProtocolError, RunLost, Unsupported
from farflung.types import Json
from farflung.wall import LaunchEnv
from farflung.wall.launch_env import SITE_VARIABLE

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Holders", "ReplicaSite"]

Holders: TypeAlias = tuple[tuple[int, ...], ...]
"""Processes of a site, grouped by the part of a parameter that they hold."""

_PATIENCE = 12
"""Deadlines for which processes of a site wait for each other: one may itself wait ten for a peer that answers."""


class ReplicaSite:
    """Processes that hold one replica together.

    Each exchanges its share of the replica with the process of the same number at the other sites. All processes of a
    site call the methods in one order, on the training thread. They use a process group of their own, so that this
    order does not mix with collectives of FSDP or of the loop.

    Args:
      group: Process group or device mesh of the site.
      deadline_s: Deadline of the run in seconds.

    Raises:
      ConfigError: This process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh, deadline_s: float) -> None:
        if isinstance(group, dist.ProcessGroup):
            ranks = dist.get_process_group_ranks(group)
        else:  # torch gives non-members a number instead of a group
            ranks = group.mesh.flatten().tolist() if hasattr(group, "mesh") else []
        self.ranks: list[int] = sorted(ranks)
        """Ranks of the processes in torch's default group."""
        if dist.get_rank() not in self.ranks:
            raise ConfigError(
                f"attach: site: process {dist.get_rank()} is not in it: give the mesh or the process group of this "
                "process's own site"
            )
        self._timeout = timedelta(seconds=_PATIENCE * deadline_s)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self._group = self.get_group(tuple(range(self.size)))
        config = dist.get_backend_config(self._group)
        self._device_types = [entry.partition(":")[0] for entry in config.split(",")]

    def locate(self, env: LaunchEnv) -> tuple[int, int]:
        """Returns the number of this site, and the number of sites.

        Args:
          env: Environment that counts sites, or the processes of all sites, one site after the other.

        Raises:
          ConfigError: It counts other processes.
          ProtocolError: The processes of the site have different numbers.
        """
        if env.counts_sites:
            self.check_equal(f"values of {SITE_VARIABLE}", [f"{env.rank}/{env.size}"])
            return env.rank, env.size
        number, share = divmod(env.rank, self.size)
        if env.size % self.size or share != self.rank or self.ranks[-1] - self.ranks[0] >= self.size:
            raise ConfigError(
                f"attach: site: process {env.rank} of {env.size} is number {self.rank} of its site of {self.size}: "
                f"give each site's launcher {SITE_VARIABLE}=NUMBER/COUNT@HOST:PORT, or number the processes of one "
                "launcher site by site"
            )
        if env.size == self.size:
            warnings.warn(
                f"attach: this site has all {env.size} processes of its launcher and trains alone: give the launcher "
                f"of each site {SITE_VARIABLE}=NUMBER/COUNT@HOST:PORT",
                stacklevel=3,
            )
        return number, env.size // self.size

    def connect_store(
        self, env: LaunchEnv, store: dist.Store | None, connect_timeout_s: float
    ) -> dist.Store | None:
        """Returns the part of a store where the processes of this number meet; ``None`` for a single site.

        Args:
          env: Environment that counts sites, or the processes of all sites.
          store: Store of all processes; by default the one of ``env``.
          connect_timeout_s: Maximum time in seconds until it is reached.
        """
        if store is None:
            # The first process of site 0 serves the store, and no other process of that site.
            store = replace(env, served=env.served or (env.counts_sites and self.rank > 0)).connect_store(
                connect_timeout_s
            )
        return None if store is None else dist.PrefixStore(f"share-{self.rank}", store)

    # --- agreement ------------------------------------------------------------------------------------------------

    def reduce(self, values: Sequence[float], op: Any = dist.ReduceOp.MAX) -> list[float]:
        """Returns the reduced numbers of all processes."""
        tensor = self.move_to_group(torch.tensor(values, dtype=torch.float64))
        with self.wrap_errors():
            dist.all_reduce(tensor, op, self._group)
        return [*tensor.tolist()]

    def has_any(self, flag: bool) -> bool:
        """Returns True if the flag of any process is True."""
        return self.reduce([float(flag)])[0] > 0

    def average(self, value: float) -> float:
        """Returns the mean of the processes' values."""
        return self.reduce([value], dist.ReduceOp.SUM)[0] / self.size

    def gather(self, value: Json) -> list[Any]:
        """Returns the JSON values of all processes."""
        content = json.dumps(value).encode()
        numel = int(self.reduce([len(content)])[0])
        tensor = self.move_to_group(torch.frombuffer(bytearray(content.ljust(numel)), dtype=torch.uint8))
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.wrap_errors():
            dist.all_gather(rows, tensor, self._group)
        return [json.loads(bytes(row.tolist())) for row in rows]

    def select_first(self, value: Json) -> Any:
        """Returns the JSON value of the first process."""
        return self.gather(value)[0]

    def check_equal(self, what: str, values: Sequence[Json]) -> None:
        """Checks that values are equal on all processes.

        Raises:
          ProtocolError: They are not; names two processes, and the first values that differ.
        """
        rows = self.gather([*values])
        for rank, row in zip(self.ranks, rows, strict=True):
            if row != rows[0]:
                first, second = next(pair for pair in zip_longest(rows[0], row) if pair[0] != pair[1])
                raise ProtocolError(
                    f"processes {self.ranks[0]} and {rank} of one site have different {what}: {first} and {second}"
                )

    def intersect(self, members: Sequence[int], size: int) -> tuple[int, ...]:
        """Returns the sites that are members for all processes.

        Args:
          members: Members of this process's view.
          size: Number of sites.
        """
        present = self.reduce([float(rank in members) for rank in range(size)], dist.ReduceOp.MIN)
        return tuple(rank for rank in range(size) if present[rank])

    # --- parts of the model ---------------------------------------------------------------------------------------

    def check_parameters(self, model: nn.Module) -> None:
        """Checks that the site alone holds the model.

        Raises:
          Unsupported: A parameter is sharded over processes outside the site.
        """
        for name, tensor in model.named_parameters():
            mesh = getattr(tensor, "device_mesh", None)
            if mesh is not None and not set(ranks := mesh.mesh.flatten().tolist()) <= set(self.ranks):
                raise Unsupported(
                    f"attach: parameter {name} is on processes {ranks}, and the site is {self._list_ranks()}: shard "
                    "the model within one site, since farflung joins the sites"
                )

    def find_holders(self, named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Holders]:
        """Returns the holders of each parameter by name, equal on all processes.

        Processes with equal parts hold them together. An empty part has a single holder.

        Raises:
          ProtocolError: The processes have different parameters.
        """
        named = list(named_parameters)
        self.check_equal(
            "parameters", [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in named]
        )
        tables = self.gather([compute_local_part(tensor) for _, tensor in named])
        return {
            name: _group_holders(parts)
            for (name, _), parts in zip(named, zip(*tables, strict=True), strict=True)
        }

    def get_group(self, holders: tuple[int, ...]) -> dist.ProcessGroup:
        """Returns the process group of some processes of the site, this one among them; all of them call this."""
        if holders not in self._groups:
            self._groups[holders] = dist.new_group(
                [self.ranks[rank] for rank in holders], timeout=self._timeout, use_local_synchronization=True
            )
        return self._groups[holders]

    def equalize(self, model: nn.Module) -> None:
        """Makes parts with several holders equal to those of the first holder, and buffers to the first process's."""
        holders = self.find_holders(model.named_parameters())
        tensors: list[tuple[Tensor, tuple[int, ...]]] = [
            *((tensor, self.find_own(holders[name])) for name, tensor in model.named_parameters()),
            *((tensor, tuple(range(self.size))) for tensor in model.buffers()),
        ]
        for tensor, own_holders in tensors:
            if len(own_holders) > 1:
                part = to_local(tensor)
                moved = self.move_to_group(part.contiguous())
                with self.wrap_errors():
                    dist.broadcast(moved, self.ranks[own_holders[0]], self.get_group(own_holders))
                part.copy_(moved)

    def find_own(self, holders: Holders) -> tuple[int, ...]:
        """Returns the processes that hold the same part as this one."""
        return next(group for group in holders if self.rank in group)

    def reshard(self, model: nn.Module) -> None:
        """Frees parameters that FSDP2 gathered in a forward pass, so that the next pass gathers the present shards."""
        for module in _list_fsdp_modules(model):
            module.reshard()

    def set_gradient_sync(self, model: nn.Module, *, is_syncing: bool) -> None:
        """Enables or disables FSDP2's reduction of gradients."""
        for module in _list_fsdp_modules(model):
            module.set_requires_gradient_sync(is_syncing, recurse=False)

    # --- collectives ----------------------------------------------------------------------------------------------

    def move_to_group(self, tensor: Tensor) -> Tensor:
        """Returns the tensor on a device that the site's process group supports; unchanged if it is on one."""
        if tensor.device.type in self._device_types:
            return tensor
        return tensor.to(HOST if HOST.type in self._device_types else self._device_types[0])

    @contextmanager
    def wrap_errors(self) -> Iterator[None]:
        """Converts errors of torch's collectives.

        Raises:
          RunLost: A process of the site has ended or does not come to the collective.
        """
        try:
            yield
        except RuntimeError as error:
            raise RunLost(
                f"another process of this site ({self._list_ranks()} of torch's default group) is lost or does not "
                f"come to the same step: {str(error).splitlines()[0]}"
            ) from error

    def close(self) -> None:
        """Frees the process groups."""
        for group in self._groups.values():
            dist.destroy_process_group(group)

    def _list_ranks(self) -> str:
        return f"processes {', '.join(map(str, self.ranks))}"


def _group_holders(parts: Sequence[Any]) -> Holders:
    """Groups processes by their parts of a parameter, each a shape and an offset."""
    groups: dict[str, list[int]] = {}
    for rank, (shape, offset) in enumerate(parts):
        groups.setdefault(f"{shape} {offset}" if 0 not in shape else f"empty {rank}", []).append(rank)
    return tuple(map(tuple, groups.values()))


def _list_fsdp_modules(model: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
    ]
