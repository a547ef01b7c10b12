"""Exchanges under way, and how they outlive a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from farflung.comm import ExchangeChannel
from farflung.errors import Unsupported
from farflung.tasks import Pending
from farflung.types import (
    Bucket,
    CodecState,
    Contribution,
    Decision,
    Reduced,
    Reducer,
    Replace,
    State,
    StateSlot,
    Swap,
    Transfer,
)

__all__ = ["Flight", "bucket_of", "carried"]


@dataclass(slots=True, eq=False)
class Flight:
    """One exchange under way.

    Args:
      step: it started at.
      transfer: as the schedule planned it.
      own: what this replica gave, where it is needed again: for a swap, a prediction or a checkpoint.
      weight: of the contribution.
      rider: of the contribution.
      at: the parameters that the gradient was taken at, where a correction needs them.
      channel: counts its bytes.
      began_s: when it started, in seconds on the run's clock.
      result: what it brings.
      before: the reducer's state when it started.
      ended_s: when its result was there; noted a moment after.
      times: what the decider has measured, where the schedule asked.
    """

    step: int
    transfer: Transfer
    own: Tensor | None
    weight: float
    rider: Tensor
    at: Tensor | None
    channel: ExchangeChannel
    began_s: float
    result: Pending[Reduced] = field(init=False)
    before: CodecState | None = None
    ended_s: float | None = None
    times: Pending[Decision] | None = None

    @property
    def index(self) -> int:
        """Of its bucket."""
        return bucket_of(self.transfer).index

    @property
    def nbytes(self) -> int:
        """Of what it keeps beside the reducer's own; a swap's block is its anchor's to count."""
        kept = (self.at, None if self.transfer.what == "update" else self.own)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    async def state_dict(self) -> State:
        """As it was given to the reducer, which a resumed run does again."""
        assert self.before is not None
        assert self.own is not None
        return {
            "step": self.step,
            "bucket": self.index,
            "what": self.transfer.what,
            "due_step": self.transfer.due_step,
            "merge": "swap" if isinstance(self.transfer.merge, Swap) else "replace",
            "correction": getattr(self.transfer.merge, "correction", 0.0),
            "own": self.own,
            "weight": self.weight,
            "rider": self.rider,
            "at": {} if self.at is None else {"weights": self.at},
            "before": {"shared": self.before.shared, "local": self.before.local},
            "times": None if self.times is None else (await self.times).value,
        }

    @staticmethod
    def transfer_of(state: State, buckets: tuple[Bucket, ...]) -> Transfer:
        """The transfer of a flight that :meth:`state_dict` describes."""
        merge = Swap() if state["merge"] == "swap" else Replace(state["correction"])
        return Transfer(buckets[state["bucket"]], state["what"], state["due_step"], merge=merge)


async def carried(
    reducer: Reducer, flight: Flight, slot: StateSlot, tensor: Tensor, before: CodecState | None = None
) -> Reduced:
    """One exchange; notes the reducer's state at its start, which is ``before`` where that is given.

    Args:
      reducer: carries it.
      flight: gives weight and rider.
      slot: the bucket's.
      tensor: given away to the reducer.
      before: for an exchange that is made again.
    """
    if before is not None:
        slot.state = before
    flight.before = slot.state
    own = Contribution(tensor, flight.weight, flight.rider)
    return await reducer.reduce(flight.channel, slot, own, step=flight.step)


def bucket_of(transfer: Transfer) -> Bucket:
    """The bucket that a transfer moves.

    Raises:
      Unsupported: it moves something else.
    """
    if not isinstance(transfer.part, Bucket):
        raise Unsupported(f"no replica moves a {type(transfer.part).__name__} yet")
    return transfer.part
