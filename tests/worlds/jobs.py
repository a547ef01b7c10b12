"""What the pool's workers run, and its counterpart in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from farflung.config import Training
from farflung.data import IID, Holding
from farflung.decisions import DecisionLog
from farflung.recipes import recipe
from farflung.reducers import summed_nbytes
from farflung.replica import Checkpoints, Replica, place
from farflung.seeding import RandomState, derive, generator
from farflung.sim import LinkModel, VirtualWorld
from farflung.streams import RateLimited
from farflung.telemetry import Event, Telemetry
from farflung.types import Decision, PoolView, Runtime, Stream, Workload
from farflung.wall import WallRuntime
from farflung.workloads import Classification, Quadratic, workload
from tests.carrying import Carrying
from tests.fed import Fed
from tests.pool import digest, leave_group

WORKLOAD = "fashion-mnist/cnn"


@cache  # the runs of one process share the samples
def trained() -> Workload:
    """What is trained: a narrow network on the packaged data, with dropout and augmentation."""
    work = workload(WORKLOAD, data="packaged")
    assert isinstance(work, Classification)
    return replace(work, network=narrow)


def narrow() -> nn.Module:
    """The workload's layers, of fewer channels: what is compared depends on kinds of layers, not on their width."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8 * 7 * 7, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


