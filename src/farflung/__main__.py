"""``python -m farflung``, and what ``torchrun -m farflung`` starts."""

import sys

from farflung.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
