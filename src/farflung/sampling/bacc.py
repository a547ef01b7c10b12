"""How many samples are scored in a step, by the time that a replica has for it."""

from __future__ import annotations

import math
from collections.abc import Callable

from farflung.files import deciding
from farflung.options import part_option, whole_option
from farflung.types import Decision, Json, Spare, State

__all__ = ["Bacc"]


class Bacc:
    r"""Sizes groups so that scoring one takes as long as the exchanges that it is done beside.

    At step 1 and then every ``every`` steps the number of chunks in a step becomes

    .. math:: \max\left(1, \left\lfloor \frac{T}{m\, t} \right\rfloor\right)

    with m samples in a chunk and t seconds to score one. T is the mean wait for exchanges; where these overlap with
    computing there is none to speak of, and T is ``share`` of a forward and backward pass. All are means over the steps
    since the choice before. In step 0 one chunk is scored.

    Where replicas take equal times, scoring ends within a chunk of the exchanges from the first choice on. Where they
    do not, each one's wait depends on when the others are through with scoring, and the number follows it from choice
    to choice: scoring may end some chunks sooner or later, until after some choices it ends within a chunk before the
    exchanges, as each replica counts chunks.

    The number is a decision of the replica's own, so a replay needs no clock.

    Args:
      name: of the sampler, for messages.
      chunk: m.
      every: steps between two choices.
      share: of the time of a forward and backward pass.

    Raises:
      ConfigError: an option out of its range.

    References: Zeng et al. 2021 (Mercury), where scoring takes exactly as long as the aggregation of its iteration. How
    that is foreseen is not said there: chunks, of which there is one at least, means over some steps and ``share`` are
    our choices.
    """

    def __init__(self, name: str, chunk: int, every: int, share: float) -> None:
        whole_option(name, "chunk", chunk, 1)
        whole_option(name, "every", every, 1)
        part_option(name, "share", share)
        self._chunk, self._every, self._share = chunk, every, share
        self._chunks = 1
        self._forget()

    def chunks(self, step: int, most: int, decide: Callable[[str, int, Callable[[], Json]], Decision]) -> int:
        """How many to score at a step; once a step.

        Args:
          step: the step.
          most: all that there are.
          decide: :meth:`farflung.types.Runtime.decide_own`.

        Raises:
          ConfigError: the decision comes from a log, and is not of such a run.
        """
        if step > 0 and (step - 1) % self._every == 0:
            decision = decide("group", step, lambda: self._choice(most))
            with deciding("group", step):
                if type(decision.value) is not int or decision.value < 1:
                    raise ValueError(f"{decision.value!r} chunks")
                self._chunks = decision.value
            self._forget()
        return min(self._chunks, most)

    def observe(self, spare: Spare) -> None:
        """What a step had to spare."""
        self._steps += 1
        self._budget_s += self._share * spare.compute_s if spare.overlaps else spare.wait_s
        self._scoring_s += spare.scoring_s
        self._scored += spare.scored

    def state_dict(self) -> State:
        """The number of chunks, and what was measured since it was chosen."""
        return {
            "chunks": self._chunks,
            "steps": self._steps,
            "budget_s": self._budget_s,
            "scoring_s": self._scoring_s,
            "scored": self._scored,
        }

    def load_state_dict(self, state: State) -> None:
        self._chunks = int(state["chunks"])
        self._steps, self._scored = int(state["steps"]), int(state["scored"])
        self._budget_s, self._scoring_s = float(state["budget_s"]), float(state["scoring_s"])

    def _forget(self) -> None:
        self._steps, self._scored = 0, 0
        self._budget_s, self._scoring_s = 0.0, 0.0

    def _choice(self, most: int) -> int:
        """The number by what was measured; the one before where nothing was."""
        if not self._scored:
            return self._chunks
        if not self._scoring_s:
            return most
        budget_s, chunk_s = self._budget_s / self._steps, self._chunk * self._scoring_s / self._scored
        return max(1, math.floor(budget_s / chunk_s))
