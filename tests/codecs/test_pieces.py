"""What codecs are built from: pieces of a tensor, norms of buckets, levels, packed bits, the largest entries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farflung.codecs import TopK, selection
from farflung.codecs import blocks as blocks_module
from farflung.codecs.bits import pack, pack_fields, unpack, unpack_fields
from farflung.codecs.blocks import Norm, compute_bucket_norms, iter_blocks
from farflung.codecs.selection import count_kept, find_largest
from farflung.codecs.stochastic import create_device_generator, from_level_codes, to_level_codes
from farflung.errors import ProtocolError
from farflung.seeding import create_generator
from farflung.types import CodecState, Payload, TensorSpec

NUMELS = [0, 1, 5, 63, 64, 65, 128, 200, 1000]
BUCKETS = [1, 3, 16, 64, 65, 100, 512, 1000]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few hundred elements have many."""
    monkeypatch.setattr(blocks_module, "BLOCK_NUMEL", 64)
    for name in ("SAMPLE_NUMEL", "EXACT_NUMEL"):
        monkeypatch.setattr(selection, name, 256)


def normal(numel: int, *labels: int) -> Tensor:
    return torch.randn(numel, generator=create_generator(3, *labels))


# --- pieces and norms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_size", BUCKETS)
def test_pieces_cover_everything_and_keep_to_buckets(bucket_size: int) -> None:
    for numel in NUMELS:
        pieces = list(iter_blocks(torch.empty(numel), bucket_size))
        assert [i for start, stop in pieces for i in range(start, stop)] == list(range(numel))
        for start, stop in pieces:
            assert start // bucket_size == (stop - 1) // bucket_size or start % bucket_size == 0
            assert stop - start <= 64
        assert len(list(iter_blocks(torch.empty(numel, device="meta")))) == min(numel, 1)


NORMS: dict[Norm, Callable[[Tensor], Tensor]] = {
    "l2": lambda t: t.norm(),
    "max": lambda t: t.abs().max(),
    "mean": lambda t: t.abs().mean(),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norms_of_buckets(norm: Norm, dtype: torch.dtype) -> None:
    for numel, bucket_size in itertools.product(NUMELS, BUCKETS):
        tensor = normal(numel).to(dtype)
        found = compute_bucket_norms(tensor, bucket_size, norm)
        wanted = [NORMS[norm](bucket.double()) for bucket in tensor.split(bucket_size)] if numel else []
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        exact = torch.tensor(wanted, dtype=torch.float64)
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0.0, msg=f"{numel}, {bucket_size}")


