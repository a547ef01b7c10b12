"""The rates that producers reach, all of them and the broker on one machine."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.workers import environment
from tests.broker import Broker

__all__ = ["COUNTS", "PRODUCE", "RATES", "THREADS", "effective"]

PRODUCE = Path(__file__).parents[2] / "examples" / "produce.py"
COUNTS, RATES = (1, 2, 4, 8, 16, 32), (100, 300, 600)
"""Of producers, and samples per second of each (Fig. 5)."""
THREADS = ((8, 4), (1, 1))
"""Of the broker, for the network and for its disk: the paper's (section V), and as few as there can be."""
LAYOUTS = {"a topic each": "own-{{rank}}-{count}-{rate}", "a partition each": "shared-{count}-{rate}"}


def effective(
    *,
    counts: tuple[int, ...],
    rates: tuple[int, ...],
    seconds: float,
    threads: Sequence[tuple[int, int]] = THREADS,
) -> list[dict[str, Any]]:
    """Samples per second of a producer, on average, for each combination; all are devices of one process.

    Args:
      counts: of producers.
      rates: that each is asked for.
      seconds: for how long they send.
      threads: of the broker.
    """
    found = []
    for network, disk in threads:
        with tempfile.TemporaryDirectory(prefix="farflung-kafka-") as folder:
            broker = Broker(
                Path(folder), real=True, settings={"num.network.threads": network, "num.io.threads": disk}
            )
            try:
                for (layout, topic), count, rate in itertools.product(LAYOUTS.items(), counts, rates):
                    name = topic.format(count=count, rate=rate)
                    reached = _reached(broker, name, count, rate, seconds)
                    found.append(
                        {
                            "threads": [network, disk],
                            "layout": layout,
                            "producers": count,
                            "asked": rate,
                            "reached": round(reached, 1),
                        }
                    )
            finally:
                broker.close()
    return found


def _reached(broker: Broker, topic: str, count: int, rate: int, seconds: float) -> float:
    """Until the last is acknowledged, or for as long as they were to send."""
    if "{rank}" in topic:
        for rank in range(count):
            broker.make(topic.format(rank=rank), 1)
    else:
        broker.make(topic, count)
    asked = [
        "--servers", broker.servers, "--topic", topic, "--devices", str(count), "--rate", str(rate),
        "--samples", str(int(rate * seconds)),
    ]  # fmt: skip
    told = subprocess.run(
        [sys.executable, str(PRODUCE), *asked], env=environment(), capture_output=True, text=True, check=True
    ).stdout.split()
    return int(told[0]) / count / max(float(told[3]), seconds)
