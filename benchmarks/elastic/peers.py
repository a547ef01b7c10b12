"""Peers in the lab, whose worker kills itself at a step: torchft's survivors, and torchrun's restart.

``python -m benchmarks.elastic.peers`` is one process of a node; :func:`survivors` starts them all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

from benchmarks.common.workers import environment
from farflung.errors import LabError
from farflung.extras import require_modules
from farflung.lab import Lab
from farflung.lab.tun import build_address
from farflung.network import find_network
from farflung.seeding import create_generator
from farflung.workloads import create_workload

__all__ = ["HEARTBEATS", "managed", "survivors"]

HEARTBEATS: dict[str, dict[str, int]] = {
    "heartbeat 1 s": {"heartbeat_timeout_ms": 1_000, "join_timeout_ms": 60_000, "quorum_tick_ms": 100},
    "heartbeat 0.3 s": {"heartbeat_timeout_ms": 300, "join_timeout_ms": 300, "quorum_tick_ms": 10},
}
"""Time-outs of torchft's lighthouse: its defaults but for the heartbeat, and the lowest for beats of 100 ms."""
PORT = 29510
LIMIT_S = 240.0


# --- all nodes ----------------------------------------------------------------------------------------------------


def survivors(
    peer: str, model: str, network: str, nodes: int, *, lost: int, at: int, steps: int
) -> dict[int, dict[int, float]]:
    """Measures the seconds from each step to the next on each node that is left where another's worker is killed.

    Args:
      peer: ``restart``, or a name of :data:`HEARTBEATS`.
      model: a workload.
      network: between the nodes.
      nodes: how many have a replica.
      lost: the node whose worker is killed.
      at: the step before which it is.
      steps: of the training.

    Raises:
      MissingExtra: torchft is not installed.
      LabError: the run did not end in time, or replicas were missing before the kill; says what a worker said.
    """
    if peer in HEARTBEATS:
        require_modules("torchft's row", "torchft", extra="peers")
    with tempfile.TemporaryDirectory(prefix="farflung-peers-") as name, ExitStack() as stack:
        folder = Path(name)
        told = [peer, model, str(nodes), str(lost), str(at), str(steps), name]
        module = [sys.executable, "-m", "benchmarks.elastic.peers", *told]
        # The lighthouse has a node of its own, which no fault strikes.
        count = nodes + (peer in HEARTBEATS)
        lab = stack.enter_context(Lab(find_network(network).with_nodes(count), count))
        lab.check(any_delay=True)
        lab.begin()
        for node in range(count):
            log = stack.enter_context((folder / f"{node}.log").open("wb"))
            command = (
                [*module, str(node)]
                if peer in HEARTBEATS
                else [*AGENT, *agent(node, nodes), *module[1:], str(node)]
            )
            lab.start(node, command, {**environment(), **FRESH}, log.fileno())
        until = time.monotonic() + LIMIT_S
        for node in range(nodes):
            child = lab.workers[node]
            assert child is not None
            code = child.wait(max(0.0, until - time.monotonic()))
            if code != 0 and (node != lost or peer not in HEARTBEATS):
                said = (folder / f"{node}.log").read_text(errors="replace")[-1500:]
                raise LabError(f"{peer}: node {node} ended with exit code {code}: {said}")
        return {node: between(folder / f"{node}.jsonl", at, nodes) for node in range(nodes) if node != lost}


AGENT = [sys.executable, "-m", "torch.distributed.run"]
FRESH = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""A restart has a store of its own: in the agents' store gloo finds the addresses of workers that have ended."""


def agent(node: int, nodes: int) -> list[str]:
    """Return the options of torchrun at a node."""
    return [
        *("--nnodes", str(nodes), "--nproc-per-node", "1", "--max-restarts", "3"),
        *("--monitor-interval", "0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{build_address(0)}:{PORT}", "--rdzv-id", "elastic"),
        *("--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", build_address(node)),
    ]


def between(file: Path, at: int, nodes: int) -> dict[int, float]:
    """Return the seconds that each step took: from the step before on, each at its first time."""
    took, last_t, last = dict[int, float](), 0.0, -1
    for line in file.read_text().splitlines():
        step, t, present = json.loads(line)
        if step == at - 1 and present != nodes:
            raise LabError(f"{present} of {nodes} replicas took part before the kill")
        if step > last:
            if last >= 0:
                took[step] = t - last_t
            last, last_t = step, t
    return took


# --- one process --------------------------------------------------------------------------------------------------


