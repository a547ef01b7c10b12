"""GradiVeQ: what aggregation takes, what windows of samples leave out, and what that costs in accuracy."""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Kept, Measured, Trainings, Trial, Trials, main
from benchmarks.gradiveq.gradients import (
    WAYS,
    WORKLOAD,
    Choice,
    Series,
    added_up,
    adjacent,
    compared,
    series,
    spectra,
)
from benchmarks.gradiveq.pictures import draw
from benchmarks.gradiveq.times import (
    QSGD_RING,
    SAMPLE_STEPS,
    SLICE_SIZE,
    Cluster,
    from_json,
    gradiveq,
    rates,
    sent_ratio,
    spec_of,
)
from farflung.network import Link, NetworkProfile
from farflung.reducers import CodecReducer, GradiVeQ, PowerSGD
from farflung.types import Reducer

FOLDER = Path(__file__).parent
AGGREGATION = "aggregation time"
OVER_QSGD = "aggregation time over 4-bit QSGD inside the ring, coding charged"
END_TO_END = "end to end time"
ACCURACY = "top-1 accuracy lost against uncompressed"
OF_PAPER = "accuracy lost, the paper's windows, true ratio of 8"
OF_BASIS = "accuracy lost, spread with error feedback, basis in effect, ratio of 11 or more"
OVER_POWERSGD = "accuracy lost over PowerSGD of equal bytes"
RATIO = "mean compression ratio"
EXPLAINED = "explained variance by the first 2 of 3 adjacent gradients over 150 iterations"

NODES = 6
COMPUTE_S, AGGREGATION_S = 650 / 500, 850 / 500
"""Of an iteration on the paper's processors, without compression (section 5)."""
LATENCY_S = 1e-4
"""One way; our choice."""
ITERATIONS, WARM_UP = 45_000, 2_500
"""The paper's; what warms up is not compressed."""
SLICE_SIZES = (128, 256, 512, 1024, 2048)
EIGHT = 9.0
"""K / d at which dense bytes are 8 times those of a window, samples and all that is sent dense among them."""
COMPRESSIONS = (EIGHT, 16.0, 32.0, 64.0)
"""K / d of the rows of times."""


def times(quick: bool) -> Mapping[str, Measured]:
    """Seconds of a window of 500 iterations, over those of the dense ring and of four bits on its hops."""
    spec = spec_of("cifar10/resnet8" if quick else WORKLOAD)
    ratios, sample_steps = ((EIGHT,), 5) if quick else (COMPRESSIONS, SAMPLE_STEPS)
    # A ring sends 2 (n - 1) / n of the gradient over each link.
    bandwidth = 2 * (NODES - 1) / NODES * 8 * spec.nbytes / AGGREGATION_S
    network = NetworkProfile.create_uniform(Link(LATENCY_S, bandwidth), NODES, "the ring's 1.7 s")
    kept = Kept(FOLDER, "coding", quick=quick).once(
        {"ratios": list(ratios), "nodes": NODES},
        functools.partial(rates, ratios, spec, NODES, 1 if quick else 10, sample_steps),
    )
    cluster = Cluster(network, spec, from_json(kept))
    plain_s, qsgd_s = cluster.plain_s(), cluster.qsgd_s()
    table: dict[float, dict[str, Any]] = {}
    for ratio in ratios:
        found = cluster.windows(ratio, sample_steps)
        table[ratio] = {
            "ratio": sent_ratio(gradiveq(ratio, sample_steps), spec, NODES),
            "sample_s": found.sample_s,
            "compress_s": found.compress_s,
            "change_s": found.change_s,
            "times_faster": plain_s / found.mean_s,
            "over_qsgd": qsgd_s / found.mean_s,
            "saved": _saved(plain_s, found.mean_s),
        }
    config = {
        "nodes": NODES,
        "bandwidth_bps": bandwidth,
        "latency_s": LATENCY_S,
        "compute_s": COMPUTE_S,
        "parameters": spec.numel,
        "plain_s": plain_s,
        "qsgd_s": qsgd_s,
        "slice_size": SLICE_SIZE,
        "of_k_over_d": table,
    }

    def row(name: str) -> Measured:
        values = [cell[name] for cell in table.values()]
        return Measured(table[EIGHT][name], (min(values), max(values)), config, simulated=True)

    return {AGGREGATION: row("times_faster"), OVER_QSGD: row("over_qsgd"), END_TO_END: row("saved")}


