"""What reducers have alike: weighted means, rounds over a collective, names of costs."""

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
    """Returns the spec of the numerator of a tensor: float32 for float16."""
    return replace(spec, dtype=torch.float32) if spec.dtype == torch.float16 else spec


def numerator(channel: Channel, own: Contribution) -> Tensor:
    """Returns weight times tensor, in the tensor's own memory; of float16 in float32.

    Sums and residuals of numbers that float16 holds may be larger than it holds. bfloat16 has the range of float32.
    """
    tensor = own.tensor
    if tensor.dtype == torch.float16:
        return channel.compute(
            CodingCost("copy", "", tensor.numel()), lambda: tensor.float().mul_(own.weight)
        )
    return tensor if own.weight == 1.0 else _scaled(channel, tensor.mul_, tensor, own.weight)


def side_of(own: Contribution) -> Tensor:
    """What is summed beside the tensor: the weight, then the metadata."""
    return torch.cat((torch.tensor([own.weight], dtype=torch.float64), own.metadata))


def divisor(side: Tensor) -> float:
    """What to divide the summed numerators by: the sum of weights, or 1 where all weights are 0."""
    return float(side[0]) or 1.0


def mean_of(channel: Channel, total: Tensor, side: Tensor) -> Tensor:
    """The mean, in the memory of the summed numerators."""
    weight_sum = divisor(side)
    return total if weight_sum == 1.0 else _scaled(channel, total.div_, total, weight_sum)


def rounded(channel: Channel, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mean in the type of what was contributed.

    What is finite stays so: codecs with residuals send more at times than float16 holds, which is cut to its largest.
    """
    if mean.dtype == dtype:
        return mean
    return channel.compute(
        CodingCost("copy", "", mean.numel()), lambda: limited(mean, torch.finfo(dtype).max).to(dtype)
    )


def limited(tensor: Tensor, limit: float) -> Tensor:
    """Returns a tensor of which what is finite is cut to a range; infinities and NaN stay."""
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-limit, limit))


def reduced(channel: Channel, total: Tensor, side: Tensor, dtype: torch.dtype | None = None) -> Reduced:
    """Returns the mean, and what was summed beside the numerators.

    Args:
      channel: of the exchange.
      total: the summed numerators, in whose memory the mean is.
      side: what was summed beside them.
      dtype: of what was contributed, where that is not the type of the numerators.
    """
    mean = mean_of(channel, total, side)
    return Reduced(mean if dtype is None else rounded(channel, mean, dtype), float(side[0]), side[1:])


def _scaled(channel: Channel, scale: Callable[[float], Tensor], tensor: Tensor, by: float) -> Tensor:
    return channel.compute(CodingCost("scale", "", tensor.numel()), partial(scale, by))


def summed_nbytes(reducer: Reducer, specs: Iterable[TensorSpec], size: int) -> list[int]:
    """Returns the bytes of each tensor that a reducer sums in a step; see :meth:`farflung.types.Reducer.summed_nbytes`.

    Args:
      reducer: of the run.
      specs: of a step's buckets.
      size: number of replicas.
    """
    return [nbytes for spec in specs for nbytes in reducer.summed_nbytes(spec, size)]


def check_rounds(name: str, collective: str) -> None:
    """Whether ``collective`` can carry one round of a bucket while another bucket is in another round.

    Raises:
      UnknownName: no such collective.
      Unsupported: it matches sums by their order, which the rounds of several buckets do not share between ranks.
    """
    if collective_named(collective).by_backend:
        raise Unsupported(
            f"collective {collective!r} matches sums by their order, which the rounds of {name} do not have: "
            "use ring or direct"
        )


def method_of(codec: Codec) -> str:
    """Returns a codec as recipes write it; takes some microseconds.

    >>> from farflung.codecs import QSGD, error_feedback
    >>> method_of(error_feedback(QSGD(bits=4)))
    'error_feedback(codec=qsgd(bits=4))'
    """
    return text_of(codec, CODECS | _MADE)


def method_of_rounds(reducer: Any, **settled: object) -> str:
    """Returns a reducer of several rounds as recipes write it, but for its collective.

    Args:
      reducer: in :data:`farflung.reducers.REDUCERS`, a frozen dataclass with a field ``collective``.
      settled: values of other fields, whatever they are.
    """
    from farflung.reducers import REDUCERS

    return text_of(replace(reducer, collective="direct", **settled), REDUCERS)


_MADE: Registry[Codec] = Registry(
    "farflung.codecs",
    {"by_role": "ByRole", "by_size": "BySize", "chain": "Chain", "error_feedback": "ErrorFeedback"},
)
"""What the members of ``CODECS`` make that are functions."""
