"""Applications that hold a worker or wait for results, as processes of their own: `python -m tests.flow.host SCENE`.

Each says on standard error what it has come to, for the test that started it.
"""

import asyncio
import contextlib
import signal
import sys

from aioqueue.errors import ConfigurationError
from tests.flow.tasks import app
from tests.kit import until_true


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


async def cancelled() -> None:
    """Run a worker beside the application's block, in a task that SIGTERM cancels instead of stopping the worker."""

    async def serve() -> None:
        async with app, app.worker(grace=30):
            say("serves")
            try:
                await asyncio.Event().wait()
            finally:
                say("is cancelled")

    async with asyncio.TaskGroup() as group:
        task = group.create_task(serve())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    say("the group has ended")


async def lifespan() -> None:
    """Run a worker in a lifespan which is left at SIGTERM, with a grace that is over at once."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with app.lifespan(object()), app.worker(grace=0.0) as worker:
        try:
            await worker.run()
        except ConfigurationError as error:
            say(f"refused: {error}")
        say("serves")
        await ended.wait()
        worker.stop()
        worker.stop()
    say("the lifespan has ended")


async def restarts() -> None:
    """Start and stop a worker twenty times, idle each time."""
    for _ in range(20):
        async with app, app.worker() as worker:
            await until_true(lambda worker=worker: not worker.problems())  # type: ignore[misc]
    others = asyncio.all_tasks() - {asyncio.current_task()}
    say(f"{len(others)} tasks are left")


async def windows() -> None:
    """Open the app where Windows' own event loop seems to run."""
    setattr(asyncio, "ProactorEventLoop", type(asyncio.get_running_loop()))  # noqa: B010 - there is none here
    sys.platform = "win32"
    try:
        await app.open()
    except ConfigurationError as error:
        say(f"refused: {error}")


async def waits() -> None:
    """Wait for twenty results, run a worker beside them, wait for one that comes, and then on until Ctrl-C."""
    async with app, asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task((await app.get("for_ever").enqueue()).result())
        first = group.create_task((await app.get("weigh").enqueue(text="one")).result())
        say("waits")
        await first  # a worker of another process has it
        async with app.worker(queues=["added"]):
            job = await app.get("weigh").options(queue="added").enqueue(text="seven")
            say(f"has {await first} and {await job.result()}")
            await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run({scene.__name__: scene for scene in (cancelled, lifespan, restarts, waits, windows)}[sys.argv[1]]())
    say("done")
