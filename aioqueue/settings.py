"""Every setting with its default, in one place: frozen, keyword-only, checked once where it is made.

Durations are seconds as float, or a timedelta where a user may give one; sizes are bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from .claimed import JobFacts
from .errors import ConfigurationError
from .session_factory import SessionFactory

DEFAULT_SCHEMA = "aioqueue"
DEFAULT_QUEUE = "default"
DEFAULT_MAX_ATTEMPTS = 5
NAME_LIMIT = 200
EMBEDDED_GRACE = 10.0
"""Seconds that a worker inside an application lets its jobs finish; a standalone one has LimitSettings.grace."""
DAY = 86_400.0


S = TypeVar("S")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigurationError(message)


def check_kind(option: str, value: object, kind: type[S]) -> S:
    """Return the value, or raise ConfigurationError where it is not of that class."""
    if not isinstance(value, kind):
        raise ConfigurationError(f"{option}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def check_schema_name(schema: str) -> str:
    """Return the schema's name, or raise ConfigurationError where it cannot be quoted safely everywhere."""
    check_kind("schema", schema, str)
    _check(bool(schema.strip()), "schema: expected a name, got an empty one")
    _check(len(schema.encode()) <= 63, f"schema: PostgreSQL's names have at most 63 bytes, {schema!r} has more")
    _check(
        not re.search(r"['$%\\\x00-\x1f]", schema),
        f"schema: {schema!r} has a quote, dollar, percent, backslash or control character; choose another name",
    )
    return schema


