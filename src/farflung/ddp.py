"""Runs any codec or reducer as a communication hook of DistributedDataParallel."""

import atexit
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from typing_extensions import override

from farflung._torch import get_current_node, get_graph_task_id, queue_backward_callback
from farflung.codecs import CODECS
from farflung.comm import COLLECTIVES, Endpoint, ExchangeChannel, Purpose
from farflung.config import BUCKET_NBYTES
from farflung.engine import Engine, GradientBuckets, StepMetadata
from farflung.engine.buckets import GradientBucket, build_buckets
from farflung.engine.placement import record_stream
from farflung.errors import CheckpointError, ConfigError, RunLost, Unsupported
from farflung.options import check_integer
from farflung.reducers import REDUCERS, CodecReducer, list_summed_nbytes
from farflung.schedules import Synchronous
from farflung.spec import build, format_spec
from farflung.tasks import Pending
from farflung.types import Bucket, Codec, Reducer, State
from farflung.wall import WallRuntime, find_group_address

__all__ = ["TRIAL_STEPS", "HookState", "ddp_hook", "exchange"]

_CONNECT_TIMEOUT_S = 60.0
_NO_METADATA = torch.zeros(0, dtype=torch.float64)
_UNEQUAL_UNUSED = (
    "DDP left out other parameters on one rank than on another: with skip_all_reduce_unused_params all ranks have to "
    "use the same parameters"
)
_WARM_UP = (True, True, False)
"""Values of :attr:`HookState.is_active` in the first steps, which create buckets and warm up connections."""
_NUM_PAIRS = 5
"""Number of steps of either kind that are timed afterwards, in pairs."""
_MAX_SLOWER_PAIRS = 1
"""Largest number of pairs in which the hook may be slower and still stay active."""
TRIAL_STEPS = len(_WARM_UP) + 2 * _NUM_PAIRS
"""Number of steps that alternate between the hook and DDP's own all-reduce with ``fall_back_if_slower``."""


def ddp_hook(
    compression: str | Codec | Reducer,
    *,
    group: dist.ProcessGroup | None = None,
    fall_back_if_slower: bool = False,
    bucket_nbytes: int = BUCKET_NBYTES,
    seed: int = 0,
    deadline_s: float = 60.0,
    endpoint: Endpoint = Endpoint(),
) -> "tuple[HookState, Callable[[HookState, dist.GradBucket], torch.futures.Future[Tensor]]]":
    """Builds a DDP communication hook and its state from a codec or reducer.

    Register it by ``ddp.register_comm_hook(*farflung.ddp_hook("int8"))``. All ranks of the group must call this before
    the first backward pass. They connect here, or with the first bucket if there is no process group yet. Gradients
    travel over farflung's own connections, which are encrypted between machines.

    If an exchange fails, ``backward()`` raises farflung's own error, :attr:`HookState.error`. Start again from a
    checkpoint with a new DDP, without the rank in ``error.rank``. State and hook can be saved: see :class:`HookState`.

    Args:
      compression: Codec or reducer, or its name with options: ``"error_feedback(topk(0.01))"``, ``"powersgd(rank=2)"``.
      group: Process group of DDP; the default group if not given.
      bucket_nbytes: Size at which one of the hook's own buckets is closed.
      fall_back_if_slower: Enables a fallback to DDP's own all-reduce unless the hook is clearly faster.
      seed: Seed of random codecs, equal on all ranks.
      deadline_s: Seconds without any message after which a replica that is waited for counts as lost. One that answers
        may be busy for ten times as long.
      endpoint: Settings of this replica's connections.

    Returns:
      State of the hook, which is saved by ``state_dict`` and ``load_state_dict``, and the hook function.

    Raises:
      UnknownName: No codec or reducer has this name.
      ConfigError: An option is out of range, or the argument is neither a codec nor a reducer.
      Unsupported: The reducer uses collective ``native``.
      ProtocolError: Ranks have different settings; names the setting.
      DeadlinePassed: A rank did not connect in time.
    """
    reducer = _build_reducer(compression)
    check_integer("ddp_hook", "bucket_nbytes", bucket_nbytes, 1)
    state = _make_state(
        _Settings(reducer, fall_back_if_slower, bucket_nbytes, seed, deadline_s, endpoint), group
    )
    if dist.is_initialized():
        state.connect()
    return state, exchange


