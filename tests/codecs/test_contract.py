"""What every codec promises, tried on a table of all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from farflung.codecs import CODECS, ErrorFeedback, Truncate16
from farflung.codecs.base import accumulate
from farflung.comm import ExchangeChannel
from farflung.comm.wire import MessageKind, encode
from farflung.errors import Unsupported
from farflung.seeding import create_generator
from farflung.state_trees import load_tree, save_tree
from farflung.types import Codec, CodecState, ParameterSpan, Payload, Runtime, Seeds, TensorSpec
from tests.helpers import (
    CODEC_ROWS,
    NUMEL,
    CodecRow,
    decode,
    in_virtual_time,
    raw,
    same_bits,
    same_payload,
    same_tree,
    tag,
    tensors_in,
)

SEEDS = Seeds(shared=11, local=12)
DRAWS = 100


def copied(payload: Payload) -> Payload:
    return Payload(tuple(copied(p) if isinstance(p, Payload) else p.clone() for p in payload.parts))


def gradient(numel: int, *labels: int) -> Tensor:
    """Entries of many magnitudes, as gradients have."""
    g = create_generator(5, *labels)
    return torch.randn(numel, generator=g) * torch.exp2(torch.randint(-12, 3, (numel,), generator=g))


def spec_of(grad: Tensor) -> TensorSpec:
    """A bucket that holds a convolution's weight, a matrix and a vector."""
    third = len(grad) // 3
    shapes = [(1, 1, third), (1, third), (len(grad) - 2 * third,)]
    starts = [0, third, 2 * third]
    parts = tuple(
        ParameterSpan(shape, start) for shape, start in zip(shapes, starts, strict=True) if math.prod(shape)
    )
    return replace(TensorSpec.from_tensor(grad), spans=parts)


def there_and_back(
    codec: Codec, grad: Tensor, *, seeds: Seeds = SEEDS, step: int = 0
) -> tuple[Tensor, Payload, CodecState]:
    spec = spec_of(grad)
    payload, state = codec.encode(codec.init(spec, seeds), grad, step=step, count=1)
    return codec.decode(state, payload, spec, step=step, count=1), payload, state


@pytest.fixture(params=CODEC_ROWS)
def row(request: pytest.FixtureRequest) -> CodecRow:
    return CODEC_ROWS[request.param]


@pytest.fixture
def codec(row: CodecRow) -> Codec:
    return row.codec


def test_the_table_has_every_codec() -> None:
    assert {name.split(" ")[0] for name in CODEC_ROWS} == set(CODECS)
    for name, row in CODEC_ROWS.items():
        assert type(row.codec) is type(CODECS[name.split(" ")[0]]())


# --- there and back ---------------------------------------------------------------------------------------------


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def test_shapes_dtypes_and_zeros_come_back(codec: Codec) -> None:
    for numel, dtype in itertools.product((0, 1, 2, 7, 64, 1000), DTYPES):
        grad = gradient(numel).to(dtype)
        decoded, payload, _ = there_and_back(codec, grad)
        assert TensorSpec.from_tensor(decoded) == TensorSpec.from_tensor(grad), (numel, dtype)
        assert decoded.isfinite().all(), (numel, dtype)
        assert payload.nbytes <= grad.nbytes or numel < 64, (numel, dtype)
        assert not there_and_back(codec, torch.zeros_like(grad))[0].any(), (numel, dtype)


@pytest.mark.parametrize("name", sorted(CODECS.keys() - {"identity", "by_role", "by_size"}))
def test_whole_numbers_are_refused(name: str) -> None:
    with pytest.raises(Unsupported, match="floating gradients"):
        CODECS[name]().init(TensorSpec((5,), torch.int64), SEEDS)


# Beyond that, norms and sums may overflow.
numbers = st.floats(-(2.0**100), 2.0**100, width=32)
small_numbers = st.floats(-1024.0, 1024.0, width=32)


@given(values=st.lists(numbers, max_size=20))
def test_any_finite_tensor_comes_back(values: list[float]) -> None:
    for name, row in CODEC_ROWS.items():
        grad = torch.tensor(values, dtype=torch.float32)
        kept = grad.clone()
        decoded, payload, _ = there_and_back(row.codec, grad)
        assert TensorSpec.from_tensor(decoded) == TensorSpec.from_tensor(grad), name
        assert same_bits(grad, kept), name
        if not row.codec.is_unbiased:
            error, size = (decoded.double() - kept.double()).norm(), kept.double().norm()
            assert error <= row.error * size * (1 + 1e-6) + len(values) * 2.0**-120, name
        assert payload.nbytes == sum(len(raw(tensor)) for tensor in payload.iter_tensors()), name


