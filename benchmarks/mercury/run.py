"""Mercury: how much sooner importance sampling is as accurate as synchronous SGD on slow links."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Measured, main
from benchmarks.mercury.applications import MBPS
from benchmarks.mercury.pictures import draw
from benchmarks.mercury.rows import JOBS, MISSING, PICTURED, Rows, pictured, tictac, tictac_row
from benchmarks.mercury.watched import CANARIES, TRAININGS, Found, Watched
from farflung.errors import DataError

__all__ = ["BENCHMARK", "NotTrained", "Quick", "stored"]

FOLDER = Path(__file__).parent
PICTURE = FOLDER.parents[1] / "docs" / "mercury.svg"


class NotTrained(DataError):
    """A training is not stored yet."""


def stored(training: Watched) -> Found:
    """What a stored training came to.

    Raises:
      NotTrained: there is none.
    """
    if training not in TRAININGS.stored():
        raise NotTrained(f"missing: a training that is not stored yet ({training.title})")
    return TRAININGS.curve(training)


class Quick:
    """Trains something small in the place of each, once."""

    def __init__(self) -> None:
        self._found: dict[str, Found] = {}

    def __call__(self, training: Watched) -> Found:
        small = training.quickly()
        if repr(small) not in self._found:
            self._found[repr(small)] = small.train()
        return self._found[repr(small)]


QUICK = Quick()


def measured(job: str, rows: Rows, quick: bool) -> Mapping[str, Measured]:
    """What stored trainings say; the picture as well, once all of its trainings are there.

    Raises:
      NotTrained: one that rows need is not there; says how to make it.
    """
    if quick:
        return rows.measure(QUICK)
    try:
        found = rows.measure(stored)
    except NotTrained as error:
        raise NotTrained(
            f"{rows.names[0]}: {error}: python -m benchmarks.mercury.trained targets {job}"
        ) from None
    if PICTURED.intersection(rows.names):
        with suppress(NotTrained):
            draw(PICTURE, pictured(stored))
    return found


def missing(rows: Rows, quick: bool) -> Mapping[str, Measured]:
    """Nothing in a quick run; else says what is missing.

    Raises:
      BadInput: what rows cannot be measured without.
    """
    return {} if quick else rows.measure(stored)


BENCHMARK = Benchmark(
    FOLDER,
    [
        *(
            Group(rows.names, partial(measured, name, rows), "trainings", 0.2, CANARIES)
            for name, job in JOBS.items()
            for rows in job.rows
        ),
        Group(tuple(map(tictac_row, MBPS)), tictac, "simulated", 1.0, ("preset tictac", *CANARIES)),
        *(Group(rows.names, partial(missing, rows), "trainings", 0.0, CANARIES) for rows in MISSING),
    ],
    TRAININGS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
