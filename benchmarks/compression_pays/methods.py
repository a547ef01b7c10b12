"""The ways of sending a gradient that are compared."""

from __future__ import annotations

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

__all__ = ["DDP", "FP16_HOOK", "METHODS", "MODELLED", "POWERSGD_HOOK"]

DDP = "DDP"
FP16_HOOK = "PyTorch's fp16 hook"
POWERSGD_HOOK = "PyTorch's PowerSGD hook, rank 2"

METHODS: dict[str, Reducer] = {
    "identity": CodecReducer(),
    "truncate16": CodecReducer(Truncate16()),
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
    "dgc, 0.1%": CodecReducer(DGC(0.001, warmup_steps=0)),
    "by_role, convolutions topk 1%": CodecReducer(by_role(error_feedback(TopK(0.01)))),
    "by_size, large ones int8": CodecReducer(by_size(large=Int8())),
    "powersgd, rank 2": PowerSGD(rank=2),
    "powersgd, rank 4": PowerSGD(rank=4),
    "shared_scale_qsgd, 4 bits": SharedScaleQSGD(bits=4),
}
"""farflung's, by what they are called in tables; every codec and reducer has a row."""

MODELLED: dict[str, Reducer] = {
    DDP: CodecReducer(collective="ring"),
    FP16_HOOK: CodecReducer(Truncate16(), "ring"),
    POWERSGD_HOOK: PowerSGD(rank=2, collective="ring"),
}
"""What stands for PyTorch's own in virtual time: as many bytes, over rings as gloo's."""
