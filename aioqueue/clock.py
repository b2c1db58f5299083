"""The clock by which a worker judges its own lease."""

from __future__ import annotations

import time


def clock() -> float:
    """Seconds of a clock that goes on while the machine sleeps, where there is one; its zero means nothing."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
