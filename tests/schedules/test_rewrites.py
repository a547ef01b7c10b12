"""Algorithms against short rewrites of their papers, in float64, on the same samples from the same parameters.

What a rewrite has in common with farflung is the batches and the seeds. Its model, its gradients and its optimizers are
written out here, its parameters are one vector, and all replicas take their steps in turn. After every step the
parameters of every replica are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from farflung.data import TensorDataset
from farflung.recipes import parse_recipe
from farflung.seeding import create_generator, derive_seed
from farflung.types import Batch, Dataset
from farflung.workloads import Quadratic
from farflung.workloads.classification import build_model
from tests.schedules.runs import APART, Run

SIZE, SEED = 3, 3
SHAPES = ((4,), (4, 32), (32,), (32, 16))
"""The parameters in the order in which their gradients arrive, that of buckets: the last layer's first."""
NUMELS = [math.prod(shape) for shape in SHAPES]
PLAIN: dict[str, Any] = {"learning_rate": 0.05}
ADAMW: dict[str, Any] = {
    "optimizer": "adamw(betas=(0.9, 0.95))",
    "learning_rate": 0.01,
    "weight_decay": 0.1,
}

Batches: TypeAlias = Sequence[Sequence[Batch]]
"""Of each replica, by step."""
Optimizer: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Parameters and a gradient to new parameters."""
Send: TypeAlias = Callable[[int, Tensor], Tensor]
"""What the others receive of a rank's tensor."""


# --- both sides -----------------------------------------------------------------------------------------------------


class Network(Quadratic):
    """Two layers in float64; keeps the batches that it is trained on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batches: list[Batch] = []

    def build_model(self, generator: torch.Generator) -> nn.Module:
        return build_model(
            lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double(), generator
        )

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        random = create_generator(SEED, "samples")
        inputs, targets = (
            torch.randn(self.samples, width, dtype=torch.float64, generator=random) for width in (16, 4)
        )
        data = TensorDataset(inputs, targets)
        return data, data

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            self.batches.append(batch)
        found: Tensor = model(batch.inputs)
        return (found - batch.targets).square().sum(dim=1) / 2

    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        return -self.compute_losses(model, batch)


def trained(
    schedule: str,
    parts: Mapping[str, Any] | None = None,
    *,
    steps: int = 40,
    settings: Mapping[str, Any] = PLAIN,
    **options: Any,
) -> tuple[Tensor, tuple[Tensor, Batches]]:
    """Every replica's parameters after every step; those of all at the start, and the batches."""
    networks: list[Network] = []

    def network() -> Network:
        networks.append(Network(samples=64))
        return networks[-1]

    given = {"steps": steps, "seed": SEED, **settings}
    run = Run(schedule, SIZE, parts or {}, workload=network, settings=given, **options)

    def weights(rank: int) -> Tensor:
        last_first = reversed(list(run.replicas[rank].model.parameters()))
        return torch.cat([p.detach().reshape(-1) for p in last_first])

    first, path = weights(0), []
    for _ in range(steps):
        run.steps(1)
        path.append(torch.stack([weights(rank) for rank in range(SIZE)]))
    return torch.stack(path), (first, [one.batches for one in networks])


def same(ours: Tensor, theirs: Sequence[Sequence[Tensor]]) -> None:
    """All parameters, to rounding."""
    wanted = torch.stack([torch.stack(list(after)) for after in theirs])
    torch.testing.assert_close(ours, wanted, rtol=0.0, atol=1e-12)


def loss(w: Tensor, batch: Batch) -> Tensor:
    """The mean over a batch."""
    bias_2, weight_2, bias_1, weight_1 = (
        piece.view(shape) for piece, shape in zip(w.split(NUMELS), SHAPES, strict=True)
    )
    outputs: Tensor = torch.tanh(batch.inputs @ weight_1.T + bias_1) @ weight_2.T + bias_2
    return (outputs - batch.targets).square().sum(dim=1).mean() / 2


def gradient(w: Tensor, batch: Batch) -> Tensor:
    at = w.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(at, batch), at)
    return found


def mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).mean(dim=0)


