"""The fixtures of the callers' tests, for what is built on them."""

from tests.callers.conftest import shop

__all__ = ["shop"]
