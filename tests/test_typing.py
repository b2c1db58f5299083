"""The typed face, held by both type checkers: in tests/typing exactly the lines marked `# E` are errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tests" / "typing").glob("*.py"))

# The first run of a checker on a busy machine reads all of pydantic and psycopg.
pytestmark = pytest.mark.timeout(600)


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    # 0: no errors, 1: errors in the files; anything else means that the checker itself did not work.
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def marked() -> set[tuple[str, int]]:
    return {
        (path.name, number)
        for path in FILES
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if line.endswith("# E")
    }


def test_mypy_flags_exactly_the_wrong_calls() -> None:
    pytest.importorskip("mypy")
    out = run("mypy", "--strict", "--no-pretty", "--no-error-summary", "--output", "json", *map(str, FILES))
    errors = [json.loads(line) for line in out.splitlines()]
    assert {(Path(e["file"]).name, e["line"]) for e in errors if e["severity"] == "error"} == marked()


def test_pyright_flags_exactly_the_wrong_calls() -> None:
    pytest.importorskip("pyright")
    out = run("pyright", "--outputjson", "--pythonpath", sys.executable, "-p", "tests/typing")
    errors = [error for error in json.loads(out)["generalDiagnostics"] if error["severity"] == "error"]
    assert {(Path(e["file"]).name, e["range"]["start"]["line"] + 1) for e in errors} == marked()
