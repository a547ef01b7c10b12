"""The ``farflung`` command of the extra ``cli``; its entry point is :mod:`farflung.cli.main`."""

__all__: list[str] = []
