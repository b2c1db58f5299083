"""The uploads example in a real browser: progress, a worker killed in mid-conversion, a server restarted, a foreign tenant.

Needs Chromium; --pictures DIRECTORY keeps what the browser showed.
"""

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import pytest
from PIL import Image, ImageDraw
from playwright.async_api import Page, async_playwright, expect
from psycopg import AsyncConnection

from aioqueue import migrate
from tests.kit import PATIENCE
from tests.postgres import Database

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "uploads"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = 60
SOON = PATIENCE * 1000


def scan(path: Path, pages: int) -> Path:
    """A scan of so many large pages: each takes a tenth of a second."""
    made = []
    for number in range(1, pages + 1):
        page = Image.new("L", (2480, 3508), 200)
        ImageDraw.Draw(page).text((200, 200), f"Page {number}", fill=60, font_size=300)
        made.append(page)
    made[0].save(path, save_all=True, append_images=made[1:], compression="tiff_lzw")
    return path


class Application:
    """The example on a database of its own: a web server without a worker, and workers beside it."""

    def __init__(self, directory: Path, dsn: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.files = directory / "files"
        self._running: list[Process] = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIOQUEUE_", "PG"))}
        self._environment = kept | {
            "AIOQUEUE_DSN": dsn,
            "UPLOADS_FILES": str(self.files),
            "UPLOADS_SECRET": "the same after a restart",
            "UPLOADS_WORKER": "0",
        }

    async def _start(self, *command: str, listening: Sequence[int] = ()) -> Process:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", *command], cwd=EXAMPLE, env=self._environment, start_new_session=True, pass_fds=listening
        )
        self._running.append(process)
        return process

    async def serve(self) -> Process:
        # Who connects before the server has started waits for it.
        with socket.create_server(("127.0.0.1", self.port)) as listening:
            number = listening.fileno()
            process = await self._start("uvicorn", "web:web", "--fd", str(number), "--log-level", "warning", listening=[number])
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE) as http:
            await http.get("/")
        return process

    async def work(self) -> Process:
        return await self._start("aioqueue", "worker", "-A", "jobs:app")

    async def end(self, process: Process, number: signal.Signals) -> int:
        process.send_signal(number)
        async with asyncio.timeout(PATIENCE):
            return await process.wait()

    async def close(self) -> None:
        for process in self._running:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


@pytest.fixture
async def application(fresh_database: Callable[[], Database], tmp_path: Path) -> AsyncIterator[Application]:
    database = fresh_database()
    owner = database.dsn("owner")
    await migrate.migrate(owner)
    await migrate.grant(owner, role="aioqueue_worker", kind="worker")
    async with await AsyncConnection.connect(owner, autocommit=True) as conn:
        await conn.execute((EXAMPLE / "schema.sql").read_bytes())
    made = Application(tmp_path, database.dsn("worker"))
    yield made
    await made.close()


@pytest.fixture
async def page(application: Application) -> AsyncIterator[Page]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not here: apt-get install chromium")
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=[*as_root, "--disable-dev-shm-usage"])
        page = await browser.new_page(viewport={"width": 900, "height": 420})
        page.set_default_timeout(SOON)
        yield page
        await browser.close()


async def log_in(page: Page, url: str, name: str, password: str) -> None:
    await page.goto(url)
    await page.fill("[name=name]", name)
    await page.fill("[name=password]", password)
    await page.click("text=Log in")
    await expect(page.locator("#tenant")).to_have_text(name, timeout=SOON)


async def test_an_upload_is_converted_though_its_worker_is_killed_and_its_server_restarted(
    application: Application, page: Page, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pictures = request.config.getoption("pictures")

    async def picture(name: str) -> None:
        if pictures is not None:
            await page.screenshot(path=Path(str(pictures)) / f"uploads-{name}.png")

    server = await application.serve()
    await log_in(page, application.url, "acme", "rocket")
    await page.set_input_files("[name=scan]", scan(tmp_path / "contract.tiff", PAGES))
    async with page.expect_response("**/uploads") as received:
        await page.click("text=Convert")
    upload = (await (await received.value).json())["id"]
    row = page.locator(f"#upload-{upload}")
    await expect(row).to_have_attribute("data-state", "ready", timeout=SOON)
    await picture("before")

    worker = await application.work()
    says = row.locator(".says")
    await expect(says).to_have_text(re.compile(rf"page [2-4]\d of {PAGES}"), timeout=SOON)
    await application.end(worker, signal.SIGKILL)
    done = {path.name: path.stat().st_mtime_ns for path in (application.files / f"{upload}.pages").glob("*.jpg")}
    assert 0 < len(done) < PAGES, "it was killed in the middle"
    await picture("during")

    assert await application.end(server, signal.SIGTERM) in (0, -signal.SIGTERM)
    await application.serve()
    await application.work()
    await expect(row).to_have_attribute("data-state", "succeeded", timeout=2 * SOON)
    await expect(says).to_have_text(f"{PAGES} pages")
    await expect(row).to_have_attribute("data-attempt", "2")
    await picture("after")
    for name, then in done.items():
        assert (application.files / f"{upload}.pages" / name).stat().st_mtime_ns == then, "the second attempt went on"

    async with page.expect_download() as fetched:
        await row.locator("a").click()
    pdf = (await (await fetched.value).path()).read_bytes()
    assert len(re.findall(rb"/Type /Page\b", pdf)) == PAGES

    job = (await page.evaluate("async () => (await fetch('/uploads')).json()"))["uploads"][0]["job"]
    own = await page.request.get(f"{application.url}/jobs/{job}")
    assert (await own.json())["result"]["pages"] == PAGES
    await page.context.clear_cookies()
    await log_in(page, application.url, "globex", "hammock")
    await expect(page.locator("#uploads li")).to_have_count(0)
    for path in (f"/jobs/{job}", f"/jobs/{job}/events", f"/uploads/{upload}/pdf"):
        assert (await page.request.get(application.url + path)).status == 404, path
    assert (await page.request.delete(f"{application.url}/jobs/{job}")).status == 404


async def test_what_is_no_scan_is_refused_and_leaves_nothing(application: Application, page: Page, tmp_path: Path) -> None:
    await application.serve()
    await log_in(page, application.url, "acme", "rocket")
    (tmp_path / "letter.tiff").write_text("no picture")
    await page.set_input_files("[name=scan]", tmp_path / "letter.tiff")
    await page.click("text=Convert")
    await expect(page.locator("#refused")).to_contain_text("expected a picture", timeout=SOON)
    await expect(page.locator("#uploads li")).to_have_count(0)
    assert list(application.files.iterdir()) == []


async def test_whoever_is_not_logged_in_gets_nothing(application: Application) -> None:
    await application.serve()
    async with httpx.AsyncClient(base_url=application.url) as http:
        for path in ("/uploads", f"/jobs/{'0' * 8}-0000-7000-8000-{'0' * 12}"):
            assert (await http.get(path)).status_code == 401
        assert (await http.post("/login", data={"name": "acme", "password": "wrong"})).status_code == 401
        assert (await http.post("/login", data={"name": "nobody", "password": "x"})).status_code == 401
        http.cookies.set("session", "eyJ0ZW5hbnQiOiAiYWNtZSJ9.aaaaaa.forged")
        assert (await http.get("/uploads")).status_code == 401
