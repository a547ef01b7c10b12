"""Timing models: what a step takes, by the equations of the papers and from a schedule's own transfers."""

from farflung.timing.delayed import delayed_s, fedavg_s, least_delay, scalability, synchronous_s
from farflung.timing.pipe_sgd import Cluster, layers_s, period_s, ring_s, server_s
from farflung.timing.transfers import Costs, Move, Timeline, timeline

__all__ = [
    "Cluster",
    "Costs",
    "Move",
    "Timeline",
    "delayed_s",
    "fedavg_s",
    "layers_s",
    "least_delay",
    "period_s",
    "ring_s",
    "scalability",
    "server_s",
    "synchronous_s",
    "timeline",
]
