"""The pages of the documentation as blocks of code, and which of these are not run, each with its reason."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"(?:#|--) ([\w/]+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    language: str
    line: int
    text: str

    @property
    def file(self) -> str | None:
        """The file that it is, by its first line: `# tasks.py`."""
        found = FILE.match(self.text)
        return found and found[1]

    @property
    def first(self) -> str:
        """Its first line."""
        return self.text.partition("\n")[0].strip()

    @property
    def runs(self) -> bool:
        """Whether there is anything to do for it, or it is an exception."""
        included = self.text.startswith('--8<-- "examples/')  # .ci/run runs these, each by itself
        return not included and self.language not in NOT_CODE and (self.page, self.first) not in NOT_RUN

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language})"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        indent = len(found[1])
        lines = "".join(line[indent:] if line[:indent].isspace() else line for line in found[3].splitlines(keepends=True))
        yield Block(page.name, found[2], text.count("\n", 0, found.start()) + 1, lines)


INSTALLS = "installs from a package index, which is what whoever runs this test has done"
CI = "a step of .ci/run"
TRIAL = "takes minutes; tests/test_benchmarks.py and tests/published run it at a small size"
VENV = "python3 -m venv .venv && .venv/bin/pip install -q -e"
NOT_RUN = {
    ("README.md", f"{VENV} '.[embedded]' && .venv/bin/python -m aioqueue demo"): CI,
    ("README.md", f"{VENV} '.[dev]' && .venv/bin/pytest"): CI,
    ("CONTRIBUTING.md", f"{VENV} '.[dev]' && .venv/bin/pytest"): CI,
    ("examples.md", "python examples/quickstart.py"): CI,
    ("README.md", "pip install '/path/to/the/clone[embedded]'"): INSTALLS,
    ("uploads.md", "pip install '/path/to/the/clone[embedded,fastapi]' uvicorn pillow python-multipart itsdangerous"): (
        f"{INSTALLS}; tests/examples/test_uploads.py starts the example"
    ),
    ("published.md", "python -m benchmarks.published            # all rows, at a reduced size: about eight minutes"): TRIAL,
}
"""Page and first line of a block that is not run: why not."""

NOT_CODE = {
    "": "a drawing, or what a command prints",
    "text": "what a command prints",
    "diff": "tests/contrib/test_port.py holds it to the example",
    "html": "for a browser",
    "dockerfile": "needs a builder of images; its commands are checked as all command lines are",
}
"""Languages that no test runs: what holds them, or why nothing does."""

ALL = [block for page in PAGES for block in blocks(page)]
