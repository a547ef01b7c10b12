"""The first steps of a training: how many say enough about it, and a digest of where they end."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import torch
from torch import nn

from farflung.replica.buckets import GradientBuckets
from farflung.types import HasPhases, Reducer, Schedule, Transfer

__all__ = ["combined", "digest", "first_steps", "machine"]

AT_LEAST = 20
COUNTED = ("warmup_steps", "warm_up")
"""Settings of codecs and reducers that are a step after which they do something else."""


def first_steps(model: nn.Module, schedule: Schedule, reducer: Reducer, total: int) -> int:
    """Steps until everything that a recipe ever does has happened twice; 20 at least, and ``total`` at most.

    What a schedule does are its transfers: two are of one kind that differ in nothing but their step, and have happened
    once they are merged. So there are two merges after a warm-up as well. Asking for measured times is another event.
    What a codec or reducer does is counted from the end of its warm-up.

    Args:
      model: whose buckets are planned for.
      schedule: plans the transfers.
      reducer: carries them.
      total: steps of the whole training.
    """
    state, moved = schedule.init(), schedule.parts(GradientBuckets(model.named_parameters()).buckets)
    events: dict[Transfer | None, list[int]] = {}
    for step in range(total):
        if schedule.asks(state, step):
            events.setdefault(None, []).append(step)
        for transfer in schedule.plan(state, moved, step):
            kind = replace(transfer, due_step=transfer.due_step - step)
            events.setdefault(kind, []).append(transfer.due_step)
    second = (sorted(steps)[:2][-1] for steps in events.values())
    starts = list(_counted(reducer))
    changes = (start + 1 for start in starts)
    phases = max(starts, default=0) + reducer.exchanges_until(2) if isinstance(reducer, HasPhases) else 0
    return min(total, max([phases, AT_LEAST, *(1 + step for step in (*second, *changes))]))


def _counted(part: object) -> Iterator[int]:
    """The steps named by the settings of something and of what it is made of."""
    if isinstance(part, tuple):
        for one in part:
            yield from _counted(one)
    if is_dataclass(part):
        for field in fields(part):
            value = getattr(part, field.name)
            if field.name in COUNTED:
                yield value
            yield from _counted(value)


def digest(model: nn.Module) -> str:
    """SHA-256 of names, dtypes, shapes and bytes of all parameters and buffers."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def combined(digests: Iterable[str]) -> str:
    """One digest of several, in their order."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def machine() -> str:
    """What the bits of a training depend on besides its code: torch, the processor, and the instructions torch uses.

    The model of the processor counts, since the libraries under torch choose their kernels by it.
    """
    return f"torch {torch.__version__}, {_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    said = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    known = [said[name] for name in ("vendor_id", "cpu family", "model") if name in said]
    return " ".join(known or [platform.machine()])
