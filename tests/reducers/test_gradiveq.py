"""Slices of convolutions on the principal components of a window."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import farflung
from farflung.comm import ExchangeChannel
from farflung.devices import CodingRates, DeviceProfile
from farflung.engine.reducer_states import ReducerStates
from farflung.errors import ConfigError, Unsupported
from farflung.reducers import GradiVeQ
from farflung.reducers.gradiveq import window
from farflung.reducers.gradiveq.slices import Coder, Layout
from farflung.reducers.gradiveq.window import alike, dimensions, fingerprint, principal
from farflung.seeding import generator
from farflung.sim import LinkModel, VirtualWorld
from farflung.tasks import Pending
from farflung.types import CodecState, Contribution, Placed, Reducer, Runtime, Seeds, StateSlot, TensorSpec
from tests.helpers import Cluster, same_bits, same_tree
from tests.reducers.replicas import LINK, NO_RIDER, SIDE, SPEC, Replica, assert_alike, gradient, run

CONVOLUTIONS = TensorSpec(
    (560,),
    parts=(Placed((4, 4, 3, 3), 0), Placed((10,), 144), Placed((5, 9, 3, 3), 154), Placed((), 559)),
)
SHORT = GradiVeQ(
    slice_size=48,
    ratio=8,
    warm_up=1,
    sample_steps=5,
    compress_steps=4,
    windows="paper",
    sample_bits=None,
)
SPREAD = replace(SHORT, windows="spread", compress_steps=10)
EXPLAINED = replace(SHORT, ratio=None, variance_left=0.0001, slice_size=144)


def normal(numel: int, *labels: int) -> Tensor:
    return torch.randn(numel, generator=generator(31, *labels))


def planar(rank: int, step: int) -> Tensor:
    """Gradients of every rank in one plane through one point, which samples of three steps show."""
    means, one, two = (normal(SPEC.numel, label) for label in range(3))
    along = torch.randn(2, generator=generator(32, rank, step))
    return means + along[0] * one + along[1] * two


def bases_of(layout: Layout, samples: Tensor, left_out: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Means and bases of samples, shape ``(n, numel)``."""
    state = window.begun(0, layout)
    for sample in samples:
        state = window.added(state, sample, 1)
    state = window.solved(state, None, left_out, lambda numel, find: find())
    return state["means"], state["bases"]


def coder_of(layout: Layout, samples: Tensor, tensor: Tensor, weight: float, left_out: float) -> Coder:
    return Coder(layout, *bases_of(layout, samples, left_out), tensor, weight)


# --- layout -----------------------------------------------------------------------------------------------------


def test_numbers_are_read_by_height_width_depth_and_filter() -> None:
    filters, depth, height, width, start = 5, 3, 2, 4, 7
    part = Placed((filters, depth, height, width), start)
    (layer,) = Layout.of(TensorSpec((200,), parts=(part,)), 30).layers
    tensor = normal(200)
    kernel = tensor[start : start + part.numel].view(part.shape)
    rows = layer.rows(tensor, 0, layer.slices)
    assert rows.shape == (4, 30)
    for h in range(height):
        for w in range(width):
            for d in range(depth):
                for f in range(filters):
                    index = ((h * width + w) * depth + d) * filters + f
                    assert rows.view(-1)[index] == kernel[f, d, h, w]


@pytest.mark.parametrize("wished", [7, 11, 30, 44, 500])
def test_slices_cover_a_layer_and_are_written_where_they_were_read(wished: int) -> None:
    """A slice begins anywhere in a kernel, and the last one ends in zeros."""
    spec = TensorSpec((200,), parts=(Placed((5, 3, 2, 4), 7),))
    (layer,) = Layout.of(spec, wished).layers
    tensor = normal(200)
    rows = layer.rows(tensor, 0, layer.slices)
    assert rows.numel() - 120 < layer.slices
    assert not rows.view(-1)[120:].any()
    again = torch.zeros_like(tensor)
    for first in range(layer.slices):
        assert torch.equal(layer.rows(tensor, first, first + 1), rows[first : first + 1])
        layer.put(again, first, rows[first : first + 1])
    assert torch.equal(again[7:127], tensor[7:127])
    assert not again[:7].any()
    assert not again[127:].any()


