"""Reducers: one bucket's whole path over the network. ``REDUCERS`` names them for recipes."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes
from farflung.spec import Registry
from farflung.types import Reducer

if TYPE_CHECKING:
    from farflung.reducers.adaptive_topk import AdaptiveTopK
    from farflung.reducers.base import list_summed_nbytes
    from farflung.reducers.codec import CodecReducer
    from farflung.reducers.gradiveq import GradiVeQ
    from farflung.reducers.powersgd import PowerSGD
    from farflung.reducers.shared_scale_qsgd import SharedScaleQSGD
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "adaptive_topk": "AdaptiveTopK",
            "codec": "CodecReducer",
            "gradiveq": "GradiVeQ",
            "powersgd": "PowerSGD",
            "shared_scale_qsgd": "SharedScaleQSGD",
            "base": "list_summed_nbytes",
        },
    )

__all__ = [
    "REDUCERS",
    "AdaptiveTopK",
    "CodecReducer",
    "GradiVeQ",
    "PowerSGD",
    "SharedScaleQSGD",
    "list_summed_nbytes",
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
