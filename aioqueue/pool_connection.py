"""One connection of the pool: how it waits for the server's answers, how it is cancelled, and how its socket is shut.

psycopg's own way sets a timer for each answer and tells the event loop of the socket anew; here it may stay with the loop.
Decides nothing about which connection is used for what: pool.py and database.py do. What is different behind a pooler stands in
pooler.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import socket
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.abc import PQGen
from psycopg.pq import ConnStatus
from psycopg.rows import TupleRow
from psycopg.waiting import Ready, Wait

from .overdue import Overdue

RV = TypeVar("RV")
CANCEL_SECONDS = 1.0
"""Seconds that a cancelled call waits for the server to end its statement."""
LOOK_AGAIN = 0.5
"""Seconds after which a wait tells the loop of its socket anew: another waiter that is not ours, whose socket had the same number
and was closed under it, takes that number from the loop when it notices."""
TAKE_OVER_SECONDS = 1.0
"""Seconds that another loop waits for the one that watches a socket."""

# The members of an enum are looked up by code in Python: for each answer that would show.
READABLE = int(Wait.R)
READY = Ready.R
OK = int(ConnStatus.OK)


def sever(conn: AsyncConnection[Any] | Connection[Any]) -> None:
    """Shut the connection's socket: whoever waits on it gets an OperationalError at once. Never blocks, never raises."""
    with contextlib.suppress(OSError, psycopg.Error):
        duplicate = socket.socket(fileno=os.dup(conn.fileno()))
        try:
            duplicate.shutdown(socket.SHUT_RDWR)
        finally:
            duplicate.close()


def _cancel_if_ended(loop: asyncio.AbstractEventLoop, fd: int, task: asyncio.Task[None]) -> None:
    """Cancel the task if nothing can come from the socket any more; whatever came, look no further."""
    loop.remove_reader(fd)
    try:
        peer = socket.socket(fileno=os.dup(fd))
        try:
            ended = not peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        finally:
            peer.close()
    except BlockingIOError:
        ended = False
    except OSError:
        ended = True
    if ended:
        task.cancel()


class _Going(Generator[Any, Any, RV]):
    """A generator that has begun: it says first how far it is, its state, end or interruption, and goes on."""

    def __init__(self, gen: PQGen[RV], error: BaseException | None, state: Any = None) -> None:
        self._gen = gen
        self._said = False
        self._error = error
        self._state = state

    def send(self, value: Any) -> Any:
        if self._said:
            return self._gen.send(value)
        self._said = True
        if self._error is not None:
            raise self._error
        return self._state

    def throw(self, *args: Any) -> Any:
        return self._gen.throw(*args)