def check_name(option: str, value: object) -> str:
    """Return a queue, tenant or task name, or raise ValueError with what is wrong with it."""
    if not isinstance(value, str):
        raise TypeError(f"{option}: expected a string, got {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{option}: expected a name, got an empty or blank one")
    if len(value) > NAME_LIMIT:
        raise ValueError(f"{option}: at most {NAME_LIMIT} characters, got {len(value)}")
    if "\x00" in value or any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError(f"{option}: {value!r} has a NUL character or a lone surrogate, which PostgreSQL cannot store")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """The one pool of a process. Two of its connections are kept back for the worker's loops."""

    size: int = 4
    """Connections at most; at least 3, or jobs with a transaction could starve the heartbeat."""
    min_size: int = 1
    """Connections kept open when idle."""
    acquire_timeout: float = 5.0
    """Seconds the runtime waits for a connection before it counts as an outage."""
    deadline: float = 10.0
    """Seconds one of the runtime's database calls may take before its connection is shut."""
    start_timeout: float = 60.0
    """Seconds that opening an app, and starting a worker, wait for a database that cannot be reached; 0: an error at once."""
    prepare: bool | None = None
    """Prepare statements on the server; None: unless a pooler stands between (PgBouncer needs 1.21, max_prepared_statements)."""

    def __post_init__(self) -> None:
        _check(self.size >= 3, f"pool size: at least 3 (two are kept for the runtime), got {self.size}")
        _check(1 <= self.min_size <= self.size, f"pool min_size: 1 to {self.size}, got {self.min_size}")
        _check(self.acquire_timeout > 0 and self.deadline > 0, "pool: timeouts must be positive")
        _check(self.start_timeout >= 0, f"pool start_timeout: must not be negative, got {self.start_timeout:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """How long a worker may be silent before its jobs are given to others."""

    lease: float = 30.0
    """Seconds a beat is good for; the time to take over after a crash. Too small: a short outage costs attempts."""
    beat: float | None = None
    """Seconds between beats; default and maximum a third of the lease."""
    rescue_interval: float = 1.0
    """Seconds between looks for dead workers."""

    def __post_init__(self) -> None:
        _check(self.lease >= 0.5, f"lease: at least 0.5 s, got {self.lease:g}")
        if self.beat is None:
            object.__setattr__(self, "beat", self.lease / 3)
        _check(
            0 < self.beat_seconds <= self.lease / 3 + 1e-9,
            f"beat: at most a third of the lease ({self.lease / 3:g} s), got {self.beat:g}",
        )
        _check(self.rescue_interval > 0, "rescue_interval: must be positive")

    @property
    def beat_seconds(self) -> float:
        """Seconds between beats."""
        return self.lease / 3 if self.beat is None else self.beat


LARGEST = 100_000_000
"""Bytes of a payload or result that a limit may be set to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """How long things may take."""

    time_limit: float = 600.0
    """Seconds a job that holds nothing may run, unless its task says otherwise."""
    transaction_time_limit: float = 30.0
    """The same for a job that runs in a transaction of its own."""
    grace: float = 25.0
    """Seconds a stopping worker lets its jobs finish (embedded: 10)."""
    abandon: float = 10.0
    """Seconds a cancelled job may ignore its cancellation before it is given up."""
    rollback: float = 2.0
    """Seconds a cancelled job's rollback may take before its connection is closed."""
    transaction_wait: float = 1.0
    """Seconds a job waits for a free connection before it is handed back, spared."""
    payload: int = 1_000_000
    """Bytes of a payload's JSON; at most 100 MB."""
    result: int = 10_000_000
    """Bytes of a result's JSON; at most 100 MB: a worker has it in memory several times, and jsonb ends at 256 MB."""

    def __post_init__(self) -> None:
        for name in ("time_limit", "transaction_time_limit", "abandon", "rollback", "transaction_wait"):
            _check(getattr(self, name) > 0, f"{name}: must be positive, got {getattr(self, name)}")
        _check(self.grace >= 0, f"grace: must not be negative, got {self.grace}")
        for name in ("payload", "result"):
            size = getattr(self, name)
            _check(0 < size <= LARGEST, f"{name}: expected 1 to {LARGEST:,} bytes, got {size}")


def _queue_names(names: object) -> tuple[str, ...]:
    """Return the names; a lone string would be read as its letters, and a mapping would lose its weights."""
    if isinstance(names, Iterable) and not isinstance(names, str | Mapping):
        texts = tuple(names)
        if all(isinstance(text, str) for text in texts):
            return texts
    raise ConfigurationError(f'queues: expected a sequence of names such as ("a", "b:3"), got {names!r}')


def parse_queues(names: tuple[str, ...]) -> dict[str, int]:
    """Read 'a', 'b:3' as queue names with weights; raise ConfigurationError for anything else."""
    queues: dict[str, int] = {}
    for text in names:
        name, colon, weight = text.rpartition(":")
        if not colon:
            name, weight = text, "1"
        _check(
            re.fullmatch(r"[1-9][0-9]?|100", weight) is not None,
            f"queue {text!r}: expected name or name:weight, a whole number from 1 to 100; a queue of that very name needs a "
            f"weight: '{text}:1'",
        )
        try:
            check_name("queue", name)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(str(error)) from None
        _check(name not in queues, f"queue {name!r} is given twice")
        queues[name] = int(weight)
    return queues


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One worker: what it serves and how it looks for work."""

    queues: tuple[str, ...] = ()
    """Queues to serve, each 'name' or 'name:weight'; empty: those of the app's registered tasks, and 'default'."""
    concurrency: int = 100
    """Jobs running at once."""
    claim_batch: int = 250
    """Jobs of one claim at most."""
    poll: float = 1.0
    """Seconds between looks without a wake-up."""
    tick: float = 0.05
    """Seconds between ticks while busy."""
    drain: bool = False
    """Stop once nothing is ready, scheduled jobs apart."""

    def __post_init__(self) -> None:
        _check(self.concurrency >= 1, f"concurrency: at least 1, got {self.concurrency}")
        _check(self.claim_batch >= 1, f"claim_batch: at least 1, got {self.claim_batch}")
        _check(0 < self.tick <= self.poll, f"poll, tick: expected 0 < tick <= poll, got {self.tick:g} and {self.poll:g}")
        object.__setattr__(self, "queues", _queue_names(self.queues))
        parse_queues(self.queues)


OWN_SETTINGS = "aioqueue_job."
"""How our own settings in a job's transaction begin."""


def check_setting_name(option: str, name: object) -> str:
    """Return the name of a setting of the application, or raise ConfigurationError; PostgreSQL wants a dot in it."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_$]*(\.[A-Za-z_][A-Za-z0-9_$]*)+", name):
        raise ConfigurationError(f"{option}: expected a setting's name with a dot such as 'app.tenant', got {name!r}")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings:
    """How a job's tenant, and what else policies go by, is brought into each of its transactions (docs/tenants.md)."""

    setting: str = "app.tenant"
    """Name of the setting that carries the tenant; row-level security policies read it. Empty for a job without one."""
    values: Callable[[JobFacts], Mapping[str, str]] | None = None
    """Further settings of a job's transaction by name, made of its facts; called before each, so it must be quick."""
    role: str | Callable[[JobFacts], str | None] | None = None
    """Role that user code runs as (SET LOCAL ROLE); the worker's role must be a member of it. None: the worker's own."""
    required: bool = False
    """Whether an enqueue without a tenant is refused, unless its task says otherwise (`require_tenant=`)."""
    strict_rls: bool = False
    """Whether a worker refuses to start where policies would not isolate its jobs; otherwise it warns."""

    def __post_init__(self) -> None:
        check_setting_name("tenants setting", self.setting)
        _check(not self.setting.lower().startswith(OWN_SETTINGS), f"tenants setting: {OWN_SETTINGS}* are aioqueue's own to set")
        _check(self.values is None or callable(self.values), f"tenants values: expected a function, got {self.values!r}")
        _check(
            self.role is None or (bool(self.role.strip()) if isinstance(self.role, str) else callable(self.role)),
            f"tenants role: expected a role's name or a function, got {self.role!r}",
        )

    def requires(self, of_task: bool | None) -> bool:
        """Whether jobs of a task must have a tenant, where the task says so (`require_tenant`) or leaves it to the app (None)."""
        return self.required if of_task is None else of_task


def _check_kept(option: str, kept: object) -> None:
    if isinstance(kept, bool) or not isinstance(kept, float | int | timedelta | None):
        raise ConfigurationError(f"retention {option}: expected seconds, a timedelta or None, got {kept!r}")


def _as_seconds(kept: float | timedelta | None) -> float:
    if kept is None:
        return math.inf
    return kept.total_seconds() if isinstance(kept, timedelta) else kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSettings:
    """How long ended jobs are kept, counted from their end; the workers prune them (docs/operations.md)."""

    succeeded: float | timedelta | None = 7 * DAY
    """Seconds, or a timedelta, that a job that succeeded is kept with its result. None: nothing is ever deleted."""
    unsuccessful: float | timedelta | None = 30 * DAY
    """The same for a dead or cancelled job and its attempts; at least as long. None: these are kept for ever."""

    def __post_init__(self) -> None:
        _check_kept("succeeded", self.succeeded)
        _check_kept("unsuccessful", self.unsuccessful)
        kept, longer = self.succeeded_seconds, self.unsuccessful_seconds
        _check(kept >= 3600, f"retention: an hour at least, got {kept:g} s")
        _check(longer >= kept, f"retention: unsuccessful jobs stay at least as long as others ({kept:g} s), got {longer:g} s")

    @property
    def succeeded_seconds(self) -> float:
        """Seconds that a success is kept; infinite for ever."""
        return _as_seconds(self.succeeded)

    @property
    def unsuccessful_seconds(self) -> float:
        """Seconds that a dead or cancelled job is kept; infinite for ever."""
        return _as_seconds(self.unsuccessful)

    @property
    def width(self) -> float:
        """Seconds of id time in one partition: a seventh of what a success is kept, so about ten exist (30 cost nothing)."""
        return max(1.0, self.succeeded_seconds / 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of an app."""

    schema: str = DEFAULT_SCHEMA
    """PostgreSQL schema that holds the queue."""
    tenants: TenantSettings = field(default_factory=TenantSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)
    lease: LeaseSettings = field(default_factory=LeaseSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    session: SessionFactory | None = None
    """Makes the sessions of tasks that take a JobSession."""

    def __post_init__(self) -> None:
        check_schema_name(self.schema)
