"""Loops as people write them around an optimizer, for the pool's workers: what each comes to under a schedule."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

import farflung
import farflung.recipes
from farflung.handle import Handle
from farflung.wall import LaunchEnv

STEPS = 7
Optimizer = torch.optim.Optimizer
Loop = Callable[[nn.Sequential, Optimizer, Handle | None, int], None]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as its users have it: two passes, and ``step`` is never called."""

    def __init__(
        self, parameters: Iterator[nn.Parameter], base: Callable[..., Optimizer], **options: Any
    ) -> None:
        super().__init__(parameters, dict(options))
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.kept: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def first_step(self) -> None:
        """Climbs, by the gradient of the first pass."""
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in used]).norm()
        for p in used:
            self.kept[p] = p.detach().clone()
            p.add_(p.grad, alpha=float(0.05 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Goes back and descends, by the gradient of the second pass."""
        for p, value in self.kept.items():
            p.data = value
        self.base_optimizer.step()
        self.zero_grad()

    @override
    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD, whose state is a model: training is at y, evaluation at x, which both lie between."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "steps": 0})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, 1 / group["steps"]).sub_(p.grad, alpha=0.1 * group["lr"])
                z.sub_(p.grad, alpha=group["lr"])

    @torch.no_grad()
    def eval(self) -> None:
        """Puts x in the place of y."""
        for group in self.param_groups:
            for p in group["params"]:
                p.lerp_(self.state[p]["z"], 1 - 1 / 0.9)


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each rank's own data."""
    random = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        yield torch.randn(8, 12, generator=random), torch.randint(5, (8,), generator=random)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    out = model(x)
    return F.cross_entropy(out, y), 0.1 * out.square().mean()


def one_loss(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    for x, y in batches(rank):
        optimizer.zero_grad()
        sum(losses(model, x, y)).backward()  # type: ignore[union-attr]
        optimizer.step()


def two_losses(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    for x, y in batches(rank):
        optimizer.zero_grad()
        first, second = losses(model, x, y)
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()


def micro_batches(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    for x, y in batches(rank):
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            (sum(losses(model, part, target)) / 4).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


def micro_batches_no_sync(
    model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int
) -> None:
    for x, y in batches(rank):
        for number, (part, target) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
            with handle.no_sync() if handle and number < 3 else contextlib.nullcontext():
                (sum(losses(model, part, target)) / 4).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


def discarded_passes(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    """Adversarial examples: several passes whose gradients are thrown away before the one that counts."""
    for x, y in batches(rank):
        for _ in range(3):
            losses(model, x, y)[1].backward()
            optimizer.zero_grad()
        sum(losses(model, x, y)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


def sharpness_aware(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    assert isinstance(optimizer, SAM)
    for x, y in batches(rank):
        sum(losses(model, x, y)).backward()  # type: ignore[union-attr]
        optimizer.first_step()
        sum(losses(model, x, y)).backward()  # type: ignore[union-attr]
        optimizer.second_step()


def by_hand(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    for x, y in batches(rank):
        model.zero_grad()
        sum(losses(model, x, y)).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)


def another_after(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    """A second optimizer has the biases, and steps after the one that is attached."""
    other = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=0.01)
    for x, y in batches(rank):
        optimizer.zero_grad()
        other.zero_grad()
        sum(losses(model, x, y)).backward()  # type: ignore[union-attr]
        optimizer.step()
        other.step()


def another_before(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    other = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=0.01)
    for x, y in batches(rank):
        optimizer.zero_grad()
        other.zero_grad()
        sum(losses(model, x, y)).backward()  # type: ignore[union-attr]
        other.step()
        optimizer.step()


def clamped(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    for x, y in batches(rank):
        optimizer.zero_grad()
        sum(losses(model, x, y)).backward()  # type: ignore[union-attr]
        optimizer.step()
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)


def noised(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    """Noise of each rank's own on the weights, after each step."""
    random = torch.Generator().manual_seed(rank)
    for x, y in batches(rank):
        optimizer.zero_grad()
        sum(losses(model, x, y)).backward()  # type: ignore[union-attr]
        optimizer.step()
        for p in model.parameters():
            p.data.add_(0.01 * torch.randn(p.shape, generator=random))


def schedule_free(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    """Evaluated after all replicas have come together."""
    assert isinstance(optimizer, ScheduleFree)
    assert handle
    for x, y in batches(rank):
        optimizer.zero_grad()
        sum(losses(model, x, y)).backward()  # type: ignore[union-attr]
        optimizer.step()
    handle.finish()
    optimizer.eval()


def in_backward(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    """An optimizer for each parameter, stepped as soon as its gradient is there."""
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: nn.Parameter) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x, y in batches(rank):
        sum(losses(model, x, y)).backward()  # type: ignore[union-attr]


def by_hand_in_backward(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    """Updates without an optimizer, in hooks that were there before."""
    for x, y in batches(rank):
        sum(losses(model, x, y)).backward()  # type: ignore[union-attr]


def update_in_backward(p: Tensor) -> None:
    """A hook that steps on a gradient and frees it."""
    assert p.grad is not None
    p.data.sub_(p.grad, alpha=0.1)
    p.grad = None


class WithoutGradient(torch.autograd.Function):
    """Gives its second input no gradient."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, unused: Tensor) -> Tensor:
        return x + 0 * unused.sum()

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def undefined_gradients(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    """A parameter whose hooks are called though it gets no gradient."""
    for x, y in batches(rank):
        optimizer.zero_grad()
        hidden = WithoutGradient.apply(x @ model.get_parameter("0.weight").T, model.get_parameter("0.bias"))
        F.cross_entropy(model[2](torch.tanh(hidden)), y).backward()
        optimizer.step()


def with_graph(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    for x, y in batches(rank):
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sum(losses(model, x, y)).backward(create_graph=True)  # type: ignore[union-attr]
        optimizer.step()


def functional(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    """Gradients that no backward pass leaves."""
    for x, y in batches(rank):
        parameters = [*model.parameters()]
        for p, gradient in zip(
            parameters, torch.autograd.grad(losses(model, x, y)[0], parameters), strict=True
        ):
            p.grad = gradient
        optimizer.step()


def micro_batches_of_padding(
    model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int
) -> None:
    """The first one of a step counts for nothing on one rank, so that its gradients are zeros."""
    for step, (x, y) in enumerate(batches(rank)):
        optimizer.zero_grad()
        for number, (part, target) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            weight = 0.0 if (rank, step, number) == (0, 2, 0) else 0.5
            (weight * sum(losses(model, part, target))).backward()  # type: ignore[union-attr]
        optimizer.step()


class Failing(torch.autograd.Function):
    """Has no memory for its gradient."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise MemoryError


def another_try(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    """A backward pass fails after its first gradients, and the batch is tried again."""
    for step, (x, y) in enumerate(batches(rank)):
        optimizer.zero_grad()
        if (rank, step) == (0, 2):
            with contextlib.suppress(MemoryError):
                F.cross_entropy(model[2](Failing.apply(model[1](model[0](x)))), y).backward()
            optimizer.zero_grad()
        sum(losses(model, x, y)).backward()  # type: ignore[union-attr]
        optimizer.step()


def critics(model: nn.Sequential, optimizer: Optimizer, handle: Handle | None, rank: int) -> None:
    """An optimizer of other parameters takes several steps for each one of the attached."""
    other = torch.optim.SGD(model[0].parameters(), lr=0.01)
    for x, y in batches(rank):
        for _ in range(5):
            other.zero_grad()
            model[0](x).square().mean().backward()
            other.step()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


LOOPS: dict[str, Loop] = {
    each.__name__: each
    for each in (
        one_loss,
        two_losses,
        micro_batches,
        micro_batches_no_sync,
        discarded_passes,
        sharpness_aware,
        by_hand,
        another_after,
        another_before,
        clamped,
        noised,
        schedule_free,
        in_backward,
        by_hand_in_backward,
        undefined_gradients,
        with_graph,
        functional,
        micro_batches_of_padding,
        another_try,
        critics,
    )
}


def run(rank: int, size: int, store: dist.Store, *, how: str, loops: list[str]) -> dict[str, dict[str, Any]]:
    """What each loop ends with: parameters, steps, what was said; or the error that stopped it."""
    recipe = farflung.recipes.parse_recipe("synchronous").with_components(schedule=how)
    return {
        name: _run(LOOPS[name], recipe, LaunchEnv(rank, size, rank, size), dist.PrefixStore(name, store))
        for name in loops
    }


def _run(loop: Loop, recipe: farflung.Recipe, env: LaunchEnv, store: dist.Store) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))
    if loop is sharpness_aware:
        optimizer: Optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    elif loop is schedule_free:
        optimizer = ScheduleFree(model.parameters(), lr=0.1)
    elif loop in (another_after, another_before):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.1, momentum=0.9)
    else:
        of = model[2] if loop is critics else model
        optimizer = torch.optim.SGD(of.parameters(), lr=0.1, momentum=0.9)
    if loop is by_hand_in_backward:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update_in_backward)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with farflung.attach(
                model, optimizer, recipe, launch_env=env, store=store, deadline_s=20.0
            ) as handle:
                loop(model, optimizer, handle, env.rank)
                with handle.use_averaged_model() if not handle.is_finished else contextlib.nullcontext():
                    averaged = [p.detach().clone() for p in model.parameters()]
        except (farflung.errors.FarflungError, RuntimeError) as error:
            return {"error": str(error)}
    said = [
        str(each.message)
        for each in itertools.islice(caught, 4)
        if "attach: the optimizer" not in str(each.message)
    ]
    return {
        "error": "",
        "said": " ".join(said),
        "step": handle.step,
        "averaged": averaged,
        "end": [p.detach().clone() for p in model.parameters()],
    }
