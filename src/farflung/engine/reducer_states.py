"""States of the reducer, one for each unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from farflung.errors import CheckpointError
from farflung.seeding import derive_seed
from farflung.trees import has_tensors, list_keys
from farflung.types import CodecState, Json, Reducer, ReduceResult, Seeds, State, StateSlot, TensorSpec

__all__ = ["ReducerStates"]


class ReducerStates:
    """Slots with the reducer's state of each unit, by number.

    The communication thread encodes with them. The training thread updates them while no exchange is about to encode.

    Args:
      reducer: Reducer of the units.
      specs: Spec of each unit's flat tensor, by number.
      seed: Seed of the run.
      rank: Rank of this replica.
      steps: Number of steps of the run; ``None`` if unknown.

    Raises:
      ConfigError: the reducer does not support such units, or so few steps.
    """

    def __init__(
        self,
        reducer: Reducer,
        specs: Mapping[int, TensorSpec],
        seed: int,
        rank: int,
        *,
        steps: int | None = None,
    ) -> None:
        reducer.check(list(specs.values()), steps)
        self._reducer = reducer
        self._slots = {
            number: StateSlot(
                reducer.init(
                    spec, Seeds(derive_seed(seed, "codec", number), derive_seed(seed, "codec", number, rank))
                )
            )
            for number, spec in specs.items()
        }
        self._keys = {number: list_keys(slot.state.local) for number, slot in self._slots.items()}

    def __getitem__(self, number: int) -> StateSlot:
        return self._slots[number]

    def __iter__(self) -> Iterator[StateSlot]:
        return iter(self._slots.values())

    @property
    def has_local_tensors(self) -> bool:
        """Returns True if this replica keeps tensors of its own, such as what its codec has left out."""
        return any(map(has_tensors, (slot.state.local for slot in self)))

    def update(self, number: int, result: ReduceResult, *, is_last: bool) -> None:
        """Updates a unit's state from its result, and all states jointly after the last result of a step.

        Args:
          number: Number of the unit.
          result: Result of its exchange.
          is_last: True if no other exchange of its step is in flight.
        """
        if result.update_state is not None:
            self._slots[number].state = result.update_state(self._slots[number].state)
        if is_last and result.update_all_states is not None:
            states = {index: slot.state for index, slot in self._slots.items()}
            for index, state in result.update_all_states(states).items():
                self._slots[index].state = state

    def report(self) -> Mapping[str, Json]:
        """Returns the reducer's figures by name."""
        return self._reducer.report([slot.state.shared for slot in self])

    def state_dict(self) -> tuple[State, State]:
        """Returns the shared and the local halves of all states."""
        shared = {str(number): slot.state.shared for number, slot in self._slots.items()}
        local = {str(number): slot.state.local for number, slot in self._slots.items()}
        return shared, local

    def check_local_state(self, local: State) -> None:
        """Checks that the local halves of :meth:`state_dict` are complete.

        Raises:
          CheckpointError: one lacks an initial key, as a state of another version may.
        """
        for number, keys in self._keys.items():
            if str(number) in local and (missing_keys := keys - list_keys(local[str(number)])):
                raise CheckpointError(
                    f"the reducer's state in the checkpoint lacks {', '.join(sorted(missing_keys))}: "
                    "use the version that wrote it, or start the run anew"
                )

    def load_state_dict(self, shared: State, local: State) -> None:
        """Restores :meth:`state_dict`, after :meth:`check_local_state`."""
        for number, slot in self._slots.items():
            slot.state = CodecState(shared[str(number)], local.get(str(number), slot.state.local))
