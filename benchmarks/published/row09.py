"""BackgroundTasks in the web process, which is killed; the same handler as a task."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import subprocess
import urllib.error
import urllib.request

from .processes import Processes, processes
from .stage import Place, Stage, Verdict, until, value

TITLE = "work in the web process, which is killed"
PUBLISHED = 'the row says "converting" for ever; work is lost'


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        verdict.waiting = f"needs {' and '.join(missing)}: pip install -e '.[dev]'"
        return verdict
    place = await stage.place()
    with processes() as started:
        process, port = await _serve(place, started)
        for path in ("background", "task"):
            await asyncio.to_thread(_post, port, path)
        async with place.connection() as boss:
            await until(lambda: value(boss, "SELECT EXISTS (SELECT FROM aioqueue.live WHERE worker IS NOT NULL)"))
            process.kill()
            process.wait(10)
            await _serve(place, started)
            finished = await until(lambda: value(boss, "SELECT state = 'converted' FROM naive.job WHERE work = 'task'"))
            results = await value(boss, "SELECT count(*) FROM naive.effect WHERE job = 'task'")
            state = await value(boss, "SELECT state FROM naive.job WHERE work = 'background'")
            lost = await value(boss, "SELECT count(*) FROM naive.effect WHERE job = 'background'")
    verdict.naive = f"the row says {state!r}, {lost} results, after the restart"
    verdict.published((state, lost) == ("converting", 0), f"{state}, {lost} results")
    verdict.promise(finished and results == 1, f"finished after the restart, one result: {results}")
    verdict.ours = f"{'converted' if finished else 'not converted'} after the restart, {results} result"
    return verdict


async def _serve(place: Place, started: Processes) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    process = started.start(
        place.dsn("worker"), "uvicorn", "benchmarks.published.web:web", "--port", str(port), "--log-level", "error"
    )

    async def answers() -> bool:
        return await asyncio.to_thread(_answers, port)

    await until(answers, pause=0.1)
    return process, port


def _post(port: int, path: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/{path}", method="POST"), timeout=20).close()


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json", timeout=2).close()
    except (urllib.error.URLError, OSError):
        return False
    return True
