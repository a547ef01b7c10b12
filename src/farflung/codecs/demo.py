"""DeMo: decoupled momentum, of which the fast components are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import starmap
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import TransformCodec, check_floating
from farflung.codecs.bits import pack_indices, unpack_indices
from farflung.errors import ProtocolError
from farflung.options import check_coefficient, check_integer
from farflung.types import CodecState, ParameterSpan, Payload, Seeds, TensorSpec

__all__ = ["DeMo"]


@dataclass(frozen=True, slots=True)
class DeMo(TransformCodec):
    r"""Codec that adds gradients to a momentum, sends its largest cosine components and subtracts them.

    .. math::
        m \leftarrow \beta m + g, \qquad \text{send } q = \mathrm{DCT}^{-1}(\mathrm{top}_k(\mathrm{DCT}(m))), \qquad
        m \leftarrow m - q

    A matrix is cut into blocks of at most ``chunk`` by ``chunk`` numbers, as large as divides it evenly; a vector into
    runs of at most ``chunk``. A tensor of more dimensions is a matrix of its first and all others. The transform is
    orthonormal. If the payload is no smaller than the dense tensor, all components are sent, with zeros for the dropped
    ones. Non-finite numbers make their block non-finite in the decoded tensor, and are then cleared.

    The momentum belongs to this codec, so set the optimizer's to 0. The paper steps on the sign of the decoded
    gradient, as ``--optimizer sign_sgd`` and :class:`farflung.optimizers.SignSGD` do.

    Args:
      decay: :math:`\beta`, at least 0 and below 1.
      chunk: Side of a block, at most 256.
      keep: k, number of components sent of each block.

    Raises:
      ConfigError: An option is out of range.

    References: Peng, Quesnelle & Kingma 2024 (DeMo), Alg. 1, with the defaults of their code. Their momentum includes
    the learning rate. Here the mean of a component is over all replicas, also those that do not send it.
    """

    decay: float = 0.999
    chunk: int = 64
    keep: int = 32

    is_stateless: ClassVar[bool] = False
    keeps_residual: ClassVar[bool] = True
    """See :attr:`farflung.codecs.ErrorFeedback.keeps_residual`."""
    compresses_matrices: ClassVar[bool] = True
    """See :attr:`farflung.types.Reducer.compresses_matrices`."""

    def __post_init__(self) -> None:
        check_coefficient("demo", "decay", self.decay)
        check_integer("demo", "chunk", self.chunk, 1, 256)
        check_integer("demo", "keep", self.keep, 1)

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns a zero momentum, by components, and the block grid of each parameter.

        Raises:
          Unsupported: The tensor is not floating.
        """
        check_floating("demo", spec)
        parts = spec.spans or (ParameterSpan((spec.numel,), 0),)
        blocks = [self._plan_grid(part) for part in parts if part.numel]
        return CodecState({"blocks": blocks}, {"components": torch.zeros(spec.shape, dtype=spec.dtype)})

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Returns the largest components of all blocks with packed indices, or dense if that is no larger."""
        momentum = state.local["components"].to(grad.device).mul(self.decay)
        values, packed_indices = [grad.new_empty(0)], [torch.empty(0, dtype=torch.int64, device=grad.device)]
        for grid in starmap(_BlockGrid, state.shared["blocks"]):
            components = grid.view_components(momentum.view(-1)).add_(grid.transform(grad.view(-1)))
            largest = components.abs().nan_to_num(nan=math.inf, posinf=math.inf)
            indices = largest.topk(min(self.keep, grid.size), dim=1, sorted=False).indices.sort(dim=1).values
            values.append(components.gather(1, indices).view(-1))
            packed_indices.append(indices.view(-1))
            components.scatter_(1, indices, 0.0)
        payload = Payload((torch.cat(values), *pack_indices(torch.cat(packed_indices), self.chunk**2)))
        payload = self.densify_large(state, payload, grad.view(-1))
        return payload, CodecState(state.shared, {"components": momentum.nan_to_num_(0.0, 0.0, 0.0)})

    @override
    def add_entries(self, state: CodecState, tensors: Sequence[Tensor], total: Tensor, alpha: float) -> None:
        values, low, high = tensors
        all_indices = unpack_indices(low, high, self.chunk**2, len(values))
        start = 0
        for grid in starmap(_BlockGrid, state.shared["blocks"]):
            keep = min(self.keep, grid.size)
            stop = start + grid.num_blocks * keep
            indices = all_indices[start:stop].view(grid.num_blocks, keep)
            if indices.device.type == "cpu" and int(indices.max()) >= grid.size:
                raise ProtocolError(
                    f"component {int(indices.max())} of {grid.size}: do all ranks run the same model and recipe?"
                )
            components = grid.view_components(total.view(-1))
            share = values[start:stop].view(grid.num_blocks, keep).to(total.dtype)
            components.scatter_add_(1, indices, share * alpha)
            start = stop

    @override
    def invert(self, state: CodecState, components: Tensor) -> Tensor:
        restored = torch.zeros_like(components)
        for grid in starmap(_BlockGrid, state.shared["blocks"]):
            grid.invert(components.view(-1), restored.view(-1))
        return restored

    def _plan_grid(self, part: ParameterSpan) -> list[int]:
        """Returns a parameter's start, rows, columns, and the height and width of its blocks."""
        rows = part.shape[0] if len(part.shape) > 1 else 1
        columns = part.numel // rows
        return [
            part.start,
            rows,
            columns,
            _find_divisor(rows, self.chunk),
            _find_divisor(columns, self.chunk),
        ]


class _BlockGrid(NamedTuple):
    """Grid of the blocks of one parameter in a flat tensor."""

    start: int
    rows: int
    columns: int
    height: int
    width: int

    @property
    def size(self) -> int:
        return self.height * self.width

    @property
    def num_blocks(self) -> int:
        return self.rows * self.columns // self.size

    def view_components(self, flat: Tensor) -> Tensor:
        """Returns a view of the components of each block, shape ``(num_blocks, size)``."""
        return self._get_part(flat).view(self.num_blocks, self.size)

    def transform(self, flat: Tensor) -> Tensor:
        """Returns the components of each block, shape ``(num_blocks, size)``."""
        down, across = self._get_transforms(flat)
        return (down @ self._view_blocks(flat) @ across.T).reshape(self.num_blocks, self.size)

    def invert(self, components: Tensor, flat: Tensor) -> None:
        """Writes the inverse transform of components to ``flat``."""
        down, across = self._get_transforms(flat)
        blocks = self._view_blocks(flat)
        blocks.copy_(down.T @ self._get_part(components).view(blocks.shape) @ across)

    def _get_part(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.rows * self.columns]

    def _get_transforms(self, reference: Tensor) -> tuple[Tensor, Tensor]:
        return _build_dct(self.height, reference.device, reference.dtype), _build_dct(
            self.width, reference.device, reference.dtype
        )

    def _view_blocks(self, flat: Tensor) -> Tensor:
        high, wide = self.rows // self.height, self.columns // self.width
        return self._get_part(flat).view(high, self.height, wide, self.width).transpose(1, 2)


def _find_divisor(number: int, limit: int) -> int:
    """Finds the largest divisor that is at most ``limit``."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


@cache
def _build_dct(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Builds the orthonormal discrete cosine transform of the second type, one component in each row."""
    numbers = torch.arange(size, dtype=torch.float64)
    waves = torch.cos(math.pi / size * torch.outer(numbers, numbers + 0.5)) * math.sqrt(2 / size)
    waves[0] /= math.sqrt(2)
    return waves.to(device, dtype)
