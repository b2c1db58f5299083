"""aioqueue.testing: tests of an application's jobs on a real PostgreSQL, through the real engine, without mocks.

    async with testing.queue(app, aioqueue_dsn) as queue:
        await place_order(…)                                # your code, which enqueues
        await queue.assert_enqueued(send, payload={"to": "ada@example.org"}, tenant="42")
        await queue.drain()                                 # runs it here

Needs no pytest; the plugin beside it (plugin.py) has the databases as fixtures. docs/testing.md is the guide.
"""

from .databases import Database, Databases
from .enqueued import ANY, Enqueued
from .faults import CrashPoint
from .kit import Queue
from .opening import queue
from .pointing import use
from .ran import JobsFailed, Ran, Runs, TestingError

__all__ = [
    "ANY",
    "CrashPoint",
    "Database",
    "Databases",
    "Enqueued",
    "JobsFailed",
    "Queue",
    "Ran",
    "Runs",
    "TestingError",
    "queue",
    "use",
]
