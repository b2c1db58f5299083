"""The life of jobs: hypothesis walks a model and the database side by side, with workers that die, transactions that are open.

Two sessions of the worker's role may be in a transaction of their own, a third is always in autocommit; every
operation of the engine is called in any order, by whoever owns a job and by whoever owned it once. After each step the
database must say of every job what the model says (tests/life_model.py), and every floor must lie below what is ready.

Time stands still: a job falls due and a lease ends because a step says so. AIOQUEUE_LIFE_SEED (1) and AIOQUEUE_LIFE_TIMES
(6) choose other walks, or more of them.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from psycopg import AsyncConnection

from aioqueue.claimed import Claimed
from aioqueue.floor import Floors
from aioqueue.maintenance_store import UNIX_EPOCH, LaneQuestion, Tick
from aioqueue.store import LOWEST_ID, WORKER_DEAD, LaneScan, Store
from aioqueue.transaction_store import NOT_OWNED
from benchmarks.mixed_jobs import NewJob, enqueue_many
from tests.life_model import LANES, QUEUES, SUSPECTS, Life, Open, World
from tests.postgres import Database
from tests.sql.engine import Session, changed, entry

EVERY = [*LANES, *SUSPECTS]
LINES = [QUEUES[0], *QUEUES]
SEED = int(os.environ.get("AIOQUEUE_LIFE_SEED", "1"))
TIMES = int(os.environ.get("AIOQUEUE_LIFE_TIMES", "6"))
EXAMPLES = 10
"""Walks of one seed: after so many hypothesis would vary those that it has rather than make new ones."""
STEPS = 50
TABLES = ("job", "live", "scheduled", "outcome", "attempt", "cancel", "worker", "task")
MARGIN = timedelta(milliseconds=1)
NEVER = "UPDATE aioqueue.scheduled SET run_at = clock_timestamp() + '1 day' WHERE job_id = ANY (%s)"
SNAPSHOT = """
SELECT (SELECT coalesce(jsonb_agg(jsonb_build_array(l.job_id, l.lane, l.vt, l.tenant, l.attempt, l.spared, l.worker)), '[]')
          FROM aioqueue.live l),
       (SELECT coalesce(jsonb_agg(jsonb_build_array(s.job_id, s.lane, s.tenant, s.attempt, s.spared,
               s.unknown_task IS NOT NULL, s.run_at <= clock_timestamp())), '[]') FROM aioqueue.scheduled s),
       (SELECT coalesce(jsonb_agg(jsonb_build_array(o.job_id, o.state, o.attempt, o.spared, o.result::text, o.message,
               o.started_at, o.finished_at)), '[]') FROM aioqueue.outcome o),
       (SELECT coalesce(jsonb_agg(jsonb_build_array(a.job_id, a.attempt, a.reason) ORDER BY a.attempt), '[]')
          FROM aioqueue.attempt a),
       (SELECT coalesce(jsonb_agg(jsonb_build_array(c.job_id, c.worker)), '[]') FROM aioqueue.cancel c),
       (SELECT coalesce(jsonb_object_agg(w.id, CASE WHEN w.dead THEN 'dead' WHEN w.lease_until < clock_timestamp() THEN 'over'
               ELSE 'alive' END), '{}') FROM aioqueue.worker w),
       (SELECT array_agg(j.id) FROM aioqueue.job j),
       (SELECT array_agg(aioqueue.virtual_time(x.lane) ORDER BY x.n) FROM unnest(%s::bigint[]) WITH ORDINALITY AS x (lane, n))
"""

WHO = st.integers(0, 2)
OPENER = st.integers(0, 1)
BY = st.integers(0, 1)
PICK = st.integers(0, 999)
FORGED = (None, None, None, None, "attempt", "worker", "vt", "lane")
OUTCOMES: dict[str, dict[str, Any]] = {
    "succeeded": {},
    "again at once": {"reason": "error", "d": 0},
    "again later": {"reason": "time limit", "d": 3600},
    "dead": {"reason": "error", "d": None},
    "cancelled": {"reason": "cancelled", "d": None},
    "snoozed": {"reason": "snoozed", "d": 3600, "s": True},
    "handed back": {"reason": "interrupted", "d": 0, "s": True},
    "unknown": {"reason": "unknown task", "d": 3600, "s": True, "u": "t"},
}


@dataclass
class Land:
    """A database and the sessions on it, for all walks of a test."""

    runner: asyncio.Runner
    boss: Session
    sessions: list[Session]

    async def clear(self) -> None:
        """Make it new, and chance in it too."""
        for session in self.sessions:
            await session.rollback()
            await session.rows("SELECT setseed(0.5)")
        await self.boss.rows(f"TRUNCATE {', '.join(f'aioqueue.{table}' for table in TABLES)}")
        for number in EVERY:
            await self.boss.rows(f"SELECT setval('aioqueue.v{number & 1023}', 0, false)")


@pytest.fixture
def land(database: Database, schema: str) -> Iterator[Land]:
    async def connect(role: str) -> Session:
        conn = await AsyncConnection.connect(database.dsn(role), autocommit=True)
        await conn.execute("SET lock_timeout = '2s'")  # a step that waits for another transaction is an error
        return Session(conn, Store(schema))

    with asyncio.Runner() as runner:
        made = Land(runner, runner.run(connect("owner")), [runner.run(connect("worker")) for _ in range(3)])
        yield made
        for session in (*made.sessions, made.boss):
            runner.run(session.conn.close())


@dataclass
class Actor:
    """A session, and its transaction if one is open."""

    session: Session
    open: Open | None = None


@dataclass
class Process:
    """A worker's process: its present identity and its floors, which outlive that."""

    id: int
    floors: Floors = field(default_factory=lambda: Floors(LANES, LOWEST_ID, suspects=SUSPECTS))
    now: float = 0.0


