"""Random numbers without global state: derived seeds, and the random state that belongs to one replica."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from farflung.types import State

__all__ = ["RandomState", "derive", "generator"]


def derive(seed: int, *labels: int | str) -> int:
    """A 63-bit seed that depends on ``seed`` and the labels, and looks unrelated for unlike labels."""
    text = "\0".join(map(str, (seed, *labels)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, *labels: int | str) -> torch.Generator:
    """A CPU generator seeded by :func:`derive`."""
    return torch.Generator().manual_seed(derive(seed, *labels))


@dataclass(slots=True)
class _Snapshot:
    """torch's, numpy's and Python's global generators at one moment."""

    torch: torch.Tensor
    numpy: dict[str, Any]
    python: tuple[Any, ...]

    @staticmethod
    def seeded(seed: int) -> _Snapshot:
        return _Snapshot(
            torch.Generator().manual_seed(seed).get_state(),
            dict(np.random.RandomState(seed % 2**32).get_state(legacy=False)),
            random.Random(seed).getstate(),
        )

    @staticmethod
    def taken() -> _Snapshot:
        return _Snapshot(torch.get_rng_state(), dict(np.random.get_state(legacy=False)), random.getstate())

    def put_back(self) -> None:
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


class RandomState:
    """The global random state that one replica's forward, backward and compute run under.

    Switching is lazy: :meth:`install` does nothing while the same replica's state is installed, so a process
    with one replica pays nothing and a thousand simulated ones pay once per turn.
    """

    _installed: ClassVar[RandomState | None] = None

    def __init__(self, seed: int) -> None:
        self._snapshot = _Snapshot.seeded(seed)

    def install(self) -> None:
        """Makes this the global random state; the one installed before keeps what it has become."""
        current = RandomState._installed
        if current is self:
            return
        if current is not None:
            current._snapshot = _Snapshot.taken()
        self._snapshot.put_back()
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
                RandomState._installed._snapshot = _Snapshot.taken()
            RandomState._installed = before
            outside.put_back()

    def state_dict(self) -> State:
        """Tensors and JSON values that :meth:`load_state_dict` continues from."""
        if RandomState._installed is self:
            self._snapshot = _Snapshot.taken()
        numpy = self._snapshot.numpy
        version, words, gauss = self._snapshot.python
        return {
            "torch": self._snapshot.torch.clone(),
            "numpy": {
                "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
                "pos": int(numpy["state"]["pos"]),
                "has_gauss": int(numpy["has_gauss"]),
                "gauss": float(numpy["gauss"]),
            },
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        }

    def load_state_dict(self, state: State) -> None:
        """Continues from :meth:`state_dict`."""
        numpy, python = state["numpy"], state["python"]
        self._snapshot = _Snapshot(
            state["torch"].clone(),
            {
                "bit_generator": "MT19937",
                "state": {"key": numpy["key"].numpy().astype(np.uint32), "pos": numpy["pos"]},
                "has_gauss": numpy["has_gauss"],
                "gauss": numpy["gauss"],
            },
            (python["version"], tuple(python["words"].tolist()), python["gauss"]),
        )
        if RandomState._installed is self:
            self._snapshot.put_back()
