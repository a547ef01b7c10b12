"""Checks of recipes, models and optimizers of external training loops, before training starts."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from farflung.config import ON_NONFINITE
from farflung.errors import ConfigError, Unsupported
from farflung.options import check_integer
from farflung.rates import NoScaling
from farflung.schedules import SCHEDULES
from farflung.spec import format_spec
from farflung.types import Schedule

if TYPE_CHECKING:
    from farflung.loop import Components
    from farflung.recipes import Recipe

__all__ = [
    "check_optimizer",
    "check_options",
    "check_recipe",
    "check_site",
    "check_steps",
    "check_tensors",
    "check_unwrapped",
    "describe_attach_support",
    "format_names",
    "is_accumulating",
    "list_optimizer_parameters",
    "needs_closure",
    "unwrap_optimizer",
]

_MAX_NAMES = 4
"""Largest number of parameter names in a message."""
_MANY_SHARES = 4
"""Number of shares of a site from which compressing each by itself costs considerably more bytes."""


def describe_attach_support(recipe: Recipe) -> str:
    """Returns ``yes`` if :func:`farflung.attach` supports the recipe, otherwise what it needs or why it is refused."""
    parts = recipe.build_components(0)
    if reason := parts.schedule.attach_refusal or _explain_refusal(parts):
        return f"no: {reason}"
    if recipe.sampler != "uniform":
        return f"draw batches with sampler {recipe.component_texts['sampler']}"
    return (
        "yes"
        if parts.stream.has_random_access
        else f"draw batches with stream {recipe.component_texts['stream']}"
    )


def check_options(
    parts: Components,
    nonfinite: str | None,
    elastic: int,
    quorum: str,
    deadline_s: float,
    *,
    size: int,
    has_sampler: bool,
) -> None:
    """Checks options of ``attach`` for ``size`` replicas that need neither a model nor other replicas.

    Raises:
      ConfigError: An option has no such value, or the recipe needs all replicas.
    """
    if nonfinite not in (None, *ON_NONFINITE):
        raise ConfigError(
            f"attach: nonfinite {nonfinite!r}: must be None or one of {', '.join(ON_NONFINITE)}"
        )
    check_integer("attach", "elastic", elastic, 0, size)
    if not deadline_s > 0:
        raise ConfigError(f"attach: deadline_s {deadline_s}: must be above 0")
    refusal = parts.reason_all_needed or ("an importance sampler needs all replicas" if has_sampler else "")
    if elastic and refusal:
        raise ConfigError(f"attach: elastic: {refusal}")
    if quorum not in ("majority", "1"):
        raise ConfigError(f"attach: quorum {quorum!r}: must be 'majority' or '1'")


def check_recipe(recipe: Recipe, parts: Components) -> None:
    """Checks that an external loop can follow a recipe.

    Raises:
      Unsupported: It cannot; names the reason and the nearest recipe that it can follow.
    """
    if reason := parts.schedule.attach_refusal or _explain_refusal(parts):
        raise Unsupported(
            f"attach cannot follow recipe {recipe.text}: {reason}; use farflung train, or this "
            f"recipe.with_components({_suggest_changes(parts)}), which comes nearest"
        )


def _suggest_changes(parts: Components) -> str:
    """Returns the changes that turn an unsupported recipe into the nearest supported one."""
    changes = {"sharing": "none"} if parts.sharing.has_data_transfers else {}
    if parts.scaling != NoScaling():
        changes["scaling"] = "none"
    if parts.schedule.attach_refusal:
        changes["schedule"] = format_spec(_find_nearest_schedule(parts.schedule), SCHEDULES)
    return ", ".join(f"{family}={text!r}" for family, text in changes.items())


def _find_nearest_schedule(schedule: Schedule) -> Schedule:
    from farflung.schedules import AdaComm, LocalSGD, Pipelined, Synchronous

    match schedule:
        case AdaComm():
            return LocalSGD(schedule.sync_every, schedule.optimizer_state)
        case Pipelined():
            return replace(schedule, predict=None)
    return Synchronous()


def _explain_refusal(parts: Components) -> str:
    """Returns why the recipe conflicts with an external training loop; empty if it does not."""
    if parts.sharing.has_data_transfers:
        return "it sees no samples and cannot send any to other replicas"
    return "" if parts.scaling == NoScaling() else "the learning rate is the loop's own"


def check_unwrapped(model: nn.Module, *, has_site: bool = False) -> None:
    """Checks that no other library exchanges the model's gradients, or shards its parameters beyond a known site.

    Args:
      model: Model of this process.
      has_site: True if the processes are known that hold the model together.

    Raises:
      Unsupported: The model uses DistributedDataParallel or FSDP1, or is sharded without a site.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise Unsupported(
                "attach: the model is a DistributedDataParallel, and gradients would be exchanged twice: pass and call "
                "model.module, or keep DistributedDataParallel and register farflung.ddp_hook; attach(site=...) "
                "averages gradients within a site by itself"
            )
        if _is_a(module, "FullyShardedDataParallel"):
            raise Unsupported(
                "attach: FullyShardedDataParallel replaces the model's parameters by its own: use "
                "torch.distributed.fsdp.fully_shard and attach(site=...)"
            )
    if not has_site and any(_is_a(parameter, "DTensor") for parameter in model.parameters()):
        raise Unsupported(
            "attach: the model is sharded by fully_shard or as DTensors: give attach(site=...) the device mesh or the "
            "process group of the processes that hold this replica together"
        )


