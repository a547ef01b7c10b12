"""Messages in virtual time: real tensors, modelled arrival."""

from farflung.comm.virtual.clock import Carrier, Clock, VirtualClock
from farflung.comm.virtual.lane import Lane
from farflung.comm.virtual.network import LinkModel, VirtualCommunicator, VirtualNetwork

__all__ = ["Carrier", "Clock", "Lane", "LinkModel", "VirtualClock", "VirtualCommunicator", "VirtualNetwork"]
