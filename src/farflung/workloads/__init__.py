"""Tasks to train: a model, a per-sample loss, a metric and data for each; any torch module and data sets are one."""

from farflung.workloads._classification import Classification
from farflung.workloads._inverted import mobilenet
from farflung.workloads._plain import vgg
from farflung.workloads._residual import resnet
from farflung.workloads.registry import DATA, WORKLOADS, check_workload, data_of, workload
from farflung.workloads.synthetic import Quadratic
from farflung.workloads.torch_workload import TorchWorkload

__all__ = [
    "DATA",
    "WORKLOADS",
    "Classification",
    "Quadratic",
    "TorchWorkload",
    "check_workload",
    "data_of",
    "mobilenet",
    "resnet",
    "vgg",
    "workload",
]
