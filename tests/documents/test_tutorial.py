"""The tutorial, followed word by word: its files are written, its commands typed into a shell, what it shows must be said."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents.pages import ROOT, Block, blocks
from tests.documents.runner import LASTING, free_port, remove_embedded_data

PAGE = ROOT / "docs" / "tutorial.md"
NOT_TYPED = {
    "python3 -m venv .venv": "installs from a package index, which is what whoever runs this test has done",
    ". .venv/bin/activate": "the environment of whoever runs this test is active",
}
PATIENCE = 60.0
"""Seconds after which a wait is a failure."""
MARK = "--- the end of it: "


class Shell:
    """One terminal: commands are typed into it, one after the other, and keep their variables."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._shell = subprocess.Popen(
            ["bash"], cwd=directory, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def type(self, commands: str) -> str:
        """Run them; what they say. Each must succeed, but for the last one's waiting for what was killed."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f'{commands}\necho "{MARK}$?"\n')
        self._shell.stdin.flush()
        said = []
        for line in self._shell.stdout:
            before, mark, code = line.partition(MARK)
            said.append(before)
            if mark:
                assert code.strip() == "0", f"{commands}\nended with {code.strip()}:\n{''.join(said)}"
                return "".join(said)
        raise AssertionError("the shell has ended")

    def close(self) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait(PATIENCE)
        assert self._shell.stdout is not None
        self._shell.stdout.close()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory, whose embedded server's data is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    remove_embedded_data()


class Server:
    """A server in a terminal of its own, from its start until Ctrl-C."""

    def __init__(self, command: str, directory: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command.split(), cwd=directory, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.said = ""
        self._works = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._works.wait(PATIENCE), self.said
        assert "Uvicorn running on" in self.said, self.said

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.said += line
                if "Uvicorn running on" in line:
                    self._works.set()
        self._works.set()

    def stop(self) -> None:
        """Type Ctrl-C."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._reader.join(PATIENCE)


def expect(block: Block, said: str) -> None:
    """Each line that the page shows was said; `…` stands for anything."""
    for line in block.text.splitlines():
        pattern = ".*".join(re.escape(part) for part in line.split("…"))
        assert re.search(rf"^{pattern}$", said, re.MULTILINE), f"{block}: {line!r} is not in\n{said}"


@pytest.mark.slow  # a lease must end, and eight programs start
@pytest.mark.skipif(shutil.which("curl") is None, reason="the tutorial uses curl")
def test_it_can_be_followed(place: Path) -> None:
    port = str(free_port())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(place), "PYTHONUNBUFFERED": "1"}
    shell = Shell(place, environment)
    server: Server | None = None
    said = ""
    shown = 0
    try:
        for block in blocks(PAGE):
            text = block.text.replace("8000", port)
            if block.first in NOT_TYPED:
                continue
            if block.file is not None:
                (place / block.file).write_text(text)
            elif block.language == "text":
                expect(block, said)
                shown += 1
            elif LASTING.search(text) and "&" not in text:
                server = Server(text, place, environment)
            else:
                assert block.language == "bash", block
                said = shell.type(text)
                print(f"$ {text}{said}")
        assert shown >= 8
    finally:
        if server is not None:
            server.stop()
        shell.close()
    assert server is not None
    assert "Finished server process" in server.said, server.said
