"""Sampling probabilities and weights from scores, their effect on variance, and statistics of renewed scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farflung.types import Json, State

__all__ = [
    "ScoreRenewal",
    "compute_importance_weights",
    "compute_inclusion",
    "compute_quantiles",
    "compute_rank_changes",
    "compute_second_moments",
    "compute_variance_ratio",
    "draw_systematic",
    "draw_with_replacement",
    "draw_without_replacement",
    "smooth_scores",
    "split_quotas",
]


def smooth_scores(scores: Tensor, smoothing: float, weights: Tensor | None = None) -> Tensor:
    r"""Computes :math:`I_j = v_j (s_j + c\, \overline{v s})` in float64; v if all scores are 0.

    With c above 0 no weight exceeds :math:`(1 + c \bar{v}) / c`, and samples with a score of 0 can be drawn.

    Args:
      scores: s, at least 0.
      smoothing: c.
      weights: v, weights of samples that have been drawn themselves; None for 1.
    """
    scores = scores.double()
    mean = scores.mean() if weights is None else (weights * scores).mean()
    importances = scores + smoothing * mean if mean > 0 else torch.ones_like(scores)
    return importances if weights is None else weights * importances


def compute_importance_weights(importances: Tensor) -> Tensor:
    r"""Computes :math:`\bar{I} / I_j`; infinite for samples that are never drawn."""
    importances = importances.double()
    return importances.mean() / importances


def compute_second_moments(
    norms: Tensor, importances: Tensor, weights: Tensor | None = None
) -> tuple[float, float, float]:
    r"""Computes second moments of gradients: of a sample drawn from candidates, a candidate, and a uniform sample.

    .. math::
        E_q \lVert w_j g_j \rVert^2 = \bar{I} \cdot \frac{1}{n} \sum_j v_j^2 s_j^2 / I_j, \qquad
        \frac{1}{n} \sum_j v_j^2 s_j^2, \qquad
        E_u \lVert g_j \rVert^2 = \frac{1}{n} \sum_j v_j s_j^2

    Args:
      norms: s, at least one, of the samples' gradients. Scores in their place give an estimate that is as accurate
        as they are.
      importances: I, by which samples are drawn.
      weights: v, weights of samples that have been drawn themselves; None for 1.

    References: after Alain et al. 2015.
    """
    squares, importances = norms.double() ** 2, importances.double()
    v = torch.ones_like(squares) if weights is None else weights
    weighted = torch.where(squares > 0, v**2 * squares / importances, 0.0)
    drawn = float(importances.mean() * weighted.mean())
    return drawn, float((v**2 * squares).mean()), float((v * squares).mean())


def compute_variance_ratio(norms: Tensor, importances: Tensor, weights: Tensor | None = None) -> float:
    r"""Computes the first of :func:`compute_second_moments` over the last; 1 if all norms are 0.

    Both variances are these moments less the same square of the mean gradient. So importance sampling has the smaller
    variance if this is below 1. The minimum, :math:`\overline{v s}^2 / \overline{v s^2}`, is reached for I = v s.
    """
    if not norms.any():
        return 1.0
    drawn, _, uniform = compute_second_moments(norms, importances, weights)
    return drawn / uniform


def compute_quantiles(scores: Tensor, percents: Sequence[int]) -> list[float]:
    """Computes for each per cent p the smallest score that at least p % of the scores do not exceed, unrounded.

    Args:
      scores: At least one score.
      percents: Numbers from 0 to 100; 0 gives the smallest score.
    """
    ordered = scores.sort().values
    return [float(ordered[max(0, -(-percent * len(ordered) // 100) - 1)]) for percent in percents]


def compute_rank_changes(old_scores: Tensor, new_scores: Tensor) -> Tensor:
    """Computes by how many ranks each sample moves from one ordering to the other, int64; equal scores keep order."""
    return (_compute_ranks(new_scores) - _compute_ranks(old_scores)).abs()


def _compute_ranks(scores: Tensor) -> Tensor:
    order = scores.argsort(stable=True)
    return torch.empty_like(order).index_put((order,), torch.arange(len(order)))


def split_quotas(total: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
    """Splits ``total`` into whole numbers in proportion to ``sizes``.

    They sum to ``total``. Each is its exact share rounded up or down, with that share as its expectation.

    Args:
      total: Number to split.
      sizes: int64 tensor, not all 0.
      generator: Generator of the random number on which all roundings depend.

    Returns:
      int64 tensor of the shape of ``sizes``.
    """
    bounds = sizes.cumsum(0)
    total_size = int(bounds[-1])
    offset = int(torch.randint(total_size, (), generator=generator))
    cumulative = (total * bounds + offset) // total_size
    return cumulative.diff(prepend=cumulative.new_zeros(1))


def draw_with_replacement(importances: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draws ``count`` indices in proportion to importance; never one whose importance is 0."""
    bounds = importances.double().cumsum(0)
    marks = torch.rand(count, dtype=torch.float64, generator=generator) * bounds[-1]
    return torch.searchsorted(bounds, marks, right=True)


