"""What a replica does that is no part of training: evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from farflung.replica.exchanges import Exchanges
from farflung.replica.summary import TimeSplit
from farflung.tasks import Pending, done
from farflung.types import Runtime

__all__ = ["Errands"]

T = TypeVar("T")


@dataclass(slots=True)
class Errands:
    """A part of a replica's time of their own, or off the clock, beside what follows.

    Args:
      runtime: the world.
      exchanges: of the replica.
      time_s: takes the time.
    """

    runtime: Runtime
    exchanges: Exchanges
    time_s: TimeSplit
    _under_way: list[Pending[Any]] = field(init=False, default_factory=list)

    async def run(
        self,
        errand: Callable[[Runtime], Coroutine[Pending[Any], None, T]],
        tell: Callable[..., None],
    ) -> Pending[T]:
        """One of them, begun: where it is off the clock, training may go on.

        Args:
          errand: in which runtime; leaves the replica as it is. Off the clock it begins at once.
          tell: of its result, and of when it was through and how long it took (``t``, ``duration_s``).
        """
        off_clock, begin = self.runtime.off_clock, self.runtime.now()
        if off_clock is None:
            with self.exchanges.aside():
                result = await errand(self.runtime)
            end = self.runtime.now()
            self.time_s.evaluation += end - begin
            tell(result, t=end, duration_s=end - begin)
            return done(result)

        async def told() -> T:
            result = await errand(off_clock)
            tell(result, t=begin, duration_s=0.0)
            return result

        for each in self._under_way:
            if each.error is not None:
                raise each.error
        task = off_clock.launch(told())
        self._under_way = [*(each for each in self._under_way if not each.done), task]
        return task

    async def end(self) -> None:
        """Waits for those that are under way."""
        for each in self._under_way:
            await each
