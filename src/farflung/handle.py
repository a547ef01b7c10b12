"""Attaches farflung to an existing training loop: three lines, and the loop itself does not change."""

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
"""Number of consecutive backward passes without a step after which the optimizer is taken never to step."""
_COMPARED_EVERY = 1024
"""Number of rounds between comparisons of equal replicas, in addition to the powers of two."""
_TOLERATED = 1e-4
"""Largest relative distance of replicas that rounding on different devices can explain."""
_STEP_IN_BACKWARD = (
    "an optimizer stepped, or a hook took a gradient away, while backward() was sending it: replicas would train "
    "apart. Step after backward()"
)
_UNEVEN = "; where ranks have unlike numbers of batches, put the loop inside handle.join()"
_attached: list[Handle] = []
"""Handles of this process that have not finished."""


def carries(chosen: Recipe) -> str:
    """Returns ``yes`` if :func:`attach` supports the recipe, otherwise what it needs or why it is refused."""
    parts = chosen.parts(0)
    if reason := parts.schedule.attach_refusal or _left_to_the_loop(parts):
        return f"no: {reason}"
    if chosen.sampler != "uniform":
        return f"draw batches with sampler {chosen.members['sampler']}"
    return "yes" if parts.stream.everything else f"draw batches with stream {chosen.members['stream']}"


