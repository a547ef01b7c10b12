"""Importance sampling: samples are scored while a step waits, and batches are drawn by their scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from farflung.errors import ConfigError
from farflung.options import check_choice, check_integer, check_number
from farflung.sampling.bacc import Bacc
from farflung.sampling.gain import Gain
from farflung.sampling.importance import (
    ScoreRenewal,
    compute_importance_weights,
    compute_quantiles,
    compute_variance_ratio,
    draw_with_replacement,
    draw_without_replacement,
    smooth_scores,
    split_quotas,
)
from farflung.sampling.rules import CANDIDATES_PER_SAMPLE, SCORE_RULES, UNSCORED, DrawRule, fill_unscored
from farflung.sampling.scores import check_scores
from farflung.sampling.scoring import ScoringSampler
from farflung.sampling.uniform import UniformSampler
from farflung.seeding import ShuffledPasses, create_generator, derive_seed
from farflung.types import (
    FORWARDS_PER_GRADIENT,
    Decision,
    Draw,
    DrawContext,
    Json,
    SampleIds,
    ScoreKind,
    ScoringTimes,
    State,
    StatisticsSource,
    WaitWork,
)

__all__ = ["GroupedImportance"]

NAME = "grouped_importance"
UNKNOWN_STEP = -1
"""Step of a score that was not made here: there is none, or its sample came from another replica."""
COLUMNS = ("scores", "stamps", "scored_at", "candidate_weights", "first_seen", "shares")
"""Columns of the table of samples; ``first_seen`` is the step of arrival, ``shares`` the future weight in a stream."""
DRAWN_SHARE = -1.0
"""Share of a stream's sample that has been drawn, and leaves."""
MIN_GROUP_BATCHES = 2
"""Smallest group sized by time, in batches, except for the paper's rule: fewer leave little to choose."""
FILL_FRACTIONS = {"fill": 1.0, "half": 0.5}
"""Rules that compute gradients in the wait, with the fraction of it that they use."""
PERCENTS = (5, 25, 50, 75, 95)
"""Percentiles of a group's scores for telemetry."""
PAPER_DEFAULTS = {"chosen": 2, "beta": 0.5}
"""Defaults of the options of the paper's rule."""