def test_adding_a_payload_is_adding_what_it_decodes_to(codec: Codec) -> None:
    for numel, alpha in itertools.product([0, 1, 7, 1000], [1.0, -1.0, 0.5]):
        decoded, payload, state = there_and_back(codec, gradient(numel))
        total = gradient(numel, 1)
        wanted = total.add(decoded, alpha=alpha)
        sent = copied(payload)
        accumulate(codec, state, payload, total, step=0, count=1, alpha=alpha)
        assert torch.equal(total, wanted), (numel, alpha)
        assert same_payload(payload, sent), (numel, alpha)


def test_a_view_of_a_larger_tensor_is_encoded_alone(codec: Codec) -> None:
    whole = gradient(100)
    view = whole.narrow(0, 13, 50)
    assert same_payload(there_and_back(codec, view)[1], there_and_back(codec, view.clone())[1])


# --- nothing else changes ---------------------------------------------------------------------------------------


def test_inputs_are_left_untouched(codec: Codec) -> None:
    grad = gradient(NUMEL)
    spec, kept = spec_of(grad), grad.clone()
    before = codec.init(spec, SEEDS)
    before_kept = codec.init(spec, SEEDS)
    payload, state = codec.encode(before, grad, step=3, count=1)
    assert same_bits(grad, kept)
    assert same_tree(before.shared, before_kept.shared)
    assert same_tree(before.local, before_kept.local)
    sent = copied(payload)
    codec.decode(state, payload, spec, step=3, count=1)
    assert same_payload(payload, sent)
    aggregate = kept.clone()
    codec.update_state(state, aggregate, step=3)
    assert same_bits(aggregate, kept)


def test_the_same_comes_of_the_same(codec: Codec) -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(there_and_back(codec, gradient(NUMEL)))
    (first, payload, state), (again, payload_again, state_again) = found
    assert same_payload(payload, payload_again)
    assert same_bits(first, again)
    assert same_tree(state.shared, state_again.shared)
    assert same_tree(state.local, state_again.local)


def test_what_is_shared_depends_on_the_shared_seed_alone(codec: Codec) -> None:
    spec = spec_of(torch.empty(NUMEL))
    one, other = codec.init(spec, Seeds(1, 2)), codec.init(spec, Seeds(1, 3))
    assert same_tree(one.shared, other.shared)


def test_a_stateless_codec_has_no_state(codec: Codec) -> None:
    grad = gradient(NUMEL)
    _, _, state = there_and_back(codec, grad)
    states = [codec.init(spec_of(grad), SEEDS), state, codec.update_state(state, grad, step=0)]
    empty = all(not s.shared and not s.local for s in states)
    assert empty == codec.is_stateless
    assert codec.is_stateless or not codec.can_requantize


def after_steps(codec: Codec, spec: TensorSpec) -> CodecState:
    """A state that is not the first."""
    state = codec.init(spec, SEEDS)
    for step in range(3):
        _, state = codec.encode(state, gradient(NUMEL, step), step=step, count=1)
        state = codec.update_state(state, gradient(NUMEL, step, 1), step=step)
    return state


def test_state_survives_a_checkpoint(codec: Codec, tmp_path: Path) -> None:
    spec = spec_of(torch.empty(NUMEL))
    state = after_steps(codec, spec)
    save_tree(tmp_path / "state.safetensors", {"shared": state.shared, "local": state.local})
    tree = load_tree(tmp_path / "state.safetensors")
    assert same_tree(tree, {"shared": state.shared, "local": state.local})
    loaded = CodecState(tree["shared"], tree["local"])
    for step in range(3, 5):
        grad = gradient(NUMEL, step)
        payload, state = codec.encode(state, grad, step=step, count=1)
        payload_loaded, loaded = codec.encode(loaded, grad, step=step, count=1)
        assert same_payload(payload, payload_loaded)
        decoded = codec.decode(state, payload, spec, step=step, count=1)
        assert same_bits(decoded, codec.decode(loaded, payload, spec, step=step, count=1))


def test_a_joiner_decodes_what_the_others_send_and_has_nothing_left_over(codec: Codec) -> None:
    spec = spec_of(torch.empty(NUMEL))
    state = after_steps(codec, spec)
    joiner = CodecState(state.shared, codec.init(spec, Seeds(SEEDS.shared, 99)).local)
    assert not any(tensor.any() for tensor in tensors_in(joiner.local))
    payload, state = codec.encode(state, gradient(NUMEL, 3), step=3, count=1)
    decoded = codec.decode(state, payload, spec, step=3, count=1)
    assert same_bits(codec.decode(joiner, payload, spec, step=3, count=1), decoded)


