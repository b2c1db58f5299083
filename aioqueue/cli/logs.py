"""How `worker` and `dev` log: lines for a console, or one JSON object a line, whatever a record holds.

Sets up the root logger's handlers; what a record says of its job comes from ../job_log.py, of an event from ../eventlog.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import click

from aioqueue.events import Event
from aioqueue.job_log import JobLogFilter
from aioqueue.lines import printable
from aioqueue.outcome import ErrorText, storable

from .failure import Failure, explain
from .options import option

Format = Literal["console", "json"]

CONSOLE = "%(asctime)s %(levelname)-7s %(message)s%(job)s"
TEXT_LIMIT = 100_000
"""Characters of one text in a JSON line at most; head and tail are kept."""
WIDTH, DEPTH = 100, 4
"""Members of a collection that an application gives a record, and levels of them, that are written at most."""
_OF_EVERY_RECORD = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "job", "event"})

log_format = option(
    "--log-format",
    type=click.Choice(["console", "json"]),
    default="console",
    show_default=True,
    help="Log lines to read, or one JSON object a line.",
)


def set_up_logs(level: int, form: Format) -> None:
    """Log to standard error, unless the app has set up logging: that stays, but in JSON its lines on the terminal are ours."""
    root = logging.getLogger()
    console = logging.StreamHandler()
    console.setFormatter(ConsoleLines(CONSOLE))
    logging.basicConfig(level=level, handlers=[console])
    if form == "json":
        logging.captureWarnings(True)
        ours = [handler for handler in root.handlers if getattr(handler, "stream", None) in (sys.stderr, sys.stdout)]
        if not ours:
            ours = [logging.StreamHandler()]
            root.addHandler(ours[0])
        for handler in ours:
            handler.setFormatter(JsonLines())
    for handler in root.handlers:
        if not any(isinstance(one, JobLogFilter) for one in handler.filters):
            handler.addFilter(JobLogFilter())


@contextlib.contextmanager
def last_word(logger: logging.Logger, level: int, form: Format, *, verbose: bool) -> Iterator[None]:
    """Where lines are JSON, log the error that ends the command, and leave with its code; otherwise the command prints it."""
    try:
        yield
    except (click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        if form == "console":
            raise
        set_up_logs(level, form)  # the app may not even be imported
        failure = error if isinstance(error, Failure) else explain(error)
        logger.error("%s", failure.message, exc_info=error if verbose else None)
        raise click.exceptions.Exit(failure.exit_code) from None


class ConsoleLines(logging.Formatter):
    """Formats a record for people: a terminal acts on nothing in it, and no text in it looks like a line of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record; further lines of its message are indented."""
        return super().formatMessage(record).replace("\n", "\n    ")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the traceback below it."""
        return printable(super().format(record))


class JsonLines(logging.Formatter):
    """Formats every record as one line of JSON in ASCII: time, level, logger, message, the job's facts, the event's, its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; never raises."""
        try:
            return json.dumps(_line(record), allow_nan=False)
        except Exception as error:
            return json.dumps({**_head(record), "message": f"(a record that cannot be written: {type(error).__name__})"})


def _head(record: logging.LogRecord) -> dict[str, Any]:
    when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return {"time": when, "level": str(record.levelname), "logger": _text(record.name)}


def _line(record: logging.LogRecord) -> dict[str, Any]:
    line = {**_head(record), "message": _message(record)}
    event = record.__dict__.get("event")
    facts: dict[str, Any] = {}
    if isinstance(event, Event):
        line["event"] = type(event).__name__
        facts = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    elif event is not None:
        facts = {"event": event}
    given = {str(name): value for name, value in record.__dict__.items() if name not in _OF_EVERY_RECORD and name not in facts}
    for name, value in (facts | given).items():
        if value is not None:
            # 63 bits, of which many readers of JSON lose the last digits.
            line[name if name not in line else f"{name}_"] = str(value) if name == "worker" else _plain(value)
    if record.exc_info and record.exc_info[1] is not None:
        error = ErrorText.of(record.exc_info[1])
        line["exception"] = error.traceback or f"{error.type}: {error.message}"
    if record.stack_info:
        line["stack"] = _text(record.stack_info)
    return line


def _message(record: logging.LogRecord) -> str:
    try:
        return _text(record.getMessage())
    except Exception:  # arguments that do not fit, or whose __str__ raises: a bug of who logs, whose words are still of use
        return f"{_shown(record.msg)} {_shown(record.args)}"


def _plain(value: object, depth: int = DEPTH) -> Any:
    """Return what JSON can hold of a value."""
    match value:
        case None | bool():
            return value
        case int():
            return int(value) if value.bit_length() <= 64 else hex(value)
        case float():
            return float(value) if math.isfinite(value) else str(float(value))
        case str():
            return _text(value)
        case UUID() | date() | Path():
            return _text(str(value))
        case dict() if depth:
            return {str(_plain(key, 0)): _plain(one, depth - 1) for key, one in list(value.items())[:WIDTH]}
        case list() | tuple() | set() | frozenset() if depth:
            return [_plain(one, depth - 1) for one in list(value)[:WIDTH]]
    return _shown(value)


def _text(text: str) -> str:
    return storable(text, TEXT_LIMIT)


def _shown(value: object) -> str:
    try:
        return _text(repr(value))
    except BaseException as error:
        return f"({type(value).__name__}: its __repr__ raised {type(error).__name__})"