class _Settings(NamedTuple):
    """Arguments of :func:`ddp_hook` that copies of its state keep."""

    reducer: Reducer
    fall_back_if_slower: bool
    bucket_nbytes: int
    seed: int
    deadline_s: float
    endpoint: Endpoint


def _make_state(settings: _Settings, group: dist.ProcessGroup | None = None) -> "HookState":
    """Creates a state that is not connected to the other ranks yet."""
    reducer, fall_back_if_slower, bucket_nbytes, seed, deadline_s, endpoint = settings

    def connect() -> tuple[WallRuntime, dist.ProcessGroup]:
        process_group = group or dist.group.WORLD
        assert process_group is not None
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        store = c10d._get_process_group_store(process_group)
        runtime = WallRuntime(
            rank,
            size,
            store,
            meeting="ddp_hook",
            endpoint=endpoint.resolve_interface(partial(find_group_address, store if size > 1 else None)),
            settings={
                "ddp_hook": format_spec(reducer),
                "fall_back_if_slower": fall_back_if_slower,
                "bucket_nbytes": bucket_nbytes,
                "seed": seed,
            },
            deadline_s=deadline_s,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
        )
        return runtime, process_group

    return HookState(settings, connect)


def exchange(state: "HookState", bucket: dist.GradBucket, *sharded: Tensor) -> torch.futures.Future[Tensor]:
    """Exchanges one of DDP's buckets, as its communication hook.

    Args:
      state: State of the hook.
      bucket: Bucket of DDP.
      sharded: Additional argument that FSDP passes to its hooks; refused.

    Returns:
      Future of the mean over the ranks, in the bucket's own memory.

    Raises:
      Unsupported: The argument is not a bucket of DDP, for example because FSDP called this.
    """
    if sharded or not isinstance(bucket, dist.GradBucket):
        raise Unsupported(
            "ddp_hook is for DistributedDataParallel with its own reducer: FSDP hands its hooks shards, and "
            "optimize_ddp='python_reducer' single gradients, which it cannot carry"
        )
    return state.handle_bucket(bucket)


@dataclass(eq=False)
class _PendingBucket:
    """Bucket of DDP whose means have not all arrived."""

    buffer: Tensor
    index: int
    parameters: Sequence[Tensor]
    grads: Sequence[Tensor]
    future: torch.futures.Future[Tensor]

    def release(self) -> None:
        """Completes the bucket's future, so that DDP continues."""
        if not self.future.done():
            self.future.set_result(self.buffer)


@dataclass(slots=True, eq=False)
class _HookBucket(GradientBucket):
    """Bucket of the hook's own, which copies DDP's gradients in and their means back."""

    grads: list[Tensor] = field(default_factory=list)
    """Gradients of DDP in the current pass."""
    grad_views: list[Tensor] = field(default_factory=list)
    """Views of the flat tensor, one for each gradient."""

    @override
    def load_gradient(self, mean: Tensor) -> None:
        if mean.data_ptr() != self.gradient.data_ptr():
            self.gradient.copy_(mean)
        torch._foreach_copy_(self.grads, self.grad_views)
        self.grads, self.grad_views = [], []


class _HookBuckets(GradientBuckets):
    """Fixed buckets of DDP's parameters.

    Args:
      parameters: Parameters in the order in which the model registered them.
      bucket_nbytes: Size at which a bucket is closed.
    """

    def __init__(self, parameters: Sequence[Any], bucket_nbytes: int) -> None:
        self.hook_buckets = [
            _HookBucket(b.index, b.gradient, b.names, b.parameters, b.views, b.orders)
            for b in build_buckets([("", parameter) for parameter in parameters], bucket_nbytes)
        ]
        self._buckets: list[GradientBucket] = [*self.hook_buckets]
        self.buckets = tuple(Bucket(bucket.index, bucket.spec) for bucket in self.hook_buckets)
        self.locations: dict[Tensor, tuple[_HookBucket, int]] = {
            parameter: (bucket, place)
            for bucket in self.hook_buckets
            for place, parameter in enumerate(bucket.parameters)
        }


