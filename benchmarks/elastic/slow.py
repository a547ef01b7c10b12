"""A workload whose first checkpoint takes one replica long, as a slow disk would."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any, cast

from torch import nn

from farflung.types import Workload
from farflung.workloads import create_workload
from farflung.workloads.classification import Classification

__all__ = ["SAVES_S", "slow"]

SAVES_S, AFTER_S = 20.0, 60.0
"""For how many seconds a replica copies its model, and how long after it was made, at the earliest."""


def slow(**options: Any) -> Workload:
    """Make ``fashion-mnist/mlp``, whose state one replica of those in a folder takes :data:`SAVES_S` to copy, once."""
    made = cast("Classification", create_workload("fashion-mnist/mlp", **options))

    def network() -> nn.Module:
        net, began_s = made.build_network(), time.monotonic()

        def wait(*_: object) -> None:
            if time.monotonic() < began_s + AFTER_S:
                return
            try:
                os.close(os.open("slow", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            time.sleep(SAVES_S)

        net.register_state_dict_pre_hook(wait)
        return net

    return replace(made, build_network=network)
