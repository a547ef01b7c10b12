"""What computing takes: layers, stragglers, memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from farflung.devices import (
    DEVICES,
    DeviceProfile,
    LayerProfile,
    Moment,
    OccasionalStraggler,
    ScheduledStraggler,
    VaryingStraggler,
    estimate_training_nbytes,
    find_device,
    measure_saved_nbytes,
)
from farflung.errors import ConfigError, UnknownName
from farflung.noise import draw_uniform, draw_uniform_array
from farflung.types import Cost

NOW = Moment(seed=1, rank=0, step=1, time_s=0.0)


def test_seconds_by_kind() -> None:
    device = DeviceProfile("d", 0.5, optimizer_s=0.25, slowdown=2.0, step_s=0.125)
    costs = [Cost("forward", 3), Cost("backward", 3), Cost("evaluate", 3), Cost("score", 3)]
    assert [device.compute_seconds(cost, NOW) for cost in costs] == [3.25, 6.0, 3.0, 3.0]
    assert device.compute_seconds(Cost("optimizer", 0), NOW) == 0.5
    assert device.compute_seconds(Cost("other", 5), NOW) == 0.0
    assert DeviceProfile(forward_s=0.5, backward_s=0.75).compute_seconds(Cost("backward", 2), NOW) == 1.5


def test_layers_add_up() -> None:
    device = DeviceProfile(
        layers=(LayerProfile(4, 0.5, 1.0), LayerProfile(0, 0.25, 0.5), LayerProfile(6, 1.0, 2.5))
    )
    assert device.compute_seconds(Cost("forward", 2), NOW) == 3.5
    assert device.compute_seconds(Cost("backward", 2), NOW) == 8.0


def test_buckets_are_ready_with_their_layers() -> None:
    # Backwards: 6 parameters by 2.5, none by 3.0, 4 by 4.0 of 4 seconds.
    device = DeviceProfile(
        layers=(LayerProfile(4, 0.5, 1.0), LayerProfile(0, 0.25, 0.5), LayerProfile(6, 1.0, 2.5))
    )
    assert device.compute_ready_fractions([0, 1], [6, 4]) == [2.5 / 4, 1.0]
    assert device.compute_ready_fractions([0, 1], [3, 7]) == [2.5 / 4, 1.0]  # a layer is through as a whole
    assert device.compute_ready_fractions([0, 1, 2], [6, 1, 3]) == [2.5 / 4, 1.0, 1.0]
    # Never before one that filled earlier.
    assert device.compute_ready_fractions([1, 0], [6, 4]) == [
        1.0,
        1.0,
    ]
    assert device.compute_ready_fractions([0, 1], []) == [0.5, 1.0]
    assert DeviceProfile().compute_ready_fractions([2, 0, 1], [1, 1, 1]) == [1 / 3, 2 / 3, 1.0]
    assert DeviceProfile(layers=(LayerProfile(3, 1.0, 0.0),)).compute_ready_fractions([0], [3]) == [0.0]


def test_when_a_bucket_is_used() -> None:
    layers = (LayerProfile(4, 0.5, 1.0), LayerProfile(0, 0.25, 0.5), LayerProfile(6, 1.25, 2.5))
    device = DeviceProfile(layers=layers)
    # Buckets are numbered from the output side, and used in the order that is given.
    assert device.compute_use_fractions([1, 0], Cost("forward", 3, (6, 4))) == [0.0, 0.75 / 2]
    assert device.compute_use_fractions([1, 0], Cost("forward", 3, (7, 3))) == [
        0.0,
        0.0,
    ]  # with its first layer
    assert device.compute_use_fractions([2, 1, 0], Cost("forward", 3, (3, 3, 4))) == [0.0, 0.375, 0.375]
    # Never before one that is used earlier.
    assert device.compute_use_fractions([0, 1], Cost("forward", 3, (6, 4))) == [0.375, 0.375]
    # What a step takes otherwise comes first.
    slow = replace(device, step_s=2.0)
    assert slow.compute_use_fractions([1, 0], Cost("forward", 1, (6, 4))) == [0.5, 2.75 / 4]
    assert DeviceProfile(forward_s=1.0).compute_use_fractions([2, 0], Cost("forward", 1, (1, 1, 1))) == [
        0.0,
        0.5,
    ]
    assert DeviceProfile().compute_use_fractions([0], Cost("forward", 1)) == [0.0]


def test_layers_of_another_model() -> None:
    with pytest.raises(ConfigError, match="they have 4 parameters, and the model has 5"):
        DeviceProfile(layers=(LayerProfile(4, 1.0, 1.0),)).compute_ready_fractions([0], [5])


# --- stragglers -------------------------------------------------------------------------------------------------


def moments(count: int, rank: int = 0, seed: int = 1) -> list[Moment]:
    return [Moment(seed, rank, step, 0.0) for step in range(count)]


def test_occasional() -> None:
    slow = [OccasionalStraggler(0.25, 4.0).compute_slowdown(moment) for moment in moments(4000)]
    assert set(slow) == {1.0, 4.0}
    assert slow.count(4.0) / 4000 == pytest.approx(0.25, abs=0.03)
    assert slow == [OccasionalStraggler(0.25, 4.0).compute_slowdown(moment) for moment in moments(4000)]
    assert slow != [
        OccasionalStraggler(0.25, 4.0).compute_slowdown(moment) for moment in moments(4000, rank=1)
    ]
    assert slow != [
        OccasionalStraggler(0.25, 4.0).compute_slowdown(moment) for moment in moments(4000, seed=2)
    ]


def test_varying() -> None:
    factors = [VaryingStraggler(0.5).compute_slowdown(moment) for moment in moments(4000)]
    assert min(factors) >= 1.0
    assert sum(factors) / 4000 == pytest.approx(1.5, abs=0.05)
    assert sum(factor > 1.5 for factor in factors) / 4000 == pytest.approx(math.exp(-1), abs=0.03)


def test_scheduled() -> None:
    slow = ScheduledStraggler(10.0, 20.0, 3.0, ranks=(2,))
    times = (9.9, 10.0, 19.9, 20.0)
    assert [slow.compute_slowdown(Moment(0, 2, 0, t)) for t in times] == [1.0, 3.0, 3.0, 1.0]
    assert [slow.compute_slowdown(Moment(0, 1, 0, t)) for t in times] == [1.0] * 4
    assert ScheduledStraggler(10.0, 20.0, 3.0).compute_slowdown(Moment(0, 1, 0, 10.0)) == 3.0


def test_factors_multiply() -> None:
    device = DeviceProfile(
        forward_s=1.0, slowdown=2.0, stragglers=(ScheduledStraggler(0, 9, 3.0), OccasionalStraggler(1.0, 5.0))
    )
    assert device.compute_seconds(Cost("forward", 1), NOW) == 30.0


def test_noise_is_the_same_in_rows_and_one_by_one() -> None:
    ranks = torch.arange(50).numpy()
    row = draw_uniform_array(7, 3, ranks, 2 * ranks)
    assert row.tolist() == [draw_uniform(7, 3, k, 2 * k) for k in range(50)]
    assert 0 <= row.min() < row.max() < 1
    many = draw_uniform_array(7, torch.arange(100_000).numpy())
    assert many.mean() == pytest.approx(0.5, abs=0.005)
    assert draw_uniform(1, 2) != draw_uniform(2, 1)


# --- by name ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICES)
def test_by_name(name: str) -> None:
    device = find_device(name, forward_flops=1e9)
    assert device.name == name
    assert device.forward_s == pytest.approx(1e9 / (0.3 * DEVICES[name].peak_flops))
    assert device.memory_nbytes == DEVICES[name].memory_nbytes
    assert "our choice" in device.source


def test_a_name_is_not_enough() -> None:
    with pytest.raises(ConfigError, match="v100: known by its operations per second"):
        find_device("v100")
    with pytest.raises(UnknownName, match="unknown device 'phone'"):
        find_device("phone")


# --- memory -----------------------------------------------------------------------------------------------------


def test_memory_by_the_formula() -> None:
    assert estimate_training_nbytes(1000, 0) == 3000
    assert estimate_training_nbytes(1000, 0, optimizer="momentum") == 4000
    assert estimate_training_nbytes(1000, 0, optimizer="adam", in_flight=2, fixed_nbytes=7) == 7007
    assert estimate_training_nbytes(1000, 8, sample_nbytes=3, activations_nbytes=10) == 3104
    assert estimate_training_nbytes(100 << 20, 0) == 225 << 20
    with pytest.raises(UnknownName, match="unknown optimizer 'lion'"):
        estimate_training_nbytes(1, 1, optimizer="lion")


def test_what_autograd_keeps_grows_with_the_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))

    def kept(batch: int) -> int:
        inputs, targets = torch.randn(batch, 3, 6, 6), torch.randint(0, 10, (batch,))
        besides = [*model.parameters(), inputs, targets]
        return measure_saved_nbytes(lambda: nn.functional.cross_entropy(model(inputs), targets), besides)

    # The output of the convolution after ReLU, which the flattened one shares, and the log of the probabilities.
    per_sample = (kept(16) - kept(8)) / 8
    assert per_sample == 4 * (8 * 36 + 10)
    predicted = estimate_training_nbytes(0, 64, activations_nbytes=per_sample)
    assert predicted == pytest.approx(kept(64), rel=0.01)
