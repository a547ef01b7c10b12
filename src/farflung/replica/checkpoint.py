"""Checkpoints: trees of tensors and JSON values in safetensors files, written atomically, with a checksum.

A checkpoint of step ``n`` is the folder ``step-<n>`` with ``shared.safetensors``, which all replicas have alike, and
one ``rank-<r>-of-<size>.safetensors`` for each. It counts once all of these are there; each file appears by a rename.

A file's header names its format and holds the SHA-256 of the file as it is with zeros in the place of the digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from farflung.errors import CheckpointError
from farflung.files import json_of, reading, write_whole, writing
from farflung.moments import kind_of
from farflung.trees import pack_tensors, unpack_tensors
from farflung.types import Json, SampleIds, State

__all__ = [
    "Checkpoints",
    "check_model",
    "check_optimizer_kind",
    "check_share",
    "fingerprint",
    "load_tree",
    "pack_tree",
    "save_tree",
    "share_name",
    "unpack_tree",
]

_META = "farflung"
FORMAT = 2
"""Of the files that are written and read here; 1 had neither a name nor a checksum. To be raised with every change of
what a checkpoint holds that older ones cannot be read with."""
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
    about = {_META: json.dumps({"format": FORMAT, "sha256": _NO_DIGEST, "values": values})}
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
    about = json.dumps({"format": FORMAT, "values": values, "tensors": [*tensors]}).encode()
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
        if about["format"] != FORMAT:
            raise CheckpointError(f"the state of the run has format {about['format']}, not {FORMAT}")
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
    if found != FORMAT:
        raise CheckpointError(
            f"{path}: a file of format {found}, and this version of farflung reads format {FORMAT}: "
            "use the version that wrote it, or start the run anew"
        )
    return dict(about)


def _digest(file: IO[bytes]) -> tuple[bytes, int, bytes]:
    """Of a file of :func:`save_tree`: the digest in it, where that begins, and what it should be, in hexadecimal.

    Raises:
      ValueError: there is no digest in it.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    header = file.read(min(length, size))
    found = _DIGEST.search(header)
    if found is None:
        raise ValueError("no checksum")
    whole = hashlib.sha256(length.to_bytes(8, "little"))
    whole.update(header[: found.start(1)] + _NO_DIGEST.encode() + header[found.end(1) :])
    while block := file.read(_BLOCK):
        whole.update(block)
    return found[1], 8 + found.start(1), whole.hexdigest().encode()


def fingerprint(model: nn.Module) -> str:
    """A short hash of the names, shapes, dtypes and memory formats in a model's state."""
    layout = [
        (name, tuple(t.shape), str(t.dtype), *(() if t.is_contiguous() else t.stride()))
        for name, t in model.state_dict().items()
        if isinstance(t, torch.Tensor)  # a module may keep anything else, by get_extra_state
    ]
    return hashlib.sha256(repr(layout).encode()).hexdigest()[:16]


def check_model(shared: State, model: nn.Module, where: str) -> None:
    """Whether the shared tree of a checkpoint belongs to ``model``.

    Raises:
      CheckpointError: it is of another.
    """
    if shared.get("fingerprint") != fingerprint(model):
        raise CheckpointError(
            f"{where}: the checkpoint is of another model, trained as {shared.get('workload')}; "
            "resume with the workload it was made with"
        )


def check_optimizer_kind(own: State, optimizer: torch.optim.Optimizer, where: str) -> None:
    """Whether what a replica's tree of a checkpoint holds was gathered by an optimizer of the same kind.

    Raises:
      CheckpointError: by another.
    """
    kind = kind_of(optimizer)
    # farflung's own optimizers were private classes once.
    if own["optimizer"]["kind"].removeprefix("_") != kind:
        raise CheckpointError(
            f"{where}: its optimizer is {own['optimizer']['kind']}, not {kind}; resume with the --optimizer that the "
            "run was started with"
        )


def share_name(share: SampleIds | None) -> str:
    """A short hash of the samples that a replica draws from; empty where that is the whole set."""
    return "" if share is None else hashlib.sha256(share.numpy().tobytes()).hexdigest()[:16]


