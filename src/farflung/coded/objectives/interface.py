"""What the solvers need to know of an objective."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["Objective"]


class Objective(Protocol):
    r"""Half the squared weights, and a loss of each sample by its margins.

    .. math:: F(W, v) = \tfrac{1}{2} \|W\|^2 + \tfrac{\rho}{2} \|v\|^2
        + C \sum_i \ell(x_i W + s v,\, y_i)

    The intercept is :math:`s v`, with the scaling s and the share :math:`\rho` of the penalty, 0 or 1.
    """

    @property
    def C(self) -> float:  # noqa: N802
        """Weight of the losses, as in scikit-learn: the larger, the weaker is the regularisation."""
        ...

    @property
    def fit_intercept(self) -> bool:
        """Whether there is an intercept."""
        ...

    @property
    def intercept_scaling(self) -> float:
        """s, the value of the constant feature that the intercept is the weight of."""
        ...

    @property
    def intercept_penalty(self) -> float:
        r""":math:`\rho`: 1 where the intercept is penalised as a weight is, 0 where it is not."""
        ...

    @property
    def curvature(self) -> float | None:
        """The largest second derivative of a sample's loss by its margins; ``None`` where the loss has kinks."""
        ...

    def outputs(self, targets: Tensor) -> int:
        """Columns of the margins."""
        ...

    def loss(self, margins: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        """C times the sum of the losses, and its derivative by the margins; a subgradient where there is none.

        Args:
          margins: (samples, outputs), float64.
          targets: what each sample should have; see the objective.

        Returns:
          The sum, and the derivative of shape (samples, outputs).
        """
        ...