def replica(
    runtime: Runtime,
    parts: dict[str, Any],
    steps: int,
    batch_size: int,
    settings: dict[str, Any] | None = None,
    device: str = "cpu",
) -> Replica:
    """One replica of a small run on the packaged data, with dropout and augmentation."""
    work = trained()
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
    while replica.step_done < replica.training.steps:
        await replica.step()
    await replica.flush()
    sent = await replica.runtime.launch(replica._count_sent())
    sent.pop("decisions", None)  # of times, which have more digits or fewer
    return {
        "parameters": digest(dict(replica.model.state_dict())),
        "bytes": replica._exchanges.sent_nbytes,
        "sent to": sent,
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


def wall_whole(
    rank: int, size: int, store: dist.Store, *, folder: str, **arguments: Any
) -> tuple[dict[str, Any], list[Decision]]:
    """A real replica from the beginning to the end: its last event, and what it has decided."""
    log = DecisionLog()
    runtime = WallRuntime(rank, size, store, decisions=log)
    try:
        return runtime.run(to_the_end(replica(runtime, **arguments), folder)), log.entries
    finally:
        runtime.close()


def virtual_whole(
    size: int, *, folder: str, count_evaluation: bool, replay: list[Decision], **arguments: Any
) -> list[dict[str, Any]]:
    """All of them in virtual time, by the decisions of the real ones: their last events."""
    world = VirtualWorld(
        size,
        LinkModel(0.003, 5e7),
        seconds_per_sample=1e-4,
        count_evaluation=count_evaluation,
        decisions=DecisionLog(replay=replay),
    )
    return world.run([to_the_end(replica(runtime, **arguments), folder) for runtime in world.runtimes])


async def to_the_end(replica: Replica, folder: str) -> dict[str, Any]:
    """A whole run, whose checkpoints go to a folder."""
    told: list[Event] = []
    comm = replica.runtime.comm
    replica.telemetry = Telemetry(comm.rank, told.append)
    replica.checkpoints = Checkpoints(Path(folder), comm.rank, comm.size, leader=comm.rank == 0)
    await replica.run()
    return told[-1]


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
    work = trained()
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
        one = replica(runtime, **arguments)
        runtime.run(steps(one))
        return {name: value.cpu().clone() for name, value in one.model.state_dict().items()}
    finally:
        runtime.close()


AT_ONCE = {"STEPS": 5, "ON": 0.0, "OFF": 0.0}
"""Constants of :mod:`farflung.sampling.gain` by which batches are drawn by scores from a few steps on."""


def scored(runtime: Runtime, parts: dict[str, str], steps: int) -> Replica:
    """A replica that scores samples of its own in its waits, on the packaged data."""
    work, rank, size = trained(), runtime.comm.rank, runtime.comm.size
    training = Training.resolve(work.defaults, {"steps": steps, "batch_size": 8, "seed": 3})
    made = recipe("synchronous").but(**parts).parts(training.seed, rank)
    # Shares of unlike size.
    whole = torch.arange(len(work.datasets()[0]))
    share = whole[: len(whole) // 3] if rank == 0 else whole[len(whole) // 3 :][rank - 1 :: size - 1]
    return Replica(runtime, work, training, made, Telemetry(rank), share=share)


def wall_scored(
    rank: int,
    size: int,
    store: dist.Store,
    *,
    replay: list[Decision] | None = None,
    choosing: dict[str, float] | None = None,
    **arguments: Any,
) -> tuple[dict[str, Any], list[Decision]]:
    """A real replica that scores, and what it has decided."""
    log = DecisionLog(replay=replay)
    runtime = WallRuntime(rank, size, store, decisions=log)
    try:
        with mock.patch.dict("farflung.sampling.gain.__dict__", choosing or {}):
            return runtime.run(steps(scored(runtime, **arguments))), log.entries
    finally:
        runtime.close()


def virtual_scored(
    size: int, *, replay: list[Decision], choosing: dict[str, float] | None = None, **arguments: Any
) -> list[tuple[dict[str, Any], list[Decision]]]:
    """All of them in virtual time, by the decisions of the real ones."""
    log = DecisionLog(replay=replay)
    world = VirtualWorld(size, LinkModel(0.003, 5e7), seconds_per_sample=1e-4, decisions=log)
    with mock.patch.dict("farflung.sampling.gain.__dict__", choosing or {}):
        found = world.run([steps(scored(runtime, **arguments)) for runtime in world.runtimes])
    mine = [[d for d in log.entries if rank == (d.rank or 0)] for rank in range(size)]
    return list(zip(found, mine, strict=True))


def streamed(runtime: Runtime, stream: Stream, parts: dict[str, str], steps: int) -> Replica:
    """A replica whose samples arrive, on a small quadratic."""
    work = Quadratic(dim=6, samples=64)
    training = Training(steps=steps, batch_size=4, learning_rate=0.05, seed=3)
    made = recipe("synchronous").but(**parts).parts(training.seed)
    return Replica(runtime, work, training, replace(made, stream=stream), Telemetry(runtime.comm.rank))


def rate_limited(rank: int) -> Stream:
    """As it comes, and too fast for one of two replicas to take it all."""
    del rank
    return RateLimited([400.0, 8000.0], least=1, most=8, backlog=12, full="drop_oldest")


def truncated(rank: int) -> Stream:
    """The newest of what has come, by a rate that changes, and weighed by it."""
    del rank
    course: list[tuple[float, float]] = [(0.0, 900.0), (0.01, 3000.0)]
    return RateLimited([400.0, course], policy="truncation", window_s=0.005, least=1, most=8, weigh="by_rate")


def fed(rank: int) -> Stream:
    """What a thread puts in as fast as it can."""
    stream = Fed(1, 8)
    stream.feed(64, [1, 3, 2, 5, 1] * 40 if rank == 0 else [2] * 200)
    return stream


STREAMS = {"rate limited": rate_limited, "truncated": truncated, "fed": fed}


def wall_streamed(
    rank: int,
    size: int,
    store: dist.Store,
    *,
    stream: str,
    replay: list[Decision] | None = None,
    **arguments: Any,
) -> tuple[dict[str, Any], list[Decision]]:
    """A real replica whose samples arrive, and what it has decided."""
    log = DecisionLog(replay=replay)
    runtime = WallRuntime(rank, size, store, decisions=log)
    try:
        one = streamed(runtime, STREAMS[stream](rank), **arguments)
        found = runtime.run(steps(one))
        one.parts.stream.close()
        return found, log.entries
    finally:
        runtime.close()


def virtual_streamed(
    size: int, *, stream: str, replay: list[Decision], **arguments: Any
) -> list[tuple[dict[str, Any], list[Decision]]]:
    """All of them in virtual time, by the decisions of the real ones."""
    log = DecisionLog(replay=replay)
    world = VirtualWorld(size, LinkModel(0.003, 5e7), seconds_per_sample=1e-4, decisions=log)
    replicas = [streamed(r, STREAMS[stream](r.comm.rank), **arguments) for r in world.runtimes]
    found = world.run([steps(each) for each in replicas])
    for each in replicas:
        each.parts.stream.close()
    return [(result, [d for d in log.entries if d.rank == rank]) for rank, result in enumerate(found)]


def resharded(runtime: Runtime, parts: dict[str, Any], count: int) -> Replica:
    """A replica of a small quadratic whose samples change owner."""
    work = Quadratic(dim=6, samples=64)
    training = Training(steps=count, batch_size=4, learning_rate=0.05, seed=3)
    rank, size = runtime.comm.rank, runtime.comm.size
    return Replica(
        runtime,
        work,
        training,
        recipe("synchronous").but(sampler=Carrying, **parts).parts(training.seed, rank),
        Telemetry(rank),
        share=IID().split(work.datasets()[0], size, seed=3)[rank],
    )


async def moved(replica: Replica) -> dict[str, Any]:
    """Trains, and says which samples the replica holds at the end and what it knows of them."""
    found = await steps(replica)
    assert isinstance(replica._train, Holding)
    assert isinstance(replica.parts.sampler, Carrying)
    held, known = replica._train.ids.tolist(), replica.parts.sampler.known.tolist()
    return {**found, "held": held, "known": known, "sent": replica.sent_nbytes}


def wall_resharded(rank: int, size: int, store: dist.Store, **arguments: Any) -> dict[str, Any]:
    """A real replica whose samples change owner."""
    runtime = WallRuntime(rank, size, store)
    try:
        return runtime.run(moved(resharded(runtime, **arguments)))
    finally:
        runtime.close()


def virtual_resharded(size: int, **arguments: Any) -> list[dict[str, Any]]:
    """All of them in virtual time."""
    world = VirtualWorld(size, LinkModel(0.003, 5e5), seconds_per_sample=1e-4)
    return world.run([moved(resharded(runtime, **arguments)) for runtime in world.runtimes])