class Training:
    """A workload's model, optimizer and batches; notes when each step is done, and kills itself where it is told to."""

    def __init__(self, model: str, file: Path, at: int | None) -> None:
        self.task = create_workload(model)
        self.model: nn.Module = self.task.build_model(create_generator(0, "model"))
        defaults: Mapping[str, Any] = self.task.defaults
        self.batch = int(defaults["batch_size"])
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=defaults["learning_rate"],
            momentum=defaults["momentum"],
            weight_decay=defaults["weight_decay"],
        )
        self.samples, _ = self.task.load_datasets()
        self.file, self.at = file.open("a"), at

    def begin(self, step: int) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def gradient(self, model: nn.Module) -> None:
        ids = torch.randint(len(self.samples), (self.batch,))
        self.task.compute_losses(model, self.samples.take(ids, train=True)).mean().backward()

    def done(self, step: int, present: int) -> None:
        self.file.write(json.dumps([step, time.monotonic(), present]) + "\n")
        self.file.flush()


def managed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    node: int,
    store: TCPStore,
    lighthouse: str,
    timeout: timedelta,
    **more: Any,
) -> Any:
    """Make torchft's manager of a replica group of one process, which hosts a store of its own."""
    from torchft import Manager, ProcessGroupGloo

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    return Manager(
        ProcessGroupGloo(timeout),
        load,
        state,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr=store.host,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{node}",
        hostname=store.host,
        init_sync=False,
        **more,
    )


def replica(train: Training, nodes: int, node: int, steps: int, folder: Path) -> None:
    """Trains as one replica group of torchft's, of one process."""
    from torchft import Optimizer

    store = TCPStore(build_address(node), 0, is_master=True, wait_for_workers=False)
    manager = managed(
        train.model,
        train.optimizer,
        node,
        store,
        f"http://{build_address(nodes)}:{PORT}",
        min_replica_size=2,
        timeout=timedelta(seconds=5),
    )
    optimizer = Optimizer(manager, train.optimizer)
    (folder / f"{node}.ready").touch()
    while len(list(folder.glob("*.ready"))) < nodes:
        time.sleep(0.01)
    while (step := manager.current_step()) < steps:
        train.begin(step)
        optimizer.zero_grad()
        train.gradient(train.model)
        # Its DistributedDataParallel ends with an AssertionError where the exchange of a bucket fails on the CPU.
        gradients = [parameter.grad for parameter in train.model.parameters() if parameter.grad is not None]
        flat = torch.cat([one.flatten() for one in gradients])
        manager.allreduce(flat).wait()
        for one, mean in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            one.copy_(mean.view_as(one))
        optimizer.step()
        if manager.current_step() > step:
            train.done(step, manager.num_participants())
    os._exit(0)


def lighthouse(heartbeat: Mapping[str, int]) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind=f"0.0.0.0:{PORT}", min_replicas=2, **heartbeat)
    print(server.address(), flush=True)
    signal.pause()


def worker(train: Training, nodes: int, steps: int, folder: Path) -> None:
    """Trains as a worker of torchrun's by DDP; rank 0 keeps model and momentum after each step."""
    from safetensors.torch import load_file, save_file
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model, kept, step = DistributedDataParallel(train.model), folder / "checkpoint", 0
    if kept.exists():
        found = load_file(kept)
        step = int(found["step"])
        train.model.load_state_dict({name: found[name] for name in train.model.state_dict()})
        for number, parameter in enumerate(train.model.parameters()):
            train.optimizer.state[parameter]["momentum_buffer"] = found[f"momentum.{number}"]
    while step < steps:
        train.begin(step)
        train.optimizer.zero_grad()
        train.gradient(model)
        train.optimizer.step()
        train.done(step, dist.get_world_size())
        step += 1
        if dist.get_rank() == 0:
            buffers = [train.optimizer.state[one]["momentum_buffer"] for one in train.model.parameters()]
            whole = {f"momentum.{number}": buffer for number, buffer in enumerate(buffers)}
            save_file(
                {**train.model.state_dict(), **whole, "step": torch.tensor(step)}, kept.with_suffix(".new")
            )
            kept.with_suffix(".new").replace(kept)
    dist.barrier()


def main(args: Sequence[str]) -> None:
    peer, model, *numbers, name, where = args
    nodes, lost, at, steps = map(int, numbers)
    node, folder = int(where), Path(name)
    if node == nodes:
        return lighthouse(HEARTBEATS[peer])
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    train = Training(model, folder / f"{node}.jsonl", at if node == lost and first else None)
    if peer in HEARTBEATS:
        return replica(train, nodes, node, steps, folder)
    return worker(train, nodes, steps, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
