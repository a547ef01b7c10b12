"""Staging: copies payloads between another device and the host, through pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from farflung.tasks import Pending, create_completed
from farflung.trees import map_tensors
from farflung.types import Payload

__all__ = ["Stage", "copy_tensor_to_device", "copy_to_device", "is_on_host", "stage_blocking", "to_host"]

Stage: TypeAlias = Callable[[Payload], Pending[Payload]]
"""Copies a payload to the host."""


def is_on_host(payload: Payload) -> bool:
    """Returns True if the whole payload is in the host's memory."""
    return all(is_on_host(part) if isinstance(part, Payload) else part.is_cpu for part in payload.parts)


def to_host(payload: Payload) -> tuple[Payload, Callable[[], None]]:
    """Starts to copy a payload from its devices, after the calling thread's earlier work on them.

    Returns:
      The payload in pinned host memory, and a function that waits for the copies. Call it before the payload is
      read, on a thread that may block.
    """
    devices = {tensor.device for tensor in payload.iter_tensors() if tensor.device.type != "cpu"}
    host = map_tensors(payload, lambda tensor: tensor.to("cpu", non_blocking=True))
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return host, wait


def stage_blocking(payload: Payload) -> Pending[Payload]:
    """Copies a payload to the host; the :data:`Stage` of a thread that may block."""
    host, wait = to_host(payload)
    wait()
    return create_completed(host)


def copy_to_device(payload: Payload, device: torch.device) -> Payload:
    """Copies a payload to ``device`` without waiting; later work on the device is ordered after the copies."""
    return (
        payload
        if device.type == "cpu"
        else map_tensors(payload, lambda tensor: copy_tensor_to_device(tensor, device))
    )


def copy_tensor_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a CUDA device through pinned memory, without waiting."""
    return tensor if tensor.device == device else tensor.pin_memory().to(device, non_blocking=True)
