"""Number of samples scored in a step, by the time that a replica has for it."""

from __future__ import annotations

import math
from collections.abc import Callable

from farflung.files import wrap_decision_errors
from farflung.options import check_fraction, check_integer
from farflung.types import Decision, Json, ScoringTimes, State

__all__ = ["Bacc"]


class Bacc:
    r"""Policy that sizes groups so that scoring a group takes as long as the exchanges it overlaps.

    At step 1 and then every ``every`` steps the number of chunks in a step becomes

    .. math:: \max\left(1, \left\lfloor \frac{T}{m\, t} \right\rfloor\right)

    with m samples in a chunk and t seconds to score one. T is the mean wait for exchanges; if these overlap with
    computation there is no wait, and T is ``share`` of a forward and backward pass. All are means over the steps
    since the previous choice. In step 0 one chunk is scored. The number is a local decision, so a replay needs no
    clock.

    Args:
      name: Name of the sampler for messages.
      chunk: m.
      every: Number of steps between two choices.
      share: Share of the time of a forward and backward pass.

    Raises:
      ConfigError: An option is out of range.

    References: Zeng et al. 2021 (Mercury), where scoring takes exactly as long as the aggregation of its iteration.
    The paper does not say how that time is predicted: chunks, means over some steps, and ``share`` are our choices.
    """

    def __init__(self, name: str, chunk: int, every: int, share: float) -> None:
        check_integer(name, "chunk", chunk, 1)
        check_integer(name, "every", every, 1)
        check_fraction(name, "share", share)
        self._chunk, self._period, self._share = chunk, every, share
        self._num_chunks = 1
        self._reset()

    def choose_chunks(
        self, step: int, max_chunks: int, decide: Callable[[str, int, Callable[[], Json]], Decision]
    ) -> int:
        """Returns the number of chunks to score at a step; chooses it anew once in every period.

        Args:
          step: Current step.
          max_chunks: Number of chunks of all samples.
          decide: :meth:`farflung.types.Runtime.decide_locally`.

        Raises:
          ConfigError: The decision comes from a log, and not of such a run.
        """
        if step > 0 and (step - 1) % self._period == 0:
            decision = decide("group", step, lambda: self._compute_chunks(max_chunks))
            with wrap_decision_errors("group", step):
                if type(decision.value) is not int or decision.value < 1:
                    raise ValueError(f"{decision.value!r} chunks")
                self._num_chunks = decision.value
            self._reset()
        return min(self._num_chunks, max_chunks)

    def record_times(self, times: ScoringTimes) -> None:
        """Records the times of a step."""
        self._steps += 1
        self._budget_s += self._share * times.compute_s if times.has_overlap else times.wait_s
        self._scoring_s += times.scoring_s
        self._num_scored += times.num_scored

    def state_dict(self) -> State:
        """Returns the number of chunks, and the measurements since it was chosen."""
        return {
            "chunks": self._num_chunks,
            "steps": self._steps,
            "budget_s": self._budget_s,
            "scoring_s": self._scoring_s,
            "scored": self._num_scored,
        }

    def load_state_dict(self, state: State) -> None:
        self._num_chunks = int(state["chunks"])
        self._steps, self._num_scored = int(state["steps"]), int(state["scored"])
        self._budget_s, self._scoring_s = float(state["budget_s"]), float(state["scoring_s"])

    def _reset(self) -> None:
        self._steps, self._num_scored = 0, 0
        self._budget_s, self._scoring_s = 0.0, 0.0

    def _compute_chunks(self, fallback: int) -> int:
        """Computes how many chunks the measured time allows; returns the previous number if none was scored."""
        if not self._num_scored:
            return self._num_chunks
        if not self._scoring_s:
            return fallback
        budget_s, chunk_s = self._budget_s / self._steps, self._chunk * self._scoring_s / self._num_scored
        return max(1, math.floor(budget_s / chunk_s))
