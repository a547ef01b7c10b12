"""Schedules, which decide when transfers start and when their results are due."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes
from farflung.spec import Registry
from farflung.types import Schedule

if TYPE_CHECKING:
    from farflung.schedules.adacomm import AdaComm
    from farflung.schedules.delayed import Delayed
    from farflung.schedules.diloco import DiLoCo, StreamingDiLoCo
    from farflung.schedules.local_sgd import LocalSGD, PostLocalSGD, Synchronous
    from farflung.schedules.pipelined import Pipelined
    from farflung.schedules.priority import Priority
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "adacomm": "AdaComm",
            "delayed": "Delayed",
            "diloco": "DiLoCo StreamingDiLoCo",
            "local_sgd": "LocalSGD PostLocalSGD Synchronous",
            "pipelined": "Pipelined",
            "priority": "Priority",
        },
    )

__all__ = [
    "SCHEDULES",
    "AdaComm",
    "Delayed",
    "DiLoCo",
    "LocalSGD",
    "Pipelined",
    "PostLocalSGD",
    "Priority",
    "StreamingDiLoCo",
    "Synchronous",
]

SCHEDULES: Registry[Schedule] = Registry(
    __name__,
    {
        "adacomm": "AdaComm",
        "delayed": "Delayed",
        "diloco": "DiLoCo",
        "local_sgd": "LocalSGD",
        "pipelined": "Pipelined",
        "post_local_sgd": "PostLocalSGD",
        "priority": "Priority",
        "streaming_diloco": "StreamingDiLoCo",
        "synchronous": "Synchronous",
    },
)
"""Schedules by name."""
