"""All-reduce algorithms as coroutines over send and receive, used by both runtimes."""

from collections.abc import Awaitable
from typing import Protocol

from torch import Tensor

from farflung.comm.collectives.all_gather import all_gather
from farflung.comm.collectives.auto import auto
from farflung.comm.collectives.coding import Coding
from farflung.comm.collectives.native import native
from farflung.comm.collectives.ring import ring
from farflung.comm.collectives.sharded import direct, multi_parameter_server, parameter_server
from farflung.types import Channel

__all__ = [
    "COLLECTIVES",
    "Coding",
    "Collective",
    "all_gather",
    "auto",
    "direct",
    "multi_parameter_server",
    "native",
    "parameter_server",
    "ring",
]


class Collective(Protocol):
    """Sums a flat tensor, which it may overwrite, and a side vector over all ranks."""

    def __call__(
        self, channel: Channel, tensor: Tensor, side: Tensor, *, coding: Coding | None = None
    ) -> Awaitable[tuple[Tensor, Tensor]]: ...


COLLECTIVES: dict[str, Collective] = {
    "ring": ring,
    "direct": direct,
    "all_gather": all_gather,
    "parameter_server": parameter_server,
    "multi_parameter_server": multi_parameter_server,
    "auto": auto,
    "native": native,
}
"""All of them by name."""
