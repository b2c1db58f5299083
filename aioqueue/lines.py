"""Words for one line of a log or a terminal: a text without line breaks, a duration in its largest unit. Pure."""

from __future__ import annotations

LINE = 500
"""Characters of a line at most, where nobody says."""


def one_line(text: str, limit: int = LINE) -> str:
    """Return the text without line breaks, shortened."""
    joined = " ".join(text.split())
    return joined if len(joined) <= limit else f"{joined[: limit - 1]}…"


def age(seconds: float | None) -> str:
    """Return a duration in its largest unit, as '40 s', '3 min', '5 h', '2 d'; '-' for none."""
    if seconds is None:
        return "-"
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def counted(number: int, noun: str) -> str:
    """Return '1 job', '2 jobs'."""
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"
