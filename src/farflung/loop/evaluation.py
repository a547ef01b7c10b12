"""Evaluation on the test set, shared out among the replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from farflung.comm import Purpose
from farflung.comm.wire import supports_dtype
from farflung.engine.averaging import average, load, sum_everywhere, unlike
from farflung.engine.placement import batch_on
from farflung.seeding import RandomState, derive
from farflung.types import Cost, Dataset, Runtime, Workload

__all__ = ["Score", "averaged", "evaluate"]

BATCH = 256
_AGAIN = 16
"""The first part of exchanges that sum the scores of lost replicas' shares."""


@dataclass(frozen=True, slots=True)
class Score:
    """Metric and mean loss over the test set."""

    metric: float
    loss: float


@asynccontextmanager
async def averaged(
    runtime: Runtime, model: nn.Module, number: int, stands: Mapping[str, Tensor] | None
) -> AsyncIterator[None]:
    """Inside, what differs between replicas is alike on all; afterwards each has its own again.

    Args:
      runtime: the world.
      model: the replica's.
      number: of the exchange; alike on all ranks.
      stands: what :meth:`farflung.engine.Engine.consensus_parameters` says.
    """
    found, compared, known, values = _differing(model, stands)
    indices = await unlike(runtime, compared, number, purpose=Purpose.EVALUATION)
    means = [tensor.detach() for tensor in (*found, *(compared[index] for index in indices))]
    places = [tensor.detach() for tensor in known]
    own = [tensor.clone() for tensor in (*means, *places)]
    await average(runtime, means, number, Purpose.EVALUATION, first_part=1)
    load(places, values)
    try:
        yield
    finally:
        load([*means, *places], own)


