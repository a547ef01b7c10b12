"""Predicts the memory that training takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from farflung.config import BUCKET_NBYTES
from farflung.errors import UnknownName

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OPTIMIZER_COPIES", "estimate_training_nbytes", "measure_saved_nbytes"]

OPTIMIZER_COPIES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Number of tensors as large as the parameters that an optimizer keeps."""


def estimate_training_nbytes(
    parameters_nbytes: int,
    batch_size: int,
    *,
    optimizer: str = "sgd",
    sample_nbytes: float = 0,
    activations_nbytes: float = 0,
    in_flight: int = 0,
    fixed_nbytes: float = 0,
    bucket_nbytes: int = BUCKET_NBYTES,
) -> int:
    r"""Estimates the bytes that one replica needs for a step of training.

    .. math:: M = M_0 + (2 + k + f)\,P + \min(P, b) + B\,(s + a)

    Args:
      parameters_nbytes: :math:`P`; counted for the parameters and for the buckets of gradients. A gradient of autograd
        exists besides until its bucket is full.
      batch_size: :math:`B`.
      optimizer: Name in :data:`OPTIMIZER_COPIES`, for :math:`k`.
      sample_nbytes: :math:`s`, bytes of one sample's inputs and targets.
      activations_nbytes: :math:`a`, bytes that autograd keeps per sample; see :func:`measure_saved_nbytes`.
      in_flight: :math:`f`, copies of the gradient in exchanges that outlive their step.
      fixed_nbytes: :math:`M_0`, bytes of the process: libraries, the device's context.
      bucket_nbytes: :math:`b`, bytes of a bucket of gradients.

    Raises:
      UnknownName: There is no such optimizer.

    References: Rajbhandari et al. 2020 (ZeRO), section 3, in float32 throughout.
    """
    if optimizer not in OPTIMIZER_COPIES:
        raise UnknownName("optimizer", optimizer, OPTIMIZER_COPIES)
    copies = 2 + OPTIMIZER_COPIES[optimizer] + in_flight
    bucket_copy_nbytes = min(parameters_nbytes, bucket_nbytes)
    samples = batch_size * (sample_nbytes + activations_nbytes)
    return round(fixed_nbytes + copies * parameters_nbytes + bucket_copy_nbytes + samples)


def measure_saved_nbytes(forward: Callable[[], Tensor], excluded: Iterable[Tensor] = ()) -> int:
    """Measures the bytes that autograd keeps of a forward pass; storage shared by several tensors counts once.

    Args:
      forward: Function that computes the loss.
      excluded: Tensors that are not counted: parameters, buffers, the batch.
    """
    from torch.autograd.graph import saved_tensors_hooks

    excluded_storages = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    nbytes_by_storage: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded_storages:
            nbytes_by_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward()
    total = sum(nbytes_by_storage.values())
    del loss  # it keeps the saved tensors alive until here, so that no storage is reused
    return total
