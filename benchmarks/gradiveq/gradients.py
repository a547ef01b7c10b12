"""Gradients of a training as all replicas sum them, and what their principal components leave out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gradiveq.times import spec_of
from farflung.reducers.gradiveq import window
from farflung.reducers.gradiveq.slices import Layout
from farflung.seeding import create_generator
from farflung.types import TensorSpec
from farflung.workloads import create_workload

__all__ = ["WAYS", "Choice", "Series", "Way", "added_up", "adjacent", "compared", "series", "spectra"]

WORKLOAD = "cifar10/resnet32"
SAMPLES, RATE, MOMENTUM = 48, 0.05, 0.9
"""Of each step, six replicas of eight; of SGD, our choice."""
LOOKED_AT = 20
"""Every so many steps behind a window its bases are tried."""
FOLLOWED = 200
"""Steps behind a window of which each one is looked at."""
SPANS = (1, 5, 20, 100)
"""So many consecutive gradients are added up."""


@dataclass(frozen=True)
class Choice:
    """Settings of a window.

    Args:
      slice_size: K, as wished.
      ratio: r; ``None``: by the variance.
      variance_left: lambda.
    """

    slice_size: int = 512
    ratio: float | None = 32.0
    variance_left: float = 0.0


@dataclass(frozen=True)
class Way:
    """What happens to what is left out.

    Args:
      every: one of so many exchanges is a sample, sent whole; ``None``: none of them.
      residuals: whether it is added to the next gradient.
    """

    every: int | None = None
    residuals: bool = False


WAYS = {
    "the paper's": Way(),
    "spread samples": Way(every=5),
    "spread samples, error feedback": Way(every=5, residuals=True),
}
"""At equal bytes over 500 exchanges: of the paper's windows, a hundred samples are over before these begin."""


@dataclass(frozen=True)
class Series:
    """Gradients of some consecutive steps.

    Args:
      spec: of each.
      window: shape ``(steps, numel)``: those that bases are found from.
      later: by steps behind the window, those that bases are tried on.
      after: shape ``(steps, numel)``: the first behind the window.
    """

    spec: TensorSpec
    window: Tensor
    later: Mapping[int, Tensor]
    after: Tensor


def gradients(name: str, steps: int, *, seed: int = 0) -> Iterator[Tensor]:
    """The mean gradient of each step of a training, flat, in the order of the parameters."""
    torch.set_num_threads(1)
    task = create_workload(name)
    model = task.build_model(create_generator(seed, "model"))
    data, _ = task.load_datasets()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=1e-4)
    order = create_generator(seed, "order")
    for _ in range(steps):
        drawn = torch.randint(len(data), (SAMPLES,), generator=order)
        task.compute_losses(model, data.take(drawn, train=True)).mean().backward()
        yield torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()


def series(name: str, skipped: int, window: int, behind: int) -> Series:
    """Of a training from its beginning on.

    Args:
      name: of the workload.
      skipped: steps before the window.
      window: steps in it.
      behind: steps after it.
    """
    inside, later, after = [], {}, []
    for step, gradient in enumerate(gradients(name, skipped + window + behind)):
        at = step - skipped
        if 0 <= at < window:
            inside.append(gradient)
        elif at >= window and (at - window) % LOOKED_AT == 0:
            later[at - window] = gradient
        if window <= at < window + FOLLOWED:
            after.append(gradient)
    spec = spec_of(name)
    return Series(spec, torch.stack(inside), later, torch.stack(after))


