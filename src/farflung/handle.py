"""Attaches farflung to an existing training loop: three lines, and the loop itself does not change."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farflung.attach_checks import (
    check_optimizer,
    check_options,
    check_recipe,
    check_site,
    check_steps,
    check_tensors,
    check_unwrapped,
    is_accumulating,
    list_optimizer_parameters,
    needs_closure,
    unwrap_optimizer,
)
from farflung.comm import Endpoint, Purpose, find_collective
from farflung.engine import Engine, GradientBuckets
from farflung.engine.averaging import (
    average,
    average_weights,
    broadcast,
    find_unequal,
    sum_over_ranks,
)
from farflung.engine.placement import to_local
from farflung.errors import CheckpointError, ConfigError, DeadlinePassed, RunLost, Unsupported
from farflung.loop import compute_fingerprint, describe_optimizer
from farflung.loop_recorder import RECIPE_VARIABLE, LoopRecorder
from farflung.moments import collect_eval_state, get_optimizer_name
from farflung.recipes import Recipe, parse_recipe
from farflung.reducers import list_summed_nbytes
from farflung.seeding import derive_seed
from farflung.sites import ReplicaSite, SiteBuckets
from farflung.step_tracker import SPREAD_TOLERANCE, LoopChecks, ReplicaComparison, StepTracker
from farflung.telemetry import Sink, Telemetry, combine_sinks
from farflung.types import Json, Schedule, State
from farflung.wall import LaunchEnv, WallRuntime

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from farflung.importance import ImportanceSampler
    from farflung.network import NetworkProfile
    from farflung.sampling import Gain

__all__ = ["Handle", "attach"]

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 60.0
_JOIN_HINT = "; if ranks have different numbers of batches, put the loop inside handle.join()"
_EQUAL_STEPS_HINT = "; this schedule needs equally many steps on all ranks"
_STATE_FAMILIES = ("codec", "reducer", "schedule")
"""Families of components whose states a handle saves."""
_active_handles: list[Handle] = []
"""Handles of this process that have not finished."""


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
    site: dist.ProcessGroup | DeviceMesh | None = None,
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
      model: Model that this loop trains. It may be compiled, but not wrapped in DistributedDataParallel, and sharded by
        ``fully_shard`` or as DTensors only with ``site``.
      optimizer: Optimizer that steps on the exchanged gradients, or a wrapper of one, such as Accelerate's.
      recipe: Recipe or its name, with changes in brackets: ``"ring(codec=int8)"``. The environment variable
        ``FARFLUNG_RECIPE`` replaces it.
      seed: Seed of random codecs, equal on all ranks.
      deadline_s: Seconds of silence after which an awaited replica is lost; one that answers may take ten times as
        long.
      launch_env: Rank and size of this replica; read from the environment by default.
      store: Store in which the replicas find each other; by default the one at ``MASTER_ADDR``.
      site: Process group or device mesh of the processes that hold this replica together, sharded or each with a copy.
        Each exchanges its share with the process of the same number at the other sites. ``FARFLUNG_SITE``, or
        :meth:`farflung.wall.LaunchEnv.of_site`, tells which site this is and where the sites meet. Otherwise one
        launcher has started all sites, and the ranks of each are consecutive.
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
    recipe = os.environ.get(RECIPE_VARIABLE) or recipe
    parsed_recipe = parse_recipe(recipe) if isinstance(recipe, str) else recipe
    parts = parsed_recipe.build_components(seed)
    check_recipe(parsed_recipe, parts)
    check_unwrapped(model, has_site=site is not None)
    own_site = None if site is None else ReplicaSite(site, deadline_s)
    env = launch_env or LaunchEnv.read_site() or LaunchEnv.read() or LaunchEnv(0, 1, 0, 1)
    rank, size = env.rank, env.size
    if own_site is not None:
        check_site(
            parsed_recipe,
            parts,
            own_site.size,
            has_sampler=sampler is not None,
            can_split=elastic > 0 and quorum == "1",
        )
        own_site.check_parameters(model)
        own_site.reshard(model)
        rank, size = own_site.locate(env)
    elif env.counts_sites:
        raise ConfigError(
            "attach: FARFLUNG_SITE is set: give attach(site=...) the process group of this site"
        )
    check_options(parts, nonfinite, elastic, quorum, deadline_s, size=size, has_sampler=sampler is not None)
    check_tensors(model, is_alone=size == 1 and own_site is None)
    should_accumulate = partial(is_accumulating, optimizer)
    optimizer = unwrap_optimizer(optimizer)
    check_optimizer(model, optimizer)
    check_steps(parts.schedule, optimizer, size)
    if any(handle.is_attached_to(model.parameters()) for handle in _active_handles):
        raise ConfigError("attach: this model is attached already; call finish() on its handle first")
    if sampler is not None and (sampler.rank, sampler.size) != (rank, size):
        raise ConfigError(
            f"attach: the sampler is that of rank {sampler.rank} of {sampler.size}, and this is rank {rank} of {size}"
        )
    profile = _load_profile(network)
    if (recorder := LoopRecorder.from_environment(model)) is not None:
        if sampler is not None or elastic or own_site is not None or needs_closure(optimizer):
            raise Unsupported(
                "farflung plan: steps with a sampler, a site, elastic or a closure cannot be recorded"
            )
        sink = recorder if sink is None else combine_sinks(sink, recorder)
    if own_site is None:
        buckets = GradientBuckets(model.named_parameters(), parts.bucket_nbytes)
        store = store or env.connect_store(_CONNECT_TIMEOUT_S)
    else:
        buckets = SiteBuckets(
            model.named_parameters(),
            parts.bucket_nbytes,
            site=own_site,
            should_check_gradients=nonfinite is not None,
        )
        store = own_site.connect_store(env, store, _CONNECT_TIMEOUT_S)
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
            **({} if own_site is None else {"a site's processes": own_site.size}),
        },
        deadline_s=deadline_s,
        is_native=find_collective(parsed_recipe.collective).is_native,
        connect_timeout_s=_CONNECT_TIMEOUT_S,
        members=range(size) if elastic else None,
        max_unreceived_nbytes=math.inf if elastic else None,
    )
    try:
        runtime.session.members.leave_detail += (
            _JOIN_HINT if parts.schedule.is_synchronous else _EQUAL_STEPS_HINT
        )
        runtime.limit_messages(itertools.chain(model.parameters(), model.buffers()))
        engine = Engine(
            runtime,
            buckets,
            parts.reducer,
            parts.schedule,
            seed=seed if own_site is None else derive_seed(seed, "share", own_site.rank),
            optimizer=optimizer,
            on_nonfinite=nonfinite or "stop",
            should_check_gradients=nonfinite is not None,
            agree=None if own_site is None else own_site.select_first,
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
            parsed_recipe.settings,
            collective,
            sink,
            should_accumulate,
            profile,
            gain,
            own_site,
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
        recipe_settings: Mapping[str, Json],
        collective: str,
        sink: Sink | None = None,
        is_accumulating: Callable[[], bool] = lambda: False,
        network: NetworkProfile | None = None,
        gain: Gain | None = None,
        site: ReplicaSite | None = None,
    ) -> None:
        self._telemetry = None if sink is None else Telemetry(runtime.comm.rank, sink)
        self._last_event_s, self._last_waited_s = 0.0, 0.0
        self.collective = collective
        """Name of the collective for all-reduces, with ``auto`` already resolved."""
        self._model, self._optimizer = model, optimizer
        self._runtime, self._buckets, self._engine = runtime, buckets, engine
        self._schedule, self._recipe_settings, self._gain = schedule, dict(recipe_settings), gain
        self._network, self._site = network, site
        self._members: tuple[int, ...] | None = None
        """Members on which the processes of a site have agreed; ``None`` if those of the engine count."""
        self.is_finished = False
        """True after :meth:`finish`, :meth:`leave` or an error."""
        self._checks = LoopChecks(model, optimizer, schedule, is_sharded=site is not None)
        self._comparison = ReplicaComparison(runtime, engine, buckets, site)
        self._steps = StepTracker(
            optimizer,
            runtime,
            buckets,
            engine,
            schedule,
            checks=self._checks,
            comparison=self._comparison,
            is_accumulating=is_accumulating,
            on_step=self._end_step,
            is_deferred=site is not None,
        )

    @property
    def step(self) -> int:
        """Number of optimizer steps so far, including those that a ``GradScaler`` skipped."""
        return self._steps.step

    @property
    def rank(self) -> int:
        """Rank of this replica; of a site, its number."""
        return self._runtime.comm.rank

    @property
    def share(self) -> tuple[int, int]:
        """Number of this process in its site, and number of processes of the site; (0, 1) without ``site``."""
        return (0, 1) if self._site is None else (self._site.rank, self._site.size)

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
        return self._engine.members if self._members is None else self._members

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
        """Number of payload bytes of gradients and updates sent by this process so far."""
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
        return self._checks.includes_any(parameters)

    def start(self) -> None:
        """Broadcasts rank 0's parameters and buffers; tensors that are equal already are not sent."""
        atexit.register(self._abort)
        _active_handles.append(self)
        if self._site is not None:
            self._site.equalize(self._model)
        tensors = [*map(to_local, self._model.parameters()), *map(to_local, self._model.buffers())]
        indices = self._runtime.drive(find_unequal(self._runtime, tensors, 0, purpose=Purpose.START))
        unequal = [tensors[index] for index in indices]
        self._runtime.drive(broadcast(self._runtime, unequal, 0, network=self._network))
        self._engine.restart()
        self._last_event_s = self._runtime.read_clock()
        if self._telemetry is not None:
            self._telemetry.emit("begin", t=self._last_event_s, step=0)

    def set_weight(self, weight: float) -> None:
        """Sets this replica's weight in the mean from the next backward pass on, such as its share of a full batch.

        All processes of a site call this together, and its weight is their mean.

        Raises:
          ConfigError: The weight is negative or not finite.
        """
        if not 0 <= weight < math.inf:
            raise ConfigError(f"weight {weight}: must be finite, and 0 or more")
        self._steps.weight = weight if self._site is None else self._site.average(weight)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disables exchanges within the context; the next backward pass outside exchanges accumulated gradients.

        Synchronous recipes exchange at each backward pass outside, as DistributedDataParallel does. Schedules with
        local steps exchange only when the optimizer steps and do not need this. Pipelined schedules refuse a second
        pass. In a site, FSDP2 reduces no gradients within the context either.
        """
        self._steps.is_syncing, was_syncing = False, self._steps.is_syncing
        if self._site is not None:
            self._site.set_gradient_sync(self._model, is_syncing=False)
        try:
            yield
        finally:
            self._steps.is_syncing = was_syncing
            if self._site is not None:
                self._site.set_gradient_sync(self._model, is_syncing=was_syncing)

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
        if self._steps.is_step_open:
            self._steps.end_step(has_updated=False, is_in_pass=False)
        steps = self.step - first
        if self._site is not None:
            self._site.check_equal("numbers of steps in join()", [steps])
        while self._steps.step_without_data():
            pass
        self._steps.step = first + self._copy_longest_state(steps)

    @contextmanager
    def use_averaged_model(self) -> Iterator[nn.Module]:
        """Yields the model to evaluate or save, and restores this replica's own on exit.

        Running statistics are averaged, and so are parameters if replicas differ; with a pull they are the anchor.

        Raises:
          RunLost: :meth:`finish` was called before.
        """
        from farflung.loop.evaluation import apply_consensus

        self._reshard()
        self._checks.check_no_new_parameters()
        self._steps.end_skipped_step()
        consensus = self._engine.get_consensus_parameters()
        if consensus == {} and self._can_have_diverged and self._comparison.measure_spread(message_part=1):
            consensus = None  # something has changed them since the last exchange
        if consensus is None and self._site is not None:
            consensus = self._buckets.unflatten(self._average_weights(Purpose.EVALUATION, 1))
        context = apply_consensus(self._runtime, self._model, self._engine.round_number, consensus)
        self._runtime.drive(context.__aenter__())
        try:
            yield self._model
        finally:
            self._reshard()
            self._runtime.drive(context.__aexit__(None, None, None))

    def state_dict(self) -> State:
        """Returns farflung's training state: step count, residuals, schedule and exchanges in flight.

        Each replica saves its own state, and its optimizer's. The state includes running statistics, and parameters if
        replicas differ. Save it before the next step, which changes tensors of its exchanges.

        Raises:
          RunLost: :meth:`finish` was called before.
        """
        self._reshard()
        self._steps.end_skipped_step()
        exchanges = self._runtime.launch(self._engine.state_dict()).wait()
        persistent = self._model.state_dict().keys()
        tensors: dict[str, Tensor] = {
            name: buffer for name, buffer in self._model.named_buffers() if name in persistent
        }
        if self._engine.has_diverged:
            trainable = {id(p) for p in self._buckets.parameters}
            tensors |= {name: p for name, p in self._model.named_parameters() if id(p) in trainable}
        return {
            "step": self.step,
            "rank": self.rank,
            "size": self._runtime.comm.size,
            "share": list(self.share),
            "recipe": self._recipe_settings,
            "buckets": self._buckets.layout,
            "model": {name: to_local(tensor).clone() for name, tensor in tensors.items()},
            "exchanges": exchanges,
        }

    def load_state_dict(self, state: State) -> None:
        """Restores a state from :meth:`state_dict`, with running statistics, and parameters if replicas differed.

        Model and optimizer may be loaded before or after :func:`attach`. During training, all ranks must load together;
        exchanges in flight are awaited and discarded.

        Raises:
          CheckpointError: The state is of another model, recipe, rank or number of replicas, or not of a handle.
        """
        required_keys = {"step", "rank", "size", "share", "recipe", "buckets", "model", "exchanges"}
        if missing_keys := required_keys - state.keys():
            raise CheckpointError(f"this is no state of a handle: it lacks {', '.join(sorted(missing_keys))}")
        if (state["rank"], state["size"]) != (self.rank, self._runtime.comm.size):
            raise CheckpointError(
                f"this state is that of rank {state['rank']} of {state['size']}, and this is rank {self.rank} of "
                f"{self._runtime.comm.size}: each rank keeps and loads its own"
            )
        if tuple(state["share"]) != self.share:
            raise CheckpointError(
                f"this state is that of share {state['share'][0]} of {state['share'][1]}, and this is share "
                f"{self.share[0]} of {self.share[1]}: "
                "torch.distributed.checkpoint can reshard model and optimizer; begin without this state, which loses "
                "residuals and exchanges in flight, or start as many processes"
            )
        changes = [
            f"{name} {state['recipe'].get(name)} in place of {self._recipe_settings[name]}"
            for name in _STATE_FAMILIES
            if state["recipe"].get(name) != self._recipe_settings[name]
        ]
        if changes:
            raise CheckpointError(
                f"this state was made with another recipe, {', '.join(changes)}: attach with that one, or begin "
                "without this state, which loses residuals and exchanges in flight"
            )
        self._reshard()
        tensors = {
            name: to_local(tensor)
            for name, tensor in (*self._model.named_buffers(), *self._model.named_parameters())
        }
        saved_tensors = state["model"]
        if state["buckets"] != self._buckets.layout or any(
            name not in tensors or tensors[name].shape != value.shape for name, value in saved_tensors.items()
        ):
            raise CheckpointError("this state was made with another model or other buckets")
        for flight in self._engine.flights:
            self._runtime.drive(flight.exchange.wait())
        self._steps.reset_step()
        with torch.no_grad():
            for name, value in saved_tensors.items():
                tensors[name].copy_(value)
        self._steps.step = state["step"]
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
                if isinstance(error, DeadlinePassed) and not self._schedule.is_gradient_only:
                    error.add_note(f"rank {self.rank} finished after {self.step} steps: do all take as many?")
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
            raise Unsupported("leave() ends the run for all others: attach(elastic=...) lets them continue")
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

    def _average_weights(self, purpose: Purpose, first_part: int) -> list[Tensor]:
        return self._runtime.drive(
            average_weights(
                self._runtime, self._buckets, self._engine.round_number, purpose, first_part=first_part
            )
        )

    def _reshard(self) -> None:
        if self._site is not None:
            self._site.reshard(self._model)

    def _end_step(self) -> None:
        """Emits the event of a completed step, which lasts from the end of the previous one."""
        if self._site is not None and self._runtime.elastic is not None:
            self._members = self._site.intersect(self._engine.members, self._runtime.comm.size)
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

    @property
    def _can_have_diverged(self) -> bool:
        """Returns True if replicas may differ after all exchanges are merged, such as with local steps."""
        return self._comparison.has_diverged or not self._schedule.is_gradient_only

    def _copy_longest_state(self, steps: int) -> int:
        """Copies parameters and optimizer state from a replica with the most steps; returns their number."""
        counts = torch.zeros(self.size, dtype=torch.float64)
        counts[self.rank] = steps
        number, purpose = self._engine.round_number, Purpose.UNEVEN_INPUTS
        _, total = self._runtime.drive(
            sum_over_ranks(self._runtime, torch.empty(0), counts, number, purpose=purpose)
        )
        state = self._optimizer.state
        tensors: list[Tensor] = [*map(to_local, self._model.parameters())]
        tensors += [
            to_local(value)
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
            self._steps.step_optimizer()

        if self._steps.is_step_open:
            self._steps.end_step(has_updated=False, is_in_pass=False)
        if self._checks.other_optimizer:
            # Sends the change it made since the last step.
            self._runtime.drive(self._engine.finish_round(has_updated=True, should_apply=False))
        self._reshard()
        number = self._engine.round_number
        self._runtime.drive(self._engine.flush(update))
        if self._can_have_diverged and (spread := self._comparison.measure_spread(message_part=2)):
            for bucket, mean in zip(self._buckets, self._average_weights(Purpose.COMPARISON, 3), strict=True):
                bucket.load_weights(mean)
            if spread > SPREAD_TOLERANCE and not self._checks.has_warned:
                self._checks.warn_once(
                    "finish",
                    f"finish() has averaged replicas that had come apart by {spread:.1g} of their parameters' norm: "
                    f"something has changed them after the last step of {get_optimizer_name(self._optimizer)}, "
                    f"such as another "
                    "optimizer. Attach the one that steps last",
                )
        if not self._schedule.is_gradient_only and (
            state := collect_eval_state(self._optimizer, self._buckets.parameters)
        ):
            self._runtime.drive(average(self._runtime, [*map(to_local, state)], number, Purpose.MOMENTS))
        if self._runtime.elastic is not None:
            self._runtime.drive(self._runtime.elastic.finish(number))

    # --- the end ----------------------------------------------------------------------------------------------

    def _close(self, error: BaseException | None) -> None:
        self.is_finished = True
        atexit.unregister(self._abort)
        if self in _active_handles:
            _active_handles.remove(self)
        self._steps.remove_hooks()
        if self._site is not None and error is None:
            self._site.close()
        if error is None and self.size > 1:
            _warn_on_later_step(self._optimizer, self.rank)
        self._runtime.close(error)

    def _abort(self) -> None:
        self._close(RunLost(f"rank {self.rank} ended without finish()"))


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
                f"rank {rank} trains on after finish(), and nothing is exchanged any more: attach() again to continue "
                "together",
                stacklevel=2,
            )

    optimizer.register_step_post_hook(warn_once)
