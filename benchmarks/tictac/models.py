"""Layers of real models, fewer parameters in the place of each, and the workload that has them in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from farflung import TorchWorkload
from farflung.devices import DeviceProfile, LayerProfile

__all__ = ["BATCH_SIZE", "MODELS", "Layers", "Model", "chain", "chain_workload"]

BATCH_SIZE = 4
REDUCED = 64
"""Times as few parameters; links and computing are scaled with them, since what is fixed is T over C."""


@dataclass(frozen=True)
class Model:
    """Layers in forward order.

    Args:
      numels: parameters of each, reduced.
      flops: shares of a forward pass.
    """

    numels: tuple[int, ...]
    flops: tuple[float, ...]

    def device(self, compute_s: float) -> DeviceProfile:
        """Computes a step in so many seconds, a third of it forward."""
        forward_s = compute_s / 3 / BATCH_SIZE / sum(self.flops)
        return DeviceProfile(
            layers=tuple(
                LayerProfile(numel, forward_s * flops, 2 * forward_s * flops)
                for numel, flops in zip(self.numels, self.flops, strict=True)
            )
        )

    def workload(self) -> TorchWorkload:
        """Samples of one number."""
        random = torch.Generator().manual_seed(0)
        inputs = torch.randn(64, 1, generator=random)
        data = TensorDataset(inputs, inputs.square())
        return TorchWorkload(partial(Layers, self.numels), data, data, nn.functional.mse_loss)


class Layers(nn.Module):
    """A parameter for each layer, used one after the other; arithmetic is next to nothing."""

    def __init__(self, numels: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.full((numel,), 1.0 / numel) for numel in numels)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(x * layer.sum())
        return x


def _reduce(layers: Sequence[tuple[float, float]]) -> Model:
    return Model(
        tuple(max(1, round(numel / REDUCED)) for numel, _ in layers), tuple(flops for _, flops in layers)
    )


def _convolution(kernel: int, channels_in: int, channels_out: int, side: int) -> tuple[float, float]:
    numel = kernel * kernel * channels_in * channels_out
    return numel, float(numel * side * side)


def chain(layers: int, numel: int = 16384) -> Model:
    """Equal layers."""
    return Model((numel,) * layers, (1.0,) * layers)


def resnet50() -> Model:
    """ResNet-50 on images of 224 x 224 (He et al. 2016)."""
    layers = [_convolution(7, 3, 64, 112)]
    channels = 64
    for width, blocks, side in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for block in range(blocks):
            if not block:
                layers.append(_convolution(1, channels, 4 * width, side))
            layers += [
                _convolution(1, channels, width, side),
                _convolution(3, width, width, side),
                _convolution(1, width, 4 * width, side),
            ]
            channels = 4 * width
    return _reduce([*layers, (2048 * 1000, 2048 * 1000.0)])


def vgg19() -> Model:
    """VGG-19 on images of 224 x 224 (Simonyan & Zisserman 2015): nine tenths of it in three last layers."""
    layers, channels, side = [], 3, 224
    for width, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(count):
            layers.append(_convolution(3, channels, width, side))
            channels = width
        side //= 2
    for wide, out in ((25088, 4096), (4096, 4096), (4096, 1000)):
        layers.append((wide * out, float(wide * out)))
    return _reduce(layers)


def transformer() -> Model:
    """Twelve blocks of width 512, with an embedding and an output layer of 32,000 tokens."""
    width, tokens = 512, 32_000
    block = [(4 * width**2, 4.0 * width**2), (8 * width**2, 8.0 * width**2)]
    output = (tokens * width, float(tokens * width))
    return _reduce([(tokens * width, 0.0), *(12 * block), output])


MODELS = {"chain": chain(16), "ResNet-50": resnet50(), "VGG-19": vgg19(), "transformer": transformer()}
"""By name."""


def chain_workload() -> TorchWorkload:
    """The chain, for worker processes."""
    return MODELS["chain"].workload()
