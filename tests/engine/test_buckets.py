"""Gradients gather in flat buckets from the output side, whatever the model and the optimizer do meanwhile."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import warnings
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farflung.engine import GradientBuckets
from farflung.errors import ConfigError, Unsupported
from farflung.types import TensorSpec
from tests.helpers import same_bits


def chain(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def loss_of(model: nn.Module, seed: int = 1, width: int = 4) -> Tensor:
    inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(seed))
    out: Tensor = model(inputs)
    return out.square().mean()


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """What plain autograd gives, without the parameters for which it gives nothing."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    loss(plain).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def check(model: nn.Module, buckets: GradientBuckets, wanted: dict[str, Tensor]) -> None:
    """Every gradient is right, and is the part of its bucket that it should be; without one there are zeros."""
    names = {p: name for name, p in model.named_parameters()}
    for bucket in buckets.buckets:
        flat, start = buckets[bucket.index].gradient, 0
        assert TensorSpec.from_tensor(flat) == bucket.spec
        for parameter in buckets[bucket.index].parameters:
            part = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            if names[parameter] not in wanted:
                assert parameter.grad is None
                assert not part.any()
                continue
            assert parameter.grad is not None
            assert same_bits(parameter.grad, wanted[names[parameter]]), names[parameter]
            assert parameter.grad.data_ptr() == part.data_ptr()
        assert start == len(flat)


def backward(buckets: GradientBuckets, loss: Tensor) -> list[int]:
    """The buckets in the order they filled."""
    order: list[int] = []
    buckets.run_backward(loss, order.append)
    assert sorted(order) == [bucket.index for bucket in buckets.buckets]
    return order


# --- their make-up ----------------------------------------------------------------------------------------------


def test_buckets_hold_every_parameter_once_from_the_output_side() -> None:
    model = chain(4, 5, 6, 7)
    buckets = GradientBuckets(model.named_parameters(), bucket_nbytes=150)
    held = [p for bucket in buckets.buckets for p in buckets[bucket.index].parameters]
    assert [id(p) for p in held] == [id(p) for p in reversed(list(model.parameters()))]
    assert [bucket.index for bucket in buckets.buckets] == list(range(len(buckets.buckets)))
    # 28 + 168 bytes of the last layer, 24 + 120 and then 20 + 80 of the others: closed at 150 or at the end.
    assert [bucket.spec.numel for bucket in buckets.buckets] == [49, 41, 20]
    assert buckets.nbytes == 4 * sum(p.numel() for p in model.parameters())


def test_one_bucket_holds_a_small_model() -> None:
    model = chain(4, 5, 6)
    (bucket,) = GradientBuckets(model.named_parameters()).buckets
    assert bucket.spec == TensorSpec((sum(p.numel() for p in model.parameters()),))


def test_the_first_bucket_closes_early() -> None:
    model = chain(600, 600, 600, 600)
    buckets = GradientBuckets(model.named_parameters())
    assert [bucket.spec.numel for bucket in buckets.buckets] == [360_600, 721_200]


def test_a_bucket_says_what_it_is_made_of() -> None:
    buckets = GradientBuckets(chain(4, 5).named_parameters())
    assert [(part.shape, part.start) for part in buckets.buckets[0].spec.spans] == [((5,), 0), ((5, 4), 5)]


def test_nothing_to_train_is_an_error() -> None:
    model = chain(4, 5)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        GradientBuckets(model.named_parameters())


# --- one backward pass ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_nbytes", [1, 150, 1 << 20])
def test_gradients_are_autograds(bucket_nbytes: int) -> None:
    model = chain(4, 5, 6, 7)
    buckets = GradientBuckets(model.named_parameters(), bucket_nbytes)
    assert backward(buckets, loss_of(model)) == list(range(len(buckets.buckets)))
    check(model, buckets, gradients(model, loss_of))


def test_a_bucket_is_whole_when_it_is_ready_and_the_rest_is_still_to_come() -> None:
    model = chain(4, 5, 6, 7)
    buckets = GradientBuckets(model.named_parameters(), 150)
    wanted = gradients(model, loss_of)
    flats: dict[int, Tensor] = {}
    reached: list[int] = []
    model.get_parameter("0.bias").register_hook(lambda _: reached.append(-1))  # the input side

    def ready(index: int) -> None:
        flats[index] = buckets[index].gradient.clone()
        reached.append(index)

    buckets.run_backward(loss_of(model), ready)
    assert reached.index(0) < reached.index(-1)
    names = {p: name for name, p in model.named_parameters()}
    for index, flat in flats.items():
        parts = [wanted[names[p]].reshape(-1) for p in buckets[index].parameters]
        assert same_bits(flat, torch.cat(parts))


