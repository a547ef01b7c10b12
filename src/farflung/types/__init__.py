"""The nouns and the protocols: what the parts of farflung say to each other.

Every protocol has its identity member elsewhere in the package (identity codec, synchronous schedule, uniform
sampler, in-memory stream, no sharing); together they equal plain data-parallel SGD. The protocols are structural:
a new member inherits from nothing.
"""

from farflung.types.data import (
    Arrivals,
    Batch,
    Dataset,
    Draw,
    Feed,
    PoolView,
    Sampler,
    Samples,
    Sharing,
    Stream,
    Tells,
    Workload,
)
from farflung.types.exchange import Codec, CodecState, Contribution, Reduced, Reducer, Seeds, StateSlot
from farflung.types.schedule import (
    Bucket,
    Fragment,
    Merge,
    Part,
    Replace,
    Schedule,
    SharedStats,
    Swap,
    SwapGradient,
    Transfer,
)
from farflung.types.tensors import Json, Payload, Placed, SampleIds, Segment, State, TensorSpec
from farflung.types.training import OptimizerFactory, RateSchedule
from farflung.types.world import (
    AllReduce,
    Channel,
    Communicator,
    Cost,
    Decision,
    Decisions,
    Feature,
    Runtime,
    SegmentCoding,
    Tag,
)

__all__ = [
    "AllReduce",
    "Arrivals",
    "Batch",
    "Bucket",
    "Channel",
    "Codec",
    "CodecState",
    "Communicator",
    "Contribution",
    "Cost",
    "Dataset",
    "Decision",
    "Decisions",
    "Draw",
    "Feature",
    "Feed",
    "Fragment",
    "Json",
    "Merge",
    "OptimizerFactory",
    "Part",
    "Payload",
    "Placed",
    "PoolView",
    "RateSchedule",
    "Reduced",
    "Reducer",
    "Replace",
    "Runtime",
    "SampleIds",
    "Sampler",
    "Samples",
    "Schedule",
    "Seeds",
    "Segment",
    "SegmentCoding",
    "SharedStats",
    "Sharing",
    "State",
    "StateSlot",
    "Stream",
    "Swap",
    "SwapGradient",
    "Tag",
    "Tells",
    "TensorSpec",
    "Transfer",
    "Workload",
]
