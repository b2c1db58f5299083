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
from typing import NamedTuple, TypeVar

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from aioqueue import embedded

T = TypeVar("T")
_numbers = count(1)
COLOURS = ("#3366aa", "#cc5533", "#449944", "#8855aa", "#997722", "#337788", "#aa3366", "#666666")
WIDTH = 800
"""Of a picture."""


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


def rotated(each: Sequence[T], turn: int) -> list[T]:
    """The order of one round: each begins in turn."""
    first = turn % max(1, len(each))
    return [*each[first:], *each[:first]]


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
    left = 20 + 7 * max(map(len, values))
    right = WIDTH - 120 - left
    body = []
    for i, (name, value) in enumerate(values.items()):
        y = 40 + 26 * i
        body.append(f'<text x="{left - 10}" y="{y + 14}" text-anchor="end">{html.escape(name)}</text>')
        body.append(
            f'<rect x="{left}" y="{y}" width="{right * value / top:.1f}" height="18" fill="{COLOURS[i % len(COLOURS)]}"/>'
        )
        figure = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        body.append(f'<text x="{left + 6 + right * value / top:.1f}" y="{y + 14}">{figure} {html.escape(unit)}</text>')
    _write(path, title, 60 + 26 * len(values), body)


def ticks(top: float) -> list[float]:
    """Round numbers from zero to the first one that is not below `top`: four to eight of them."""
    step = 10.0 ** math.floor(math.log10(top))
    step *= next(factor for factor in (0.2, 0.5, 1.0, 2.0) if top / (step * factor) <= 7)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def lines(path: Path | None, title: str, series: Mapping[str, Sequence[tuple[float, float]]], unit: str, across: str) -> None:
    """Draw one line for each series of (x, y), from zero."""
    if path is None:
        return
    points = [point for line in series.values() for point in line]
    xs, ys = ticks(max(x for x, _ in points) or 1.0), ticks(max(y for _, y in points) or 1.0)

    def at(x: float, y: float) -> tuple[float, float]:
        return 70 + 700 * x / xs[-1], 360 - 300 * y / ys[-1]

    body = [f'<text x="70" y="46">{html.escape(unit)}</text>']
    for y in ys:
        height = at(0, y)[1]
        body.append(f'<path d="M70 {height:.1f}H770" stroke="{"#888" if not y else "#ddd"}"/>')
        body.append(f'<text x="62" y="{height + 4:.1f}" text-anchor="end">{y:,.6g}</text>')
    body += [f'<text x="{at(x, 0)[0]:.1f}" y="378" text-anchor="middle">{x:,.6g}</text>' for x in xs]
    body.append(f'<text x="770" y="398" text-anchor="end">{html.escape(across)}</text>')
    for i, (name, line) in enumerate(series.items()):
        colour, dash = COLOURS[i % len(COLOURS)], ' stroke-dasharray="5 3"' if i >= len(COLOURS) else ""
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
        body.append(f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        x, y = 80 + 170 * (i % 4), 420 + 20 * (i // 4)
        body.append(f'<path d="M{x} {y - 4}H{x + 24}" stroke="{colour}" stroke-width="2"{dash}/>')
        body.append(f'<text x="{x + 30}" y="{y}">{html.escape(name)}</text>')
    _write(path, title, 430 + 20 * math.ceil(len(series) / 4), body)


def _write(path: Path, title: str, height: int, body: Sequence[str]) -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="13">'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    text = f'<text x="10" y="20" font-size="15">{html.escape(title)}</text>'
    path.write_text("\n".join([head, ground, text, *body, "</svg>", ""]))
    say(f"drawn: {path}")
