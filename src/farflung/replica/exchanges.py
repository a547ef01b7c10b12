"""Launches the exchanges a schedule plans, and merges their results when they are due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose
from farflung.errors import NonFinite, Unsupported
from farflung.replica.anchor import Anchor
from farflung.replica.buckets import GradientBuckets
from farflung.replica.flights import Flight, bucket_of, carried
from farflung.replica.times import Times
from farflung.replica.votes import Vote, ballot, mean_loss, odd_ranks
from farflung.seeding import derive
from farflung.tasks import done
from farflung.types import (
    CodecState,
    Decision,
    Reduced,
    Reducer,
    Replace,
    Runtime,
    Schedule,
    Seeds,
    SharedStats,
    State,
    StateSlot,
    Swap,
    Transfer,
)

__all__ = ["Exchanges", "Settled"]


@dataclass(slots=True)
class Settled:
    """What the exchanges that were due at a step have brought."""

    nonfinite: int = 0
    """How many replicas had a non-finite loss; they contributed nothing."""
    stats: SharedStats | None = None
    """Of the last step whose exchange was due; ``None`` where none was."""
    stop: bool = False
    """Whether any replica asked to stop."""


class Exchanges:
    """One replica's exchanges: launched as buckets fill or parameters are updated, merged when they are due.

    Args:
      runtime: the world.
      buckets: the model's gradients and parameters.
      reducer: carries each bucket.
      schedule: says what starts when and is due when.
      seed: the run's.
      on_nonfinite: what to do where a replica's loss is not finite; see :class:`farflung.config.Training`.
      on_arrival: told of each exchange that is merged.
    """

    def __init__(
        self,
        runtime: Runtime,
        buckets: GradientBuckets,
        reducer: Reducer,
        schedule: Schedule,
        seed: int,
        on_nonfinite: str = "stop",
        on_arrival: Callable[[Flight], None] | None = None,
    ) -> None:
        self._on_nonfinite, self._on_arrival = on_nonfinite, on_arrival
        self._runtime, self._buckets, self._reducer, self._schedule = runtime, buckets, reducer, schedule
        self._state = schedule.init(buckets.buckets)
        rank = runtime.comm.rank
        self._slots = [
            StateSlot(
                reducer.init(
                    bucket.spec,
                    Seeds(derive(seed, "codec", bucket.index), derive(seed, "codec", bucket.index, rank)),
                )
            )
            for bucket in buckets.buckets
        ]
        self._anchor = Anchor(buckets) if schedule.what == "update" else None
        self._sums: dict[int, Tensor] = {}
        """Own gradients since the last exchange, by bucket, where a schedule swaps gradients."""
        self._in_flight: list[Flight] = []
        self._planned: dict[int, Transfer] = {}
        self._launchable = 0
        self._filled: set[int] = set()
        self._step = 0
        self._votes: list[Vote] = []
        """Since the last exchange."""
        self._averaged = False
        self._settled = Settled()
        self._times = Times(runtime.now)
        self.sent_nbytes = 0
        self.most_nbytes = 0
        """The most that anchors, blocks and copies for exchanges under way have taken up."""

    @property
    def in_flight(self) -> int:
        """Steps whose exchanges are under way."""
        return len({flight.step for flight in self._in_flight})

    @property
    def apart(self) -> bool:
        """Whether replicas' parameters may differ now; the answer is alike on all."""
        if self._schedule.steps_on == "aggregate" or self._averaged:
            return False
        return self._anchor is None or bool(self._votes) or bool(self._in_flight)

    def anchor(self) -> dict[str, Tensor] | None:
        """The parameters without what is pending, alike on all replicas; ``None`` where there are none such."""
        return None if self._anchor is None else self._anchor.parameters()

    def missing(self) -> list[dict[int, Tensor]]:
        """The own gradients whose means are still under way, oldest first, by bucket."""
        found: dict[int, dict[int, Tensor]] = {}
        for flight in self._in_flight:
            if flight.own is not None:
                found.setdefault(flight.step, {})[flight.index] = flight.own
        return list(found.values())

    # --- a step -----------------------------------------------------------------------------------------------

    def begin(self, step: int, vote: Vote) -> None:
        """Plans a step, before its backward pass."""
        self._times.step_begins()
        self._step = step
        self._votes.append(vote)
        self._averaged = False
        self._settled = Settled()
        self._planned = {
            bucket_of(transfer).index: transfer for transfer in self._schedule.plan(self._state, step)
        }
        self._filled.clear()
        self._launchable = 0

    def ready(self, index: int) -> None:
        """A bucket has filled: launches what was waiting for it.

        Buckets start in order, on every rank the same: the backend's own collectives match by nothing else.
        """
        self._filled.add(index)
        if not self._votes[-1].finite:
            # Neither a mean nor a residual may ever see this gradient.
            self._buckets.flat(index).zero_()
        if self._schedule.what == "gradient" and self._schedule.steps_on == "own":
            own = self._buckets.flat(index)
            self._sums[index] = self._sums[index].add_(own) if index in self._sums else own.clone()
        while self._launchable in self._filled:
            transfer = self._planned.get(self._launchable)
            if transfer is not None and transfer.what == "gradient":
                self._launch(transfer)
            self._launchable += 1

    async def settle(self) -> bool:
        """Waits for gradients that are due at this step's optimizer, and merges them.

        Returns:
          Whether the optimizer has a gradient to step on.

        Raises:
          NonFinite: a replica had a non-finite loss; on all replicas at the same step, before the update.
        """
        self._weigh()
        merged = await self._merge("gradient")
        if self._schedule.steps_on == "aggregate":
            return merged
        return self._anchor is None or self._votes[-1].finite

    async def finish(self, *, updated: bool) -> Settled:
        """The optimizer is through: launches updates, and merges those that are due.

        Args:
          updated: whether it had a gradient to step on.
        """
        self.close(updated=updated)
        await self._merge("update")
        return self._settled

    def close(self, *, updated: bool) -> None:
        """The first half of :meth:`finish`, which leaves the parameters alone; what is due may be merged later."""
        if self._anchor is not None:
            self._anchor.fresh += updated
            for index in sorted(self._planned):
                self._launch(self._planned[index])
            if self._planned:
                self._anchor.fresh = 0
        if self._planned:
            self._votes = []
        self._weigh()

    def _weigh(self) -> None:
        held = 0 if self._anchor is None else self._anchor.nbytes
        held += sum(flight.nbytes for flight in self._in_flight)
        self.most_nbytes = max(self.most_nbytes, held + sum(own.nbytes for own in self._sums.values()))

    # --- the end ----------------------------------------------------------------------------------------------

    def due_steps(self) -> list[int]:
        """The steps, after the last, at which what is under way would be merged."""
        return sorted({flight.transfer.due_step for flight in self._in_flight})

    async def drain(self, step: int) -> bool:
        """Merges what is due at one of :meth:`due_steps`; whether the optimizer has a gradient to step on."""
        self._step = step
        merged = await self._merge("gradient")
        await self._merge("update")
        return merged and self._schedule.steps_on == "aggregate"

    def restart(self) -> None:
        """All replicas have come to the same parameters, and nothing is under way."""
        self._averaged = True
        self._votes, self._sums = [], {}
        if self._anchor is not None:
            self._anchor.restart()

    # --- checkpoints ------------------------------------------------------------------------------------------

    async def state_dict(self) -> State:
        """Reducer and schedule state, and what is under way, as it was given to the reducer."""
        return await self._runtime.launch(self._snapshot())

    def load_state_dict(self, state: State) -> None:
        """Continues from :meth:`state_dict`: what was under way starts again, and so brings the same."""
        self.sent_nbytes, self.most_nbytes = state["sent_nbytes"], state["most_nbytes"]
        self._state = {**self._state, **state["schedule"]}
        self._votes = [Vote(*vote) for vote in state["votes"]]
        self._sums = {int(index): own for index, own in state["sums"].items()}
        for kept in state["flights"].values():
            self._relaunch(kept)
        if self._anchor is not None:
            blocks = {(f.index, f.step): f.own for f in self._in_flight if f.own is not None}
            self._anchor.load_state_dict(state["anchor"], blocks)
        for slot, kept in zip(self._slots, state["slots"].values(), strict=True):
            now = _codec_state(kept)
            if self._in_flight:
                self._runtime.launch(_put(slot, now))  # behind what starts again
            else:
                slot.state = now

    async def _snapshot(self) -> State:
        return {
            "sent_nbytes": self.sent_nbytes,
            "most_nbytes": self.most_nbytes,
            "schedule": {name: value for name, value in self._state.items() if name != "buckets"},
            "votes": [[vote.loss, vote.weight, vote.stop] for vote in self._votes],
            "sums": {str(index): own for index, own in self._sums.items()},
            "flights": {f"{i:06}": await flight.state_dict() for i, flight in enumerate(self._in_flight)},
            "anchor": {} if self._anchor is None else self._anchor.state_dict(),
            "slots": {
                str(index): {"shared": slot.state.shared, "local": slot.state.local}
                for index, slot in enumerate(self._slots)
            },
        }

    # --- launching --------------------------------------------------------------------------------------------

    def _launch(self, transfer: Transfer) -> None:
        index = bucket_of(transfer).index
        weight, rider = ballot(self._votes, self._runtime.comm.rank)
        own, tensor = self._given(transfer, index)
        corrects = isinstance(transfer.merge, Replace) and transfer.merge.correction
        at = self._buckets.weights(index) if corrects else None
        flight = self._flight(self._step, transfer, own, weight, rider, at)
        flight.result = self._runtime.launch(carried(self._reducer, flight, self._slots[index], tensor))
        self._depart(flight)
        if self._schedule.asks(self._state, self._step) and index == 0:
            flight.times = self._runtime.decide("times", self._step, self._times.to_json)

    def _given(self, transfer: Transfer, index: int) -> tuple[Tensor | None, Tensor]:
        """What is kept, where it is needed again, and what is given away."""
        if isinstance(transfer.merge, Swap):
            own = self._sums.pop(index) if self._anchor is None else self._anchor.close(index, self._step)
            return own, own.clone()
        if transfer.what != "gradient" or not isinstance(transfer.merge, Replace):
            raise Unsupported(f"no replica merges {transfer.what} by {type(transfer.merge).__name__} yet")
        gradient = self._buckets.flat(index)
        if transfer.due_step == self._step:
            return None, gradient
        own = gradient.clone()
        return own, own.clone()

    def _flight(
        self,
        step: int,
        transfer: Transfer,
        own: Tensor | None,
        weight: float,
        rider: Tensor,
        at: Tensor | None,
    ) -> Flight:
        channel = ExchangeChannel(self._runtime.comm, Purpose.STEP.at(step), bucket_of(transfer).index)
        return Flight(step, transfer, own, weight, rider, at, channel, self._runtime.now())

    def _relaunch(self, kept: State) -> None:
        transfer = Flight.transfer_of(kept, self._buckets.buckets)
        at = kept["at"].get("weights")
        flight = self._flight(kept["step"], transfer, kept["own"], kept["weight"], kept["rider"], at)
        slot = self._slots[flight.index]
        before = _codec_state(kept["before"])
        flight.result = self._runtime.launch(
            carried(self._reducer, flight, slot, kept["own"].clone(), before)
        )
        if kept["times"] is not None:
            flight.times = done(Decision("times", flight.step, kept["times"]))
        self._depart(flight)

    def _depart(self, flight: Flight) -> None:
        now = self._runtime.now

        def arrived(_: object) -> None:
            flight.ended_s = now()

        flight.result.on_done(arrived)
        self._in_flight.append(flight)

    # --- merging ----------------------------------------------------------------------------------------------

    async def _merge(self, what: str) -> bool:
        """Whether the last step that was due has brought something."""
        due = [
            flight
            for flight in self._in_flight
            if flight.transfer.what == what and flight.transfer.due_step <= self._step
        ]
        merged = False
        for _, flights in groupby(due, key=lambda flight: flight.step):
            first = True
            for flight in flights:
                reduced = await self._arrival(flight)
                if first:
                    merged, first = await self._verdict(flight, reduced), False
                self._put_in_place(flight, reduced, merged)
        return merged

    async def _arrival(self, flight: Flight) -> Reduced:
        with self._times.waiting():
            reduced = await flight.result
        self._in_flight.remove(flight)
        self.sent_nbytes += flight.channel.sent_nbytes
        self._times.exchanged(flight)
        if self._on_arrival is not None:
            self._on_arrival(flight)
        if reduced.learn is not None:
            await self._runtime.launch(_learn(self._slots[flight.index], reduced))
        return reduced

    async def _verdict(self, flight: Flight, reduced: Reduced) -> bool:
        """Whether all replicas merge the exchange of this step; tells the schedule of it."""
        nonfinite = int(reduced.rider[1])
        self._settled.nonfinite += nonfinite
        self._settled.stop |= bool(reduced.rider[4])
        if nonfinite and self._on_nonfinite == "stop":
            raise NonFinite(flight.step, odd_ranks(reduced.rider), nonfinite)
        times: dict[str, float | None] = {}
        if flight.times is not None:
            with self._times.waiting():
                decision = await flight.times
            assert isinstance(decision.value, dict)
            times = decision.value  # type: ignore[assignment]
        self._settled.stats = SharedStats(flight.step, mean_loss(reduced), reduced.weight, **times)
        self._state = self._schedule.observe(self._state, self._settled.stats)
        return not (nonfinite and (self._on_nonfinite == "skip" or reduced.weight == 0))

    def _put_in_place(self, flight: Flight, reduced: Reduced, good: bool) -> None:
        index, mean = flight.index, reduced.mean
        if isinstance(flight.transfer.merge, Replace):
            if flight.at is not None:
                moved = self._buckets.weights(index).sub_(flight.at)
                mean = mean + flight.transfer.merge.correction * mean * mean * moved
            self._buckets.load(index, mean)
        elif self._anchor is not None:
            self._anchor.swap(index, flight.step, mean if good else None)
        else:
            assert flight.own is not None
            gradient = self._buckets.flat(index).sub_(flight.own)
            if good:
                gradient.add_(mean)


def _codec_state(kept: State) -> CodecState:
    return CodecState(kept["shared"], kept["local"])


async def _put(slot: StateSlot, state: CodecState) -> None:
    slot.state = state


async def _learn(slot: StateSlot, reduced: Reduced) -> None:
    assert reduced.learn is not None
    slot.state = reduced.learn(slot.state)
