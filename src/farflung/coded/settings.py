"""The settings of a coded run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from farflung.coded.blocks import MAX_PIECES
from farflung.coded.redundancy import MOST_SETS
from farflung.coded.roster import Kind
from farflung.errors import ConfigError

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is given; devices are told what they need of it.

    Args:
      partitions: training begins with so many of them, :math:`K`.
      devices: and with so many devices, :math:`N`, those that bring partitions among them.
      coded: coded blocks of each kind that are made at first; ``None``: one for each device without data, and at least
        ``redundancy``.
      code: how their rows are drawn, as text; see :data:`farflung.coded.codes.CODES`.
      seed: by which.
      redundancy: so many devices may vanish at any time, in the worst case: blocks are made that make up for lost ones.
      pieces: in how many every product is answered; 1: whole blocks.
      transposed: how the product with residuals is had: from coded ``"columns"``; or by ``"repair"``, without them:
        each device with a partition answers for it, and for one that does not the others multiply their blocks of rows
        by its residuals, a round for each.
      on_loss: what becomes of training when a partition is lost that nothing at hand makes up for: ``"wait"`` for it to
        come back, or ``"go_on"`` without it.
      max_condition: the largest condition number of a set of answers that is decoded.
      patience_s: how long training waits for whoever is missing, in seconds.
      least_s: no device counts as silent sooner, in seconds.

    Raises:
      ConfigError: a value out of its range; begins with its name.
    """

    partitions: int
    devices: int
    coded: int | None = None
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
                f"devices = {self.devices}: each of {self.partitions} partitions is brought by one"
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
        if self.coded is not None and self.coded < 0:
            raise ConfigError(f"coded = {self.coded}: must be 0 or more")
        if ":" in self.code:
            raise ConfigError(f"code = {self.code}: devices know the codes of the package alone")
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
        """Of blocks that are made."""
        return ("rows", "columns") if self.transposed == "columns" else ("rows",)

    @property
    def first_coded(self) -> int:
        """How many coded blocks of each kind are made at first."""
        if self.coded is not None:
            return self.coded
        return max(self.redundancy, self.devices - self.partitions)
