"""What is special about single reducers and ways of carrying a codec: exact sums, bytes, delays, residuals."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from farflung.codecs import (
    QSGD,
    Identity,
    Int8,
    RandomK,
    RoutedCodec,
    Sign,
    TopK,
    Truncate16,
    by_role,
    by_size,
    chain,
    error_feedback,
)
from farflung.codecs.base import BaseCodec
from farflung.reducers import AdaptiveTopK, CodecReducer, GradiVeQ, PowerSGD, SharedScaleQSGD
from farflung.seeding import create_generator
from farflung.sim import LinkModel
from farflung.types import (
    Codec,
    CodecState,
    Payload,
    Reducer,
    Seeds,
    TensorSpec,
)
from tests.covering import covered
from tests.helpers import same_bits
from tests.reducers.replicas import SIDE, SPEC, WEIGHTS, exact_mean, gradient, left, once, run

QSGD_NBYTES = 512 // 2 + 4
"""Of 512 numbers in four bits, with their norm."""
SIDES = {"ring": 6 * SIDE, "direct": 12 * SIDE, "parameter_server": 6 * SIDE}
"""Bytes of what rides beside, over four ranks."""


def same(rank: int, step: int) -> Tensor:
    """A constant gradient."""
    return gradient(rank, 0)


def decoded(codec: Codec, grad: Tensor, own: int) -> Tensor:
    spec = TensorSpec.from_tensor(grad)
    payload, state = codec.encode(codec.init(spec, Seeds(1, own)), grad, step=0, count=1)
    return codec.decode(state, payload, spec, step=0, count=1)


# --- the ways of a codec ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [TopK(0.1), QSGD(), Sign(), error_feedback(TopK(0.1)), chain()])
def test_gathered_payloads_are_decoded_and_added_in_rank_order(codec: Codec) -> None:
    grads = [gradient(rank, 0) for rank in range(4)]
    results, _, _ = once(CodecReducer(codec), grads)
    wanted = decoded(codec, grads[0], 2)
    for rank in (1, 2, 3):
        wanted = wanted + decoded(codec, grads[rank], 2 + rank)
    assert same_bits(results[0].mean, wanted / 4)


def test_linear_payloads_are_summed_on_their_way() -> None:
    grads = [torch.randn(840, generator=create_generator(3, rank)) for rank in range(4)]
    results, nbytes, _ = once(CodecReducer(RandomK(0.1)), grads)
    torch.testing.assert_close(
        results[0].mean,
        sum(decoded(RandomK(0.1), grad, 0) for grad in grads) / 4,
    )
    assert nbytes == [2 * 3 * 84 + 3 * SIDE] * 4


@pytest.mark.parametrize("size", [2, 4, 8])
def test_two_phases_send_no_more_with_more_replicas(size: int) -> None:
    grads = [torch.randn(8000, generator=create_generator(3, rank)) for rank in range(size)]
    payload = 8000 // 100 * 8
    _, gathered, _ = once(CodecReducer(TopK(0.01)), grads)
    _, two, _ = once(CodecReducer(TopK(0.01), phases="two"), grads)
    assert gathered == [(size - 1) * (payload + SIDE)] * size
    assert two == [2 * (size - 1) * payload // size + (size - 1) * SIDE] * size


@pytest.mark.parametrize(
    "codec", [QSGD(bits=4), Sign(), Int8(), by_size(error_feedback(Sign()), error_feedback(QSGD()), 5)]
)
def test_auto_takes_two_phases_for_long_tensors_with_error_feedback(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflung.reducers.codec.TWO_PHASES_NUMEL", 8000)
    grads = [torch.randn(8000, generator=create_generator(3, rank)) for rank in range(4)]
    codec = codec if isinstance(codec, RoutedCodec) else error_feedback(codec)
    cases: list[tuple[int, int, Literal["gather", "two"]]] = [
        (4, 8000, "two"), (2, 8000, "gather"), (4, 7999, "gather"),
    ]  # fmt: skip
    for size, numel, phases in cases:
        parts = [grad[:numel] for grad in grads[:size]]
        chosen, nbytes, _ = once(CodecReducer(codec), parts)
        wanted, wanted_nbytes, _ = once(CodecReducer(codec, phases=phases), parts)
        assert nbytes == wanted_nbytes
        assert same_bits(chosen[0].mean, wanted[0].mean)


@pytest.mark.parametrize(
    "codec", [error_feedback(TopK(0.01)), error_feedback(chain(TopK(0.3), Int8())), QSGD()]
)
def test_auto_gathers_selected_entries_and_noise(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farflung.reducers.codec.TWO_PHASES_NUMEL", 1)
    grads = [gradient(rank, 0) for rank in range(3)]
    assert once(CodecReducer(codec), grads)[1] == once(CodecReducer(codec, phases="gather"), grads)[1]


@pytest.mark.parametrize("phases", ["gather", "two", "hops"])
def test_residuals_fade_by_the_decay(phases: Literal["gather", "two", "hops"]) -> None:
    def make(rank: int, step: int) -> Tensor:
        return gradient(rank, 0) * (step == 0)

    reducer = CodecReducer(error_feedback(TopK(0.1), decay=0.5), phases=phases)
    first, second = (run(reducer, 2, steps, make=make) for steps in (1, 2))
    kept, kept_later = (torch.stack([left(replica) for replica in group]).sum(0) for group in (first, second))
    sent = sum(WEIGHTS[:2]) * second[0].results[1].mean.double()
    assert kept.norm() > 0.01
    torch.testing.assert_close(sent + kept_later, 0.5 * kept)


@pytest.mark.parametrize(
    ("reducer", "delays"),
    [
        (CodecReducer(TopK(0.1)), 1),
        (CodecReducer(TopK(0.1), phases="two"), 2),
        (CodecReducer(Int8()), 2),
        (CodecReducer(QSGD(), phases="hops"), 2),
        (CodecReducer(RandomK(0.1)), 2),
        (CodecReducer(by_role(TopK(0.1))), 2),
        (CodecReducer(by_size(Identity(), TopK(0.1), 5)), 1),
        (SharedScaleQSGD(), 3),
        (PowerSGD(), 4),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_how_many_one_way_delays_it_takes(reducer: Reducer, delays: int, size: int) -> None:
    grads = [gradient(rank, 0) for rank in range(size)]
    _, _, seconds = once(reducer, grads, link=LinkModel(latency_s=0.25), spec=SPEC)
    assert seconds == 0.25 * delays


@pytest.mark.parametrize("collective", ["ring", "direct", "parameter_server"])
def test_a_codec_with_seeds_may_be_encoded_anew_on_every_hop(collective: str) -> None:
    """The traffic of the collective in the codec's size, and no bias."""
    grads = [torch.randn(4096, generator=create_generator(3, rank)) for rank in range(4)]
    reducer = CodecReducer(QSGD(bits=4), collective, phases="hops")
    _, nbytes, _ = once(reducer, grads)
    _, dense, _ = once(CodecReducer(Identity(), collective), grads)
    ratio = QSGD_NBYTES / (4 * 512)
    assert sum(nbytes) - SIDES[collective] == ratio * (sum(dense) - SIDES[collective])
    draws = [draw.mean.double() for draw in run(reducer, 4, steps=24, make=same, weighted=False)[0].results]
    errors = torch.stack(draws) - exact_mean(4, 0, weighted=False)
    assert errors.mean(dim=0).norm() <= 2 * errors.norm(dim=1).mean() / 24**0.5