def compared(found: Series, choice: Choice) -> dict[str, Any]:
    """How much smaller gradients become, and how far what comes out is from what went in.

    Returns:
      ``ratio``: numbers of convolutions over coefficients; ``losses``: the norm of what is left out over that of the
      gradient, of convolutions, by steps behind the window; ``loss``: their median; ``ratios``: of each layer.
    """
    layout, means, bases = _solved(found, choice)
    left, whole = dict.fromkeys(found.later, 0.0), dict.fromkeys(found.later, 0.0)
    coded, ratios = 0, []
    for name, layer in layout.layers_by_name.items():
        basis = bases[name]
        for behind, gradient in found.later.items():
            own = layer.read_slices(gradient, 0, layer.num_slices)
            centred = own - means[name]
            left[behind] += float((centred - centred @ basis @ basis.T).square().sum())
            whole[behind] += float(own.square().sum())
        coded += basis.shape[1] * layer.num_slices
        ratios.append(layer.numel / (basis.shape[1] * layer.num_slices))
    losses = {behind: (left[behind] / whole[behind]) ** 0.5 for behind in found.later}
    return {
        "ratio": sum(layer.numel for layer in layout.layers) / coded,
        "loss": statistics.median(losses.values()),
        "losses": losses,
        "ratios": ratios,
    }


def _solved(found: Series, choice: Choice) -> tuple[Layout, Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Where slices are, and the means and bases of the window by layers."""
    layout = Layout.from_spec(found.spec, choice.slice_size)
    state = window.init_window(0, layout)
    for gradient in found.window:
        state = window.add_mean(state, gradient, 1)
    state = window.solve_bases(state, choice.ratio, choice.variance_left, lambda numel: None)
    return layout, state["means"], state["bases"]


def added_up(found: Series, choice: Choice, way: Way) -> dict[int, float]:
    """How far the sum of consecutive gradients is from the sum of what comes out for them.

    Returns:
      The norm of the difference over that of the sum of the gradients, of all layers, in the median of those there are
      behind the window, by the number of gradients.
    """
    layout, means, bases = _solved(found, choice)
    off = {span: torch.zeros(len(found.after) // span) for span in SPANS}
    whole = {span: torch.zeros(len(found.after) // span) for span in SPANS}
    for name, layer in layout.layers_by_name.items():
        mean, basis = means[name], bases[name]
        after = torch.stack([layer.read_slices(one, 0, layer.num_slices) for one in found.after])
        errors, left = torch.empty_like(after), torch.zeros_like(mean)
        for step, own in enumerate(after):
            given = own + left
            sampled = way.every is not None and step % way.every == 0
            out = given if sampled else (given - mean) @ basis @ basis.T + mean
            errors[step] = out - own
            left = given - out if way.residuals else left
        for span in SPANS:
            off[span] += _squares_of_sums(errors, span)
            whole[span] += _squares_of_sums(after, span)
    return {span: float((off[span] / whole[span]).sqrt().median()) for span in SPANS}


def _squares_of_sums(steps: Tensor, span: int) -> Tensor:
    """Of each so many consecutive steps, the squared norm of their sum."""
    return steps.flatten(1).view(len(steps) // span, span, -1).sum(dim=1).square().sum(dim=1)


def spectra(found: Series, slice_size: int) -> list[list[float]]:
    """Of each layer's first slice, the share of its variance that the first 1, 2, ... components explain."""
    layout = Layout.from_spec(found.spec, slice_size)
    shares = []
    for layer in layout.layers:
        rows = torch.stack([layer.read_slices(one, 0, 1)[0] for one in found.window])
        variances = torch.linalg.svdvals(rows - rows.mean(dim=0)).square()[:-1]
        shares.append((variances.cumsum(0) / variances.sum()).tolist())
    return shares


def adjacent(found: Series) -> list[list[float]]:
    """Of each layer, the share of variance that two components explain of every three adjacent gradients.

    References: Yu et al. 2018, Fig. 4, three adjacent gradients of one layer over 150 iterations.
    """
    layout = Layout.from_spec(found.spec, found.spec.numel)
    explained = []
    for layer in layout.layers:
        flat = torch.stack([layer.read_slices(one, 0, layer.num_slices).reshape(-1) for one in found.window])
        centred = (flat - flat.mean(dim=0)).double()
        triples = centred[:, : flat.shape[1] // 3 * 3].view(len(flat), -1, 3)
        covariances = torch.einsum("tia,tib->iab", triples, triples)
        variances = torch.linalg.eigvalsh(covariances)
        total = variances.sum(dim=1)
        explained.append((1 - variances[:, 0] / total)[total > 0].tolist())
    return explained
