"""Whatever is sent comes back bit for bit; whatever else arrives is refused, and takes no memory."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from farflung.comm import framing, wire
from farflung.comm.wire import INLINE_NBYTES, MAX_INLINE_HEAD_NBYTES, MessageKind, WireError, encode
from farflung.types import Payload, Tag
from tests.helpers import decode, raw, same_bits, same_payload

ROOM = 1 << 24
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
TAG = Tag(exchange=2**63 + 5, part=2**32 - 1, hop=3)


def filled(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits the dtype can have, NaNs among them."""
    nbytes = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(high, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype).reshape(tuple(shape))


def received(frames: Sequence[Any]) -> list[bytearray]:
    """Frames as a socket would hand them out."""
    return [bytearray(frame) for frame in frames]


def round_trip(payload: Payload) -> Payload:
    message = decode(received(encode(MessageKind.DATA, 7, TAG, payload)), max_nbytes=ROOM)
    assert (message.kind, message.view, message.tag) == (MessageKind.DATA, 7, TAG)
    return message.payload


small = st.lists(st.integers(0, 5), max_size=4)
large = st.sampled_from(
    [[INLINE_NBYTES], [INLINE_NBYTES + 1], [INLINE_NBYTES // 8], [3, INLINE_NBYTES], [2, 0, INLINE_NBYTES]]
)
tensors = st.builds(filled, small | large, st.sampled_from(DTYPES), st.integers(0, 2**32))
trees = st.recursive(
    tensors, lambda parts: st.lists(parts, max_size=4).map(lambda p: Payload(tuple(p))), max_leaves=12
)
payloads = st.lists(trees, max_size=4).map(lambda parts: Payload(tuple(parts)))


# --- what is sent comes back ------------------------------------------------------------------------------------


@given(payloads)
def test_payloads_come_back_bit_for_bit(payload: Payload) -> None:
    back = round_trip(payload)
    assert same_payload(back, payload)
    assert back.nbytes == payload.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (3, 0, 2), (5, 7), (INLINE_NBYTES // 2 + 1,), (1,) * 8], ids=str
)
def test_every_dtype_and_kind_of_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = filled(shape, dtype)
    assert same_payload(round_trip(Payload((tensor, tensor))), Payload((tensor, tensor)))


def test_views_that_are_not_contiguous_and_need_a_gradient() -> None:
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    for view in (base.T, base[:, 1::2], base[1:2].expand(5, 4), base[:1, ::2][:, :1], base[::2, 0][:1]):
        (back,) = round_trip(Payload((view,))).iter_tensors()
        assert same_bits(back, view.detach())


@pytest.mark.parametrize("kind", list(MessageKind))
def test_every_kind(kind: MessageKind) -> None:
    assert decode(received(encode(kind, 0, TAG, Payload(()))), max_nbytes=0).kind is kind


def test_small_tensors_ride_in_the_header_and_large_ones_are_not_copied_to_be_sent() -> None:
    little, big = filled([INLINE_NBYTES], torch.uint8), filled([INLINE_NBYTES + 1], torch.uint8)
    head, body = encode(MessageKind.DATA, 0, TAG, Payload((little, big)))
    assert raw(little) in bytes(head)
    big[0] += 1
    assert bytes(body) == raw(big)
    _, back = decode(received([head, body]), max_nbytes=ROOM).payload.iter_tensors()
    assert raw(back) == raw(big)


def test_no_head_is_larger_than_a_piece() -> None:
    little = filled([INLINE_NBYTES // 8 - 1], torch.float64)
    payload = Payload((*[little] * 100, filled([0, 7], torch.int8)))
    frames = encode(MessageKind.DATA, 0, TAG, payload)
    assert len(frames[0]) <= MAX_INLINE_HEAD_NBYTES
    assert len(frames) > 1
    assert same_payload(decode(received(frames), max_nbytes=ROOM).payload, payload)


def test_more_tensors_than_fit_in_a_message_are_refused() -> None:
    large, small = torch.zeros(INLINE_NBYTES + 1, dtype=torch.uint8), torch.zeros((1,) * 8)
    for count, each in ((9, Payload((large,) * 32)), (8, Payload((small,) * 254))):
        with pytest.raises(ValueError, match="tensors is more than fits in a message"):
            encode(MessageKind.DATA, 0, TAG, Payload((each,) * count))


@pytest.mark.parametrize("offset", range(8))
def test_a_frame_may_begin_at_any_address(offset: int) -> None:
    tensor = filled([INLINE_NBYTES], torch.float64)
    head, body = encode(MessageKind.DATA, 0, TAG, Payload((tensor,)))
    shifted = memoryview(bytearray(offset) + bytearray(body))[offset:]
    (back,) = decode([head, shifted], max_nbytes=ROOM).payload.iter_tensors()
    assert same_bits(back, tensor)
    assert back.data_ptr() % 8 == 0


# --- anything else is refused -----------------------------------------------------------------------------------


def harmless(frames: Sequence[Any], room: int = ROOM) -> Payload | None:
    """Decodes what may be nonsense: refused, or no larger than what arrived."""
    try:
        payload = decode(frames, max_nbytes=room).payload
    except WireError:
        return None
    assert payload.nbytes <= min(room, sum(len(frame) for frame in frames))
    for tensor in payload.iter_tensors():
        assert tensor.untyped_storage().nbytes() <= sum(map(len, frames))
    return payload


@given(payloads, st.data())
def test_every_truncation_is_refused(payload: Payload, data: st.DataObject) -> None:
    frames = received(encode(MessageKind.DATA, 0, TAG, payload))
    which = data.draw(st.integers(0, len(frames) - 1), label="frame")
    keep = data.draw(st.integers(0, len(frames[which]) - 1), label="bytes kept")
    cut = [*frames[:which], frames[which][:keep], *frames[which + 1 :]]
    assert harmless(cut) is None
    assert harmless(frames[:which]) is None
    assert harmless([*frames, bytearray(1)]) is None
    assert harmless([frames[0] + b"\0", *frames[1:]]) is None


@given(payloads, st.lists(st.tuples(st.integers(0), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_are_harmless(payload: Payload, flips: list[tuple[int, int]]) -> None:
    frames = received(encode(MessageKind.DATA, 0, TAG, payload))
    for where, mask in flips:
        frames[0][where % len(frames[0])] ^= mask
    harmless(frames)


def test_each_single_flip_of_a_header() -> None:
    payload = Payload(
        (filled([3], torch.int16), Payload((filled([0, 2], torch.bool), filled([2000], torch.float32))))
    )
    good = encode(MessageKind.DATA, 0, TAG, payload)
    for where in range(len(good[0])):
        for mask in (1, 0x80, 0xFF):
            frames = received(good)
            frames[0][where] ^= mask
            harmless(frames)


@given(st.lists(st.binary(max_size=80), max_size=3))
def test_noise_is_harmless(frames: list[bytes]) -> None:
    harmless(frames)


def headed(
    description: bytes, kind: int = 0, magic: bytes = wire.MAGIC, version: int = wire.VERSION
) -> bytearray:
    """A description behind a good header, unless told otherwise."""
    padded = description + bytes(-len(description) % 8)
    return bytearray(
        struct.pack("<2sBBIQIIIIIi", magic, version, kind, *[0] * 4, len(padded), *[0] * 3) + padded
    )


@given(st.binary(max_size=60))
@example(b"\xff\x01" * 200)
def test_noise_after_a_good_header_is_harmless(noise: bytes) -> None:
    harmless([headed(b"\xff" + noise)])


sizes = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1])


@given(st.integers(0, 12), st.lists(sizes, max_size=9))
@example(0, [0, 2**63])
@example(0, [2**40, 2**40, 0])
@example(0, [2**62, 4])
def test_absurd_shapes_are_harmless(code: int, shape: list[int]) -> None:
    head = headed(struct.pack(f"<4B{len(shape)}Q", 0xFF, 1, code, len(shape), *shape))
    harmless(received([head + bytes(64)]))
    harmless(received([head, bytes(8192)]))


@pytest.mark.parametrize("shape", [(0, 2**49), (2**25, 0, 2**24), (2**48, 0, 2)])
def test_empty_tensors_of_absurd_dimensions_are_refused(shape: tuple[int, ...]) -> None:
    head = headed(struct.pack(f"<4B{len(shape)}Q", 0xFF, 1, 0, len(shape), *shape))
    with pytest.raises(WireError, match="an empty tensor of absurd dimensions"):
        decode([head], max_nbytes=ROOM)


def test_empty_tensors_may_be_long_the_other_way() -> None:
    shape = (2**24, 0, 2**24)
    head = headed(struct.pack("<4B3Q", 0xFF, 1, 0, len(shape), *shape))
    (tensor,) = decode([head], max_nbytes=0).payload.iter_tensors()
    assert tensor.shape == shape


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [headed(b"")],
        [headed(b"\xff\0", magic=b"XX")],
        [headed(b"\xff\0", version=wire.VERSION + 1)],
        [headed(b"\xff\0", kind=17)],
        [headed(b"\0\0")],
        [headed(b"\xff\x01\x63\0")],
        [headed(b"\xff\x01\0\x09" + bytes(72))],
        [headed(b"\xff\x01" * 30 + b"\xff\0")],
        [headed(b"\xff\0")[:-1]],
        [headed(b"\xff\0" + bytes(8))],
        [headed(b"\xff\0" + b"\x01")],
    ],
    ids=[
        "nothing",
        "empty",
        "no payload",
        "magic",
        "version",
        "kind",
        "bare tensor",
        "dtype",
        "dims",
        "nested too deep",
        "description cut",
        "description too long",
        "padding",
    ],
)
def test_each_fault_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames, max_nbytes=ROOM)


@pytest.mark.parametrize("numel", [100, INLINE_NBYTES])
def test_the_whole_payload_counts_against_the_bound(numel: int) -> None:
    tensor = filled([numel], torch.float32)
    frames = received(encode(MessageKind.DATA, 0, TAG, Payload((tensor, Payload((tensor,))))))
    assert decode(frames, max_nbytes=2 * tensor.nbytes).payload.nbytes == 2 * tensor.nbytes
    with pytest.raises(WireError, match="where messages of this run have at most"):
        decode(frames, max_nbytes=2 * tensor.nbytes - 1)


# --- in virtual time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 8, INLINE_NBYTES, INLINE_NBYTES + 8, 10**6])
def test_the_model_of_a_message_has_the_bytes_of_one(nbytes: int) -> None:
    head, *rest = encode(MessageKind.DATA, 7, TAG, Payload((torch.zeros(nbytes, dtype=torch.uint8),)))
    piece = framing.compute_piece_nbytes(50e6, expects_urgent=True)
    assert piece == 62_500
    plain = 8 + len(head) + sum(len(frame) + 21 * math.ceil(len(frame) / piece) for frame in rest)
    assert framing.compute_wire_nbytes(nbytes, piece, is_encrypted=False) == plain
    assert framing.compute_wire_nbytes(nbytes, piece, is_encrypted=True) == plain + 22 * math.ceil(
        plain / 16_384
    )


@pytest.mark.parametrize(
    ("rate_bps", "urgent", "bulk"),
    [
        (0.0, 1 << 14, 1 << 14),
        (1e6, 1 << 14, 25_000),
        (10e6, 1 << 14, 1 << 16),
        (80e6, 100_000, 100_000),
        (math.inf, 1 << 18, 1 << 18),
    ],
)
def test_a_piece_takes_10_ms_where_urgent_messages_are_expected_and_else_up_to_200(
    rate_bps: float, urgent: int, bulk: int
) -> None:
    assert framing.compute_piece_nbytes(rate_bps, expects_urgent=True) == urgent
    assert framing.compute_piece_nbytes(rate_bps) == bulk


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(1.0, 1e12)), min_size=1), st.booleans())
def test_many_messages_are_modelled_as_one(messages: list[tuple[int, float]], sealed: bool) -> None:
    pieces = [framing.compute_piece_nbytes(bps) for _, bps in messages]
    assert all(1 << 14 <= piece <= 1 << 18 for piece in pieces)
    each = [
        framing.compute_wire_nbytes(n, piece, is_encrypted=sealed)
        for (n, _), piece in zip(messages, pieces, strict=True)
    ]
    together = framing.compute_wire_nbytes(
        np.array([n for n, _ in messages]), np.array(pieces), is_encrypted=sealed
    )
    assert np.array_equal(together, each)
