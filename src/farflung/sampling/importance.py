"""Probabilities and weights from scores, what they are worth, and how scores change when they are renewed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farflung.types import Json, State

__all__ = [
    "Renewal",
    "importance_weights",
    "included",
    "quantiles",
    "quotas",
    "rank_changes",
    "second_moments",
    "smoothed",
    "systematic",
    "variance_ratio",
    "with_replacement",
    "without_replacement",
]


def smoothed(scores: Tensor, smoothing: float, weights: Tensor | None = None) -> Tensor:
    r""":math:`I_j = v_j (s_j + c\, \overline{v s})`, float64; v where all scores are 0.

    With c above 0 no weight exceeds :math:`(1 + c \bar{v}) / c`, and no sample is left out for a score of 0.

    Args:
      scores: s, none below 0.
      smoothing: c.
      weights: v, of samples that have been drawn themselves; all 1 when not given.
    """
    scores = scores.double()
    mean = scores.mean() if weights is None else (weights * scores).mean()
    importances = scores + smoothing * mean if mean > 0 else torch.ones_like(scores)
    return importances if weights is None else weights * importances


def importance_weights(importances: Tensor) -> Tensor:
    r""":math:`\bar{I} / I_j`; infinite where a sample is never drawn."""
    importances = importances.double()
    return importances.mean() / importances


def second_moments(
    norms: Tensor, importances: Tensor, weights: Tensor | None = None
) -> tuple[float, float, float]:
    r"""The second moments of the weighted gradient of a sample that is drawn from candidates, of a candidate, and
    of a sample drawn uniformly.

    .. math::
        E_q \lVert w_j g_j \rVert^2 = \bar{I} \cdot \frac{1}{n} \sum_j v_j^2 s_j^2 / I_j, \qquad
        \frac{1}{n} \sum_j v_j^2 s_j^2, \qquad
        E_u \lVert g_j \rVert^2 = \frac{1}{n} \sum_j v_j s_j^2

    Args:
      norms: s, of the samples' gradients or what stands for them: where scores do, it is an estimate that is as good
        as they are; one at least.
      importances: I, by which samples are drawn.
      weights: v, of samples that have been drawn themselves; all 1 when not given.

    References: after Alain et al. 2015.
    """
    squares, importances = norms.double() ** 2, importances.double()
    v = torch.ones_like(squares) if weights is None else weights
    weighted = torch.where(squares > 0, v**2 * squares / importances, 0.0)
    drawn = float(importances.mean() * weighted.mean())
    return drawn, float((v**2 * squares).mean()), float((v * squares).mean())


def variance_ratio(norms: Tensor, importances: Tensor, weights: Tensor | None = None) -> float:
    r"""The first of :func:`second_moments` over the last; 1 where all norms are 0.

    Both variances are these moments less the same square of the mean gradient, so importance sampling has the smaller
    variance just where this is below 1. It is least, :math:`\overline{v s}^2 / \overline{v s^2}`, for I = v s.
    """
    if not norms.any():
        return 1.0
    drawn, _, uniform = second_moments(norms, importances, weights)
    return drawn / uniform


def quantiles(scores: Tensor, percents: Sequence[int]) -> list[float]:
    """For each per cent p the least of the scores that at least p % of them do not exceed: one of them, so unrounded.

    Args:
      scores: one at least.
      percents: 0 to 100; of 0 the least.
    """
    ordered = scores.sort().values
    return [float(ordered[max(0, -(-percent * len(ordered) // 100) - 1)]) for percent in percents]


def rank_changes(before: Tensor, after: Tensor) -> Tensor:
    """By how many places each sample moves when all are ordered by other scores, int64; equal ones stay in order."""
    return (_ranks(after) - _ranks(before)).abs()


def _ranks(scores: Tensor) -> Tensor:
    order = scores.argsort(stable=True)
    return torch.empty_like(order).index_put((order,), torch.arange(len(order)))


def quotas(total: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
    """``total`` shared out by ``sizes``, in whole numbers.

    They sum up to ``total``, each is its exact share rounded up or down, and expects to be that share.

    Args:
      total: what is shared out.
      sizes: int64, not all 0.
      generator: of the one random number that all roundings depend on.

    Returns:
      int64, of the shape of ``sizes``.
    """
    bounds = sizes.cumsum(0)
    total_size = int(bounds[-1])
    offset = int(torch.randint(total_size, (), generator=generator))
    cumulative = (total * bounds + offset) // total_size
    return cumulative.diff(prepend=cumulative.new_zeros(1))


def with_replacement(importances: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Positions of ``count`` samples, each drawn by its importance; never one whose importance is 0."""
    bounds = importances.double().cumsum(0)
    marks = torch.rand(count, dtype=torch.float64, generator=generator) * bounds[-1]
    return torch.searchsorted(bounds, marks, right=True)