@pytest.mark.parametrize(
    ("shape", "slices", "numel"),
    [((16, 16, 3, 3), 4, 576), ((16, 3, 3, 3), 1, 432), ((64, 64, 3, 3), 72, 512), ((30, 50), 3, 500)],
)
def test_slices_are_of_the_size_that_fits_best(shape: tuple[int, ...], slices: int, numel: int) -> None:
    part = Placed(shape, 0)
    (layer,) = Layout.of(TensorSpec((part.numel,), parts=(part,)), 512, matrices=True).layers
    assert (layer.slices, layer.slice_numel) == (slices, numel)


@pytest.mark.parametrize(
    ("shape", "kernel"), [((4, 6, 5), (4, 6, 1, 5)), ((4, 6, 2, 3, 2), (4, 6, 3, 4))], ids=["1-d", "3-d"]
)
def test_convolutions_have_any_number_of_sides(shape: tuple[int, ...], kernel: tuple[int, ...]) -> None:
    one, other = (
        Layout.of(TensorSpec((math.prod(sides),), parts=(Placed(sides, 0),)), 48) for sides in (shape, kernel)
    )
    assert one == other


def test_a_slice_of_a_matrix_is_some_inputs_with_all_their_outputs() -> None:
    spec = TensorSpec((67,), parts=(Placed((5, 12), 3),))
    assert Layout.of(spec, 20).layers == ()
    (layer,) = Layout.of(spec, 20, matrices=True).layers
    tensor = normal(67)
    rows = layer.rows(tensor, 0, layer.slices)
    assert rows.shape == (3, 20)
    matrix = tensor[3:63].view(5, 12)
    assert torch.equal(rows, matrix.T.reshape(3, 20))


def test_what_is_no_convolution_is_dense() -> None:
    layout = Layout.of(CONVOLUTIONS, 48)
    assert layout.dense == ((144, 10), (559, 1))
    assert Layout.of_state(layout.state) == layout


# --- principal components ---------------------------------------------------------------------------------------


def test_dimensions_explain_the_variance() -> None:
    variances = torch.tensor([8.0, 1.0, 0.5, 0.5])
    shares = (0.5, 0.2, 0.15, 0.06, 0.05, 0.01, 0.0)
    assert [dimensions(variances, left) for left in shares] == [1, 1, 2, 3, 3, 4, 4]
    assert dimensions(torch.zeros(4), 0.0) == 1


@pytest.mark.parametrize(("samples", "slices"), [(2, 1), (6, 1), (6, 3), (40, 1)])
def test_dimensions_are_no_more_than_samples_have(samples: int, slices: int) -> None:
    rows = normal(samples * slices * 30).view(samples, slices, 30)
    sums, gram = rows.sum(dim=0), rows.view(-1, 30).T @ rows.view(-1, 30)
    basis = principal(sums, gram, samples, None, 0.0)
    assert basis.shape == (30, min(slices * (samples - 1), 30))
    torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1]))
    assert principal(sums, gram, samples, None, 0.5).shape[1] < basis.shape[1] or samples == 2
    counts = {ratio: principal(sums, gram, samples, ratio, 0.0).shape[1] for ratio in (1.0, 10.0, 1000.0)}
    assert counts == {1.0: basis.shape[1], 10.0: min(3, basis.shape[1]), 1000.0: 1}


