"""Reducers: one bucket's whole journey over the network."""

from farflung.reducers.codec import CodecReducer

__all__ = ["CodecReducer"]
