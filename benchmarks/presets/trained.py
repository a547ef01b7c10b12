"""Trains presets, so that several processes may share the work: ``python -m benchmarks.presets.trained NAME...``.

The reference comes first: the others begin at its rate.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.presets.courses import best_rate
from benchmarks.presets.language import TRAININGS, Language
from benchmarks.presets.methods import METHODS, NETWORKS
from farflung.errors import FarflungError, UnknownName

__all__ = ["main"]


def main(presets: Sequence[str]) -> int:
    """Searches their rates, and stores all their trainings; the exit code."""
    try:
        for preset in presets:
            if preset not in METHODS:
                raise UnknownName("preset", preset, METHODS)
        for preset in presets:
            networks = NETWORKS if METHODS[preset].by_clock else ("",)
            rate, _ = best_rate(TRAININGS.accuracy, preset, networks[0])
            for network in networks:
                TRAININGS.accuracy(Language(preset, rate, network))
    except FarflungError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
