"""What all replicas know of the window they are in, and how one window becomes the next.

The state is alike on all replicas and changes when a result is merged. Each phase is a name in it:

``sample``
  of each mean the first slice of every group is kept, and all slices are added up;
``confirm``
  bases have been found, and a hash of them rides along with a sum as in ``sample``;
``share``
  the hashes were unlike, and rank 0's bases travel beside such a sum;
``compress``
  slices travel on their bases; where samples are spread, one of several exchanges is summed and kept as in ``sample``,
  and what has been found is confirmed when as many are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from farflung.codecs.blocks import working_dtype
from farflung.reducers.gradiveq.bases import alike, groups, principal
from farflung.reducers.gradiveq.layout import Layout
from farflung.types import State

__all__ = [
    "Solve",
    "bases_of",
    "begun",
    "compressed",
    "confirmed",
    "shared_by",
    "solved",
    "taken",
]

Solve: TypeAlias = Callable[[int, Callable[[], Tensor]], Tensor]
"""Finds a basis from so many numbers, as a part of an exchange."""


def begun(seed: int, layout: Layout) -> State:
    """The state at the start."""
    return _sampling({"seed": seed, "layout": layout.state, "window": 0})


def bases_of(state: State) -> list[Tensor]:
    """The bases and, last, the means, in an order that is alike on all replicas."""
    return [*(state["bases"][name] for name in sorted(state["bases"])), state["means"]["all"]]


def taken(state: State, mean: Tensor, reuse: int | None) -> State:
    """One more mean is known; one that is not finite begins the sampling again.

    Args:
      state: of now.
      mean: flat, of all replicas.
      reuse: slices that share a basis.
    """
    layers = Layout.of_state(state["layout"]).layers
    slices = [layer.rows(mean, 0, layer.slices).to(working_dtype(mean.dtype)) for layer in layers]
    every = torch.cat([rows.reshape(-1) for rows in slices])
    if not every.isfinite().all():
        return _sampling(state)
    first = torch.cat([slices[group.layer][group.first] for group in groups(layers, reuse)])
    means, rows = state["means"], state["rows"]
    total = every + means["sum"].to(every.device) if "sum" in means else every
    rows = {**rows, f"{len(rows):06}": first}
    return {**state, "rows": rows, "means": {**means, "sum": total}}


def solved(state: State, reuse: int | None, left_out: float, solve: Solve) -> State:
    """All samples are there.

    Args:
      state: of now.
      reuse: slices that share a basis.
      left_out: share of the variance that bases need not explain.
      solve: finds each basis.
    """
    layers = Layout.of_state(state["layout"]).layers
    samples = [state["rows"][name] for name in sorted(state["rows"])]
    bases, start = {}, 0
    for group in groups(layers, reuse):
        numel = layers[group.layer].slice_numel
        found = partial(_principal, samples, start, numel, left_out)
        bases[group.name] = solve(len(samples) * numel, found)
        start += numel
    means = {"all": state["means"]["sum"] / len(samples)}
    return {**state, "phase": "confirm", "count": 0, "rows": {}, "means": means, "bases": bases}


def _principal(samples: Sequence[Tensor], start: int, numel: int, left_out: float) -> Tensor:
    device = samples[-1].device
    return principal(torch.stack([row.narrow(0, start, numel).to(device) for row in samples]), left_out)


def confirmed(state: State, said: list[float], size: int) -> State:
    """The hashes are known; the exchange that carried them is the first of those to be compressed."""
    return {**state, "phase": "compress" if alike(said, size) else "share", "count": 1}


def shared_by(state: State, received: list[Tensor]) -> State:
    """Rank 0's bases are here, in the order of :func:`bases_of`."""
    *bases, mean = received
    named = dict(zip(sorted(state["bases"]), bases, strict=True))
    return {**state, "phase": "compress", "means": {"all": mean}, "bases": named}


def compressed(state: State, votes: float, *, steps: float, size: int) -> State:
    """One more exchange is over; another window begins after ``steps``, or when most have voted for it."""
    count = state["count"] + 1
    if count >= steps or 2 * votes > size:
        return _sampling(state)
    return {**state, "count": count}


def _sampling(state: State) -> State:
    window = state["window"] + 1
    return {**state, "phase": "sample", "window": window, "count": 0, "rows": {}, "means": {}, "bases": {}}
