"""Device of a replica, and transfer of samples and states to it."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from farflung.comm.staging import copy_tensor_to_device
from farflung.errors import ConfigError
from farflung.types import Batch, State

__all__ = ["HOST", "move_batch", "move_state", "record_stream", "select_device", "synchronize", "to_local"]

HOST = torch.device("cpu")
"""Default device."""


def select_device(
    device: str, *, local_rank: int = 0, local_size: int = 1, option: str = "--device"
) -> torch.device:
    """Returns the device of a replica on this machine.

    Args:
      device: ``cpu``; ``cuda`` for a device by the replica's local rank; or ``cuda:1``, for instance, for all replicas.
      local_rank: Number of the replica on this machine, torchrun's ``LOCAL_RANK``.
      local_size: Number of replicas on this machine, torchrun's ``LOCAL_WORLD_SIZE``.
      option: Option named in messages.

    Raises:
      ConfigError: the device does not exist, or there are fewer than replicas.
    """
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if match is None:
        raise ConfigError(
            f"{option} {device}: must be cpu, cuda (one for each replica) or, for instance, cuda:0 (one for all)"
        )
    if device == "cpu":
        return HOST
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(f"{option} {device}: torch sees no CUDA device on this machine: use {option} cpu")
    if match[1] is not None:
        if int(match[1]) >= count:
            raise ConfigError(f"{option} {device}: this machine's last CUDA device is cuda:{count - 1}")
        return torch.device(device)
    if local_size > count:
        raise ConfigError(
            f"{option} cuda: {local_size} replicas here for {count} CUDA devices: start fewer, or have them share one "
            f"with {option} cuda:0"
        )
    return torch.device("cuda", local_rank)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Copies a batch to ``device`` without waiting for the copies."""
    if device == HOST:
        return batch
    return Batch(copy_tensor_to_device(batch.inputs, device), copy_tensor_to_device(batch.targets, device))


def move_state(state: State, device: torch.device) -> State:
    """Moves the tensors of a state to ``device``."""
    return {
        name: move_state(leaf, device)
        if isinstance(leaf, dict)
        else leaf.to(device)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for name, leaf in state.items()
    }


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that this process holds, without its graph and in the same memory.

    That is the local tensor of a DTensor, and all of any other tensor.
    """
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def record_stream(device: torch.device) -> Callable[[], None]:
    """Returns a function that makes another thread's stream wait for the work queued on this thread's."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.current_stream(device).record_event()
    return lambda: torch.cuda.current_stream(device).wait_event(event)


def synchronize(device: torch.device) -> None:
    """Waits until ``device`` has completed the work of this thread, so that its time counts as computing."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
