"""Workloads: a model, a per-sample loss, a metric and data; any torch module with data sets can be one."""

from farflung.workloads.classification import Classification
from farflung.workloads.models import resnet, vgg
from farflung.workloads.registry import DATA, WORKLOADS, check_workload, create_workload, find_dataset
from farflung.workloads.synthetic import Quadratic
from farflung.workloads.torch_workload import TorchWorkload

__all__ = [
    "DATA",
    "WORKLOADS",
    "Classification",
    "Quadratic",
    "TorchWorkload",
    "check_workload",
    "create_workload",
    "find_dataset",
    "resnet",
    "vgg",
]