class HookState:
    """State of the hook between steps, and its connections.

    A copy by ``copy.deepcopy``, or by ``torch.save`` and ``torch.load``, has the settings and the codec's state. It has
    no connections and connects to the other ranks with its first bucket, in the default process group. If the copy is
    used on another rank, local codec state, such as residuals, starts afresh. DDP does not register the hook with a
    copy of itself: call ``register_comm_hook`` with the copied state.

    Args:
      settings: Arguments of :func:`ddp_hook`.
      connect: Function that connects to the other ranks and returns this rank's runtime and the process group.
    """

    def __init__(
        self, settings: _Settings, connect: Callable[[], tuple[WallRuntime, dist.ProcessGroup]]
    ) -> None:
        self.step = 0
        """Number of backward passes exchanged so far."""
        self.is_active = True
        """True if the hook's reducer exchanges this step's gradients, False if DDP's own all-reduce does."""
        self.error: BaseException | None = None
        """First error of an exchange, after which nothing is exchanged."""
        self._settings, self._reducer, self._connect = settings, settings.reducer, connect
        self._runtime: WallRuntime
        self._is_connected = False
        self._buckets: _HookBuckets | None = None
        self._engine: Engine
        self._pending_buckets: list[_PendingBucket] = []
        """Buckets of DDP in the current pass."""
        self._last_index = -1
        """Index of the last bucket that DDP passed to the hook in the current pass; -1 after the last one."""
        self._task = -1
        """Id of the autograd task that has a callback at its end."""
        self._is_watched = False
        """True if the current pass fails unless its next bucket comes in time."""
        self._pending_averages: list[Pending[None]] = []
        """Uncompressed exchanges of DDP's buckets, before the hook has buckets of its own."""
        self._averaged_nbytes = 0
        self._loaded_state: State | None = None
        self._is_closed = False
        self._group: dist.ProcessGroup
        self._turns = self._iter_turns()

    @property
    def sent_nbytes(self) -> int:
        """Number of payload bytes sent by this rank so far."""
        return self._averaged_nbytes + (0 if self._buckets is None else self._engine.sent_nbytes)

    def connect(self) -> None:
        """Connects to the other ranks unless connected; the first bucket does so too."""
        if not self._is_connected:
            self._runtime, self._group = self._connect()
            self._is_connected = True
            atexit.register(self.close)

    def handle_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Starts the exchange of one of DDP's buckets and returns the future of its mean."""
        buffer = bucket.buffer()
        if buffer.layout is not torch.strided or any(p.is_complex() for p in bucket.parameters()):
            raise Unsupported(
                "ddp_hook carries neither sparse nor complex gradients: give embeddings sparse=False, and make a "
                "complex parameter's torch.view_as_real the parameter"
            )
        self.connect()
        task, is_last = get_graph_task_id(), bucket.is_last()
        # The first pass of a static graph ends with one call per bucket, all with the same index.
        is_delayed = task >= 0 and get_current_node() is None and not is_last
        if self._last_index < 0 or (bucket.index() <= self._last_index and not is_delayed):
            self._begin_step()
        self._last_index = bucket.index()
        if task not in (-1, self._task):
            self._task = task
            queue_backward_callback(self._finish_pass)
        future = (
            self._add_ddp_bucket(bucket, is_delayed)
            if self.is_active
            else allreduce_hook(self._group, bucket)
        )
        if is_last:
            self._complete_pass()
            # Happens in DDP's join() on a rank without data, or if DDP waits in the same callback.
            if task < 0 or get_current_node() is None:
                self._finish_pass()
        return future

    def _add_ddp_bucket(self, bucket: dist.GradBucket, is_after_pass: bool) -> torch.futures.Future[Tensor]:
        """Adds one of DDP's buckets to the exchanges of this step and returns the future of its mean."""
        buffer = bucket.buffer()
        devices: list[int | str | torch.device] = [] if buffer.device.type == "cpu" else [buffer.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        grads = [grad.detach() for grad in bucket.gradients()]  # create_graph=True gives them a graph
        arrival = _PendingBucket(buffer, bucket.index(), bucket.parameters(), grads, future)
        self._pending_buckets.append(arrival)
        if is_after_pass:
            self._average_bucket(arrival)
        elif self._buckets is not None:
            self._fill_buckets(arrival)
        if self.error is not None:
            arrival.release()  # DDP may wait for it before the pass ends
        return future

    def _complete_pass(self) -> None:
        """Sends the remaining buckets after the last one of the pass, with zeros for unused parameters."""
        self._last_index = -1
        if not self.is_active:
            return
        if self._buckets is None and self._pending_buckets and not self._pending_averages:
            self._create_buckets()
            for arrival in self._pending_buckets:
                self._fill_buckets(arrival)
        for bucket in () if self._buckets is None else self._buckets.hook_buckets:
            if bucket.missing_places:
                self._send_bucket(bucket, sorted(bucket.missing_places))

    def _finish_pass(self) -> None:
        """Applies the means of the pass, before DDP waits for them and replaces errors by its own."""
        if self._last_index >= 0:
            if get_current_node() is not None:  # a reentrant checkpoint ends, and the pass continues
                self._watch_pass()
                return
            self._complete_pass()
        try:
            averages, self._pending_averages = self._pending_averages, []
            self._wait(averages)
            if self._buckets is not None and self._engine.is_round_open:
                self._runtime.drive(self._engine.merge_gradients())
                self._runtime.drive(self._engine.finish_round(has_updated=True))
                if self._engine.unused.is_unequal:
                    raise ConfigError(f"ddp_hook: in step {self.step - 1} {_UNEQUAL_UNUSED}")
        except BaseException as error:
            self.error = self.error or error
            raise self.error from None
        finally:
            arrivals, self._pending_buckets = self._pending_buckets, []
            _release_buckets(arrivals)

    def _wait(self, exchanges: Iterable[Pending[None]]) -> None:
        for pending in exchanges:
            pending.wait_until_done()
            self.error = self.error or pending.error
        self._raise_error()

    def _watch_pass(self) -> None:
        """Sets a deadline for the next bucket, since DDP waits forever if it skipped the remaining ones."""
        get_current_node().register_hook(self._raise_error)
        if not self._is_watched:
            self._is_watched = True
            self._runtime.launch(self._await_next_bucket())

    async def _await_next_bucket(self) -> None:
        deadline_s = self._settings.deadline_s
        while self._last_index >= 0:
            position = (self.step, self._last_index)
            await self._runtime.sleep_until(self._runtime.read_clock() + deadline_s)
            if position == (self.step, self._last_index):
                self.error = Unsupported(
                    f"ddp_hook: after a reentrant checkpoint no gradient came for {deadline_s:g} s. Where DDP has "
                    "skip_all_reduce_unused_params, give torch.utils.checkpoint use_reentrant=False"
                )
                _release_buckets(self._pending_buckets)
                break
        self._is_watched = False

    def _raise_error(self, *_: object) -> None:
        if self.error is not None:
            raise self.error

    def state_dict(self) -> State:
        """Returns the codec's state of this rank; each rank saves its own, and not during a backward pass."""
        if self._buckets is None:
            return self._loaded_state or {"step": self.step, "parameters": {}}
        if self._is_closed:
            return self._runtime.drive(self._snapshot())
        return self._runtime.launch(self._snapshot()).wait()

    def load_state_dict(self, state: State) -> None:
        """Restores a state from :meth:`state_dict` of the same rank.

        Raises:
          CheckpointError: The state is of another model, or not of a hook; raised here or in the first backward pass.
        """
        required_keys = {"step", "parameters", *(("shared", "local") if state.get("parameters") else ())}
        if missing_keys := required_keys - state.keys():
            raise CheckpointError(f"this is no state of the hook: it lacks {', '.join(sorted(missing_keys))}")
        self.step, self._loaded_state = state["step"], state
        if self._buckets is not None:
            self._runtime.launch(self._restore()).wait()

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        state = self.state_dict()
        if self._buckets is not None:
            state["rank"] = self._runtime.comm.rank
        return _make_state, (self._settings,), state

    __setstate__ = load_state_dict

    def close(self, error: BaseException | None = None) -> None:
        """Disconnects from the other ranks; called at the end of the process at the latest.

        Args:
          error: Error of this rank that is reported to the other ranks, if any.
        """
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self.close)
            if self._is_connected:
                self._runtime.close(error)

    # --- one step ---------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if self._pending_buckets:
            rank = self._runtime.comm.rank
            raise RunLost(
                f"the backward pass of step {self.step - 1} broke off on rank {rank} while others took its gradients; "
                "start again from a checkpoint"
            )
        self.step += 1
        self._runtime.events += 1
        if self._settings.fall_back_if_slower:
            self.is_active = next(self._turns)
        if self.is_active and self._buckets is not None:
            self._begin_round()

    def _begin_round(self) -> None:
        assert self._buckets is not None
        for bucket in self._buckets.hook_buckets:
            bucket.missing_places = set(range(len(bucket.parameters)))
        self._engine.begin_round(self.step - 1, StepMetadata(0.0, 1.0))

    def _iter_turns(self) -> Iterator[bool]:
        """Yields :attr:`is_active` of each step; a step lasts from its first bucket to the next step's first."""
        yield from _WARM_UP
        slowdowns_s = torch.zeros(_NUM_PAIRS, dtype=torch.float64)
        for turn in range(_NUM_PAIRS):
            for is_active in (True, False):
                begin_s = self._read_clock()
                yield is_active
                slowdowns_s[turn] += (self._read_clock() - begin_s) * (1 if is_active else -1)
        summed_s = self._runtime.launch(self._sum_over_ranks(slowdowns_s)).wait()
        is_faster = int((summed_s < 0).sum()) >= _NUM_PAIRS - _MAX_SLOWER_PAIRS
        while True:
            yield is_faster

    def _read_clock(self) -> float:
        assert self._buckets is not None
        device = self._buckets[0].gradient.device
        if device.type != "cpu":
            torch.cuda.current_stream(device).synchronize()
        return perf_counter()

    async def _sum_over_ranks(self, values: Tensor) -> Tensor:
        channel = ExchangeChannel(self._runtime.comm, Purpose.DECISION.build_exchange_id(self.step), 0)
        total, _ = await channel.get_collective("direct")(channel, values, _NO_METADATA)
        return total

    async def _check_shapes(self, shapes: object) -> None:
        if not _are_equal(await self._sum_over_ranks(_compute_checksums(shapes)), self._runtime.comm.size):
            raise ConfigError(f"ddp_hook: in the first backward pass {_UNEQUAL_UNUSED}")

    def _create_buckets(self) -> None:
        """Creates the fixed buckets, with parameters in the order in which the model registered them.

        The first buckets of DDP have parameters in that order, the last bucket first.
        """
        settings, size = self._settings, self._runtime.comm.size
        parameters: list[Any] = [p for arrival in reversed(self._pending_buckets) for p in arrival.parameters]
        shapes = [
            (arrival.index, [tuple(p.shape) for p in arrival.parameters]) for arrival in self._pending_buckets
        ]
        self._wait([self._runtime.launch(self._check_shapes(shapes))])
        self._runtime.limit_messages(parameters)
        buckets = _HookBuckets(parameters, settings.bucket_nbytes)
        self._engine = Engine(self._runtime, buckets, self._reducer, Synchronous(), seed=settings.seed)
        self._engine.round_number = self.step - 1  # earlier rounds exchanged DDP's buckets
        nbytes = list_summed_nbytes(self._reducer, [bucket.spec for bucket in buckets], size)
        self._runtime.resolve_collective(_get_collective(self._reducer), nbytes)
        self._buckets = buckets
        if self._loaded_state is not None:
            self._runtime.launch(self._restore()).wait()
        self._begin_round()

    def _fill_buckets(self, arrival: _PendingBucket) -> None:
        """Copies DDP's bucket into the hook's own buckets and sends those that are full."""
        assert self._buckets is not None
        place_of = self._buckets.locations
        if not place_of.keys() >= set(arrival.parameters):
            error = ConfigError(
                "ddp_hook: this state belongs to another model already; create one for each model. Under "
                "skip_all_reduce_unused_params parameters that were unused in the first backward pass have to stay so"
            )
            self.close(error)
            raise error
        pieces: dict[_HookBucket, tuple[list[Tensor], list[Tensor]]] = {}
        for parameter, grad in zip(arrival.parameters, arrival.grads, strict=True):
            bucket, place = place_of[parameter]
            bucket.missing_places.remove(place)
            grads, places = pieces.setdefault(bucket, ([], []))
            grads.append(grad)
            places.append(bucket.views[place])
        for bucket, (grads, places) in pieces.items():
            torch._foreach_copy_(places, grads)
            bucket.grads += grads
            bucket.grad_views += places
        if arrival.buffer.requires_grad:  # as with PyTorch's hooks, the graph covers this rank's share
            with torch.enable_grad():
                arrival.buffer.div_(self._runtime.comm.size)
        for bucket in pieces:
            if not bucket.missing_places:
                self._send_bucket(bucket, ())

    def _send_bucket(self, bucket: _HookBucket, unused_places: Sequence[int]) -> None:
        """Sends a bucket, with zeros in the places of parameters that DDP skipped."""
        bucket.missing_places = set()
        bucket.zero_missing_gradients(unused_places)
        self._engine.handle_bucket(bucket.index)

    def _average_bucket(self, arrival: _PendingBucket) -> None:
        """Averages one of DDP's buckets uncompressed, before the hook has buckets of its own."""
        values = arrival.buffer.detach().clone()
        number = len(self._pending_averages)
        size = self._runtime.comm.size
        channel = ExchangeChannel(self._runtime.comm, Purpose.STEP.build_exchange_id(self.step - 1), number)
        wait_until_filled = record_stream(values.device)
        divides_first = values.dtype == torch.float16  # whose sums may overflow

        async def exchange() -> None:
            wait_until_filled()
            summand = values.mul_(1 / size) if divides_first else values
            total, _ = await channel.get_collective("direct")(channel, summand, _NO_METADATA)
            arrival.buffer.detach().copy_(total if divides_first else total.div_(size))
            self._averaged_nbytes += channel.sent_nbytes
            arrival.release()

        self._pending_averages.append(self._runtime.launch(exchange()))

    # --- checkpoints ------------------------------------------------------------------------------------------

    async def _snapshot(self) -> State:
        assert self._buckets is not None
        shared_state, local_state = self._engine.reducer_states.state_dict()
        parameters = {str(bucket.index): bucket.layout for bucket in self._buckets}
        return {"step": self.step, "parameters": parameters, "shared": shared_state, "local": local_state}

    async def _restore(self) -> None:
        assert self._loaded_state is not None
        assert self._buckets is not None
        state, self._loaded_state = self._loaded_state, None
        if not state["parameters"]:
            return
        if {str(bucket.index): bucket.layout for bucket in self._buckets} != state["parameters"]:
            raise CheckpointError("ddp_hook: this state was made with another model")
        rank = self._runtime.comm.rank
        local_state = state["local"] if state.get("rank", rank) == rank else {}
        self._engine.reducer_states.check_local_state(local_state)
        self._engine.reducer_states.load_state_dict(state["shared"], local_state)


