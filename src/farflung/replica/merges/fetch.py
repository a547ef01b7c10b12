"""Own updates to a server, and its parameters in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from farflung.replica.buckets import GradientBuckets
from farflung.replica.in_flight import Carrier, InFlight
from farflung.replica.merges.merger import Merger
from farflung.replica.server import ByServer
from farflung.replica.stopping import StopAgreement
from farflung.types import Fetch, Runtime, State, Transfer

__all__ = ["Fetching"]


class Fetching(Merger):
    """Carries out :class:`farflung.types.Fetch`: an update is what was done to the parameters since the last answer."""

    takes_whole: ClassVar[str] = "its server takes whole updates of equal batches, as they arrive"
    by_server: ClassVar[bool] = True
    rank_0_stands: ClassVar[bool] = True

    def __init__(self, merge: Fetch, buckets: GradientBuckets) -> None:
        super().__init__(merge, buckets)
        self._bound = merge.bound
        self._fetched = self._weights()
        self._by_server: ByServer | None = None

    @property
    @override
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._fetched)

    @staticmethod
    @override
    def needs_the_loop(merge: Fetch) -> str:
        """A server ends when all have done the run's steps."""
        del merge
        return "its server has to know how many steps there are"

    @override
    def carrier(
        self,
        runtime: Runtime,
        rider: int,
        seed: int,
        steps: int | None,
        meets: Callable[[int], bool],
        stop: StopAgreement | None,
    ) -> Carrier:
        del seed
        assert steps is not None
        assert stop is not None
        self._by_server = ByServer(runtime, self._bound, rider, steps, meets, stop)
        return self._by_server

    @override
    def opens(self, step: int) -> None:
        assert self._by_server is not None
        self._by_server.open(step, lambda: dict(enumerate(self._fetched)))

    @override
    def give(self, index: int, transfer: Transfer, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        del transfer, step
        return self._buckets.weights(index).sub_(self._fetched[index]), {}

    @override
    def put(self, index: int, exchange: InFlight, mean: Tensor | None) -> None:
        del exchange
        assert mean is not None
        self._fetched[index] = mean
        self._buckets.load_weights(index, mean)

    @override
    def diverged(self, *, pending: bool) -> bool:
        """Unless all had come to the same step when they were answered."""
        return pending or not (self._by_server is not None and self._by_server.together)

    @override
    def consensus_parameters(self) -> list[Tensor]:
        return self._fetched

    @override
    def restart(self) -> None:
        self._reset_weights(self._fetched)

    @override
    def load_state_dict(self, shared: State, own: State, exchanges: Sequence[InFlight]) -> None:
        del shared, own, exchanges
        self.restart()

    def _weights(self) -> list[Tensor]:
        return [self._buckets.weights(bucket.index) for bucket in self._buckets.buckets]
