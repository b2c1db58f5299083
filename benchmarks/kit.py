"""What the benchmarks share: a PostgreSQL of their own, interleaved rounds, medians and spread, one table, one picture.

Measures nothing itself. Figures are ratios within one run: absolute times belong to the machine and its other work.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from aioqueue import embedded

_numbers = count(1)
COLOURS = ("#3366aa", "#cc5533", "#449944", "#8855aa", "#997722", "#337788", "#aa3366", "#666666")


class Server:
    """A server, and databases on it that go with the run."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self._made: list[str] = []

    def database(self) -> str:
        """Make an empty database and return its DSN."""
        name = f"bench_{os.getpid()}_{next(_numbers)}"
        self.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        self._made.append(name)
        return self.dsn_of(name)

    def copy(self, dsn: str) -> str:
        """Make a database like another one of these, to which nobody is connected, and return its DSN."""
        name, like = f"bench_{os.getpid()}_{next(_numbers)}", str(conninfo_to_dict(dsn)["dbname"])
        statement = "CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY"
        self.execute(sql.SQL(statement).format(sql.Identifier(name), sql.Identifier(like)))
        self._made.append(name)
        return self.dsn_of(name)

    def dsn_of(self, name: str) -> str:
        """The URI of another database of this server."""
        head, _, options = self.dsn.partition("?")
        return f"{head.rpartition('/')[0]}/{name}{'?' + options if options else ''}"

    def drop(self, dsn: str) -> None:
        """Drop a database that was made here, whoever is in it."""
        name = conninfo_to_dict(dsn)["dbname"]
        self.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(str(name))))
        self._made.remove(str(name))

    def close(self) -> None:
        """Drop what was made."""
        for name in list(self._made):
            with contextlib.suppress(psycopg.Error):
                self.drop(self.dsn_of(name))

    def execute(self, statement: sql.Composed) -> None:
        """Run one statement outside of a transaction."""
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(statement)


@contextlib.contextmanager
def server(arguments: argparse.Namespace, **settings: str) -> Iterator[Server]:
    """The server of `--dsn`, or a temporary one with PostgreSQL's default durability."""
    if arguments.dsn is not None:
        found = Server(arguments.dsn)
        try:
            yield found
        finally:
            found.close()
        return
    with tempfile.TemporaryDirectory(prefix="aioqueue-bench-", ignore_cleanup_errors=True) as home:
        os.chmod(home, 0o711)  # noqa: S103 - as root the server is another user, who must get through
        defaults = {"max_connections": "200", "max_wal_size": "8GB", "checkpoint_timeout": "1h"}
        with embedded.start(Path(home) / "server", settings={**defaults, **settings}) as started:
            yield Server(started.dsn("superuser", "postgres"))


def parser(documentation: str | None, name: str, *, rounds: int) -> argparse.ArgumentParser:
    """An argument parser with the options that every benchmark has."""
    text = documentation or ""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dsn", metavar="URI", help="a server to use, as a superuser; default: one of its own")
    parser.add_argument("--rounds", type=int, default=rounds, metavar="N", help=f"interleaved rounds (default {rounds})")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="where to draw the picture; default: none")
    return parser