def test_roles_travel_each_in_its_own_way() -> None:
    grads = [gradient(rank, 0) for rank in range(4)]
    results, _, _ = once(CodecReducer(by_role(TopK(0.1), RandomK(0.5))), grads, spec=SPEC)
    exact = torch.stack(grads).mean(dim=0)
    torch.testing.assert_close(results[0].mean[244:], exact[244:])
    assert results[0].mean[144:244].count_nonzero() == 50  # the same entries of all
    tops = sum(decoded(TopK(0.1), grad[:144], 0) for grad in grads)
    assert isinstance(tops, Tensor)
    torch.testing.assert_close(results[0].mean[:144], tops / 4)


class Lent(TopK):
    """What it is given is its dense payload, which others may read late."""

    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        return Payload((grad,)), state


@pytest.mark.parametrize("phases", ["gather", "two"])
@pytest.mark.parametrize("late", range(3))
def test_a_payload_is_not_written_over_before_all_have_read_it(
    phases: Literal["gather", "two"], late: int
) -> None:
    replicas = run(CodecReducer(Lent(), phases=phases), 3, 2, late={late: 9.0})
    for step, replica in itertools.product(range(2), replicas):
        torch.testing.assert_close(
            replica.results[step].mean.double(), exact_mean(3, step), rtol=0.0, atol=1e-6
        )