class PoolConnection(AsyncConnection[TupleRow]):
    """A connection whose cancelled calls end soon: psycopg's own would wait up to 10 s for a server that hangs."""

    _severing: asyncio.TimerHandle | None = None
    _watched_by: asyncio.AbstractEventLoop | None = None
    """The loop that watches the socket."""
    _socket = -1
    _gen: PQGen[Any] | None = None
    """What reads for whoever waits; None: nobody does."""
    _context: contextvars.Context | None = None
    _answer: asyncio.Future[tuple[bool, Any]] | None = None
    """Done when it has read all, or waits for something else: whether it has ended, and its value or what it waits for."""
    stays_watched_by: asyncio.AbstractEventLoop | None = None
    """The loop that goes on watching when an answer has come; whoever sets it is to `unwatch` at the end."""
    pass_on_until = 0.0
    """Until when it may go from job to job without coming back to the pool, by time.monotonic()."""

    async def wait(self, gen: PQGen[RV], *args: Any, **options: Any) -> RV:
        """Wait for the server, as psycopg does; but that sets a timer for each answer, and tells the loop of its socket anew."""
        loop = asyncio.get_running_loop()
        if self._answer is not None:
            raise psycopg.OperationalError("another statement waits for its answer on this connection")
        if args or options or self._is_of_another(loop):
            return await self._wait_slowly(gen, *args, **options)
        try:
            socket = self.pgconn.socket
            state: Any = next(gen)
            if state == READABLE:
                waits = _waits.add(self, LOOK_AGAIN)
                # What the generator calls (handlers of notices) finds the context of who waits.
                self._gen, self._context = gen, contextvars.copy_context()
                answer = self._answer = loop.create_future()
                try:
                    if self._watched_by is None:
                        self._watch(loop, socket)
                    ended, state = await answer
                except BaseException:
                    if answer.done() and not answer.cancelled():
                        answer.exception()  # of a wait that is cancelled as its answer has come: nobody else looks
                    raise
                finally:
                    waits.pop(self, None)
                    if self._answer is answer:
                        self._gen = self._context = self._answer = None
                    if self.stays_watched_by is not loop:
                        self.unwatch()
                if ended:
                    return state  # type: ignore[no-any-return]
        except StopIteration as ended_at_once:
            # Without a wait; psycopg lets other tasks run when there was none for long.
            gen = _Going(gen, ended_at_once)
        except OSError as error:
            raise psycopg.OperationalError("the connection's socket is closed") from error
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit) as interruption:
            gen = _Going(gen, interruption)
        else:
            gen = _Going(gen, None, state)
        finally:
            self._unwatch_if_lost()
        return await self._wait_slowly(gen)

    def _watch(self, loop: asyncio.AbstractEventLoop, socket: int) -> None:
        # The loop keeps the context in which it is told of a socket: a job's would keep the job.
        contextvars.Context().run(loop.add_reader, socket, self._on_readable)
        self._watched_by, self._socket = loop, socket

    def _look_again(self) -> None:
        """Tell the loop of the socket anew; what lies ready there is then read at once."""
        self._unwatch_if_lost()
        loop = self._watched_by
        if loop is not None and self._answer is not None and not self._answer.done():
            loop.remove_reader(self._socket)
            self._watch(loop, self._socket)
            _waits.add(self, LOOK_AGAIN)

    def _on_readable(self) -> None:
        """Let the generator read; whoever waits is told when it has all."""
        if self._gen is None or self._answer is None or self._context is None:
            self.unwatch()  # nobody asked: a server's notice, or its end; who asks next finds it
        elif not self._answer.done():
            try:
                state = self._context.run(self._gen.send, READY)
            except StopIteration as ended:
                self._answer.set_result((True, ended.value))
            except Exception as error:
                self._answer.set_exception(error)
            except BaseException:
                # The generator is over, in the middle of an answer.
                self._answer.set_exception(psycopg.OperationalError("the wait for the server's answer was interrupted"))
                raise
            else:
                if state != READABLE:
                    self._answer.set_result((False, state))
            self._unwatch_if_lost()

    def _unwatch_if_lost(self) -> None:
        # libpq has closed the socket then, whose number another one may have from now on.
        if self._watched_by is not None and self.pgconn.status != OK:
            self.unwatch()

    def unwatch(self) -> None:
        """Take the socket from the loop. Before it is closed: the loop would take the next of that number for watched.

        Who waits for an answer gets an OperationalError: none would come any more. Not for another thread than the loop's.
        """
        loop, self._watched_by = self._watched_by, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._socket)
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(psycopg.OperationalError("the connection was closed before the server's answer"))

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody waits for an answer; its lock tells of calls, but a COPY that is read or a bare wait() holds none."""
        return self._answer is not None

    def _is_of_another(self, loop: asyncio.AbstractEventLoop) -> bool:
        return self._watched_by not in (None, loop) or self.stays_watched_by not in (None, loop)

    async def _take_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the loop that watches the socket, another thread's or an earlier one, cease to before `loop` uses it."""
        watching = self._watched_by
        if watching is None or watching is loop or not watching.is_running():
            self.unwatch()
            return
        done = asyncio.Event()

        def cease() -> None:
            if self._answer is None:
                self.unwatch()
            with contextlib.suppress(RuntimeError):  # closed: nobody waits there any more
                loop.call_soon_threadsafe(done.set)

        watching.call_soon_threadsafe(cease, context=contextvars.Context())
        with contextlib.suppress(TimeoutError):
            # It may be blocked by the very call that waits for `loop`. Before it does anything else it ceases, then, too.
            async with asyncio.timeout(TAKE_OVER_SECONDS):
                await done.wait()

    async def close(self) -> None:
        """Close it, as psycopg does."""
        self.unwatch()
        await super().close()

    async def _wait_slowly(self, gen: PQGen[RV], *args: Any, **options: Any) -> RV:
        try:
            if self._watched_by is not None:
                await self._take_over(asyncio.get_running_loop())
        except asyncio.CancelledError as interruption:
            gen = _Going(gen, interruption)
        try:
            return await super().wait(gen, *args, **options)
        finally:
            if self._severing is not None:
                self._severing.cancel()
                self._severing = None

    async def _try_cancel(self, *, timeout: float = CANCEL_SECONDS) -> None:
        # psycopg calls it when a wait is cancelled, and then waits for the statement's end.
        loop, fd = asyncio.get_running_loop(), self.pgconn.socket
        self._severing = loop.call_later(CANCEL_SECONDS, sever, self)
        asking = loop.create_task(self._ask_to_cancel(min(timeout, CANCEL_SECONDS)))
        try:
            # One whose lease is over is severed meanwhile: its server need not be asked any more, and may not even answer.
            loop.add_reader(fd, _cancel_if_ended, loop, fd, asking)
            await asyncio.wait([asking])
        finally:
            loop.remove_reader(fd)
            asking.cancel()
        if not asking.cancelled():
            asking.result()

    async def _ask_to_cancel(self, seconds: float) -> None:
        with contextlib.suppress(psycopg.Error, OSError):
            await self.cancel_safe(timeout=seconds)


_waits: Overdue[PoolConnection] = Overdue(PoolConnection._look_again)