def settle(dsn: str) -> None:
    """Vacuum, analyse and flush, so that a round begins as the others do."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("VACUUM (ANALYZE, SKIP_LOCKED)")
        conn.execute("CHECKPOINT")


@contextlib.contextmanager
def held_horizon(dsn: str, how: str) -> Iterator[None]:
    """Hold the xmin horizon of a database: `xid` (a transaction that wrote), `reader` (REPEATABLE READ), or `free`."""
    if how == "free":
        yield
        return
    conninfo = make_conninfo(dsn, application_name="bench-holder", options="-c idle_in_transaction_session_timeout=0")
    with psycopg.connect(conninfo, autocommit=True) as conn:
        conn.execute("BEGIN" if how == "xid" else "BEGIN ISOLATION LEVEL REPEATABLE READ")
        conn.execute("SELECT pg_current_xact_id()" if how == "xid" else "SELECT count(*) FROM pg_class")
        yield
        conn.execute("ROLLBACK")


@contextlib.contextmanager
def beside(over: threading.Event, call: Callable[[float], object], firsts: Iterable[float]) -> Iterator[None]:
    """Make the call for each of `firsts` in a thread of its own, until the block ends and sets `over`."""
    threads = [threading.Thread(target=call, args=(first,)) for first in firsts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def median(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return statistics.median(values) if values else math.nan


def spread(values: Sequence[float], form: str = "{:,.0f}") -> str:
    """Lowest to highest."""
    return f"{form.format(min(values))}–{form.format(max(values))}" if values else "–"


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The order of one round: each begins in turn."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


class Promise(NamedTuple):
    """One thing that aioqueue promises, and what this run measured of it; NaN: it did not measure it."""

    what: str
    measured: float
    least: float | None = None
    most: float | None = None
    form: str = "{:.2f}"

    @property
    def kept(self) -> bool | None:
        """Whether it is kept; None: not measured."""
        if math.isnan(self.measured):
            return None
        return (self.least is None or self.measured >= self.least) and (self.most is None or self.measured <= self.most)


def promises(found: Iterable[Promise]) -> tuple[str, bool]:
    """A table of what was promised, and whether none of it is broken."""
    rows, kept = [], True
    for one in found:
        bounds = [f"{sign} {one.form.format(bound)}" for sign, bound in (("≥", one.least), ("≤", one.most)) if bound is not None]
        kept = kept and one.kept is not False
        measured = "not measured" if one.kept is None else one.form.format(one.measured)
        rows.append((one.what, ", ".join(bounds), measured, {None: "–", True: "kept", False: "**not kept**"}[one.kept]))
    return table(("promise", "bound", "measured", ""), rows), kept


def say(text: str) -> None:
    """Print at once, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def bars(path: Path | None, title: str, values: Mapping[str, float], unit: str) -> None:
    """Draw horizontal bars."""
    if path is None or not values:
        return
    top = max(values.values()) or 1.0
    body = []
    for i, (name, value) in enumerate(values.items()):
        y = 40 + 26 * i
        body.append(f'<text x="235" y="{y + 14}" text-anchor="end">{html.escape(name)}</text>')
        body.append(f'<rect x="245" y="{y}" width="{440 * value / top:.1f}" height="18" fill="{COLOURS[i % len(COLOURS)]}"/>')
        body.append(f'<text x="{250 + 440 * value / top:.1f}" y="{y + 14}">{value:,.4g} {html.escape(unit)}</text>')
    _write(path, title, 60 + 26 * len(values), body)


def lines(path: Path | None, title: str, series: Mapping[str, Sequence[tuple[float, float]]], unit: str, across: str) -> None:
    """Draw one line for each series of (x, y), from zero."""
    if path is None:
        return
    points = [point for line in series.values() for point in line]
    right, top = max(x for x, _ in points) or 1.0, max(y for _, y in points) or 1.0
    body = ['<path d="M70 40V340H760" fill="none" stroke="#888"/>']
    body += [f'<text x="62" y="{345 - 100 * i}" text-anchor="end">{top * i / 3:,.3g}</text>' for i in range(4)]
    body.append(f'<text x="760" y="362" text-anchor="end">{right:,.6g} {html.escape(across)}</text>')
    body.append(f'<text x="70" y="34">{html.escape(unit)}</text>')
    for i, (name, line) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        where = " ".join(f"{70 + 690 * x / right:.1f},{340 - 300 * y / top:.1f}" for x, y in line)
        body.append(f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body.append(f'<text x="80" y="{386 + 18 * i}" fill="{colour}">{html.escape(name)}</text>')
    _write(path, title, 390 + 18 * len(series), body)


def _write(path: Path, title: str, height: int, body: Sequence[str]) -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{height}" font-family="sans-serif" font-size="13">'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    text = f'<text x="10" y="20" font-size="15">{html.escape(title)}</text>'
    path.write_text("\n".join([head, ground, text, *body, "</svg>", ""]))
    say(f"drawn: {path}")
