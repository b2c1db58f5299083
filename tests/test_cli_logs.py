"""`--log-format json`: one line of JSON for every record, whatever it holds, with the facts of its job and of its event."""

import enum
import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioqueue.cli.logs import CONSOLE, ConsoleLines, JsonLines, set_up_logs
from aioqueue.eventlog import EventLog
from aioqueue.events import DatabaseLost, JobClaimed, JobRecorded, JobsRescued, WorkerStarted

JOB = UUID(int=1)


class Evil:
    """Nothing about it can be written."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class EvilError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Colour(enum.IntEnum):
    RED = 1


def line_of(record: logging.LogRecord) -> dict[str, Any]:
    text = JsonLines().format(record)
    assert text.isascii() and text.isprintable(), "one line, whatever reads it"
    found: dict[str, Any] = json.loads(text)
    return found


def record(message: object = "hello", *args: object, error: BaseException | None = None, **extra: object) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    return logging.getLogger("some.library").makeRecord(
        "some.library", logging.WARNING, "file.py", 7, message, args, exc_info, extra=extra
    )


def test_a_line_says_when_how_grave_who_and_what() -> None:
    line = line_of(record("hello %s", "world"))
    assert datetime.fromisoformat(line.pop("time")).tzinfo == UTC
    assert line == {"level": "WARNING", "logger": "some.library", "message": "hello world"}


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("a\0b", "a\\x00b"),
        ("\ud800 alone", "\\ud800 alone"),
        (b"\xff\x00", "b'\\xff\\x00'"),
        ("two\nlines\r\n\u2028more\u0085", "two\nlines\r\n\u2028more\u0085"),
        ("\x1b[31mred\x1b[0m ünïcode 🎉", "\x1b[31mred\x1b[0m ünïcode 🎉"),
        (ValueError("as a message"), "as a message"),
    ],
)
def test_any_message_is_one_line(message: object, shown: str) -> None:
    assert line_of(record(message))["message"] == shown


def test_a_message_that_cannot_be_made_is_shown_in_its_parts() -> None:
    assert line_of(record("%d of %d", "x"))["message"] == "'%d of %d' ('x',)"
    assert "its __repr__ raised RuntimeError" in line_of(record("of %s", Evil()))["message"]
    assert "its __repr__ raised RuntimeError" in line_of(record(Evil()))["message"]


def test_a_long_message_keeps_head_and_tail() -> None:
    message = line_of(record("a" * 1_000_000 + "z"))["message"]
    assert len(message) < 101_000 and message.startswith("aaa") and message.endswith("z")


def test_an_exception_is_its_traceback_in_one_text() -> None:
    try:
        raise ValueError("a\0b\ud800")
    except ValueError as error:
        line = line_of(record("failed", error=error))
    assert line["exception"].startswith("Traceback") and line["exception"].rstrip().endswith("ValueError: a\\x00b\\ud800")
    assert "EvilError" in line_of(record("failed", error=EvilError()))["exception"]
    group = ExceptionGroup("many", [ValueError(n) for n in range(10_000)])
    assert len(line_of(record("failed", error=group))["exception"]) < 100_000


def test_what_an_application_gives_a_record_is_there_as_far_as_json_can_hold_it() -> None:
    deep: list[Any] = []
    deep.append(deep)
    line = line_of(
        record(
            invoice=7, ratio=float("nan"), big=10**5000, raw=b"\xff", when=datetime(2026, 1, 2, tzinfo=UTC), colour=Colour.RED,
            names={"a": ["ü", None, JOB], JOB: 1, 7: 2, Evil(): 3},
            evil=Evil(), deep=deep, many=list(range(1000)), none=None, level="mine",
        )
    )  # fmt: skip
    assert line["invoice"] == 7 and line["ratio"] == "nan" and line["big"].startswith("0x") and line["raw"] == "b'\\xff'"
    assert line["when"] == "2026-01-02 00:00:00+00:00" and line["colour"] == 1
    assert line["names"] == {
        "a": ["ü", None, str(JOB)], str(JOB): 1, "7": 2, "(Evil: its __repr__ raised RuntimeError)": 3,
    }  # fmt: skip
    assert "raised RuntimeError" in line["evil"] and len(line["many"]) == 100 and "none" not in line
    assert line["level"] == "WARNING" and line["level_"] == "mine"


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters()), st.binary(), st.builds(Evil)),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner), st.tuples(inner)),
)


@given(message=ANYTHING, args=st.lists(ANYTHING, max_size=2), value=ANYTHING)
def test_no_record_breaks_a_line(message: object, args: list[object], value: object) -> None:
    line_of(record(message, *args, value=value))


def test_an_event_is_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test of events")
    log = EventLog(logger)
    with caplog.at_level(logging.DEBUG, "test of events"):
        log(JobClaimed(JOB, "t", "a", 1, "mail", 7))
        log(JobRecorded(JOB, "t", None, 1, "mail", 7, "dead", 0.5, "E: bad\0", "error", 1, 1))
        log(WorkerStarted(7, ("a", "b"), 10))
        log(DatabaseLost("claimer", "gone"))
    claimed, dead, started, lost = [line_of(one) for one in caplog.records]
    facts = {"job_id": str(JOB), "task": "t", "attempt": 1, "queue": "mail", "worker": "7"}
    assert {name: claimed[name] for name in facts} == facts and claimed["event"] == "JobClaimed" and claimed["tenant"] == "a"
    assert {name: dead[name] for name in facts} == facts and "tenant" not in dead
    assert (dead["state"], dead["seconds"], dead["error"], dead["reason"]) == ("dead", 0.5, "E: bad\\x00", "error")
    assert (started["worker"], started["queues"], started["event"]) == ("7", ["a", "b"], "WorkerStarted")
    assert (lost["loop"], lost["error"], lost["level"]) == ("claimer", "gone", "WARNING")


def test_of_jobs_that_go_well_nothing_is_made_unless_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(logging.getLogger("test of events"))
    with caplog.at_level(logging.INFO, "test of events"):
        log(JobClaimed(JOB, "t", "a", 1, "mail", 7))
        log(JobRecorded(JOB, "t", "a", 1, "mail", 7, "succeeded", 0.5))
    assert caplog.records == []


def test_each_job_of_a_dead_worker_has_a_line_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(logging.getLogger("test of events"))
    ids = tuple(UUID(int=n) for n in range(25))
    log(JobsRescued(7, 25, ids))
    first, *each = caplog.records
    assert first.getMessage() == "took over 25 jobs of dead worker 7, of which 20 are named here"
    assert [line_of(one)["job_id"] for one in each] == [str(job_id) for job_id in ids[:20]]
    assert {one.levelname for one in caplog.records} == {"WARNING"}
    log(JobsRescued(7, 1, ids[:1]))
    assert caplog.messages[-2:] == ["took over 1 job of dead worker 7", f"took over job {ids[0]} of dead worker 7"]


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger; as it was afterwards."""
    made = logging.getLogger()
    handlers, level = made.handlers[:], made.level
    yield made
    made.handlers[:] = handlers
    made.setLevel(level)
    logging.captureWarnings(False)


