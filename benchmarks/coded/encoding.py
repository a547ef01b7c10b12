"""What encoding sends under one code, over what it sends under another."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from benchmarks.coded.codes import LAWS
from benchmarks.coded.world import noise, run
from benchmarks.common import Measured
from farflung.coded.coordinator import Coordinator, Settings
from farflung.types import Runtime

__all__ = ["SIZES", "both", "rows_alone", "sent"]

SIZES = ((20, 16), (50, 40))
"""N and K."""
ROWS_EACH, FEATURES_OF_K = 20, 4
"""Rows of a partition, and features over K: column blocks are equal."""
Transposed = Literal["columns", "repair"]


async def _nothing(coordinator: Coordinator, runtime: Runtime) -> None:
    del coordinator, runtime


def sent(code: str, devices: int, partitions: int, transposed: Transposed, seed: int = 0) -> Counter[str]:
    """Payload bytes by kind, of a run that ends once its data are encoded."""
    settings = Settings(
        partitions=partitions,
        devices=devices,
        code=code,
        seed=seed,
        redundancy=0,
        pieces=1,
        transposed=transposed,
    )
    return run(noise(ROWS_EACH * partitions, FEATURES_OF_K * partitions, partitions), settings, _nothing).sent


def measure(devices: int, partitions: int, transposed: Transposed, quick: bool) -> Measured:
    """Bytes of RLNC over those of MDS; the spread is that of seeds of the code."""
    seeds = range(1 if quick else 3)
    mds = sent("mds", devices, partitions, transposed)
    laws = dict(list(LAWS.items())[:1]) if quick else LAWS
    bytes_: dict[str, list[Counter[str]]] = {
        law: [sent(code, devices, partitions, transposed, seed) for seed in seeds]
        for law, code in laws.items()
    }
    ratios = {law: [one["encoding"] / mds["encoding"] for one in ran] for law, ran in bytes_.items()}
    partition = 8 * ROWS_EACH * FEATURES_OF_K * partitions
    config: dict[str, Any] = {
        "devices": devices,
        "partitions": partitions,
        "coded": devices - partitions,
        "transposed": transposed,
        "rows_of_a_partition": ROWS_EACH,
        "features": FEATURES_OF_K * partitions,
        "seeds": list(seeds),
        "ratio_by_law": ratios,
        "partitions_sent": {
            "mds": mds["encoding"] / partition,
            **{law: ran[0]["encoding"] / partition for law, ran in bytes_.items()},
        },
        "encoding_nbytes": {"mds": mds["encoding"], "rlnc": bytes_["balanced"][0]["encoding"]},
        "members_nbytes": {"mds": mds["members"], "rlnc": bytes_["balanced"][0]["members"]},
        "labels_nbytes": 8 * ROWS_EACH * partitions,
    }
    balanced = ratios["balanced"]
    return Measured(statistics.median(balanced), (min(balanced), max(balanced)), config, simulated=True)


def rows_alone(quick: bool) -> Mapping[str, Measured]:
    """Of blocks of rows."""
    return {
        f"RLNC encoding bytes over MDS, row encoding, ({n},{k})": measure(n, k, "repair", quick)
        for n, k in SIZES
    }


def both(quick: bool) -> Mapping[str, Measured]:
    """Of blocks of rows and of columns."""
    return {
        f"encoding bytes over MDS, row and column together, ({n},{k})": measure(n, k, "columns", quick)
        for n, k in SIZES
    }
