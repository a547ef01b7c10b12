"""farflung in somebody's own training loop: three lines, and the loop stays as it is."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from farflung.comm import collective_named
from farflung.errors import ConfigError, RunLost, Unsupported
from farflung.network import NetworkProfile, network_profile
from farflung.recipes import Recipe, recipe
from farflung.reducers import summed_nbytes
from farflung.replica import Exchanges, GradientBuckets, Vote
from farflung.replica.averaging import averaged, broadcast
from farflung.replica.merges import needs_the_loop
from farflung.runtime import Seat, WallRuntime, interface_to_master
from farflung.types import State

__all__ = ["Handle", "attach", "carries", "interface_to_master"]

T = TypeVar("T")

_JOIN_S = 60.0
_numbers = itertools.count()
"""Handles of one process, counted alike on all ranks, so that several can meet in one store."""


def carries(chosen: Recipe) -> str:
    """What :func:`attach` makes of a recipe: ``yes``, or what it needs beside, or why it is refused."""
    if chosen.sampler != "uniform":
        return f"draw batches with sampler {chosen.sampler}"
    reason = needs_the_loop(chosen.parts(0).schedule)
    return f"no: {reason}" if reason else "yes"


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    how: Recipe | str = "synchronous",
    *,
    seed: int = 0,
    deadline_s: float = 60.0,
    store: dist.Store | None = None,
    interface: str | None = None,
    encrypt: bool = False,
    network: NetworkProfile | str | None = None,
) -> Handle:
    """Lets the replicas that torchrun, srun or mpirun has started train ``model`` together.

    Afterwards the loop is what it was: each ``loss.backward()`` exchanges gradients while autograd runs, and ends when
    ``p.grad`` holds what the optimizer is to step on, or nothing where the schedule has nothing for it. Parameters
    and buffers start as rank 0's. Without torchrun there is one replica, and nothing is exchanged.

    Where replicas step on their own gradients (delayed updates), each ``optimizer.step()`` exchanges what it did to
    the parameters. They differ between replicas until :meth:`Handle.finish`; :meth:`Handle.averaged` gives the model
    to evaluate. Each scales its own loss, if a ``GradScaler`` does that; with pipelined schedules there can be none,
    since a gradient would be divided by another scale than it was multiplied by.

    Args:
      model: trained by this loop; wrapped or compiled models will do.
      optimizer: steps on the exchanged gradients.
      how: a recipe or the name of one; ``recipe("ring").but(bucket_nbytes=1 << 20)`` has buckets of another size.
      seed: equal on all ranks; what codecs draw from.
      deadline_s: seconds that any message may take before its sender counts as lost.
      store: where the replicas meet; the one at ``MASTER_ADDR`` when not given.
      interface: the address or network interface to listen on; that of the route to the master when not given.
      encrypt: encrypts on loopback too; elsewhere everything is encrypted anyway.
      network: what lies between the replicas, a profile or the name of one; from it the collective ``auto`` becomes the
        fastest one. It is measured when not given: see :meth:`farflung.runtime.WallRuntime.settle_collective`.

    Raises:
      UnknownName: no such recipe or network.
      Unsupported: a recipe that needs more than this loop.
      ConfigError: the environment does not say where the replicas meet.
      RunLost: a replica did not come.
    """
    chosen = recipe(how) if isinstance(how, str) else how
    parts = chosen.parts(seed)
    if reason := needs_the_loop(parts.schedule):
        raise Unsupported(f"attach cannot follow schedule {chosen.schedule}: {reason}; use farflung train")
    seat = Seat.taken() or Seat(0, 1, 0, 1)
    rank, size = seat.rank, seat.size
    profile = network_profile(network) if isinstance(network, str) else network
    if store is None and (meeting := seat.store(_JOIN_S)) is not None:
        store = dist.PrefixStore(f"attach-{next(_numbers)}", meeting)
    buckets = GradientBuckets(model.named_parameters(), parts.bucket_nbytes)
    runtime = WallRuntime(
        rank,
        size,
        store,
        settings={
            **chosen.to_json(),
            "seed": seed,
            "network": None if profile is None else profile.name,
            "bucket sizes": [bucket.spec.numel for bucket in buckets.buckets],
        },
        deadline_s=deadline_s,
        native=collective_named(chosen.collective).by_backend,
        join_s=_JOIN_S,
        interface=interface or interface_to_master(size),
        encrypt=encrypt,
    )
    try:
        runtime.expect(itertools.chain(model.parameters(), model.buffers()))
        exchanges = Exchanges(runtime, buckets, parts.reducer, parts.schedule, seed)
        nbytes = summed_nbytes(parts.reducer, [bucket.spec for bucket in buckets.buckets], size)
        collective = runtime.settle_collective(chosen.collective, nbytes, network=profile)
        handle = Handle(model, optimizer, runtime, buckets, exchanges, collective)
        handle.start()
    except BaseException as error:
        runtime.close(error)
        raise
    return handle


class Handle:
    """What :func:`attach` gives back; also a context manager that ends with :meth:`finish`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        runtime: WallRuntime,
        buckets: GradientBuckets,
        exchanges: Exchanges,
        collective: str,
    ) -> None:
        self.collective = collective
        """How all-reduces travel; never ``auto``, but what that stands for."""
        self.step = 0
        """Backward passes exchanged so far."""
        self._model, self._optimizer = model, optimizer
        self._runtime, self._buckets, self._exchanges = runtime, buckets, exchanges
        self._syncing = True
        self._weight = 1.0
        self._finished = False
        self._pass: int | None = None
        self._open = False
        """Whether a step has begun whose parameters have not been updated."""
        self._step_hook = optimizer.register_step_post_hook(lambda *_: self._updated(done=True))
        buckets.watch(self._gradient_arrives)

    @property
    def rank(self) -> int:
        """This replica."""
        return self._runtime.comm.rank

    @property
    def size(self) -> int:
        """Number of replicas."""
        return self._runtime.comm.size

    @property
    def communication_cpu_s(self) -> float:
        """Processor seconds that the communication thread has taken so far, without ZeroMQ's own."""
        return self._runtime.communication_cpu_s

    def start(self) -> None:
        """Begins from rank 0's parameters and buffers."""
        atexit.register(self._abandon)
        tensors = [*self._model.parameters(), *self._model.buffers()]
        self._runtime.drive(broadcast(self._runtime, tensors, 0))
        self._exchanges.restart()

    def weigh(self, weight: float) -> None:
        """Sets this replica's weight in the mean from the next backward on: samples over a full batch's, say.

        Raises:
          ConfigError: a negative weight.
        """
        if weight < 0:
            raise ConfigError(f"weight {weight}: must be 0 or more")
        self._weight = weight

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add to the gradients and exchange nothing; the next one outside exchanges all."""
        self._syncing, before = False, self._syncing
        try:
            yield
        finally:
            self._syncing = before

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Inside, the model is what should be evaluated or kept: running statistics are averaged, and parameters
        where replicas differ by updates that are under way.
        """
        self._updated(done=False)
        apart = self._exchanges.apart
        entered = averaged(self._runtime, self._model, self.step, apart=apart)
        self._runtime.drive(entered.__aenter__())
        try:
            yield self._model
        finally:
            self._runtime.drive(entered.__aexit__(None, None, None))

    def state_dict(self) -> State:
        """What farflung adds to the state of model and optimizer: steps, residuals, schedule, what is under way.

        Where replicas differ, each keeps its own parameters and optimizer beside it.
        """
        self._updated(done=False)
        return {"step": self.step, "exchanges": self._runtime.drive(self._exchanges.state_dict())}

    def load_state_dict(self, state: State) -> None:
        """Continues from :meth:`state_dict`."""
        self.step = state["step"]
        self._exchanges.load_state_dict(state["exchanges"])

    def finish(self) -> None:
        """Takes leave of the others, once the loop is through.

        What is still under way is applied first, by steps of the optimizer where it is gradients; afterwards all
        replicas have the same parameters.
        """
        if not self._finished:
            try:
                self._flush()
            except BaseException as error:
                self._end(error)
                raise
            self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif not self._finished:
            self._end(error)

    # --- inside autograd --------------------------------------------------------------------------------------

    def _gradient_arrives(self) -> None:
        if not self._syncing:
            return
        current = torch._C._current_graph_task_id()
        if current == self._pass:
            return
        if self._pass is not None:
            raise RunLost(
                f"the backward pass of step {self.step} broke off on rank {self.rank} while others took its gradients; "
                "start again from a checkpoint"
            )
        self._pass = current
        if self._open:
            # No step since the last backward. This one needs the parameters as they are, so results wait.
            self._exchanges.close(updated=False)
        self._open = True
        self._exchanges.begin(self.step, Vote(0.0, self._weight))
        self._buckets.arm(self._exchanges.ready)
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._buckets.finish()
        if not self._runtime.drive(self._exchanges.settle()):
            self._buckets.clear()
        self._pass = None
        self.step += 1
        if not self._exchanges.moves_parameters:
            self._updated(done=True)

    def _updated(self, *, done: bool) -> None:
        """The optimizer is through with a step, or it turns out that it was left out, as by a scaler."""
        if self._open:
            self._open = False
            self._runtime.drive(self._exchanges.finish(updated=done))

    def _flush(self) -> None:
        async def update(step: int) -> None:
            del step  # the loop's own schedule has come to its end
            self._optimizer.step()

        self._updated(done=False)
        self._runtime.drive(self._exchanges.flush(self.step, update))

    # --- the end ----------------------------------------------------------------------------------------------

    def _end(self, error: BaseException | None) -> None:
        self._finished = True
        atexit.unregister(self._abandon)
        self._buckets.remove()
        self._step_hook.remove()
        self._runtime.close(error)

    def _abandon(self) -> None:
        self._end(RunLost(f"rank {self.rank} ended without finish()"))
