"""Schedules: which transfers start at a step, and when their results are due."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy
from farflung.spec import Registry
from farflung.types import Schedule

if TYPE_CHECKING:
    from farflung.schedules.adacomm import AdaComm
    from farflung.schedules.backup_workers import BackupWorkers
    from farflung.schedules.delayed import Delayed, DelayedGradient
    from farflung.schedules.diloco import DiLoCo, StreamingDiLoCo
    from farflung.schedules.gradient_coding import GradientCoding
    from farflung.schedules.local_sgd import LocalSGD, PostLocalSGD, Synchronous
    from farflung.schedules.pipelined import Pipelined
    from farflung.schedules.ssp import SSP
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "adacomm": "AdaComm",
            "backup_workers": "BackupWorkers",
            "delayed": "Delayed DelayedGradient",
            "diloco": "DiLoCo StreamingDiLoCo",
            "gradient_coding": "GradientCoding",
            "local_sgd": "LocalSGD PostLocalSGD Synchronous",
            "pipelined": "Pipelined",
            "ssp": "SSP",
        },
    )

__all__ = [
    "SCHEDULES",
    "SSP",
    "AdaComm",
    "BackupWorkers",
    "Delayed",
    "DelayedGradient",
    "DiLoCo",
    "GradientCoding",
    "LocalSGD",
    "Pipelined",
    "PostLocalSGD",
    "StreamingDiLoCo",
    "Synchronous",
]

SCHEDULES: Registry[Schedule] = Registry(
    __name__,
    {
        "adacomm": "AdaComm",
        "backup_workers": "BackupWorkers",
        "delayed": "Delayed",
        "delayed_gradient": "DelayedGradient",
        "diloco": "DiLoCo",
        "gradient_coding": "GradientCoding",
        "local_sgd": "LocalSGD",
        "pipelined": "Pipelined",
        "post_local_sgd": "PostLocalSGD",
        "ssp": "SSP",
        "streaming_diloco": "StreamingDiLoCo",
        "synchronous": "Synchronous",
    },
)
"""All of them by name."""
