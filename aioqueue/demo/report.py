"""What the demo has found: its checks and its figures, as values, and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .held import Held


@dataclass(frozen=True, slots=True)
class Check:
    """One figure that must be right."""

    name: str
    expected: object
    found: object
    ok: bool


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One tenant's line of the table."""

    tenant: int
    expected: int
    computed: int
    cents_equal: bool
    attempts: int
    runs: int
    sent: int
    claimed_milliseconds: float
    waited_milliseconds: float

    @property
    def ok(self) -> bool:
        """Whether all of it is as it must be."""
        return self.expected == self.computed and self.cents_equal and self.runs == 1 and self.sent == 1


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One attempt that did not succeed, as it stands in the database."""

    job: str
    attempt: int
    reason: str
    error: str
    seconds: float


@dataclass(slots=True)
class Report:
    """All of it."""

    server: str = ""
    data_dir: str = ""
    invoices: int = 0
    workers: int = 0
    tenants: list[TenantRow] = field(default_factory=list)
    attempts: list[AttemptRow] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every check is right, and there were any."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return everything as values that JSON has."""
        held = [{name: value for name, value in asdict(phase).items() if name != "at_peak"} for phase in self.held]
        return {
            "ok": self.ok,
            "server": self.server,
            "data_dir": self.data_dir,
            "invoices": self.invoices,
            "workers": self.workers,
            "seconds": round(self.seconds, 2),
            "checks": [
                {"name": check.name, "expected": str(check.expected), "found": str(check.found), "ok": check.ok}
                for check in self.checks
            ],
            "tenants": [asdict(row) for row in self.tenants],
            "attempts": [asdict(row) for row in self.attempts],
            "held": held,
        }
