"""The exchanges of an elastic run at one member: made again, or adopted from others, where members are lost."""

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
    """The result of an exchange, for those that follow.

    Args:
      number: of the exchange in the run.
      exchange: its number by purpose and step.
      part: which part it moves.
      begun: the last step that had begun when it started.
      content: see :func:`farflung.trees.pack_tensors`.
    """

    number: int
    exchange: int
    part: int
    begun: int
    content: Tensor


@dataclass(eq=False, slots=True)
class Logged(Started[T], Generic[T]):
    """An exchange that may be made again; ``number`` counts the exchanges of the run, alike on all members."""

    log: ExchangeLog
    number: int
    exchange: int
    part: int
    make: Callable[[ExchangeChannel], Coroutine[Pending[Any], None, T]] | None = None
    """``None`` once it is whole, so that what was contributed is freed at once."""
    values: Values[T] = field(default_factory=lambda: cast("Values[T]", Values(tuple, tuple)))
    rewind: Callable[[], None] | None = None
    ends_step: bool = False
    begun: int = 0
    """The last step that had begun when it started."""
    made_s: float = math.inf
    """When it was made or asked for, the last time; infinite: not yet."""
    drops: list[Logged[Any]] = field(default_factory=list)
    """Exchanges whose results all members have, once this one is whole."""
    kept: tuple[Tensor, ...] | None = None
    """The result, for members that lack it; ``None``: the exchange is not whole here."""

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
    """The exchanges of a run that are under way, and the results that another member may lack.

    Args:
      agreement: of this member.
      first_step: of the run.
    """

    def __init__(self, agreement: Agreement, first_step: int) -> None:
        self._agreement, self._roster, self._comm = agreement, agreement.roster, agreement.runtime.comm
        self.step = first_step
        """The last step that has begun here."""
        self.taken: list[Logged[Any]] = []
        """Exchanges whose results were taken since the last one started."""
        self.started = 0
        """The number of exchanges that have started here."""
        self.is_frozen = False
        """Whether no exchange becomes whole, because the view ends."""
        self.error: BaseException | None = None
        """Why exchanges fail."""
        self.waits: Pending[None] = Pending()
        """Done once an exchange is waited for."""
        self._logged: dict[int, Logged[Any]] = {}
        self._base = 0
        """The number up to which all exchanges are whole."""
        self._complete = {0: first_step - 1}
        """The steps that end with an exchange, by its number."""

    def start(
        self,
        number: int,
        part: int,
        make: Callable[[ExchangeChannel], Coroutine[Pending[Any], None, T]],
        values: Values[T],
        rewind: Callable[[], None] | None = None,
        ends_step: bool = False,
    ) -> Logged[T]:
        """Starts an exchange; see :func:`farflung.comm.start`."""
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
        await self._make(logged, view)  # in a view that this has installed it is made already

    def _is_current(self, view: View) -> bool:
        return view is self._roster.view and not self.is_frozen

    async def _make(self, logged: Logged[Any], view: View) -> None:
        if not self._is_current(view):  # it is made in the next view
            return
        assert logged.make is not None
        self._await(logged)
        among = Among(self._comm, self._roster.contributors(logged.begun))
        try:
            value = await logged.make(ViewChannel(among, logged.channel, lambda: self._roster.view is view))
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
                self._agreement.member.redo()  # one that has left was lost before it had handed over
                self._agreement.settle_soon()
            return
        if self._is_current(view):
            (content,) = payload.tensors()
            self._hold(logged, logged.values.unpack(unpack_tensors(content)))

    def _await(self, logged: Logged[Any]) -> None:
        logged.made_s = self._agreement.runtime.now()
        self.waits.set(None)

    def _hold(self, logged: Logged[Any], value: Any) -> None:
        """Holds an exchange whole."""
        logged.kept = tuple(tensor.clone() for tensor in logged.values.pack(value))
        logged.make = logged.rewind = None
        self._agreement.giver.add(logged)
        while (later := self._logged.get(self._base + 1)) is not None and later.kept is not None:
            self._base += 1
        for dropped in logged.drops:
            self._logged.pop(dropped.number, None)
        logged.drops.clear()  # else each exchange would keep all before it
        known = [number for number in self._complete if number <= self._base]
        for number in sorted(known)[:-1]:
            del self._complete[number]
        logged.result.set(value)

    # --- views ------------------------------------------------------------------------------------------------------

    def freeze(self) -> tuple[int, ...]:
        """Stops all exchanges; see :meth:`farflung.membership.Driver.freeze`."""
        self.is_frozen = True
        whole = [n for n, one in self._logged.items() if n > self._base and one.kept is not None]
        return self._base, *sorted(whole)

    def change(self, before: Collection[str], view: View) -> None:
        """Notes the change of members by a view."""
        self._roster.change([*before], view, self._complete.items(), self._agreement.runtime.now())

    def install(self, view: View) -> None:
        """Adopts what others hold whole in a view, and makes all other exchanges again."""
        givers = {
            x.exchange: int(x.giver) for x in view.transfers() if x.receiver == self._agreement.member.name
        }
        missing = [one for _, one in sorted(self._logged.items()) if one.kept is None]
        for logged in reversed(missing):
            if logged.rewind is not None and logged.number not in givers:
                logged.rewind()
        for logged in missing:
            giver = givers.get(logged.number)
            work = self._make(logged, view) if giver is None else self._adopt(logged, view, giver)
            self._agreement.launch(work)

    def hand(self, receiver: str, number: int) -> None:
        """Gives a member the result of an exchange."""
        content = self._logged[number].to_result().content
        self._comm.send(Payload((content,)), int(receiver), Tag(Purpose.ADOPTION.at(number)))

    def fail(self, error: BaseException) -> None:
        """Fails all exchanges, those that start later too."""
        self.error = error
        for logged in self._logged.values():
            logged.result.fail(error)

    def clear(self) -> None:
        """Forgets all exchanges of a member that is suspended."""
        self._logged.clear()
        self.taken.clear()

    # --- what others ask --------------------------------------------------------------------------------------------

    def under_way(self) -> list[Logged[Any]]:
        """Returns the exchanges that have been made, or asked for, and are not whole."""
        return [one for one in self._logged.values() if one.kept is None and one.made_s < math.inf]

    def up_to(self, number: int) -> list[Logged[Any]]:
        """Returns the exchanges whose results a member may lack, up to a number."""
        return [one for one in self._logged.values() if one.number <= number]

    @property
    def least(self) -> int:
        """The number below which all members have the results of exchanges."""
        return min(self._logged, default=self.started + 1)

    def merged(self) -> set[Logged[Any]]:
        """Returns exchanges whose results are in the state before the next step."""
        return {*self.taken, *(one for logged in list(self._logged.values()) for one in logged.drops)}

    def to_begin(self, started: int) -> dict[str, Any]:
        """Returns what a replica that joins begins with, once all exchanges up to a number are whole."""
        return {
            "started": started,
            "complete": [each for each in self._complete.items() if each[0] <= started],
            "log": [one.number for one in self.up_to(started)],
        }

    def begin(
        self,
        begins: Mapping[str, Any],
        results: Mapping[int, tuple[Tensor, ...]],
        followed: Iterable[Logged[Any]],
    ) -> None:
        """Takes part from now on, with all that is whole; see :meth:`to_begin`.

        Args:
          begins: what a member has told.
          results: by number.
          followed: exchanges that have these results.
        """
        self.started = self._base = begins["started"]
        self._complete = dict(begins["complete"])
        self.taken = [logged for logged in self.taken if logged.number in begins["log"]]
        for logged in followed:
            logged.kept, logged.make, logged.rewind = results[logged.number], None, None
            self._logged[logged.number] = logged
