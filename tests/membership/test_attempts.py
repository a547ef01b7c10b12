"""Exchanges that are made again: the attempt of an earlier view has no part in the newer one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from farflung.comm import ExchangeChannel, Purpose
from farflung.errors import WaitEnded
from farflung.membership.elastic import Among, _Channel
from farflung.tasks import Pending
from farflung.types import Payload


def test_an_attempt_that_resumes_in_a_newer_view_neither_sends_nor_takes_messages() -> None:
    comm = Mock(rank=0, size=3, lane=None)
    comm.recv.return_value = comm.send.return_value = Pending()
    elastic, exchange = SimpleNamespace(view="first"), Purpose.STEP.at(7)
    logged: Any = SimpleNamespace(
        elastic=elastic, exchange=exchange, part=0, channel=ExchangeChannel(comm, exchange, 0)
    )
    attempt = _Channel(Among(comm, [0, 2]), logged)
    payload = Payload((torch.zeros(2),))
    assert not attempt.recv(1, 0).done
    assert not attempt.send(payload, 1, 0).done
    sent, calls = attempt.sent_nbytes, len(comm.mock_calls)
    elastic.view = "second"
    attempt.land(1, 0, torch.zeros(2))
    for ended in (attempt.recv(1, 1), attempt.send(payload, 1, 1)):
        with pytest.raises(WaitEnded, match="rank 2"):
            raise ended.error  # type: ignore[misc]
    assert (attempt.sent_nbytes, len(comm.mock_calls)) == (sent, calls)
