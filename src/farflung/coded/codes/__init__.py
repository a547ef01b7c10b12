from dataclasses import dataclass
from typing import Protocol
import torch
class Code(Protocol):
    def row(self, index: int, partitions: int, seed: int) -> torch.Tensor: ...
    def grown(self, index: int, partition: int, seed: int) -> float: ...
@dataclass(frozen=True)
class RLNC:
    law: str = "masked"
    def row(self, index, partitions, seed):
        g = torch.Generator().manual_seed(seed * 1000003 + index)
        while True:
            r = torch.randn(partitions, generator=g, dtype=torch.float64) * (torch.rand(partitions, generator=g) < .5)
            if bool(r.any()):
                return r
    def grown(self, index, partition, seed):
        return float(self.row(index, partition + 1, seed)[-1])
@dataclass(frozen=True)
class MDS:
    def row(self, index, partitions, seed):
        return torch.randn(partitions, generator=torch.Generator().manual_seed(seed * 1000003 + index), dtype=torch.float64)
    def grown(self, index, partition, seed):
        return float(self.row(index, partition + 1, seed)[-1])
CODES = {"rlnc": RLNC, "mds": MDS}
