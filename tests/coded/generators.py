"""Generator matrices: the raw rows, then the coded ones."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.coded.codes import Masked, Replication
from farflung.coded import MDS, RLNC, Code

CODE_ROWS: dict[str, Code] = {
    "mds": MDS(),
    "replication": Replication(),
    "rlnc": RLNC(),
    "rlnc binary": Masked(values=False),
    "rlnc masked": Masked(),
}


def raw(partition: int, partitions: int) -> Tensor:
    return torch.eye(partitions, dtype=torch.float64)[partition]


def row_of(*coefficients: float) -> Tensor:
    return torch.tensor(coefficients, dtype=torch.float64)


def coded_rows(code: Code, blocks: int, partitions: int, seed: int) -> Tensor:
    """The first so many."""
    rows = [code.draw_row(index, partitions, seed) for index in range(blocks)]
    return torch.stack(rows) if rows else torch.zeros(0, partitions, dtype=torch.float64)


def generator_matrix(code: Code, blocks: int, partitions: int, seed: int) -> Tensor:
    """(partitions + coded blocks, partitions)."""
    return torch.cat([torch.eye(partitions, dtype=torch.float64), coded_rows(code, blocks, partitions, seed)])
