"""Coded training: what encoding sends, how many answers decode, what is learned, and how long iterations take."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.coded import answers, descent, encoding, lab, models, processor, rounds
from benchmarks.common import Benchmark, Group, load_expected, main

FOLDER = Path(__file__).parent
CODES = ["src/farflung/coded/codes/*.py"]
MODELS = [
    f"src/farflung/coded/{name}.py"
    for name in (
        "estimators/*",
        "objectives/*",
        "solvers/*",
        "problem",
        "held",
        "local",
        "training",
        "rounds",
        "plan",
    )
]
DECODING = [*CODES, *(f"src/farflung/coded/{name}.py" for name in ("decoder", "plan", "span"))]
RUNS = [
    f"src/farflung/coded/{name}.py"
    for name in (
        "codes/*",
        "planning",
        "fetching",
        "giving",
        "blocks",
        "coordinator",
        "rounds",
        "decoder",
        "device",
    )
]
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
        Group(ENCODING_ROWS, encoding.rows_alone, "simulated", 0.5, RUNS),
        Group(ENCODING_BOTH, encoding.both, "simulated", 1.0, RUNS),
        Group(
            EXTRA, answers.laws_of_coefficients, "simulated", 3.0, [*CODES, "src/farflung/coded/decoder.py"]
        ),
        Group(_one("decode probability"), answers.tables, "simulated", 2.0, CODES),
        Group(_one("test accuracy"), models.accuracy, "simulated", 0.2, MODELS),
        Group(_one("logistic and squared hinge"), models.smooth, "simulated", 2.0, MODELS),
        Group(_one("scikit-learn, hinge"), models.hinge, "simulated", 2.0, MODELS),
        Group(_one("total bytes"), descent.total_bytes, "simulated", 2.0, RUNS),
        Group(_one("in pieces, RLNC over uncoded"), rounds.in_pieces, "simulated", 3.0, RUNS),
        Group(_one("whole-block answers"), rounds.whole_blocks, "simulated", 3.0, RUNS),
        Group(_one("real processes"), lab.in_pieces, "measured", 4.0, RUNS),
        Group(_one("of a decode"), processor.decode, "measured", 0.1, DECODING),
        Group(_one("of the coordinator"), processor.iteration, "measured", 1.0, RUNS),
    ],
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
