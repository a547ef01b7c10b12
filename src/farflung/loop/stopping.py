"""Agreement on a run's last step, without an exchange of the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from farflung.comm import Purpose
from farflung.errors import RunLost, WaitEnded
from farflung.tasks import Pending
from farflung.types import Communicator, ElasticMembership, Payload, Runtime, Tag, TensorSpec

__all__ = ["STOP", "StopAgreement"]

STOP = "stop"
"""Name of the decision to end a run; its step is the last."""
_REPORT = (TensorSpec((2,), torch.int64),)
"""Last step that a replica has begun, and the last step of the run if it knows it, or -1."""


class StopAgreement:
    """Agreement on the last step of a run, once any replica is asked to stop.

    Each replica reports the last step that it has begun. The run's last step is the one after the latest of these, so
    no replica has passed it. The thread that carries exchanges answers, whatever its replica computes. A replica that
    knows of the request waits for the agreement at the end of its step.

    In an elastic run the members of a view agree. The next view repeats the agreement, and adopts a step that one of
    its members knows. Members of a view receive equal reports, so they agree on one step. An object serves one
    membership: a replica that is admitted again has another.

    Args:
      runtime: Clock and messages of the replica.
      is_requested_here: Returns True once this replica is asked to stop; called at the end of each step.
    """

    def __init__(self, runtime: Runtime, is_requested_here: Callable[[], bool] = lambda: False) -> None:
        self._runtime, self._is_requested_here = runtime, is_requested_here
        self._request, self._interruption = Pending[None](), Pending[None]()
        self._last_begun_step = -1
        self._is_listening = False
        self.is_requested = False
        """True once this replica knows that any replica was asked to stop."""
        self.agreed_step = Pending[float]()
        """Last step; infinite if the run ends before an agreement."""

    @property
    def last_step(self) -> float:
        """Last step of the run; infinite while it is unknown."""
        return self.agreed_step.result() if self.agreed_step.is_done else math.inf

    def request_stop(self) -> None:
        """Requests all replicas to stop; callable from any thread, but not from a signal handler."""
        self._request.set_result(None)

    def listen(self, step: int) -> None:
        """Answers requests from now on.

        Args:
          step: First step of this replica; -1: it has not received the state of the run.
        """
        self._last_begun_step = step
        if not self._is_listening:
            self._is_listening = True
            if self._runtime.elastic is not None:
                self._interruption = self._runtime.elastic.interruption
            self._runtime.launch(self._listen()).add_done_callback(self._handle_end)

    def replay(self, step: int) -> None:
        """Sets the last step of the run that is replayed; call before :meth:`listen`."""
        self.is_requested = True
        self.agreed_step.set_result(step)

    async def is_last(self, step: int) -> bool:
        """Returns True if the run ends after this step, which is done.

        Raises:
          Left: This replica has left the run.
          RunLost: The run has ended, or continues without this replica.
        """
        if self._is_requested_here():
            self.request_stop()
        if self.is_requested or self._request.is_done:
            await self._runtime.wait_any(self.agreed_step, self._interruption)
        if self._interruption.is_done:
            self._interruption.result()
        # After the check of is_requested: a thread that answers in between reports a step that has begun or ended.
        self._last_begun_step = step + 1
        return step == self.last_step

    # --- on the thread that carries exchanges ---------------------------------------------------------------------

    async def _listen(self) -> None:
        elastic = self._runtime.elastic
        if elastic is None:
            comm = (self._runtime.untimed or self._runtime).comm
            await self._agree(comm, 0, range(comm.size))
        while elastic is not None and not self._interruption.is_done:
            with suppress(WaitEnded):  # the members of the next view agree again
                await self._agree(self._runtime.comm, elastic.view_number, elastic.members)

    async def _probe(self, elastic: ElasticMembership, view: int) -> None:
        """Probes silent members while the agreement waits, so that they are evicted without an exchange."""
        while elastic.view_number == view and not (self.agreed_step.is_done or self._interruption.is_done):
            await elastic.probe()

    def _handle_end(self, task: Pending[None]) -> None:
        if isinstance(task.error, RunLost):
            self.agreed_step.set_result(math.inf)  # a replica is lost, or has finished the run
        elif task.error is not None:
            self.agreed_step.set_exception(task.error)

    async def _agree(self, comm: Communicator, view: int, members: Sequence[int]) -> None:
        """Agrees with the other members of a view; in an elastic run, returns only when the view ends."""
        elastic, peers = self._runtime.elastic, [rank for rank in members if rank != comm.rank]
        request = Tag(Purpose.STOP.build_exchange_id(2 * view))
        report = Tag(Purpose.STOP.build_exchange_id(2 * view + 1))
        request_arrival = comm.recv_any(request, deadline_s=math.inf)
        if comm.rank not in members:
            await request_arrival  # until a view admits this replica
        if not self.is_requested:
            await self._runtime.wait_any(self._request, request_arrival)
            if request_arrival.is_done:
                request_arrival.result()
            self.is_requested = True
        comm.cancel_exchange(request.exchange)
        last_step = int(self.last_step) if self.last_step < math.inf else -1
        local_report = torch.tensor([self._last_begun_step, last_step])
        for rank in peers:
            comm.send(Payload((torch.empty(0),)), rank, request, priority=-1)
            comm.send(Payload((local_report,)), rank, report, priority=-1)
        reports = [local_report]
        if elastic is None:
            reports += [next((await comm.recv(rank, report, _REPORT)).iter_tensors()) for rank in peers]
        else:
            self._runtime.launch(self._probe(elastic, view))
            while len(reports) <= len(peers):
                _, payload = await comm.recv_any(report, _REPORT, deadline_s=math.inf)
                reports.append(next(payload.iter_tensors()))
        last_begun, last_step = torch.stack(reports).amax(0).tolist()
        self.agreed_step.set_result(last_begun + 1 if last_step < 0 else last_step)
        if elastic is not None:
            await comm.recv_any(report, deadline_s=math.inf)
