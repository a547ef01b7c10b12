"""ScaDLES: what following the rate of the data wins, what it costs in accuracy, and what waits to be used."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Measured, Trainings, load_expected, main
from benchmarks.scadles.injected import bytes_sent
from benchmarks.scadles.limits import (
    BASE,
    LEAST,
    MOST,
    baseline,
    held,
    kept,
    limit,
    per_second,
    seconds,
    weighted,
)
from benchmarks.scadles.memory import OPTIMIZERS, memory
from benchmarks.scadles.streamed import NETS, Point, Streamed
from farflung.seeding import derive_seed
from farflung.streams.rates import build_courses, draw_rates

FOLDER = Path(__file__).parent
DEVICES, FEW = 16, 10
"""As many as the paper's; fewer where each has one label."""
LAWS = ("S1", "S2", "S1'", "S2'")
NAMES = {"residual": "residual net", "plain": "plain net"}
BOUND = 128
"""Of a batch, where samples come fast: a step takes as long for any, and with larger ones there are too few steps."""
ALLOWED = 0.005
"""Below the baseline's best is as good as that."""
LONGER = {"S2": 2, "S2'": 2}
"""Where samples come four times as fast, ours may train on so many times as many: its time still ends sooner."""
CANARIES = ("preset scadles", "preset scadles_baseline")
TRAININGS: Trainings[Streamed, dict[str, Any]] = Trainings(
    FOLDER / "results" / "trainings.jsonl",
    Streamed,
    lambda training: CANARIES,
)


def everything(law: str | Sequence[Any], *, density: float = 0.1, threshold: float = 0.3) -> dict[str, str]:
    """Weighted, truncated, and adaptively compressed."""
    return {
        **weighted(law, "truncation"),
        "reducer": f"adaptive_topk(density={density}, threshold={threshold})",
    }


def bounded(law: str) -> dict[str, str]:
    """The same with smaller batches, so that weights and learning rates go by them and not by the rates."""
    stream = f"rate({law!r}, window_s=1, least={LEAST}, most={BOUND}, policy='truncation')"
    return {**everything(law), "stream": stream}


# --- trainings --------------------------------------------------------------------------------------------------


def smooth(points: Sequence[Point], of: str) -> list[float]:
    """The median of each evaluation and those beside it."""
    scores = [float(getattr(point, of)) for point in points]
    return [statistics.median(scores[max(0, at - 1) : at + 2]) for at in range(len(scores))]


def usual(parts: dict[str, str], net: str = "residual", **settings: Any) -> Streamed:
    """Where the search for a learning rate begins."""
    return Streamed(parts, net, learning_rate=NETS[net].learning_rate, **settings)


def best(training: Streamed, *, part: int = 4, quick: bool) -> tuple[Streamed, list[Point], dict[str, Any]]:
    """With the learning rate whose best accuracy is highest in trainings of a part of the samples, a quarter or all.

    It is searched from that of the training upwards and downwards by factors of 2, for as long as that is better.
    """
    if quick:
        training = tried(training)
        found = training.train()
        return training, training.points(found), found
    rate = training.learning_rate
    scores: dict[float, float] = {}
    while True:
        due = [one for one in (rate, rate / 2, rate * 2) if one not in scores]
        scores |= zip(due, shortly(training, due, part), strict=True)
        winner = max((rate, rate / 2, rate * 2), key=scores.__getitem__)
        if winner == rate:
            break
        rate = winner
    chosen = replace(training, learning_rate=rate)
    found = TRAININGS.curve(chosen)
    return chosen, chosen.points(found), found


def tried(training: Streamed) -> Streamed:
    """One step's samples of the baseline on the smallest net, to see that it works."""
    samples = BASE * training.replicas
    return replace(training, net="perceptron", samples=samples, every=samples)


def curves(trainings: Sequence[Streamed], *, quick: bool) -> list[dict[str, Any]]:
    """Those of several trainings, side by side."""
    return [tried(one).train() for one in trainings] if quick else TRAININGS.curves(trainings)


