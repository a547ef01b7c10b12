"""Shared state of a GradiVeQ window, its transitions, and the broadcast of rank 0's bases."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from farflung.codecs.blocks import get_working_dtype
from farflung.comm.collectives.segments import cut_segments, list_peers
from farflung.comm.staging import copy_tensor_to_device
from farflung.errors import ProtocolError
from farflung.reducers.gradiveq.slices import Layout
from farflung.types import Channel, Payload, State, TensorSpec

__all__ = [
    "add_mean",
    "adopt_bases",
    "advance_window",
    "broadcast_bases",
    "compute_basis",
    "compute_fingerprint",
    "count_dimensions",
    "init_window",
    "is_unanimous",
    "list_bases",
    "solve_bases",
]


_NO_SAMPLES: State = {"samples": 0, "added": 0, "sums": {}}
_NUM_DIGITS, _DIGIT_NBYTES = 3, 2
"""Shape of a hash. A float64 sums the squares of 16-bit digits exactly for a thousand replicas."""


def init_window(seed: int, layout: Layout) -> State:
    """Returns the initial state."""
    return _begin_sampling({"seed": seed, "layout": layout.state, "window": 0})


def list_bases(state: State) -> list[Tensor]:
    """Lists the bases, followed by the means, in the order of the layers."""
    return [state[kind][name] for kind in ("bases", "means") for name in sorted(state["bases"])]


def add_mean(state: State, mean: Tensor, num_accumulated: int) -> State:
    r"""Adds the mean of an exchange to the sums from which the next bases and means are computed.

    The next :math:`\mu` is the mean of all results since the previous bases. Residuals are sent eventually, so that is
    the mean of the gradients, while a single sample holds those of several.

    Args:
      state: Current state.
      mean: Finite flat mean over all replicas.
      num_accumulated: Number of exchanges accumulated in the part of the sample outside the bases. That part is
        divided by its root, which restores the variance of one exchange. If 0, the mean is no sample.
    """
    flat, previous = mean.to(get_working_dtype(mean.dtype)), state["sums"]
    added = {"total": flat}
    for name, layer in Layout.from_state(state["layout"]).layers_by_name.items() if num_accumulated else ():
        rows = layer.read_slices(flat, 0, layer.num_slices)
        if name in state["bases"]:
            basis = state["bases"][name].to(flat.device)
            rows = rows - state["means"][name].to(flat.device)
            rows = torch.lerp(rows @ basis @ basis.T, rows, num_accumulated**-0.5)
        added |= {f"{name}.sum": rows, f"{name}.gram": rows.T @ rows}
    sums = {
        key: value + previous[key].to(value.device) if key in previous else value.clone()
        for key, value in added.items()
    }
    counts = {"samples": state["samples"] + (num_accumulated > 0), "added": state["added"] + 1}
    return {**state, **counts, "sums": {**previous, **sums}}


def solve_bases(state: State, ratio: float | None, left_out: float, charge: Callable[[int], None]) -> State:
    """Computes bases and means once all samples are complete.

    Args:
      state: Current state.
      ratio: K over the columns of a basis; None for as many columns as explain the variance.
      left_out: Share of the variance that bases need not explain.
      charge: Charges for a basis, by the number of elements of its matrix.
    """
    samples, count = state["sums"], state["samples"]
    total = (samples["total"] / state["added"]).nan_to_num_(0.0, 0.0, 0.0)
    bases, means = {}, {}
    for name, layer in Layout.from_state(state["layout"]).layers_by_name.items():
        means[name] = layer.read_slices(total, 0, layer.num_slices)
        charge(layer.slice_numel**2)
        bases[name] = compute_basis(samples[f"{name}.sum"], samples[f"{name}.gram"], count, ratio, left_out)
    solution = {"means": means, "bases": bases, "window": state["window"] + 1}
    return {**state, **_NO_SAMPLES, **solution, "phase": "confirm", "count": 0}


def compute_basis(
    sums: Tensor, gram: Tensor, num_samples: int, ratio: float | None, left_out: float
) -> Tensor:
    """Returns an orthonormal basis of the directions in which slices vary most about their means.

    Args:
      sums: Sum of the samples of each slice, shape ``(slices, K)``.
      gram: Sum of the outer products of all samples of all slices, shape ``(K, K)``.
      num_samples: Number of samples of each slice.
      ratio: K over d; None uses :func:`count_dimensions`.
      left_out: Share for :func:`count_dimensions`.

    Returns:
      U of shape ``(K, d)`` with orthonormal columns; d is at least 1, and at most the rank of the samples.
    """
    covariance = (gram - sums.T @ sums / num_samples).nan_to_num_(0.0, 0.0, 0.0)
    variances, directions = torch.linalg.eigh(covariance)
    num_columns = (
        count_dimensions(variances.flip(0).clamp_(min=0.0), left_out)
        if ratio is None
        else max(1, round(len(gram) / ratio))
    )
    num_columns = min(num_columns, max(1, len(sums) * (num_samples - 1)))
    basis: Tensor = directions[:, -num_columns:].flip(1).clone(memory_format=torch.contiguous_format)
    return basis


def adopt_bases(state: State, tensors: list[Tensor]) -> State:
    """Returns the state with phase ``compress`` and rank 0's bases and means, in the order of :func:`list_bases`."""
    names = sorted(state["bases"])
    bases = dict(zip(names, tensors[: len(names)], strict=True))
    means = dict(zip(names, tensors[len(names) :], strict=True))
    return {**state, "phase": "compress", "means": means, "bases": bases}


