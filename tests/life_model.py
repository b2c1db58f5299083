"""A small model of the life of jobs: what the database must say of each, as the committed world and as open transactions see it.

It knows states, counters and who may touch what; it knows no SQL, no clock and no position but that of a running job.
tests/test_life.py holds the machine that walks model and database side by side.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from uuid import UUID

from aioqueue.claimed import Claimed
from aioqueue.job import SUSPECT, lane

QUEUES = (("default", 0), ("default", 1), ("other", 0))
LANES = [lane(*line) for line in QUEUES]
SUSPECTS = [lane(queue, SUSPECT) for queue in ("default", "other")]
LOST = "worker lost"


@dataclass(frozen=True)
class Life:
    """One job: where it stands and how it came there."""

    id: UUID
    queue: str
    priority: int
    tenant: str | None
    max_attempts: int
    lane: int
    state: str = "ready"
    attempt: int = 0
    spared: int = 0
    worker: int | None = None
    vt: int | None = None
    """Its position while it runs."""
    due: bool = False
    """Scheduled, and its time has come."""
    backing_off: bool = False
    """Scheduled by a rescue, a random while ahead."""
    unknown: bool = False
    """Waits for a worker that knows its task."""
    asked: bool = False
    """Running, and asked to end."""
    attempts: tuple[tuple[int, str], ...] = ()
    result: str | None = None

    @property
    def ended(self) -> bool:
        return self.state in ("succeeded", "dead", "cancelled")

    @property
    def last(self) -> bool:
        return self.attempt - self.spared >= self.max_attempts

    def held_by(self, hand: Claimed) -> bool:
        """Whether a claim's fence is the job's present one."""
        return self.state == "running" and (self.worker, self.lane, self.vt, self.attempt) == (
            hand.worker, hand.lane, hand.vt, hand.attempt,
        )  # fmt: skip

    def claimed(self, worker: int, vt: int) -> "Life":
        return replace(self, state="running", worker=worker, vt=vt, attempt=self.attempt + 1)

    def scheduled(self, *, due: bool = False) -> "Life":
        return replace(self, state="scheduled", due=due)

    def promoted(self) -> "Life":
        return replace(self, state="ready", due=False, backing_off=False, unknown=False)

    def cancelled(self) -> "Life":
        return replace(self, state="cancelled", due=False, backing_off=False, unknown=False)

    def succeeded(self, result: str) -> "Life":
        return replace(self, state="succeeded", worker=None, vt=None, result=result)

    def returned(self, reason: str, delay: float | None, *, spare: bool = False, unknown: bool = False) -> "Life":
        """Its attempt ended otherwise than well; `delay` None: for good."""
        back = replace(self, worker=None, vt=None, asked=False, attempts=(*self.attempts, (self.attempt, reason)))
        if self.asked or reason == "cancelled":
            return replace(back, state="cancelled")
        if delay is None:
            return replace(back, state="dead")
        back = replace(back, spared=self.spared + spare)
        return replace(back, state="scheduled", unknown=unknown) if delay else replace(back, state="ready")

    def rescued(self) -> "Life":
        """Its worker was lost."""
        losses = sum(reason == LOST for _, reason in self.attempts)
        back = self.returned(LOST, None if self.last else 60 if losses else 0)
        if losses and not back.ended:
            back = replace(back, lane=lane(self.queue, SUSPECT), backing_off=True)
        return back


@dataclass(eq=False)
class Open:
    """A transaction that is open: what it will change, and what it keeps others from."""

    only_enqueues: bool = False
    """Under a snapshot of its own: what it sees is the past."""
    jobs: dict[UUID, Life] = field(default_factory=dict)
    workers: dict[int, str | None] = field(default_factory=dict)
    locked: set[UUID] = field(default_factory=set)
    shares: set[int] = field(default_factory=set)
    """Workers whose row a claim holds FOR KEY SHARE."""
    takes: set[int] = field(default_factory=set)
    """Workers whose row rescue or resign holds FOR UPDATE."""
    hands: list[Claimed] = field(default_factory=list)
    promotes: bool = False


@dataclass
class World:
    """What is committed, and the transactions that are open."""

    jobs: dict[UUID, Life] = field(default_factory=dict)
    workers: dict[int, str] = field(default_factory=dict)
    """alive, over (its lease has ended), dead (and said so); a worker without a row is not in it."""
    opened: list[Open] = field(default_factory=list)

    def seen_jobs(self, by: Open | None) -> dict[UUID, Life]:
        return self.jobs if by is None else {**self.jobs, **by.jobs}

    def seen_workers(self, by: Open | None) -> dict[int, str]:
        changes: Mapping[int, str | None] = {} if by is None else by.workers
        return {worker: state for worker, state in {**self.workers, **changes}.items() if state is not None}

    def put(self, by: Open | None, *lives: Life) -> None:
        for life in lives:
            (self.jobs if by is None else by.jobs)[life.id] = life
            if by is not None:
                by.locked.add(life.id)

    def put_worker(self, by: Open | None, worker: int, state: str | None) -> None:
        if by is not None:
            by.workers[worker] = state
            by.takes.add(worker)
        elif state is None:
            self.workers.pop(worker, None)
        else:
            self.workers[worker] = state

    def locked(self, by: Open | None, job_id: UUID) -> bool:
        """Whether another open transaction holds the job."""
        return any(job_id in other.locked for other in self.opened if other is not by)

    def taken(self, by: Open | None, worker: int, *, also_shared: bool = False) -> bool:
        """Whether another open transaction holds the worker's row."""
        return any(worker in other.takes or (also_shared and worker in other.shares) for other in self.opened if other is not by)

    def commit(self, made: Open) -> None:
        self.opened.remove(made)
        self.jobs.update(made.jobs)
        for worker, state in made.workers.items():
            self.put_worker(None, worker, state)

    def available(self, by: Open | None, lives: Iterable[Life]) -> list[Life]:
        """Those that no other open transaction holds."""
        return [life for life in lives if not self.locked(by, life.id)]
