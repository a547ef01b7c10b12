"""Integrations of farflung into other training loops; each module needs the extra of its name."""

__all__: list[str] = []
