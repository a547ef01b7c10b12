"""Deep gradient compression: very sparse gradients with momentum correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import SparseCodec
from farflung.codecs.routed import gather_runs
from farflung.codecs.selection import count_kept, find_largest
from farflung.options import check_coefficient, check_fraction, check_integer
from farflung.types import CodecState, ParameterSpan, Payload, Seeds, TensorSpec

__all__ = ["DGC"]

WARMUP_STAGES = 5


@dataclass(frozen=True, slots=True)
class DGC(SparseCodec):
    r"""Codec that accumulates momentum on each replica and sends its largest accumulated entries.

    .. math::
        u_t = m u_{t-1} + g_t, \quad v_t = v_{t-1} + u_t, \quad
        M_t = \mathrm{top}_\rho(|v_t|), \quad \text{send } v_t \odot M_t,

    Entries that are sent are cleared in both, u and v. With ``nesterov`` :math:`u_t = m (u_{t-1} + g_t)` and
    :math:`v_t = v_{t-1} + u_t + g_t`. **The momentum of the optimizer must be 0**, since this codec includes it.

    Each matrix or convolution weight has its own threshold, a tensor without :attr:`farflung.types.TensorSpec.spans` a
    single one. Vectors and scalars are sent as :math:`u_t`. Non-finite entries are sent first and cleared.

    Args:
      density: Fraction of entries sent after the warm-up, in (0, 1]; 1 - sparsity in the paper.
      momentum: m.
      nesterov: If True, use Nesterov momentum.
      warmup_steps: Steps over which the density falls, as :math:`\rho^{(e + 1) / 6}` in five equal stages
        :math:`e = 0 \dots 4`. The authors count five epochs; a codec knows only steps, so 500 is our choice.

    Raises:
      ConfigError: An option is out of range.

    References: Lin et al. 2018, Alg. 1 and 2, with the warm-up of the authors' code, and exact thresholds.
    """

    density: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    warmup_steps: int = 500

    is_stateless: ClassVar[bool] = False
    keeps_residual: ClassVar[bool] = True
    """See :attr:`farflung.codecs.ErrorFeedback.keeps_residual`."""

    def __post_init__(self) -> None:
        check_fraction("dgc", "density", self.density)
        check_coefficient("dgc", "momentum", self.momentum)
        check_integer("dgc", "warmup_steps", self.warmup_steps, 0)

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns a state with zero momentum.

        Raises:
          Unsupported: The tensor is not floating, or has more entries than int32 indices allow.
        """
        SparseCodec.init(self, spec, seeds)
        parts = spec.spans or (ParameterSpan((spec.numel, 1), 0),)
        zeros = torch.zeros(spec.numel, dtype=spec.dtype)
        return CodecState(
            {
                "sparse": [[part.start, part.numel] for part in parts if len(part.shape) > 1],
                "dense": [[part.start, part.numel] for part in parts if len(part.shape) <= 1],
            },
            {"velocity": zeros, "accumulated": zeros.clone()},
        )

    def compute_density(self, step: int) -> float:
        """Returns the density of a step."""
        if step >= self.warmup_steps:
            return self.density
        return float(self.density ** ((step * WARMUP_STAGES // self.warmup_steps + 1) / (WARMUP_STAGES + 1)))

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Returns values and indices of the sparse parts, and all accumulated values of the dense parts."""
        flat = grad.reshape(-1)
        velocity, accumulated = (state.local[name].to(flat.device) for name in ("velocity", "accumulated"))
        if self.nesterov:
            velocity = (velocity + flat).mul_(self.momentum)
            accumulated = (accumulated + velocity).add_(flat)
        else:
            velocity = (velocity * self.momentum).add_(flat)
            accumulated = accumulated + velocity
        density = self.compute_density(step)
        indices = torch.cat(
            [
                find_largest(accumulated[start : start + numel], count_kept(numel, density)).add_(start)
                for start, numel in state.shared["sparse"]
            ]
            or [torch.empty(0, dtype=torch.int64, device=flat.device)]
        )
        dense = gather_runs(accumulated, state.shared["dense"]).clone() if state.shared["dense"] else flat[:0]
        payload = Payload((accumulated[indices], indices.to(torch.int32), dense))
        payload = self.densify_large(state, payload, flat)
        velocity.index_fill_(0, indices, 0.0)
        accumulated.index_fill_(0, indices, 0.0)
        for start, numel in state.shared["dense"]:
            accumulated[start : start + numel] = 0.0
            velocity[start : start + numel].nan_to_num_(0.0, 0.0, 0.0)
        return payload, CodecState(state.shared, {"velocity": velocity, "accumulated": accumulated})

    @override
    def add_entries(self, state: CodecState, tensors: Sequence[Tensor], total: Tensor, alpha: float) -> None:
        """Adds sparse entries, and runs of small parameters that are sent dense, to ``total``."""
        SparseCodec.add_entries(self, state, tensors[:2], total, alpha)
        runs = state.shared["dense"]
        for (start, numel), part in zip(runs, tensors[2].split([numel for _, numel in runs]), strict=True):
            total.view(-1)[start : start + numel].add_(part, alpha=alpha)