@pytest.mark.parametrize("bucket_size", [10, 100])
@pytest.mark.parametrize("norm", NORMS)
def test_a_nan_is_in_the_norm_of_its_bucket_alone(bucket_size: int, norm: Norm) -> None:
    tensor = normal(300)
    tensor[150] = math.nan
    expected = [index == 150 // bucket_size for index in range(300 // bucket_size)]
    assert compute_bucket_norms(tensor, bucket_size, norm).isnan().tolist() == expected


# --- levels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 7, 127])
def test_the_nearest_level(levels: int) -> None:
    for numel, bucket_size in itertools.product(NUMELS, BUCKETS):
        tensor = normal(numel)
        norms = compute_bucket_norms(tensor, bucket_size, "max")
        found = to_level_codes(tensor, norms, levels, bucket_size, None)
        spread = norms.repeat_interleave(bucket_size)[:numel]
        where = (numel, bucket_size)
        assert found.dtype == torch.uint8
        assert torch.equal(found.int() - levels, (tensor / spread * levels).round().int()), where
        decoded = from_level_codes(found, norms, levels, bucket_size, torch.float32)
        assert ((decoded - tensor).abs() <= spread / levels / 2 * (1 + 1e-5)).all(), where
        twice = from_level_codes(2 * found.int(), norms, levels, bucket_size, torch.float32, count=2)
        torch.testing.assert_close(twice, 2 * decoded, msg=str(where))


@pytest.mark.parametrize("is_finite", [True, False])
@pytest.mark.parametrize("levels", [1, 7, 127])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_levels_at_random_have_the_bits_of_the_equation(
    dtype: torch.dtype, levels: int, is_finite: bool
) -> None:
    for numel, bucket_size in itertools.product(NUMELS, BUCKETS):
        tensor = normal(numel).to(dtype)
        if not is_finite and numel:
            tensor[numel // 2], tensor[0] = math.inf, math.nan
        norms = compute_bucket_norms(tensor, bucket_size, "max")
        found = to_level_codes(tensor, norms, levels, bucket_size, create_device_generator(tensor.device, 1))
        uniform = torch.rand(
            numel, generator=create_device_generator(tensor.device, 1), dtype=norms.dtype
        )  # the noise of all blocks
        largest = torch.finfo(norms.dtype).max
        spread = torch.where(norms > 0, norms, 1.0).clamp_max(largest).repeat_interleave(bucket_size)[:numel]
        exact = (tensor.to(norms.dtype) / spread * levels + uniform).floor()
        exact = exact.nan_to_num(0.0).clamp(-levels, levels) + levels
        assert torch.equal(found, exact.to(torch.uint8)), (numel, bucket_size)


@pytest.mark.parametrize(("numel", "bucket_size"), [(200, 16), (200, 100), (1000, 1000)])
def test_a_neighbouring_level_with_the_right_chance(numel: int, bucket_size: int) -> None:
    tensor = normal(numel)
    norms = compute_bucket_norms(tensor, bucket_size, "l2")
    scaled = tensor / norms.repeat_interleave(bucket_size)[:numel] * 7
    noise = create_device_generator(tensor.device, 1)
    draws = torch.stack(
        [to_level_codes(tensor, norms, 7, bucket_size, noise).int() - 7 for _ in range(400)]
    ).float()
    assert ((draws == scaled.floor()) | (draws == scaled.floor() + 1)).all()
    share = scaled - scaled.floor()
    six_errors = 6 * (share * (1 - share) / 400).sqrt() + 6 / 400
    assert ((draws.mean(dim=0) - scaled).abs() <= six_errors).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_levels_of_other_dtypes(dtype: torch.dtype) -> None:
    tensor = normal(200).to(dtype)
    norms = compute_bucket_norms(tensor, 50, "max")
    decoded = from_level_codes(to_level_codes(tensor, norms, 127, 50, None), norms, 127, 50, dtype)
    assert decoded.dtype == dtype
    assert ((decoded - tensor).abs() <= norms.max() / 127).all()


@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 2.0**-126, 0.0])
def test_the_smallest_numbers_are_no_trouble(tiny: float) -> None:
    tensor = torch.tensor([tiny, -tiny, 0.0])
    norms = compute_bucket_norms(tensor, 3, "max")
    assert to_level_codes(tensor, norms, 7, 3, None).tolist() == ([14, 0, 7] if tiny else [7, 7, 7])


# --- bits -------------------------------------------------------------------------------------------------------


