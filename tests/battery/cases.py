"""The trainings that must end as they always did: every preset, and recipes beyond them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor, nn

from farflung.data import fashion_mnist
from farflung.data.source import Variant
from farflung.engine import buckets
from farflung.recipes import RECIPES
from farflung.types import Workload
from farflung.workloads import WORKLOADS, Classification

__all__ = ["CASES", "CODED", "DENSE", "Case", "known"]

UNEVEN = "battery/uneven"
RESIDUALS = "error_feedback(topk(density=0.05))"
WINDOWS = "gradiveq(slice_size=90, warm_up=2, sample_steps=4, compress_steps=5{})"
"""Of which 20 steps see two, and their half falls among those that are compressed."""


@dataclass(frozen=True, slots=True)
class Case:
    """One training, run to its half, resumed, and run to its end, in each world that it is for.

    Args:
      name: of the case; also its key among the recorded values.
      settings: options of the command line, with underscores.
      network: a named one, for virtual time.
      virtual: whether it can be simulated.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    network: str = "wifi-100mbps"
    virtual: bool = True

    @property
    def whole(self) -> dict[str, Any]:
        """All settings, with those of the battery where the case has none of its own."""
        given = {"workload": UNEVEN, "workers": 2, "steps": 20, "batch_size": 8, "seed": 7, **self.settings}
        return {"evaluate_every": 0, "checkpoint_every": 0, **given}


SOONER: dict[str, dict[str, Any]] = {
    "adacomm": {"schedule": "adacomm(sync_every=6, interval_s=0.1, block_momentum=0.3)"},
    "demo": {"codec": "demo(chunk=16, keep=8)", "optimizer": "sign_sgd", "learning_rate": 1e-3},
    "diloco": {"schedule": "diloco(sync_every=6)"},
    "local_sgd": {"schedule": "local_sgd(sync_every=6)"},
    "mercury": {
        "sampler": "grouped_importance(rule='paper', groups='bacc', chunk=8, every=3)",
        "sharing": "resharding(samples=6, every=4, within=3)",
    },
    "post_local_sgd": {"schedule": "post_local_sgd(warmup=8, sync_every=5, optimizer_state='averaged')"},
    "sparse_loco": {"schedule": "diloco(sync_every=6, outer_rate=1.0, outer_momentum=0.0)"},
    "streaming_diloco": {
        "schedule": "streaming_diloco(sync_every=6, fragments=2, delay=2, optimizer_state='reset')"
    },
    "scadles": {
        "stream": "rate([1600, 2000, 1800, 2400], window_s=0.005, policy='truncation', weigh='by_rate')"
    },
    "scadles_baseline": {"stream": "rate([1600, 2000, 1800, 2400], least=16)"},
}
"""Than devices send, so that nobody waits; and than the presets exchange, so that 20 steps see it, the half of them a
block or a fragment that is under way.
"""


def _presets() -> list[Case]:
    """Each preset on one of two networks, with four replicas; a merge 20 steps late is seen in 50 steps alone."""
    networks = itertools.cycle(["wifi-100mbps", "four-regions"])
    return [
        Case(
            f"preset {name}",
            {"recipe": name, "workers": 4, "steps": 50 if name == "dga" else 20, **SOONER.get(name, {})},
            network,
            virtual=name != "ddp",
        )
        for name, network in zip(RECIPES, networks, strict=False)
    ]


