"""Registry of the collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from farflung.comm.collectives.all_gather import all_reduce_by_all_gather
from farflung.comm.collectives.auto import auto
from farflung.comm.collectives.collective import Collective
from farflung.comm.collectives.native import native
from farflung.comm.collectives.ring import ring
from farflung.comm.collectives.sharded import (
    count_all_owners,
    count_half_owners,
    count_server_owners,
    direct,
    multi_parameter_server,
    parameter_server,
)
from farflung.errors import UnknownName
from farflung.network.costs import predict_all_gather_s, predict_ring_s, predict_sharded_s
from farflung.types import AllReduce

__all__ = ["AUTO", "COLLECTIVES", "find_collective"]

AUTO = "auto"
"""Name that :func:`farflung.comm.resolve_collective` replaces by another."""


def _build_sharded(run: AllReduce, count_owners: Callable[[int], int]) -> Collective:
    return Collective(
        run,
        partial(predict_sharded_s, count_owners),
        count_messages=lambda size: 2 * count_owners(size) * (size - 1),
        is_rank_ordered=True,
    )


COLLECTIVES: dict[str, Collective] = {
    "direct": _build_sharded(direct, count_all_owners),
    "all_gather": Collective(
        all_reduce_by_all_gather,
        predict_all_gather_s,
        count_messages=lambda size: size * (size - 1),
        is_rank_ordered=True,
    ),
    "ring": Collective(ring, predict_ring_s, count_messages=lambda size: 2 * size * (size - 1)),
    "multi_parameter_server": _build_sharded(multi_parameter_server, count_half_owners),
    "parameter_server": _build_sharded(parameter_server, count_server_owners),
    AUTO: Collective(partial(auto, {})),
    "native": Collective(native, is_native=True),
}
"""Collectives by name. Add your own before the run is built."""


def find_collective(name: str) -> Collective:
    """Finds a collective by its name.

    Raises:
      UnknownName: there is no such collective.
    """
    if name not in COLLECTIVES:
        raise UnknownName("collective", name, COLLECTIVES)
    return COLLECTIVES[name]
