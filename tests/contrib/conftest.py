"""The fixtures of the callers' tests, for what is built on them."""

from tests.callers.conftest import app, boss, shop

__all__ = ["app", "boss", "shop"]