def compute_inclusion(importances: Tensor, count: int) -> Tensor:
    r"""Computes the probability that each sample is among ``count`` distinct ones, :math:`\min(1, \lambda I_i)`.

    Args:
      importances: I, above 0, float64.
      count: Sum of the probabilities. With fewer samples than that, expected counts in proportion to I.
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


def draw_systematic(expected: Tensor, generator: torch.Generator) -> Tensor:
    """Draws each index as often as expected, rounded up or down, in random order.

    A single random number decides, so the number of indices equals the sum. Random order prevents that a period in
    the data meets the interval of the draw.

    Args:
      expected: Expected count of each index, float64, with a whole sum.
      generator: Generator of the order and of the random number.
    """
    order = torch.randperm(len(expected), generator=generator)
    bounds = expected[order].cumsum(0)
    count = round(float(bounds[-1]))
    marks = torch.rand((), dtype=torch.float64, generator=generator) + torch.arange(count)
    places = torch.searchsorted(bounds * (count / bounds[-1]), marks, right=True)
    return order[places.clamp(max=len(order) - 1)]


def draw_without_replacement(logs: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draws ``count`` distinct indices, one after the other in proportion to importance.

    Takes the largest logarithms after adding Gumbel noise, so importances may differ by any factor.

    Args:
      logs: Logarithms of importances; minus infinity is drawn last.
      count: Number of indices, at most all.
      generator: Generator of the noise.
    """
    waits = torch.empty(len(logs), dtype=torch.float64).exponential_(generator=generator)
    return (logs.double() - waits.log()).topk(count).indices


MIN_RENEWED = 8
"""Smallest number of samples for which rank changes are reported."""
_NO_SAMPLES = torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int64)
"""Old scores, new scores and ages of no samples."""


class ScoreRenewal:
    """Statistics of the samples of one step that were scored before, from their old and new scores.

    References: Zeng et al. 2021 (Mercury) report the share of all samples whose rank moved by less than 5 % and 10 %
    over one step and over ten. Here ranks are among the renewed samples of a step, and the age is reported.
    """

    def __init__(self) -> None:
        self._step, self._columns = -1, _NO_SAMPLES

    def add(self, old_scores: Tensor, new_scores: Tensor, ages: Tensor, step: int) -> None:
        """Adds a chunk of samples that had a score and are scored again.

        Args:
          old_scores: Scores before the renewal.
          new_scores: Scores after it.
          ages: Ages of the old scores in steps, int64.
          step: Current step; a new step clears the samples of the previous one.
        """
        columns = self._columns if step == self._step else _NO_SAMPLES
        first, second, third = map(torch.cat, zip(columns, (old_scores, new_scores, ages), strict=True))
        self._step, self._columns = step, (first, second, third)

    def get_stats(self, step: int) -> dict[str, Json]:
        """Returns the shares of samples whose rank changed little, and the mean age of their old scores, at a step.

        All are None if fewer than 8 samples were renewed at ``step``.

        Returns:
          ``rank_within_5`` and ``rank_within_10``, the share of samples whose rank changed by less than that per cent
          of their number, and ``score_age``, the mean age of their old scores in steps.
        """
        old_scores, new_scores, ages = self._columns
        if step != self._step or len(ages) < MIN_RENEWED:
            return dict.fromkeys(("rank_within_5", "rank_within_10", "score_age"))
        # In whole numbers: comparing 100 changes with 5 n avoids rounding.
        changes, count = 100 * compute_rank_changes(old_scores, new_scores), len(ages)
        return {
            "rank_within_5": int((changes < 5 * count).sum()) / count,
            "rank_within_10": int((changes < 10 * count).sum()) / count,
            "score_age": int(ages.sum()) / count,
        }

    def state_dict(self) -> State:
        return {
            "step": self._step,
            **dict(zip(("old_scores", "new_scores", "ages"), self._columns, strict=True)),
        }

    def load_state_dict(self, state: State) -> None:
        self._step = int(state["step"])
        self._columns = state["old_scores"], state["new_scores"], state["ages"]
