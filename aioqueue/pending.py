"""One outcome on its way into the database: what is written of it, and the words for it in events.

The one `match` over outcomes stands here. Pure; record.py writes and decides what becomes of what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .claimed import Claimed
from .outcome import Cancelled, ErrorText, Failed, Outcome, Reason, Released, Snoozed, Succeeded

SPARED = (Reason.SNOOZED, Reason.INTERRUPTED, Reason.NO_CONNECTION, Reason.UNKNOWN_TASK)
"""Reasons of attempts that are not held against the job."""


@dataclass(slots=True, eq=False)
class Pending:
    """One outcome on its way. `name` is what stands in events; `state` what the job is to become, a cancel apart."""

    job: Claimed
    text: str
    """The result of a success; of any other outcome what sql/functions/record.sql reads. JSON."""
    name: str
    state: str
    reason: Reason | None = None
    """Why the attempt did not succeed; None: it did."""
    delay: float | None = None
    minimal: bool = False
    refusals: int = 0
    waits: int = 0
    """How often its row was held by somebody."""

    def minimise(self, refusal: Exception) -> None:
        """Make it the smallest outcome that still says why: the one the database cannot refuse for its content."""
        state = getattr(refusal, "sqlstate", None) or type(refusal).__name__
        error = ErrorText("OutcomeRefused", f"the outcome could not be stored ({state})")
        small = encode(self.job, Failed(Reason.INVALID_RESULT, error, None))
        self.text, self.name, self.state = small.text, small.name, small.state
        self.reason, self.delay = small.reason, small.delay
        self.minimal = True


def parts(batch: Sequence[Pending]) -> tuple[list[str], list[Claimed], list[str]]:
    """Return a batch as `Store.record` takes it: outcomes that are no successes, jobs that succeeded, their results."""
    succeeded = [pending for pending in batch if pending.reason is None]
    others = [pending.text for pending in batch if pending.reason is not None]
    return others, [pending.job for pending in succeeded], [pending.text for pending in succeeded]


def encode(job: Claimed, outcome: Outcome) -> Pending:
    """Turn an outcome into what is written of it."""
    if isinstance(outcome, Succeeded):  # most are: to look for it by the pattern of each case costs more
        return Pending(job, outcome.result, "succeeded", "succeeded")
    facts: dict[str, Any]
    state = "ready"
    match outcome:
        case Failed(reason, error, delay):
            facts = {"o": reason, "d": delay, "t": error.type, "m": error.message, "b": error.traceback}
            name = f"{error.type}: {error.message}"
            state = "dead" if delay is None else state
        case Cancelled(message):
            facts = {"o": Reason.CANCELLED, "d": None, "m": message}
            name, state = message, "cancelled"
        case Snoozed(delay):
            facts = {"o": Reason.SNOOZED, "d": delay, "s": True}
            name = "snoozed"
        case Released(reason, message, delay):
            facts = {"o": reason, "d": delay, "s": True, "m": message}
            if reason is Reason.UNKNOWN_TASK:
                facts["u"] = job.task
            name = message
    if facts["d"]:
        state = "scheduled"
    fence = {"j": job.job_id.hex, "l": job.lane, "v": job.vt, "a": job.attempt}
    return Pending(job, json.dumps({**fence, **facts}), name, state, Reason(facts["o"]), facts["d"])
