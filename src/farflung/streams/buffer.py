"""What has arrived and is not yet used, and how much of it a step takes: alike for all streams whose samples arrive."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from farflung.errors import ConfigError, DataError
from farflung.files import deciding
from farflung.options import choice_option, number_option, whole_option
from farflung.types import Arrivals, Feed, Json, SampleIds, State

__all__ = ["Buffer", "Full", "Policy", "Weigh", "buffered"]

S = TypeVar("S", bound=Callable[..., object])

Policy = Literal["persistence", "truncation"]
Full = Literal["pause", "stop", "drop_oldest"]
Weigh = Literal["by_batch", "by_rate"]

LEAST, MOST = 8, 1024
"""Samples of a step that is made of what some seconds bring: the bounds of Tyagi & Swany 2022."""


class Buffer:
    r"""Samples between their arrival and their use.

    A step waits until ``least`` samples are there and takes all there are, up to ``most``. So it always takes as many
    as the run's batch where neither is given. With ``window_s`` it takes what so many seconds of the stream bring,

    .. math:: b_i = \min(\max(S_i w, b_{\min}), b_{\max}),

    rounded, where :math:`S_i` is the rate of replica i in samples per second, :math:`w` is ``window_s`` and the bounds
    are ``least`` and ``most``.

    What depends on the clock is a decision of the replica: the rate where it changes or is measured, the samples that
    are dropped, and the number taken between two bounds. A replay makes it again. Nothing is decided where a step takes
    a fixed number of all that comes, in one order.

    Args:
      policy: with ``persistence`` samples are kept until they are used, oldest first. With ``truncation`` a step takes
        the newest of what has streamed in since the step before chose, and all else is dropped; so what is held is
        never more than what just streamed in.
      least: samples without which no step begins; the run's batch size when not given, 8 with ``window_s``.
      most: no step takes more; ``least`` when not given, with ``window_s`` 1024, or the backlog if that is less.
      backlog: with ``persistence``: how many samples may wait to be used; ``None``: any number.
      full: what happens when more than that wait: with ``pause`` the source sends no more until a step has taken some,
        with ``stop`` the run ends with an error, with ``drop_oldest`` the samples that have waited longest are lost
        when a step chooses.
      window_s: seconds of the stream that a step is made of; ``None``: by ``least`` and ``most`` alone.
      weigh: what a step weighs in the mean over the replicas: ``by_batch``, its samples, or ``by_rate``, :math:`S_i w`,
        what the window brings, of a second where none is given; either by the run's batch size, which changes no mean.

    Raises:
      ConfigError: a value out of its range.

    References: Tyagi & Swany 2022 (ScaDLES), sections III and IV: batches by rate, their bounds, persistence and
    truncation. Which samples a truncated stream keeps when more have come than a step takes is our choice, and so is
    ``drop_oldest``.
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
        choice_option("stream", "policy", policy, get_args(Policy))
        choice_option("stream", "full", full, get_args(Full))
        choice_option("stream", "weigh", weigh, get_args(Weigh))
        for name, value in (("least", least), ("most", most), ("backlog", backlog)):
            if value is not None:
                whole_option("stream", name, value, 1)
        if window_s is not None:
            number_option("stream", "window_s", window_s, 0.001)
        self._truncates = policy == "truncation"
        if self._truncates and (backlog is not None or full != "pause"):
            raise ConfigError("stream: policy 'truncation' keeps no backlog: leave out backlog and full")
        if backlog is None and full != "pause":
            raise ConfigError(f"stream: full={full!r} says what happens at a backlog: give one")
        self._least, self._most, self._backlog, self._full = least, most, backlog, full
        self._drops = self._truncates or full != "pause"
        self._window_s, self._by_rate = window_s, weigh == "by_rate"
        self.ids: SampleIds = torch.empty(0, dtype=torch.int64)
        """All that is held, in the order of arrival; what has been shown stays as it is."""
        self._dropped = 0
        self._oldest: dict[int, int] = {}
        """By lane: no id before this one is held, not even if it is still to come."""
        self._rate: tuple[int, float] | None = None
        self._chosen: tuple[int, list[tuple[int, int]]] | None = None
        """The step that chose last, and of each lane the oldest id kept and the number taken."""
        self._in_use: Arrivals | None = None
        """What the step under way is made of."""

    def open(
        self,
        feed: Feed,
        *,
        rate: float | None = None,
        lanes: int = 1,
        stride: int = 1,
        ahead: int = 1 << 24,
        gone: Callable[[SampleIds], object] = lambda ids: None,
    ) -> None:
        """Prepares for the first sample.

        Args:
          feed: of the replica.
          rate: :math:`S_i`, where it neither changes nor has to be measured.
          lanes: how many sources there are, whose samples arrive in an order of their own but mix in any.
          stride: the remainder of an id divided by this says its lane; ids of a lane ascend.
          ahead: ids that a run which is replayed may have been ahead of this one.
          gone: called with ids that are not held any more.

        Raises:
          ConfigError: bounds that contradict each other, or a rate below them.
        """
        batch = feed.batch_size if self._window_s is None else LEAST
        self._fewest = batch if self._least is None else self._least
        if self._most is not None:
            self._largest = self._most
        elif self._window_s is None:
            self._largest = self._fewest
        else:
            self._largest = max(self._fewest, min(MOST, self._backlog or MOST))
        room = self._largest if self._backlog is None else self._backlog
        if not self._fewest <= self._largest <= room:
            raise ConfigError(
                f"stream: least {self._fewest}, most {self._largest}, backlog {room}: none may be above the next"
            )
        self._batch_size, self._decide = feed.batch_size, feed.decide
        row = feed.data.rows(torch.tensor([0]))
        self._sample_nbytes = row.inputs.nbytes + row.targets.nbytes
        self._fixed_rate, self._gone = rate, gone
        self.measures = rate is None and (self._window_s is not None or self._by_rate)
        """Whether the rate has to be measured."""
        self._lanes, self._stride, self._ahead = lanes, stride, ahead

    def check_rate(self, rate: float) -> None:
        """Checks that a constant rate brings enough for a step.

        Raises:
          ConfigError: it does not; says what to do.
        """
        if self._window_s is not None and rate * self._window_s < self._fewest:
            raise ConfigError(
                f"stream: {rate:g} samples per second bring {rate * self._window_s:g} in window_s={self._window_s:g}, "
                f"and a step takes at least {self._fewest}: lengthen window_s, or give least"
            )

    @property
    def in_use(self) -> int:
        """How many of them the step under way is made of; 0 between steps."""
        return 0 if self._in_use is None else self._in_use.count or 0

    @property
    def room(self) -> int | None:
        """How many more samples may arrive before the source has to pause; ``None``: any number."""
        if self._backlog is None or self._full != "pause":
            return None
        return max(0, self._backlog - (len(self.ids) - self.in_use))

    def oldest(self, lane: int = 0) -> int:
        """Returns the id of this lane before which none is wanted any more."""
        return self._oldest.get(lane, 0)

    def put(self, ids: SampleIds) -> None:
        """Adds samples that have arrived."""
        if self._oldest:
            unwanted = self._unwanted(ids)
            self._drop(ids, unwanted)
            ids = ids[~unwanted]
        if len(ids):
            self.ids = torch.cat([self.ids, ids])

    def poll(self, step: int, rate: Callable[[], float]) -> tuple[int, Arrivals]:
        """Returns what ``step`` is made of, as far as that is known.

        Args:
          step: the step.
          rate: :math:`S_i` now, where it is no fixed one.

        Returns:
          How many samples are missing, and what is held; when none are missing, also what the step takes of it.

        Raises:
          DataError: more samples wait than may.
        """
        if self._in_use is None:
            missing = self._settle(step, rate)
            if missing:
                return missing, Arrivals(self.ids)
        assert self._in_use is not None
        return 0, Arrivals(self._shown(), None, self._in_use.count, self._in_use.weight, self._in_use.told)

    def commit(self, ids: SampleIds) -> None:
        """Takes samples out; of a stream that is truncated, with them what the step has chosen and left."""
        if self._truncates and self._in_use is not None:
            left = self._shown()[: self.in_use]
            self._drop(left, ~torch.isin(left, ids))
            self._remove(left)
        else:
            self._remove(ids)
        self._gone(ids)
        self._in_use = None

    def state_dict(self) -> State:
        """Returns which samples are held, and how many have been dropped."""
        oldest = {str(lane): first for lane, first in self._oldest.items()}
        return {"held": self.ids.clone(), "dropped": self._dropped, "oldest": oldest}

    def seek(self, state: State) -> None:
        """Goes back to a position from :meth:`state_dict`."""
        self.ids = state["held"]
        self._dropped = int(state["dropped"])
        self._oldest = {int(lane): int(first) for lane, first in state["oldest"].items()}
        self._chosen = self._in_use = self._rate = None

    # --- what a step takes --------------------------------------------------------------------------------------

    def _settle(self, step: int, rate: Callable[[], float]) -> int:
        """Settles what the step is made of, as far as it can be; returns how many samples are missing for it."""
        held = len(self.ids)
        per_second = self._fixed_rate or 0.0
        if self.measures:
            if held < self._fewest:
                return self._fewest - held
            per_second = self._rate_at(step, rate)
        low, high = self._sizes(per_second)
        if self._chosen is None or self._chosen[0] != step:
            if held < low:
                return low - held
            self._choose(step, low, high)
        assert self._chosen is not None
        takes = self._chosen[1]
        missing = sum(max(0, count - len(self._lane(oldest))) for oldest, count in takes)
        if not missing:
            weight = per_second * (self._window_s or 1.0) / self._batch_size if self._by_rate else None
            nbytes = held * self._sample_nbytes
            told: dict[str, Json] = {"held": held, "held_nbytes": nbytes, "dropped": self._dropped}
            self._in_use = Arrivals(self.ids, None, sum(count for _, count in takes), weight, told)
        return missing

    def _rate_at(self, step: int, rate: Callable[[], float]) -> float:
        if self._rate is None or self._rate[0] != step:
            made = self._decide("rate", step, rate)
            with deciding("rate", step):
                value: Any = made.value
                if isinstance(value, bool) or not 0 <= value < float("inf"):
                    raise ValueError(f"{value!r} samples per second")
                self._rate = step, float(value)
        return self._rate[1]

    def _sizes(self, rate: float) -> tuple[int, int]:
        """Returns the fewest and the most samples that a step takes at a rate."""
        if self._window_s is None:
            return self._fewest, self._largest
        size = min(max(round(rate * self._window_s), self._fewest), self._largest)
        return size, size

    def _choose(self, step: int, low: int, high: int) -> None:
        """Decides which samples are taken, and drops those that are not kept."""
        if low == high and self._lanes == 1 and not self._drops:
            self._chosen = step, [(int(self.ids[0]), low)]
            return
        made = self._decide("arrivals", step, lambda: self._choice(high))
        with deciding("arrivals", step):
            self._chosen = step, self._possible(made.value, low, high)
        self._oldest.update({oldest % self._stride: oldest for oldest, _ in self._chosen[1]})
        held = self.ids
        unwanted = self._unwanted(held)
        if unwanted.any():
            self._drop(held, unwanted)
            self._remove(held[unwanted])

    def _choice(self, high: int) -> Json:
        """Returns the oldest id kept and the number taken of each lane; what arrived first is taken first."""
        kept = held = self.ids
        if self._truncates:
            kept = held[-high:]
        elif self._backlog is not None and len(held) > self._backlog:
            if self._full == "stop":
                raise DataError(
                    f"stream: {len(held)} samples wait to be used, and backlog={self._backlog}: raise it or most, or "
                    "choose full='pause', full='drop_oldest' or policy='truncation'"
                )
            if self._full == "drop_oldest":
                kept = held[-self._backlog :]
        taken = kept[:high]
        choice: list[Json] = []
        for lane in torch.unique(held % self._stride).tolist():
            here, behind = self._in_lane(kept, lane), self._in_lane(held, lane)[-1] + self._stride
            oldest = int(here[0] if len(here) else behind)
            choice.append({"oldest": oldest, "count": len(self._in_lane(taken, lane))})
        return choice

    def _possible(self, choice: Any, low: int, high: int) -> list[tuple[int, int]]:
        """Checks a choice as it was made or read.

        Raises:
          ValueError: it cannot have been made.
        """
        takes = [(each["oldest"], each["count"]) for each in choice]
        whole = all(type(oldest) is int and type(count) is int and count >= 0 for oldest, count in takes)
        lanes = [oldest % self._stride for oldest, _ in takes] if whole else []
        known = int(self.ids.max())
        if not (
            whole
            and len(lanes) == len(set(lanes))
            and low <= sum(count for _, count in takes) <= high
            and all(0 <= oldest <= known + self._ahead for oldest, _ in takes)
        ):
            raise ValueError(f"{choice!r}")
        return takes

    # --- what is held -------------------------------------------------------------------------------------------

    def _in_lane(self, ids: SampleIds, lane: int) -> SampleIds:
        return ids if self._lanes == 1 else ids[ids % self._stride == lane]

    def _lane(self, like: int) -> SampleIds:
        """Returns what is held of the lane of an id, in the order of arrival."""
        return self._in_lane(self.ids, like % self._stride)

    def _shown(self) -> SampleIds:
        """Returns all that is held; what the step takes is first, lane by lane."""
        held = self.ids
        if self._lanes == 1 or self._chosen is None:
            return held
        taken = torch.cat([self._lane(oldest)[:count] for oldest, count in self._chosen[1]])
        return torch.cat([taken, held[~torch.isin(held, taken)]])

    def _unwanted(self, ids: SampleIds) -> Tensor:
        """Marks ids before the oldest that is kept."""
        found = torch.zeros(len(ids), dtype=torch.bool)
        for lane, oldest in self._oldest.items():
            found |= (ids % self._stride == lane) & (ids < oldest)
        return found

    def _drop(self, ids: SampleIds, which: Tensor) -> None:
        self._dropped += int(which.sum())
        self._gone(ids[which])

    def _remove(self, ids: SampleIds) -> None:
        if torch.equal(self.ids[: len(ids)], ids):
            self.ids = self.ids[len(ids) :]
        else:
            self.ids = self.ids[~torch.isin(self.ids, ids)]


def buffered(stream: S) -> S:
    """Shows the options of the buffer in a stream's signature, in place of ``**buffer``."""
    own = list(inspect.signature(stream).parameters.values())[:-1]
    of_the_buffer = inspect.signature(Buffer).parameters.values()
    stream.__signature__ = inspect.Signature([*own, *of_the_buffer])  # type: ignore[attr-defined]
    return stream
