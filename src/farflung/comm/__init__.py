"""Messages between replicas: the wire format, matching by tag, collectives, and the two communicators."""

from farflung.comm.channel import ExchangeChannel, Purpose
from farflung.comm.choice import SIDE_NBYTES, choose, cost_s, resolve_collective
from farflung.comm.collectives import AUTO, COLLECTIVES, Coding, Collective, collective_named
from farflung.comm.mailbox import Mailbox, Waiting
from farflung.comm.paced import NetworkModel, PacedCommunicator
from farflung.comm.virtual import LinkModel, VirtualCommunicator, VirtualNetwork
from farflung.comm.zeromq import Peer, ZmqCommunicator

__all__ = [
    "AUTO",
    "COLLECTIVES",
    "SIDE_NBYTES",
    "Coding",
    "Collective",
    "ExchangeChannel",
    "LinkModel",
    "Mailbox",
    "NetworkModel",
    "PacedCommunicator",
    "Peer",
    "Purpose",
    "VirtualCommunicator",
    "VirtualNetwork",
    "Waiting",
    "ZmqCommunicator",
    "choose",
    "collective_named",
    "cost_s",
    "resolve_collective",
]
