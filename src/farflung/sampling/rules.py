"""Draws a batch without replacement from candidates that were scored for it, and candidates by older scores."""

from __future__ import annotations

import torch
from torch import Tensor

from farflung.errors import ConfigError
from farflung.options import number_option
from farflung.sampling.importance import included, second_moments, smoothed, systematic
from farflung.seeding import Passes, generator
from farflung.types import State

__all__ = ["CANDIDATES", "NEVER", "TWO_STAGE", "Rule", "filled"]

CANDIDATES = 10
"""Samples scored for each one of a batch, where nothing else sets their number."""
NEVER = -1.0
"""The score of a sample that was never scored; others are at least 0."""
CACHED = 0.25
"""The smoothing of older scores: q = 0.8 of the score over the mean, plus 0.2."""
TWO_STAGE = ("auto", "pool", "two")


class Rule:
    r"""The rules ``pool`` and ``two``: candidates, and a batch from them.

    With M candidates that weigh v, scores s of the model's present state and a batch of b, sample i has

    .. math::
        I_i = v_i (s_i + c\, \overline{v s}), \qquad \pi_i = \min(1, \lambda I_i), \qquad \textstyle\sum_i \pi_i = b,
        \qquad w_i = v_i\, \frac{b}{M \pi_i} \leq \frac{1 + c \bar{v}}{c}

    where :math:`\pi` is the probability that the batch includes it and w its weight in the mean over the batch. The
    draw is systematic, in random order: one number u from [0, 1), and each sample in which the cumulated :math:`\pi`
    passes one of u, u + 1, ... . With fewer candidates than b, :math:`\pi` is the expected number of times that a
    sample comes.

    ``pool``: candidates are the next ones of a random order and weigh 1. ``two``: candidates are drawn from all N
    samples in the same way by their last scores, those without one at the mean, with :math:`\pi^{(1)}` from c = 0.25.
    Then :math:`v = M / (N \pi^{(1)}) \leq 5`, and the weighted mean is unbiased for the mean over all N, however old
    those scores are. :class:`farflung.sampling.Gain` says when which is worth it.

    Args:
      name: of the sampler, for messages.
      smoothing: c, above 0.
      seed: of all draws.

    Raises:
      ConfigError: an option out of its range.

    References: candidates and scores follow Katharopoulos & Fleuret 2018; inclusion probabilities and the systematic
    draw are those of Madow 1949. The second stage is this project's own.
    """

    def __init__(self, name: str, smoothing: float, seed: int) -> None:
        number_option(name, "smoothing", smoothing, 0)
        if smoothing == 0:
            raise ConfigError(f"{name}: smoothing 0 must be above 0, or samples scored 0 are never drawn")
        self._smoothing, self._seed = float(smoothing), seed
        self._order, self._cursor = Passes(seed), 0

    def candidates(self, scores: Tensor, size: int, *at: int, two: bool) -> tuple[Tensor, Tensor]:
        """Chooses the next candidates.

        Args:
          scores: the last ones of all samples, :data:`NEVER` where there is none.
          size: M, at most as many as there are samples.
          at: what this choice is numbered by.
          two: whether by rule ``two``.

        Returns:
          Their positions, and v.
        """
        if two:
            expected = included(smoothed(filled(scores), CACHED), size)
            rows = systematic(expected, generator(self._seed, "candidates", *at))
            return rows, size / (len(scores) * expected[rows])
        order = self._order.order(0, len(scores))
        rows = order[(self._cursor + torch.arange(size)) % len(scores)]
        self._cursor = (self._cursor + size) % len(scores)
        return rows, torch.ones(size, dtype=torch.float64)

    def moments(self, scores: Tensor, weights: Tensor) -> tuple[float, float, float]:
        """See :func:`farflung.sampling.importance.second_moments`; of one candidate at least."""
        return second_moments(scores, smoothed(scores, self._smoothing, weights), weights)

    def batch(self, scores: Tensor, weights: Tensor, batch_size: int, *at: int) -> tuple[Tensor, Tensor]:
        """Draws a batch from candidates.

        Args:
          scores: s, :data:`NEVER` where there is none.
          weights: v.
          batch_size: b.
          at: what this draw is numbered by.

        Returns:
          Positions among the candidates, and w, float32.
        """
        expected = included(smoothed(filled(scores), self._smoothing, weights), batch_size)
        rows = systematic(expected, generator(self._seed, "draw", *at))
        return rows, (weights * batch_size / (len(scores) * expected))[rows].float()

    def stream_batch(
        self, scores: Tensor, shares: Tensor, left: Tensor, batch_size: int, *at: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        r"""Draws a batch from what a stream holds, of which a sample leaves when it is drawn, or is lost after a while.

        A sample that was always drawn with :math:`\pi` would be drawn at last with probability P, and weighs u / P,
        where u is what it shall weigh from now on, in expectation. What is left of that to one that is not drawn is u'.

        .. math::
            P = 1 - (1 - \pi)^r, \qquad w = \frac{b\, u / P}{\sum \pi u / P}, \qquad
            u' = u\, \frac{1 - \pi / P}{1 - \pi}

        So all samples weigh alike over their time, whatever becomes of their scores: plain weights where none is ever
        lost, those of :meth:`batch` where each may be drawn once.

        Args:
          scores: s, :data:`NEVER` where there is none.
          shares: u, of one that has arrived 1.
          left: r, draws before a sample is lost, from 1; infinite where none is.
          batch_size: b.
          at: what this draw is numbered by.

        Returns:
          Positions, w, float32, and u'.
        """
        expected = included(smoothed(filled(scores), self._smoothing), batch_size).clamp(max=1)
        rows = systematic(expected, generator(self._seed, "draw", *at))
        drawn_probability = 1 - (1 - expected) ** left
        weights = batch_size * shares / (drawn_probability * (expected * shares / drawn_probability).sum())
        remaining_share = (1 - expected / drawn_probability).clamp(min=0) / (1 - expected).clamp(min=1e-12)
        return rows, weights[rows].float(), shares * remaining_share

    def state_dict(self) -> State:
        return {"cursor": self._cursor}

    def load_state_dict(self, state: State) -> None:
        self._cursor = state["cursor"]


def filled(scores: Tensor) -> Tensor:
    """Scores, float64, with their mean in place of those there are none of; all 1 where there is none at all."""
    scores = scores.double()
    has_score = scores >= 0
    return torch.where(has_score, scores, scores[has_score].mean() if has_score.any() else 1.0)
