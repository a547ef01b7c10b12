"""Exchanges of an elastic run at one member, which are repeated or adopted from others after the loss of members."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from torch import Tensor
from typing_extensions import override

from farflung.comm import ExchangeChannel, ExchangeHandle, Purpose, ResultCodec
from farflung.comm.channel import get_exchange_step
from farflung.errors import PeerFailed, PeerLost, WaitEnded
from farflung.membership.subgroup import Subgroup
from farflung.membership.views import View
from farflung.tasks import Pending
from farflung.trees import pack_tensors, unpack_tensors
from farflung.types import Payload, Tag

if TYPE_CHECKING:
    from farflung.membership.agreement import Agreement

__all__ = ["ExchangeLog", "LoggedExchange", "Result"]

T = TypeVar("T")


class Result(NamedTuple):
    """Result of an exchange, for replicas that follow.

    Args:
      number: Number of the exchange in the run.
      exchange: Number by purpose and step.
      part: Part that the exchange moves.
      begun_step: Last step that had begun when it started.
      content: Packed tensors; see :func:`farflung.trees.pack_tensors`.
    """

    number: int
    exchange: int
    part: int
    begun_step: int
    content: Tensor


@dataclass(eq=False, slots=True)
class LoggedExchange(ExchangeHandle[T], Generic[T]):
    """Exchange that may be repeated; ``number`` counts the exchanges of the run, equally on all members."""

    log: ExchangeLog
    number: int
    exchange: int
    part: int
    make: Callable[[ExchangeChannel], Coroutine[Pending[Any], None, T]] | None = None
    """Coroutine of the exchange; ``None`` once it is complete, so that its contribution is freed at once."""
    result_codec: ResultCodec[T] = field(
        default_factory=lambda: cast("ResultCodec[T]", ResultCodec(tuple, tuple))
    )
    rewind: Callable[[], None] | None = None
    is_last_of_step: bool = False
    begun_step: int = 0
    """Last step that had begun when it started."""
    started_s: float = math.inf
    """Time of the latest attempt or adoption; infinite if there was none."""
    obsolete: list[LoggedExchange[Any]] = field(default_factory=list)
    """Exchanges whose results all members have, once this one is complete."""
    stored_result: tuple[Tensor, ...] | None = None
    """Result for members that lack it; ``None`` while the exchange is not complete on this member."""

    @property
    def step(self) -> int:
        return get_exchange_step(self.exchange)

    @override
    async def wait(self) -> T:
        value = await self.result
        self.log.taken_exchanges.append(self)
        return value

    def to_result(self) -> Result:
        assert self.stored_result is not None
        return Result(
            self.number, self.exchange, self.part, self.begun_step, pack_tensors(self.stored_result)
        )


class ExchangeLog:
    """Log of the pending exchanges of a run, and of the results that another member may lack.

    Args:
      agreement: Agreement of this member.
      first_step: First step of the run.
    """

    def __init__(self, agreement: Agreement, first_step: int) -> None:
        self._agreement, self._roster, self._comm = agreement, agreement.roster, agreement.runtime.comm
        self.step = first_step
        """Last step that has begun on this member."""
        self.taken_exchanges: list[LoggedExchange[Any]] = []
        """Exchanges whose results have been collected since the last start."""
        self.num_started = 0
        """Number of exchanges that have started on this member."""
        self.is_frozen = False
        """True if no exchange becomes complete because the view is ending."""
        self.error: BaseException | None = None
        """Error that all exchanges fail with."""
        self.wait_started: Pending[None] = Pending()
        """Completes once an exchange is waited for."""
        self._exchanges: dict[int, LoggedExchange[Any]] = {}
        self._last_complete = 0
        """Number up to which all exchanges are complete."""
        self._step_ends = {0: first_step - 1}
        """Steps that end with an exchange, by its number."""

    def start(
        self,
        number: int,
        part: int,
        make: Callable[[ExchangeChannel], Coroutine[Pending[Any], None, T]],
        result_codec: ResultCodec[T],
        *,
        rewind: Callable[[], None] | None = None,
        is_last_of_step: bool = False,
    ) -> LoggedExchange[T]:
        """Starts an exchange, or follows it with the results of others; see :func:`farflung.comm.start_exchange`."""
        if self._agreement.is_joining:
            return self._agreement.joiner.follow_exchange(number, part, make, result_codec)
        self.num_started += 1
        drops, self.taken_exchanges = self.taken_exchanges, []
        logged = LoggedExchange(
            *(ExchangeChannel(self._comm, number, part), Pending[T](), self, self.num_started, number, part),
            make, result_codec, rewind, is_last_of_step, begun_step=self.step, obsolete=drops,
        )  # fmt: skip
        self._agreement.launch(self._register(logged))
        return logged

    async def _register(self, logged: LoggedExchange[Any]) -> None:
        if self.error is not None:
            logged.result.set_exception(self.error)
            return
        self._exchanges[logged.number] = logged
        if logged.is_last_of_step:
            self._step_ends[logged.number] = logged.step
        view = self._roster.view
        await self._agreement.prepare_exchange(logged.is_last_of_step)
        await self._run_exchange(logged, view)  # does nothing if a newer view has started it already

    def _is_current(self, view: View) -> bool:
        return view is self._roster.view and not self.is_frozen

    async def _run_exchange(self, logged: LoggedExchange[Any], view: View) -> None:
        if not self._is_current(view):  # the next view starts it
            return
        assert logged.make is not None
        self._mark_started(logged)
        group = Subgroup(
            self._comm,
            self._roster.list_contributors(logged.begun_step),
            is_current=lambda: self._roster.view is view,
            sent_counts=logged.channel.sent_counts,
        )
        try:
            value = await logged.make(ExchangeChannel(group, logged.exchange, logged.part))
        except (PeerLost, PeerFailed) as error:
            if view is self._roster.view:
                self._agreement.mark_lost(str(error.rank))
        except WaitEnded:
            pass
        except Exception as error:
            logged.result.set_exception(error)
        else:
            if self._is_current(view):
                self._store_result(logged, value)

    async def _adopt_result(self, logged: LoggedExchange[Any], view: View, giver: int) -> None:
        if not self._is_current(view):
            return
        self._mark_started(logged)
        try:
            payload = await self._comm.recv(
                giver, Tag(Purpose.ADOPTION.build_exchange_id(logged.number)), deadline_s=math.inf
            )
        except (PeerLost, PeerFailed, WaitEnded):
            if view is self._roster.view and str(giver) not in view.members:
                self._agreement.member.request_new_view()  # a leaving member was lost before its handover
                self._agreement.schedule_processing()
            return
        if self._is_current(view):
            (content,) = payload.iter_tensors()
            self._store_result(logged, logged.result_codec.unpack(unpack_tensors(content)))

    def _mark_started(self, logged: LoggedExchange[Any]) -> None:
        logged.started_s = self._agreement.runtime.read_clock()
        self.wait_started.set_result(None)

    def _store_result(self, logged: LoggedExchange[Any], value: Any) -> None:
        """Stores the result of an exchange, which is complete now."""
        logged.stored_result = tuple(tensor.clone() for tensor in logged.result_codec.pack(value))
        logged.make = logged.rewind = None
        self._agreement.giver.add_result(logged)
        while (
            successor := self._exchanges.get(self._last_complete + 1)
        ) is not None and successor.stored_result is not None:
            self._last_complete += 1
        for dropped in logged.obsolete:
            self._exchanges.pop(dropped.number, None)
        logged.obsolete.clear()  # otherwise each exchange would retain all earlier ones
        ended = [number for number in self._step_ends if number <= self._last_complete]
        for number in sorted(ended)[:-1]:
            del self._step_ends[number]
        logged.result.set_result(value)

    # --- views ------------------------------------------------------------------------------------------------------

    def freeze(self) -> tuple[int, ...]:
        """Stops all exchanges; see :meth:`farflung.membership.Driver.freeze`."""
        self.is_frozen = True
        numbers = [
            n
            for n, logged in self._exchanges.items()
            if n > self._last_complete and logged.stored_result is not None
        ]
        return self._last_complete, *sorted(numbers)

    def record_change(self, previous_members: Collection[str], view: View) -> None:
        """Records the change of members by a view."""
        self._roster.record_change(
            [*previous_members], view, self._step_ends.items(), self._agreement.runtime.read_clock()
        )

    def install_view(self, view: View) -> None:
        """Adopts the exchanges that other members have completed, and repeats the other unfinished ones."""
        givers = {
            x.exchange: int(x.giver)
            for x in view.list_handovers()
            if x.receiver == self._agreement.member.name
        }
        missing = [x for _, x in sorted(self._exchanges.items()) if x.stored_result is None]
        for logged in reversed(missing):
            if logged.rewind is not None and logged.number not in givers:
                logged.rewind()
        for logged in missing:
            giver = givers.get(logged.number)
            work = (
                self._run_exchange(logged, view) if giver is None else self._adopt_result(logged, view, giver)
            )
            self._agreement.launch(work)

    def send_result(self, receiver: str, number: int) -> None:
        """Sends a member the result of an exchange."""
        content = self._exchanges[number].to_result().content
        self._comm.send(Payload((content,)), int(receiver), Tag(Purpose.ADOPTION.build_exchange_id(number)))

    def fail(self, error: BaseException) -> None:
        """Fails all exchanges, including those that start later."""
        self.error = error
        for logged in self._exchanges.values():
            logged.result.set_exception(error)

    def clear(self) -> None:
        """Removes all exchanges of a suspended member."""
        self._exchanges.clear()
        self.taken_exchanges.clear()

    # --- what others ask --------------------------------------------------------------------------------------------

    def list_pending(self) -> list[LoggedExchange[Any]]:
        """Returns the started or requested exchanges that are not complete."""
        return [x for x in self._exchanges.values() if x.stored_result is None and x.started_s < math.inf]

    def list_retained(self, number: int) -> list[LoggedExchange[Any]]:
        """Returns the exchanges whose results a member may lack, up to a number."""
        return [x for x in self._exchanges.values() if x.number <= number]

    @property
    def first_retained(self) -> int:
        """Number below which all members have the results of exchanges."""
        return min(self._exchanges, default=self.num_started + 1)

    def find_merged(self) -> set[LoggedExchange[Any]]:
        """Returns exchanges whose results are in the state before the next step."""
        return {
            *self.taken_exchanges,
            *(x for logged in list(self._exchanges.values()) for x in logged.obsolete),
        }

    def build_start_state(self, num_started: int) -> dict[str, Any]:
        """Returns the start state of a joining replica, once all exchanges up to a number are complete."""
        return {
            "started": num_started,
            "complete": [step_end for step_end in self._step_ends.items() if step_end[0] <= num_started],
            "log": [logged.number for logged in self.list_retained(num_started)],
        }

    def begin(
        self,
        start_state: Mapping[str, Any],
        results: Mapping[int, tuple[Tensor, ...]],
        followed_exchanges: Iterable[LoggedExchange[Any]],
    ) -> None:
        """Begins to take part, with all complete exchanges; see :meth:`build_start_state`.

        Args:
          start_state: Start state from a member.
          results: Results by number.
          followed_exchanges: Exchanges that have these results.
        """
        self.num_started = self._last_complete = start_state["started"]
        self._step_ends = dict(start_state["complete"])
        self.taken_exchanges = [
            logged for logged in self.taken_exchanges if logged.number in start_state["log"]
        ]
        for logged in followed_exchanges:
            logged.stored_result, logged.make, logged.rewind = results[logged.number], None, None
            self._exchanges[logged.number] = logged
