"""The agreement on a run's last step, which needs no exchange of the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from farflung.comm import Purpose
from farflung.errors import RunLost, WaitEnded
from farflung.tasks import Pending
from farflung.types import Communicator, Elastic, Payload, Runtime, Tag, TensorSpec

__all__ = ["STOP", "StopAgreement"]

STOP = "stop"
"""The name of the decision to end a run; its step is the last."""
_REPORT = (TensorSpec((2,), torch.int64),)
"""The last step that a replica has begun, and the step that it knows to be the last of the run, or -1."""


class StopAgreement:
    """Agrees on the last step of a run once any replica is asked to stop.

    Each replica reports the last step that it has begun. The run's last step is the one after the latest of these, so
    no replica has passed it. The thread that carries exchanges answers, whatever its replica computes. A replica that
    knows of the request waits for the agreement at the end of its step.

    In an elastic run the members of a view agree. The next view repeats the agreement, and adopts a step that a member
    of it knows. Members of a view receive the same reports, so they agree on the same step. An object serves one
    membership: a replica that is admitted again has another.

    Args:
      runtime: the world.
      is_wanted: returns True once this replica is asked to stop; read at the end of each step.
    """

    def __init__(self, runtime: Runtime, is_wanted: Callable[[], bool] = lambda: False) -> None:
        self._runtime, self._is_wanted = runtime, is_wanted
        self._wish, self._interrupted = Pending[None](), Pending[None]()
        self._begun = -1
        self._is_listening = False
        self.is_asked = False
        """Whether any replica was asked to stop, as far as this one knows."""
        self.agreed = Pending[float]()
        """The last step; infinite where the run comes to its end before an agreement."""

    @property
    def last_step(self) -> float:
        """The run's last step, as far as it is known; infinite: it is not."""
        return self.agreed.result() if self.agreed.done else math.inf

    def ask(self) -> None:
        """Asks all replicas to stop; callable from any thread, but not from a signal handler."""
        self._wish.set(None)

    def listen(self, step: int) -> None:
        """Answers requests from now on.

        Args:
          step: the first step of this replica; -1: it has yet to be given the state of the run.
        """
        self._begun = step
        if not self._is_listening:
            self._is_listening = True
            if self._runtime.elastic is not None:
                self._interrupted = self._runtime.elastic.interrupted
            self._runtime.launch(self._listen()).on_done(self._ended)

    def replay(self, step: int) -> None:
        """Adopts the last step of the run that is replayed, before :meth:`listen`."""
        self.is_asked = True
        self.agreed.set(step)

    async def is_last(self, step: int) -> bool:
        """Returns True if the run ends after this step, which is done.

        Raises:
          Left: this replica has left the run.
          RunLost: the run has ended here, or goes on without this replica.
        """
        if self._is_wanted():
            self.ask()
        if self.is_asked or self._wish.done:
            await self._runtime.first_of(self.agreed, self._interrupted)
        if self._interrupted.done:
            self._interrupted.result()
        # After the look at is_asked: a thread that answers in between reports a step that this one has begun or ends.
        self._begun = step + 1
        return step == self.last_step

    # --- on the thread that carries exchanges ---------------------------------------------------------------------

    async def _listen(self) -> None:
        elastic = self._runtime.elastic
        if elastic is None:
            comm = (self._runtime.off_clock or self._runtime).comm
            await self._agree(comm, 0, range(comm.size))
        while elastic is not None and not self._interrupted.done:
            with suppress(WaitEnded):  # the members of the next view agree anew
                await self._agree(self._runtime.comm, elastic.view_number, elastic.members)

    async def _probe(self, elastic: Elastic, view: int) -> None:
        """Has silent members left out while the agreement waits, since no exchange may be waited for."""
        while elastic.view_number == view and not (self.agreed.done or self._interrupted.done):
            await elastic.probe()

    def _ended(self, task: Pending[None]) -> None:
        if isinstance(task.error, RunLost):
            self.agreed.set(math.inf)  # a replica is lost, or has come to the run's end
        elif task.error is not None:
            self.agreed.fail(task.error)

    async def _agree(self, comm: Communicator, view: int, members: Sequence[int]) -> None:
        """Agrees with the other members of a view; in an elastic run this ends with the view alone."""
        elastic, others = self._runtime.elastic, [rank for rank in members if rank != comm.rank]
        request, report = Tag(Purpose.STOP.at(2 * view)), Tag(Purpose.STOP.at(2 * view + 1))
        requested = comm.recv_any(request, deadline_s=math.inf)
        if comm.rank not in members:
            await requested  # until a view admits this replica
        if not self.is_asked:
            await self._runtime.first_of(self._wish, requested)
            if requested.done:
                requested.result()
            self.is_asked = True
        comm.forget(request.exchange)
        known = int(self.last_step) if self.last_step < math.inf else -1
        own = torch.tensor([self._begun, known])
        for rank in others:
            comm.send(Payload((torch.empty(0),)), rank, request, priority=-1)
            comm.send(Payload((own,)), rank, report, priority=-1)
        reports = [own]
        if elastic is None:
            reports += [next((await comm.recv(rank, report, _REPORT)).tensors()) for rank in others]
        else:
            self._runtime.launch(self._probe(elastic, view))
            while len(reports) <= len(others):
                _, payload = await comm.recv_any(report, _REPORT, deadline_s=math.inf)
                reports.append(next(payload.tensors()))
        begun, known = torch.stack(reports).amax(0).tolist()
        self.agreed.set(begun + 1 if known < 0 else known)
        if elastic is not None:
            await comm.recv_any(report, deadline_s=math.inf)
