"""Words for a log or a terminal: a text that a terminal only shows, in one line, a duration in its largest unit. Pure."""

from __future__ import annotations

import re

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""What a terminal acts on instead of showing it, but for tab and newline: control characters, and what turns the direction."""
LINE = 500
"""Characters of a line at most, where nobody says."""


def printable(text: str) -> str:
    """Return the text with an escape (`\\x1b`) in place of each character that a terminal acts on; tabs and newlines stay."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str, limit: int = LINE) -> str:
    """Return the text without line breaks, `printable` and shortened."""
    joined = printable(" ".join(text.split()))
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