def test_one_replica_encodes_what_has_a_memory_and_nothing_else() -> None:
    grad = gradient(0, 0)
    for codec in (Identity(), Truncate16(), Int8()):
        assert same_bits(once(CodecReducer(codec), [grad])[0][0].mean, grad)
    assert once(CodecReducer(TopK(0.1)), [grad])[0][0].mean.count_nonzero() == 26


# --- weights and residuals --------------------------------------------------------------------------------------


WINDOWS = GradiVeQ(slice_size=48, ratio=8, warm_up=1, sample_steps=3, compress_steps=9, sample_bits=None)
ROUTED = by_role(error_feedback(TopK(0.1)), error_feedback(Sign()))
FEEDBACK: list[Reducer] = [
    CodecReducer(error_feedback(TopK(0.1))),
    CodecReducer(error_feedback(RandomK(0.3, unbiased=False))),
    CodecReducer(ROUTED),
    CodecReducer(error_feedback(TopK(0.1)), phases="two"),
    CodecReducer(ROUTED, phases="two"),
    CodecReducer(error_feedback(TopK(0.1)), phases="hops"),
    CodecReducer(error_feedback(chain(TopK(0.3), Int8())), "ring", phases="hops"),
    CodecReducer(ROUTED, "ring", phases="hops"),
    AdaptiveTopK(threshold=0.6, smoothing=1.0),
    AdaptiveTopK(threshold=1.0, decide="exact"),
    PowerSGD(),
    PowerSGD(rank=1, warm_start=False),
    WINDOWS,
    replace(WINDOWS, slice_size=50, collective="ring"),
    replace(WINDOWS, sample_bits=4, collective="ring"),
]


STEPS = 12
ONE_OF_EACH = [FEEDBACK[number] for number in (0, 1, 4, 6, 9, 10, 14)]
"""Gathered, summed, in two phases, on hops, of Adaptive Top-k, PowerSGD and GradiVeQ."""


@covered("reducer, size, width", FEEDBACK, [1, 3], [1, 3])
def test_what_was_sent_and_what_is_left_are_all_there_was(reducer: Reducer, size: int, width: int) -> None:
    """Over all replicas, whether exchanges overlap or not; weights are numerators' weights."""
    replicas = run(reducer, size, steps=STEPS, width=width)
    weight = sum(WEIGHTS[:size])
    given = sum((weight * exact_mean(size, step) for step in range(STEPS)), torch.zeros(1))
    sent = sum((weight * result.mean.double() for result in replicas[0].results), torch.zeros(1))
    kept = sum((left(replica) for replica in replicas), torch.zeros(1))
    by_hops = isinstance(reducer, CodecReducer) and reducer.phases == "hops"
    assert kept.norm() > 0.01 or (size == 1 and by_hops), "one replica has no hop"
    torch.testing.assert_close(sent + kept, given, rtol=0.0, atol=2e-4)


@pytest.mark.parametrize("reducer", ONE_OF_EACH, ids=repr)
def test_a_constant_gradient_is_sent_whole_in_the_end(reducer: Reducer) -> None:
    replicas = run(reducer, 2, steps=60, make=same, weighted=False)
    average = torch.stack([result.mean for result in replicas[0].results]).mean(dim=0)
    exact = exact_mean(2, 0, weighted=False)
    assert (average - exact).norm() <= 0.25 * exact.norm()


