"""Exchanges of an elastic run at one member, which are repeated or adopted from others after the loss of members."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from torch import Tensor
from typing_extensions import override

from farflung.comm import ExchangeChannel, Purpose, Started, Values
from farflung.comm.channel import step_of
from farflung.errors import PeerFailed, PeerLost, WaitEnded
from farflung.membership.among import Among, ViewChannel
from farflung.membership.views import View
from farflung.tasks import Pending
from farflung.trees import pack_tensors, unpack_tensors
from farflung.types import Payload, Tag

if TYPE_CHECKING:
    from farflung.membership.agreement import Agreement

__all__ = ["ExchangeLog", "Logged", "Result"]

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
    begun: int
    content: Tensor


@dataclass(eq=False, slots=True)
class Logged(Started[T], Generic[T]):
    """Exchange that may be repeated; ``number`` counts the exchanges of the run, equally on all members."""

    log: ExchangeLog
    number: int
    exchange: int
    part: int
    make: Callable[[ExchangeChannel], Coroutine[Pending[Any], None, T]] | None = None
    """Coroutine of the exchange; ``None`` once it is whole, so that its contribution is freed at once."""
    values: Values[T] = field(default_factory=lambda: cast("Values[T]", Values(tuple, tuple)))
    rewind: Callable[[], None] | None = None
    ends_step: bool = False
    begun: int = 0
    """Last step that had begun when it started."""
    made_s: float = math.inf
    """Time of the latest attempt or adoption; infinite if there was none."""
    drops: list[Logged[Any]] = field(default_factory=list)
    """Exchanges whose results all members have, once this one is whole."""
    kept: tuple[Tensor, ...] | None = None
    """Result for members that lack it; ``None`` while the exchange is not whole on this member."""

    @property
    def step(self) -> int:
        return step_of(self.exchange)

    @override
    async def bring(self) -> T:
        value = await self.result
        self.log.taken.append(self)
        return value

    def to_result(self) -> Result:
        assert self.kept is not None
        return Result(self.number, self.exchange, self.part, self.begun, pack_tensors(self.kept))


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
        self.taken: list[Logged[Any]] = []
        """Exchanges whose results have been collected since the last start."""
        self.started = 0
        """Number of exchanges that have started on this member."""
        self.is_frozen = False
        """True if no exchange becomes whole because the view is ending."""
        self.error: BaseException | None = None
        """Error that all exchanges fail with."""
        self.waits: Pending[None] = Pending()
        """Completes once an exchange is waited for."""
        self._logged: dict[int, Logged[Any]] = {}
        self._base = 0
        """Number up to which all exchanges are whole."""
        self._complete = {0: first_step - 1}
        """Steps that end with an exchange, by its number."""

    def start(
        self,
        number: int,
        part: int,
        make: Callable[[ExchangeChannel], Coroutine[Pending[Any], None, T]],
        values: Values[T],
        rewind: Callable[[], None] | None = None,
        ends_step: bool = False,
    ) -> Logged[T]:
        """Starts an exchange; see :func:`farflung.comm.start_exchange`."""
        self.started += 1
        drops, self.taken = self.taken, []
        logged = Logged(
            *(ExchangeChannel(self._comm, number, part), Pending[T](), self, self.started, number, part),
            make, values, rewind, ends_step, begun=self.step, drops=drops,
        )  # fmt: skip
        self._agreement.launch(self._enter(logged))
        return logged

    async def _enter(self, logged: Logged[Any]) -> None:
        if self.error is not None:
            logged.result.fail(self.error)
            return
        self._logged[logged.number] = logged
        if logged.ends_step:
            self._complete[logged.number] = logged.step
        view = self._roster.view
        await self._agreement.before_exchange(logged.ends_step)
        await self._make(logged, view)  # does nothing if a newer view has started it already

    def _is_current(self, view: View) -> bool:
        return view is self._roster.view and not self.is_frozen

    async def _make(self, logged: Logged[Any], view: View) -> None:
        if not self._is_current(view):  # the next view starts it
            return
        assert logged.make is not None
        self._await(logged)
        group = Among(self._comm, self._roster.contributors(logged.begun))
        try:
            value = await logged.make(ViewChannel(group, logged.channel, lambda: self._roster.view is view))
        except (PeerLost, PeerFailed) as error:
            if view is self._roster.view:
                self._agreement.lose(str(error.rank))
        except WaitEnded:
            pass
        except Exception as error:
            logged.result.fail(error)
        else:
            if self._is_current(view):
                self._hold(logged, value)

    async def _adopt(self, logged: Logged[Any], view: View, giver: int) -> None:
        if not self._is_current(view):
            return
        self._await(logged)
        try:
            payload = await self._comm.recv(
                giver, Tag(Purpose.ADOPTION.at(logged.number)), deadline_s=math.inf
            )
        except (PeerLost, PeerFailed, WaitEnded):
            if view is self._roster.view and str(giver) not in view.members:
                self._agreement.member.redo()  # a leaving member was lost before its handover
                self._agreement.settle_soon()
            return
        if self._is_current(view):
            (content,) = payload.tensors()
            self._hold(logged, logged.values.unpack(unpack_tensors(content)))

    def _await(self, logged: Logged[Any]) -> None:
        logged.made_s = self._agreement.runtime.now()
        self.waits.set(None)

    def _hold(self, logged: Logged[Any], value: Any) -> None:
        """Stores the result of an exchange, which is whole now."""
        logged.kept = tuple(tensor.clone() for tensor in logged.values.pack(value))
        logged.make = logged.rewind = None
        self._agreement.giver.add(logged)
        while (successor := self._logged.get(self._base + 1)) is not None and successor.kept is not None:
            self._base += 1
        for dropped in logged.drops:
            self._logged.pop(dropped.number, None)
        logged.drops.clear()  # otherwise each exchange would retain all earlier ones
        ended = [number for number in self._complete if number <= self._base]
        for number in sorted(ended)[:-1]:
            del self._complete[number]
        logged.result.set(value)

    # --- views ------------------------------------------------------------------------------------------------------

    def freeze(self) -> tuple[int, ...]:
        """Stops all exchanges; see :meth:`farflung.membership.Driver.freeze`."""
        self.is_frozen = True
        numbers = [n for n, logged in self._logged.items() if n > self._base and logged.kept is not None]
        return self._base, *sorted(numbers)

    def change(self, before: Collection[str], view: View) -> None:
        """Records the change of members by a view."""
        self._roster.change([*before], view, self._complete.items(), self._agreement.runtime.now())

    def install(self, view: View) -> None:
        """Adopts the whole exchanges of others in a view, and repeats all other exchanges."""
        givers = {
            x.exchange: int(x.giver) for x in view.transfers() if x.receiver == self._agreement.member.name
        }
        missing = [x for _, x in sorted(self._logged.items()) if x.kept is None]
        for logged in reversed(missing):
            if logged.rewind is not None and logged.number not in givers:
                logged.rewind()
        for logged in missing:
            giver = givers.get(logged.number)
            work = self._make(logged, view) if giver is None else self._adopt(logged, view, giver)
            self._agreement.launch(work)

    def hand(self, receiver: str, number: int) -> None:
        """Sends a member the result of an exchange."""
        content = self._logged[number].to_result().content
        self._comm.send(Payload((content,)), int(receiver), Tag(Purpose.ADOPTION.at(number)))

    def fail(self, error: BaseException) -> None:
        """Fails all exchanges, including those that start later."""
        self.error = error
        for logged in self._logged.values():
            logged.result.fail(error)

    def clear(self) -> None:
        """Removes all exchanges of a suspended member."""
        self._logged.clear()
        self.taken.clear()

    # --- what others ask --------------------------------------------------------------------------------------------

    def under_way(self) -> list[Logged[Any]]:
        """Returns the started or requested exchanges that are not whole."""
        return [x for x in self._logged.values() if x.kept is None and x.made_s < math.inf]

    def up_to(self, number: int) -> list[Logged[Any]]:
        """Returns the exchanges whose results a member may lack, up to a number."""
        return [x for x in self._logged.values() if x.number <= number]

    @property
    def least(self) -> int:
        """Number below which all members have the results of exchanges."""
        return min(self._logged, default=self.started + 1)

    def merged(self) -> set[Logged[Any]]:
        """Returns exchanges whose results are in the state before the next step."""
        return {*self.taken, *(x for logged in list(self._logged.values()) for x in logged.drops)}

    def to_begin(self, started: int) -> dict[str, Any]:
        """Returns the start state of a joining replica, once all exchanges up to a number are whole."""
        return {
            "started": started,
            "complete": [step_end for step_end in self._complete.items() if step_end[0] <= started],
            "log": [logged.number for logged in self.up_to(started)],
        }

    def begin(
        self,
        begins: Mapping[str, Any],
        results: Mapping[int, tuple[Tensor, ...]],
        followed: Iterable[Logged[Any]],
    ) -> None:
        """Begins to take part, with all whole exchanges; see :meth:`build_start_state`.

        Args:
          start_state: Start state from a member.
          results: Results by number.
          followed_exchanges: Exchanges that have these results.
        """
        self.started = self._base = begins["started"]
        self._complete = dict(begins["complete"])
        self.taken = [logged for logged in self.taken if logged.number in begins["log"]]
        for logged in followed:
            logged.kept, logged.make, logged.rewind = results[logged.number], None, None
            self._logged[logged.number] = logged
