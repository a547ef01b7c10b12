"""Runs any codec or reducer as a communication hook of DistributedDataParallel."""

import atexit
import zlib
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from typing_extensions import override

from farflung._torch import after_backward, current_node, graph_task_id
from farflung.codecs import CODECS
from farflung.comm import COLLECTIVES, Endpoint, ExchangeChannel, Purpose
from farflung.config import BUCKET_NBYTES
from farflung.errors import CheckpointError, ConfigError, RunLost, Unsupported
from farflung.options import whole_option
from farflung.reducers import REDUCERS, CodecReducer, summed_nbytes
from farflung.replica.buckets import Filling, fillings
from farflung.replica.slots import Slots
from farflung.spec import build, text_of
from farflung.tasks import Pending
from farflung.types import Codec, Contribution, Reducer, State
from farflung.wall import WallRuntime, interface_to_master

__all__ = ["DECIDED_AFTER", "HookState", "ddp_hook", "exchange"]

_JOIN_S = 60.0
_NO_RIDER = torch.zeros(0, dtype=torch.float64)
_UNLIKE = (
    "DDP left out other parameters on one rank than on another: with skip_all_reduce_unused_params all ranks have to "
    "use the same parameters"
)
_WARM_UP = (True, True, False)
"""Whether the hook carries each of the first steps, in which buckets are laid out and connections find their rate."""
_TURNS = 5
"""How many steps of either kind are timed after those, in pairs."""
_EXCEPTIONS = 1
"""In how many pairs the hook may be the slower one and stays nevertheless."""
DECIDED_AFTER = len(_WARM_UP) + 2 * _TURNS
"""How many steps take turns where the hook may fall back on DDP's own all-reduce."""


def ddp_hook(
    how: str | Codec | Reducer,
    *,
    group: dist.ProcessGroup | None = None,
    fall_back: bool = False,
    bucket_nbytes: int = BUCKET_NBYTES,
    seed: int = 0,
    deadline_s: float = 60.0,
    endpoint: Endpoint = Endpoint(),
) -> "tuple[HookState, Callable[[HookState, dist.GradBucket], torch.futures.Future[Tensor]]]":
    """A codec or reducer as a communication hook: ``ddp.register_comm_hook(*farflung.ddp_hook("int8"))``.

    All ranks of the group call it, before the first backward pass. The process group is where they meet: here, or with
    the first bucket where there is none yet. Gradients travel over farflung's own connections beside it, which carry
    payloads of any kind, cost one way of latency where the backend's collectives cost several, and are encrypted
    between machines. Ranks with unlike settings are found out when they meet, by name.

    An exchange that fails makes ``backward()`` raise farflung's own error, :attr:`HookState.error`::

        try:
            loss.backward()
        except farflung.errors.PeerLost as error:
            ...  # start again from a checkpoint, without error.rank and with a new DDP

    What DDP sends by itself, such as buffers before a forward pass, goes by the process group. Where that fails first,
    the error is the group's ``RuntimeError``.

    Gradients are regrouped into buckets that never change, about as large as DDP's. So when DDP rebuilds its own
    after the first step, residuals and whatever else a codec remembers of a parameter stay where they are. In the
    first step DDP has a single bucket, and nothing overlaps with the backward pass.

    DDP's ``join()``, ``static_graph``, ``skip_all_reduce_unused_params`` and ``backward(create_graph=True)`` do what
    they do with PyTorch's hooks. A parameter that DDP leaves out in the first backward pass has to stay unused, and
    all ranks have to use the same ones; anything else raises an error on all of them. With ``static_graph`` and
    parameters of several types the first gradients are summed as they are. State and hook can be saved and copied
    with the DDP: see :class:`HookState`.

    Whether a method pays depends on the network. With ``fall_back`` the first 13 steps take turns between it and DDP's
    own all-reduce. All ranks stay with it if it was faster, summed over the ranks, in at least four of the last five
    pairs of steps, and go on with DDP's otherwise; :attr:`HookState.carries` tells. Steps that are timed wait for the
    device. DDP's own all-reduce is not encrypted by farflung; what error feedback holds back when it is chosen is not
    sent.

    Args:
      how: a codec or reducer, or its name with options: ``"error_feedback(topk(0.01))"``, ``"powersgd(rank=2)"``,
        ``"codec(qsgd(), phases='two')"``.
      group: DDP's process group; the default one when not given.
      bucket_nbytes: of the hook's own buckets; a bucket is closed once it holds as many.
      fall_back: leaves gradients to DDP's own all-reduce unless the hook is clearly faster.
      seed: equal on all ranks; what codecs draw from.
      deadline_s: seconds for which a replica that is waited for may be silent before it counts as lost. One that
        answers may be busy for ten times as long.
      endpoint: how this replica connects to the others.

    Returns:
      The state, which holds what the codec remembers and goes into checkpoints by ``state_dict`` and
      ``load_state_dict``, and the hook.

    Raises:
      UnknownName: no such codec or reducer.
      ConfigError: an option out of its range, or something that is neither.
      Unsupported: collective ``native``.
      ProtocolError: ranks with unlike settings.
      DeadlinePassed: a rank did not come.
    """
    reducer = _reducer(how)
    whole_option("ddp_hook", "bucket_nbytes", bucket_nbytes, 1)
    state = _make_state(_Settings(reducer, fall_back, bucket_nbytes, seed, deadline_s, endpoint), group)
    if dist.is_initialized():
        state.meet()
    return state, exchange


