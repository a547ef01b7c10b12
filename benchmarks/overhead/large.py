"""Peak memory of large models and time of DiLoCo's rounds, under torchrun; time of their checkpoints, by itself."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import farflung
from benchmarks.common.meter import Memory
from farflung.state_trees import save_tree

__all__ = ["DDP", "DDP_VIEWS", "compare_checkpoints"]

DDP, DDP_VIEWS = "DDP", "DDP with gradient_as_bucket_view"
TOKENS = 64


def main() -> None:
    """Measures ``large MODEL SYSTEM STEPS ROUNDS``; rank 0 prints one JSON object.

    The model is ``matrices`` or ``gpt2``, with ``small`` behind it for a quick try; the system is DDP or a recipe.
    Memory is counted above that of the model, and its optimizer is SGD with momentum.
    """
    torch.set_num_threads(1)
    model_name, system = sys.argv[1:3]
    steps, rounds = map(int, sys.argv[3:5])
    dist.init_process_group("gloo")
    model, compute_loss = create_model(model_name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    numel = sum(p.numel() for p in model.parameters())
    compute_loss()  # loads libraries, which are no part of what is measured
    dist.barrier()
    forward: nn.Module = model
    with Memory() as memory:
        begin = time.perf_counter()
        if system in (DDP, DDP_VIEWS):
            forward = DistributedDataParallel(model, gradient_as_bucket_view=system == DDP_VIEWS)
        else:
            handle = farflung.attach(model, optimizer, system, deadline_s=300)
        start_s = time.perf_counter() - begin
        step_s = []
        for _ in range(steps):
            dist.barrier()
            begin = time.perf_counter()
            compute_loss(forward).backward()
            optimizer.step()
            optimizer.zero_grad()
            step_s.append(time.perf_counter() - begin)
    result = {
        "peak_models": memory.most_nbytes / (4 * numel),
        "held_models": memory.grown_nbytes() / (4 * numel),
        "model_mb": 4 * numel / 1e6,
        "start_s": start_s,
        "step_s": [round(seconds, 3) for seconds in step_s],
    }
    if rounds:
        flat = torch.ones(numel)
        spent = [time_round(compute_loss, optimizer, flat) for _ in range(rounds)]
        result["round_over_gloo"] = [ours / gloo for ours, gloo in spent[1:] or spent]
        result["round_s"], result["gloo_s"] = zip(*spent, strict=True)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(result), flush=True)
    if forward is model:
        handle.finish()
    dist.barrier()


def create_model(name: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Creates a model, and a function that computes its loss, of the wrapped model if one is given."""
    torch.manual_seed(0)
    kind, _, size = name.partition(" ")
    if kind == "matrices":  # 24 of 4 million parameters
        width = 64 if size else 2048
        model: nn.Module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(24)))
        inputs = torch.randn(2, width)
        return model, lambda forward=model: forward(inputs).square().mean()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    if size:
        config.update({"n_layer": 2, "n_embd": 96, "vocab_size": 1000})
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(config.vocab_size, (1, TOKENS))
    return model, lambda forward=model: forward(input_ids=tokens, labels=tokens, use_cache=False).loss


def time_round(
    compute_loss: Callable[..., Tensor], optimizer: torch.optim.Optimizer, flat: Tensor
) -> tuple[float, float]:
    """Returns seconds of an exchange of ``diloco(sync_every=2)``, and of gloo's all-reduce of ``flat``."""
    spent = []
    for _ in range(2):
        compute_loss().backward()
        dist.barrier()
        begin = time.perf_counter()
        optimizer.step()
        spent.append(time.perf_counter() - begin)
        optimizer.zero_grad()
    dist.barrier()
    begin = time.perf_counter()
    dist.all_reduce(flat)
    return spent[1] - spent[0], time.perf_counter() - begin


def compare_checkpoints(nbytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """Returns seconds of :func:`save_tree` and of ``torch.save`` with ``fsync``, each round in random order."""
    matrices = [torch.randn(2048, max(nbytes >> 17, 1)) for _ in range(16)]
    state = {"model": {str(index): matrix for index, matrix in enumerate(matrices)}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state")

        def save_by_torch() -> None:
            with path.open("wb") as file:
                torch.save(state, file)  # noqa: TID251 - it is what is measured
                file.flush()
                os.fsync(file.fileno())

        ways: list[Callable[[], None]] = [lambda: save_tree(path, state), save_by_torch]
        spent: list[list[float]] = [[], []]
        for _ in range(rounds):
            for way in random.sample(range(2), 2):
                with suppress(FileNotFoundError):
                    path.unlink()
                os.sync()
                begin = time.perf_counter()
                ways[way]()
                spent[way].append(time.perf_counter() - begin)
    return spent[0], spent[1]


if __name__ == "__main__":
    main()
