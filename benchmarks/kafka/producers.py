"""How near to the rates they are asked for producers come, all of them and the broker on one machine."""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

from farflung.data import KafkaOutlet, RateCourse, courses, in_turn, publish
from farflung.types import Dataset
from tests.broker import Broker

__all__ = ["COUNTS", "RATES", "THREADS", "effective"]

COUNTS, RATES = (1, 2, 4, 8, 16, 32), (100, 300, 600)
"""Of producers, and samples per second of each (Fig. 5)."""
THREADS = ((8, 4), (1, 1))
"""Of the broker, for the network and for its disk: the paper's (section V), and as few as there can be."""
LAYOUTS = {"a topic each": "own-{rank}", "a partition each": "shared"}


def effective(
    data: Dataset, *, counts: tuple[int, ...], rates: tuple[int, ...], seconds: float
) -> list[dict[str, Any]]:
    """Samples per second of a producer, on average, for each combination; all are devices of one process.

    Args:
      data: what they send.
      counts: of producers.
      rates: that each is asked for.
      seconds: for how long they send.
    """
    found = []
    for (network, disk), (layout, topic) in itertools.product(THREADS, LAYOUTS.items()):
        with tempfile.TemporaryDirectory(prefix="farflung-kafka-") as folder:
            broker = Broker(
                Path(folder), real=True, settings={"num.network.threads": network, "num.io.threads": disk}
            )
            try:
                for count, rate in itertools.product(counts, rates):
                    name = f"{topic}-{count}-{rate}"
                    reached = _reached(broker.servers, name, data, courses(rate, count, 0), seconds)
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


def _reached(servers: str, topic: str, data: Dataset, given: list[RateCourse], seconds: float) -> float:
    """Until the last is acknowledged, or for as long as they were to send."""
    outlet = KafkaOutlet(servers, topic, len(given), make=True)
    sources = [in_turn(data, rank, len(given), shared=True, seed=0) for rank in range(len(given))]
    begin = time.monotonic()
    published = publish(outlet, given, sources, seconds=seconds)
    taken_s = max(time.monotonic() - begin, seconds)
    return sum(published.samples) / len(given) / taken_s