class _Settings(NamedTuple):
    """Arguments of :func:`ddp_hook` that a copy of its state has too."""

    reducer: Reducer
    fall_back: bool
    bucket_nbytes: int
    seed: int
    deadline_s: float
    endpoint: Endpoint


def _make_state(settings: _Settings, group: dist.ProcessGroup | None = None) -> "HookState":
    """Makes a state that has not met the other ranks."""
    reducer, fall_back, bucket_nbytes, seed, deadline_s, endpoint = settings

    def meet() -> tuple[WallRuntime, dist.ProcessGroup]:
        found = group or dist.group.WORLD
        assert found is not None
        rank, size = dist.get_rank(found), dist.get_world_size(found)
        store = c10d._get_process_group_store(found)
        runtime = WallRuntime(
            rank,
            size,
            store,
            meeting="ddp_hook",
            endpoint=endpoint.on(partial(interface_to_master, store if size > 1 else None)),
            settings={
                "ddp_hook": text_of(reducer),
                "fall_back": fall_back,
                "bucket_nbytes": bucket_nbytes,
                "seed": seed,
            },
            deadline_s=deadline_s,
            join_s=_JOIN_S,
        )
        return runtime, found

    return HookState(settings, meet)


def exchange(state: "HookState", bucket: dist.GradBucket, *sharded: Tensor) -> torch.futures.Future[Tensor]:
    """The hook: takes one of DDP's buckets; the future holds the mean over the ranks, in the bucket's own memory.

    Args:
      state: of the hook.
      bucket: of DDP.
      sharded: what FSDP gives beside it.

    Raises:
      Unsupported: it is no bucket, as where FSDP calls this.
    """
    if sharded or not isinstance(bucket, dist.GradBucket):
        raise Unsupported(
            "ddp_hook is for DistributedDataParallel with its own reducer: FSDP hands its hooks shards, and "
            "optimize_ddp='python_reducer' single gradients, which it cannot carry"
        )
    return state.take(bucket)


@dataclass(eq=False)
class _Arrival:
    """One of DDP's buckets, until the means of all its gradients are there."""

    buffer: Tensor
    index: int
    parameters: Sequence[Tensor]
    grads: Sequence[Tensor]
    future: torch.futures.Future[Tensor]
    waits_for: int = 0


_Piece: TypeAlias = tuple[Tensor, Tensor]


@dataclass(eq=False)
class _Own:
    """One bucket of the hook's own, and what of it is on the way."""

    index: int
    filling: Filling
    arrivals: list[_Arrival] = field(default_factory=list)
    grads: list[_Piece] = field(default_factory=list)
    """DDP's own gradients, each with its place here."""


