"""States of the reducer, one for each unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from farflung.errors import CheckpointError
from farflung.seeding import derive
from farflung.trees import keys_of
from farflung.types import CodecState, Json, Reduced, Reducer, Seeds, State, StateSlot, TensorSpec

__all__ = ["ReducerStates"]


class ReducerStates:
    """The reducer's state of each unit, in a slot, by number.

    The communication thread encodes with them. The training thread updates them while no exchange is about to encode.

    Args:
      reducer: whose states these are.
      specs: of each unit's flat tensor, by number.
      seed: of the run.
      rank: this one.
      steps: of the run; ``None`` if that is not known.

    Raises:
      ConfigError: the reducer cannot carry such units, or is not made for so few steps.
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
                reducer.init(spec, Seeds(derive(seed, "codec", number), derive(seed, "codec", number, rank)))
            )
            for number, spec in specs.items()
        }
        self._keys = {number: keys_of(slot.state.local) for number, slot in self._slots.items()}

    def __getitem__(self, number: int) -> StateSlot:
        return self._slots[number]

    def __iter__(self) -> Iterator[StateSlot]:
        return iter(self._slots.values())

    def learn(self, number: int, reduced: Reduced, *, last: bool) -> None:
        """Updates states by a result.

        Args:
          number: of the unit that has the result.
          reduced: the result.
          last: whether no other exchange of its step is in flight.
        """
        if reduced.learn is not None:
            self._slots[number].state = reduced.learn(self._slots[number].state)
        if last and reduced.learn_together is not None:
            states = {each: slot.state for each, slot in self._slots.items()}
            for each, state in reduced.learn_together(states).items():
                self._slots[each].state = state

    def report(self) -> Mapping[str, Json]:
        """Returns the reducer's own figures, by name."""
        return self._reducer.report([slot.state.shared for slot in self])

    def state_dict(self) -> tuple[State, State]:
        """Returns the halves of all states that are equal on all ranks, and those of this rank."""
        shared = {str(number): slot.state.shared for number, slot in self._slots.items()}
        own = {str(number): slot.state.local for number, slot in self._slots.items()}
        return shared, own

    def check_own(self, own: State) -> None:
        """Checks that a rank's own halves of :meth:`state_dict` hold what the reducer keeps.

        Raises:
          CheckpointError: one lacks what it has from the beginning, as that of another version may.
        """
        for number, keys in self._keys.items():
            if str(number) in own and (lacking := keys - keys_of(own[str(number)])):
                raise CheckpointError(
                    f"the reducer's state in the checkpoint lacks {', '.join(sorted(lacking))}: "
                    "use the version that wrote it, or start the run anew"
                )

    def load_state_dict(self, shared: State, own: State) -> None:
        """Continues from :meth:`state_dict`, after :meth:`check_own`."""
        for number, slot in self._slots.items():
            slot.state = CodecState(shared[str(number)], own.get(str(number), slot.state.local))
