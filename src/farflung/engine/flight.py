"""Exchange in flight, from its launch until its result is applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, ExchangeHandle, Purpose, ResultCodec, start_exchange
from farflung.engine.placement import move_state, record_stream
from farflung.engine.units import Places, UnitState
from farflung.state_trees import pack_tree, unpack_tree
from farflung.tasks import Pending, create_completed
from farflung.types import CodecState, Contribution, Decision, Merge, Reducer, ReduceResult, Runtime, State

__all__ = ["Flight", "concatenate", "zero_contributions"]


@dataclass(slots=True, eq=False)
class Flight:
    """Exchange of one unit, from its launch until its result is applied.

    Args:
      unit: State of the unit.
      step: Step at which it starts.
      round_number: Number of its messages; differs from the step if a step has several backward passes.
      delay: Number of steps until its result is due.
      merge: Merge that applies the result.
      saved: Saved state of the merge by bucket and name; ``contribution`` is this rank's contribution.
      weight: Weight of this rank in the mean.
      metadata: Float64 vector that is summed with the tensor.
      is_first_of_step: True if it is the first of its step, whose metadata has the numbers of extensions.
      zero_places: Parameters of the unit without a gradient.
      notes: JSON values of extensions by name.
    """

    unit: UnitState
    step: int
    round_number: int
    delay: int
    merge: Merge
    saved: dict[int, State]
    weight: float
    metadata: Tensor
    is_first_of_step: bool
    zero_places: Places = ()
    notes: dict[str, Any] = field(default_factory=dict)
    exchange: ExchangeHandle[ReduceResult] = field(init=False)
    start_s: float = field(init=False)
    end_s: float | None = field(init=False, default=None)
    """Time of the result on the run's clock, recorded shortly after it."""
    state_before: CodecState | None = field(init=False, default=None)
    """State of the reducer when the exchange started."""
    decider_times: Pending[Decision] | None = field(init=False, default=None)
    """Times measured by the decider, if requested by the schedule."""

    @property
    def merge_step(self) -> int:
        """Step at which the result is applied."""
        return self.step + self.delay

    @property
    def nbytes(self) -> int:
        """Number of bytes saved for the merge."""
        values = (value for saved in self.saved.values() for value in saved.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    def launch(
        self,
        runtime: Runtime,
        reducer: Reducer,
        tensor: Tensor,
        state: CodecState | None = None,
        *,
        is_last_of_step: bool = False,
        priority: int | None = None,
    ) -> None:
        """Starts the exchange on the communication thread.

        Args:
          runtime: Runtime of this replica.
          reducer: Reducer of the unit.
          tensor: Contribution, given away to the reducer.
          state: State of the reducer, if the exchange is repeated.
          is_last_of_step: True if it is the last to start at its step.
          priority: Priority of its messages.
        """
        self.start_s = runtime.read_clock()
        originals, wait_until_filled = [tensor], record_stream(tensor.device)
        # The first attempt may write in the tensor; another one needs the same numbers.
        is_saved = all("contribution" in saved for saved in self.saved.values())
        backup = None if runtime.elastic is None or is_saved else tensor.clone()

        async def exchange(channel: ExchangeChannel) -> ReduceResult:
            wait_until_filled()
            if originals:
                values = originals.pop()
            else:
                values = self._copy_contribution() if backup is None else backup.clone()
            slot = self.unit.slot
            if state is not None:
                slot.state = state
            self.state_before = slot.state
            contribution = Contribution(values, self.weight, self.metadata)
            result = await reducer.reduce(channel, slot, contribution, step=self.step)
            await channel.wait_computed()
            return result

        def rewind() -> None:
            if self.state_before is not None:
                self.unit.slot.state = self.state_before

        def handle_end(_: object) -> None:
            self.end_s = runtime.read_clock()

        number = Purpose.STEP.build_exchange_id(self.round_number)
        self.exchange = start_exchange(
            runtime,
            number,
            self.unit.number,
            exchange,
            _RESULT,
            rewind=rewind,
            is_last_of_step=is_last_of_step,
            priority=priority,
        )
        self.exchange.result.add_done_callback(handle_end)

    def _copy_contribution(self) -> Tensor:
        """Returns a copy of the saved contribution."""
        return concatenate([self.saved[bucket.index]["contribution"].clone() for bucket in self.unit.buckets])

    async def state_dict(self) -> State:
        """Returns the original input of the exchange, from which a resumed run repeats it."""
        # One whose result another rank gave never began.
        codec_state = self.state_before or self.unit.slot.state
        return {
            "number": self.unit.number,
            "step": self.step,
            "round_number": self.round_number,
            "delay": self.delay,
            "merge": {"kind": type(self.merge).__name__, "settings": asdict(self.merge)},  # type: ignore[call-overload]
            "saved": {str(index): saved for index, saved in self.saved.items()},
            "weight": self.weight,
            "metadata": self.metadata,
            "is_first_of_step": self.is_first_of_step,
            "zero_places": list(self.zero_places),
            "notes": dict(self.notes),
            "codec_state": {"shared": codec_state.shared, "local": codec_state.local},
            "times": None if self.decider_times is None else (await self.decider_times).value,
        }

    @staticmethod
    def restart(
        state: State, unit: UnitState, merges: Mapping[str, type[Merge]], runtime: Runtime, reducer: Reducer
    ) -> Flight:
        """Restarts an exchange from :meth:`state_dict`.

        A rank that joins the run has not contributed to it and receives its result.
        """
        flight = Flight(
            unit,
            state["step"],
            state["round_number"],
            state["delay"],
            merges[state["merge"]["kind"]](**state["merge"]["settings"]),
            {int(index): move_state(saved, unit.device) for index, saved in state["saved"].items()},
            state["weight"],
            state["metadata"],
            state["is_first_of_step"],
            tuple(state["zero_places"]),
            dict(state["notes"]),
        )
        if state["times"] is not None:
            flight.decider_times = create_completed(Decision("times", flight.step, state["times"]))
        if runtime.elastic is not None and runtime.elastic.is_joining:
            for saved in flight.saved.values():
                saved["contribution"].zero_()
            flight.weight, flight.zero_places, flight.notes = 0.0, (), {}
            flight.metadata = torch.zeros_like(flight.metadata)
        codec_state = move_state(state["codec_state"], unit.device)
        flight.launch(
            runtime,
            reducer,
            flight._copy_contribution(),
            CodecState(codec_state["shared"], codec_state["local"]),
        )
        return flight


def zero_contributions(local: State) -> State:
    """Returns a rank's local half of the engine's state, with zeros for its contributions."""
    flights = {}
    for name, flight in local["flights"].items():
        saved = {
            index: {**state, "contribution": torch.zeros_like(state["contribution"])}
            for index, state in flight["saved"].items()
        }
        codec_state = {**flight["codec_state"], "local": _zero_tree(flight["codec_state"]["local"])}
        flights[name] = {**flight, "saved": saved, "codec_state": codec_state}
    pending: State = {"steps": {}, "numbers": {}}
    return {
        **local,
        "flights": flights,
        "merges": _zero_tree(local["merges"]),
        "reducer": {},
        "metadata": pending,
    }


def concatenate(tensors: list[Tensor]) -> Tensor:
    """Concatenates flat tensors; a single one is returned unchanged."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _zero_tree(tree: Any) -> Any:
    """Returns nested dicts with tensors replaced by zeros."""
    if isinstance(tree, dict):
        return {name: _zero_tree(node) for name, node in tree.items()}
    return torch.zeros_like(tree) if isinstance(tree, Tensor) else tree


def _pack_result(result: ReduceResult) -> tuple[Tensor, ...]:
    """Returns a result as tensors, for a member that lacks it and thereby loses its residual of the exchange."""
    tensors = result.mean, torch.tensor([result.weight], dtype=torch.float64), result.metadata
    if not result.shared_delta:
        return tensors
    return *tensors, pack_tree(result.shared_delta)


def _unpack_result(tensors: tuple[Tensor, ...]) -> ReduceResult:
    mean, weight, metadata, *delta = tensors
    if not delta:
        return ReduceResult(mean, float(weight), metadata)
    shared = unpack_tree(delta[0])

    def update_state(state: CodecState) -> CodecState:
        return CodecState({**state.shared, **shared}, state.local)

    return ReduceResult(mean, float(weight), metadata, update_state, shared_delta=shared)


_RESULT: ResultCodec[ReduceResult] = ResultCodec(_pack_result, _unpack_result)
