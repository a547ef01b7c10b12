"""Rules that draw a batch without replacement from scored candidates, and candidates by older scores."""

from __future__ import annotations

import torch
from torch import Tensor

from farflung.errors import ConfigError
from farflung.options import check_number
from farflung.sampling.importance import (
    compute_inclusion,
    compute_second_moments,
    draw_systematic,
    smooth_scores,
)
from farflung.seeding import ShuffledPasses, create_generator
from farflung.types import State

__all__ = ["CANDIDATES_PER_SAMPLE", "SCORE_RULES", "UNSCORED", "DrawRule", "fill_unscored"]

CANDIDATES_PER_SAMPLE = 10
"""Samples scored for each sample of a batch, unless another option sets their number."""
UNSCORED = -1.0
"""Score of a sample that was never scored; other scores are at least 0."""
CACHED_SMOOTHING = 0.25
"""Smoothing of older scores: q = 0.8 of the score over the mean, plus 0.2."""
SCORE_RULES = ("auto", "pool", "two")


class DrawRule:
    r"""Rules ``pool`` and ``two`` for choosing candidates and drawing a batch from them.

    With M candidates that weigh v, scores s of the model's present state and a batch of b, sample i has

    .. math::
        I_i = v_i (s_i + c\, \overline{v s}), \qquad \pi_i = \min(1, \lambda I_i), \qquad \textstyle\sum_i \pi_i = b,
        \qquad w_i = v_i\, \frac{b}{M \pi_i} \leq \frac{1 + c \bar{v}}{c}

    where :math:`\pi` is the probability that the batch includes it and w its weight in the mean over the batch. The
    draw is systematic, in random order. With fewer candidates than b, :math:`\pi` is the expected count of a sample.

    ``pool``: candidates are the next ones of a random order and weigh 1. ``two``: candidates are drawn from all N
    samples in the same way by their last scores, unscored ones at the mean, with :math:`\pi^{(1)}` from c = 0.25.
    Then :math:`v = M / (N \pi^{(1)}) \leq 5`, and the weighted mean is unbiased for the mean over all N, even if the
    scores are old. :class:`farflung.sampling.Gain` decides when each rule pays off.

    Args:
      name: Name of the sampler for messages.
      smoothing: c, above 0.
      seed: Seed of all draws.

    Raises:
      ConfigError: An option is out of range.

    References: Katharopoulos & Fleuret 2018 for candidates and scores; Madow 1949 for the draw; stage two is ours.
    """

    def __init__(self, name: str, smoothing: float, seed: int) -> None:
        check_number(name, "smoothing", smoothing, 0)
        if smoothing == 0:
            raise ConfigError(f"{name}: smoothing 0 must be above 0, or samples scored 0 are never drawn")
        self._smoothing, self._seed = float(smoothing), seed
        self._order, self._cursor = ShuffledPasses(seed), 0

    def choose_candidates(
        self, scores: Tensor, size: int, *labels: int, is_two_stage: bool
    ) -> tuple[Tensor, Tensor]:
        """Chooses the next candidates.

        Args:
          scores: Last scores of all samples, :data:`UNSCORED` if there is none.
          size: M, at most the number of samples.
          labels: Numbers that identify this choice.
          is_two_stage: True for rule ``two``.

        Returns:
          Their indices, and v.
        """
        if is_two_stage:
            expected = compute_inclusion(smooth_scores(fill_unscored(scores), CACHED_SMOOTHING), size)
            rows = draw_systematic(expected, create_generator(self._seed, "candidates", *labels))
            return rows, size / (len(scores) * expected[rows])
        order = self._order.get_order(0, len(scores))
        rows = order[(self._cursor + torch.arange(size)) % len(scores)]
        self._cursor = (self._cursor + size) % len(scores)
        return rows, torch.ones(size, dtype=torch.float64)

    def compute_moments(self, scores: Tensor, weights: Tensor) -> tuple[float, float, float]:
        """Computes :func:`farflung.sampling.importance.compute_second_moments` of at least one candidate."""
        return compute_second_moments(scores, smooth_scores(scores, self._smoothing, weights), weights)

    def draw_batch(
        self, scores: Tensor, weights: Tensor, batch_size: int, *labels: int
    ) -> tuple[Tensor, Tensor]:
        """Draws a batch from candidates.

        Args:
          scores: s, :data:`UNSCORED` if there is none.
          weights: v.
          batch_size: b.
          labels: Numbers that identify this draw.

        Returns:
          Indices among the candidates, and w, float32.
        """
        expected = compute_inclusion(
            smooth_scores(fill_unscored(scores), self._smoothing, weights), batch_size
        )
        rows = draw_systematic(expected, create_generator(self._seed, "draw", *labels))
        return rows, (weights * batch_size / (len(scores) * expected))[rows].float()

    def draw_stream_batch(
        self, scores: Tensor, shares: Tensor, remaining_draws: Tensor, batch_size: int, *labels: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        r"""Draws a batch from the samples of a stream, which leave when they are drawn, or are lost after a while.

        A sample that was always drawn with :math:`\pi` would finally be drawn with probability P, and weighs u / P,
        where u is its expected weight from now on. The expected weight of a sample that is not drawn becomes u'.

        .. math::
            P = 1 - (1 - \pi)^r, \qquad w = \frac{b\, u / P}{\sum \pi u / P}, \qquad
            u' = u\, \frac{1 - \pi / P}{1 - \pi}

        So all samples have equal weight over their time, however their scores change: plain weights if none is ever
        lost, those of :meth:`draw_batch` if each may be drawn once.

        Args:
          scores: s, :data:`UNSCORED` if there is none.
          shares: u, 1 on arrival.
          remaining_draws: r, number of draws before a sample is lost, from 1; infinite if none is.
          batch_size: b.
          labels: Numbers that identify this draw.

        Returns:
          Indices, w, float32, and u'.
        """
        expected = compute_inclusion(smooth_scores(fill_unscored(scores), self._smoothing), batch_size).clamp(
            max=1
        )
        rows = draw_systematic(expected, create_generator(self._seed, "draw", *labels))
        drawn_probability = 1 - (1 - expected) ** remaining_draws
        weights = batch_size * shares / (drawn_probability * (expected * shares / drawn_probability).sum())
        remaining_share = (1 - expected / drawn_probability).clamp(min=0) / (1 - expected).clamp(min=1e-12)
        return rows, weights[rows].float(), shares * remaining_share

    def state_dict(self) -> State:
        return {"cursor": self._cursor}

    def load_state_dict(self, state: State) -> None:
        self._cursor = state["cursor"]


def fill_unscored(scores: Tensor) -> Tensor:
    """Fills in the mean for missing scores, in float64; all 1 if no sample has a score."""
    scores = scores.double()
    has_score = scores >= 0
    return torch.where(has_score, scores, scores[has_score].mean() if has_score.any() else 1.0)
