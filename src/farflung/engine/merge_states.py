"""States of a schedule's merges, one for each bucket; see :class:`farflung.types.MergeState`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from farflung.engine.buckets import GradientBucket, GradientBuckets
from farflung.engine.flight import Flight
from farflung.errors import Unsupported
from farflung.moments import drop_state
from farflung.types import Merge, MergeState, Schedule, State

__all__ = ["MergeStates"]


class MergeStates:
    """States of each bucket and kind of merge for a whole run, without anchors until :meth:`reset_anchors`.

    Args:
      schedule: Schedule with the merges.
      buckets: Buckets of the model.
      optimizer: Optimizer of the buckets; ``None`` if unknown.

    Raises:
      Unsupported: two merges are of one kind.
      ConfigError: a merge does not support the optimizer.
    """

    def __init__(
        self, schedule: Schedule, buckets: GradientBuckets, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._buckets = buckets
        self.kinds: dict[str, type[Merge]] = {}
        """Classes of merges by name."""
        self._merges: dict[type[Merge], Merge] = {}
        for merge in schedule.merges:
            if type(merge) in self._merges:
                raise Unsupported(
                    f"schedule {type(schedule).__name__}: merge {type(merge).__name__} is named twice: name it once, "
                    "and give transfers their own settings"
                )
            self._merges[type(merge)] = merge
            self.kinds[type(merge).__name__] = type(merge)
            if optimizer is not None:
                merge.check(optimizer)
        self._states = {kind: [MergeState() for _ in buckets] for kind in self._merges}

    def __contains__(self, merge: Merge) -> bool:
        return type(merge) in self._merges

    def __iter__(self) -> Iterator[tuple[Merge, GradientBucket, MergeState]]:
        for kind, states in self._states.items():
            for bucket, state in zip(self._buckets, states, strict=True):
                yield self._merges[kind], bucket, state

    @property
    def has_diverged(self) -> bool:
        """Returns True if ranks differ after the last result was applied; equal on all ranks."""
        return any(state.has_diverged for _, _, state in self)

    @property
    def should_evaluate_anchor(self) -> bool:
        """Returns True if the anchor is evaluated while ranks differ."""
        return any(merge.should_evaluate_anchor for merge in self._merges.values())

    @property
    def anchors(self) -> list[Tensor] | None:
        """Parameters without contributions in flight, flat by bucket; ``None`` if no merge has anchors."""
        for states in self._states.values():
            anchors = [state.anchor for state in states if state.anchor is not None]
            if anchors:
                return anchors
        return None

    @property
    def nbytes(self) -> int:
        """Number of bytes of all states."""
        return sum(state.nbytes for _, _, state in self)

    def contribute(
        self, merge: Merge, buckets: Sequence[GradientBucket], delay: int
    ) -> tuple[list[Tensor], dict[int, State]]:
        """Returns the contribution of each bucket to an exchange, and the saved state by bucket.

        The saved state is pending until :meth:`apply`.
        """
        tensors, saved = [], {}
        for bucket in buckets:
            state = self._states[type(merge)][bucket.index]
            tensor, saved[bucket.index] = merge.contribute(bucket, state, delay)
            state.has_updates = False
            state.pending.append(saved[bucket.index])
            tensors.append(tensor)
        return tensors, saved

    def add_restarted(self, flight: Flight) -> None:
        """Adds the saved state of a restarted exchange to the pending ones."""
        for index, saved in flight.saved.items():
            self._states[type(flight.merge)][index].pending.append(saved)

    def apply(self, flight: Flight, mean: Tensor | None) -> None:
        """Applies the result of an exchange; ``None`` reverts the rank's own contribution."""
        merge, buckets = flight.merge, flight.unit.buckets
        means: Sequence[Tensor | None] = [mean] * len(buckets)
        if mean is not None and len(buckets) > 1:
            means = mean.split([bucket.gradient.numel() for bucket in buckets])
        for bucket, bucket_mean in zip(buckets, means, strict=True):
            state, saved = self._states[type(merge)][bucket.index], flight.saved[bucket.index]
            state.pending = [contribution for contribution in state.pending if contribution is not saved]
            merge.apply(bucket, state, saved, bucket_mean, flight.delay)
            if merge.optimizer_state == "reset":
                assert bucket.optimizer is not None
                drop_state(bucket.optimizer, bucket.parameters)

    def mark_updated(self) -> None:
        """Records that the optimizer has stepped."""
        for _, _, state in self:
            state.has_updates = True

    def reset_anchors(self) -> None:
        """Sets anchors to the parameters, which are equal on all ranks; frees each old one before the next."""
        for merge, bucket, state in self:
            if merge.average_target != "gradient":
                state.anchor, state.local = None, {}
                initial = merge.init(bucket.copy_weights())
                state.anchor, state.local = initial.anchor, initial.local
                state.shared.update(initial.shared)
                state.has_diverged = state.has_updates = False

    def reset_local_states(self, *, to_anchors: bool) -> None:
        """Resets local states to those of a rank that joins at the anchors; contributions in flight are unchanged.

        Args:
          to_anchors: True to set parameters to the anchors.
        """
        for merge, bucket, state in self:
            if state.anchor is not None:
                if to_anchors:
                    bucket.load_weights(state.anchor)
                state.local, state.has_updates = merge.init(state.anchor.clone()).local, False

    def finish(self) -> None:
        """Completes merges at the end of a run, when nothing is in flight."""
        for merge, bucket, state in self:
            merge.finish(bucket, state)

    def state_dict(self) -> tuple[State, State]:
        """Returns the shared and the local half, without the saved state of flights."""
        shared: dict[str, State] = {name: {} for name in self.kinds}
        local: dict[str, State] = {name: {} for name in self.kinds}
        for merge, bucket, state in self:
            name, key = type(merge).__name__, str(bucket.index)
            anchor = {} if state.anchor is None else {"anchor": state.anchor}
            shared[name][key] = {**anchor, **state.shared, "has_diverged": state.has_diverged}
            local[name][key] = {**state.local, "has_updates": state.has_updates}
        return shared, local

    def load_state_dict(self, shared: Mapping[str, State], local: Mapping[str, State]) -> None:
        """Restores :meth:`state_dict`, with nothing in flight."""
        for merge, bucket, state in self:
            name, key = type(merge).__name__, str(bucket.index)
            state.shared = _copy_state(shared[name][key], bucket)
            state.local = _copy_state(local[name][key], bucket)
            state.anchor = state.shared.pop("anchor", None)
            state.has_diverged = state.shared.pop("has_diverged")
            state.has_updates = state.local.pop("has_updates")
            state.pending = []


def _copy_state(state: State, bucket: GradientBucket) -> State:
    device = bucket.gradient.device
    return {
        name: value.to(device, copy=True) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }
