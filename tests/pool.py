"""Long-lived worker processes for tests that need real replicas: started once, given one job after another.

They are forks of one process that has imported torch, and do not share what the tests' own process has made.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

DEADLINE_S = 250
"""An upper bound for a job, and for the start of the processes, on a busy machine."""


def preloaded() -> ForkServerContext:
    """Makes processes that are forks of one that has imported torch and farflung."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


class Pool:
    """``size`` processes; a job runs as ``module.function(rank, size, store, **arguments)`` on the first few."""

    def __init__(self, size: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._size, self._jobs = size, 0
        self._links: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        self._start()

    def run(self, size: int, function: str, **arguments: Any) -> list[Any]:
        """The results of all ranks."""
        self._jobs += 1
        for rank, link in enumerate(self._links[:size]):
            link.send((self._jobs, rank, size, function, arguments))
        results: list[Any] = []
        errors: list[str] = []
        for rank, link in enumerate(self._links[:size]):
            if not link.poll(DEADLINE_S):
                self.close()
                self._start()  # the jobs to come have nothing to do with what hangs here
                raise AssertionError(f"rank {rank} gave no result of {function}")
            good, result = link.recv()
            (results if good else errors).append(result)
        assert not errors, "\n".join(errors)
        return results

    def close(self) -> None:
        """Ends the workers."""
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()

    def _start(self) -> None:
        context = preloaded()
        self._links, self._processes = [], []
        for _ in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self.store.port), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)
        for link in self._links:
            assert link.poll(DEADLINE_S), "a worker did not start"
            link.recv()


def _serve(link: Connection, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))
    link.send("here")
    while True:
        try:
            job, rank, size, function, arguments = link.recv()
        except EOFError:
            return
        try:
            module, _, name = function.rpartition(".")
            job_function = getattr(importlib.import_module(module), name)
            with mock.patch.dict(os.environ):  # what a job sets is gone before the next
                result: tuple[bool, Any] = (
                    True,
                    job_function(rank, size, dist.PrefixStore(f"job-{job}", store), **arguments),
                )
        except Exception:
            result = (False, f"rank {rank}:\n{traceback.format_exc()}")
        link.send(result)


def leave_group() -> None:
    """Destroys the process group after what a job made with it is gone.

    The destructor of DDP's reducer keeps the interpreter lock. Were it the last to hold the group, it could wait
    forever for gloo's thread, which may need that lock to let go of the last all-reduce.
    """
    gc.collect()
    dist.destroy_process_group()


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names and bits."""
    import hashlib

    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(name.encode())
        whole.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if tensor.numel()
            else b""
        )
    return whole.hexdigest()
