"""How many times fewer steps methods take than uniform sampling, each at its own best learning rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

from benchmarks.common import Measured
from benchmarks.sampling.regimes import Regime
from benchmarks.sampling.training import LEARNED_COLUMN, SCORE_COLUMN, Found, Sampled, best

__all__ = ["WITHIN", "Ask", "Gains", "constant", "factor_of_equal", "gains", "shortened"]

K = TypeVar("K", bound=Hashable)
Ask: TypeAlias = Callable[[Sequence[Sampled]], list[Found]]
"""What trainings come to."""
WITHIN = 0.5
"""Points below uniform sampling's best."""
FACTORS = (1.0, 1.5, 2.0, 2.5, 3.0)
"""By which trainings with a falling rate are shorter than uniform sampling's."""


@dataclass(frozen=True)
class Gains:
    """What the trainings of a regime say of the chosen rule and of the paper's.

    Args:
      chosen: the rule that is best on the pilot seeds.
      factors: times fewer steps than uniform sampling, by method; ``None``: it misses the target on a seed.
      spreads: the lowest and the highest of all seeds.
      bests: the best score of the seed that comes to least.
      target: the score.
      over_paper: the paper's steps over those of the chosen rule; where the paper's rule misses the target its steps
        are all that there are, and where the chosen one does this is 0.
      predicted: the gain that the chosen rule's sampler predicts, on average; ``None``: it predicts none.
      config: for the record.
    """

    chosen: str
    factors: Mapping[str, float | None]
    spreads: Mapping[str, tuple[float, float] | None]
    bests: Mapping[str, float]
    target: float
    over_paper: float
    predicted: float | None
    config: Mapping[str, Any]

    def measured(self, method: str) -> Measured:
        """The row of a method."""
        factor, config = self.factors[method], {"method": method, "chosen": self.chosen, **self.config}
        if factor is None:
            return Measured.missed(self.bests[method], self.target, config)
        return Measured(factor, self.spreads[method], config)

    @property
    def misjudged(self) -> float | None:
        """The absolute error of the predicted gain, as a share of the observed one."""
        observed = self.factors[self.chosen]
        return None if self.predicted is None or not observed else abs(self.predicted / observed - 1)


def gains(regime: Regime, ask: Ask) -> Gains:
    """Of a regime."""
    return (constant if regime.schedule == "constant" else shortened)(regime, ask)


def constant(regime: Regime, ask: Ask) -> Gains:
    """Steps to a target: a share of learned samples, or uniform sampling's best on the pilot seeds less half a point.

    Uniform sampling tries all rates on all pilot seeds and takes the one that is at the target first; methods try
    them on the first pilot seed.
    """
    column = SCORE_COLUMN if regime.learned is None else LEARNED_COLUMN
    tried = [(rate, seed) for rate in regime.rates for seed in regime.pilots]
    whole = _trained(ask, {at: regime.training("uniform", *at) for at in tried})
    score = {
        rate: statistics.fmean(best(whole[rate, seed]["looks"], column) for seed in regime.pilots)
        for rate in regime.rates
    }
    target = regime.learned or round(max(score.values()) - WITHIN, 2)
    goal: dict[str, Any] = {"target" if regime.learned is None else "learned": target}
    stop = {} if regime.whole else goal

    def steps(found: Found) -> float:
        there = regime.training("uniform", 1.0, 0, **goal).reached(found["looks"])
        return math.inf if there is None else there

    of_uniform = {rate: [steps(whole[rate, seed]) for seed in regime.pilots] for rate in regime.rates}
    rates = {"uniform": min(regime.rates, key=lambda rate: (sum(of_uniform[rate]), -score[rate]))}
    pilots = {"uniform": of_uniform[rates["uniform"]]}
    first = regime.pilots[0]
    of_rates = _trained(
        ask,
        {
            (one, rate): regime.training(one, rate, first, **stop)
            for one in regime.rivals
            for rate in regime.rates
        },
    )
    for one in regime.rivals:
        rates[one] = min(
            regime.rates,
            key=lambda rate: (steps(of_rates[one, rate]), -best(of_rates[one, rate]["looks"], column)),
        )
    others = _seeds(regime, ask, rates, regime.rivals, regime.pilots[1:], **stop)
    for one in regime.rivals:
        pilots[one] = [steps(found) for found in (of_rates[one, rates[one]], *others[one])]
    chosen = min(
        regime.ours, key=lambda one: (sum(pilots[one]), -best(of_rates[one, rates[one]]["looks"], column))
    )

    found = _seeds(regime, ask, rates, ["uniform", "paper", chosen], regime.seeds, **stop)
    there = {one: [steps(each) for each in all_of] for one, all_of in found.items()}
    ends = {one: [min(each, regime.steps) for each in all_of] for one, all_of in there.items()}
    mean = {one: statistics.fmean(all_of) for one, all_of in ends.items()}
    factors, spreads = dict[str, float | None](), dict[str, tuple[float, float] | None]()
    for one in ("paper", chosen):
        ratios = [theirs / own for theirs, own in zip(ends["uniform"], ends[one], strict=True)]
        missed = math.inf in there[one]
        factors[one] = None if missed else mean["uniform"] / mean[one]
        spreads[one] = None if missed else (min(ratios), max(ratios))
    return Gains(
        chosen,
        factors,
        spreads,
        {one: min(best(each["looks"], column) for each in all_of) for one, all_of in found.items()},
        target,
        0.0 if factors[chosen] is None else mean["paper"] / mean[chosen],
        _predicted(found[chosen]),
        {
            **_told(regime, rates),
            "target": target,
            "pilot_steps": _finite(pilots),
            "pilot_gains": {
                one: round(statistics.fmean(pilots["uniform"]) / statistics.fmean(steps), 2)
                for one, steps in pilots.items()
            },
            "steps": _finite(there),
            "learned_at_the_end": {
                one: [each["looks"][-1][LEARNED_COLUMN] for each in all_of] for one, all_of in found.items()
            },
        },
    )