@given(bits=st.integers(1, 8), numel=st.integers(0, 100), seed=st.integers(0, 100))
def test_packed_numbers_come_back(bits: int, numel: int, seed: int) -> None:
    values = torch.randint(0, 2**bits, (numel,), generator=create_generator(seed)).to(torch.uint8)
    packed = pack(values, bits)
    assert packed.nbytes == (numel if bits == 8 else (numel + 7) // 8 * bits)
    stream = np.unpackbits(values.numpy(), bitorder="little").reshape(numel, 8)[:, :bits]  # lowest bit first
    expected = np.packbits(stream, bitorder="little")
    assert packed.tolist() == [*expected, *[0] * (packed.nbytes - len(expected))]
    assert torch.equal(unpack(packed, bits, numel), values)


@given(
    largest_value=st.integers(1, 254),
    count=st.integers(1, 40),
    numel=st.integers(0, 50),
    seed=st.integers(0, 9),
)
def test_sums_of_fields_are_fields_of_sums(largest_value: int, count: int, numel: int, seed: int) -> None:
    width = (largest_value * count).bit_length()
    size = (count, numel)
    values = torch.randint(0, largest_value + 1, size, generator=create_generator(seed)).to(torch.uint8)
    values[:, : numel // 2] = largest_value  # the largest sums there can be
    words = torch.stack([pack_fields(row, width) for row in values]).sum(dim=0, dtype=torch.int32)
    assert words.numel() == math.ceil(numel / (32 // width))
    assert torch.equal(unpack_fields(words, width, numel), values.int().sum(dim=0, dtype=torch.int32))


# --- the largest ------------------------------------------------------------------------------------------------


def by_sorting(tensor: Tensor, k: int) -> Tensor:
    magnitudes = tensor.double().abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return magnitudes.sort(descending=True, stable=True).indices[:k].sort().values


def mostly(value: float, share: float) -> Callable[[int], Tensor]:
    return lambda n: torch.where(
        torch.rand(n, generator=create_generator(4)) < share, torch.tensor(value), normal(n)
    )


TENSORS: dict[str, Callable[[int], Tensor]] = {
    "normal": normal,
    "few magnitudes": lambda n: torch.randint(-3, 4, (n,), generator=create_generator(5)).float(),
    "zeros": torch.zeros,
    "nearly all zeros": mostly(0.0, 0.995),
    "some NaN": mostly(math.nan, 0.1),
    "some infinities": mostly(-math.inf, 0.02),
    "tiny": lambda n: normal(n) * 1e-42,
    "large at the end": lambda n: torch.cat([normal(n // 2), 100 * normal(n - n // 2)]),
    "in step with the sample": lambda n: torch.where(torch.arange(n) % (n // 256 | 1) == 0, 100.0, normal(n)),
    "bfloat16": lambda n: normal(n).bfloat16(),
    "float64": lambda n: normal(n).double(),
}


@pytest.mark.parametrize("make", TENSORS)
def test_the_largest_are_those_that_sorting_finds(make: str) -> None:
    for numel in (1, 2, 31, 257, 2048, 5003):
        tensor = TENSORS[make](numel)
        for density in (0.0001, 0.01, 0.1, 0.5, 0.99, 1.0):
            k = count_kept(numel, density)
            assert torch.equal(find_largest(tensor, k), by_sorting(tensor, k)), (numel, density)
            assert torch.equal(
                selection._select_largest(selection._compute_magnitudes(tensor), k), by_sorting(tensor, k)
            )


@pytest.mark.parametrize(("numel", "sampled"), [(1000, 59), (17 * 256, 256), (6000, 261), (1 << 16, 256)])
def test_a_sample_is_as_small_as_it_may_be(numel: int, sampled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry in 17, or fewer of a large tensor, at distances that are odd."""
    watched = mock.Mock(wraps=selection._compute_magnitudes)
    monkeypatch.setattr(selection, "_compute_magnitudes", watched)
    find_largest(normal(numel), 10)
    assert len(watched.call_args_list[0].args[0]) == sampled


def test_another_device_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way without data-dependent shapes, taken on a CPU."""

    class Elsewhere(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("meta")

    monkeypatch.setattr(torch, "empty", _on_cpu(torch.empty))
    monkeypatch.setattr(torch, "arange", _on_cpu(torch.arange))
    for make in TENSORS.values():
        tensor = make(500)
        magnitudes = selection._compute_magnitudes(tensor).as_subclass(Elsewhere)
        assert torch.equal(
            selection._select_largest(magnitudes, 40).as_subclass(Tensor), by_sorting(tensor, 40)
        )


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **options: make(*args, **{k: v for k, v in options.items() if k != "device"})


@pytest.mark.parametrize(
    ("numel", "density", "k"),
    [(0, 0.5, 0), (1, 0.001, 1), (100, 0.29, 29), (100, 1.0, 100), (1000, 0.0016, 2)],
)
def test_how_many_a_density_keeps(numel: int, density: float, k: int) -> None:
    assert count_kept(numel, density) == k


@pytest.mark.parametrize("index", [-1, 5])
def test_an_entry_that_is_not_there_is_refused(index: int) -> None:
    payload = Payload((torch.ones(2), torch.tensor([0, index], dtype=torch.int32)))
    with pytest.raises(ProtocolError, match=f"entry {index} of 5"):
        TopK().decode(CodecState(), payload, TensorSpec((5,)), step=0, count=1)
