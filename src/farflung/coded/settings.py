"""Settings of a coded run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from farflung.coded.blocks import MAX_PIECES
from farflung.coded.redundancy import MOST_SETS
from farflung.coded.registry import Kind
from farflung.errors import ConfigError

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the coordinator.

    Args:
      partitions: the number of partitions with which training begins, :math:`K`.
      devices: the number of devices with which it begins, :math:`N`, those that bring partitions among them.
      code: the coefficients of coded blocks, as text; see :data:`farflung.coded.CODES`.
      seed: of the code.
      redundancy: so many devices may vanish at any time, in the worst case: blocks are made that make up for lost ones.
      pieces: into which every product is cut; 1: whole blocks.
      transposed: the way to the product with residuals: from coded ``"columns"``; or by ``"repair"``, without them:
        each device with a partition answers for it, and for one that does not the others multiply their blocks of rows
        by its residuals, a round for each.
      on_loss: when a partition is lost that does not follow from the remaining blocks, ``"wait"`` for it to come back,
        or ``"go_on"`` without it.
      max_condition: the largest condition number of a set of answers that is decoded.
      patience_s: the time for which training waits for missing devices, in seconds.
      least_s: no device counts as silent sooner, in seconds.

    Raises:
      ConfigError: a value out of its range; begins with its name.
    """

    partitions: int
    devices: int
    code: str = "rlnc"
    seed: int = 0
    redundancy: int = 1
    pieces: int = 8
    transposed: Literal["columns", "repair"] = "columns"
    on_loss: Literal["wait", "go_on"] = "wait"
    max_condition: float = 1e6
    patience_s: float = 300.0
    least_s: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("partitions", 1), ("devices", 1), ("redundancy", 0), ("pieces", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be {least} or more")
        if self.devices < self.partitions:
            raise ConfigError(
                f"devices = {self.devices}: must be at least partitions = {self.partitions}, as each is brought by one"
            )
        most = min(self.redundancy, self.devices)
        sets = accumulate(math.comb(self.devices, losses) for losses in range(1, most + 1))
        if any(tried > MOST_SETS for tried in sets):
            raise ConfigError(
                f"redundancy = {self.redundancy}: with {self.devices} devices that is more than {MOST_SETS:,} sets of "
                "devices that may vanish, and no more are tried: lower it"
            )
        if self.pieces > MAX_PIECES:
            raise ConfigError(f"pieces = {self.pieces}: must be at most {MAX_PIECES}")
        if self.on_loss not in ("wait", "go_on"):
            raise ConfigError(f"on_loss = {self.on_loss!r}: must be 'wait' or 'go_on'")
        if self.transposed not in ("columns", "repair"):
            raise ConfigError(f"transposed = {self.transposed!r}: must be 'columns' or 'repair'")
        for name in ("max_condition", "patience_s", "least_s"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} = {value}: must be a number above 0")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of blocks that are made."""
        return ("rows", "columns") if self.transposed == "columns" else ("rows",)
