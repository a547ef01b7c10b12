"""Trees of tensors and JSON values as safetensors files, written atomically with a checksum, and as bytes.

A file's header names its format and holds the SHA-256 of the file as it is with zeros in the place of the digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from farflung.errors import CheckpointError
from farflung.files import json_of, reading, write_whole, writing
from farflung.trees import pack_tensors, unpack_tensors
from farflung.types import Json, State

__all__ = ["load_tree", "pack_tree", "save_tree", "unpack_tree"]

_META = "farflung"
_FORMAT = 3
"""Format of the files; raised with every change of checkpoints after which older ones cannot be read."""
_NO_DIGEST = "0" * 64
_DIGEST = re.compile(rb'\\"sha256\\": \\"([0-9a-f]{64})\\"')
"""The first such place in a header, which holds JSON as a text inside JSON."""
_BLOCK = 1 << 20


def save_tree(path: Path, tree: State) -> None:
    """Writes nested dicts whose leaves are tensors or JSON values; the file appears whole or not at all.

    Raises:
      StorageError: it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Json] = {}
    _flatten(tree, "", tensors, values)
    about = {_META: json.dumps({"format": _FORMAT, "sha256": _NO_DIGEST, "values": values})}
    flat = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}

    def write(partial: Path) -> None:
        try:
            save_file(flat, partial, about)
        except SafetensorError as error:  # it has the system's own words in it
            raise OSError(str(error)) from None
        with partial.open("r+b") as file:
            _, place, digest = _digest(file)
            file.seek(place)
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, write)


def load_tree(path: Path) -> State:
    """Reads what :func:`save_tree` wrote.

    Raises:
      CheckpointError: absent, damaged, or written by something else or by another version.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint file")
    with reading(path, "cut short or damaged; remove it to use an older one", CheckpointError):
        try:
            with safe_open(path, framework="pt") as file:
                about = _about(path, file.metadata() or {})
                with path.open("rb") as content:
                    stored, _, digest = _digest(content)
                if stored != digest:
                    raise CheckpointError(
                        f"{path}: damaged (the bytes are not those of its checksum); remove it to use an older one"
                    )
                flat: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        return _grown({**flat, **about["values"]})


def pack_tree(tree: State) -> Tensor:
    """Returns nested dicts as bytes; see :func:`save_tree`."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Json] = {}
    _flatten(tree, "", tensors, values)
    about = json.dumps({"format": _FORMAT, "values": values, "tensors": [*tensors]}).encode()
    return pack_tensors(
        [torch.frombuffer(bytearray(about), dtype=torch.uint8), *(t.cpu() for t in tensors.values())]
    )


def unpack_tree(content: Tensor) -> State:
    """Returns the tree of :func:`pack_tree`.

    Raises:
      CheckpointError: of another version, or something else.
    """
    with reading(Path("the state of the run"), "damaged", CheckpointError):
        text, *tensors = unpack_tensors(content)
        about = json.loads(bytes(text.numpy()))
        if about["format"] != _FORMAT:
            raise CheckpointError(f"the state of the run has format {about['format']}, not {_FORMAT}")
        return _grown({**dict(zip(about["tensors"], tensors, strict=True)), **about["values"]})


def _grown(leaves: Mapping[str, Any]) -> State:
    """Returns the nested dicts whose leaves have paths as names."""
    tree: State = {}
    for name, leaf in leaves.items():
        *folders, last = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(_unescape(folder), {})
        node[_unescape(last)] = leaf
    return tree


def _about(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """What :func:`save_tree` has put beside the tensors."""
    if _META not in metadata:
        raise CheckpointError(f"{path}: not written by farflung")
    about: Any = json_of(metadata[_META])
    found = about["format"] if "values" in about else 1
    if found != _FORMAT:
        raise CheckpointError(
            f"{path}: a file of format {found}, and this version of farflung reads format {_FORMAT}: "
            "use the version that wrote it, or start the run anew"
        )
    return dict(about)


def _digest(file: IO[bytes]) -> tuple[bytes, int, bytes]:
    """Of a file of :func:`save_tree`: the digest in it, where that begins, and what it should be, in hexadecimal.

    Raises:
      ValueError: there is no digest in it.
    """
    length = int.from_bytes(file.read(8), "little")
    header = file.read(min(length, os.fstat(file.fileno()).st_size))
    found = _DIGEST.search(header)
    if found is None:
        raise ValueError("no checksum")
    whole = hashlib.sha256(length.to_bytes(8, "little"))
    whole.update(header[: found.start(1)] + _NO_DIGEST.encode() + header[found.end(1) :])
    while block := file.read(_BLOCK):
        whole.update(block)
    return found[1], 8 + found.start(1), whole.hexdigest().encode()


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
