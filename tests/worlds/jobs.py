"""What the pool's workers run, and its counterpart in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from farflung.comm import LinkModel
from farflung.config import Training
from farflung.recipes import recipe
from farflung.reducers import summed_nbytes
from farflung.replica import Replica, place
from farflung.runtime import VirtualWorld, WallRuntime
from farflung.seeding import RandomState, derive, generator
from farflung.telemetry import Telemetry
from farflung.types import PoolView, Runtime
from farflung.workloads import workload
from tests.pool import digest, leave_group

WORKLOAD = "fashion-mnist/cnn"


def replica(
    runtime: Runtime,
    parts: dict[str, Any],
    steps: int,
    batch_size: int,
    settings: dict[str, Any] | None = None,
    device: str = "cpu",
) -> Replica:
    """One replica of a small run on the packaged data, with dropout and augmentation."""
    work = workload(WORKLOAD, data="packaged")
    training = Training.resolve(
        work.defaults, {"steps": steps, "batch_size": batch_size, "seed": 3, **(settings or {})}
    )
    return Replica(
        runtime,
        work,
        training,
        recipe("synchronous").but(**parts).parts(training.seed),
        Telemetry(runtime.comm.rank),
        device=place(device),
    )


async def steps(replica: Replica) -> dict[str, Any]:
    """Trains to the flush, without the evaluation at the end; what two worlds must agree on."""
    for _ in range(replica.training.steps):
        await replica.step()
    await replica.flush()
    return {
        "parameters": digest(dict(replica.model.state_dict())),
        "bytes": replica._exchanges.sent_nbytes,
        "samples": replica._samples,
    }


def wall(rank: int, size: int, store: dist.Store, **arguments: Any) -> dict[str, Any]:
    """A real replica."""
    runtime = WallRuntime(rank, size, store, native=arguments["parts"].get("collective") == "native")
    try:
        trained = replica(runtime, **arguments)
        nbytes = summed_nbytes(trained.parts.reducer, trained.bucket_specs, size)
        runtime.settle_collective(arguments["parts"].get("collective", "auto"), nbytes)
        return runtime.run(steps(trained))
    finally:
        runtime.close()


def virtual(size: int, **arguments: Any) -> list[dict[str, Any]]:
    """All replicas in virtual time, on links slow enough that exchanges overlap backward."""
    world = VirtualWorld(size, LinkModel(0.003, 5e7), seconds_per_sample=1e-4)
    replicas = [replica(runtime, **arguments) for runtime in world.runtimes]
    nbytes = summed_nbytes(replicas[0].parts.reducer, replicas[0].bucket_specs, size)
    world.settle_collective(arguments["parts"].get("collective", "auto"), nbytes)
    return world.run([steps(one) for one in replicas])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4),
    "sgd(nesterov=True)": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4, nesterov=True),
    "adam(eps=1e-6)": partial(torch.optim.Adam, lr=0.01, eps=1e-6, weight_decay=1e-4),
    "adamw(betas=(0.8, 0.95))": partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.95), weight_decay=1e-4),
}
"""As torch's own, with the workload's settings."""


def ddp(
    rank: int, size: int, store: dist.Store, *, steps: int, batch_size: int, optimizer: str = "sgd"
) -> dict[str, torch.Tensor]:
    """The same training by DistributedDataParallel."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        return _by_ddp(rank, size, steps, batch_size, optimizer)
    finally:
        leave_group()


def _by_ddp(rank: int, size: int, steps: int, batch_size: int, named: str) -> dict[str, torch.Tensor]:
    work = workload(WORKLOAD, data="packaged")
    data, _ = work.datasets()
    model = DistributedDataParallel(work.model(generator(3, "model")))
    optimizer = OPTIMIZERS[named](model.parameters())
    sampler = recipe("synchronous").parts(3).sampler
    with RandomState.scope():
        RandomState(derive(3, "replica", rank)).install()
        for step in range(steps):
            draw = sampler.next(PoolView(step, rank, size, batch_size, len(data)))
            batch = data.take(draw.ids, train=True)
            model.train()
            work.loss(model, batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def farflung_parameters(rank: int, size: int, store: dist.Store, **arguments: Any) -> dict[str, torch.Tensor]:
    """The parameters that a real replica ends with."""
    runtime = WallRuntime(rank, size, store, native=arguments["parts"].get("collective") == "native")
    try:
        trained = replica(runtime, **arguments)
        runtime.run(steps(trained))
        return {name: value.cpu().clone() for name, value in trained.model.state_dict().items()}
    finally:
        runtime.close()
