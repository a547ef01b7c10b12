"""Shared parts of reducers: weighted means, checks of collectives, names of costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farflung.codecs import CODECS
from farflung.comm import collective_named
from farflung.errors import Unsupported
from farflung.spec import Registry, text_of
from farflung.types import Channel, Codec, CodingCost, Contribution, Reduced, Reducer, TensorSpec

__all__ = [
    "carried_spec",
    "check_rounds",
    "divisor",
    "limited",
    "mean_of",
    "method_of",
    "method_of_rounds",
    "numerator",
    "reduced",
    "rounded",
    "side_of",
    "summed_nbytes",
]


def carried_spec(spec: TensorSpec) -> TensorSpec:
    """Returns the spec of a tensor's numerator: float32 for float16."""
    return replace(spec, dtype=torch.float32) if spec.dtype == torch.float16 else spec


def numerator(channel: Channel, own: Contribution) -> Tensor:
    """Computes weight times tensor, in the memory of the tensor; float16 becomes float32.

    Sums and residuals may exceed the range of float16. bfloat16 has the range of float32.
    """
    tensor = own.tensor
    if tensor.dtype == torch.float16:
        return channel.compute(
            CodingCost("copy", "", tensor.numel()), lambda: tensor.float().mul_(own.weight)
        )
    return tensor if own.weight == 1.0 else _scaled(channel, tensor.mul_, tensor, own.weight)


def side_of(own: Contribution) -> Tensor:
    """Packs the numbers that are summed beside the tensor: the weight, then the metadata."""
    return torch.cat((torch.tensor([own.weight], dtype=torch.float64), own.metadata))


def divisor(side: Tensor) -> float:
    """Returns the divisor of the summed numerators: the sum of weights, or 1 if all weights are 0."""
    return float(side[0]) or 1.0


def mean_of(channel: Channel, total: Tensor, side: Tensor) -> Tensor:
    """Computes the mean, in the memory of the summed numerators."""
    weight_sum = divisor(side)
    return total if weight_sum == 1.0 else _scaled(channel, total.div_, total, weight_sum)


def rounded(channel: Channel, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts a mean to the dtype of the contribution.

    Finite numbers stay finite: those beyond the range of float16, which residuals may cause, are clamped.
    """
    if mean.dtype == dtype:
        return mean
    return channel.compute(
        CodingCost("copy", "", mean.numel()), lambda: limited(mean, torch.finfo(dtype).max).to(dtype)
    )


def limited(tensor: Tensor, limit: float) -> Tensor:
    """Clamps finite numbers to a range; infinities and NaN are preserved."""
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-limit, limit))


def reduced(channel: Channel, total: Tensor, side: Tensor, dtype: torch.dtype | None = None) -> Reduced:
    """Builds the result of an exchange from the sums.

    Args:
      channel: Channel of the exchange.
      total: Summed numerators, overwritten by the mean.
      metadata: Sum of the packed metadata.
      dtype: Dtype of the contribution if it differs from that of the numerators.
    """
    mean = mean_of(channel, total, side)
    return Reduced(mean if dtype is None else rounded(channel, mean, dtype), float(side[0]), side[1:])


def _scaled(channel: Channel, scale: Callable[[float], Tensor], tensor: Tensor, by: float) -> Tensor:
    return channel.compute(CodingCost("scale", "", tensor.numel()), partial(scale, by))


def summed_nbytes(reducer: Reducer, specs: Iterable[TensorSpec], size: int) -> list[int]:
    """Lists the bytes of each tensor summed in a step; see :meth:`farflung.types.Reducer.list_summed_nbytes`.

    Args:
      reducer: Reducer of the run.
      specs: Specs of the buckets of a step.
      size: Number of replicas.
    """
    return [nbytes for spec in specs for nbytes in reducer.summed_nbytes(spec, size)]


def check_rounds(name: str, collective: str) -> None:
    """Checks that ``collective`` can carry a round of one bucket during another round of a second bucket.

    Raises:
      UnknownName: There is no such collective.
      Unsupported: It matches sums by their order, which rounds of several buckets do not share between ranks.
    """
    if collective_named(collective).by_backend:
        raise Unsupported(
            f"collective {collective!r} matches sums by their order, which the rounds of {name} do not have: "
            "use ring or direct"
        )


def method_of(codec: Codec) -> str:
    """Returns a codec in recipe syntax; takes some microseconds.

    >>> from farflung.codecs import QSGD, error_feedback
    >>> get_codec_method(error_feedback(QSGD(bits=4)))
    'error_feedback(codec=qsgd(bits=4))'
    """
    return text_of(codec, CODECS | _MADE)


def method_of_rounds(reducer: Any, **settled: object) -> str:
    """Returns a reducer of several rounds in recipe syntax, without its collective.

    Args:
      reducer: Frozen dataclass in :data:`farflung.reducers.REDUCERS` with a field ``collective``.
      overrides: Values of other fields that replace the reducer's.
    """
    from farflung.reducers import REDUCERS

    return text_of(replace(reducer, collective="direct", **settled), REDUCERS)


_MADE: Registry[Codec] = Registry(
    "farflung.codecs",
    {"by_role": "ByRole", "by_size": "BySize", "chain": "Chain", "error_feedback": "ErrorFeedback"},
)
"""Classes of the codecs whose entries in ``CODECS`` are functions."""
