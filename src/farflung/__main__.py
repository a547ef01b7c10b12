"""Entry point of the ``farflung`` command, ``python -m farflung`` and ``torchrun -m farflung``."""

import sys

__all__: list[str] = []


def main() -> int:
    """Runs the command if its extra is installed, and ``--version`` always; returns the exit code."""
    try:
        from farflung import __version__
        from farflung.errors import MissingExtra
        from farflung.extras import require_modules

        if sys.argv[1:] == ["--version"]:
            print(f"farflung {__version__}")
            return 0
        try:
            require_modules("the farflung command", "tyro", "rich", "matplotlib", extra="cli")
        except MissingExtra as error:
            print(f"farflung: {error}", file=sys.stderr)
            return error.exit_code
        from farflung.cli.main import main as command

        return command()
    except KeyboardInterrupt:  # while modules are imported
        print("farflung: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
