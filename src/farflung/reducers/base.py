"""Shared parts of reducers: weighted means, checks of collectives, names of costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from farflung.codecs import CODECS
from farflung.comm import find_collective
from farflung.errors import Unsupported
from farflung.spec import Registry, format_spec
from farflung.types import Channel, Codec, Contribution, Reducer, ReduceResult, TensorSpec

__all__ = [
    "build_result",
    "cast_mean",
    "check_rounds",
    "clamp_finite",
    "compute_mean",
    "compute_numerator",
    "format_codec",
    "format_reducer",
    "get_divisor",
    "get_numerator_spec",
    "list_summed_nbytes",
    "pack_metadata",
]


def get_numerator_spec(spec: TensorSpec, *, has_residual: bool = False) -> TensorSpec:
    """Returns the spec of a tensor's numerator: float32 for float16, and with a residual for bfloat16.

    Sums and residuals may exceed the range of float16. bfloat16 has the range of float32, but a residual in it loses
    what is less than 1/256 of it.
    """
    is_widened = spec.dtype == torch.float16 or (has_residual and spec.dtype == torch.bfloat16)
    return replace(spec, dtype=torch.float32) if is_widened else spec


def compute_numerator(channel: Channel, contribution: Contribution, *, has_residual: bool = False) -> Tensor:
    """Computes weight times tensor, in the memory of the tensor unless :func:`get_numerator_spec` widens it."""
    tensor = contribution.tensor
    spec = TensorSpec.from_tensor(tensor)
    if get_numerator_spec(spec, has_residual=has_residual) is not spec:
        channel.charge("copy", tensor.numel())
        return tensor.float().mul_(contribution.weight)
    if contribution.weight == 1.0:
        return tensor
    channel.charge("scale", tensor.numel())
    return tensor.mul_(contribution.weight)


def pack_metadata(contribution: Contribution) -> Tensor:
    """Packs the numbers that are summed beside the tensor: the weight, then the metadata."""
    return torch.cat((torch.tensor([contribution.weight], dtype=torch.float64), contribution.metadata))


def get_divisor(metadata: Tensor) -> float:
    """Returns the divisor of the summed numerators: the sum of weights, or 1 if all weights are 0."""
    return float(metadata[0]) or 1.0


def compute_mean(channel: Channel, total: Tensor, metadata: Tensor) -> Tensor:
    """Computes the mean, in the memory of the summed numerators."""
    weight_sum = get_divisor(metadata)
    if weight_sum == 1.0:
        return total
    channel.charge("scale", total.numel())
    return total.div_(weight_sum)


def cast_mean(channel: Channel, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts a mean to the dtype of the contribution.

    Finite numbers stay finite: those beyond the range of float16, which residuals may cause, are clamped.
    """
    if mean.dtype == dtype:
        return mean
    channel.charge("copy", mean.numel())
    return clamp_finite(mean, torch.finfo(dtype).max).to(dtype)


def clamp_finite(tensor: Tensor, limit: float) -> Tensor:
    """Clamps finite numbers to a range; infinities and NaN are preserved."""
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-limit, limit))


def build_result(
    channel: Channel, total: Tensor, metadata: Tensor, dtype: torch.dtype | None = None
) -> ReduceResult:
    """Builds the result of an exchange from the sums.

    Args:
      channel: Channel of the exchange.
      total: Summed numerators, overwritten by the mean.
      metadata: Sum of the packed metadata.
      dtype: Dtype of the contribution if it differs from that of the numerators.
    """
    mean = compute_mean(channel, total, metadata)
    return ReduceResult(
        mean if dtype is None else cast_mean(channel, mean, dtype), float(metadata[0]), metadata[1:]
    )


def list_summed_nbytes(reducer: Reducer, specs: Iterable[TensorSpec], size: int) -> list[int]:
    """Lists the bytes of each tensor summed in a step; see :meth:`farflung.types.Reducer.list_summed_nbytes`.

    Args:
      reducer: Reducer of the run.
      specs: Specs of the buckets of a step.
      size: Number of replicas.
    """
    return [nbytes for spec in specs for nbytes in reducer.list_summed_nbytes(spec, size)]


def check_rounds(name: str, collective: str) -> None:
    """Checks that ``collective`` can carry a round of one bucket during another round of a second bucket.

    Raises:
      UnknownName: There is no such collective.
      Unsupported: It matches sums by their order, which rounds of several buckets do not share between ranks.
    """
    if find_collective(collective).is_native:
        raise Unsupported(
            f"collective {collective!r} matches sums by their order, which the rounds of {name} do not have: "
            "use ring or direct"
        )


def format_codec(codec: Codec) -> str:
    """Returns a codec in recipe syntax; takes some microseconds.

    >>> from farflung.codecs import QSGD, error_feedback
    >>> format_codec(error_feedback(QSGD(bits=4)))
    'error_feedback(codec=qsgd(bits=4))'
    """
    return format_spec(codec, CODECS | _FACTORY_CLASSES)


def format_reducer(reducer: Any, **overrides: object) -> str:
    """Returns a reducer of several rounds in recipe syntax, without its collective.

    Args:
      reducer: Frozen dataclass in :data:`farflung.reducers.REDUCERS` with a field ``collective``.
      overrides: Values of other fields that replace the reducer's.
    """
    from farflung.reducers import REDUCERS

    return format_spec(replace(reducer, collective="direct", **overrides), REDUCERS)


_FACTORY_CLASSES: Registry[Codec] = Registry(
    "farflung.codecs",
    {"by_role": "ByRole", "by_size": "BySize", "chain": "Chain", "error_feedback": "ErrorFeedback"},
)
"""Classes of the codecs whose entries in ``CODECS`` are functions."""
