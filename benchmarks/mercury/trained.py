"""Makes trainings, so that several processes may share the work: ``python -m benchmarks.mercury.trained NAME...``.

Those of ``targets`` come first: all others need them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.common import in_turn
from benchmarks.mercury.curves import Ask
from benchmarks.mercury.rows import JOBS
from benchmarks.mercury.watched import TRAININGS

__all__ = ["main"]


def main(names: Sequence[str], ask: Ask = TRAININGS.curve) -> int:
    """Makes and stores those of each job in turn; the exit code.

    Args:
      names: of the jobs.
      ask: trains.
    """
    return in_turn("trainings", names, JOBS, lambda _, job: job.go_through(ask))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