class GroupedImportance(ScoringSampler):
    r"""Sampler that draws by scores, some of which are renewed while each step waits for exchanges.

    Rules are described in the documentation's page on sampling, see also :class:`farflung.sampling.DrawRule` and
    :class:`farflung.sampling.Gain`. Rule ``paper`` is Mercury's, for its figures: see the page of the paper.

    Args:
      seed: Seed of all draws; different on replicas with different samples.
      rule: ``"auto"``, ``"pool"``, ``"two"``, ``"fill"``, ``"half"`` or ``"paper"``.
      groups: Samples scored in one step: a number D for a D-th of the replica's samples; ``"bacc"`` for as many as
        there is time for, see :class:`farflung.sampling.Bacc`; None for ten batches, or D = 8 with the paper's rule.
      scored_by: See :data:`farflung.types.ScoreKind`; None for ``"gradient_bound"``, paper's rule ``"loss"``.
      statistics: Source of running statistics, such as a batch norm's: ``"batch"``; or ``"uniform"`` for as many
        uniform samples in the wait, in place of batches drawn by scores.
      smoothing: c; None for 0.02, or 0.5 with the paper's rule, which also allows 0: weights are then unbounded.
      chosen: d, number of groups of a batch, or all while there are fewer. For the paper's rule only.
      beta: :math:`\beta`, preference for fresh groups; 0 ignores age. For the paper's rule only.
      chunk: Number of samples scored at once.
      max_scored: Largest size of a group for ``"bacc"``: the rest of a longer wait is idle; None for all samples.
      every: Number of steps between two choices of a group's size, for ``"bacc"``.
      share: Share of computation that scoring may take if exchanges overlap with it, for ``"bacc"``.

    Raises:
      ConfigError: An option is out of range, or belongs to another rule.

    References: Zeng et al. 2021 (Mercury); Katharopoulos & Fleuret 2018 for ``"gradient_bound"``.
    """

    can_transfer_scores = True

    def __init__(
        self,
        seed: int,
        *,
        rule: Literal["auto", "pool", "two", "fill", "half", "paper"] = "auto",
        groups: int | Literal["bacc"] | None = None,
        scored_by: ScoreKind | None = None,
        statistics: StatisticsSource = "batch",
        smoothing: float | None = None,
        chosen: int = 2,
        beta: float = 0.5,
        chunk: int = 64,
        max_scored: int | None = None,
        every: int = 10,
        share: float = 0.25,
    ) -> None:
        check_choice(NAME, "rule", rule, (*SCORE_RULES, *FILL_FRACTIONS, "paper"))
        is_paper = rule == "paper"
        groups = 8 if is_paper and groups is None else groups
        if groups is not None and groups != "bacc":
            if isinstance(groups, str):
                raise ConfigError(f"{NAME}: groups {groups!r} must be a whole number or 'bacc'")
            check_integer(NAME, "groups", groups, 1)
        for option, value in {"chosen": chosen, "beta": beta}.items():
            if not is_paper and value != PAPER_DEFAULTS[option]:
                raise ConfigError(f"{NAME}: {option} {value!r} is of the paper's rule: give rule='paper' too")
        check_integer(NAME, "chosen", chosen, 1)
        if is_paper and isinstance(groups, int) and chosen > groups:
            raise ConfigError(f"{NAME}: chosen {chosen} must be at most groups, {groups}")
        check_number(NAME, "beta", beta, 0)
        smoothing = (0.5 if is_paper else 0.02) if smoothing is None else smoothing
        check_number(NAME, "smoothing", smoothing, 0)
        scored_by = ("loss" if is_paper else "gradient_bound") if scored_by is None else scored_by
        check_choice(NAME, "scored_by", scored_by, get_args(ScoreKind))
        check_choice(NAME, "statistics", statistics, get_args(StatisticsSource))
        check_integer(NAME, "chunk", chunk, 1)
        if max_scored is not None:
            check_integer(NAME, "max_scored", max_scored, chunk)
        self._groups, self._num_chosen = groups, chosen
        self._beta, self._smoothing = float(beta), float(smoothing)
        self.scored_by, self._chunk, self._max_scored = scored_by, chunk, max_scored
        self.statistics, self._fill_fraction = statistics, FILL_FRACTIONS.get(rule, 0.0)
        needs = {
            f"rule {rule!r}": rule in ("two", *FILL_FRACTIONS),
            "statistics='uniform'": statistics == "uniform",
        }
        self._stream_conflict = " and ".join(text for text, is_set in needs.items() if is_set)
        self._seed, self._order = seed, ShuffledPasses(derive_seed(seed, "order"))
        self.gain = Gain(rule) if rule in SCORE_RULES else None
        """Predicted gain of drawing by scores; None if the rule does not depend on it."""
        self._rule = None if is_paper else DrawRule(NAME, smoothing, derive_seed(seed, "rule"))
        self._bacc = Bacc(NAME, chunk, every, share)
        self._uniform = UniformSampler(derive_seed(seed, "uniform"))
        self._batch_rule, self._cursor = "paper" if is_paper else "uniform", 0
        self._batch_fraction, self._new_scores = 1.0, list[tuple[Tensor, Tensor]]()
        self._renewal = ScoreRenewal()
        self._shares: Tensor
        empty_ids = torch.empty(0, dtype=torch.int64)
        self._set_table(empty_ids, *self._create_columns(empty_ids, 0))
        self._lifetime_steps = math.inf

    # --- drawing ----------------------------------------------------------------------------------------------------

    @override
    def draw(self, context: DrawContext) -> Draw:
        """Draws a batch from a few groups, newer ones more often; returns rows of the score table and their weights.

        Raises:
          ConfigError: There are more groups than samples, or an option needs all samples and there is a stream.
        """
        self._update_table(context)
        if not isinstance(context.pool, int) and (reason := self._stream_conflict):
            raise ConfigError(
                f"{NAME}: {reason} takes samples from all of a replica's, and a stream holds those that have arrived: "
                "give rule='pool' and statistics='batch'"
            )
        newest = self._stamps.max()
        mask = (self._stamps == newest) & (self._scores >= 0)
        scores, first = self._scores[mask], self._candidate_weights[mask]
        if self.gain is not None:
            self.gain.is_streaming = not isinstance(context.pool, int)
            if self.gain.rule == "uniform":
                self._batch_rule = "uniform"
            self.gain.steps[self._batch_rule] += 1
        telemetry: dict[str, Json] = {
            "rule": self._batch_rule,
            "groups": len(self._list_groups()[0]),
            "num_scored": len(scores),
            "variance_ratio": compute_variance_ratio(
                scores, smooth_scores(scores, self._smoothing, first), first
            ),
            **({} if self.gain is None else self.gain.get_stats()),
            "score_quantiles": [*compute_quantiles(scores, PERCENTS)] if len(scores) else None,
            "largest_weight": 1.0,
            **self._renewal.get_stats(context.step - 1),
        }
        weight = context.share if isinstance(context.pool, int) else None
        if self._batch_rule == "uniform":
            ids = self._uniform.draw(context).ids
            if not isinstance(context.pool, int):
                self._shares[self._find_rows(ids)[0]] = DRAWN_SHARE
            return Draw(ids, None, weight, telemetry)
        if self._rule is None:
            rows, weights = self._draw_by_groups(context)
        elif not isinstance(context.pool, int):
            remaining_draws = (self._lifetime_steps - (context.step - self._first_seen)).clamp(min=1)
            rows, weights, self._shares = self._rule.draw_stream_batch(
                self._scores, self._shares, remaining_draws, context.batch_size, context.step, context.rank
            )
            self._shares[rows] = DRAWN_SHARE
        else:
            pool = self._find_members(int(newest))
            drawn, weights = self._rule.draw_batch(
                self._scores[pool],
                self._candidate_weights[pool],
                context.batch_size,
                context.step,
                context.rank,
            )
            rows = pool[drawn]
        telemetry["largest_weight"] = float(weights.max())
        return Draw(self._ids[rows], weights, weight, telemetry)

    def _draw_by_groups(self, context: DrawContext) -> tuple[Tensor, Tensor]:
        """Draws rows and weights of a batch by the paper's rule."""
        random = create_generator(self._seed, "draw", context.step, context.rank)
        stamps, sizes = self._list_groups()
        logs = -self._beta * (stamps[-1] - stamps).double()
        chosen = draw_without_replacement(logs, min(self._num_chosen, len(stamps)), random)
        rows, weights = [], []
        for stamp, size in zip(
            stamps[chosen].tolist(),
            split_quotas(context.batch_size, sizes[chosen], random).tolist(),
            strict=True,
        ):
            members = self._find_members(stamp)
            importances = self._compute_importances(members)
            drawn = draw_with_replacement(importances, size, random)
            rows.append(members[drawn])
            weights.append(compute_importance_weights(importances)[drawn])
        return torch.cat(rows), torch.cat(weights).float()

    def _list_groups(self) -> tuple[Tensor, Tensor]:
        """Returns stamps and sizes of the groups, oldest first."""
        first = self._stamps.min()
        sizes = torch.bincount(self._stamps - first)
        occupied = sizes.nonzero().flatten()
        return first + occupied, sizes[occupied]

    def _find_members(self, stamp: int) -> Tensor:
        return (self._stamps == stamp).nonzero().flatten()

    def _compute_importances(self, members: Tensor) -> Tensor:
        """Computes I of a group."""
        return smooth_scores(fill_unscored(self._scores[members]), self._smoothing)

    # --- scoring ----------------------------------------------------------------------------------------------------

    @override
    def plan_wait(
        self, context: DrawContext, decide: Callable[[str, int, Callable[[], Json]], Decision]
    ) -> WaitWork:
        """Plans the samples to score, and those for gradients and statistics; sets the rule of the next batch."""
        count = context.pool if isinstance(context.pool, int) else len(context.pool)
        size = self._compute_group_size(context, count, decide)
        gradients = math.ceil(self._fill_fraction * size / FORWARDS_PER_GRADIENT)
        size -= math.ceil(self._fill_fraction * size)
        if self.gain is not None:
            self._batch_fraction = context.batch_size / max(
                context.batch_size, size if isinstance(context.pool, int) else count
            )
            self._batch_rule = self.gain.rule
            if self._batch_rule == "uniform":
                size = min(context.batch_size, size) if self.gain.should_score(context.step) else 0
        elif self._rule is not None:
            self._batch_rule = "pool" if size else "uniform"
        num_uniform = (
            context.batch_size if self.statistics == "uniform" and self._batch_rule != "uniform" else 0
        )
        return WaitWork(
            self._choose_group(context, count, size),
            self._draw_uniform(context, gradients),
            self._draw_uniform(context, num_uniform),
        )

    def _draw_uniform(self, context: DrawContext, size: int) -> Sequence[SampleIds]:
        """Draws the next uniform samples, in chunks."""
        return (
            torch.split(self._uniform.draw(replace(context, batch_size=size)).ids, self._chunk)
            if size
            else ()
        )

    def _choose_group(self, context: DrawContext, count: int, size: int) -> Sequence[SampleIds]:
        if not size:
            return ()
        if not isinstance(context.pool, int):
            rows, is_held = self._find_rows(context.pool)
            lacks_score = ~is_held | (self._scores[rows] < 0)  # unscored samples come first
            stamps = torch.where(lacks_score, torch.iinfo(torch.int64).min, self._stamps[rows])
            ids = context.pool[stamps.argsort(stable=True)[:size]]
        elif self._rule is None:
            ids = self._order.get_order(0, count)[(self._cursor + torch.arange(size)) % count]
        else:
            ids, first = self._rule.choose_candidates(
                self._scores, size, context.step, is_two_stage=self._batch_rule == "two"
            )
            self._candidate_weights[ids] = first
        return torch.split(ids, self._chunk)

    def _compute_group_size(
        self, context: DrawContext, count: int, decide: Callable[[str, int, Callable[[], Json]], Decision]
    ) -> int:
        """Computes the number of samples of the next group, from ``count`` available ones."""
        if self._groups == "bacc":
            limit = count if self._max_scored is None else min(self._max_scored, count)
            size = (
                self._bacc.choose_chunks(context.step, max(1, -(-limit // self._chunk)), decide) * self._chunk
            )
            return min(
                size if self._rule is None else max(size, MIN_GROUP_BATCHES * context.batch_size), limit
            )
        if self._groups is None:
            return min(CANDIDATES_PER_SAMPLE * context.batch_size, count)
        if self._rule is None and isinstance(context.pool, int):
            # Stop at the end of the group that the cursor is in; the end of group g is at count * (g + 1) // groups.
            group = -(-(self._cursor + 1) * self._groups // count) - 1
            return count * (group + 1) // self._groups - self._cursor
        return -(-count // self._groups)

    @override
    def record_scores(self, ids: SampleIds, scores: Tensor, step: int) -> None:
        """Records the scores of a chunk, whose samples move to the step's group.

        Raises:
          RunLost: Scores are not finite.
          ConfigError: Scores are below 0.
        """
        check_scores(NAME, scores, step)
        rows, is_held = self._find_rows(ids)
        rows, scores = rows[is_held], scores[is_held].to(self._scores)
        if self.gain is not None:
            self._new_scores.append((scores, self._candidate_weights[rows]))
        was_scored = self._scored_at[rows] >= 0
        old_scores, ages = self._scores[rows][was_scored], step - self._scored_at[rows][was_scored]
        self._renewal.add(old_scores, scores[was_scored], ages, step)
        self._scores[rows] = scores
        self._stamps[rows] = self._scored_at[rows] = step
        self._cursor = (self._cursor + len(ids)) % len(self._ids)

    @override
    def record_times(self, times: ScoringTimes) -> None:
        """Records the times for the size of groups, and the moments of the step's scores."""
        self._bacc.record_times(times)
        if self._rule is not None and self.gain is not None and self._new_scores:
            scores, weights = (torch.cat(column) for column in zip(*self._new_scores, strict=True))
            self.gain.record_moments(self._rule.compute_moments(scores, weights), self._batch_fraction)
        self._new_scores.clear()

    # --- samples that change their owner ----------------------------------------------------------------------------

    @override
    def report(self) -> Mapping[str, Json]:
        return {} if self.gain is None else self.gain.report()

    @override
    def choose_outgoing(self, count: int, step: int) -> SampleIds:
        r"""Chooses from each group its share, :math:`n M_i / N`, without replacement by q.

        Raises:
          ConfigError: ``count`` exceeds the number of samples.
        """
        if count > len(self._ids):
            raise ConfigError(f"{NAME}: {count} samples are to be given away, and there are {len(self._ids)}")
        random = create_generator(self._seed, "outgoing", step)
        stamps, sizes = self._list_groups()
        rows = []
        for stamp, share in zip(stamps.tolist(), split_quotas(count, sizes, random).tolist(), strict=True):
            members = self._find_members(stamp)
            rows.append(
                members[draw_without_replacement(self._compute_importances(members).log(), share, random)]
            )
        return self._ids[torch.cat(rows)]

    @override
    def get_scores(self, ids: SampleIds) -> Tensor:
        """Returns the scores without smoothing."""
        rows, is_held = self._find_rows(ids)
        return torch.where(is_held, self._scores[rows], UNSCORED)

    @override
    def set_scores(self, ids: SampleIds, scores: Tensor) -> None:
        """Sets the scores of slots whose samples were replaced; the slots stay in their groups."""
        rows, is_held = self._find_rows(ids)
        self._scores[rows[is_held]], self._scored_at[rows[is_held]] = scores[is_held], UNKNOWN_STEP

    # --- table of samples -------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> State:
        return {
            "ids": self._ids.clone(),
            **{name: column.clone() for name, column in zip(COLUMNS, self._get_columns(), strict=True)},
            "lifetime_steps": self._lifetime_steps,
            "cursor": self._cursor,
            "batch_rule": self._batch_rule,
            **{name: part.state_dict() for name, part in self._get_parts().items()},
        }

    @override
    def load_state_dict(self, state: State) -> None:
        ids = state["ids"].clone()
        self._set_table(ids, *(state[name].clone() for name in COLUMNS))
        self._lifetime_steps = state["lifetime_steps"]
        self._cursor = state["cursor"]
        self._batch_rule = state["batch_rule"]
        for name, part in self._get_parts().items():
            part.load_state_dict(state[name])

    def _get_parts(self) -> dict[str, Any]:
        """Returns the parts with a state, by name."""
        parts = {"renewal": self._renewal, "bacc": self._bacc, "uniform": self._uniform}
        return {
            **parts,
            **{name: part for name, part in (("rule", self._rule), ("gain", self.gain)) if part is not None},
        }

    def _update_table(self, context: DrawContext) -> None:
        """Drops samples that have left, and adds new ones."""
        if isinstance(context.pool, int) and isinstance(self._groups, int) and self._groups > context.pool:
            raise ConfigError(
                f"{NAME}: groups {self._groups} for the {context.pool} samples of this replica: ask for fewer "
                f"groups, or "
                "for fewer replicas"
            )
        ids = torch.arange(context.pool) if isinstance(context.pool, int) else context.pool
        if torch.equal(ids, self._ids):
            return
        is_leading = torch.isin(self._ids, ids).cumsum(0) == 0
        lost = self._first_seen[is_leading & (self._shares != DRAWN_SHARE)]
        if len(lost):
            self._lifetime_steps = float(context.step - lost.min())
        rows, is_held = self._find_rows(ids)
        columns = self._create_columns(ids, context.step)
        for new, old in zip(columns, self._get_columns(), strict=True):
            new[is_held] = old[rows[is_held]]
        self._set_table(ids.clone(), *columns)
        self._cursor %= len(ids)

    def _create_columns(self, ids: SampleIds, step: int) -> tuple[Tensor, ...]:
        """Creates the columns of samples that arrive at a step."""
        return (
            torch.full(ids.shape, UNSCORED, dtype=torch.float32),
            torch.full_like(ids, step - 1),
            torch.full_like(ids, UNKNOWN_STEP),
            torch.ones(ids.shape, dtype=torch.float64),
            torch.full_like(ids, step),
            torch.ones(ids.shape, dtype=torch.float64),
        )

    def _set_table(self, ids: SampleIds, *columns: Tensor) -> None:
        self._ids = ids
        (
            self._scores,
            self._stamps,
            self._scored_at,
            self._candidate_weights,
            self._first_seen,
            self._shares,
        ) = columns
        self._sorted_ids, self._sort_order = ids.sort()

    def _get_columns(self) -> list[Tensor]:
        return [getattr(self, f"_{name}") for name in COLUMNS]

    def _find_rows(self, ids: SampleIds) -> tuple[Tensor, Tensor]:
        """Finds the rows of samples, and which of them are held; the rows of others are arbitrary."""
        if not len(self._ids):
            return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        position = torch.searchsorted(self._sorted_ids, ids).clamp(max=len(self._ids) - 1)
        return self._sort_order[position], self._sorted_ids[position] == ids