def shortened(regime: Regime, ask: Ask) -> Gains:
    """The factor by which a training may be shorter and end as accurate, where rates fall to 0 in either.

    Rates and the rule are those that are best after half of the steps, uniform sampling's after all.
    """

    def of(method: str, rate: float, seed: int, factor: float = 2.0) -> Sampled:
        steps = round(regime.steps / (1.0 if method == "uniform" else factor))
        return regime.training(method, rate, seed, steps=steps, every=steps)

    methods = ("uniform", *regime.rivals)
    tried = [(one, rate, seed) for one in methods for rate in regime.rates for seed in regime.pilots]
    pilots = {at: _end(found) for at, found in _trained(ask, {at: of(*at) for at in tried}).items()}
    score = {
        (one, rate): statistics.fmean(pilots[one, rate, seed] for seed in regime.pilots)
        for one, rate, _ in tried
    }
    rates = {one: max(regime.rates, key=lambda rate: score[one, rate]) for one in methods}
    chosen = max(regime.ours, key=lambda one: score[one, rates[one]])

    judged = {
        (one, factor, seed): of(one, rates[one], seed, factor)
        for one in ("uniform", "paper", chosen)
        for factor in (FACTORS if one != "uniform" else (1.0,))
        for seed in regime.seeds
    }
    found = _trained(ask, judged)
    ends = {
        (one, factor): [_end(found[one, factor, seed]) for seed in regime.seeds] for one, factor, _ in judged
    }
    goals = ends["uniform", 1.0]
    target = statistics.fmean(goals)
    factors, spreads, bests = dict[str, float | None](), dict[str, tuple[float, float] | None](), {}
    for one in ("paper", chosen):
        means = [statistics.fmean(ends[one, factor]) for factor in FACTORS]
        factors[one], bests[one] = factor_of_equal(means, target), max(means)
        each = [
            factor_of_equal([ends[one, factor][at] for factor in FACTORS], goal) or 0.0
            for at, goal in enumerate(goals)
        ]
        spreads[one] = (min(each), max(each))
    return Gains(
        chosen,
        factors,
        spreads,
        bests,
        target,
        (factors[chosen] or 0.0) / (factors["paper"] or 1.0),
        _predicted([found[chosen, 2.0, seed] for seed in regime.seeds]),
        {
            **_told(regime, rates),
            "pilot_accuracy_after_half_of_the_steps": {one: score[one, rates[one]] for one in methods},
            "accuracy": [[one, factor, all_of] for (one, factor), all_of in ends.items()],
        },
    )


def factor_of_equal(accuracies: Sequence[float], goal: float) -> float | None:
    """Where accuracies at :data:`FACTORS` fall below a goal first, interpolated; ``None``: at once."""
    if accuracies[0] < goal:
        return None
    for (low, above), (high, below) in pairwise(zip(FACTORS, accuracies, strict=True)):
        if below < goal:
            return low + (high - low) * (above - goal) / (above - below)
    return FACTORS[-1]


def _trained(ask: Ask, trainings: Mapping[K, Sampled]) -> dict[K, Found]:
    return dict(zip(trainings, ask([*trainings.values()]), strict=True))


def _seeds(
    regime: Regime,
    ask: Ask,
    rates: Mapping[str, float],
    methods: Sequence[str],
    seeds: Sequence[int],
    **others: Any,
) -> dict[str, list[Found]]:
    """Of each method and seed, at the method's rate."""
    at = [(one, seed) for one in methods for seed in seeds]
    found = _trained(ask, {(one, seed): regime.training(one, rates[one], seed, **others) for one, seed in at})
    return {one: [found[one, seed] for seed in seeds] for one in methods}


def _end(found: Found) -> float:
    return found["looks"][-1][SCORE_COLUMN]


def _predicted(found: Sequence[Found]) -> float | None:
    told = [gain for one in found for (gain,) in one["predicted"]]
    return statistics.fmean(told) if told else None


def _told(regime: Regime, rates: Mapping[str, float]) -> dict[str, Any]:
    return {
        "workload": regime.workload,
        "steps_at_most": regime.steps,
        "rates": list(regime.rates),
        "best_rate": dict(rates),
        "pilots": list(regime.pilots),
        "seeds": list(regime.seeds),
    }


def _finite(steps: Mapping[str, Sequence[float]]) -> dict[str, list[float | None]]:
    """As JSON has it: ``None`` where a target is missed."""
    return {one: [None if math.isinf(each) else each for each in all_of] for one, all_of in steps.items()}
