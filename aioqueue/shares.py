"""Who may have one of the pool's connections: jobs' transactions and callers share what the runtime leaves them.

Counts; of connections it knows only one that a job leaves for the job that is let in next. Callers (enqueues, status, results,
hints) are short and hold nothing else; a job may be one while it holds its transaction. So one caller always comes through, also
while jobs have the whole share: jobs that enqueue outside their transaction never wait for each other, and an application is not
shut out by its own worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from .overdue import Overdue

C = TypeVar("C")
Kind = Literal["job", "caller"]


@dataclass(slots=True, eq=False)
class Waiting(Generic[C]):
    """One that waits to be let in, until `turn` is done; `guest` is what it brought with it."""

    turn: asyncio.Future[C | None]
    guest: object


def _give_up(turn: asyncio.Future[Any]) -> None:
    if not turn.done():
        turn.set_exception(TimeoutError())


_turns: Overdue[asyncio.Future[Any]] = Overdue(_give_up)


class Shares(Generic[C]):
    """Lets jobs and callers in, together up to `limit`, and one caller beyond that; each kind in order of arrival."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside: dict[Kind, int] = {"job": 0, "caller": 0}
        self._waiting: dict[Kind, deque[Waiting[C]]] = {"job": deque(), "caller": deque()}
        self.left_over: list[C] = []
        """Connections for jobs that were cancelled at the moment they were let in; for whoever has the pool."""

    @property
    def limit(self) -> int:
        """How many there may be, one more caller apart."""
        return self._limit

    @property
    def free(self) -> int:
        """Jobs that would be let in at once."""
        return max(0, self._limit - self._inside["job"] - self._inside["caller"])

    @property
    def jobs(self) -> int:
        """Jobs that are in, or wait."""
        return self._inside["job"] + len(self._waiting["job"])

    async def enter(self, kind: Kind, guest: object = None, wait: float | None = None) -> C | None:
        """Wait to be let in; `leave` follows exactly if this returns. What it returns was left for who is let in.

        TimeoutError after `wait` seconds.
        """
        if not self._waiting[kind] and self._has_room(kind):
            self._inside[kind] += 1
            return None
        waiting: Waiting[C] = Waiting(asyncio.get_running_loop().create_future(), guest)
        turn = waiting.turn
        self._waiting[kind].append(waiting)
        under_way = None if wait is None else _turns.add(turn, wait)
        try:
            return await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # Let in at the moment of its cancellation. Nobody else gets what was left for it: its own transaction may have
                # begun there.
                left = turn.result()
                if left is not None:
                    self.left_over.append(left)
                self.leave(kind)
            elif waiting in self._waiting[kind]:
                self._waiting[kind].remove(waiting)
            raise
        finally:
            if under_way is not None:
                under_way.pop(turn, None)

    def leave(self, kind: Kind, left: C | None = None) -> bool:
        """Make room for the next; whether a job has got what was `left` for it."""
        self._inside[kind] -= 1
        taken = False
        for each in self._waiting:
            # Jobs first: a stream of callers, one of which always comes through, must not keep them out.
            while self._waiting[each] and self._has_room(each):
                turn = self._waiting[each].popleft().turn
                if turn.done():
                    continue
                self._inside[each] += 1
                gets = each == "job" and not taken
                turn.set_result(left if gets else None)
                taken = taken or gets
        return taken

    def first(self) -> Waiting[C] | None:
        """Take the job that waits first from the line, to change places with one that is in: by `pass_on`, or `put_back`."""
        line = self._waiting["job"]
        while line:
            if not (waiting := line.popleft()).turn.done():
                return waiting
        return None

    def put_back(self, waiting: Waiting[C]) -> None:
        """Let it wait first again."""
        if not waiting.turn.done():
            self._waiting["job"].appendleft(waiting)

    def pass_on(self, waiting: Waiting[C], left: C) -> bool:
        """Let it in in the place of a job that leaves; False: it does not wait any more, and that job is to `leave`."""
        if waiting.turn.done():
            return False
        waiting.turn.set_result(left)
        return True

    def _has_room(self, kind: Kind) -> bool:
        return self.free > 0 or (kind == "caller" and not self._inside["caller"])
