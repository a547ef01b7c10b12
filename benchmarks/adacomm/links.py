"""Links on which a synchronous exchange takes so many times as long as the computation of a step."""

from __future__ import annotations

from farflung.comm import predict_cost_s
from farflung.devices import DeviceProfile
from farflung.network import Link, NetworkProfile

__all__ = ["COLLECTIVE", "LATENCY_SHARE", "REPLICAS", "STEP_S", "device", "links", "most_per_step"]

REPLICAS = 4
STEP_S = 1.0
"""Y: computation of a step."""
COLLECTIVE = "ring"
LATENCY_SHARE = 0.01
"""Of an exchange: 60 MB around a ring of four at 10 Gbit/s take 72 ms, and six times 0.1 ms of latency; our choice."""


def device(batch_size: int) -> DeviceProfile:
    """Computes a step of so many samples in Y, a third of it forward."""
    return DeviceProfile(forward_s=STEP_S / (3 * batch_size))


def links(ratio: float, nbytes: int) -> NetworkProfile:
    """An exchange of so many bytes takes ``ratio`` times Y: D."""

    def cost(latency_s: float, bandwidth_bps: float) -> float:
        return predict_cost_s(
            NetworkProfile.create_uniform(Link(latency_s, bandwidth_bps), REPLICAS), COLLECTIVE, nbytes
        )

    bandwidth = 1e6 * cost(0.0, 1e6) / (ratio * STEP_S * (1 - LATENCY_SHARE))
    latencies = cost(1.0, bandwidth) - cost(0.0, bandwidth)
    return NetworkProfile.create_uniform(
        Link(ratio * STEP_S * LATENCY_SHARE / latencies, bandwidth), REPLICAS
    )


def most_per_step(ratio: float, period: float) -> float:
    """How many times faster a step may become by an exchange every ``period`` steps: (1 + a) / (1 + a / tau)."""
    return (1 + ratio) / (1 + ratio / period)
