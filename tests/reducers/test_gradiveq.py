"""Slices of convolutions on the principal components of a window."""

from __future__ import annotations

import functools
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
from farflung.reducers.gradiveq import slices, window
from farflung.reducers.gradiveq.slices import Layout, SliceCoder
from farflung.reducers.gradiveq.window import (
    compute_basis,
    compute_fingerprint,
    count_dimensions,
    is_unanimous,
)
from farflung.seeding import create_generator
from farflung.sim import LinkModel, VirtualWorld
from farflung.tasks import Pending
from farflung.types import (
    CodecState,
    Contribution,
    ParameterSpan,
    Reducer,
    Runtime,
    Seeds,
    State,
    StateSlot,
    TensorSpec,
)
from tests.helpers import Cluster, same_bits, same_tree
from tests.reducers.replicas import LINK, NO_RIDER, SIDE, SPEC, Replica, assert_alike, gradient, run

CONVOLUTIONS = TensorSpec(
    (560,),
    spans=(
        ParameterSpan((4, 4, 3, 3), 0),
        ParameterSpan((10,), 144),
        ParameterSpan((5, 9, 3, 3), 154),
        ParameterSpan((), 559),
    ),
)
SHORT = GradiVeQ(
    slice_size=48, ratio=8, warm_up=1, sample_steps=5, compress_steps=4, windows="paper", sample_bits=None
)
SPREAD = replace(SHORT, windows="spread", compress_steps=10)
EXPLAINED = replace(SHORT, ratio=None, variance_left=0.0001, slice_size=144)


def normal(numel: int, *labels: int) -> Tensor:
    return torch.randn(numel, generator=create_generator(31, *labels))


def planar(rank: int, step: int) -> Tensor:
    """Gradients of every rank in one plane through one point, which samples of three steps show."""
    means, one, two = (normal(SPEC.numel, label) for label in range(3))
    along = torch.randn(2, generator=create_generator(32, rank, step))
    return means + along[0] * one + along[1] * two


