"""What reducers have alike: weighted means, rounds over a collective, names of costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from farflung.codecs import CODECS, ErrorFeedback
from farflung.codecs.routed import Routed
from farflung.comm import collective_named
from farflung.errors import Unsupported
from farflung.spec import Registry, text_of
from farflung.types import Channel, Codec, CodingCost, Contribution, Reduced, Reducer, TensorSpec

__all__ = [
    "Methods",
    "Named",
    "carried_spec",
    "check_rounds",
    "divisor",
    "limited",
    "mean_of",
    "method_of",
    "method_of_rounds",
    "methods_of",
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
    """What is summed beside the tensor: the weight, then the rider."""
    return torch.cat((torch.tensor([own.weight], dtype=torch.float64), own.rider))


def divisor(side: Tensor) -> float:
    """What to divide the summed numerators by: the sum of weights, or 1 where all weights are 0."""
    return float(side[0]) or 1.0


def mean_of(channel: Channel, total: Tensor, side: Tensor) -> Tensor:
    """The mean, in the memory of the summed numerators."""
    by = divisor(side)
    return total if by == 1.0 else _scaled(channel, total.div_, total, by)


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


_MADE: Registry[Codec] = Registry(
    "farflung.codecs",
    {"by_role": "ByRole", "by_size": "BySize", "chain": "Chain", "error_feedback": "ErrorFeedback"},
)
"""What the members of ``CODECS`` make that are functions."""

_USUAL = "direct"
"""The collective where none is named."""


class Named(NamedTuple):
    """A codec's names.

    Args:
      whole: as it is.
      inside: without error feedback, as segments are encoded.
    """

    whole: str
    inside: str


Methods: TypeAlias = Mapping[tuple[str, ...], Named]
"""Of a codec and of those that it sends parts by, by the names of the routes to them."""


def method_of(codec: Codec) -> str:
    """A codec as recipes write it; takes some microseconds.

    >>> from farflung.codecs import QSGD, error_feedback
    >>> method_of(error_feedback(QSGD(bits=4)))
    'error_feedback(codec=qsgd(bits=4))'
    """
    return text_of(codec, CODECS | _MADE)


def methods_of(codec: Codec) -> Methods:
    """Of a codec, and of all that parts may go by."""
    return dict(_walk(codec, ()))


def _walk(codec: Codec, route: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Named]]:
    inside = codec.codec if isinstance(codec, ErrorFeedback) else codec
    yield route, Named(method_of(codec), method_of(inside))
    if isinstance(codec, Routed):
        for name, inner in codec.codecs.items():
            yield from _walk(inner, (*route, name))


def method_of_rounds(name: str, reducer: Any) -> str:
    """A reducer of several rounds as recipes write it, whose collective is a setting of theirs.

    Args:
      name: in :data:`farflung.reducers.REDUCERS`.
      reducer: a frozen dataclass with a field ``collective``, and with the text in ``method`` once it is made.
    """
    if reducer.collective != _USUAL:
        return str(replace(reducer, collective=_USUAL).method)
    return text_of(reducer, {name: type(reducer)})
