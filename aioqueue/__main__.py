"""`python -m aioqueue`."""

from __future__ import annotations

from .cli.main import cli


def main() -> None:
    """Run the command line and end the process with its exit code."""
    cli(prog_name="aioqueue")


if __name__ == "__main__":
    main()
