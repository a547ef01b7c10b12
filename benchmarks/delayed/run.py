"""Delayed updates and delayed gradient averaging: what latency costs, and what delay and sparsity cost in accuracy."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, main
from benchmarks.delayed.accuracy import (
    CANARIES,
    DELAYS,
    LAGS,
    REGIONS_LOST,
    TRAININGS,
    compensated,
    compensation,
    lag,
    lagging,
    regions,
)
from benchmarks.delayed.lengths import LAW_ROW, ROWS, law, length_row, lengths, long, long_rows
from benchmarks.delayed.targets import NETWORKS, target_row, to_target
from benchmarks.delayed.times import (
    IN_REGIONS,
    LATENCIES_MS,
    NODES,
    TASKS,
    in_regions,
    latencies,
    scalability_row,
    speed_up_row,
    speed_ups,
)

BENCHMARK = Benchmark(
    Path(__file__).parent,
    [
        Group(tuple(scalability_row(ms) for ms in LATENCIES_MS), latencies, "simulated", 5.0, CANARIES),
        *(
            Group(
                tuple(speed_up_row(nodes, task) for nodes in NODES if nodes > 1),
                partial(speed_ups, task),
                "simulated",
                5.0,
                CANARIES,
            )
            for task in TASKS
        ),
        Group(tuple(IN_REGIONS), in_regions, "measured", 5.0, CANARIES),
        *(
            Group(compensated(delay), partial(compensation, delay), "trainings", 0.0, CANARIES)
            for delay in DELAYS
        ),
        *(Group(lagging(number), partial(lag, number), "trainings", 0.0, CANARIES) for number in LAGS),
        Group((REGIONS_LOST,), regions, "trainings", 0.0, CANARIES),
        *(
            Group(
                tuple(length_row(delay, steps) for delay in (5, 20)),
                partial(lengths, steps),
                "trainings",
                0.0,
                CANARIES,
            )
            for steps in ROWS
        ),
        *(Group(long_rows(number), partial(long, number), "trainings", 0.0, CANARIES) for number in LAGS),
        Group((LAW_ROW,), law, "trainings", 0.0, CANARIES),
        Group(tuple(target_row(network) for network in NETWORKS), to_target, "trainings", 0.5, CANARIES),
    ],
    TRAININGS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
