"""One of two replicas: what is urgent is sent behind 4 MB, and the other tells what came first and when.

Without an argument it is a message; with ``buckets`` a small bucket, whose exchange starts after a large one's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from farflung.comm import Endpoint, ExchangeChannel
from farflung.lab.tun import INTERFACE
from farflung.tasks import Pending
from farflung.types import Payload, Tag
from farflung.wall import WallRuntime

BULK_NBYTES = 4_000_000
SMALL_NBYTES = 40_000
BULK, URGENT, HEARD = Tag(1), Tag(2), Tag(3)


async def sender(runtime: WallRuntime) -> None:
    """Sends both, the time in each, and waits until they have been heard."""
    sent = torch.tensor([time.monotonic()], dtype=torch.float64)
    bulk = torch.zeros(BULK_NBYTES // 4)
    runtime.comm.send(Payload((sent.clone(), bulk)), 1, BULK)
    runtime.comm.send(Payload((sent,)), 1, URGENT, priority=-1)
    await runtime.comm.recv(1, HEARD)


async def receiver(runtime: WallRuntime) -> list[tuple[str, float]]:
    """What came, in its order, and after how many seconds."""
    came: list[tuple[str, float]] = []
    waits = {name: runtime.comm.recv(0, tag) for name, tag in (("bulk", BULK), ("urgent", URGENT))}

    def told(name: str, done: Pending[Payload]) -> None:
        sent = next(iter(done.result().iter_tensors()))
        came.append((name, time.monotonic() - float(sent)))

    for name, wait in waits.items():
        wait.add_done_callback(partial(told, name))
    for wait in waits.values():
        await wait
    runtime.comm.send(Payload((torch.zeros(1),)), 0, HEARD)
    return came


async def sum_buckets(runtime: WallRuntime) -> list[tuple[str, float]]:
    """Sums a large bucket, and a small one that is needed sooner; which is done first, and after how many seconds."""
    begin_s, done = time.monotonic(), list[tuple[str, float]]()

    async def exchange(name: str, part: int, nbytes: int, priority: int) -> None:
        channel = ExchangeChannel(runtime.comm, 0, part, priority)
        metadata = torch.zeros(1, dtype=torch.float64)
        await channel.get_collective("direct")(channel, torch.zeros(nbytes // 4), metadata)
        done.append((name, time.monotonic() - begin_s))

    running = [
        runtime.launch(exchange("bulk", 0, BULK_NBYTES, 7)),
        runtime.launch(exchange("urgent", 1, SMALL_NBYTES, 0)),
    ]
    for one in running:
        await one
    return done


def main() -> None:
    """As torchrun would start it."""
    rank, patience = int(os.environ["RANK"]), timedelta(seconds=60)
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*place, 2, is_master=rank == 0, timeout=patience)
    runtime = WallRuntime(rank, 2, store, endpoint=Endpoint(INTERFACE))
    if sys.argv[1:] == ["buckets"]:
        print(json.dumps(runtime.launch(sum_buckets(runtime)).wait()), file=sys.stdout, flush=True)
    elif rank == 0:
        runtime.launch(sender(runtime)).wait()
    else:
        print(json.dumps(runtime.launch(receiver(runtime)).wait()), file=sys.stdout, flush=True)
    runtime.close()


if __name__ == "__main__":
    main()
