"""Linear models: losses and penalties, the problem that a solver solves, classes, and the trained model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from farflung.errors import CheckpointError, ConfigError, DataError
from farflung.files import wrap_read_errors
from farflung.options import check_flag, check_integer
from farflung.state_trees import load_tree, save_tree
from farflung.tasks import Pending, create_completed

__all__ = [
    "LOSSES",
    "Classes",
    "Hinge",
    "InMemoryProducts",
    "LinearModel",
    "Logistic",
    "Multinomial",
    "Objective",
    "Problem",
    "Products",
    "SquaredHinge",
]

_BLOCK_SIZE = 8192
"""Number of margins processed at a time, so that they stay in the second-level cache."""
_KINK_WIDTH = 0.01
"""Width of the quadratic piece in place of the hinge's kink."""
_NEWTON_STEPS = 50
"""Maximum number of Newton steps for the intercept; near the optimum three are enough."""
_STEP_LENGTHS = [0.5**halvings for halvings in range(40)]
"""Lengths of a Newton step; the first that reduces the derivative is used."""
_EPSILON, _FULL_STEP_TOLERANCE = 4 * torch.finfo(torch.float64).eps, 1e-10
"""Relative derivatives by the intercept: rounding error, and range in which only a full step is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(ABC):
    r"""Half the squared weights, and a loss of each sample by its margins.

    .. math:: F(W, v) = \tfrac{1}{2} \|W\|^2 + \tfrac{\rho}{2} \|v\|^2
        + C \sum_i \ell(x_i W + s v,\, y_i)

    The intercept is :math:`s v`, with the scaling s and the share :math:`\rho` of the penalty, 0 or 1. Unless
    an objective says otherwise, targets are -1.0 or 1.0, of shape (samples, outputs), and each output is a
    separate problem. With an infinite C the penalty is left out, and the losses have the weight 1.

    Args:
      C: Weight of the losses, above 0, as in scikit-learn: a larger weight means a weaker penalty.
      fit_intercept: True to fit an intercept.
      intercept_scaling: Constant feature s, above 0, whose weight is the intercept.

    Raises:
      ConfigError: a setting is out of its range.
    """

    intercept_penalty: ClassVar[float] = 1.0
    r"""Share :math:`\rho` of the penalty: 1 as in ``LinearSVC``, 0 as in ``LogisticRegression``."""
    curvature: ClassVar[float]
    """Largest second derivative of a sample's loss by its margins."""

    C: float = 1.0
    fit_intercept: bool = True
    intercept_scaling: float = 1.0

    def __post_init__(self) -> None:
        for option, is_allowed in (("C", math.inf == self.C), ("intercept_scaling", False)):
            value = getattr(self, option)
            is_number = not isinstance(value, bool) and isinstance(value, Real)
            if not is_allowed and not (is_number and 0 < value < math.inf):
                raise ConfigError(f"objective: {option} {value!r} must be a number above 0")
        check_flag("objective", "fit_intercept", self.fit_intercept)

    @property
    def loss_weight(self) -> float:
        """Weight of the losses: C, or 1 without a penalty."""
        return float(self.C) if self.has_penalty else 1.0

    @property
    def has_penalty(self) -> bool:
        """Returns True if the weights of features are penalised."""
        return math.inf > self.C

    def count_outputs(self, targets: Tensor) -> int:
        """Returns the number of margins of a sample."""
        return targets.shape[1]

    @abstractmethod
    def compute_loss(
        self, margins: Tensor, targets: Tensor, sample_weights: Tensor | None = None
    ) -> tuple[float, Tensor]:
        """Computes C times the sum of the losses, and its derivative by the margins.

        Args:
          margins: Margins, (samples, outputs), float64.
          targets: Targets of the samples.
          sample_weights: Factors of the losses, of the shape of the margins or (samples, 1); 1 by default.

        Returns:
          Sum, and derivative of shape (samples, outputs).
        """

    @abstractmethod
    def compute_shift_curvature(
        self, margins: Tensor, slopes: Tensor, targets: Tensor, sample_weights: Tensor | None
    ) -> Tensor:
        """Computes the second derivative of the losses by a shift of all margins, (outputs, outputs).

        Args:
          margins: Margins; see :meth:`compute_loss`.
          slopes: Derivative of the losses by the margins.
          targets: Targets of the samples.
          sample_weights: Factors of the losses; see :meth:`compute_loss`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Logistic(Objective):
    r"""Negative logarithm of the label's probability; the intercept is not penalised.

    .. math:: \ell(z, y) = \log(1 + e^{-y z}), \qquad \ell'(z, y) = \frac{-y}{1 + e^{y z}}
    """

    intercept_penalty = 0.0
    curvature = 0.25

    @override
    def compute_loss(
        self, margins: Tensor, targets: Tensor, sample_weights: Tensor | None = None
    ) -> tuple[float, Tensor]:
        slopes = torch.empty_like(margins, memory_format=torch.contiguous_format)
        total = torch.zeros((), dtype=margins.dtype)
        parts = [part.reshape(-1).split(_BLOCK_SIZE) for part in (margins, targets, slopes)]
        factors = _split(sample_weights, margins, _BLOCK_SIZE)
        for z, y, slope, factor in zip(*parts, factors, strict=True):
            agreement = z * y
            torch.mul(torch.sigmoid(-agreement), y, out=slope)
            if factor is None:
                total -= agreement.clamp(max=0).sum()
                total += agreement.abs_().neg_().exp_().log1p_().sum()
            else:
                slope.mul_(factor)
                total -= agreement.clamp(max=0) @ factor
                total += agreement.abs_().neg_().exp_().log1p_() @ factor
        return self.loss_weight * float(total), slopes.mul_(-self.loss_weight)

    @override
    def compute_shift_curvature(
        self, margins: Tensor, slopes: Tensor, targets: Tensor, sample_weights: Tensor | None
    ) -> Tensor:
        odds = slopes.abs().div_(self.loss_weight)  # weighted probability of the wrong label
        complement = 1 - odds if sample_weights is None else sample_weights - odds
        if sample_weights is not None:
            odds = torch.where(sample_weights > 0, odds / sample_weights, 0.0)
        return torch.diag(self.loss_weight * (odds * complement).sum(dim=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Multinomial(Objective):
    r"""Negative logarithm of the label's probability under a softmax; the intercept is not penalised.

    .. math:: \ell(z, y) = \log \sum_c e^{z_c} - z_y, \qquad
        \frac{\partial \ell}{\partial z_c} = \frac{e^{z_c}}{\sum_d e^{z_d}} - [c = y]

    Targets are classes from 0, int64, of shape (samples,). The curvature is that of two classes which share all
    probability (Böhning 1992).

    Args:
      classes: Number of classes, at least 2; each has a margin.
    """

    intercept_penalty = 0.0
    curvature = 0.5

    classes: int

    @override
    def __post_init__(self) -> None:
        Objective.__post_init__(self)
        check_integer("objective", "classes", self.classes, 2)

    @override
    def count_outputs(self, targets: Tensor) -> int:
        return self.classes

    @override
    def compute_loss(
        self, margins: Tensor, targets: Tensor, sample_weights: Tensor | None = None
    ) -> tuple[float, Tensor]:
        slopes = torch.empty_like(margins, memory_format=torch.contiguous_format)
        total = torch.zeros((), dtype=margins.dtype)
        rows = max(1, _BLOCK_SIZE // self.classes)
        parts = [part.split(rows) for part in (margins, targets.unsqueeze(1), slopes)]
        factors = [None] * len(parts[0]) if sample_weights is None else sample_weights.split(rows)
        for z, y, slope, factor in zip(*parts, factors, strict=True):
            max_margin = z.amax(dim=1, keepdim=True)
            torch.sub(z, max_margin, out=slope)
            losses = slope.gather(1, y).neg_()
            sums = slope.exp_().sum(dim=1, keepdim=True)
            if factor is None:
                total += losses.sum()
                total += sums.log().sum()
            else:
                total += (losses.add_(sums.log()).mul_(factor)).sum()
            slope.div_(sums).scatter_add_(1, y, slope.new_full((len(y), 1), -1.0))
            if factor is not None:
                slope.mul_(factor)
        return self.loss_weight * float(total), slopes.mul_(self.loss_weight)

    @override
    def compute_shift_curvature(
        self, margins: Tensor, slopes: Tensor, targets: Tensor, sample_weights: Tensor | None
    ) -> Tensor:
        odds = slopes / self.loss_weight
        if sample_weights is not None:
            odds = torch.where(sample_weights > 0, odds / sample_weights, 0.0)
        odds.scatter_add_(1, targets.unsqueeze(1), odds.new_ones(len(odds), 1))
        weighted = odds if sample_weights is None else odds * sample_weights
        curvature = self.loss_weight * (torch.diag(weighted.sum(dim=0)) - odds.T @ weighted)
        # A shift common to all outputs changes no loss. A curvature keeps it out of Newton's steps.
        return curvature + curvature.diagonal().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class SquaredHinge(Objective):
    r"""Square of the shortfall of the margin from 1.

    .. math:: \ell(z, y) = \max(0, 1 - y z)^2, \qquad \ell'(z, y) = -2 y \max(0, 1 - y z)
    """

    curvature = 2.0

    @override
    def compute_loss(
        self, margins: Tensor, targets: Tensor, sample_weights: Tensor | None = None
    ) -> tuple[float, Tensor]:
        slack = (margins * targets).neg_().add_(1).clamp_(min=0)
        weighted = slack if sample_weights is None else slack * sample_weights
        total = float(slack.view(-1) @ weighted.view(-1))
        return self.loss_weight * total, (weighted * targets).mul_(-2 * self.loss_weight)

    @override
    def compute_shift_curvature(
        self, margins: Tensor, slopes: Tensor, targets: Tensor, sample_weights: Tensor | None
    ) -> Tensor:
        weights = torch.ones_like(slopes) if sample_weights is None else sample_weights
        return torch.diag(2 * self.loss_weight * torch.where(slopes != 0, weights, 0.0).sum(dim=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hinge(Objective):
    r"""Shortfall of the margin from 1, with a parabola of width :math:`\delta` = 0.01 in place of the kink.

    .. math:: \ell(z, y) = \begin{cases} 1 - y z & y z \le 1 - \delta / 2 \\
        (1 - y z + \delta / 2)^2 / 2 \delta & |1 - y z| < \delta / 2 \\
        0 & y z \ge 1 + \delta / 2 \end{cases}

    It lies at most :math:`\delta / 8` above the hinge, and only for samples whose margin is that close to 1. So
    any solver of smooth losses minimises it. On a9a its minimiser's hinge loss is 1.2e-5 above the least,
    relative.

    References: Chapelle 2007, section 2.2.
    """

    curvature = 1 / _KINK_WIDTH

    @override
    def compute_loss(
        self, margins: Tensor, targets: Tensor, sample_weights: Tensor | None = None
    ) -> tuple[float, Tensor]:
        slack = (margins * targets).neg_().add_(1 + _KINK_WIDTH / 2).clamp_(min=0)
        bent = slack.clamp(max=_KINK_WIDTH)
        straight, square = slack - bent, bent * bent
        if sample_weights is not None:
            straight, square, bent = (part * sample_weights for part in (straight, square, bent))
        total = float(straight.sum()) + float(square.sum()) / (2 * _KINK_WIDTH)
        return self.loss_weight * total, bent.mul_(targets).mul_(-self.loss_weight / _KINK_WIDTH)

    @override
    def compute_shift_curvature(
        self, margins: Tensor, slopes: Tensor, targets: Tensor, sample_weights: Tensor | None
    ) -> Tensor:
        weights = torch.ones_like(slopes) if sample_weights is None else sample_weights
        is_bent = (1 - margins * targets).abs() < _KINK_WIDTH / 2
        return torch.diag(self.loss_weight / _KINK_WIDTH * torch.where(is_bent, weights, 0.0).sum(dim=0))


def _split(sample_weights: Tensor | None, margins: Tensor, size: int) -> Sequence[Tensor | None]:
    if sample_weights is None:
        return [None] * -(-margins.numel() // size)
    parts: Sequence[Tensor] = sample_weights.expand_as(margins).reshape(-1).split(size)
    return parts


LOSSES: dict[str, type[Objective]] = {"hinge": Hinge, "squared_hinge": SquaredHinge}
"""Losses of support vector machines, by name."""


# --- problems ---------------------------------------------------------------------------------------------------------


class Products(Protocol):
    """Products of a matrix :math:`X` of samples by features, in float64."""

    @property
    def samples(self) -> int:
        """Number of rows of :math:`X`, without padding."""

    @property
    def features(self) -> int:
        """Number of columns of :math:`X`."""

    def multiply(self, weights: Tensor) -> Awaitable[Tensor]:
        """Multiplies :math:`X W`, (features, outputs) to (samples, outputs)."""

    def multiply_transposed(self, residuals: Tensor) -> Awaitable[Tensor]:
        """Multiplies :math:`X^T R`, (samples, outputs) to (features, outputs)."""


class InMemoryProducts:
    """Products of a matrix in memory: the reference for those of devices.

    Args:
      matrix: Matrix, (samples, features), float64.

    Raises:
      ConfigError: the matrix has another number of dimensions.
    """

    def __init__(self, matrix: Tensor) -> None:
        if matrix.dim() != 2:
            raise ConfigError(f"products: expected a matrix, found {matrix.dim()} dimensions")
        self._matrix = matrix
        self.samples, self.features = matrix.shape

    def multiply(self, weights: Tensor) -> Pending[Tensor]:
        return create_completed(self._matrix @ weights)

    def multiply_transposed(self, residuals: Tensor) -> Pending[Tensor]:
        return create_completed(self._matrix.T @ residuals)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Minimisation of an objective over the weights; intercept and targets stay on the coordinator.

    Weights have shape (rows, outputs): a row for each feature, and a last one for any intercept.

    Args:
      products: Products of the samples' features.
      objective: Loss and its weight.
      targets: One entry for each sample, in the form of the objective.
      sample_weights: Factor of each sample's loss, (samples, 1) or (samples, outputs); 1 by default.
    """

    products: Products
    objective: Objective
    targets: Tensor
    sample_weights: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows = self.products.features + int(self.objective.fit_intercept)
        return rows, self.objective.count_outputs(self.targets)

    def split(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Splits weights into those of the features (features, outputs), and the intercepts (outputs,)."""
        features = self.products.features
        return weights[:features], self.objective.intercept_scaling * weights[features:].sum(dim=0)

    async def compute_margins(self, weights: Tensor) -> Tensor:
        """Computes the margins of all samples, (samples, outputs), with one product."""
        features, intercepts = self.split(weights)
        return (await self.products.multiply(features)) + intercepts

    async def multiply_transposed(self, residuals: Tensor) -> Tensor:
        """Multiplies residuals by the transposed matrix, with the intercept's constant feature: one product."""
        features = await self.products.multiply_transposed(residuals)
        if not self.objective.fit_intercept:
            return features
        constant = self.objective.intercept_scaling * residuals.sum(dim=0, keepdim=True)
        return torch.cat([features, constant])

    def compute_penalty(self, weights: Tensor) -> tuple[float, Tensor]:
        """Computes the penalty of weights, and its gradient."""
        if not self.objective.has_penalty:
            return 0.0, torch.zeros_like(weights)
        gradient = weights.clone()
        gradient[self.products.features :] *= self.objective.intercept_penalty
        return 0.5 * float((weights * gradient).sum()), gradient

    def evaluate(self, weights: Tensor, margins: Tensor) -> tuple[float, Tensor, Tensor]:
        """Computes the objective, its losses' derivative by the margins, and the penalty's gradient.

        The gradient of the objective is that of the penalty plus the derivative's :meth:`multiply_transposed`.
        """
        loss, slopes = self.objective.compute_loss(margins, self.targets, self.sample_weights)
        penalty, gradient = self.compute_penalty(weights)
        return loss + penalty, slopes, gradient

    async def compute_gradient(self, weights: Tensor, margins: Tensor) -> tuple[float, Tensor]:
        """Computes the objective and its gradient, with one product."""
        objective, slopes, gradient = self.evaluate(weights, margins)
        return objective, gradient + await self.multiply_transposed(slopes)

    async def init_weights(self, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns initial weights and their margins, with one product if weights are given.

        Args:
          weights: Weights to start from; zeros by default.
        """
        if weights is None:
            weights = torch.zeros(self.shape, dtype=torch.float64)
            return weights, weights.new_zeros(self.products.samples, self.shape[1])
        return weights, await self.compute_margins(weights)

    def optimize_intercept(self, weights: Tensor, margins: Tensor) -> tuple[Tensor, Tensor]:
        """Moves the intercept to its optimum by Newton's method, and the margins with it: no product."""
        if not self.objective.fit_intercept:
            return weights, margins
        scaling = self.objective.intercept_scaling
        excess, rounding, slopes = self._compute_intercept_slopes(weights, margins)
        for _ in range(_NEWTON_STEPS):
            if bool((excess.abs() <= _EPSILON * rounding).all()):
                break
            curvature = self.objective.compute_shift_curvature(
                margins, slopes, self.targets, self.sample_weights
            )
            if self.objective.has_penalty:
                curvature.diagonal().add_(self.objective.intercept_penalty / scaling**2)
            shift = -(torch.linalg.pinv(curvature, hermitian=True) @ excess)
            is_near = bool((excess.abs() <= _FULL_STEP_TOLERANCE * rounding).all())
            for length in _STEP_LENGTHS[:1] if is_near else _STEP_LENGTHS:
                new_weights = torch.cat([weights[:-1], weights[-1:] + length * shift / scaling])
                new_margins = margins + length * shift
                new_excess, rounding, slopes = self._compute_intercept_slopes(new_weights, new_margins)
                if float(new_excess.norm()) < float(excess.norm()):
                    break
            else:
                break
            weights, margins, excess = new_weights, new_margins, new_excess
        return weights, margins

    def _compute_intercept_slopes(self, weights: Tensor, margins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the derivative by the intercept, the sum of its terms' sizes, and the losses' derivative."""
        _, slopes, gradient = self.evaluate(weights, margins)
        share = gradient[-1] / self.objective.intercept_scaling
        return slopes.sum(dim=0) + share, slopes.abs().sum(dim=0) + share.abs(), slopes

    def compute_gap(self, objective: float, gradient: Tensor, gain: float) -> float:
        r"""Bounds the distance of the objective from its minimum, relative to it.

        .. math:: F(w) - F^* \le \tfrac{1}{2} \|\nabla F(w)\|^2

        as the penalty makes F strongly convex with modulus 1. The bound is also the duality gap at the dual
        point of the losses' derivatives. It uses no model of the curvature. It holds after
        :meth:`optimize_intercept`.

        Without a penalty there is no such bound. Then the gap is the gain that the solver expects of its next
        step, and at most the whole objective. It is relative to the weight of all samples.

        Args:
          objective: Objective at some weights.
          gradient: Gradient at these weights.
          gain: Gain that the solver expects of its next step.
        """
        if self.objective.has_penalty:
            bound, scale = 0.5 * float((gradient * gradient).sum()), objective
        else:
            bound, scale = min(gain, objective), float(self.products.samples)
            if self.sample_weights is not None:
                scale = float(self.sample_weights.sum()) / self.sample_weights.shape[1]
        return bound / scale if bound > 0 else 0.0


# --- classes and models -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of labels.

    Args:
      labels: Label of each class, ascending.
      positive: Label of one class against all others; ``None`` distinguishes all classes.
    """

    labels: tuple[float, ...]
    positive: float | None = None

    @staticmethod
    def from_labels(labels: Tensor, positive: float | None = None) -> Classes:
        """Finds the classes of labels.

        Raises:
          DataError: there is only one class.
        """
        values = tuple(labels.unique().tolist())
        if positive is not None and positive not in values:
            raise DataError(
                f"positive = {positive:g}: no sample has that label; there are {_format_labels(values)}"
            )
        if len(values) < 2:
            raise DataError(
                f"all samples have the label {_format_labels(values)}: there is nothing to tell apart; give the "
                f"devices "
                "samples of two classes or more"
            )
        return Classes(values, positive)

    @property
    def count(self) -> int:
        """Number of classes that are distinguished."""
        return len(self.labels) if self.positive is None else 2

    def encode(self, labels: Tensor) -> Tensor:
        """Encodes labels as class numbers, (samples,) int64; -1 for an unknown label."""
        if self.positive is not None:
            return (labels == self.positive).to(torch.int64)
        class_labels = torch.tensor(self.labels, dtype=torch.float64)
        places = torch.searchsorted(class_labels, labels.to(torch.float64)).clamp_(max=len(class_labels) - 1)
        return torch.where(class_labels[places] == labels, places, -1)

    def decode(self, codes: Tensor) -> Tensor:
        """Decodes class numbers to labels; with a positive class, to 1 for it and 0 for the others."""
        if self.positive is not None:
            return codes.to(torch.float64)
        return torch.tensor(self.labels, dtype=torch.float64)[codes]

    def explain_mismatch(self, labels: Tensor) -> str:
        """Describes the error in labels of later samples; returns an empty string if there is none."""
        unknown = labels[self.encode(labels) < 0].unique().tolist()
        if not unknown:
            return ""
        return f"it has the label {_format_labels(unknown)}, and training began with {_format_labels(self.labels)}"


def _format_labels(labels: tuple[float, ...] | list[float]) -> str:
    return ", ".join(f"{label:g}" for label in labels[:10]) + (", ..." if len(labels) > 10 else "")


@dataclass(frozen=True, slots=True, eq=False)
class LinearModel:
    """A trained linear classifier.

    Args:
      weights: Weights, (features, outputs), with one output for two classes, else one for each.
      intercepts: Intercepts, (outputs,).
      classes: Classes that it distinguishes.
    """

    weights: Tensor
    intercepts: Tensor
    classes: Classes

    def predict(self, samples: Tensor) -> Tensor:
        """Predicts the label of each sample.

        Args:
          samples: Samples, (samples, features), float64.

        Returns:
          (samples,), float64; with a positive class, 1 for it and 0 for the others.

        Raises:
          DataError: the samples have another number of features.
        """
        return self.classes.decode(self._predict_codes(samples))

    def _predict_codes(self, samples: Tensor) -> Tensor:
        if samples.shape[1] != len(self.weights):
            raise DataError(
                f"samples of {samples.shape[1]} features, for a model of {len(self.weights)}: give those that it was "
                "trained on"
            )
        margins = samples @ self.weights + self.intercepts
        return (margins[:, 0] > 0).long() if margins.shape[1] == 1 else margins.argmax(dim=1)

    def compute_accuracy(self, samples: Tensor, labels: Tensor) -> float:
        """Computes the share of samples whose class is predicted."""
        return float((self._predict_codes(samples) == self.classes.encode(labels)).double().mean())

    def save(self, path: Path) -> None:
        """Writes the model; see :func:`farflung.state_trees.save_tree`."""
        save_tree(
            path,
            {
                "weights": self.weights,
                "intercepts": self.intercepts,
                "classes": list(self.classes.labels),
                "positive": self.classes.positive,
            },
        )

    @staticmethod
    def load(path: Path) -> LinearModel:
        """Reads a model that :meth:`save` wrote.

        Raises:
          CheckpointError: the file is absent, damaged, or not a model.
        """
        with wrap_read_errors(path, "not a linear model", CheckpointError):
            tree = load_tree(path)
            classes = Classes(tuple(map(float, tree["classes"])), tree["positive"])
            return LinearModel(tree["weights"], tree["intercepts"], classes)