def check_share(own: State, share: SampleIds | None, where: str) -> None:
    """Whether a replica's tree of a checkpoint was trained on ``share``.

    Raises:
      CheckpointError: on another.
    """
    if own.get("share", "") != share_name(share):
        raise CheckpointError(
            f"{where}: this replica drew from another share of the data; resume with the --partition and --seed "
            "that the run was started with"
        )


class Checkpoints:
    """The checkpoints of one run, as one replica sees them.

    Args:
      folder: where they are; shared by the replicas of one machine.
      rank: this replica.
      size: number of replicas.
      leader: whether this replica writes the shared file on its machine and removes old checkpoints.
      keep: how many to keep.
      any_size: whether to load checkpoints of another number of replicas too.
    """

    def __init__(
        self, folder: Path, rank: int, size: int, *, leader: bool, keep: int = 2, any_size: bool = False
    ) -> None:
        self.folder = folder
        self._any_size = any_size
        self._rank, self._size, self._leader, self._keep = rank, size, leader, keep

    def among(self, rank: int, size: int) -> Checkpoints:
        """The same of one of ``size`` replicas that are left, whose first one writes the shared file too."""
        leads = self._leader or rank == 0
        return Checkpoints(self.folder, rank, size, leader=leads, keep=self._keep, any_size=self._any_size)

    def save(self, step: int, shared: State, own: State) -> Path:
        """Writes this replica's part; the checkpoint is complete once all ranks have written theirs."""
        folder = self.folder / f"step-{step:08d}"
        if self._leader:
            save_tree(folder / "shared.safetensors", shared)
        save_tree(folder / self._own_name(), own)
        return folder

    def prune(self) -> None:
        """Removes all but the newest ``keep`` checkpoints; to be called once all ranks have saved."""
        if self._leader:
            kept = self.complete()[-self._keep :]
            for folder in self.folder.glob("step-*"):
                if kept and folder.name < f"step-{kept[0]:08d}":
                    shutil.rmtree(folder, ignore_errors=True)

    def complete(self) -> list[int]:
        """The steps with every file in place, oldest first."""
        steps = []
        for folder in self.folder.glob("step-*"):
            match = re.fullmatch(r"step-(\d+)", folder.name)
            ranks = {int(m[1]): int(m[2]) for f in folder.iterdir() if (m := _RANK_FILE.fullmatch(f.name))}
            sizes = set(ranks.values())
            if (
                match
                and (folder / "shared.safetensors").exists()
                and len(sizes) == 1
                and len(ranks) == sizes.pop()
            ):
                steps.append(int(match[1]))
        return sorted(steps)

    def newest(self) -> int:
        """The step of the newest complete checkpoint.

        Raises:
          CheckpointError: there is none.
        """
        steps = self.complete()
        if not steps:
            raise CheckpointError(f"{self.folder}: no complete checkpoint to resume from")
        return steps[-1]

    def load(self, step: int) -> tuple[State, State]:
        """The shared tree and this replica's own.

        Raises:
          CheckpointError: damaged, or saved by another number of replicas.
        """
        folder = self.folder / f"step-{step:08d}"
        if self._any_size:
            return load_tree(folder / "shared.safetensors"), self._own_of_any_size(folder)
        if not (folder / self._own_name()).exists():
            raise CheckpointError(
                f"{folder}: saved by another number of replicas than {self._size}; resume with as many as before"
            )
        return load_tree(folder / "shared.safetensors"), load_tree(folder / self._own_name())

    def _own_of_any_size(self, folder: Path) -> State:
        """This replica's tree; without one, that of rank 0, less its random state and its residuals."""
        own_file = next(iter(folder.glob(f"rank-{self._rank}-of-*")), None)
        other = next(iter(folder.glob("rank-0-of-*")))
        own = load_tree(own_file or other)
        if other.name != f"rank-0-of-{self._size}.safetensors":
            own["sent"] = {}
        if own_file is None:
            del own["random"]
            own["exchanges"] = {**own["exchanges"], "slots": {}}
        return own

    def _own_name(self) -> str:
        return f"rank-{self._rank}-of-{self._size}.safetensors"


_RANK_FILE = re.compile(r"rank-(\d+)-of-(\d+)\.safetensors")


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
