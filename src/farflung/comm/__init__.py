"""Communication between replicas: the wire format, matching by tag, collectives, and the wall clock's communicator."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes

if TYPE_CHECKING:
    from farflung.comm.channel import (
        RELAYED_KIND,
        ExchangeChannel,
        ExchangeHandle,
        Purpose,
        ResultCodec,
        start_exchange,
    )
    from farflung.comm.choice import METADATA_NBYTES, choose_collective, predict_cost_s, resolve_collective
    from farflung.comm.collectives import AUTO, COLLECTIVES, Coding, Collective, find_collective
    from farflung.comm.endpoint import Endpoint
    from farflung.comm.group import BaseCommunicator, WallCommunicator
    from farflung.comm.loop import EventLoop
    from farflung.comm.mailbox import Mailbox, PendingRecv
    from farflung.comm.peer import Peer
    from farflung.comm.tcp import TcpTransport
    from farflung.comm.transport import ConnectionTraffic, Listener, Refusals, Transport
    from farflung.comm.view import ViewSession
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "channel": "RELAYED_KIND ExchangeChannel Purpose ExchangeHandle ResultCodec start_exchange",
            "choice": "METADATA_NBYTES choose_collective predict_cost_s resolve_collective",
            "collectives": "AUTO COLLECTIVES Coding Collective find_collective",
            "group": "BaseCommunicator WallCommunicator",
            "endpoint": "Endpoint",
            "loop": "EventLoop",
            "mailbox": "Mailbox PendingRecv",
            "peer": "Peer",
            "tcp": "TcpTransport",
            "transport": "Listener ConnectionTraffic Refusals Transport",
            "view": "ViewSession",
        },
    )

__all__ = [
    "AUTO",
    "COLLECTIVES",
    "METADATA_NBYTES",
    "RELAYED_KIND",
    "BaseCommunicator",
    "Coding",
    "Collective",
    "ConnectionTraffic",
    "Endpoint",
    "EventLoop",
    "ExchangeChannel",
    "ExchangeHandle",
    "Listener",
    "Mailbox",
    "Peer",
    "PendingRecv",
    "Purpose",
    "Refusals",
    "ResultCodec",
    "TcpTransport",
    "Transport",
    "ViewSession",
    "WallCommunicator",
    "choose_collective",
    "find_collective",
    "predict_cost_s",
    "resolve_collective",
    "start_exchange",
]