def shortly(training: Streamed, rates: Sequence[float], part: int) -> list[float]:
    """The best accuracy at each rate, in a training of so small a part of the samples."""
    short = [
        replace(
            training, learning_rate=rate, samples=training.samples // part, warm_up=training.warm_up // part
        )
        for rate in rates
    ]
    return [
        max(smooth(one.points(found), NETS[one.net].score))
        for one, found in zip(short, TRAININGS.curves(short), strict=True)
    ]


def reached(points: Sequence[Point], target: float, of: str) -> float | None:
    """Seconds until the smoothed accuracy is there; ``None``: never."""
    scored = zip(points, smooth(points, of), strict=True)
    return next((point.seconds for point, score in scored if score >= target), None)


def retimed(points: Sequence[Point], rates: str | Sequence[Any], net: str, steps: int) -> list[Point]:
    """The baseline's evaluations at its times with other rates; its arithmetic is the same whatever the rates."""
    ends = seconds(baseline(rates), net, DEVICES, steps)
    return [replace(point, seconds=ends[point.samples // (BASE * DEVICES) - 1]) for point in points]


def raced(
    net: str, rates: str | Sequence[Any], ours: dict[str, str], *, times: int = 1, quick: bool
) -> dict[str, Any]:
    """Ours, on so many times the samples, beside the baseline."""
    base, base_points, base_found = best(usual(baseline("S1"), net), quick=quick)
    own, points, found = best(usual(ours, net, samples=times * Streamed().samples), quick=quick)
    base_points = retimed(base_points, rates, net, base_found["steps"])
    target = max(smooth(base_points, "top5")) - ALLOWED
    theirs_s, ours_s = (reached(one, target, "top5") for one in (base_points, points))

    def lost(of: str) -> float:
        return 100 * (max(smooth(base_points, of)) - max(smooth(points, of)))

    return {
        "step_s": NETS[net].step_s,
        "target_top5": target,
        "best_top5": max(smooth(points, "top5")),
        "seconds": [theirs_s, ours_s],
        "times_faster": None if theirs_s is None or ours_s is None else theirs_s / ours_s,
        "learning_rates": [base.learning_rate, own.learning_rate],
        "lost_top5": lost("top5"),
        "lost_top1": lost("top1"),
        "samples": [base.samples, own.samples],
        "steps": [base_found["steps"], found["steps"]],
        "held_at_the_end": [base_found["held"], found["held"]],
        "sent": [base_found["sent"], found["sent"]],
        "reducer": found["reducer"],
        "reduced": NETS[net].reduced,
    }


def compared(net: str, law: str, ours: dict[str, str], *, quick: bool) -> dict[str, Any]:
    """By rates of a law, with the limit that they and step time set."""
    rates = [course.rates[0] for course in build_courses(law, DEVICES, derive_seed(0, "rates"))]
    return {
        **raced(net, law, ours, times=LONGER.get(law, 1), quick=quick),
        "rates": rates,
        "limit": limit(rates, NETS[net].step_s, BOUND if ours == bounded(law) else MOST),
        "parts": ours,
    }


def beyond(published: float, found: dict[str, Any]) -> str:
    """Why a speed-up compares with no published one: one of the two is above the limit of rates and step time."""
    bound = found["limit"]
    if reason := above(published, bound):
        return reason
    if (found["times_faster"] or 0.0) > bound:
        return (
            f"ours is above {bound:.2f}, the most that rates and step time allow, "
            "since the baseline has not converged and smaller batches learn more from a sample"
        )
    return ""


def above(published: float, bound: float) -> str:
    """Why a published speed-up compares with none of ours: no rates of ours allow it."""
    if published <= bound:
        return ""
    return f"the published {published:g} is above {bound:.2f}, the most that rates and step time allow"


PUBLISHED = {row.name: row.published for row in load_expected(FOLDER)}


def row(figure: float | None, config: dict[str, Any], *, simulated: bool, reason: str = "") -> Measured:
    """Of one training and one set of rates."""
    if figure is None:
        best, target = (100 * config[name] for name in ("best_top5", "target_top5"))
        return Measured.missed(best, target, config, simulated=simulated)
    return Measured(figure, (figure, figure), config, simulated=simulated, reason=reason)


def weighted_alone(net: str, law: str, quick: bool) -> Mapping[str, Measured]:
    """Batches and weights by rate."""
    found = compared(net, law, weighted(law), quick=quick)
    name = f"weighted aggregation, {law}, {NAMES[net]}"
    reason = beyond(PUBLISHED[name] or 0.0, found)
    return {name: row(found["times_faster"], found, simulated=True, reason=reason)}


CONVERGED = "{}, {}, converged baseline, Fashion-MNIST"
LOST = "{}, accuracy lost"
OURS: Mapping[str, Callable[[str], dict[str, str]]] = {
    "weighted aggregation": weighted,
    "everything on": everything,
}
SEEDS = (0, 1, 2)
ENOUGH, OFTEN = 2_000_000, 20_000
"""Samples after which the baseline has converged on Fashion-MNIST, 33 passes; and those between two evaluations."""
GAIN = 0.5
"""Points that twice the samples gain at most where a baseline has converged."""


def converged(what: str, law: str, quick: bool) -> Mapping[str, Measured]:
    """Times and accuracy against a baseline that has converged; each seed has its own rates.

    The learning rates are searched with the first seed and all samples: a quarter of them favours too high rates. The
    target is the mean over seeds of the baseline's best, less what is allowed.
    """
    net, name = "perceptron", CONVERGED.format(what, law)
    of, step_s = NETS[net].score, NETS[net].step_s
    base, own = (
        best(usual(parts, net, samples=ENOUGH, every=OFTEN), part=1, quick=quick)[0]
        for parts in (baseline("S1"), OURS[what](law))
    )
    kinds = {"baseline": base, "ours": own, "baseline, twice the samples": replace(base, samples=2 * ENOUGH)}
    trainings = [replace(one, seed=seed) for one in kinds.values() for seed in SEEDS]
    found = curves(trainings, quick=quick)
    rates = [
        [course.rates[0] for course in build_courses(law, DEVICES, derive_seed(seed, "rates"))]
        for seed in SEEDS
    ]
    points = [one.points(curve) for one, curve in zip(trainings, found, strict=True)]
    if law != "S1":
        steps = found[0]["steps"]
        points[: len(SEEDS)] = [
            retimed(one, each, net, steps) for one, each in zip(points[: len(SEEDS)], rates, strict=True)
        ]

    def of_kinds(values: Sequence[Any]) -> dict[str, list[Any]]:
        """The values of all trainings, a list over seeds for each kind."""
        return {kind: list(values[at * len(SEEDS) :][: len(SEEDS)]) for at, kind in enumerate(kinds)}

    bests = {score: of_kinds([max(smooth(one, score)) for one in points]) for score in ("top1", "top5")}
    means = {kind: statistics.mean(values) for kind, values in bests[of].items()}
    target = means["baseline"] - ALLOWED
    gain = 100 * (means["baseline, twice the samples"] - means["baseline"])
    seconds = of_kinds([reached(one, target, of) for one in points])
    pairs = list(zip(seconds["baseline"], seconds["ours"], strict=True))
    faster = [theirs_s / ours_s for theirs_s, ours_s in pairs if None not in (theirs_s, ours_s)]
    lost = [
        100 * (theirs - ours) for theirs, ours in zip(bests[of]["baseline"], bests[of]["ours"], strict=True)
    ]
    limits = [limit(one, step_s) for one in rates]
    config = {
        "seeds": SEEDS,
        "step_s": step_s,
        "target_top1": target,
        "best": bests,
        "gain_of_twice_the_samples": gain,
        "seconds": seconds,
        "times_faster": faster,
        "lost_top1": lost,
        "limits": limits,
        "rates": rates,
        "learning_rates": [base.learning_rate, own.learning_rate],
        "samples": [base.samples, own.samples],
        "steps": of_kinds([curve["steps"] for curve in found]),
        "reducer": [curve["reducer"] for curve in found[len(SEEDS) : 2 * len(SEEDS)]],
        "parts": own.parts,
        "reduced": NETS[net].reduced,
    }
    reason = (
        "" if gain < GAIN else f"the baseline has not converged: twice its samples gain {gain:.2f} points"
    )
    rows = {LOST.format(name): Measured(statistics.mean(lost), (min(lost), max(lost)), config, reason=reason)}
    reason = reason or above(PUBLISHED[name] or 0.0, max(limits))
    if len(faster) < len(SEEDS):
        lowest = 100 * min(bests[of]["ours"])
        rows[name] = Measured.missed(lowest, 100 * target, config, simulated=True, reason=reason)
    else:
        spread = min(faster), max(faster)
        rows[name] = Measured(statistics.mean(faster), spread, config, simulated=True, reason=reason)
    return {row: rows[row] for row in (name, LOST.format(name)) if row in PUBLISHED}


LARGE = "plain", "S2"
"""Where batches are largest, and the net that trains faster."""


def large_batches(net: str, law: str) -> dict[str, dict[str, float]]:
    """What batches as large as the rates learn: with the paper's rule, and with what is said to help them."""
    longer = usual(everything(law), net, samples=Streamed().samples * LONGER[law])
    ways = {
        "linear": longer,
        "linear, warm-up over a tenth": replace(longer, warm_up=longer.samples // 10),
        "root": replace(longer, parts={**longer.parts, "scaling": "root"}),
        "linear, LARS": replace(longer, optimizer="lars(trust=0.02)"),
    }
    found = {}
    for name, training in ways.items():
        own, points, _ = best(training, quick=False)
        found[name] = {
            "top5": max(smooth(points, "top5")),
            "top1": max(smooth(points, "top1")),
            "learning_rate": own.learning_rate,
        }
    return found


def all_on(net: str, law: str, quick: bool) -> Mapping[str, Measured]:
    """With truncation and compression; where samples come fast, with batches that are bounded."""
    found = compared(net, law, bounded(law) if law in LONGER else everything(law), quick=quick)
    if (net, law) == LARGE and not quick:
        found["batches not bounded"] = large_batches(net, law)
    name = f"everything on, {law}, {NAMES[net]}"
    return {
        name: row(found["times_faster"], found, simulated=True, reason=beyond(PUBLISHED[name] or 0.0, found)),
        f"{name}, accuracy lost": row(found["lost_top5"], found, simulated=False),
    }


# --- rates ------------------------------------------------------------------------------------------------------

SHARE = "share of the limit that rates and step time set, weighted aggregation, S1, S1', S2, S2', worst"
DRAWS = 100


def share_of_limit(quick: bool) -> Mapping[str, Measured]:
    """Of each law, the median over draws."""
    shares, limits = {}, {}
    for law in LAWS[: 1 if quick else None]:
        draws = [draw_rates(law, DEVICES, seed) for seed in range(1 if quick else DRAWS)]
        bounds = [limit(rates, NETS["residual"].step_s) for rates in draws]
        found = [
            per_second(weighted(rates), rates, "residual") / per_second(baseline(rates), rates, "residual")
            for rates in draws
        ]
        shares[law] = statistics.median(own / bound for own, bound in zip(found, bounds, strict=True))
        limits[law] = [min(bounds), statistics.median(bounds), max(bounds)]
    worst = min(shares.values())
    config = {
        "shares": shares,
        "limits": limits,
        "draws": DRAWS,
        "step_s": NETS["residual"].step_s,
        "samples_per_second": by_devices(COUNTS[: 1 if quick else None]),
    }
    return {SHARE: Measured(worst, (worst, max(shares.values())), config, simulated=True)}


COUNTS = (2, 4, 8, 16, 32, 64)


def by_devices(counts: Sequence[int]) -> list[dict[str, Any]]:
    """What training takes in, with so many devices, of one draw of each law: ours, and the baseline."""
    found = []
    for law, count in itertools.product(LAWS, counts):
        rates = draw_rates(law, count, 0)
        ours, theirs = (per_second(parts, rates, "residual") for parts in (weighted(rates), baseline(rates)))
        found.append({"law": law, "devices": count, "ours": round(ours), "baseline": round(theirs)})
    return found


KEPT = {
    "S1": {"residual": 2.9e5, "plain": 1e5},
    "S2": {"residual": 4.36e6, "plain": 4e6},
    "S1'": {"residual": 6.2e5, "plain": 3.7e5},
    "S2'": {"residual": 3.6e6, "plain": 2.5e6},
}
"""Samples that persistence keeps in Table IV, from which the iterations follow."""


def buffers(law: str, quick: bool) -> Mapping[str, Measured]:
    """What waits under persistence, against the closed form."""
    errors, config = [], {}
    for net, samples in KEPT[law].items():
        step_s = NETS[net].step_s
        rates = [course.rates[0] for course in build_courses(law, DEVICES, derive_seed(0, "rates"))]
        grows = kept(rates, step_s, 1) - kept(rates, step_s, 0)
        steps = 4 if quick else round((samples - sum(rates)) / grows)
        there, wanted = held(weighted(law), net, DEVICES, steps), kept(rates, step_s, steps)
        less = held(weighted(law, "truncation"), net, DEVICES, min(steps, 50))
        batches = [BASE, round(statistics.median(rates)), MOST][: 1 if quick else None]
        errors.append(abs(there - wanted) / wanted)
        config[net] = {
            "steps": steps,
            "persistence": there,
            "closed form": wanted,
            "truncation": less,
            "memory": [memory(net, batch, name) for batch in batches for name in OPTIMIZERS],
        }
    name = f"buffer, persistence, {law}, against the closed form"
    return {name: Measured(max(errors), (min(errors), max(errors)), config, simulated=True)}


CHANGING = "everything on against the conventional baseline, time to target, rates changing within the run"
EVERY_S = 60.0


def changing(quick: bool) -> Mapping[str, Measured]:
    """Devices take on each other's rates of S1 every minute."""
    rates = draw_rates("S1", DEVICES, 0)
    minutes = 10 if quick else 24 * 60
    given = [
        [(EVERY_S * at, rates[(device + 5 * at) % DEVICES]) for at in range(minutes)]
        for device in range(DEVICES)
    ]
    found = raced("residual", given, everything(given), quick=quick)
    config = {**found, "every_s": EVERY_S, "rates": rates}
    return {CHANGING: row(found["times_faster"], config, simulated=True)}


# --- injection, compression -------------------------------------------------------------------------------------

INJECTED = "S1'"
"""The law of the rates where samples are sent around."""
KEPT_BY_INJECTION = "injection (.5,.5) on one-label devices, accuracy of everything-IID kept"


def injecting(training: Streamed, share: float, *, keep: bool = False) -> Streamed:
    """The same with samples that are sent around, for as many steps; those that were received count in weights."""
    stream = f"rate({INJECTED!r}, window_s=1, least={LEAST}, most={MOST})"
    sharing = f"injection(alpha={share}, beta={share}, keep_batch={keep})"
    senders = math.ceil(share * training.replicas)
    times = 1.0 if keep else 1.0 + senders * share * (training.replicas - 1) / training.replicas
    return replace(
        training,
        parts={**training.parts, "stream": stream, "sharing": sharing},
        samples=round(times * training.samples),
        every=round(times * training.every),
    )


def injection(quick: bool) -> Mapping[str, Measured]:
    """Ten devices of one label each, with and without rows of the others; and a net without batch norm."""
    scores: dict[str, dict[str, float]] = {}

    def score(name: str, training: Streamed, *, search: bool = True) -> Streamed:
        if search:
            training, points, _ = best(training, quick=quick)
        else:
            points = training.points(TRAININGS.curve(training))
        scores[name] = {
            "top5": max(smooth(points, "top5")),
            "top1": max(smooth(points, "top1")),
            "learning_rate": training.learning_rate,
        }
        return training

    one_label = usual(weighted(INJECTED), partition="labels(k=1)", replicas=FEW)
    score("i.i.d.", replace(one_label, partition="iid"))
    score("no injection", one_label)
    slower = replace(one_label, learning_rate=one_label.learning_rate / 4)  # linear scaling by larger batches
    half = score("(0.5, 0.5)", injecting(slower, 0.5))
    if not quick:
        found = replace(one_label, learning_rate=half.learning_rate)
        for share in (0.25, 0.1, 0.05):
            score(f"({share}, {share})", injecting(found, share), search=False)
        score("(0.5, 0.5), batches kept", injecting(found, 0.5, keep=True), search=False)
        mixed = score("plain net, i.i.d.", usual(weighted(INJECTED), "plain", partition="iid", replicas=FEW))
        score("plain net, no injection", replace(mixed, partition="labels(k=1)"), search=False)
    share_kept = scores["(0.5, 0.5)"]["top5"] / scores["i.i.d."]["top5"]
    reduced = {net: NETS[net].reduced for net in NAMES}
    config = {"scores": scores, "samples": Streamed().samples, "reduced": reduced}
    return {KEPT_BY_INJECTION: Measured(share_kept, (share_kept, share_kept), config)}


BYTES = "injection (.5,.5) bytes against the sum over senders and receivers"


def injected_bytes(quick: bool) -> Mapping[str, Measured]:
    """A copy for each receiver; the figure counts one for each sender."""
    found = {law: bytes_sent(law, FEW, 0.5, 0.5) for law in LAWS[: 1 if quick else None]}
    errors = [abs(one["sent"] - one["copies"]) / one["copies"] for one in found.values()]
    return {BYTES: Measured(max(errors), (min(errors), max(errors)), found, simulated=True)}


CNC = "CNC is monotone in delta at fixed CR and in CR at fixed delta"
DENSITIES, THRESHOLDS = (0.01, 0.1), (0.1, 0.2, 0.3, 0.4)


def monotone(quick: bool) -> Mapping[str, Measured]:
    """Of each two neighbours in the paper's table."""
    samples = 60_000
    trainings = {
        (density, threshold): Streamed(
            everything("S1'", density=density, threshold=threshold), samples=samples, every=samples
        )
        for density, threshold in itertools.product(DENSITIES, THRESHOLDS)
    }
    if quick:
        trainings = dict(list(trainings.items())[-2:])
    found = curves(list(trainings.values()), quick=quick)
    cnc = {key: one["reducer"]["cnc"] for key, one in zip(trainings, found, strict=True)}
    pairs = [
        (one, two)
        for one, two in itertools.permutations(cnc, 2)
        if (one[0] == two[0] and one[1] < two[1]) or (one[1] == two[1] and one[0] < two[0])
    ]
    share = sum(cnc[one] <= cnc[two] for one, two in pairs) / len(pairs)
    table = [
        {"density": density, "threshold": threshold, "cnc": value}
        for (density, threshold), value in cnc.items()
    ]
    return {CNC: Measured(share, (share, share), {"cnc": table, "samples": samples})}


BENCHMARK = Benchmark(
    FOLDER,
    [
        Group((SHARE,), share_of_limit, "simulated", 6.0, CANARIES),
        *(
            Group(
                (f"buffer, persistence, {law}, against the closed form",),
                functools.partial(buffers, law),
                "simulated",
                4.0,
                CANARIES,
            )
            for law in LAWS
        ),
        Group((BYTES,), injected_bytes, "simulated", 0.5, CANARIES),
        *(
            Group(
                (f"weighted aggregation, {law}, {NAMES[net]}",),
                functools.partial(weighted_alone, net, law),
                "trainings",
                1.0,
                CANARIES,
            )
            for law, net in itertools.product(("S1", "S1'"), NAMES)
        ),
        *(
            Group(
                tuple(row for row in (name, LOST.format(name)) if row in PUBLISHED),
                functools.partial(converged, what, law),
                "trainings",
                1.0,
                CANARIES,
            )
            for what, law in itertools.product(OURS, ("S1", "S1'"))
            for name in (CONVERGED.format(what, law),)
        ),
        *(
            Group(
                (f"everything on, {law}, {NAMES[net]}", f"everything on, {law}, {NAMES[net]}, accuracy lost"),
                functools.partial(all_on, net, law),
                "trainings",
                1.0,
                CANARIES,
            )
            for law, net in itertools.product(LAWS, NAMES)
        ),
        Group((KEPT_BY_INJECTION,), injection, "trainings", 0.0, CANARIES),
        Group((CNC,), monotone, "trainings", 0.0, CANARIES),
        Group((CHANGING,), changing, "trainings", 1.0, CANARIES),
    ],
    TRAININGS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
