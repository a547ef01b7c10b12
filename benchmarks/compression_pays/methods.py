"""The ways of sending a gradient that are compared, as communication hooks of DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import farflung
from farflung.codecs import (
    DGC,
    QSGD,
    Int8,
    RandomK,
    Sign,
    TopK,
    Truncate16,
    by_role,
    by_size,
    chain,
    error_feedback,
)
from farflung.reducers import CodecReducer, PowerSGD, SharedScaleQSGD
from farflung.types import Reducer

__all__ = [
    "AUTO",
    "DDP",
    "FP16_HOOK",
    "METHODS",
    "OWN_MOMENTUM",
    "POWERSGD_HOOK",
    "REFERENCES",
    "SYNCHRONOUS",
    "TIGHT",
    "TRUNCATE16",
    "wrapped",
]

DDP = "DDP"
FP16_HOOK = "PyTorch's fp16 hook"
POWERSGD_HOOK = "PyTorch's PowerSGD hook, rank 2"
REFERENCES = (DDP, FP16_HOOK, POWERSGD_HOOK)
"""What PyTorch has."""
AUTO, SYNCHRONOUS, TRUNCATE16 = "identity, auto, falls back", "identity", "truncate16"
TIGHT = (AUTO, SYNCHRONOUS, TRUNCATE16)
"""Those whose goals are close to 1."""

METHODS: dict[str, Reducer] = {
    AUTO: CodecReducer(collective="auto"),
    SYNCHRONOUS: CodecReducer(),
    TRUNCATE16: CodecReducer(Truncate16()),
    "int8": CodecReducer(Int8()),
    "int8, stochastic, gathered": CodecReducer(Int8("stochastic")),
    "qsgd, 4 bits, gathered": CodecReducer(QSGD(bits=4)),
    "qsgd, 4 bits, in two phases": CodecReducer(QSGD(bits=4), phases="two"),
    "qsgd, 4 bits, on hops of a ring": CodecReducer(QSGD(bits=4), "ring", phases="hops"),
    "topk, 1%, error feedback, gathered": CodecReducer(error_feedback(TopK(0.01))),
    "topk, 1%, error feedback, in two phases": CodecReducer(error_feedback(TopK(0.01)), phases="two"),
    "topk, 1%, then int8, error feedback": CodecReducer(error_feedback(chain(TopK(0.01), Int8()))),
    "randomk, 1%, error feedback": CodecReducer(error_feedback(RandomK(0.01, unbiased=False))),
    "sign, error feedback, gathered": CodecReducer(error_feedback(Sign())),
    "sign, error feedback, in two phases": CodecReducer(error_feedback(Sign()), phases="two"),
    "topk, 0.1%, error feedback, gathered": CodecReducer(error_feedback(TopK(0.001))),
    "dgc, 0.1%": CodecReducer(DGC(0.001, warmup_steps=0)),
    "by_role, convolutions topk 1%": CodecReducer(by_role(error_feedback(TopK(0.01)))),
    "by_size, large ones int8": CodecReducer(by_size(large=Int8())),
    "powersgd, rank 1": PowerSGD(rank=1),
    "powersgd, rank 2": PowerSGD(rank=2),
    "powersgd, rank 4": PowerSGD(rank=4),
    "shared_scale_qsgd, 4 bits": SharedScaleQSGD(bits=4),
}
"""farflung's, by what they are called in tables; every codec and reducer has a row."""
OWN_MOMENTUM = ("dgc, 0.1%",)
"""Those that have the momentum in themselves, so that the optimizer has none."""


def wrapped(method: str, model: nn.Module) -> tuple[DistributedDataParallel, Callable[[], None]]:
    """The model with a method as its hook, and what to call at the end.

    Channels are innermost, as PyTorch recommends for convolutions: for all methods a fifth less to compute here.
    """
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # PyTorch's PowerSGD takes several all-reduces for a bucket; with two buckets gloo mixes them up and aborts.
    one_bucket = {"bucket_cap_mb": 25} if method == POWERSGD_HOOK else {}
    ddp = DistributedDataParallel(model, **one_bucket)  # type: ignore[arg-type]
    if method == FP16_HOOK:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == POWERSGD_HOOK:
        state: Any = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif method != DDP:
        ours, hook = farflung.ddp_hook(METHODS[method], fall_back_if_slower=method == AUTO)
        ddp.register_comm_hook(ours, hook)
        return ddp, ours.close
    return ddp, lambda: None
