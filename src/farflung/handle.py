"""farflung in a training loop of its user's: three lines, and the loop stays as it is."""

from __future__ import annotations

import atexit
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from farflung._torch import after_backward, current_node, graph_task_id
from farflung.attach_checks import (
    accumulates,
    check_optimizer,
    check_sole,
    check_whole,
    held_by,
    named,
    needs_closure,
    plain_optimizer,
)
from farflung.comm import Endpoint, Purpose, collective_named
from farflung.config import ON_NONFINITE
from farflung.engine import Engine, GradientBuckets, StepMetadata
from farflung.engine.averaging import (
    average,
    broadcast,
    relative_spread,
    sketch,
    sum_everywhere,
    unlike,
)
from farflung.errors import CheckpointError, ConfigError, RunLost, Unsupported
from farflung.loop import Parts, fingerprint, optimizer_settings
from farflung.moments import eval_state, kind_of
from farflung.rates import NoScaling
from farflung.recipes import Recipe, recipe
from farflung.reducers import summed_nbytes
from farflung.schedules import SCHEDULES
from farflung.spec import text_of
from farflung.telemetry import Sink, Telemetry
from farflung.types import Schedule, State
from farflung.wall import LaunchEnv, WallRuntime

if TYPE_CHECKING:
    from farflung.importance import ImportanceSampler
    from farflung.network import NetworkProfile
    from farflung.sampling import Gain

__all__ = ["Handle", "attach", "carries"]

T = TypeVar("T")

_JOIN_S = 60.0
_MOST_PASSES = 100
"""Backward passes in a row without a step, after which the optimizer is taken for one that does not step."""
_COMPARED_EVERY = 1024
"""Rounds after which equal replicas are compared again, beside the powers of two."""
_TOLERATED = 1e-4
"""Relative distance of replicas that rounding on unlike devices may explain."""
_STEP_IN_BACKWARD = (
    "an optimizer stepped, or a hook took a gradient away, while backward() was sending it: replicas would train "
    "apart. Step after backward()"
)
_UNEVEN = "; where ranks have unlike numbers of batches, put the loop inside handle.join()"
_attached: list[Handle] = []
"""Those of this process that have not finished."""


def carries(chosen: Recipe) -> str:
    """What :func:`attach` makes of a recipe: ``yes``, or what it needs beside, or why it is refused."""
    parts = chosen.parts(0)
    if reason := parts.schedule.attach_refusal or _left_to_the_loop(parts):
        return f"no: {reason}"
    if chosen.sampler != "uniform":
        return f"draw batches with sampler {chosen.members['sampler']}"
    return "yes" if parts.stream.everything else f"draw batches with stream {chosen.members['stream']}"


def _nearest(parts: Parts) -> str:
    """Tells what to change in a recipe that a loop of its own cannot follow, for the nearest one that it can."""
    changes = {"sharing": "none"} if parts.sharing.data_leaves_device else {}
    if parts.scaling != NoScaling():
        changes["scaling"] = "none"
    if parts.schedule.attach_refusal:
        changes["schedule"] = text_of(_nearest_schedule(parts.schedule), SCHEDULES)
    return ", ".join(f"{family}={text!r}" for family, text in changes.items())


def _nearest_schedule(schedule: Schedule) -> Schedule:
    from farflung.schedules import AdaComm, LocalSGD, Pipelined, Synchronous

    match schedule:
        case AdaComm():
            return LocalSGD(schedule.sync_every, schedule.optimizer_state)
        case Pipelined():
            return replace(schedule, predict=None)
    return Synchronous()


def _left_to_the_loop(parts: Parts) -> str:
    """What a recipe does that belongs to the loop itself; empty: nothing."""
    if parts.sharing.data_leaves_device:
        return "it sees no samples and cannot send any to other replicas"
    return "" if parts.scaling == NoScaling() else "the learning rate is the loop's own"


