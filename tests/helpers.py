"""What several test files need: the codecs to try, bits to compare, and replicas of both worlds in one process."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from farflung.codecs import (
    DGC,
    QSGD,
    ChunkedTopK,
    DeMo,
    Identity,
    Int8,
    RandomK,
    Sign,
    TopK,
    Truncate16,
    by_role,
    by_size,
    chain,
    error_feedback,
)
from farflung.comm import Peer, TcpTransport, ViewSession, WallCommunicator
from farflung.comm.endpoint import UNREACHABLE
from farflung.comm.wire import Frame, Message, WireError, read_head
from farflung.sim import LinkModel, VirtualWorld
from farflung.tasks import Pending
from farflung.types import Codec, Payload, Runtime, Tag
from farflung.wall import WallRuntime
from farflung.wall.rendezvous import Rendezvous

T = TypeVar("T")

PATIENCE_S = 30.0
"""How long a test on real sockets waits before it gives up; a test that passes never waits for it."""


# --- codecs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodecRow:
    """One codec to try: adding a codec is adding a row.

    Args:
      codec: with the options to try it with.
      error: the largest ``|C(g) - g| / |g|`` for up to :data:`NUMEL` numbers, at most 1; of an unbiased codec the
        largest standard deviation of it.
      odd: what it makes of an infinity or a NaN: ``kept`` in its place as it is, ``shown`` by something there that is
        not finite, or sent when its ``turn`` comes.
    """

    codec: Codec
    error: float
    odd: Literal["kept", "shown", "turn"] = "kept"


NUMEL = 257
HALF_A_STEP = NUMEL**0.5 / 254
"""What rounding to the nearest of 127 levels may lose."""

CODEC_ROWS: dict[str, CodecRow] = {
    "by_role": CodecRow(by_role(), HALF_A_STEP, "shown"),
    "by_role (parts of top-k)": CodecRow(by_role(TopK(0.1), QSGD()), 1.2, "shown"),
    "by_size": CodecRow(by_size(numel=64), HALF_A_STEP, "shown"),
    "chain": CodecRow(chain(TopK(0.1), Int8()), 0.98, "shown"),
    "chain (of three)": CodecRow(chain(TopK(0.5), RandomK(0.9, unbiased=False), Truncate16()), 1.0, "turn"),
    "chain (unbiased)": CodecRow(chain(RandomK(0.5), QSGD(bits=8)), 1.1, "turn"),
    "chunked_topk": CodecRow(ChunkedTopK(0.1, chunk=64, bits=None), 0.97),
    "chunked_topk (in long chunks)": CodecRow(ChunkedTopK(0.1, chunk=300, bits=None), 0.97),
    "chunked_topk (in two bits)": CodecRow(ChunkedTopK(0.1, chunk=64), 1.0, "shown"),
    "chunked_topk (signs)": CodecRow(ChunkedTopK(0.5, chunk=32, bits=1), 1.0, "shown"),
    "demo": CodecRow(DeMo(chunk=4, keep=2), (1 - 2 / 16) ** 0.5, "shown"),
    "demo (of one component)": CodecRow(DeMo(chunk=8, keep=1), (1 - 1 / 64) ** 0.5, "shown"),
    "dgc": CodecRow(DGC(0.1), 0.97),
    "error_feedback": CodecRow(error_feedback(TopK(0.1)), 0.97),
    "error_feedback (of signs)": CodecRow(error_feedback(Sign()), (1 - 1 / NUMEL) ** 0.5, "shown"),
    "identity": CodecRow(Identity(), 0.0),
    "int8": CodecRow(Int8(), HALF_A_STEP, "shown"),
    "int8 (stochastic)": CodecRow(Int8("stochastic"), 2 * HALF_A_STEP, "shown"),
    "qsgd": CodecRow(QSGD(), NUMEL**0.5 / (2 * 7), "shown"),
    "qsgd (as in its analysis)": CodecRow(QSGD(bits=8, bucket_size=100, norm="l2"), 10 / 127, "shown"),
    "randomk": CodecRow(RandomK(0.25), 1.8, "turn"),
    "randomk (contractive)": CodecRow(RandomK(0.25, unbiased=False), 1.0, "turn"),
    "sign": CodecRow(Sign(), (1 - 1 / NUMEL) ** 0.5, "shown"),
    "topk": CodecRow(TopK(0.1), 0.97),
    "truncate16": CodecRow(Truncate16(), 2.0**-7),
}
"""Keys are names in CODECS, with a word in brackets where one name has several rows."""


# --- tensors ----------------------------------------------------------------------------------------------------


def raw(tensor: Tensor) -> bytes:
    """The tensor's own bytes, whatever its dtype."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # a single number may have any stride, and no view
    return bytes(flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8).numpy())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every bit, NaNs included."""
    return a.shape == b.shape and a.dtype == b.dtype and raw(a) == raw(b)


def same_payload(a: Payload, b: Payload) -> bool:
    """Equal trees with equal bits."""
    if len(a.parts) != len(b.parts):
        return False
    for one, other in zip(a.parts, b.parts, strict=True):
        if isinstance(one, Payload) or isinstance(other, Payload):
            if not (isinstance(one, Payload) and isinstance(other, Payload) and same_payload(one, other)):
                return False
        elif not same_bits(one, other):
            return False
    return True


def same_tree(a: Any, b: Any) -> bool:
    """Equal nested dicts of tensors and JSON values."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_tree(a[key], b[key]) for key in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_bits(a, b)
    return bool(type(a) is type(b) and a == b)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors of a state."""
    if isinstance(tree, dict):
        for node in tree.values():
            yield from tensors_in(node)
    elif isinstance(tree, Tensor):
        yield tree


def numbered(value: float) -> Payload:
    """A payload that can be told from others."""
    return Payload((torch.tensor([value], dtype=torch.float32),))


def number_in(payload: Payload) -> float:
    """What :func:`numbered` put there."""
    (tensor,) = payload.iter_tensors()
    return float(tensor)


def decode(frames: Sequence[Frame], *, max_nbytes: int) -> Message:
    """The message that :func:`farflung.comm.wire.encode` has made frames of.

    Raises:
      WireError: they are none.
    """
    if not frames:
        raise WireError("no head")
    head = read_head(frames[0], max_nbytes)
    if [len(frame) for frame in frames[1:]] != head.layout.large_nbytes:
        raise WireError("other frames than described")
    large = [torch.frombuffer(frame, dtype=torch.uint8).clone() for frame in frames[1:]]
    return head.build_message(large)


# --- drivers ----------------------------------------------------------------------------------------------------


class Driver:
    """The least that drives tasks: a queue emptied by hand."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()

    def schedule(self, fn: Callable[[], None]) -> None:
        self.queue.append(fn)

    def run(self) -> None:
        while self.queue:
            self.queue.popleft()()


