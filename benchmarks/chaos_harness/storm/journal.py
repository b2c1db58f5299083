"""What an enqueuer asked for and was answered: lines appended to a file of its process, which outlives a kill."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from uuid import UUID

from .model import Storm

NEWEST = 60


class Journal:
    """The file of one process. Words:

    asked ID TENANT (enqueued in a transaction); sent ID… (COMMIT is about to be sent); committed ID… (and was answered);
    fate WHAT (how a transaction ended); try (an enqueue without a transaction), pooled ID (it was answered); cancel ID;
    cancelled ID STATE (it was answered); told WHAT (a waiter was), wrong TEXT, ready PID.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.newest: deque[UUID] = deque(maxlen=NEWEST)
        """Jobs committed a moment ago."""
        self.tenants: dict[UUID, str] = {}

    def note(self, word: str, *facts: object) -> None:
        """Write one line, with the machine's monotonic clock; in one call, so that a kill leaves whole lines."""
        os.write(self._file, f"{time.monotonic():.6f} {word} {' '.join(map(str, facts))}\n".encode())
        match word, facts:
            case "asked", (UUID() as job_id, str() as tenant):
                self.tenants[job_id] = tenant
            case "committed", _:
                self.newest += [fact for fact in facts if isinstance(fact, UUID)]


def read(storm: Storm, path: Path) -> None:
    """Add what a process wrote to what is known of the storm; once, after its end."""
    asked: set[UUID] = set()
    sent: set[UUID] = set()
    committed: dict[UUID, float] = {}
    tries = answers = 0
    for line in path.read_text().splitlines():
        at, word, *facts = line.split(" ")
        match word:
            case "asked":
                asked.add(UUID(facts[0]))
            case "sent":
                sent |= {UUID(fact) for fact in facts if fact}
            case "committed":
                committed.update({UUID(fact): float(at) for fact in facts if fact})
            case "fate":
                storm.counts[f"transactions: {facts[0].replace('_', ' ')}"] += 1
            case "try":
                tries += 1
            case "pooled":
                answers += 1
                storm.pooled.add(UUID(facts[0]))
            case "cancel":
                storm.cancelled.setdefault(UUID(facts[0]), "")
                storm.counts["fault: cancel"] += 1
            case "cancelled":
                storm.cancelled[UUID(facts[0])] = facts[1]
            case "told":
                storm.counts[f"waiters told: {facts[0]}"] += 1
            case "wrong":
                storm.fault(" ".join(facts))
    storm.committed.update(committed)
    storm.unknown |= sent - committed.keys()
    storm.rolled_back |= asked - sent
    storm.pooled_unknown += tries - answers
