"""Random numbers without global state: derived seeds, and the random state that belongs to one replica."""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from farflung.errors import ConfigError
from farflung.types import State

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
_NUMPY_NBYTES = 625 * 4
"""Of numpy's Mersenne Twister: 624 words, and which of them is next."""


def _numpy_address() -> int:
    """Where numpy keeps the words of its global generator.

    Raises:
      ConfigError: it has been given a generator of another kind.
    """
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(bits, np.random.MT19937):
        raise ConfigError(
            f"numpy's global generator is {type(bits).__name__}: leave MT19937 there, which it begins with"
        )
    return int(bits.ctypes.state_address)


_PYTHON: random.Random = random.random.__self__  # type: ignore[attr-defined]
"""Python's global generator."""


def _python_words(state: tuple[Any, ...]) -> bytes:
    """A state as CPython keeps it: which word is next, then all 624."""
    return struct.pack("=i624I", state[1][-1], *state[1][:-1])


def _python_offset() -> int | None:
    """Where Python's global generator keeps its words in its own memory; ``None`` where they are not to be seen."""
    if sys.implementation.name != "cpython":
        return None
    memory = ctypes.string_at(id(_PYTHON), type(_PYTHON).__basicsize__)
    at = memory.find(_python_words(_PYTHON.getstate()))
    return None if at < 0 else at


_PYTHON_AT = _python_offset()
_PYTHON_NBYTES = 625 * 4


def _python_now(before: _Snapshot | None) -> tuple[tuple[Any, ...], bytes]:
    """Python's state and its words; those of ``before`` where nobody has drawn since."""
    if before is not None and _PYTHON_AT is not None:
        words = ctypes.string_at(id(_PYTHON) + _PYTHON_AT, _PYTHON_NBYTES)
        if words == before.python_words and _PYTHON.gauss_next == before.python[2]:  # type: ignore[attr-defined]
            return before.python, words
    python = _PYTHON.getstate()
    return python, _python_words(python)


@dataclass(slots=True)
class _Snapshot:
    """torch's, numpy's and Python's global generators at one moment, and those of CUDA devices that are in use.

    numpy's own functions copy its 624 words one by one, which takes longer than a small model's forward pass. Few
    models draw from it, so its words are compared in place, and copied in place; its functions are left for a
    generator that holds the second half of a pair of normal numbers besides. Python's function makes a number of each
    of its 624 words, so those too are compared in place, where they are to be seen.
    """

    torch: torch.Tensor
    numpy: dict[str, Any]
    words: bytes
    python: tuple[Any, ...]
    python_words: bytes
    cuda: dict[int, Tensor]
    """By the number of the device."""

    @staticmethod
    def seeded(seed: int, cuda: int | None) -> _Snapshot:
        numpy = dict(np.random.RandomState(seed % 2**32).get_state(legacy=False))
        python = random.Random(seed).getstate()
        return _Snapshot(
            torch.Generator().manual_seed(seed).get_state(),
            numpy,
            _words(numpy),
            python,
            _python_words(python),
            {} if cuda is None else {cuda: torch.Generator(f"cuda:{cuda}").manual_seed(seed).get_state()},
        )

    @staticmethod
    def taken(before: _Snapshot | None = None) -> _Snapshot:
        """What there is now; ``before`` is what was put in last."""
        words = ctypes.string_at(_numpy_address(), _NUMPY_NBYTES)
        if before is not None and words == before.words and not before.numpy["has_gauss"]:
            numpy = before.numpy
        else:
            numpy = dict(np.random.get_state(legacy=False))
        if before is not None:
            devices = list(before.cuda)
        else:
            devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        cuda = {index: torch.cuda.get_rng_state(index) for index in devices}
        python, python_words = _python_now(before)
        return _Snapshot(torch.get_rng_state(), numpy, words, python, python_words, cuda)

    def put_back(self, instead_of: _Snapshot | None = None) -> None:
        """Into the place of what there is now, where that is known."""
        address = _numpy_address()
        torch.set_rng_state(self.torch)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)
        random.setstate(self.python)
        if instead_of is None or self.numpy["has_gauss"] or instead_of.numpy["has_gauss"]:
            np.random.set_state(self.numpy)
        else:
            ctypes.memmove(address, self.words, _NUMPY_NBYTES)


def _words(numpy: dict[str, Any]) -> bytes:
    state = numpy["state"]
    return bytes(np.append(state["key"], state["pos"]).astype(np.uint32))


class RandomState:
    """The global random state that one replica's forward, backward and compute run under.

    Switching is lazy: :meth:`install` does nothing while the same replica's state is installed, so a process
    with one replica pays nothing and a thousand simulated ones pay once per turn.

    Args:
      seed: of all of it.
      device: whose generator is part of it, beside those of the host.
    """

    _installed: ClassVar[RandomState | None] = None

    def __init__(self, seed: int, device: torch.device = _HOST) -> None:
        self._snapshot = _Snapshot.seeded(seed, device.index if device.type == "cuda" else None)

    def install(self) -> None:
        """Makes this the global random state; the one installed before keeps what it has become."""
        current = RandomState._installed
        if current is self:
            return
        if current is not None:
            current._keep()
        self._snapshot.put_back(None if current is None else current._snapshot)
        RandomState._installed = self

    @staticmethod
    @contextmanager
    def scope() -> Iterator[None]:
        """Around a run: afterwards the global random state is as it was before."""
        outside, before = _Snapshot.taken(), RandomState._installed
        RandomState._installed = None
        try:
            yield
        finally:
            if RandomState._installed is not None:
                RandomState._installed._keep()
            RandomState._installed = before
            outside.put_back()

    def _keep(self) -> None:
        self._snapshot = _Snapshot.taken(self._snapshot)

    def state_dict(self) -> State:
        """Tensors and JSON values that :meth:`load_state_dict` continues from."""
        if RandomState._installed is self:
            self._keep()
        numpy = self._snapshot.numpy
        version, words, gauss = self._snapshot.python
        devices = list(self._snapshot.cuda.values())  # one, or none
        return {
            "torch": self._snapshot.torch.clone(),
            "numpy": {
                "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
                "pos": int(numpy["state"]["pos"]),
                "has_gauss": int(numpy["has_gauss"]),
                "gauss": float(numpy["gauss"]),
            },
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            **({"cuda": devices[0].clone()} if devices else {}),
        }

    def load_state_dict(self, state: State) -> None:
        """Continues from :meth:`state_dict`; a device that had no part in it goes on from where it is."""
        numpy, python = state["numpy"], state["python"]
        kept = {
            "bit_generator": "MT19937",
            "state": {"key": numpy["key"].numpy().astype(np.uint32), "pos": numpy["pos"]},
            "has_gauss": numpy["has_gauss"],
            "gauss": numpy["gauss"],
        }
        own = (python["version"], tuple(python["words"].tolist()), python["gauss"])
        self._snapshot = _Snapshot(
            state["torch"].clone(),
            kept,
            _words(kept),
            own,
            _python_words(own),
            {index: state.get("cuda", now).clone() for index, now in self._snapshot.cuda.items()},
        )
        if RandomState._installed is self:
            self._snapshot.put_back()
