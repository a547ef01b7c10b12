"""Tasks to train: a model, a per-sample loss, a metric and data for each."""

from farflung.workloads.registry import DATA, WORKLOADS, workload
from farflung.workloads.synthetic import Quadratic

__all__ = ["DATA", "WORKLOADS", "Quadratic", "workload"]
