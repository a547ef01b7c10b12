"""Engine that launches the exchanges of a schedule, and merges their results when they are due."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from farflung.comm import Purpose
from farflung.engine.averaging import average_tensors, average_weights
from farflung.engine.buckets import GradientBuckets
from farflung.engine.extension import Extension
from farflung.engine.flight import Flight, concatenate
from farflung.engine.gate import LinkGate
from farflung.engine.merge_states import MergeStates
from farflung.engine.metadata import PendingMetadata, StepMetadata
from farflung.engine.placement import move_state, to_local
from farflung.engine.plan import Arrival, StepOutcome, StepPlan
from farflung.engine.reducer_states import ReducerStates
from farflung.engine.times import StepTimer
from farflung.engine.units import UnitState, build_spec, enumerate_units
from farflung.engine.unused import UnusedParameters
from farflung.errors import NonFinite, Unsupported
from farflung.files import wrap_decision_errors
from farflung.moments import collect_moments, get_learning_rate
from farflung.types import (
    ForwardTrace,
    Json,
    Reducer,
    ReduceResult,
    Runtime,
    Schedule,
    SharedStats,
    State,
    Transfer,
)

__all__ = ["Engine"]


class Engine:
    """Exchanges the gradients and updates of one rank for a whole run; local steps begin with :meth:`restart`.

    A step is a round of exchanges: :meth:`begin_round`, a :meth:`handle_bucket` for each bucket,
    :meth:`merge_gradients`, the optimizer, :meth:`finish_round`. All of this runs on the training thread. Exchanges run
    on the communication thread, which owns the reducers, in the order of their launch. The training thread updates the
    reducer's states from results while no exchange is about to encode, because an update may take longer than messages
    can wait.

    Args:
      runtime: Runtime of this replica.
      buckets: Gradients and parameters of the model.
      reducer: Reducer of all units.
      schedule: Schedule of the exchanges.
      seed: Seed of the run.
      optimizer: Optimizer that steps on the means; ``None`` if unknown.
      on_nonfinite: Policy for a loss that is not finite; see :class:`farflung.config.Training`.
      should_check_gradients: True to check gradients for this too, because the loss is unknown.
      steps: Number of steps of the run; ``None`` if unknown.
      trace: Trace of a forward pass, for a schedule with deferred updates.
      agree: Function that returns the same value to all processes of a site; ``None`` if it has one process.

    Raises:
      Unsupported: no unit contains a bucket, a merge is named twice, or a fragment is on several devices.
      ConfigError: a merge does not support the optimizer.
    """

    def __init__(
        self,
        runtime: Runtime,
        buckets: GradientBuckets,
        reducer: Reducer,
        schedule: Schedule,
        *,
        seed: int,
        optimizer: torch.optim.Optimizer | None = None,
        on_nonfinite: str = "stop",
        should_check_gradients: bool = False,
        steps: int | None = None,
        trace: ForwardTrace | None = None,
        agree: Callable[[Json], Json] | None = None,
    ) -> None:
        self._agree = agree
        self._runtime, self._buckets, self._reducer, self._schedule = runtime, buckets, reducer, schedule
        self._on_nonfinite = on_nonfinite
        self._should_check_gradients = should_check_gradients
        self._steps = steps
        self._optimizer = optimizer
        self._extensions: list[Extension] = []
        self._merge_states = MergeStates(schedule, buckets, optimizer)
        for bucket in buckets:
            bucket.optimizer = optimizer
        sync_units = enumerate_units(schedule, buckets.buckets)
        specs = {number: build_spec(sync_unit) for number, sync_unit in sync_units.items()}
        self.reducer_states = ReducerStates(reducer, specs, seed, runtime.comm.rank, steps=steps)
        self._unit_states = {
            number: UnitState.build(number, sync_unit, buckets, self.reducer_states[number])
            for number, sync_unit in sync_units.items()
        }
        self._sync_units = tuple(sync_units.values())
        self._states_by_id = {id(unit.sync_unit): unit for unit in self._unit_states.values()}
        self.unused = UnusedParameters()
        self._metadata = PendingMetadata(self._unit_states.values(), runtime.comm.rank)
        self._schedule_state = schedule.init()
        if trace is not None:
            self._schedule_state = schedule.record_trace(self._schedule_state, self._sync_units, trace)
        self._plan = StepPlan(0, StepMetadata(0.0, 0.0), (), None, StepOutcome())
        self._has_local_steps = not schedule.is_gradient_only
        """True if ranks step on their own gradients, at some steps or all."""
        self._has_stale_anchors = False
        """True if all ranks have moved equally since the anchors of local steps were last set."""
        self._unapplied: list[list[Arrival]] = []
        """Updates that have arrived and are not applied yet, by step."""
        self._max_unapplied = max(schedule.max_steps_ahead, 1)
        self.flights: list[Flight] = []
        """Exchanges in flight, in order of launch."""
        self.times = StepTimer(runtime.read_clock)
        self.gate = LinkGate(runtime, self._is_busy, has_overlap=not schedule.is_synchronous)
        """Gate that blocks background transfers while a step waits for an exchange."""
        self.round_number = 0
        """Number of the current round, or of the next one; numbers messages, and is equal on all ranks."""
        self.is_round_open = False
        """True if a round has begun and not finished."""
        self.sent_nbytes = 0
        self.peak_nbytes = 0
        """Largest number of bytes in merge states and saved contributions."""

    def extend(self, *extensions: Extension) -> None:
        """Adds extensions before the first step, in an order that is equal on all ranks."""
        self._extensions += extensions
        self._metadata.extend(name for extension in extensions for name in extension.names)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that take batches at the current round, or at the next one."""
        elastic = self._runtime.elastic
        return (
            tuple(range(self._runtime.comm.size))
            if elastic is None
            else elastic.find_change(self.round_number).ranks
        )

    # --- a step -----------------------------------------------------------------------------------------------

    def has_gradient_transfers(self, step: int) -> bool:
        """Returns True if gradients leave in the backward pass of a step."""
        transfers = self._schedule.plan(self._schedule_state, self._sync_units, step)
        return any(transfer.merge.average_target == "gradient" for transfer in transfers)

    def begin_round(self, step: int, metadata: StepMetadata) -> None:
        """Plans a round, before its backward pass.

        Args:
          step: Step of the optimizer; several rounds may belong to one.
          metadata: Metadata of this rank.

        Raises:
          Unsupported: the schedule plans a unit or merge that it has not declared.
        """
        self.times.begin_step()
        rate = None if self._optimizer is None else get_learning_rate(self._optimizer)
        transfers = self._schedule.plan(self._schedule_state, self._sync_units, step)
        outcome = self._plan.outcome if self._schedule.has_deferred_updates else StepOutcome()
        plan = self._plan = StepPlan(step, metadata, transfers, rate, outcome)
        self.is_round_open = True
        if self._has_stale_anchors and not plan.has_gradients and not self.has_diverged:
            self._has_stale_anchors = False
            self._merge_states.reset_anchors()
        numbers: dict[str, float] = {}
        for extension in self._extensions:
            numbers |= extension.report_metadata(metadata)
        self._metadata.add(metadata, numbers)
        for transfer in transfers:
            self._check_transfer(transfer)

    def handle_bucket(self, index: int) -> None:
        """Launches the transfers that waited for a bucket, which has filled.

        Exchanges start in the planned order, which is equal on all ranks, because the backend's native collectives are
        matched by order. Autograd's threads may call this, one at a time, while the training thread waits for them.
        """
        plan, gradient = self._plan, self._buckets[index].gradient
        if self._should_check_gradients and plan.metadata.is_finite and not gradient.isfinite().all():
            nonfinite = replace(plan.metadata, loss=math.nan)
            self._metadata.replace_step_metadata(plan.metadata, nonfinite)
            plan.metadata = nonfinite
        if not plan.metadata.is_finite:
            gradient.zero_()  # neither a mean nor a residual may ever see it
        for transfer in plan.fill(index):
            self._launch_transfer(transfer)

    async def merge_gradients(self, index: int | None = None) -> bool:
        """Applies mean gradients that are due; returns True if the optimizer should step, on them or on local ones.

        Args:
          index: Bucket whose mean is awaited alone, with deferred updates and before the next round begins.

        Raises:
          NonFinite: a rank had a non-finite loss, or gradient if these are checked. It is raised on all ranks at the
            same step, before the update.
        """
        if index is not None:
            arrivals = await self._collect([flight for flight in self.flights if flight.unit.number == index])
            if any(flight.is_first_of_step for flight, _, _ in arrivals):
                await self._report_arrival(arrivals[0])
            return await self._apply_arrivals(arrivals)
        if len(self._unapplied) > self._max_unapplied:
            await self._apply_pending()  # steps have been left out one after the other
        self._track_peak()
        steps_on_means = self._plan.has_gradients or bool(self._list_due(gradients=True))
        has_merged = await self._merge_due(gradients=True)
        self.gate.release()
        if steps_on_means:
            self._has_stale_anchors |= self._has_local_steps
            return has_merged
        return self._has_local_steps and self._plan.metadata.is_finite

    async def finish_round(self, *, has_updated: bool, should_apply: bool = True) -> StepOutcome:
        """Launches transfers of updates, applies those that are due, and ends the round.

        Args:
          has_updated: True if the optimizer had a gradient to step on.
          should_apply: False to only await results, so that the schedule's state stays equal to ranks that apply them.
            The next call applies them.
        """
        if has_updated and self._has_local_steps:
            self._merge_states.mark_updated()
        for transfer in self._plan.take_updates():
            self._launch_transfer(transfer, is_updated=has_updated)
        self._track_peak()
        if should_apply:
            await self._merge_due(gradients=False)
            self.gate.release()
        else:
            for flights in self._list_due(gradients=False):
                self._unapplied.append(await self._collect(flights))
                await self._report_arrival(self._unapplied[-1][0])
        if self.is_round_open:
            self.is_round_open = False
            self.round_number += 1
        outcome, self._plan.outcome = self._plan.outcome, StepOutcome()
        return outcome

    async def flush(self, update: Callable[[int], Awaitable[None]]) -> StepOutcome:
        """Applies all exchanges in flight, as later steps would; afterwards all ranks are equal.

        Args:
          update: Optimizer step, given the training step that it belongs to.
        """
        previous = self._plan
        plan = self._plan = StepPlan(
            previous.step, previous.metadata, (), previous.learning_rate, previous.outcome
        )
        await self._apply_pending()
        for step in sorted({flight.merge_step for flight in self.flights}):
            plan.step = step
            has_due = bool(self._list_due(gradients=True))
            has_merged = await self._merge_due(gradients=True)
            await self._merge_due(gradients=False)
            if has_merged and has_due:
                await update(step)
            self._buckets.clear()
        self._merge_states.finish()
        if self.has_diverged:
            means = await average_weights(self._runtime, self._buckets, self.round_number, Purpose.FLUSH)
            for bucket, mean in zip(self._buckets, means, strict=True):
                bucket.load_weights(mean)
            self.restart()
        for name, value in (await self._metadata.sum_remaining(self._runtime, self.round_number)).items():
            plan.outcome.sums[name] = plan.outcome.sums.get(name, 0.0) + value
        return plan.outcome

    def restart(self, *, from_anchors: bool = False) -> None:
        """Restarts with no contributions, and anchors equal to the parameters.

        Args:
          from_anchors: True to set parameters to the anchors, as on a joining rank. Otherwise anchors are set to the
            parameters, which are equal on all ranks, with nothing in flight.
        """
        self._metadata.clear(numbers=from_anchors)
        if from_anchors:
            self._merge_states.reset_local_states(to_anchors=not self._has_stale_anchors)
        else:
            self._merge_states.reset_anchors()

    @property
    def merged_weight(self) -> float:
        """Sum of the weights of the last gradients merged at this step; 0 if there were none."""
        stats = self._plan.outcome.stats
        return stats.weight if stats else 0.0

    # --- the model --------------------------------------------------------------------------------------------

    @property
    def has_diverged(self) -> bool:
        """Returns True if parameters may differ between ranks; equal on all ranks."""
        if not self._has_local_steps:
            return False
        is_pending = bool(self.flights or self._unapplied) or not self._metadata.is_empty
        return is_pending or self._merge_states.has_diverged

    def get_anchor_parameters(self) -> dict[str, Tensor] | None:
        """Returns the parameters without contributions in flight, equal on all ranks; ``None`` without anchors."""
        anchors = None if self._has_stale_anchors else self._merge_states.anchors
        return None if anchors is None else self._buckets.unflatten(anchors)

    def get_consensus_parameters(self) -> dict[str, Tensor] | None:
        """Returns the parameters for evaluations and checkpoints, by name and equal on all ranks.

        Returns:
          Parameters that replace the rank's own: none if ranks are equal. ``None`` stands for the mean of all ranks.
        """
        if not self.has_diverged:
            return {}
        return self.get_anchor_parameters() if self._merge_states.should_evaluate_anchor else None

    # --- checkpoints ------------------------------------------------------------------------------------------

    async def state_dict(self) -> State:
        """Returns the state to resume from, with the original input of exchanges in flight.

        Launch it with ``Runtime.launch``, so that no exchange advances while it runs.

        Returns:
          ``shared``, equal on all ranks, and ``local``.
        """
        shared_reducer, local_reducer = self.reducer_states.state_dict()
        shared_unused, local_unused = self.unused.state_dict()
        shared_merges, local_merges = self._merge_states.state_dict()
        return {
            "shared": {
                "schedule": self._schedule_state,
                "merges": shared_merges,
                "reducer": shared_reducer,
                "unused": shared_unused,
                "has_stale_anchors": self._has_stale_anchors,
                "round_number": self.round_number,
            },
            "local": {
                "elapsed_s": self.times.elapsed_s,
                "sent_nbytes": self.sent_nbytes,
                "peak_nbytes": self.peak_nbytes,
                "metadata": self._metadata.state_dict(),
                "flights": {f"{i:06}": await flight.state_dict() for i, flight in enumerate(self.flights)},
                "merges": local_merges,
                "reducer": local_reducer,
                "unused_local": local_unused,
            },
        }

    def load_state_dict(self, state: State, *, counts_only: bool = False) -> None:
        """Restores :meth:`state_dict`; exchanges that were in flight start again and give equal results.

        Args:
          state: State with tensors on any device.
          counts_only: True for the state of a flushed engine with another reducer or schedule, of which only rounds
            and counts continue. The parameters must be loaded already.

        Raises:
          CheckpointError: the reducer's state is of another version.
        """
        shared, local = state["shared"], state["local"]
        if not counts_only:
            self.reducer_states.check_local_state(local["reducer"])
        self.flights.clear()
        self._unapplied.clear()
        self.is_round_open, self.round_number = False, shared["round_number"]
        self.sent_nbytes, self.peak_nbytes = local["sent_nbytes"], local["peak_nbytes"]
        self.times.resume_from(local["elapsed_s"])
        if counts_only:
            self.restart()
            return
        self._schedule_state, self._has_stale_anchors = shared["schedule"], shared["has_stale_anchors"]
        self._metadata.load_state_dict(local["metadata"])
        self.unused.load_state_dict(shared["unused"], local["unused_local"])
        self._merge_states.load_state_dict(shared["merges"], local["merges"])
        for saved in local["flights"].values():
            unit = self._unit_states[saved["number"]]
            kinds = self._merge_states.kinds
            flight = Flight.restart(saved, unit, kinds, self._runtime, self._reducer)
            self.flights.append(flight)
            self._merge_states.add_restarted(flight)
        states = [
            {
                number: move_state(half, self._unit_states[int(number)].device)
                for number, half in halves.items()
            }
            for halves in (shared["reducer"], local["reducer"])
        ]

        async def load_behind_restarted() -> None:
            self.reducer_states.load_state_dict(*states)

        if self.flights:
            self._runtime.launch(load_behind_restarted())
        else:
            self.reducer_states.load_state_dict(*states)

    # --- launching --------------------------------------------------------------------------------------------

    def _check_transfer(self, transfer: Transfer) -> None:
        """Checks that unit and merge are the schedule's, and that a result is late only if the schedule allows it."""
        plans = f"schedule {type(self._schedule).__name__}, step {self._plan.step}: plans"
        if transfer.merge not in self._merge_states:
            raise Unsupported(
                f"{plans} merge {type(transfer.merge).__name__}, which is not among its merges: name it there"
            )
        if id(transfer.unit) not in self._states_by_id:
            raise Unsupported(f"{plans} a unit that its build_units does not return")
        if transfer.merge_step > self._plan.step and not self._schedule.has_late_results:
            raise Unsupported(
                f"{plans} a result for step {transfer.merge_step}, and its has_late_results is False: make it True"
            )

    def _launch_transfer(self, transfer: Transfer, *, is_updated: bool = True) -> None:
        plan, unit = self._plan, self._states_by_id[id(transfer.unit)]
        merge, delay = transfer.merge, transfer.merge_step - plan.step
        if self._steps is not None and transfer.merge_step >= self._steps - 1:
            merge = merge.as_final()
        if delay <= 0:
            self.gate.close()
        is_first, plan.has_launched = not plan.has_launched, True
        moves_gradient = merge.average_target == "gradient"
        zero_places = unit.zero_places if moves_gradient else ()
        unused_changed = moves_gradient and self.unused.did_change(unit, zero_places)
        weight, vector = self._metadata.pack(
            unit, is_first_of_step=is_first, has_unused_changes=unused_changed
        )
        # A step that was left out may be made up for before the result is applied.
        steps_before = delay if is_updated else max(delay, 1)
        tensors, saved = self._merge_states.contribute(merge, unit.buckets, steps_before)
        flight = Flight(
            unit, plan.step, self.round_number, delay, merge, saved, weight, vector, is_first, zero_places
        )
        for extension in self._extensions:
            extension.handle_launch(flight, tensors)
        plan.num_unlaunched -= 1
        flight.launch(
            self._runtime,
            self._reducer,
            concatenate(tensors),
            is_last_of_step=not plan.num_unlaunched,
            priority=transfer.priority,
        )
        self.flights.append(flight)
        if is_first and self._schedule.needs_times(self._schedule_state, plan.step):
            agreed = None if self._agree is None else self._agree(self.times.to_json())
            flight.decider_times = self._runtime.decide(
                "times", plan.step, self.times.to_json if agreed is None else lambda: agreed
            )

    def _is_busy(self) -> bool:
        """Returns True if any exchange is incomplete."""
        return any(not flight.exchange.result.is_done for flight in tuple(self.flights))

    def _track_peak(self) -> None:
        nbytes = sum(flight.nbytes for flight in self.flights)
        if self._has_local_steps:
            nbytes += self._merge_states.nbytes
        self.peak_nbytes = max(self.peak_nbytes, nbytes)

    # --- applying ---------------------------------------------------------------------------------------------

    def _list_due(self, *, gradients: bool) -> list[list[Flight]]:
        """Returns the due exchanges of gradients, or all other due ones, by the step at which they started."""
        candidates = [
            flight
            for flight in self.flights
            if (flight.merge.average_target == "gradient") == gradients
            and flight.merge_step <= self._plan.step
        ]
        return [list(flights) for _, flights in groupby(candidates, key=lambda flight: flight.step)]

    async def _merge_due(self, *, gradients: bool) -> bool:
        """Applies due results; returns True if those of the last step changed anything."""
        has_merged = not gradients and await self._apply_pending()
        for flights in self._list_due(gradients=gradients):
            arrivals = await self._collect(flights)
            has_merged = await self._apply_arrivals(arrivals)
            await self._report_arrival(arrivals[0])
        return has_merged

    async def _apply_pending(self) -> bool:
        """Applies updates that were only awaited so far; returns True if the last ones changed anything."""
        has_merged = False
        pending, self._unapplied = self._unapplied, []
        for arrivals in pending:
            has_merged = await self._apply_arrivals(arrivals)
        return has_merged

    async def _collect(self, flights: Sequence[Flight]) -> list[Arrival]:
        """Waits for the exchanges of one step, and agrees on the parameters that no rank has used in it."""
        arrivals: list[Arrival] = []
        for flight in flights:
            with self.times.measure_wait():
                result = await flight.exchange.wait()
            self.flights.remove(flight)
            self.sent_nbytes += flight.exchange.channel.sent_nbytes
            self.times.record_exchange(flight)
            await self._update_reducer(flight, result)
            metadata = self._metadata.layout.unpack(result.metadata)
            if metadata.num_nonfinite and self._on_nonfinite == "stop":
                quantity = "gradient" if self._should_check_gradients else "loss"
                raise NonFinite(flight.step, metadata.nonfinite_ranks, metadata.num_nonfinite, quantity)
            arrivals.append(Arrival(flight, result, metadata))
        requests = [
            (flight.unit, flight.zero_places)
            for flight, _, metadata in arrivals
            if metadata.has_unused_changes
        ]
        if requests:
            with self.times.measure_wait():
                self.sent_nbytes += await self.unused.exchange_zero_places(
                    self._runtime, flights[0].round_number, requests
                )
        for flight in flights:
            self.unused.update(flight.unit)
        return arrivals

    async def _update_reducer(self, flight: Flight, reduced: ReduceResult) -> None:
        is_last = reduced.update_all_states is not None and all(
            candidate.step != flight.step for candidate in self.flights
        )
        if reduced.update_state is not None or is_last:
            # What was launched before encodes first; its messages go on while this thread learns.
            await self._runtime.launch(_await_earlier())
            self.reducer_states.update(flight.unit.number, reduced, is_last=is_last)

    async def _apply_arrivals(self, arrivals: Sequence[Arrival]) -> bool:
        """Applies one step's results; returns True if they changed anything."""
        is_skipped = self._on_nonfinite == "skip" and any(
            arrival.metadata.num_nonfinite for arrival in arrivals
        )
        has_merged = False
        for extension in self._extensions:
            extension.handle_arrivals(arrivals)
        for flight, result, metadata in arrivals:
            is_valid = not (is_skipped or (metadata.num_nonfinite and result.weight == 0))
            has_merged |= is_valid
            self._merge_states.apply(flight, result.mean if is_valid else None)
            if is_valid and flight.merge.optimizer_state == "averaged":
                await self._average_moments(flight)
        return has_merged

    async def _average_moments(self, flight: Flight) -> None:
        assert self._optimizer is not None
        tensors = [
            to_local(moment)
            for bucket in flight.unit.buckets
            for moment in collect_moments(self._optimizer, bucket.parameters)
        ]
        if tensors and self._runtime.comm.size > 1:
            number = Purpose.MOMENTS.build_exchange_id(flight.round_number)
            with self.times.measure_wait():
                self.sent_nbytes += await average_tensors(self._runtime, tensors, number, flight.unit.number)

    async def _report_arrival(self, arrival: Arrival) -> None:
        """Reports one step's exchanges to the schedule and to the outcome of this step."""
        flight, result, metadata = arrival
        outcome = self._plan.outcome
        outcome.num_nonfinite += metadata.num_nonfinite
        outcome.num_exhausted = metadata.num_exhausted
        loss = metadata.loss / result.weight if result.weight else 0.0
        sums = metadata.sums if flight.is_first_of_step else {}
        for name, value in sums.items():
            outcome.sums[name] = outcome.sums.get(name, 0.0) + value
        stats = SharedStats(flight.step, loss, result.weight, sums, learning_rate=self._plan.learning_rate)
        if flight.decider_times is not None:
            with self.times.measure_wait():
                decision = await flight.decider_times
            with wrap_decision_errors(decision.name, decision.step):
                stats = replace(stats, **StepTimer.from_json(decision.value))
        outcome.stats = stats
        self._schedule_state = self._schedule.update_state(self._schedule_state, stats)


async def _await_earlier() -> None:
    """Completes once every exchange launched earlier has reached its first await."""
