"""A source of samples without a broker, and streams that write down which samples each step has used."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from farflung.streams import LiveStream, iterator, kafka
from farflung.streams.live import STRIDE
from farflung.types import SampleIds, Samples, StreamContext
from farflung.workloads import create_workload

Sample = tuple[torch.Tensor, torch.Tensor]


def readings(rank: int, size: int, position: int) -> Iterator[tuple[int, Sample]]:
    """The samples of ``synthetic/quadratic`` over and over, in bursts of 16 with pauses between them."""
    data, _ = create_workload("synthetic/quadratic").load_datasets()
    for number in itertools.count(position):
        rows = data.get_rows(torch.tensor([(number * size + rank) % len(data)]))
        yield number, (rows.inputs[0], rows.targets[0])
        if number % 16 == 15:
            time.sleep(0.05)


def logged(folder: str, **options: Any) -> LiveStream:
    """The stream ``kafka``, or ``iterator`` over :func:`readings`; a line for each step in a file of each replica."""
    stream = kafka(**options) if "topic" in options else iterator(readings, **options)
    opened, committed = stream.start, stream.commit
    path = Path(folder)

    def open_(context: StreamContext) -> Samples:
        nonlocal path
        path = Path(folder) / f"used-{context.rank}.jsonl"
        return opened(context)

    def commit(ids: SampleIds, *, step: int) -> None:
        committed(ids, step=step)
        places = [[one % STRIDE, one // STRIDE] for one in ids.tolist()]
        with path.open("a") as file:
            file.write(json.dumps([step, places]) + "\n")

    stream.start, stream.commit = open_, commit  # type: ignore[method-assign]
    return stream


def used(folder: Path, rank: int) -> dict[int, list[tuple[int, int]]]:
    """The partition and position of each sample by step; of a step that was made again the last time counts."""
    lines = map(json.loads, (folder / f"used-{rank}.jsonl").read_text().splitlines())
    return {step: [(partition, position) for partition, position in places] for step, places in lines}