def test_an_apps_own_handlers_stay_and_its_terminal_gets_json(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    root.handlers.clear()
    terminal, file = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    root.addHandler(logging.StreamHandler(terminal))
    root.addHandler(logging.StreamHandler(file))
    set_up_logs(logging.INFO, "json")
    logging.getLogger("x").error("hello\nworld")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    hello, warned = [json.loads(line) for line in terminal.getvalue().splitlines()]
    assert hello["message"] == "hello\nworld" and warned["logger"] == "py.warnings"
    assert file.getvalue().startswith("hello\nworld\n")


@pytest.mark.parametrize("form", ["console", "json"])
def test_where_an_app_has_set_up_nothing_it_is_standard_error(root: logging.Logger, form: Any, capsys: Any) -> None:
    root.handlers.clear()
    set_up_logs(logging.INFO, form)
    logging.getLogger("x").error("hello")
    said = capsys.readouterr().err
    assert (json.loads(said)["message"] == "hello") if form == "json" else ("ERROR   hello" in said)


def test_on_a_console_nothing_is_acted_on_and_nothing_looks_like_a_line_of_its_own() -> None:
    said = record("no \x1b[2Jroom\n2026-12-01 INFO    all is well", job=" [send, tenant a\n2026-12-01 INFO    fake]")
    lines = ConsoleLines(CONSOLE).format(said).split("\n")
    assert "WARNING no \\x1b[2Jroom" in lines[0]
    assert lines[1:] == ["    2026-12-01 INFO    all is well [send, tenant a", "    2026-12-01 INFO    fake]"]
    said = record("failed", error=ValueError("\x9b1A"), job="")
    text = ConsoleLines(CONSOLE).format(said)
    assert "\nTraceback" in text or "\nValueError" in text
    assert "ValueError: \\x9b1A" in text
