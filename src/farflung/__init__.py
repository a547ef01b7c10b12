"""farflung: trains one PyTorch model on many devices that are far apart."""

__version__ = "0.1.0"

__all__ = ["__version__"]
