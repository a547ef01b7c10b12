"""Importance sampling: samples are scored in waits, and batches are drawn by their scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from farflung.errors import ConfigError
from farflung.options import choice_option, number_option, whole_option
from farflung.sampling.bacc import Bacc
from farflung.sampling.gain import Gain
from farflung.sampling.importance import (
    Renewal,
    importance_weights,
    quantiles,
    quotas,
    smoothed,
    variance_ratio,
    with_replacement,
    without_replacement,
)
from farflung.sampling.rules import CANDIDATES, NEVER, TWO_STAGE, Rule, filled
from farflung.sampling.scores import check_scores
from farflung.sampling.scoring import ScoringSampler
from farflung.sampling.uniform import Uniform
from farflung.seeding import Passes, derive, generator
from farflung.types import (
    PASSES,
    Decision,
    Draw,
    Due,
    Json,
    PoolView,
    SampleIds,
    ScoredBy,
    Spare,
    State,
    Statistics,
)

__all__ = ["GroupedImportance"]

NAME = "grouped_importance"
UNKNOWN = -1
"""In place of the step at which a score was made here: none was, or its sample has come from another replica."""
COLUMNS = ("scores", "stamps", "made", "first", "since", "shares")
"""Of the table of samples: the step at which one was first seen, and what one of a stream shall weigh, are the last."""
DRAWN = -1.0
"""In place of what a sample of a stream shall weigh from now on: it has been drawn, and leaves."""
FEWEST = 2
"""Batches that a group by time has at least, outside the paper's rule: of fewer there is little to choose."""
FILLS = {"fill": 1.0, "half": 0.5}
"""Rules that compute gradients in the wait, with the part of it that they do so in."""
PERCENTS = (5, 25, 50, 75, 95)
"""Of the scores of a group, for telemetry."""
PAPER = {"chosen": 2, "beta": 0.5}
"""Options of the paper's rule alone."""


