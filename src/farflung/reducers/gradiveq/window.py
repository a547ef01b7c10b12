"""What all replicas know of the window they are in, how one becomes the next, and rank 0's bases for all."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from farflung.codecs.blocks import working_dtype
from farflung.comm.collectives.segments import cut, others
from farflung.comm.staging import moved
from farflung.errors import ProtocolError
from farflung.reducers.gradiveq.slices import Layout
from farflung.types import Channel, Payload, State, TensorSpec

__all__ = [
    "Solve",
    "add_mean",
    "adopt_bases",
    "begin",
    "count_dimensions",
    "count_exchange",
    "find_directions",
    "fingerprint",
    "is_alike",
    "list_bases",
    "receive_bases",
    "solve_bases",
]


Solve: TypeAlias = Callable[[int, Callable[[], Tensor]], Tensor]
"""Finds a basis from so many numbers, as a part of an exchange."""
_NOTHING_SEEN: State = {"samples": 0, "added": 0, "seen": {}}
_DIGITS, _DIGIT_BYTES = 3, 2
"""Of a hash. A float64 sums the squares of 16-bit digits exactly for a thousand replicas."""


def begin(seed: int, layout: Layout) -> State:
    """The state at the start."""
    return _sampling({"seed": seed, "layout": layout.state, "window": 0})


def list_bases(state: State) -> list[Tensor]:
    """The bases and, behind them, the means, in the order of the layers."""
    return [state[kind][name] for kind in ("bases", "means") for name in sorted(state["bases"])]


def add_mean(state: State, mean: Tensor, waited: int) -> State:
    r"""Adds the mean of one more exchange to what the next bases and means are found from.

    The next :math:`\mu` is the mean of all that has come out since the bases before were found. Residuals are sent in
    the end, so that is the mean of the gradients, while a sample alone holds those of several.

    Args:
      state: of now.
      mean: flat, of all replicas, finite.
      waited: so many exchanges have added to the part of a sample that lies outside the bases; it is divided by the
        root, so that it varies as much as that of one. 0: the mean is no sample.
    """
    flat, previous = mean.to(working_dtype(mean.dtype)), state["seen"]
    added = {"total": flat}
    for name, layer in Layout.of_state(state["layout"]).named.items() if waited else ():
        rows = layer.rows(flat, 0, layer.slices)
        if name in state["bases"]:
            basis = state["bases"][name].to(flat.device)
            rows = rows - state["means"][name].to(flat.device)
            rows = torch.lerp(rows @ basis @ basis.T, rows, waited**-0.5)
        added |= {f"{name}.sum": rows, f"{name}.gram": rows.T @ rows}
    sums = {
        key: value + previous[key].to(value.device) if key in previous else value.clone()
        for key, value in added.items()
    }
    counts = {"samples": state["samples"] + (waited > 0), "added": state["added"] + 1}
    return {**state, **counts, "seen": {**previous, **sums}}


def solve_bases(state: State, ratio: float | None, left_out: float, solve: Solve) -> State:
    """All samples are there: finds bases and means.

    Args:
      state: of now.
      ratio: K over the columns of a basis; ``None``: as many as explain the variance.
      left_out: share of the variance that bases need not explain.
      solve: finds each basis.
    """
    samples, count = state["seen"], state["samples"]
    total = (samples["total"] / state["added"]).nan_to_num_(0.0, 0.0, 0.0)
    bases, means = {}, {}
    for name, layer in Layout.of_state(state["layout"]).named.items():
        means[name] = layer.rows(total, 0, layer.slices)
        sums = (samples[f"{name}.sum"], samples[f"{name}.gram"])
        bases[name] = solve(layer.slice_numel**2, partial(find_directions, *sums, count, ratio, left_out))
    solution = {"means": means, "bases": bases, "window": state["window"] + 1}
    return {**state, **_NOTHING_SEEN, **solution, "phase": "confirm", "count": 0}


def find_directions(sums: Tensor, gram: Tensor, count: int, ratio: float | None, left_out: float) -> Tensor:
    """Finds the directions in which slices vary most about their own means.

    Args:
      sums: of the samples of each slice, shape ``(slices, K)``.
      gram: sum of the outer products of all samples of all slices, shape ``(K, K)``.
      count: samples of each slice.
      ratio: K over d; ``None``: see :func:`count_dimensions`.
      left_out: for :func:`count_dimensions`.

    Returns:
      U, shape ``(K, d)``, its columns orthonormal; d is 1 at least, and at most the rank that the samples can have.
    """
    covariance = (gram - sums.T @ sums / count).nan_to_num_(0.0, 0.0, 0.0)
    variances, directions = torch.linalg.eigh(covariance)
    num_columns = (
        count_dimensions(variances.flip(0).clamp_(min=0.0), left_out)
        if ratio is None
        else max(1, round(len(gram) / ratio))
    )
    num_columns = min(num_columns, max(1, len(sums) * (count - 1)))
    basis: Tensor = directions[:, -num_columns:].flip(1).clone(memory_format=torch.contiguous_format)
    return basis


def adopt_bases(state: State, received: list[Tensor]) -> State:
    """Rank 0's bases are here, in the order of :func:`list_bases`."""
    names = sorted(state["bases"])
    bases = dict(zip(names, received[: len(names)], strict=True))
    means = dict(zip(names, received[len(names) :], strict=True))
    return {**state, "phase": "compress", "means": means, "bases": bases}


