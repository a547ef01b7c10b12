"""One process of a site that is sharded by FSDP2: ``-m benchmarks.sites.worker SYSTEM SITES LOST_AT``, as JSON lines.

The model and the way to average are those of torchft's ``fsdp_test.py``: a linear layer of 128 x 128, and a hook of
FSDP2's all-reduce that calls torchft's manager.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import farflung
from benchmarks.common.meter import SENT

WIDTH, BATCH, STEPS, RATE = 128, 16, 400, 0.003
TARGET = 0.05
"""Loss on samples apart, relative to that at the start, at which a run has reached its target."""
EVALUATE_EVERY = 10
TIMEOUT = timedelta(seconds=60)


def count_sent_nbytes() -> int:
    """Counts the bytes that this node's interfaces have sent, with headers; loopback does not count."""
    lines = SENT.read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")


def draw(generator: torch.Generator, teacher: nn.Module, count: int) -> tuple[Tensor, Tensor]:
    """Draws samples of a fixed linear map."""
    inputs = torch.randn(count, WIDTH, generator=generator)
    with torch.no_grad():
        return inputs, teacher(inputs)


class Torchft:
    """Site as a replica group of torchft's, whose ranks each average with the same rank of the other groups.

    Args:
      model: Sharded model.
      optimizer: Its optimizer.
      lighthouse: Address of the lighthouse.
      sites: Number of sites.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, lighthouse: str, sites: int
    ) -> None:
        from torchft import Manager, Optimizer, ProcessGroupGloo
        from torchft.coordination import LighthouseServer

        site = os.environ["SITE"]
        if site == os.environ["RANK"] == "0":  # no fault strikes this process
            self._lighthouse = LighthouseServer(
                bind=f"0.0.0.0:{lighthouse.rpartition(':')[2]}",
                min_replicas=1,
                quorum_tick_ms=10,
                heartbeat_timeout_ms=1_000,
                join_timeout_ms=60_000,
            )
        self._manager: Any = Manager(
            ProcessGroupGloo(TIMEOUT),
            lambda state: None,
            dict,
            min_replica_size=1,
            timeout=TIMEOUT,
            lighthouse_addr=lighthouse,
            replica_id=f"site_{site}",
            hostname=os.environ["SITE_ADDRESS"],
            init_sync=False,
            use_async_quorum=False,
        )
        self.optimizer: Any = Optimizer(self._manager, optimizer)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(lambda output: self._manager.allreduce(output).wait())
        while True:  # until all sites are there
            self._manager.start_quorum()
            self._manager.wait_quorum()
            if self.size == sites:
                break

    @property
    def size(self) -> int:
        """Number of sites in the last quorum."""
        return int(self._manager.num_participants())

    def finish(self) -> None:
        """Ends this process without waiting for the manager's threads."""
        sys.stdout.flush()
        os._exit(0)


class Farflung:
    """Site as a replica of farflung's.

    Args:
      model: Sharded model.
      optimizer: Its optimizer.
      recipe: Recipe of the exchanges.
      mesh: Processes of the site.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: str, mesh: Any) -> None:
        self.optimizer = optimizer
        self._handle = farflung.attach(
            model,
            optimizer,
            recipe,
            site=mesh,
            elastic=1,
            endpoint=farflung.Endpoint(interface=os.environ["SITE_ADDRESS"]),
        )

    @property
    def size(self) -> int:
        """Number of sites that take part."""
        return self._handle.size

    def finish(self) -> None:
        """Ends the run."""
        self._handle.finish()


def main(system: str, sites: int, lost_at: int) -> None:
    """Trains until the target, or the last step.

    Args:
      system: ``torchft``, or a recipe of farflung's.
      sites: Number of sites.
      lost_at: Step before which the first process of site 1 is killed; after it, ten steps end the run. -1 for none.
    """
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    site, share = int(os.environ["SITE"]), mesh.get_local_rank()
    torch.manual_seed(0)
    teacher, model = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    fully_shard(model, mesh=mesh)
    plain = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    if system == "torchft":
        run: Torchft | Farflung = Torchft(model, plain, f"http://{os.environ['LIGHTHOUSE']}", sites)
    else:
        run = Farflung(model, plain, system, mesh)
    generator = torch.Generator().manual_seed(1 + site * mesh.size() + share)
    held_out = draw(torch.Generator().manual_seed(0), teacher, 256)
    begin_s, begin_nbytes, first_loss = time.monotonic(), count_sent_nbytes(), 0.0
    for step in range(STEPS):
        if step == lost_at and (site, share) == (1, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = draw(generator, teacher, BATCH)
        run.optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        run.optimizer.step()
        facts: dict[str, float] = {"step": step, "t": time.monotonic() - begin_s, "sites": run.size}
        if step % EVALUATE_EVERY == 0:
            with torch.no_grad():
                facts["loss"] = float(nn.functional.mse_loss(model(held_out[0]), held_out[1]))
            first_loss = first_loss or facts["loss"]
            facts["sent"] = count_sent_nbytes() - begin_nbytes
        if share == 0:
            print(json.dumps(facts), flush=True)
        if (lost_at < 0 and facts.get("loss", first_loss) < TARGET * first_loss) or step == lost_at + 10 > 9:
            break
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
