"""Trains presets, so that several processes may share the work: ``python -m benchmarks.presets.trained NAME...``.

The reference comes first: the others begin at its rate.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.common import in_turn
from benchmarks.presets.courses import best_rate
from benchmarks.presets.language import TRAININGS, Language
from benchmarks.presets.methods import METHODS, NETWORKS, Method

__all__ = ["main"]


def main(presets: Sequence[str]) -> int:
    """Searches their rates, and stores all their trainings; the exit code."""
    return in_turn("preset", presets, METHODS, _train)


def _train(preset: str, method: Method) -> None:
    networks = NETWORKS if method.by_clock else ("",)
    rate, _ = best_rate(TRAININGS.curve, preset, networks[0])
    for network in networks:
        TRAININGS.curve(Language(preset, rate, network))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
