"""All-reduce algorithms as coroutines over send and receive, used by both runtimes."""

from farflung.comm.collectives.all_gather import all_reduce_by_all_gather
from farflung.comm.collectives.auto import auto, choose_default_collective
from farflung.comm.collectives.coding import Coding
from farflung.comm.collectives.collective import Collective
from farflung.comm.collectives.native import native
from farflung.comm.collectives.ring import ring
from farflung.comm.collectives.sharded import direct, multi_parameter_server, parameter_server
from farflung.comm.collectives.table import AUTO, COLLECTIVES, find_collective

__all__ = [
    "AUTO",
    "COLLECTIVES",
    "Coding",
    "Collective",
    "all_reduce_by_all_gather",
    "auto",
    "choose_default_collective",
    "direct",
    "find_collective",
    "multi_parameter_server",
    "native",
    "parameter_server",
    "ring",
]