class HookState:
    """What the hook keeps from step to step, and the connections it uses.

    A copy, made by ``copy.deepcopy`` or by ``torch.save`` and ``torch.load``, has the settings and what the codec
    remembers. It has no connections, and meets the other ranks with its first bucket, in the default process group.
    On another rank than the one that was copied, a codec begins without what that rank alone remembered, such as
    residuals. DDP registers no hook with a copy of itself: call ``register_comm_hook`` with the copied state.

    Args:
      settings: arguments of :func:`ddp_hook`.
      meet: joins the others; this rank's runtime, and the group that they met in.
    """

    def __init__(
        self, settings: _Settings, meet: Callable[[], tuple[WallRuntime, dist.ProcessGroup]]
    ) -> None:
        self.step = 0
        """Backward passes exchanged so far."""
        self.carries = True
        """Whether gradients go by the reducer in this step, and not by DDP's own all-reduce."""
        self.sent_nbytes = 0
        """Payload bytes sent so far by this rank."""
        self.error: BaseException | None = None
        """The first thing that went wrong in an exchange; nothing is exchanged after it."""
        self._settings, self._reducer, self._meet = settings, settings.reducer, meet
        self._runtime: WallRuntime
        self._met = False
        self._owns: list[_Own] = []
        self._places: dict[Tensor, tuple[_Own, int]] = {}
        self._slots: Slots
        self._carried: dict[int, int] = {}
        """How many buckets of a step have been carried, where some are left."""
        self._waiting: list[_Arrival] = []
        self._index = -1
        """The index of the bucket that DDP handed over last in the pass under way; -1 once all have come."""
        self._task = -1
        """The run of autograd that calls back at its end."""
        self._is_watched = False
        """Whether the pass under way is given up if it does not go on in time."""
        self._launched: dict[int, Pending[None]] = {}
        """The exchanges of the pass under way, by number of the bucket."""
        self._loaded: State | None = None
        self._closed = False
        self._group: dist.ProcessGroup
        self._turns = self._taking_turns()

    def meet(self) -> None:
        """Joins the other ranks, once; by itself with the first bucket."""
        if not self._met:
            self._runtime, self._group = self._meet()
            self._met = True
            atexit.register(self.close)

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.layout is not torch.strided or any(p.is_complex() for p in bucket.parameters()):
            raise Unsupported(
                "ddp_hook carries neither sparse nor complex gradients: give embeddings sparse=False, and make a "
                "complex parameter's torch.view_as_real the parameter"
            )
        self.meet()
        task, is_last = graph_task_id(), bucket.is_last()
        # The first pass of a static graph ends with a call for each bucket, by the same index if there are several.
        is_delayed = task >= 0 and current_node() is None and not is_last
        if self._index < 0 or (bucket.index() <= self._index and not is_delayed):
            self._begin()
        self._index = bucket.index()
        if task not in (-1, self._task):
            self._task = task
            after_backward(self._end)
        future = self._pass_on(bucket, is_delayed) if self.carries else allreduce_hook(self._group, bucket)
        if is_last:
            self._complete()
            if task < 0:  # of a rank that has run out of data, inside DDP's join()
                self._end()
        return future

    def _pass_on(self, bucket: dist.GradBucket, is_delayed: bool) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        devices: list[int | str | torch.device] = [] if buffer.device.type == "cpu" else [buffer.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        grads = [grad.detach() for grad in bucket.gradients()]  # create_graph=True gives them a graph
        arrival = _Arrival(buffer, bucket.index(), bucket.parameters(), grads, future)
        if is_delayed:
            self._average(arrival)
        elif self._owns:
            self._enter(arrival)
        else:
            self._waiting.append(arrival)
        return future

    def _complete(self) -> None:
        """Sends the rest: all buckets of the pass have come, except those that DDP leaves out as unused."""
        self._index = -1
        if not self.carries:
            return
        if self._waiting:
            self._lay_out()
            for waiting in self._waiting:
                self._enter(waiting)
            self._waiting.clear()
        for own in self._owns:
            if own.index not in self._launched:
                absent = own.filling.missing or set(range(len(own.filling.parameters)))
                own.filling.missing = set()
                torch._foreach_zero_([own.filling.views[place] for place in absent])
                self._launch(own, absent)

    def _end(self) -> None:
        """Waits for the exchanges of the pass, before DDP does and turns their error into one of its own."""
        if self._index >= 0:
            if current_node() is not None:  # a reentrant checkpoint ends, and the pass goes on
                self._watch()
                return
            self._complete()
        launched, self._launched = self._launched, {}
        self._wait(launched.values())

    def _wait(self, exchanges: Iterable[Pending[None]]) -> None:
        for pending in exchanges:
            pending.block()
            self.error = self.error or pending.error
        self._raise_error()

    def _watch(self) -> None:
        """Sees to it that the pass goes on: DDP waits already if it left out the buckets after those that have come."""
        current_node().register_hook(self._raise_error)
        if not self._is_watched:
            self._is_watched = True
            self._runtime.launch(self._await_next())

    async def _await_next(self) -> None:
        deadline_s = self._settings.deadline_s
        while self._index >= 0:
            before = (self.step, self._index)
            await self._runtime.sleep_until(self._runtime.now() + deadline_s)
            if before == (self.step, self._index):
                self.error = Unsupported(
                    f"ddp_hook: after a reentrant checkpoint no gradient came for {deadline_s:g} s. Where DDP has "
                    "skip_all_reduce_unused_params, give torch.utils.checkpoint use_reentrant=False"
                )
                _release([arrival for own in self._owns for arrival in own.arrivals])
                break
        self._is_watched = False

    def _raise_error(self, *_: object) -> None:
        if self.error is not None:
            raise self.error

    def state_dict(self) -> State:
        """Returns what the codec remembers of this rank's parameters; each rank keeps its own.

        Not during a backward pass.
        """
        if not self._owns:
            return self._loaded or {"step": self.step, "parameters": {}}
        if self._closed:
            return self._runtime.drive(self._snapshot())
        return self._runtime.launch(self._snapshot()).wait()

    def load_state_dict(self, state: State) -> None:
        """Continues from :meth:`state_dict` of the same rank.

        Raises:
          CheckpointError: of another model, here or in the first backward pass.
        """
        self.step, self._loaded = state["step"], state
        if self._owns:
            self._runtime.launch(self._restore()).wait()

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        memory = self.state_dict()
        if self._owns:
            memory["rank"] = self._runtime.comm.rank
        return _make_state, (self._settings,), memory

    __setstate__ = load_state_dict

    def close(self, error: BaseException | None = None) -> None:
        """Takes leave of the other ranks; by itself at the end of the process.

        Args:
          error: tells them that this rank fails, and why.
        """
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            if self._met:
                self._runtime.close(error)

    # --- one step ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._waiting or any(own.arrivals for own in self._owns):
            rank = self._runtime.comm.rank
            raise RunLost(
                f"the backward pass of step {self.step - 1} broke off on rank {rank} while others took its gradients; "
                "start again from a checkpoint"
            )
        self.step += 1
        self._runtime.events += 1
        self._launched = {}
        if self._settings.fall_back:
            self.carries = next(self._turns)

    def _taking_turns(self) -> Iterator[bool]:
        """Whether the reducer carries each step; a step lasts from the first bucket of one to that of the next."""
        yield from _WARM_UP
        slower = torch.zeros(_TURNS, dtype=torch.float64)
        for turn in range(_TURNS):
            for carries in (True, False):
                begin = self._now()
                yield carries
                slower[turn] += (self._now() - begin) * (1 if carries else -1)
        of_all = self._runtime.launch(self._sum(slower)).wait()
        faster = int((of_all < 0).sum()) >= _TURNS - _EXCEPTIONS
        while True:
            yield faster

    def _now(self) -> float:
        device = self._owns[0].filling.flat.device
        if device.type != "cpu":
            torch.cuda.current_stream(device).synchronize()
        return perf_counter()

    async def _sum(self, values: Tensor) -> Tensor:
        channel = ExchangeChannel(self._runtime.comm, Purpose.DECISION.at(self.step), 0)
        total, _ = await channel.collective("direct")(channel, values, _NO_RIDER)
        return total

    async def _check_equal(self, shapes: object) -> None:
        if not _are_equal(await self._sum(_sample_of(shapes)), self._runtime.comm.size):
            raise ConfigError(f"ddp_hook: in the first backward pass {_UNLIKE}")

    def _lay_out(self) -> None:
        """Buckets that stay, made of the parameters in the order in which the model registered them.

        DDP's first buckets have them in that order, the last bucket first.
        """
        parameters: list[Any] = [p for arrival in reversed(self._waiting) for p in arrival.parameters]
        shapes = [(arrival.index, [tuple(p.shape) for p in arrival.parameters]) for arrival in self._waiting]
        self._wait([self._runtime.launch(self._check_equal(shapes))])
        self._runtime.expect(parameters)
        named = [("", parameter) for parameter in parameters]
        for index, filling in enumerate(fillings(named, self._settings.bucket_nbytes)):
            own = _Own(index, filling)
            self._owns.append(own)
            self._places |= {parameter: (own, place) for place, parameter in enumerate(filling.parameters)}
        specs = {own.index: own.filling.spec for own in self._owns}
        self._slots = Slots(self._reducer, specs, self._settings.seed, self._runtime.comm.rank)
        nbytes = summed_nbytes(self._reducer, specs.values(), self._runtime.comm.size)
        self._runtime.settle_collective(_collective(self._reducer), nbytes)
        if self._loaded is not None:
            self._runtime.launch(self._restore()).wait()

    def _enter(self, arrival: _Arrival) -> None:
        """Spreads DDP's bucket over those of the hook's own; whichever are full then are sent."""
        if not self._places.keys() >= set(arrival.parameters):
            error = ConfigError(
                "ddp_hook: this state belongs to another model already; create one for each model. Under "
                "skip_all_reduce_unused_params parameters that were unused in the first backward pass have to stay so"
            )
            self.close(error)
            raise error
        touched: dict[_Own, list[_Piece]] = {}
        for parameter, grad in zip(arrival.parameters, arrival.grads, strict=True):
            own, place = self._places[parameter]
            if not own.filling.missing:
                own.filling.missing = set(range(len(own.filling.parameters)))
            own.filling.missing.remove(place)
            touched.setdefault(own, []).append((grad, own.filling.views[place]))
        arrival.waits_for = len(touched)
        for own, pieces in touched.items():
            torch._foreach_copy_([view for _, view in pieces], [grad for grad, _ in pieces])
            own.grads += pieces
            own.arrivals.append(arrival)
        if arrival.buffer.requires_grad:  # as with PyTorch's hooks, its graph is that of this rank's share
            with torch.enable_grad():
                arrival.buffer.div_(self._runtime.comm.size)
        for own in touched:
            if not own.filling.missing:
                self._launch(own)

    def _launch(self, own: _Own, absent: Collection[int] = ()) -> None:
        arrivals, pieces, step = own.arrivals, own.grads, self.step - 1
        own.arrivals, own.grads = [], []
        exchange = partial(self._carry, own, pieces, step, sorted(absent))
        self._start(own.index, own.filling.flat.device, exchange, arrivals)

    def _average(self, arrival: _Arrival) -> None:
        """Sends one of DDP's buckets as it is, before there are buckets of the hook's own."""
        arrival.waits_for = 1
        values, number, size = arrival.buffer.detach().clone(), len(self._launched), self._runtime.comm.size
        channel = ExchangeChannel(self._runtime.comm, Purpose.STEP.at(self.step - 1), number)

        divides_first = values.dtype == torch.float16  # whose sums may overflow

        async def exchange() -> None:
            given = values.mul_(1 / size) if divides_first else values
            total, _ = await channel.collective("direct")(channel, given, _NO_RIDER)
            arrival.buffer.detach().copy_(total if divides_first else total.div_(size))
            self.sent_nbytes += channel.sent_nbytes

        self._start(number, values.device, exchange, [arrival])

    def _start(
        self,
        number: int,
        device: torch.device,
        exchange: Callable[[], Coroutine[Pending[Any], None, None]],
        arrivals: Sequence[_Arrival],
    ) -> None:
        """Begins an exchange that some of DDP's buckets wait for."""
        filled = None if device.type == "cpu" else torch.cuda.current_stream(device).record_event()

        async def carry() -> None:
            if filled is not None:
                torch.cuda.current_stream(device).wait_event(filled)
            await exchange()
            for arrival in arrivals:
                arrival.waits_for -= 1
                if not arrival.waits_for:
                    arrival.future.set_result(arrival.buffer)

        def ended(pending: Pending[None]) -> None:
            if pending.error is not None:
                _release(arrivals)

        pending = self._runtime.launch(carry())
        pending.on_done(ended)
        self._launched[number] = pending

    async def _carry(self, own: _Own, pieces: Sequence[_Piece], step: int, absent: Sequence[int]) -> None:
        """The whole of a bucket's exchange; runs on the communication thread, which others go on with meanwhile."""
        channel = ExchangeChannel(self._runtime.comm, Purpose.STEP.at(step), own.index)
        contribution = Contribution(own.filling.flat, 1.0, _sample_of(absent))
        reduced = await self._reducer.reduce(channel, self._slots[own.index], contribution, step=step)
        if not _are_equal(reduced.rider, channel.size):
            raise ConfigError(f"ddp_hook: in step {step} {_UNLIKE}")
        carried = self._carried.pop(step, 0) + 1
        if carried < len(self._owns):
            self._carried[step] = carried
        last = carried == len(self._owns)
        if reduced.learn is not None or (last and reduced.learn_together is not None):
            await self._runtime.aside(partial(self._slots.learn, own.index, reduced, last=last))
        if reduced.mean.data_ptr() != own.filling.flat.data_ptr():
            own.filling.flat.copy_(reduced.mean)
        torch._foreach_copy_([grad for grad, _ in pieces], [view for _, view in pieces])
        self.sent_nbytes += channel.sent_nbytes

    # --- checkpoints ------------------------------------------------------------------------------------------

    async def _snapshot(self) -> State:
        shared, local = self._slots.state_dict()
        parameters = {str(own.index): own.filling.layout for own in self._owns}
        return {"step": self.step, "parameters": parameters, "shared": shared, "local": local}

    async def _restore(self) -> None:
        assert self._loaded is not None
        kept, self._loaded = self._loaded, None
        if not kept["parameters"]:
            return
        if {str(own.index): own.filling.layout for own in self._owns} != kept["parameters"]:
            raise CheckpointError("ddp_hook: this state was made with another model")
        rank = self._runtime.comm.rank
        local = kept["local"] if kept.get("rank", rank) == rank else {}
        self._slots.check_own(local)
        self._slots.load_state_dict(kept["shared"], local)


def _sample_of(value: object) -> Tensor:
    """Returns numbers whose sums over the ranks tell whether the value is equal on all."""
    checksum = zlib.crc32(repr(value).encode()) % 2**20
    return torch.tensor([checksum, checksum**2], dtype=torch.float64)


def _are_equal(sums: Tensor, size: int) -> bool:
    """Returns True, on all ranks alike, if all gave the same sample: only then is the variance zero."""
    total, squares = sums.tolist()
    return bool(total**2 == size * squares)


def _release(arrivals: Iterable[_Arrival]) -> None:
    """Lets DDP go on where there is an error to raise."""
    for arrival in arrivals:
        if not arrival.future.done():
            arrival.future.set_result(arrival.buffer)


def _collective(reducer: Reducer) -> str:
    """The one it asks for; a reducer need not have any."""
    return getattr(reducer, "collective", "direct")


def _reducer(how: str | Codec | Reducer) -> Reducer:
    made: Any = how
    if isinstance(how, str):
        made = build("codec or reducer", how, CODECS | REDUCERS)
    if hasattr(made, "encode"):
        made = CodecReducer(made)
    if not isinstance(made, Reducer):
        raise ConfigError(f"ddp_hook: {how!r} is neither a codec nor a reducer")
    if COLLECTIVES[_collective(made)].by_backend:
        raise Unsupported(
            "ddp_hook: gradients travel over connections of its own: use collective direct or ring"
        )
    reducer: Reducer = made
    return reducer
