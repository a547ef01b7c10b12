"""One node's part of all_reduce.py: times all-reduces that all nodes begin at the same moments."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from farflung.comm import Endpoint, ExchangeChannel
from farflung.comm.interface import find_local_address
from farflung.wall import WallRuntime

WARM_UPS = 2
BETWEEN_S = 0.15
"""From the latest moment one can end until the next begins: a connection in regular use."""


def main() -> None:
    """``worker what``, a JSON list of ``[how, bytes, seconds of idling, seconds at most, repetitions]``."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(iter(rendezvous("env://")))
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=size)
    runtime = WallRuntime(rank, size, store, endpoint=Endpoint(find_local_address(os.environ["MASTER_ADDR"])))
    exchange = [0]

    async def one(how: str, tensor: Tensor) -> Tensor:
        exchange[0] += 1
        channel = ExchangeChannel(runtime.comm, exchange[0], 0)
        return (await channel.get_collective(how)(channel, tensor, torch.ones(1, dtype=torch.float64)))[0]

    for number, (how, nbytes, idle_s, at_most_s, repetitions) in enumerate(json.loads(sys.argv[1])):
        tensor = torch.ones(nbytes // 4)
        run: Callable[[], object] = (
            (lambda tensor=tensor: dist.all_reduce(tensor))  # type: ignore[misc]
            if how == "native"
            else (lambda tensor=tensor, how=how: runtime.launch(one(how, tensor)).wait())  # type: ignore[misc]
        )
        seconds = []
        begin = _agreed(store, f"{number}", rank)
        for _ in range(WARM_UPS + repetitions):
            time.sleep(max(0.0, begin - time.monotonic()))
            run()
            seconds.append(time.monotonic() - begin)
            begin += at_most_s + BETWEEN_S + idle_s
        said = {"how": how, "nbytes": nbytes, "idle_s": idle_s, "rank": rank, "seconds": seconds[WARM_UPS:]}
        print(json.dumps(said), flush=True)
    dist.barrier()
    runtime.close()
    dist.destroy_process_group()


def _agreed(store: dist.Store, number: str, rank: int) -> float:
    """A moment on the clock that all processes of one machine share."""
    store.add(f"here/{number}", 1)
    if rank == 0:
        while store.add(f"here/{number}", 0) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.05)
        store.set(f"begin/{number}", repr(time.monotonic() + 1.0))
    return float(store.get(f"begin/{number}"))


if __name__ == "__main__":
    main()
