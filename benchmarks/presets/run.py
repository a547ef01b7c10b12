"""Presets on language: loss against bytes and against time on slow networks, and what it takes to be as good."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Measured, main
from benchmarks.presets.courses import WITHIN, Course, courses_of, first_at, lowest, target
from benchmarks.presets.language import DEVICE, NODES, TRAININGS, Language, canaries
from benchmarks.presets.methods import METHODS, NETWORKS, RATES, REFERENCE
from benchmarks.presets.pictures import draw
from benchmarks.presets.times import paces

FOLDER = Path(__file__).parent
DOCS = FOLDER.parents[1] / "docs"
STEPS = Language.steps
OTHERS = [preset for preset in METHODS if preset != REFERENCE]
EQUAL = "bytes to synchronous's best loss, best preset"
WHOLE = f"bytes to within {WITHIN:g} of synchronous's best loss, best preset"
TOLERANCES = (0.0, 0.02, WITHIN, 0.1, 0.2)


def loss_row(preset: str) -> str:
    """Its name in ``expected.toml``, as of those that follow."""
    return f"{preset}, loss after {STEPS:,} steps"


def bytes_row(preset: str) -> str:
    return f"{preset}, bytes of {STEPS:,} steps"


def target_row(preset: str, network: str) -> str:
    return f"{preset}, time to within {WITHIN:g} of synchronous's best loss, {network}"


def steps_row(preset: str) -> str:
    return f"{preset}, time of {STEPS:,} steps"


def learned(preset: str, quick: bool) -> Mapping[str, Measured]:
    """What a preset's training came to."""
    reference, courses = courses_of(REFERENCE, quick=quick)[0], courses_of(preset, quick=quick)
    rows = {loss_row(preset): _over([course.loss for course in courses], _config(courses))}
    if preset == REFERENCE:
        return rows
    fewer = [reference.points[-1].sent / course.points[-1].sent for course in courses]
    rows[bytes_row(preset)] = _over(fewer, _config(courses))
    wanted = target(reference, WITHIN)
    for course in courses:
        for network in course.networks:
            rows[target_row(preset, network)] = _in_time(reference, course, wanted, network)
    if METHODS[preset].by_clock:
        seconds = {
            network: course.points[-1].seconds[network] for course in courses for network in course.networks
        }
        rows[steps_row(preset)] = _times_faster(reference.points[-1].seconds, seconds, {})
    return rows


def _in_time(reference: Course, course: Course, wanted: float, network: str) -> Measured:
    """Seconds of the reference until it is there over those of another."""
    theirs, ours = first_at(reference, wanted), first_at(course, wanted)
    assert theirs is not None
    config = {
        "network": network,
        "device": DEVICE,
        "target": wanted,
        "steps": [theirs.steps, None if ours is None else ours.steps],
        "seconds": [theirs.seconds[network], None if ours is None else ours.seconds[network]],
        "learning_rates": [reference.learning_rate, course.learning_rate],
        "not_charged": list(course.not_charged),
    }
    if ours is None:
        return Measured.missed(lowest(course), wanted, config, simulated=True)
    faster = theirs.seconds[network] / ours.seconds[network]
    return Measured(faster, (faster, faster), config, simulated=True)


def fewest_bytes(quick: bool) -> Mapping[str, Measured]:
    """The preset that needs the fewest bytes to be as good as the reference, and nearly so; pictures of all."""
    presets = list(METHODS)[:2] if quick else list(METHODS)
    courses = [course for preset in presets for course in courses_of(preset, quick=quick)]
    reference, others = courses[0], courses[1:]
    by_tolerance = {within: _fewer(reference, others, within) for within in TOLERANCES}
    config = {
        **_config(courses),
        "times_fewer_by_tolerance": {f"{within:g}": found for within, found in by_tolerance.items()},
        "target": target(reference, WITHIN),
    }
    if not quick:
        draw(DOCS, courses, config["target"])
    rows = {}
    for row, within in ((EQUAL, 0.0), (WHOLE, WITHIN)):
        best = max((found for found in by_tolerance[within].values() if found is not None), default=None)
        if best is None:
            rows[row] = Measured.missed(min(map(lowest, others)), target(reference, within), config)
        else:
            rows[row] = Measured(best, (best, best), config)
    return rows


def _fewer(reference: Course, others: Sequence[Course], within: float) -> dict[str, float | None]:
    """Bytes of the reference until it is there over those of each other; of several of a preset the least gain."""
    wanted, found = target(reference, within), dict[str, float | None]()
    theirs = first_at(reference, wanted)
    assert theirs is not None
    for course in others:
        ours = first_at(course, wanted)
        gain = None if ours is None else theirs.sent / ours.sent
        before = found.get(course.preset, gain)
        found[course.preset] = None if gain is None or before is None else min(gain, before)
    return found


def simulated(preset: str, quick: bool) -> Mapping[str, Measured]:
    """Seconds of all steps of the reference over those of a preset whose steps do not hang on times."""
    networks = NETWORKS[:1] if quick else NETWORKS
    seconds, told = {}, {}
    for name in (REFERENCE, preset):
        found = {network: paces(name, network, quick=quick) for network in networks}
        steps = {network: sum(pace.steps for pace in one.parts) for network, one in found.items()}
        seconds[name] = {network: one.end_s(steps[network]) for network, one in found.items()}
        told[name] = {
            "simulated_steps": sum(len(pace.ends_s) for pace in found[networks[0]].parts),
            "bytes_a_step": {network: one.sent_a_step for network, one in found.items()},
            "not_charged": list(found[networks[0]].not_charged),
        }
    return {steps_row(preset): _times_faster(seconds[REFERENCE], seconds[preset], told)}


def _times_faster(theirs: Mapping[str, float], ours: Mapping[str, float], told: dict[str, Any]) -> Measured:
    """In the median of the networks."""
    faster = {network: theirs[network] / seconds for network, seconds in ours.items()}
    config = {"device": DEVICE, "times_faster": faster, "seconds": [dict(theirs), dict(ours)], **told}
    values = faster.values()
    return Measured(statistics.median(values), (min(values), max(values)), config, simulated=True)


def _over(values: Sequence[float], config: dict[str, Any]) -> Measured:
    """The mean of one training, or of one for each network."""
    return Measured(statistics.fmean(values), (min(values), max(values)), config)


def _config(courses: Sequence[Course]) -> dict[str, Any]:
    return {
        "workload": Language.workload,
        "nodes": NODES,
        "device": DEVICE,
        "seeds": [Language.seed],
        "steps": STEPS,
        "rates": list(RATES),
        "courses": [course.to_json() for course in courses],
    }


def _rows(preset: str) -> tuple[str, ...]:
    """Of its trainings."""
    if preset == REFERENCE:
        return (loss_row(preset),)
    to_target = [target_row(preset, network) for network in NETWORKS]
    return (
        loss_row(preset),
        bytes_row(preset),
        *to_target,
        *([steps_row(preset)] if METHODS[preset].by_clock else []),
    )


BENCHMARK = Benchmark(
    FOLDER,
    [
        *(
            Group(_rows(preset), partial(learned, preset), "trainings", 0.1, canaries(preset))
            for preset in METHODS
        ),
        Group((EQUAL, WHOLE), fewest_bytes, "trainings", 0.1, canaries(REFERENCE)),
        *(
            Group((steps_row(preset),), partial(simulated, preset), "simulated", 0.6, canaries(preset))
            for preset in OTHERS
            if not METHODS[preset].by_clock
        ),
    ],
    TRAININGS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
