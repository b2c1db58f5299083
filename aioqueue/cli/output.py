"""Prints tables, times and JSON. With rich (the extra `cli`) and a terminal, tables are rich's; otherwise aligned text."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import click

from aioqueue.lines import CONTROLS, one_line, printable

RICH = importlib.util.find_spec("rich") is not None
"""Whether the extra `cli` is installed."""


def _plain(value: object) -> str:
    match value:
        case datetime():
            return value.isoformat()
        case UUID():
            return str(value)
    raise TypeError(f"{type(value).__name__} in JSON output")


def _with_text(value: Any) -> Any:
    match value:
        case dict():
            worker = value.get("worker")
            known = {"worker": str(worker)} if isinstance(worker, int) else {}
            return {name: _with_text(one) for name, one in {**value, **known}.items()}
        case list() | tuple():
            return [_with_text(one) for one in value]
    return value


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON; in its texts a terminal finds nothing to act on."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=_plain)
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def print_json(value: Any) -> None:
    """Print a value as indented JSON; times are ISO 8601, identities of workers (63 bits, `worker`) are text."""
    click.echo(dumps(_with_text(value), indent=2))


def say(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text in which names and messages of anybody may stand; see `printable`."""
    click.echo(printable(text), err=err, nl=nl)


def cell(text: str) -> str:
    """Return a name as it stands in one line, character by character."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), indent: int = 0) -> None:
    """Print rows of text under their headers; the columns in `right` are aligned there.

    In a terminal the last column is cut to what is left of the line: half an id or half a name is of no use.
    """
    rows = [[cell(text) for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    if sys.stdout.isatty():
        last = max(20, shutil.get_terminal_size().columns - indent - sum(width + 2 for width in widths[:-1]))
        rows = [(*cells, text if len(text) <= last else f"{text[: last - 1]}…") for *cells, text in rows]
        widths[-1] = min(widths[-1], last)
        if RICH:
            _print_rich(headers, rows, right, widths)
            return
    for row in (headers, *rows):
        cells = [
            text.rjust(width) if header in right else text.ljust(width)
            for header, text, width in zip(headers, row, widths, strict=True)
        ]
        click.echo(" " * indent + "  ".join(cells).rstrip())


def _print_rich(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str], widths: Sequence[int]) -> None:
    table = importlib.import_module("rich.table").Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    width = sum(width + 2 for width in widths)
    importlib.import_module("rich.console").Console(markup=False, highlight=False, width=width).print(table)


def moment(at: datetime | None) -> str:
    """Return a time in the local zone, which it names, to the second; '-' for none."""
    return "-" if at is None else at.astimezone().isoformat(sep=" ", timespec="seconds")


def wrap(text: str, *, indent: int) -> str:
    """Return a text as lines that fit the terminal, all but the first behind `indent` columns."""
    width = max(20, shutil.get_terminal_size().columns - indent)
    return f"\n{' ' * indent}".join(textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False) or [""])


def shorten(text: str, *, indent: int = 0) -> str:
    """Return one line that fits the terminal behind `indent` columns."""
    limit = max(20, shutil.get_terminal_size().columns - indent)
    return one_line(text, limit)
