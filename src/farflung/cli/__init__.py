"""The ``farflung`` command, which the extra ``cli`` is for; it starts in :mod:`farflung.cli.main`."""

__all__: list[str] = []
