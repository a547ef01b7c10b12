"""Checks of the models and optimizers of external training loops; what is unsupported is refused before training."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from farflung.errors import ConfigError, Unsupported

__all__ = [
    "accumulates",
    "check_optimizer",
    "check_sole",
    "check_whole",
    "held_by",
    "named",
    "needs_closure",
    "plain_optimizer",
]

_FEW = 4
"""Names of parameters in a message."""


def check_sole(model: nn.Module) -> None:
    """Refuses a model whose gradients another library exchanges, or whose parameters are sharded.

    Raises:
      Unsupported: DistributedDataParallel or FSDP.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise Unsupported(
                "attach: the model is a DistributedDataParallel, and gradients would be exchanged twice: pass and call "
                "model.module, or keep DistributedDataParallel and register farflung.ddp_hook"
            )
        if _is_a(module, "FullyShardedDataParallel"):
            raise Unsupported(_SHARDED)
    if any(_is_a(parameter, "DTensor") for parameter in model.parameters()):
        raise Unsupported(_SHARDED)


_SHARDED = (
    "attach: the model is sharded by FSDP or as DTensors, while farflung needs the whole of it on each replica: "
    "attach it unsharded"
)


def _is_a(thing: object, kind: str) -> bool:
    """By name, since importing the class would take a second where it is not used."""
    return any(base.__name__ == kind for base in type(thing).__mro__)


def check_whole(model: nn.Module, *, is_alone: bool = False) -> None:
    """Refuses tensors that cannot be overwritten with those of another rank, and layers whose gradients are sparse.

    Args:
      model: of this rank.
      is_alone: whether there is no other rank, so that tensors need no values yet.

    Raises:
      Unsupported: names the tensor or the layer.
    """
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise Unsupported(
                f"attach: {name} is lazy and has no shape yet: run a batch through the model before, on all ranks"
            )
        if not is_alone and (reason := _reason_not_whole(tensor)):
            raise Unsupported(f"attach: {name} {reason}")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise Unsupported(
                f"attach: layer {name or type(module).__name__} has sparse gradients: use sparse=False"
            )


def _reason_not_whole(tensor: Tensor) -> str | None:
    if tensor.is_meta:
        return "is on the meta device and has no values: load or initialize the model before"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}, and only dense tensors can be exchanged: make it dense"
    if any(extent > 1 and stride == 0 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded, so that several elements share one place in memory: clone() it"
    return None


_WRAPPED = ("optimizer", "base_optimizer")
"""Attributes by which wrappers hold an optimizer."""


def plain_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer itself, where a wrapper such as Accelerate's or SAM has it in an attribute.

    Raises:
      ConfigError: it is none of torch's.
    """
    inner: object = optimizer
    while wrapped := [
        each for name in _WRAPPED if isinstance(each := getattr(inner, name, None), torch.optim.Optimizer)
    ]:
        inner = wrapped[0]
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(f"attach: {type(optimizer).__name__} is no torch.optim.Optimizer")
    return inner


def accumulates(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether a wrapper adds this pass to later ones without a step, as Accelerate's in ``accumulate()``."""
    return not getattr(getattr(optimizer, "gradient_state", None), "sync_gradients", True)


def held_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Whether an optimizer is the model's own; says so once where it has only some of the parameters.

    Raises:
      ConfigError: it has none of them, or others beside them.
    """
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = {id(p): p for p in held_by(optimizer)}
    if trained and not trained.keys() & held.keys():
        raise ConfigError(
            "attach: the optimizer holds none of the model's parameters: make it from model.parameters(), after the "
            "model has come to its device"
        )
    known = {id(p) for p in model.parameters()}
    if foreign := sum(p.requires_grad for key, p in held.items() if key not in known):
        raise ConfigError(
            f"attach: {foreign} parameters of the optimizer are not the model's, and would differ between replicas: "
            "attach one module that holds them all"
        )
    if lacking := [name for key, name in trained.items() if key not in held]:
        warnings.warn(
            f"attach: the optimizer lacks {named(lacking)}, whose gradients are exchanged nevertheless: freeze them "
            "before, unless another optimizer has them",
            stacklevel=3,
        )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step runs forward and backward by itself, as LBFGS's does."""
    takes = inspect.signature(optimizer.step).parameters.values()
    return any(p.name == "closure" and p.default is inspect.Parameter.empty for p in takes)


def named(names: Iterable[str]) -> str:
    """The first few of some names."""
    every = list(names)
    return ", ".join(every[:_FEW]) + (f" and {len(every) - _FEW} more" if len(every) > _FEW else "")