def count_exchange(state: State, in_favour: float, *, steps: float, size: int) -> State:
    """Counts an exchange; begins another window after ``steps``, or when ``in_favour`` is a majority of ``size``."""
    count = state["count"] + 1
    if count >= steps or 2 * in_favour > size:
        return _sampling(state)
    return {**state, "count": count}


def _sampling(state: State) -> State:
    cleared = {"window": state["window"] + 1, "means": {}, "bases": {}}
    return {**state, **_NOTHING_SEEN, **cleared, "phase": "sample", "count": 0}


def count_dimensions(variances: Tensor, left_out: float) -> int:
    r"""The smallest d that explains all variance but a share.

    .. math:: \sum_{k \le d} s_k \ge (1 - \lambda) \sum_k s_k

    Args:
      variances: s, the largest first.
      left_out: :math:`\lambda`.

    Returns:
      At least 1, so that a slice that did not change in the window is not left out for ever, which is our choice.

    References: Yu et al. 2018, eq. (6).
    """
    explained = variances.double().cumsum(0)
    bound = (1.0 - left_out) * explained[-1]
    return min(int((explained < bound).sum()) + 1, len(variances))


def fingerprint(tensors: Iterable[Tensor]) -> list[float]:
    """Numbers whose sums over the replicas say whether all have the same bits: digits of a hash and their squares."""
    hasher = hashlib.blake2b(digest_size=_DIGITS * _DIGIT_BYTES)
    for tensor in tensors:
        hasher.update(tensor.contiguous().cpu().view(torch.uint8).numpy().data)
    digest = hasher.digest()
    digits = [
        float(int.from_bytes(digest[start : start + _DIGIT_BYTES])) for start in range(0, len(digest), _DIGIT_BYTES)
    ]
    return [*digits, *(digit * digit for digit in digits)]


def is_alike(summed: Sequence[float], size: int) -> bool:
    """Whether fingerprints that sum to this over ``size`` replicas were equal.

    The inequality of Cauchy and Schwarz is an equality for equal numbers alone.
    """
    digits, squares = summed[:_DIGITS], summed[_DIGITS:]
    return all(size * square == digit * digit for digit, square in zip(digits, squares, strict=True))


async def receive_bases(channel: Channel, own: Sequence[Tensor], piece_numel: int) -> list[Tensor]:
    """Rank 0's bases and means, on all ranks.

    Bases may be larger than the tensor that they are for, and no message may be; so they go in pieces as long as that.

    Args:
      channel: the exchange's.
      own: this rank's, in the order of :func:`list_bases`; all ranks have equal K, and may have unlike d.
      piece_numel: the most numbers in a message.

    Raises:
      ProtocolError: rank 0's do not fit the own tensor.
    """

    async def broadcast(hop: int, like: Tensor) -> Tensor:
        """What rank 0 sends, on all ranks."""
        if channel.rank:
            (incoming,) = (await channel.recv(0, hop, (TensorSpec.of(like),))).tensors()
            return moved(incoming, like.device)
        for peer in others(channel):
            channel.send(Payload((like,)), peer, hop)
        return like

    bases, means = own[: len(own) // 2], own[len(own) // 2 :]
    columns = (await broadcast(channel.hops(1), torch.tensor([basis.shape[1] for basis in bases]))).tolist()
    if not all(1 <= d <= len(basis) for d, basis in zip(columns, bases, strict=True)):
        raise ProtocolError(
            f"rank 0 sent bases of {columns} columns: do all ranks run the same model and recipe?"
        )
    shapes = [(len(basis), d) for d, basis in zip(columns, bases, strict=True)] + [
        mean.shape for mean in means
    ]
    sizes = [math.prod(shape) for shape in shapes]
    flat = means[0].new_empty(sum(sizes)) if channel.rank else torch.cat([tensor.reshape(-1) for tensor in own])
    pieces = cut(len(flat), math.ceil(len(flat) / piece_numel))
    hop = channel.hops(len(pieces))
    received_numbers = torch.cat([await broadcast(hop + index, piece.of(flat)) for index, piece in enumerate(pieces)])
    return [part.view(shape).clone() for part, shape in zip(received_numbers.split(sizes), shapes, strict=True)]
