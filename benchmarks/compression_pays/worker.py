"""Times steps with each method beside PyTorch's own, on whatever network it is started on.

torchrun ... -m benchmarks.compression_pays.worker BATCH ROUNDS STEPS METHOD ...
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.common.meter import Meter
from benchmarks.compression_pays.methods import AUTO, REFERENCES, TIGHT, wrapped
from farflung.ddp import TRIAL_STEPS
from farflung.seeding import create_generator
from farflung.workloads import create_workload

WARM_UP = 3
"""Steps in which buckets are laid out and connections find their rate."""
SIDE_BY_SIDE = 4
"""How many methods take turns with one block of each reference."""
MORE = 5
"""How many times as many rounds those have whose goals are close to 1: blocks of one method differ by more."""


def main() -> None:
    """Rank 0 prints one JSON object for each method: seconds of a step in each block, its own and the references'."""
    torch.set_num_threads(1)
    (batch, rounds, steps), methods = map(int, sys.argv[1:4]), sys.argv[4:]
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    meter = Meter()
    with meter.stopwatch():
        measure(batch, rounds, steps, methods, meter)
    dist.destroy_process_group()


def measure(batch: int, rounds: int, steps: int, methods: Sequence[str], meter: Meter) -> None:
    """All methods, each group with its own blocks of the references; DDP's own threads are gone afterwards."""
    references = [Training(name, batch, meter) for name in REFERENCES]
    for reference in references:
        reference.block(WARM_UP)
    for names in groups(methods):
        own = [Training(name, batch, meter) for name in names]
        for training in own:
            training.block(TRIAL_STEPS + 1 if training.method == AUTO else WARM_UP)
        taking_turns = [*references, *own]
        for training in taking_turns:
            training.forget()
        for _ in range(rounds * (MORE if set(names) <= set(TIGHT) else 1)):
            for training in taking_turns:
                training.times_s.append(training.block(steps))
        beside = {reference.method: reference.times_s for reference in references}
        for training in taking_turns if set(names) <= set(TIGHT) else own:
            if dist.get_rank() == 0:
                said = {"method": training.method, "step_s": training.times_s, "beside_s": beside}
                print(json.dumps({**said, "profile": training.profile()}), flush=True)
        for training in own:
            training.close()


def groups(methods: Sequence[str]) -> Iterator[list[str]]:
    """Those with tight goals, then the others."""
    yield [method for method in methods if method in TIGHT]
    others = [method for method in methods if method not in TIGHT]
    for begin in range(0, len(others), SIDE_BY_SIDE):
        yield others[begin : begin + SIDE_BY_SIDE]


class Training:
    """resnet20 under DDP with one method as its hook, on random pictures.

    Args:
      method: its name.
      batch: samples of each step and rank.
      meter: of this process.
    """

    def __init__(self, method: str, batch: int, meter: Meter) -> None:
        self.method, self.times_s = method, list[float]()
        self._meter = meter
        self._ddp, self.close = wrapped(
            method, create_workload("cifar10/resnet20").build_model(create_generator(0, "model"))
        )
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=0.01, momentum=0.9)
        own = create_generator(0, "data", dist.get_rank())
        self._inputs = torch.randn(batch, 3, 32, 32, generator=own)
        self._targets = torch.randint(10, (batch,), generator=own)
        # The gradient of the first layer comes last.
        next(self._ddp.parameters()).register_hook(self._computed)
        self._computed_at = 0.0
        self.forget()

    def block(self, steps: int) -> float:
        """The median of so many steps, which all ranks begin together; in seconds."""
        times, before = [], self._meter.read()
        for _ in range(steps):
            dist.barrier()
            begin = time.perf_counter()
            F.cross_entropy(self._ddp(self._inputs), self._targets).backward()
            back = time.perf_counter()
            self._optimizer.step()
            self._optimizer.zero_grad()
            end = time.perf_counter()
            times.append(end - begin)
            parts = {"computing": self._computed_at - begin, "waiting": back - self._computed_at}
            self._add({**parts, "optimizer": end - back}, 1e3)
        dist.barrier()
        self._add(self._meter.since(before))
        self._steps += steps
        return statistics.median(times)

    def forget(self) -> None:
        """Begins to count anew."""
        self.times_s, self._spent, self._steps = [], defaultdict[str, float](float), 0

    def profile(self) -> dict[str, float]:
        """What a step took on average; milliseconds, but for what was sent."""
        return {name: round(spent / self._steps, 2) for name, spent in self._spent.items()}

    def _add(self, spent: Mapping[str, float], scale: float = 1.0) -> None:
        for name, one in spent.items():
            self._spent[name] += scale * one

    def _computed(self, _: object) -> None:
        self._computed_at = time.perf_counter()


if __name__ == "__main__":
    main()