def sgd(rate: float, momentum: float = 0.0) -> Optimizer:
    """Heavy-ball momentum as torch has it: Sutskever et al. 2013 with the rate outside."""
    v = torch.zeros(sum(NUMELS), dtype=torch.float64)

    def step(w: Tensor, g: Tensor) -> Tensor:
        v.mul_(momentum).add_(g)
        return w - rate * v

    return step


def adamw(
    rate: float, decay: float, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
) -> Optimizer:
    """Loshchilov & Hutter 2019, Alg. 2."""
    m, v = (torch.zeros(sum(NUMELS), dtype=torch.float64) for _ in range(2))
    t = 0

    def step(w: Tensor, g: Tensor) -> Tensor:
        nonlocal t
        t += 1
        m.copy_(betas[0] * m + (1 - betas[0]) * g)
        v.copy_(betas[1] * v + (1 - betas[1]) * g * g)
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        return w - rate * m_hat / (v_hat.sqrt() + eps) - rate * decay * w

    return step


def inner() -> list[Optimizer]:
    """The optimizers of :data:`ADAMW`."""
    return [adamw(ADAMW["learning_rate"], ADAMW["weight_decay"]) for _ in range(SIZE)]


def top(tensor: Tensor, k: int) -> Tensor:
    """Whether an entry is one of the k of largest magnitude."""
    return torch.zeros_like(tensor, dtype=torch.bool).index_fill_(
        0, tensor.abs().argsort(descending=True)[:k], True
    )


def whole(rank: int, tensor: Tensor) -> Tensor:
    """Sends everything."""
    del rank
    return tensor


# --- blocks of local steps ------------------------------------------------------------------------------------------


def diloco(
    first: Tensor,
    batches: Batches,
    every: int,
    rate: float,
    momentum: float,
    nesterov: bool,
    send: Send = whole,
    warmup: Sequence[int] = (),
) -> list[list[Tensor]]:
    """Douillard et al. 2023 (DiLoCo), Alg. 1: outer SGD with Nesterov's momentum on the mean of theta - theta_i.

    Ours: an outer step at the end, and after each of the steps of a warm-up, is a plain mean.
    """
    begin = max(warmup, default=0)
    theta, m, path = first, torch.zeros_like(first), []
    w, optimizers = [first] * SIZE, inner()
    for step in range(len(batches[0])):
        w = [optimizers[i](w[i], gradient(w[i], batches[i][step])) for i in range(SIZE)]
        plain = step + 1 == len(batches[0]) or step < begin
        if step + 1 in warmup if step < begin else (step + 1 - begin) % every == 0:
            delta = mean([send(i, theta - w[i]) for i in range(SIZE)])
            m = m if step < begin else momentum * m + delta
            theta = theta - (delta if plain else rate * (delta + momentum * m if nesterov else m))
            w = [theta] * SIZE
        path.append(w)
    return path


@pytest.mark.parametrize(
    ("every", "rate", "momentum", "nesterov", "steps"),
    [(5, 0.7, 0.9, True, 43), (5, 0.7, 0.9, True, 40), (4, 0.5, 0.8, False, 43), (1, 1.0, 0.0, True, 43)],
)
def test_diloco(every: int, rate: float, momentum: float, nesterov: bool, steps: int) -> None:
    """Where torchft is not installed, too; with an unfinished block at the end, and with whole ones alone."""
    ours, given = trained(f"diloco({every}, {rate}, {momentum}, {nesterov})", steps=steps, settings=ADAMW)
    same(ours, diloco(*given, every, rate, momentum, nesterov))


@pytest.mark.parametrize(
    ("every", "warmup", "ends"),
    [
        (4, 8, (1, 2, 3, 4, 6, 8)),
        (10, 20, (1, 2, 3, 4, 6, 9, 13, 19, 20)),
        (5, 5, (1, 2, 4, 5)),
        (3, 1, (1,)),
    ],
)
def test_a_warm_up_of_diloco(every: int, warmup: int, ends: Sequence[int]) -> None:
    """Blocks grow, and outer momentum is that of the blocks after them."""
    ours, given = trained(f"diloco({every}, 0.7, 0.9, warmup={warmup})", steps=43, settings=ADAMW)
    same(ours, diloco(*given, every, 0.7, 0.9, nesterov=True, warmup=ends))


