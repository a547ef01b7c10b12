"""Training coroutine of one replica, for the wall clock and for virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from farflung.comm import Purpose
from farflung.config import Training
from farflung.data import Holding
from farflung.engine.accumulated import AccumulatedGradient
from farflung.engine.averaging import average, sum_over_ranks
from farflung.engine.buckets import GradientBuckets
from farflung.engine.engine import Engine
from farflung.engine.extension import Extension, StepResult
from farflung.engine.flight import zero_contributions
from farflung.engine.forward import ForwardWatcher, trace_forward
from farflung.engine.metadata import StepMetadata
from farflung.engine.placement import HOST, move_batch, synchronize
from farflung.engine.plan import StepOutcome
from farflung.errors import ConfigError, StateOutdated
from farflung.loop.batch_loader import BatchLoader
from farflung.loop.checkpoint import Checkpoints
from farflung.loop.checkpointer import BackgroundTasks, Checkpointer
from farflung.loop.components import Components
from farflung.loop.evaluation import Score, apply_consensus, evaluate
from farflung.loop.extensions import ExchangeTrace, JoinHandler, MetadataExtension
from farflung.loop.lockstep import Lockstep
from farflung.loop.optimizers import set_rate
from farflung.loop.stopping import STOP, StopAgreement
from farflung.loop.summary import Leg, Summary, TimeSplit
from farflung.moments import collect_moments
from farflung.sampling.scoring import score_batch
from farflung.seeding import RandomState, create_generator, derive_seed
from farflung.state_trees import pack_tree, unpack_tree
from farflung.tasks import Pending
from farflung.telemetry import Telemetry
from farflung.types import (
    Batch,
    Cost,
    Dataset,
    Decision,
    ElasticMembership,
    ForwardTrace,
    Json,
    RateSchedule,
    Reducer,
    Runtime,
    SampleIds,
    Sampler,
    Samples,
    Schedule,
    ScoreKind,
    SentBytes,
    State,
    StreamContext,
    TensorSpec,
    Workload,
)

__all__ = ["Replica"]


def _has_no_stop_request() -> bool:
    return False


@dataclass(slots=True)
class Replica:
    """Replica of a run: model, optimizer, data and state of one rank.

    Args:
      runtime: Clock, computation, messages and decisions of the replica.
      workload: Model, loss and data sets to train.
      training: Length and settings of the run.
      components: Schedule, reducer, sampler, stream and sharing.
      telemetry: Receiver of the events.
      checkpoints: Checkpoint files; ``None``: none are written.
      is_stop_requested: Returns True once this replica is asked to stop; all replicas then stop after one step.
      share: Training samples that this replica alone draws from; ``None``: all share passes over the whole set.
      should_trace: Emits an event for each exchange.
      device: Device of model, gradients and optimizer.

    Raises:
      ConfigError: Components or settings are incompatible.
    """

    runtime: Runtime
    workload: Workload
    training: Training
    components: Components
    telemetry: Telemetry
    checkpoints: Checkpoints | None = None
    is_stop_requested: Callable[[], bool] = _has_no_stop_request
    share: SampleIds | None = None
    should_trace: bool = False
    device: torch.device = HOST
    lockstep: Lockstep | None = field(init=False, default=None)
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    completed_steps: int = field(init=False, default=0)
    time_s: TimeSplit = field(init=False, default_factory=TimeSplit)
    _train_set: Dataset = field(init=False)
    _test_set: Dataset = field(init=False)
    holding: Holding | None = field(init=False, default=None)
    _source: Samples = field(init=False)
    batch_loader: BatchLoader = field(init=False)
    accumulated_gradient: AccumulatedGradient = field(init=False)
    _extensions: list[Extension] = field(init=False, default_factory=list)
    _random: RandomState = field(init=False)
    buckets: GradientBuckets = field(init=False)
    engine: Engine = field(init=False)
    _stop_agreement: StopAgreement = field(init=False)
    _rate_schedule: RateSchedule = field(init=False)
    _use_order: Sequence[int] = field(init=False, default=())
    """Buckets in the order of their first use, if updates are deferred."""
    _watcher: ForwardWatcher | None = field(init=False, default=None)
    """Watcher of the last forward pass, if updates are deferred."""
    _rate: float | None = field(init=False, default=None)
    """Learning rate of this step, if the rate changes."""
    _num_samples: int = field(init=False, default=0)
    _begin_s: float = field(init=False, default=0.0)
    """Time at which this leg of the run began."""
    _first_step: int = field(init=False, default=0)
    """Number of steps completed before this leg."""
    _earlier_legs: Leg = field(init=False, default_factory=lambda: Leg(0, 0.0, TimeSplit()))
    """Time of earlier legs up to the checkpoint that was resumed."""
    _dropped_states: list[Json] | None = field(init=False, default=None)
    """States of the recipe before this leg that were dropped; ``None`` if the recipe has not changed."""
    _earlier_sent: Mapping[str, list[int]] = field(init=False, default_factory=dict)
    """Bytes that had been sent when the resumed checkpoint was written."""
    _background: BackgroundTasks = field(init=False)
    _checkpointer: Checkpointer = field(init=False)

    def __post_init__(self) -> None:
        comm, seed = self.runtime.comm, self.training.seed
        self._train_set, self._test_set = self.workload.load_datasets()
        if comm.size > len(self._train_set):
            raise ConfigError(
                f"{comm.size} replicas for {len(self._train_set)} training samples of {self.workload.name}: "
                "use at most one replica per sample"
            )
        share_of_mean: float | None = None
        if self.share is not None:
            if not len(self.share):
                raise ConfigError(f"replica {comm.rank} has no training sample: choose another --partition")
            share_of_mean = len(self.share) * comm.size / len(self._train_set)
            self._train_set = self.holding = Holding(self._train_set, self.share)
        components = self.components
        if components.sampler.needs_scores and components.stream.has_random_access and self.share is None:
            raise ConfigError(
                f"sampler {type(components.sampler).__name__} picks from a replica's own samples: give each a share "
                "(--partition iid)"
            )
        self._source = components.stream.start(
            StreamContext(
                self._train_set,
                comm.rank,
                comm.size,
                self.share is None,
                self.training.batch_size,
                seed,
                self.runtime.decide_locally,
            )
        )
        self.model = self.workload.build_model(create_generator(seed, "model")).to(self.device)
        self.optimizer = self.training.make_optimizer(self.model.parameters())
        self._rate_schedule = self.training.make_rate_schedule()
        self._random = RandomState.from_workload(
            self.workload, derive_seed(seed, "replica", comm.rank), self.device
        )
        self.buckets = GradientBuckets(self.model.named_parameters(), components.bucket_nbytes)
        self._stop_agreement = StopAgreement(self.runtime, self.is_stop_requested)
        trace = self._trace_forward(self.workload) if components.schedule.has_deferred_updates else None
        self._use_order = () if trace is None else trace.order
        self.engine = Engine(
            self.runtime,
            self.buckets,
            components.reducer,
            components.schedule,
            seed=seed,
            optimizer=self.optimizer,
            on_nonfinite=self.training.on_nonfinite,
            steps=self.training.steps,
            trace=trace,
        )
        self.engine.restart()
        self.accumulated_gradient = AccumulatedGradient(self.model)
        self.batch_loader = BatchLoader(
            self.runtime,
            components,
            self._source,
            len(self._train_set),
            share_of_mean,
            self.training.batch_size,
            self._random,
        )
        self._extensions = [
            MetadataExtension(components),
            JoinHandler(self.runtime, self.telemetry, self._offer_state),
        ]
        for part in (components.sharing, components.schedule, components.sampler):
            self._extensions += part.build_extensions(self)
        if self.should_trace:
            self._extensions.append(ExchangeTrace(self.telemetry, self.runtime))
        self.engine.extend(*self._extensions)
        self._background = BackgroundTasks(self.runtime, self.engine, self.time_s)
        self._checkpointer = Checkpointer(
            self.workload.name,
            self.training,
            self.model,
            self.optimizer,
            self._random,
            self.batch_loader,
            self.engine,
            self._extensions,
            self.share,
        )
        if components.has_rate_scaling and not components.schedule.is_gradient_only:
            raise ConfigError(
                f"--scaling: under {type(self.components.schedule).__name__} the optimizer steps before it is "
                f"known how "
                "many samples all replicas took: leave it out, or choose another --schedule"
            )

    @property
    def schedule(self) -> Schedule:
        return self.components.schedule

    @property
    def reducer(self) -> Reducer:
        return self.components.reducer

    @property
    def sampler(self) -> Sampler:
        return self.components.sampler

    def request_stop(self) -> None:
        """Requests all replicas to stop, before the end of this step; callable from any thread."""
        self._stop_agreement.request_stop()

    @property
    def bucket_specs(self) -> list[TensorSpec]:
        """Tensor specs of the gradient buckets."""
        return [bucket.spec for bucket in self.buckets.buckets]

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes sent so far in exchanges that have ended."""
        return (
            self.engine.sent_nbytes
            + self.batch_loader.sent_nbytes
            + sum(extension.sent_nbytes for extension in self._extensions)
        )

    # --- whole run --------------------------------------------------------------------------------------------

    async def run(self) -> Summary:
        """Trains to the last step, or until a replica is asked to stop, and closes the stream.

        Raises:
          NonFinite: A loss is not finite; raised at the same step on all replicas.
          RunLost: A replica was lost.
        """
        try:
            return await self._run()
        finally:
            self.components.stream.close()

    async def _run(self) -> Summary:
        if self.runtime.elastic is not None and self.runtime.elastic.is_joining:
            self._stop_agreement.listen(-1)
            await self._join()
        stop_step = self.runtime.decisions.find_replayed_step(STOP, self.completed_steps)
        if stop_step is not None:
            self._stop_agreement.replay(stop_step)
        self._stop_agreement.listen(self.completed_steps)
        begin = self._begin_s = self.runtime.read_clock()
        self._first_step = self.completed_steps
        is_stopped, pending_score = False, None
        fields: dict[str, Json] = {} if self.device == HOST else {"device": str(self.device)}
        if self._dropped_states is not None:
            fields["dropped"] = self._dropped_states
        self.telemetry.emit("begin", t=begin, step=self.completed_steps, steps=self.training.steps, **fields)
        while self.completed_steps < self.training.steps and not is_stopped:
            await self.step()
            is_finished = self.completed_steps == self.training.steps
            is_stopped = not is_finished and await self._stop_agreement.is_last(self.completed_steps - 1)
            if is_stopped and self.runtime.comm.rank == 0:
                self.runtime.decisions.record(Decision(STOP, self.completed_steps - 1, True, timing=False))
            should_save = (
                is_stopped or is_finished or _is_due(self.completed_steps, self.training.checkpoint_every)
            )
            should_evaluate = is_finished or _is_due(self.completed_steps, self.training.evaluate_every)
            if self.schedule.has_deferred_updates and (should_save or should_evaluate):
                await self._settle()
            if should_save:
                await self.save()
            if is_finished:
                await self.flush()
            if should_evaluate:
                pending_score = await self._start_evaluation()
        if pending_score is None and not is_stopped:
            pending_score = await self._start_evaluation()
        for extension in self._extensions:
            await extension.finish()
        end, leg = self.runtime.read_clock(), self._build_leg()
        total = leg.add_earlier(self._earlier_legs)
        await self._background.wait()
        score = None if pending_score is None else pending_score.result()
        sent = await self.runtime.launch(self._count_sent())
        summary = Summary(
            steps=self.completed_steps,
            samples=self._num_samples,
            final_accuracy=None if score is None else score.metric,
            final_loss=None if score is None else score.loss,
            bytes_sent=self.sent_nbytes,
            sent=sent,
            schedule_nbytes=self.engine.peak_nbytes,
            duration_s=total.duration_s,
            time_s=total.time_s,
            is_stopped=is_stopped,
            reducer=self.engine.reducer_states.report(),
            sampling=self.components.sampler.report(),
            last_leg=leg if leg.from_step else None,
        )
        self.telemetry.emit("end", t=end, **summary.to_json())
        return summary

    async def _count_sent(self) -> dict[str, list[int]]:
        """Returns the bytes sent to each rank so far, by kind; call by ``runtime.launch``: no exchange may proceed.

        Excludes exchanges in flight, as :attr:`sent_nbytes` does, and messages that measured the network before the
        run.
        """
        sent = SentBytes(self.runtime.comm.size, self._earlier_sent)
        sent.add_all(self.runtime.comm.sent_bytes)
        if self.runtime.untimed is not None:
            sent.add_all(self.runtime.untimed.comm.sent_bytes)
        in_flight = [flight.exchange.channel for flight in self.engine.flights]
        for extension in self._extensions:
            in_flight += extension.channels
        for channel in in_flight:
            sent.add(channel.kind, -channel.sent_counts)
        return {kind: counts for kind, counts in sent.to_json().items() if kind != Purpose.MEASURE.kind}

    def _build_leg(self) -> Leg:
        """Builds the time split of this leg so far.

        The remainder is reported only if it exceeds rounding error. The parts of a step are a dozen differences and
        sums of times, each off by at most half of the clock's last place.
        """
        end, times = self.runtime.read_clock(), self.time_s
        duration_s, steps = end - self._begin_s, self.completed_steps - self._first_step
        accounted_s = math.fsum(
            (times.compute, times.exposed_communication, times.data_wait, times.scoring, times.evaluation)
        )
        other_s, rounding_s = duration_s - accounted_s, 16 * (steps + 1) * math.ulp(end)
        return Leg(
            self._first_step, duration_s, replace(times, other=other_s if abs(other_s) > rounding_s else 0.0)
        )

    async def step(self) -> StepOutcome:
        """Runs one step: batch, forward, backward with its exchanges, merge, optimizer, telemetry."""
        read_clock, step = self.runtime.read_clock, self.completed_steps
        begin_s = read_clock()
        for extension in self._extensions:
            await extension.prepare_step(step)
        if not self.schedule.has_deferred_updates:
            self._set_rate(step)
        waited_before_s = self.engine.times.waited_s
        metadata, fetched_s = await self._compute(step)
        computed_s, use_wait_s = read_clock(), self.engine.times.waited_s - waited_before_s
        for extension in self._extensions:
            await extension.use_wait(step)
        scored_s = read_clock() if self.components.sampler.needs_scores else computed_s
        has_gradient = not self.schedule.has_deferred_updates and await self.engine.merge_gradients()
        merged_s = read_clock()
        if has_gradient:
            self._scale_rate(step)
            await self.runtime.compute(Cost("optimizer", 0), self.update)
        self.buckets.clear()
        updated_s = read_clock()
        outcome = await self.engine.finish_round(has_updated=has_gradient)
        waited_s = self.engine.times.last_arrival_s - computed_s
        result = StepResult(step, metadata.samples, outcome, computed_s - fetched_s, waited_s)
        if not self.components.has_equal_batch_sizes:
            result.report["batch"] = metadata.samples
        result.report.update(self.batch_loader.commit(step))
        for extension in self._extensions:
            await extension.finish_step(result)
        split = TimeSplit(
            (computed_s - fetched_s - use_wait_s) + (updated_s - merged_s),
            use_wait_s + (merged_s - scored_s) + (read_clock() - updated_s),
            fetched_s - begin_s,
            scoring=scored_s - computed_s,
        )
        if self.runtime.elastic is not None:
            self._num_samples += metadata.samples * self.runtime.elastic.count_batches(step)
        elif self.components.has_equal_batch_sizes:
            self._num_samples += metadata.samples * self.runtime.comm.size
        self._add_reported_samples(outcome)
        self._record_step(metadata, result, split, begin_s)
        self.completed_steps += 1
        return outcome

    async def _compute(self, step: int) -> tuple[StepMetadata, float]:
        """Draws a batch and runs forward and backward; returns metadata and the time when the samples had arrived."""
        batch, weights = await self.batch_loader.load_batch(step)
        fetched_s = self.runtime.read_clock()
        with ExitStack() as stack:
            for extension in self._extensions:
                stack.enter_context(extension.compute_context(step))
            loss, metadata = await self._run_forward(step, batch, weights)
            self.engine.begin_round(step, metadata)
            self.accumulated_gradient.load_gradients(len(batch))
            await self.runtime.run_backward(
                Cost("backward", len(batch), self.buckets.numels),
                lambda ready: self.backward(loss, ready),
                self.engine.handle_bucket,
            )
        return metadata, fetched_s

    def _trace_forward(self, workload: Workload) -> ForwardTrace:
        """Traces a forward pass of a new model, on the first two samples of the training set."""
        seed = self.training.seed
        with RandomState.preserve_globals():
            RandomState(derive_seed(seed, "trace"), self.device).install()
            model = workload.build_model(create_generator(seed, "model")).to(self.device).train()
            data, _ = workload.load_datasets()
            batch = move_batch(data.take(torch.arange(min(2, len(data))), train=True), self.device)
            buckets = GradientBuckets(model.named_parameters(), self.components.bucket_nbytes)
            return trace_forward(buckets, lambda: workload.compute_losses(model, batch))

    async def _run_forward(
        self, step: int, batch: Batch, weights: Tensor | None
    ) -> tuple[Tensor, StepMetadata]:
        """Runs the forward pass; deferred updates are applied before their buckets are used."""
        cost = Cost("forward", len(batch), self.buckets.numels)
        if not self.schedule.has_deferred_updates:
            return await self.runtime.compute(cost, lambda: self.compute_scaled_loss(batch, weights))

        def run(use: Callable[[int], None]) -> tuple[Tensor, StepMetadata]:
            def check_use(index: int) -> None:
                watcher.check_order(step, self._use_order)
                use(index)

            self._watcher = watcher = ForwardWatcher(self.buckets, check_use)
            with watcher:
                return self.compute_scaled_loss(batch, weights)

        result = await self.runtime.run_forward(cost, self._use_order, run, self._update_bucket)
        await self._settle()
        self._set_rate(step)
        return result

    async def _update_bucket(self, index: int) -> None:
        """Waits for a bucket's mean and steps the optimizer on it."""
        if await self.engine.merge_gradients(index):
            share = self.buckets.numels[index] / sum(self.buckets.numels)
            await self.runtime.compute(Cost("optimizer", 0, share=share), self.update)
        self.buckets.clear()

    async def _settle(self) -> None:
        """Applies deferred updates that no forward pass has awaited."""
        if await self.engine.merge_gradients():
            await self.runtime.compute(Cost("optimizer", 0), self.update)
        self.buckets.clear()

    async def _join(self) -> None:
        """Loads a snapshot of the run, and follows its steps until this replica becomes a member."""
        elastic, is_member, first_step, begin_s = self.runtime.elastic, False, 0, self.runtime.read_clock()
        assert elastic is not None
        while not is_member:
            with suppress(StateOutdated):
                shared_state, optimizer, replica_state = map(unpack_tree, await elastic.receive_state())
                shared_state["step"] = replica_state.pop("step")
                shared_state["model"] = {**self.model.state_dict(), **shared_state["model"]}
                self._checkpointer.restore_states(
                    shared_state, {**optimizer, **replica_state}, "the state of the run", self._restore_counts
                )
                self.engine.restart(from_anchors=True)
                first_step, received_s = self.completed_steps, self.runtime.read_clock()
                while await elastic.should_follow(self.completed_steps):
                    await self._follow(elastic)
                is_member = True
        self.engine.restart(from_anchors=True)
        end_s = self.runtime.read_clock()
        self.telemetry.emit(
            "joined",
            t=end_s,
            step=self.completed_steps,
            duration_s=end_s - begin_s,
            state_s=received_s - begin_s,
            followed=self.completed_steps - first_step,
            nbytes=elastic.join_nbytes,
        )

    async def _follow(self, elastic: ElasticMembership) -> None:
        """Carries out a step from the results of its exchanges, without a contribution of this replica."""
        step = self.completed_steps
        self._set_rate(step)
        samples = await self.batch_loader.pick(step)
        self.engine.begin_round(step, StepMetadata(math.nan, 0.0))
        self.buckets.run_backward(None, self.engine.handle_bucket)
        has_gradient = await self.engine.merge_gradients()
        if has_gradient:
            self._scale_rate(step)
            await self.runtime.compute(Cost("optimizer", 0), self.update)
        self.buckets.clear()
        outcome = await self.engine.finish_round(has_updated=has_gradient)
        self.batch_loader.commit(step)
        self._num_samples += samples * elastic.count_batches(step)
        self._add_reported_samples(outcome)
        self.completed_steps += 1

    async def _offer_state(self, elastic: ElasticMembership, step: int) -> None:
        """Publishes the state of the run for replicas that join it."""
        exchanges = await self.runtime.launch(self.engine.state_dict())
        counts: State = {"samples": self._num_samples, "sent": {}, "time": Leg(0, 0.0, TimeSplit()).to_json()}
        shared_state, replica_state = self._checkpointer.build_states(step, exchanges, counts)
        del replica_state["random"]
        replica_state["parameters"] = {}
        replica_state["exchanges"] = zero_contributions(replica_state["exchanges"])
        replica_state["sampler"] = {
            **replica_state["sampler"],
            "latest": self.components.sampler.get_joiner_state(),
        }
        anchors = self.engine.get_anchor_parameters() or {}  # these are in the state of exchanges too
        shared_state["model"] = {name: t for name, t in shared_state["model"].items() if name not in anchors}
        replica_state["step"] = shared_state.pop("step")  # the remainder is equal in blocks of local steps
        optimizer = {"optimizer": replica_state.pop("optimizer")}
        await elastic.publish_state(
            step, [pack_tree(part) for part in (shared_state, optimizer, replica_state)]
        )

    async def flush(self) -> None:
        """Merges exchanges in flight as later steps would; afterwards all replicas are equal.

        A mean is applied at the learning rate of the step that it is due at. Past the last step, a rate that decays
        to 0 is 0.
        """

        async def update(step: int) -> None:
            self._set_rate(step)
            self._scale_rate(step)
            await self.runtime.compute(Cost("optimizer", 0), self.update)

        self._add_reported_samples(await self.engine.flush(update))

    def _add_reported_samples(self, outcome: StepOutcome) -> None:
        """Adds the samples of all replicas in the reported steps, if batch sizes differ."""
        if not self.components.has_equal_batch_sizes:
            self._num_samples += int(outcome.sums.get("samples", 0))

    def _set_rate(self, step: int, weight_share: float = 1.0) -> None:
        self._rate = set_rate(
            self.optimizer,
            self.training,
            self._rate_schedule,
            step=step,
            samples=self._num_samples,
            size=self._initial_size,
            scale=self.components.scaling.compute_factor(weight_share)
            if self.components.has_rate_scaling
            else None,
        )

    def _scale_rate(self, step: int) -> None:
        """Sets a step's learning rate by the weight of the gradient that the optimizer is about to apply."""
        if self.components.has_rate_scaling:
            self._set_rate(step, self.engine.merged_weight / self._initial_size)

    @property
    def _initial_size(self) -> int:
        """Number of replicas at the start of the run."""
        elastic = self.runtime.elastic
        return self.runtime.comm.size if elastic is None else len(elastic.changes[0].ranks)

    # --- parts of a step --------------------------------------------------------------------------------------

    def compute_scaled_loss(self, batch: Batch, weights: Tensor | None) -> tuple[Tensor, StepMetadata]:
        """Returns the loss to differentiate, scaled by the batch's share of accumulated samples, and the metadata."""
        self.model.train()
        self._random.install()
        losses = self.workload.compute_losses(self.model, move_batch(batch, self.device))
        loss = losses.mean() if weights is None else (losses * weights.to(self.device)).mean()
        share = self.accumulated_gradient.compute_share(len(batch))
        weight = self.batch_loader.compute_weight(len(batch))
        value = float(loss.detach())
        if share == 1.0:
            return loss, StepMetadata(value, weight, len(batch))
        return loss * share, StepMetadata(value, weight / share, len(batch))

    def build_scorer(self, kind: ScoreKind) -> Callable[[SampleIds], Tensor]:
        """Builds a function that scores samples under the current model and its own random state."""
        seed = derive_seed(self.training.seed, "score", self.completed_steps, self.runtime.comm.rank)
        random = RandomState.from_workload(self.workload, seed, self.device)

        def score(ids: SampleIds) -> Tensor:
            random.install()
            batch = self._source.prepare(self._source.get_rows(ids), train=False)
            return score_batch(self.workload, self.model, move_batch(batch, self.device), kind)

        return score

    def build_loss_fn(self) -> Callable[[SampleIds], Tensor]:
        """Builds a function that computes losses of samples outside the batch, under its own random state."""
        seed = derive_seed(self.training.seed, "fill", self.completed_steps, self.runtime.comm.rank)
        random = RandomState.from_workload(self.workload, seed, self.device)

        def compute_losses(ids: SampleIds) -> Tensor:
            random.install()
            batch = self._source.prepare(self._source.get_rows(ids), train=True)
            self.model.train()
            return self.workload.compute_losses(self.model, move_batch(batch, self.device))

        return compute_losses

    def backward(self, loss: Tensor, ready: Callable[[int], None]) -> None:
        """Runs autograd, and calls ``ready`` for each bucket as it fills."""
        self._random.install()
        self.buckets.run_backward(loss, ready)
        if self._watcher is not None:
            self._watcher.check_gradients(self.completed_steps)
        synchronize(self.device)

    def update(self) -> None:
        """Clips the merged gradient if requested, and steps the optimizer, once a step if in lockstep."""
        parameters: Iterable[nn.Parameter] = self.model.parameters()
        if self.lockstep is not None:
            parameters = self.lockstep.take_gradients(parameters, self.completed_steps)
            if not parameters:
                return
        if self.training.clip_norm:
            nn.utils.clip_grad_norm_(parameters, self.training.clip_norm)
        self.optimizer.step()

    async def evaluate(self) -> Score:
        """Returns loss and metric on the test set, equal on all replicas; each replica scores a share."""
        return await (await self._start_evaluation())

    async def _start_evaluation(self) -> Pending[Score]:
        """Starts an evaluation; in an untimed runtime, training may continue during it."""
        step, nbytes, is_concurrent = self.completed_steps, self.sent_nbytes, self.runtime.untimed is not None

        def run_evaluation(runtime: Runtime) -> Coroutine[Pending[Any], None, Score]:
            return evaluate(
                runtime,
                self.workload,
                self.model,
                self._test_set,
                step,
                consensus=self.engine.get_consensus_parameters(),
                is_concurrent=is_concurrent,
                seed=self.training.seed,
                device=self.device,
            )

        def report_score(score: Score, **times: Json) -> None:
            results: dict[str, Json] = {"accuracy": score.metric, "loss": score.loss, "bytes_sent": nbytes}
            self.telemetry.emit("evaluation", **times, step=step, **results)

        return await self._background.run(run_evaluation, report_score)

    async def get_consensus_state(self) -> State:
        """Returns the evaluated state, averaged where replicas differ; to be called once, after the run."""
        # The number after the last evaluation's, since exchange numbers are unique.
        async with apply_consensus(
            self.runtime, self.model, self.completed_steps + 1, self.engine.get_consensus_parameters()
        ):
            return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    # --- checkpoints ------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """Starts a checkpoint if configured; all replicas must call it, and it is complete when all have written."""
        if self.checkpoints is None:
            return

        async def snapshot() -> tuple[State, dict[str, list[int]]]:
            return await self.engine.state_dict(), await self._count_sent()

        exchanges, sent_counts = await self.runtime.launch(snapshot())
        counts = self._build_counts(sent_counts)
        checkpoints = self.checkpoints
        if self.runtime.elastic is not None:
            ranks = await _gather_present_ranks(self.runtime, self.completed_steps)
            checkpoints = checkpoints.with_ranks(ranks.index(self.runtime.comm.rank), len(ranks))
        await self._checkpointer.save(
            checkpoints, self.completed_steps, exchanges, counts, self._background, self.telemetry
        )

    def _build_counts(self, sent: Mapping[str, list[int]]) -> State:
        """Builds the counts of a checkpoint, given the bytes sent to each rank by kind."""
        total_time = self._build_leg().add_earlier(self._earlier_legs).to_json()
        return {"samples": self._num_samples, "sent": sent, "time": total_time}

    def resume(self, step: int, states: tuple[State, State] | None = None) -> None:
        """Continues from the checkpoint of ``step``.

        Args:
          step: Number of completed steps.
          states: Trees of the checkpoint, if they are loaded already.

        Raises:
          CheckpointError: The checkpoint is damaged, or belongs to another model or share of the data.
        """
        assert self.checkpoints is not None
        shared_state, replica_state = states or self.checkpoints.load(step)
        origin = f"{self.checkpoints.folder}, step {step}"
        self._checkpointer.restore_states(shared_state, replica_state, origin, self._restore_counts)

    async def take_over(self, predecessor: Replica) -> None:
        """Continues from a resumed replica of the same rank with another recipe; afterwards all replicas are equal.

        Its exchanges in flight are merged as at the end of a run, and moments of the optimizer are averaged if its
        replicas took local steps. Event ``begin`` names the states that are dropped.
        """
        predecessor._begin_s, predecessor._first_step = self.runtime.read_clock(), predecessor.completed_steps
        await predecessor.flush()
        if not predecessor.schedule.is_gradient_only:
            moments = collect_moments(predecessor.optimizer, predecessor.buckets.parameters)
            number = predecessor.engine.round_number
            await average(self.runtime, moments, number, Purpose.MOMENTS)
        exchanges = await self.runtime.launch(predecessor.engine.state_dict())
        counts = predecessor._build_counts(
            predecessor._earlier_sent
        )  # what the flush sent counts in this leg
        states = predecessor._checkpointer.build_states(predecessor.completed_steps, exchanges, counts)
        self._dropped_states = self._checkpointer.take_over(*states, self._restore_counts)
        predecessor.components.stream.close()

    def _restore_counts(self, counts: State) -> None:
        self.completed_steps, self._num_samples = counts["step"], counts["samples"]
        self._earlier_sent = counts.get("sent", {})
        self._earlier_legs = Leg.from_state(counts["time"])

    def _record_step(
        self, metadata: StepMetadata, result: StepResult, split: TimeSplit, begin: float
    ) -> None:
        """Adds a step to the times of the run, and emits its event."""
        total, outcome = self.time_s, result.outcome
        total.compute += split.compute
        total.exposed_communication += split.exposed_communication
        total.data_wait += split.data_wait
        total.scoring += split.scoring
        end = self.runtime.read_clock()
        self.telemetry.emit(
            "step",
            t=end,
            step=self.completed_steps,
            loss=metadata.loss if metadata.is_finite else None,
            nonfinite=outcome.num_nonfinite,
            mean_loss=None if outcome.stats is None else outcome.stats.loss,
            in_flight=len({flight.step for flight in self.engine.flights}),
            samples=self._num_samples,
            **result.report,
            bytes_sent=self.sent_nbytes,
            duration_s=end - begin,
            compute_s=split.compute,
            exposed_s=split.exposed_communication,
            data_s=split.data_wait,
            **({"scoring_s": split.scoring} if self.components.sampler.needs_scores else {}),
            **({} if self._rate is None else {"learning_rate": self._rate}),
        )


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


async def _gather_present_ranks(runtime: Runtime, step: int) -> list[int]:
    """Returns the ranks of all replicas that take part in a checkpoint, equal on all; lost ranks are excluded."""
    presence = torch.zeros(runtime.comm.size, dtype=torch.float64)
    presence[runtime.comm.rank] = 1
    empty = torch.empty(0)
    _, totals = await sum_over_ranks(runtime, empty, presence, step, part=1, purpose=Purpose.CHECKPOINT)
    return [int(rank) for rank in totals.nonzero()]
