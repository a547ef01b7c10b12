"""What the pool's workers run, and its counterpart in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
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
from farflung.engine import select_device
from farflung.loop import Checkpoints, Replica
from farflung.recipes import parse_recipe
from farflung.reducers import list_summed_nbytes
from farflung.seeding import RandomState, create_generator, derive_seed
from farflung.sim import LinkModel, VirtualWorld
from farflung.streams import RateLimited
from farflung.tasks import Pending
from farflung.telemetry import Event, Telemetry
from farflung.types import Decision, DrawContext, Runtime, Stream, Workload
from farflung.wall import WallRuntime
from farflung.workloads import Classification, Quadratic, create_workload
from tests.carrying import Carrying
from tests.fed import Fed
from tests.pool import digest, leave_group

WORKLOAD = "fashion-mnist/cnn"


@cache  # the runs of one process share the samples
def packaged() -> Classification:
    """A small network on the packaged data, with dropout and augmentation."""
    work = create_workload(WORKLOAD, data="packaged")
    assert isinstance(work, Classification)
    return work


@cache
def trained() -> Workload:
    """What is trained: a narrow network on the packaged data, with dropout and augmentation."""
    return replace(packaged(), build_network=narrow)


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
        parse_recipe("synchronous").with_components(**parts).build_components(training.seed),
        Telemetry(runtime.comm.rank),
        device=select_device(device),
    )


async def steps(replica: Replica) -> dict[str, Any]:
    """Trains to the flush, without the evaluation at the end; what two worlds must agree on."""
    while replica.completed_steps < replica.training.steps:
        await replica.step()
    await replica.flush()
    sent = await replica.runtime.launch(replica._count_sent())
    sent.pop("decisions", None)  # of times, which have more digits or fewer
    return {
        "parameters": digest(dict(replica.model.state_dict())),
        "bytes": replica.engine.sent_nbytes,
        "sent to": sent,
        "samples": replica._num_samples,
    }


async def to_the_end(replica: Replica, folder: str) -> dict[str, Any]:
    """A whole run, whose checkpoints go to a folder: its last event."""
    told: list[Event] = []
    comm = replica.runtime.comm
    replica.telemetry = Telemetry(comm.rank, told.append)
    replica.checkpoints = Checkpoints(Path(folder), comm.rank, comm.size, is_leader=comm.rank == 0)
    await replica.run()
    return told[-1]


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
    data, _ = work.load_datasets()
    model = DistributedDataParallel(work.build_model(create_generator(3, "model")))
    optimizer = OPTIMIZERS[named](model.parameters())
    sampler = parse_recipe("synchronous").build_components(3).sampler
    with RandomState.preserve_globals():
        RandomState(derive_seed(3, "replica", rank)).install()
        for step in range(steps):
            draw = sampler.draw(DrawContext(step, rank, size, batch_size, len(data)))
            batch = data.take(draw.ids, train=True)
            model.train()
            work.compute_losses(model, batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return {name: value.clone() for name, value in model.module.state_dict().items()}


async def parameters(replica: Replica) -> dict[str, torch.Tensor]:
    """Trains; the parameters at the end."""
    await steps(replica)
    return {name: value.cpu().clone() for name, value in replica.model.state_dict().items()}


AT_ONCE = {"MIN_STEPS": 5, "GAIN_ON": 0.0, "GAIN_OFF": 0.0}
"""Constants of :mod:`farflung.sampling.gain` by which batches are drawn by scores from a few steps on."""


def scored(runtime: Runtime, parts: dict[str, str], steps: int) -> Replica:
    """A replica that scores samples of its own in its waits, on the packaged data.

    With the whole network: a narrow one scores so fast that a wait on a busy machine has thousands of scores.
    """
    work, rank, size = packaged(), runtime.comm.rank, runtime.comm.size
    training = Training.resolve(work.defaults, {"steps": steps, "batch_size": 8, "seed": 3})
    made = parse_recipe("synchronous").with_components(**parts).build_components(training.seed, rank)
    # Shares of unlike size.
    whole = torch.arange(len(work.load_datasets()[0]))
    share = whole[: len(whole) // 3] if rank == 0 else whole[len(whole) // 3 :][rank - 1 :: size - 1]
    return Replica(runtime, work, training, made, Telemetry(rank), share=share)


def streamed(runtime: Runtime, stream: str, parts: dict[str, str], steps: int) -> Replica:
    """A replica whose samples arrive, on a small quadratic."""
    work = Quadratic(dim=6, samples=64)
    training = Training(steps=steps, batch_size=4, learning_rate=0.05, seed=3)
    made = parse_recipe("synchronous").with_components(**parts).build_components(training.seed)
    made = replace(made, stream=STREAMS[stream](runtime.comm.rank))
    return Replica(runtime, work, training, made, Telemetry(runtime.comm.rank))


async def closed(replica: Replica) -> dict[str, Any]:
    """Trains, and closes the stream."""
    found = await steps(replica)
    replica.components.stream.close()
    return found


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


def resharded(runtime: Runtime, parts: dict[str, Any], count: int) -> Replica:
    """A replica of a small quadratic whose samples change owner."""
    work = Quadratic(dim=6, samples=64)
    training = Training(steps=count, batch_size=4, learning_rate=0.05, seed=3)
    rank, size = runtime.comm.rank, runtime.comm.size
    return Replica(
        runtime,
        work,
        training,
        parse_recipe("synchronous")
        .with_components(sampler=Carrying, **parts)
        .build_components(training.seed, rank),
        Telemetry(rank),
        share=IID().split(work.load_datasets()[0], size, seed=3)[rank],
    )


async def moved(replica: Replica) -> dict[str, Any]:
    """Trains, and says which samples the replica holds at the end and what it knows of them."""
    found = await steps(replica)
    assert isinstance(replica._train_set, Holding)
    assert isinstance(replica.components.sampler, Carrying)
    held, known = replica._train_set.ids.tolist(), replica.components.sampler.known.tolist()
    return {**found, "held": held, "known": known, "sent": replica.sent_nbytes}


KINDS: dict[str, tuple[Callable[..., Replica], Callable[[Replica], Coroutine[Pending[Any], None, Any]]]] = {
    "plain": (replica, steps),
    "parameters": (replica, parameters),
    "scored": (scored, steps),
    "streamed": (streamed, closed),
    "resharded": (resharded, moved),
}
"""By name, what makes a replica and what drives it."""
End = tuple[dict[str, Any], list[Decision]]


def wall(
    rank: int,
    size: int,
    store: dist.Store,
    *,
    kind: str = "plain",
    folder: str = "",
    replay: list[Decision] | None = None,
    choosing: dict[str, float] | None = None,
    **arguments: Any,
) -> End:
    """A real replica, and what it has decided; a whole run where it has a folder."""
    log, collective = DecisionLog(replay=replay), arguments["parts"].get("collective")
    runtime = WallRuntime(rank, size, store, is_native=collective == "native", decisions=log)
    make, drive = KINDS[kind]
    try:
        one = make(runtime, **arguments)
        if collective == "auto":
            runtime.resolve_collective(
                collective, list_summed_nbytes(one.components.reducer, one.bucket_specs, size)
            )
        with mock.patch.dict("farflung.sampling.gain.__dict__", choosing or {}):
            return runtime.run(to_the_end(one, folder) if folder else drive(one)), log.entries
    finally:
        runtime.close()


def virtual(
    size: int,
    *,
    kind: str = "plain",
    folder: str = "",
    replay: list[Decision] | None = None,
    choosing: dict[str, float] | None = None,
    count_evaluation: bool = False,
    **arguments: Any,
) -> list[End]:
    """All replicas in virtual time, by the decisions of real ones, on links so slow that exchanges overlap backward."""
    log, collective = DecisionLog(replay=replay), arguments["parts"].get("collective")
    world = VirtualWorld(
        size,
        LinkModel(0.003, 5e7),
        seconds_per_sample=1e-4,
        count_evaluation=count_evaluation,
        decisions=log,
    )
    make, drive = KINDS[kind]
    made = [make(runtime, **arguments) for runtime in world.runtimes]
    if collective == "auto":
        world.resolve_collective(
            collective, list_summed_nbytes(made[0].components.reducer, made[0].bucket_specs, size)
        )
    with mock.patch.dict("farflung.sampling.gain.__dict__", choosing or {}):
        found = world.run([to_the_end(one, folder) if folder else drive(one) for one in made])
    mine = [[d for d in log.entries if rank == (d.rank or 0)] for rank in range(size)]
    return list(zip(found, mine, strict=True))
