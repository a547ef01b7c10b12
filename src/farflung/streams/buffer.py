"""Buffer between the arrival of samples and their use, shared by all streams of arriving samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from farflung.errors import ConfigError, DataError
from farflung.files import wrap_decision_errors
from farflung.options import check_choice, check_integer, check_number
from farflung.types import Arrivals, Json, SampleIds, State, StreamContext

__all__ = ["Buffer", "Full", "Policy", "Weigh", "with_buffer_options"]

S = TypeVar("S", bound=Callable[..., object])

Policy = Literal["persistence", "truncation"]
Full = Literal["pause", "stop", "drop_oldest"]
Weigh = Literal["by_batch", "by_rate"]

MIN_SAMPLES, MAX_SAMPLES = 8, 1024
"""Bounds on the samples of a step that is made of some seconds of the stream, from Tyagi & Swany 2022."""


class Buffer:
    r"""Buffer of samples between their arrival and their use.

    A step takes all samples that have arrived, from ``least`` to ``most``. With ``window_s`` it takes the samples of
    that many seconds of the stream, rounded, where :math:`S_i` is the rate of replica i in samples per second:

    .. math:: b_i = \min(\max(S_i w, b_{\min}), b_{\max})

    Args:
      policy: ``persistence`` keeps samples until they are used, oldest first. With ``truncation`` a step takes the
        newest of the samples that have arrived since the previous step chose, and drops all others.
      least: Minimum number of samples of a step; the run's batch size by default, 8 with ``window_s``.
      most: Maximum number of samples of a step; ``least`` by default, with ``window_s`` 1024 or the backlog if less.
      backlog: Maximum number of waiting samples with ``persistence``; ``None``: unlimited.
      full: Action when more samples wait: ``pause`` stops the source until a step has taken some, ``stop`` ends the
        run with an error, ``drop_oldest`` drops the oldest samples when a step chooses.
      window_s: w, seconds of the stream in a step; ``None``: only ``least`` and ``most`` bound a step.
      weigh: Weight of a step in the mean over the replicas, over the run's batch size: its number of samples with
        ``by_batch``, or :math:`S_i w` with ``by_rate``, where w is 1 without a window.

    Raises:
      ConfigError: A value is out of range.

    References: Tyagi & Swany 2022 (ScaDLES), sections III and IV. Details of truncation and ``drop_oldest`` are ours.
    """

    def __init__(
        self,
        *,
        policy: Policy = "persistence",
        least: int | None = None,
        most: int | None = None,
        backlog: int | None = None,
        full: Full = "pause",
        window_s: float | None = None,
        weigh: Weigh = "by_batch",
    ) -> None:
        check_choice("stream", "policy", policy, get_args(Policy))
        check_choice("stream", "full", full, get_args(Full))
        check_choice("stream", "weigh", weigh, get_args(Weigh))
        for name, value in (("least", least), ("most", most), ("backlog", backlog)):
            if value is not None:
                check_integer("stream", name, value, 1)
        if window_s is not None:
            check_number("stream", "window_s", window_s, 0.001)
        self._is_truncated = policy == "truncation"
        if self._is_truncated and (backlog is not None or full != "pause"):
            raise ConfigError("stream: policy 'truncation' keeps no backlog: leave out backlog and full")
        if backlog is None and full != "pause":
            raise ConfigError(f"stream: full={full!r} says what happens at a backlog: give one")
        self._least_option, self._most_option, self._backlog, self._full = least, most, backlog, full
        self._can_drop = self._is_truncated or full != "pause"
        self._window_s, self._is_by_rate = window_s, weigh == "by_rate"
        self.ids: SampleIds = torch.empty(0, dtype=torch.int64)
        """Ids of all held samples in the order of arrival; returned tensors are never modified."""
        self._num_dropped = 0
        self._oldest_ids: dict[int, int] = {}
        """Smallest id of each lane that may still be held or arrive."""
        self._rate: tuple[int, float] | None = None
        self._selection: tuple[int, list[tuple[int, int]]] | None = None
        """Step that chose last, with the oldest kept id and the number of taken samples of each lane."""
        self._arrivals: Arrivals | None = None
        """Samples of the current step."""

    def prepare(
        self,
        context: StreamContext,
        *,
        rate: float | None = None,
        lanes: int = 1,
        stride: int = 1,
        max_replay_lead: int = 1 << 24,
        on_remove: Callable[[SampleIds], object] = lambda ids: None,
    ) -> None:
        """Prepares the buffer for the first sample.

        Args:
          context: Context of the stream.
          rate: Constant rate :math:`S_i`; ``None`` if it changes or has to be measured.
          lanes: Number of sources, each with an order of its own.
          stride: Divisor of ids whose remainder is the lane; ids of a lane ascend.
          max_replay_lead: Number of ids by which a replayed run may have been ahead of this one.
          on_remove: Callback that receives the ids of samples that are no longer held.

        Raises:
          ConfigError: The bounds contradict each other, or the rate is below them.
        """
        batch = context.batch_size if self._window_s is None else MIN_SAMPLES
        self._min_samples = batch if self._least_option is None else self._least_option
        if self._most_option is not None:
            self._max_samples = self._most_option
        elif self._window_s is None:
            self._max_samples = self._min_samples
        else:
            self._max_samples = max(self._min_samples, min(MAX_SAMPLES, self._backlog or MAX_SAMPLES))
        room = self._max_samples if self._backlog is None else self._backlog
        if not self._min_samples <= self._max_samples <= room:
            raise ConfigError(
                f"stream: least {self._min_samples}, most {self._max_samples}, backlog {room}: none may be "
                f"above the next"
            )
        self._batch_size, self._decide = context.batch_size, context.decide
        row = context.data.get_rows(torch.tensor([0]))
        self._sample_nbytes = row.inputs.nbytes + row.targets.nbytes
        self._fixed_rate, self._on_remove = rate, on_remove
        self.needs_rate = rate is None and (self._window_s is not None or self._is_by_rate)
        """True if the rate has to be measured."""
        self._lanes, self._stride, self._max_lead = lanes, stride, max_replay_lead

    def check_rate(self, rate: float) -> None:
        """Checks that a constant rate supplies enough samples for a step within ``window_s``.

        Raises:
          ConfigError: The rate is too low; the message names a remedy.
        """
        if self._window_s is not None and rate * self._window_s < self._min_samples:
            raise ConfigError(
                f"stream: {rate:g} samples per second bring {rate * self._window_s:g} in window_s={self._window_s:g}, "
                f"and a step takes at least {self._min_samples}: lengthen window_s, or give least"
            )

    @property
    def num_in_use(self) -> int:
        """Number of held samples in the current step; 0 between steps."""
        return 0 if self._arrivals is None else self._arrivals.count or 0

    @property
    def room(self) -> int | None:
        """Number of samples that may arrive before the source has to pause; ``None``: unlimited."""
        if self._backlog is None or self._full != "pause":
            return None
        return max(0, self._backlog - (len(self.ids) - self.num_in_use))

    def get_oldest(self, lane: int = 0) -> int:
        """Returns the smallest id of a lane that the buffer still accepts."""
        return self._oldest_ids.get(lane, 0)

    def add_arrivals(self, ids: SampleIds) -> None:
        """Adds arrived samples, except those that an earlier choice has dropped; enforces no backlog."""
        if self._oldest_ids:
            unwanted = self._mark_unwanted(ids)
            self._drop(ids, unwanted)
            ids = ids[~unwanted]
        if len(ids):
            self.ids = torch.cat([self.ids, ids])

    def poll(self, step: int, rate: Callable[[], float]) -> tuple[int, Arrivals]:
        """Returns the samples of a step, as far as they are known.

        Args:
          step: Number of the step.
          rate: Function that returns the current :math:`S_i`, if it is not constant.

        Returns:
          Number of missing samples, and the held samples; if none are missing, also the number that the step takes.

        Raises:
          DataError: More samples wait than allowed.
        """
        if self._arrivals is None:
            missing = self._resolve_step(step, rate)
            if missing:
                return missing, Arrivals(self.ids)
        assert self._arrivals is not None
        return 0, Arrivals(
            self._order_held(), None, self._arrivals.count, self._arrivals.weight, self._arrivals.metrics
        )

    def commit(self, ids: SampleIds) -> None:
        """Removes used samples; in a truncated stream also the samples that the step chose and left unused."""
        if self._is_truncated and self._arrivals is not None:
            selected = self._order_held()[: self.num_in_use]
            self._drop(selected, ~torch.isin(selected, ids))
            self._remove(selected)
        else:
            self._remove(ids)
        self._on_remove(ids)
        self._arrivals = None

    def state_dict(self) -> State:
        """Returns the ids of held samples and the number of dropped ones."""
        oldest = {str(lane): first for lane, first in self._oldest_ids.items()}
        return {"held": self.ids.clone(), "dropped": self._num_dropped, "oldest": oldest}

    def load_state_dict(self, state: State) -> None:
        """Restores a position from :meth:`state_dict`."""
        self.ids = state["held"]
        self._num_dropped = int(state["dropped"])
        self._oldest_ids = {int(lane): int(first) for lane, first in state["oldest"].items()}
        self._selection = self._arrivals = self._rate = None

    # --- what a step takes --------------------------------------------------------------------------------------

    def _resolve_step(self, step: int, rate: Callable[[], float]) -> int:
        """Determines the samples of a step if possible, and returns how many are missing."""
        num_held = len(self.ids)
        per_second = self._fixed_rate or 0.0
        if self.needs_rate:
            if num_held < self._min_samples:
                return self._min_samples - num_held
            per_second = self._decide_rate(step, rate)
        min_count, max_count = self._compute_bounds(per_second)
        if self._selection is None or self._selection[0] != step:
            if num_held < min_count:
                return min_count - num_held
            self._choose_samples(step, min_count, max_count)
        assert self._selection is not None
        counts = self._selection[1]
        missing = sum(max(0, count - len(self._get_lane(oldest))) for oldest, count in counts)
        if not missing:
            weight = per_second * (self._window_s or 1.0) / self._batch_size if self._is_by_rate else None
            nbytes = num_held * self._sample_nbytes
            telemetry: dict[str, Json] = {
                "buffered": num_held,
                "buffered_nbytes": nbytes,
                "dropped": self._num_dropped,
            }
            self._arrivals = Arrivals(self.ids, None, sum(count for _, count in counts), weight, telemetry)
        return missing

    def _decide_rate(self, step: int, rate: Callable[[], float]) -> float:
        if self._rate is None or self._rate[0] != step:
            decision = self._decide("rate", step, rate)
            with wrap_decision_errors("rate", step):
                value: Any = decision.value
                if isinstance(value, bool) or not 0 <= value < float("inf"):
                    raise ValueError(f"{value!r} samples per second")
                self._rate = step, float(value)
        return self._rate[1]

    def _compute_bounds(self, rate: float) -> tuple[int, int]:
        """Returns the minimum and maximum number of samples of a step at a rate."""
        if self._window_s is None:
            return self._min_samples, self._max_samples
        size = min(max(round(rate * self._window_s), self._min_samples), self._max_samples)
        return size, size

    def _choose_samples(self, step: int, min_count: int, max_count: int) -> None:
        """Chooses the samples of a step, and drops those that are not kept."""
        if min_count == max_count and self._lanes == 1 and not self._can_drop:
            self._selection = step, [(int(self.ids[0]), min_count)]
            return
        decision = self._decide("arrivals", step, lambda: self._build_choice(max_count))
        with wrap_decision_errors("arrivals", step):
            self._selection = step, self._parse_choice(decision.value, min_count, max_count)
        self._oldest_ids.update({oldest % self._stride: oldest for oldest, _ in self._selection[1]})
        held_ids = self.ids
        unwanted = self._mark_unwanted(held_ids)
        if unwanted.any():
            self._drop(held_ids, unwanted)
            self._remove(held_ids[unwanted])

    def _build_choice(self, max_count: int) -> Json:
        """Returns the oldest kept id and the number of taken samples of each lane, in the order of arrival."""
        kept_ids = ids = self.ids
        if self._is_truncated:
            kept_ids = ids[-max_count:]
        elif self._backlog is not None and len(ids) > self._backlog:
            if self._full == "stop":
                raise DataError(
                    f"stream: {len(ids)} samples wait to be used, and backlog={self._backlog}: raise it or most, or "
                    "choose full='pause', full='drop_oldest' or policy='truncation'"
                )
            if self._full == "drop_oldest":
                kept_ids = ids[-self._backlog :]
        taken_ids = kept_ids[:max_count]
        choice: list[Json] = []
        for lane in torch.unique(ids % self._stride).tolist():
            lane_ids, end = self._select_lane(kept_ids, lane), self._select_lane(ids, lane)[-1] + self._stride
            oldest = int(lane_ids[0] if len(lane_ids) else end)
            choice.append({"oldest": oldest, "count": len(self._select_lane(taken_ids, lane))})
        return choice

    def _parse_choice(self, choice: Any, min_count: int, max_count: int) -> list[tuple[int, int]]:
        """Parses a choice, which may come from a log.

        Raises:
          ValueError: The choice is impossible.
        """
        counts = [(entry["oldest"], entry["count"]) for entry in choice]
        is_valid = all(type(oldest) is int and type(count) is int and count >= 0 for oldest, count in counts)
        lanes = [oldest % self._stride for oldest, _ in counts] if is_valid else []
        last_id = int(self.ids.max())
        if not (
            is_valid
            and len(lanes) == len(set(lanes))
            and min_count <= sum(count for _, count in counts) <= max_count
            and all(0 <= oldest <= last_id + self._max_lead for oldest, _ in counts)
        ):
            raise ValueError(f"{choice!r}")
        return counts

    # --- what is held -------------------------------------------------------------------------------------------

    def _select_lane(self, ids: SampleIds, lane: int) -> SampleIds:
        return ids if self._lanes == 1 else ids[ids % self._stride == lane]

    def _get_lane(self, sample_id: int) -> SampleIds:
        """Returns the held ids of the lane of an id, in the order of arrival."""
        return self._select_lane(self.ids, sample_id % self._stride)

    def _order_held(self) -> SampleIds:
        """Returns all held ids, beginning with those of the step, lane by lane."""
        held_ids = self.ids
        if self._lanes == 1 or self._selection is None:
            return held_ids
        step_ids = torch.cat([self._get_lane(oldest)[:count] for oldest, count in self._selection[1]])
        return torch.cat([step_ids, held_ids[~torch.isin(held_ids, step_ids)]])

    def _mark_unwanted(self, ids: SampleIds) -> Tensor:
        """Returns a mask of the ids that precede the oldest kept id of their lane."""
        mask = torch.zeros(len(ids), dtype=torch.bool)
        for lane, oldest in self._oldest_ids.items():
            mask |= (ids % self._stride == lane) & (ids < oldest)
        return mask

    def _drop(self, ids: SampleIds, mask: Tensor) -> None:
        self._num_dropped += int(mask.sum())
        self._on_remove(ids[mask])

    def _remove(self, ids: SampleIds) -> None:
        if torch.equal(self.ids[: len(ids)], ids):
            self.ids = self.ids[len(ids) :]
        else:
            self.ids = self.ids[~torch.isin(self.ids, ids)]


def with_buffer_options(stream: S) -> S:
    """Replaces ``**buffer`` in a stream's signature by the options of :class:`Buffer`."""
    parameters = list(inspect.signature(stream).parameters.values())[:-1]
    buffer_parameters = inspect.signature(Buffer).parameters.values()
    stream.__signature__ = inspect.Signature([*parameters, *buffer_parameters])  # type: ignore[attr-defined]
    return stream
