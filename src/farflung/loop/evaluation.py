"""Evaluation on the test set, divided among the replicas."""

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
from farflung.engine.averaging import average, find_unequal, load_values, sum_over_ranks
from farflung.engine.placement import move_batch, to_local
from farflung.seeding import RandomState, derive_seed
from farflung.types import Cost, Dataset, Runtime, Workload

__all__ = ["Score", "apply_consensus", "evaluate"]

BATCH = 256
_RETRY_PART = 16
"""First part number of exchanges that sum the scores of lost replicas' shares."""


@dataclass(frozen=True, slots=True)
class Score:
    """Metric and mean loss over the test set."""

    metric: float
    loss: float


@asynccontextmanager
async def apply_consensus(
    runtime: Runtime, model: nn.Module, number: int, consensus: Mapping[str, Tensor] | None
) -> AsyncIterator[None]:
    """Averages state that differs between replicas; restores each replica's values at exit.

    Args:
      runtime: Clock and messages of the replica.
      model: Model of the replica.
      number: Number of the exchange, equal on all ranks.
      consensus: Result of :meth:`farflung.engine.Engine.get_consensus_parameters`.
    """
    trained_params, candidates, overwritten, new_values = _collect_consensus_tensors(model, consensus)
    averaged_if_unequal = [*map(to_local, candidates)]
    indices = await find_unequal(runtime, averaged_if_unequal, number, purpose=Purpose.EVALUATION)
    means = [*map(to_local, trained_params), *(averaged_if_unequal[index] for index in indices)]
    overwritten_data = [*map(to_local, overwritten)]
    saved_values = [tensor.clone() for tensor in (*means, *overwritten_data)]
    await average(runtime, means, number, Purpose.EVALUATION, first_part=1)
    load_values(overwritten_data, new_values)
    try:
        yield
    finally:
        load_values([*means, *overwritten_data], saved_values)


