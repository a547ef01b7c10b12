"""Derived seeds, shuffled passes, and a separate random state for each replica."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from farflung.errors import ConfigError
from farflung.types import State, Workload

__all__ = ["RandomState", "ShuffledPasses", "create_generator", "derive_seed"]


def derive_seed(seed: int, *labels: int | str) -> int:
    """Derives a 63-bit seed from a seed and labels; different labels give independent seeds."""
    text = "\0".join(map(str, (seed, *labels)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def create_generator(seed: int, *labels: int | str) -> torch.Generator:
    """Creates a CPU generator seeded by :func:`derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(seed, *labels))


class ShuffledPasses:
    """Sample orders of endless shuffled passes, with the last two cached.

    Args:
      seed: Seed of the orders.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._orders: dict[tuple[int, int], torch.Tensor] = {}

    def get_order(self, index: int, n: int) -> torch.Tensor:
        """Returns the order of ``n`` samples in pass ``index``, counted from 0; int64."""
        if (index, n) not in self._orders:
            self._orders = {key: order for key, order in self._orders.items() if key == (index - 1, n)}
            self._orders[index, n] = torch.randperm(n, generator=create_generator(self._seed, "pass", index))
        return self._orders[index, n]


_CPU = torch.device("cpu")


@dataclass(slots=True)
class _Snapshot:
    """States of torch's global generators, and of numpy's and Python's if a replica draws from them."""

    cpu: Tensor
    cuda: dict[int, Tensor]
    """States by device index, of the devices in use."""
    numpy: dict[str, Any] | None
    python: tuple[Any, ...] | None

    @staticmethod
    def from_seed(seed: int, device: torch.device, is_torch_only: bool) -> _Snapshot:
        return _Snapshot(
            torch.Generator().manual_seed(seed).get_state(),
            {device.index: torch.Generator(device).manual_seed(seed).get_state()}
            if device.type == "cuda"
            else {},
            None if is_torch_only else dict(np.random.RandomState(seed % 2**32).get_state(legacy=False)),
            None if is_torch_only else random.Random(seed).getstate(),
        )

    @staticmethod
    def from_globals(devices: Iterable[int], is_torch_only: bool = False) -> _Snapshot:
        """Reads the global generators."""
        if not is_torch_only:
            _check_numpy()
        return _Snapshot(
            torch.get_rng_state(),
            {index: torch.cuda.get_rng_state(index) for index in devices},
            None if is_torch_only else dict(np.random.get_state(legacy=False)),
            None if is_torch_only else random.getstate(),
        )

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)
        if self.numpy is not None:
            _check_numpy()
            np.random.set_state(self.numpy)
        if self.python is not None:
            random.setstate(self.python)


def _check_numpy() -> None:
    """Raises :class:`ConfigError` if numpy's global generator was replaced by another kind."""
    kind = type(np.random.get_bit_generator()).__name__  # type: ignore[attr-defined]
    if kind != "MT19937":
        raise ConfigError(f"numpy's global generator is {kind}: leave MT19937 there, which it begins with")


class RandomState:
    """Global random state of one replica's computation.

    Switching is lazy: :meth:`install` does nothing if the replica's state is installed already. A process with one
    replica therefore has no cost, and simulated replicas have one switch per turn.

    Args:
      seed: Seed of all generators.
      device: Device whose generator is included, in addition to the host's.
      is_torch_only: True if nothing draws from numpy's and Python's generators. They are then not saved, and a switch
        takes 2 instead of 70 microseconds.
    """

    _installed: ClassVar[RandomState | None] = None

    def __init__(self, seed: int, device: torch.device = _CPU, *, is_torch_only: bool = False) -> None:
        self._is_torch_only = is_torch_only
        self._snapshot = _Snapshot.from_seed(seed, device, is_torch_only)

    @staticmethod
    def from_workload(workload: Workload, seed: int, device: torch.device) -> RandomState:
        """Creates the random state of a replica that trains ``workload``."""
        return RandomState(seed, device, is_torch_only=getattr(workload, "draws_from_torch_alone", False))

    def install(self) -> None:
        """Installs this as the global random state, after saving the one installed before."""
        current = RandomState._installed
        if current is self:
            return
        if current is not None:
            current._save_globals()
        self._snapshot.restore()
        RandomState._installed = self

    @staticmethod
    @contextmanager
    def preserve_globals() -> Iterator[None]:
        """Restores the global random state at the end of the context."""
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        globals_before, installed_before = _Snapshot.from_globals(devices), RandomState._installed
        RandomState._installed = None
        try:
            yield
        finally:
            if RandomState._installed is not None:
                RandomState._installed._save_globals()
            RandomState._installed = installed_before
            globals_before.restore()

    def _save_globals(self) -> None:
        self._snapshot = _Snapshot.from_globals(self._snapshot.cuda, self._is_torch_only)

    def state_dict(self) -> State:
        """Returns the state of the generators as tensors and JSON values."""
        if RandomState._installed is self:
            self._save_globals()
        snapshot = self._snapshot
        state: State = {"torch": snapshot.cpu.clone()}
        for device in snapshot.cuda.values():  # at most one
            state["cuda"] = device.clone()
        if snapshot.numpy is not None:
            state["numpy"] = {
                "key": torch.from_numpy(snapshot.numpy["state"]["key"].astype(np.int64)),
                "pos": int(snapshot.numpy["state"]["pos"]),
                "has_gauss": int(snapshot.numpy["has_gauss"]),
                "gauss": float(snapshot.numpy["gauss"]),
            }
        if snapshot.python is not None:
            version, words, gauss = snapshot.python
            state["python"] = {
                "version": version,
                "words": torch.tensor(words, dtype=torch.int64),
                "gauss": gauss,
            }
        return state

    def load_state_dict(self, state: State) -> None:
        """Restores a state from :meth:`state_dict`; generators that are not in it keep theirs."""
        snapshot = self._snapshot
        snapshot.cpu = state["torch"].clone()
        snapshot.cuda = {i: state.get("cuda", current).clone() for i, current in snapshot.cuda.items()}
        if snapshot.numpy is not None and (numpy := state.get("numpy")) is not None:
            snapshot.numpy = {
                "bit_generator": "MT19937",
                "state": {"key": numpy["key"].numpy().astype(np.uint32), "pos": numpy["pos"]},
                "has_gauss": numpy["has_gauss"],
                "gauss": numpy["gauss"],
            }
        if snapshot.python is not None and (python := state.get("python")) is not None:
            snapshot.python = (python["version"], tuple(python["words"].tolist()), python["gauss"])
        if RandomState._installed is self:
            snapshot.restore()
