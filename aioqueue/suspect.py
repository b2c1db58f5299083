"""When a busy worker stands still for a suspect: a job lost twice with its worker, which runs with nothing beside it.

Pure: it is told the time and answers how long to claim nothing. An idle worker takes a suspect at once, so a busy one has
patience first, at random and the longer the more it has to wait out. Then it drains for a bounded spell; in vain, it works on
for several times as long and tries again with a spell twice as long. From its first drain on a worker stands still for a third
of the time at most (a fifth on the average), however long its jobs are, and yet the suspect is run alone in the end, since a
spell outgrows every time limit. It is never run
beside other jobs: a third loss would be theirs too.
"""

from __future__ import annotations

import random

PATIENCE = (1.0, 5.0)
"""Seconds, at random, that a worker with little to do leaves a ready suspect to others."""
LONG = 300.0
"""Seconds of a job's remaining time limit that count as much as that patience once more."""
LONGEST = 3600.0
"""Seconds of it that count at most."""
SPELL = 10.0
"""Seconds of the first drain."""
WORK = (4.0, 6.0)
"""Time between two drains, at random, in lengths of the one before."""


class SuspectTurn:
    """The turn of the suspect that is ready now."""

    def __init__(self) -> None:
        self._begins: float | None = None
        self._spell = SPELL

    def reset(self) -> None:
        """No suspect is ready, or one was run: the next one's turn begins anew."""
        self._begins = None
        self._spell = SPELL

    def seconds(self, now: float, *, busy: float, longest: float) -> float:
        """Return for how long to claim nothing else from now on; 0: go on with other work.

        `busy` is the share of the slots that is taken, `longest` the time in seconds that a running job may take yet.
        """
        if self._begins is None:
            self._begins = now + random.uniform(*PATIENCE) * (1.0 + busy + min(longest, LONGEST) / LONG)
        if now < self._begins:
            return 0.0
        left = self._begins + self._spell - now
        if left > 0.0:
            return left
        self._begins = now + self._spell * random.uniform(*WORK)
        self._spell *= 2
        return 0.0