def test_a_basis_is_of_all_slices_about_their_own_means() -> None:
    """The same as a singular value decomposition of all samples of all slices, less the mean of each slice."""
    rows = normal(6 * 3 * 30).view(6, 3, 30)
    basis = principal(rows.sum(dim=0), rows.view(-1, 30).T @ rows.view(-1, 30), 6, 10.0, 0.0)
    _, _, directions = torch.linalg.svd((rows - rows.mean(dim=0)).view(-1, 30), full_matrices=False)
    torch.testing.assert_close(basis @ basis.T, directions[:3].T @ directions[:3], rtol=0.0, atol=1e-5)


def test_the_sum_of_encoded_is_the_encoded_sum() -> None:
    layout = Layout.of(CONVOLUTIONS, 40)
    samples = normal(6 * 560, 1).view(6, 560)
    weights = (1.0, 0.5, 2.0)
    own = [weight * normal(560, 2, rank) for rank, weight in enumerate(weights)]
    coders = [coder_of(layout, samples, one, weight, 0.1) for one, weight in zip(own, weights, strict=True)]
    (whole,) = coders[0].cut(1)
    of_sum = coder_of(layout, samples, torch.stack(own).sum(dim=0), sum(weights), 0.1).encode(whole)
    sum_of = torch.stack([coder.encode(whole) for coder in coders]).sum(dim=0)
    assert (sum_of - of_sum).norm() <= 1e-6 * of_sum.norm()


def test_with_nothing_left_out_the_window_comes_out_whole() -> None:
    layout = Layout.of(CONVOLUTIONS, 1000)
    samples = normal(6 * 560).view(6, 560).double()
    for sample in samples:
        coder = coder_of(layout, samples, 2 * sample, 2.0, 0.0)
        (whole,) = coder.cut(1)
        encoded = coder.encode(whole)
        assert len(encoded) == 5 * len(layout.layers) + 11
        coder.decode(encoded, whole, 2.0)
        torch.testing.assert_close(coder._tensor, sample, rtol=0.0, atol=1e-5)
        assert coder.loss == pytest.approx(0.0, abs=1e-3)


def test_the_loss_is_that_of_the_own_tensor() -> None:
    layout = Layout.of(SPEC, 48)
    tensor = normal(SPEC.numel, 4)
    coder = coder_of(layout, normal(6 * SPEC.numel).view(6, -1), tensor.clone(), 1.0, 0.3)
    assert coder.loss is None
    (whole,) = coder.cut(1)
    coder.decode(coder.encode(whole), whole, 1.0)
    left = (coder._tensor - tensor)[:144].norm() / tensor[:144].norm()
    assert coder.loss == pytest.approx(float(left), rel=1e-4)


# --- around a ring ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8, 40])
def test_borders_are_those_of_slices_and_balance_bytes(size: int) -> None:
    layout = Layout.of(CONVOLUTIONS, 16)
    coder = coder_of(layout, normal(9 * 560).view(9, 560), normal(560), 1.0, 0.2)
    places = coder.cut(size)
    sent = [coder.sent_numel(place) for place in places]
    (whole,) = coder.cut(1)
    assert len(places) == size
    assert sum(sent) == coder.sent_numel(whole)
    assert sum(coder.numel(place) for place in places) == 560
    torch.testing.assert_close(torch.cat([coder.encode(place) for place in places]), coder.encode(whole))
    largest = max(coder._sizes)
    assert all(abs(one - sum(sent) / size) <= largest + 1 for one in sent)


def halfway(reducer: GradiVeQ, size: int, **options: Any) -> list[Replica]:
    """Replicas whose next exchange is compressed, or one after."""
    return run(reducer, size, reducer.warm_up + reducer.sample_steps + 1, **options)


