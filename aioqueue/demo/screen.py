"""What the demo shows while it runs and at its end: plain lines, or with rich in a terminal colours and a moving bar.

Only shows; every figure comes from report.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from .report import Check, Report

WIDTH = 34


class Screen:
    """Plain text, a line at a time; nothing at all when quiet."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._step = 0
        self._total = 0
        self._done = 0

    def line(self, text: str = "") -> None:
        """Show one line."""
        if not self._quiet:
            print(text, flush=True)

    def step(self, text: str, promise: str) -> None:
        """Begin a step: what it does, and which promise it shows."""
        self._step += 1
        self.line(f"\n{self._step}. {text}")
        self.line(f"   Promise: {promise}")

    def fact(self, text: str) -> None:
        """Show something that was seen and is not judged."""
        self.line(f"   {text}")

    def checked(self, check: Check) -> None:
        """Show a check."""
        if check.ok:
            self.line(f"   ok     {check.name}: {check.found}")
        else:
            self.line(f"   WRONG  {check.name}: expected {check.expected}, found {check.found}")

    def begin_progress(self, total: int) -> None:
        """Begin a bar."""
        self._total, self._done = total, 0

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        if self._quiet:
            return
        full = WIDTH * self._done // self._total
        text = f"   [{'#' * full}{'.' * (WIDTH - full)}] {self._done}/{self._total}"
        if sys.stdout.isatty():
            print(f"\r{text}", end="" if self._done < self._total else "\n", flush=True)
        elif self._done == self._total or self._done % max(1, self._total // 4) == 0:
            self.line(text)

    def end_progress(self) -> None:
        """End the bar."""

    def table(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table; columns whose cells are numbers stand to the right."""
        widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
        right = [_numeric(rows, column) for column in range(len(heads))]

        def layout(cells: Sequence[str]) -> str:
            parts = [
                cell.rjust(width) if is_right else cell.ljust(width)
                for cell, width, is_right in zip(cells, widths, right, strict=True)
            ]
            return "   " + "  ".join(parts).rstrip()

        self.line(f"\n{title}")
        self.line(layout(heads))
        self.line("   " + "  ".join("-" * width for width in widths))
        for row in rows:
            self.line(layout(row))


class RichScreen(Screen):
    """The same in colour, where rich is installed and the output is a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._console: Any = importlib.import_module("rich.console").Console(highlight=False)
        self._escape: Any = importlib.import_module("rich.markup").escape
        self._bar: Any = None
        self._bar_task: Any = None

    def line(self, text: str = "") -> None:
        """Show one line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def step(self, text: str, promise: str) -> None:
        """Begin a step."""
        self._step += 1
        self._console.print(f"\n[bold]{self._step}. {self._escape(text)}[/]\n   [dim]Promise: {self._escape(promise)}[/]")

    def checked(self, check: Check) -> None:
        """Show a check."""
        if check.ok:
            self._console.print(f"   [green]ok[/]     {self._escape(f'{check.name}: {check.found}')}")
        else:
            text = self._escape(f"{check.name}: expected {check.expected}, found {check.found}")
            self._console.print(f"   [bold red]WRONG[/]  {text}")

    def begin_progress(self, total: int) -> None:
        """Begin a bar."""
        progress = importlib.import_module("rich.progress")
        self._bar = progress.Progress("  ", progress.BarColumn(WIDTH), progress.MofNCompleteColumn(), console=self._console)
        self._bar.start()
        self._bar_task = self._bar.add_task("", total=total)

    def advance(self) -> None:
        """One more is done."""
        self._bar.advance(self._bar_task)

    def end_progress(self) -> None:
        """End the bar."""
        self._bar.stop()


def make_screen(*, quiet: bool) -> Screen:
    """Return what fits the output."""
    if not quiet and sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return RichScreen()
    return Screen(quiet=quiet)


def show_report(screen: Screen, report: Report) -> None:
    """Show the tables at the end, and the verdict."""
    rows = report.tenants
    shown = [*rows[:4], *rows[-1:]]
    table = [
        [
            str(row.tenant),
            f"{row.expected:,}",
            f"{row.computed:,}",
            "yes" if row.cents_equal else "NO",
            str(row.attempts),
            str(row.runs),
            f"{row.waited_milliseconds:.0f}",
            f"{row.claimed_milliseconds:.0f}",
        ]
        for row in shown
    ]
    if len(rows) > len(shown):
        table.insert(4, ["..."] + [""] * 7)
    good = sum(row.ok for row in rows)
    table.append(
        [
            "all",
            f"{sum(row.expected for row in rows):,}",
            f"{sum(row.computed for row in rows):,}",
            f"all {good} equal" if good == len(rows) else f"{len(rows) - good} WRONG",
            f"max {max((row.attempts for row in rows), default=0)}",
            f"max {max((row.runs for row in rows), default=0)}",
            f"max {max((row.waited_milliseconds for row in rows), default=0):.0f}",
            f"max {max((row.claimed_milliseconds for row in rows), default=0):.0f}",
        ]
    )
    screen.table(
        "Statements: invoices per tenant, expected (floor) and computed under its policy",
        ["tenant", "expected", "computed", "sums equal", "attempts", "written", "waited ms", "claim to end ms"],
        table,
    )
    screen.table(
        "Attempts that did not succeed, as the database keeps them",
        ["job", "attempt", "reason", "error", "after s"],
        [[row.job, str(row.attempt), row.reason, row.error, f"{row.seconds:.2f}"] for row in report.attempts],
    )
    screen.table(
        f"Held by the {report.workers} workers while it ran (pg_stat_activity, 20 looks a second; the most at any look)",
        ["phase", "jobs at once", "connections", "transactions", "longest s", "xmin holders"],
        [
            [
                phase.phase,
                str(phase.running),
                str(phase.connections),
                str(phase.transactions),
                f"{phase.longest_transaction:.2f}",
                str(phase.xmin_holders),
            ]
            for phase in report.held
        ],
    )
    wrong = [check for check in report.checks if not check.ok]
    screen.line()
    for check in wrong:
        screen.checked(check)
    verdict = f"all {len(report.checks)} checks right" if report.ok else f"{len(wrong)} of {len(report.checks)} checks WRONG"
    screen.line(f"{verdict}, in {report.seconds:.1f} s")


def _numeric(rows: Sequence[Sequence[str]], column: int) -> bool:
    return any(row[column][:1].isdigit() for row in rows)
