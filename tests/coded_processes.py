"""Devices of coded training that are processes, and what goes wrong with them."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farflung.coded import messages
from farflung.coded.blocks import BlockStore
from farflung.coded.device import Device
from farflung.coded.linear_model import InMemoryProducts
from farflung.coded.meeting import Address, run_device
from farflung.coded.registry import BlockRegistry
from farflung.comm.channel import describe_tag
from farflung.tasks import Task
from farflung.types import Json
from farflung.wall import WallRuntime
from tests.coded_runs import Notes, part
from tests.forks import Fork
from tests.helpers import PATIENCE_S, Driver
from tests.lab.netns import enter

__all__ = ["Crowd", "Told", "descend", "trained"]

FEATURES = 20
ITERATIONS = 40
RATE = 4.0


def partition(number: int) -> tuple[Tensor, Tensor]:
    """Features and labels of 0 or 1 of one partition; unlike numbers of rows."""
    features, _ = part(number, FEATURES, 60 + 7 * number)
    random = torch.Generator().manual_seed(99)
    truth = torch.randn(FEATURES, 1, generator=random, dtype=torch.float64)
    return features, (features @ truth > 0).to(torch.float64)[:, 0]


async def descend(
    times: Callable[[Tensor], Any],
    transposed: Callable[[Tensor], Any],
    labels: Tensor,
    at: Callable[[int, Tensor], object],
    begin: int = 0,
    weights: Tensor | None = None,
) -> Tensor:
    """Gradient descent on the logistic loss; ``at`` is called before each iterate."""
    weights = torch.zeros(FEATURES, 1, dtype=torch.float64) if weights is None else weights
    for iterate in range(begin, ITERATIONS):
        at(iterate, weights)
        residuals = torch.sigmoid(await times(weights)) - labels[:, None]
        weights = weights - RATE / len(labels) * await transposed(residuals)
    return weights


def trained(partitions: int) -> Tensor:
    """The weights that come out where nothing goes wrong, on one machine."""
    parts = [partition(number) for number in range(partitions)]
    whole, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    products, driver = InMemoryProducts(whole), Driver()
    found = Task(
        descend(products.multiply, products.multiply_transposed, labels, lambda *_: None), driver.schedule
    )
    driver.run()
    return found.result()


# --- devices ----------------------------------------------------------------------------------------------------


def attend(
    host: str,
    port: int,
    number: int | None,
    folder: str,
    *,
    namespace: str | None = None,
    data: Callable[[int], tuple[Tensor, Tensor]] = partition,
) -> int:
    """What runs in the process of a device: says which process a rank is, and at the end what it has left."""
    torch.set_num_threads(1)
    if namespace is not None:
        enter(namespace)
    before_nbytes = memory_nbytes("VmRSS")
    holding = _Watched() if number is None else _Watched(f"part {number}", *data(number))
    met: list[tuple[Device, WallRuntime]] = []

    def note(device: Device, runtime: WallRuntime) -> None:
        met.append((device, runtime))
        Path(folder, f"rank-{runtime.comm.rank}-{os.getpid()}").touch()

    reason = run_device(Address(host, port), holding, patience_s=2 * PATIENCE_S, on_connect=note)
    device, runtime = met[-1]
    # A command that came in one burst with the end is not carried out any more.
    kept = [describe_tag(tag) for tag in runtime.session.mailbox._stored if tag != messages.COMMAND]
    left = {
        "reason": reason,
        "refused": device.num_refused,
        "kept": kept,
        "meetings": len(met),
        "blocks_nbytes": max(holding.dropped_at_nbytes, holding.nbytes),
        "grown_nbytes": memory_nbytes("VmHWM") - before_nbytes,
    }
    Path(folder, f"left-{os.getpid()}").write_text(json.dumps(left))
    return 0


class _Watched(BlockStore):
    """Knows how much it had before it let something go."""

    dropped_at_nbytes = 0

    def drop_block(self, block: int) -> None:
        self.dropped_at_nbytes = max(self.dropped_at_nbytes, self.nbytes)
        super().drop_block(block)


def memory_nbytes(name: str) -> int:
    """Of this process: what is resident now (``VmRSS``), or was at most (``VmHWM``)."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status[name].split()[0])


@dataclass
class Crowd:
    """Processes of devices, and which ranks they are.

    Args:
      address: of the coordinator.
      folder: where devices leave what they say.
      start: starts the process of a device, from what it calls.
      data: features and labels of a partition.
    """

    address: Address
    folder: Path
    start: Callable[..., Fork] = Fork
    data: Callable[[int], tuple[Tensor, Tensor]] = partition
    forks: list[Fork] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    """Processes."""

    def join(self, number: int | None, **options: Any) -> Fork:
        """One more device, with a partition or without."""
        options = {"data": self.data, **options}
        call = partial(attend, self.address.host, self.address.port, number, str(self.folder), **options)
        fork = self.start(call, log=self.folder / f"log-{len(self.forks)}")
        self.forks.append(fork)
        return fork

    def pid(self, rank: int) -> int:
        """Of the device of a rank that is there."""
        (found,) = self.folder.glob(f"rank-{rank}-*")
        return int(found.name.rpartition("-")[2])

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Kills a device, stops it or lets it go on."""
        pid = self.pid(rank)
        if number is signal.SIGKILL:
            self.killed.add(pid)
        os.kill(pid, number)

    def left(self) -> list[dict[str, Any]]:
        """What each device that has not been killed has left, once all have ended."""
        found = []
        for fork in self.forks:
            code = fork.wait(2 * PATIENCE_S)
            if fork.pid in self.killed:
                assert code == -signal.SIGKILL
            else:
                assert code == 0, (code, [log.read_text() for log in self.folder.glob("log-*")])
                found.append(json.loads((self.folder / f"left-{fork.pid}").read_text()))
        return found

    def close(self) -> None:
        """Ends what still runs."""
        for fork in self.forks:
            if fork.returncode is None:
                os.kill(fork.pid, signal.SIGKILL)
            fork.__exit__()


# --- what is left ------------------------------------------------------------------------------------------------


def rank_of(registry: BlockRegistry, kind: str, without: set[int]) -> int:
    """The rank of the blocks of a kind that are made, and with none of these devices."""
    if kind == "rows":
        unknowns = [one.number for one in registry.partitions]
    else:
        unknowns = list(range(len(registry.bounds) - 1))
    whole = {one.number for one in registry.partitions}
    rows = [
        [block.coefficients.get(one, 0.0) for one in unknowns]
        for block in registry.blocks.values()
        if block.kind == kind and block.is_ready and block.holder not in {None, *without}
        if kind == "rows" or block.parts >= whole
    ]
    return int(np.linalg.matrix_rank(np.array(rows), tol=1e-6)) if rows else 0


# --- the coordinator ----------------------------------------------------------------------------------------------


class Told(Notes):
    """A record that tells somebody of each event, when it happens."""

    def __init__(self) -> None:
        super().__init__()
        self.listener: Callable[[str, dict[str, Json]], object] = lambda event, values: None

    def record_event(self, event: str, **values: Json) -> None:
        super().record_event(event, **values)
        self.listener(event, values)


def difference(found: Tensor, due: Tensor) -> float:
    """Relative, of weights."""
    return float((found - due).norm() / due.norm()) if math.isfinite(float(found.norm())) else math.inf