def _nearest(parts: Parts) -> str:
    """Returns the changes that turn an unsupported recipe into the nearest supported one."""
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
    """Returns why the recipe conflicts with an external training loop; empty if it does not."""
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
    """Connects the replicas that torchrun, srun or mpirun started, so that they train ``model`` together.

    The loop stays the same. Each ``loss.backward()`` exchanges gradients while autograd runs. When it returns,
    ``p.grad`` holds the gradient for the optimizer, or ``None`` if the schedule has none for this step. Parameters and
    buffers start from rank 0's. Without a launcher there is one replica, and nothing is exchanged.

    If replicas step on their own gradients (delayed updates), each ``optimizer.step()`` exchanges its change of the
    parameters. Parameters then differ between replicas until :meth:`Handle.finish`, and
    :meth:`Handle.use_averaged_model` provides the model to evaluate. With a ``GradScaler``, each replica scales its own
    loss. Pipelined schedules do not support one, since they would unscale a gradient by the scale of a later step.

    As under DistributedDataParallel, a parameter that no replica used has no gradient, and replicas that did not use a
    parameter contribute zeros. Frozen parameters are not exchanged and must stay frozen until :meth:`Handle.finish`.

    Args:
      model: Model that this loop trains; it may be compiled, but not wrapped in DistributedDataParallel or FSDP.
      optimizer: Optimizer that steps on the exchanged gradients, or a wrapper of one, such as Accelerate's. Inside
        Accelerate's ``accumulate()`` nothing is exchanged until its optimizer steps.
      recipe: Recipe or its name, with changes in brackets: ``"ring(codec=int8)"``.
      seed: Seed of random codecs, equal on all ranks.
      deadline_s: Seconds without any message after which a replica that is waited for counts as lost. One that answers
        may be busy for ten times as long.
      launch_env: Rank and size of this replica; read from the environment by default.
      store: Store in which the replicas find each other; by default the one at ``MASTER_ADDR``.
      endpoint: Settings of this replica's connections.
      network: Profile of the network, or its name, from which ``auto`` selects the fastest collective. By default the
        network is measured: see :meth:`farflung.wall.WallRuntime.resolve_collective`.
      nonfinite: Action on all replicas if a gradient is NaN or infinite: ``stop``, ``skip`` the step, or ``exclude``
        that replica from it, except for buckets sent earlier. Checking a bucket synchronizes with the device. ``None``
        checks nothing, as under DistributedDataParallel, and is meant for loops with a ``GradScaler``.
      sampler: Sampler of this rank's batches. With rule ``auto`` it learns from gradients and scores of all ranks
        when to draw by importance.
      elastic: Smallest number of replicas with which the run continues after losses, see :attr:`Handle.members`; 0 ends
        the run at the first loss.
      quorum: ``majority``, or ``1``: replicas cut off from the majority continue alone, each group with its own model.
      sink: Sink for one event per step of this replica: its seconds, seconds waited for exchanges, bytes sent so far.
        For example :class:`farflung.loggers.RunLog`.

    Raises:
      UnknownName: No recipe or network has this name.
      Unsupported: The recipe conflicts with an external loop, the optimizer needs a closure but results come late, or
        the model has an unsupported wrapper (DistributedDataParallel, FSDP), sparse gradients, or complex or lazy
        parameters.
      ConfigError: The optimizer does not belong to the model, the model is attached already, or the environment lacks
        the rendezvous address.
      RunLost: A replica did not connect in time.
    """
    parsed_recipe = recipe(how) if isinstance(how, str) else how
    parts = parsed_recipe.parts(seed)
    if reason := parts.schedule.attach_refusal or _left_to_the_loop(parts):
        raise Unsupported(
            f"attach cannot follow recipe {parsed_recipe.text}: {reason}; use farflung train, or this "
            f"recipe.but({_nearest(parts)}), which comes nearest"
        )
    if nonfinite not in (None, *ON_NONFINITE):
        raise ConfigError(
            f"attach: nonfinite {nonfinite!r}: must be None or one of {', '.join(ON_NONFINITE)}"
        )
    if elastic and (
        refusal := parts.needs_all or (sampler is not None and "an importance sampler needs all replicas")
    ):
        raise ConfigError(f"attach: elastic: {refusal}")
    if quorum not in ("majority", "1"):
        raise ConfigError(f"attach: quorum {quorum!r}: must be 'majority' or '1'")
    check_sole(model)
    env = launch_env or LaunchEnv.read() or LaunchEnv(0, 1, 0, 1)
    rank, size = env.rank, env.size
    check_whole(model, is_alone=size == 1)
    should_accumulate = partial(accumulates, optimizer)
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
            **parsed_recipe.to_json(),
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
        native=collective_named(parsed_recipe.collective).by_backend,
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
                f"{parsed_recipe.schedule} cannot follow: use a synchronous recipe"
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
        collective = runtime.settle_collective(parsed_recipe.collective, nbytes, network=profile)
        handle = Handle(
            model,
            optimizer,
            runtime,
            buckets,
            engine,
            parts.schedule,
            collective,
            show,
            should_accumulate,
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
    """Connection of a training loop to the other replicas, as a context manager that calls :meth:`finish`."""

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
        """Name of the collective for all-reduces, with ``auto`` already resolved."""
        self.step = 0
        """Number of optimizer steps so far, including those that a ``GradScaler`` skipped."""
        self._model, self._optimizer = model, optimizer
        self._runtime, self._buckets, self._engine = runtime, buckets, engine
        self._schedule, self._gain = schedule, gain
        self._syncing, self._accumulating = True, accumulating
        self._network = network
        self._weight = 1.0
        self.is_finished = False
        """True after :meth:`finish`, :meth:`leave` or an error."""
        self._tasks: dict[int, weakref.ref[_End] | None] = {}
        """Autograd tasks of the current backward pass, by id; ``None`` for a task that has ended."""
        self._is_step_open = False
        """True if a backward pass ran since the optimizer's last step."""
        self._empty_passes = 0
        """Number of consecutive backward passes, with the current one, whose hooks saw no gradient."""
        self._exchanged = False
        """True if an exchange ran since the optimizer's last step."""
        self._steps_by_itself = False
        """True while farflung itself steps the optimizer, at the end or for a replica without data."""
        self._skipped_steps = 0
        """Number of consecutive steps that the loop skipped."""
        self._sketch_of_open_step: Tensor | None = None
        """Sums of parameters at the start of a pass, if the previous pass's gradients vanished without a step."""
        self._has_stepped: bool | None = None
        """True if the optimizer has stepped since the last gradient; ``None`` before the first gradient."""
        self._other_optimizer = ""
        """Class name of another optimizer that has stepped on the same parameters since this one."""
        self._passes = 0
        """Number of backward passes before the current one since the optimizer's last step."""
        self._is_apart = False
        """True if replicas were found to differ although they should be equal."""
        self._warnings: set[str] = set()
        """Kinds of warnings issued so far."""
        parameters = list(model.named_parameters())
        self._trained = buckets.parameters
        self._known = {id(p) for _, p in parameters}
        self._left_out = [(name, p) for name, p in parameters if not p.requires_grad]
        self._held = len(held_by(optimizer))
        # A step may be compiled, but not the exchange.
        handle_step, handle_other_step = (
            torch.compiler.disable(method) for method in (self._stepped, self._other_stepped)
        )
        self._hooks = [
            optimizer.register_step_post_hook(lambda *_: handle_step()),
            register_optimizer_step_post_hook(lambda stepping, *_: handle_other_step(stepping)),
        ]
        buckets.watch(self._gradient_arrives)

    @property
    def rank(self) -> int:
        """Rank of this replica."""
        return self._runtime.comm.rank

    @property
    def size(self) -> int:
        """Number of replicas that take batches at the next step; lost ones are not counted."""
        return len(self.members)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that take batches at the next step, equal on all replicas.

        A lost rank leaves the means of exchanges immediately, and this tuple some steps later. A loop can therefore
        draw batch ``members.index(rank)`` of ``size`` at each step, consistently with all other replicas.
        """
        elastic = self._runtime.elastic
        return (
            tuple(range(self._runtime.comm.size))
            if elastic is None
            else elastic.at(self._engine.round_number).ranks
        )

    @property
    def is_synchronous(self) -> bool:
        """Returns True if all replicas take equal steps, each on the mean of that step's own gradients."""
        return self._schedule.is_synchronous

    @property
    def communication_cpu_s(self) -> float:
        """CPU seconds of the communication thread so far."""
        return self._runtime.communication_cpu_s

    @property
    def sent_nbytes(self) -> int:
        """Number of payload bytes of gradients and updates sent by this replica so far."""
        return self._engine.sent_nbytes

    @property
    def sent(self) -> dict[str, list[int]]:
        """Numbers of payload bytes sent to each rank so far, by :class:`farflung.comm.Purpose`.

        Exchanges in flight count with the bytes sent so far.
        """
        return self._runtime.comm.sent.to_json()

    @property
    def waited_s(self) -> float:
        """Seconds for which the loop has waited for exchanges so far; the rest overlapped with computation."""
        return self._engine.times.waited_s

    def knows(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Returns True if any of the parameters belongs to this handle's model."""
        return any(id(parameter) in self._known for parameter in parameters)

    def start(self) -> None:
        """Broadcasts rank 0's parameters and buffers; tensors that are equal already are not sent."""
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
        """Sets this replica's weight in the mean from the next backward pass on, such as its share of a full batch.

        Raises:
          ConfigError: The weight is negative.
        """
        if weight < 0:
            raise ConfigError(f"weight {weight}: must be 0 or more")
        self._weight = weight

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disables exchanges within the context; the next backward pass outside exchanges accumulated gradients.

        Synchronous recipes exchange at each backward pass outside, as DistributedDataParallel does. Schedules with
        local steps exchange only when the optimizer steps and do not need this. Pipelined schedules refuse a second
        pass.
        """
        self._syncing, was_syncing = False, self._syncing
        try:
            yield
        finally:
            self._syncing = was_syncing

    @contextmanager
    def join(self) -> Iterator[None]:
        """Supports loops with different numbers of steps on the replicas, like DistributedDataParallel's ``join()``.

        A replica that has no more data takes part in exchanges until all replicas have finished, and each mean is over
        the replicas with data. It follows them by ``optimizer.step()``. At the end, it copies parameters and
        optimizer tensors from a replica that finished last. Learning rates, clipping and the rest of the loop stay
        local to each replica.

        Raises:
          Unsupported: Results of the schedule come late, or the optimizer needs a closure.
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
        """Yields the model to evaluate or save, and restores this replica's own on exit.

        Running statistics are averaged, and so are parameters if replicas differ; with a pull they are the anchor.

        Raises:
          RunLost: :meth:`finish` was called before.
        """
        from farflung.loop.evaluation import averaged

        self._check_none_new()
        self._end_skipped_step()
        consensus = self._engine.consensus_parameters()
        if consensus == {} and self._can_be_apart and self._measure_spread(part=1):
            consensus = None  # something has changed them since the last exchange
        context = averaged(self._runtime, self._model, self._engine.round_number, consensus)
        self._runtime.drive(context.__aenter__())
        try:
            yield self._model
        finally:
            self._runtime.drive(context.__aexit__(None, None, None))

    def state_dict(self) -> State:
        """Returns farflung's training state: step count, residuals, schedule and exchanges in flight.

        Each replica saves its own state, and its optimizer's. The state includes running statistics, and parameters if
        replicas differ.

        Raises:
          RunLost: :meth:`finish` was called before.
        """
        self._end_skipped_step()
        exchanges = self._runtime.launch(self._engine.state_dict()).wait()
        persistent = self._model.state_dict().keys()
        tensors: dict[str, Tensor] = {
            name: buffer for name, buffer in self._model.named_buffers() if name in persistent
        }
        if self._engine.diverged:
            trainable = {id(p) for p in self._trained}
            tensors |= {name: p for name, p in self._model.named_parameters() if id(p) in trainable}
        return {
            "step": self.step,
            "rank": self.rank,
            "size": self._runtime.comm.size,
            "buckets": self._buckets.layout,
            "model": {name: tensor.detach().clone() for name, tensor in tensors.items()},
            "exchanges": exchanges,
        }

    def load_state_dict(self, state: State) -> None:
        """Restores a state from :meth:`state_dict`; model and optimizer may be loaded before or after :func:`attach`.

        During training, all ranks must load together; exchanges in flight are awaited and discarded.

        Raises:
          CheckpointError: The state is of another model, rank or number of replicas, or not of a handle.
        """
        required_keys = {"step", "rank", "size", "buckets", "model", "exchanges"}
        if missing_keys := required_keys - state.keys():
            raise CheckpointError(f"this is no state of a handle: it lacks {', '.join(sorted(missing_keys))}")
        if (state["rank"], state["size"]) != (self.rank, self._runtime.comm.size):
            raise CheckpointError(
                f"this state is that of rank {state['rank']} of {state['size']}, and this is rank {self.rank} of "
                f"{self._runtime.comm.size}: each rank keeps and loads its own"
            )
        tensors: dict[str, Tensor] = {
            **dict(self._model.named_buffers()),
            **dict(self._model.named_parameters()),
        }
        saved_tensors = state["model"]
        if state["buckets"] != self._buckets.layout or any(
            name not in tensors or tensors[name].shape != value.shape for name, value in saved_tensors.items()
        ):
            raise CheckpointError("this state was made with another model or other buckets")
        for flight in self._engine.flights:
            self._runtime.drive(flight.started.bring())
        self._reset_step()
        with torch.no_grad():
            for name, value in saved_tensors.items():
                tensors[name].copy_(value)
        self.step = state["step"]
        self._engine.load_state_dict(state["exchanges"])

    def finish(self) -> None:
        """Ends the run together with the other replicas, after the loop.

        Exchanges in flight are applied first, gradients by steps of the optimizer. Afterwards all replicas have equal
        parameters. If something else has made parameters differ, this averages them and warns.
        """
        if not self.is_finished:
            try:
                self._flush()
            except BaseException as error:
                self._end(error)
                raise
            self._end(None)

    def leave(self) -> None:
        """Leaves an elastic run (``attach(elastic=...)``) between two steps; the others continue.

        The others take over this replica's batches that are in no update yet. Its parameters stay unchanged. Like
        :meth:`finish`, it finishes the handle.

        Raises:
          RunLost: The run has ended on this replica for another reason, such as the loss of the majority.
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
        """Registers a callback at the end of the current autograd task."""
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
        """Determines if another backward pass before the step accumulates gradients or follows a skipped step.

        Args:
          parameter: Parameter with the first gradient of this pass.

        Raises:
          Unsupported: The schedule does not support it, or another optimizer than the attached one steps.
        """
        if self._schedule.has_late_gradients:
            raise Unsupported(
                f"a second backward pass before the step of {kind_of(self._optimizer)}: "
                f"{type(self._schedule).__name__} has sent the first one's gradients for a later step. Add losses up "
                "for one backward(), or put all passes of a step but the last inside handle.no_sync()"
            )
        symptom = f"took no step in {_MOST_PASSES} backward passes"
        is_kept = self._buckets.has_kept_gradients(parameter)
        if not is_kept and (self._buckets.has_zeroed_gradients(parameter) or not self._buckets.is_finite()):
            # Gradients were zeroed in place or not finite, as when a GradScaler skips a step.
            self._skipped_steps += 1
            if self._skipped_steps >= _MOST_PASSES:
                raise Unsupported(self._describe_missing_step(symptom))
            self._end_step(updated=False, in_pass=True)
        elif self._engine.has_gradient_transfers(self.step):
            self._passes += 1
            if self._passes >= _MOST_PASSES:
                self._warn_once("step", self._describe_missing_step(symptom))
            if self._engine.is_round_open:
                self._close_round(updated=False, in_pass=True)
        elif not is_kept:
            sums = sketch(self._trained)
            if self._sketch_of_open_step is not None and not torch.equal(sums, self._sketch_of_open_step):
                raise Unsupported(self._describe_missing_step("takes no step, while parameters change"))
            self._sketch_of_open_step = sums

    def _check_none_new(self) -> None:
        """Raises ConfigError if trainable parameters were created after :func:`attach`."""
        if names := [
            name for name, p in self._model.named_parameters() if p.requires_grad and id(p) not in self._known
        ]:
            raise ConfigError(
                f"the model has parameters that were made after attach(), unlike on each rank: {named(names)}; "
                "finish() and attach() again"
            )

    def _describe_missing_step(self, what: str) -> str:
        hint = f"; {self._other_optimizer} did" if self._other_optimizer else ""
        return (
            f"{kind_of(self._optimizer)}, which attach() was given, {what}{hint}, and {type(self._schedule).__name__} "
            "counts its steps: attach the optimizer whose step() runs; updates by hand need a synchronous recipe"
        )

    def _begin_round(self, *, has_data: bool = True) -> None:
        """Plans the exchanges of a backward pass."""
        number = self._engine.round_number
        if not number & (number - 1):
            self._check_none_new()
        if self._schedule.moves_gradients:
            self._compare(has_data=has_data)
        weight = self._weight if has_data else 0.0
        self._engine.begin(self.step, StepMetadata(0.0, weight, is_exhausted=not has_data))

    def _compare(self, *, has_data: bool) -> None:
        """Compares replicas that step on equal means, at growing intervals; warns once if they differ."""
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
        """Ends the pass with the outermost autograd task; inner tasks are of reentrant checkpoints."""
        self._tasks[task] = None
        outer = current_node()
        if outer is None:
            self._tasks.clear()
            self._backward_ends()
            return

        def follow_outer_task(*_: object) -> None:
            hook.remove()
            with self._buckets.lock:
                self._follow_task()

        hook = outer.register_hook(follow_outer_task)

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
        if not self._exchanged:  # otherwise the backward pass has checked them
            self._check_all_known()
            if not self._schedule.moves_gradients and not self._engine.has_gradient_transfers(self.step):
                self._begin_round()  # its gradients come from no_sync() or torch.func
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
        """Records a step of any other optimizer in this process.

        Raises:
          Unsupported: It steps inside backward, or changes parameters after their change was exchanged.
        """
        if other is self._optimizer or not any(id(p) in self._known for p in held_by(other)):
            return
        if graph_task_id() >= 0:
            raise Unsupported(_STEP_IN_BACKWARD)
        self._other_optimizer = kind_of(other)
        if not self._has_stepped or self._schedule.moves_gradients:
            return
        unoptimized_ids = self._known - {id(p) for p in held_by(self._optimizer)}
        if any(p.grad is not None and id(p) in unoptimized_ids for p in held_by(other)):
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
        """Raises ConfigError if a parameter was unfrozen or added to the optimizer after :func:`attach`."""
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
        """Ends a step that the loop skipped, as a GradScaler does; a step with finite gradients stays open."""
        if self._engine.is_round_open and (
            not self._buckets.is_finite() or self._buckets.has_zeroed_gradients()
        ):
            self._end_step(updated=False, in_pass=False)

    def _end_step(self, *, updated: bool, in_pass: bool) -> None:
        """Ends a step of the optimizer.

        Args:
          has_updated: True if the optimizer had gradients to step on.
          is_in_pass: True if the next backward pass runs already, so that parameters must not change.
        """
        if self._engine.is_round_open:
            self._close_round(updated=updated, in_pass=in_pass)
        self._reset_step()
        self.step += 1
        self._runtime.events += 1
        self._tell()

    def _reset_step(self) -> None:
        """Resets the state kept about backward passes since the optimizer's last step."""
        self._is_step_open = self._exchanged = False
        self._passes, self._sketch_of_open_step = 0, None

    def _close_round(self, *, updated: bool, in_pass: bool) -> None:
        self._runtime.drive(self._engine.finish(updated=updated, applies=not in_pass))

    @property
    def _can_be_apart(self) -> bool:
        """Returns True if replicas may differ after all exchanges are merged, such as with local steps."""
        return self._is_apart or not self._schedule.moves_gradients

    def _tell(self) -> None:
        """Emits the event of a completed step, which lasts from the end of the previous one."""
        if self._telemetry is None:
            return
        begin_s, begin_waited_s = self._told_s, self._told_waited_s
        self._told_s, self._told_waited_s = self._runtime.now(), self.waited_s
        self._telemetry.emit(
            "step",
            t=self._told_s,
            step=self.step - 1,
            duration_s=self._told_s - begin_s,
            exposed_s=self._told_waited_s - begin_waited_s,
            bytes_sent=self.sent_nbytes,
            in_flight=len({flight.step for flight in self._engine.flights}),
            **({} if self._gain is None else {"rule": self._gain.rule, **self._gain.told()}),
        )

    def _answers(self) -> bool:
        """Takes part in a step without data; returns True if any replica had data."""
        self._begin_round(has_data=False)
        self._buckets.without_data(self._engine.bucket_ready)
        has_gradient = self._runtime.drive(self._engine.settle())
        outcome = self._runtime.drive(self._engine.finish(updated=has_gradient))
        self.step += 1
        self._runtime.events += 1
        has_data = outcome.num_exhausted < self.size
        if has_data and has_gradient:
            self._step_by_itself()
        self._buckets.clear()
        return has_data

    def _step_by_itself(self) -> None:
        self._steps_by_itself = True
        try:
            self._optimizer.step()
        finally:
            self._steps_by_itself = False

    def _adopt(self, steps: int) -> int:
        """Copies parameters and optimizer state from a replica with the most steps; returns their number."""
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
            del step  # the loop's own learning-rate schedule has ended
            self._step_by_itself()

        if self._is_step_open:
            self._end_step(updated=False, in_pass=False)
        if self._other_optimizer:
            # Sends the change it made since the last step.
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
    """Callback at the end of an autograd task; only autograd refers to it, so it is freed if the task fails."""

    def __init__(self, ended: Callable[[int], None], task: int) -> None:
        self._ended, self._task = ended, task

    def __call__(self) -> None:
        self._ended(self._task)


def _say_if_it_goes_on(optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Warns at the next step of an optimizer whose handle has finished, unless it is attached again by then."""
    has_warned = False

    def warn_once(*_: object) -> None:
        nonlocal has_warned
        if not has_warned and not any(handle.knows(held_by(optimizer)) for handle in _attached):
            has_warned = True
            warnings.warn(
                f"rank {rank} trains on after finish(), and nothing is exchanged any more: attach() again to go on "
                "together",
                stacklevel=2,
            )

    optimizer.register_step_post_hook(warn_once)
