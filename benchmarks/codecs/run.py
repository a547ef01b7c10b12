"""How fast codecs are on one core, beside a memory copy and beside sorting."""

from __future__ import annotations

import ctypes
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.common import Benchmark, Group, Measured, main
from farflung.codecs import (
    CODECS,
    DGC,
    QSGD,
    Int8,
    Sign,
    TopK,
    Truncate16,
    by_role,
    by_size,
    chain,
    error_feedback,
)
from farflung.reducers.gradiveq.slices import Layout, SliceCoder
from farflung.types import Codec, ParameterSpan, Seeds, TensorSpec

FULL_NUMEL, QUICK_NUMEL = 10_000_000, 100_000
SEED = 0
FULL_ROUNDS, QUICK_ROUNDS = 21, 3
ROWS = {
    "truncate16": "truncate16",
    "int8": "int8",
    "qsgd 4 bits, packed": "qsgd",
    "topk 1%": "topk",
    "gradiveq at ratio 8, after warm-up": "gradiveq",
}
"""The timed codec of each row; GradiVeQ is a reducer, whose windows of samples have passed."""
SLICE_NUMEL, COEFFICIENTS = 768, 96
"""GradiVeQ's K and d."""
# Every name in CODECS, with the options that its row or its purpose asks for.
TIMED: dict[str, Codec] = {
    **{name: make() for name, make in CODECS.items()},
    "by_role": by_role(Int8(), Int8()),
    "by_size": by_size(large=Int8()),
    "chain": chain(TopK(0.01), Int8()),
    "dgc": DGC(density=0.001, warmup_steps=0),
    "error_feedback": error_feedback(TopK(0.01)),
    "int8": Int8(),
    "int8, stochastic": Int8("stochastic"),
    "qsgd": QSGD(bits=4),
    "sign": Sign(512),
    "topk": TopK(0.01),
    "truncate16": Truncate16(),
}
Seconds = dict[str, list[float]]


def measure(quick: bool) -> Mapping[str, Measured]:
    """All rows: in each round everything has its turn, and a ratio is one of times of the same round."""
    torch.set_num_threads(1)
    rounds = QUICK_ROUNDS if quick else FULL_ROUNDS
    grad = torch.randn(QUICK_NUMEL if quick else FULL_NUMEL, generator=torch.Generator().manual_seed(SEED))
    works, sizes = _works(grad)
    with_fresh_pages = _timed(works, 1 if quick else 5)
    _keep_memory()
    seconds = _timed(works, rounds)
    common: dict[str, Any] = {
        "numel": len(grad),
        "seeds": [SEED],
        "rounds": rounds,
        "threads": 1,
        "clock": "processor time of the thread",
        "milliseconds": _medians(seconds),
        "milliseconds_with_fresh_pages": _medians(with_fresh_pages),
        "compression_ratio": sizes,
    }
    results = {}
    for row, name in ROWS.items():
        base, encode, decode = (seconds[key] for key in ("copy", f"{name}: encode", f"{name}: decode"))
        if name == "topk":
            ratios = [theirs / ours for theirs, ours in zip(seconds["abs().topk()"], encode, strict=True)]
        else:
            ratios = [copy / (one + two) for copy, one, two in zip(base, encode, decode, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        results[row] = Measured(middle, (low, high), common)
    return results


def _works(grad: torch.Tensor) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """What is timed, and dense bytes over payload bytes of each codec."""
    there, numel = torch.empty_like(grad), len(grad)
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: there.copy_(grad),
        "clone": grad.clone,
        "PyTorch's fp16 hook, cast and back": lambda: there.copy_(grad.to(torch.float16).div_(2)),
        "abs().topk()": lambda: grad.abs().topk(numel // 100),
    }
    sizes, side = {}, math.isqrt(numel // 10)
    spec = TensorSpec(tuple(grad.shape), grad.dtype, (ParameterSpan((side, side, 10), 0),))
    for name, codec in TIMED.items():
        before = codec.init(spec, Seeds(SEED, SEED))
        payload, state = codec.encode(before, grad, step=0, count=1)
        sizes[name] = round(grad.nbytes / payload.nbytes, 3)
        works[f"{name}: encode"] = lambda codec=codec, before=before: codec.encode(  # type: ignore[misc]
            before, grad, step=0, count=1
        )
        works[f"{name}: decode"] = lambda codec=codec, state=state, payload=payload: codec.decode(  # type: ignore[misc]
            state, payload, spec, step=0, count=1
        )
    coder = _coder(grad.clone())
    (whole,) = coder.split(1)
    encoded = coder.encode(whole)
    sizes["gradiveq"] = round(grad.nbytes / encoded.nbytes, 3)
    works["gradiveq: encode"] = lambda: coder.encode(whole)
    works["gradiveq: decode"] = lambda: coder.decode(encoded, whole, 1.0)
    return works, sizes


def _coder(tensor: torch.Tensor) -> SliceCoder:
    """One convolution of 16 filters, and as deep, whose slices share a basis; a few numbers over are dense."""
    numel = len(tensor)
    slices = numel // SLICE_NUMEL
    convolution = ParameterSpan((16, 16, slices * SLICE_NUMEL // 256, 1), 0)
    rest = ParameterSpan((numel - slices * SLICE_NUMEL,), slices * SLICE_NUMEL)
    layout = Layout.from_spec(TensorSpec((numel,), spans=(convolution, rest)), SLICE_NUMEL)
    generator = torch.Generator().manual_seed(SEED)
    basis, _ = torch.linalg.qr(torch.randn(SLICE_NUMEL, COEFFICIENTS, generator=generator))
    (name,) = layout.layers_by_name
    return SliceCoder(layout, {name: torch.zeros(slices, SLICE_NUMEL)}, {name: basis}, tensor, 1.0)


def _timed(works: Mapping[str, Callable[[], object]], rounds: int) -> Seconds:
    seconds: Seconds = {name: [] for name in works}
    for work in works.values():
        work()
    for round_ in range(rounds):
        # Taking turns in going first evens out a drift of the machine.
        for name in sorted(works, reverse=round_ % 2 == 1):
            begin = time.thread_time()
            works[name]()
            seconds[name].append(time.thread_time() - begin)
    return seconds


def _medians(seconds: Seconds) -> dict[str, float]:
    return {name: round(1e3 * statistics.median(times), 2) for name, times in seconds.items()}


def _keep_memory() -> None:
    """Has the C library keep what is freed, so that a fresh tensor is not made of fresh pages.

    It does so by itself for tensors of up to 32 MiB, which buckets are; one of ten million numbers is larger.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(-4, 0)  # M_MMAP_MAX: nothing is mapped for itself
        library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing is given back


BENCHMARK = Benchmark(
    Path(__file__).parent,
    [
        Group(
            tuple(ROWS),
            measure,
            "measured",
            2.0,
            (
                "preset pipe_sgd",
                "int8 on hops",
                "shared_scale_qsgd",
                "topk, residuals",
                "gradiveq, around a ring",
            ),
        )
    ],
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
