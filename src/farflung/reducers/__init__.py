"""Reducers: one bucket's whole path over the network. ``REDUCERS`` names them for recipes."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy
from farflung.spec import Registry
from farflung.types import Reducer

if TYPE_CHECKING:
    from farflung.reducers.adaptive_topk import AdaptiveTopK
    from farflung.reducers.base import summed_nbytes
    from farflung.reducers.codec import CodecReducer
    from farflung.reducers.gradiveq import GradiVeQ
    from farflung.reducers.powersgd import PowerSGD
    from farflung.reducers.shared_scale_qsgd import SharedScaleQSGD
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "adaptive_topk": "AdaptiveTopK",
            "codec": "CodecReducer",
            "gradiveq": "GradiVeQ",
            "powersgd": "PowerSGD",
            "shared_scale_qsgd": "SharedScaleQSGD",
            "base": "summed_nbytes",
        },
    )

__all__ = [
    "REDUCERS",
    "AdaptiveTopK",
    "CodecReducer",
    "GradiVeQ",
    "PowerSGD",
    "SharedScaleQSGD",
    "summed_nbytes",
]

REDUCERS: Registry[Reducer] = Registry(
    __name__,
    {
        "adaptive_topk": "AdaptiveTopK",
        "codec": "CodecReducer",
        "gradiveq": "GradiVeQ",
        "powersgd": "PowerSGD",
        "shared_scale_qsgd": "SharedScaleQSGD",
    },
)
"""Registry of reducers by name; each can be built without arguments and takes ``collective``."""
