"""Coded training: linear models on devices that may vanish at any moment, with exact answers."""

from farflung.coded.products import Products

__all__ = ["Products"]