def _saved(plain_s: float, mean_s: float) -> float:
    """Share of the paper's 45,000 iterations' time, with what warms up uncompressed."""
    dense = ITERATIONS * (COMPUTE_S + plain_s)
    ours = WARM_UP * (COMPUTE_S + plain_s) + (ITERATIONS - WARM_UP) * (COMPUTE_S + mean_s)
    return 1 - ours / dense


SKIPPED, ADJACENT, BEHIND = 250, 150, 400
CHOICES = {
    "K": [Choice(slice_size=size) for size in SLICE_SIZES],
    "r": [Choice(ratio=ratio) for ratio in (4.0, 8.0, 16.0, 32.0, 64.0, 512.0)],
    "lambda": [Choice(ratio=None, variance_left=left) for left in (0.01, 0.05, 0.1, 0.2, 0.5)],
}


def left_out(quick: bool) -> Mapping[str, Measured]:
    """How many fewer numbers travel, and what of the gradients behind a window is left out; pictures of both."""
    if quick:
        return {}
    found = _looked()
    draw(FOLDER / "results", found)
    at_eight = next(one for one in found["choices"] if Choice(**one["choice"]) == Choice(ratio=8.0))
    ratio = {
        "workload": WORKLOAD,
        "reduced": "CIFAR-10 for CIFAR-100",
        "skipped_steps": SKIPPED + ADJACENT - SAMPLE_STEPS,
        "held_out_loss": at_eight["loss"],
        "choices": found["choices"],
        "left_out_of_sums": found["added_up"],
    }
    best = [max(layer) for layer in found["adjacent"]]
    explained = {
        "best_of_layers": best,
        "median_of_layers": [statistics.median(layer) for layer in found["adjacent"]],
        "median": statistics.median(share for layer in found["adjacent"] for share in layer),
    }
    ratios = [one["ratio"] for one in found["choices"]]
    return {
        RATIO: Measured(at_eight["ratio"], (min(ratios), max(ratios)), ratio),
        EXPLAINED: Measured(statistics.median(best), (min(best), max(best)), explained),
    }


def _looked() -> Mapping[str, Any]:
    """At gradients of a training, once."""
    return Kept(FOLDER, "gradients").once(
        {"steps": [SKIPPED, ADJACENT, BEHIND]},
        lambda: _seen(series(WORKLOAD, SKIPPED, ADJACENT, BEHIND)),
    )


def _seen(found: Series) -> dict[str, Any]:
    """All that is drawn and all rows, of one training."""
    window = replace(found, window=found.window[-SAMPLE_STEPS:])
    choices = list(dict.fromkeys(choice for some in CHOICES.values() for choice in some))
    return {
        "choices": [
            {
                "choice": asdict(choice),
                **compared(window, choice),
            }
            for choice in choices
        ],
        "added_up": {name: added_up(window, Choice(), way) for name, way in WAYS.items()},
        "spectra": spectra(window, Choice().slice_size),
        "adjacent": [_thinned(layer) for layer in adjacent(found)],
    }


def _thinned(shares: list[float], most: int = 101) -> list[float]:
    """Quantiles, the least and the greatest among them."""
    ordered = sorted(shares)
    return [ordered[round(at * (len(ordered) - 1) / (most - 1))] for at in range(most)]


STEPS, RATES = 4500, (0.05, 0.1)
"""A tenth of the paper's steps, and so of its warm-up; windows are as long as the paper's."""
SEEDS = (0, 1, 2)
_WARM_UP = WARM_UP * STEPS // ITERATIONS


@dataclass(frozen=True)
class Method:
    """What is trained.

    Args:
      reducer: carries the gradients.
      seeds: so many.
      rates: of learning, of which the best for the first seed counts.
      parts: other members of the recipe.
      period: steps that an exchange sums.
    """

    reducer: Reducer
    seeds: int = 1
    rates: Sequence[float] = RATES[:1]
    parts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trial(self) -> Trial:
        parts = {"collective": "ring", **self.parts}
        if not isinstance(self.reducer, CodecReducer):
            parts["reducer"] = self.reducer.method  # type: ignore[attr-defined]
        return Trial(parts, "cifar10/resnet8", NODES, 8, STEPS, RATES[0])


def _windows(**options: Any) -> GradiVeQ:
    return GradiVeQ(warm_up=_WARM_UP, collective="ring", **options)


