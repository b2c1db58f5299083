"""The port of a BackgroundTasks handler in the documentation is the example's code, and takes as many lines as the page says."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_port_in_the_documentation_is_the_example_s() -> None:
    page = (ROOT / "docs" / "background-tasks.md").read_text()
    found = re.search(r"^```diff\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    lines = found[1].splitlines()
    before = "\n".join(line[1:] for line in lines if line[0] in "- ")
    after = "\n".join(line[1:] for line in lines if line[0] in "+ ")
    ast.parse(before)
    example = (ROOT / "examples" / "fastapi_app.py").read_text()
    for function in re.split(r"\n{3}", after):
        assert function in example
    added, removed = (sum(line[0] == sign for line in lines) for sign in "+-")
    assert f"{added} lines added and {removed} removed" in page.replace("\n", " ")
