"""Random numbers without global state: derived seeds, and the random state that belongs to one replica."""

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

__all__ = ["Passes", "RandomState", "derive", "generator"]


def derive(seed: int, *labels: int | str) -> int:
    """A 63-bit seed that depends on ``seed`` and the labels, and looks unrelated for unlike labels."""
    text = "\0".join(map(str, (seed, *labels)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, *labels: int | str) -> torch.Generator:
    """A CPU generator seeded by :func:`derive`."""
    return torch.Generator().manual_seed(derive(seed, *labels))


class Passes:
    """Endless passes over samples, each in an order of its own; the last two are kept.

    Args:
      seed: equal orders come from equal seeds.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def order(self, index: int, n: int) -> torch.Tensor:
        """The order of ``n`` samples in pass ``index``, counted from 0; int64."""
        if (index, n) not in self._kept:
            self._kept = {key: kept for key, kept in self._kept.items() if key == (index - 1, n)}
            self._kept[index, n] = torch.randperm(n, generator=generator(self._seed, "pass", index))
        return self._kept[index, n]


_HOST = torch.device("cpu")


@dataclass(slots=True)
class _Snapshot:
    """The states of torch's global generators, and of numpy's and Python's where a replica may draw from them."""

    cpu: Tensor
    cuda: dict[int, Tensor]
    """By the number of the device, of those in use."""
    numpy: dict[str, Any] | None
    python: tuple[Any, ...] | None

    @staticmethod
    def seeded(seed: int, device: torch.device, torch_alone: bool) -> _Snapshot:
        return _Snapshot(
            torch.Generator().manual_seed(seed).get_state(),
            {device.index: torch.Generator(device).manual_seed(seed).get_state()}
            if device.type == "cuda"
            else {},
            None if torch_alone else dict(np.random.RandomState(seed % 2**32).get_state(legacy=False)),
            None if torch_alone else random.Random(seed).getstate(),
        )

    @staticmethod
    def taken(devices: Iterable[int], torch_alone: bool = False) -> _Snapshot:
        """Reads the global generators."""
        if not torch_alone:
            _check_numpy()
        return _Snapshot(
            torch.get_rng_state(),
            {index: torch.cuda.get_rng_state(index) for index in devices},
            None if torch_alone else dict(np.random.get_state(legacy=False)),
            None if torch_alone else random.getstate(),
        )

    def put_back(self) -> None:
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)
        if self.numpy is not None:
            _check_numpy()
            np.random.set_state(self.numpy)
        if self.python is not None:
            random.setstate(self.python)


def _check_numpy() -> None:
    """Raises :class:`ConfigError` where numpy's global generator has been replaced by another kind."""
    kind = type(np.random.get_bit_generator()).__name__  # type: ignore[attr-defined]
    if kind != "MT19937":
        raise ConfigError(f"numpy's global generator is {kind}: leave MT19937 there, which it begins with")


class RandomState:
    """The global random state that one replica's forward, backward and compute run under.

    Switching is lazy: :meth:`install` does nothing while the same replica's state is installed, so a process
    with one replica pays nothing and a thousand simulated ones pay once per turn.

    Args:
      seed: of all generators.
      device: whose generator is part of the state, beside those of the host.
      torch_alone: whether nothing draws from numpy's and Python's generators, which are then left as they are: a switch
        takes 2 microseconds in place of 70.
    """

    _installed: ClassVar[RandomState | None] = None

    def __init__(self, seed: int, device: torch.device = _HOST, *, torch_alone: bool = False) -> None:
        self._torch_alone = torch_alone
        self._snapshot = _Snapshot.seeded(seed, device, torch_alone)

    @staticmethod
    def of(workload: Workload, seed: int, device: torch.device) -> RandomState:
        """Makes the state of a replica that trains ``workload``, which may draw from torch alone."""
        return RandomState(seed, device, torch_alone=getattr(workload, "draws_from_torch_alone", False))

    def install(self) -> None:
        """Makes this the global random state; the one installed before keeps what it has become."""
        current = RandomState._installed
        if current is self:
            return
        if current is not None:
            current._keep()
        self._snapshot.put_back()
        RandomState._installed = self

    @staticmethod
    @contextmanager
    def scope() -> Iterator[None]:
        """Around a run: afterwards the global random state is as it was before."""
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        outside, before = _Snapshot.taken(devices), RandomState._installed
        RandomState._installed = None
        try:
            yield
        finally:
            if RandomState._installed is not None:
                RandomState._installed._keep()
            RandomState._installed = before
            outside.put_back()

    def _keep(self) -> None:
        self._snapshot = _Snapshot.taken(self._snapshot.cuda, self._torch_alone)

    def state_dict(self) -> State:
        """Tensors and JSON values that :meth:`load_state_dict` continues from."""
        if RandomState._installed is self:
            self._keep()
        kept = self._snapshot
        state: State = {"torch": kept.cpu.clone()}
        for device in kept.cuda.values():  # one, or none
            state["cuda"] = device.clone()
        if kept.numpy is not None:
            state["numpy"] = {
                "key": torch.from_numpy(kept.numpy["state"]["key"].astype(np.int64)),
                "pos": int(kept.numpy["state"]["pos"]),
                "has_gauss": int(kept.numpy["has_gauss"]),
                "gauss": float(kept.numpy["gauss"]),
            }
        if kept.python is not None:
            version, words, gauss = kept.python
            state["python"] = {
                "version": version,
                "words": torch.tensor(words, dtype=torch.int64),
                "gauss": gauss,
            }
        return state

    def load_state_dict(self, state: State) -> None:
        """Continues from :meth:`state_dict`; a generator that had no part in it goes on from where it is."""
        kept = self._snapshot
        kept.cpu = state["torch"].clone()
        kept.cuda = {index: state.get("cuda", now).clone() for index, now in kept.cuda.items()}
        if kept.numpy is not None and (numpy := state.get("numpy")) is not None:
            kept.numpy = {
                "bit_generator": "MT19937",
                "state": {"key": numpy["key"].numpy().astype(np.uint32), "pos": numpy["pos"]},
                "has_gauss": numpy["has_gauss"],
                "gauss": numpy["gauss"],
            }
        if kept.python is not None and (python := state.get("python")) is not None:
            kept.python = (python["version"], tuple(python["words"].tolist()), python["gauss"])
        if RandomState._installed is self:
            kept.put_back()