_HOPS = {"reducer": "codec(phases='hops')"}
UNCOMPRESSED, PAPER, POWERSGD = "uncompressed", "the paper's windows, K / 9", "PowerSGD, rank 3"
OURS, BASIS = "spread windows, K / 32", "spread windows, one sample in three, K / 32"
METHODS = {
    UNCOMPRESSED: Method(CodecReducer(collective="ring"), 3, RATES),
    BASIS: Method(_windows(ratio=32.0, compress_steps=200), 3, RATES),
    "spread windows, K / 16": Method(_windows(ratio=16.0), 3),
    OURS: Method(_windows(), 3),
    POWERSGD: Method(PowerSGD(rank=3, dense_steps=_WARM_UP, collective="ring"), 3, RATES),
    PAPER: Method(_windows(ratio=9.0, windows="paper")),
    "no basis, one sample in two, d = 1": Method(_windows(ratio=512.0, compress_steps=100)),
    "spread windows, K / 9": Method(_windows(ratio=9.0)),
    "spread windows, one sample in ten, K / 48": Method(_windows(ratio=48.0, compress_steps=900)),
    "4-bit QSGD on hops": Method(QSGD_RING, parts={"codec": "qsgd(bits=4)", **_HOPS}),
    "4-bit QSGD on hops, errors fed back": Method(
        QSGD_RING, parts={"codec": "error_feedback(qsgd(bits=4))", **_HOPS}
    ),
}
"""By importance. Samples are sent in 4 bits on hops; K is 512, d its quotient."""


def _canaries(training: Trial) -> tuple[str, ...]:
    reducer = training.parts.get("reducer", "")
    if reducer.startswith("gradiveq"):
        return CANARIES
    if reducer.startswith("powersgd"):
        return ("preset ring", "powersgd, pipelined")
    return ("preset ring", "int8 on hops") if reducer else ("preset ring",)


CANARIES = ("preset ring", "gradiveq, around a ring", "gradiveq, pipelined", "gradiveq, residuals")
TRAININGS: Trainings[Trial, list[list[float]]] = Trainings(
    FOLDER / "results" / "trainings.jsonl", Trial, _canaries
)


def accuracy(quick: bool) -> Mapping[str, Measured]:
    """Points lost to the dense ring at equal steps, beside true ratios and what bases leave out of a gradient."""
    trials = Trials(TRAININGS, quick=quick)
    if quick:
        return {}
    table: dict[str, dict[str, Any]] = {}
    for name, method in METHODS.items():
        found, rate = trials.best(method.trial, method.rates, SEEDS[: method.seeds])
        dense = table[UNCOMPRESSED]["accuracies"] if table else found
        table[name] = {
            "ratio": sent_ratio(method.reducer, spec_of(METHODS[UNCOMPRESSED].trial.workload), NODES),
            "accuracies": found,
            "best_rate": rate,
            "lost": [one - own for one, own in zip(dense, found, strict=False)],
        }
    trial = METHODS[UNCOMPRESSED].trial
    behind = series(trial.workload, SKIPPED + ADJACENT - SAMPLE_STEPS, SAMPLE_STEPS, BEHIND)
    for name, method in METHODS.items():
        if isinstance(method.reducer, GradiVeQ):
            choice = Choice(ratio=method.reducer.ratio or Choice().ratio)
            table[name]["left_out_of_a_gradient"] = compared(behind, choice)["loss"]
    config = {
        "workload": trial.workload,
        "reduced": "resnet8 on CIFAR-10 for resnet32 on CIFAR-100, a tenth of the steps",
        "replicas": NODES,
        "steps": STEPS,
        "seeds": list(SEEDS),
        "methods": table,
    }
    reason = trials.unconverged(replace(trial, learning_rate=table[UNCOMPRESSED]["best_rate"]))
    lost = {name: one["lost"] for name, one in table.items()}
    over = [own - theirs for own, theirs in zip(lost[BASIS], lost[POWERSGD], strict=True)]
    return {
        row: Measured(statistics.fmean(points), (min(points), max(points)), config, reason=why)
        for row, points, why in (
            (ACCURACY, lost[OURS], reason),
            (OF_PAPER, lost[PAPER], reason),
            (OF_BASIS, lost[BASIS], ""),
            (OVER_POWERSGD, over, ""),
        )
    }


BENCHMARK = Benchmark(
    FOLDER,
    [
        Group((AGGREGATION, OVER_QSGD, END_TO_END), times, "simulated", 8.0, CANARIES),
        Group((RATIO, EXPLAINED), left_out, "simulated", 15.0, CANARIES),
        Group((ACCURACY, OF_PAPER, OF_BASIS, OVER_POWERSGD), accuracy, "trainings", 0.0, CANARIES),
    ],
    TRAININGS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