def test_the_preset_diloco() -> None:
    """With the outer rate 0.7 and momentum 0.9 of the paper's experiments."""
    schedule = str(parse_recipe("diloco").schedule).replace("50", "6")
    ours, given = trained(schedule, settings=ADAMW)
    same(ours, diloco(*given, 6, 0.7, 0.9, nesterov=True))


def sparse(density: float, chunk: int, decay: float) -> Send:
    """Sarfi et al. 2025 (SparseLoCo), Alg. 1: e <- beta e + Delta, sends Q(Top-k(e)), e <- e - Q(Top-k(e)).

    Q is the one that ``chunked_topk`` documents: a sign, and the mean of the smaller or the larger half of magnitudes.
    """
    residuals = [torch.zeros(sum(NUMELS), dtype=torch.float64) for _ in range(SIZE)]

    def send(rank: int, delta: Tensor) -> Tensor:
        e = decay * residuals[rank] + delta
        chunks = e.split(chunk)
        keep = max(1, round(density * min(chunk, e.numel())))
        chosen = torch.cat([top(each, keep) for each in chunks])
        magnitudes = e[chosen].abs()
        large = e.abs() >= (magnitudes.min() + magnitudes.max()) / 2
        sent = torch.zeros_like(e)
        for group in (large & (e > 0), large & (e < 0), ~large & (e > 0), ~large & (e < 0)):
            if (group & chosen).any():
                sent[group & chosen] = e[group & chosen].mean()
        residuals[rank] = e - sent
        return sent

    return send


@pytest.mark.parametrize(
    ("codec", "density", "chunk", "decay"),
    [
        (parse_recipe("sparse_loco").codec, 1 / 64, 4096, 0.95),
        ("error_feedback(chunked_topk(density=0.1, chunk=64), decay=0.8)", 0.1, 64, 0.8),
    ],
    ids=["preset", "chunks"],
)
def test_sparse_loco(codec: str, density: float, chunk: int, decay: float) -> None:
    schedule = str(parse_recipe("sparse_loco").schedule).replace("50", "4")
    ours, given = trained(schedule, {"codec": codec}, settings=ADAMW)
    same(ours, diloco(*given, 4, 1.0, 0.0, nesterov=True, send=sparse(density, chunk, decay)))


def quantized(tensor: Tensor, bits: int, bucket_size: int, noise: torch.Generator) -> Tensor:
    """Alistarh et al. 2017 (QSGD), eq. (1) with the maximum norm: rounds up with probability a - floor(a)."""
    s, found = 2 ** (bits - 1) - 1, []
    draws = torch.empty_like(tensor).uniform_(generator=noise)
    for v, u in zip(tensor.split(bucket_size), draws.split(bucket_size), strict=True):
        norm = v.abs().max()
        a = s * v.abs() / norm
        above = torch.where(v > 0, u >= 1 - (a - a.floor()), u < a - a.floor())
        found.append(norm * v.sign() * (a.floor() + above) / s)
    return torch.cat(found)


