"""Communication between replicas: the wire format, matching by tag, collectives, and the wall clock's communicator."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy

if TYPE_CHECKING:
    from farflung.comm.channel import RELAYED, ExchangeChannel, Purpose, Started, Values, start
    from farflung.comm.choice import SIDE_NBYTES, choose, cost_s, resolve_collective
    from farflung.comm.collectives import AUTO, COLLECTIVES, Coding, Collective, collective_named
    from farflung.comm.endpoint import Endpoint
    from farflung.comm.group import Group, WallCommunicator
    from farflung.comm.mailbox import Mailbox, Waiting
    from farflung.comm.peer import Peer
    from farflung.comm.tcp import TcpTransport
    from farflung.comm.transport import Listener, Traffic, Transport
    from farflung.comm.view import View
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "channel": "RELAYED ExchangeChannel Purpose Started Values start",
            "choice": "SIDE_NBYTES choose cost_s resolve_collective",
            "collectives": "AUTO COLLECTIVES Coding Collective collective_named",
            "group": "Group WallCommunicator",
            "endpoint": "Endpoint",
            "mailbox": "Mailbox Waiting",
            "peer": "Peer",
            "tcp": "TcpTransport",
            "transport": "Listener Traffic Transport",
            "view": "View",
        },
    )

__all__ = [
    "AUTO",
    "COLLECTIVES",
    "RELAYED",
    "SIDE_NBYTES",
    "Coding",
    "Collective",
    "Endpoint",
    "ExchangeChannel",
    "Group",
    "Listener",
    "Mailbox",
    "Peer",
    "Purpose",
    "Started",
    "TcpTransport",
    "Traffic",
    "Transport",
    "Values",
    "View",
    "Waiting",
    "WallCommunicator",
    "choose",
    "collective_named",
    "cost_s",
    "resolve_collective",
    "start",
]