def _differing(
    model: nn.Module, stands: Mapping[str, Tensor] | None
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Finds what may differ between replicas.

    Args:
      model: the replica's.
      stands: parameters that are known alike on all, by name; ``None``: those of the model that train differ.

    Returns:
      Parameters that differ, whose means are to be taken; what nothing trains and is a number, such as running
      statistics, whose means are taken where it differs; parameters that need none, and what stands in their place.
    """
    parameters = dict(model.named_parameters())
    trained: list[Tensor] = [p for p in parameters.values() if p.requires_grad]
    others = [p for p in parameters.values() if not p.requires_grad]
    known = stands or {}
    return (
        trained if stands is None else [],
        [tensor for tensor in (*model.buffers(), *others) if _has_mean(tensor)],
        [parameters[name] for name in known],
        list(known.values()),
    )


def _has_mean(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() and supports_dtype(tensor.dtype)) or tensor.is_complex()


async def evaluate(
    runtime: Runtime,
    workload: Workload,
    model: nn.Module,
    data: Dataset,
    step: int,
    *,
    stands: Mapping[str, Tensor] | None,
    goes_on: bool,
    seed: int,
    device: torch.device,
) -> Score:
    """Evaluates the model: each replica scores its share, and one exchange sums the scores, equal on all ranks.

    The model is scored as it is at the call. Random numbers are drawn from a state of the evaluation's own, so training
    is unchanged by it.

    Args:
      runtime: the world.
      workload: what is trained.
      model: the replica's.
      data: the test set.
      step: of the evaluation.
      stands: what :meth:`farflung.engine.Engine.consensus_parameters` says.
      goes_on: whether the model may be trained on before this ends.
      seed: the run's.
      device: of the model.
    """
    comm = runtime.comm
    random = RandomState.of(workload, derive(seed, "evaluation", step, comm.rank), device)

    means, compared, known, stood = _differing(model, stands)
    kept = [*means, *known]
    if goes_on and (kept or compared):
        kept += _others(model, kept)
    values = [tensor.detach().clone() for tensor in kept]
    standing = values[len(means) : len(means) + len(known)]
    for value, stands_here in zip(standing, stood, strict=True):
        value.copy_(stands_here)
    averaged = values[: len(means)]
    at_call = dict(zip(map(id, kept), values, strict=True))
    found = [at_call.get(id(tensor), tensor) for tensor in compared]
    for index in await unlike(runtime, found, step, purpose=Purpose.EVALUATION):
        if not goes_on:
            kept.append(compared[index])
            values.append(compared[index].detach().clone())
            found[index] = values[-1]
        averaged.append(found[index])
    await average(runtime, averaged, step, Purpose.EVALUATION, first_part=1)

    def score(share: Tensor) -> Tensor:
        random.install()
        with _holding(kept, values):
            return _score(workload, model, data, share, device)

    total = await _shared_out(runtime, torch.arange(len(data)), score, step)
    loss, count, *_ = total.tolist()
    metric_of = getattr(workload, "metric_of", None)
    metric = total[2].item() / count if metric_of is None else metric_of(total[2:])
    return Score(float(metric), loss / count)


async def _shared_out(runtime: Runtime, ids: Tensor, score: Callable[[Tensor], Tensor], step: int) -> Tensor:
    """Sums the scores of all ids, of which each replica takes a share; the others score the shares of lost ones."""
    comm, part = runtime.comm, 0
    ranks = range(comm.size) if runtime.elastic is None else runtime.elastic.at(step - 1).ranks
    shares = dict(zip(ranks, ids.tensor_split(len(ranks)), strict=True))
    total: Tensor | float = 0.0
    while True:
        share = shares[comm.rank]
        sums = await runtime.compute(Cost("evaluate", len(share)), partial(score, share))
        here = torch.zeros(0 if runtime.elastic is None else comm.size, dtype=sums.dtype)
        here[comm.rank : comm.rank + 1] = 1
        _, summed = await sum_everywhere(
            runtime, torch.empty(0), torch.cat([sums, here]), step, part=part, purpose=Purpose.EVALUATION
        )
        total = total + summed[: len(sums)]
        left = [] if runtime.elastic is None else summed[len(sums) :].nonzero().flatten().tolist()
        missing = [shares[rank] for rank in shares if left and rank not in left]
        if not sum(map(len, missing)):
            return total
        shares = dict(zip(left, torch.cat(missing).tensor_split(len(left)), strict=True))
        part = part + 1 if part else _AGAIN


def _others(model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What a model's state has beside these tensors."""
    among = {id(tensor) for tensor in tensors}
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in among]


@contextmanager
def _holding(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the tensors have other values; a backward pass that is due for them does not notice."""
    own = [tensor.data for tensor in tensors]
    try:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data = value
        yield
    finally:
        for tensor, value in zip(tensors, own, strict=True):
            tensor.data = value


@contextmanager
def _forward_once(model: nn.Module) -> Iterator[None]:
    """Inside, the model returns its last output again for the same inputs: loss and metric share one forward pass."""
    forward, own = model.forward, vars(model).get("forward")
    inputs: tuple[Any, ...] | None = None
    output: Any = None

    def remembered(*given: Any, **named: Any) -> Any:
        nonlocal inputs, output
        if named:
            return forward(*given, **named)
        if inputs is None or len(given) != len(inputs) or any(map(is_not, given, inputs)):
            inputs, output = given, forward(*given)
        return output

    vars(model)["forward"] = (
        remembered  # not by setattr, which modules of TorchScript have their own way with
    )
    try:
        yield
    finally:
        del vars(model)["forward"]
        if own is not None:
            vars(model)["forward"] = own


def _score(workload: Workload, model: nn.Module, data: Dataset, ids: Tensor, device: torch.device) -> Tensor:
    model.eval()
    sums = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad(), _forward_once(model):
        for part in ids.split(BATCH):
            batch = batch_on(data.take(part, train=False), device)
            metric = workload.metric(model, batch).double().sum(dim=0).reshape(-1)
            loss = workload.loss(model, batch).double().sum().reshape(1)
            sums = sums + torch.cat([loss, loss.new_tensor([len(part)]), metric])
    return sums.cpu()