_OTHERS = (
    Case("synchronous", {"momentum": 0.0, "weight_decay": 0.0}, "4g"),
    Case("synchronous, adam, clipped", {"optimizer": "adam", "learning_rate": 1e-3, "clip_norm": 0.5}),
    Case("pipelined, plain", {"schedule": "pipelined(width=2, predict=False)"}),
    Case("pipelined, predicted", {"schedule": "pipelined(width=3, predict=True)", "workers": 3}, "4g"),
    Case("pipelined, corrected", {"schedule": "pipelined(width=2, warmup=3, correction=0.1)"}, "4g"),
    Case(
        "delayed, period",
        {"schedule": "delayed(delay=3, period=2, pull='swap')", "workers": 4},
        "four-regions",
    ),
    Case("delayed, residuals", {"schedule": "delayed(delay=2, pull='swap')", "codec": RESIDUALS}),
    Case(
        "delayed, adam",
        {"schedule": "delayed(delay=2, pull='swap')", "optimizer": "adam", "learning_rate": 1e-3},
        "4g",
    ),
    Case(
        "delayed, pulled",
        {"schedule": "delayed(delay=5, period=2)", "codec": RESIDUALS, "workers": 3},
        "four-regions",
    ),
    Case(
        "delayed, pulled, adam",
        {"schedule": "delayed(delay='auto')", "optimizer": "adam", "learning_rate": 1e-3},
        "4g",
    ),
    Case("topk, residuals", {"codec": RESIDUALS}),
    Case("topk, own shares", {"codec": RESIDUALS, "partition": "labels(k=3)", "workers": 4}),
    Case(
        "int8 on hops",
        {"codec": "int8", "reducer": "codec(phases='hops')", "collective": "ring", "workers": 3},
    ),
    Case("dgc, pipelined", {"codec": "dgc(density=0.02)", "schedule": "pipelined(width=2, predict=False)"}),
    Case(
        "powersgd, pipelined",
        {
            "reducer": "powersgd",
            "schedule": "pipelined(width=2, predict=False)",
            "collective": "ring",
            "workers": 3,
        },
    ),
    Case(
        "powersgd, delayed",
        {"reducer": "powersgd(rank=1)", "schedule": "delayed(delay=2, pull='swap')"},
        "4g",
    ),
    Case(
        "gradiveq, around a ring",
        {
            "reducer": WINDOWS.format(", matrices=True"),
            "collective": "ring",
            "workers": 3,
        },
    ),
    Case(
        "gradiveq, pipelined",
        {
            "reducer": WINDOWS.format(", windows='paper', variance_left=0.1"),
            "schedule": "pipelined(width=2, predict=False)",
        },
        "4g",
    ),
    Case(
        "gradiveq, residuals",
        {
            "reducer": WINDOWS.format(", ratio=8"),
            "schedule": "delayed(delay=2, pull='swap')",
            "workers": 3,
        },
    ),
    *(
        Case(
            f"importance, {rule}",
            {
                "sampler": f"grouped_importance(rule={rule!r}, chunk=40)",
                "partition": "iid",
                "optimizer": "adam",
                "learning_rate": 1e-3,
            },
        )
        for rule in ("auto", "fill", "half", "pool", "two")
    ),
    Case("shared_scale_qsgd", {"reducer": "shared_scale_qsgd(bits=4)", "workers": 3}),
    Case(
        "quadratic, own shares",
        {
            "workload": "synthetic/quadratic",
            "schedule": "delayed(delay=2, period=3, pull='swap')",
            "partition": "labels(k=3)",
            "workers": 4,
        },
        "4g",
    ),
)

CODED, DENSE = "coded", "three dense exchanges"
CASES: dict[str, Case | None] = {
    **{case.name: case for case in (*_presets(), *_OTHERS)},
    CODED: None,
}
"""By name; coded training has no settings of the command line."""


# --- a workload in which little is alike ------------------------------------------------------------------------


class _Uneven(nn.Module):
    """Two convolutions, running statistics, dropout, and layers of very unlike sizes; they fill two buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 12, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.dense = nn.Linear(12 * 7 * 7, 40)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.ReLU(), nn.Linear(40, 10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dense(self.picture(images)))
        return logits


@functools.cache  # the runs of one process share the samples
def _uneven(data: Variant = "packaged") -> Workload:
    """The images of the package, mirrored at random."""
    defaults = {"batch_size": 8, "learning_rate": 0.02, "momentum": 0.9, "weight_decay": 1e-4, "steps": 20}
    return Classification(UNEVEN, _Uneven, functools.partial(fashion_mnist.load, data), defaults)


@contextmanager
def known() -> Iterator[None]:
    """Inside, the workload has its name, and a first bucket is full with 64 KiB."""
    with (
        mock.patch.dict(WORKLOADS, {UNEVEN: _uneven}),
        mock.patch.object(buckets, "FIRST_BUCKET_NBYTES", 1 << 16),
    ):
        yield