def _compute_checksums(value: object) -> Tensor:
    """Returns a checksum and its square, whose sums over the ranks show if the value is equal on all."""
    checksum = zlib.crc32(repr(value).encode()) % 2**20
    return torch.tensor([checksum, checksum**2], dtype=torch.float64)


def _are_equal(sums: Tensor, size: int) -> bool:
    """Returns True if the checksums of all ranks are equal, so that their variance is zero."""
    total, squares = sums.tolist()
    return bool(total**2 == size * squares)


def _release_buckets(buckets: Iterable[_PendingBucket]) -> None:
    """Completes the futures of buckets after an error, so that DDP continues."""
    for arrival in buckets:
        arrival.release()


def _get_collective(reducer: Reducer) -> str:
    """Returns the name of the reducer's collective, by default ``direct``."""
    return getattr(reducer, "collective", "direct")


def _build_reducer(compression: str | Codec | Reducer) -> Reducer:
    candidate: Any = compression
    if isinstance(compression, str):
        candidate = build("codec or reducer", compression, CODECS | REDUCERS)
    if hasattr(candidate, "encode"):
        candidate = CodecReducer(candidate)
    if not isinstance(candidate, Reducer):
        raise ConfigError(f"ddp_hook: {compression!r} is neither a codec nor a reducer")
    if COLLECTIVES[_get_collective(candidate)].is_native:
        raise Unsupported(
            "ddp_hook: gradients travel over connections of its own: use collective direct or ring"
        )
    reducer: Reducer = candidate
    return reducer
