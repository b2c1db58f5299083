"""Who may have one of the pool's connections: jobs' transactions and callers share what the runtime leaves them.

Counts only, no connection passes here. Callers (enqueues, status, results, hints) are short and hold nothing else; a job may
be one while it holds its transaction. So one caller always comes through, also while jobs have the whole share: jobs that
enqueue outside their transaction never wait for each other, and an application is not shut out by its own worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Literal

Kind = Literal["job", "caller"]


class Shares:
    """Lets jobs and callers in, together up to `limit`, and one caller beyond that; each kind in order of arrival."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside: dict[Kind, int] = {"job": 0, "caller": 0}
        self._waiting: dict[Kind, deque[asyncio.Future[None]]] = {"job": deque(), "caller": deque()}

    @property
    def free(self) -> int:
        """Jobs that would be let in at once."""
        return max(0, self._limit - sum(self._inside.values()))

    async def enter(self, kind: Kind) -> None:
        """Wait to be let in; `leave` follows exactly if this returns."""
        if not self._waiting[kind] and self._has_room(kind):
            self._inside[kind] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[kind].append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.leave(kind)  # let in at the moment of its cancellation
            elif turn in self._waiting[kind]:
                self._waiting[kind].remove(turn)
            raise

    def leave(self, kind: Kind) -> None:
        """Make room for the next."""
        self._inside[kind] -= 1
        for each in self._waiting:
            # Jobs first: a stream of callers, one of which always comes through, must not keep them out.
            while self._waiting[each] and self._has_room(each):
                turn = self._waiting[each].popleft()
                if turn.done():
                    continue
                self._inside[each] += 1
                turn.set_result(None)

    def _has_room(self, kind: Kind) -> bool:
        return self.free > 0 or (kind == "caller" and not self._inside["caller"])
