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
    ViewSession,
    WallCommunicator,
    find_collective,
)
from farflung.comm.staging import to_host
from farflung.decisions import (
    COLLECTIVE,
    DecisionLog,
    apply_collectives,
    decide_by_rank_0,
    resolve_collectives,
)
from farflung.errors import ConfigError, DeadlinePassed, PeerFailed, PeerLost, ProtocolError, RunLost
from farflung.seeding import RandomState
from farflung.tasks import Pending, create_completed
from farflung.types import Cost, Decision, ElasticMembership, Json, Payload
from farflung.wall.communication import CommunicationThread
from farflung.wall.rendezvous import Rendezvous

if TYPE_CHECKING:
    from farflung.network import NetworkProfile
    from farflung.wall.pace import Pace

__all__ = ["WallRuntime"]

T = TypeVar("T")

DEADLINE_S = 60.0
MAX_EXPANSION = 8
"""Maximum ratio of payload to tensor size; an 8-byte index with its value is six times as large as a 2-byte number."""
EXTRA_NBYTES = 1 << 24
"""Additional bytes that a message may have, for probes of the network, decisions and settings."""
_POLL_S = 0.2
"""Interval of reading the store while greetings of others are pending."""


class WallRuntime:
    """Runtime of one replica in a real process; see :class:`farflung.types.Runtime`.

    Args:
      rank: Rank of this replica.
      size: Number of replicas.
      store: Store where replicas publish their addresses, see :mod:`farflung.wall.rendezvous`; ``None`` for a single
        replica, and for one that joins.
      meeting: Name of the meeting; other meetings in the same store need another name.
      advice: Answer of rank 0 to replicas that ask it before the meeting.
      endpoint: Addresses and keys of this replica; loopback by default.
      settings: Settings that must be equal on all ranks, by name.
      deadline_s: Maximum silence of an awaited replica, in seconds.
      connect_timeout_s: Maximum time in seconds until the others appear.
      is_native: True to join a process group for the backend's own collectives.
      decisions: Log of decisions; they are not kept by default.
      pace: Pace of a slower device for computations; ``None`` for the speed of this machine.
      members: Ranks of the first members; others may join, see :meth:`admit`. ``None``: all; a loss ends the view.
      announce: Function that announces this joining replica to the members of a run, and returns all of them.
      max_unreceived_nbytes: See :class:`farflung.comm.ViewSession`.
      transport: Factory of the transport, with rank, size and options as :class:`farflung.comm.tcp.TcpTransport`.

    Raises:
      ConfigError: The endpoint is unusable, a key is rejected, or two replicas can neither connect nor be relayed.
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
        connect_timeout_s: float = DEADLINE_S,
        is_native: bool = False,
        decisions: DecisionLog | None = None,
        pace: Pace | None = None,
        members: Collection[int] | None = None,
        announce: Callable[[Peer], Sequence[Peer]] | None = None,
        max_unreceived_nbytes: float | None = None,
        transport: Callable[..., Transport] = TcpTransport,
    ) -> None:
        if is_native and size > 1 and not endpoint.is_local:
            raise ConfigError(
                "the backend's own collectives (--collective native) are not encrypted, and are for replicas of one "
                "machine: choose another collective"
            )
        self._begin_s, self._is_local, self._deadline_s = time.monotonic(), endpoint.is_local, deadline_s
        self.untimed: None = None
        """``None``, since all work takes real time; see :class:`farflung.types.Runtime`."""
        self.elastic: ElasticMembership | None = None
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
            keys=endpoint.get_keys(),
            allow_late=members is not None,
            connections=endpoint.connections,
        )
        self._create_session = partial(
            ViewSession,
            size=size,
            read_clock=self.read_clock,
            needs_all_members=members is None,
            members=members,
            settings=settings,
            max_unreceived_nbytes=max_unreceived_nbytes,
        )
        self._is_native = is_native and size > 1
        self._start_view()
        try:
            if announce is not None or store is None or size == 1:
                self._connect(announce)
                self._did_all_greet(connect_timeout_s)
                return
            present = range(size) if members is None else members
            rendezvous = Rendezvous(store, meeting, rank, present, self._begin_s + connect_timeout_s, advice)
            while not self._did_meet(rendezvous, connect_timeout_s):
                self._stop()
                self._start_view()
            if self._is_native:
                keys = dist.PrefixStore(f"farflung/{meeting}/{rendezvous.call}", store)
                self._group = _create_gloo(keys, rank, size, endpoint.address, deadline_s)
        except BaseException as error:
            self.close(error)
            raise

    def _start_view(self) -> None:
        """Starts a view under a new address."""
        self._staging_executor = ThreadPoolExecutor(1, "farflung-staging")
        self._executor = ThreadPoolExecutor(1, "farflung-aside")
        self.session = self._create_session(self._make_transport())
        self.session.stage, self.session.wait_monitor.count_events = self._stage_payload, lambda: self.events
        self.comm = WallCommunicator(self.session, native=self._reduce_natively if self._is_native else None)
        self._thread = CommunicationThread(self.session, self.read_clock, self._deadline_s)
        self.launch = self._thread.launch

    def limit_messages(self, tensors: Iterable[Tensor]) -> None:
        """Limits messages to the size of any message about these tensors, which are all of the model."""
        self.session.transport.max_nbytes = (
            MAX_EXPANSION * sum(tensor.nbytes for tensor in tensors) + EXTRA_NBYTES
        )

    # --- the runtime ------------------------------------------------------------------------------------------

    def read_clock(self) -> float:
        """Returns seconds since this runtime began."""
        return time.monotonic() - self._begin_s

    @property
    def communication_cpu_s(self) -> float:
        """Processor seconds of the communication thread so far."""
        return self._thread.cpu_s

    def sleep_until(self, t: float) -> Pending[None]:
        woken = self._thread.track(Pending[None]())
        self._thread.call_soon(lambda: self._thread.call_at(t, lambda: woken.set_result(None)))
        return woken

    def wait_any(self, *pendings: Pending[Any]) -> Pending[int]:
        return tasks.wait_any(pendings)

    def wait_for_data(self, ready: Pending[None] | float) -> Pending[None]:
        """Completes at a clock time, or when another thread reports samples; fails if the view ends first."""
        data = ready if isinstance(ready, Pending) else self.sleep_until(ready)
        finished = self._thread.track(Pending[None]())
        self._thread.call_soon(lambda: self.session.wait_monitor.wait_for_data(finished))

        def finish(_: object) -> None:
            self._thread.call_soon(self.session.wait_monitor.end_wait_for_data)
            if data.error is not None:
                finished.set_exception(data.error)
            else:
                finished.set_result(None)

        data.add_done_callback(finish)
        return finished

    def compute(self, cost: Cost, fn: Callable[[], T]) -> Pending[T]:
        """Runs ``fn`` on the calling thread; sleeps until its modelled end if a pace is set."""
        self.events += 1
        if self.pace is None:
            return create_completed(fn())
        _, ends = self.pace.begin(cost)
        value = fn()
        if cost.kind == "forward":
            self.pace.record_overrun(ends)
        self.pace.end_computation(ends)
        return create_completed(value)

    async def run_forward(
        self,
        cost: Cost,
        order: Sequence[int],
        fn: Callable[[Callable[[int], None]], T],
        prepare: Callable[[int], Coroutine[Pending[Any], None, None]],
    ) -> T:
        """Computes on the calling thread, and prepares each bucket inside the forward pass, when it is used.

        At a device's pace, it is used at the modelled time.
        """
        self.events += 1
        if self.pace is None:
            return fn(lambda bucket: self.drive(prepare(bucket)))
        pace = self.pace
        begin_s, end_s = pace.begin(cost)
        shares = dict(zip(order, pace.compute_use_shares(order, cost), strict=True))
        elapsed_s = 0.0

        def compute_until(share: float) -> None:
            nonlocal elapsed_s
            pace.advance((end_s - begin_s) * share - elapsed_s)
            elapsed_s = (end_s - begin_s) * share

        def use(bucket: int) -> None:
            compute_until(shares[bucket])
            self.drive(prepare(bucket))

        value = fn(use)
        compute_until(1.0)
        return value

    def run_backward(
        self, cost: Cost, fn: Callable[[Callable[[int], None]], None], on_ready: Callable[[int], None]
    ) -> Pending[None]:
        """Computes on the calling thread; exchanges start inside autograd when buckets are full.

        At a device's pace, they start at the modelled times.
        """
        self.events += 1
        if self.pace is None:
            fn(on_ready)
            return create_completed(None)
        begin, ends = self.pace.begin(cost)
        order: list[int] = []
        fn(order.append)
        shares = self.pace.compute_ready_shares(order, cost.numels)
        self.pace.record_overrun(begin + (ends - begin) * min(shares, default=1.0))
        for bucket, share in zip(order, shares, strict=True):
            self.pace.sleep_until(begin + (ends - begin) * share)
            on_ready(bucket)
        self.pace.end_computation(ends)
        return create_completed(None)

    def watch(self, fd: int, readable: Callable[[], None]) -> None:
        """Calls ``readable`` on the communication thread whenever a descriptor is readable."""
        self._thread.call_soon(lambda: self.session.transport.loop.watch(fd, readable=readable))

    def run_in_executor(self, fn: Callable[[], T]) -> Pending[T]:
        """Runs ``fn`` on a separate thread, in the order of calls, while messages are processed.

        Returns:
          Completes with its result or error, on the communication thread.
        """
        result = self._thread.track(Pending[T]())

        def run() -> None:
            try:
                value = fn()
            except BaseException as error:
                self._thread.call_soon(partial(result.set_exception, error))
            else:
                self._thread.call_soon(lambda: result.set_result(value))

        self._executor.submit(run)
        return result

    def decide(self, name: str, step: int, local: Callable[[], Json]) -> Pending[Decision]:
        return self.launch(decide_by_rank_0(self.comm, self.decisions, name, step, local))

    def decide_locally(self, name: str, step: int, local: Callable[[], Json]) -> Decision:
        return self.decisions.decide(name, step, local, self.comm.rank)

    def resolve_collective(
        self, name: str, nbytes: Sequence[int], *, network: NetworkProfile | None = None, step: int = 0
    ) -> str:
        """Sets the collectives that rank 0 decides on for ``auto``, and returns their names; all replicas call this.

        An unknown network is measured, see :func:`farflung.wall.measure_network`, except between two replicas, where
        little depends on it, and on loopback. Between two replicas loopback counts as a network without delay.

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
        find_collective(name)
        if name != AUTO:
            return name
        size = self.comm.size
        is_measured = network is None and size > 2 and not self._is_local
        if network is None and size == 2 and self._is_local:
            from farflung.network import Link, NetworkProfile

            network = NetworkProfile.create_uniform(Link(), size)
        elif is_measured:
            from farflung.wall.measuring import measure_network

            network = self.drive(measure_network(self))
        choose = partial(resolve_collectives, nbytes, size, network, is_measured=is_measured)
        decision = decide_by_rank_0(
            self.comm, self.decisions, COLLECTIVE, step, choose, timing=False, purpose=Purpose.MEASURE
        )
        return apply_collectives(self.comm, self.launch(decision).wait())

    # --- a replica's life -------------------------------------------------------------------------------------

    def run(self, coroutine: Coroutine[Pending[Any], None, T]) -> T:
        """Runs a replica to its end, and restores the global random state afterwards."""
        with RandomState.preserve_globals():
            return self.drive(coroutine)

    def drive(self, coroutine: Coroutine[Pending[Any], None, T]) -> T:
        """Runs a coroutine on the calling thread, which blocks while the coroutine waits."""
        try:
            while True:
                awaited = coroutine.send(None)
                must_wait = not awaited.is_done
                awaited.wait_until_done()
                if must_wait and self.pace is not None:
                    self.pace.finish_wait()
        except StopIteration as stop:
            value: T = stop.value
            return value

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the view, or announces ``error`` to the peers, and ends the thread.

        A relay first continues until it has relayed no message for the run's deadline.
        """
        self._executor.shutdown()
        self._staging_executor.shutdown()  # payloads that are still being copied are sent before the leave
        if error is not None and self.elastic is not None:
            self._thread.call_soon(self.elastic.announce_failure)
        self._thread.call_soon(lambda: self.session.leave(error, relay_idle_s=self._deadline_s))
        self._stop()
        if self._group is not None:
            self._group.shutdown()

    def _stop(self) -> None:
        """Ends all threads, and with them the view's connections."""
        self._executor.shutdown()
        self._staging_executor.shutdown()
        self._thread.stop()

    def get_address(self, rank: int) -> str | None:
        """Returns the address of a replica that has come; see :meth:`farflung.comm.Peer.to_json`."""
        return self.peers[rank].to_json() if rank in self.peers else None

    def admit(self, peer: Peer, connect_timeout_s: float = DEADLINE_S) -> Pending[None]:
        """Admits a replica that is new or has returned; called on the communication thread.

        See :meth:`farflung.comm.members.ViewMembers.admit`.

        Args:
          peer: Address of the replica, whose rank is below the size of the run.
          connect_timeout_s: Maximum time in seconds until its greeting. Then the wait fails with
            :class:`DeadlinePassed`, and the replica is dismissed.
        """
        greeted = self.session.members.admit(peer)
        self.peers[peer.rank] = peer

        def give_up() -> None:
            if not greeted.is_done:  # otherwise it may be reconnecting
                self.session.members.revoke_admission(
                    peer.rank, DeadlinePassed(peer.rank, "its greeting", connect_timeout_s)
                )

        self._thread.call_at(self.read_clock() + connect_timeout_s, give_up)
        return greeted

    def _did_meet(self, rendezvous: Rendezvous, connect_timeout_s: float) -> bool:
        """Meets the other members; returns False if one has restarted in the meantime, so that all must meet again."""

        def exchange_peers(me: Peer) -> list[Peer]:
            peers = {rank: Peer.from_json(text) for rank, text in rendezvous.exchange(me.to_json()).items()}
            for rank, peer in peers.items():
                if peer.rank != rank:
                    raise ProtocolError(f"the store holds rank {peer.rank} under the name of rank {rank}")
            return list(peers.values())

        def is_due(rank: int) -> bool:
            member = self.session.members.by_rank.get(rank)
            return not self.session.mailbox.ended.is_done and member is not None and member.is_present

        self._connect(exchange_peers)
        try:
            return self._did_all_greet(connect_timeout_s, rendezvous.is_repeated) and rendezvous.try_confirm(
                is_due
            )
        except (PeerLost, PeerFailed):
            # The first rank that sees a repeated meeting closes its connections.
            if rendezvous.is_repeated():
                return False
            raise

    def _connect(self, announce: Callable[[Peer], Sequence[Peer]] | None) -> None:
        """Connects to the peers that ``announce`` returns; always starts the thread, which also closes sockets."""
        try:
            if announce is not None:
                peers = announce(self.session.transport.local_peer)
                self.peers = {peer.rank: peer for peer in peers}
                self.session.members.connect(peers)
        finally:
            self._thread.start()

    def _did_all_greet(
        self, connect_timeout_s: float, is_repeated: Callable[[], bool] = lambda: False
    ) -> bool:
        """Waits until all others have greeted; returns False if the meeting is repeated before."""
        greeted, members = threading.Event(), self.session.members

        def give_up() -> None:
            timeout = members.build_timeout(self.read_clock())
            if timeout is not None:
                self.session.mailbox.end(timeout)

        self._thread.call_soon(lambda: self._thread.call_at(connect_timeout_s, give_up))
        members.ready.add_done_callback(lambda _: greeted.set())
        while not greeted.wait(_POLL_S):
            if is_repeated():
                return False
        members.ready.result()
        return True

    def _stage_payload(self, payload: Payload) -> Pending[Payload]:
        """Copies a payload to the host; another thread waits for the device."""
        host, wait = to_host(payload)
        staged: Pending[Payload] = Pending()

        def copy_to_host() -> None:
            try:
                wait()
            except RuntimeError as error:  # the device has failed
                failure = RunLost(f"a gradient could not be copied from its device: {error}")
                self._thread.call_soon(lambda: self.session.mailbox.end(failure))
                self._thread.call_soon(lambda: staged.set_exception(failure))
            else:
                self._thread.call_soon(lambda: staged.set_result(host))

        self._staging_executor.submit(copy_to_host)
        return staged

    def _reduce_natively(self, tensor: Tensor) -> Pending[Tensor]:
        summed: Pending[Tensor] = Pending()
        work = self._group.allreduce([tensor])

        def finish_sum(future: torch.futures.Future[Any]) -> None:
            try:
                future.value()
            except Exception as error:  # the backend raises RuntimeErrors of many kinds
                failure = RunLost(f"the native all-reduce failed: {error}")
                self._thread.call_soon(lambda: summed.set_exception(failure))
            else:
                self._thread.call_soon(lambda: summed.set_result(tensor))

        work.get_future().add_done_callback(finish_sum)
        return summed


def _create_gloo(store: dist.Store, rank: int, size: int, address: str, deadline_s: float) -> Any:
    """Creates the backend's collectives, which listen at one address instead of that of the machine's name."""
    gloo: Any = dist.ProcessGroupGloo  # torch has no annotations for its methods
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=deadline_s)
    return gloo(store, rank, size, options)
