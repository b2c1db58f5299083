"""Run the published experiments: all at a reduced size, `--full` at the published one, `--row N` some of them."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.kit import say, table

from .stage import Stage, Verdict, stage

ROWS = range(1, 17)


def main() -> None:
    """Exit with 1 where aioqueue does not keep its promise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--row", type=int, action="append", choices=ROWS, metavar="N", help="this row; several times")
    parser.add_argument("--full", action="store_true", help="at the published size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    arguments = parser.parse_args()
    found: dict[int, tuple[Any, Verdict]] = {}
    with stage(full=arguments.full) as made:
        for number in arguments.row or ROWS:
            found[number] = _run(made, number)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps({number: vars(verdict) for number, (_, verdict) in found.items()}, indent=1))
    print(_table(found))
    sys.exit(any(verdict.broken for _, verdict in found.values()))


def _run(made: Stage, number: int) -> tuple[Any, Verdict]:
    row = importlib.import_module(f"benchmarks.published.row{number:02d}")
    began = time.monotonic()
    try:
        verdict: Verdict = asyncio.run(row.run(made))
    except Exception as error:
        traceback.print_exc()
        verdict = Verdict(broken=[f"it ended with {type(error).__name__}: {error}"])
    say(f"row {number}: {_word(verdict)} in {time.monotonic() - began:.0f} s")
    return row, verdict


def _word(verdict: Verdict) -> str:
    if verdict.broken:
        return f"NOT KEPT: {'; '.join(verdict.broken)}"
    if not verdict.ours:
        return f"waiting: {verdict.waiting}"
    return f"kept; waiting in part: {verdict.waiting}" if verdict.waiting else "kept"


def _table(found: dict[int, tuple[Any, Verdict]]) -> str:
    rows = []
    for number, (row, verdict) in found.items():
        naive = verdict.naive + (f" (unlike published: {'; '.join(verdict.unlike)})" if verdict.unlike else "")
        rows.append((number, row.TITLE, row.PUBLISHED, naive or "–", verdict.ours or "–", _word(verdict)))
    return table(("row", "experiment", "published", "naive form here", "aioqueue here", "promise"), rows)


if __name__ == "__main__":
    main()
