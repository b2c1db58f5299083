"""docs/errors.md explains every error, code of the doctor, reason, exit code and SQLSTATE that there is, and no other."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

from aioqueue import doctor, errors
from aioqueue.cli import failure
from aioqueue.finding import Kind
from aioqueue.outcome import Reason
from tests.documents.pages import ROOT

TEXT = (ROOT / "docs" / "errors.md").read_text()
PACKAGE = Path(errors.__file__).parent


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def test_every_error_has_a_paragraph() -> None:
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.AioQueueError) and kind.__module__ == errors.__name__
    }
    bases = {base.__name__ for kind in classes.values() for base in kind.__mro__[1:]}
    for name in set(classes) - bases:
        found = re.search(rf"^### `{name}`\n\n(.+?)(?=\n#|\Z)", TEXT, re.DOTALL | re.MULTILINE)
        assert found is not None, name
        assert len(found[1].split()) >= 12, f"{name}: what it means, and what to do"
    assert set(re.findall(r"^### `(\w+)`", TEXT, re.MULTILINE)) <= set(classes)
    for name in bases & set(classes):
        assert f"`{name}`" in TEXT, name


def kinds() -> Iterator[Kind]:
    for module in pkgutil.iter_modules(doctor.__path__, f"{doctor.__name__}."):
        yield from (value for value in vars(importlib.import_module(module.name)).values() if isinstance(value, Kind))


def test_every_code_of_the_doctor_is_listed_with_its_severity() -> None:
    listed = re.findall(
        r"^\| \[`([\w-]+)`\]\(doctor\.md#[\w-]+\) \| (\w+) \| \S", section("Findings of the doctor"), re.MULTILINE
    )
    assert sorted(listed) == sorted({(kind.code, str(kind.severity)) for kind in kinds()})
    assert len(listed) >= 20


def test_every_reason_exit_code_and_sqlstate_is_there() -> None:
    reasons = re.findall(r"^\| `([\w ]+)` \|", section("Reasons of an attempt"), re.MULTILINE)
    assert sorted(reasons) == sorted(Reason)
    codes = re.findall(r"^\| (\d) \|", section("Exit codes"), re.MULTILINE)
    assert [int(code) for code in codes] == [0, failure.FAILED, failure.USAGE, failure.UNHEALTHY]
    raised = {
        state for path in PACKAGE.rglob("functions/*.sql") for state in re.findall(r"ERRCODE = '(AQ\d+)'", path.read_text())
    }
    assert raised and raised <= set(re.findall(r"^\| `(AQ\d+)` \|", section("SQLSTATEs"), re.MULTILINE))
