"""AdaComm: how much sooner the training loss is as low as synchronous SGD's, and what fixed periods come to."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.adacomm.links import LATENCY_SHARE, REPLICAS, STEP_S, most_per_step
from benchmarks.adacomm.pictures import draw
from benchmarks.adacomm.race import ALLOWED, Race, Raced, on_links
from benchmarks.adacomm.watched import Point, Watched
from benchmarks.common import Benchmark, Group, Measured, Trainings, main

FOLDER = Path(__file__).parent
PICTURE = FOLDER.parents[1] / "docs" / "adacomm.svg"
RATIO = 4.0
"""D/Y at which three times is near what can be had."""
RATIOS = (0.5, 1.0, 2.0, 8.0)
"""Others."""
TAU_0 = (20, 10, 50, 100)
"""The learning rate is searched with the first, and again with the one that is best, if that is another."""
PERIODS = (5, 20, 100)
"""Of local SGD; synchronous SGD has 1."""
INTERVAL_STEPS = 60
"""Between two choices of a period, in synchronous steps: a twenty-fifth of synchronous SGD's run: our choice."""
SEEDS = (0, 1)
USUAL = Watched(ratio=RATIO, learning_rate=0.1)
"""With the rate that the search for synchronous SGD's begins at."""
SHRINK = "rule='shrink'"
MOMENTUM = replace(USUAL, momentum=0.9, learning_rate=0.0125)
KINDS = {
    "decaying rate": (replace(USUAL, milestones=[USUAL.steps // 2, USUAL.steps * 3 // 4]), SHRINK),
    "momentum kept": (MOMENTUM, SHRINK),
    "block momentum": (MOMENTUM, f"{SHRINK}, optimizer_state='reset', block_momentum=0.3"),
}
"""Trainings of another kind, and AdaComm's options there; all but these have a constant rate and no momentum."""
OTHER_TARGETS = (1.0, 1.02, 1.1, 1.2, 1.5)
"""Times the lowest loss of synchronous SGD; only told."""
REDUCED = (
    "a VGG of 5 layers on CIFAR-10 at 16 x 16 and 1,500 steps of 64 samples, for VGG-16 and some 200 passes"
)
CANARIES = ("preset adacomm", "preset local_sgd", "preset synchronous")
TRAININGS: Trainings[Watched, list[list[float]]] = Trainings(
    FOLDER / "results" / "trainings.jsonl",
    Watched,
    lambda training: CANARIES,
)


def adacomm(tau_0: int, ratio: float, more: str = SHRINK) -> str:
    """The schedule, with an interval by what a synchronous step takes."""
    interval = INTERVAL_STEPS * STEP_S * (1 + ratio)
    return f"adacomm(sync_every={tau_0}, interval_s={interval:g}, {more})"


def fixed(period: int) -> str:
    """Local SGD."""
    return f"local_sgd(sync_every={period})"


def race(usual: Watched, quick: bool) -> Race:
    """Of trainings of a kind; quick ones are of a quadratic."""
    if quick:
        tiny = replace(usual, workload="synthetic/quadratic", steps=40, every=10, batch_size=4)
        return Race(tiny, lambda trainings: [one.train() for one in trainings], SEEDS[:1], search=False)
    return Race(usual, TRAININGS.curves, SEEDS)


def first(race: Race, quick: bool) -> Raced:
    """AdaComm where an exchange takes as long as four steps: the best of :data:`TAU_0`."""
    return race.best([adacomm(tau_0, RATIO) for tau_0 in TAU_0[: 1 if quick else None]])


def tau_0_of(raced: Raced) -> int:
    """That of the schedule that was best."""
    return next(
        tau_0 for tau_0 in TAU_0 if raced.training.schedule.startswith(f"adacomm(sync_every={tau_0},")
    )


# --- rows -------------------------------------------------------------------------------------------------------


def on(raced: Raced, ratio: float) -> Raced:
    """A method with a fixed period on other links than it was trained on."""
    return Raced(raced.training, [on_links(points, ratio / RATIO) for points in raced.curves])


def told(raced: Raced, target: float) -> dict[str, Any]:
    """A method: its settings, and where it has reached the target."""
    return {
        "training": asdict(raced.training),
        "seconds": raced.seconds(target),
        "there": [None if point is None else asdict(point) for point in raced.there(target)],
        "lowest": raced.lowest,
    }


def _exchange_s(synchronous: Raced) -> float:
    """What each took in virtual time."""
    last = synchronous.curves[0][-1]
    return last.seconds / last.steps - STEP_S


def faster(theirs: Raced, ours: Raced, target: float) -> float | None:
    """Seconds of one over those of the other; ``None`` where either never reaches the target."""
    before_s, ours_s = theirs.seconds(target), ours.seconds(target)
    return None if before_s is None or ours_s is None else before_s / ours_s


def period(point: Point, ratio: float) -> float:
    """Steps for each exchange on the way there."""
    return point.steps * ratio * STEP_S / (point.seconds - point.steps * STEP_S)


def times_faster(
    race: Race, ours: Raced, ratio: float, others: Mapping[str, Raced] | None = None
) -> Measured:
    """Seconds of synchronous SGD over ours."""
    theirs = on(race.synchronous, ratio)
    there = ours.there(race.target)
    known = [point for point in there if point is not None]
    figures = [
        0.0 if point is None or before is None else before.seconds / point.seconds
        for before, point in zip(theirs.there(race.target), there, strict=True)
    ]
    figure = faster(theirs, ours, race.target)
    config = {
        "D/Y": ratio,
        "step_s": STEP_S,
        "exchange_s": _exchange_s(theirs),
        "latency_share": LATENCY_SHARE,
        "replicas": REPLICAS,
        "reduced": REDUCED,
        "seeds": list(SEEDS),
        "target": race.target,
        "allowed": ALLOWED,
        "times_faster_at_other_targets": {
            allowed: faster(theirs, ours, allowed * theirs.lowest) for allowed in OTHER_TARGETS
        },
        "limit_of_any_period": 1 + ratio,
        "limit_of_its_mean_period": [most_per_step(ratio, period(point, ratio)) for point in known],
        "mean_period": [period(point, ratio) for point in known],
        "synchronous": told(theirs, race.target),
        "ours": told(ours, race.target),
        **{name: told(other, race.target) for name, other in (others or {}).items()},
    }
    if figure is None:
        return Measured.missed(ours.lowest, race.target, config, simulated=True)
    return Measured(figure, (min(figures), max(figures)), config, simulated=True)


BEST = "time to the same training loss against synchronous SGD, best case"
BASIC = "AdaComm by the basic rule, time to the same training loss, D/Y 4"
LEFT = "AdaComm, lowest training loss over synchronous SGD's, D/Y 4"


def fixed_rows(period: int) -> tuple[str, str]:
    """The rows of a period."""
    name = f"local SGD with a period of {period}"
    return (
        f"{name}, time to the same training loss, D/Y 4",
        f"{name}, lowest training loss over synchronous SGD's, D/Y 4",
    )


def ratio_row(ratio: float) -> str:
    """Its name in ``expected.toml``."""
    return f"AdaComm, time to the same training loss, D/Y {ratio:g}"


def kind_row(kind: str) -> str:
    """Its name in ``expected.toml``."""
    return f"AdaComm, time to the same training loss, D/Y 4, {kind}"


def left(race: Race, ours: Raced) -> Measured:
    """The lowest loss over that of synchronous SGD."""
    figures = [
        Raced(ours.training, [points]).lowest / Raced(ours.training, [before]).lowest
        for points, before in zip(ours.curves, race.synchronous.curves, strict=True)
    ]
    config = {"reduced": REDUCED, "synchronous": race.synchronous.lowest, "ours": ours.lowest}
    return Measured(statistics.fmean(figures), (min(figures), max(figures)), config)


def rules(quick: bool) -> Mapping[str, Measured]:
    """AdaComm by both rules, and local SGD, with a constant rate; and the picture."""
    compared = race(USUAL, quick)
    ours = first(compared, quick)
    basic = compared.best([adacomm(tau_0_of(ours), RATIO, "rule='basic'")])
    periods = {count: compared.best([fixed(count)]) for count in PERIODS[: 1 if quick else None]}
    rows = {
        BEST: times_faster(compared, ours, RATIO),
        BASIC: times_faster(compared, basic, RATIO),
        LEFT: left(compared, ours),
    }
    for count, raced in periods.items():
        faster, lowest = fixed_rows(count)
        rows |= {faster: times_faster(compared, raced, RATIO), lowest: left(compared, raced)}
    if not quick:
        methods = {
            "synchronous SGD": compared.synchronous,
            **{f"local SGD, period {count}": raced for count, raced in periods.items()},
            "AdaComm": ours,
        }
        draw(PICTURE, {name: raced.curves[0] for name, raced in methods.items()}, compared.target)
    return rows


def at_ratio(ratio: float, quick: bool) -> Mapping[str, Measured]:
    """On other links: the best of :data:`TAU_0`, at the rate that is best at D/Y 4; local SGD is told beside."""
    compared = race(USUAL, quick)
    rate = first(compared, quick).training.learning_rate
    ours = compared.best(
        [adacomm(tau_0, ratio) for tau_0 in TAU_0[: 1 if quick else None]], rate=rate, ratio=ratio
    )
    periods: Sequence[int] = () if quick else PERIODS
    others = {f"period {count}": on(compared.best([fixed(count)]), ratio) for count in periods}
    return {ratio_row(ratio): times_faster(compared, ours, ratio, others)}


def of_kind(kind: str, quick: bool) -> Mapping[str, Measured]:
    """With the best period to begin with of a constant rate."""
    tau_0 = TAU_0[0] if quick else tau_0_of(first(race(USUAL, quick), quick))
    usual, more = KINDS[kind]
    compared = race(usual, quick)
    return {kind_row(kind): times_faster(compared, compared.best([adacomm(tau_0, RATIO, more)]), RATIO)}


BENCHMARK = Benchmark(
    FOLDER,
    [
        Group(
            (BEST, BASIC, LEFT, *(row for count in PERIODS for row in fixed_rows(count))),
            rules,
            "trainings",
            0.5,
            CANARIES,
        ),
        *(
            Group((ratio_row(ratio),), partial(at_ratio, ratio), "trainings", 0.5, CANARIES)
            for ratio in RATIOS
        ),
        *(Group((kind_row(kind),), partial(of_kind, kind), "trainings", 0.5, CANARIES) for kind in KINDS),
    ],
    TRAININGS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