def included(importances: Tensor, count: int) -> Tensor:
    r"""The probability that each sample is among ``count`` distinct ones: :math:`\pi_i = \min(1, \lambda I_i)`.

    Args:
      importances: I, above 0, float64.
      count: the sum of :math:`\pi`. With fewer samples than that, expected numbers of times in proportion to I.
    """
    expected = count * importances / importances.sum()
    if count > len(importances):
        return expected
    is_certain = expected > 1
    while bool((expected > 1).any()):
        is_certain |= expected > 1
        uncertain = importances.where(~is_certain, 0.0)
        expected = ((count - is_certain.sum()) * uncertain / uncertain.sum()).nan_to_num(0.0)
    return expected.where(~is_certain, 1.0)


def systematic(expected: Tensor, generator: torch.Generator) -> Tensor:
    """Positions of samples, each as often as expected, rounded up or down; in random order.

    One random number decides, so the number of positions is the sum exactly. The order is random, so that no period in
    the data meets the interval of the draw.

    Args:
      expected: how often each comes, float64; the sum is a whole number.
      generator: of the order and of the random number.
    """
    order = torch.randperm(len(expected), generator=generator)
    bounds = expected[order].cumsum(0)
    count = round(float(bounds[-1]))
    marks = torch.rand((), dtype=torch.float64, generator=generator) + torch.arange(count)
    places = torch.searchsorted(bounds * (count / bounds[-1]), marks, right=True)
    return order[places.clamp(max=len(order) - 1)]


def without_replacement(logs: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Positions of ``count`` distinct samples, one after the other drawn by its importance among those left.

    As the largest of logarithms that Gumbel's noise is added to, so importances may differ by any factor.

    Args:
      logs: logarithms of importances; minus infinity comes last.
      count: at most as many as there are.
      generator: of the noise.
    """
    waits = torch.empty(len(logs), dtype=torch.float64).exponential_(generator=generator)
    return (logs.double() - waits.log()).topk(count).indices


FEWEST = 8
"""Of fewer samples ranks say nothing."""
_NOTHING = torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int64)
"""Scores before, scores now and ages of no samples."""


class Renewal:
    """The samples of one step that had a score before, with what both scores were.

    References: Zeng et al. 2021 (Mercury) tell which share of all samples has moved by less than 5 % and 10 % in rank
    over one step and over ten; here ranks are those among the samples of a step that had a score, and the age is told.
    """

    def __init__(self) -> None:
        self._step, self._columns = -1, _NOTHING

    def add(self, before: Tensor, after: Tensor, ages: Tensor, step: int) -> None:
        """A chunk of samples with a score that are scored afresh.

        Args:
          before: the scores that they had.
          after: those that they have now.
          ages: steps since the scores before were made, int64.
          step: now; with another than that of the chunk before, what was there is forgotten.
        """
        columns = self._columns if step == self._step else _NOTHING
        first, second, third = map(torch.cat, zip(columns, (before, after, ages), strict=True))
        self._step, self._columns = step, (first, second, third)

    def told(self, step: int) -> dict[str, Json]:
        """Of the samples that were scored afresh at a step; ``None`` where fewer than 8 had a score.

        Returns:
          ``rank_within_5`` and ``rank_within_10``, the share whose rank among them changed by less than that per cent
          of their number, and ``score_age``, the mean age of their scores before, in steps.
        """
        before, after, ages = self._columns
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
        return {"step": self._step, **dict(zip(("before", "after", "ages"), self._columns, strict=True))}

    def load_state_dict(self, state: State) -> None:
        self._step = int(state["step"])
        self._columns = state["before"], state["after"], state["ages"]
