"""Wall-clock runtime: autograd on the main thread, all pending exchanges on one communication thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from farflung import tasks
from farflung.comm import (
    AUTO,
    Endpoint,
    Peer,
    Purpose,
    TcpTransport,
    Transport,
    View,
    WallCommunicator,
    collective_named,
)
from farflung.comm.staging import to_host
from farflung.decisions import COLLECTIVE, DecisionLog, adopt_collectives, collectives_of, decide_by_rank_0
from farflung.errors import ConfigError, DeadlinePassed, PeerFailed, PeerLost, ProtocolError, RunLost
from farflung.seeding import RandomState
from farflung.tasks import Pending, done
from farflung.types import Cost, Decision, Elastic, Json, Payload
from farflung.wall.communication import CommunicationThread
from farflung.wall.rendezvous import Rendezvous

if TYPE_CHECKING:
    from farflung.network import NetworkProfile
    from farflung.wall.pace import Pace

__all__ = ["WallRuntime"]

T = TypeVar("T")

DEADLINE_S = 60.0
EXPANSION = 8
"""Maximum ratio of payload to tensor size; an 8-byte index with its value is six times as large as a 2-byte number."""
BESIDE_NBYTES = 1 << 24
"""Additional bytes that a message may have, for probes of the network, decisions and settings."""
_LOOK_AGAIN_S = 0.2
"""Interval of reading the store while greetings of others are pending."""


class WallRuntime:
    """Runtime of one replica in a real process; see :class:`farflung.types.Runtime`.

    Args:
      rank: Rank of this replica.
      size: Number of replicas.
      store: Store where replicas publish their addresses, see :mod:`farflung.wall.rendezvous`; keys of earlier
        processes do no harm. ``None`` for a single replica, and for one that joins.
      meeting: Name of the meeting; other meetings in the same store need another name.
      advice: Answer of rank 0 to replicas that ask it before the meeting.
      endpoint: Addresses and keys of this replica; loopback by default.
      settings: Settings that must be equal on all ranks, by name.
      deadline_s: Maximum silence of an awaited replica, in seconds.
      join_s: Maximum time in seconds until the others appear.
      is_native: True to join a process group for the backend's own collectives.
      decisions: Log of decisions; they are not kept by default.
      pace: Pace of a slower device for computations; ``None`` for the speed of this machine.
      members: Ranks of the first members, with this one. Others come later, see :meth:`admit`, and the loss of one
        ends only its own waits. ``None``: all ranks, and the loss of one ends the view.
      announce: Function that announces this joining replica to the members of a run, and returns all of them.
      max_unreceived_nbytes: See :class:`farflung.comm.View`.
      transport: Factory of the transport, with rank, size and options as :class:`farflung.comm.tcp.TcpTransport`.

    Raises:
      ConfigError: The endpoint is unusable, a replica's key is rejected, or two replicas can neither connect nor be
        relayed.
      DeadlinePassed: A replica did not appear; names it.
      ProtocolError: Ranks were started with different settings; names the setting.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store | None,
        *,
        meeting: str = "run",
        advice: str = "",
        endpoint: Endpoint = Endpoint(),
        settings: Mapping[str, Json] | None = None,
        deadline_s: float = DEADLINE_S,
        join_s: float = DEADLINE_S,
        native: bool = False,
        decisions: DecisionLog | None = None,
        pace: Pace | None = None,
        members: Collection[int] | None = None,
        come: Callable[[Peer], Sequence[Peer]] | None = None,
        kept_nbytes: float | None = None,
        transport: Callable[..., Transport] = TcpTransport,
    ) -> None:
        if native and size > 1 and not endpoint.is_local:
            raise ConfigError(
                "the backend's own collectives (--collective native) are not encrypted, and are for replicas of one "
                "machine: choose another collective"
            )
        self._begin, self._local, self._deadline_s = time.monotonic(), endpoint.is_local, deadline_s
        self.off_clock: None = None
        """``None``, since all work takes real time; see :class:`farflung.types.Runtime`."""
        self.elastic: Elastic | None = None
        """See :class:`farflung.types.Runtime`."""
        self.events = 0
        """See :class:`farflung.types.Runtime`."""
        self.pace = pace
        """Pace of another device for computations, if requested."""
        self._group: Any = None
        self.decisions = decisions or DecisionLog(keep=False)
        self.peers: dict[int, Peer] = {}
        """Replicas that have come, by rank."""
        self._make_transport = partial(
            transport,
            rank,
            size,
            interface=endpoint.address,
            ports=endpoint.ports,
            advertise=endpoint.advertise,
            keys=endpoint.proof(),
            later=members is not None,
            connections=endpoint.connections,
        )
        self._make_view = partial(
            View,
            size=size,
            now=self.now,
            whole=members is None,
            members=members,
            settings=settings,
            kept_nbytes=kept_nbytes,
        )
        self._native = native and size > 1
        self._open()
        try:
            if come is not None or store is None or size == 1:
                self._connect(come)
                self._await_greetings(join_s)
                return
            present = range(size) if members is None else members
            rendezvous = Rendezvous(store, meeting, rank, present, self._begin + join_s, advice)
            while not self._meet(rendezvous, join_s):
                self._stop()
                self._open()
            if self._native:
                keys = dist.PrefixStore(f"farflung/{meeting}/{rendezvous.call}", store)
                self._group = _gloo(keys, rank, size, endpoint.address, deadline_s)
        except BaseException as error:
            self.close(error)
            raise

    def _open(self) -> None:
        """Starts a view under a new address."""
        self._staging = ThreadPoolExecutor(1, "farflung-staging")
        self._aside = ThreadPoolExecutor(1, "farflung-aside")
        self.view = self._make_view(self._make_transport())
        self.view.stage, self.view.waits.events = self._stage, lambda: self.events
        self.comm = WallCommunicator(self.view, native=self._native_sum if self._native else None)
        self._thread = CommunicationThread(self.view, self.now, self._deadline_s)
        self.launch = self._thread.launch

    def expect(self, tensors: Iterable[Tensor]) -> None:
        """Limits messages to the size of any message about these tensors, which are all of the model."""
        self.view.transport.max_nbytes = EXPANSION * sum(tensor.nbytes for tensor in tensors) + BESIDE_NBYTES

    # --- the runtime ------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Returns seconds since this runtime began."""
        return time.monotonic() - self._begin

    @property
    def communication_cpu_s(self) -> float:
        """Processor seconds of the communication thread so far."""
        return self._thread.cpu_s

    def sleep_until(self, t: float) -> Pending[None]:
        woken: Pending[None] = Pending()
        self._thread.soon(lambda: self._thread.at(t, lambda: woken.set(None)))
        return woken

    def first_of(self, *pendings: Pending[Any]) -> Pending[int]:
        return tasks.first_of(pendings)

    def wait_for_data(self, ready: Pending[None] | float) -> Pending[None]:
        """Waits for a time or for another thread; fails if the view ends first."""
        data = ready if isinstance(ready, Pending) else self.sleep_until(ready)
        finished: Pending[None] = Pending()
        self._thread.soon(lambda: self.view.waits.wait_for_data(finished))

        def finish(_: object) -> None:
            self._thread.soon(self.view.waits.end_wait_for_data)
            if data.error is not None:
                finished.fail(data.error)
            else:
                finished.set(None)

        data.on_done(finish)
        return finished

    def compute(self, cost: Cost, fn: Callable[[], T]) -> Pending[T]:
        """Computes on the calling thread, at the device's pace if there is one."""
        self.events += 1
        if self.pace is None:
            return done(fn())
        _, ends = self.pace.begin(cost)
        value = fn()
        if cost.kind == "forward":
            self.pace.computed(ends)
        self.pace.end(ends)
        return done(value)

    def backward(
        self, cost: Cost, fn: Callable[[Callable[[int], None]], None], on_ready: Callable[[int], None]
    ) -> Pending[None]:
        """Computes on the calling thread; exchanges start inside autograd when buckets are full.

        At a device's pace, they start at the modelled times.
        """
        self.events += 1
        if self.pace is None:
            fn(on_ready)
            return done(None)
        begin, ends = self.pace.begin(cost)
        order: list[int] = []
        fn(order.append)
        shares = self.pace.ready_at(order, cost.numels)
        self.pace.computed(begin + (ends - begin) * min(shares, default=1.0))
        for bucket, share in zip(order, shares, strict=True):
            self.pace.until(begin + (ends - begin) * share)
            on_ready(bucket)
        self.pace.end(ends)
        return done(None)

    def watch(self, fd: int, readable: Callable[[], None]) -> None:
        """Calls ``readable`` on the communication thread whenever a descriptor is readable."""
        self._thread.soon(lambda: self.view.transport.watch(fd, readable))

    def aside(self, fn: Callable[[], T]) -> Pending[T]:
        """Runs ``fn`` on a separate thread, in the order of calls, while messages are processed.

        Returns:
          Completes with its result or error, on the communication thread.
        """
        result: Pending[T] = Pending()

        def run() -> None:
            try:
                value = fn()
            except BaseException as error:
                self._thread.soon(partial(result.fail, error))
            else:
                self._thread.soon(lambda: result.set(value))

        self._aside.submit(run)
        return result

    def decide(self, name: str, step: int, local: Callable[[], Json]) -> Pending[Decision]:
        return self.launch(decide_by_rank_0(self.comm, self.decisions, name, step, local))

    def decide_own(self, name: str, step: int, local: Callable[[], Json]) -> Decision:
        return self.decisions.decide(name, step, local, self.comm.rank)

    def settle_collective(
        self, name: str, nbytes: Sequence[int], *, network: NetworkProfile | None = None, step: int = 0
    ) -> str:
        """Resolves ``auto`` to collectives; rank 0 decides and records it. All replicas call this.

        An unknown network is measured, see :func:`farflung.wall.measure_network`, except between two replicas, where
        nothing depends on it, and on loopback.

        Args:
          name: Requested collective; any but ``auto`` is returned as it is.
          nbytes: Bytes of the tensors summed in a step.
          network: Network between the replicas, if known.
          step: First step of the run.

        Returns:
          The name of the collective that the replicas use; for ``auto`` those of all sizes, the largest tensor's
          first.

        Raises:
          UnknownName: No such collective.
        """
        collective_named(name)
        if name != AUTO:
            return name
        size = self.comm.size
        if network is None and size > 2 and not self._local:
            from farflung.wall.measuring import measured_network

            network = self.drive(measured_network(self))
        choose = partial(collectives_of, nbytes, size, network)
        decision = decide_by_rank_0(
            self.comm, self.decisions, COLLECTIVE, step, choose, timing=False, purpose=Purpose.MEASURE
        )
        return adopt_collectives(self.comm, self.launch(decision).wait())

    # --- a replica's life -------------------------------------------------------------------------------------

    def run(self, coroutine: Coroutine[Pending[Any], None, T]) -> T:
        """Runs a replica to its end, and restores the global random state afterwards."""
        with RandomState.scope():
            return self.drive(coroutine)

    def drive(self, coroutine: Coroutine[Pending[Any], None, T]) -> T:
        """Runs a coroutine on the calling thread, which blocks while the coroutine waits."""
        try:
            while True:
                awaited = coroutine.send(None)
                must_wait = not awaited.done
                awaited.block()
                if must_wait and self.pace is not None:
                    self.pace.waited()
        except StopIteration as stop:
            value: T = stop.value
            return value

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the view, or announces ``error`` to the peers, and ends the thread.

        A relay first continues until it has relayed no message for the run's deadline.
        """
        self._aside.shutdown()
        self._staging.shutdown()  # payloads that are still being copied are sent before the leave
        if error is not None and self.elastic is not None:
            self._thread.soon(self.elastic.end)
        self._thread.soon(lambda: self.view.leave(error, relays_s=self._deadline_s))
        self._stop()
        if self._group is not None:
            self._group.shutdown()

    def _stop(self) -> None:
        """Ends all threads, and with them the view's connections."""
        self._aside.shutdown()
        self._staging.shutdown()
        self._thread.stop()

    def address_of(self, rank: int) -> str | None:
        """Returns the address of a replica that has come; see :meth:`farflung.comm.Peer.to_json`."""
        return self.peers[rank].to_json() if rank in self.peers else None

    def let_in(self, peer: Peer, join_s: float = DEADLINE_S) -> Pending[None]:
        """Admits a replica that is new or has returned; called on the communication thread.

        See :meth:`farflung.comm.View.admit`.

        Args:
          peer: Address of the replica, whose rank is below the size of the run.
          join_s: Maximum time in seconds until its greeting. Then the wait fails with :class:`DeadlinePassed`, and the
            replica is dismissed.
        """
        greeted = self.view.admit(peer)
        self.peers[peer.rank] = peer

        def give_up() -> None:
            if not greeted.done:  # otherwise it may be reconnecting
                self.view.dismiss(peer.rank, DeadlinePassed(peer.rank, "its greeting", join_s))

        self._thread.at(self.now() + join_s, give_up)
        return greeted

    def _meet(self, rendezvous: Rendezvous, join_s: float) -> bool:
        """Meets the other members; returns False if one has restarted in the meantime, so that all must meet again."""

        def exchange_peers(me: Peer) -> list[Peer]:
            peers = {rank: Peer.from_json(text) for rank, text in rendezvous.exchange(me.to_json()).items()}
            for rank, peer in peers.items():
                if peer.rank != rank:
                    raise ProtocolError(f"the store holds rank {peer.rank} under the name of rank {rank}")
            return list(peers.values())

        def is_due(rank: int) -> bool:
            return self.view.lost is None and rank in self.view.present()

        self._connect(exchange_peers)
        try:
            return self._await_greetings(join_s, rendezvous.is_repeated) and rendezvous.confirm(is_due)
        except (PeerLost, PeerFailed):
            # The first rank that sees a repeated meeting closes its connections.
            if rendezvous.is_repeated():
                return False
            raise

    def _connect(self, come: Callable[[Peer], Sequence[Peer]] | None) -> None:
        """Connects to the others that ``announce`` returns, and starts the thread, which closes sockets."""
        try:
            if come is not None:
                peers = come(self.view.transport.me)
                self.peers = {peer.rank: peer for peer in peers}
                self.view.connect(peers)
        finally:
            self._thread.start()

    def _await_greetings(self, join_s: float, is_repeated: Callable[[], bool] = lambda: False) -> bool:
        """Waits until all others have greeted; returns False if the meeting is repeated before."""
        greeted = threading.Event()

        def give_up() -> None:
            missing = self.view.missing()
            if missing and not self.view.ready.done:
                self.view.end(DeadlinePassed(missing[0], self.view.greeting_of(missing[0]), self.now()))

        self._thread.soon(lambda: self._thread.at(join_s, give_up))
        self.view.ready.on_done(lambda _: greeted.set())
        while not greeted.wait(_LOOK_AGAIN_S):
            if is_repeated():
                return False
        self.view.ready.result()
        return True

    def _stage(self, payload: Payload) -> Pending[Payload]:
        """Copies a payload to the host; another thread waits for the device."""
        host, wait = to_host(payload)
        staged: Pending[Payload] = Pending()

        def copy_to_host() -> None:
            try:
                wait()
            except RuntimeError as error:  # the device has failed
                failure = RunLost(f"a gradient could not be copied from its device: {error}")
                self._thread.soon(lambda: self.view.end(failure))
                self._thread.soon(lambda: staged.fail(failure))
            else:
                self._thread.soon(lambda: staged.set(host))

        self._staging.submit(copy_to_host)
        return staged

    def _native_sum(self, tensor: Tensor) -> Pending[Tensor]:
        summed: Pending[Tensor] = Pending()
        work = self._group.allreduce([tensor])

        def finish_sum(future: torch.futures.Future[Any]) -> None:
            try:
                future.value()
            except Exception as error:  # the backend raises RuntimeErrors of many kinds
                failure = RunLost(f"the native all-reduce failed: {error}")
                self._thread.soon(lambda: summed.fail(failure))
            else:
                self._thread.soon(lambda: summed.set(tensor))

        work.get_future().add_done_callback(finish_sum)
        return summed


def _gloo(store: dist.Store, rank: int, size: int, address: str, deadline_s: float) -> Any:
    """Creates the backend's collectives, which listen at one address instead of that of the machine's name."""
    gloo: Any = dist.ProcessGroupGloo  # torch has no annotations for its methods
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=deadline_s)
    return gloo(store, rank, size, options)