@pytest.mark.parametrize("how", ["none", "zeros", "removed by hand"])
def test_views_come_back_after_zero_grad(how: str) -> None:
    model = chain(4, 5, 6)
    buckets = GradientBuckets(model.named_parameters(), 100)
    for seed in (1, 2, 3):
        backward(buckets, loss_of(model, seed))
        check(model, buckets, gradients(model, lambda m, seed=seed: loss_of(m, seed)))  # type: ignore[misc]
        if how == "removed by hand":
            first, *others = model.parameters()
            first.grad = None
            for p in others:
                p.grad = torch.zeros_like(p)
        else:
            model.zero_grad(set_to_none=how == "none")


def test_the_optimizer_steps_on_what_was_loaded() -> None:
    model = chain(4, 5, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    buckets = GradientBuckets(model.named_parameters(), 100)
    for in_place in (False, True):
        before = [p.detach().clone() for p in model.parameters()]
        backward(buckets, loss_of(model))
        optimizer.zero_grad(set_to_none=True)
        for bucket in buckets.buckets:
            flat = buckets[bucket.index].gradient
            buckets[bucket.index].load_gradient(flat.fill_(0.5) if in_place else torch.full_like(flat, 0.5))
        optimizer.step()
        for was, p in zip(before, model.parameters(), strict=True):
            assert same_bits(p.detach(), was - 0.5)


def test_cleared_gradients_stop_the_optimizer() -> None:
    model = chain(4, 5)
    buckets = GradientBuckets(model.named_parameters())
    backward(buckets, loss_of(model))
    before = [p.detach().clone() for p in model.parameters()]
    buckets.clear()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(same_bits(p.detach(), was) for was, p in zip(before, model.parameters(), strict=True))


# --- unlike models ----------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Two dtypes, by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 6, dtype=torch.float64)
        self.c, self.d = nn.Linear(6, 5), nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.d(self.c(self.b(self.a(x).double()).float()).double())
        return y


@pytest.mark.parametrize("bucket_nbytes", [1, 200, 1 << 20])
def test_each_dtype_has_buckets_of_its_own(bucket_nbytes: int) -> None:
    torch.manual_seed(0)
    model = Mixed()
    buckets = GradientBuckets(model.named_parameters(), bucket_nbytes)
    assert {bucket.spec.dtype for bucket in buckets.buckets} == {torch.float32, torch.float64}
    backward(buckets, loss_of(model))
    check(model, buckets, gradients(model, loss_of))


def test_frozen_parameters_are_left_out() -> None:
    model = chain(4, 5, 6)
    model[0].weight.requires_grad_(False)
    buckets = GradientBuckets(model.named_parameters())
    backward(buckets, loss_of(model))
    assert buckets.nbytes == 4 * (5 + 5 * 6 + 6)
    assert model[0].weight.grad is None
    check(model, buckets, gradients(model, loss_of))


def test_tied_parameters_are_held_once() -> None:
    model = chain(4, 4, 4, 4)
    model[2].weight = model[0].weight
    buckets = GradientBuckets(model.named_parameters(), 16)
    assert buckets.nbytes == 4 * (2 * 16 + 3 * 4)
    backward(buckets, loss_of(model))
    check(model, buckets, gradients(model, loss_of))


def test_a_parameter_of_any_shape_and_layout() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.conv = nn.Conv2d(3, 2, 2)
            self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x.reshape(-1, 3, 2, 2)) * self.scale
            return y + self.empty.sum()

    torch.manual_seed(0)
    model = Odd()
    buckets = GradientBuckets(model.named_parameters(), 8)
    for _ in range(2):
        backward(buckets, loss_of(model, width=12))
        wanted = gradients(model, lambda m: loss_of(m, width=12))
        for name, p in model.named_parameters():
            assert p.grad is not None
            assert torch.equal(p.grad, wanted[name])
        model.zero_grad()


def odd_layouts() -> nn.ParameterDict:
    """Parameters dense in another order than that of their dimensions, and one that is not dense."""
    torch.manual_seed(0)
    layouts = {
        "transposed": torch.randn(3, 4).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "moved": torch.randn(2, 3, 4).permute(2, 0, 1),
        "single": torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last),
        "gaps": torch.randn(6, 4)[::2],
        "plain": torch.randn(3, 3),
    }
    return nn.ParameterDict({name: nn.Parameter(value) for name, value in layouts.items()})


