"""What faults have done to the way from one replica to another."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from farflung.faults.plan import Fault

__all__ = ["Condition"]


@dataclass(frozen=True, slots=True)
class Condition:
    """What has happened to a way; by default nothing.

    Args:
      cut: nothing arrives, and nobody is told.
      loss: share of packets that are lost, besides the network's own.
      bandwidth_bps: there is no more, in bits per second; on top of the network's own limits.
    """

    cut: bool = False
    loss: float = 0.0
    bandwidth_bps: float = math.inf

    def after(self, fault: Fault) -> Condition:
        """What one more fault of ``cut``, ``throttle`` or ``lose`` makes of it."""
        if fault.kind == "cut":
            return replace(self, cut=True)
        if fault.bandwidth_bps is not None:
            return replace(self, bandwidth_bps=fault.bandwidth_bps)
        assert fault.loss is not None
        return replace(self, loss=fault.loss)