def advance_window(state: State, num_drifted_ranks: float, *, steps: float, size: int) -> State:
    """Counts an exchange; starts a new window after ``steps``, or if most of ``size`` ranks report drift."""
    count = state["count"] + 1
    if count >= steps or 2 * num_drifted_ranks > size:
        return _begin_sampling(state)
    return {**state, "count": count}


def _begin_sampling(state: State) -> State:
    cleared = {"window": state["window"] + 1, "means": {}, "bases": {}}
    return {**state, **_NO_SAMPLES, **cleared, "phase": "sample", "count": 0}


def count_dimensions(variances: Tensor, left_out: float) -> int:
    r"""Returns the smallest number of dimensions that explain the share ``1 - left_out`` of the variance.

    .. math:: \sum_{k \le d} s_k \ge (1 - \lambda) \sum_k s_k

    Args:
      variances: s in descending order.
      left_out: :math:`\lambda`.

    Returns:
      At least 1, so that a slice without variance in the window is still sent, which is our choice.

    References: Yu et al. 2018, eq. (6).
    """
    explained = variances.double().cumsum(0)
    bound = (1.0 - left_out) * explained[-1]
    return min(int((explained < bound).sum()) + 1, len(variances))


def compute_fingerprint(tensors: Iterable[Tensor]) -> list[float]:
    """Computes digits of a hash and their squares, whose sums over the replicas show if all hashes are equal."""
    hasher = hashlib.blake2b(digest_size=_NUM_DIGITS * _DIGIT_NBYTES)
    for tensor in tensors:
        hasher.update(tensor.contiguous().cpu().view(torch.uint8).numpy().data)
    digest = hasher.digest()
    digits = [
        float(int.from_bytes(digest[start : start + _DIGIT_NBYTES]))
        for start in range(0, len(digest), _DIGIT_NBYTES)
    ]
    return [*digits, *(digit * digit for digit in digits)]


def is_unanimous(summed: Sequence[float], size: int) -> bool:
    """Returns True if the fingerprints that sum to ``summed`` over ``size`` replicas are equal.

    The Cauchy-Schwarz inequality is an equality for equal numbers only.
    """
    digits, squares = summed[:_NUM_DIGITS], summed[_NUM_DIGITS:]
    return all(size * square == digit * digit for digit, square in zip(digits, squares, strict=True))


async def broadcast_bases(
    channel: Channel, local_tensors: Sequence[Tensor], piece_numel: int
) -> list[Tensor]:
    """Broadcasts rank 0's bases and means.

    Bases may be larger than their tensor, and a message may not; so they are sent in pieces of at most that length.

    Args:
      channel: Channel of the exchange.
      local_tensors: Bases and means of this rank, in the order of :func:`list_bases`; K is equal on all ranks.
      piece_numel: Largest number of elements in a message.

    Raises:
      ProtocolError: Rank 0's bases do not fit this rank's.
    """

    async def broadcast(hop: int, tensor: Tensor) -> Tensor:
        if channel.rank:
            (incoming,) = (await channel.recv(0, hop, (TensorSpec.from_tensor(tensor),))).iter_tensors()
            return copy_tensor_to_device(incoming, tensor.device)
        for peer in list_peers(channel):
            channel.send(Payload((tensor,)), peer, hop)
        return tensor

    bases, means = local_tensors[: len(local_tensors) // 2], local_tensors[len(local_tensors) // 2 :]
    columns = (
        await broadcast(channel.reserve_hops(1), torch.tensor([basis.shape[1] for basis in bases]))
    ).tolist()
    if not all(1 <= d <= len(basis) for d, basis in zip(columns, bases, strict=True)):
        raise ProtocolError(
            f"rank 0 sent bases of {columns} columns: do all ranks run the same model and recipe?"
        )
    shapes = [(len(basis), d) for d, basis in zip(columns, bases, strict=True)] + [
        mean.shape for mean in means
    ]
    sizes = [math.prod(shape) for shape in shapes]
    flat = (
        means[0].new_empty(sum(sizes))
        if channel.rank
        else torch.cat([tensor.reshape(-1) for tensor in local_tensors])
    )
    pieces = cut_segments(len(flat), math.ceil(len(flat) / piece_numel))
    hop = channel.reserve_hops(len(pieces))
    numbers = torch.cat(
        [await broadcast(hop + index, piece.narrow(flat)) for index, piece in enumerate(pieces)]
    )
    return [part.view(shape).clone() for part, shape in zip(numbers.split(sizes), shapes, strict=True)]
