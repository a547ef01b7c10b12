"""Exchanges under way, how they outlive a checkpoint, and the gate that keeps other traffic off the link."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose, Started, Values, start
from farflung.replica.checkpoint import pack_tree, unpack_tree
from farflung.replica.slots import Slots, buckets_of
from farflung.replica.unused import Places, PlacesByBucket
from farflung.tasks import Pending, done
from farflung.types import (
    CodecState,
    Contribution,
    Decision,
    Merge,
    Part,
    Reduced,
    Reducer,
    Runtime,
    State,
    StateSlot,
    Transfer,
)

__all__ = ["InFlight", "Launcher", "LinkGate", "joined"]


@dataclass(slots=True, eq=False)
class InFlight:
    """One exchange under way.

    Args:
      number: of its part; alike on all replicas.
      step: it started at.
      round_number: of its messages; differs from the step where a step has several backward passes.
      transfer: as the schedule planned it.
      kept: for each of its buckets what the merge needs again, by name; ``own`` is what this replica gave.
      weight: of the contribution.
      rider: of the contribution.
      leads: whether it is the first of its step, which carries what is said once a step.
      absent: which parameters of its part this replica had no gradient for.
      square: of the norm of what was given, where that is measured.
      again: whether it started before the run was resumed.
      started: what carries it; has its channel, which counts its bytes, and its result.
      began_s: when it started, in seconds on the run's clock.
      before: the reducer's state when it started.
      ended_s: when its result was there; noted a moment after.
      times: what the decider has measured, where the schedule asked.
      unused: places in its buckets that no replica had a gradient for; noted when it is merged.
      never: places that none has ever had one for.
    """

    number: int
    step: int
    round_number: int
    transfer: Transfer
    kept: dict[int, dict[str, Tensor]]
    weight: float
    rider: Tensor
    leads: bool
    absent: Places
    square: float = 0.0
    again: bool = False
    started: Started[Reduced] = field(init=False)
    began_s: float = field(init=False)
    before: CodecState | None = None
    ended_s: float | None = None
    times: Pending[Decision] | None = None
    unused: PlacesByBucket = field(default_factory=dict)
    never: PlacesByBucket = field(default_factory=dict)

    @property
    def channel(self) -> ExchangeChannel:
        """Counts its bytes."""
        return self.started.channel

    @property
    def result(self) -> Pending[Reduced]:
        """What it brings."""
        return self.started.result

    @property
    def nbytes(self) -> int:
        """Of what it keeps beside the reducer's own."""
        return sum(tensor.nbytes for kept in self.kept.values() for tensor in kept.values())

    def own(self) -> Tensor:
        """Returns a copy of what was given, where it is kept."""
        return joined([self.kept[bucket.index]["own"].clone() for bucket in buckets_of(self.transfer.part)])

    async def carry(
        self,
        reducer: Reducer,
        channel: ExchangeChannel,
        slot: StateSlot,
        tensor: Tensor,
        before: CodecState | None = None,
    ) -> Reduced:
        """The exchange itself; notes the reducer's state at its start, which is ``before`` where that is given.

        Args:
          reducer: carries it.
          channel: of it.
          slot: the part's.
          tensor: given away to the reducer.
          before: for an exchange that is made again.
        """
        if before is not None:
            slot.state = before
        self.before = slot.state
        given = Contribution(tensor, self.weight, self.rider)
        reduced = await reducer.reduce(channel, slot, given, step=self.step)
        await channel.computed()
        return reduced

    async def state_dict(self, now: CodecState) -> State:
        """As it was given to the reducer, which a resumed run does again; ``now`` is the reducer's state."""
        before = self.before or now  # one whose result another replica has given never began
        return {
            "number": self.number,
            "step": self.step,
            "round_number": self.round_number,
            "due_step": self.transfer.due_step,
            "merge": {"kind": type(self.transfer.merge).__name__, "settings": asdict(self.transfer.merge)},  # type: ignore[call-overload]
            "kept": {str(index): kept for index, kept in self.kept.items()},
            "weight": self.weight,
            "rider": self.rider,
            "leads": self.leads,
            "absent": list(self.absent),
            "square": self.square,
            "before": {"shared": before.shared, "local": before.local},
            "times": None if self.times is None else (await self.times).value,
        }