FEEDBACK = [name for name, row in CODEC_ROWS.items() if isinstance(row.codec, ErrorFeedback)]


@given(steps=st.lists(st.lists(small_numbers, min_size=12, max_size=12), min_size=1, max_size=8))
def test_a_residual_and_what_was_decoded_are_all_there_was(steps: list[list[float]]) -> None:
    for name in FEEDBACK:
        codec, spec = CODEC_ROWS[name].codec, TensorSpec((12,))
        state = codec.init(spec, SEEDS)
        given_, sent = torch.zeros(12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
        for step, values in enumerate(steps):
            payload, state = codec.encode(state, torch.tensor(values), step=step, count=1)
            given_ += torch.tensor(values)
            sent += codec.decode(state, payload, spec, step=step, count=1)
        # Every step rounds numbers that are at most the sum of all magnitudes so far.
        tolerance = len(steps) * 2.0**-20 * sum(max(map(abs, values)) for values in steps) + 1e-30
        torch.testing.assert_close(sent + state.local["residual"], given_, rtol=0.0, atol=tolerance, msg=name)


# --- bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 2, 50, 5000])
def test_the_bytes_counted_are_the_bytes_moved(codec: Codec, numel: int) -> None:
    grad = gradient(numel)
    decoded, payload, state = there_and_back(codec, grad)
    for tensor in (decoded, *payload.iter_tensors()):  # a single number may have any stride
        assert tensor.reshape(-1).view(torch.uint8).numel() == tensor.nbytes
    frames = encode(MessageKind.DATA, 0, tag(), payload)
    message = decode([bytearray(frame) for frame in frames], max_nbytes=payload.nbytes)
    assert message.payload.nbytes == payload.nbytes <= max(grad.nbytes, 8)
    assert sum(len(frame) for frame in frames) - payload.nbytes <= 256, "nothing but a header beside it"
    back = codec.decode(state, message.payload, spec_of(grad), step=0, count=1)
    assert same_bits(back, decoded)

    async def send(runtime: Runtime) -> int:
        channel = ExchangeChannel(runtime.comm, 1, 0)
        if runtime.comm.rank == 0:
            channel.send(payload, 1, 0)
        return channel.sent_nbytes

    assert in_virtual_time(2, send)[0] == [payload.nbytes, 0]


# --- what it claims ---------------------------------------------------------------------------------------------


def added(a: Payload, b: Payload) -> Payload:
    return Payload(
        tuple(
            added(x, y) if isinstance(x, Payload) else x + y  # type: ignore[arg-type, operator]
            for x, y in zip(a.parts, b.parts, strict=True)
        )
    )


def sums(codec: Codec, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Payloads added up and decoded, and decoded and added up."""
    spec = spec_of(grads[0])
    states = [codec.init(spec, Seeds(1, rank)) for rank in range(len(grads))]
    encoded = [codec.encode(s, g, step=2, count=1) for s, g in zip(states, grads, strict=True)]
    total = encoded[0][0]
    for payload, _ in encoded[1:]:
        total = added(total, payload)
    decoded = [codec.decode(state, payload, spec, step=2, count=1) for payload, state in encoded]
    return codec.decode(encoded[0][1], total, spec, step=2, count=len(grads)), torch.stack(decoded).sum(dim=0)


LINEAR = [
    name
    for name, row in CODEC_ROWS.items()
    if row.codec.is_linear(row.codec.init(spec_of(torch.empty(NUMEL)), SEEDS))
]


def test_which_codecs_are_linear() -> None:
    assert set(LINEAR) == {"identity", "randomk", "randomk (contractive)"}


@given(grads=st.lists(st.lists(small_numbers, min_size=9, max_size=9), min_size=1, max_size=4))
def test_payloads_of_a_linear_codec_may_be_summed(grads: list[list[float]]) -> None:
    for name in LINEAR:
        summed, apart = sums(CODEC_ROWS[name].codec, [torch.tensor(values) for values in grads])
        size = 9 * max(abs(value) for values in grads for value in values)  # randomk multiplies by n/k
        torch.testing.assert_close(
            summed, apart, rtol=0.0, atol=len(grads) * 2.0**-21 * size + 1e-30, msg=name
        )


def test_it_is_unbiased_or_contractive_as_it_says(row: CodecRow) -> None:
    codec, grad, times = row.codec, gradient(NUMEL), DRAWS if row.codec.is_unbiased else 20
    draws = [there_and_back(codec, grad, seeds=Seeds(k, k + 1), step=k)[0].double() for k in range(times)]
    size = grad.double().norm()
    if not codec.is_unbiased:
        assert all((decoded - grad.double()).norm() <= row.error * size * (1 + 1e-6) for decoded in draws)
        return
    errors = torch.stack(draws) - grad.double()
    assert errors.square().sum(dim=1).mean().sqrt() <= row.error * size
    # Along each of some directions the mean is zero within six of its standard errors.
    noise = torch.randn(20, NUMEL, generator=create_generator(6), dtype=torch.float64)
    along = errors @ torch.cat([noise, grad.double()[None], grad.sign().double()[None]]).T
    assert (along.mean(dim=0).abs() <= 6.0 * along.std(dim=0) / math.sqrt(DRAWS) + 1e-12).all()


NOISY = [
    name for name, row in CODEC_ROWS.items() if "seed" in row.codec.init(TensorSpec((NUMEL,)), SEEDS).local
]


@pytest.mark.parametrize("name", NOISY)
def test_replicas_steps_and_sums_round_apart(name: str) -> None:
    """A replica may encode its own gradient and a sum that it is part of."""
    codec, grad = CODEC_ROWS[name].codec, gradient(800)

    def encoded(own: int = 2, step: int = 0, count: int = 1) -> list[bytes]:
        state = codec.init(TensorSpec((800,)), Seeds(1, own))
        return [raw(part) for part in codec.encode(state, grad, step=step, count=count)[0].iter_tensors()]

    assert encoded() == encoded()
    assert encoded() != encoded(own=3)
    assert encoded() != encoded(step=1)
    assert encoded() != encoded(count=2)


SPECIAL: dict[str, Callable[[Tensor], Any]] = {
    "nan": torch.isnan,
    "inf": torch.isposinf,
    "-inf": torch.isneginf,
}


def test_a_number_that_is_none_is_not_hidden(row: CodecRow) -> None:
    for value, numel in itertools.product(SPECIAL, [1, NUMEL]):
        grad = gradient(numel)
        grad[numel // 2] = float(value)
        decoded, _, state = there_and_back(row.codec, grad)
        assert all(tensor.isfinite().all() for tensor in tensors_in(state.local)), "it is forgotten"
        assert row.odd == "turn" or not decoded[numel // 2].isfinite(), (value, numel)
        if row.odd == "kept":
            assert SPECIAL[value](decoded[numel // 2]), (value, numel)


# --- truncate16 alone -------------------------------------------------------------------------------------------

words = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50)


@given(words)
@example([0x7F800001, 0x7F80FFFF, -0x7FFFFF, 0x7FC00000])  # NaNs wherever their bits are
def test_truncation_keeps_the_high_half_of_every_number(bits: list[int]) -> None:
    grad = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    decoded, payload, _ = there_and_back(Truncate16(), grad)
    assert payload.nbytes == 2 * len(bits)
    number = ~grad.isnan()
    assert torch.equal(decoded.isnan(), grad.isnan())
    kept = (torch.tensor(bits, dtype=torch.int32) >> 16) << 16
    assert torch.equal(decoded.view(torch.int32)[number], kept[number])
    assert (decoded[number].abs() <= grad[number].abs()).all()
    assert torch.equal(decoded[number].signbit(), grad[number].signbit())
    again, _, _ = there_and_back(Truncate16(), decoded)
    assert same_bits(again, decoded)


@given(words)
def test_truncation_keeps_numbers_of_sixteen_bits(bits: list[int]) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        grad = torch.tensor(bits, dtype=torch.int32).view(dtype)
        decoded, payload, _ = there_and_back(Truncate16(), grad)
        assert payload.nbytes == grad.nbytes
        assert torch.equal(decoded.view(torch.int16), grad.view(torch.int16))


def test_truncation_cuts_wider_numbers_to_as_many_bits_as_float32() -> None:
    grad = torch.tensor([1.0, -1 / 3, 1e-30, 0.0, torch.inf, torch.nan], dtype=torch.float64)
    decoded, payload, _ = there_and_back(Truncate16(), grad)
    assert (payload.nbytes, decoded.dtype) == (2 * len(grad), torch.float64)
    assert torch.equal(decoded.isnan(), grad.isnan())
    narrow, _, _ = there_and_back(Truncate16(), grad.float())
    assert torch.equal(decoded[:5], narrow[:5].double())
