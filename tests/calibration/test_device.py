"""Times by a clock that the layers move themselves, and memory by tensors of known size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from farflung.calibration import calibrate, count_forward_flops, measure_peak_nbytes
from farflung.config import Training
from farflung.data import TensorDataset
from farflung.devices import LayerProfile
from farflung.errors import ConfigError
from farflung.types import Batch, Dataset, Json
from farflung.workloads import create_workload


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class _Passed(torch.autograd.Function):
    """Moves the clock on in either pass."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, clock: Clock, s: tuple[float, float]
    ) -> Tensor:
        ctx.clock, ctx.s = clock, s  # type: ignore[attr-defined]
        clock.now += s[0]
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.now += ctx.s[1]  # type: ignore[attr-defined]
        return grad, None, None


class Slow(nn.Module):
    def __init__(self, clock: Clock, forward_s: float, backward_s: float, numel: int = 0) -> None:
        super().__init__()
        self.clock, self.seconds = clock, (forward_s, backward_s)
        self.scale = nn.Parameter(torch.ones(numel)) if numel else None

    def forward(self, x: Tensor) -> Tensor:
        scaled = x if self.scale is None else x * self.scale.sum()
        passed: Tensor = _Passed.apply(scaled, self.clock, self.seconds)
        return passed


@dataclass
class Work:
    clock: Clock
    name: str = "slow"
    defaults: Mapping[str, Json] = field(default_factory=dict)

    def build_model(self, generator: torch.Generator) -> nn.Module:
        return nn.Sequential(
            Slow(self.clock, 0.5, 0.25),
            Slow(self.clock, 1.0, 2.0, 3),
            Slow(self.clock, 4.0, 8.0, 5),
        )

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        losses: Tensor = model(batch.inputs.requires_grad_()).mean(dim=1)
        self.clock.now += 0.125
        return losses

    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.compute_losses(model, batch)

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        data = Loaded(self.clock)
        return data, data


class Loaded(TensorDataset):
    def __init__(self, clock: Clock) -> None:
        super().__init__(torch.ones(6, 2), torch.zeros(6), torch.zeros(6))
        self.clock = clock

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        self.clock.now += 0.75
        return super().prepare(rows, train=train)


def training(**given: Json) -> Training:
    return Training.resolve({"steps": 1, "batch_size": 4, "learning_rate": 0.1}, given)


def test_each_layer_gets_its_time() -> None:
    clock = Clock()
    found = calibrate(Work(clock), training(), rounds=2, clock=clock)
    # What has no parameters counts to the layer after it, or to the last; the loss to the last layer.
    assert found.device.layers == (
        LayerProfile(3, (0.5 + 1.0) / 4, (2.0 + 0.25) / 4),
        LayerProfile(5, (4.0 + 0.125) / 4, 8.0 / 4),
    )
    assert found.names == ("1", "2")
    assert found.forward_s == (5.625 / 4,) * 3
    assert found.backward_s == (10.25 / 4,) * 3
    assert found.optimizer_s == (0.0,) * 3
    assert found.device.step_s == 0.75


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rounds 1: must be 2 or more"):
        calibrate(Work(Clock()), training(), rounds=1)
    with pytest.raises(ConfigError, match="--batch-size 7: slow has 6 training samples"):
        calibrate(Work(Clock()), training(batch_size=7))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fashion-mnist/mlp", {"batch_size": 256, "momentum": 0.0}),
        ("fashion-mnist/cnn", {"batch_size": 8, "optimizer": "adam"}),
    ],
)
def test_memory_is_as_predicted(name: str, settings: dict[str, Json]) -> None:
    work = create_workload(name)
    found = calibrate(work, Training.resolve(work.defaults, settings), rounds=2)
    assert found.predicted_nbytes == pytest.approx(found.measured_nbytes, rel=0.1)


def test_the_layers_are_those_of_the_buckets() -> None:
    work = create_workload("fashion-mnist/cnn")
    found = calibrate(work, Training.resolve(work.defaults, {"batch_size": 4}), rounds=2)
    numel = sum(parameter.numel() for parameter in work.build_model(torch.Generator()).parameters())
    assert found.device.compute_ready_fractions([0], [numel]) == [1.0]
    assert found.device.forward_per_sample_s == pytest.approx(found.forward_s.median)
    assert found.device.backward_per_sample_s == pytest.approx(found.backward_s.median)


def test_peak_memory() -> None:
    def work() -> None:
        one = torch.ones(1000)
        other = one + 1
        view = other.view(10, 100)
        del one, other
        torch.zeros(500)
        del view
        torch.zeros(1500)

    assert measure_peak_nbytes(work) == 8000
    assert measure_peak_nbytes(lambda: None) == 0


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("fashion-mnist/mlp", 2 * (784 * 256 + 256 * 10)),
        ("fashion-mnist/cnn", 2_234_112),
    ],
)
def test_operations(name: str, flops: int) -> None:
    assert count_forward_flops(create_workload(name)) == flops
