"""aioqueue: an asyncio-native job queue on PostgreSQL for multi-tenant applications.

What stands here is the public interface; everything else may change between versions.
"""

from .app import AioQueue
from .claimed import JobFacts
from .context import JobContext, JobTransaction, current_job
from .control import TenantStatus
from .errors import (
    AioQueueError,
    AppNotOpen,
    ConfigurationError,
    DuplicateJob,
    EmbeddedError,
    EnqueueError,
    InvalidOption,
    InvalidPayload,
    InvalidResult,
    JobCancelled,
    JobError,
    JobFailed,
    JobNotFound,
    LeaseLost,
    NotCommitted,
    ResourcesFailed,
    ResultError,
    ResultInvalid,
    ResultTimeout,
    RetryRefused,
    SchemaError,
    TaskDefinitionError,
    TenantRequired,
    TimeLimitExceeded,
    TransactionAborted,
    TransactionViolation,
    UnknownTask,
    UnsafeDatabase,
)
from .job import Job, JobState, JobStatus
from .job_log import JobLogFilter
from .middleware import CallNext, Middleware
from .outcome import Cancel, RetryIn, Snooze
from .retry import Retry
from .running import RunningWorker
from .settings import LeaseSettings, LimitSettings, PoolSettings, RetentionSettings, Settings, TenantSettings, WorkerSettings
from .states import JobEnded, JobEvent, Progress, ProgressChanged, StateChanged
from .task import BoundTask, Task
from .version import VERSION as __version__

__all__ = [
    "AioQueue",
    "AioQueueError",
    "AppNotOpen",
    "BoundTask",
    "CallNext",
    "Cancel",
    "ConfigurationError",
    "DuplicateJob",
    "EmbeddedError",
    "EnqueueError",
    "InvalidOption",
    "InvalidPayload",
    "InvalidResult",
    "Job",
    "JobCancelled",
    "JobContext",
    "JobEnded",
    "JobError",
    "JobEvent",
    "JobFacts",
    "JobFailed",
    "JobLogFilter",
    "JobNotFound",
    "JobState",
    "JobStatus",
    "JobTransaction",
    "LeaseLost",
    "LeaseSettings",
    "LimitSettings",
    "Middleware",
    "NotCommitted",
    "PoolSettings",
    "Progress",
    "ProgressChanged",
    "ResourcesFailed",
    "ResultError",
    "ResultInvalid",
    "ResultTimeout",
    "RetentionSettings",
    "Retry",
    "RetryIn",
    "RetryRefused",
    "RunningWorker",
    "SchemaError",
    "Settings",
    "Snooze",
    "StateChanged",
    "Task",
    "TaskDefinitionError",
    "TenantRequired",
    "TenantSettings",
    "TenantStatus",
    "TimeLimitExceeded",
    "TransactionAborted",
    "TransactionViolation",
    "UnknownTask",
    "UnsafeDatabase",
    "WorkerSettings",
    "__version__",
    "current_job",
]
