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

from farflung._torch import get_current_node, get_graph_task_id, queue_backward_callback
from farflung.attach_checks import (
    check_optimizer,
    check_tensors,
    check_unwrapped,
    format_names,
    is_accumulating,
    list_optimizer_parameters,
    needs_closure,
    unwrap_optimizer,
)
from farflung.comm import Endpoint, Purpose, find_collective
from farflung.config import ON_NONFINITE
from farflung.engine import Engine, GradientBuckets, StepMetadata
from farflung.engine.averaging import (
    average,
    broadcast,
    compute_sketch,
    estimate_max_divergence,
    find_unequal,
    sum_over_ranks,
)
from farflung.errors import CheckpointError, ConfigError, RunLost, Unsupported
from farflung.loop import Components, compute_fingerprint, describe_optimizer
from farflung.moments import collect_eval_state, get_optimizer_name
from farflung.rates import NoScaling
from farflung.recipes import Recipe, parse_recipe
from farflung.reducers import list_summed_nbytes
from farflung.schedules import SCHEDULES
from farflung.spec import format_spec
from farflung.telemetry import Sink, Telemetry
from farflung.types import Schedule, State
from farflung.wall import LaunchEnv, WallRuntime

if TYPE_CHECKING:
    from farflung.importance import ImportanceSampler
    from farflung.network import NetworkProfile
    from farflung.sampling import Gain

__all__ = ["Handle", "attach", "describe_attach_support"]

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 60.0
_MAX_PASSES = 100
"""Number of consecutive backward passes without a step after which the optimizer is taken never to step."""
_COMPARISON_PERIOD = 1024
"""Number of rounds between comparisons of equal replicas, in addition to the powers of two."""
_SPREAD_TOLERANCE = 1e-4
"""Largest relative distance of replicas that rounding on different devices can explain."""
_STEP_IN_BACKWARD = (
    "an optimizer stepped, or a hook took a gradient away, while backward() was sending it: replicas would train "
    "apart. Step after backward()"
)
_JOIN_HINT = "; where ranks have unlike numbers of batches, put the loop inside handle.join()"
_active_handles: list[Handle] = []
"""Handles of this process that have not finished."""


def describe_attach_support(recipe: Recipe) -> str:
    """Returns ``yes`` if :func:`attach` supports the recipe, otherwise what it needs or why it is refused."""
    parts = recipe.build_components(0)
    if reason := parts.schedule.attach_refusal or _explain_refusal(parts):
        return f"no: {reason}"
    if recipe.sampler != "uniform":
        return f"draw batches with sampler {recipe.component_texts['sampler']}"
    return (
        "yes"
        if parts.stream.has_random_access
        else f"draw batches with stream {recipe.component_texts['stream']}"
    )


def _suggest_changes(parts: Components) -> str:
    """Returns the changes that turn an unsupported recipe into the nearest supported one."""
    changes = {"sharing": "none"} if parts.sharing.has_data_transfers else {}
    if parts.scaling != NoScaling():
        changes["scaling"] = "none"
    if parts.schedule.attach_refusal:
        changes["schedule"] = format_spec(_find_nearest_schedule(parts.schedule), SCHEDULES)
    return ", ".join(f"{family}={text!r}" for family, text in changes.items())


def _find_nearest_schedule(schedule: Schedule) -> Schedule:
    from farflung.schedules import AdaComm, LocalSGD, Pipelined, Synchronous

    match schedule:
        case AdaComm():
            return LocalSGD(schedule.sync_every, schedule.optimizer_state)
        case Pipelined():
            return replace(schedule, predict=None)
    return Synchronous()


def _explain_refusal(parts: Components) -> str:
    """Returns why the recipe conflicts with an external training loop; empty if it does not."""
    if parts.sharing.has_data_transfers:
        return "it sees no samples and cannot send any to other replicas"
    return "" if parts.scaling == NoScaling() else "the learning rate is the loop's own"


