"""Tasks to train: a model, a per-sample loss, a metric and data for each; any torch module and data sets are one."""

from farflung.workloads.registry import DATA, WORKLOADS, check_workload, data_of, workload
from farflung.workloads.synthetic import Quadratic
from farflung.workloads.torch_workload import TorchWorkload

__all__ = ["DATA", "WORKLOADS", "Quadratic", "TorchWorkload", "check_workload", "data_of", "workload"]
