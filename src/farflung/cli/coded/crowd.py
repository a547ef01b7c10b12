"""Devices of coded training as processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from farflung.coded.attendance import take_part
from farflung.coded.blocks import Holding
from farflung.coded.local import partitioned
from farflung.coded.meeting import Address
from farflung.coded.parts import read_samples
from farflung.errors import FarflungError

__all__ = ["Crowd"]


class Crowd:
    """Forks of a process that has imported all that they need; those that are left end with the context.

    Args:
      scratch: a folder for their data.
      patience_s: how long they wait for a coordinator, in seconds.
    """

    def __init__(self, scratch: Path, patience_s: float) -> None:
        self._scratch, self._patience_s = scratch, patience_s
        self._address: Address | None = None
        self._processes: list[ForkServerProcess] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.join(0 if error is not None else self._patience_s)
            process.kill()
            process.join()

    def begin(self, address: Address, samples: Tensor, labels: Tensor, parts: int) -> None:
        """Starts a device for each part of the samples."""
        self._address = address
        for number, rows in enumerate(partitioned(len(samples), parts), start=1):
            path = self._scratch / f"part {number}.npz"
            np.savez(path, x=samples[rows].numpy(), y=labels[rows].numpy())
            self.add(path)

    def add(self, path: Path | None = None) -> None:
        """Starts a device, with room alone unless it has a file of samples."""
        assert self._address is not None
        process = self._context.Process(
            target=_attend, args=(str(self._address), path, self._patience_s), daemon=True
        )
        process.start()
        self._processes.append(process)

    def kill(self, number: int) -> None:
        """Ends a device at once, by its number in the order in which they were started."""
        self._processes[number].kill()


def _attend(address: str, path: Path | None, patience_s: float) -> None:
    torch.set_num_threads(1)
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 2)  # what a device says that is killed half-way
    holding = Holding() if path is None else Holding(path.stem, *read_samples(str(path)))
    with contextlib.suppress(FarflungError, KeyboardInterrupt):
        take_part(Address.of(address), holding, patience_s=patience_s)