def streaming_diloco(
    first: Tensor, batches: Batches, every: int, fragments: int, delay: int
) -> list[list[Tensor]]:
    """Douillard et al. 2025 (Streaming DiLoCo), Alg. 2, with a share of 0.5, a rate of 0.4, and 4 bits by QSGD.

    A fragment is every P-th bucket, here every P-th parameter; what is sent is theta_m - theta, so signs are opposite.
    """
    numbers = torch.repeat_interleave(torch.arange(len(NUMELS)), torch.tensor(NUMELS)) % fragments
    theta, m, path = first.clone(), torch.zeros_like(first), []
    w, optimizers = [first] * SIZE, inner()
    coming: dict[int, tuple[Tensor, Tensor]] = {}
    for step in range(len(batches[0])):
        w = [optimizers[i](w[i], gradient(w[i], batches[i][step])) for i in range(SIZE)]
        turns, rest = divmod(step + 1, every // fragments)
        if rest == 0:
            p = (turns - 1) % fragments
            here, slot = numbers == p, len(NUMELS) + p
            sent = [
                quantized(
                    (w[i] - theta)[here],
                    4,
                    512,
                    create_generator(derive_seed(SEED, "codec", slot, i), step, 1),
                )
                for i in range(SIZE)
            ]
            coming[step + delay] = here, mean(sent)
        if step in coming:
            here, delta = coming.pop(step)
            m[here] = 0.9 * m[here] + delta
            theta[here] += 0.4 * (delta + 0.9 * m[here])
            w = [torch.where(here, 0.5 * own + 0.5 * theta, own) for own in w]
        path.append(w)
    return path


@pytest.mark.parametrize(("every", "fragments", "delay"), [(8, 4, 1), (8, 2, 3), (6, 1, 0)])
def test_streaming_diloco(every: int, fragments: int, delay: int) -> None:
    preset = parse_recipe("streaming_diloco")
    schedule = str(preset.schedule).replace("48", str(every)).replace("fragments=4", f"fragments={fragments}")
    schedule = schedule.replace(")", f", delay={delay})")
    ours, given = trained(schedule, {**APART, "codec": preset.codec}, settings=ADAMW)
    same(ours, streaming_diloco(*given, every, fragments, delay))


# --- delayed averages -----------------------------------------------------------------------------------------------


def dga(first: Tensor, batches: Batches, rate: float, delay: int, period: int) -> list[list[Tensor]]:
    """Zhu et al. 2021 (DGA), Alg. 1, line by line: rounds t of K local steps k; with K = 1 Zhu et al. 2019 (DTS)."""
    w, path = [first] * SIZE, []
    s = (delay - 1) // period
    sums: dict[int, list[Tensor]] = {}
    for t in range(1, len(batches[0]) // period + 1):
        total = [torch.zeros_like(first)] * SIZE
        for k in range(1, period + 1):
            g = [gradient(w[i], batches[i][(t - 1) * period + k - 1]) for i in range(SIZE)]
            total = [total[i] + g[i] for i in range(SIZE)]
            if (k - delay) % period == 0 and t - 1 - s >= 1:
                m = sums[t - 1 - s]
                g = [g[i] - m[i] + mean(m) for i in range(SIZE)]
            w = [w[i] - rate * g[i] for i in range(SIZE)]
            path.append(w)
        sums[t] = total
    return path


@pytest.mark.parametrize(
    ("delay", "period"), [(1, 1), (4, 1), (1, 4), (3, 4), (4, 4), (5, 4), (11, 4), (20, 5)]
)
def test_delayed_gradient_averaging(delay: int, period: int) -> None:
    """With plain SGD, for which the swap of updates and that of gradients are the same."""
    ours, given = trained(f"delayed({delay}, {period}, pull='swap')")
    same(ours, dga(*given, PLAIN["learning_rate"], delay, period))


def swapped(
    first: Tensor, batches: Batches, optimizers: Sequence[Optimizer], delay: int, period: int
) -> list[list[Tensor]]:
    """Zhu et al. 2019 (DTS), unrolled: the mean updates up to step n - t, and the own ones since then."""
    w, path = [first] * SIZE, []
    updates: list[list[Tensor]] = [[] for _ in range(SIZE)]
    for step in range(len(batches[0])):
        for i in range(SIZE):
            updates[i].append(optimizers[i](w[i], gradient(w[i], batches[i][step])) - w[i])
        arrived = max(0, (step + 1 - delay) // period * period)
        common = first + sum(mean(each) for each in list(zip(*updates, strict=True))[:arrived])
        w = [common + sum(own[arrived:]) for own in updates]
        path.append(w)
    return path


MOMENTUM = {"learning_rate": 0.02, "momentum": 0.9}


def with_momentum() -> list[Optimizer]:
    """The optimizers of :data:`MOMENTUM`."""
    return [sgd(MOMENTUM["learning_rate"], MOMENTUM["momentum"]) for _ in range(SIZE)]


@pytest.mark.parametrize(
    ("settings", "optimizers"), [(MOMENTUM, with_momentum), (ADAMW, inner)], ids=["momentum", "adamw"]
)
@pytest.mark.parametrize(("delay", "period"), [(3, 1), (5, 4)])
def test_swapped_updates_of_any_optimizer(
    delay: int, period: int, settings: dict[str, Any], optimizers: Callable[[], list[Optimizer]]
) -> None:
    ours, given = trained(f"delayed({delay}, {period}, pull='swap')", settings=settings)
    same(ours, swapped(*given, optimizers(), delay, period))


# --- AdaComm --------------------------------------------------------------------------------------------------------


def adacomm(
    first: Tensor,
    batches: Batches,
    rate_at: Callable[[int], float],
    step_s: float,
    *,
    rule: str,
    beta: float = 0.0,
    tau_0: int = 12,
    interval_s: float = 20.5,
) -> list[list[Tensor]]:
    """Wang & Joshi 2019 (AdaComm): tau = ceil(tau_0 sqrt(eta_0 / eta * F / F_0)) at the first mean of each interval.

    F is the mean loss of a block, and F_0 that of the first. Where tau would not fall, the rule ``shrink`` halves it.
    Block momentum is that of the first author's code, on displacements over the learning rate; at the end a plain mean.
    """
    x, m, w, path = first, torch.zeros_like(first), [first] * SIZE, []
    tau, began, clock, interval, losses = tau_0, 0, 0.0, 0, []
    f_0 = eta_0 = 0.0
    for step in range(len(batches[0])):
        eta, clock = rate_at(step), clock + step_s
        losses.append(sum(float(loss(w[i], batches[i][step])) for i in range(SIZE)) / SIZE)
        w = [w[i] - eta * gradient(w[i], batches[i][step]) for i in range(SIZE)]
        if step + 1 == began + tau:
            m = beta * m + mean([(x - each) / eta for each in w])
            x = mean(w) if step + 1 == len(batches[0]) else x - eta * m
            w, began, f = [x] * SIZE, step + 1, sum(losses) / len(losses)
            losses = []
            f_0, eta_0 = f_0 or f, eta_0 or eta
            if clock // interval_s > interval:
                interval = int(clock // interval_s)
                wanted = math.ceil(tau_0 * math.sqrt(eta_0 / eta * f / f_0))
                tau = wanted if rule == "basic" or wanted < tau else math.ceil(tau / 2)
        path.append(w)
    return path


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"rule": "shrink"}, "constant"),
        ({"rule": "basic"}, "constant"),
        ({"rule": "basic"}, "step(gamma=0.5, every=25)"),
        ({"rule": "shrink", "beta": 0.3, "interval_s": 6.1}, "constant"),
    ],
    ids=["shrink", "basic", "falling", "block momentum"],
)
def test_adacomm(options: dict[str, Any], rates: str) -> None:
    """A forward pass of 0.1 s a sample is a step of 1.2 s; blocks of 12 steps become 11, 6, 3 or rise to 19.

    The short intervals end more than once in a block, after which one choice is made.
    """
    interval_s, beta = options.get("interval_s", 20.5), options.get("beta", 0.0)
    text = f"adacomm(12, {interval_s}, {options['rule']!r}, block_momentum={beta})"
    settings = {"learning_rate": 0.2, "learning_rate_schedule": rates}
    ours, given = trained(text, steps=80, settings=settings, seconds_per_sample=0.1)

    def rate_at(step: int) -> float:
        return 0.2 if rates == "constant" else float(0.2 * 0.5 ** (step // 25))

    same(ours, adacomm(*given, rate_at, 1.2, **options))


# --- compressed gradients -------------------------------------------------------------------------------------------


def synchronous(
    first: Tensor, batches: Batches, update: Callable[[Tensor], Tensor], send: Send
) -> list[list[Tensor]]:
    """All replicas move alike, by what they have sent of their gradients at the same parameters."""
    w, path = first, []
    for step in range(len(batches[0])):
        w = w + update(mean([send(i, gradient(w, batches[i][step])) for i in range(SIZE)]))
        path.append([w] * SIZE)
    return path


@pytest.mark.parametrize("density", [0.01, 0.1])
def test_error_feedback_of_top_k(density: float) -> None:
    """Karimireddy et al. 2019 (EF-SGD), Alg. 2: p = gamma g + e, x <- x - C(p), e = p - C(p), in units of updates."""
    errors = [torch.zeros(sum(NUMELS), dtype=torch.float64) for _ in range(SIZE)]

    def send(rank: int, g: Tensor) -> Tensor:
        p = PLAIN["learning_rate"] * g + errors[rank]
        sent = torch.where(top(p, round(density * len(p))), p, 0.0)
        errors[rank] = p - sent
        return sent

    ours, given = trained("synchronous", {"codec": f"error_feedback(topk({density}))"})
    same(ours, synchronous(*given, torch.neg, send))


def cosines(size: int) -> Tensor:
    """The matrix of the orthonormal DCT-II, by the Fourier transform of what is mirrored at its end."""
    mirrored = torch.cat([torch.eye(size, dtype=torch.float64), torch.eye(size, dtype=torch.float64).flip(0)])
    turned = torch.exp(-1j * math.pi * torch.arange(size, dtype=torch.float64) / (2 * size))
    waves = (torch.fft.fft(mirrored, dim=0)[:size] * turned[:, None]).real
    normal: Tensor = waves / torch.linalg.vector_norm(waves, dim=1, keepdim=True)
    return normal


def fast(matrix: Tensor, chunk: tuple[int, int], keep: int) -> Tensor:
    """Peng et al. 2024 (DeMo), the fast components: of each block the largest of its DCT, transformed back."""
    found, (height, width) = torch.zeros_like(matrix), chunk
    down, across = cosines(height), cosines(width)
    for row in range(0, matrix.shape[0], height):
        for column in range(0, matrix.shape[1], width):
            here = slice(row, row + height), slice(column, column + width)
            components = (down @ matrix[here] @ across.T).reshape(-1)
            kept = torch.where(top(components, keep), components, 0.0).view(height, width)
            found[here] = down.T @ kept @ across
    return found


@pytest.mark.parametrize(
    ("codec", "decay", "keep", "chunks", "settings"),
    [
        (
            parse_recipe("demo").codec,
            0.999,
            32,
            [(1, 4), (4, 32), (1, 32), (32, 16)],
            {"optimizer": "sign_sgd", "learning_rate": 0.003},
        ),
        ("demo(decay=0.9, chunk=6, keep=3)", 0.9, 3, [(1, 4), (4, 4), (1, 4), (4, 4)], PLAIN),
        ("demo(decay=0.8, chunk=8, keep=5)", 0.8, 5, [(1, 4), (4, 8), (1, 8), (8, 8)], PLAIN),
    ],
    ids=["preset", "smaller blocks", "whole blocks"],
)
def test_demo(
    codec: str, decay: float, keep: int, chunks: Sequence[tuple[int, int]], settings: dict[str, Any]
) -> None:
    """Peng et al. 2024 (DeMo), Alg. 1: m <- beta m + g, q = the fast components of m, m <- m - q, and the mean of q.

    The preset steps on the sign of that mean, as the authors' code does; a block divides its matrix evenly.
    """
    m = [torch.zeros(sum(NUMELS), dtype=torch.float64) for _ in range(SIZE)]

    def send(rank: int, g: Tensor) -> Tensor:
        m[rank] = decay * m[rank] + g
        q = torch.cat(
            [
                fast(piece.view(shape if len(shape) > 1 else (1, -1)), chunk, keep).reshape(-1)
                for piece, shape, chunk in zip(m[rank].split(NUMELS), SHAPES, chunks, strict=True)
            ]
        )
        m[rank] = m[rank] - q
        return q

    def update(mean_q: Tensor) -> Tensor:
        return -float(settings["learning_rate"]) * (mean_q.sign() if "optimizer" in settings else mean_q)

    ours, given = trained("synchronous", {"codec": codec}, settings=settings)
    same(ours, synchronous(*given, update, send))
