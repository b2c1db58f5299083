"""The published experiments: every row has its module and its line in docs/published.md, and the tests named there exist."""

import asyncio
import importlib
import re
import sys
from pathlib import Path

import pytest

from benchmarks.published import __main__ as command
from benchmarks.published.stage import Stage, Verdict, stage

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "published.md"
QUICK = (3, 8, 11)
"""Rows that take a few seconds: each runs whole, on a server of its own."""


@pytest.mark.parametrize("number", command.ROWS)
def test_every_row_has_a_module_and_a_line(number: int) -> None:
    module = importlib.import_module(f"benchmarks.published.row{number:02d}")
    assert module.TITLE and module.PUBLISHED
    assert re.search(rf"^\| {number} \| {re.escape(module.TITLE)} \|", PAGE.read_text(), re.MULTILINE)


def test_the_tests_that_the_page_names_exist() -> None:
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", PAGE.read_text())
    assert len(named) >= 15
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_quick_rows_keep_their_promise_and_the_naive_form_does_as_published() -> None:
    with stage() as made:
        for number in QUICK:
            row = importlib.import_module(f"benchmarks.published.row{number:02d}")
            verdict = asyncio.run(row.run(made))
            assert (verdict.broken, verdict.unlike, verdict.waiting) == ([], [], ""), number
            assert verdict.naive and verdict.ours


@pytest.mark.slow
def test_row_16_shows_both_forms_beside_the_analysts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For three seconds: what is shown is all there, and there is no backlog; the times are a run's of its own."""
    row = importlib.import_module("benchmarks.published.row16")
    monkeypatch.setattr(row, "RATE", 40)
    monkeypatch.setattr(row, "SECONDS", (3, 3))
    monkeypatch.setattr(row, "NAIVE", (3, 3))
    monkeypatch.setattr(row, "QUERY", (3, 3))
    with stage() as made:
        verdict = asyncio.run(row.run(made))
    assert "jobs wait at the end" in verdict.naive and "jobs wait at the end" in verdict.ours and not verdict.waiting
    assert not any("no backlog" in what for what in verdict.broken)


@pytest.mark.parametrize(
    ("verdict", "said", "code"),
    [
        (Verdict(ours="x"), "kept", 0),
        (Verdict(ours="x", unlike=["y"]), "kept", 0),
        (Verdict(ours="x", broken=["one run: 2"]), "NOT KEPT: one run: 2", 1),
        (Verdict(waiting="not built yet"), "waiting: not built yet", 0),
        (Verdict(ours="x", waiting="needs root"), "kept; waiting in part: needs root", 0),
    ],
)
def test_a_broken_promise_is_an_exit_code_and_a_waiting_row_is_called_that(
    verdict: Verdict, said: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(_stage: Stage) -> Verdict:
        return verdict

    monkeypatch.setattr(importlib.import_module("benchmarks.published.row16"), "run", run)
    monkeypatch.setattr(sys, "argv", ["published", "--row", "16"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert int(ended.value.code or 0) == code
    assert f"| {said} |" in capsys.readouterr().out


def test_a_row_that_fails_is_not_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def run(_stage: Stage) -> Verdict:
        raise RuntimeError("no")

    monkeypatch.setattr(importlib.import_module("benchmarks.published.row16"), "run", run)
    monkeypatch.setattr(sys, "argv", ["published", "--row", "16"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 1
    assert "NOT KEPT: it ended with RuntimeError: no" in capsys.readouterr().out