def test_a_gradient_has_the_strides_of_its_parameter() -> None:
    model = odd_layouts()
    buckets = GradientBuckets(model.items(), 100)
    backward(buckets, sum((p * torch.arange(p.numel()).view(p.shape)).sum() for p in model.values()))
    for name, p in model.items():
        assert p.grad is not None
        assert torch.equal(p.grad, torch.arange(p.numel()).view(p.shape).to(p.dtype))
        assert (p.grad.stride() == p.stride()) == (name != "gaps")


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_fused_optimizer_steps_each_weight_by_its_own_gradient(optimizer: Any) -> None:
    ends = []
    for with_buckets in (True, False):
        model = odd_layouts()
        step = optimizer([p for name, p in model.items() if name != "gaps"], lr=0.1, fused=True)
        buckets = GradientBuckets(model.items(), 100) if with_buckets else None
        for _ in range(3):
            step.zero_grad()
            loss = sum((p * torch.arange(p.numel()).view(p.shape)).sin().sum() for p in model.values())
            buckets.run_backward(loss, lambda index: None) if buckets else loss.backward()
            step.step()
        ends.append([p.detach().clone() for p in model.values()])
    assert all(same_bits(one, other) for one, other in zip(*ends, strict=True))


def test_flat_weights_and_gradients_have_one_order() -> None:
    model = odd_layouts()
    buckets = GradientBuckets(model.items(), 100)
    kept = {name: p.detach().clone() for name, p in model.items()}
    flats = [bucket.copy_weights() for bucket in buckets]
    backward(buckets, sum(p.square().sum() / 2 for p in model.values()))
    for bucket, flat in zip(buckets, flats, strict=True):
        assert torch.equal(bucket.gradient, flat)
    assert all(torch.equal(value, kept[name]) for name, value in buckets.unflatten(flats).items())
    for p in model.values():
        p.detach().zero_()
    for bucket, flat in zip(buckets, flats, strict=True):
        bucket.load_weights(flat)
    assert all(torch.equal(p, kept[name]) for name, p in model.items())


def test_shapes_are_told_in_the_order_of_memory() -> None:
    buckets = GradientBuckets(odd_layouts().items())
    shapes = [part.shape for part in buckets.buckets[0].spec.spans]
    assert shapes == [(3, 4), (4, 3, 1, 1), (3, 3), (2, 3, 4), (3, 4), (2, 4, 5, 3)]


@pytest.mark.parametrize("fused", [False, True])
def test_a_memory_format_may_change_between_steps(fused: bool) -> None:
    ends = []
    for with_buckets in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        buckets = GradientBuckets(model.named_parameters()) if with_buckets else None
        for step in range(4):
            optimizer.zero_grad(set_to_none=step != 3)
            loss = (
                model(torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step))).square().mean()
            )
            if buckets:
                buckets.run_backward(loss, lambda index: None)
                bucket = buckets[0]
                bucket.load_gradient(bucket.gradient.clone())
                for p, view in zip(bucket.parameters, bucket.view(bucket.gradient), strict=True):
                    assert p.grad is not None
                    assert torch.equal(p.grad, view)
            else:
                loss.backward()
            optimizer.step()
            if step == 1:
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("keeps", [False, True])
def test_the_data_of_a_gradient_may_be_set(keeps: bool) -> None:
    """As loops do that clip by hand."""
    model = chain(4, 5, 6)
    buckets = GradientBuckets(model.named_parameters(), 150)
    for seed in range(3):
        backward(buckets, loss_of(model, seed))
        wanted = gradients(model, lambda m, seed=seed: loss_of(m, seed))  # type: ignore[misc]
        check(model, buckets, wanted)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.data = p.grad.data.clamp(-0.125, 0.125)
            assert float(p.grad.abs().max()) <= 0.125
            if keeps:
                p.grad.zero_()
            else:
                p.grad = None


# --- unused parameters ------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Each call takes one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.side = "left"

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = getattr(self, self.side)(self.stem(x))
        return y


def test_what_no_loss_reached_contributes_zeros_and_is_named_once() -> None:
    torch.manual_seed(0)
    model = Branches()
    buckets = GradientBuckets(model.named_parameters(), 16)
    with pytest.warns(
        UserWarning, match=r"2 parameters had no part in the loss .* zeros: right\.\w+, right\.\w+$"
    ):
        backward(buckets, loss_of(model))
    check(model, buckets, gradients(model, loss_of))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for side in ("right", "left"):
            model.side = side
            model.zero_grad(set_to_none=True)
            backward(buckets, loss_of(model))
            check(model, buckets, gradients(model, loss_of))


def test_a_loss_that_reaches_next_to_nothing() -> None:
    model = chain(4, 5, 6, 7)
    buckets = GradientBuckets(model.named_parameters(), 16)
    with pytest.warns(UserWarning, match="5 parameters had no part in the loss"):
        backward(buckets, model.get_parameter("0.bias").sum())
    check(model, buckets, {"0.bias": torch.ones(5)})


