"""The documentation holds: its commands and options are there, its links and the tests that it names exist.

That its blocks run, that its site builds, and that nothing is missing in it is held by tests/documents.
"""

import re
from pathlib import Path

import click
import pytest

from aioqueue.cli.main import cli
from tests.documents.pages import PAGES, ROOT


def test_there_is_something_to_check() -> None:
    assert len(PAGES) >= 20


def commands(group: click.Group, path: str = "") -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        found[f"{path}{name}"] = command
        if isinstance(command, click.Group):
            found |= commands(command, f"{path}{name} ")
    return found


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts) if name[0] == "-"}


def test_every_command_line_names_what_there_is() -> None:
    known = commands(cli)
    lines = [line for page in PAGES for line in re.findall(r"python -m aioqueue ([^`'\n]*)", page.read_text())]
    # The lists of containers: ["python", "-m", "aioqueue", …].
    listed = [line for page in PAGES for line in re.findall(r'\["python", "-m", "aioqueue", ([^]]*)\]', page.read_text())]
    assert len(lines) >= 20
    assert len(listed) >= 3
    lines += [line.replace('"', "").replace(",", "") for line in listed]
    for line in lines:
        words = re.sub(r"^(--dsn \S+ )", "", re.split(r" [>|&]|;", line)[0]).split()
        if words[0].isupper():  # a placeholder
            continue
        assert words[0] in known, line
        command = known.get(" ".join(words[:2]), known[words[0]])
        unknown = {word for word in words if re.match(r"--?[a-zA-Z]", word)} - options(command) - options(cli)
        assert not unknown, line


def test_every_option_stands_in_the_reference() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    for name, command in commands(cli).items():
        assert name in text or name.split()[0] in text, name
        missing = {option for option in options(command) if f"`{option}" not in text} - {"--help"}
        assert not missing, f"{name}: {missing}"


def test_every_option_of_the_reference_exists() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    known = set().union(*(options(command) for command in commands(cli).values()), options(cli), {"--help"})
    assert set(re.findall(r"`(--?[a-z-]+)", text)) <= known | {"-A", "-"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize(("page", "number"), [("promises.md", 12), ("faults.md", 50)])
def test_the_named_tests_exist(page: str, number: int) -> None:
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", (ROOT / "docs" / page).read_text())
    assert len(named) >= number
    for file, test in named:
        assert (ROOT / file).is_file(), file
        assert not test or re.search(rf"def {test}\(", (ROOT / file).read_text()), f"{file}::{test}"


def test_nobody_is_told_to_install_another_project() -> None:
    for page in PAGES:
        assert not re.search(r"pip install (-\S+ )*['\"]?aioqueue(\[|['\"]?\s|['\"]?$)", page.read_text(), re.MULTILINE)