class Launcher:
    """Launches a replica's exchanges, which the communication thread carries, and holds those that are not merged.

    Args:
      runtime: the world.
      reducer: carries the exchanges.
      kinds: the merges that there are, by name.
      slots: the reducer's states.
      parts: what exchanges move, by number.
    """

    def __init__(
        self,
        runtime: Runtime,
        reducer: Reducer,
        kinds: Mapping[str, type[Merge]],
        slots: Slots,
        parts: Mapping[int, Part],
    ) -> None:
        self._runtime, self._reducer, self._kinds = runtime, reducer, kinds
        self._slots, self._parts = slots, parts
        self.in_flight: list[InFlight] = []
        """In the order of their starts."""

    @property
    def busy(self) -> bool:
        """Whether any exchange has no result yet."""
        return any(not exchange.result.done for exchange in tuple(self.in_flight))

    @property
    def nbytes(self) -> int:
        """Of what is kept for merges."""
        return sum(exchange.nbytes for exchange in self.in_flight)

    def of(self, kind: type[Merge]) -> list[InFlight]:
        """The exchanges of one kind of merge."""
        return [exchange for exchange in self.in_flight if type(exchange.transfer.merge) is kind]

    def due(self, step: int, *, gradients: bool) -> list[InFlight]:
        """The exchanges that are due at a step or before, those of gradients or all others."""
        return [
            exchange
            for exchange in self.in_flight
            if (exchange.transfer.merge.moves == "gradient") == gradients
            and exchange.transfer.due_step <= step
        ]

    def launch(
        self, exchange: InFlight, given: Tensor, before: CodecState | None = None, *, ends_step: bool = False
    ) -> None:
        """Starts an exchange.

        Args:
          exchange: to start.
          given: the contribution, which the reducer takes over.
          before: the reducer's state, of an exchange that is made again.
          ends_step: whether it is the last to start at its step.
        """
        runtime = self._runtime
        slot = self._slots[exchange.number]
        exchange.began_s = runtime.now()

        def arrived(_: object) -> None:
            exchange.ended_s = runtime.now()

        first = [given]
        # The first attempt may write in what is given; another needs the same numbers.
        keeps_own = all("own" in kept for kept in exchange.kept.values())
        copy = None if runtime.elastic is None or keeps_own else given.clone()

        def carry(channel: ExchangeChannel) -> Coroutine[Pending[Any], None, Reduced]:
            tensor = first.pop() if first else exchange.own() if copy is None else copy.clone()
            return exchange.carry(self._reducer, channel, slot, tensor, before)

        def rewind() -> None:
            if exchange.before is not None:
                slot.state = exchange.before

        number = Purpose.STEP.at(exchange.round_number)
        exchange.started = start(
            runtime, number, exchange.number, carry, _VALUES, rewind=rewind, ends_step=ends_step
        )
        exchange.result.on_done(arrived)
        self.in_flight.append(exchange)

    async def state_dict(self) -> State:
        """The exchanges as they were given to the reducer."""
        return {
            f"{i:06}": await exchange.state_dict(self._slots[exchange.number].state)
            for i, exchange in enumerate(self.in_flight)
        }

    def launch_again(self, state: State) -> None:
        """Starts an exchange of :meth:`state_dict` again, in a run that goes on.

        A replica that joins the run has given nothing to it, and is given its result.
        """
        part, kind = self._parts[state["number"]], state["merge"]["kind"]
        merge = self._kinds[kind](**state["merge"]["settings"])
        kept = {int(index): dict(kept) for index, kept in state["kept"].items()}
        exchange = InFlight(
            state["number"],
            state["step"],
            state["round_number"],
            Transfer(part, state["due_step"], merge),
            kept,
            state["weight"],
            state["rider"],
            state["leads"],
            tuple(state["absent"]),
            state["square"],
            again=True,
        )
        if state["times"] is not None:
            exchange.times = done(Decision("times", exchange.step, state["times"]))
        if self._runtime.elastic is not None and self._runtime.elastic.joins:
            for each in kept.values():
                each["own"].zero_()
            exchange.weight, exchange.square, exchange.absent, exchange.again = 0.0, 0.0, (), False
            exchange.rider = torch.zeros_like(exchange.rider)
        self.launch(exchange, exchange.own(), CodecState(state["before"]["shared"], state["before"]["local"]))


def _packed(reduced: Reduced) -> tuple[Tensor, ...]:
    """A result with what it teaches all alike; a replica that is given it loses what it would have left of its own."""
    result = reduced.mean, torch.tensor([reduced.weight], dtype=torch.float64), reduced.rider
    if not reduced.taught:
        return result
    return *result, pack_tree(reduced.taught)


def _unpacked(tensors: tuple[Tensor, ...]) -> Reduced:
    mean, weight, rider, *taught = tensors
    if not taught:
        return Reduced(mean, float(weight), rider)
    shared = unpack_tree(taught[0])

    def learn(now: CodecState) -> CodecState:
        return CodecState({**now.shared, **shared}, now.local)

    return Reduced(mean, float(weight), rider, learn, taught=shared)


_VALUES = Values(_packed, _unpacked)


def joined(tensors: list[Tensor]) -> Tensor:
    """One flat tensor of several; a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class LinkGate:
    """Shut from the first launch of exchanges that a step waits for until they are merged; see
    :class:`farflung.types.Gate`.

    The thread that trains shuts and opens it; what waits for it runs where exchanges do. There, what saw it open sends
    before exchanges that were launched afterwards begin, since each runs undisturbed up to its next wait.

    Args:
      runtime: the world.
      under_way: whether exchanges are.
      overlaps: whether some of them go on beside computing.
    """

    def __init__(self, runtime: Runtime, under_way: Callable[[], bool], *, overlaps: bool) -> None:
        self._runtime, self._under_way, self._overlaps = runtime, under_way, overlaps
        self._opens: Pending[None] | None = None
        """Done when it opens; ``None`` while it is open."""

    def now(self) -> float:
        return self._runtime.now()

    def shut(self) -> None:
        """Nothing sets out any more."""
        if self._opens is None:
            self._opens = Pending()

    def open(self) -> None:
        """Opens the gate to all waits."""
        opens, self._opens = self._opens, None
        if opens is not None:
            opens.set(None)

    async def opened(self, rest_s: float = 0.0) -> float:
        """Rests where exchanges are under way that no step waits for, then waits until it is open."""
        if rest_s and self._overlaps and self._under_way():
            await self._runtime.sleep_until(self.now() + rest_s)
        # It may have been shut again since the wait was over.
        while (opens := self._opens) is not None:
            await opens
        return self.now()