def bases_of(layout: Layout, samples: Tensor, left_out: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Means and bases of samples, shape ``(n, numel)``."""
    state = window.init_window(0, layout)
    for sample in samples:
        state = window.add_mean(state, sample, 1)
    state = window.solve_bases(state, None, left_out, lambda numel: None)
    return state["means"], state["bases"]


def coder_of(layout: Layout, samples: Tensor, tensor: Tensor, weight: float, left_out: float) -> SliceCoder:
    return SliceCoder(layout, *bases_of(layout, samples, left_out), tensor, weight)


# --- layout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wished", [7, 30, 44, 500])
@pytest.mark.parametrize("shape", [(5, 3, 2, 4), (5, 3, 8), (5, 3, 2, 2, 2), (5, 24)])
def test_slices_are_read_by_position_depth_and_filter_and_written_where_they_were(
    shape: tuple[int, ...], wished: int
) -> None:
    """A slice begins anywhere in a kernel, and the last one ends in zeros; a matrix is a kernel of depth 1."""
    spec, depth = TensorSpec((200,), spans=(ParameterSpan(shape, 7),)), 3 if len(shape) > 2 else 1
    assert len(Layout.from_spec(spec, wished).layers) == (depth == 3)
    (layer,) = Layout.from_spec(spec, wished, matrices=True).layers
    tensor = normal(200)
    rows = layer.read_slices(tensor, 0, layer.num_slices)
    assert rows.numel() - 120 < layer.num_slices
    assert torch.equal(rows.view(-1)[:120], tensor[7:127].view(5, depth, -1).permute(2, 1, 0).reshape(-1))
    assert not rows.view(-1)[120:].any()
    again = torch.zeros_like(tensor)
    for first in range(layer.num_slices):
        assert torch.equal(layer.read_slices(tensor, first, first + 1), rows[first : first + 1])
        layer.write_slices(again, first, rows[first : first + 1])
    wanted = torch.zeros_like(tensor)
    wanted[7:127] = tensor[7:127]
    assert torch.equal(again, wanted)


@pytest.mark.parametrize(
    ("shape", "slices", "numel"),
    [((16, 16, 3, 3), 4, 576), ((16, 3, 3, 3), 1, 432), ((64, 64, 3, 3), 72, 512), ((30, 50), 3, 500)],
)
def test_slices_are_of_the_size_that_fits_best(shape: tuple[int, ...], slices: int, numel: int) -> None:
    part = ParameterSpan(shape, 0)
    (layer,) = Layout.from_spec(TensorSpec((part.numel,), spans=(part,)), 512, matrices=True).layers
    assert (layer.num_slices, layer.slice_numel) == (slices, numel)


def test_what_is_no_convolution_is_dense() -> None:
    layout = Layout.from_spec(CONVOLUTIONS, 48)
    assert layout.dense == ((144, 10), (559, 1))
    assert Layout.from_state(layout.state) == layout


# --- principal components ---------------------------------------------------------------------------------------


def test_dimensions_explain_the_variance() -> None:
    variances = torch.tensor([8.0, 1.0, 0.5, 0.5])
    shares = (0.5, 0.2, 0.15, 0.06, 0.05, 0.01, 0.0)
    assert [count_dimensions(variances, left) for left in shares] == [1, 1, 2, 3, 3, 4, 4]
    assert count_dimensions(torch.zeros(4), 0.0) == 1


@pytest.mark.parametrize(("samples", "slices"), [(2, 1), (6, 1), (6, 3), (40, 1)])
def test_dimensions_are_no_more_than_samples_have(samples: int, slices: int) -> None:
    rows = normal(samples * slices * 30).view(samples, slices, 30)
    sums, gram = rows.sum(dim=0), rows.view(-1, 30).T @ rows.view(-1, 30)
    basis = compute_basis(sums, gram, samples, None, 0.0)
    assert basis.shape == (30, min(slices * (samples - 1), 30))
    torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1]))
    assert compute_basis(sums, gram, samples, None, 0.5).shape[1] < basis.shape[1] or samples == 2
    counts = {ratio: compute_basis(sums, gram, samples, ratio, 0.0).shape[1] for ratio in (1.0, 10.0, 1000.0)}
    assert counts == {1.0: basis.shape[1], 10.0: min(3, basis.shape[1]), 1000.0: 1}


def test_a_basis_is_of_all_slices_about_their_own_means() -> None:
    """The same as a singular value decomposition of all samples of all slices, less the mean of each slice."""
    rows = normal(6 * 3 * 30).view(6, 3, 30)
    basis = compute_basis(rows.sum(dim=0), rows.view(-1, 30).T @ rows.view(-1, 30), 6, 10.0, 0.0)
    _, _, directions = torch.linalg.svd((rows - rows.mean(dim=0)).view(-1, 30), full_matrices=False)
    torch.testing.assert_close(basis @ basis.T, directions[:3].T @ directions[:3], rtol=0.0, atol=1e-5)


def test_with_nothing_left_out_the_window_comes_out_whole() -> None:
    layout = Layout.from_spec(CONVOLUTIONS, 1000)
    samples = normal(6 * 560).view(6, 560).double()
    for sample in samples:
        coder = coder_of(layout, samples, 2 * sample, 2.0, 0.0)
        (whole,) = coder.split(1)
        encoded = coder.encode(whole)
        assert len(encoded) == 5 * len(layout.layers) + 11
        coder.decode(encoded, whole, 2.0)
        torch.testing.assert_close(coder._tensor, sample, rtol=0.0, atol=1e-5)
        assert coder.relative_error == pytest.approx(0.0, abs=1e-3)


def test_the_loss_is_that_of_the_own_tensor() -> None:
    layout = Layout.from_spec(SPEC, 48)
    tensor = normal(SPEC.numel, 4)
    coder = coder_of(layout, normal(6 * SPEC.numel).view(6, -1), tensor.clone(), 1.0, 0.3)
    assert coder.relative_error is None
    (whole,) = coder.split(1)
    coder.decode(coder.encode(whole), whole, 1.0)
    left = (coder._tensor - tensor)[:144].norm() / tensor[:144].norm()
    assert coder.relative_error == pytest.approx(float(left), rel=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunks_of_slices_are_coded_as_all_at_once(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of seven slices cover a layer of seven, and begin in the middle of a segment of the other."""
    layout = Layout.from_spec(CONVOLUTIONS, 22)
    assert [layer.num_slices for layer in layout.layers] == [7, 18]
    samples, results = normal(6 * 560).view(6, 560), []
    for num_slices in (100, chunk):
        monkeypatch.setattr(slices, "_CHUNK_SLICES", num_slices)
        coder = coder_of(layout, samples, normal(560, 5), 2.0, 0.3)
        encoded = [coder.encode(segment) for segment in coder.split(3)]
        for sums, segment in zip(encoded, coder.split(3), strict=True):
            assert len(sums) == coder.count_encoded(segment)
            coder.decode(sums, segment, 4.0)
        results.append((*encoded, coder._tensor, torch.tensor(coder.relative_error)))
    torch.testing.assert_close(*results)


# --- around a ring ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8, 40])
def test_borders_are_those_of_slices_and_balance_bytes(size: int) -> None:
    layout = Layout.from_spec(CONVOLUTIONS, 16)
    coder = coder_of(layout, normal(9 * 560).view(9, 560), normal(560), 1.0, 0.2)
    places = coder.split(size)
    sent = [coder.count_encoded(place) for place in places]
    (whole,) = coder.split(1)
    assert len(places) == size
    assert sum(sent) == coder.count_encoded(whole)
    assert sum(coder.count_dense(place) for place in places) == 560
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
    return after, world.clock.time()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_around_a_ring_it_is_the_same_as_without_overlap(size: int) -> None:
    """Segments are summed in the order of the ring, each from its own rank on, and every rank decodes the sums."""
    reducer = replace(SHORT, collective="ring", slice_size=44)
    make = functools.partial(gradient, numel=560)
    before = halfway(reducer, size, spec=CONVOLUTIONS, make=make, weighted=False)
    shared = before[0].slot.state.shared
    after, _ = going_on(before, range(7, 8))
    layout = Layout.from_state(shared["layout"])
    coders = [
        SliceCoder(layout, shared["means"], shared["bases"], make(rank, 7), 1.0) for rank in range(size)
    ]
    for index, place in enumerate(coders[0].split(size)):
        total = coders[index].encode(place)
        for offset in range(1, size):
            total = total + coders[(index + offset) % size].encode(place)
        coders[0].decode(total, place, float(size))
    for replica in after:
        assert same_bits(replica.results[0].mean, coders[0]._tensor)


@pytest.mark.parametrize(("encode_s", "decode_s"), [(0.3, 0.2), (0.8, 0.7)])
def test_coding_and_messages_go_on_side_by_side(encode_s: float, decode_s: float) -> None:
    """Three segments of one slice each: on every hop the longer of the two counts, and what is coded first."""
    spec = TensorSpec((144,), spans=(ParameterSpan((4, 4, 3, 3), 0),))
    reducer = replace(SHORT, collective="ring", ratio=12)
    before = halfway(reducer, 3, spec=spec, make=lambda rank, step: gradient(rank, step, 144), weighted=False)
    rates = {("encode", reducer.method): encode_s, ("decode", reducer.method): decode_s, ("add", ""): 0.12}
    coding = CodingRates({key: ((1, one / 48), (48, one)) for key, one in rates.items()})
    _, took = going_on(before, range(7, 8), DeviceProfile(coding=coding))
    added = 0.12 * 4 / 48  # of the four numbers that a slice is encoded in
    # The last segment is decoded after what is timed here.
    assert took == pytest.approx(encode_s + 2 * (max(encode_s, 0.5) + added) + 2 * max(decode_s, 0.5))


# --- windows ----------------------------------------------------------------------------------------------------


def watched(reducer: GradiVeQ, steps: int, size: int = 3, **options: Any) -> tuple[list[str], list[Replica]]:
    """The phase of each exchange, and the replicas."""
    phases: list[str] = []

    class Watched(Reducer):
        """The reducer, and a note of its phase on rank 0."""

        def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
            return reducer.init(spec, seeds)

        async def reduce(
            self, channel: Any, slot: StateSlot, contribution: Contribution, *, step: int
        ) -> Any:
            if channel.rank == 0:
                phases.append("warm_up" if step < reducer.warm_up else slot.state.shared["phase"])
            return await reducer.reduce(channel, slot, contribution, step=step)

    return phases, run(Watched(), size, steps, **options)


WINDOW = [*["sample"] * 5, "confirm", *["compress"] * 3]


def test_windows_follow_each_other() -> None:
    phases, _ = watched(SHORT, 20)
    assert phases == ["warm_up", *WINDOW, *WINDOW, "sample"]
    assert phases[1 : 1 + SHORT.compute_num_exchanges(2)] == [*WINDOW, *WINDOW[:7]]


def test_samples_may_be_spread_among_those_that_are_compressed() -> None:
    """One of three exchanges is summed whole, and after five of them bases are found and confirmed anew."""
    cycle = ["confirm", *["compress"] * 15]
    phases, replicas = watched(SPREAD, 40, 2)
    assert phases == ["warm_up", *["sample"] * 5, *cycle, *cycle, "confirm", "compress"]
    assert phases[1 : 1 + SPREAD.compute_num_exchanges(3)] == phases[1:]
    nbytes = replicas[0].nbytes
    whole = [step for step, sent in enumerate(nbytes) if sent > 0.9 * nbytes[1]]
    assert whole == [*range(7), *range(9, 22, 3), 22, *range(25, 38, 3), 38]


def test_with_several_exchanges_under_way_a_phase_lasts_until_the_last_is_merged() -> None:
    expected = ["warm_up", *["sample"] * 6, *["confirm"] * 2, *["compress"] * 4]
    assert watched(SHORT, 14, width=2)[0] == [*expected, "sample"]


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

    without, _ = watched(reducer, 20)
    phases, replicas = watched(reducer, 24, make=troubled)
    assert [phase for step, phase in enumerate(phases) if step not in bad] == without
    for replica in replicas:
        state = replica.slot.state
        for kept in (state.local["residual"], *(state.shared[kind] for kind in ("sums", "means", "bases"))):
            assert all(tensor.isfinite().all() for tensor in kept.values())


class Watching(Replica):
    """A replica that notes the step and the state of each exchange that it has merged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.states: list[State] = []

    async def _learn(self, reduced: Any) -> None:
        await super()._learn(reduced)
        self.states.append(self.slot.state.shared)


@pytest.mark.parametrize("drift", [1e9, 1.0])
def test_the_mean_stays_that_of_the_gradients(drift: float) -> None:
    """Constant gradients and noise, over five windows, at 4 bits, whether votes end some of them or not."""
    reducer = replace(SPREAD, sample_steps=8, compress_steps=32, sample_bits=4, drift=drift)
    constant = normal(SPEC.numel, 7)
    (layer,) = Layout.from_spec(SPEC, 48).layers
    exact = layer.read_slices(constant, 0, layer.num_slices)
    world = VirtualWorld(2, LINK)
    replicas = [
        Watching(
            runtime, reducer, make=lambda rank, step: constant + 0.2 * gradient(rank, step), weighted=False
        )
        for runtime in world.runtimes
    ]
    world.run([replica.run(range(176)) for replica in replicas])
    errors = {
        state["window"]: float((state["means"]["0000"] - exact).norm() / exact.norm())
        for state in replicas[0].states
        if state["means"]
    }
    assert len(errors) >= 5
    assert max(errors.values()) < 0.1
    votes_ended_some = max(errors) > len(errors) + 1
    assert votes_ended_some == (drift == 1.0)


def test_what_waited_for_a_sample_does_not_turn_the_bases() -> None:
    """Three directions of variance 4 among those of 1, of which five steps come out at once."""
    reducer = replace(SPREAD, ratio=16, sample_steps=60, compress_steps=240, drift=1e9)
    (layer,) = Layout.from_spec(SPEC, 48).layers

    def make(rank: int, step: int) -> Tensor:
        tensor = gradient(rank, step)
        rows = layer.read_slices(tensor, 0, layer.num_slices)
        rows[:, :3] *= 2
        layer.write_slices(tensor, 0, rows)
        return tensor

    world = VirtualWorld(1, LINK)
    replica = Watching(world.runtimes[0], reducer, make=make, weighted=False)
    world.run([replica.run(range(62 + 2 * 301))])
    for state in replica.states[61::301]:
        basis = state["bases"]["0000"]
        assert basis.shape == (48, 3)
        assert basis[:3].square().sum() > 0.7 * 3


def test_most_must_see_the_loss_grow_to_end_a_window() -> None:
    """What the window has seen leaves little; afterwards gradients go elsewhere, on two ranks or on one of three."""
    reducer = replace(EXPLAINED, compress_steps=20, drift=2.0)

    def drifting(away: int) -> list[str]:
        def make(rank: int, step: int) -> Tensor:
            noise = 0.01 * gradient(rank, step)
            return planar(rank, step) + (noise if step < 9 or rank >= away else 100 * noise)

        return watched(reducer, 13, make=make)[0]

    assert drifting(1)[9:] == ["compress"] * 4
    assert drifting(2)[9:] == ["compress", "compress", "sample", "sample"]


@pytest.mark.parametrize("size", range(1, 9))
def test_a_window_ends_by_a_majority_or_after_its_steps(size: int) -> None:
    state = {**window.init_window(0, Layout.from_spec(SPEC, 48)), "phase": "compress", "count": 1}
    ends = [
        window.advance_window(state, votes, steps=3, size=size)["phase"] == "sample"
        for votes in range(size + 1)
    ]
    assert ends == [votes > size / 2 for votes in range(size + 1)]
    second = window.advance_window(state, 0, steps=3, size=size)
    assert (second["phase"], second["count"]) == ("compress", 2)
    assert window.advance_window(second, 0, steps=3, size=size)["phase"] == "sample"


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
    one, same = compute_fingerprint(tensors), compute_fingerprint([tensor.clone() for tensor in tensors])
    other = compute_fingerprint([tensors[0], torch.nextafter(tensors[1], torch.zeros(3))])
    assert is_unanimous([7 * number for number in one], 7)
    assert one == same
    assert not is_unanimous([a + b for a, b in zip(one, other, strict=True)], 2)


def test_who_has_no_weight_says_nothing_and_nobody_s_weight_teaches_nothing() -> None:
    (before,) = halfway(SHORT, 1)
    world = VirtualWorld(1, LINK)
    slot = StateSlot(before.slot.state)
    own = Contribution(torch.zeros(SPEC.numel), 0.0, NO_RIDER)
    (result,) = world.run([SHORT.reduce(ExchangeChannel(world.runtimes[0].comm, 1, 0), slot, own, step=9)])
    assert not result.mean.any()
    assert result.update_state is not None
    assert result.update_state(slot.state) is slot.state


# --- what is refused --------------------------------------------------------------------------------------------


def test_models_that_it_can_do_nothing_for_are_refused() -> None:
    matrix = TensorSpec((100,), spans=(ParameterSpan((10, 10), 0),))
    with pytest.raises(Unsupported, match="this model has none"):
        ReducerStates(GradiVeQ(), {0: matrix}, 1, 0)
    ReducerStates(GradiVeQ(matrices=True), {0: matrix}, 1, 0)
    with pytest.raises(Unsupported, match="this model has neither"):
        ReducerStates(GradiVeQ(matrices=True), {0: TensorSpec((10,))}, 1, 0)
    ReducerStates(GradiVeQ(), {0: matrix, 1: SPEC}, 1, 0)


def test_a_run_that_ends_before_anything_is_compressed_is_refused() -> None:
    recipe = farflung.parse_recipe("synchronous").with_components(
        reducer="gradiveq(warm_up=3,sample_steps=5)"
    )
    with pytest.raises(
        ConfigError, match=r"warm_up 3 and sample_steps 5 .* run of 9 steps: .* 10 steps or more"
    ):
        farflung.simulate("fashion-mnist/cnn", recipe, steps=9)
