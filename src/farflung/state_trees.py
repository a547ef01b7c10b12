"""Trees of tensors and JSON values as safetensors files, written atomically with a checksum, and as bytes.

The header of a file contains its format and the SHA-256 of the file with zeros in place of the digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from farflung.errors import CheckpointError
from farflung.files import parse_json, wrap_read_errors, wrap_write_errors, write_atomically
from farflung.trees import pack_tensors, unpack_tensors
from farflung.types import Json, State

__all__ = ["load_tree", "pack_tree", "save_tree", "unpack_tree"]

_META = "farflung"
_FORMAT = 5
"""Version of the file format, incremented by every incompatible change of checkpoints."""
_NO_DIGEST = "0" * 64
_DIGEST = re.compile(rb'\\"sha256\\": \\"([0-9a-f]{64})\\"')
"""Pattern of the digest in a header, which contains JSON as a string inside JSON."""
_BLOCK = 1 << 20
_DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""Names in the format of safetensors."""


def save_tree(path: Path, tree: State) -> None:
    """Writes nested dicts of tensors and JSON values to a file atomically.

    Each tensor is hashed as it is written, without a copy if it is contiguous and on a CPU.

    Raises:
      StorageError: The file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Json] = {}
    _flatten(tree, "", tensors, values)
    # The widest numbers go first, so that all are aligned when the file is mapped.
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    header = _build_header(tensors, values)

    def write(partial: Path) -> None:
        checksum = hashlib.sha256(header)
        with partial.open("wb") as file:
            file.write(header)
            for block in _iter_blocks(tensors.values()):
                checksum.update(block)
                file.write(block)
                if hasattr(
                    os, "posix_fadvise"
                ):  # Linux begins to write to the disk, in place of waiting for the end
                    begin = file.tell() - len(block)
                    os.posix_fadvise(file.fileno(), begin, len(block), os.POSIX_FADV_DONTNEED)
            match = _DIGEST.search(header)
            assert match is not None
            file.seek(match.start(1))
            file.write(checksum.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())

    with wrap_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, write)


def load_tree(path: Path) -> State:
    """Loads a tree from a file of :func:`save_tree`.

    Raises:
      CheckpointError: The file is missing or damaged, or of another program or format.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint file")
    with wrap_read_errors(path, "cut short or damaged; remove it to use an older one", CheckpointError):
        try:
            with safe_open(path, framework="pt") as file:
                header = _read_header(path, file.metadata() or {})
                with path.open("rb") as content:
                    stored_digest, _, digest = _compute_digest(content)
                if stored_digest != digest:
                    raise CheckpointError(
                        f"{path}: damaged (the bytes are not those of its checksum); remove it to use an older one"
                    )
                flat: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        return _unflatten({**flat, **header["values"]})


def pack_tree(tree: State) -> Tensor:
    """Packs nested dicts into bytes; see :func:`save_tree`."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Json] = {}
    _flatten(tree, "", tensors, values)
    header = json.dumps({"format": _FORMAT, "values": values, "tensors": [*tensors]}).encode()
    return pack_tensors(
        [torch.frombuffer(bytearray(header), dtype=torch.uint8), *(t.cpu() for t in tensors.values())]
    )


def unpack_tree(content: Tensor) -> State:
    """Unpacks the tree of :func:`pack_tree`.

    Raises:
      CheckpointError: The bytes are damaged or of another format.
    """
    with wrap_read_errors(Path("the state of the run"), "damaged", CheckpointError):
        text, *tensors = unpack_tensors(content)
        header = json.loads(bytes(text.numpy()))
        if header["format"] != _FORMAT:
            raise CheckpointError(f"the state of the run has format {header['format']}, not {_FORMAT}")
        return _unflatten({**dict(zip(header["tensors"], tensors, strict=True)), **header["values"]})


def _unflatten(leaves: Mapping[str, Any]) -> State:
    """Builds nested dicts from leaves by path."""
    tree: State = {}
    for name, leaf in leaves.items():
        *folders, last = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(_unescape(folder), {})
        node[_unescape(last)] = leaf
    return tree


def _read_header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Reads and checks the header that :func:`save_tree` wrote."""
    if _META not in metadata:
        raise CheckpointError(f"{path}: not written by farflung")
    header: Any = parse_json(metadata[_META])
    version = header["format"] if "values" in header else 1
    if version != _FORMAT:
        raise CheckpointError(
            f"{path}: a file of format {version}, and this version of farflung reads format {_FORMAT}: "
            "use the version that wrote it, or start the run anew"
        )
    return dict(header)


def _build_header(tensors: Mapping[str, Tensor], values: Mapping[str, Json]) -> bytes:
    """Builds the length and header of a safetensors file, without a digest; tensors follow it in their order."""
    content = json.dumps({"format": _FORMAT, "sha256": _NO_DIGEST, "values": values})
    header: dict[str, Json] = {"__metadata__": {_META: content}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _iter_blocks(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """Yields the bytes of tensors in blocks, in the order of their elements."""
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        for block in flat.split(_BLOCK):
            yield block.numpy().data


def _compute_digest(file: IO[bytes]) -> tuple[bytes, int, bytes]:
    """Returns the stored digest of a file of :func:`save_tree`, its offset, and the computed digest, in hexadecimal.

    Raises:
      ValueError: The file has no digest.
    """
    length = int.from_bytes(file.read(8), "little")
    header = file.read(min(length, os.fstat(file.fileno()).st_size))
    match = _DIGEST.search(header)
    if match is None:
        raise ValueError("no checksum")
    checksum = hashlib.sha256(length.to_bytes(8, "little"))
    checksum.update(header[: match.start(1)] + _NO_DIGEST.encode() + header[match.end(1) :])
    while block := file.read(_BLOCK):
        checksum.update(block)
    return match[1], 8 + match.start(1), checksum.hexdigest().encode()


def _flatten(
    tree: Mapping[str, Any], prefix: str, tensors: dict[str, Tensor], values: dict[str, Json]
) -> None:
    for key, leaf in tree.items():
        name = prefix + _escape(str(key))
        if isinstance(leaf, Mapping) and leaf:
            _flatten(leaf, f"{name}/", tensors, values)
        elif isinstance(leaf, torch.Tensor):
            tensors[name] = leaf
        else:
            values[name] = leaf


def _escape(key: str) -> str:
    return key.replace("%", "%25").replace("/", "%2F")


def _unescape(key: str) -> str:
    return key.replace("%2F", "/").replace("%25", "%")