@pytest.mark.parametrize("bucket_nbytes", [1, 1 << 20])
def test_a_sparse_gradient_is_refused_by_name(bucket_nbytes: int) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(4, 3)})
    buckets = GradientBuckets(model.named_parameters(), bucket_nbytes)
    out = nn.functional.embedding(torch.tensor([1]), model.get_parameter("words.weight"), sparse=True)
    with pytest.raises(Unsupported, match=r"parameter words\.weight is sparse.* sparse=False"):
        backward(buckets, out.sum())


def test_no_gradient_is_kept_for_what_nobody_used_unless_the_mean_has_something() -> None:
    model = chain(4, 5)
    buckets = GradientBuckets(model.named_parameters())

    def loaded(mean: Tensor, unused: Collection[int] = (), never: Collection[int] = ()) -> None:
        buckets[0].unused_places, buckets[0].unreached_places = unused, never
        buckets[0].load_gradient(mean)

    bias, weight = buckets[0].parameters
    loaded(torch.zeros_like(buckets[0].gradient), {0, 1})
    assert bias.grad is None
    assert weight.grad is None
    mean = torch.zeros_like(buckets[0].gradient)
    mean[-1] = 1.0  # what error feedback had left from an earlier step
    loaded(mean, {0, 1})
    assert bias.grad is None
    assert weight.grad is not None
    loaded(mean, {0, 1}, {1})
    assert weight.grad is None
    loaded(torch.zeros_like(mean))
    assert bias.grad is not None


# --- several passes ---------------------------------------------------------------------------------------------


def test_two_forwards_and_one_backward() -> None:
    def twice(model: nn.Module) -> Tensor:
        return loss_of(model, 1) + 2.0 * loss_of(model, 2)

    model = chain(4, 5, 6)
    buckets = GradientBuckets(model.named_parameters(), 16)
    backward(buckets, twice(model))
    check(model, buckets, gradients(model, twice))


def test_two_backwards_add_up() -> None:
    model = chain(4, 5, 6)
    buckets = GradientBuckets(model.named_parameters(), 16)
    first, second = (gradients(model, lambda m, seed=seed: loss_of(m, seed)) for seed in (1, 2))  # type: ignore[misc]
    for seed in (1, 2):
        backward(buckets, loss_of(model, seed))
    check(model, buckets, {name: first[name] + second[name] for name in first})


def test_a_backward_outside_is_not_watched() -> None:
    model = chain(4, 5, 6)
    buckets = GradientBuckets(model.named_parameters(), 16)
    ready: list[int] = []
    buckets.run_backward(loss_of(model), ready.append)
    count = len(ready)
    model.zero_grad()
    loss_of(model).backward()
    assert len(ready) == count
    model.zero_grad()
    backward(buckets, loss_of(model))
    check(model, buckets, gradients(model, loss_of))


def test_gradients_of_several_threads_are_taken_one_at_a_time() -> None:
    """As of a model on several devices, each of which has a thread of autograd's own."""
    layers = [chain(4, 5), chain(4, 5)]
    buckets = GradientBuckets(nn.ModuleList(layers).named_parameters(), 1)
    together, two_at_once = threading.Barrier(2), []

    def ready(index: int) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.5)  # ends when a second thread is here
            two_at_once.append(index)

    buckets.arm(ready)
    threads = [threading.Thread(target=loss_of(layer).backward) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not two_at_once
    assert not buckets.missing_names


class Refused(RuntimeError):
    """What goes wrong in the next test."""


@pytest.mark.parametrize("where", ["autograd", "ready"])
@pytest.mark.parametrize("bucket_nbytes", [16, 200, 1 << 20])
def test_a_good_step_follows_an_error_in_the_middle_of_backward(where: str, bucket_nbytes: int) -> None:
    model = chain(4, 5, 6, 7)
    buckets = GradientBuckets(model.named_parameters(), bucket_nbytes)
    ready: list[int] = []

    def refuse(*_: Any) -> None:
        ready.append(-1)
        raise Refused

    loss = loss_of(model, 9)
    hook = model.get_parameter("1.bias").register_hook(refuse) if where == "autograd" else None
    with pytest.raises(Refused):
        buckets.run_backward(loss, ready.append if hook else refuse)
    if hook:
        hook.remove()
    heard = len(ready)
    loss_of(model, 9).backward()
    assert len(ready) == heard, "it listens although its backward is over"
    model.zero_grad(set_to_none=True)
    assert backward(buckets, loss_of(model)) == list(range(len(buckets.buckets)))
    check(model, buckets, gradients(model, loss_of))


def test_removed_buckets_hear_of_nothing() -> None:
    model = chain(4, 5)
    buckets = GradientBuckets(model.named_parameters())
    heard: list[int] = []
    buckets.watch(lambda _: heard.append(1))
    loss_of(model).backward()
    assert len(heard) == 2
    buckets.remove()
    loss_of(model).backward()
    assert len(heard) == 2
