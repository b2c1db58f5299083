"""The documentation builds strictly; pages load nothing from elsewhere, links lead somewhere, nothing public is missing."""

import fcntl
import importlib
import importlib.util
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import aioqueue
from aioqueue import contrib, events
from tests.documents.pages import PAGES, ROOT

CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
"""What a browser loads without being asked to."""


class Page(HTMLParser):
    """The links, the anchors, and what is loaded, of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if LOADED.get(tag) in values and values.get("rel") != "canonical":
            self.loaded.append(values[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built once, whichever process of xdist comes first."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "documentation"
    place.mkdir(exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "built").exists():
            _build(place)
            (place / "built").touch()
    return place / "site"


def _build(place: Path) -> None:
    """Build strictly from a copy: a build writes beside its configuration."""
    for name in ("docs", "examples", "benchmarks", "aioqueue"):
        if (ROOT / name).exists():  # where the wheel is tested, the package is installed instead
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for name in ("zensical.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, place / name)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean"],
        cwd=place,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def in_nav(entries: list[object]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, dict):
            yield from in_nav(list(entry.values()))
        elif isinstance(entry, list):
            yield from in_nav(entry)
        else:
            yield str(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    named = list(in_nav(CONFIG["nav"]))
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_every_link_leads_to_a_page_and_a_place_in_it(site: Path, pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are of the address that it will have
            continue
        for link in page.links:
            if link.startswith(("https://", "http://", "mailto:", "data:")):
                continue
            target, anchor = urldefrag(unquote(link))
            there = (path.parent / target).resolve() if target else path
            if there.is_dir():
                there /= "index.html"
            if there not in pages or (anchor and anchor not in pages[there].anchors and anchor != "__top"):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert not lost


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for loaded in page.loaded:
            assert not loaded.startswith(("http:", "https:", "//")), f"{path.name}: {loaded}"
            if path.name != "404.html":
                assert (path.parent / urldefrag(loaded)[0].partition("?")[0]).exists(), f"{path.name}: {loaded}"
    # The theme fetches this program for drawings in the text; ours are files.
    assert not any("mermaid" in path.read_text() for path in pages)


def public() -> Iterator[str]:
    """Every name that the reference must have."""
    yield from (f"aioqueue.{name}" for name in aioqueue.__all__ if name != "__version__")
    yield from (f"aioqueue.events.{name}" for name, kind in vars(events).items() if _is_event(kind))
    for module in pkgutil.iter_modules(contrib.__path__, "aioqueue.contrib."):
        yield from _offered(module.name)
    if importlib.util.find_spec("aioqueue.testing"):
        yield from _offered("aioqueue.testing")


def _is_event(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, events.Event)


def _offered(name: str) -> Iterator[str]:
    """What a module lists; one that lists nothing is another's inside."""
    yield from (f"{name}.{offered}" for offered in getattr(importlib.import_module(name), "__all__", ()))


def test_the_reference_has_all_that_is_public_with_its_docstring(site: Path, pages: dict[Path, Page]) -> None:
    anchors = pages[site / "reference.html"].anchors
    assert not {name for name in public() if name not in anchors}
    # What the pages call on the objects that everybody has.
    called = {
        f"{kind}.{name}"
        for variable, kind in {"app": "AioQueue", "job": "Job", "ctx": "JobContext", "tx": "JobTransaction"}.items()
        for page in PAGES
        for name in re.findall(rf"(?<![\w/.:]){variable}\.([a-z_]+)\(", page.read_text())
    }
    assert len(called) >= 15
    assert not {name for name in called if f"aioqueue.{name}" not in anchors}
