"""Coded training: what encoding sends, how many answers decode, what is learned, and how long iterations take."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.coded import answers, descent, encoding, lab, models, processor, rounds
from benchmarks.common import Benchmark, Group, load_expected, main

FOLDER = Path(__file__).parent
CANARIES = ("coded",)
NAMES = tuple(row.name for row in load_expected(FOLDER))
ENCODING_ROWS, ENCODING_BOTH, EXTRA = (
    tuple(name for name in NAMES if text in name)
    for text in ("row encoding", "row and column", "extra answers")
)


def _one(text: str) -> tuple[str, ...]:
    """The row that has this in its name."""
    (name,) = (name for name in NAMES if text in name)
    return (name,)


BENCHMARK = Benchmark(
    FOLDER,
    [
        Group(ENCODING_ROWS, encoding.rows_alone, "simulated", 0.5, CANARIES),
        Group(ENCODING_BOTH, encoding.both, "simulated", 1.0, CANARIES),
        Group(EXTRA, answers.laws_of_coefficients, "simulated", 3.0, CANARIES),
        Group(_one("decode probability"), answers.tables, "simulated", 2.0, CANARIES),
        Group(_one("test accuracy"), models.accuracy, "simulated", 0.2, CANARIES),
        Group(_one("logistic and squared hinge"), models.smooth, "simulated", 2.0, CANARIES),
        Group(_one("scikit-learn, hinge"), models.hinge, "simulated", 2.0, CANARIES),
        Group(_one("total bytes"), descent.total_bytes, "simulated", 2.0, CANARIES),
        Group(_one("in pieces, RLNC over uncoded"), rounds.in_pieces, "simulated", 3.0, CANARIES),
        Group(_one("whole-block answers"), rounds.whole_blocks, "simulated", 3.0, CANARIES),
        Group(_one("real processes"), lab.in_pieces, "measured", 4.0, CANARIES),
        Group(_one("of a decode"), processor.decode, "measured", 0.1, CANARIES),
        Group(_one("of the coordinator"), processor.iteration, "measured", 1.0, CANARIES),
    ],
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
