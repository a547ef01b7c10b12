"""Lets PyTorch's tests of DDP, most of which ask for GPUs only to place modules, run on processors with gloo."""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

GPUS = 8


def on_cpu(place: Any) -> Any:
    """Returns the processor for a GPU, and anything else as it is."""
    is_number = isinstance(place, int) and not isinstance(place, bool)
    return "cpu" if is_number or str(place).startswith("cuda") else place


class OnCpu(TorchFunctionMode):
    """Context in which functions of torch take processors for GPUs."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        keywords = dict(kwargs or {})
        if "device" in keywords:
            keywords["device"] = on_cpu(keywords["device"])
        if getattr(func, "__name__", "") == "to":
            args = (args[0], *map(on_cpu, args[1:]))
        return func(*args, **keywords)


def pretend_gpus() -> None:
    """Patches torch and its utilities for tests, in this process and its forks."""
    if "expecttest" not in sys.modules:  # an extra of torch's, for tests that are not run here
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal import common_distributed as utilities

    patches: dict[Any, dict[str, Any]] = {
        utilities: {
            "skip_if_lt_x_gpu": lambda _: lambda test: test,
            "nccl_skip_if_lt_x_gpu": lambda *_: lambda test: test,
            "skip_if_no_gpu": lambda test: test,
        },
        torch.cuda: {
            "set_device": lambda _: None,
            "synchronize": lambda device=None: None,
            "current_device": lambda: 0,
            "device_count": lambda: GPUS,
        },
        Tensor: {"cuda": lambda self, *_, **__: self},
        nn.Module: {"cuda": lambda self, *_: self, "to": _moved(nn.Module.to)},
        DistributedDataParallel: {"__init__": _without_devices(DistributedDataParallel.__init__)},
        utilities.MultiProcessTestCase: {"_spawn_processes": _fork},
    }
    for owner, parts in patches.items():
        for name, part in parts.items():
            setattr(owner, name, part)
    OnCpu().__enter__()


def _moved(to: Callable[..., Any]) -> Callable[..., Any]:
    def move(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        return to(self, *map(on_cpu, args), **{name: on_cpu(value) for name, value in keywords.items()})

    return move


def _without_devices(initialize: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, module: nn.Module, *_: object, **keywords: Any) -> None:
        initialize(self, module, **{**keywords, "device_ids": None, "output_device": None})

    return init


def _fork(self: Any) -> None:
    self._start_processes(torch.multiprocessing.get_context("fork").Process)
