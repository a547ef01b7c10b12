"""The reducer's state for each part of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from farflung.seeding import derive
from farflung.types import (
    ChecksRun,
    CodecState,
    Json,
    Reduced,
    Reducer,
    Reports,
    Seeds,
    State,
    StateSlot,
    TensorSpec,
)

__all__ = ["Slots"]


class Slots:
    """One slot for each part, by number.

    The thread that carries exchanges encodes with them. Another one learns while none of them is about to encode.

    Args:
      reducer: whose state they hold.
      specs: of the flat tensor of each part, by number.
      seed: the run's.
      rank: this replica's.
      steps: of the run, where that is known.

    Raises:
      ConfigError: the reducer cannot carry such parts, or is not made for so few steps.
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
        if isinstance(reducer, ChecksRun):
            reducer.check(list(specs.values()), steps)
        self._reducer = reducer
        self._slots = {
            number: StateSlot(
                reducer.init(spec, Seeds(derive(seed, "codec", number), derive(seed, "codec", number, rank)))
            )
            for number, spec in specs.items()
        }

    def __getitem__(self, number: int) -> StateSlot:
        return self._slots[number]

    def __iter__(self) -> Iterator[StateSlot]:
        return iter(self._slots.values())

    def learn(self, number: int, reduced: Reduced, *, last: bool) -> None:
        """Takes in what a result teaches.

        Args:
          number: of the part whose result is merged.
          reduced: the result.
          last: whether no other exchange of its step is left to merge.
        """
        if reduced.learn is not None:
            self._slots[number].state = reduced.learn(self._slots[number].state)
        if last and reduced.learn_together is not None:
            states = {each: slot.state for each, slot in self._slots.items()}
            for each, state in reduced.learn_together(states).items():
                self._slots[each].state = state

    def report(self) -> Mapping[str, Json]:
        """What the reducer has to tell."""
        if not isinstance(self._reducer, Reports):
            return {}
        return self._reducer.report([slot.state.shared for slot in self])

    def state_dict(self) -> tuple[State, State]:
        """The halves of all states that are alike on all replicas, and those that are this one's own."""
        shared = {str(number): slot.state.shared for number, slot in self._slots.items()}
        own = {str(number): slot.state.local for number, slot in self._slots.items()}
        return shared, own

    def load_state_dict(self, shared: State, own: State) -> None:
        """Continues from :meth:`state_dict`."""
        for number, slot in self._slots.items():
            slot.state = CodecState(shared[str(number)], own[str(number)])