def check_site(recipe: Recipe, parts: Components, size: int, *, has_sampler: bool, can_split: bool) -> None:
    """Checks that the processes of a site can exchange shares; warns if that costs more bytes.

    Args:
      recipe: Recipe of the run.
      parts: Its components.
      size: Number of processes of the site.
      has_sampler: True if the loop draws batches by importance.
      can_split: True if replicas cut off from the majority would continue.

    Raises:
      Unsupported: The shares of a site would not stay together.
    """
    if has_sampler:
        raise Unsupported(
            "attach: site: leave out sampler, which would learn from one share of the gradients"
        )
    if can_split:
        raise Unsupported(
            "attach: site: leave out quorum='1', or shares of one site may continue in two groups"
        )
    if parts.reducer.compresses_matrices and size >= _MANY_SHARES:
        warnings.warn(
            f"attach: recipe {recipe.text} compresses the part of a matrix that each of {size} processes exchanges, "
            "which sends more than compressing the whole: prefer int8, Top-k or diloco",
            stacklevel=3,
        )


def _is_a(instance: object, kind: str) -> bool:
    """Returns True for instances of a class with this name, without importing the class."""
    return any(base.__name__ == kind for base in type(instance).__mro__)


def check_tensors(model: nn.Module, *, is_alone: bool = False) -> None:
    """Checks that tensors can be overwritten by another rank's, and that no layer has sparse gradients.

    Args:
      model: Model of this rank.
      is_alone: True if there is no other rank, so that tensors need no values yet.

    Raises:
      Unsupported: A tensor or layer is unsupported; the message names it.
    """
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise Unsupported(
                f"attach: {name} is lazy and has no shape yet: run a batch through the model before, on all ranks"
            )
        if not is_alone and (reason := _explain_unsupported(tensor)):
            raise Unsupported(f"attach: {name} {reason}")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise Unsupported(
                f"attach: layer {name or type(module).__name__} has sparse gradients: use sparse=False"
            )


def _explain_unsupported(tensor: Tensor) -> str | None:
    if tensor.is_meta:
        return "is on the meta device and has no values: load or initialize the model before"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}, and only dense tensors can be exchanged: make it dense"
    if any(extent > 1 and stride == 0 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded, so that several elements share one place in memory: clone() it"
    return None


_WRAPPER_ATTRIBUTES = ("optimizer", "base_optimizer")
"""Attributes in which wrappers hold an optimizer."""


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer inside wrappers such as Accelerate's or SAM.

    Raises:
      ConfigError: The innermost object is not a torch optimizer.
    """
    inner: object = optimizer
    while inner_optimizers := [
        value
        for name in _WRAPPER_ATTRIBUTES
        if isinstance(value := getattr(inner, name, None), torch.optim.Optimizer)
    ]:
        inner = inner_optimizers[0]
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(f"attach: {type(optimizer).__name__} is no torch.optim.Optimizer")
    return inner


def is_accumulating(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if a wrapper accumulates this pass without a step, as Accelerate's ``accumulate()``."""
    return not getattr(getattr(optimizer, "gradient_state", None), "sync_gradients", True)


def list_optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Lists the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Checks that an optimizer's parameters are the model's; warns if it lacks some of them.

    Raises:
      ConfigError: It has none of the model's parameters, or other trainable parameters.
    """
    trainable_names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    optimizer_parameters = {id(p): p for p in list_optimizer_parameters(optimizer)}
    if trainable_names and not trainable_names.keys() & optimizer_parameters.keys():
        raise ConfigError(
            "attach: the optimizer holds none of the model's parameters: make it from model.parameters(), after the "
            "model has come to its device"
        )
    model_ids = {id(p) for p in model.parameters()}
    if foreign := sum(p.requires_grad for key, p in optimizer_parameters.items() if key not in model_ids):
        raise ConfigError(
            f"attach: {foreign} parameters of the optimizer are not the model's, and would differ between replicas: "
            "attach one module that holds them all"
        )
    if missing := [name for key, name in trainable_names.items() if key not in optimizer_parameters]:
        warnings.warn(
            f"attach: the optimizer lacks {format_names(missing)}, whose gradients are exchanged nevertheless: "
            f"freeze them "
            "before, unless another optimizer has them",
            stacklevel=3,
        )


def check_steps(schedule: Schedule, optimizer: torch.optim.Optimizer, size: int) -> None:
    """Warns where steps of ``size`` replicas do less than a user expects.

    Raises:
      Unsupported: The optimizer computes gradients inside its step, and the schedule has local or late steps.
    """
    name = type(optimizer).__name__
    if needs_closure(optimizer) and not schedule.is_synchronous:
        raise Unsupported(
            f"attach: {name} computes gradients inside its step, which schedule "
            f"{format_spec(schedule, SCHEDULES)} cannot follow: use a synchronous recipe"
        )
    if size > 1 and any(group.get("line_search_fn") for group in optimizer.param_groups):
        warnings.warn(
            f"attach: the line search of {name} compares losses: return the mean over all replicas from the closure, "
            "or they take different steps",
            stacklevel=3,
        )
    try:
        schedule.check(size)
    except ConfigError as error:
        warnings.warn(f"attach: {error}", stacklevel=3)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if a step requires a closure that computes the loss, as LBFGS's does."""
    parameters = inspect.signature(optimizer.step).parameters.values()
    return any(p.name == "closure" and p.default is inspect.Parameter.empty for p in parameters)


def format_names(names: Iterable[str]) -> str:
    """Joins the first few names and the number of the remaining ones."""
    listed = list(names)
    return ", ".join(listed[:_MAX_NAMES]) + (
        f" and {len(listed) - _MAX_NAMES} more" if len(listed) > _MAX_NAMES else ""
    )
