"""Parts of a model, buckets and fragments of several, and the reducer's state for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from farflung.errors import CheckpointError, Unsupported
from farflung.seeding import derive
from farflung.trees import keys_of
from farflung.types import (
    Bucket,
    CodecState,
    Json,
    Part,
    Placed,
    Reduced,
    Reducer,
    Schedule,
    Seeds,
    State,
    StateSlot,
    TensorSpec,
)

__all__ = ["Slots", "buckets_of", "numbered", "spec_of"]


def buckets_of(part: Part) -> tuple[Bucket, ...]:
    """Those that a part consists of, in its order."""
    return (part,) if isinstance(part, Bucket) else part.buckets


def numbered(schedule: Schedule, buckets: Sequence[Bucket]) -> dict[int, Part]:
    """A schedule's parts, each with a number of its own: buckets come first, then fragments.

    Raises:
      Unsupported: a bucket that no part moves.
    """
    parts = schedule.parts(buckets)
    left = {bucket.index for bucket in buckets} - {b.index for part in parts for b in buckets_of(part)}
    if left:
        raise Unsupported(
            f"schedule {type(schedule).__name__}: no part of it moves bucket {min(left)}, which would train apart"
        )
    return {part.index if isinstance(part, Bucket) else len(buckets) + part.index: part for part in parts}


def spec_of(part: Part) -> TensorSpec:
    """Of a part's flat tensor, with what it is made of.

    Raises:
      Unsupported: a fragment of unlike dtypes.
    """
    buckets = buckets_of(part)
    dtypes = {bucket.spec.dtype for bucket in buckets}
    if len(dtypes) > 1:
        raise Unsupported(
            f"fragment {part.index} holds {' and '.join(sorted(map(str, dtypes)))}: give each type fragments of its own"
        )
    places: list[Placed] = []
    start = 0
    for bucket in buckets:
        places += [Placed(placed.shape, start + placed.start) for placed in bucket.spec.parts]
        start += bucket.spec.numel
    return TensorSpec((start,), dtypes.pop(), tuple(places))


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
        return self._reducer.report([slot.state.shared for slot in self])

    def state_dict(self) -> tuple[State, State]:
        """The halves of all states that are alike on all replicas, and those that are this one's own."""
        shared = {str(number): slot.state.shared for number, slot in self._slots.items()}
        own = {str(number): slot.state.local for number, slot in self._slots.items()}
        return shared, own

    def check_own(self, own: State) -> None:
        """Checks that a replica's own halves of :meth:`state_dict` hold what the reducer keeps.

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
