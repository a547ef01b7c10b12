"""Registry of the collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from farflung.comm.collectives.all_gather import all_gather
from farflung.comm.collectives.auto import auto
from farflung.comm.collectives.collective import Collective
from farflung.comm.collectives.native import native
from farflung.comm.collectives.ring import ring
from farflung.comm.collectives.sharded import (
    all_own,
    direct,
    half_own,
    multi_parameter_server,
    one_owns,
    parameter_server,
)
from farflung.errors import UnknownName
from farflung.network.costs import gather_s, owners_s, ring_s
from farflung.types import AllReduce

__all__ = ["AUTO", "COLLECTIVES", "collective_named"]

AUTO = "auto"
"""Name that :func:`farflung.comm.resolve_collective` replaces by another."""


def _by_owners(run: AllReduce, owners: Callable[[int], int]) -> Collective:
    return Collective(
        run,
        partial(owners_s, owners),
        messages=lambda size: 2 * owners(size) * (size - 1),
        in_rank_order=True,
    )


COLLECTIVES: dict[str, Collective] = {
    "direct": _by_owners(direct, all_own),
    "all_gather": Collective(
        all_gather, gather_s, messages=lambda size: size * (size - 1), in_rank_order=True
    ),
    "ring": Collective(ring, ring_s, messages=lambda size: 2 * size * (size - 1)),
    "multi_parameter_server": _by_owners(multi_parameter_server, half_own),
    "parameter_server": _by_owners(parameter_server, one_owns),
    AUTO: Collective(auto),
    "native": Collective(native, by_backend=True),
}
"""Collectives by name. Add your own before the run is built."""


def collective_named(name: str) -> Collective:
    """Finds a collective by its name.

    Raises:
      UnknownName: there is no such collective.
    """
    if name not in COLLECTIVES:
        raise UnknownName("collective", name, COLLECTIVES)
    return COLLECTIVES[name]
