"""The paper's data sets and models, on its devices and links, and the small models that stand for these here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.workloads.aid import small_network
from farflung.comm import predict_cost_s
from farflung.devices import DeviceProfile
from farflung.network import Link, NetworkProfile
from farflung.types import Workload
from farflung.workloads import Classification, create_workload, resnet, vgg

__all__ = [
    "APPLICATIONS",
    "CHUNK",
    "COLLECTIVE",
    "MBPS",
    "QUADRATIC",
    "REPLICAS",
    "Application",
    "workload_of",
]

REPLICAS = 4
MBPS = (10, 50, 100, 200)
"""Bandwidths of the paper's Wi-Fi."""
COLLECTIVE = "ring"
"""Every replica sends as much as with the paper's parameter servers, of which each device is one."""
LATENCY_S = 2e-3
"""One way over Wi-Fi; our choice, which is next to nothing here."""
PEAK_FLOPS = 512e9
"""Of a Jetson TX1: 256 lanes at 1 GHz, two float operations each."""
REACHED = 0.25
"""Share of that in training; our assumption."""
CHUNK = 32
"""Samples that are scored at once."""
QUADRATIC = "quadratic"


@dataclass(frozen=True)
class Application:
    """One data set.

    Seconds are those of the paper's device and links with the paper's model. A second of virtual time is what computing
    a step takes there, so the links have as many bits a second for the small model's gradient as the paper's have for
    the paper's.

    Args:
      data: its name in ``needs``.
      whole: the workload of the paper's model.
      parameters: of that, each with 4 bytes of its gradient.
      flops: of its forward pass, per sample.
      small: the workload that stands for it.
      network: in the place of that one's; ``None``: none.
      batch_size: samples per replica and step, the paper's.
      steps: of each training.
      most: samples of a group that is scored in a step, at most.
      moved: samples that a replica gives away in a round of resharding.
    """

    data: str
    whole: str
    parameters: int
    flops: float
    small: str
    network: Callable[[], nn.Module] | None
    batch_size: int
    steps: int
    most: int
    moved: int

    @property
    def step_s(self) -> float:
        """What computing a step takes: a forward pass, and twice that backward."""
        return 3 * self.batch_size * self.flops / (REACHED * PEAK_FLOPS)

    def ratio(self, mbps: float, replicas: int = REPLICAS) -> float:
        """What an exchange takes over what computing a step does."""
        links = NetworkProfile.create_uniform(Link(LATENCY_S, 1e6 * mbps), replicas)
        return predict_cost_s(links, COLLECTIVE, 4 * self.parameters) / self.step_s

    def group(self, mbps: float, replicas: int = REPLICAS) -> int:
        """Samples that BACC scores in a step, from the second on: whole chunks while an exchange is under way."""
        fit = int(self.ratio(mbps, replicas) * 3 * self.batch_size / CHUNK)
        return min(self.most, CHUNK * max(1, fit))

    @property
    def device(self) -> DeviceProfile:
        """Computes a step in a second of virtual time, and scores a sample in a third of what training on it takes."""
        return DeviceProfile(forward_s=1 / (3 * self.batch_size))

    def links(self, mbps: float, nbytes: int, replicas: int = REPLICAS) -> NetworkProfile:
        """In virtual time, for a gradient of so many bytes.

        Args:
          mbps: of the paper's links.
          nbytes: of the small model's gradient.
          replicas: how many.
        """
        bandwidth = 1e6 * mbps * self.step_s * nbytes / (4 * self.parameters)
        return NetworkProfile.create_uniform(Link(LATENCY_S / self.step_s, bandwidth), replicas)


def workload_of(name: str) -> Workload:
    """What trains for an application."""
    return _workload(APPLICATIONS[name].small, APPLICATIONS[name].network)


@functools.cache
def _workload(small: str, network: Callable[[], nn.Module] | None) -> Workload:
    task = create_workload(small)
    return (
        task if network is None else Classification(f"{task.name}, halved", network, task.load_datasets, {})
    )


def _halved(network: Callable[[], nn.Module]) -> nn.Module:
    """It sees pictures of half the width and height, each pixel the mean of four."""
    made = nn.Sequential(nn.AvgPool2d(2), network())
    return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _vgg() -> nn.Module:
    """That of :func:`benchmarks.workloads.speech_commands.vgg`, for spectrograms of half the size."""
    return vgg((1, 32, 50), (16, None, 32, None, 64, None, 64, None), 64, 9)


def _pictures(data: str, whole: str, parameters: int, flops: float, small: str, classes: int) -> Application:
    """Of 32 x 32, in colour."""
    return Application(
        data,
        whole,
        parameters,
        flops,
        small,
        partial(_halved, partial(resnet, 8, classes)),
        batch_size=32,
        steps=2000,
        most=512,
        moved=24,
    )


def _dense(batch_size: int) -> Application:
    """A small model of no paper's, cheap enough to look where sampling helps."""
    return Application(
        "fashion-mnist",
        "fashion-mnist/mlp",
        203_530,
        406_528,
        "fashion-mnist/mlp",
        None,
        batch_size=batch_size,
        steps=2000,
        most=320,
        moved=0,
    )


_QUADRATIC = "farflung.workloads.synthetic:Quadratic(dim=2000, samples=256)"
APPLICATIONS = {
    "cifar10": _pictures("cifar10", "cifar10/resnet18", 11_173_962, 1_110_845_440, "cifar10/resnet8", 10),
    "cifar100": _pictures(
        "cifar100", "cifar100/resnet50", 23_705_252, 2_596_028_416, "cifar100/resnet8", 100
    ),
    "svhn": _pictures(
        "svhn",
        "benchmarks.workloads.svhn:resnet18",
        11_173_962,
        1_110_845_440,
        "benchmarks.workloads.svhn:resnet8",
        10,
    ),
    "aid": Application(
        "aid",
        "benchmarks.workloads.aid:mobilenetv2",
        2_262_302,
        48_973_824,
        "benchmarks.workloads.aid:mobilenet",
        partial(_halved, partial(small_network, 30)),
        batch_size=32,
        steps=1000,
        most=256,
        moved=4,
    ),
    "speech": Application(
        "speech",
        "benchmarks.workloads.speech_commands:vgg13",
        9_807_587,
        2_806_366_976,
        "benchmarks.workloads.speech_commands:vgg",
        partial(_halved, _vgg),
        batch_size=64,
        steps=600,
        most=256,
        moved=12,
    ),
    "agnews": Application(
        "agnews",
        "benchmarks.workloads.news:ag_news_attentive_lstm",
        16_840_388,
        931_872_768,
        "benchmarks.workloads.news:ag_news_lstm",
        None,
        batch_size=64,
        steps=500,
        most=512,
        moved=24,
    ),
    "fashion": _dense(batch_size=32),
    "fashion in small batches": _dense(batch_size=4),
    QUADRATIC: Application(
        QUADRATIC,
        _QUADRATIC,
        100_000,
        1e9,
        _QUADRATIC,
        None,
        batch_size=4,
        steps=24,
        most=64,
        moved=2,
    ),
}
"""The paper's, two to look around, and one for quick runs. Operations are those of a forward pass, as
:func:`farflung.calibration.count_forward_flops` counts: AID's of pictures of 64 x 64, spectrograms of 64 x 101, 48
words. CIFAR-100 and SVHN have CIFAR-10's settings; their data were not at hand, so nothing was tried there."""