def going_on(
    before: list[Replica], steps: range, device: DeviceProfile | None = None
) -> tuple[list[Replica], float]:
    """Their next exchanges in a world of their own, and the seconds that takes."""
    world = VirtualWorld(
        len(before), LINK if device is None else LinkModel(0.5), device=device or DeviceProfile()
    )
    after = [
        Replica(runtime, old.reducer, old.spec, make=old.make, weighted=old.weighted)
        for runtime, old in zip(world.runtimes, before, strict=True)
    ]
    for replica, old in zip(after, before, strict=True):
        replica.slot.state = old.slot.state
    world.run([replica.run(steps) for replica in after])
    return after, world.clock.now()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_around_a_ring_it_is_the_same_as_without_overlap(size: int) -> None:
    """Segments are summed in the order of the ring, each from its own rank on, and every rank decodes the sums."""
    reducer = replace(SHORT, collective="ring", slice_size=44)
    options: dict[str, Any] = {
        "spec": CONVOLUTIONS,
        "make": lambda rank, step: gradient(rank, step, 560),
        "weighted": False,
    }
    before = halfway(reducer, size, **options)
    shared = before[0].slot.state.shared
    after, _ = going_on(before, range(7, 8))
    coders = [
        Coder(
            Layout.of_state(shared["layout"]),
            shared["means"],
            shared["bases"],
            gradient(rank, 7, 560),
            1.0,
        )
        for rank in range(size)
    ]
    for index, place in enumerate(coders[0].cut(size)):
        total = coders[index].encode(place)
        for offset in range(1, size):
            total = total + coders[(index + offset) % size].encode(place)
        coders[0].decode(total, place, float(size))
    for replica in after:
        assert same_bits(replica.results[0].mean, coders[0]._tensor)


@pytest.mark.parametrize(("encode_s", "decode_s"), [(0.3, 0.2), (0.8, 0.7)])
def test_coding_and_messages_go_on_side_by_side(encode_s: float, decode_s: float) -> None:
    """Three segments of one slice each: on every hop the longer of the two counts, and what is coded first."""
    spec = TensorSpec((144,), parts=(Placed((4, 4, 3, 3), 0),))
    reducer = replace(SHORT, collective="ring", ratio=12)
    before = halfway(reducer, 3, spec=spec, make=lambda rank, step: gradient(rank, step, 144), weighted=False)
    rates = {("encode", reducer.method): encode_s, ("decode", reducer.method): decode_s, ("add", ""): 0.12}
    coding = CodingRates({key: ((1, one / 48), (48, one)) for key, one in rates.items()})
    _, took = going_on(before, range(7, 8), DeviceProfile(coding=coding))
    added = 0.12 * 4 / 48  # of the four numbers that a slice is encoded in
    # The last segment is decoded after what is timed here.
    assert took == pytest.approx(encode_s + 2 * (max(encode_s, 0.5) + added) + 2 * max(decode_s, 0.5))


# --- windows ----------------------------------------------------------------------------------------------------


def seen(reducer: GradiVeQ, steps: int, size: int = 3, **options: Any) -> list[str]:
    """The phase of each exchange."""
    found: list[str] = []

    class Watching(Reducer):
        """The reducer, and a note of its phase on rank 0."""

        def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
            return reducer.init(spec, seeds)

        async def reduce(self, channel: Any, slot: StateSlot, own: Contribution, *, step: int) -> Any:
            if channel.rank == 0:
                found.append("warm_up" if step < reducer.warm_up else slot.state.shared["phase"])
            return await reducer.reduce(channel, slot, own, step=step)

    run(Watching(), size, steps, **options)
    return found


WINDOW = [*["sample"] * 5, "confirm", *["compress"] * 3]


def test_windows_follow_each_other() -> None:
    assert seen(SHORT, 20) == ["warm_up", *WINDOW, *WINDOW, "sample"]


def test_samples_may_be_spread_among_those_that_are_compressed() -> None:
    """One of three exchanges is summed whole, and after five of them bases are found and confirmed anew."""
    cycle = ["confirm", *["compress"] * 15]
    assert seen(SPREAD, 40) == ["warm_up", *["sample"] * 5, *cycle, *cycle, "confirm", "compress"]
    nbytes = run(SPREAD, 2, 40)[0].nbytes
    whole = [step for step, sent in enumerate(nbytes) if sent > 0.9 * nbytes[1]]
    assert whole == [*range(7), *range(9, 22, 3), 22, *range(25, 38, 3), 38]