def _profile(network: NetworkProfile | str | None) -> NetworkProfile | None:
    if not isinstance(network, str):
        return network
    from farflung.network import network_profile

    return network_profile(network)


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    how: Recipe | str = "synchronous",
    *,
    seed: int = 0,
    deadline_s: float = 60.0,
    launch_env: LaunchEnv | None = None,
    store: dist.Store | None = None,
    endpoint: Endpoint = Endpoint(),
    network: NetworkProfile | str | None = None,
    nonfinite: str | None = None,
    sampler: ImportanceSampler | None = None,
    elastic: int = 0,
    quorum: str = "majority",
    show: Sink | None = None,
) -> Handle:
    """Lets the replicas that torchrun, srun or mpirun has started train ``model`` together.

    Afterwards the loop is what it was: each ``loss.backward()`` exchanges gradients while autograd runs, and ends when
    ``p.grad`` holds what the optimizer is to step on, or nothing where the schedule has nothing for it. Parameters
    and buffers start as rank 0's. Without torchrun there is one replica, and nothing is exchanged.

    Where replicas step on their own gradients (delayed updates), each ``optimizer.step()`` exchanges what it did to
    the parameters. They differ between replicas until :meth:`Handle.finish`; :meth:`Handle.averaged` gives the model
    to evaluate. Each scales its own loss, if a ``GradScaler`` does that; with pipelined schedules there can be none,
    since a gradient would be divided by another scale than it was multiplied by.

    A parameter that no loss reached on any replica keeps no gradient, as under DistributedDataParallel; where some
    replicas lack it they count as zeros. What is frozen now is left alone, and has to stay frozen until
    :meth:`Handle.finish`.

    Args:
      model: trained by this loop; compiled models will do, those wrapped in DistributedDataParallel or FSDP will not.
      optimizer: steps on the exchanged gradients; one that wraps another, as Accelerate's, will do. Inside of
        Accelerate's ``accumulate()`` nothing is exchanged until its optimizer steps.
      how: a recipe or the name of one, with changes in brackets if wished: ``"ring(codec=int8)"``.
      seed: equal on all ranks; what codecs draw from.
      deadline_s: seconds for which a replica that is waited for may be silent before it counts as lost. One that
        answers may be busy for ten times as long.
      launch_env: rank and size of this replica; read from the environment when not given.
      store: where the replicas meet; the one at ``MASTER_ADDR`` when not given.
      endpoint: how this replica connects to the others.
      network: what lies between the replicas, a profile or the name of one; from it the collective ``auto`` becomes the
        fastest one. It is measured when not given: see :meth:`farflung.wall.WallRuntime.settle_collective`.
      nonfinite: what all replicas do where a gradient is NaN or infinite: ``stop``, ``skip`` the step, or ``exclude``
        that replica from it, except for buckets that have left before. Each bucket is then looked through, which
        waits for the device. ``None``: none is checked, as under DistributedDataParallel; for loops with a
        ``GradScaler``.
      sampler: this rank's, which draws the loop's batches: with rule ``auto`` it learns from gradients and scores of
        all ranks whether to draw by scores.
      elastic: replicas with which the run at least goes on where others are lost, see :attr:`Handle.members`; 0: the
        first loss ends it.
      quorum: ``majority``, or ``1``: replicas that lose touch with the majority go on alone, each part with a model of
        its own.
      show: gets an event for each step of this replica: its seconds, those waited for exchanges, bytes sent so far. For
        example :class:`farflung.loggers.RunLog`.

    Raises:
      UnknownName: no such recipe or network.
      Unsupported: a recipe that needs more than this loop, or a model that cannot be carried: DistributedDataParallel,
        FSDP, sparse gradients, complex or lazy parameters; an optimizer that needs a closure, with late results.
      ConfigError: an optimizer that is not the model's, a model that is attached already, or an environment that does
        not say where the replicas meet.
      RunLost: a replica did not come.
    """
    chosen = recipe(how) if isinstance(how, str) else how
    parts = chosen.parts(seed)
    if reason := parts.schedule.attach_refusal or _left_to_the_loop(parts):
        raise Unsupported(
            f"attach cannot follow recipe {chosen.text}: {reason}; use farflung train, or this "
            f"recipe.but({_nearest(parts)}), which comes nearest"
        )
    if nonfinite not in (None, *ON_NONFINITE):
        raise ConfigError(
            f"attach: nonfinite {nonfinite!r}: must be None or one of {', '.join(ON_NONFINITE)}"
        )
    if elastic and (
        why := parts.needs_all or (sampler is not None and "an importance sampler needs all replicas")
    ):
        raise ConfigError(f"attach: elastic: {why}")
    if quorum not in ("majority", "1"):
        raise ConfigError(f"attach: quorum {quorum!r}: must be 'majority' or '1'")
    check_sole(model)
    env = launch_env or LaunchEnv.read() or LaunchEnv(0, 1, 0, 1)
    rank, size = env.rank, env.size
    check_whole(model, is_alone=size == 1)
    accumulating = partial(accumulates, optimizer)
    optimizer = plain_optimizer(optimizer)
    check_optimizer(model, optimizer)
    if any(handle.knows(model.parameters()) for handle in _attached):
        raise ConfigError("attach: this model is attached already; call finish() on its handle first")
    if sampler is not None and (sampler.rank, sampler.size) != (rank, size):
        raise ConfigError(
            f"attach: the sampler is that of rank {sampler.rank} of {sampler.size}, and this is rank {rank} of {size}"
        )
    profile = _profile(network)
    if store is None:
        store = env.store(_JOIN_S)
    buckets = GradientBuckets(model.named_parameters(), parts.bucket_nbytes)
    runtime = WallRuntime(
        rank,
        size,
        store,
        meeting="attach",
        endpoint=endpoint.on(partial(env.interface, store)),
        settings={
            **chosen.to_json(),
            "seed": seed,
            "network": None if profile is None else profile.name,
            "nonfinite": nonfinite,
            "elastic": elastic,
            "quorum": quorum,
            "bucket sizes": [bucket.spec.numel for bucket in buckets.buckets],
            "model": fingerprint(model),
            **optimizer_settings(optimizer),
        },
        deadline_s=deadline_s,
        native=collective_named(chosen.collective).by_backend,
        join_s=_JOIN_S,
        members=range(size) if elastic else None,
        kept_nbytes=math.inf if elastic else None,
    )
    try:
        runtime.view.left += _UNEVEN
        runtime.expect(itertools.chain(model.parameters(), model.buffers()))
        if needs_closure(optimizer) and not parts.schedule.is_synchronous:
            raise Unsupported(
                f"attach: {type(optimizer).__name__} computes gradients inside its step, which schedule "
                f"{chosen.schedule} cannot follow: use a synchronous recipe"
            )
        engine = Engine(
            runtime,
            buckets,
            parts.reducer,
            parts.schedule,
            seed=seed,
            optimizer=optimizer,
            on_nonfinite=nonfinite or "stop",
            checks_gradients=nonfinite is not None,
        )
        gain = None if sampler is None else sampler.gain
        if gain is not None:
            from farflung.sampling.gain import MeasuredGain

            engine.extend(MeasuredGain(gain, runtime, parts.schedule, parts.reducer))
        nbytes = summed_nbytes(parts.reducer, [bucket.spec for bucket in buckets.buckets], size)
        collective = runtime.settle_collective(chosen.collective, nbytes, network=profile)
        handle = Handle(
            model,
            optimizer,
            runtime,
            buckets,
            engine,
            parts.schedule,
            collective,
            show,
            accumulating,
            profile,
            gain,
        )
        handle.start()
        if elastic and size > 1:
            from farflung.membership import Page
            from farflung.wall.visits import elastic_on

            runtime.elastic = elastic_on(
                runtime,
                range(size),
                page=Page.inherited(),
                least=elastic,
                quorum=quorum,
                patience_s=deadline_s,
                reach=parts.schedule.reach,
            )
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
        engine: Engine,
        schedule: Schedule,
        collective: str,
        show: Sink | None = None,
        accumulating: Callable[[], bool] = lambda: False,
        network: NetworkProfile | None = None,
        gain: Gain | None = None,
    ) -> None:
        self._telemetry = None if show is None else Telemetry(runtime.comm.rank, show)
        self._told_s, self._told_waited_s = 0.0, 0.0
        self.collective = collective
        """How all-reduces travel; never ``auto``, but what that stands for."""
        self.step = 0
        """Steps of the optimizer so far; one that a ``GradScaler`` skips counts too."""
        self._model, self._optimizer = model, optimizer
        self._runtime, self._buckets, self._engine = runtime, buckets, engine
        self._schedule, self._gain = schedule, gain
        self._syncing, self._accumulating = True, accumulating
        self._network = network
        self._weight = 1.0
        self.is_finished = False
        """Whether :meth:`finish`, :meth:`leave` or an error has ended what :func:`attach` began."""
        self._tasks: dict[int, weakref.ref[_End] | None] = {}
        """The runs of autograd that make up the backward pass under way, by number; ``None``: it has ended."""
        self._is_step_open = False
        """Whether there was a backward pass since the optimizer's last step."""
        self._empty_passes = 0
        """Backward passes in a row, with that under way, whose hooks were called without any gradient."""
        self._exchanged = False
        """Whether there was an exchange since the optimizer's last step."""
        self._steps_by_itself = False
        """Whether farflung steps the optimizer, at the end or for a replica without data."""
        self._skipped_steps = 0
        """Steps in a row that the loop has left out."""
        self._sketch_of_open_step: Tensor | None = None
        """Sums of parameters when a backward pass began whose predecessor's gradients were gone without a step."""
        self._has_stepped: bool | None = None
        """Whether the optimizer has stepped since the last gradient arrived; ``None``: no gradient has arrived."""
        self._other_optimizer = ""
        """Class of another optimizer that has stepped on the same parameters since this one."""
        self._passes = 0
        """Backward passes before the one that is under way, since the optimizer's last step."""
        self._is_apart = False
        """Whether replicas have differed that should have been equal."""
        self._warnings: set[str] = set()
        """Kinds of warnings that have been given."""
        parameters = list(model.named_parameters())
        self._trained = buckets.parameters
        self._known = {id(p) for _, p in parameters}
        self._left_out = [(name, p) for name, p in parameters if not p.requires_grad]
        self._held = len(held_by(optimizer))
        # A step may be compiled; what exchanges is not.
        stepped, other_stepped = (
            torch.compiler.disable(method) for method in (self._stepped, self._other_stepped)
        )
        self._hooks = [
            optimizer.register_step_post_hook(lambda *_: stepped()),
            register_optimizer_step_post_hook(lambda other, *_: other_stepped(other)),
        ]
        buckets.watch(self._gradient_arrives)

    @property
    def rank(self) -> int:
        """This replica."""
        return self._runtime.comm.rank

    @property
    def size(self) -> int:
        """Number of replicas; where some are lost, of those that take the next step's batches."""
        return len(self.members)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take the next step's batches, alike on all at a step.

        Where a rank is lost it leaves this list some steps later, and the means of exchanges at once. So a loop that
        draws the batch of place ``members.index(rank)`` of ``size`` at each step draws as all others do.
        """
        elastic = self._runtime.elastic
        return (
            tuple(range(self._runtime.comm.size))
            if elastic is None
            else elastic.at(self._engine.round_number).ranks
        )

    @property
    def is_synchronous(self) -> bool:
        """Whether all replicas take the same steps: on means of gradients, each at the step that they were taken at."""
        return self._schedule.is_synchronous

    @property
    def communication_cpu_s(self) -> float:
        """Processor seconds that the communication thread has taken so far."""
        return self._runtime.communication_cpu_s

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes of gradients and updates that this replica has sent so far."""
        return self._engine.sent_nbytes

    @property
    def sent(self) -> dict[str, list[int]]:
        """Payload bytes that this replica has sent to each rank so far, whatever for, by kind.

        See :class:`farflung.comm.Purpose`. Exchanges under way count with what has left.
        """
        return self._runtime.comm.sent.to_json()

    @property
    def waited_s(self) -> float:
        """Seconds for which the loop has waited for exchanges so far; the rest was hidden behind its work."""
        return self._engine.times.waited_s

    def knows(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether this handle is on any of some parameters."""
        return any(id(parameter) in self._known for parameter in parameters)

    def start(self) -> None:
        """Begins from rank 0's parameters and buffers; those travel that differ."""
        atexit.register(self._abandon)
        _attached.append(self)
        tensors = [*self._model.parameters(), *self._model.buffers()]
        indices = self._runtime.drive(unlike(self._runtime, tensors, 0, purpose=Purpose.START))
        unequal = [tensors[index] for index in indices]
        self._runtime.drive(broadcast(self._runtime, unequal, 0, network=self._network))
        self._engine.restart()
        self._told_s = self._runtime.now()
        if self._telemetry is not None:
            self._telemetry.emit("begin", t=self._told_s, step=0)

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
        """Inside, backward passes add to the gradients and exchange nothing; the next one outside exchanges all.

        Synchronous recipes exchange at each backward pass outside, as DistributedDataParallel does; schedules of local
        steps only when the optimizer steps, so that they need this nowhere; pipelined ones refuse a second pass.
        """
        self._syncing, before = False, self._syncing
        try:
            yield
        finally:
            self._syncing = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around loops that have unlike numbers of steps on the replicas.

        A replica that comes to the end answers the others without data until all have come there: each mean is over
        those that have data. Meanwhile it follows them by ``optimizer.step()``, and at the end parameters and the
        optimizer's tensors become those of a replica that was among the last. Learning rates, clipping and whatever
        else a loop does are each replica's own.

        Raises:
          Unsupported: a schedule whose results come late, or an optimizer that needs a closure.
        """
        if self._runtime.elastic is not None:
            raise Unsupported("join() needs all replicas: leave out elastic")
        if not self._schedule.is_synchronous or needs_closure(self._optimizer):
            raise Unsupported(
                "join() follows other replicas step by step, which neither a late schedule nor an optimizer with a "
                "closure allows: use a synchronous recipe, or as many steps on all"
            )
        first = self.step
        yield
        if self._is_step_open:
            self._end_step(updated=False, in_pass=False)
        steps = self.step - first
        while self._answers():
            pass
        self.step = first + self._adopt(steps)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Inside, the model is what should be evaluated or kept: running statistics are averaged, and parameters
        where replicas differ; with a pull they are the anchor instead.

        Raises:
          RunLost: after :meth:`finish`.
        """
        from farflung.loop.evaluation import averaged

        self._check_none_new()
        self._end_skipped_step()
        stands = self._engine.consensus_parameters()
        if stands == {} and self._can_be_apart and self._measure_spread(part=1):
            stands = None  # something has changed them since the last exchange
        entered = averaged(self._runtime, self._model, self._engine.round_number, stands)
        self._runtime.drive(entered.__aenter__())
        try:
            yield self._model
        finally:
            self._runtime.drive(entered.__aexit__(None, None, None))

    def state_dict(self) -> State:
        """What farflung adds to the state of model and optimizer: steps, residuals, schedule, what is under way.

        Each replica keeps its own, and that of its optimizer. What else is a replica's own, its running statistics and,
        where replicas differ, its parameters, is in here too.

        Raises:
          RunLost: after :meth:`finish`.
        """
        self._end_skipped_step()
        exchanges = self._runtime.launch(self._engine.state_dict()).wait()
        persistent = self._model.state_dict().keys()
        own: dict[str, Tensor] = {
            name: buffer for name, buffer in self._model.named_buffers() if name in persistent
        }
        if self._engine.diverged:
            trained = {id(p) for p in self._trained}
            own |= {name: p for name, p in self._model.named_parameters() if id(p) in trained}
        return {
            "step": self.step,
            "rank": self.rank,
            "size": self._runtime.comm.size,
            "buckets": self._buckets.layout,
            "model": {name: tensor.detach().clone() for name, tensor in own.items()},
            "exchanges": exchanges,
        }

    def load_state_dict(self, state: State) -> None:
        """Continues from :meth:`state_dict`; model and optimizer may be loaded before :func:`attach` or after it.

        Where training has begun, all ranks go back together; what is under way is waited for and forgotten.

        Raises:
          CheckpointError: of another model, another rank, another number of replicas, or none at all.
        """
        wanted = {"step", "rank", "size", "buckets", "model", "exchanges"}
        if lacking := wanted - state.keys():
            raise CheckpointError(f"this is no state of a handle: it lacks {', '.join(sorted(lacking))}")
        if (state["rank"], state["size"]) != (self.rank, self._runtime.comm.size):
            raise CheckpointError(
                f"this state is that of rank {state['rank']} of {state['size']}, and this is rank {self.rank} of "
                f"{self._runtime.comm.size}: each rank keeps and loads its own"
            )
        tensors: dict[str, Tensor] = {
            **dict(self._model.named_buffers()),
            **dict(self._model.named_parameters()),
        }
        own = state["model"]
        if state["buckets"] != self._buckets.layout or any(
            name not in tensors or tensors[name].shape != value.shape for name, value in own.items()
        ):
            raise CheckpointError("this state was made with another model or other buckets")
        for flight in self._engine.flights:
            self._runtime.drive(flight.started.bring())
        self._reset_step()
        with torch.no_grad():
            for name, value in own.items():
                tensors[name].copy_(value)
        self.step = state["step"]
        self._engine.load_state_dict(state["exchanges"])

    def finish(self) -> None:
        """Takes leave of the others, once the loop is through.

        What is still under way is applied first, by steps of the optimizer where it is gradients; afterwards all
        replicas have the same parameters. Where something has changed them besides, unlike on each, they become the
        mean, which is warned of.
        """
        if not self.is_finished:
            try:
                self._flush()
            except BaseException as error:
                self._end(error)
                raise
            self._end(None)

    def leave(self) -> None:
        """Leaves a run that goes on where replicas are lost (``attach(elastic=...)``), between two steps.

        The others take the batches of this replica that are in no update. Its parameters stay as they are; like
        :meth:`finish`, it ends what :func:`attach` began.

        Raises:
          RunLost: the run has ended here for another reason, such as members that are no majority.
        """
        if self.is_finished:
            return
        if self._runtime.elastic is not None:
            try:
                self._runtime.elastic.leave().wait()
            except BaseException as error:
                self._end(error)
                raise
        elif self.size > 1:
            raise Unsupported("leave() ends the run for all others: attach(elastic=...) lets them go on")
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif not self.is_finished:
            self._end(error)

    # --- inside autograd --------------------------------------------------------------------------------------

    def _gradient_arrives(self, parameter: nn.Parameter) -> None:
        self._has_stepped = False
        if not self._syncing or self._accumulating():
            return
        if not self._tasks:
            self._begin_pass(parameter)
        if parameter.grad is not None:
            self._empty_passes = 0
        self._follow_task()

    def _follow_task(self) -> None:
        """Asks autograd to tell of the end of the run that calls this."""
        task = graph_task_id()
        if task in self._tasks:
            return
        if any(end is not None and end() is None for end in self._tasks.values()):
            raise RunLost(
                f"the backward pass of step {self.step} broke off on rank {self.rank} while others took its gradients; "
                "start again from a checkpoint"
            )
        end = _End(self._task_ends, task)
        self._tasks[task] = weakref.ref(end)
        after_backward(end)

    def _begin_pass(self, parameter: nn.Parameter) -> None:
        self._check_all_known()
        if self._is_step_open:
            self._continue_step(parameter)
        if not self._engine.is_round_open:
            self._begin_round()
        self._is_step_open = True
        self._empty_passes += 1
        self._buckets.arm(self._engine.bucket_ready)

    def _continue_step(self, parameter: nn.Parameter) -> None:
        """Decides what another backward pass before the optimizer's step is, by what became of the last one.

        Args:
          parameter: has the first gradient of this pass.

        Raises:
          Unsupported: the schedule cannot take it, or the optimizer is not the one that steps.
        """
        if self._schedule.has_late_gradients:
            raise Unsupported(
                f"a second backward pass before the step of {kind_of(self._optimizer)}: "
                f"{type(self._schedule).__name__} has sent the first one's gradients for a later step. Add losses up "
                "for one backward(), or put all passes of a step but the last inside handle.no_sync()"
            )
        none_in_many = f"took no step in {_MOST_PASSES} backward passes"
        is_kept = self._buckets.has_kept_gradients(parameter)
        if not is_kept and (self._buckets.has_zeroed_gradients(parameter) or not self._buckets.is_finite()):
            # They were zeroed in place, or were no numbers, as where a GradScaler skips a step.
            self._skipped_steps += 1
            if self._skipped_steps >= _MOST_PASSES:
                raise Unsupported(self._describe_missing_step(none_in_many))
            self._end_step(updated=False, in_pass=True)
        elif self._engine.has_gradient_transfers(self.step):
            self._passes += 1
            if self._passes >= _MOST_PASSES:
                self._warn_once("step", self._describe_missing_step(none_in_many))
            if self._engine.is_round_open:
                self._close_round(updated=False, in_pass=True)
        elif not is_kept:
            sums = sketch(self._trained)
            if self._sketch_of_open_step is not None and not torch.equal(sums, self._sketch_of_open_step):
                raise Unsupported(self._describe_missing_step("takes no step, while parameters change"))
            self._sketch_of_open_step = sums

    def _check_none_new(self) -> None:
        """Raises ConfigError where parameters that train were made after :func:`attach`."""
        if new := [
            name for name, p in self._model.named_parameters() if p.requires_grad and id(p) not in self._known
        ]:
            raise ConfigError(
                f"the model has parameters that were made after attach(), unlike on each rank: {named(new)}; "
                "finish() and attach() again"
            )

    def _describe_missing_step(self, what: str) -> str:
        other = f"; {self._other_optimizer} did" if self._other_optimizer else ""
        return (
            f"{kind_of(self._optimizer)}, which attach() was given, {what}{other}, and {type(self._schedule).__name__} "
            "counts its steps: attach the optimizer whose step() runs; updates by hand need a synchronous recipe"
        )

    def _begin_round(self, *, has_data: bool = True) -> None:
        """Plans what leaves in a backward pass or after it."""
        number = self._engine.round_number
        if not number & (number - 1):
            self._check_none_new()
        if self._schedule.moves_gradients:
            self._compare(has_data=has_data)
        weight = self._weight if has_data else 0.0
        self._engine.begin(self.step, StepMetadata(0.0, weight, is_exhausted=not has_data))

    def _compare(self, *, has_data: bool) -> None:
        """Compares replicas, which step on the same means, more and more seldom; says once where they differ."""
        count = self._engine.round_number
        if not count or (count & (count - 1) and count % _COMPARED_EVERY):
            return
        spread = self._measure_spread(has_data=has_data)
        self._is_apart |= spread > 0
        if spread > _TOLERATED:
            self._warn_once(
                "apart",
                f"replicas have come apart by {spread:.1g} of their parameters' norm by step {self.step}, though their "
                f"gradients are equal: something beside the steps of {kind_of(self._optimizer)} changes parameters "
                "unlike on each rank, such as noise drawn with unlike seeds. finish() averages them",
            )

    def _measure_spread(self, part: int = 0, *, has_data: bool = True) -> float:
        if self.size == 1:
            return 0.0
        number = self._engine.round_number
        return self._runtime.drive(
            relative_spread(self._runtime, self._trained, number, part=part, takes_part=has_data)
        )

    def _task_ends(self, task: int) -> None:
        """The pass ends with the outermost run of autograd; those inside are of reentrant checkpoints."""
        self._tasks[task] = None
        outer = current_node()
        if outer is None:
            self._tasks.clear()
            self._backward_ends()
            return

        def outer_goes_on(*_: object) -> None:
            hook.remove()
            with self._buckets.lock:
                self._follow_task()

        hook = outer.register_hook(outer_goes_on)

    def _backward_ends(self) -> None:
        self._buckets.finish()
        if self._empty_passes > 1 or self._buckets.has_replaced_gradients():
            raise Unsupported(_STEP_IN_BACKWARD)
        if not self._runtime.drive(self._engine.settle()):
            self._buckets.clear()
        self._exchanged = True
        if self._schedule.moves_gradients:
            self._close_round(updated=True, in_pass=False)

    # --- around the optimizer ---------------------------------------------------------------------------------

    def _stepped(self) -> None:
        if self._steps_by_itself or not (self._is_step_open or self._has_gradients()):
            return
        self._has_stepped = None if self._has_stepped is None else True
        if not self._exchanged:  # else the backward pass has checked
            self._check_all_known()
            if not self._schedule.moves_gradients and not self._engine.has_gradient_transfers(self.step):
                self._begin_round()  # its gradients are those of no_sync() or torch.func
            elif self.size > 1 and self._has_gradients():
                self._is_apart = True
                self._warn_once(
                    "exchange",
                    f"an optimizer step on rank {self.rank} followed no exchange since step {self.step}: replicas "
                    "train apart. Gradients are exchanged by backward() outside no_sync(); those of "
                    "torch.autograd.grad or torch.func are not",
                )
        self._skipped_steps, self._other_optimizer = 0, ""
        self._end_step(updated=True, in_pass=False)

    def _other_stepped(self, other: torch.optim.Optimizer) -> None:
        """Takes note of the step of any other optimizer in this process.

        Raises:
          Unsupported: it steps inside backward, or moves parameters after what moved them has been exchanged.
        """
        if other is self._optimizer or not any(id(p) in self._known for p in held_by(other)):
            return
        if graph_task_id() >= 0:
            raise Unsupported(_STEP_IN_BACKWARD)
        self._other_optimizer = kind_of(other)
        if not self._has_stepped or self._schedule.moves_gradients:
            return
        others = self._known - {id(p) for p in held_by(self._optimizer)}
        if any(p.grad is not None and id(p) in others for p in held_by(other)):
            raise Unsupported(
                f"{kind_of(other)} steps after {kind_of(self._optimizer)}, which attach() was given, on other "
                f"parameters of the model: {type(self._schedule).__name__} exchanges what steps have changed when the "
                "attached one has stepped. Attach the optimizer that steps last"
            )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warnings:
            self._warnings.add(kind)
            warnings.warn(text, stacklevel=3)

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in held_by(self._optimizer))

    def _check_all_known(self) -> None:
        """Whether all that trains is exchanged, though layers and groups of the optimizer may have been added."""
        if self._left_out and (unfrozen := [name for name, p in self._left_out if p.requires_grad]):
            raise ConfigError(
                f"parameters were frozen when attach() was called, and would train apart now: {named(unfrozen)}; "
                "finish() and attach() again after unfreezing"
            )
        count = 0
        for group in self._optimizer.param_groups:
            count += len(group["params"])
        if count != self._held and not all(id(p) in self._known for p in held_by(self._optimizer)):
            raise ConfigError(
                "the optimizer was given parameters after attach(), which would train apart: finish() and attach() "
                "again"
            )

    def _end_skipped_step(self) -> None:
        """Ends a step that the loop has left out, as a GradScaler does; one whose gradients are numbers goes on."""
        if self._engine.is_round_open and (
            not self._buckets.is_finite() or self._buckets.has_zeroed_gradients()
        ):
            self._end_step(updated=False, in_pass=False)

    def _end_step(self, *, updated: bool, in_pass: bool) -> None:
        """Ends a step of the optimizer.

        Args:
          updated: whether it had gradients to step on.
          in_pass: whether the next backward pass runs already, so that parameters have to stay as they are.
        """
        if self._engine.is_round_open:
            self._close_round(updated=updated, in_pass=in_pass)
        self._reset_step()
        self.step += 1
        self._runtime.events += 1
        self._tell()

    def _reset_step(self) -> None:
        """Forgets the backward passes since the optimizer's last step."""
        self._is_step_open = self._exchanged = False
        self._passes, self._sketch_of_open_step = 0, None

    def _close_round(self, *, updated: bool, in_pass: bool) -> None:
        self._runtime.drive(self._engine.finish(updated=updated, applies=not in_pass))

    @property
    def _can_be_apart(self) -> bool:
        """Whether replicas may differ though all exchanges are merged: those that step for themselves, for one."""
        return self._is_apart or not self._schedule.moves_gradients

    def _tell(self) -> None:
        """Emits an event of the step that has ended, from the end of the one before to its own."""
        if self._telemetry is None:
            return
        begin, waited = self._told_s, self._told_waited_s
        self._told_s, self._told_waited_s = self._runtime.now(), self.waited_s
        self._telemetry.emit(
            "step",
            t=self._told_s,
            step=self.step - 1,
            duration_s=self._told_s - begin,
            exposed_s=self._told_waited_s - waited,
            bytes_sent=self.sent_nbytes,
            in_flight=len({flight.step for flight in self._engine.flights}),
            **({} if self._gain is None else {"rule": self._gain.rule, **self._gain.told()}),
        )

    def _answers(self) -> bool:
        """A step without data; whether any replica had some."""
        self._begin_round(has_data=False)
        self._buckets.without_data(self._engine.bucket_ready)
        has_gradient = self._runtime.drive(self._engine.settle())
        outcome = self._runtime.drive(self._engine.finish(updated=has_gradient))
        self.step += 1
        self._runtime.events += 1
        going_on = outcome.num_exhausted < self.size
        if going_on and has_gradient:
            self._step_by_itself()
        self._buckets.clear()
        return going_on

    def _step_by_itself(self) -> None:
        self._steps_by_itself = True
        try:
            self._optimizer.step()
        finally:
            self._steps_by_itself = False

    def _adopt(self, steps: int) -> int:
        """Takes over what a replica with the most steps has come to; returns how many these are."""
        counts = torch.zeros(self.size, dtype=torch.float64)
        counts[self.rank] = steps
        number, purpose = self._engine.round_number, Purpose.JOIN
        _, total = self._runtime.drive(
            sum_everywhere(self._runtime, torch.empty(0), counts, number, purpose=purpose)
        )
        state = self._optimizer.state
        tensors: list[Tensor] = list(self._model.parameters())
        tensors += [
            value
            for p in held_by(self._optimizer)
            for _, value in sorted(state.get(p, {}).items())
            if isinstance(value, Tensor)
        ]
        src = int(total.argmax())
        self._runtime.drive(
            broadcast(self._runtime, tensors, number, src=src, part=1, purpose=purpose, network=self._network)
        )
        return int(total[src])

    def _flush(self) -> None:
        async def update(step: int) -> None:
            del step  # the loop's own schedule has come to its end
            self._step_by_itself()

        if self._is_step_open:
            self._end_step(updated=False, in_pass=False)
        if self._other_optimizer:
            # What it has done since the last step.
            self._runtime.drive(self._engine.finish(updated=True, applies=False))
        number = self._engine.round_number
        self._runtime.drive(self._engine.flush(update))
        if self._can_be_apart and (spread := self._measure_spread(part=2)):
            parameters = [p.detach() for p in self._trained]
            self._runtime.drive(average(self._runtime, parameters, number, Purpose.COMPARISON, first_part=3))
            if spread > _TOLERATED and not self._warnings:
                self._warn_once(
                    "finish",
                    f"finish() has averaged replicas that had come apart by {spread:.1g} of their parameters' norm: "
                    f"something has changed them after the last step of {kind_of(self._optimizer)}, such as another "
                    "optimizer. Attach the one that steps last",
                )
        if not self._schedule.moves_gradients and (state := eval_state(self._optimizer, self._trained)):
            self._runtime.drive(average(self._runtime, state, number, Purpose.MOMENTS))
        if self._runtime.elastic is not None:
            self._runtime.drive(self._runtime.elastic.finish(number))

    # --- the end ----------------------------------------------------------------------------------------------

    def _end(self, error: BaseException | None) -> None:
        self.is_finished = True
        atexit.unregister(self._abandon)
        if self in _attached:
            _attached.remove(self)
        self._buckets.remove()
        for hook in self._hooks:
            hook.remove()
        if error is None and self.size > 1:
            _say_if_it_goes_on(self._optimizer, self.rank)
        self._runtime.close(error)

    def _abandon(self) -> None:
        self._end(RunLost(f"rank {self.rank} ended without finish()"))


class _End:
    """Told by autograd that a run is through. Autograd alone keeps it, so it is gone with a run that broke off."""

    def __init__(self, ended: Callable[[int], None], task: int) -> None:
        self._ended, self._task = ended, task

    def __call__(self) -> None:
        self._ended(self._task)


def _say_if_it_goes_on(optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Warns at the next step of an optimizer whose handle has finished, unless it is attached again by then."""
    said = False

    def stepped(*_: object) -> None:
        nonlocal said
        if not said and not any(handle.knows(held_by(optimizer)) for handle in _attached):
            said = True
            warnings.warn(
                f"rank {rank} trains on after finish(), and nothing is exchanged any more: attach() again to go on "
                "together",
                stacklevel=2,
            )

    optimizer.register_step_post_hook(stepped)
