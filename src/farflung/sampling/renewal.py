"""What becomes of scores when samples are scored anew: how fresh those before were, and how ranks have moved."""

from __future__ import annotations

import torch
from torch import Tensor

from farflung.sampling.importance import rank_changes
from farflung.types import Json, State

__all__ = ["Renewal"]

FEWEST = 8
"""Of fewer samples ranks say nothing."""


class Renewal:
    """The samples of one step that had a score before, with what both scores were.

    References: Zeng et al. 2021 (Mercury) tell which share of all samples has moved by less than 5 % and 10 % in rank
    over one step and over ten; here ranks are those among the samples of a step that had a score, and the age is told.
    """

    def __init__(self) -> None:
        self._step = -1
        self._columns = _empty()

    def add(self, before: Tensor, after: Tensor, ages: Tensor, step: int) -> None:
        """A chunk of samples with a score that are scored anew.

        Args:
          before: the scores that they had.
          after: those that they have now.
          ages: steps since the scores before were made, int64.
          step: now; with another than that of the chunk before, what was there is forgotten.
        """
        if step != self._step:
            self._step, self._columns = step, _empty()
        for column, more in zip(self._columns, (before, after, ages), strict=True):
            column.append(more)

    def told(self, step: int) -> dict[str, Json]:
        """Of the samples that were scored anew at a step; ``None`` where fewer than 8 had a score.

        Returns:
          ``rank_within_5`` and ``rank_within_10``, the share whose rank among them changed by less than that per cent
          of their number, and ``score_age``, the mean age of their scores before, in steps.
        """
        before, after, ages = map(torch.cat, self._columns)
        if step != self._step or len(ages) < FEWEST:
            return dict.fromkeys(("rank_within_5", "rank_within_10", "score_age"))
        # In whole numbers: 100 changes against 5 n rounds nothing.
        changes, count = 100 * rank_changes(before, after), len(ages)
        return {
            "rank_within_5": int((changes < 5 * count).sum()) / count,
            "rank_within_10": int((changes < 10 * count).sum()) / count,
            "score_age": int(ages.sum()) / count,
        }

    def state_dict(self) -> State:
        """Both scores and ages."""
        before, after, ages = map(torch.cat, self._columns)
        return {"step": self._step, "before": before, "after": after, "ages": ages}

    def load_state_dict(self, state: State) -> None:
        """Continues from there."""
        self._step = int(state["step"])
        self._columns = [state["before"]], [state["after"]], [state["ages"]]


def _empty() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Of scores before, scores now and ages; each may be joined."""
    return [torch.empty(0)], [torch.empty(0)], [torch.empty(0, dtype=torch.int64)]