def _load_profile(network: NetworkProfile | str | None) -> NetworkProfile | None:
    if not isinstance(network, str):
        return network
    from farflung.network import find_network

    return find_network(network)


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe | str = "synchronous",
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
    sink: Sink | None = None,
) -> Handle:
    """Connects the replicas that torchrun, srun or mpirun started, so that they train ``model`` together.

    Each ``loss.backward()`` exchanges gradients. When it returns, ``p.grad`` holds the gradient for the optimizer, or
    ``None`` if the schedule has none for this step. Parameters and buffers start from rank 0's. With local steps, such
    as delayed updates, ``optimizer.step()`` exchanges its change of the parameters instead.
    Without a launcher there is one replica, and nothing is exchanged.

    Args:
      model: Model that this loop trains; it may be compiled, but not wrapped in DistributedDataParallel or FSDP.
      optimizer: Optimizer that steps on the exchanged gradients, or a wrapper of one, such as Accelerate's.
      recipe: Recipe or its name, with changes in brackets: ``"ring(codec=int8)"``.
      seed: Seed of random codecs, equal on all ranks.
      deadline_s: Seconds of silence after which an awaited replica is lost; one that answers may take ten times as
        long.
      launch_env: Rank and size of this replica; read from the environment by default.
      store: Store in which the replicas find each other; by default the one at ``MASTER_ADDR``.
      endpoint: Settings of this replica's connections.
      network: Profile or name of the network, from which ``auto`` selects the fastest collective; measured by default.
      nonfinite: Action on all replicas if a gradient is NaN or infinite: ``stop``, ``skip`` the step, or ``exclude``
        that replica from it, except for buckets sent earlier. ``None`` checks nothing, for loops with a ``GradScaler``.
      sampler: Sampler of this rank's batches. With rule ``auto`` it learns from gradients and scores of all ranks.
      elastic: Smallest number of replicas with which the run continues after losses, see :attr:`Handle.members`; 0 ends
        the run at the first loss.
      quorum: ``majority``, or ``1``: replicas cut off from the majority continue alone, each group with its own model.
      sink: Sink for one event per step of this replica, for example :class:`farflung.loggers.RunLog`.

    Raises:
      UnknownName: No recipe or network has this name.
      Unsupported: Recipe, optimizer or model cannot be used in an external loop; names the reason.
      ConfigError: The optimizer does not belong to the model, the model is attached already, or the environment lacks
        the rendezvous address.
      RunLost: A replica did not connect in time.
    """
    parsed_recipe = parse_recipe(recipe) if isinstance(recipe, str) else recipe
    parts = parsed_recipe.build_components(seed)
    if reason := parts.schedule.attach_refusal or _explain_refusal(parts):
        raise Unsupported(
            f"attach cannot follow recipe {parsed_recipe.text}: {reason}; use farflung train, or this "
            f"recipe.with_components({_suggest_changes(parts)}), which comes nearest"
        )
    if nonfinite not in (None, *ON_NONFINITE):
        raise ConfigError(
            f"attach: nonfinite {nonfinite!r}: must be None or one of {', '.join(ON_NONFINITE)}"
        )
    if elastic and (
        refusal := parts.reason_all_needed
        or (sampler is not None and "an importance sampler needs all replicas")
    ):
        raise ConfigError(f"attach: elastic: {refusal}")
    if quorum not in ("majority", "1"):
        raise ConfigError(f"attach: quorum {quorum!r}: must be 'majority' or '1'")
    check_unwrapped(model)
    env = launch_env or LaunchEnv.read() or LaunchEnv(0, 1, 0, 1)
    rank, size = env.rank, env.size
    check_tensors(model, is_alone=size == 1)
    should_accumulate = partial(is_accumulating, optimizer)
    optimizer = unwrap_optimizer(optimizer)
    check_optimizer(model, optimizer)
    if any(handle.is_attached_to(model.parameters()) for handle in _active_handles):
        raise ConfigError("attach: this model is attached already; call finish() on its handle first")
    if sampler is not None and (sampler.rank, sampler.size) != (rank, size):
        raise ConfigError(
            f"attach: the sampler is that of rank {sampler.rank} of {sampler.size}, and this is rank {rank} of {size}"
        )
    profile = _load_profile(network)
    if store is None:
        store = env.connect_store(_CONNECT_TIMEOUT_S)
    buckets = GradientBuckets(model.named_parameters(), parts.bucket_nbytes)
    runtime = WallRuntime(
        rank,
        size,
        store,
        meeting="attach",
        endpoint=endpoint.resolve_interface(partial(env.find_address, store)),
        settings={
            **parsed_recipe.to_json(),
            "seed": seed,
            "network": None if profile is None else profile.name,
            "nonfinite": nonfinite,
            "elastic": elastic,
            "quorum": quorum,
            "bucket sizes": [bucket.spec.numel for bucket in buckets.buckets],
            "model": compute_fingerprint(model),
            **describe_optimizer(optimizer),
        },
        deadline_s=deadline_s,
        is_native=find_collective(parsed_recipe.collective).is_native,
        connect_timeout_s=_CONNECT_TIMEOUT_S,
        members=range(size) if elastic else None,
        max_unreceived_nbytes=math.inf if elastic else None,
    )
    try:
        runtime.session.members.leave_detail += _JOIN_HINT
        runtime.limit_messages(itertools.chain(model.parameters(), model.buffers()))
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
            should_check_gradients=nonfinite is not None,
        )
        gain = None if sampler is None else sampler.gain
        if gain is not None:
            from farflung.sampling.gain import GainExtension

            engine.extend(GainExtension(gain, runtime, parts.schedule, parts.reducer))
        nbytes = list_summed_nbytes(parts.reducer, [bucket.spec for bucket in buckets.buckets], size)
        collective = runtime.resolve_collective(parsed_recipe.collective, nbytes, network=profile)
        handle = Handle(
            model,
            optimizer,
            runtime,
            buckets,
            engine,
            parts.schedule,
            collective,
            sink,
            should_accumulate,
            profile,
            gain,
        )
        handle.start()
        if elastic and size > 1:
            from farflung.membership import Page
            from farflung.wall.visits import create_elastic

            runtime.elastic = create_elastic(
                runtime,
                range(size),
                page=Page.from_environment(),
                min_members=elastic,
                quorum=quorum,
                patience_s=deadline_s,
                max_steps_ahead=parts.schedule.max_steps_ahead,
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
        sink: Sink | None = None,
        is_accumulating: Callable[[], bool] = lambda: False,
        network: NetworkProfile | None = None,
        gain: Gain | None = None,
    ) -> None:
        self._telemetry = None if sink is None else Telemetry(runtime.comm.rank, sink)
        self._last_event_s, self._last_waited_s = 0.0, 0.0
        self.collective = collective
        """Name of the collective for all-reduces, with ``auto`` already resolved."""
        self.step = 0
        """Number of optimizer steps so far, including those that a ``GradScaler`` skipped."""
        self._model, self._optimizer = model, optimizer
        self._runtime, self._buckets, self._engine = runtime, buckets, engine
        self._schedule, self._gain = schedule, gain
        self._is_syncing, self._is_accumulating = True, is_accumulating
        self._network = network
        self._weight = 1.0
        self.is_finished = False
        """True after :meth:`finish`, :meth:`leave` or an error."""
        self._tasks: dict[int, weakref.ref[_TaskEndCallback] | None] = {}
        """Autograd tasks of the current backward pass, by id; ``None`` for a task that has ended."""
        self._is_step_open = False
        """True if a backward pass ran since the optimizer's last step."""
        self._empty_passes = 0
        """Number of consecutive backward passes, with the current one, whose hooks saw no gradient."""
        self._has_exchanged = False
        """True if an exchange ran since the optimizer's last step."""
        self._is_stepping_optimizer = False
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
        self._has_diverged = False
        """True if replicas were found to differ although they should be equal."""
        self._issued_warnings: set[str] = set()
        """Kinds of warnings issued so far."""
        parameters = list(model.named_parameters())
        self._trainable_parameters = buckets.parameters
        self._parameter_ids = {id(p) for _, p in parameters}
        self._frozen_parameters = [(name, p) for name, p in parameters if not p.requires_grad]
        self._num_optimizer_params = len(list_optimizer_parameters(optimizer))
        # A step may be compiled, but not the exchange.
        handle_step, handle_other_step = (
            torch.compiler.disable(method) for method in (self._handle_step, self._handle_other_step)
        )
        self._hooks = [
            optimizer.register_step_post_hook(lambda *_: handle_step()),
            register_optimizer_step_post_hook(lambda stepping, *_: handle_other_step(stepping)),
        ]
        buckets.watch(self._handle_gradient)

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
            else elastic.find_change(self._engine.round_number).ranks
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
    def sent_nbytes_by_purpose(self) -> dict[str, list[int]]:
        """Numbers of payload bytes sent to each rank so far, by :class:`farflung.comm.Purpose`.

        Exchanges in flight count with the bytes sent so far.
        """
        return self._runtime.comm.sent_bytes.to_json()

    @property
    def waited_s(self) -> float:
        """Seconds for which the loop has waited for exchanges so far; the rest overlapped with computation."""
        return self._engine.times.waited_s

    def is_attached_to(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Returns True if any of the parameters belongs to this handle's model."""
        return any(id(parameter) in self._parameter_ids for parameter in parameters)

    def start(self) -> None:
        """Broadcasts rank 0's parameters and buffers; tensors that are equal already are not sent."""
        atexit.register(self._abort)
        _active_handles.append(self)
        tensors = [*self._model.parameters(), *self._model.buffers()]
        indices = self._runtime.drive(find_unequal(self._runtime, tensors, 0, purpose=Purpose.START))
        unequal = [tensors[index] for index in indices]
        self._runtime.drive(broadcast(self._runtime, unequal, 0, network=self._network))
        self._engine.restart()
        self._last_event_s = self._runtime.read_clock()
        if self._telemetry is not None:
            self._telemetry.emit("begin", t=self._last_event_s, step=0)

    def set_weight(self, weight: float) -> None:
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
        self._is_syncing, was_syncing = False, self._is_syncing
        try:
            yield
        finally:
            self._is_syncing = was_syncing

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
            self._end_step(has_updated=False, is_in_pass=False)
        steps = self.step - first
        while self._step_without_data():
            pass
        self.step = first + self._copy_longest_state(steps)

    @contextmanager
    def use_averaged_model(self) -> Iterator[nn.Module]:
        """Yields the model to evaluate or save, and restores this replica's own on exit.

        Running statistics are averaged, and so are parameters if replicas differ; with a pull they are the anchor.

        Raises:
          RunLost: :meth:`finish` was called before.
        """
        from farflung.loop.evaluation import apply_consensus

        self._check_no_new_parameters()
        self._end_skipped_step()
        consensus = self._engine.get_consensus_parameters()
        if consensus == {} and self._can_have_diverged and self._measure_spread(message_part=1):
            consensus = None  # something has changed them since the last exchange
        context = apply_consensus(self._runtime, self._model, self._engine.round_number, consensus)
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
        if self._engine.has_diverged:
            trainable = {id(p) for p in self._trainable_parameters}
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
        """Restores a state from :meth:`state_dict`, with running statistics, and parameters if replicas differed.

        Model and optimizer may be loaded before or after :func:`attach`. During training, all ranks must load together;
        exchanges in flight are awaited and discarded.

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
            self._runtime.drive(flight.exchange.wait())
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
                self._end_run()
            except BaseException as error:
                self._close(error)
                raise
            self._close(None)

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
                self._close(error)
                raise
        elif self.size > 1:
            raise Unsupported("leave() ends the run for all others: attach(elastic=...) lets them go on")
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif not self.is_finished:
            self._close(error)

    # --- inside autograd --------------------------------------------------------------------------------------

    def _handle_gradient(self, parameter: nn.Parameter) -> None:
        self._has_stepped = False
        if not self._is_syncing or self._is_accumulating():
            return
        if not self._tasks:
            self._begin_pass(parameter)
        if parameter.grad is not None:
            self._empty_passes = 0
        self._follow_task()

    def _follow_task(self) -> None:
        """Registers a callback at the end of the current autograd task."""
        task = get_graph_task_id()
        if task in self._tasks:
            return
        if any(end is not None and end() is None for end in self._tasks.values()):
            raise RunLost(
                f"the backward pass of step {self.step} broke off on rank {self.rank} while others took its gradients; "
                "start again from a checkpoint"
            )
        end = _TaskEndCallback(self._handle_task_end, task)
        self._tasks[task] = weakref.ref(end)
        queue_backward_callback(end)

    def _begin_pass(self, parameter: nn.Parameter) -> None:
        self._check_all_exchanged()
        if self._is_step_open:
            self._continue_step(parameter)
        if not self._engine.is_round_open:
            self._begin_round()
        self._is_step_open = True
        self._empty_passes += 1
        self._buckets.arm(self._engine.handle_bucket)

    def _continue_step(self, parameter: nn.Parameter) -> None:
        """Determines if another backward pass before the step accumulates gradients or follows a skipped step.

        Args:
          parameter: Parameter with the first gradient of this pass.

        Raises:
          Unsupported: The schedule does not support it, or another optimizer than the attached one steps.
        """
        if self._schedule.has_late_gradients:
            raise Unsupported(
                f"a second backward pass before the step of {get_optimizer_name(self._optimizer)}: "
                f"{type(self._schedule).__name__} has sent the first one's gradients for a later step. Add losses up "
                "for one backward(), or put all passes of a step but the last inside handle.no_sync()"
            )
        symptom = f"took no step in {_MAX_PASSES} backward passes"
        is_kept = self._buckets.has_kept_gradients(parameter)
        if not is_kept and (self._buckets.has_zeroed_gradients(parameter) or not self._buckets.is_finite()):
            # Gradients were zeroed in place or not finite, as when a GradScaler skips a step.
            self._skipped_steps += 1
            if self._skipped_steps >= _MAX_PASSES:
                raise Unsupported(self._describe_missing_step(symptom))
            self._end_step(has_updated=False, is_in_pass=True)
        elif self._engine.has_gradient_transfers(self.step):
            self._passes += 1
            if self._passes >= _MAX_PASSES:
                self._warn_once("step", self._describe_missing_step(symptom))
            if self._engine.is_round_open:
                self._close_round(has_updated=False, is_in_pass=True)
        elif not is_kept:
            sums = compute_sketch(self._trainable_parameters)
            if self._sketch_of_open_step is not None and not torch.equal(sums, self._sketch_of_open_step):
                raise Unsupported(self._describe_missing_step("takes no step, while parameters change"))
            self._sketch_of_open_step = sums

    def _check_no_new_parameters(self) -> None:
        """Raises ConfigError if trainable parameters were created after :func:`attach`."""
        if names := [
            name
            for name, p in self._model.named_parameters()
            if p.requires_grad and id(p) not in self._parameter_ids
        ]:
            raise ConfigError(
                f"the model has parameters that were made after attach(), unlike on each rank: {format_names(names)}; "
                "finish() and attach() again"
            )

    def _describe_missing_step(self, symptom: str) -> str:
        hint = f"; {self._other_optimizer} did" if self._other_optimizer else ""
        return (
            f"{get_optimizer_name(self._optimizer)}, which attach() was given, {symptom}{hint}, and "
            f"{type(self._schedule).__name__} "
            "counts its steps: attach the optimizer whose step() runs; updates by hand need a synchronous recipe"
        )

    def _begin_round(self, *, has_data: bool = True) -> None:
        """Plans the exchanges of a backward pass."""
        number = self._engine.round_number
        if not number & (number - 1):
            self._check_no_new_parameters()
        if self._schedule.is_gradient_only:
            self._compare_replicas(has_data=has_data)
        weight = self._weight if has_data else 0.0
        self._engine.begin_round(self.step, StepMetadata(0.0, weight, is_exhausted=not has_data))

    def _compare_replicas(self, *, has_data: bool) -> None:
        """Compares replicas that step on equal means, at growing intervals; warns once if they differ."""
        count = self._engine.round_number
        if not count or (count & (count - 1) and count % _COMPARISON_PERIOD):
            return
        spread = self._measure_spread(is_compared=has_data)
        self._has_diverged |= spread > 0
        if spread > _SPREAD_TOLERANCE:
            self._warn_once(
                "apart",
                f"replicas have come apart by {spread:.1g} of their parameters' norm by step {self.step}, though their "
                f"gradients are equal: something beside the steps of {get_optimizer_name(self._optimizer)} "
                f"changes parameters "
                "unlike on each rank, such as noise drawn with unlike seeds. finish() averages them",
            )

    def _measure_spread(self, message_part: int = 0, *, is_compared: bool = True) -> float:
        """Measures how far replicas' parameters differ, relative to their norm; 0.0 if they are equal."""
        if self.size == 1:
            return 0.0
        number = self._engine.round_number
        return self._runtime.drive(
            estimate_max_divergence(
                self._runtime,
                self._trainable_parameters,
                number,
                part=message_part,
                should_contribute=is_compared,
            )
        )

    def _handle_task_end(self, task: int) -> None:
        """Ends the pass with the outermost autograd task; follows the outer task of a reentrant checkpoint."""
        self._tasks[task] = None
        outer = get_current_node()
        if outer is None:
            self._tasks.clear()
            self._finish_backward()
            return

        def follow_outer_task(*_: object) -> None:
            hook.remove()
            with self._buckets.lock:
                self._follow_task()

        hook = outer.register_hook(follow_outer_task)

    def _finish_backward(self) -> None:
        self._buckets.finish()
        if self._empty_passes > 1 or self._buckets.has_replaced_gradients():
            raise Unsupported(_STEP_IN_BACKWARD)
        if not self._runtime.drive(self._engine.merge_gradients()):
            self._buckets.clear()
        self._has_exchanged = True
        if self._schedule.is_gradient_only:
            self._close_round(has_updated=True, is_in_pass=False)

    # --- around the optimizer ---------------------------------------------------------------------------------

    def _handle_step(self) -> None:
        if self._is_stepping_optimizer or not (self._is_step_open or self._has_gradients()):
            return
        self._has_stepped = None if self._has_stepped is None else True
        if not self._has_exchanged:  # otherwise the backward pass has checked them
            self._check_all_exchanged()
            if not self._schedule.is_gradient_only and not self._engine.has_gradient_transfers(self.step):
                self._begin_round()  # its gradients come from no_sync() or torch.func
            elif self.size > 1 and self._has_gradients():
                self._has_diverged = True
                self._warn_once(
                    "exchange",
                    f"an optimizer step on rank {self.rank} followed no exchange since step {self.step}: replicas "
                    "train apart. Gradients are exchanged by backward() outside no_sync(); those of "
                    "torch.autograd.grad or torch.func are not",
                )
        self._skipped_steps, self._other_optimizer = 0, ""
        self._end_step(has_updated=True, is_in_pass=False)

    def _handle_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Records a step of any other optimizer in this process.

        Raises:
          Unsupported: It steps inside backward, or changes parameters after their change was exchanged.
        """
        if optimizer is self._optimizer or not any(
            id(p) in self._parameter_ids for p in list_optimizer_parameters(optimizer)
        ):
            return
        if get_graph_task_id() >= 0:
            raise Unsupported(_STEP_IN_BACKWARD)
        self._other_optimizer = get_optimizer_name(optimizer)
        if not self._has_stepped or self._schedule.is_gradient_only:
            return
        unoptimized_ids = self._parameter_ids - {id(p) for p in list_optimizer_parameters(self._optimizer)}
        if any(p.grad is not None and id(p) in unoptimized_ids for p in list_optimizer_parameters(optimizer)):
            raise Unsupported(
                f"{get_optimizer_name(optimizer)} steps after {get_optimizer_name(self._optimizer)}, which "
                f"attach() was given, on other "
                f"parameters of the model: {type(self._schedule).__name__} exchanges what steps have changed when the "
                "attached one has stepped. Attach the optimizer that steps last"
            )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._issued_warnings:
            self._issued_warnings.add(kind)
            warnings.warn(text, stacklevel=3)

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in list_optimizer_parameters(self._optimizer))

    def _check_all_exchanged(self) -> None:
        """Raises ConfigError if a parameter was unfrozen or added to the optimizer after :func:`attach`."""
        if self._frozen_parameters and (
            unfrozen := [name for name, p in self._frozen_parameters if p.requires_grad]
        ):
            raise ConfigError(
                f"parameters were frozen when attach() was called, and would train apart now: "
                f"{format_names(unfrozen)}; "
                "finish() and attach() again after unfreezing"
            )
        count = 0
        for group in self._optimizer.param_groups:
            count += len(group["params"])
        if count != self._num_optimizer_params and not all(
            id(p) in self._parameter_ids for p in list_optimizer_parameters(self._optimizer)
        ):
            raise ConfigError(
                "the optimizer was given parameters after attach(), which would train apart: finish() and attach() "
                "again"
            )

    def _end_skipped_step(self) -> None:
        """Ends a step that the loop skipped, as a GradScaler does; a step with finite gradients stays open."""
        if self._engine.is_round_open and (
            not self._buckets.is_finite() or self._buckets.has_zeroed_gradients()
        ):
            self._end_step(has_updated=False, is_in_pass=False)

    def _end_step(self, *, has_updated: bool, is_in_pass: bool) -> None:
        """Ends a step of the optimizer.

        Args:
          has_updated: True if the optimizer had gradients to step on.
          is_in_pass: True if the next backward pass runs already, so that parameters must not change.
        """
        if self._engine.is_round_open:
            self._close_round(has_updated=has_updated, is_in_pass=is_in_pass)
        self._reset_step()
        self.step += 1
        self._runtime.events += 1
        self._report_step()

    def _reset_step(self) -> None:
        """Resets the state kept about backward passes since the optimizer's last step."""
        self._is_step_open = self._has_exchanged = False
        self._passes, self._sketch_of_open_step = 0, None

    def _close_round(self, *, has_updated: bool, is_in_pass: bool) -> None:
        self._runtime.drive(self._engine.finish_round(has_updated=has_updated, should_apply=not is_in_pass))

    @property
    def _can_have_diverged(self) -> bool:
        """Returns True if replicas may differ after all exchanges are merged, such as with local steps."""
        return self._has_diverged or not self._schedule.is_gradient_only

    def _report_step(self) -> None:
        """Emits the event of a completed step, which lasts from the end of the previous one."""
        if self._telemetry is None:
            return
        begin_s, begin_waited_s = self._last_event_s, self._last_waited_s
        self._last_event_s, self._last_waited_s = self._runtime.read_clock(), self.waited_s
        self._telemetry.emit(
            "step",
            t=self._last_event_s,
            step=self.step - 1,
            duration_s=self._last_event_s - begin_s,
            exposed_s=self._last_waited_s - begin_waited_s,
            bytes_sent=self.sent_nbytes,
            in_flight=len({flight.step for flight in self._engine.flights}),
            **({} if self._gain is None else {"rule": self._gain.rule, **self._gain.get_stats()}),
        )

    def _step_without_data(self) -> bool:
        """Takes part in a step without data; returns True if any replica had data."""
        self._begin_round(has_data=False)
        self._buckets.fill_zeros(self._engine.handle_bucket)
        has_gradient = self._runtime.drive(self._engine.merge_gradients())
        outcome = self._runtime.drive(self._engine.finish_round(has_updated=has_gradient))
        self.step += 1
        self._runtime.events += 1
        has_data = outcome.num_exhausted < self.size
        if has_data and has_gradient:
            self._step_optimizer()
        self._buckets.clear()
        return has_data

    def _step_optimizer(self) -> None:
        """Runs the optimizer's step without the handle's own hooks around it."""
        self._is_stepping_optimizer = True
        try:
            self._optimizer.step()
        finally:
            self._is_stepping_optimizer = False

    def _copy_longest_state(self, steps: int) -> int:
        """Copies parameters and optimizer state from a replica with the most steps; returns their number."""
        counts = torch.zeros(self.size, dtype=torch.float64)
        counts[self.rank] = steps
        number, purpose = self._engine.round_number, Purpose.UNEVEN_INPUTS
        _, total = self._runtime.drive(
            sum_over_ranks(self._runtime, torch.empty(0), counts, number, purpose=purpose)
        )
        state = self._optimizer.state
        tensors: list[Tensor] = list(self._model.parameters())
        tensors += [
            value
            for p in list_optimizer_parameters(self._optimizer)
            for _, value in sorted(state.get(p, {}).items())
            if isinstance(value, Tensor)
        ]
        src = int(total.argmax())
        self._runtime.drive(
            broadcast(self._runtime, tensors, number, src=src, part=1, purpose=purpose, network=self._network)
        )
        return int(total[src])

    def _end_run(self) -> None:
        """Completes all exchanges, averages what still differs between replicas, and ends an elastic run."""

        async def update(step: int) -> None:
            del step  # the loop's own learning-rate schedule has ended
            self._step_optimizer()

        if self._is_step_open:
            self._end_step(has_updated=False, is_in_pass=False)
        if self._other_optimizer:
            # Sends the change it made since the last step.
            self._runtime.drive(self._engine.finish_round(has_updated=True, should_apply=False))
        number = self._engine.round_number
        self._runtime.drive(self._engine.flush(update))
        if self._can_have_diverged and (spread := self._measure_spread(message_part=2)):
            parameters = [p.detach() for p in self._trainable_parameters]
            self._runtime.drive(average(self._runtime, parameters, number, Purpose.COMPARISON, first_part=3))
            if spread > _SPREAD_TOLERANCE and not self._issued_warnings:
                self._warn_once(
                    "finish",
                    f"finish() has averaged replicas that had come apart by {spread:.1g} of their parameters' norm: "
                    f"something has changed them after the last step of {get_optimizer_name(self._optimizer)}, "
                    f"such as another "
                    "optimizer. Attach the one that steps last",
                )
        if not self._schedule.is_gradient_only and (
            state := collect_eval_state(self._optimizer, self._trainable_parameters)
        ):
            self._runtime.drive(average(self._runtime, state, number, Purpose.MOMENTS))
        if self._runtime.elastic is not None:
            self._runtime.drive(self._runtime.elastic.finish(number))

    # --- the end ----------------------------------------------------------------------------------------------

    def _close(self, error: BaseException | None) -> None:
        self.is_finished = True
        atexit.unregister(self._abort)
        if self in _active_handles:
            _active_handles.remove(self)
        self._buckets.remove()
        for hook in self._hooks:
            hook.remove()
        if error is None and self.size > 1:
            _warn_on_later_step(self._optimizer, self.rank)
        self._runtime.close(error)

    def _abort(self) -> None:
        self._close(RunLost(f"rank {self.rank} ended without finish()"))


class _TaskEndCallback:
    """Callback at the end of an autograd task; only autograd refers to it, so it is freed if the task fails."""

    def __init__(self, on_end: Callable[[int], None], task: int) -> None:
        self._on_end, self._task = on_end, task

    def __call__(self) -> None:
        self._on_end(self._task)


def _warn_on_later_step(optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Warns at the next step of an optimizer whose handle has finished, unless it is attached again by then."""
    has_warned = False

    def warn_once(*_: object) -> None:
        nonlocal has_warned
        if not has_warned and not any(
            handle.is_attached_to(list_optimizer_parameters(optimizer)) for handle in _active_handles
        ):
            has_warned = True
            warnings.warn(
                f"rank {rank} trains on after finish(), and nothing is exchanged any more: attach() again to go on "
                "together",
                stacklevel=2,
            )

    optimizer.register_step_post_hook(warn_once)
