"""Codecs: gradient to payload and back. Each algorithm has a module; ``CODECS`` names them for recipes.

Codecs compose: :func:`chain`, :func:`error_feedback`, :func:`by_size`, :func:`by_role`.
"""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes
from farflung.spec import Registry
from farflung.types import Codec

if TYPE_CHECKING:
    from farflung.codecs.base import SparseCodec
    from farflung.codecs.chained import Chain, chain
    from farflung.codecs.chunked_topk import ChunkedTopK
    from farflung.codecs.demo import DeMo
    from farflung.codecs.dgc import DGC
    from farflung.codecs.feedback import ErrorFeedback, error_feedback
    from farflung.codecs.identity import Identity
    from farflung.codecs.int8 import Int8
    from farflung.codecs.qsgd import QSGD
    from farflung.codecs.randomk import RandomK
    from farflung.codecs.routed import ByRole, BySize, CodecRoute, RoutedCodec, by_role, by_size
    from farflung.codecs.sign import Sign
    from farflung.codecs.topk import TopK
    from farflung.codecs.truncate16 import Truncate16
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "base": "SparseCodec",
            "chained": "Chain chain",
            "chunked_topk": "ChunkedTopK",
            "demo": "DeMo",
            "dgc": "DGC",
            "feedback": "ErrorFeedback error_feedback",
            "identity": "Identity",
            "int8": "Int8",
            "qsgd": "QSGD",
            "randomk": "RandomK",
            "routed": "ByRole BySize CodecRoute RoutedCodec by_role by_size",
            "sign": "Sign",
            "topk": "TopK",
            "truncate16": "Truncate16",
        },
    )

__all__ = [
    "CODECS",
    "DGC",
    "QSGD",
    "ByRole",
    "BySize",
    "Chain",
    "ChunkedTopK",
    "CodecRoute",
    "DeMo",
    "ErrorFeedback",
    "Identity",
    "Int8",
    "RandomK",
    "RoutedCodec",
    "Sign",
    "SparseCodec",
    "TopK",
    "Truncate16",
    "by_role",
    "by_size",
    "chain",
    "error_feedback",
]

CODECS: Registry[Codec] = Registry(
    __name__,
    {
        "by_role": "by_role",
        "by_size": "by_size",
        "chain": "chain",
        "chunked_topk": "ChunkedTopK",
        "demo": "DeMo",
        "dgc": "DGC",
        "error_feedback": "error_feedback",
        "identity": "Identity",
        "int8": "Int8",
        "qsgd": "QSGD",
        "randomk": "RandomK",
        "sign": "Sign",
        "topk": "TopK",
        "truncate16": "Truncate16",
    },
)
"""Registry of codecs by name; each can be built without arguments."""
