"""Exchanges under way, how they outlive a checkpoint, and the gate that keeps other traffic off the link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel
from farflung.replica.unused import Places
from farflung.tasks import Pending
from farflung.types import (
    Channel,
    CodecState,
    Contribution,
    Decision,
    Merge,
    Part,
    Reduced,
    Runtime,
    State,
    StateSlot,
    Transfer,
)

__all__ = ["Carrier", "Flight", "LinkGate", "joined"]


class Carrier(Protocol):
    """What exchanges are carried by: a :class:`farflung.types.Reducer`, or a server."""

    async def reduce(self, channel: Channel, slot: StateSlot, own: Contribution, *, step: int) -> Reduced:
        """See :meth:`farflung.types.Reducer.reduce`."""
        ...


@dataclass(slots=True, eq=False)
class Flight:
    """One exchange under way.

    Args:
      number: of its part; alike on all replicas.
      step: it started at.
      transfer: as the schedule planned it.
      kept: for each of its buckets what the merge needs again, by name; ``own`` is what this replica gave.
      weight: of the contribution.
      rider: of the contribution.
      leads: whether it is the first of its step, which carries what is said once a step.
      absent: which parameters of its part this replica had no gradient for.
      channel: counts its bytes.
      began_s: when it started, in seconds on the run's clock.
      result: what it brings.
      before: the reducer's state when it started.
      ended_s: when its result was there; noted a moment after.
      times: what the decider has measured, where the schedule asked.
      square: of the norm of what was given, where that is measured.
      again: whether it started before the run was resumed.
      unused: places in its buckets that no replica had a gradient for; noted when it is merged.
      never: places that none has ever had one for.
    """

    number: int
    step: int
    transfer: Transfer
    kept: dict[int, dict[str, Tensor]]
    weight: float
    rider: Tensor
    leads: bool
    absent: Places
    channel: ExchangeChannel
    began_s: float
    result: Pending[Reduced] = field(init=False)
    before: CodecState | None = None
    ended_s: float | None = None
    times: Pending[Decision] | None = None
    square: float = 0.0
    again: bool = False
    unused: Mapping[int, frozenset[int]] = field(default_factory=dict)
    never: Mapping[int, frozenset[int]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of what it keeps beside the reducer's own."""
        return sum(tensor.nbytes for kept in self.kept.values() for tensor in kept.values())

    async def carry(
        self, carrier: Carrier, slot: StateSlot, tensor: Tensor, before: CodecState | None = None
    ) -> Reduced:
        """The exchange itself; notes the reducer's state at its start, which is ``before`` where that is given.

        Args:
          carrier: of it.
          slot: the part's.
          tensor: given away to the reducer.
          before: for an exchange that is made again.
        """
        if before is not None:
            slot.state = before
        self.before = slot.state
        given = Contribution(tensor, self.weight, self.rider)
        reduced = await carrier.reduce(self.channel, slot, given, step=self.step)
        await self.channel.computed()
        return reduced

    async def state_dict(self) -> State:
        """As it was given to the reducer, which a resumed run does again."""
        assert self.before is not None
        return {
            "number": self.number,
            "step": self.step,
            "due_step": self.transfer.due_step,
            "merge": {"kind": type(self.transfer.merge).__name__, "settings": asdict(self.transfer.merge)},  # type: ignore[call-overload]
            "kept": {str(index): kept for index, kept in self.kept.items()},
            "weight": self.weight,
            "rider": self.rider,
            "leads": self.leads,
            "absent": list(self.absent),
            "square": self.square,
            "before": {"shared": self.before.shared, "local": self.before.local},
            "times": None if self.times is None else (await self.times).value,
        }

    @staticmethod
    def transfer_of(state: State, parts: Mapping[int, Part], merges: Mapping[str, type[Merge]]) -> Transfer:
        """The transfer of a flight that :meth:`state_dict` describes; ``merges`` are the schedule's, by name."""
        merge = merges[state["merge"]["kind"]](**state["merge"]["settings"])
        return Transfer(parts[state["number"]], state["due_step"], merge)

    @staticmethod
    def kept_of(state: State) -> dict[int, dict[str, Tensor]]:
        return {int(index): dict(kept) for index, kept in state["kept"].items()}


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
