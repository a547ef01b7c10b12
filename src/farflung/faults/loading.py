"""Fault plans from TOML.

.. code-block:: toml

    [[fault]]
    kind = "slow"    # crash, hang, leave, join, slow, cut, throttle, lose, restore
    rank = 1
    at_s = 30.0      # seconds since the first step
    factor = 4       # of slow alone
    for_s = 10.0     # of cut, hang, lose, slow and throttle: then it is undone by itself; lasts when left out

    [[fault]]
    kind = "cut"
    rank = 2
    at_step = 100    # once rank 2 has done so many steps
    peer = 0         # of cut, throttle, lose and restore alone; everybody when left out

    [[fault]]
    kind = "throttle"
    rank = 2
    at_s = 60.0
    bandwidth_bps = 1e6

    [[fault]]
    kind = "lose"
    rank = 2
    at_s = 90.0
    loss = 0.02      # share of packets
"""

from __future__ import annotations

from pathlib import Path

from farflung.errors import ConfigError
from farflung.faults.plan import Fault, FaultPlan
from farflung.tables import Table, open_toml

__all__ = ["load_faults"]


def load_faults(path: Path) -> FaultPlan:
    """Reads a plan; the format is at the top of this module.

    Raises:
      ConfigError: the file is absent or no TOML, or something in it is wrong; one line with file and key.
    """
    top = open_toml(path)
    faults = tuple(_fault(table) for table in top.tables("fault"))
    return top.make(lambda: FaultPlan(faults))


def _fault(table: Table) -> Fault:
    kind, rank = table.text("kind"), table.whole("rank")
    if rank is None:
        raise ConfigError(f"{table.where}: rank is missing")
    at_step, peer = table.whole("at_step"), table.whole("peer")
    at_s, factor, bandwidth_bps, loss, for_s = (
        table.number(key) if key in table else None
        for key in ("at_s", "factor", "bandwidth_bps", "loss", "for_s")
    )
    return table.make(lambda: Fault(kind, rank, at_step, at_s, factor, peer, bandwidth_bps, loss, for_s))
