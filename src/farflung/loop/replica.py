"""The replica: one coroutine that trains, the same on the wall clock and in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from farflung.comm import Purpose
from farflung.config import Training
from farflung.data import Holding
from farflung.engine.accumulated import AccumulatedGradient
from farflung.engine.averaging import sum_everywhere
from farflung.engine.buckets import GradientBuckets
from farflung.engine.engine import Engine
from farflung.engine.extension import Extension, StepResult
from farflung.engine.flight import without_contributions
from farflung.engine.metadata import StepMetadata
from farflung.engine.placement import HOST, batch_on, wait_for
from farflung.engine.plan import StepOutcome
from farflung.errors import ConfigError, StateOutdated
from farflung.loop.checkpoint import Checkpoints
from farflung.loop.drawing import Drawing
from farflung.loop.evaluation import Score, averaged, evaluate
from farflung.loop.extensions import Joins, StepNumbers, Trace
from farflung.loop.keeping import BackgroundTasks, Keeping
from farflung.loop.lockstep import Lockstep
from farflung.loop.members import Parts
from farflung.loop.optimizers import set_rate
from farflung.loop.stopping import STOP, StopAgreement
from farflung.loop.summary import Leg, Summary, TimeSplit
from farflung.sampling.scoring import scores_of
from farflung.seeding import RandomState, derive, generator
from farflung.state_trees import pack_tree, unpack_tree
from farflung.tasks import Pending
from farflung.telemetry import Telemetry
from farflung.types import (
    Batch,
    Cost,
    Dataset,
    Decision,
    Elastic,
    Feed,
    Json,
    RateSchedule,
    Reducer,
    Runtime,
    SampleIds,
    Sampler,
    Samples,
    Schedule,
    ScoredBy,
    Sent,
    State,
    TensorSpec,
    Workload,
)

__all__ = ["Replica"]


def _never() -> bool:
    return False


@dataclass(slots=True)
class Replica:
    """One member of a run.

    Args:
      runtime: the world.
      workload: what is trained.
      training: for how long and with what settings.
      parts: with which members of the families.
      telemetry: where events go.
      checkpoints: where state is kept, if it is.
      stop_asked: whether this replica was asked to stop; then all stop after the same step.
      share: the training samples that this replica draws from, alone and in passes of its own; ``None``: all
        replicas draw from the whole set, in passes over it that they share.
      trace: whether to tell of every exchange.
      device: where model, gradients and optimizer are; samples, random state and checkpoints come to it.

    Raises:
      ConfigError: parts or settings that do not go together.
    """

    runtime: Runtime
    workload: Workload
    training: Training
    parts: Parts
    telemetry: Telemetry
    checkpoints: Checkpoints | None = None
    stop_asked: Callable[[], bool] = _never
    share: SampleIds | None = None
    trace: bool = False
    device: torch.device = HOST
    lockstep: Lockstep | None = field(init=False, default=None)
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    step_done: int = field(init=False, default=0)
    time_s: TimeSplit = field(init=False, default_factory=TimeSplit)
    _train: Dataset = field(init=False)
    _test: Dataset = field(init=False)
    held: Holding | None = field(init=False, default=None)
    _source: Samples = field(init=False)
    drawing: Drawing = field(init=False)
    accumulated: AccumulatedGradient = field(init=False)
    _extensions: list[Extension] = field(init=False, default_factory=list)
    _random: RandomState = field(init=False)
    buckets: GradientBuckets = field(init=False)
    engine: Engine = field(init=False)
    _stop: StopAgreement = field(init=False)
    _rates: RateSchedule = field(init=False)
    _rate: float | None = field(init=False, default=None)
    """The learning rate of this step, where it changes."""
    _samples: int = field(init=False, default=0)
    _begin: float = field(init=False, default=0.0)
    """When this leg of the run began."""
    _from_step: int = field(init=False, default=0)
    """The steps that had been done by then."""
    _before: Leg = field(init=False, default_factory=lambda: Leg(0, 0.0, TimeSplit()))
    """What earlier legs took up to the checkpoint that this one goes on from."""
    _sent_before: Mapping[str, list[int]] = field(init=False, default_factory=dict)
    """What had been sent when the checkpoint was written that this leg goes on from."""
    _background: BackgroundTasks = field(init=False)
    _keeping: Keeping = field(init=False)

    def __post_init__(self) -> None:
        comm, seed = self.runtime.comm, self.training.seed
        self._train, self._test = self.workload.datasets()
        if comm.size > len(self._train):
            raise ConfigError(
                f"{comm.size} replicas for {len(self._train)} training samples of {self.workload.name}: "
                "use at most one replica per sample"
            )
        share_of_mean: float | None = None
        if self.share is not None:
            if not len(self.share):
                raise ConfigError(f"replica {comm.rank} has no training sample: choose another --partition")
            share_of_mean = len(self.share) * comm.size / len(self._train)
            self._train = self.held = Holding(self._train, self.share)
        parts = self.parts
        if parts.sampler.needs_scores and parts.stream.everything and self.share is None:
            raise ConfigError(
                f"sampler {type(parts.sampler).__name__} picks from a replica's own samples: give each a share "
                "(--partition iid)"
            )
        self._source = parts.stream.open(
            Feed(
                self._train,
                comm.rank,
                comm.size,
                self.share is None,
                self.training.batch_size,
                seed,
                self.runtime.decide_own,
            )
        )
        self.model = self.workload.model(generator(seed, "model")).to(self.device)
        self.optimizer = self.training.make_optimizer(self.model.parameters())
        self._rates = self.training.make_rates()
        self._random = RandomState.of(self.workload, derive(seed, "replica", comm.rank), self.device)
        self.buckets = GradientBuckets(self.model.named_parameters(), parts.bucket_nbytes)
        self._stop = StopAgreement(self.runtime, self.stop_asked)
        self.engine = Engine(
            self.runtime,
            self.buckets,
            parts.reducer,
            parts.schedule,
            seed=seed,
            optimizer=self.optimizer,
            on_nonfinite=self.training.on_nonfinite,
            steps=self.training.steps,
        )
        self.accumulated = AccumulatedGradient(self.model)
        self.drawing = Drawing(
            self.runtime,
            parts,
            self._source,
            len(self._train),
            share_of_mean,
            self.training.batch_size,
            self._random,
        )
        self._extensions = [StepNumbers(parts), Joins(self.runtime, self.telemetry, self._offer_state)]
        for part in (parts.sharing, parts.schedule, parts.sampler):
            self._extensions += part.extensions(self)
        if self.trace:
            self._extensions.append(Trace(self.telemetry, self.runtime))
        self.engine.extend(*self._extensions)
        self._background = BackgroundTasks(self.runtime, self.engine, self.time_s)
        self._keeping = Keeping(
            self.workload.name,
            self.training,
            self.model,
            self.optimizer,
            self._random,
            self.drawing,
            self.engine,
            self._extensions,
            self.share,
        )
        if parts.scales and not parts.schedule.moves_gradients:
            raise ConfigError(
                f"--scaling: under {type(self.parts.schedule).__name__} the optimizer steps before it is known how "
                "many samples all replicas took: leave it out, or choose another --schedule"
            )

    @property
    def schedule(self) -> Schedule:
        """Schedule of the recipe."""
        return self.parts.schedule

    @property
    def reducer(self) -> Reducer:
        """Reducer of the recipe."""
        return self.parts.reducer

    @property
    def sampler(self) -> Sampler:
        """Sampler of the recipe."""
        return self.parts.sampler

    def ask_to_stop(self) -> None:
        """Asks all replicas to stop, without waiting for the end of a step; callable from any thread."""
        self._stop.ask()

    @property
    def bucket_specs(self) -> list[TensorSpec]:
        """Of the gradients in each bucket."""
        return [bucket.spec for bucket in self.buckets.buckets]

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes sent so far, in exchanges that are through."""
        return (
            self.engine.sent_nbytes
            + self.drawing.sent_nbytes
            + sum(extension.sent_nbytes for extension in self._extensions)
        )

    # --- the whole run ----------------------------------------------------------------------------------------

    async def run(self) -> Summary:
        """Trains to the end, or until a replica is asked to stop; closes the stream.

        Raises:
          NonFinite: a loss is not finite; raised at the same step on all replicas.
          RunLost: a replica was lost.
        """
        try:
            return await self._run()
        finally:
            self.parts.stream.close()

    async def _run(self) -> Summary:
        if self.runtime.elastic is not None and self.runtime.elastic.joins:
            self._stop.listen(-1)
            await self._join()
        last = self.runtime.decisions.first_replayed(STOP, self.step_done)
        if last is not None:
            self._stop.replay(last)
        self._stop.listen(self.step_done)
        begin = self._begin = self.runtime.now()
        self._from_step = self.step_done
        stopped, scored = False, None
        placed = {} if self.device == HOST else {"device": str(self.device)}
        self.telemetry.emit("begin", t=begin, step=self.step_done, steps=self.training.steps, **placed)
        while self.step_done < self.training.steps and not stopped:
            await self.step()
            finished = self.step_done == self.training.steps
            stopped = not finished and await self._stop.is_last(self.step_done - 1)
            if stopped and self.runtime.comm.rank == 0:
                self.runtime.decisions.record(Decision(STOP, self.step_done - 1, True, timing=False))
            if stopped or finished or _is_due(self.step_done, self.training.checkpoint_every):
                await self.save()
            if finished:
                await self.flush()
            if finished or _is_due(self.step_done, self.training.evaluate_every):
                scored = await self._evaluated()
        if scored is None and not stopped:
            scored = await self._evaluated()
        for extension in self._extensions:
            await extension.finish()
        end, leg = self.runtime.now(), self._leg()
        whole = leg.after(self._before)
        await self._background.end()
        score = None if scored is None else scored.result()
        sent = await self.runtime.launch(self._count_sent())
        summary = Summary(
            steps=self.step_done,
            samples=self._samples,
            final_accuracy=None if score is None else score.metric,
            final_loss=None if score is None else score.loss,
            bytes_sent=self.sent_nbytes,
            sent=sent,
            schedule_nbytes=self.engine.peak_nbytes,
            duration_s=whole.duration_s,
            time_s=whole.time_s,
            stopped=stopped,
            reducer=self.engine.reducer_states.report(),
            sampling=self.parts.sampler.report(),
            last_leg=leg if leg.from_step else None,
        )
        self.telemetry.emit("end", t=end, **summary.to_json())
        return summary

    async def _count_sent(self) -> dict[str, list[int]]:
        """Returns the bytes sent to each rank so far, by kind; to be launched, so that no exchange goes on meanwhile.

        As in :attr:`sent_nbytes`, exchanges in flight are not counted, nor are messages that measure the network before
        the run.
        """
        sent = Sent(self.runtime.comm.size, self._sent_before)
        sent.add_all(self.runtime.comm.sent)
        if self.runtime.off_clock is not None:
            sent.add_all(self.runtime.off_clock.comm.sent)
        in_flight = [flight.channel for flight in self.engine.flights]
        for extension in self._extensions:
            in_flight += extension.channels
        for channel in in_flight:
            sent.add(channel.kind, -channel.sent)
        return {kind: counts for kind, counts in sent.to_json().items() if kind != Purpose.MEASURE.kind}

    def _leg(self) -> Leg:
        """What this leg of the run has taken so far.

        What is left over after all parts is no part where it may be rounding alone: the parts of a step are a dozen
        differences and sums of times, none of which is off by more than half of the clock's last place.
        """
        end, spent = self.runtime.now(), self.time_s
        duration, steps = end - self._begin, self.step_done - self._from_step
        known = math.fsum(
            (spent.compute, spent.exposed_communication, spent.data_wait, spent.scoring, spent.evaluation)
        )
        left, rounding = duration - known, 16 * (steps + 1) * math.ulp(end)
        return Leg(self._from_step, duration, replace(spent, other=left if abs(left) > rounding else 0.0))

    async def step(self) -> StepOutcome:
        """One step: batch, forward, backward with its exchanges, merge, optimizer, telemetry."""
        now, step = self.runtime.now, self.step_done
        begin = now()
        for extension in self._extensions:
            await extension.before_step(step)
        self._set_rate(step)
        metadata, fetched = await self._compute(step)
        computed = now()
        for extension in self._extensions:
            await extension.while_waiting(step)
        scored = now() if self.parts.sampler.needs_scores else computed
        has_gradient = await self.engine.settle()
        merged = now()
        if has_gradient:
            self._scale_rate(step)
            await self.runtime.compute(Cost("optimizer", 0), self.update)
        self.buckets.clear()
        updated = now()
        outcome = await self.engine.finish(updated=has_gradient)
        waited_s = self.engine.times.arrived_s - computed
        result = StepResult(step, metadata.samples, outcome, computed - fetched, waited_s)
        if not self.parts.even:
            result.report["batch"] = metadata.samples
        result.report.update(self.drawing.commit(step))
        for extension in self._extensions:
            await extension.after_step(result)
        split = TimeSplit(
            (computed - fetched) + (updated - merged),
            (merged - scored) + (now() - updated),
            fetched - begin,
            scoring=scored - computed,
        )
        if self.runtime.elastic is not None:
            self._samples += metadata.samples * self.runtime.elastic.counted(step)
        elif self.parts.even:
            self._samples += metadata.samples * self.runtime.comm.size
        self._count(outcome)
        self._record(metadata, result, split, begin)
        self.step_done += 1
        return outcome

    async def _compute(self, step: int) -> tuple[StepMetadata, float]:
        """Draws a batch and runs forward and backward; returns metadata, and the time at which samples were there."""
        batch, weights = await self.drawing.batch(step)
        fetched = self.runtime.now()
        with ExitStack() as stack:
            for extension in self._extensions:
                stack.enter_context(extension.computing(step))
            loss, metadata = await self.runtime.compute(
                Cost("forward", len(batch)), lambda: self.forward(batch, weights)
            )
            self.engine.begin(step, metadata)
            self.accumulated.load(len(batch))
            await self.runtime.backward(
                Cost("backward", len(batch), self.buckets.numels),
                lambda ready: self.backward(loss, ready),
                self.engine.bucket_ready,
            )
        return metadata, fetched

    async def _join(self) -> None:
        """Follows the run from a snapshot of its state up to the step that this replica begins at."""
        elastic, begins, first, begin = self.runtime.elastic, False, 0, self.runtime.now()
        assert elastic is not None
        while not begins:
            with suppress(StateOutdated):
                shared, optimizer, own = map(unpack_tree, await elastic.given())
                shared["step"] = own.pop("step")
                shared["model"] = {**self.model.state_dict(), **shared["model"]}
                self._keeping.take_over(
                    shared, {**optimizer, **own}, "the state of the run", self._go_on_from
                )
                self.engine.restart(from_anchors=True)
                first, given = self.step_done, self.runtime.now()
                while await elastic.follows(self.step_done):
                    await self._follow(elastic)
                begins = True
        self.engine.restart(from_anchors=True)
        now = self.runtime.now()
        self.telemetry.emit(
            "joined",
            t=now,
            step=self.step_done,
            duration_s=now - begin,
            state_s=given - begin,
            followed=self.step_done - first,
            nbytes=elastic.given_nbytes,
        )

    async def _follow(self, elastic: Elastic) -> None:
        """Carries out a step by the results of its exchanges, to which this replica gives nothing."""
        step = self.step_done
        self._set_rate(step)
        samples = await self.drawing.pick(step)
        self.engine.begin(step, StepMetadata(math.nan, 0.0))
        self.buckets.without_data(self.engine.bucket_ready)
        has_gradient = await self.engine.settle()
        if has_gradient:
            self._scale_rate(step)
            await self.runtime.compute(Cost("optimizer", 0), self.update)
        self.buckets.clear()
        outcome = await self.engine.finish(updated=has_gradient)
        self.drawing.commit(step)
        self._samples += samples * elastic.counted(step)
        self._count(outcome)
        self.step_done += 1

    async def _offer_state(self, elastic: Elastic, step: int) -> None:
        """Offers the state of the run to replicas that join it."""
        exchanges = await self.runtime.launch(self.engine.state_dict())
        counted: State = {"samples": self._samples, "sent": {}, "time": Leg(0, 0.0, TimeSplit()).to_json()}
        shared, own = self._keeping.state(step, exchanges, counted)
        del own["random"]
        own["parameters"] = {}
        own["exchanges"] = without_contributions(own["exchanges"])
        own["sampler"] = {**own["sampler"], "latest": self.parts.sampler.latest()}
        anchors = self.engine.anchor_parameters() or {}  # which are among the state of exchanges too
        shared["model"] = {name: t for name, t in shared["model"].items() if name not in anchors}
        own["step"] = shared.pop("step")  # in blocks of local steps, replicas have the rest in common
        optimizer = {"optimizer": own.pop("optimizer")}
        await elastic.offer(step, [pack_tree(part) for part in (shared, optimizer, own)])

    async def flush(self) -> None:
        """Merges what is still under way, as the steps to come would; afterwards all replicas are alike.

        A mean is applied at the learning rate of the step that it is due at: behind the last one, where a rate that
        falls to 0 has come to 0.
        """

        async def update(step: int) -> None:
            self._set_rate(step)
            self._scale_rate(step)
            await self.runtime.compute(Cost("optimizer", 0), self.update)

        self._count(await self.engine.flush(update))

    def _count(self, outcome: StepOutcome) -> None:
        """The samples of the steps that all replicas have heard of, where they may take unlike numbers."""
        if not self.parts.even:
            self._samples += int(outcome.sums.get("samples", 0))

    def _set_rate(self, step: int, share: float = 1.0) -> None:
        self._rate = set_rate(
            self.optimizer,
            self.training,
            self._rates,
            step=step,
            samples=self._samples,
            size=self._first_size,
            scale=self.parts.scaling.factor(share) if self.parts.scales else None,
        )

    def _scale_rate(self, step: int) -> None:
        """Sets the rate of a step by what the gradient weighs that the optimizer is about to step on."""
        if self.parts.scales:
            self._set_rate(step, self.engine.merged_weight / self._first_size)

    @property
    def _first_size(self) -> int:
        """The replicas that the run began with."""
        elastic = self.runtime.elastic
        return self.runtime.comm.size if elastic is None else len(elastic.changes[0].ranks)

    # --- its pieces -------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, weights: Tensor | None) -> tuple[Tensor, StepMetadata]:
        """Returns the weighted mean loss, and the step's metadata."""
        self.model.train()
        self._random.install()
        losses = self.workload.loss(self.model, batch_on(batch, self.device))
        loss = losses.mean() if weights is None else (losses * weights.to(self.device)).mean()
        share = self.accumulated.share(len(batch))
        weight = self.drawing.weight(len(batch))
        value = float(loss.detach())
        if share == 1.0:
            return loss, StepMetadata(value, weight, len(batch))
        return loss * share, StepMetadata(value, weight / share, len(batch))

    def scorer(self, by: ScoredBy) -> Callable[[SampleIds], Tensor]:
        """What the sampler judges samples by, under the model as it is; what that draws at a step is its own."""
        seed = derive(self.training.seed, "score", self.step_done, self.runtime.comm.rank)
        random = RandomState.of(self.workload, seed, self.device)

        def score(ids: SampleIds) -> Tensor:
            random.install()
            batch = self._source.prepare(self._source.rows(ids), train=False)
            return scores_of(self.workload, self.model, batch_on(batch, self.device), by)

        return score

    def losses(self) -> Callable[[SampleIds], Tensor]:
        """What gives the losses of samples beside a step's batch; what that draws at a step is its own."""
        seed = derive(self.training.seed, "fill", self.step_done, self.runtime.comm.rank)
        random = RandomState.of(self.workload, seed, self.device)

        def losses(ids: SampleIds) -> Tensor:
            random.install()
            batch = self._source.prepare(self._source.rows(ids), train=True)
            self.model.train()
            return self.workload.loss(self.model, batch_on(batch, self.device))

        return losses

    def backward(self, loss: Tensor, ready: Callable[[int], None]) -> None:
        """Autograd, telling of each bucket as it fills."""
        self._random.install()
        self.buckets.backward(loss, ready)
        wait_for(self.device)

    def update(self) -> None:
        """The optimizer's step on the merged gradient, clipped where that is asked for."""
        parameters: Iterable[nn.Parameter] = self.model.parameters()
        if self.lockstep is not None:
            parameters = self.lockstep.take(parameters, self.step_done)
            if not parameters:
                return
        if self.training.clip_norm:
            nn.utils.clip_grad_norm_(parameters, self.training.clip_norm)
        self.optimizer.step()

    async def evaluate(self) -> Score:
        """Loss and metric on the test set, each replica taking a share of it; equal on all."""
        return await (await self._evaluated())

    async def _evaluated(self) -> Pending[Score]:
        """The same, begun: where it is off the clock, training may go on."""
        step, sent, goes_on = self.step_done, self.sent_nbytes, self.runtime.off_clock is not None

        def evaluation(runtime: Runtime) -> Coroutine[Pending[Any], None, Score]:
            return evaluate(
                runtime,
                self.workload,
                self.model,
                self._test,
                step,
                stands=self.engine.consensus_parameters(),
                goes_on=goes_on,
                seed=self.training.seed,
                device=self.device,
            )

        def tell(score: Score, **when: Json) -> None:
            found: dict[str, Json] = {"accuracy": score.metric, "loss": score.loss, "bytes_sent": sent}
            self.telemetry.emit("evaluation", **when, step=step, **found)

        return await self._background.run(evaluation, tell)

    async def trained(self) -> State:
        """The state of the model that is evaluated: what differs between replicas is averaged. Once, after the run."""
        # The number after the last evaluation's, since no exchange comes twice.
        async with averaged(self.runtime, self.model, self.step_done + 1, self.engine.consensus_parameters()):
            return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    # --- checkpoints ------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """A checkpoint of the whole replica, if it keeps any; whole when every replica has written its part."""
        if self.checkpoints is None:
            return

        async def snapshot() -> tuple[State, dict[str, list[int]]]:
            return await self.engine.state_dict(), await self._count_sent()

        exchanges, sent = await self.runtime.launch(snapshot())
        time = self._leg().after(self._before).to_json()
        counted: State = {"samples": self._samples, "sent": sent, "time": time}
        checkpoints = self.checkpoints
        if self.runtime.elastic is not None:
            ranks = await _present(self.runtime, self.step_done)
            checkpoints = checkpoints.among(ranks.index(self.runtime.comm.rank), len(ranks))
        await self._keeping.save(
            checkpoints, self.step_done, exchanges, counted, self._background, self.telemetry
        )

    def resume(self, step: int) -> None:
        """Continues from the checkpoint of ``step``.

        Raises:
          CheckpointError: damaged, or of another model or share of the data.
        """
        assert self.checkpoints is not None
        self._keeping.resume(self.checkpoints, step, self._go_on_from)

    def _go_on_from(self, counted: State) -> None:
        self.step_done, self._samples = counted["step"], counted["samples"]
        self._sent_before = counted.get("sent", {})
        self._before = Leg.from_state(counted["time"])

    def _record(self, metadata: StepMetadata, result: StepResult, split: TimeSplit, begin: float) -> None:
        """Adds a step to the times of the run, and emits its event."""
        total, outcome = self.time_s, result.outcome
        total.compute += split.compute
        total.exposed_communication += split.exposed_communication
        total.data_wait += split.data_wait
        total.scoring += split.scoring
        end = self.runtime.now()
        self.telemetry.emit(
            "step",
            t=end,
            step=self.step_done,
            loss=metadata.loss if metadata.is_finite else None,
            nonfinite=outcome.num_nonfinite,
            mean_loss=None if outcome.stats is None else outcome.stats.loss,
            in_flight=len({flight.step for flight in self.engine.flights}),
            samples=self._samples,
            **result.report,
            bytes_sent=self.sent_nbytes,
            duration_s=end - begin,
            compute_s=split.compute,
            exposed_s=split.exposed_communication,
            data_s=split.data_wait,
            **({"scoring_s": split.scoring} if self.parts.sampler.needs_scores else {}),
            **({} if self._rate is None else {"learning_rate": self._rate}),
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


async def _present(runtime: Runtime, step: int) -> list[int]:
    """Returns the ranks of all replicas that come to a checkpoint, alike on all; lost ones are not among them."""
    here = torch.zeros(runtime.comm.size, dtype=torch.float64)
    here[runtime.comm.rank] = 1
    nothing = torch.empty(0)
    _, summed = await sum_everywhere(runtime, nothing, here, step, part=1, purpose=Purpose.CHECKPOINT)
    return [int(rank) for rank in summed.nonzero()]