@pytest.mark.parametrize(
    "reducer", [CodecReducer(QSGD()), CodecReducer(QSGD(), phases="two"), SharedScaleQSGD()], ids=repr
)
def test_an_unbiased_codec_makes_an_unbiased_mean(reducer: Reducer) -> None:
    replicas = run(reducer, 3, steps=50, make=same, link=LinkModel())
    errors = torch.stack([result.mean for result in replicas[0].results]).double() - exact_mean(3, 0)
    along = errors @ torch.randn(SPEC.numel, 20, generator=create_generator(6), dtype=torch.float64)
    assert (along.mean(dim=0).abs() <= 6 * along.std(dim=0) / math.sqrt(50)).all()


class Learner(BaseCodec):
    """A linear codec that adds up what it was shown."""

    is_stateless = False

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        return CodecState({"seen": torch.zeros(spec.shape)})

    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        return Payload((grad.clone(), torch.ones(2, 3, dtype=torch.int64))), state

    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        grad, ones = payload.iter_tensors()
        assert (ones == count).all()
        return grad

    def update_state(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        return CodecState({"seen": state.shared["seen"] + aggregate + step})

    def is_linear(self, state: CodecState) -> bool:
        return not state.shared["seen"].any()


@pytest.mark.parametrize("codec", [Learner(), by_role(Learner(), Learner()), error_feedback(Learner())])
def test_a_codec_learns_the_average_of_what_was_encoded(codec: Codec) -> None:
    """Summed on its way as long as it says so, gathered afterwards: payloads of two dtypes, either way."""
    replicas = run(CodecReducer(codec), 4, steps=3)
    seen = sum(exact_mean(4, step) * sum(WEIGHTS) / 4 + step for step in range(3))
    shared = replicas[0].slot.state.shared
    shared = shared.get("codec", shared)
    if "convolution" in shared:
        found = torch.cat([shared[name]["seen"] for name in ("convolution", "other")])
        torch.testing.assert_close(found.double(), seen[:244], rtol=0.0, atol=1e-5)  # type: ignore[index]
    else:
        torch.testing.assert_close(shared["seen"].double(), seen, rtol=0.0, atol=1e-5)


# --- shared scales ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "width"), [(2, 5), (4, 6), (8, 7)])
def test_levels_travel_in_fields_that_hold_their_sum(size: int, width: int) -> None:
    grads = [torch.randn(8400, generator=create_generator(3, rank)) for rank in range(size)]
    _, nbytes, _ = once(SharedScaleQSGD(bucket_size=840), grads)
    words = math.ceil(8400 / (32 // width))
    for sent in nbytes:
        tensors = sent - (size - 1) * (10 * 4 + SIDE)
        assert abs(tensors - 2 * (size - 1) * 4 * words / size) <= 8 * size


@pytest.mark.parametrize("size", [2, 4])
def test_all_levels_at_their_largest_do_not_overflow(size: int) -> None:
    for value in (1.0, -1.0):
        results, _, _ = once(SharedScaleQSGD(bits=8), [torch.full((100,), value)] * size)
        assert torch.equal(results[0].mean, torch.full((100,), value))


def test_an_infinity_anywhere_is_seen_by_all() -> None:
    grads = [gradient(rank, 0) for rank in range(2)]
    grads[1][3] = math.nan
    results, _, _ = once(SharedScaleQSGD(bucket_size=100), grads)
    assert results[0].mean[:100].isnan().all()
    assert results[0].mean[100:].isfinite().all()


def test_other_dtypes_keep_theirs() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        for reducer in (PowerSGD(), SharedScaleQSGD(bits=8), CodecReducer(error_feedback())):
            grads = [gradient(rank, 0).to(dtype) for rank in range(2)]
            results, _, _ = once(reducer, grads, spec=replace(SPEC, dtype=dtype))
            assert results[0].mean.dtype == dtype
            assert same_bits(results[0].mean, results[1].mean)
