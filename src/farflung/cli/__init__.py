"""The ``farflung`` command; it starts in :mod:`farflung.cli.main`."""

__all__: list[str] = []
