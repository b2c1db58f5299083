"""What a check found: a code, how bad it is, what there is, why it matters, and the command that mends it.

A noun: the checks that make findings stand in doctor/. docs/doctor.md explains every code; a test holds it to these.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """Tenants are not kept apart, or jobs are misread: mend it before anything runs."""
    WARNING = "warning"
    """Something works badly, or will not work for long."""
    ADVICE = "advice"
    """Nothing is wrong; it could be safer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found."""

    code: str
    severity: Severity
    what: str
    """What there is, with its names."""
    why: str
    fix: str
    """The command that mends it, or what to do where there is none."""

    @property
    def wrong(self) -> bool:
        """Whether something is wrong: an error or a warning."""
        return self.severity != Severity.ADVICE

    def __str__(self) -> str:
        """Return one line: what, and how to mend it."""
        return f"{self.code}: {self.what}; {self.fix}"


@dataclass(frozen=True, slots=True)
class Kind:
    """One code: what all findings of it have in common."""

    code: str
    severity: Severity
    why: str

    def found(self, what: str, *, fix: str, severity: Severity | None = None) -> Finding:
        """Return a finding of this kind; `severity` where this one is worse or better than most."""
        return Finding(self.code, severity or self.severity, what, self.why, fix)
