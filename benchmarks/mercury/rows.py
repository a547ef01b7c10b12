"""The rows, what each is measured by, and the trainings that these need, in the order in which they are made."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.common import Measured
from benchmarks.common.trials import CONVERGED
from benchmarks.common.worlds import replicas_in
from benchmarks.mercury.applications import APPLICATIONS, COLLECTIVE, MBPS, REPLICAS
from benchmarks.mercury.curves import Ask, Method, Panel, Target, at_the_end, smooth, times_faster
from benchmarks.mercury.methods import (
    ALONE,
    MERCURY_RATES,
    PUBLISHED_RATE,
    RATES,
    Reference,
    adacomm,
    best_rate,
    curves_of,
    for_as_many_samples,
    grouped,
    mercury,
    mercury_at,
    reference,
    resharded,
    seeds_of,
    uniform,
)
from benchmarks.mercury.watched import SEEN, SHARES, Watched
from farflung import TorchWorkload
from farflung.config import Training
from farflung.devices import DeviceProfile
from farflung.errors import DataError
from farflung.loop import Replica
from farflung.sim import VirtualWorld
from farflung.workloads import resnet

__all__ = [
    "JOBS",
    "MISSING",
    "PICTURED",
    "Job",
    "Rows",
    "adacomm_row",
    "mercury_row",
    "pictured",
    "tictac",
    "tictac_row",
    "why_missing",
]

Measure: TypeAlias = Callable[[Ask], Mapping[str, Measured]]
TICTAC_STEPS, TICTAC_BATCH = 9, 4
"""Samples of a step stand for the whole batch, whose time is charged."""
AT_HAND = ("cifar10", "speech", "aid", "agnews")
NOT_AT_HAND = ("cifar100", "svhn")
SLOWEST, FASTEST = MBPS[0], MBPS[-1]
DEVICES = (4, 8, 12)
ALPHAS = (10, 1, 0.5)
FEDERATED = 12
SHARE = 2048
"""Samples of each replica where all of them are scored in every step."""
FIRST_STEPS = 300
"""Of such a training."""
MOVED = 100
"""Samples that a replica gives away in a round without regard to importance: in all some four fifths of its share."""
FURTHER = 5.0
"""Points below the target, at which methods are compared too that do not come to it."""
FEW = 128
"""Samples of a group at most, in rows that compare sharings, numbers of replicas or what is combined: on both sides."""
LOOKS: dict[str, dict[str, Any]] = {
    "batches of 128": {"application": "fashion"},
    "batches of 16": {"application": "fashion in small batches"},
    "batches of 128, classes down to a hundredth": {"application": "fashion", "tail": 0.01},
}
"""Where sampling is looked at besides, by what is unlike."""
LOOK_RATES, LOOK_SEEDS = (0.004, 0.001), (0, 1)
RANKED = (200, 500, 1000, 1500)
SEQUENTIAL_MBPS = 200
"""Where groups fill the exchange, and none is cut off at the most; the paper does not say which bandwidth it is."""
DRIFT = {(1, 0): 50.0, (1, 1): 70.0, (10, 1): 65.0}
"""Rows by steps and share, with what is published."""


@dataclass(frozen=True)
class Rows:
    """Rows that are measured together.

    Args:
      names: of the rows.
      measure: measures them by what trainings came to.
    """

    names: tuple[str, ...]
    measure: Measure


@dataclass(frozen=True)
class Job:
    """Trainings that are made together, for some rows.

    Args:
      what: they are.
      rows: that need them.
      first: trainings that others need too.
    """

    what: str
    rows: Sequence[Rows] = ()
    first: Sequence[Watched] = field(default_factory=list)

    def go_through(self, ask: Ask) -> None:
        """Asks for all of its trainings."""
        for training in self.first:
            ask(training)
        for rows in self.rows:
            rows.measure(ask)


def mercury_row(application: str, mbps: float) -> str:
    """Its name in ``expected.toml``, as of those that follow."""
    return f"mercury {application} at {mbps:g} Mbit/s"


def adacomm_row(application: str, mbps: float) -> str:
    return f"adacomm {application} at {mbps:g} Mbit/s"


def tictac_row(mbps: float) -> str:
    return f"tictac cifar10 at {mbps:g} Mbit/s"


def devices_row(replicas: int) -> str:
    return f"mercury cifar10, {replicas} devices, 10 Mbit/s"


def federated_row(alpha: float) -> str:
    return f"federated, Dirichlet {alpha:g}, 12 devices"


def alone_row(name: str, application: str = "cifar10") -> str:
    return f"{name} alone, {application} at 10 Mbit/s"


def together_row(name: str, application: str = "cifar10") -> str:
    return f"mercury with {name}, {application} at 10 Mbit/s"


def look_row(name: str) -> str:
    return f"importance sampling, fashion-mnist/mlp, {name}"


def drift_row(steps: int, share: float) -> str:
    return (
        f"samples that move less than {100 * share:g}% in rank, {steps} step{'s' if steps > 1 else ''} later"
    )


GROUP_WISE = "group-wise over all-inclusive scoring"
SEQUENTIAL = "BACC over sequential"
FIXED = "BACC over fixed group size, 10 Mbit/s"
AGNOSTIC = "importance-aware resharding at 50% minus agnostic at 100%"
RESHARDED = "resharding at 50% minus none"


# --- what is common to rows -------------------------------------------------------------------------------------


def _setting(application: str, mbps: float, replicas: int = REPLICAS) -> dict[str, Any]:
    """The paper's model and links, and what trains in their place."""
    what = APPLICATIONS[application]
    return {
        "workload": what.small,
        "stands_for": what.whole,
        "gradient_nbytes": 4 * what.parameters,
        "mbps": mbps,
        "device_step_s": what.step_s,
        "exchange_over_step": what.ratio(mbps, replicas),
        "replicas": replicas,
        "batch_size": what.batch_size,
        "group": what.group(mbps, replicas),
    }


