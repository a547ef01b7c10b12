"""Launches the exchanges a schedule plans, and merges their results when they are due."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose
from farflung.errors import NonFinite, Unsupported
from farflung.files import deciding
from farflung.replica.averaging import average, average_on, sum_everywhere
from farflung.replica.buckets import GradientBuckets
from farflung.replica.in_flight import InFlight, Launcher, LinkGate, joined
from farflung.replica.merges import mergers
from farflung.replica.optimizers import rate_of
from farflung.replica.placement import state_on
from farflung.replica.slots import Slots, buckets_of, numbered, spec_of
from farflung.replica.summary import Times
from farflung.replica.unused import Places, Unused, joined_places
from farflung.replica.votes import Rider, Tally, Vote
from farflung.types import (
    Decision,
    Json,
    Outer,
    Part,
    Reduced,
    Reducer,
    Replace,
    Runtime,
    Schedule,
    SharedStats,
    State,
    Transfer,
)

if TYPE_CHECKING:
    from farflung.sampling import Gain

__all__ = ["Exchanges", "Settled", "given_nothing"]


@dataclass(slots=True)
class Settled:
    """What the exchanges that were due at a step have brought."""

    nonfinite: int = 0
    """How many replicas had a non-finite loss; they contributed nothing."""
    stats: SharedStats | None = None
    """Of the last step whose exchange was due; ``None`` where none was."""
    out: int = 0
    """How many replicas had run out of data at the last step whose exchange was due."""
    sums: dict[str, float] = field(default_factory=dict)
    """What parts of all replicas have added to the rider, by name."""


@dataclass(slots=True)
class _Step:
    """What lasts for one step.

    Args:
      number: of the step.
      round_number: of its messages.
      vote: this replica's metadata.
      planned: the transfers that start at it.
      waiting: those of gradients, until all of their buckets have filled.
      rate: the learning rate when it began.
      settled: what it has brought.
      filled: the buckets that have.
      leads: whether the next exchange to start is the first of the step.
      left: how many of those that are planned have not started.
    """

    number: int
    round_number: int
    vote: Vote
    planned: list[Transfer] = field(default_factory=list)
    waiting: deque[Transfer] = field(default_factory=deque)
    rate: float | None = None
    settled: Settled = field(default_factory=Settled)
    filled: set[int] = field(default_factory=set)
    leads: bool = True
    left: int = 0


class Exchanges:
    """One replica's exchanges: launched as buckets fill or parameters are updated, merged when they are due.

    All of it runs on the thread that trains, but for what is launched: reducers belong to the thread that carries
    exchanges, where what is launched runs in the order of launch. What a result teaches is learned here, since it may
    take longer than messages can wait: no exchange is about to encode then.

    Args:
      runtime: the world.
      buckets: the model's gradients and parameters.
      reducer: carries each part.
      schedule: says what starts when and is due when.
      seed: the run's.
      on_nonfinite: what to do where a replica's loss is not finite; see :class:`farflung.config.Training`.
      looks: whether to look for it in the gradients too, where the loss is not known.
      on_arrival: told of each exchange that is merged.
      rides: the names of the numbers that votes carry beside their own.
      gain: of a sampler, which learns how gradients differ; what it chooses is a decision of the run.
      steps: of the run, where that is known.

    Raises:
      Unsupported: a merge that nothing carries out, a bucket that nothing moves, or a fragment on several devices.
    """

    def __init__(
        self,
        runtime: Runtime,
        buckets: GradientBuckets,
        reducer: Reducer,
        schedule: Schedule,
        seed: int,
        on_nonfinite: str = "stop",
        on_arrival: Callable[[InFlight], None] | None = None,
        rides: Iterable[str] = (),
        *,
        gain: Gain | None = None,
        looks: bool = False,
        steps: int | None = None,
    ) -> None:
        self._on_nonfinite, self._on_arrival, self._looks = on_nonfinite, on_arrival, looks
        self._runtime, self._buckets, self._schedule = runtime, buckets, schedule
        self._mergers = mergers(schedule, buckets)
        self._parts = numbered(schedule, buckets.buckets)
        self._numbers = {part: number for number, part in self._parts.items()}
        self._in_order = tuple(self._parts.values())
        for part in self._in_order:
            self._check_device(part)
        self._state, self._steps = schedule.init(), steps
        specs = {number: spec_of(part) for number, part in self._parts.items()}
        self._slots = Slots(reducer, specs, seed, runtime.comm.rank, steps=steps)
        self._unused = Unused(self._parts)
        self._gain = gain
        measured = () if gain is None else gain.begins(self._unlike(reducer))
        self._learner = gain if measured else None
        """The gain, where gradients say what it is."""
        self._rider = Rider((*rides, *measured))
        kinds = {kind.__name__: kind for kind in self._mergers}
        self._launcher = Launcher(runtime, reducer, kinds, self._slots, self._parts)
        self._step = _Step(0, 0, Vote(0.0, 0.0))
        self._metadata: dict[int, list[Vote]] = {number: [] for number in self._parts}
        """The metadata of each part's steps since its last exchange."""
        self._said: dict[str, float] = {}
        """The sums of the metadata's numbers since the last exchange of any part, by name."""
        self._averaged = False
        self._behind = False
        """Whether all replicas have moved alike since those merges last looked that let each step for itself."""
        self._taken: list[list[tuple[InFlight, Reduced, Tally]]] = []
        """What has arrived and been told, by step, and waits to be merged."""
        self._optimizer: torch.optim.Optimizer | None = None
        self._times = Times(runtime.now)
        self.gate = LinkGate(runtime, lambda: self._launcher.busy, overlaps=not self.is_synchronous)
        """For what is sent beside exchanges and must not hold up any that a step waits for."""
        self.sent_nbytes = 0
        self.arrived_s = 0.0
        """When the last exchange was there that has been merged, on the run's clock."""
        self.most_nbytes = 0
        """The most that merges and copies for exchanges under way have taken up."""

    def _unlike(self, reducer: Reducer) -> str:
        """Says why replicas' gradients do not compare with their mean; empty: they do."""
        if self._runtime.comm.size == 1:
            return "one replica"
        if not all(issubclass(kind, Replace) for kind in self._mergers):
            return f"replicas' parameters differ under {type(self._schedule).__name__}"
        codec = getattr(reducer, "codec", None)
        if not getattr(codec, "per_hop", False):
            return f"{type(codec or reducer).__name__} changes gradients"
        return ""

    @property
    def worth(self) -> dict[str, Json]:
        """For telemetry, what drawing samples by scores is worth; empty where nothing draws so."""
        return {} if self._gain is None else {"rule": self._gain.rule, **self._gain.told()}

    @property
    def in_flight(self) -> int:
        """Steps whose exchanges are under way."""
        return len({exchange.step for exchange in self._launcher.in_flight})

    @property
    def channels(self) -> list[ExchangeChannel]:
        """Of the exchanges that have not been merged; a run that goes on from here makes them again."""
        return [exchange.channel for exchange in self._launcher.in_flight]

    @property
    def diverged(self) -> bool:
        """Whether replicas' parameters may differ now; the answer is alike on all."""
        if self._averaged:
            return False
        pending = bool(self._launcher.in_flight or self._taken) or any(self._metadata.values())
        return any(merger.diverged(pending=pending) for merger in self._mergers.values())

    @property
    def moves_parameters(self) -> bool:
        """Whether anything starts after the optimizer's step rather than in backward."""
        return any(kind.moves != "gradient" for kind in self._mergers)

    @property
    def is_synchronous(self) -> bool:
        """Whether optimizers step on means of gradients alone, each at the step that they were taken at."""
        return not self.moves_parameters and not self._schedule.late

    @property
    def waited_s(self) -> float:
        """Seconds for which the thread that trains has waited for exchanges so far."""
        return self._times.waited_s

    @property
    def schedule_name(self) -> str:
        """Class of the schedule, for messages."""
        return type(self._schedule).__name__

    @property
    def has_late_gradients(self) -> bool:
        """Whether gradients leave in their backward pass and are due at a later step."""
        return self._schedule.late and any(kind.moves == "gradient" for kind in self._mergers)

    def has_gradient_transfers(self, step: int) -> bool:
        """Returns True if gradients leave in the backward pass of a step."""
        return any(transfer.merge.moves == "gradient" for transfer in self._planned(step))

    @property
    def steps_on_means(self) -> bool:
        """Whether the optimizer steps on means of gradients and on nothing else."""
        return all(merger.takes_gradient for merger in self._mergers.values())

    @property
    def merged_weight(self) -> float:
        """What the gradients of the last step that has been merged at this one weigh together; 0 where none has."""
        return self._step.settled.stats.weight if self._step.settled.stats else 0.0

    def goes_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Once before the first step: the optimizer that steps on what is merged.

        Raises:
          ConfigError: the schedule's merges cannot go with it; says what to do instead.
        """
        self._optimizer = optimizer
        for merger in self._mergers.values():
            merger.goes_with(optimizer)

    def common(self) -> dict[str, Tensor] | None:
        """The parameters without what is pending, alike on all replicas; ``None`` where there are none such."""
        if self._behind:
            return None  # no merge has looked at the parameters since replicas moved alike
        found = [flats for merger in self._mergers.values() if (flats := merger.common()) is not None]
        return self._buckets.named(found[0]) if found else None

    def consensus_parameters(self) -> dict[str, Tensor] | None:
        """The parameters that a model is evaluated and kept with, by name and alike on all replicas.

        Returns:
          Those that take the place of its own: none where replicas are alike. ``None``: the mean of all does.
        """
        if not self.diverged:
            return {}
        found = [f for merger in self._mergers.values() if (f := merger.consensus_parameters()) is not None]
        return self._buckets.named(found[0]) if found else None

    def taking_gradients(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[object]:
        """Around forward and backward of a step."""
        takings = [
            merger.taking(optimizer, self._launcher.of(kind)) for kind, merger in self._mergers.items()
        ]
        if len(takings) == 1:
            return takings[0]
        with ExitStack() as stack:
            for taking in takings:
                stack.enter_context(taking)
            return stack.pop_all()

    def aside(self) -> AbstractContextManager[None]:
        """Around what is no part of a step and takes time nevertheless."""
        return self._times.aside()

    # --- a step -----------------------------------------------------------------------------------------------

    def begin(self, step: int, vote: Vote, round_number: int | None = None) -> None:
        """Plans a step, before its backward pass.

        Args:
          step: of the optimizer.
          vote: this replica's metadata.
          round_number: of its messages, alike on all replicas and never the same twice; ``None``: that of the step.

        Raises:
          Unsupported: the schedule plans what it has not named before.
        """
        self._times.step_begins()
        planned = self._planned(step)
        gradients = deque(transfer for transfer in planned if transfer.merge.moves == "gradient")
        if self._behind and not gradients and not self.diverged:
            self._catch_up()
        rate = None if self._optimizer is None else rate_of(self._optimizer)
        number = step if round_number is None else round_number
        self._step = _Step(step, number, vote, planned, gradients, rate, left=len(planned))
        for steps in self._metadata.values():
            steps.append(vote)
        numbers = vote.numbers if self._learner is None else {**vote.numbers, **self._learner.tell()}
        for name, value in numbers.items():
            self._said[name] = self._said.get(name, 0.0) + value
        self._averaged = False
        for transfer in planned:
            self._check(transfer)

    def _planned(self, step: int) -> list[Transfer]:
        """Return what a step starts; an outer step that no step of training follows is a plain mean.

        Outer rate and momentum anticipate steps to come. Ours: the sources step on.
        """
        planned = self._schedule.plan(self._state, self._in_order, step)
        if self._steps is None or all(transfer.due_step < self._steps - 1 for transfer in planned):
            return planned
        return [
            replace(each, merge=replace(each.merge, rate=1.0, momentum=0.0, nesterov=False))
            if isinstance(each.merge, Outer) and each.due_step >= self._steps - 1
            else each
            for each in planned
        ]

    def ready(self, index: int) -> None:
        """A bucket has filled: launches what was waiting for it.

        Exchanges start in the planned order, on every rank the same: the backend's own collectives match by nothing
        else. May be called by threads of autograd's, one at a time, while the one that trains waits for them.
        """
        step = self._step
        step.filled.add(index)
        if self._looks and step.vote.finite and not self._buckets.flat(index).isfinite().all():
            self._recant(replace(step.vote, loss=math.nan))
        if not step.vote.finite:
            # Neither a mean nor a residual may ever see this gradient.
            self._buckets.flat(index).zero_()
        while step.waiting and step.filled.issuperset(b.index for b in buckets_of(step.waiting[0].part)):
            self._launch(step.waiting.popleft())

    def _recant(self, vote: Vote) -> None:
        """Replaces this step's metadata for the exchanges that have not started yet."""
        for steps in self._metadata.values():
            if steps and steps[-1] is self._step.vote:
                steps[-1] = vote
        self._step.vote = vote

    async def settle(self) -> bool:
        """Waits for gradients that are due at this step's optimizer, and merges them.

        Returns:
          Whether the optimizer has a gradient to step on.

        Raises:
          NonFinite: a replica had a non-finite loss, or gradient where it is looked for there; on all replicas at the
            same step, before the update.
        """
        if len(self._taken) > max(self._schedule.reach, 1):
            await self._merge_taken()  # steps have been left out one after the other
        self._weigh()
        acting = {type(transfer.merge) for transfer in self._step.planned}
        acting.update([type(exchange.transfer.merge) for exchange in self._due(gradients=True)])
        merged = await self._merge(gradients=True)
        self.gate.open()
        taking = [m for kind, m in self._mergers.items() if kind in acting and m.takes_gradient]
        asked = taking or [m for m in self._mergers.values() if not m.takes_gradient]
        self._behind |= bool(taking) and len(taking) < len(self._mergers)
        finite = self._step.vote.finite
        return bool(asked) and all(merger.steps(merged=merged, finite=finite) for merger in asked)

    def _catch_up(self) -> None:
        """Replicas are alike and go their own ways from here: what they differ by counts from these parameters."""
        self._behind = False
        for merger in self._mergers.values():
            if not merger.takes_gradient:
                merger.restart()

    async def finish(self, *, updated: bool) -> Settled:
        """The optimizer is through: launches what moves parameters, and merges what of that is due.

        Args:
          updated: whether it had a gradient to step on.
        """
        self.close(updated=updated)
        await self._merge(gradients=False)
        self.gate.open()
        return self._step.settled

    def close(self, *, updated: bool) -> None:
        """The first half of :meth:`finish`, which leaves the parameters alone.

        The next step may begin after it only once :meth:`take` is through; what is due is merged by the next
        :meth:`finish`.
        """
        for merger in self._mergers.values():
            merger.updated(done=updated)
        for transfer in self._step.planned:
            if transfer.merge.moves != "gradient":
                self._launch(transfer)
        self._step.planned = []
        self._weigh()

    async def take(self) -> None:
        """Waits for updates that are due, and leaves them to be merged later.

        So the schedule knows what it knows on replicas that have merged them, and plans the same.
        """
        for _, exchanges in groupby(self._due(gradients=False), key=lambda exchange: exchange.step):
            arrived = await self._arrived(exchanges)
            self._taken.append(arrived)
            await self._tell(*arrived[0])

    def _weigh(self) -> None:
        held = sum(merger.nbytes for merger in self._mergers.values())
        self.most_nbytes = max(self.most_nbytes, held + self._launcher.nbytes)

    # --- the end ----------------------------------------------------------------------------------------------

    async def flush(self, number: int, update: Callable[[int], Awaitable[None]]) -> Settled:
        """Merges what is still under way, as the steps to come would; afterwards all replicas are alike.

        Args:
          number: of the exchange that averages parameters, where that is needed; alike on all ranks.
          update: a step of the optimizer, given the step of training that it belongs to.
        """
        self._step.settled = Settled()
        for step in sorted({exchange.transfer.due_step for exchange in self._launcher.in_flight}):
            self._step.number = step
            taking = any(
                self._mergers[type(f.transfer.merge)].takes_gradient for f in self._due(gradients=True)
            )
            merged = await self._merge(gradients=True)
            await self._merge(gradients=False)
            if merged and taking:
                await update(step)
            self._buckets.clear()
        for merger in self._mergers.values():
            merger.landed()
        if self.diverged:
            parameters = [
                p.detach() for b in self._buckets.buckets for p in self._buckets.parameters(b.index)
            ]
            await average(self._runtime, parameters, number, Purpose.FLUSH)
            self.restart()
        if self._said:
            await self._say_the_rest(number)
        return self._step.settled

    async def _say_the_rest(self, number: int) -> None:
        """The numbers of steps that no exchange has followed; equal names on all replicas."""
        own = torch.tensor(list(self._said.values()), dtype=torch.float64)
        _, summed = await sum_everywhere(
            self._runtime, torch.empty(0), own, number, purpose=Purpose.REMAINDER
        )
        sums = self._step.settled.sums
        for name, value in zip(self._said, summed.tolist(), strict=True):
            sums[name] = sums.get(name, 0.0) + value
        self._said = {}

    def restart(self) -> None:
        """All replicas have come to the same parameters, and nothing is under way."""
        self._averaged = True
        for steps in self._metadata.values():
            steps.clear()
        for merger in self._mergers.values():
            merger.restart()

    def report(self) -> Mapping[str, Json]:
        """Figures of the reducer's own, by name."""
        return self._slots.report()

    # --- checkpoints ------------------------------------------------------------------------------------------

    async def state_dict(self) -> State:
        """What goes on with the run, what is under way as it was given to the reducer.

        Returns:
          ``shared``, alike on all replicas, and ``own``.
        """
        return await self._runtime.launch(self.snapshot())

    async def drop(self) -> None:
        """Waits for what is under way, and forgets it: all replicas are about to go back to an earlier state."""
        for exchange in self._launcher.in_flight:
            await exchange.started.bring()
        self._launcher.in_flight.clear()
        self._taken.clear()

    def load_state_dict(self, state: State) -> None:
        """Continues from :meth:`state_dict`: what was under way starts again, and so brings the same.

        Tensors of the state may be on any device.

        Raises:
          CheckpointError: its reducer's state is of another version.
        """
        shared, own = state["shared"], state["own"]
        self._slots.check_own(own["slots"])
        self._launcher.in_flight.clear()
        self._taken.clear()
        self.sent_nbytes, self.most_nbytes = own["sent_nbytes"], own["most_nbytes"]
        self._state, self._behind = shared["schedule"], shared["behind"]
        self._times.go_on_from(own.get("elapsed_s", 0.0))
        self._metadata = {
            number: [Vote(*vote) for vote in own["votes"].get(str(number), ())] for number in self._parts
        }
        self._said = dict(own["said"])
        self._unused.load_state_dict(shared["unused"], own["absent"])
        for kept in own["flights"].values():
            self._launcher.launch_again(state_on(kept, self._device(kept["number"])))
        for kind, merger in self._mergers.items():
            name = kind.__name__
            merger.load_state_dict(shared["merges"][name], own["merges"][name], self._launcher.of(kind))
        slots = self._placed(shared["slots"]), self._placed(own["slots"])

        async def behind_what_started_again() -> None:
            self._slots.load_state_dict(*slots)

        if self._launcher.in_flight:
            self._runtime.launch(behind_what_started_again())
        else:
            self._slots.load_state_dict(*slots)

    def joined(self) -> None:
        """Takes the state for that of a replica that has given nothing yet, such as one of another replica."""
        self._metadata = {number: [] for number in self._parts}
        self._said = {}
        for merger in self._mergers.values():
            for index, weights in enumerate((not self._behind and merger.common()) or ()):
                self._buckets.load_weights(index, weights)
            merger.joined()

    def _device(self, number: int) -> torch.device:
        """The device of a part."""
        return self._buckets.flat(buckets_of(self._parts[number])[0].index).device

    def _placed(self, slots: State) -> State:
        return {number: state_on(state, self._device(int(number))) for number, state in slots.items()}

    async def snapshot(self) -> State:
        """The same, to be launched: on the thread that carries exchanges."""
        merges = {kind.__name__: merger.state_dict() for kind, merger in self._mergers.items()}
        shared_slots, own_slots = self._slots.state_dict()
        unused, absent = self._unused.state_dict()
        return {
            "shared": {
                "schedule": self._state,
                "merges": {name: shared for name, (shared, _) in merges.items()},
                "slots": shared_slots,
                "unused": unused,
                "behind": self._behind,
            },
            "own": {
                "elapsed_s": self._times.elapsed_s,
                "sent_nbytes": self.sent_nbytes,
                "most_nbytes": self.most_nbytes,
                "votes": {
                    str(number): [[vote.loss, vote.weight] for vote in steps]
                    for number, steps in self._metadata.items()
                },
                "said": dict(self._said),
                "flights": await self._launcher.state_dict(),
                "merges": {name: own for name, (_, own) in merges.items()},
                "slots": own_slots,
                "absent": absent,
            },
        }

    # --- launching --------------------------------------------------------------------------------------------

    def _check_device(self, part: Part) -> None:
        devices = sorted({str(self._buckets.flat(bucket.index).device) for bucket in buckets_of(part)})
        if len(devices) > 1:
            raise Unsupported(
                f"schedule {type(self._schedule).__name__}: fragment {part.index} holds parameters on "
                f"{' and '.join(devices)}: choose a schedule without fragments, or keep the model on one device"
            )

    def _check(self, transfer: Transfer) -> None:
        named = f"schedule {type(self._schedule).__name__}, step {self._step.number}"
        if type(transfer.merge) not in self._mergers:
            raise Unsupported(
                f"{named}: plans merge {type(transfer.merge).__name__}, which is not among its merges: name it there"
            )
        if transfer.part not in self._numbers:
            raise Unsupported(f"{named}: plans a part that is not among its parts: name it there")
        if transfer.due_step > self._step.number and not self._schedule.late:
            raise Unsupported(
                f"{named}: plans a result for step {transfer.due_step}, and its late is False: make it True"
            )

    def _launch(self, transfer: Transfer) -> None:
        if transfer.due_step <= self._step.number:
            self.gate.shut()
        number = self._numbers[transfer.part]
        merger = self._mergers[type(transfer.merge)]
        leads, self._step.leads = self._step.leads, False
        said: dict[str, float] = {}
        if leads:
            said, self._said = self._said, {}
        absent = self._absent(transfer.part) if merger.takes_gradient else ()
        asks = merger.takes_gradient and self._unused.changes(number, absent)
        weight, rider = self._rider.cast(self._metadata[number], self._runtime.comm.rank, said, asks=asks)
        self._metadata[number] = []
        tensors, kept = [], {}
        for bucket in buckets_of(transfer.part):
            tensor, kept[bucket.index] = merger.give(bucket.index, transfer, self._step.number)
            tensors.append(tensor)
        exchange = InFlight(
            number, self._step.number, self._step.round_number, transfer, kept, weight, rider, leads, absent
        )
        if self._learner is not None:
            exchange.square = _square(tensors)
        self._step.left -= 1
        self._launcher.launch(exchange, joined(tensors), ends_step=not self._step.left)
        if leads and self._schedule.asks(self._state, self._step.number):
            exchange.times = self._runtime.decide("times", self._step.number, self._times.to_json)

    def _absent(self, part: Part) -> Places:
        found = [(bucket, self._buckets.absent(bucket.index)) for bucket in buckets_of(part)]
        return joined_places(found) if any(absent for _, absent in found) else ()

    # --- merging ----------------------------------------------------------------------------------------------

    def _due(self, *, gradients: bool) -> list[InFlight]:
        return self._launcher.due(self._step.number, gradients=gradients)

    async def _merge(self, *, gradients: bool) -> bool:
        """Whether the last step that was due has brought something."""
        merged = not gradients and await self._merge_taken()
        for _, exchanges in groupby(self._due(gradients=gradients), key=lambda exchange: exchange.step):
            arrived = await self._arrived(exchanges)
            merged = await self._put_all(arrived)
            await self._tell(*arrived[0])
        return merged

    async def _merge_taken(self) -> bool:
        """Merges what :meth:`take` has left; returns True if the last of it has brought something."""
        merged = False
        taken, self._taken = self._taken, []
        for arrived in taken:
            merged = await self._put_all(arrived)
        return merged

    async def _put_all(self, arrived: Sequence[tuple[InFlight, Reduced, Tally]]) -> bool:
        """Merges one step's exchanges; whether they have brought something."""
        skipped = self._on_nonfinite == "skip" and any(tally.nonfinite for _, _, tally in arrived)
        merged = False
        if self._learner is not None and not any(tally.nonfinite for _, _, tally in arrived):
            exchange, reduced, _ = arrived[0]
            self._learner.measured(
                sum(exchange.square for exchange, _, _ in arrived),
                _square([reduced.mean for _, reduced, _ in arrived]),
                exchange.weight / reduced.weight if reduced.weight else 0.0,
                first=self._runtime.comm.rank == 0,
            )
        for exchange, reduced, tally in arrived:
            good = not (skipped or (tally.nonfinite and reduced.weight == 0))
            merged |= good
            self._put(exchange, reduced.mean if good else None)
            if good:
                await self._average_moments(exchange)
        return merged

    async def _arrived(self, exchanges: Iterable[InFlight]) -> list[tuple[InFlight, Reduced, Tally]]:
        """Waits for the exchanges of one step, and learns what no replica has used in it."""
        arrived: list[tuple[InFlight, Reduced, Tally]] = []
        for exchange in exchanges:
            reduced = await self._arrival(exchange)
            tally = self._rider.read(reduced.rider)
            if tally.nonfinite and self._on_nonfinite == "stop":
                what = "gradient" if self._looks else "loss"
                raise NonFinite(exchange.step, tally.ranks, tally.nonfinite, what)
            arrived.append((exchange, reduced, tally))
        absent = {exchange.number: exchange.absent for exchange, _, tally in arrived if tally.asks}
        if absent:
            with self._times.waiting():
                told = self._unused.tell(self._runtime, arrived[0][0].round_number, absent)
                self.sent_nbytes += await told
        for exchange, _, _ in arrived:
            exchange.unused, exchange.never = self._unused.merged(exchange.number)
        return arrived

    async def _arrival(self, exchange: InFlight) -> Reduced:
        with self._times.waiting():
            reduced = await exchange.started.bring()
        self._launcher.in_flight.remove(exchange)
        self.sent_nbytes += exchange.channel.sent_nbytes
        self._times.exchanged(exchange)
        self.arrived_s = max(
            self.arrived_s, self._runtime.now() if exchange.ended_s is None else exchange.ended_s
        )
        if self._on_arrival is not None:
            self._on_arrival(exchange)
        last = all(other.step != exchange.step for other in self._launcher.in_flight)
        if reduced.learn is not None or (last and reduced.learn_together is not None):
            # What was launched before encodes first; its messages go on while this thread learns.
            await self._runtime.launch(_reached())
            self._slots.learn(exchange.number, reduced, last=last)
        return reduced

    async def _tell(self, exchange: InFlight, reduced: Reduced, tally: Tally) -> None:
        """Reports one step's exchanges to the schedule and to the observers of the step."""
        settled = self._step.settled
        settled.nonfinite += tally.nonfinite
        settled.out = tally.out
        loss = tally.loss / reduced.weight if reduced.weight else 0.0
        sums = tally.sums if exchange.leads else {}
        for name, value in sums.items():
            settled.sums[name] = settled.sums.get(name, 0.0) + value
        if (
            self._learner is not None
            and exchange.leads
            and self._learner.learn(sums)
            and self._runtime.comm.rank == 0
        ):
            chosen = Decision("sampling", exchange.step, self._learner.rule, timing=False)
            self._runtime.decisions.record(chosen)
        stats = SharedStats(exchange.step, loss, reduced.weight, sums, learning_rate=self._step.rate)
        if exchange.times is not None:
            with self._times.waiting():
                decision = await exchange.times
            with deciding(decision.name, decision.step):
                stats = replace(stats, **Times.from_json(decision.value))
        settled.stats = stats
        self._state = self._schedule.observe(self._state, stats)

    async def _average_moments(self, exchange: InFlight) -> None:
        merger = self._mergers[type(exchange.transfer.merge)]
        found = [t for bucket in buckets_of(exchange.transfer.part) for t in merger.averages(bucket.index)]
        if not found or self._runtime.comm.size == 1:
            return
        number = Purpose.MOMENTS.at(exchange.round_number)
        with self._times.waiting():
            self.sent_nbytes += await average_on(self._runtime, found, number, exchange.number)

    def _put(self, exchange: InFlight, mean: Tensor | None) -> None:
        merger = self._mergers[type(exchange.transfer.merge)]
        buckets = buckets_of(exchange.transfer.part)
        sizes = [bucket.spec.numel for bucket in buckets]
        means = [None] * len(buckets) if mean is None else mean.split(sizes) if len(buckets) > 1 else [mean]
        for bucket, each in zip(buckets, means, strict=True):
            merger.put(bucket.index, exchange, each)


def given_nothing(own: State) -> State:
    """Returns a replica's own half of :meth:`Exchanges.snapshot` with zeros for what it has given."""
    flights = {}
    for name, flight in own["flights"].items():
        kept = {
            index: {**each, "own": torch.zeros_like(each["own"])} for index, each in flight["kept"].items()
        }
        before = {**flight["before"], "local": _zeros(flight["before"]["local"])}
        flights[name] = {**flight, "kept": kept, "before": before}
    return {**own, "flights": flights, "merges": _zeros(own["merges"])}


def _zeros(tree: Any) -> Any:
    """Returns nested dicts with zeros for tensors."""
    if isinstance(tree, dict):
        return {name: _zeros(node) for name, node in tree.items()}
    return torch.zeros_like(tree) if isinstance(tree, Tensor) else tree


def _square(tensors: Iterable[Tensor]) -> float:
    """The square of the norm of all together."""
    return sum(float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in tensors)


async def _reached() -> None:
    """Its end says that all that was launched before has come to its first wait."""
