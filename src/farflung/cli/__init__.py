"""The ``farflung`` command."""

from farflung.cli.main import main

__all__ = ["main"]
