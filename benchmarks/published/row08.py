"""The tenant policy put on the queue's table too."""

from __future__ import annotations

from aioqueue import AioQueue
from aioqueue.errors import AioQueueError

from .stage import Stage, Verdict, value

TITLE = "the tenant policy on the queue's own table"
PUBLISHED = "the worker sees 0 of 100 jobs: no error, an apparently empty queue"
POLICY = """
ALTER TABLE {0} ENABLE ROW LEVEL SECURITY;
ALTER TABLE {0} FORCE ROW LEVEL SECURITY;
CREATE POLICY of_tenant ON {0} USING ({1} = current_setting('app.tenant', true))"""


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    place = await stage.place()
    async with place.connection("owner") as owner, place.connection("worker") as conn:
        await owner.execute("INSERT INTO naive.job (worker) SELECT '7' FROM generate_series(1, 100)")
        await owner.execute(POLICY.format("naive.job", "worker").encode())
        seen = await value(conn, "SELECT count(*) FROM naive.job")
        verdict.naive = f"the worker sees {seen} of 100 jobs, no error"
        verdict.published(seen == 0, f"{seen} of 100")
        await owner.execute(POLICY.format("aioqueue.live", "tenant").encode())
    app = AioQueue(place.dsn("worker"))

    @app.task(name="none")
    async def none() -> None:
        pass

    said = "no error"
    try:
        async with app, app.worker():
            pass
    except AioQueueError as error:
        said = f"{type(error).__name__}: {error}"
    verdict.promise("of_tenant" in said and "live" in said, f"an error at start that names policy and table: {said}")
    verdict.ours = " ".join(said.split())[:200]
    return verdict
