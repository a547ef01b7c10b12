"""Messages: what is sent comes back bit for bit, and what is no sample of the workload is refused."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from farflung.errors import ConfigError
from farflung.streams import as_messages
from farflung.streams.messages import MessageDecoder, import_function
from farflung.types import Batch
from tests.helpers import same_bits

DTYPES = [torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.float64]


def batch(count: int, shape: tuple[int, ...], inputs: torch.dtype, targets: torch.dtype) -> Batch:
    torch.manual_seed(count)
    return Batch(torch.randint(0, 2, (count, *shape)).to(inputs), torch.randint(0, 2, (count,)).to(targets))


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 4), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
)
def test_rows_come_back_as_they_were(
    count: int, shape: tuple[int, ...], inputs: torch.dtype, targets: torch.dtype
) -> None:
    sent = batch(count, shape, inputs, targets)
    reader = MessageDecoder(sent, None)
    for _ in range(2):  # one by one, then all with the header that is remembered
        read = reader.build_rows([reader.check_message(value) for value in as_messages(sent)])
        assert same_bits(read.inputs, sent.inputs)
        assert same_bits(read.targets, sent.targets)


def test_any_library_of_safetensors_may_write_them() -> None:
    like = batch(3, (2, 3), torch.float32, torch.int64)
    values = as_messages(like)
    values[1] = save(
        {"inputs": like.inputs[1], "other": torch.ones(5), "targets": like.targets[1]}, {"from": "elsewhere"}
    )
    for first in range(3):
        reader = MessageDecoder(like, None)
        reader.check_message(values[first])
        read = reader.build_rows([reader.check_message(value) for value in values])
        assert same_bits(read.inputs, like.inputs)
        assert same_bits(read.targets, like.targets)


LIKE = batch(1, (2,), torch.float32, torch.int64)
GOOD = as_messages(LIKE)[0]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b"", "no safetensors"),
        (b"x", "no safetensors"),
        (GOOD[:-1], "no safetensors"),
        (GOOD + b"x", "no safetensors"),
        (b"\xff" * 8 + GOOD[8:], "no safetensors"),
        (b"x" * len(GOOD), "no safetensors"),
        (save({"inputs": LIKE.inputs[0]}), "no tensor 'targets'"),
        (
            save({"inputs": LIKE.inputs, "targets": LIKE.targets[0]}),
            r"inputs of float32\[1, 2\], and a sample",
        ),
        (
            save({"inputs": LIKE.inputs[0], "targets": LIKE.targets[0].to(torch.int32)}),
            r"targets of int32\[\]",
        ),
    ],
)
def test_what_is_no_sample_of_the_workload_is_refused(value: bytes, says: str) -> None:
    reader = MessageDecoder(LIKE, None)
    for _ in range(2):
        with pytest.raises(ValueError, match=says):
            reader.check_message(value)
        reader.check_message(GOOD)


def pairs(value: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Two numbers and a class, as a sensor might send them."""
    first, second, label = struct.unpack("<ffq", value)
    return torch.tensor([first, second]), torch.tensor(label)


def test_a_decoder_reads_other_messages() -> None:
    reader = MessageDecoder(LIKE, pairs)
    rows = reader.build_rows(
        [reader.check_message(struct.pack("<ffq", 0.5, index, index)) for index in range(3)]
    )
    assert rows.inputs.tolist() == [[0.5, 0.0], [0.5, 1.0], [0.5, 2.0]]
    assert rows.targets.tolist() == [0, 1, 2]
    with pytest.raises(struct.error):
        reader.check_message(b"short")


def test_a_function_is_given_itself_or_by_name() -> None:
    assert import_function("decoder", pairs) is pairs
    assert import_function("decoder", f"{__name__}:pairs") is pairs
    for name in ("nowhere:pairs", f"{__name__}:GOOD", f"{__name__}:absent"):
        with pytest.raises(ConfigError, match="decoder"):
            import_function("decoder", name)
