"""The schedule of DiLoCo: long blocks of local steps, and an outer optimizer on their mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farflung.options import whole_option
from farflung.schedules.fixed import Fixed
from farflung.schedules.options import outer_options, state_option
from farflung.types import Merge, Outer, Part, State, Transfer
from farflung.types.schedule import OptimizerState

__all__ = ["DiLoCo"]


@dataclass(frozen=True, slots=True)
class DiLoCo(Fixed):
    r"""Each replica makes ``sync_every`` steps of its own; an outer optimizer steps on the mean of the ways they went.

    .. math::
        \Delta = \frac{1}{n} \sum_j (w_j - a), \qquad v \leftarrow \mu v + \Delta, \qquad
        a \leftarrow a + \eta (\Delta + \mu v), \qquad w_j \leftarrow a

    The anchor a is where all set out from. The outer optimizer is SGD with Nesterov's momentum; with ``outer_rate`` 1
    and ``outer_momentum`` 0 this is :class:`farflung.schedules.LocalSGD`, to the bit. The mean is waited for:
    :class:`farflung.schedules.StreamingDiLoCo` waits less.

    Anchor and outer momentum are alike on all replicas, and are kept once in a checkpoint. They take two copies of the
    parameters. The optimizer of the run is the inner one, by the paper AdamW.

    Between exchanges evaluation sees the mean of the replicas' parameters, and a run ends with it; so let the number of
    steps be a multiple of ``sync_every``.

    Args:
      sync_every: H, steps between two exchanges.
      outer_rate: :math:`\eta`.
      outer_momentum: :math:`\mu`.
      nesterov: whether momentum is Nesterov's; without it, :math:`a \leftarrow a + \eta v`.
      optimizer_state: of the inner optimizer; see :class:`farflung.schedules.LocalSGD`.

    Raises:
      ConfigError: an option out of its range.

    References: Douillard et al. 2023 (DiLoCo), Alg. 1, with the settings of its experiments as defaults: AdamW with
    learning rate 4e-4, warm-up and cosine inside, and inner state kept.
    """

    sync_every: int = 500
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    optimizer_state: OptimizerState = "kept"

    def __post_init__(self) -> None:
        whole_option("diloco", "sync_every", self.sync_every, 1)
        outer_options("diloco", self.outer_rate, self.outer_momentum, self.nesterov)
        state_option("diloco", self.optimizer_state)

    @property
    def merges(self) -> tuple[Merge, ...]:
        """An outer step."""
        return (Outer(self.outer_rate, self.outer_momentum, self.nesterov, state=self.optimizer_state),)

    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        """At the end of a block, one transfer for each bucket."""
        del state
        if (step + 1) % self.sync_every:
            return []
        return [Transfer(part, step, *self.merges) for part in parts]