class GroupedImportance(ScoringSampler):
    r"""Draws by scores, a part of which is made anew in each step's wait for exchanges.

    Samples that were scored in the wait of the same step are a *group*. How many these are: ``groups``, a whole number
    D, for one D-th of the replica's samples; ``"bacc"`` for as many as there is time for, see
    :class:`farflung.sampling.Bacc`; ``None`` for ten batches, with the paper's rule 8 groups.

    **Rules** ``pool`` and ``two`` draw a batch without replacement from the newest group, see
    :class:`farflung.sampling.Rule`. Groups by time have two batches at least. Of a stream all samples that are held are
    the candidates, each until it is drawn or lost, see :meth:`farflung.sampling.Rule.stream_batch`; those whose score
    is oldest are scored, first those without any; ``two`` is refused there. **Rule** ``auto`` takes either while that
    is worth it, see :class:`farflung.sampling.Gain`, ``two`` of no stream. Otherwise batches are uniform, in shuffled
    passes over the replica's samples, and what is scored is a batch of candidates in every 20th step; nothing, where no
    gain can be predicted.

    **Rule** ``fill`` computes gradients in the wait in place of scores, a third as many, of uniform samples; they are
    a step old when the next step's gradient takes them in, weighted by samples. Its batches are uniform, and come from
    the same passes. **Rule** ``half`` spends half the wait so, and the other half as ``pool``.

    **Rule** ``paper`` is Mercury's, for its figures. Batches are drawn on two levels: first ``chosen`` groups without
    replacement, each by how fresh it is. With :math:`a_i` steps since its scoring and :math:`M_i` samples,

    .. math:: r_i = e^{-\beta a_i} / \textstyle\sum_k e^{-\beta a_k}.

    Then :math:`|B| M_i / \sum_{k \text{ chosen}} M_k` samples of each, rounded up or down at random, with replacement
    by their smoothed scores; one weighs :math:`\bar{I}_i / I_{ij}`, at most :math:`(1 + c)/c`:

    .. math::
        q_{ij} = I_{ij} / \textstyle\sum_m I_{im}, \qquad I_{ij} = s_{ij} + c\, \bar{s}_i

    That corrects for scores, not for freshness: the mean over a batch expects to be that over the chosen groups. It is
    the mean over all samples since groups are made at random and take turns in being fresh. Samples are scored in turn
    in one random order; where groups are sized by time, a sample that is scored anew leaves its group for the newest.

    Where all samples are at hand, the batch weighs, in the mean over the replicas, as many batches as the replica has
    samples over the mean of all. What a batch of a stream weighs is the stream's choice. A sample without a score
    counts as the mean of those beside it, and all as alike where none has one, so the first batch is uniform.

    Telemetry: ``rule`` of the batch (``uniform``, ``pool``, ``two`` or ``paper``), ``groups`` there are, ``scored``
    samples of the newest; ``variance_ratio`` as their scores have it
    (:func:`farflung.sampling.importance.variance_ratio`); ``gain`` and ``noise_scale``
    (:class:`farflung.sampling.Gain`; not for ``paper``); the scores that 5, 25, 50, 75 and 95 % of them do not exceed
    (``score_quantiles``, ``None`` where none is scored); the ``largest_weight`` of the batch; and the figures of
    :class:`farflung.sampling.importance.Renewal` for samples that were scored afresh in the step before.

    Args:
      seed: of all that is random here; unlike on replicas with samples of their own.
      rule: ``"auto"``, ``"pool"``, ``"two"``, ``"fill"``, ``"half"`` or ``"paper"``.
      groups: see above.
      scored_by: see :data:`farflung.types.ScoredBy`; ``None``: ``"gradient_bound"``, with the paper's rule ``"loss"``.
      statistics: what running statistics, such as a batch norm's, are updated by: ``"batch"``, every batch;
        ``"uniform"``, no batch that is drawn by scores, and as many uniform samples in its wait.
      smoothing: c; ``None``: 0.02, with the paper's rule 0.5. Without any, which the paper's rule allows, weights have
        no bound and samples with a score of 0 are not drawn.
      chosen: d, of how many groups a batch is; of as many as there are until then. The paper's rule alone.
      beta: :math:`\beta`; with 0 age does not matter. The paper's rule alone.
      chunk: samples that are scored at once.
      most: samples of a group at most, for ``"bacc"``: beyond that a longer wait is left idle; ``None``: all there are.
      every: steps between two choices of a group's size, for ``"bacc"``.
      share: of computing that scoring may take, for ``"bacc"``, where exchanges overlap with computing.

    Raises:
      ConfigError: an option out of its range, or of another rule.

    References: Zeng et al. 2021 (Mercury), sections on group-wise importance; Katharopoulos & Fleuret 2018 for
    ``"gradient_bound"``. The paper gives no D, d, :math:`\beta` or smoothing. Its released
    code draws from the newest group alone and smooths by its mean: the script by half a running mean, a class beside it
    by the mean itself. Under the paper's rule half the mean of each group is added, at the time of a draw. This
    project's own choices as well: ``most``, rounding at random, the weight by samples, which the paper's proof needs
    and its update leaves out, and samples without a score.
    """

    carries_scores = True

    def __init__(
        self,
        seed: int,
        *,
        rule: Literal["auto", "pool", "two", "fill", "half", "paper"] = "auto",
        groups: int | Literal["bacc"] | None = None,
        scored_by: ScoredBy | None = None,
        statistics: Statistics = "batch",
        smoothing: float | None = None,
        chosen: int = 2,
        beta: float = 0.5,
        chunk: int = 64,
        most: int | None = None,
        every: int = 10,
        share: float = 0.25,
    ) -> None:
        choice_option(NAME, "rule", rule, (*TWO_STAGE, *FILLS, "paper"))
        paper = rule == "paper"
        groups = 8 if paper and groups is None else groups
        if groups is not None and groups != "bacc":
            if isinstance(groups, str):
                raise ConfigError(f"{NAME}: groups {groups!r} must be a whole number or 'bacc'")
            whole_option(NAME, "groups", groups, 1)
        for option, value in {"chosen": chosen, "beta": beta}.items():
            if not paper and value != PAPER[option]:
                raise ConfigError(f"{NAME}: {option} {value!r} is of the paper's rule: give rule='paper' too")
        whole_option(NAME, "chosen", chosen, 1)
        if paper and isinstance(groups, int) and chosen > groups:
            raise ConfigError(f"{NAME}: chosen {chosen} must be at most groups, {groups}")
        number_option(NAME, "beta", beta, 0)
        smoothing = (0.5 if paper else 0.02) if smoothing is None else smoothing
        number_option(NAME, "smoothing", smoothing, 0)
        scored_by = ("loss" if paper else "gradient_bound") if scored_by is None else scored_by
        choice_option(NAME, "scored_by", scored_by, get_args(ScoredBy))
        choice_option(NAME, "statistics", statistics, get_args(Statistics))
        whole_option(NAME, "chunk", chunk, 1)
        if most is not None:
            whole_option(NAME, "most", most, chunk)
        self._groups, self._chosen = groups, chosen
        self._beta, self._smoothing = float(beta), float(smoothing)
        self.scored_by, self._chunk, self._most = scored_by, chunk, most
        self.statistics, self._fills = statistics, FILLS.get(rule, 0.0)
        needs = {f"rule {rule!r}": rule in ("two", *FILLS), "statistics='uniform'": statistics == "uniform"}
        self._needs_all = " and ".join(text for text, is_set in needs.items() if is_set)
        self._seed, self._order = seed, Passes(derive(seed, "order"))
        self.gain = Gain(rule) if rule in TWO_STAGE else None
        """What drawing by scores is worth; ``None`` where the rule does not depend on it."""
        self._rule = None if paper else Rule(NAME, smoothing, derive(seed, "rule"))
        self._bacc = Bacc(NAME, chunk, every, share)
        self._uniform = Uniform(derive(seed, "uniform"))
        self._by, self._cursor = "paper" if paper else "uniform", 0
        self._part, self._fresh = 1.0, list[tuple[Tensor, Tensor]]()
        self._renewal = Renewal()
        self._shares: Tensor
        none = torch.empty(0, dtype=torch.int64)
        self._put(none, *self._blank(none, 0))
        self._life = math.inf

    # --- drawing ----------------------------------------------------------------------------------------------------

    @override
    def next(self, view: PoolView) -> Draw:
        """A batch by the scores there are.

        Raises:
          ConfigError: more groups than samples, or a stream where something is to be drawn from all samples.
        """
        self._hold(view)
        if not isinstance(view.pool, int) and (conflict := self._needs_all):
            raise ConfigError(
                f"{NAME}: {conflict} takes samples from all of a replica's, and a stream holds those that have arrived: "
                "give rule='pool' and statistics='batch'"
            )
        newest = self._stamps.max()
        mask = (self._stamps == newest) & (self._scores >= 0)
        scores, first = self._scores[mask], self._first[mask]
        if self.gain is not None:
            self.gain.streams = not isinstance(view.pool, int)
            if self.gain.rule == "uniform":
                self._by = "uniform"
            self.gain.steps[self._by] += 1
        telemetry: dict[str, Json] = {
            "rule": self._by,
            "groups": len(self._present()[0]),
            "scored": len(scores),
            "variance_ratio": variance_ratio(scores, smoothed(scores, self._smoothing, first), first),
            **({} if self.gain is None else self.gain.told()),
            "score_quantiles": [*quantiles(scores, PERCENTS)] if len(scores) else None,
            "largest_weight": 1.0,
            **self._renewal.told(view.step - 1),
        }
        weight = view.share if isinstance(view.pool, int) else None
        if self._by == "uniform":
            ids = self._uniform.next(view).ids
            if not isinstance(view.pool, int):
                self._shares[self._find(ids)[0]] = DRAWN
            return Draw(ids, None, weight, telemetry)
        if self._rule is None:
            rows, weights = self._by_groups(view)
        elif not isinstance(view.pool, int):
            remaining_draws = (self._life - (view.step - self._since)).clamp(min=1)
            rows, weights, self._shares = self._rule.stream_batch(
                self._scores, self._shares, remaining_draws, view.batch_size, view.step, view.rank
            )
            self._shares[rows] = DRAWN
        else:
            pool = self._members(int(newest))
            drawn, weights = self._rule.batch(
                self._scores[pool], self._first[pool], view.batch_size, view.step, view.rank
            )
            rows = pool[drawn]
        telemetry["largest_weight"] = float(weights.max())
        return Draw(self._ids[rows], weights, weight, telemetry)

    def _by_groups(self, view: PoolView) -> tuple[Tensor, Tensor]:
        """Rows and weights of a batch by the paper's rule."""
        random = generator(self._seed, "draw", view.step, view.rank)
        stamps, sizes = self._present()
        logs = -self._beta * (stamps[-1] - stamps).double()
        chosen = without_replacement(logs, min(self._chosen, len(stamps)), random)
        rows, weights = [], []
        for stamp, size in zip(
            stamps[chosen].tolist(), quotas(view.batch_size, sizes[chosen], random).tolist(), strict=True
        ):
            members = self._members(stamp)
            importances = self._importances(members)
            drawn = with_replacement(importances, size, random)
            rows.append(members[drawn])
            weights.append(importance_weights(importances)[drawn])
        return torch.cat(rows), torch.cat(weights).float()

    def _present(self) -> tuple[Tensor, Tensor]:
        """Stamps and sizes of the groups, oldest first."""
        first = self._stamps.min()
        sizes = torch.bincount(self._stamps - first)
        occupied = sizes.nonzero().flatten()
        return first + occupied, sizes[occupied]

    def _members(self, stamp: int) -> Tensor:
        return (self._stamps == stamp).nonzero().flatten()

    def _importances(self, members: Tensor) -> Tensor:
        """I of a group."""
        return smoothed(filled(self._scores[members]), self._smoothing)

    # --- scoring ----------------------------------------------------------------------------------------------------

    @override
    def due(self, view: PoolView, decide: Callable[[str, int, Callable[[], Json]], Decision]) -> Due:
        """The next group of all samples, or those of a stream that are in most need of a score; in chunks."""
        count = view.pool if isinstance(view.pool, int) else len(view.pool)
        size = self._due(view, count, decide)
        gradients = math.ceil(self._fills * size / PASSES)
        size -= math.ceil(self._fills * size)
        if self.gain is not None:
            self._part = view.batch_size / max(view.batch_size, size if isinstance(view.pool, int) else count)
            self._by = self.gain.rule
            if self._by == "uniform":
                size = min(view.batch_size, size) if self.gain.scores_at(view.step) else 0
        elif self._rule is not None:
            self._by = "pool" if size else "uniform"
        statistics_size = view.batch_size if self.statistics == "uniform" and self._by != "uniform" else 0
        return Due(
            self._next_group(view, count, size), self._beside(view, gradients), self._beside(view, statistics_size)
        )

    def _beside(self, view: PoolView, size: int) -> Sequence[SampleIds]:
        """The next of the uniform samples, in chunks."""
        return (
            torch.split(self._uniform.next(replace(view, batch_size=size)).ids, self._chunk) if size else ()
        )

    def _next_group(self, view: PoolView, count: int, size: int) -> Sequence[SampleIds]:
        if not size:
            return ()
        if not isinstance(view.pool, int):
            rows, is_held = self._find(view.pool)
            lacks_score = ~is_held | (self._scores[rows] < 0)  # these come first
            stamps = torch.where(lacks_score, torch.iinfo(torch.int64).min, self._stamps[rows])
            ids = view.pool[stamps.argsort(stable=True)[:size]]
        elif self._rule is None:
            ids = self._order.order(0, count)[(self._cursor + torch.arange(size)) % count]
        else:
            ids, first = self._rule.candidates(self._scores, size, view.step, two=self._by == "two")
            self._first[ids] = first
        return torch.split(ids, self._chunk)

    def _due(
        self, view: PoolView, count: int, decide: Callable[[str, int, Callable[[], Json]], Decision]
    ) -> int:
        """The size of a group of so many samples."""
        if self._groups == "bacc":
            limit = count if self._most is None else min(self._most, count)
            size = self._bacc.chunks(view.step, max(1, -(-limit // self._chunk)), decide) * self._chunk
            return min(size if self._rule is None else max(size, FEWEST * view.batch_size), limit)
        if self._groups is None:
            return min(CANDIDATES * view.batch_size, count)
        if self._rule is None and isinstance(view.pool, int):
            # Up to the end of the group that the cursor is in; the end of group g is at count * (g + 1) // groups.
            group = -(-(self._cursor + 1) * self._groups // count) - 1
            return count * (group + 1) // self._groups - self._cursor
        return -(-count // self._groups)

    @override
    def scored(self, ids: SampleIds, scores: Tensor, step: int) -> None:
        """Keeps the scores of a chunk; its samples belong to the step's group now.

        Raises:
          RunLost: scores that are not finite.
          ConfigError: scores below 0.
        """
        check_scores(NAME, scores, step)
        rows, is_held = self._find(ids)
        rows, scores = rows[is_held], scores[is_held].to(self._scores)
        if self.gain is not None:
            self._fresh.append((scores, self._first[rows]))
        was_scored = self._made[rows] >= 0
        before, ages = self._scores[rows][was_scored], step - self._made[rows][was_scored]
        self._renewal.add(before, scores[was_scored], ages, step)
        self._scores[rows] = scores
        self._stamps[rows] = self._made[rows] = step
        self._cursor = (self._cursor + len(ids)) % len(self._ids)

    @override
    def observe(self, spare: Spare) -> None:
        """What groups are sized by, where they are, and the scores of the step."""
        self._bacc.observe(spare)
        if self._rule is not None and self.gain is not None and self._fresh:
            scores, weights = (torch.cat(column) for column in zip(*self._fresh, strict=True))
            self.gain.judge(self._rule.moments(scores, weights), self._part)
        self._fresh.clear()

    # --- samples that change their owner ----------------------------------------------------------------------------

    @override
    def report(self) -> Mapping[str, Json]:
        return {} if self.gain is None else self.gain.report()

    @override
    def outgoing(self, count: int, step: int) -> SampleIds:
        r"""Of each group its share, :math:`n M_i / N`, without replacement by q.

        Raises:
          ConfigError: more than there are.
        """
        if count > len(self._ids):
            raise ConfigError(f"{NAME}: {count} samples are to be given away, and there are {len(self._ids)}")
        random = generator(self._seed, "outgoing", step)
        stamps, sizes = self._present()
        rows = []
        for stamp, share in zip(stamps.tolist(), quotas(count, sizes, random).tolist(), strict=True):
            members = self._members(stamp)
            rows.append(members[without_replacement(self._importances(members).log(), share, random)])
        return self._ids[torch.cat(rows)]

    @override
    def scores_of(self, ids: SampleIds) -> Tensor:
        """The scores as they were made, without smoothing."""
        rows, is_held = self._find(ids)
        return torch.where(is_held, self._scores[rows], NEVER)

    @override
    def incoming(self, ids: SampleIds, scores: Tensor) -> None:
        """Other samples with other scores; their slots stay in the groups that they were in."""
        rows, is_held = self._find(ids)
        self._scores[rows[is_held]], self._made[rows[is_held]] = scores[is_held], UNKNOWN

    # --- what is held -----------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> State:
        """Scores and stamps of all samples, how far scoring has come, and what sizes and rules go by."""
        return {
            "ids": self._ids.clone(),
            **{name: column.clone() for name, column in zip(COLUMNS, self._columns(), strict=True)},
            "life": self._life,
            "cursor": self._cursor,
            "by": self._by,
            **{name: part.state_dict() for name, part in self._parts().items()},
        }

    @override
    def load_state_dict(self, state: State) -> None:
        ids = state["ids"].clone()
        self._put(ids, *(state[name].clone() for name in COLUMNS))
        self._life, self._cursor, self._by = state["life"], state["cursor"], state["by"]
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        """Returns what has a state of its own."""
        parts = {"renewal": self._renewal, "bacc": self._bacc, "uniform": self._uniform}
        return {
            **parts,
            **{name: part for name, part in (("rule", self._rule), ("gain", self.gain)) if part is not None},
        }

    def _hold(self, view: PoolView) -> None:
        """Forgets samples that are gone, and takes up new ones."""
        if isinstance(view.pool, int) and isinstance(self._groups, int) and self._groups > view.pool:
            raise ConfigError(
                f"{NAME}: groups {self._groups} for the {view.pool} samples of this replica: ask for fewer groups, or "
                "for fewer replicas"
            )
        ids = torch.arange(view.pool) if isinstance(view.pool, int) else view.pool
        if torch.equal(ids, self._ids):
            return
        leading = torch.isin(self._ids, ids).cumsum(0) == 0
        lost = self._since[leading & (self._shares != DRAWN)]
        if len(lost):
            self._life = float(view.step - lost.min())
        rows, is_held = self._find(ids)
        columns = self._blank(ids, view.step)
        for new, old in zip(columns, self._columns(), strict=True):
            new[is_held] = old[rows[is_held]]
        self._put(ids.clone(), *columns)
        self._cursor %= len(ids)

    def _blank(self, ids: SampleIds, step: int) -> tuple[Tensor, ...]:
        """The table's columns of samples that are new in a step."""
        return (
            torch.full(ids.shape, NEVER, dtype=torch.float32),
            torch.full_like(ids, step - 1),
            torch.full_like(ids, UNKNOWN),
            torch.ones(ids.shape, dtype=torch.float64),
            torch.full_like(ids, step),
            torch.ones(ids.shape, dtype=torch.float64),
        )

    def _put(self, ids: SampleIds, *columns: Tensor) -> None:
        self._ids = ids
        self._scores, self._stamps, self._made, self._first, self._since, self._shares = columns
        self._sorted, self._sorting = ids.sort()

    def _columns(self) -> list[Tensor]:
        return [getattr(self, f"_{name}") for name in COLUMNS]

    def _find(self, ids: SampleIds) -> tuple[Tensor, Tensor]:
        """Where samples are in the table, and whether they are there; anywhere in it where they are not."""
        if not len(self._ids):
            return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        position = torch.searchsorted(self._sorted, ids).clamp(max=len(self._ids) - 1)
        return self._sorting[position], self._sorted[position] == ids