def test_with_several_exchanges_under_way_a_phase_lasts_until_the_last_is_merged() -> None:
    expected = ["warm_up", *["sample"] * 6, *["confirm"] * 2, *["compress"] * 4]
    assert seen(SHORT, 14, width=2) == [*expected, "sample"]


def test_a_gradient_that_varies_in_few_directions_comes_out_whole_at_a_fraction_of_the_bytes() -> None:
    reducer = replace(EXPLAINED, compress_steps=30, collective="ring")
    replicas = run(reducer, 4, 9, make=planar, weighted=False)
    for step in (7, 8):
        exact = torch.stack([planar(rank, step) for rank in range(4)]).mean(dim=0)
        torch.testing.assert_close(replicas[0].results[step].mean, exact, rtol=0.0, atol=1e-4)
    state = replicas[0].slot.state
    assert [basis.shape[1] for basis in state.shared["bases"].values()] == [2]
    dense, compressed = (sum(replica.nbytes[step] for replica in replicas) for step in (0, 8))
    riding = SIDE + 2 * 8
    sent = 2 * 3 * (2 + 113) * 4 + 4 * 3 * (riding + 8)
    assert compressed == sent
    assert compressed < dense


@pytest.mark.parametrize("reducer", [SHORT, replace(SPREAD, sample_bits=4)], ids=["paper", "spread"])
def test_an_exchange_whose_mean_is_not_finite_teaches_nothing(reducer: GradiVeQ) -> None:
    """While gradients are sampled, confirmed or compressed: the phase is as long as without it, and nothing is kept."""
    bad = (3, 7, 9, 12)

    def troubled(rank: int, step: int) -> Tensor:
        return torch.full((SPEC.numel,), math.nan) if step in bad and rank == 1 else gradient(rank, step)

    without = seen(reducer, 20)
    phases = seen(reducer, 24, make=troubled)
    assert [phase for step, phase in enumerate(phases) if step not in bad] == without
    for replica in run(reducer, 3, 24, make=troubled):
        state = replica.slot.state
        for kept in (state.local["residual"], *(state.shared[kind] for kind in ("seen", "means", "bases"))):
            assert all(tensor.isfinite().all() for tensor in kept.values())


@pytest.mark.parametrize("drift", [1e9, 1.0])
def test_the_mean_stays_that_of_the_gradients(drift: float) -> None:
    """Constant gradients and noise, over five windows, at 4 bits, whether votes end some of them or not."""
    reducer = replace(SPREAD, sample_steps=10, compress_steps=40, sample_bits=4, drift=drift)
    constant = normal(SPEC.numel, 7)
    (layer,) = Layout.of(SPEC, 48).layers
    exact = layer.rows(constant, 0, layer.slices)
    errors: dict[int, float] = {}

    class Watching(Replica):
        """A replica that notes how far each new mean is from the gradients'."""

        async def _learn(self, reduced: Any) -> None:
            await super()._learn(reduced)
            shared = self.slot.state.shared
            if shared["means"] and self.rank == 0:
                off = (shared["means"]["0000"] - exact).norm() / exact.norm()
                errors[shared["window"]] = float(off)

    world = VirtualWorld(2, LINK)
    replicas = [
        Watching(
            runtime,
            reducer,
            make=lambda rank, step: constant + 0.3 * gradient(rank, step),
            weighted=False,
        )
        for runtime in world.runtimes
    ]
    world.run([replica.run(range(262)) for replica in replicas])
    assert len(errors) >= 5
    assert max(errors.values()) < 0.1
    votes_ended_some = max(errors) > len(errors) + 1
    assert votes_ended_some == (drift == 1.0)


