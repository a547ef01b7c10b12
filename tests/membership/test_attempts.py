"""Exchanges that are made again: the attempt of an earlier view has no part in the newer one."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from farflung.comm import ExchangeChannel, Purpose
from farflung.errors import WaitEnded
from farflung.membership.among import Among, ViewChannel
from farflung.tasks import Pending
from farflung.types import Payload


def test_an_attempt_that_resumes_in_a_newer_view_neither_sends_nor_takes_messages() -> None:
    comm = Mock(rank=0, size=3, lane=None)
    comm.recv.return_value = comm.send.return_value = Pending()
    views = ["first"]
    channel = ExchangeChannel(comm, Purpose.STEP.at(7), 0)
    attempt = ViewChannel(Among(comm, [0, 2]), channel, lambda: views[-1] == "first")
    payload = Payload((torch.zeros(2),))
    assert not attempt.recv(1, 0).done
    assert not attempt.send(payload, 1, 0).done
    sent, calls = attempt.sent_nbytes, len(comm.mock_calls)
    views.append("second")
    attempt.land(1, 0, torch.zeros(2))
    for ended in (attempt.recv(1, 1), attempt.send(payload, 1, 1)):
        with pytest.raises(WaitEnded, match="rank 2"):
            raise ended.error  # type: ignore[misc]
    assert (attempt.sent_nbytes, len(comm.mock_calls)) == (sent, calls)
