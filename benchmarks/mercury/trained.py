"""Makes trainings, so that several processes may share the work: ``python -m benchmarks.mercury.trained NAME...``.

Those of ``targets`` come first: all others need them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.mercury.curves import Ask
from benchmarks.mercury.rows import JOBS
from benchmarks.mercury.watched import TRAININGS
from farflung.errors import FarflungError, UnknownName

__all__ = ["main"]


def main(names: Sequence[str], ask: Ask = TRAININGS.accuracy) -> int:
    """Makes and stores those of each job in turn; the exit code.

    Args:
      names: of the jobs.
      ask: trains.
    """
    try:
        for name in names:
            if name not in JOBS:
                raise UnknownName("trainings", name, JOBS)
        for name in names:
            JOBS[name].go_through(ask)
    except FarflungError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