def in_virtual_time(
    size: int,
    body: Callable[[Runtime], Coroutine[Pending[Any], None, T]],
    link: LinkModel | None = None,
) -> tuple[list[T], float]:
    """Runs ``body`` on every rank; the results, and the virtual seconds it took."""
    world = VirtualWorld(size, link)
    results = world.run([body(runtime) for runtime in world.runtimes])
    return results, world.clock.time()


def in_threads(*fns: Callable[[], T]) -> list[T | Exception]:
    """Runs each function on a thread of its own, to the end; what it returned or raised."""
    results: list[T | Exception] = [RuntimeError("it never ended")] * len(fns)

    def call(index: int, fn: Callable[[], T]) -> None:
        try:
            results[index] = fn()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=item, daemon=True) for item in enumerate(fns)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    return results


def joined(size: int, store: dist.Store | None = None, **settings: Any) -> list[WallRuntime]:
    """``size`` replicas of one process that have found each other; close them with :func:`parted`."""
    meeting = store or dist.HashStore()
    options: dict[str, Any] = {"deadline_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S, **settings}
    found = in_threads(
        *(lambda rank=rank: WallRuntime(rank, size, meeting, **options) for rank in range(size))
    )
    runtimes = [runtime for runtime in found if isinstance(runtime, WallRuntime)]
    if len(runtimes) < size:
        parted(runtimes)
        raise next(error for error in found if isinstance(error, Exception))
    return runtimes


def impostor(store: dist.Store, rank: int, size: int, published: str) -> Callable[[], object]:
    """What comes to a store as one of ``size`` replicas, publishes something there, and does nothing else."""
    until = time.monotonic() + PATIENCE_S
    return lambda: Rendezvous(store, "run", rank, range(size), until).exchange(published)


def parted(runtimes: Sequence[WallRuntime]) -> None:
    """Closes runtimes side by side, as processes would."""
    for result in in_threads(*(runtime.close for runtime in runtimes)):
        if isinstance(result, Exception):
            raise result


class Cluster:
    """Replicas on real sockets, kept from test to test: one group for each size, made when it is first asked for."""

    def __init__(self) -> None:
        self._groups: dict[int, list[WallRuntime]] = {}
        self._exchange = 0

    def run(self, size: int, body: Callable[[Runtime, int], Coroutine[Pending[Any], None, T]]) -> list[T]:
        """Runs ``body(runtime, exchange)`` on every rank's communication thread; their results in rank order."""
        if any(runtime.session.mailbox.ended.error for runtime in self._groups.get(size, [])):
            parted(self._groups.pop(size))
        if size not in self._groups:
            self._groups[size] = joined(size)
        self._exchange += 1
        pendings = [runtime.launch(body(runtime, self._exchange)) for runtime in self._groups[size]]
        return [pending.wait() for pending in pendings]

    def close(self) -> None:
        for group in self._groups.values():
            parted(group)


def tag(exchange: int = 1, part: int = 0, hop: int = 0) -> Tag:
    """A tag."""
    return Tag(exchange, part, hop)


class Group:
    """Members of a view in one process, all driven by the test's own thread, on a clock set by hand.

    Args:
      size: how many.
      settings: of each.
      about: options of their views.
      hidden: ranks that have no way in.
      options: of their transports.
    """

    def __init__(
        self,
        size: int,
        settings: list[dict[str, Any]] | None = None,
        *,
        about: dict[str, Any] | None = None,
        hidden: Collection[int] = (),
        **options: Any,
    ) -> None:
        self.clock = 0.0
        given = settings or [{}] * size
        ways = [{"advertise": UNREACHABLE} if rank in hidden else {} for rank in range(size)]
        transports = [TcpTransport(rank, size, **{**options, **way}) for rank, way in enumerate(ways)]
        self.take(transports, given, **(about or {}))

    def take(
        self, transports: Sequence[TcpTransport], settings: Sequence[dict[str, Any]], **about: Any
    ) -> None:
        """Makes members of these."""
        self.transports, size = list(transports), len(transports)
        self.views = [
            ViewSession(one, size, read_clock=lambda: self.clock, settings=told, **about)
            for one, told in zip(transports, settings, strict=True)
        ]
        self.comms = [WallCommunicator(view) for view in self.views]
        self._open = list(self.views)

    @property
    def peers(self) -> list[Peer]:
        """As the store would name them."""
        return [Peer.from_json(one.local_peer.to_json()) for one in self.transports]

    def meet(self) -> Group:
        """Connects all that have not been connected yet, and waits for them to greet each other."""
        for view in self.views:
            if not view.members.remaining_ranks:
                view.members.connect(self.peers)
        self.until(lambda: all(view.members.ready.is_done for view in self.views))
        return self

    def until(self, condition: Callable[[], bool]) -> None:
        """Lets them work in turn until something has happened."""
        late = time.monotonic() + PATIENCE_S
        while time.monotonic() < late:
            # On loopback what is sent is there at once, so a wait is for what a thread does.
            for wait_s in (*[0.0] * 20, 0.01 / len(self._open)):
                if condition():
                    return
                for view in self._open:
                    view.transport.poll(wait_s)
        raise AssertionError("it never happened")

    def exchange(self, number: int, src: int = 0, dst: int = 1) -> None:
        """A message each way; whatever was sent before on these connections has then arrived."""
        for a, b in ((src, dst), (dst, src)):
            self.comms[a].send(numbered(number), b, tag(number))
            arrived = self.comms[b].recv(a, tag(number))
            self.until(partial(getattr, arrived, "is_done"))
            assert number_in(arrived.result()) == number

    def raw(self, src: int, dst: int, *frames: bytes) -> None:
        """Any bytes at all from one member to another, as the frames of a message."""
        self.transports[src].send(dst, frames)

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        """What a replica does at its end, on a clock that jumps: it waits for nobody."""
        view = self.views[rank]
        view.read_clock = itertools.count(0.0, 1e6).__next__
        view.leave(error)
        self.close(view)

    def close(self, *views: ViewSession) -> None:
        """Closes some, or all that are still open."""
        for view in views or tuple(self._open):
            self._open.remove(view)
            view.close()


def admitted(runtime: WallRuntime, store: dist.Store, rank: int, *, join_s: float) -> Pending[None]:
    """Lets a replica in that comes by :func:`coming_late`."""
    store.set(f"late/{runtime.comm.rank}", runtime.session.transport.local_peer.to_json())

    def published() -> bytes:
        store.wait([f"late/{rank}"], timedelta(seconds=join_s))
        return store.get(f"late/{rank}")

    async def lets_in() -> None:
        await runtime.admit(Peer.from_json(await runtime.run_in_executor(published)), join_s)

    return runtime.launch(lets_in())


def coming_late(store: dist.Store, hosts: Collection[int]) -> Callable[[Peer], list[Peer]]:
    """How a replica comes to others that are together already, and let it in by :func:`admit_device`."""

    def come(me: Peer) -> list[Peer]:
        store.set(f"late/{me.rank}", me.to_json())
        return [*(Peer.from_json(store.get(f"late/{rank}")) for rank in hosts), me]

    return come