def _faster(
    theirs: Method,
    ours: Method,
    target: Target,
    config: Mapping[str, Any],
    of: str = "seconds",
    reason: str = "",
) -> Measured:
    """Times faster in the mean of the seeds; missed where one of ours never reaches the target."""
    figures = times_faster(theirs, ours, target, of)
    found: dict[str, Any] = {
        "target": {"of": target.of, "value": target.value},
        "uniform": theirs.told(target),
        "ours": ours.told(target),
        "gain_in_steps": times_faster(theirs, ours, target, "steps"),
        "to_5_points_less": times_faster(theirs, ours, _lower(target), of),
    }
    if None in theirs.there(target):
        found["uniform is not there at its end"] = "counted as there, so the figure is one from below"
    whole, simulated = {**config, **found}, of == "seconds"
    if 0.0 in figures:
        return Measured.missed(ours.best(target), target.value, whole, simulated=simulated, reason=reason)
    spread = min(figures), max(figures)
    return Measured(statistics.fmean(figures), spread, whole, simulated=simulated, reason=reason)


def _unconverged(ask: Ask, application: str) -> str:
    """Why accuracies compare with no published one; empty where twice the steps gain less than half a point.

    The rate is constant, so a training of half the steps is the first half of the curve.
    """
    one = uniform(application)
    accuracies = smooth([point.accuracy for point in one.points(ask(one))])
    gain = max(accuracies) - max(accuracies[: len(accuracies) // 2])
    if gain < CONVERGED:
        return ""
    return (
        f"uniform sampling has not converged: the second half of {one.steps:,} steps gains {gain:.1f} points"
    )


def _lower(target: Target) -> Target:
    """What methods reach too that end below it."""
    return Target(target.of, target.value - FURTHER)


# --- Mercury ----------------------------------------------------------------------------------------------------


def _mercury(ask: Ask, application: str, mbps: float, rate: float, seeds: Sequence[int]) -> Method:
    """Mercury's trainings, in the times of some links."""
    at = mercury_at(application, mbps)
    found = curves_of(ask, mercury(application, mbps=at, learning_rate=rate), seeds)
    return found if at == mbps else found.at(mbps)


def _main(application: str, mbps: float, name: str, ask: Ask) -> Mapping[str, Measured]:
    """Both at the published rate; in the configuration each at its own best, and other targets."""
    at, seeds = mercury_at(application, mbps), seeds_of(application)
    theirs = reference(ask, uniform(application), seeds)
    target, before = theirs.target, theirs.uniform.at(mbps)
    ours = _mercury(ask, application, mbps, PUBLISHED_RATE, seeds_of(application, at))
    rate = best_rate(ask, uniform(application), RATES, target)
    best = curves_of(ask, uniform(application, learning_rate=rate), seeds).at(mbps)
    own = best_rate(ask, mercury(application), MERCURY_RATES, target)
    own_best = _mercury(ask, application, mbps, own, seeds[:1])
    config = {
        **_setting(application, mbps),
        "trained_at_mbps": at,
        "times": "as trained" if at == mbps else f"groups as at {at} Mbit/s, the exchange of {mbps} Mbit/s",
        "against_uniform_at_its_best_rate": {
            "rate": rate,
            "times_faster": times_faster(best, ours, target),
            **best.told(target),
        },
        "at_its_best_rate": {
            "rate": own,
            "times_faster": times_faster(before, own_best, target),
            "against_uniform_at_its_best_rate": times_faster(best, own_best, target),
            **own_best.told(target),
        },
        "to_the_same": {of: times_faster(before, ours, one) for of, one in theirs.beside.items()},
    }
    return {name: _faster(before, ours, target, config, reason=_unconverged(ask, application))}


def _devices(replicas: int, ask: Ask) -> Mapping[str, Measured]:
    many = {"replicas": replicas, **for_as_many_samples("cifar10", replicas)}
    theirs = reference(ask, uniform("cifar10", **many))
    ours = curves_of(ask, mercury("cifar10", parts={"sampler": grouped(FEW)}, **many))
    config = _setting("cifar10", SLOWEST, replicas)
    reason = _unconverged(ask, "cifar10")
    before = theirs.uniform.at(SLOWEST)
    return {devices_row(replicas): _faster(before, ours, theirs.target, config, reason=reason)}


def _sequential(ask: Ask) -> Mapping[str, Measured]:
    """The same trainings, with samples scored once the exchange is there."""
    theirs, mbps = reference(ask, uniform("cifar10"), seeds_of("cifar10")), SEQUENTIAL_MBPS
    figures = {}
    for one in MBPS:
        ours = _mercury(ask, "cifar10", one, PUBLISHED_RATE, (0,))
        figures[one] = times_faster(ours.at(one, sequential=True), ours.at(one), theirs.target)[0]
    ours = _mercury(ask, "cifar10", mbps, PUBLISHED_RATE, (0,))
    config = {**_setting("cifar10", mbps), "by_mbps": figures, "ours": ours.told(theirs.target)}
    return {SEQUENTIAL: Measured(figures[mbps], (figures[mbps],) * 2, config, simulated=True)}


def _fixed(ask: Ask) -> Mapping[str, Measured]:
    """Groups of the size that 200 Mbit/s have time for, on links of 10 Mbit/s."""
    target = reference(ask, uniform("cifar10"), seeds_of("cifar10")).target
    ours = _mercury(ask, "cifar10", SLOWEST, PUBLISHED_RATE, (0,))
    fixed = _mercury(ask, "cifar10", FASTEST, PUBLISHED_RATE, (0,)).at(SLOWEST)
    figures = times_faster(fixed, ours, target)
    config = {
        **_setting("cifar10", SLOWEST),
        "fixed_group": APPLICATIONS["cifar10"].group(FASTEST),
        "fixed": fixed.told(target),
        "ours": ours.told(target),
    }
    return {FIXED: Measured(figures[0], (figures[0],) * 2, config, simulated=True)}


PICTURED_LOOK = "batches of 128"
PICTURED = {mercury_row("cifar10", SLOWEST), adacomm_row("cifar10", SLOWEST), look_row(PICTURED_LOOK)}
"""Rows whose trainings the picture shows."""


def pictured(ask: Ask) -> list[Panel]:
    """Curves of first seeds: CIFAR-10 at 10 Mbit/s over steps and over time, and Fashion-MNIST over steps."""
    theirs = reference(ask, uniform("cifar10"), seeds_of("cifar10"))
    rate = best_rate(ask, uniform("cifar10"), RATES, theirs.target)
    methods = {
        f"uniform, {PUBLISHED_RATE:g}": theirs.uniform.at(SLOWEST),
        f"uniform, {rate:g}": curves_of(ask, uniform("cifar10", learning_rate=rate)).at(SLOWEST),
        "AdaComm": curves_of(ask, adacomm("cifar10", SLOWEST)),
        "Mercury": _mercury(ask, "cifar10", SLOWEST, PUBLISHED_RATE, (0,)),
    }
    curves = {name: method.curves[0] for name, method in methods.items()}
    what = LOOKS[PICTURED_LOOK]
    looks = {
        f"{name}, {rate:g}": curves_of(ask, uniform(**what, parts=parts, learning_rate=rate)).curves[0]
        for name, parts in {"uniform": {}, "by importance": _look_parts(what["application"])}.items()
        for rate in LOOK_RATES
    }
    title = "CIFAR-10 at 10 Mbit/s"
    return [
        Panel(title, "steps", curves, theirs.target),
        Panel(title, "seconds", curves, theirs.target),
        Panel("Fashion-MNIST", "steps", looks, reference(ask, uniform(**what), LOOK_SEEDS).target),
    ]


# --- others -----------------------------------------------------------------------------------------------------


def _adacomm(application: str, mbps: float, ask: Ask) -> Mapping[str, Measured]:
    theirs = reference(ask, uniform(application), seeds_of(application))
    ours = curves_of(ask, adacomm(application, mbps))
    config = _setting(application, mbps)
    before, reason = theirs.uniform.at(mbps), _unconverged(ask, application)
    return {adacomm_row(application, mbps): _faster(before, ours, theirs.target, config, reason=reason)}


def _group_wise(ask: Ask) -> Mapping[str, Measured]:
    """Both score once the exchange is there, as the paper's do, on small shares; until all-inclusive scoring ends."""
    usual = uniform("cifar10", mbps=FASTEST, samples=SHARE * REPLICAS, every=10)
    all_inclusive = replace(
        usual,
        steps=FIRST_STEPS,
        parts={"sampler": "grouped_importance(rule='paper', groups=1, chosen=1, chunk=128)"},
    )
    group_wise = replace(
        usual,
        steps=2 * FIRST_STEPS,
        parts={"sampler": "grouped_importance(rule='paper', groups=8, chunk=128)"},
    )
    theirs = curves_of(ask, all_inclusive)
    target = Target("loss", at_the_end(theirs.curves[0], "loss"))
    ours = curves_of(ask, group_wise)
    by_mbps = {
        mbps: times_faster(theirs.at(mbps, sequential=True), ours.at(mbps, sequential=True), target)[0]
        for mbps in MBPS
    }
    config = {
        **_setting("cifar10", FASTEST),
        "samples_per_replica": SHARE,
        "groups": 8,
        "by_mbps": by_mbps,
        "target": {"of": target.of, "value": target.value},
        "all_inclusive": theirs.told(target),
        "ours": ours.told(target),
    }
    figure = by_mbps[FASTEST]
    return {GROUP_WISE: Measured(figure, (figure, figure), config, simulated=True)}


def _resharding(ask: Ask) -> Mapping[str, Measured]:
    """Accuracy at the end on shares of unlike classes."""
    usual = mercury("cifar10", mbps=50, partition="dirichlet(alpha=0.5)", parts={"sampler": grouped(FEW)})
    sharings = {
        "none": "none",
        "importance-aware": resharded(MOVED // 2),
        "agnostic": resharded(MOVED, "uniform"),
    }
    found = {
        name: at_the_end(
            curves_of(ask, replace(usual, parts={**usual.parts, "sharing": sharing})).curves[0], "accuracy"
        )
        for name, sharing in sharings.items()
    }
    config = {
        **_setting("cifar10", 50),
        "partition": usual.partition,
        "sharings": sharings,
        "accuracy": found,
    }

    def points(other: str) -> Measured:
        figure = found["importance-aware"] - found[other]
        return Measured(figure, (figure, figure), config, reason=reason)

    reason = _unconverged(ask, "cifar10")
    return {AGNOSTIC: points("agnostic"), RESHARDED: points("none")}


def _federated(alpha: float, ask: Ask) -> Mapping[str, Measured]:
    """Steps, on any links."""
    usual = uniform(
        "cifar10",
        replicas=FEDERATED,
        **for_as_many_samples("cifar10", FEDERATED),
        partition=f"dirichlet(alpha={alpha:g})",
        parts={"schedule": "local_sgd(sync_every=5)"},
    )
    theirs = reference(ask, usual)
    ours = curves_of(
        ask,
        replace(
            usual, parts={**usual.parts, "sampler": "grouped_importance(rule='paper', groups=16, chunk=128)"}
        ),
    )
    config = {**_setting("cifar10", SLOWEST, FEDERATED), "partition": usual.partition}
    reason = _unconverged(ask, "cifar10")
    return {federated_row(alpha): _faster(theirs.uniform, ours, theirs.target, config, "steps", reason)}


def _product(name: str, ask: Ask) -> Mapping[str, Measured]:
    """What saves bytes or waits, alone and with Mercury on CIFAR-10."""
    sampler = {"sampler": grouped(FEW, ", share=1.0" if name == "delayed" else "")}
    return _gains(
        name,
        "cifar10",
        reference(ask, uniform("cifar10"), seeds_of("cifar10")),
        ours=curves_of(ask, mercury("cifar10", parts={"sampler": grouped(FEW)})),
        alone=curves_of(ask, uniform("cifar10", parts=ALONE[name])),
        together=curves_of(ask, mercury("cifar10", parts={**ALONE[name], **sampler})),
    )


def _product_of_look(name: str, ask: Ask) -> Mapping[str, Measured]:
    """The same where sampling by importance helps: on the small model that is looked at besides."""
    parts, sampler = dict(ALONE[name]), _look_parts("fashion")
    if name == "gradiveq":
        parts["reducer"] = parts["reducer"].replace(")", ", matrices=True)")
    return _gains(
        name,
        "fashion",
        reference(ask, uniform("fashion"), LOOK_SEEDS),
        ours=curves_of(ask, uniform("fashion", parts=sampler)),
        alone=curves_of(ask, uniform("fashion", parts=parts)),
        together=curves_of(ask, uniform("fashion", parts={**parts, **sampler})),
    )


def _gains(
    name: str, application: str, theirs: Reference, *, ours: Method, alone: Method, together: Method
) -> Mapping[str, Measured]:
    """In the times of each; with the product of what sampling and the other gain alone."""
    target, before = theirs.target, theirs.uniform.at(SLOWEST)
    config = _setting(application, SLOWEST)

    def product(to: Target) -> dict[str, float]:
        gains = [times_faster(before, one, to)[0] for one in (ours, alone)]
        return {"mercury": gains[0], name: gains[1], "product": gains[0] * gains[1]}

    alone_gains = {
        "gains_alone": product(target),
        "gains_alone_to_5_points_less": product(_lower(target)),
    }
    return {
        alone_row(name, application): _faster(before, alone, target, config),
        together_row(name, application): _faster(before, together, target, {**config, **alone_gains}),
    }


def _look_parts(application: str) -> dict[str, str]:
    """Groups of ten batches of 32, scored at once."""
    most = APPLICATIONS[application].most
    return {"sampler": grouped(most, chunk=most)}


def _look(name: str, ask: Ask) -> Mapping[str, Measured]:
    """Steps, with uniform sampling at the published rate and both at their best."""
    what = LOOKS[name]
    parts = _look_parts(what["application"])
    theirs = reference(ask, uniform(**what), LOOK_SEEDS)
    target = theirs.target

    def at_best(parts: dict[str, str]) -> Method:
        each = [
            curves_of(ask, uniform(**what, parts=parts, learning_rate=rate), LOOK_SEEDS)
            for rate in LOOK_RATES
        ]
        return min(each, key=lambda one: one.mean_steps(target))

    ours = curves_of(ask, uniform(**what, parts=parts), LOOK_SEEDS)
    best, own_best = at_best({}), at_best(parts)
    config = {
        **_setting(what["application"], SLOWEST),
        **what,
        "against_uniform_at_its_best_rate": {
            "times_faster": times_faster(best, ours, target, "steps"),
            **best.told(target),
        },
        "at_its_best_rate": {
            "against_uniform_at_its_best_rate": times_faster(best, own_best, target, "steps"),
            **own_best.told(target),
        },
        "to_the_same": {
            of: times_faster(theirs.uniform, ours, one, "steps") for of, one in theirs.beside.items()
        },
    }
    return {look_row(name): _faster(theirs.uniform, ours, target, config, "steps")}


def _drift(ask: Ask) -> Mapping[str, Measured]:
    """In the mean over several steps of a training with uniform sampling."""
    one = replace(uniform("cifar10"), ranked=list(RANKED), steps=RANKED[-1] + 20, every=500)
    moved = one.moved(ask(one))
    config = {
        **_setting("cifar10", SLOWEST),
        "samples": SEEN,
        "learning_rate": one.learning_rate,
        "moved": [[each.since, each.steps, *each.shares] for each in moved],
    }
    rows = {}
    for steps, nth in DRIFT:
        figures = [100 * each.shares[nth] for each in moved if each.steps == steps]
        rows[drift_row(steps, SHARES[nth])] = Measured(
            statistics.fmean(figures), (min(figures), max(figures)), config
        )
    return rows


# --- what there is ----------------------------------------------------------------------------------------------


def _application(name: str) -> Iterator[Rows]:
    """Mercury at all bandwidths."""
    for mbps in MBPS:
        row = mercury_row(name, mbps)
        yield Rows((row,), partial(_main, name, mbps, row))


JOBS: dict[str, Job] = {
    "targets": Job(
        "uniform sampling at the published rate, by which targets are set",
        first=[replace(uniform(name), seed=seed) for name in AT_HAND for seed in seeds_of(name)],
    ),
    "cifar10": Job(
        "Mercury on CIFAR-10, learning rates",
        [
            *_application("cifar10"),
            Rows((SEQUENTIAL,), _sequential),
            Rows((FIXED,), _fixed),
        ],
    ),
    "speech": Job("Mercury on Speech Commands, learning rates", list(_application("speech"))),
    "aid": Job("Mercury on AID, learning rates", list(_application("aid"))),
    "agnews": Job("Mercury on AG News, learning rates", list(_application("agnews"))),
    "adacomm": Job(
        "AdaComm on all",
        [
            Rows((adacomm_row(name, mbps),), partial(_adacomm, name, mbps))
            for name in AT_HAND
            for mbps in (MBPS if name == "cifar10" else (SLOWEST, FASTEST))
        ],
    ),
    "all-inclusive": Job("all samples scored in each step, and groups", [Rows((GROUP_WISE,), _group_wise)]),
    "resharding": Job("shares of unlike classes, resharded", [Rows((AGNOSTIC, RESHARDED), _resharding)]),
    "products": Job(
        "delayed updates and codecs, alone and with Mercury",
        [
            *(Rows((alone_row(name), together_row(name)), partial(_product, name)) for name in ALONE),
            *(
                Rows(
                    (alone_row(name, "fashion"), together_row(name, "fashion")),
                    partial(_product_of_look, name),
                )
                for name in ALONE
            ),
        ],
    ),
    "drift": Job(
        "ranks on the way", [Rows(tuple(drift_row(steps, SHARES[nth]) for steps, nth in DRIFT), _drift)]
    ),
    "devices": Job(
        "4, 8 and 12 replicas",
        [Rows((devices_row(count),), partial(_devices, count)) for count in DEVICES],
    ),
    "looks": Job(
        "importance sampling on a small model, by batch and frequency of classes",
        [Rows((look_row(name),), partial(_look, name)) for name in LOOKS],
    ),
    "federated": Job(
        "12 replicas with local SGD",
        [Rows((federated_row(alpha),), partial(_federated, alpha)) for alpha in ALPHAS],
    ),
}
"""By name, in the order of what they are worth."""


def _data_lacks(name: str, ask: Ask) -> Mapping[str, Measured]:
    del ask
    raise DataError(why_missing(mercury_row(name, SLOWEST)))


def tictac(quick: bool) -> Mapping[str, Measured]:
    """TicTac over synchronous SGD in equal buckets: the parameters are equal at each step, so steps' times say it all.

    Samples are random numbers, since times do not depend on them.
    """
    return {tictac_row(mbps): _tictac(mbps) for mbps in (MBPS[:1] if quick else MBPS)}


def _tictac(mbps: float) -> Measured:
    what, random = APPLICATIONS["cifar10"], torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(64, 3, 32, 32, generator=random), torch.randint(10, (64,), generator=random)
    data = TensorDataset(inputs, labels)
    network = partial(resnet, 8, 10)
    task = TorchWorkload(network, data, data, nn.functional.cross_entropy)
    nbytes = sum(parameter.nbytes for parameter in network().parameters())
    device = DeviceProfile(forward_s=1 / (3 * TICTAC_BATCH))
    times_s = {}
    for schedule in ("synchronous", "priority"):
        world = VirtualWorld(REPLICAS, device=device, network=what.links(mbps, nbytes))
        training = Training(
            steps=TICTAC_STEPS, batch_size=TICTAC_BATCH, learning_rate=0.001, optimizer="adam"
        )
        parts = {"collective": COLLECTIVE, "schedule": schedule, "bucket_nbytes": 1}
        first, *others = replicas_in(world, task, training, parts)
        ends_s: list[float] = []

        async def train(replica: Replica, ends_s: list[float]) -> None:
            for _ in range(TICTAC_STEPS):
                await replica.step()
                ends_s.append(replica.runtime.read_clock())

        world.run([train(first, ends_s), *(train(other, []) for other in others)])
        times_s[schedule] = (ends_s[-1] - ends_s[2]) / (len(ends_s) - 3)
    figure = times_s["synchronous"] / times_s["priority"]
    limit = 1 + 1 / (3 * what.ratio(mbps))
    config = {"seeds": [0], "step_s": times_s, "T/C": what.ratio(mbps), "limit": limit}
    reason = (
        f"synchronous SGD overlaps its exchange with the backward pass here, which leaves at most {limit:.3f}: the "
        "forward pass, a third of what a step computes"
    )
    return Measured(figure, (figure, figure), config, simulated=True, reason=reason)


def why_missing(row: str) -> str:
    """Why a row cannot be measured yet whatever is trained; empty where it can."""
    for name in NOT_AT_HAND:
        if row.startswith(f"mercury {name} "):
            return f"missing: data of {name}, for {APPLICATIONS[name].small} in the place of {APPLICATIONS[name].whole}"
    return ""


MISSING = [
    *(
        Rows(tuple(mercury_row(name, mbps) for mbps in MBPS), partial(_data_lacks, name))
        for name in NOT_AT_HAND
    ),
]
"""Rows that cannot be measured yet."""
