"""Recipes on language: the loss of a transformer against bytes and against time on slow networks."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Measured, main
from benchmarks.presets.courses import (
    JUDGED,
    STEPS,
    WITHIN,
    Course,
    all_courses,
    course_of,
    first_within,
    gap,
)
from benchmarks.presets.language import DEVICE, NODES, TRAININGS, Language, canaries
from benchmarks.presets.methods import FP16, METHODS, NETWORKS, REFERENCE, Setting
from benchmarks.presets.pictures import draw
from benchmarks.presets.times import paces

FOLDER = Path(__file__).parent
DOCS = FOLDER.parents[1] / "docs"
OTHERS = [method for method in METHODS if method != REFERENCE]
NANOGPT = "tinyshakespeare/gpt, synchronous, nanoGPT's CPU setting"
EQUAL = "bytes to equal loss over float32 DDP, tinyshakespeare/gpt"
FEWEST = (
    "bytes to within 0.05 of synchronous's loss over DDP with its fp16 hook, 20newsgroups/gpt, best recipe"
)
PLAYS, PLAY_STEPS = "tinyshakespeare/gpt", 2_000
ON_PLAYS = {
    REFERENCE: Setting("synchronous", 0.008),
    "demo": Setting("demo", 0.001, "sign_sgd"),
    "powersgd": Setting("powersgd", 0.008),
}
"""At the rates that were best on the corpus's grid in whole trainings."""


def gap_row(method: str) -> str:
    """Its name in ``expected.toml``, as of those that follow."""
    name = "diloco, period 50" if method == "diloco" else method
    return f"{name}, loss above synchronous, 20newsgroups/gpt"


def bytes_row(method: str) -> str:
    return f"{method}, bytes to within {WITHIN:g} of synchronous's loss over DDP with its fp16 hook, 20newsgroups/gpt"


def time_row(method: str) -> str:
    return f"{method}, time to within {WITHIN:g} of synchronous's loss over DDP with its fp16 hook, 20newsgroups/gpt"


def learned(method: str, quick: bool) -> Mapping[str, Measured]:
    """Compare a method's loss at the end with the reference's, and what it took to be nearly as good."""
    reference, course = course_of(REFERENCE, quick=quick), course_of(method, quick=quick)
    above = gap(course, reference)
    config = {
        **_config(),
        "course": course.to_json(),
        "learning_rate_of_reference": reference.setting.learning_rate,
    }
    rows = {gap_row(method): Measured(statistics.fmean(above), (min(above), max(above)), config)}
    wanted = reference.loss + WITHIN
    theirs, ours = first_within(reference, wanted), first_within(course, wanted)
    assert theirs is not None
    if ours is None:
        missed = Measured.missed(min(_means(course)), wanted, config)
        return {**rows, bytes_row(method): missed, time_row(method): missed}
    fewer = theirs[1] / 2 / ours[1]
    rows[bytes_row(method)] = Measured(fewer, (fewer, fewer), config)
    faster, not_charged = {}, dict[str, None]()
    for network in NETWORKS[:1] if quick else NETWORKS:
        seconds = []
        for recipe, steps in ((FP16, theirs[0]), (course.setting.recipe, ours[0])):
            pace = paces(recipe, network, STEPS, quick=quick)
            seconds.append(pace.end_s(steps))
            not_charged |= dict.fromkeys(pace.not_charged)
        faster[network] = seconds[0] / seconds[1]
    config = {**config, "device": DEVICE, "times_faster": faster, "not_charged": list(not_charged)}
    spread = (min(faster.values()), max(faster.values()))
    rows[time_row(method)] = Measured(statistics.median(faster.values()), spread, config, simulated=True)
    return rows


def fewest_bytes(quick: bool) -> Mapping[str, Measured]:
    """Find the method that needs the fewest bytes to be nearly as good as the reference; draw all."""
    courses = all_courses(quick=quick)
    reference = courses[REFERENCE]
    wanted = reference.loss + WITHIN
    theirs = first_within(reference, wanted)
    assert theirs is not None
    found = {
        method: theirs[1] / 2 / ours[1]
        for method, course in courses.items()
        if method != REFERENCE and (ours := first_within(course, wanted)) is not None
    }
    config = {**_config(), "times_fewer": found, "loss": {name: one.loss for name, one in courses.items()}}
    if not quick:
        draw(DOCS, courses, wanted)
    if not found:
        return {FEWEST: Measured.missed(min(courses[name].loss for name in OTHERS), wanted, config)}
    best = max(found.values())
    return {FEWEST: Measured(best, (best, best), config)}


def on_plays(quick: bool) -> Mapping[str, Measured]:
    """Compare with what is published for tinyshakespeare: nanoGPT's loss, and DeMo's bytes to an equal one."""
    trainings = {name: Language.of(one, PLAY_STEPS, 0, PLAYS) for name, one in ON_PLAYS.items()}
    if quick:
        curves = {name: one.quickly().train() for name, one in trainings.items()}
    else:
        curves = {name: TRAININGS.curve(one) for name, one in trainings.items()}
    config = {"workload": PLAYS, "nodes": NODES, "steps": PLAY_STEPS, "curves": curves}
    loss = curves[REFERENCE][-1][1]
    course = {name: Course(name, ON_PLAYS[name], [], [curve]) for name, curve in curves.items()}
    reached = {
        name: curves[REFERENCE][-1][2] / ours[1]
        for name, one in course.items()
        if name != REFERENCE and (ours := first_within(one, loss)) is not None
    }
    best = max(reached.values(), default=None)
    lowest = min(one.loss for name, one in course.items() if name != REFERENCE)
    return {
        NANOGPT: Measured(loss, (loss, loss), config),
        EQUAL: Measured.missed(lowest, loss, config)
        if best is None
        else Measured(best, (best, best), config),
    }


def _means(course: Course) -> Sequence[float]:
    """The mean over the seeds at each evaluation."""
    return [statistics.fmean(point[1] for point in points) for points in zip(*course.curves, strict=True)]


def _config() -> dict[str, Any]:
    return {"workload": "20newsgroups/gpt", "nodes": NODES, "seeds": list(JUDGED), "steps": STEPS}


BENCHMARK = Benchmark(
    FOLDER,
    [
        Group((NANOGPT, EQUAL), on_plays, "trainings", 0.3, canaries(REFERENCE)),
        *(
            Group(
                (gap_row(method), bytes_row(method), time_row(method)),
                partial(learned, method),
                "trainings",
                1.0,
                canaries(METHODS[method][0].recipe),
            )
            for method in OTHERS
        ),
        Group((FEWEST,), fewest_bytes, "trainings", 0.1, canaries(REFERENCE)),
    ],
    TRAININGS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