def step(**strategies: Any) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Any]:
    """Make an async method a rule."""

    def decorate(method: Callable[..., Coroutine[Any, Any, None]]) -> Any:
        def run(self: "LifeOfJobs", **drawn: Any) -> None:
            self.land.runner.run(method(self, **drawn))

        run.__name__ = method.__name__
        made: Any = rule(**strategies)
        return made(run)

    return decorate


class LifeOfJobs(RuleBasedStateMachine):
    """The walk. A step that would wait for another transaction, or that nobody could take now, is no step."""

    land: Land

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.actors = [Actor(session) for session in self.land.sessions]
        self.hands: list[Claimed] = []
        self.identities: list[int] = []
        self.processes: list[Process] = []
        self.made = 0
        self.outcomes: dict[UUID, Any] = {}
        self.asked: set[UUID] = set()
        self.vts = [0] * len(EVERY)
        self.positions: dict[UUID, tuple[int, int]] = {}
        self.committing = False

    # -- small parts --------------------------------------------------------------------------------------------------

    @property
    def service(self) -> Session:
        """The session that is never in a transaction."""
        return self.actors[2].session

    def next_number(self) -> int:
        self.made += 1
        return self.made * 0x9E3779B97F4A7C15 % 2**63

    def pick_job(self, by: Open | None, pick: int, *states: str) -> Life | None:
        found = [life for life in self.world.seen_jobs(by).values() if not states or life.state in states]
        return found[pick % len(found)] if found else None

    def find_hands(self, by: Open | None, late: bool) -> list[Claimed]:
        """Claims that are good now, or those that are late: of jobs that run again first."""
        jobs = self.world.seen_jobs(by)
        found = [hand for hand in self.hands if jobs[hand.job_id].held_by(hand) is not late]
        return [hand for hand in found if late and jobs[hand.job_id].state == "running"] or found

    async def pick_hand(self, by: Open | None, pick: int, late: bool) -> Claimed | None:
        """One of them; where there is none, jobs are claimed, and handed back and claimed again by the same worker."""
        found = self.find_hands(by, late)
        if not found:
            await self.claim_some(pick)
            for hand in self.find_hands(None, False) if late else ():
                if not self.world.locked(None, hand.job_id):
                    back = self.world.jobs[hand.job_id].returned("interrupted", 0, spare=True)
                    await self.service.record(hand.worker, entry(hand, "interrupted", d=0, s=True))
                    self.world.put(None, back)
            if late:
                await self.claim_some(pick)
            found = self.find_hands(by, late)
        return found[pick % len(found)] if found else None

    async def claim_some(self, pick: int) -> None:
        """Claim something, by a worker that lives; enqueue something first where nothing is ready."""
        process = self.processes[pick % 2]
        if self.world.workers.get(process.id) != "alive" or self.world.taken(None, process.id):
            process.id = await self.register_one(())
        if not any(x.state == "ready" for x in self.world.available(None, self.world.jobs.values())):
            tenant = (None, "A", "B")[pick % 5 % 3]
            await self.enqueue_some(self.actors[2], LINES[pick % len(LINES)], tenant, 1 + pick % 2, None, 1 + pick % 3)
        await self.claim_as(self.actors[2], process, process.id, 2, True, True)
        if pick % 4:
            await self.tick(process, 0.05)

    def waits(self, by: Open | None, hand: Claimed) -> bool:
        """Whether a write with this fence would wait: its row as committed is another transaction's."""
        life = self.world.seen_jobs(by).get(hand.job_id)
        return life is not None and life.held_by(hand) and self.world.locked(by, hand.job_id)

    async def refused(self, actor: Actor, call: Coroutine[Any, Any, Any], sqlstate: str) -> None:
        """The call is refused with this state; an open transaction ends with it."""
        try:
            await call
        except psycopg.Error as error:
            state = error.sqlstate
        else:
            raise AssertionError(f"expected SQLSTATE {sqlstate}, but it was done")
        assert state == sqlstate
        if actor.open is not None:
            await actor.session.rollback()
            self.world.opened.remove(actor.open)
            actor.open = None

    async def open(self, actor: Actor, made: Open) -> None:
        self.world.opened.append(made)
        actor.open = made

    async def keep_back(self, lives: list[Life]) -> None:
        """Back-off is drawn at random: far enough ahead, it cannot fall due by itself."""
        backing_off = [life.id for life in lives if life.backing_off]
        if backing_off:
            await self.land.boss.rows(NEVER, backing_off)

    async def tick(self, process: Process, seconds: float) -> Tick:
        """One tick as maintenance/tick.py does it."""
        floors = process.floors
        floors.begin_tick()
        questions = [LaneQuestion(n, floors.highest_claimed(n), floors[n].start, floors[n].question) for n in EVERY]
        due_start, due = floors.due.start, floors.due.question
        seen = await self.service.store.tick(
            self.service.conn, worker=process.id, questions=questions, due_from=self.due_from(process),
            due_to=None if due is None else UNIX_EPOCH + timedelta(microseconds=due),
        )  # fmt: skip
        process.now += seconds
        for question, vt, first in zip(questions, seen.vts, seen.firsts, strict=True):
            floor = floors[question.lane]
            if question.upto is not None:
                floor.answer(question.floor, question.upto, first)
            floor.observe(vt, seen.snapshot, process.now)
        if due is not None:
            found = seen.first_due
            floors.due.answer(due_start, due, None if found is None else ((found - UNIX_EPOCH) // timedelta(microseconds=1), 0))
        floors.due.observe((seen.clock - MARGIN - UNIX_EPOCH) // timedelta(microseconds=1), seen.snapshot, process.now)
        return seen

    def due_from(self, process: Process) -> Any:
        return UNIX_EPOCH + timedelta(microseconds=process.floors.due.value)

    # -- the caller's side --------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        async def prepare() -> None:
            await self.land.clear()
            self.processes = [Process(await self.register_one(())) for _ in range(2)]

        self.land.runner.run(prepare())

    async def register_one(self, tasks: tuple[dict[str, object], ...]) -> int:
        identity = await self.service.register(self.next_number(), tasks=tasks)
        self.identities.append(identity)
        self.world.workers[identity] = "alive"
        return identity

    @step(
        who=OPENER, level=st.sampled_from(("READ COMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")),
        line=st.sampled_from(LINES), delay=st.sampled_from((None, None, 1e-6)),
    )  # fmt: skip
    async def open_transaction(self, who: int, level: str, line: tuple[str, int], delay: float | None) -> None:
        """Open one that enqueues, and perhaps does more before it ends."""
        actor = self.actors[who]
        if actor.open is None:
            await actor.session.begin(level)
            await self.open(actor, Open(only_enqueues=level != "READ COMMITTED"))
            await self.enqueue_some(actor, line, "A", 1, delay, 2)

    @step(who=OPENER, commits=st.sampled_from((True, True, False)))
    async def end_transaction(self, who: int, commits: bool) -> None:
        actor = self.actors[who]
        made, actor.open = actor.open, None
        if made is None:
            return
        if not commits:
            await actor.session.rollback()
            self.world.opened.remove(made)
            return
        await actor.session.commit()
        self.committing = True
        self.world.commit(made)
        self.hands += made.hands
        for hand in made.hands:
            for process in self.processes:
                process.floors.claimed(hand.lane, hand.vt)
        await self.keep_back(list(made.jobs.values()))

    @step(
        who=WHO, line=st.sampled_from(LINES), tenant=st.sampled_from((None, "A", "A", "B")), number=st.sampled_from((1, 1, 3)),
        delay=st.sampled_from((None, None, None, 1e-6, 3600.0)), max_attempts=st.sampled_from((1, 2, 5)),
    )  # fmt: skip
    async def enqueue(
        self, who: int, line: tuple[str, int], tenant: str | None, number: int, delay: float | None, max_attempts: int
    ) -> None:
        await self.enqueue_some(self.actors[who], line, tenant, number, delay, max_attempts)

    async def enqueue_some(
        self, actor: Actor, line: tuple[str, int], tenant: str | None, number: int, delay: float | None, max_attempts: int
    ) -> None:
        queue, priority = line
        lives = [
            Life(UUID(int=self.next_number() << 64), queue, priority, tenant, max_attempts, LANES[QUEUES.index(line)])
            for _ in range(number)
        ]
        await enqueue_many(actor.session.store, actor.session.conn, [self.new_job(life, delay) for life in lives])
        self.world.put(actor.open, *(life if delay is None else life.scheduled(due=delay < 1) for life in lives))

    def new_job(self, life: Life, delay: float | None) -> NewJob:
        return NewJob(
            id=life.id, task="t", payload="{}", queue=life.queue, priority=life.priority, tenant=life.tenant,
            max_attempts=life.max_attempts, delay=delay,
        )  # fmt: skip

    @step(who=WHO, pick=PICK)
    async def enqueue_again(self, who: int, pick: int) -> None:
        """The same job by the same id: an enqueue whose answer was lost."""
        actor = self.actors[who]
        life = self.pick_job(actor.open, pick)
        if life is not None and (actor.open is None or not actor.open.only_enqueues):
            await enqueue_many(actor.session.store, actor.session.conn, [self.new_job(life, None)])

    @step(who=WHO, pick=PICK, tenant=st.sampled_from((None, "own", "wrong")))
    async def cancel(self, who: int, pick: int, tenant: str | None) -> None:
        actor = self.actors[who]
        life = self.pick_job(actor.open, pick)
        if life is None or self.world.locked(actor.open, life.id) or (actor.open and actor.open.only_enqueues):
            return
        given = {None: None, "own": life.tenant or "", "wrong": "C"}[tenant]
        state = await actor.session.cancel(life.id, given)
        if tenant == "wrong":
            assert state is None
        elif life.ended:
            assert state == life.state
        elif life.state == "running":
            assert state == "running"
            self.asked.add(life.id)
            self.world.put(actor.open, replace(life, asked=True))
        else:
            assert state == "cancelled"
            self.world.put(actor.open, life.cancelled())

    @step(who=WHO, pick=PICK, ended=st.sampled_from((True, True, False)))
    async def retry(self, who: int, pick: int, ended: bool) -> None:
        actor = self.actors[who]
        life = self.pick_job(actor.open, pick, *(("dead", "cancelled") if ended else ()))
        if life is None or self.world.locked(actor.open, life.id) or (actor.open and actor.open.only_enqueues):
            return
        call = actor.session.store.retry_job(actor.session.conn, life.id)
        if life.state in ("dead", "cancelled"):
            new = await call
            assert new is not None
            first_lane = LANES[QUEUES.index((life.queue, life.priority))]
            self.world.put(actor.open, Life(new, life.queue, life.priority, life.tenant, life.max_attempts, first_lane))
        else:
            await self.refused(actor, call, "55000")

    @step(who=WHO, pick=PICK)
    async def look(self, who: int, pick: int) -> None:
        actor = self.actors[who]
        life = self.pick_job(actor.open, pick)
        if life is None or (actor.open and actor.open.only_enqueues):
            return
        status = await actor.session.store.job_status(actor.session.conn, life.id)
        assert status is not None
        assert (status.state, status.attempt, status.spared, status.worker, status.tenant) == (
            life.state, life.attempt, life.spared, life.worker, life.tenant,
        )  # fmt: skip
        last = None if status.error is None else (status.error.attempt, status.error.reason)
        assert last == (life.attempts[-1] if life.attempts else None)
        (ended,) = await actor.session.store.read_outcomes(actor.session.conn, [(life.id, None)])
        assert (ended.state, ended.result) == (life.state if life.ended else None, life.result)

    @step(pick=PICK)
    async def fall_due(self, pick: int) -> None:
        """Its time has come. As a row that is written now would be: XID first, then the clock."""
        life = self.pick_job(None, pick, "scheduled")
        if life is None:
            await self.enqueue_some(self.actors[2], LINES[pick % len(LINES)], "A", 2, 3600.0, 1 + pick % 3)
        elif not life.due and not self.world.locked(None, life.id):
            boss = self.land.boss
            await boss.begin()
            await boss.rows("SELECT pg_current_xact_id()")
            await boss.rows("UPDATE aioqueue.scheduled SET run_at = clock_timestamp() WHERE job_id = %s", life.id)
            await boss.commit()
            self.world.put(None, replace(life, due=True, backing_off=False))

    # -- the worker's side --------------------------------------------------------------------------------------------

    @step(
        who=WHO, by=BY, limit=st.sampled_from((1, 2, 10)), from_floor=st.sampled_from((True, True, True, False)),
        answered=st.sampled_from((True, True, True, True, False)),
    )  # fmt: skip
    async def claim(self, who: int, by: int, limit: int, from_floor: bool, answered: bool) -> None:
        actor, process = self.actors[who], self.processes[by]
        if not any(life.state == "ready" for life in self.world.seen_jobs(actor.open).values()):
            await self.enqueue_some(actor, LINES[limit % len(LINES)], "A", limit, None, limit)
        await self.claim_as(actor, process, process.id, limit, from_floor, answered)

    @step(who=WHO, by=BY, pick=PICK)
    async def claim_late(self, who: int, by: int, pick: int) -> None:
        """A worker that is dead and does not know it yet claims."""
        if all(self.world.workers.get(worker) == "alive" for worker in self.identities):
            await self.silence(self.identities[pick % len(self.identities)])
        gone = [worker for worker in self.identities if self.world.workers.get(worker) != "alive"]
        if gone:
            await self.claim_as(self.actors[who], self.processes[by], gone[pick % len(gone)], 10, True, True)

    async def claim_as(self, actor: Actor, process: Process, worker: int, limit: int, from_floor: bool, answered: bool) -> None:
        if self.world.taken(actor.open, worker) or (actor.open and actor.open.only_enqueues):
            return
        scans = [
            LaneScan(n, process.floors[n].start if from_floor else (0, LOWEST_ID), limit, group) for group, n in enumerate(EVERY)
        ]
        call = actor.session.store.claim(actor.session.conn, worker=worker, lanes=scans, limit=limit)
        if self.world.seen_workers(actor.open).get(worker) != "alive":
            await self.refused(actor, call, WORKER_DEAD)
            return
        expected = await self.claimable(actor, scans)
        # The first ones by position; which of them comes first in the answer is no matter.
        got = sorted((await call).jobs, key=lambda hand: (EVERY.index(hand.lane), hand.vt, hand.job_id))
        assert [(hand.job_id, hand.lane, hand.vt) for hand in got] == expected[:limit]
        self.take(actor, worker, got)
        if actor.open is not None:
            actor.open.shares.add(worker)
            actor.open.hands += got if answered else []
        elif answered:
            self.hands += got
            for hand in got:
                process.floors.claimed(hand.lane, hand.vt)

    def take(self, actor: Actor, worker: int, got: list[Claimed]) -> None:
        jobs = self.world.seen_jobs(actor.open)
        for hand in got:
            life = jobs[hand.job_id].claimed(worker, hand.vt)
            assert (hand.worker, hand.attempt, hand.spared, hand.tenant, hand.queue, hand.priority, hand.max_attempts) == (
                worker, life.attempt, life.spared, life.tenant, life.queue, life.priority, life.max_attempts,
            )  # fmt: skip
            self.world.put(actor.open, life)

    async def claimable(self, actor: Actor, scans: list[LaneScan]) -> list[tuple[UUID, int, int]]:
        """What the model says can be claimed, in the order of the positions that the database gave it."""
        jobs = self.world.seen_jobs(actor.open)
        ready = {life.id: life for life in self.world.available(actor.open, jobs.values()) if life.state == "ready"}
        rows = await actor.session.rows("SELECT lane, vt, job_id FROM aioqueue.live ORDER BY lane, vt, job_id")
        order = {scan.lane: n for n, scan in enumerate(scans)}
        found = sorted(
            (order[lane], vt, job_id, lane) for lane, vt, job_id in rows if job_id in ready and ready[job_id].lane == lane
        )
        assert len(found) == len(ready)
        # A long transaction that has ended takes its floors back with the next tick: until then its jobs may lie below.
        floors = {scan.lane: scan.floor for scan in scans}
        return [(job_id, lane, vt) for _, vt, job_id, lane in found if (vt, job_id) >= floors[lane]]

    @step(by=BY)
    async def take_all(self, by: int) -> None:
        """After a tick, a claim from the floors finds all that is ready; then it is rolled back."""
        actor, process = self.actors[2], self.processes[by]
        await self.tick(process, 0.05)
        if self.world.workers.get(process.id) != "alive" or self.world.taken(None, process.id):
            return
        scans = [LaneScan(n, process.floors[n].start, 1000) for n in EVERY]
        await actor.session.begin()
        got = (await actor.session.store.claim(actor.session.conn, worker=process.id, lanes=scans, limit=1000)).jobs
        await actor.session.rollback()
        jobs = self.world.available(None, self.world.jobs.values())
        assert {hand.job_id for hand in got} == {life.id for life in jobs if life.state == "ready"}

    @step(
        who=WHO, picks=st.lists(st.tuples(PICK, st.booleans(), st.sampled_from(sorted(OUTCOMES))), min_size=1, max_size=3),
        forged=st.sampled_from(FORGED),
    )  # fmt: skip
    async def record(self, who: int, picks: list[tuple[int, bool, str]], forged: str | None) -> None:
        await self.record_some(who, picks, forged)

    async def record_some(self, who: int, picks: list[tuple[int, bool, str]], forged: str | None) -> None:
        actor = self.actors[who]
        if actor.open is not None and actor.open.only_enqueues:
            return
        chosen: dict[UUID, tuple[Claimed, str]] = {}
        for pick, late, outcome in picks:
            hand = await self.pick_hand(actor.open, pick, late)
            if hand is not None:
                chosen.setdefault(hand.job_id, (hand, outcome))
        if not chosen:
            return
        hands = [self.forge(hand, forged) for hand, _ in chosen.values()]
        worker = hands[0].worker
        hands = [replace(hand, worker=worker) for hand in hands]
        entries, expected = [], {}
        for hand, (_, outcome) in zip(hands, chosen.values(), strict=True):
            facts = OUTCOMES[outcome]
            life = self.world.seen_jobs(actor.open)[hand.job_id]
            if self.waits(actor.open, hand):
                continue
            if life.last and facts.get("d") is not None and not facts.get("s"):
                facts = {**facts, "d": None}  # as the runner decides it
            number = self.next_number()
            entries.append(entry(hand, **facts) if facts else entry(hand, r=number))
            if life.held_by(hand):
                expected[life.id] = (
                    life.returned(facts["reason"], facts["d"], spare="s" in facts, unknown="u" in facts)
                    if facts
                    else life.succeeded(str(number))
                )
        states = await actor.session.record(worker, *entries)
        assert states == {life.id: life.state for life in expected.values()}
        self.world.put(actor.open, *expected.values())

    @step(who=WHO, pick=PICK, outcome=st.sampled_from(sorted(OUTCOMES)))
    async def run_one(self, who: int, pick: int, outcome: str) -> None:
        """What happens most: a job is claimed and recorded."""
        await self.claim_some(pick)
        await self.record_some(who, [(pick, False, outcome)], None)

    @step(who=WHO, pick=PICK, outcome=st.sampled_from(sorted(OUTCOMES)))
    async def record_late(self, who: int, pick: int, outcome: str) -> None:
        """A worker that lost its job writes what became of it."""
        await self.record_some(who, [(pick, True, outcome)], None)

    def forge(self, hand: Claimed, part: str | None) -> Claimed:
        """The claim with one part of its fence wrong."""
        if part is None:
            return hand
        if part == "worker":
            return replace(hand, worker=next(w for w in self.identities if w != hand.worker))
        if part == "lane":
            return replace(hand, lane=next(n for n in EVERY if n != hand.lane))
        return replace(hand, **{part: getattr(hand, part) + 1})

    @step(who=OPENER, pick=PICK, late=st.booleans(), forged=st.sampled_from(FORGED), enqueues=st.booleans())
    async def finish(self, who: int, pick: int, late: bool, forged: str | None, enqueues: bool) -> None:
        """In the job's own transaction, with a job that exists if that commits; it stays open."""
        actor = self.actors[who]
        hand = None if actor.open is not None else await self.pick_hand(None, pick, late)
        if hand is None or self.waits(None, hand := self.forge(hand, forged)):
            return
        life, made = self.world.jobs[hand.job_id], Open()
        await actor.session.open_job(hand)
        await self.open(actor, made)
        if enqueues:
            child = Life(UUID(int=self.next_number() << 64), *QUEUES[0], hand.tenant, 5, LANES[0])
            await enqueue_many(actor.session.store, actor.session.conn, [self.new_job(child, None)])
            self.world.put(made, child)
        number = str(self.next_number())
        if life.held_by(hand):
            await actor.session.finish(hand, number)
            self.world.put(made, life.succeeded(number))
        else:
            await self.refused(actor, actor.session.finish(hand, number), NOT_OWNED)

    @step(who=OPENER, pick=PICK, late=st.booleans(), forged=st.sampled_from(FORGED))
    async def confirm(self, who: int, pick: int, late: bool, forged: str | None) -> None:
        """A short transaction of a job, at its end; it stays open."""
        actor = self.actors[who]
        hand = None if actor.open is not None else await self.pick_hand(None, pick, late)
        if hand is None or self.waits(None, hand := self.forge(hand, forged)):
            return
        await actor.session.open_job(hand)
        await self.open(actor, made := Open())
        if self.world.jobs[hand.job_id].held_by(hand):
            await actor.session.confirm(hand)
            made.locked.add(hand.job_id)
        else:
            await self.refused(actor, actor.session.confirm(hand), NOT_OWNED)

    @step(pick=PICK, late=st.booleans())
    async def read_back(self, pick: int, late: bool) -> None:
        hand = await self.pick_hand(None, pick, late)
        if hand is None or self.waits(None, hand):
            return
        life = self.world.jobs[hand.job_id]
        good = life.state == "succeeded" and life.attempt == hand.attempt
        found = await self.service.store.read_back(self.service.conn, hand)
        assert found == ("ours" if life.held_by(hand) else "succeeded" if good else "lost")

    @step(by=BY, pick=PICK)
    async def find_unknown_claims(self, by: int, pick: int) -> None:
        """Claims whose answer was lost; found, they can be handed back as any other."""
        worker = self.processes[by].id
        running = [life for life in self.world.jobs.values() if life.worker == worker]
        known = {hand.job_id for hand in self.hands if self.world.jobs[hand.job_id].held_by(hand)}
        known -= {life.id for n, life in enumerate(running) if n == pick}
        found = await self.service.store.unknown_claims(self.service.conn, worker=worker)
        found = [hand for hand in found if hand.job_id not in known]
        expected = [life for life in running if life.id not in known]
        assert {(h.job_id, h.lane, h.vt, h.attempt, h.spared, h.tenant) for h in found} == {
            (life.id, life.lane, life.vt, life.attempt, life.spared, life.tenant) for life in expected
        }
        mine = {hand.fence for hand in self.hands}
        self.hands += [hand for hand in sorted(found, key=lambda hand: hand.job_id) if hand.fence not in mine]

    # -- maintenance --------------------------------------------------------------------------------------------------

    @step(by=BY, seconds=st.sampled_from((0.05, 0.05, 2.0)), number=st.sampled_from((1, 3)))
    async def tick_some(self, by: int, seconds: float, number: int) -> None:
        process = self.processes[by]
        seen = await self.tick(process, seconds)
        for _ in range(number - 1):
            seen = await self.tick(process, seconds)
        asked = {life.id for life in self.world.jobs.values() if life.asked and life.worker == process.id}
        assert asked <= set(seen.cancelled) <= self.asked
        assert seen.losses == any(state != "alive" for w, state in self.world.workers.items() if w != process.id)
        if any(life.state == "scheduled" and life.due for life in self.world.jobs.values()):
            assert seen.next_due is not None and seen.next_due <= seen.clock

    @step(who=WHO, by=BY, limit=st.sampled_from((1, 100, 100)))
    async def promote(self, who: int, by: int, limit: int) -> None:
        actor, process = self.actors[who], self.processes[by]
        if actor.open is not None and (actor.open.only_enqueues or any(x.backing_off for x in actor.open.jobs.values())):
            return
        if not any(life.state == "scheduled" and life.due for life in self.world.seen_jobs(actor.open).values()):
            await self.enqueue_some(actor, LINES[limit % len(LINES)], "A", 3, 1e-6, 2)
        await self.tick(process, 0.05)
        # Of rows of its own transaction no floor knows.
        start = UNIX_EPOCH if actor.open is not None else self.due_from(process)
        jobs = self.world.seen_jobs(actor.open)
        due = {x.id: x for x in self.world.available(actor.open, jobs.values()) if x.state == "scheduled" and x.due}
        number = await actor.session.store.promote(actor.session.conn, due_from=start, limit=limit)
        if any(other.promotes for other in self.world.opened if other is not actor.open):
            assert number == -1
            return
        assert number == min(limit, len(due))
        moved = await actor.session.rows("SELECT job_id FROM aioqueue.live WHERE job_id = ANY (%s)", list(due))
        assert len(moved) == number
        self.world.put(actor.open, *(due[job_id].promoted() for (job_id,) in moved))
        if actor.open is not None:
            actor.open.promotes = True

    @step(by=BY, knows=st.booleans())
    async def register(self, by: int, knows: bool) -> None:
        """The process takes another identity; the jobs of the old one stay with that."""
        waiting = [life for life in self.world.jobs.values() if life.unknown and life.state == "scheduled"]
        if knows and len(self.world.available(None, waiting)) < len(waiting):
            return
        facts = {"name": "t", "queue": "default", "priority": 0, "max_attempts": 5}
        self.processes[by].id = await self.register_one((facts,) if knows else ())
        if knows:
            self.world.put(None, *(replace(life, due=True, unknown=False) for life in waiting))

    @step(pick=PICK)
    async def end_lease(self, pick: int) -> None:
        worker = self.pick_worker(pick)
        if worker is not None:
            await self.silence(worker)

    async def silence(self, worker: int) -> None:
        """Its lease ends."""
        if not self.world.taken(None, worker):
            await self.land.boss.end_lease(worker)
            if self.world.workers[worker] == "alive":
                self.world.workers[worker] = "over"

    def pick_worker(self, pick: int) -> int | None:
        workers = list(self.world.workers)
        return workers[pick % len(workers)] if workers else None

    @step(pick=PICK)
    async def beat(self, pick: int) -> None:
        worker = self.identities[pick % len(self.identities)]
        if self.world.taken(None, worker):
            return
        lives = self.world.workers.get(worker) in ("alive", "over")
        assert await self.service.store.beat(self.service.conn, worker=worker, lease=60, running=1) is lives
        if lives:
            self.world.workers[worker] = "alive"

    @step(who=WHO, by=BY, limit=st.sampled_from((1, 100, 100)))
    async def rescue(self, who: int, by: int, limit: int) -> None:
        actor, caller = self.actors[who], self.processes[by].id
        if actor.open is not None and actor.open.only_enqueues:
            return
        if all(state == "alive" for state in self.world.workers.values()):
            await self.claim_some(1 - by)
            await self.silence(self.processes[1 - by].id)
        workers = self.world.seen_workers(actor.open)
        gone = {
            worker: state
            for worker, state in workers.items()
            if worker != caller and state != "alive" and not self.world.taken(actor.open, worker, also_shared=True)
        }
        found = await actor.session.rescue(caller, limit)
        if not gone:
            assert found is None
            return
        assert found is not None
        worker, moved = found
        assert gone[worker] == ("over" if "over" in gone.values() else "dead")
        jobs = self.world.seen_jobs(actor.open)
        running = [life for life in jobs.values() if life.worker == worker]
        free = {life.id: life for life in self.world.available(actor.open, running)}
        assert moved == min(limit, len(free))
        rows = await actor.session.rows("SELECT job_id FROM aioqueue.live WHERE worker = %s", worker)
        left = {job_id for (job_id,) in rows}
        lives = [life.rescued() for life in free.values() if life.id not in left]
        assert len(lives) == moved
        self.world.put(actor.open, *lives)
        self.world.put_worker(actor.open, worker, "dead" if running else None)
        if actor.open is None:
            await self.keep_back(lives)

    @step(who=WHO, pick=PICK)
    async def resign(self, who: int, pick: int) -> None:
        actor = self.actors[who]
        worker = self.identities[pick % len(self.identities)]
        if self.world.taken(actor.open, worker, also_shared=True) or (actor.open and actor.open.only_enqueues):
            return
        await actor.session.store.resign(actor.session.conn, worker=worker)
        if worker in self.world.seen_workers(actor.open):
            runs = any(life.worker == worker for life in self.world.seen_jobs(actor.open).values())
            self.world.put_worker(actor.open, worker, "dead" if runs else None)

    @step(pick=PICK)
    async def lose_row_and_rescue_orphans(self, pick: int) -> None:
        """A worker's row is gone, as after a failover; its jobs are found without it."""
        worker = self.pick_worker(pick)
        if worker is None or self.world.taken(None, worker, also_shared=True):
            return
        await self.land.boss.rows("DELETE FROM aioqueue.worker WHERE id = %s", worker)
        self.world.put_worker(None, worker, None)
        running = [life for life in self.world.jobs.values() if life.worker and life.worker not in self.world.workers]
        lives = [life.rescued() for life in self.world.available(None, running)]
        assert await self.service.store.rescue_orphans(self.service.conn, limit=100) == len(lives)
        self.world.put(None, *lives)
        await self.keep_back(lives)

    # -- what must hold after each step -------------------------------------------------------------------------------

    @invariant()
    def database_and_model_agree(self) -> None:
        self.land.runner.run(self._compare())

    async def _compare(self) -> None:
        live, scheduled, outcomes, attempts, cancels, workers, ids, vts = (await self.land.boss.rows(SNAPSHOT, EVERY))[0]
        places: dict[str, list[Any]] = {}
        for job_id, lane, vt, tenant, attempt, spared, worker in live:
            places.setdefault(job_id, []).append(
                ("live", lane, tenant, attempt, spared, worker, vt if worker is not None else None)
            )
        for job_id, *rest in scheduled:
            places.setdefault(job_id, []).append(("scheduled", *rest))
        for job_id, state, attempt, spared, result, *_ in outcomes:
            places.setdefault(job_id, []).append((state, attempt, spared, result))
        assert places == {str(life.id): [_place(life)] for life in self.world.jobs.values()}
        assert {str(job_id) for job_id in ids or ()} == set(places)

        for job_id, *outcome in outcomes:
            assert self.outcomes.setdefault(job_id, outcome) == outcome, "an end never changes"
        found: dict[str, list[tuple[int, str]]] = {}
        for job_id, attempt, reason in attempts:
            found.setdefault(job_id, []).append((attempt, reason))
        assert found == {str(life.id): list(life.attempts) for life in self.world.jobs.values() if life.attempts}
        for life in self.world.jobs.values():
            numbers = [number for number, _ in life.attempts]
            ran = life.attempt - (life.state in ("running", "succeeded"))
            assert numbers == list(range(1, ran + 1)), "one row for each attempt that did not end in success"
        assert {(str(x.id), x.worker) for x in self.world.jobs.values() if x.asked and x.state == "running"} == {
            (job_id, worker) for job_id, worker in cancels if not self.world.jobs[UUID(job_id)].ended
        }
        assert {int(worker): state for worker, state in workers.items()} == self.world.workers

        assert all(now >= before for now, before in zip(vts, self.vts, strict=True)), "virtual time never goes back"
        before = dict(zip(EVERY, self.vts, strict=True))
        positions = {UUID(job_id): (lane, vt) for job_id, lane, vt, *_ in live}
        if not self.committing:
            for job_id, (lane, vt) in positions.items():
                if self.positions.get(job_id) != (lane, vt):
                    assert vt > before[lane], "whatever becomes ready lies above virtual time"
        self.vts, self.positions, self.committing = vts, positions, False
        for process in self.processes:
            for job_id, (lane, vt) in positions.items():
                floor = process.floors[lane]
                if self.world.jobs[job_id].state == "ready" and not floor._aside:
                    assert (vt, job_id) >= floor.start, "nothing ready lies below a floor"

    def teardown(self) -> None:
        async def end() -> None:
            for actor in self.actors:
                await actor.session.rollback()

        self.land.runner.run(end())


def _place(life: Life) -> tuple[Any, ...]:
    """The one row that stands for the job."""
    if life.ended:
        return (life.state, life.attempt, life.spared, life.result)
    if life.state == "scheduled":
        return ("scheduled", life.lane, life.tenant or "", life.attempt, life.spared, life.unknown, life.due)
    return ("live", life.lane, life.tenant or "", life.attempt, life.spared, life.worker, life.vt)


def walk(land: Land, *, times: int = TIMES, shrinks: bool = True) -> None:
    """Walk so often, always the same ways; on failure the shortest way that was found is printed."""
    for number in range(SEED, SEED + times):

        class Walk(LifeOfJobs):
            pass

        Walk.land = land
        try:
            run_state_machine_as_test(
                seed(number)(Walk),
                settings=settings(
                    max_examples=EXAMPLES,
                    stateful_step_count=STEPS,
                    deadline=None,
                    database=None,
                    derandomize=False,
                    report_multiple_bugs=False,
                    phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
                    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
                ),
            )
        except BaseException as error:
            error.add_note(f"AIOQUEUE_LIFE_SEED={number} AIOQUEUE_LIFE_TIMES=1 walks the same way again")
            raise


@pytest.mark.timeout(600)
def test_the_life_of_jobs(land: Land) -> None:
    walk(land)


SABOTAGE = {
    "record without the attempt in its fence": (
        "record",
        ("AND l.worker = p_worker AND l.attempt = x.a FOR UPDATE", "AND l.worker = p_worker FOR UPDATE"),
    ),
    "a hand-back that keeps the old position": (
        "return_job",
        (
            """PERFORM aioqueue.make_ready(ARRAY[p_lane], ARRAY[p_row.job_id], ARRAY[p_row.tenant], ARRAY[p_row.attempt],
                                ARRAY[p_row.spared + p_spare::integer]);""",
            """INSERT INTO aioqueue.live (lane, vt, job_id, tenant, attempt, spared)
    VALUES (p_lane, p_row.vt, p_row.job_id, p_row.tenant, p_row.attempt, p_row.spared + p_spare::integer);""",
        ),
    ),
    "a claim of a worker that is dead": ("claim", ("NOT w.dead AND w.lease_until > clock_timestamp()", "true")),
    "a tick that takes its snapshot without the transactions in flight": (
        "tick",
        ("SELECT x::text FROM pg_snapshot_xip(seen) AS x", "SELECT x::text FROM pg_snapshot_xip(seen) AS x WHERE false"),
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotaged_the_walk_falls(land: Land, name: str) -> None:
    function, *changes = SABOTAGE[name]
    sabotage = changed(land.boss, function, *changes)
    land.runner.run(sabotage.__aenter__())
    try:
        with pytest.raises(AssertionError):
            walk(land, times=max(TIMES, 10), shrinks=False)
    finally:
        land.runner.run(sabotage.__aexit__(None, None, None))