def _collect_consensus_tensors(
    model: nn.Module, consensus: Mapping[str, Tensor] | None
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Returns tensors to average, tensors to average if unequal, tensors to overwrite, and their new values.

    Args:
      model: Model of the replica.
      consensus: Parameters equal on all ranks, by name; ``None``: the trained parameters differ.

    Returns:
      Trained parameters to average; untrained numbers such as running statistics, averaged where they differ;
      parameters with consensus values; these values.
    """
    parameters = dict(model.named_parameters())
    trained_params: list[Tensor] = [p for p in parameters.values() if p.requires_grad]
    frozen_params = [p for p in parameters.values() if not p.requires_grad]
    consensus_values = consensus or {}
    return (
        trained_params if consensus is None else [],
        [tensor for tensor in (*model.buffers(), *frozen_params) if _has_mean(tensor)],
        [parameters[name] for name in consensus_values],
        list(consensus_values.values()),
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
    consensus: Mapping[str, Tensor] | None,
    is_concurrent: bool,
    seed: int,
    device: torch.device,
) -> Score:
    """Evaluates the model: each replica scores its share, and one exchange sums the scores, equal on all ranks.

    The model is scored as it is at the call. The evaluation has a random state of its own, so training is unchanged
    by it.

    Args:
      runtime: Clock and messages of the evaluation.
      workload: Loss and metric to evaluate.
      model: Model of the replica.
      data: Test set.
      step: Step of the evaluation.
      consensus: Result of :meth:`farflung.engine.Engine.get_consensus_parameters`.
      is_concurrent: True if training of the model may continue before this ends.
      seed: Seed of the run.
      device: Device of the model.
    """
    comm = runtime.comm
    random = RandomState.from_workload(workload, derive_seed(seed, "evaluation", step, comm.rank), device)

    means, averaged_if_unequal, overwritten, new_values = _collect_consensus_tensors(model, consensus)
    tensors = [*means, *overwritten]
    if is_concurrent and (tensors or averaged_if_unequal):
        tensors += _list_other_tensors(model, tensors)
    values = [tensor.detach().clone() for tensor in tensors]
    anchor_copies = values[len(means) : len(means) + len(overwritten)]
    for value, anchor_value in zip(anchor_copies, new_values, strict=True):
        value.copy_(anchor_value)
    to_average = values[: len(means)]
    snapshots = dict(zip(map(id, tensors), values, strict=True))
    candidate_values = [snapshots.get(id(tensor), tensor) for tensor in averaged_if_unequal]
    for index in await find_unequal(runtime, candidate_values, step, purpose=Purpose.EVALUATION):
        if not is_concurrent:
            tensors.append(averaged_if_unequal[index])
            values.append(averaged_if_unequal[index].detach().clone())
            candidate_values[index] = values[-1]
        to_average.append(candidate_values[index])
    await average(runtime, to_average, step, Purpose.EVALUATION, first_part=1)

    def score(share: Tensor) -> Tensor:
        random.install()
        with _swap_values(tensors, values):
            return _sum_local_scores(workload, model, data, share, device)

    total = await _sum_scores(runtime, torch.arange(len(data)), score, step)
    loss, count, *_ = total.tolist()
    metric_of = getattr(workload, "metric_of", None)
    metric = total[2].item() / count if metric_of is None else metric_of(total[2:])
    return Score(float(metric), loss / count)


async def _sum_scores(runtime: Runtime, ids: Tensor, score: Callable[[Tensor], Tensor], step: int) -> Tensor:
    """Sums the scores of all ids, a share for each replica; remaining replicas rescore the shares of lost ones."""
    comm, part = runtime.comm, 0
    ranks = range(comm.size) if runtime.elastic is None else runtime.elastic.find_change(step - 1).ranks
    shares = dict(zip(ranks, ids.tensor_split(len(ranks)), strict=True))
    total: Tensor | float = 0.0
    while True:
        share = shares[comm.rank]
        sums = await runtime.compute(Cost("evaluate", len(share)), partial(score, share))
        presence = torch.zeros(0 if runtime.elastic is None else comm.size, dtype=sums.dtype)
        presence[comm.rank : comm.rank + 1] = 1
        _, totals = await sum_over_ranks(
            runtime, torch.empty(0), torch.cat([sums, presence]), step, part=part, purpose=Purpose.EVALUATION
        )
        total = total + totals[: len(sums)]
        present_ranks = [] if runtime.elastic is None else totals[len(sums) :].nonzero().flatten().tolist()
        missing = [shares[rank] for rank in shares if present_ranks and rank not in present_ranks]
        if not sum(map(len, missing)):
            return total
        shares = dict(zip(present_ranks, torch.cat(missing).tensor_split(len(present_ranks)), strict=True))
        part = part + 1 if part else _RETRY_PART


def _list_other_tensors(model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Lists the tensors of a model's state that are not among ``tensors``."""
    excluded_ids = {id(tensor) for tensor in tensors}
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in excluded_ids]


@contextmanager
def _swap_values(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Replaces the values of tensors inside the context; a pending backward pass does not notice."""
    saved_values = [tensor.data for tensor in tensors]
    try:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data = value
        yield
    finally:
        for tensor, value in zip(tensors, saved_values, strict=True):
            tensor.data = value


@contextmanager
def _cache_forward(model: nn.Module) -> Iterator[None]:
    """Caches the last output for identical inputs, so that loss and metric share one forward pass."""
    forward, instance_forward = model.forward, vars(model).get("forward")
    inputs: tuple[Any, ...] | None = None
    output: Any = None

    def forward_cached(*args: Any, **kwargs: Any) -> Any:
        nonlocal inputs, output
        if kwargs:
            return forward(*args, **kwargs)
        if inputs is None or len(args) != len(inputs) or any(map(is_not, args, inputs)):
            inputs, output = args, forward(*args)
        return output

    vars(model)["forward"] = forward_cached  # not by setattr, which modules of TorchScript override
    try:
        yield
    finally:
        del vars(model)["forward"]
        if instance_forward is not None:
            vars(model)["forward"] = instance_forward


def _sum_local_scores(
    workload: Workload, model: nn.Module, data: Dataset, ids: Tensor, device: torch.device
) -> Tensor:
    """Returns the loss sum, the number of samples and the metric sums, in float64 on the CPU."""
    model.eval()
    sums = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad(), _cache_forward(model):
        for part in ids.split(BATCH):
            batch = move_batch(data.take(part, train=False), device)
            metric = workload.compute_metrics(model, batch).double().sum(dim=0).reshape(-1)
            loss = workload.compute_losses(model, batch).double().sum().reshape(1)
            sums = sums + torch.cat([loss, loss.new_tensor([len(part)]), metric])
    return sums.cpu()