def test_what_waited_for_a_sample_does_not_turn_the_bases() -> None:
    """Three directions of variance 4 among those of 1, of which five steps come out at once."""
    reducer = replace(SPREAD, ratio=16, sample_steps=60, compress_steps=240, drift=1e9)
    (layer,) = Layout.of(SPEC, 48).layers

    def make(rank: int, step: int) -> Tensor:
        tensor = gradient(rank, step)
        rows = layer.rows(tensor, 0, layer.slices)
        rows[:, :3] *= 2
        layer.put(tensor, 0, rows)
        return tensor

    for steps in (62, 62 + 301, 62 + 2 * 301):
        (replica,) = run(reducer, 1, steps, make=make, weighted=False)
        basis = replica.slot.state.shared["bases"]["0000"]
        assert basis.shape == (48, 3)
        assert basis[:3].square().sum() > 0.7 * 3


def test_most_must_see_the_loss_grow_to_end_a_window() -> None:
    """What the window has seen leaves little; afterwards gradients go elsewhere, on two ranks or on one of three."""
    reducer = replace(EXPLAINED, compress_steps=20, drift=2.0)

    def drifting(away: int) -> list[str]:
        def make(rank: int, step: int) -> Tensor:
            noise = 0.01 * gradient(rank, step)
            return planar(rank, step) + (noise if step < 9 or rank >= away else 100 * noise)

        return seen(reducer, 13, make=make)

    assert drifting(1)[9:] == ["compress"] * 4
    assert drifting(2)[9:] == ["compress", "compress", "sample", "sample"]


@pytest.mark.parametrize("size", range(1, 9))
def test_a_window_ends_by_a_majority_or_after_its_steps(size: int) -> None:
    state = {**window.begun(0, Layout.of(SPEC, 48)), "phase": "compress", "count": 1}
    ends = [
        window.compressed(state, votes, steps=3, size=size)["phase"] == "sample" for votes in range(size + 1)
    ]
    assert ends == [votes > size / 2 for votes in range(size + 1)]
    second = window.compressed(state, 0, steps=3, size=size)
    assert (second["phase"], second["count"]) == ("compress", 2)
    assert window.compressed(second, 0, steps=3, size=size)["phase"] == "sample"


def test_a_window_that_was_sampled_in_few_bits_is_alike_on_all_ranks() -> None:
    replicas = run(replace(SHORT, sample_bits=4), 3, 9)
    dense = run(SHORT, 3, 9)
    assert_alike(replicas)
    assert replicas[0].slot.state.shared["phase"] == "compress"
    assert replicas[0].nbytes[0] == dense[0].nbytes[0]
    assert replicas[0].nbytes[2] < 0.4 * dense[0].nbytes[2]


@pytest.mark.parametrize("collective", ["direct", "ring"])
def test_bases_that_differ_are_replaced_by_those_of_rank_0(collective: str) -> None:
    reducer = replace(SHORT, collective=collective)
    before = run(reducer, 3, 6)
    own = before[1].slot.state
    bases = {name: basis + 1e-7 for name, basis in own.shared["bases"].items()}
    bases["0000"] = bases["0000"][:, :1]
    before[1].slot.state = CodecState({**own.shared, "bases": bases}, own.local)
    after, _ = going_on(before, range(6, 7))
    assert [replica.slot.state.shared["phase"] for replica in after] == ["share"] * 3
    after, _ = going_on(after, range(7, 9))
    assert_alike(after)
    assert after[1].slot.state.shared["phase"] == "compress"
    assert same_tree(after[1].slot.state.shared["bases"], before[0].slot.state.shared["bases"])

    def again(runtime: Runtime, number: int) -> Coroutine[Pending[Any], None, Replica]:
        replica = Replica(runtime, reducer, first=1000 * number)
        replica.slot.state = before[replica.rank].slot.state
        return replica.run(range(6, 9))

    cluster = Cluster()
    real = cluster.run(3, again)
    cluster.close()
    for one, two in zip(real, after, strict=True):
        assert same_bits(one.results[-1].mean, two.results[-1].mean)
        assert same_tree(one.slot.state.shared, two.slot.state.shared)


