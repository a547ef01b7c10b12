"""What reducers have alike: weighted means, rounds over a collective, names of costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from farflung.types import Channel, Codec, CodingCost, Contribution, Reduced

__all__ = [
    "Methods",
    "Named",
    "check_rounds",
    "divisor",
    "mean_of",
    "method_of",
    "method_of_rounds",
    "methods_of",
    "numerator",
    "reduced",
    "side_of",
]


def numerator(channel: Channel, own: Contribution) -> Tensor:
    """Weight times tensor, in the tensor's own memory."""
    return own.tensor if own.weight == 1.0 else _scaled(channel, own.tensor.mul_, own.tensor, own.weight)


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


def reduced(channel: Channel, total: Tensor, side: Tensor) -> Reduced:
    """The mean, in the memory of the summed numerators, and what was summed beside them."""
    return Reduced(mean_of(channel, total, side), float(side[0]), side[1:])


def _scaled(channel: Channel, scale: Callable[[float], Tensor], tensor: Tensor, by: float) -> Tensor:
    return channel.compute(CodingCost("scale", "", tensor.numel()), partial(scale, by))


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
