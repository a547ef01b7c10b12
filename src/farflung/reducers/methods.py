"""What the arithmetic of codecs and reducers is called by, so that it can be charged for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from farflung.codecs import CODECS, BySize, Chain, ErrorFeedback
from farflung.codecs.by_role import ByRole
from farflung.codecs.routed import Routed
from farflung.spec import text_of
from farflung.types import Codec

__all__ = ["Methods", "Named", "method_of", "method_of_rounds", "methods_of"]

_MADE = {"by_role": ByRole, "by_size": BySize, "chain": Chain, "error_feedback": ErrorFeedback}
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
    return text_of(codec, {**CODECS, **_MADE})


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
