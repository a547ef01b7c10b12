"""Trains methods, so that several processes may share the work: ``python -m benchmarks.presets.trained NAME...``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.common import in_turn
from benchmarks.presets.courses import course_of
from benchmarks.presets.methods import METHODS

__all__ = ["main"]


def main(methods: Sequence[str]) -> int:
    """Tune and train methods, and store all their trainings; the exit code."""
    return in_turn("method", methods, METHODS, lambda method, _: course_of(method))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