def test_a_hash_tells_the_smallest_difference() -> None:
    tensors = [normal(40).view(8, 5), normal(3)]
    one, same = fingerprint(tensors), fingerprint([tensor.clone() for tensor in tensors])
    other = fingerprint([tensors[0], torch.nextafter(tensors[1], torch.zeros(3))])
    assert alike([7 * number for number in one], 7)
    assert one == same
    assert not alike([a + b for a, b in zip(one, other, strict=True)], 2)


def test_a_second_replica_goes_on_from_the_shared_state() -> None:
    """In the middle of what is compressed, bit for bit, whatever its own votes were."""
    before = halfway(replace(SHORT, collective="ring"), 3)
    kept, _ = going_on(before, range(7, 10))
    fresh = before[0].reducer.init(SPEC, Seeds(5, 102)).local
    before[2].slot.state = CodecState(before[0].slot.state.shared, fresh)
    joined, _ = going_on(before, range(7, 10))
    assert_alike(joined)
    assert all(
        same_bits(one.mean, two.mean) for one, two in zip(kept[0].results, joined[2].results, strict=True)
    )


def test_who_has_no_weight_says_nothing_and_nobody_s_weight_teaches_nothing() -> None:
    (before,) = halfway(SHORT, 1)
    world = VirtualWorld(1, LINK)
    slot = StateSlot(before.slot.state)
    own = Contribution(torch.zeros(SPEC.numel), 0.0, NO_RIDER)
    (result,) = world.run([SHORT.reduce(ExchangeChannel(world.runtimes[0].comm, 1, 0), slot, own, step=9)])
    assert not result.mean.any()
    assert result.learn is not None
    assert result.learn(slot.state) is slot.state


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slice_size": 0}, "slice_size 0"),
        ({"ratio": 0.5}, "ratio 0.5"),
        ({"ratio": 8, "variance_left": 0.01}, "give ratio or variance_left, not both"),
        ({"variance_left": 1.0}, "variance_left 1.0"),
        ({"warm_up": -1}, "warm_up -1"),
        ({"sample_steps": 1}, "sample_steps 1"),
        ({"compress_steps": 1}, "compress_steps 1"),
        ({"sample_bits": 9}, "bits 9"),
        ({"drift": 0.5}, "drift 0.5"),
        ({"windows": "short"}, "windows 'short' must be 'spread' or 'paper'"),
        ({"compress_steps": 99}, "99 is less than 100"),
        ({"collective": "native"}, "'native' matches sums by their order"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradiVeQ(**options)


def test_models_that_it_can_do_nothing_for_are_refused() -> None:
    matrix = TensorSpec((100,), parts=(Placed((10, 10), 0),))
    with pytest.raises(Unsupported, match="this model has none"):
        ReducerStates(GradiVeQ(), {0: matrix}, 1, 0)
    ReducerStates(GradiVeQ(matrices=True), {0: matrix}, 1, 0)
    with pytest.raises(Unsupported, match="this model has neither"):
        ReducerStates(GradiVeQ(matrices=True), {0: TensorSpec((10,))}, 1, 0)
    ReducerStates(GradiVeQ(), {0: matrix, 1: SPEC}, 1, 0)


def test_a_run_that_ends_before_anything_is_compressed_is_refused() -> None:
    recipe = farflung.recipe("synchronous").but(reducer="gradiveq(warm_up=3,sample_steps=5)")
    with pytest.raises(
        ConfigError, match=r"warm_up 3 and sample_steps 5 .* run of 9 steps: .* 10 steps or more"
    ):
        farflung.simulate("fashion-mnist/cnn", recipe, steps=9)
