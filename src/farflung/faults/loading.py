"""Fault plans from TOML.

.. code-block:: toml

    [[fault]]
    kind = "slow"    # crash, hang, leave, join, slow, cut, restore, corrupt
    rank = 1
    at_s = 30.0      # seconds on the run's clock
    factor = 4       # of slow alone

    [[fault]]
    kind = "cut"
    rank = 2
    at_step = 100    # once rank 2 has done so many steps
    peer = 0         # of cut and restore alone; everybody when left out
"""

from __future__ import annotations

from pathlib import Path

from farflung.errors import ConfigError
from farflung.faults.plan import Fault, FaultPlan
from farflung.network.tables import Table, open_toml

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
    at_s = table.number("at_s") if "at_s" in table else None
    factor = table.number("factor") if "factor" in table else None
    return table.make(lambda: Fault(kind, rank, at_step, at_s, factor, peer))
