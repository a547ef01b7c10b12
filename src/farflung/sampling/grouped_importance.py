"""Mercury's importance sampling: samples are scored group by group, and drawn by scores that are not too old."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from farflung.errors import ConfigError, RunLost
from farflung.options import flag_option, number_option, whole_option
from farflung.sampling.bacc import Bacc
from farflung.sampling.importance import (
    Renewal,
    importance_weights,
    quantiles,
    quotas,
    smoothed,
    speed_up,
    speed_up_threshold,
    variance_ratio,
    with_replacement,
    without_replacement,
)
from farflung.sampling.uniform import Uniform
from farflung.seeding import Passes, derive, generator
from farflung.types import Decision, Draw, Json, PoolView, SampleIds, ScoredBy, Spare, State

__all__ = ["GroupedImportance"]

Estimator = Literal["paper", "exact"]

NAME = "grouped_importance"
NEVER = -1.0
"""The score of a sample that was never scored; others are at least 0."""
UNKNOWN = -1
"""In place of the step at which a score was made here: none was, or its sample has come from another replica."""
INERTIA = 0.9
PERCENTS = (5, 25, 50, 75, 95)
"""Of the scores of a group, for telemetry."""


class _Take(NamedTuple):
    """What a batch takes of one group.

    Args:
      stamp: of the group.
      size: samples.
      factor: what each weighs besides its weight within the group.
    """

    stamp: int
    size: int
    factor: float


class GroupedImportance:
    r"""Draws by scores, a part of which is made anew in each step's wait for exchanges.

    Samples that were scored in the wait of the same step are a *group*; :math:`M_i` is its size. A step's batch B is
    drawn on two levels. First ``chosen`` groups, each by how fresh it is: with :math:`a_i` steps since its scoring,

    .. math:: r_i = e^{-\beta a_i} / \textstyle\sum_k e^{-\beta a_k}.

    Then samples of each with replacement, by their smoothed scores:

    .. math::
        q_{ij} = I_{ij} / \textstyle\sum_m I_{im}, \qquad I_{ij} = s_{ij} + c\, \bar{s}_i

    With ``estimator="paper"`` groups are chosen without replacement, a group gives
    :math:`|B| M_i / \sum_{k \text{ chosen}} M_k` samples, rounded up or down at random, and a sample weighs
    :math:`1 / (M_i q_{ij}) = \bar{I}_i / I_{ij}`, at most :math:`(1 + c)/c`. That corrects for scores, not for
    freshness: the mean over a batch expects to be that over the chosen groups. It is the mean over all samples since
    groups are made at random and take turns in being fresh.

    With ``estimator="exact"`` d groups are chosen with replacement, each gives :math:`b = |B| / d` samples, and one
    weighs

    .. math:: \frac{|B|}{d\, b} \cdot \frac{M_i}{N r_i} \cdot \frac{1}{M_i q_{ij}}

    so that the mean over a batch expects to be the mean over all N samples, whatever the groups. Old groups weigh much,
    and so does its variance.

    Where all samples are at hand, they are scored in turn in one random order. With a whole number D as ``groups``
    that makes D groups that stay the same, each scored once in D steps, with N / D samples, rounded up or down. With
    ``"bacc"`` a group is as large as there is time for, see :class:`farflung.sampling.Bacc`, and a sample that is
    scored anew leaves its group for the newest. The batch weighs, in the mean over the replicas, as many batches as the
    replica has samples over the mean of all.

    Of a stream those held are scored whose score is oldest, first those without any; ``groups`` divides what is held.
    What arrives joins the newest group. What the batch weighs is the stream's choice.

    A sample without a score counts as the mean of its group, and all as alike where none has one, so the first batch is
    uniform.

    Telemetry: ``groups`` there are, ``scored`` samples of the newest; estimated by their scores, ``variance_ratio``
    (:func:`farflung.sampling.importance.variance_ratio`) and ``tau``, :math:`\tau` of
    :func:`farflung.sampling.importance.speed_up`, where 0.9 of the one before stays, from 0 on; the scores that 5, 25,
    50, 75 and 95 % of them do not exceed (``score_quantiles``, ``None`` where none is scored); the ``largest_weight``
    of the batch; and what :class:`farflung.sampling.importance.Renewal` tells of samples that were scored afresh in
    the step before.

    Args:
      seed: of all that is random here; unlike on replicas with samples of their own.
      groups: D, or ``"bacc"``.
      chosen: d, of how many groups a batch is; of as many as there are until then.
      beta: :math:`\beta`; with 0 age does not matter.
      smoothing: c; without any, weights have no bound and samples with a score of 0 are not drawn.
      scored_by: see :data:`farflung.types.ScoredBy`.
      estimator: ``"paper"`` or ``"exact"``.
      switch: whether batches are uniform while :math:`\tau \leq (M + 3|B|) / 3|B|`, with M samples in the newest group.
        That counts the time of scoring as lost, which in a wait it is not, and so asks for much.
      chunk: samples that are scored at once.
      most: samples of a group at most, for ``"bacc"``: beyond that a longer wait is left idle; ``None``: all there are.
      every: steps between two choices of a group's size, for ``"bacc"``.
      share: of computing that scoring may take, for ``"bacc"``, where exchanges overlap with computing.

    Raises:
      ConfigError: an option out of its range.

    References: Zeng et al. 2021 (Mercury), sections on group-wise importance; Katharopoulos & Fleuret 2018 for
    ``switch`` and :math:`\tau`. The paper gives no D, d, :math:`\beta` or smoothing. Its released code draws from the
    newest group alone and smooths by its mean: the script by half a running mean, a class beside it by the mean itself.
    Ours is half the mean of each group, at the time of a draw, so groups of unlike age are each smoothed by their own.
    Our choices as well: ``most``, rounding at random, the weight by samples, which the paper's proof needs and its
    update leaves out, and what becomes of samples without a score.
    """

    def __init__(
        self,
        seed: int,
        *,
        groups: int | Literal["bacc"] = 8,
        chosen: int = 2,
        beta: float = 0.5,
        smoothing: float = 0.5,
        scored_by: ScoredBy = "loss",
        estimator: Estimator = "paper",
        switch: bool = False,
        chunk: int = 64,
        most: int | None = None,
        every: int = 10,
        share: float = 0.25,
    ) -> None:
        if groups != "bacc":
            if isinstance(groups, str):
                raise ConfigError(f"{NAME}: groups {groups!r} must be a whole number or 'bacc'")
            whole_option(NAME, "groups", groups, 1)
        whole_option(NAME, "chosen", chosen, 1)
        if groups != "bacc" and chosen > groups:
            raise ConfigError(f"{NAME}: chosen {chosen} must be at most groups, {groups}")
        number_option(NAME, "beta", beta, 0)
        number_option(NAME, "smoothing", smoothing, 0)
        _one_of("scored_by", scored_by, get_args(ScoredBy))
        _one_of("estimator", estimator, get_args(Estimator))
        flag_option(NAME, "switch", switch)
        whole_option(NAME, "chunk", chunk, 1)
        if most is not None:
            whole_option(NAME, "most", most, chunk)
        self._groups, self._chosen, self._beta, self._smoothing = (
            groups,
            chosen,
            float(beta),
            float(smoothing),
        )
        self._scored_by, self._exact, self._chunk, self._most = scored_by, estimator == "exact", chunk, most
        self._seed, self._order = seed, Passes(derive(seed, "order"))
        self._bacc = Bacc(NAME, chunk, every, share)
        self._uniform = Uniform(derive(seed, "uniform")) if switch else None
        self._tau, self._cursor = 0.0, 0
        self._renewal = Renewal()
        none = torch.empty(0, dtype=torch.int64)
        self._put(none, none.float(), none, none)

    @property
    def scored_by(self) -> ScoredBy:
        """What samples are judged by."""
        return self._scored_by

    # --- drawing ----------------------------------------------------------------------------------------------------

    def next(self, view: PoolView) -> Draw:
        """A batch by the scores there are.

        Raises:
          ConfigError: more groups than samples.
        """
        self._hold(view)
        newest = int(self._stamps.max())
        scores = self._scores[(self._stamps == newest) & (self._scores >= 0)]
        if newest == view.step - 1 and len(scores):
            self._tau = INERTIA * self._tau + (1 - INERTIA) * speed_up(scores)
        told: dict[str, Json] = {
            "groups": len(self._present()[0]),
            "scored": len(scores),
            "variance_ratio": variance_ratio(scores, smoothed(scores, self._smoothing)),
            "tau": self._tau,
            "score_quantiles": [*quantiles(scores, PERCENTS)] if len(scores) else None,
            "largest_weight": 1.0,
            **self._renewal.told(view.step - 1),
        }
        weight = view.share if isinstance(view.pool, int) else None
        if self._uniform is not None:
            if self._tau <= speed_up_threshold(len(scores), view.batch_size):
                return Draw(self._uniform.next(view).ids, None, weight, told)
        random = generator(self._seed, "draw", view.step, view.rank)
        rows, weights = [], []
        for take in self._takes(view.batch_size, random):
            members = self._members(take.stamp)
            importances = self._importances(members)
            drawn = with_replacement(importances, take.size, random)
            rows.append(members[drawn])
            weights.append(take.factor * importance_weights(importances)[drawn])
        weighed = torch.cat(weights).float()
        told["largest_weight"] = float(weighed.max())
        return Draw(self._ids[torch.cat(rows)], weighed, weight, told)

    def _takes(self, size: int, random: torch.Generator) -> list[_Take]:
        """What a batch of some size takes of which groups."""
        stamps, sizes = self._present()
        logs = -self._beta * (stamps[-1] - stamps).double()
        if not self._exact:
            at = without_replacement(logs, min(self._chosen, len(stamps)), random)
            counts = quotas(size, sizes[at], random)
            return [_Take(*both, 1.0) for both in zip(stamps[at].tolist(), counts.tolist(), strict=True)]
        fresh, chosen = torch.softmax(logs, 0), min(self._chosen, size)
        takes = []
        for nth, at in enumerate(with_replacement(fresh, chosen, random).tolist()):
            count = size // chosen + (nth < size % chosen)
            group = float(sizes[at]) / (len(self._ids) * float(fresh[at]))
            takes.append(_Take(int(stamps[at]), count, size / (chosen * count) * group))
        return takes

    def _present(self) -> tuple[Tensor, Tensor]:
        """Stamps and sizes of the groups, oldest first."""
        first = self._stamps.min()
        sizes = torch.bincount(self._stamps - first)
        at = sizes.nonzero().flatten()
        return first + at, sizes[at]

    def _members(self, stamp: int) -> Tensor:
        return (self._stamps == stamp).nonzero().flatten()

    def _importances(self, members: Tensor) -> Tensor:
        """I of a group."""
        scores = self._scores[members].double()
        known = scores >= 0
        scores[~known] = scores[known].mean() if known.any() else 1.0
        return smoothed(scores, self._smoothing)

    # --- scoring ----------------------------------------------------------------------------------------------------

    def due(
        self, view: PoolView, decide: Callable[[str, int, Callable[[], Json]], Decision]
    ) -> Sequence[SampleIds]:
        """The next group of all samples, or those of a stream that are in most need of a score; in chunks."""
        count = view.pool if isinstance(view.pool, int) else len(view.pool)
        if self._groups == "bacc":
            most = count if self._most is None else min(self._most, count)
            chunks = self._bacc.chunks(view.step, max(1, -(-most // self._chunk)), decide)
            size = min(chunks * self._chunk, most)
        elif isinstance(view.pool, int):
            size = _to_boundary(self._cursor, count, self._groups)
        else:
            size = -(-count // self._groups)
        if not size:
            return []
        if isinstance(view.pool, int):
            ids = self._order.order(0, count)[(self._cursor + torch.arange(size)) % count]
        else:
            ids = view.pool[self._need(view.pool).argsort(stable=True)[:size]]
        return list(torch.split(ids, self._chunk))

    def scored(self, ids: SampleIds, scores: Tensor, step: int) -> None:
        """Keeps the scores of a chunk; its samples belong to the step's group now.

        Raises:
          RunLost: scores that are not finite.
          ConfigError: scores below 0.
        """
        odd = int((~scores.isfinite()).sum())
        if odd:
            raise RunLost(
                f"{NAME}: {odd} of {len(scores)} scores at step {step} are not finite: "
                "lower the learning rate or look at the data there"
            )
        below = int((scores < 0).sum())
        if below:
            raise ConfigError(
                f"{NAME}: {below} of {len(scores)} scores at step {step} are below 0, and samples cannot be drawn by "
                "them: choose scored_by='gradient_bound', or a loss that is never negative"
            )
        rows, there = self._find(ids)
        rows, scores = rows[there], scores[there].to(self._scores)
        again = self._made[rows] >= 0
        before, ages = self._scores[rows][again], step - self._made[rows][again]
        self._renewal.add(before, scores[again], ages, step)
        self._scores[rows] = scores
        self._stamps[rows] = self._made[rows] = step
        self._cursor = (self._cursor + len(ids)) % len(self._ids)

    def observe(self, spare: Spare) -> None:
        """What groups are sized by, where they are."""
        self._bacc.observe(spare)

    def _need(self, pool: SampleIds) -> Tensor:
        """The stamp of each sample's score, and less than any where there is none."""
        rows, there = self._find(pool)
        never = ~there | (self._scores[rows] < 0)
        return torch.where(never, torch.iinfo(torch.int64).min, self._stamps[rows])

    # --- samples that change their owner ----------------------------------------------------------------------------

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

    def scores_of(self, ids: SampleIds) -> Tensor:
        """The scores as they were made, without smoothing."""
        rows, there = self._find(ids)
        return torch.where(there, self._scores[rows], NEVER)

    def incoming(self, ids: SampleIds, scores: Tensor) -> None:
        """Other samples with other scores; their slots stay in the groups that they were in."""
        rows, there = self._find(ids)
        self._scores[rows[there]], self._made[rows[there]] = scores[there], UNKNOWN

    # --- what is held -----------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Scores and stamps of all samples, how far scoring has come, and what sizes and switches go by."""
        return {
            "ids": self._ids.clone(),
            "scores": self._scores.clone(),
            "stamps": self._stamps.clone(),
            "made": self._made.clone(),
            "renewal": self._renewal.state_dict(),
            "cursor": self._cursor,
            "tau": self._tau,
            "bacc": self._bacc.state_dict(),
            "uniform": {} if self._uniform is None else self._uniform.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        columns = (state[name].clone() for name in ("ids", "scores", "stamps", "made"))
        self._put(*columns)
        self._renewal.load_state_dict(state["renewal"])
        self._cursor, self._tau = state["cursor"], state["tau"]
        self._bacc.load_state_dict(state["bacc"])
        if self._uniform is not None:
            self._uniform.load_state_dict(state["uniform"])

    def _hold(self, view: PoolView) -> None:
        """Forgets samples that are gone, and takes up new ones."""
        if isinstance(view.pool, int) and self._groups != "bacc" and self._groups > view.pool:
            raise ConfigError(
                f"{NAME}: groups {self._groups} for the {view.pool} samples of this replica: ask for fewer groups, or "
                "for fewer replicas"
            )
        ids = torch.arange(view.pool) if isinstance(view.pool, int) else view.pool
        if torch.equal(ids, self._ids):
            return
        scores, stamps, made = (
            torch.full(ids.shape, NEVER, dtype=torch.float32),
            torch.full_like(ids, view.step - 1),
            torch.full_like(ids, UNKNOWN),
        )
        rows, there = self._find(ids)
        scores[there], stamps[there] = self._scores[rows[there]], self._stamps[rows[there]]
        made[there] = self._made[rows[there]]
        self._put(ids.clone(), scores, stamps, made)
        self._cursor %= len(ids)

    def _put(self, ids: SampleIds, scores: Tensor, stamps: Tensor, made: Tensor) -> None:
        self._ids, self._scores, self._stamps, self._made = ids, scores, stamps, made
        self._sorted, self._sorting = ids.sort()

    def _find(self, ids: SampleIds) -> tuple[Tensor, Tensor]:
        """Where samples are in the table, and whether they are there; anywhere in it where they are not."""
        if not len(self._ids):
            return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        at = torch.searchsorted(self._sorted, ids).clamp(max=len(self._ids) - 1)
        return self._sorting[at], self._sorted[at] == ids


def _to_boundary(position: int, count: int, groups: int) -> int:
    """Samples from a position to the end of its group; the end of group g is at ``count * (g + 1) // groups``."""
    group = -(-(position + 1) * groups // count) - 1
    return count * (group + 1) // groups - position


def _one_of(option: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{NAME}: {option} {value!r} must be {' or '.join(map(repr, known))}")
